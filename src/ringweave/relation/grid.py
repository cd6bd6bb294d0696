"""Relations on the tokens of a grid, as products of relations along its axes.

The tokens of a grid stand box by box. A run of tokens is a few pieces, which are intervals along every axis: parts of a
box, or some whole boxes. So a tile is a few pairs of pieces, and two pieces allow the pairs that every axis allows. The
relation of an axis is a tree of zones of coordinates; an interval of queries and an interval of keys are a tile of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .arrays import Bool, Int64, Words, combine_ids, distinct, listed, number_rows, packed, padded
from .lines import NONE, Line, by_strip, union
from .node import EMPTY, FULL, Frame, Node, Origin, Sides, Tiles

# a tile with more pairs of pieces than this is a class of its own
_COMPARED = 256


def axis_parts(n: int, side: int) -> list[tuple[int, int, int]]:
    """Return the whole boxes along an axis and the smaller one at its end, as (first coordinate, boxes, side)."""
    return [(0, n // side, side)] + [(n // side * side, 1, n % side)] * (n % side > 0)


class Order:
    """The order of a grid's tokens.

    The grid has regions with boxes of one size: the whole boxes, and the smaller boxes at the end of some axes. The
    regions follow one another, the last axis first; in a region the boxes stand row by row, and in a box the tokens.

    Args:
        shape: Tokens along each axis.
        box: Tokens of a box along each axis, at most those of the grid.
    """

    def __init__(self, shape: tuple[int, ...], box: tuple[int, ...]):
        self.shape, self.box, self.tokens = shape, box, math.prod(shape)
        self.parts = [axis_parts(n, side) for n, side in zip(shape, box, strict=True)]
        regions = np.array(list(itertools.product(*self.parts)), np.int64)
        self._corner, self._side = regions[:, :, 0], regions[:, :, 2]
        # the place of a token in its region has these digits: its box along each axis, and its place in the box
        self._digits = np.concatenate([regions[:, :, 1], self._side], 1)
        places = np.cumprod(self._digits[:, ::-1], axis=1)
        self._first = np.append(0, np.cumsum(places[:, -1]))
        self._unit = np.append(places[:, -2::-1], np.ones((len(regions), 1), np.int64), axis=1)

    def coordinates(self, token: Tensor) -> list[Tensor]:
        """Return the coordinates of tokens along each axis."""
        first, corner, side, digits, unit = (
            torch.from_numpy(part).to(token.device)
            for part in (self._first, self._corner, self._side, self._digits, self._unit)
        )
        region = torch.searchsorted(first, token.contiguous(), right=True) - 1 if len(corner) > 1 else 0
        place, axes = token - first[region], len(self.shape)
        found = []
        for axis in range(axes):
            box = place // unit[region, axis] % digits[region, axis]
            inner = place // unit[region, axes + axis] % digits[region, axes + axis]
            found.append(corner[region, axis] + box * side[region, axis] + inner)
        return found

    def on_host(self, token: Int64) -> list[Int64]:
        """Return the coordinates of tokens along each axis as arrays."""
        return [each.numpy() for each in self.coordinates(torch.from_numpy(token))]

    def pieces(self, sides: Sides) -> Pieces:
        """Cut the sides of tiles to pieces; positions that are no tokens of the grid are left out."""
        lo, hi = np.clip(sides.lo, 0, self.tokens), np.clip(sides.hi, 0, self.tokens)
        first = np.searchsorted(self._first, lo, "right") - 1
        side, region = listed(first, np.searchsorted(self._first, hi, "left") - first)
        base = self._first[region]
        begins = [np.maximum(lo[side] - base, 0)]
        ends = [np.minimum(hi[side], self._first[region + 1]) - base]
        # from both ends to the next multiple of a row, of a slice, of a box, and so on, as far as the ends do not cross
        for unit in self._unit[region, :-1].T[::-1]:
            begins.append(np.minimum(-(-begins[-1] // unit) * unit, ends[-1]))
            ends.append(np.maximum(ends[-1] // unit * unit, begins[-1]))
        cuts = np.stack([*begins, *reversed(ends)], 1)
        at, slot = np.nonzero(cuts[:, :-1] < cuts[:, 1:])
        side = side[at]
        begin, end = cuts[at, slot] + base[at], cuts[at, slot + 1] + base[at]
        low, last = (np.stack(self.on_host(token), 1) for token in (begin, end - 1))
        high = last + 1
        # the extent of a piece says how its tokens stand: its boxes are as long as those of the grid, or as the piece
        shape = combine_ids(begin - sides.lo[side], *(high - low).T)
        number = np.bincount(side, minlength=len(lo))
        single = len(side) == len(lo) and bool((number == 1).all())
        layout = shape if single else number_rows(padded(side, shape, len(lo)))
        covered = np.bincount(side, end - begin, len(lo)) == sides.hi - sides.lo
        return Pieces(np.cumsum(number) - number, number, side, low, high, layout, covered)

    def box_runs(self, places: list[Int64], end: Int64) -> tuple[Int64, Int64]:
        """Return the tokens [begin, end) of boxes in a row, from a place along each axis to an end on the last axis.

        The boxes of a row are whole along the last axis, or they are the smaller one at its end.
        """
        region, inner = np.zeros(len(end), np.int64), list[Int64]()
        for place, parts in zip(places, self.parts, strict=True):
            smaller = place >= parts[0][1]
            region = region * len(parts) + smaller
            inner.append(np.where(smaller, 0, place))
        begin = self._first[region].copy()
        for axis, place in enumerate(inner):
            begin += place * self._unit[region, axis]
        return begin, begin + (end - places[-1]) * self._unit[region, len(inner) - 1]


class Pieces(NamedTuple):
    """The pieces of the sides of tiles.

    Attributes:
        begin: (sides,), first piece of each side.
        number: (sides,), its number of pieces.
        side: (pieces,), side of each piece.
        low: (pieces, axes), least coordinates.
        high: (pieces, axes), ends of the coordinates, exclusive.
        layout: (sides,), equal numbers for sides that differ only by the coordinates at which their pieces begin.
        covered: (sides,), whether all positions of a side are tokens of the grid.
    """

    begin: Int64
    number: Int64
    side: Int64
    low: Int64
    high: Int64
    layout: Int64
    covered: Bool


class _Intervals(NamedTuple):
    """Distinct intervals of an axis, and which of them each piece has."""

    sides: Sides
    of: Int64

    @staticmethod
    def along(pieces: Pieces, axis: int) -> _Intervals:
        low, high = pieces.low[:, axis], pieces.high[:, axis]
        first, of = distinct(combine_ids(low, high - low))
        return _Intervals(Sides.of(low[first], high[first]), of)


class Product(Node):
    """The pairs of a grid's tokens that the relation of every axis allows; a position that is no token allows no pair.

    Args:
        order: The order of tokens.
        axes: The relation of coordinates along each axis, equal for all batch elements.
    """

    def __init__(self, order: Order, axes: Sequence[Node]):
        self.order, self.axes = order, tuple(axes)

    def touched(self, frame: Frame, within: Line | None = None) -> Line:
        pieces = self.order.pieces(frame.q)
        # the boxes that each piece of queries reaches, axis by axis; along the last axis they are one run of tokens
        piece, places = np.arange(len(pieces.side)), list[Int64]()
        for axis in range(len(self.axes)):
            count, begin, end = self._reached(axis, pieces)
            row, found = listed((np.cumsum(count) - count)[piece], count[piece])
            piece, places = piece[row], [place[row] for place in places]
            if axis < len(self.axes) - 1:
                row, place = listed(begin[found], (end - begin)[found])
                piece, places = piece[row], [*(place[row] for place in places), place]
            else:
                low, high = self.order.box_runs([*places, begin[found]], end[found])
        strip, kv_tile = pieces.side[piece], frame.tile[1]
        first = frame.whole.lo[strip]
        low, high = np.maximum(low, first), np.minimum(high, frame.whole.hi[strip])
        start, stop = (low - first) // kv_tile + strip * frame.width, -((first - high) // kv_tile) + strip * frame.width
        used = low < high
        return union(Line(start[used], stop[used]))

    def _reached(self, axis: int, pieces: Pieces) -> tuple[Int64, Int64, Int64]:
        """Return the places of boxes along an axis that pieces of queries reach: how many intervals, and [begin, end).

        The intervals of a piece are ascending, and the smaller box at the end of the axis has one of its own.
        """
        n, side, whole = self.order.shape[axis], self.order.box[axis], self.order.parts[axis][0][1]
        queries = _Intervals.along(pieces, axis)
        low, zero = np.arange(0, n, side, dtype=np.int64), np.zeros_like(queries.sides.lo)
        frame = Frame(
            queries.sides, Sides.of(low, np.minimum(low + side, n)), Sides.of(zero, zero + n), (1, side), len(low)
        )
        strip, begin, end = by_strip(self.axes[axis].touched(frame), frame.width)
        parts = np.stack([begin, np.maximum(begin, whole)], 1), np.stack([np.minimum(end, whole), end], 1)
        at, part = np.nonzero(parts[0] < parts[1])
        begin, end = (each[at, part] for each in parts)
        # each piece has the intervals of its own interval
        count = np.bincount(strip[at], minlength=len(zero))
        _, every = listed((np.cumsum(count) - count)[queries.of], count[queries.of])
        return count[queries.of], begin[every], end[every]

    def filled(self, frame: Frame, within: Line | None = None) -> Line:
        return NONE

    def classes(self, tiles: Tiles) -> Int64:
        (q_sides, qi), (k_sides, ki) = _distinct(tiles.q, tiles.qi), _distinct(tiles.k, tiles.ki)
        q, k = self.order.pieces(q_sides), self.order.pieces(k_sides)
        along = [
            (axis, _Intervals.along(q, number), _Intervals.along(k, number)) for number, axis in enumerate(self.axes)
        ]
        codes = np.full(len(qi), EMPTY, np.int64)
        pairs = q.number[qi] * k.number[ki]
        for some in (pairs == 1, (pairs > 1) & (pairs <= _COMPARED)):
            here = np.flatnonzero(some)
            if not len(here):
                continue
            mine, theirs = (qi, ki) if len(here) == len(qi) else (qi[here], ki[here])
            found = self._classes(along, q, mine, k, theirs)
            codes[here] = np.where(found > FULL, found + int(codes.max()), found)
        crowded = np.flatnonzero(pairs > _COMPARED)
        if len(crowded):
            codes[crowded] = combine_ids(qi[crowded], ki[crowded]) + int(codes.max())
        return codes

    def _classes(
        self, along: list[tuple[Node, _Intervals, _Intervals]], q: Pieces, qi: Int64, k: Pieces, ki: Int64
    ) -> Int64:
        """Classify tiles with a pair of pieces or more, by each pair in turn."""
        q_count, k_count = q.number[qi], k.number[ki]
        pairs = q_count * k_count
        empty, full = np.ones(len(qi), np.bool_), q.covered[qi] & k.covered[ki]
        number = combine_ids(q.layout[qi], k.layout[ki])
        for slot in range(int(pairs.max())):
            here = np.flatnonzero(slot < pairs) if slot else np.arange(len(qi))
            i = q.begin[qi[here]] + slot // k_count[here]
            j = k.begin[ki[here]] + slot % k_count[here]
            part = self._pairs(along, i, j)
            empty[here] &= part == EMPTY
            full[here] &= part == FULL
            code = np.full(len(qi), -1, np.int64)
            code[here] = part
            number = combine_ids(number, code)
        return np.where(empty, EMPTY, np.where(full, FULL, number))

    @staticmethod
    def _pairs(along: list[tuple[Node, _Intervals, _Intervals]], i: Int64, j: Int64) -> Int64:
        """Classify pairs of pieces."""
        empty, full, parts = np.zeros(len(i), np.bool_), np.ones(len(i), np.bool_), []
        for axis, q, k in along:
            x, y = q.of[i], k.of[j]
            # an axis has few distinct pairs of intervals
            first, like = distinct(x * len(k.sides.lo) + y)
            part = axis.classes(Tiles(q.sides, k.sides, x[first], y[first]))[like]
            empty |= part == EMPTY
            full &= part == FULL
            parts.append(part)
        return np.where(empty, EMPTY, np.where(full, FULL, combine_ids(*parts)))

    def words(self, tiles: Tiles, size: tuple[int, int]) -> Words:
        (q, q_real, qi), (k, k_real, ki) = (
            self._tokens(sides, number, length)
            for sides, number, length in ((tiles.q, tiles.qi, size[0]), (tiles.k, tiles.ki, size[1]))
        )
        words = np.full((len(qi), size[0], -(-size[1] // 32)), -1, np.int32).view(np.uint32)
        for axis, mine, theirs in zip(self.axes, q, k, strict=True):
            # along an axis, a query's keys in a tile depend on its coordinate and on the tile's keys; both are few
            rows = mine[qi]
            first, like = distinct((rows * len(theirs) + ki[:, None]).ravel())
            found = _looked_up(axis, rows.ravel()[first][:, None], theirs[ki[first // size[0]]])
            words &= packed(found[None])[0][like].reshape(words.shape)
        if not (q_real.all() and k_real.all()):
            words &= packed(q_real[qi][:, :, None] & k_real[ki][:, None])
        return words

    def _tokens(self, sides: Sides, number: Int64, length: int) -> tuple[list[Int64], Bool, Int64]:
        """List the tokens of the sides of some tiles.

        Returns:
            Their coordinates along each axis, (sides, length); whether they are tokens of the grid; and the side of
            each tile. Past the end of a side, tokens are any.
        """
        sides, like = _distinct(sides, number)
        token = np.minimum(sides.lo[:, None] + np.arange(length), sides.hi[:, None] - 1)
        real = (token >= 0) & (token < self.order.tokens)
        return self.order.on_host(np.clip(token, 0, self.order.tokens - 1)), real, like

    def contains(self, q: Tensor, k: Tensor, origin: Origin) -> Tensor:
        last = self.order.tokens - 1
        allowed = (q >= 0) & (q <= last) & (k >= 0) & (k <= last)
        ends = (self.order.coordinates(side.clamp(0, last)) for side in (q, k))
        for axis, mine, theirs in zip(self.axes, *ends, strict=True):
            allowed &= axis.contains(mine, theirs, Origin())
        return allowed


def _distinct(sides: Sides, number: Int64) -> tuple[Sides, Int64]:
    """Return the distinct sides of some tiles, in any batch element, and the side of each tile."""
    if len(number) < len(sides.lo):
        sides, number = sides.take(number), np.arange(len(number))
    first, like = distinct(combine_ids(sides.lo, sides.hi - sides.lo))
    return sides.take(first), like[number]


def _looked_up(axis: Node, q: Int64, k: Int64) -> Bool:
    """Evaluate pairs of coordinates. If they have few distinct values, the pairs are looked up in a table."""
    (q_first, q_like), (k_first, k_like) = distinct(q.ravel()), distinct(k.ravel())
    if len(q_first) * len(k_first) > math.prod(np.broadcast_shapes(q.shape, k.shape)):
        return axis.contains(torch.from_numpy(q), torch.from_numpy(k), Origin()).numpy()
    ends = torch.from_numpy(q.ravel()[q_first][:, None]), torch.from_numpy(k.ravel()[k_first])
    table: Bool = axis.contains(*ends, Origin()).numpy()
    return table[q_like.reshape(q.shape), k_like.reshape(k.shape)]
