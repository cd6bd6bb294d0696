"""Zones: the geometry of a pattern as data.

A zone is the set of pairs (q, k) with q in [q0, q1), k in [k0, k1) and k - q in [d0, d1). :class:`Zones` lists disjoint
zones in groups: the groups have ascending disjoint ranges of queries, and each group has ascending disjoint runs of
keys and one band of distances. A list may add one residue: ``(x - phase) mod m < width`` for x = q, k or k - q.

A zone inside a tile is a difference bound matrix over (0, q, k). Shortest paths among three nodes have at most two
edges, so one pass makes the bounds as tight as possible and decides whether the zone is empty (Dill 1989; Bengtsson and
Yi 2004, section 4).
"""

from __future__ import annotations

import functools
import operator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..native import module
from .arrays import Bool, Int64, Words, combine_ids, distinct, listed, number_rows, packed, padded
from .lines import NONE, Line, union
from .node import ELEMENT, EMPTY, FAR, FULL, Frame, Node, Origin, Sides, Tiles

#: The axes of a residue: the query, the key, or their distance k - q.
Q, K, D = 0, 1, 2
# a tile that meets more zones than this is a class of its own
_COMPARED = 24
# distances are looked up if a tile has one of few; fewer tiles than this are classified directly
_FEW_TILES = 64
# inside of the ranges of few zones, too
_FEW_GROUPS = 8


class Residue(NamedTuple):
    """The pairs with ``(x - phase) mod m < width``, where x is the query, the key or their distance."""

    axis: int
    m: int
    width: int


class _Local(NamedTuple):
    """Zones inside tiles, relative to the tiles' corners and as tight as possible.

    Attributes:
        bounds: Bounds of the query, the key and the distance.
        phase: Phase of the residue; -1 where the residue does not matter.
        some: Whether a zone has a pair in its tile.
        every: Whether it has every pair.
    """

    bounds: tuple[Int64, ...]
    phase: Int64
    some: Bool
    every: Bool

    def numbers(self) -> Int64:
        """Return the class of each zone."""
        return np.where(self.every, FULL, np.where(self.some, combine_ids(*self.bounds, self.phase), EMPTY))


def _side(number: int) -> cached_property[Int64]:
    """Return an attribute of zones: an array that is made when it is first read."""
    return cached_property(lambda zones: zones._sides[number])


class Zones(Node):
    """Disjoint zones in groups.

    Args:
        q: First query and end of each group: numbers, or (groups,) ascending.
        k: First key and end of each run of keys: numbers, or (runs,) ascending in each group.
        d: Least distance k - q of each group, and one past the largest.
        ptr: (groups + 1,) first run of each group; None if each group has one run.
        residue: Axis, period and width of the residue.
        phase: Phase of each group.
        each: Whether positions are on the axis of all batch elements, where element b begins at ``b * ELEMENT``. If
            not, all elements have the same zones.
    """

    def __init__(
        self,
        q: tuple[ArrayLike, ArrayLike] = (-FAR, FAR),
        k: tuple[ArrayLike, ArrayLike] = (-FAR, FAR),
        d: tuple[ArrayLike, ArrayLike] = (-ELEMENT, ELEMENT),
        *,
        ptr: Int64 | None = None,
        residue: Residue | None = None,
        phase: ArrayLike = 0,
        each: bool = False,
    ):
        bounds: tuple[Any, ...] = (*q, *k, *d, phase)
        self.residue, self.each = residue, each
        axis = None if residue is None else residue.axis
        #: The bounds and the phase of a single zone as numbers, which compiled code can trace; None for a list.
        self.single: tuple[int, ...] | None = (
            bounds if ptr is None and all(type(side) is int for side in bounds) else None
        )
        if self.single is not None:
            q0, q1, k0, k1, d0, d1, _ = self.single
            self.groups, self.ptr = 1, None
            every_q, every_k = q0 <= -FAR and q1 >= FAR, k0 <= -FAR and k1 >= FAR
            every_d = d0 <= -ELEMENT and d1 >= ELEMENT
            every_of_each = q1 - q0 >= ELEMENT
        else:
            sides = [np.array(side, np.int64, ndmin=1, copy=None) for side in bounds]
            self.groups = len(sides[0])
            if ptr is not None and len(ptr) == len(sides[2]) + 1 and bool((np.diff(ptr) == 1).all()):
                ptr = None
            for number in (2, 3, 4, 5, 6) if ptr is None else (4, 5, 6):
                if len(sides[number]) != self.groups:
                    sides[number] = np.broadcast_to(sides[number], self.groups)
            self.ptr, self._sides = ptr, tuple(sides)
            every_q = self.groups == 1 and bool(self.q0[0] <= -FAR and self.q1[0] >= FAR)
            every_k = ptr is None and bool((self.k0 <= -FAR).all() and (self.k1 >= FAR).all())
            every_d = bool((self.d0 <= -ELEMENT).all() and (self.d1 >= ELEMENT).all())
            every_of_each = each and bool((np.diff(self.q0 >> 32) > 0).all() and (self.q1 - self.q0 >= ELEMENT).all())
            if self.groups == 1 and ptr is None:
                self.single = tuple(int(side[0]) for side in sides)
        every_q, every_k, every_of_each = every_q and not each, every_k and not each, every_of_each and each
        #: Whether it has every pair with a distance in one band.
        self.is_band = every_q and every_k and residue is None
        # whether the class of a tile depends on its keys only, on its queries only, or inside of ranges on its distance
        self._by_keys = every_d and axis in (None, K) and (every_q or every_of_each)
        self._by_queries = every_d and every_k and axis in (None, Q)
        self._moves = axis in (None, D)
        self._unbounded = every_q and every_k
        self.few = self.ptr is None and residue is None
        #: Whether a band restricts the distances of a group.
        self.banded = not every_d

    @cached_property
    def _sides(self) -> tuple[Int64, ...]:
        assert self.single is not None
        return tuple(np.array([side], np.int64) for side in self.single)

    #: First query and end of each group, first key and end of each run, and least distance of each group, one past its
    #: largest distance, and its phase.
    q0, q1, k0, k1, d0, d1, phase = map(_side, range(7))

    def _on_axis(self, sides: Sides) -> tuple[Int64, Int64]:
        """Return the bounds of sides as these zones count positions."""
        if not self.each:
            return sides.lo, sides.hi
        base = sides.element * ELEMENT
        return sides.lo + base, sides.hi + base

    def sides(self, tiles: Tiles) -> tuple[Int64, Int64, Int64, Int64]:
        """Return the bounds of tiles, (q_lo, q_hi, k_lo, k_hi), as these zones count positions."""
        (q_lo, q_hi), (k_lo, k_hi) = self._on_axis(tiles.q), self._on_axis(tiles.k)
        return q_lo[tiles.qi], q_hi[tiles.qi], k_lo[tiles.ki], k_hi[tiles.ki]

    @cached_property
    def _order(self) -> tuple[Int64, Int64, Int64]:
        """Runs of all groups on one axis, for searches: the first key of each group, starts and ends of runs."""
        assert self.ptr is not None
        of = np.repeat(np.arange(self.groups), np.diff(self.ptr))
        base = np.append(self.k0, 0)[np.minimum(self.ptr[:-1], max(len(self.k0) - 1, 0))]
        return base, (of << 34) + self.k0 - base[of], (of << 34) + self.k1 - base[of]

    def overlaps(self, q_lo: Int64, q_hi: Int64, k_lo: Int64, k_hi: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the pairs of rectangles and zones that may meet, ascending: (rectangle, group, run)."""
        if self.groups == 1:
            rect, group = np.arange(len(q_lo)), np.zeros(len(q_lo), np.int64)
        else:
            first = np.searchsorted(self.q1, q_lo, "right")
            rect, group = listed(first, np.searchsorted(self.q0, q_hi, "left") - first)
        begin, end = np.maximum(q_lo[rect], self.q0[group]), np.minimum(q_hi[rect], self.q1[group])
        low = np.maximum(k_lo[rect], begin + self.d0[group])
        high = np.minimum(k_hi[rect], end - 1 + self.d1[group])
        if self.ptr is None:
            met = (begin < end) & (np.maximum(low, self.k0[group]) < np.minimum(high, self.k1[group]))
            return (rect, group, group) if met.all() else (rect[met], group[met], group[met])
        base, start, stop = self._order
        low, high = (
            np.minimum(np.maximum(side - base[group], 0), (1 << 34) - 1) + (group << 34) for side in (low, high)
        )
        first = np.searchsorted(stop, low, "right")
        pair, run = listed(first, np.where(begin < end, np.searchsorted(start, high, "left") - first, 0))
        return rect[pair], group[pair], run

    # ---- intervals of tiles ------------------------------------------------------------------------------------------

    def _strips(self, frame: Frame, within: Line | None) -> tuple[Int64, Int64, Int64, Int64, Int64]:
        """Return the first key of each strip, its queries, and the keys of it that matter."""
        (q_lo, q_hi), (first, k_hi) = self._on_axis(frame.q), self._on_axis(frame.whole)
        if within is None or self.few:
            return first, q_lo, q_hi, first, k_hi
        begin, end = within.within(np.arange(len(q_lo)), frame.width)
        return first, q_lo, q_hi, first + begin * frame.tile[1], np.minimum(k_hi, first + end * frame.tile[1])

    def touched(self, frame: Frame, within: Line | None = None) -> Line:
        first, q_lo, q_hi, k_lo, k_hi = self._strips(frame, within)
        rect, group, run = self.overlaps(q_lo, q_hi, k_lo, k_hi)
        begin, end = np.maximum(q_lo[rect], self.q0[group]), np.minimum(q_hi[rect], self.q1[group])
        low = np.maximum(np.maximum(k_lo[rect], self.k0[run]), begin + self.d0[group])
        high = np.minimum(np.minimum(k_hi[rect], self.k1[run]), end - 1 + self.d1[group])
        if self.residue is not None and self.residue.axis != Q and len(rect):
            axis, m, width = self.residue
            # multiples that are further apart than tiles give an interval each
            wide = np.full(len(rect), width) if axis == K else width + end - begin - 1
            if m > 2 * frame.tile[1] + int(wide.max()):
                from_ = self.phase[group] + (0 if axis == K else begin)
                multiple = -((from_ + wide - 1 - low) // m)
                pair, multiple = listed(multiple, (high - 1 - from_) // m - multiple + 1)
                rect, at = rect[pair], from_[pair] + multiple * m
                low, high = np.maximum(low[pair], at), np.minimum(high[pair], at + wide[pair])
        start, stop = (low - first[rect]) // frame.tile[1], -((first[rect] - high) // frame.tile[1])
        return self._line(rect, start, stop, high > low, frame.width)

    def _line(self, strip: Int64, start: Int64, stop: Int64, used: Bool, width: int) -> Line:
        """Return the columns [start, stop) of strips as intervals; of a single zone they are in order."""
        if not used.all():
            strip, start, stop = strip[used], start[used], stop[used]
        line = Line(start + strip * width, stop + strip * width)
        return union(line) if self.single is None or self.residue is not None else line

    def filled(self, frame: Frame, within: Line | None = None) -> Line:
        if self.residue is not None:
            return NONE
        first, q_lo, q_hi, k_lo, k_hi = self._strips(frame, within)
        rect, group, run = self.overlaps(q_lo, q_hi, k_lo, k_hi)
        if self.ptr is None and self.groups > 1 and len(rect) and (rect[1:] == rect[:-1]).any():
            # the groups of a strip have the keys that each of them has
            q0, q1 = np.maximum(self.q0[group], q_lo[rect]), np.minimum(self.q1[group], q_hi[rect])
            part = np.flatnonzero(np.append(True, rect[1:] != rect[:-1]))
            low = np.maximum.reduceat(np.maximum(self.k0[run], q1 - 1 + self.d0[group]), part)
            high = np.minimum.reduceat(np.minimum(self.k1[run], q0 + self.d1[group]), part)
            rect = rect[part]
            whole = np.add.reduceat(q1 - q0, part) == q_hi[rect] - q_lo[rect]
        else:
            low = np.maximum(self.k0[run], q_hi[rect] - 1 + self.d0[group])
            high = np.minimum(self.k1[run], q_lo[rect] + self.d1[group])
            whole = (self.q0[group] <= q_lo[rect]) & (self.q1[group] >= q_hi[rect])
        begin, end = first[rect], self._on_axis(frame.whole)[1][rect]
        start = -((begin - np.maximum(low, begin)) // frame.tile[1])
        stop = np.where(high >= end, frame.width, (high - begin) // frame.tile[1])
        used = whole & (stop > start)
        return self._line(rect, start, stop, used, frame.width)

    # ---- classes of tiles --------------------------------------------------------------------------------------------

    def classes(self, tiles: Tiles) -> Int64:
        q, k = tiles.q, tiles.k
        if self._by_keys and len(tiles.ki) > len(k.lo):
            one = Tiles.of(Sides(k.first, k.first + 1, k.element, k.first), k)
            return compact(self.classes(one))[tiles.ki]
        if self._by_queries and len(tiles.qi) > len(q.lo):
            one = Tiles.of(q, Sides(q.first, q.first + 1, q.element, q.first))
            return compact(self.classes(one))[tiles.qi]
        sides = self.sides(tiles)
        found = self._by_distance(*sides)
        if found is None:
            return self._classes(*sides)
        first, like = found
        return compact(self._classes(*(side[first] for side in sides)))[like]

    def _by_distance(self, q_lo: Int64, q_hi: Int64, k_lo: Int64, k_hi: Int64) -> tuple[Int64, Int64] | None:
        """Return some of the tiles, and which of them each tile has the class of; None if these are too many.

        Inside of the ranges of a zone, the class of a tile depends on its distance.
        """
        few = 0 < self.groups <= _FEW_GROUPS and self.ptr is None
        if not few or not self._moves or len(q_lo) <= _FEW_TILES:
            return None
        parts = [k_lo - q_lo, q_hi - q_lo, k_hi - k_lo]
        if not self._unbounded:
            group = np.minimum(np.searchsorted(self.q1, q_lo, "right"), self.groups - 1)
            q0, q1, k0, k1 = (side[group] for side in (self.q0, self.q1, self.k0, self.k1))
            inside = (q0 <= q_lo) & (q1 >= q_hi) & (k0 <= k_lo) & (k1 >= k_hi)
            parts += [np.where(inside, group - self.groups, np.arange(len(q_lo)))]
        first, like = distinct(combine_ids(*parts))
        return None if 2 * len(first) >= len(q_lo) else (first, like)

    def _classes(self, q_lo: Int64, q_hi: Int64, k_lo: Int64, k_hi: Int64) -> Int64:
        rect, group, run = self.overlaps(q_lo, q_hi, k_lo, k_hi)
        crowded = np.bincount(rect, minlength=len(q_lo)) > _COMPARED
        if crowded.any():
            keep = ~crowded[rect]
            rect, group, run = rect[keep], group[keep], run[keep]
        sides = q_lo[rect], q_hi[rect], k_lo[rect], k_hi[rect]
        numbers = self._local(group, run, *sides).numbers()
        some = numbers != EMPTY
        codes = several(rect[some], numbers[some], len(q_lo))
        if crowded.any():
            codes[crowded] = combine_ids(q_lo[crowded], k_lo[crowded]) + int(codes.max())
        return codes

    def _local(self, group: Int64, run: Int64, q_lo: Int64, q_hi: Int64, k_lo: Int64, k_hi: Int64) -> _Local:
        high, wide, back = q_hi - q_lo, k_hi - k_lo, k_lo - q_lo
        bounds = _tight(
            np.maximum(self.q0[group] - q_lo, 0),
            np.minimum(self.q1[group] - q_lo, high),
            np.maximum(self.k0[run] - k_lo, 0),
            np.minimum(self.k1[run] - k_lo, wide),
            self.d0[group] - back,
            self.d1[group] - back,
        )
        phase = np.full(len(high), -1, np.int64)
        if self.residue is not None:
            axis, m, width = self.residue
            shift = (self.phase[group] - (q_lo, k_lo, back)[axis]) % m
            low, end = bounds[2 * axis], bounds[2 * axis + 1]
            # move both bounds to the first and the last place that the residue allows
            into, over = (low - shift) % m, (end - 1 - shift) % m
            low = np.where(into < width, low, low + m - into)
            end = np.where(over < width, end, end - (over - width + 1))
            moved = list(bounds)
            moved[2 * axis], moved[2 * axis + 1] = low, end
            bounds = _tight(*moved)
            phase = np.where((low - shift) % m + end - low <= width, -1, shift)
        q0, q1, k0, k1, d0, d1 = bounds
        some = (q0 < q1) & (k0 < k1) & (d0 < d1)
        # a band that reaches both far corners of a tile has every pair
        return _Local(bounds, phase, some, some & (d0 == 1 - high) & (d1 == wide) & (phase < 0))

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def words(self, tiles: Tiles, size: tuple[int, int]) -> Words:
        sides = self.sides(tiles)
        compiled = self.compiled
        if compiled is None:
            return packed(self._bits(*sides, size))
        words = np.empty((len(sides[0]), size[0], -(-size[1] // 32)), np.uint32)
        # one thread: a plan that was made before a fork leaves no pool of threads, for which a child would wait
        compiled.paint(*sides, words, 1)
        return words

    @cached_property
    def compiled(self) -> Any:
        """The zones as compiled code reads them, checked and copied; None without it."""
        native = module()
        if native is None:
            return None
        names = ("q0", "q1", "d0", "d1", "phase", "k0", "k1")
        sides = {name: np.ascontiguousarray(getattr(self, name)) for name in names}
        return native.Zones(**sides, ptr=self.ptr, residue=self.residue)

    def _bits(self, q_lo: Int64, q_hi: Int64, k_lo: Int64, k_hi: Int64, size: tuple[int, int]) -> Bool:
        """Evaluate tiles by token: (tiles, *size), False outside of the tiles."""
        rect, group, run = self.overlaps(q_lo, q_hi, k_lo, k_hi)
        # the keys of a query in a zone are an interval: +1 at its start, -1 at its end, and a running sum
        first = np.maximum(self.q0[group] - q_lo[rect], 0)
        pair, row = listed(first, np.minimum(self.q1[group], q_hi[rect]) - q_lo[rect] - first)
        at, group, run = rect[pair], group[pair], run[pair]
        q = q_lo[at] + row
        low = np.maximum(np.maximum(self.k0[run], q + self.d0[group]), k_lo[at]) - k_lo[at]
        high = np.minimum(np.minimum(self.k1[run], q + self.d1[group]), k_hi[at]) - k_lo[at]
        line, some = (at * size[0] + row) * (size[1] + 1), low < high
        steps = np.zeros(len(q_lo) * size[0] * (size[1] + 1), np.int16)
        np.add.at(steps, (line + low)[some], 1)
        np.add.at(steps, (line + high)[some], -1)
        out: Bool = np.cumsum(steps.reshape(len(q_lo), size[0], -1), axis=2, dtype=np.int16)[:, :, :-1] > 0
        if self.residue is not None:
            axis, m, width = self.residue
            # a query is in one group, so it has one phase
            phase = np.zeros((len(q_lo), size[0]), np.int64)
            phase[at, row] = self.phase[group]
            rows = (q_lo[:, None] + np.arange(size[0]))[:, :, None]
            columns = (k_lo[:, None] + np.arange(size[1]))[:, None]
            out &= ((rows, columns, columns - rows)[axis] - phase[:, :, None]) % m < width
        return out

    def contains(self, q: Tensor, k: Tensor, origin: Origin) -> Tensor:
        if self.each:
            q, k = q + origin.element * ELEMENT, k + origin.element * ELEMENT
        if self.single is not None:
            return self._allowed(q, k, self.single)
        if not self.groups or not len(self.k0):
            return torch.zeros(torch.broadcast_shapes(q.shape, k.shape), dtype=torch.bool, device=q.device)

        def on_device(array: Int64) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(q.device)

        # a query is in at most one group, and a key in at most one of its runs
        group = torch.searchsorted(on_device(self.q1), q.contiguous(), right=True).clamp_(max=self.groups - 1)
        run = group
        if self.ptr is not None:
            base, _, stop = map(on_device, self._order)
            at = (k - base[group]).clamp_(0, (1 << 34) - 1) + (group << 34)
            run = torch.searchsorted(stop, at, right=True).clamp_(max=len(self.k0) - 1)
        q0, q1, d0, d1, phase = (on_device(side)[group] for side in (self.q0, self.q1, self.d0, self.d1, self.phase))
        k0, k1 = (on_device(side)[run] for side in (self.k0, self.k1))
        allowed = self._allowed(q, k, (q0, q1, k0, k1, d0, d1, phase))
        if self.ptr is None:
            return allowed
        first = on_device(self.ptr)
        return allowed & (run >= first[group]) & (run < first[group + 1])

    def _allowed(self, q: Tensor, k: Tensor, zone: tuple[int | Tensor, ...]) -> Tensor:
        """Evaluate pairs by the bounds and the phases of their zones, in the order of :attr:`single`."""
        q0, q1, k0, k1, d0, d1, phase = zone
        distance = k - q
        # A bound of the first or last position of an only element says nothing, and compiled code for int32 positions
        # cannot hold it.
        conditions = []
        for x, low, high, far in ((q, q0, q1, FAR), (k, k0, k1, FAR), (distance, d0, d1, 2 * FAR)):
            if self.each or isinstance(low, Tensor) or low > -far:
                conditions.append(x >= low)
            if self.each or isinstance(high, Tensor) or high < far:
                conditions.append(x < high)
        allowed = functools.reduce(operator.and_, conditions, torch.ones_like(distance, dtype=torch.bool))
        if self.residue is not None:
            axis, m, width = self.residue
            # a new tensor: compiled code may not write to one here
            allowed = allowed & (((q, k, distance)[axis] - phase) % m < width)
        return allowed


def _tight(q0: Int64, q1: Int64, k0: Int64, k1: Int64, d0: Int64, d1: Int64) -> tuple[Int64, ...]:
    return (
        np.maximum(q0, k0 - d1 + 1),
        np.minimum(q1, k1 - d0),
        np.maximum(k0, q0 + d0),
        np.minimum(k1, q1 + d1 - 1),
        np.maximum(d0, k0 - q1 + 1),
        np.minimum(d1, k1 - q0),
    )


def compact(codes: Int64) -> Int64:
    """Number the classes of tiles anew, by small numbers: many tiles have few classes."""
    partial = np.flatnonzero(codes > FULL)
    codes[partial] = distinct(codes[partial])[1] + 2
    return codes


def several(tile: Int64, number: Int64, tiles: int) -> Int64:
    """Return the class of each tile from the classes of its parts; ``tile``, the tile of each part, ascends."""
    codes = np.full(tiles, EMPTY, np.int64)
    codes[tile] = number
    count = np.bincount(tile, minlength=tiles)
    many = np.flatnonzero(count > 1)
    if len(many):
        # a tile with several parts has a number for each list of them
        order = np.zeros(tiles, np.int64)
        order[many] = np.arange(len(many))
        part = count[tile] > 1
        rows = padded(order[tile[part]], number[part], len(many))
        codes[many] = number_rows(rows) + int(codes.max()) + 1
    return codes
