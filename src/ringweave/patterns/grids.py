"""Patterns of nearby tokens in an image or a video, in the token order of a grid.

A pattern is the product of its axes: a query attends a key if it does so along every axis. Along an axis the relation
is a few zones of coordinates.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ..checks import flag
from ..errors import PatternError, shown
from ..relation.grid import Product
from ..relation.node import Node
from ..relation.shapes import neighborhood, segments
from ..relation.zones import Zones
from .base import Pattern
from .boxes import Grid, axes_text, per_axis
from .declared import declare

_SMALLEST, _LARGEST = 32, 128  # tile sizes


class OnGrid(Pattern):
    """A product over the axes of a grid."""

    looks_up: ClassVar[bool] = True
    grid: Grid

    @abstractmethod
    def _along(self, axis: int) -> Zones:
        """Return the zones of an axis, over coordinates."""

    @abstractmethod
    def _all_pairs(self) -> int:
        """Count all allowed pairs, as the product over the axes."""

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        tokens = self.grid.tokens
        if nk != tokens or q_offset + nq > nk:
            raise PatternError(
                type(self).__name__,
                f"a grid of {self.grid.shape}, {tokens} tokens, for {nk} keys and queries up to {q_offset + nq}",
                f"{tokens} keys, and every query among them",
                "Build the grid for these tokens, and order them with grid.flatten.",
            )

    @property
    def tile_size(self) -> int:
        # the tokens of a box, rounded to a tile size that kernels accept
        volume = math.prod(self.grid.tile)
        return min(max(-(-volume // 16) * 16, _SMALLEST), _LARGEST)

    def _allowed_pairs(self, nq: int, nk: int) -> int | None:
        """Return the number of allowed pairs of all tokens by a formula; None for fewer queries, which are counted."""
        return self._all_pairs() if nq == nk == self.grid.tokens else None

    def zones(self, n: int | None) -> Node:
        axes = [self._along(axis) for axis in range(len(self.grid.shape))]
        # on one axis the boxes follow one another, so tokens stand by their coordinate
        return Product(self.grid.order, axes) if len(axes) > 1 else axes[0]


@declare("GridNeighborhood(Grid((32, 32)), 7)", "On a grid", hostile="GridNeighborhood(Grid((n // 64, 64)), 7, (4, 9))")
class GridNeighborhood(OnGrid):
    """Neighbourhood attention on a grid: along each axis ``window`` keys around the query, shifted inwards at borders.

    A query attends the product of its axes' windows, so every query attends the same number of keys. Along an axis its
    neighbours are the coordinates ``q + j * dilation``. An odd window is centred on the query. An even window has one
    more key before the query than after it (``window // 2`` before, ``window // 2 - 1`` after), as in NATTEN. A window
    that crosses a border is shifted inwards, within its residue class. Along a causal axis the window ends at the
    query, from ``q - (window - 1) * dilation`` to q, and is not shifted: queries near the beginning attend fewer keys.

    Args:
        grid: The order of tokens.
        window: Number of keys along each axis, including the query's coordinate; one for all axes or one for each.
        dilation: Distance between neighbours; one for all axes or one for each.
        causal: Whether an axis is causal (time, for example); one for all axes or one for each.
    Raises:
        PatternError: A window or dilation is below 1, or ``window * dilation`` is larger than the axis; at use, the
            lengths are not those of the grid.
    Example:
        >>> pattern = rw.GridNeighborhood(rw.Grid((16, 16)), (5, 7))
        >>> pattern.to_dense(256)[0, 0].sum(-1).unique()
        tensor([35])

    References:
        Hassani, Walton, Li, Li, Shi (2023), Neighborhood attention transformer, section 3; Hassani, Shi (2022), Dilated
        neighborhood attention transformer, section 3. Even windows and causal axes: NATTEN's reference mask.
    """

    def __init__(
        self,
        grid: Grid,
        window: int | Sequence[int],
        dilation: int | Sequence[int] = 1,
        causal: bool | Sequence[bool] = False,
    ):
        self.grid = _grid(grid)
        axes = len(grid.shape)
        self.window, self.dilation = per_axis("window", window, axes, 1), per_axis("dilation", dilation, axes, 1)
        if isinstance(causal, (list, tuple)):
            self.causal = tuple(flag("causal", each) for each in causal)
        else:
            self.causal = (flag("causal", causal),) * axes
        if len(self.causal) != axes:
            wanted = f"one bool, or one for each of {axes} axes"
            raise PatternError("causal", shown(self.causal), wanted, "Pass causal for the grid's axes.")
        if any(w * d > n for w, d, n in zip(self.window, self.dilation, grid.shape, strict=True)):
            got = f"{self.window} times {self.dilation} on a grid of {grid.shape}"
            remedy = "Lower one of them, or use a larger grid."
            raise PatternError("window, dilation", got, "at most the grid's size along each axis", remedy)
        self.__post_init__()

    def _text(self) -> str:
        dilated = f", dilation={axes_text(self.dilation)}" if max(self.dilation) > 1 else ""
        causal = f", causal={axes_text(self.causal)}" if any(self.causal) else ""
        return f"GridNeighborhood({self.grid.__repr__()}, {axes_text(self.window)}{dilated}{causal})"

    def _along(self, axis: int) -> Zones:
        return neighborhood(self.window[axis], self.dilation[axis], self.grid.shape[axis], self.causal[axis])

    @property
    def residue_rate(self) -> int:
        # a strided view has one axis of tokens, so only a grid of one axis has such views
        return self.dilation[0] if len(self.dilation) == 1 else 1

    def _all_pairs(self) -> int:
        counts = zip(self.grid.shape, self.window, self.dilation, self.causal, strict=True)
        return math.prod(n * w - (d * w * (w - 1) // 2 if causal else 0) for n, w, d, causal in counts)


@declare(
    "GridWindows(Grid((32, 32)), 8, shift=4)",
    "On a grid",
    hostile="GridWindows(Grid((n // 64, 64)), (32, 3), (1, 2))",
)
class GridWindows(OnGrid):
    """Windows of one size over a grid, as in Swin: a query attends its window. The last windows may be smaller.

    Shifted windows begin at coordinate ``shift``, and the tokens before it are a smaller window. Swin computes the same
    by rolling the image by ``-shift`` and masking pairs that the roll brings together; this pattern rolls nothing.

    Args:
        grid: The order of tokens. With boxes of ``size`` (``Grid(shape, tile=size)``) unshifted windows are tiles.
        size: Tokens in a window along each axis; one number for all axes or one for each.
        shift: Coordinate of the first whole window, less than the size; one number for all axes or one for each.
    Raises:
        PatternError: A size is below 1, or a shift is negative or not less than the size; at use, the lengths are not
            those of the grid.
    Example:
        >>> rw.GridWindows(rw.Grid((4, 4)), 2, shift=1).to_dense(16)[0, 0].sum(-1).unique()
        tensor([1, 2, 4])

    References:
        Liu et al. (2021), Swin transformer, section 3.2.
    """

    def __init__(self, grid: Grid, size: int | Sequence[int], shift: int | Sequence[int] = 0):
        self.grid = _grid(grid)
        axes = len(grid.shape)
        self.size, self.shift = per_axis("size", size, axes, 1), per_axis("shift", shift, axes, 0)
        if any(shift >= size for shift, size in zip(self.shift, self.size, strict=True)):
            got = f"{self.shift} for windows of {self.size}"
            raise PatternError("shift", got, "less than the size", "Pass shift % size.")
        self.__post_init__()

    def _text(self) -> str:
        shift = f", shift={axes_text(self.shift)}" if any(self.shift) else ""
        return f"GridWindows({self.grid.__repr__()}, {axes_text(self.size)}{shift})"

    def _along(self, axis: int) -> Zones:
        return segments(self.size[axis], self.grid.shape[axis], self.shift[axis])

    def _all_pairs(self) -> int:
        def along(n: int, size: int, shift: int) -> int:
            before = min(shift, n)
            windows, rest = divmod(n - before, size)
            return before**2 + windows * size**2 + rest**2

        return math.prod(map(along, self.grid.shape, self.size, self.shift))


def _grid(grid: object) -> Grid:
    if not isinstance(grid, Grid):
        raise PatternError("grid", shown(grid), "a Grid", "Make a grid of its shape: Grid((height, width)).")
    return grid
