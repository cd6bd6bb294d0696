"""Tensors, score terms and dropout as the kernels take them, and the gradients of the terms' tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...plan import BlockPlan
from ...terms import Term, TermOperands
from ..backend import Upstream
from . import queues
from .kernels.extras import KINDS, OWN, SUMMED
from .launch_config import padded


def strides(*tensors: Tensor) -> tuple[int, list[int]]:
    """Find what divides the strides over batch, heads and tokens; it, and these divided by it.

    16 elements where some have 8 bits, 8 or 1: loads of 16 bytes at a time need strides that as many elements divide.
    """
    # where a dimension has one element or none its stride says nothing: it may be anything
    steps = [step if side > 1 else 0 for x in tensors for step, side in zip(x.stride()[:3], x.shape, strict=False)]
    units = (16, 8) if any(x.element_size() == 1 for x in tensors) else (8,)
    unit = next((unit for unit in units if all(step % unit == 0 for step in steps)), 1)
    return unit, [step // unit for step in steps]


def wide(plan: BlockPlan, *tensors: Tensor) -> bool:
    """Tell whether 32 bits are too few for addresses within a tile."""
    return any(max(plan.q_tile, plan.kv_tile) * x.stride(2) >= 2**31 for x in tensors)


def head_bytes(*tensors: Tensor) -> int:
    """Count the bytes of one head of all the tensors."""
    return sum(x.shape[2] * x.shape[3] * x.element_size() for x in tensors)


def describable(*tensors: Tensor) -> bool:
    """Tell whether descriptors can describe tensors: from 16 bytes to 16 bytes, nothing broadcast, nothing empty."""
    return all(
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and x.stride(3) == 1
        and all(step > 0 and step * x.element_size() % 16 == 0 for step in x.stride()[:3])
        for x in tensors
    )


def described(x: Tensor, tokens: int) -> TensorDescriptor:
    """Describe tiles of (tokens, channels) of (B, H, N, D)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, tokens, padded(x.shape[3])])


# what integers come times, see kernels/extras.py
_ALIKE = 16
# bits of a sum of whole numbers, all pairs of which are at their bound
_BITS = 61
# tiles whose keys are looked at together
_AT_ONCE = 2**16


class Extras(NamedTuple):
    """What kernels take for terms and dropout; None for what there is not.

    Attributes:
        places: (heads, rows, columns, offsets), int64, as in TermOperands.
        tables: Tensors by term.
        numbers: Numbers by term, which are no reason to compile again.
        drop: (the seed in four pieces of 16 bits, the lowest first, threshold, factor of what is kept).
        terms: Kinds by term.
        holes: Whether a term may leave a row without weight.
    """

    places: tuple[Tensor, ...] | None = None
    tables: tuple[tuple[Tensor, ...], ...] | None = None
    numbers: tuple[tuple[float, ...], ...] | None = None
    drop: tuple[float, ...] | None = None
    terms: tuple[int, ...] | None = None
    holes: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by name, of every kernel."""
        given: dict[str, Any] = {"places": self.places, "tables": self.tables}
        given |= {"numbers": self.numbers, "drop": self.drop}
        return given | {"TERMS": self.terms, "EXTRAS": self.places is not None}


def of(scoring: TermOperands | None, device: torch.device) -> Extras:
    """Take terms and dropout of a view."""
    if scoring is None:
        return Extras()
    dropout = scoring.dropout
    places = (scoring.heads, scoring.rows, scoring.columns, scoring.offsets.contiguous())
    drop = None
    if dropout is not None:
        seed = (dropout.seed >> shift & 0xFFFF for shift in (0, 16, 32, 48))
        drop = (*(_ALIKE * each for each in (*seed, dropout.threshold)), dropout.factor)
    if not scoring.terms:
        return Extras(places, drop=drop)
    terms = tuple(KINDS[term.kernel] for term in scoring.terms)
    tables = tuple(_table(term, device) for term in scoring.terms)
    numbers = tuple(_numbers(term) for term in scoring.terms)
    return Extras(places, tables, numbers, drop, terms, any(term.learns for term in scoring.terms))


def _table(term: Term, device: torch.device) -> tuple[Tensor, ...]:
    """A bias of all pairs is read as it lies."""
    return tuple(x if term.places else x.to(device).float().contiguous() for x in term.tables)


def _numbers(term: Term) -> tuple[float, ...]:
    """A term's own; the reach of a table of distances; the strides of a bias, and of its gradient."""
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
    """What tables get of one call of backward: by term a way of adding, where there is something to be added to.

    Where a table has an entry for every pair, that is added to in place. Elsewhere many pairs share one, and arrive in
    any order: whole numbers are added then, of a quantum made from the largest gradients, so that the bits are the same
    each time. Within a head the weights of a row sum to 1, so that a bound of one pair bounds a row. What is not finite
    is written to the total, as NaN.
    """

    def __init__(self, scoring: TermOperands, upstream: Upstream, v: Tensor, plan: BlockPlan):
        self.scoring = scoring
        pairs = list(zip(scoring.terms, scoring.totals, strict=True))
        self.ways = tuple(0 if total is None else self._way(term, total.shape, len(v)) for term, total in pairs)
        self.sums = [
            torch.zeros_like(total, dtype=torch.int64) if total is not None and way == SUMMED.value else None
            for way, total in zip(self.ways, scoring.totals, strict=True)
        ]
        if SUMMED.value in self.ways:
            factor = 1.0 if scoring.dropout is None else scoring.dropout.factor
            # of pairs that there are: what lies in padding may be of any size
            rows = ~torch.isneginf(upstream.lse)
            keys = _attended(plan).unflatten(1, (v.shape[1], -1)).any(2)
            pair = _largest(upstream.dout, rows) * _largest(v, keys) * (v.shape[3] * factor)
            pair = pair + _largest(upstream.delta[..., None], rows)
            exponent = torch.frexp(pair * upstream.lse.numel()).exponent
            self.per_quantum = torch.exp2((_BITS - exponent).clamp(-126, 127).double()).float()

    @staticmethod
    def of(scoring: TermOperands, upstream: Upstream, v: Tensor, plan: BlockPlan) -> Sums | None:
        """Make room, if any table learns."""
        return Sums(scoring, upstream, v, plan) if any(total is not None for total in scoring.totals) else None

    def _way(self, term: Term, shape: torch.Size, batch: int) -> int:
        sides = ((shape[0], batch), (shape[1], self.scoring.heads.numel()))
        own = term.places and all(side > 1 or of == 1 for side, of in sides)
        return int(OWN.value if own else SUMMED.value)

    def arguments(self, extras: Extras) -> dict[str, Any]:
        """Add to the tables of each term that learns its whole numbers, its total, and how many quanta are 1."""
        tables = tuple(
            given if total is None else (*given, sums, total, None if sums is None else self.per_quantum)
            for given, sums, total in zip(extras.tables or (), self.sums, self.scoring.totals, strict=True)
        )
        return extras.arguments | {"tables": tables}

    def finish(self) -> None:
        """Add the whole numbers to the totals."""
        for sums, total in zip(self.sums, self.scoring.totals, strict=True):
            if sums is not None and total is not None:
                total.add_(sums.double().div_(self.per_quantum.double()))


def _largest(x: Tensor, used: Tensor) -> Tensor:
    """The largest of used rows that is finite, float64: a pair of what is not is not finite either."""
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1).double().nan_to_num(0.0, 0.0, 0.0)
    return largest.masked_fill(~used, 0.0).amax()


def _attended(plan: BlockPlan) -> Tensor:
    """Mark the keys that any query may attend, (B, Hq, keys); nothing is read back."""
    live, sets, tiles = queues.masks(plan).live_keys.flatten(0, -2), plan.col_ptr.shape[0], plan.kv_tiles
    # a code of -1 takes the last one: all
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
