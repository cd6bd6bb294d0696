"""An order of the tokens of an image or a video in which the tokens of a tile form a compact box.

A box is an interval along every axis. The order itself, and the boxes of a run of tokens, are those of a relation on a
grid: :mod:`ringweave.relation.grid`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..checks import LONGEST, integers, whole
from ..errors import PatternError, ShapeError, shown
from ..relation.grid import Order, axis_parts

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
        return torch.stack(self.order.coordinates(torch.arange(self.tokens, device="cpu")), 1)

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
