"""The options of a context, and the checks of its calls; nothing has been sent when they raise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..axes import Axes
from ..backends import BACKENDS
from ..checks import number, one_of, seconds, whole
from ..errors import PatternError, ShapeError, UnsupportedError
from ..patterns import BlockTable, Pattern, check_extents
from ..patterns.global_tokens import check_places
from ..patterns.lists import check_rows
from ..program import named_backend, names
from .execution.wire import FORMATS
from .planning.placement import NAMED, Placement
from .shards import Shards

_OF_CONTEXT = Axes("q: [B Hq Nq D]; k: [B Hkv Nk D]")
_WHOLE = Axes("q: [B Hq N D]; k: [B Hkv N D]; v: [B Hkv N Dv]")
SCHEDULES = ("auto", "allgather", "ring")


@dataclass(frozen=True)
class ContextOptions:
    """The options of a context for placement and exchange; see the arguments of :class:`ContextParallel`.

    Raises:
        ShapeError: A number is invalid or out of bounds.
        UnsupportedError: The schedule, placement or wire is unknown.
    """

    schedule: str = "auto"
    placement: str | Placement = "auto"
    wire: str = "native"
    tolerance: float | None = None
    deadline: float = 30.0
    retries: int = 0

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        if not isinstance(self.placement, Placement):
            one_of("placement", self.placement, ("auto", *NAMED), "'auto', a Placement or ")
        one_of("wire", self.wire, FORMATS)
        tolerance = None if self.tolerance is None else number("tolerance", self.tolerance, 0, error=ShapeError)
        object.__setattr__(self, "tolerance", tolerance)
        object.__setattr__(self, "deadline", seconds("deadline", self.deadline))
        object.__setattr__(self, "retries", whole("retries", self.retries, 0, error=ShapeError))


def check_pattern(pattern: Pattern, tokens: int, query_heads: int, batch: int | None = None) -> None:
    """Raise PatternError unless a pattern fits a sequence; ``batch`` is unknown while the context is created."""
    made = pattern.extents()[0]
    check_extents(pattern, (made or 1) if batch is None else batch, query_heads)
    check_rows(pattern, tokens)
    check_places(pattern, tokens)
    pattern.check(tokens, tokens, 0)


def check_shards(shards: Shards, heads: tuple[int, int], q: Tensor, k: Tensor) -> None:
    """Raise ShapeError unless q and k are shards with the context's heads."""
    for name, x in (("q", q), ("k", k)):
        shards.check(name, x, 2)
    _OF_CONTEXT.fit(q=q, k=k, Hq=heads[0], Hkv=heads[1], remedy="Make a context for these heads.")


def check_backend(backend: str, features: frozenset[str], device: str) -> None:
    """Raise UnsupportedError unless a backend computes plans, and the named features."""
    if backend == "auto":
        return
    known = named_backend(backend)
    if not (known.planned and known.branched):
        able = [name for name in names()[1:] if BACKENDS[name].planned and BACKENDS[name].branched]
        wanted = f"'auto' or one that computes a plan: {', '.join(able)}"
        raise UnsupportedError("backend", repr(backend), wanted, "Use 'auto'.")
    if known.lacks(features, device):
        wanted = f"one that computes {', '.join(sorted(features))}"
        raise UnsupportedError("backend", repr(backend), wanted, "Use 'auto'.")


def check_pattern_of_call(pattern: Pattern, shards: Shards, query_heads: int, batch: int) -> None:
    """Raise PatternError unless a pattern fits a call; say so if it has a block table that is made for one shard."""
    local, tokens = shards.placement.local, shards.placement.tokens
    try:
        check_pattern(pattern, tokens, query_heads, batch)
    except PatternError as error:
        table = _table_of_shard(pattern, local, tokens)
        if table is None:
            raise
        blocks = f"{table.blocks.shape[-2:]} blocks of {table.block_size}"
        got = f"a table of {blocks}, made for one shard of {local} tokens"
        wanted = f"{_blocks(table, tokens, tokens)} blocks for the whole sequence of {tokens} tokens"
        remedy = "Gather the rows of all ranks with context.share_table(rows, block_size, version)."
        raise PatternError("BlockTable", got, wanted, remedy) from error


def check_replicated(q: Tensor, k: Tensor, v: Tensor, tokens: int) -> None:
    """Raise an error unless q, k and v are whole tensors without gradients."""
    _WHOLE.fit(q=q, k=k, v=v, N=tokens, remedy="Pass whole tensors.")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        got = "inputs that require gradients"
        wanted, remedy = "inputs without gradients", "Use shards, or torch.no_grad()."
        raise UnsupportedError("q, k, v", got, wanted, remedy)


def _table_of_shard(pattern: Pattern, local: int, tokens: int) -> BlockTable | None:
    """Find a block table within a pattern that is made for the queries of a shard and not for the whole sequence."""
    if isinstance(pattern, BlockTable):
        shape = pattern.blocks.shape[-2:]
        of_shard = shape in (_blocks(pattern, local, local), _blocks(pattern, local, tokens))
        return pattern if of_shard and shape != _blocks(pattern, tokens, tokens) else None
    found = (_table_of_shard(part, local, tokens) for part in pattern.parts_within())
    return next((table for table in found if table is not None), None)


def _blocks(table: BlockTable, queries: int, keys: int) -> tuple[int, int]:
    """Count the blocks of a table for some queries and keys."""
    rows, columns = table.block_size
    return -(-queries // rows), -(-keys // columns)
