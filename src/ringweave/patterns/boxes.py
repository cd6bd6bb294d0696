"""An order of the tokens of an image or a video in which those of a tile are a compact box.

Along every axis boxes are intervals. Ranges of tokens become boxes here (``Pieces``), and boxes become ranges of tokens
(``token_runs``).
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
from ..errors import PatternError, ShapeError, message, shown
from .tiles import Int64, mix
from .validate import LONGEST, integers, whole

# Tokens of a box that is chosen. In the native kernel a pair of a tile of 32 takes 1.08 times as long as one of 64, and
# 1.16 times one of 128; but boxes of 64 and 128 tokens compute 1.1 to 2.8 times as many (windows from 31 down to 7).
_BOX = 32
# and where there is one axis, whose order they do not change
_LONG_BOX = 128


def per_axis(name: str, value: object, axes: int, least: int) -> tuple[int, ...]:
    """A whole number per axis, of one for all or of one for each."""
    if isinstance(value, (int, np.integer, set, frozenset)):
        return (whole(name, value, least),) * axes
    listed = tuple(integers(name, value, least))
    if len(listed) != axes:
        wanted = f"one number, or one for each of {axes} axes"
        raise PatternError(message(name, shown(listed), wanted, f"Pass {name} for the grid's axes."))
    return listed


def axes_text(values: tuple[int, ...]) -> str:
    """A tuple as text, number by number: so torch.compile takes sizes that change for what they are."""
    said = ", ".join([f"{value}" for value in values])
    return f"({said},)" if len(values) == 1 else f"({said})"


class _Boxes(NamedTuple):
    """The boxes of a grid in its order.

    Attributes:
        first: (boxes + 1,), the first token of each; the last is the number of tokens.
        corner: (boxes, axes), the least coordinates.
        side: (boxes, axes), tokens along each axis.
        number: By place along each axis, which box lies there.
    """

    first: Int64
    corner: Int64
    side: Int64
    number: Int64


@dataclass(frozen=True, init=False, repr=False)
class Grid:
    """An order of the tokens of an image or a video: box by box, so that a tile of a plan is a compact box.

    Boxes follow one another row by row, and so do the tokens in a box. What is left at the ends of axes that the box
    does not divide comes after all whole boxes, so that tiles lie on boxes.

    Args:
        shape: Tokens along each axis: (n,), (height, width) or (time, height, width); any sizes.
        tile: Tokens of a box along each axis, or one number for all; the sides of tiles should be multiples of its
            tokens. None: chosen, 32 tokens or fewer, as near to a cube as the shape allows. (1, width) is the plain
            order row by row.
    Raises:
        PatternError: Another number of axes than one to three, or a size below 1.
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
        # parts of rows side by side are rows: so boxes are not many more than they need be
        if math.prod(box[:-1]) == 1 and sizes[-1] % box[-1] == 0 and len(box) > 1:
            box = (*box[:-1], sizes[-1])
        object.__setattr__(self, "tile", box)

    def __repr__(self) -> str:
        return f"Grid({axes_text(self.shape)}, {axes_text(self.tile)})"

    @property
    def tokens(self) -> int:
        """Count all tokens."""
        return math.prod(self.shape)

    @property
    def positions(self) -> Tensor:
        """The coordinates of all tokens in this order, int64 (tokens, axes)."""
        return torch.stack(coordinates(self, torch.arange(self.tokens, device="cpu")), 1)

    def flatten(self, x: Tensor, dim: int) -> Tensor:
        """Lay the grid's axes out as one axis of tokens, in this order.

        Args:
            x: A tensor with the grid's axes side by side; any other axes, dtype, device and strides.
            dim: The first of them; negative: from the end.
        Returns:
            The tensor with one axis of tokens in their place; differentiable. It may share memory with x.
        Raises:
            ShapeError: Other axes than the grid's are there.
        Example:
            >>> rw.Grid((8, 8)).flatten(torch.zeros(1, 2, 8, 8, 16), 2).shape
            torch.Size([1, 2, 64, 16])
        """
        dim = _axis(x, dim)
        axes = len(self.shape)
        if x.shape[dim : dim + axes] != self.shape:
            got, wanted = f"{tuple(x.shape)}, from axis {dim} on", f"axes of {self.shape} there"
            raise ShapeError(message("x", got, wanted, "Pass the first of the grid's axes as dim."))
        # of each axis the boxes before the tokens in them
        order = [*range(dim), *range(dim, dim + 2 * axes, 2), *range(dim + 1, dim + 2 * axes, 2)]
        parts: list[Tensor] = []
        for region in itertools.product(*self._ends):
            part = x
            for axis, (start, boxes, side) in enumerate(region):
                part = part.narrow(dim + 2 * axis, start, boxes * side).unflatten(dim + 2 * axis, (boxes, side))
            parts.append(part.permute(*order, *range(dim + 2 * axes, part.ndim)).flatten(dim, dim + 2 * axes - 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def unflatten(self, x: Tensor, dim: int) -> Tensor:
        """Bring the grid's axes back: the inverse of :meth:`flatten`.

        Args:
            x: A tensor with an axis of the grid's tokens.
            dim: That axis; negative: from the end.
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
            raise ShapeError(message("x", got, f"{self.tokens} tokens there", "Pass the axis of tokens as dim."))
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
        """Per axis the whole boxes and what is left: from which coordinate on, how many, and their side."""
        sides = list(zip(self.shape, self.tile, strict=True))
        return [[(0, n // side, side)] + [(n // side * side, 1, n % side)] * (n % side > 0) for n, side in sides]


def _boxes(grid: Grid) -> _Boxes:
    boxes: _Boxes | None = PATTERNS.get(("boxes", grid))
    if boxes is None:
        boxes = _made(grid)
        PATTERNS.put(("boxes", grid), boxes, sum(part.nbytes for part in boxes))
    return boxes


def _made(grid: Grid) -> _Boxes:
    # of numpy, which no mode of torch makes something else of
    axes = [np.arange(0, n, side) for n, side in zip(grid.shape, grid.tile, strict=True)]
    corner = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
    side = np.minimum(np.array(grid.shape) - corner, np.array(grid.tile))
    # what is left at the end of the first axis comes last
    left = (side < np.array(grid.tile)) @ (1 << np.arange(len(axes))[::-1])
    order = np.argsort(left, kind="stable")
    corner, side = corner[order], side[order]
    first = np.append(0, side.prod(1).cumsum())
    return _Boxes(first, corner, side, np.argsort(order).reshape([len(each) for each in axes]))


def coordinates(grid: Grid, position: Tensor) -> list[Tensor]:
    """The coordinates of tokens along each axis."""
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
        raise PatternError(message("shape", got, "one to three sizes", "Pass (n,), (h, w) or (t, h, w)."))
    return sizes


def _chosen(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sides of a box: powers of two, the shortest doubled in turn, from the last axis on, while an axis has room."""
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
        raise ShapeError(message("x", got, "a dense tensor", "Convert it with to_dense or torch.as_tensor."))
    least, most = -x.ndim, max(x.ndim - 1, 0)
    number = whole("dim", dim, least, most, error=ShapeError, remedy=f"Pass an axis of the tensor, {least}..{most}.")
    if not x.ndim:
        raise ShapeError(message("x", "a tensor without axes", "the grid's axes", "Pass a tensor of tokens."))
    return number % x.ndim


class Pieces(NamedTuple):
    """Ranges of tokens, each once, in pieces that are boxes: the grid's, cut at a range's ends, or several in a row.

    Attributes:
        given: Which of them each given range is.
        number: (ranges,), pieces.
        begin: (ranges,), the first of them.
        first: (pieces, axes), the least coordinates.
        last: (pieces, axes), the largest ones; of a box that is cut both may hold more.
        layout: (ranges,), equal where the tokens lie alike, but for where.
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
        layout = mix(hi - lo, cut, number)
        for place in range(int(number.max(initial=0))):
            each, here = np.minimum(start + place, len(heads) - 1), place < number
            shape = (*side[heads[each]].T, *(last - first)[each].T)
            layout = mix(layout, *(np.where(here, along, -1) for along in shape))
        return Pieces(given.reshape(-1), number, start, first, last, layout)


def _between(grid: Grid, box: Int64, begin: Int64, end: Int64) -> tuple[Int64, Int64]:
    """The least and the largest coordinates of the tokens begin..end of a box."""
    corner, side = (part[box] for part in _boxes(grid)[1:3])
    low, high = corner.copy(), corner + side - 1
    alike = np.ones(len(box), np.bool_)
    ends = (coordinates(grid, torch.from_numpy(each)) for each in (begin, end))
    for axis, (from_, to) in enumerate(zip(*ends, strict=True)):
        # a run of tokens fills an axis as soon as one before it moves
        low[alike, axis], high[alike, axis] = from_.numpy()[alike], to.numpy()[alike]
        alike &= (from_ == to).numpy()
    return low, high


def token_runs(grid: Grid, first: list[Int64], last: list[Int64]) -> tuple[Int64, Int64, Int64]:
    """The tokens of all boxes with coordinates from first to last, as runs: of which of them, from where to where."""
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
    # along the last axis whole boxes are one run, and what is left at its end another
    whole_boxes = grid.shape[-1] // grid.tile[-1]
    left = along(np.arange(len(grid._ends[-1])), axes)
    low = np.where(left, np.maximum(begin[-1], whole_boxes), begin[-1])
    high = np.where(left, end[-1], np.minimum(end[-1], whole_boxes - 1))
    real = real & (low <= high)
    shape, bounds = real.shape, table.first
    used = real.nonzero()
    *places, low, high = (np.broadcast_to(each, shape)[used] for each in (*places, low, high))
    return used[0], bounds[table.number[(*places, low)]], bounds[table.number[(*places, high)] + 1]
