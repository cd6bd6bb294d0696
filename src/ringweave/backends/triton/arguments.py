"""Kernel arguments for tensors, score terms and dropout, and the gradients of the terms' tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...plan import BlockPlan
from ...terms import Term
from ...terms.operands import TermOperands
from ..backend import Upstream
from . import queues
from .kernels.score_terms import KINDS, OWN, SUMMED
from .launch_config import padded


def strides(*tensors: Tensor) -> tuple[int, list[int]]:
    """Return a common divisor of the strides over batch, heads and tokens, and the strides divided by it.

    The divisor is 16 (only if a tensor has 8-bit elements), 8 or 1. Loads of 16 bytes at a time need strides that are
    multiples of 16 bytes.
    """
    # the stride of a dimension with at most one element is arbitrary
    steps = [step if side > 1 else 0 for x in tensors for step, side in zip(x.stride()[:3], x.shape, strict=False)]
    units = (16, 8) if any(x.element_size() == 1 for x in tensors) else (8,)
    unit = next((unit for unit in units if all(step % unit == 0 for step in steps)), 1)
    return unit, [step // unit for step in steps]


def wide(plan: BlockPlan, *tensors: Tensor) -> bool:
    """Return whether offsets within a tile need more than 32 bits."""
    return any(max(plan.q_tile, plan.kv_tile) * x.stride(2) >= 2**31 for x in tensors)


def head_bytes(*tensors: Tensor) -> int:
    """Return the bytes of one head, summed over the tensors."""
    return sum(x.shape[2] * x.shape[3] * x.element_size() for x in tensors)


def describable(*tensors: Tensor) -> bool:
    """Return whether tensor descriptors support all tensors: aligned to 16 bytes, not broadcast, not empty."""
    return all(
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and x.stride(3) == 1
        and all(step > 0 and step * x.element_size() % 16 == 0 for step in x.stride()[:3])
        for x in tensors
    )


def described(x: Tensor, tokens: int) -> TensorDescriptor:
    """Return a descriptor of tiles (tokens, channels) of a tensor (B, H, N, D)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, tokens, padded(x.shape[3])])


# factor of integer arguments, so that all are specialised in the same way; see kernels/score_terms.py
_ALIKE = 16
# bits of an integer sum in which every pair reaches its bound
_BITS = 61
# number of tiles processed together by _attended
_AT_ONCE = 2**16


class TermArguments(NamedTuple):
    """Kernel arguments for terms and dropout; None if absent.

    Attributes:
        places: (heads, rows, columns, offsets), int64, as in TermOperands.
        tables: Tensors of each term.
        numbers: Numbers of each term; kernels are not compiled again for other values.
        drop: (seed in four pieces of 16 bits, lowest first, threshold, factor of kept weights).
        terms: Kind of each term.
        holes: Whether a term may leave a row without any weight.
    """

    places: tuple[Tensor, ...] | None = None
    tables: tuple[tuple[Tensor, ...], ...] | None = None
    numbers: tuple[tuple[float, ...], ...] | None = None
    drop: tuple[float, ...] | None = None
    terms: tuple[int, ...] | None = None
    holes: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that every kernel takes."""
        given: dict[str, Any] = {"places": self.places, "tables": self.tables}
        given |= {"numbers": self.numbers, "drop": self.drop}
        return given | {"TERMS": self.terms, "SCORED": self.places is not None}


def of(terms: TermOperands | None, device: torch.device) -> TermArguments:
    """Return the kernel arguments for the terms and dropout of a view."""
    if terms is None:
        return TermArguments()
    dropout = terms.dropout
    places = (terms.heads, terms.rows, terms.columns, terms.offsets.contiguous())
    drop = None
    if dropout is not None:
        seed = (dropout.seed >> shift & 0xFFFF for shift in (0, 16, 32, 48))
        drop = (*(_ALIKE * each for each in (*seed, dropout.threshold)), dropout.factor)
    if not terms.terms:
        return TermArguments(places, drop=drop)
    kinds = tuple(KINDS[term.kernel] for term in terms.terms)
    tables = tuple(_table(term, device) for term in terms.terms)
    numbers = tuple(_numbers(term) for term in terms.terms)
    return TermArguments(places, tables, numbers, drop, kinds, any(bool(term.learns) for term in terms.terms))


def _table(term: Term, device: torch.device) -> tuple[Tensor, ...]:
    """Return a term's tables in float32; a table with an entry for every pair is passed unchanged."""
    return tuple(x if term.places else x.to(device).float().contiguous() for x in term.tables)


def _numbers(term: Term) -> tuple[float, ...]:
    """Return a term's numbers: for distances the table's reach, for a bias the strides of table and gradient."""
    if term.kernel == "distance":
        return (_ALIKE * (term.tables[0].shape[1] // 2),)
    if term.kernel != "bias":
        return term.numbers
    table = term.tables[0]
    shape = table.shape
    steps = [step if side > 1 else 0 for step, side in zip(table.stride(), shape, strict=True)]
    total = [step if side > 1 else 0 for step, side in zip((shape[1:].numel(), shape[2:].numel()), shape, strict=False)]
    return tuple(_ALIKE * each for each in (*steps, *total, shape[3]))


class Sums:
    """Accumulators of the gradients of terms' tables in one backward call.

    If a table has an entry for every pair, gradients are added to the total in place. Otherwise many pairs share an
    entry and arrive in any order: gradients are then added as integer multiples of a quantum, which is derived from the
    largest gradients, so that the bits are the same each time. The weights of a row sum to 1, so a bound of one pair
    also bounds a row. A gradient that is not finite makes the total NaN.
    """

    def __init__(self, terms: TermOperands, upstream: Upstream, v: Tensor, plan: BlockPlan):
        self.terms = terms
        # a kind that the kernels know has at most one table
        self.totals = [totals[0] if totals else None for _, totals in terms.with_totals()]
        pairs = list(zip(terms.terms, self.totals, strict=True))
        self.ways = tuple(0 if total is None else self._way(term, total.shape, len(v)) for term, total in pairs)
        self.sums = [
            torch.zeros_like(total, dtype=torch.int64) if total is not None and way == SUMMED.value else None
            for way, total in zip(self.ways, self.totals, strict=True)
        ]
        if SUMMED.value in self.ways:
            factor = 1.0 if terms.dropout is None else terms.dropout.factor
            # only rows and keys that are attended count, since padding may contain numbers of any size
            rows = ~torch.isneginf(upstream.lse)
            keys = _attended(plan).unflatten(1, (v.shape[1], -1)).any(2)
            pair = _largest(upstream.dout, rows) * _largest(v, keys) * (v.shape[3] * factor)
            pair = pair + _largest(upstream.delta[..., None], rows)
            exponent = torch.frexp(pair * upstream.lse.numel()).exponent
            self.per_quantum = torch.exp2((_BITS - exponent).clamp(-126, 127).double()).float()

    @staticmethod
    def of(terms: TermOperands, upstream: Upstream, v: Tensor, plan: BlockPlan) -> Sums | None:
        """Return the accumulators; None if no table has a gradient."""
        return Sums(terms, upstream, v, plan) if any(total is not None for total in terms.totals) else None

    def _way(self, term: Term, shape: torch.Size, batch: int) -> int:
        sides = ((shape[0], batch), (shape[1], self.terms.heads.numel()))
        own = term.places and all(side > 1 or of == 1 for side, of in sides)
        return int(OWN.value if own else SUMMED.value)

    def arguments(self, given: TermArguments) -> dict[str, Any]:
        """Return the keyword arguments of kernels.

        The tables of each term with a gradient are extended by its integer sums, its total, and the number of quanta
        in 1.
        """
        tables = tuple(
            table if total is None else (*table, sums, total, None if sums is None else self.per_quantum)
            for table, sums, total in zip(given.tables or (), self.sums, self.totals, strict=True)
        )
        return given.arguments | {"tables": tables}

    def finish(self) -> None:
        """Add the integer sums to the totals."""
        for sums, total in zip(self.sums, self.totals, strict=True):
            if sums is not None and total is not None:
                total.add_(sums.double().div_(self.per_quantum.double()))


def _largest(x: Tensor, used: Tensor) -> Tensor:
    """Return the largest finite magnitude in the used rows, float64.

    Rows that are not finite need no bound, since their pairs are not finite either.
    """
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1).double().nan_to_num(0.0, 0.0, 0.0)
    return largest.masked_fill(~used, 0.0).amax()


def _attended(plan: BlockPlan) -> Tensor:
    """Return which keys any query may attend, bool (B, Hq, keys), without synchronising with the device."""
    live, sets, tiles = queues.masks(plan).live_keys.flatten(0, -2), plan.col_ptr.shape[0], plan.kv_tiles
    # a full tile has code -1, which indexes the last row: all keys
    live = torch.cat([live, live.new_full((1, live.shape[1]), -1)])
    bit = torch.arange(32, dtype=torch.int32, device=live.device)
    starts = plan.col_ptr[:, :-1].contiguous().flatten()
    counts = torch.zeros(sets * tiles, plan.kv_tile, dtype=torch.int32, device=live.device)
    entries = torch.arange(len(plan.row), dtype=torch.int32, device=live.device)
    for entry, code in zip(entries.split(_AT_ONCE), plan.mask_id_t.split(_AT_ONCE), strict=True):
        there = entry < plan.col_ptr[-1, -1]
        words = live[torch.where(there, code, -1).long()]
        alive = ((words[..., None] >> bit) & 1).flatten(-2)[:, : plan.kv_tile] * there[:, None]
        counts.index_add_(0, torch.searchsorted(starts, entry, right=True) - 1, alive)
    by_set = counts.view(sets, -1)[:, : plan.nk] > 0
    return by_set[plan.row_set.long()]
