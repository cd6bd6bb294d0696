"""First positions of queries and keys, for calls where they differ between batch elements or keys begin after 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..checks import INTEGERS, LONGEST, whole
from ..errors import PatternError, ShapeError, shown
from ..relation.arrays import Int64
from ..relation.node import ELEMENT_BITS, Node
from .base import Composite, Full, Pattern
from .batch_axis import Bounds, rows_of
from .fitting import nest, refuse

_SIDES = ("q_offset", "k_offset")


class Offsets(Bounds, Full):
    """The positions of the first query and key of each batch element, as a pattern that allows every pair.

    Args:
        table: (B, 2), or (1, 2) for all batch elements; int64. It is not copied, and read when a plan is made.
        batch: The offsets of all batch elements, if ``table`` has those of one element.
    """

    def __init__(self, table: Tensor, batch: Offsets | None = None):
        self.table, self.batch = table, batch
        self.__post_init__()

    def _text(self) -> str:
        return "Offsets(_)"

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def extents(self) -> tuple[int | None, int | None]:
        return (len(self.table) if len(self.table) > 1 else None), None

    def select(self, b: int, h: int) -> Pattern:
        return self if len(self.table) == 1 else Offsets(self.table[b : b + 1], self)

    def _make(self) -> Int64:
        # (2, B), since contiguous offsets of one side are quicker to look up
        return np.ascontiguousarray(rows_of(self.table, 2).T)

    def bound_ids(self) -> tuple[Int64, ...]:
        return tuple(self._now)

    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        now, last = self._now, np.array([[LONGEST - q_offset - nq], [LONGEST - nk]])
        wrong = (now < 0) | (now > last)
        if wrong.any():
            side, b = divmod(int(wrong.argmax()), now.shape[1])
            got = f"{now[side, b]}" + (f" in batch element {b}" if now.shape[1] > 1 else "")
            wanted = f"0 to {last[side, 0]}"
            raise ShapeError(_SIDES[side], got, wanted, "Positions count from 0: pad, or shift both sides.")

    def most(self) -> tuple[int, int]:
        """Return the largest offsets of queries and of keys over the batch; sizes are checked against them."""
        q, k = (self if self.batch is None else self.batch)._now.max(1).tolist()
        return q, k

    def added(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Add the offsets to places of queries and keys on the axis of all batch elements."""
        now = self._now
        of_q, of_k = (torch.from_numpy(side).to(q.device) for side in now)
        if now.shape[1] > 1:
            # both offsets are looked up by query: a pair is inside one element, and there are far more keys
            element = q >> ELEMENT_BITS
            of_q, of_k = of_q.take(element), of_k.take(element)
        return q + of_q, k + of_k

    def of(self, position: Int64) -> tuple[Int64, Int64]:
        """Return the offsets of queries and of keys for positions on the axis of all batch elements."""
        q, k = self._now
        if len(q) == 1:
            return q, k
        element = position >> ELEMENT_BITS
        return q[element], k[element]


class Shifted(Composite):
    """A pattern on places in q and k with given first positions: ``pattern.allows(q + first_q, k + first_k)``.

    A call's ``q_offset`` and ``k_offset`` make one, unless ``q_offset`` is an int and ``k_offset`` is 0.

    Args:
        pattern: A relation of positions.
        offsets: The first positions.
    Raises:
        PatternError: The pattern is not a relation.
    """

    counts_apart = True

    def __init__(self, pattern: Pattern, offsets: Offsets):
        if not pattern.combinable:
            got = f"{pattern!r} with a tensor, or a k_offset"
            remedy = "A LongNet selects tokens by their place: pass an int q_offset and all keys."
            raise PatternError("q_offset, k_offset", got, "a relation", remedy)
        self.pattern, self.offsets = pattern, offsets
        nest(self, 1 + pattern.depth, pattern.leaves + 1)
        self.__post_init__()

    def _text(self) -> str:
        return f"Shifted({self.pattern.spec}, {self.offsets.spec})"

    def __repr__(self) -> str:
        return f"Shifted({self.pattern!r}, <{len(self.offsets.table)} offsets>)"

    def parts_within(self) -> tuple[Pattern, ...]:
        return self.pattern, self.offsets

    def remade(self, parts: Sequence[Pattern]) -> Pattern:
        pattern, offsets = parts
        assert isinstance(offsets, Offsets)
        return Shifted(pattern, offsets)

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        if self.offsets.readable():
            self.fits(nq, nk, q_offset)

    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        """Raise PatternError if the pattern is made for other positions, ShapeError if a position is out of range."""
        self.offsets.fits(nq, nk, q_offset)
        self.pattern.check(*self.extent(nq, nk, q_offset))

    def extent(self, nq: int, nk: int, q_offset: int) -> tuple[int, int, int]:
        """Return (nq, nk, q_offset) of the smallest call without a k_offset that contains all batch elements."""
        q, k = self.offsets.most()
        return nq, nk + k, q_offset + q

    @property
    def tile_size(self) -> int | None:
        return self.pattern.tile_size

    def zones(self, n: int | None) -> Node:
        return self.pattern.zones(n)


def with_offsets(pattern: Pattern, q_offset: int | Tensor, k_offset: int | Tensor, batch: int) -> tuple[Pattern, int]:
    """Return the pattern of a call with its offsets applied, and the q_offset, an int, that is left.

    Args:
        pattern: A pattern of positions.
        q_offset: Position of the first query: an int, or an integer tensor () or (B,), which is not read.
        k_offset: Position of the first key, in the same form.
        batch: Number of batch elements.
    Raises:
        ShapeError: An offset is of another kind, or below 0.
        PatternError: The pattern is a LongNet, and an offset is a tensor or k_offset is not 0.
    """
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    if type(q_offset) is type(k_offset) is int and q_offset == k_offset == 0:
        return pattern, 0
    sides = [checked_offset(*each, batch) for each in zip(_SIDES, (q_offset, k_offset), strict=True)]
    q, k = sides
    if isinstance(q, int) and isinstance(k, int) and k == 0 and (q == 0 or not places(pattern, 2)):
        return pattern, q
    # the table is on the device of an offset, so that no device is waited for
    devices = [side.device for side in sides if isinstance(side, Tensor)]
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    rows = [
        side.to(device, torch.int64).reshape(-1)
        if isinstance(side, Tensor)
        else torch.full((1,), side, dtype=torch.int64, device=device)
        for side in sides
    ]
    offsets = Offsets(torch.stack(torch.broadcast_tensors(*rows), 1))
    if not places(pattern):
        return Shifted(pattern, offsets), 0
    # the first part says where the call's positions begin
    return Shifted(Full(), offsets) & _shifted(pattern, offsets), 0


def places(pattern: Pattern, least: int = 1) -> bool:
    """Return whether a pattern, or a part of it, counts by places, with so many rows: see :attr:`Pattern.by_place`.

    A single row is that of a single query, at any position.
    """
    if not pattern.tables or pattern.by_place:
        return pattern.by_place and pattern.tables[0].shape[-2] >= least
    return any(places(part, least) for part in pattern.parts_within())


def _shifted(pattern: Pattern, offsets: Offsets) -> Pattern:
    """Apply offsets to the parts of a pattern that count by positions."""
    if not places(pattern):
        return Shifted(pattern, offsets)
    if not isinstance(pattern, Composite):
        return pattern
    return pattern.with_parts([_shifted(part, offsets) for part in pattern.parts_within()])


def first_positions(pattern: Pattern, q_offset: int, batch: int, device: torch.device) -> Tensor:
    """Return the first query and key position of each batch element, (B, 2) int64, of a result of ``with_offsets``."""
    first = torch.zeros(batch, 2, dtype=torch.int64, device=device)
    for part in (pattern, *pattern.parts_within()):
        # a paged call combines the shifted pattern with bounds, so it is one of the parts
        if isinstance(part, Shifted):
            return first + part.offsets.table.to(device)
    first[:, 0] = q_offset
    return first


def checked_offset(name: str, value: int | Tensor, batch: int) -> int | Tensor:
    """Check an offset: an int, or an integer tensor, which is not read."""
    if isinstance(value, Tensor):
        fits = value.ndim == 0 or (value.ndim == 1 and value.shape[0] == batch)
        if value.dtype in INTEGERS and value.layout == torch.strided and fits:
            return value.detach()
        wanted = f"an int, or an integer tensor () or ({shown(batch)},)"
        remedy = f"Pass one number for all, or one for each of the {shown(batch)} batch elements."
        raise ShapeError(name, shown(value), wanted, remedy)
    remedy = "Pass 'end' for a decode step." if name == "q_offset" else "Pass the number of keys that were dropped."
    if isinstance(value, int) and value < 0:
        raise ShapeError(name, shown(value), "an int of at least 0", remedy)
    # a symbolic number stays symbolic, so that decoding steps do not recompile
    if isinstance(value, torch.SymInt):
        return value
    return whole(name, value, 0, error=ShapeError, remedy=remedy, settled=False)
