"""Plans many ranks in one process: what a step would move and cost, next to other ways to spread attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from ...errors import ShapeError, message
from ...patterns import Pattern
from ...plan import BlockPlan, Branch, branches
from ...plan.from_pattern import estimate_tiles
from ..arguments import integer, pair_of_heads, patterns_of
from .choice import choose
from .cost import Estimate, Machine, Widths
from .other_systems import peers
from .placement import block_for

# tiles of one row set beyond which larger ones are counted, where ranks hold whole ones
_MANY = 2**20
_TOO_MANY = 2**24
_MAX_SIDE = 1024


@dataclass(frozen=True)
class Row:
    """One number of ranks.

    Attributes:
        ranks: How many.
        ringweave: The estimate of the placement that was chosen; its name is the placement's.
        peers: Those of the others by name; None where one cannot run.
    """

    ranks: int
    ringweave: Estimate
    peers: dict[str, Estimate | None]


def simulate(
    patterns: Pattern | Sequence[Pattern],
    tokens: int,
    ranks: Sequence[int],
    *,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    itemsize: int = 2,
    machine: Machine | None = None,
) -> list[Row]:
    """What a forward step over a pattern would move and cost on many ranks; nothing is run.

    Bytes, work and stages are counts of the plans that such a step would use; times are modelled.

    Args:
        patterns: One, or those of interleaved layers, which share a placement.
        tokens: Length of the sequence.
        ranks: Numbers of ranks.
        heads: Query heads and key heads.
        head_dim: Channels of a head.
        itemsize: Bytes of a value of q, k and v.
        machine: What a rank is taken to be.
    Returns:
        One row for each number of ranks.
    Raises:
        ShapeError: Query heads that are no multiple of key heads; no ranks, or more than 16 tokens each allow; a number
            that is none.
        PatternError: No pattern, or one that is made for another length or other heads.
    Example:
        >>> from ringweave.parallel.planning.simulate import simulate
        >>> (row,) = simulate(rw.SlidingWindow(4096) & rw.Causal(), 2**20, [256])
        >>> row.ringweave.name, row.ringweave.stages
        ('contiguous', 1)
    """
    each, heads, tokens = patterns_of(patterns), pair_of_heads(heads), integer("tokens", tokens, 1)
    if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
        raise ShapeError(message("ranks", repr(ranks), "numbers of ranks", "Pass such as [8, 16]."))
    ranks = [integer("ranks", number, 1) for number in ranks]
    for number in ranks:
        if number * 16 > max(tokens, 16):
            raise ShapeError(message("ranks", number, f"1 to {max(tokens // 16, 1)}", "Pass fewer ranks."))
    if machine is not None and not isinstance(machine, Machine):
        raise ShapeError(message("machine", type(machine).__name__, "a Machine", "Leave it out for the default."))
    calls = [branches(pattern, tokens, tokens, heads=heads[0]) for pattern in each]
    machine = machine or Machine()
    head_dim = integer("head_dim", head_dim, 1)
    widths = Widths(head_dim, head_dim, integer("itemsize", itemsize, 1))
    rows = []
    for number in ranks:
        seen = [[_coarse(branch, tokens // number) for branch in call] for call in calls]
        tile = max((branch.tile[0] for call in seen for branch in call), default=128)
        block = block_for(tokens, number, tile)
        choice = choose(seen, tokens, number, block, heads[0] // heads[1], machine, widths)
        rows.append(Row(number, choice.estimate, peers(seen, tokens, number, block, heads, machine, widths)))
    return rows


@dataclass(frozen=True)
class _Coarse(Branch):
    """A branch whose plan has tiles of another side."""

    side: int

    @property
    def tile(self) -> tuple[int, int]:
        return self.side, self.side

    def plan(self, device: str | torch.device = "cpu", tile: int | tuple[int, int] | None = None) -> BlockPlan:
        return super().plan(device, self.side if tile is None else tile)


def _coarse(branch: Branch, local: int) -> Branch:
    """The branch, or where it is nearly dense one with larger tiles: for these nothing else would differ."""
    side = branch.tile[0]
    tiles = estimate_tiles(branch.pattern, branch.nq, branch.nk)
    # two tiles for each rank, or one where memory would not hold the others
    while tiles > _MANY and side < _MAX_SIDE and (4 if tiles < _TOO_MANY else 2) * side * branch.rate <= local:
        side, tiles = 2 * side, tiles / 4
    if side == branch.tile[0]:
        return branch
    return _Coarse(**{field.name: getattr(branch, field.name) for field in fields(Branch)}, side=side)
