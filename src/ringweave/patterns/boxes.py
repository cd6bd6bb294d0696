"""An order of the tokens of an image or a video in which the tokens of a tile form a compact box.

A box is an interval along every axis. ``Pieces`` converts ranges of tokens to boxes, and ``token_runs`` converts boxes
to ranges of tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cache import PATTERNS
from ..checks import LONGEST, integers, whole
from ..errors import PatternError, ShapeError, shown
from ..relation.grid import Order, axis_parts
from .tiles import Int64, combine_ids

# Tokens of a default box. In the native kernel a pair in a tile of 32 takes 1.08 times as long as in a tile of 64, and
# 1.16 times as long as in one of 128; but boxes of 64 and 128 tokens compute 1.1 to 2.8 times as many pairs (windows
# from 31 down to 7).
_BOX = 32
# Tokens of a default box on a grid of one axis, where boxes do not change the order.
_LONG_BOX = 128


def per_axis(name: str, value: object, axes: int, least: int) -> tuple[int, ...]:
    """Return a whole number per axis, given one for all axes or one for each."""
    if isinstance(value, (int, np.integer, set, frozenset)):
        return (whole(name, value, least),) * axes
    listed = tuple(integers(name, value, least))
    if len(listed) != axes:
        wanted = f"one number, or one for each of {axes} axes"
        raise PatternError(name, shown(listed), wanted, f"Pass {name} for the grid's axes.")
    return listed


def axes_text(values: tuple[int, ...]) -> str:
    """Write a tuple as text, number by number, so that torch.compile can keep changing sizes symbolic."""
    said = ", ".join([f"{value}" for value in values])
    return f"({said},)" if len(values) == 1 else f"({said})"


class _Boxes(NamedTuple):
    """The boxes of a grid in its order.

    Attributes:
        first: (boxes + 1,), the first token of each box; the last entry is the number of tokens.
        corner: (boxes, axes), the least coordinates of each box.
        side: (boxes, axes), tokens along each axis.
        number: Number of the box at each place, with one axis per axis of the grid.
    """

    first: Int64
    corner: Int64
    side: Int64
    number: Int64


@dataclass(frozen=True, init=False, repr=False)
class Grid:
    """An order of the tokens of an image or a video, box by box, so that a tile of a plan is a compact box.

    Boxes follow one another row by row, and so do the tokens in a box. If a box does not divide an axis, the smaller
    boxes at its end come after all whole boxes, so that tiles coincide with boxes.

    Args:
        shape: Tokens along each axis: (n,), (height, width) or (time, height, width); any sizes.
        tile: Tokens of a box along each axis, or one number for all; the sides of tiles should be multiples of the
            box's tokens. None chooses a box of 32 tokens or fewer, as near to a cube as the shape allows. (1, width)
            is the plain order row by row.
    Raises:
        PatternError: There are not one to three axes, or a size is below 1.
    Example:
        >>> grid = rw.Grid((4, 4), tile=2)
        >>> grid.flatten(torch.arange(16).view(4, 4), 0)
        tensor([ 0,  1,  4,  5,  2,  3,  6,  7,  8,  9, 12, 13, 10, 11, 14, 15])
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]

    def __init__(self, shape: int | Sequence[int], tile: int | Sequence[int] | None = None):
        sizes = per_axis("shape", shape, 1, 1) if isinstance(shape, (int, np.integer)) else tuple(_sizes(shape))
        whole("shape", math.prod(sizes), 1, LONGEST)
        box = _chosen(sizes) if tile is None else per_axis("tile", tile, len(sizes), 1)
        object.__setattr__(self, "shape", sizes)
        box = tuple(map(min, box, sizes))
        # parts of one row that follow one another are joined to the whole row: fewer boxes, the same order
        if math.prod(box[:-1]) == 1 and sizes[-1] % box[-1] == 0 and len(box) > 1:
            box = (*box[:-1], sizes[-1])
        object.__setattr__(self, "tile", box)

    def __repr__(self) -> str:
        return f"Grid({axes_text(self.shape)}, {axes_text(self.tile)})"

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return math.prod(self.shape)

    @property
    def positions(self) -> Tensor:
        """Coordinates of all tokens in this order, int64 (tokens, axes)."""
        return torch.stack(coordinates(self, torch.arange(self.tokens, device="cpu")), 1)

    def flatten(self, x: Tensor, dim: int) -> Tensor:
        """Flatten the grid's axes to one axis of tokens, in this order.

        Args:
            x: A tensor with the grid's axes side by side; any other axes, dtype, device and strides.
            dim: The first of the grid's axes; a negative number counts from the end.
        Returns:
            The tensor with one axis of tokens in their place; differentiable. It may share memory with x.
        Raises:
            ShapeError: The axes do not have the grid's sizes.
        Example:
            >>> rw.Grid((8, 8)).flatten(torch.zeros(1, 2, 8, 8, 16), 2).shape
            torch.Size([1, 2, 64, 16])
        """
        dim = _axis(x, dim)
        axes = len(self.shape)
        if x.shape[dim : dim + axes] != self.shape:
            got, wanted = f"{tuple(x.shape)}, from axis {dim} on", f"axes of {self.shape} there"
            raise ShapeError("x", got, wanted, "Pass the first of the grid's axes as dim.")
        # the axes of boxes come before the axes of tokens in a box
        order = [*range(dim), *range(dim, dim + 2 * axes, 2), *range(dim + 1, dim + 2 * axes, 2)]
        parts: list[Tensor] = []
        for region in itertools.product(*self._ends):
            part = x
            for axis, (start, boxes, side) in enumerate(region):
                part = part.narrow(dim + 2 * axis, start, boxes * side).unflatten(dim + 2 * axis, (boxes, side))
            parts.append(part.permute(*order, *range(dim + 2 * axes, part.ndim)).flatten(dim, dim + 2 * axes - 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def unflatten(self, x: Tensor, dim: int) -> Tensor:
        """Restore the grid's axes: the inverse of :meth:`flatten`.

        Args:
            x: A tensor with an axis of the grid's tokens.
            dim: The axis of tokens; a negative number counts from the end.
        Returns:
            The tensor with the grid's axes in its place; differentiable. It may share memory with x.
        Raises:
            ShapeError: The axis has another length.
        Example:
            >>> grid, x = rw.Grid((30, 20)), torch.rand(2, 30, 20, 3)
            >>> torch.equal(grid.unflatten(grid.flatten(x, 1), 1), x)
            True
        """
        dim = _axis(x, dim)
        axes = len(self.shape)
        if x.shape[dim] != self.tokens:
            got = f"{tuple(x.shape)}, axis {dim}"
            raise ShapeError("x", got, f"{self.tokens} tokens there", "Pass the axis of tokens as dim.")
        order = [*range(dim), *(dim + axis + axes * inner for axis in range(axes) for inner in (0, 1))]
        regions = list(itertools.product(*self._ends))
        volumes = [math.prod([boxes * side for _, boxes, side in region]) for region in regions]
        parts: list[Tensor] = []
        for part, region in zip(x.split(volumes, dim), regions, strict=True):
            _, boxes, sides = zip(*region, strict=True)
            part = part.unflatten(dim, (*boxes, *sides)).permute(*order, *range(dim + 2 * axes, x.ndim + 2 * axes - 1))
            for axis in range(dim, dim + axes):
                part = part.flatten(axis, axis + 1)
            parts.append(part)
        for axis, ends in reversed(list(enumerate(self._ends))):
            if len(ends) > 1:
                parts = [torch.cat(parts[i : i + 2], dim + axis) for i in range(0, len(parts), 2)]
        return parts[0]

    @property
    def _ends(self) -> list[list[tuple[int, int, int]]]:
        """For each axis the whole boxes and the smaller one at the end, as (first coordinate, boxes, side)."""
        return [axis_parts(n, side) for n, side in zip(self.shape, self.tile, strict=True)]

    @property
    def order(self) -> Order:
        """The order of tokens."""
        return Order(self.shape, self.tile)


def _boxes(grid: Grid) -> _Boxes:
    boxes: _Boxes | None = PATTERNS.get(("boxes", grid))
    if boxes is None:
        boxes = _made(grid)
        PATTERNS.put(("boxes", grid), boxes, sum(part.nbytes for part in boxes))
    return boxes


def _made(grid: Grid) -> _Boxes:
    # numpy, since modes of torch (fake tensors, default devices) would change torch's tensors
    axes = [np.arange(0, n, side) for n, side in zip(grid.shape, grid.tile, strict=True)]
    corner = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
    side = np.minimum(np.array(grid.shape) - corner, np.array(grid.tile))
    # the smaller boxes at the end of the first axis come last
    left = (side < np.array(grid.tile)) @ (1 << np.arange(len(axes))[::-1])
    order = np.argsort(left, kind="stable")
    corner, side = corner[order], side[order]
    first = np.append(0, side.prod(1).cumsum())
    return _Boxes(first, corner, side, np.argsort(order).reshape([len(each) for each in axes]))


def coordinates(grid: Grid, position: Tensor) -> list[Tensor]:
    """Return the coordinates of tokens along each axis."""
    first, corner, side = (torch.from_numpy(part).to(position.device) for part in _boxes(grid)[:3])
    box = torch.searchsorted(first, position.contiguous(), right=True) - 1
    inner = position - first[box]
    found = []
    for axis in reversed(range(len(grid.shape))):
        found.append(corner[:, axis][box] + inner % side[:, axis][box])
        inner = inner // side[:, axis][box]
    return found[::-1]


def _sizes(shape: object) -> list[int]:
    sizes = [] if isinstance(shape, (set, frozenset)) else integers("shape", shape, 1)
    if not 1 <= len(sizes) <= 3:
        got = shown(shape if isinstance(shape, set) else sizes)
        raise PatternError("shape", got, "one to three sizes", "Pass (n,), (h, w) or (t, h, w).")
    return sizes


def _chosen(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Choose the sides of a box: powers of two; the shortest is doubled in turn, last axis first, while it fits."""
    if len(shape) == 1:
        return (_LONG_BOX,)
    box = [1] * len(shape)
    while math.prod(box) < _BOX:
        room = [axis for axis, n in enumerate(shape) if 2 * box[axis] <= n]
        if not room:
            break
        axis = min(reversed(room), key=lambda each: box[each])
        box[axis] *= 2
    return tuple(box)


def _axis(x: object, dim: object) -> int:
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        got = (
            type(x).__name__
            if not isinstance(x, Tensor)
            else "a nested tensor"
            if x.is_nested
            else f"a {x.layout} tensor"
        )
        raise ShapeError("x", got, "a dense tensor", "Convert it with to_dense or torch.as_tensor.")
    least, most = -x.ndim, max(x.ndim - 1, 0)
    number = whole("dim", dim, least, most, error=ShapeError, remedy=f"Pass an axis of the tensor, {least}..{most}.")
    if not x.ndim:
        raise ShapeError("x", "a tensor without axes", "the grid's axes", "Pass a tensor of tokens.")
    return number % x.ndim


class Pieces(NamedTuple):
    """Distinct ranges of tokens, cut into pieces that are boxes.

    A piece is a box of the grid, a part of one at an end of the range, or several equal boxes in a row.

    Attributes:
        given: Number of the distinct range of each given range.
        number: (ranges,), number of pieces of each range.
        begin: (ranges,), first piece of each range.
        first: (pieces, axes), least coordinates.
        last: (pieces, axes), largest coordinates; for a part of a box, first and last may bound more than the part.
        layout: (ranges,), equal numbers for ranges that differ only by a translation.
    """

    given: Int64
    number: Int64
    begin: Int64
    first: Int64
    last: Int64
    layout: Int64

    @staticmethod
    def of(grid: Grid, lo: Int64, hi: Int64) -> Pieces:
        bounds, _, sides, _ = _boxes(grid)
        ranges, given = np.unique(lo * 2**31 + hi, return_inverse=True)
        lo, hi = ranges >> 31, ranges & (2**31 - 1)
        box, end = np.searchsorted(bounds, lo, side="right") - 1, np.searchsorted(bounds, hi)
        cut, number = lo - bounds[box], end - box
        row = np.repeat(np.arange(len(lo)), number)
        box = np.arange(len(row)) + (box - np.cumsum(number) + number)[row]
        begin, end = np.maximum(bounds[box], lo[row]), np.minimum(bounds[box + 1], hi[row])
        side, uncut = sides[box], end - begin == np.diff(bounds)[box]
        first, last = _between(grid, box, begin, end - 1)
        # boxes of one shape that follow each other along one axis are one piece
        moved = first[1:] != first[:-1]
        joined = (row[1:] == row[:-1]) & uncut[1:] & uncut[:-1] & (side[1:] == side[:-1]).all(1)
        joined &= (moved.sum(1) == 1) & (~moved | (first[1:] == last[:-1] + 1)).all(1)
        heads = np.flatnonzero(np.append(np.ones(min(len(row), 1), np.bool_), ~joined))
        first, last = first[heads], last[np.append(heads[1:], len(row)) - 1] if len(row) else last
        number = np.bincount(row[heads], minlength=len(lo))
        start = np.cumsum(number) - number
        layout = combine_ids(hi - lo, cut, number)
        for place in range(int(number.max(initial=0))):
            each, here = np.minimum(start + place, len(heads) - 1), place < number
            shape = (*side[heads[each]].T, *(last - first)[each].T)
            layout = combine_ids(layout, *(np.where(here, along, -1) for along in shape))
        return Pieces(given.reshape(-1), number, start, first, last, layout)


def _between(grid: Grid, box: Int64, begin: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Return bounds of the coordinates of tokens begin..end of a box."""
    corner, side = (part[box] for part in _boxes(grid)[1:3])
    low, high = corner.copy(), corner + side - 1
    alike = np.ones(len(box), np.bool_)
    ends = (coordinates(grid, torch.from_numpy(each)) for each in (begin, end))
    for axis, (from_, to) in enumerate(zip(*ends, strict=True)):
        # a run of tokens covers an axis completely if its ends differ along an axis before it
        low[alike, axis], high[alike, axis] = from_.numpy()[alike], to.numpy()[alike]
        alike &= (from_ == to).numpy()
    return low, high


def token_runs(grid: Grid, first: list[Int64], last: list[Int64]) -> tuple[Int64, Int64, Int64]:
    """Return runs of tokens that contain all tokens from coordinates first to last, as (number, begin, end)."""
    table, axes = _boxes(grid), len(first)

    def along(values: Int64, axis: int) -> Int64:
        return values.reshape([-1 if each == axis else 1 for each in range(axes + 1)])

    begin, end = ([along(c // side, 0) for c, side in zip(each, grid.tile, strict=True)] for each in (first, last))
    real = np.ones((), np.bool_)
    places = []
    for axis in range(axes - 1):
        place = begin[axis] + along(np.arange(int((end[axis] - begin[axis]).max(initial=0)) + 1), axis + 1)
        real = real & (place <= end[axis])
        places.append(place)
    # along the last axis the whole boxes are one run, and the smaller box at its end is another
    whole_boxes = grid.shape[-1] // grid.tile[-1]
    left = along(np.arange(len(grid._ends[-1])), axes)
    low = np.where(left, np.maximum(begin[-1], whole_boxes), begin[-1])
    high = np.where(left, end[-1], np.minimum(end[-1], whole_boxes - 1))
    real = real & (low <= high)
    shape, bounds = real.shape, table.first
    used = real.nonzero()
    *places, low, high = (np.broadcast_to(each, shape)[used] for each in (*places, low, high))
    return used[0], bounds[table.number[(*places, low)]], bounds[table.number[(*places, high)] + 1]
