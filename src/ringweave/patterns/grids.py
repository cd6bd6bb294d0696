"""Images and video: an order of a grid's tokens in which tiles are compact boxes, and patterns of what is near in it.

Along an axis everything is an interval: a query attends the keys ``first(q) + j * dilation``, j = 0, 1, ... below
``width``. A pattern is the product of its axes, and so are its bounds for a box of queries and the class of a pair of
boxes: what two boxes allow depends on how far they lie apart, and near a border on where the queries' box lies.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import PatternError, ShapeError, message, shown
from .base import Pattern
from .numbers import LONGEST, flag, integers, whole
from .tiles import EMPTY, FULL, Int64, Ranges, Tiles, classes, mix

# Tokens of a box that is chosen. In the native kernel a pair of a tile of 32 takes 1.08 times as long as one of 64, and
# 1.16 times one of 128; but boxes of 64 and 128 tokens compute 1.1 to 2.8 times as many (windows from 31 down to 7).
_BOX = 32
_SMALLEST, _LARGEST = 32, 128  # tiles that a pattern asks for
_COMPARED = 256  # pairs of boxes in a tile, beyond which it is like no other


def _each(name: str, value: object, axes: int, least: int) -> tuple[int, ...]:
    """A whole number per axis, of one for all or of one for each."""
    if isinstance(value, (int, np.integer, set, frozenset)):
        return (whole(name, value, least),) * axes
    listed = tuple(integers(name, value, least))
    if len(listed) != axes:
        wanted = f"one number, or one for each of {axes} axes"
        raise PatternError(message(name, shown(listed), wanted, f"Pass {name} for the grid's axes."))
    return listed


def _said(values: tuple[int, ...]) -> str:
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
        sizes = _each("shape", shape, 1, 1) if isinstance(shape, (int, np.integer)) else tuple(_sizes(shape))
        whole("shape", math.prod(sizes), 1, LONGEST)
        box = _chosen(sizes) if tile is None else _each("tile", tile, len(sizes), 1)
        object.__setattr__(self, "shape", sizes)
        box = tuple(map(min, box, sizes))
        # parts of rows side by side are rows: so boxes are not many more than they need be
        if math.prod(box[:-1]) == 1 and sizes[-1] % box[-1] == 0 and len(box) > 1:
            box = (*box[:-1], sizes[-1])
        object.__setattr__(self, "tile", box)

    def __repr__(self) -> str:
        return f"Grid({_said(self.shape)}, {_said(self.tile)})"

    @property
    def tokens(self) -> int:
        """All tokens."""
        return math.prod(self.shape)

    @property
    def positions(self) -> Tensor:
        """The coordinates of all tokens in this order, int64 (tokens, axes)."""
        return torch.stack(_coordinates(self, torch.arange(self.tokens, device="cpu")), 1)

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


@functools.lru_cache(maxsize=64)
def _boxes(grid: Grid) -> _Boxes:
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


def _coordinates(grid: Grid, position: Tensor) -> list[Tensor]:
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
        return (_LARGEST,)
    box = [1] * len(shape)
    while math.prod(box) < _BOX:
        room = [axis for axis, n in enumerate(shape) if 2 * box[axis] <= n]
        if not room:
            break
        axis = min(reversed(room), key=lambda each: box[each])
        box[axis] *= 2
    return tuple(box)


def _axis(x: object, dim: object) -> int:
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        got = f"{x.layout}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(message("x", got, "a dense tensor", "Convert it with to_dense or torch.as_tensor."))
    least, most = -x.ndim, max(x.ndim - 1, 0)
    number = whole("dim", dim, least, most, error=ShapeError, remedy=f"Pass an axis of the tensor, {least}..{most}.")
    if not x.ndim:
        raise ShapeError(message("x", "a tensor without axes", "the grid's axes", "Pass a tensor of tokens."))
    return number % x.ndim


class _Pieces(NamedTuple):
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
    def of(grid: Grid, lo: Int64, hi: Int64) -> _Pieces:
        bounds, _, sides, _ = _boxes(grid)
        ranges, given = np.unique(lo * 2**31 + hi, return_inverse=True)
        lo, hi = ranges >> 31, ranges & (2**31 - 1)
        box, end = np.searchsorted(bounds, lo, side="right") - 1, np.searchsorted(bounds, hi)
        cut, number = lo - bounds[box], end - box
        row = np.repeat(np.arange(len(lo)), number)
        box = np.arange(len(row)) + (box - np.cumsum(number) + number)[row]
        begin, end = np.maximum(bounds[box], lo[row]), np.minimum(bounds[box + 1], hi[row])
        side, uncut = sides[box], end - begin == np.diff(bounds)[box]
        first, last = _coordinates_between(grid, box, begin, end - 1)
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
        return _Pieces(given.reshape(-1), number, start, first, last, layout)


def _coordinates_between(grid: Grid, box: Int64, begin: Int64, end: Int64) -> tuple[Int64, Int64]:
    """The least and the largest coordinates of the tokens begin..end of a box."""
    corner, side = (part[box] for part in _boxes(grid)[1:3])
    low, high = corner.copy(), corner + side - 1
    alike = np.ones(len(box), np.bool_)
    ends = (_coordinates(grid, torch.from_numpy(each)) for each in (begin, end))
    for axis, (from_, to) in enumerate(zip(*ends, strict=True)):
        # a run of tokens fills an axis as soon as one before it moves
        low[alike, axis], high[alike, axis] = from_.numpy()[alike], to.numpy()[alike]
        alike &= (from_ == to).numpy()
    return low, high


class _OnGrid(Pattern):
    """A product over the axes of a grid, each with keys ``first(q) + j * dilation`` below ``first(q) + reach``."""

    grid: Grid
    dilation: tuple[int, ...]
    reach: tuple[int, ...]

    @abstractmethod
    def _first(self, axis: int, q: Tensor) -> Tensor:
        """The least coordinate that a query attends; it may lie before the axis."""

    @abstractmethod
    def _bound(self, axis: int, q: Int64) -> Int64:
        """At most ``_first`` of any query from here on, and less than ``dilation`` below that of any up to here."""

    @abstractmethod
    def _all_pairs(self) -> int:
        """All allowed pairs: the product of those along the axes."""

    @abstractmethod
    def _anchor(self, axis: int, first: Int64, last: Int64) -> Int64:
        """What the relation of queries in [first, last] depends on, beside the keys' distance."""

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        tokens = self.grid.tokens
        if nk != tokens or q_offset + nq > nk:
            raise PatternError(
                message(
                    type(self).__name__,
                    f"a grid of {self.grid.shape}, {tokens} tokens, for {nk} keys and queries up to {q_offset + nq}",
                    "as many keys, and every query among them",
                    "Build the grid for these tokens, and lay them out by grid.flatten.",
                )
            )

    def block_side(self) -> int:
        # of as many tokens as a box, where kernels take such tiles
        volume = math.prod(self.grid.tile)
        return min(max(-(-volume // 16) * 16, _SMALLEST), _LARGEST)

    def allowed_pairs(self, nq: int, nk: int, q_offset: int) -> int | None:
        return self._all_pairs() if nq == nk else None

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        allowed = torch.ones((), dtype=torch.bool, device=q.device)
        for axis, (query, key) in enumerate(zip(_coordinates(self.grid, q), _coordinates(self.grid, k), strict=True)):
            step = key - self._first(axis, query)
            allowed = allowed & (step >= 0) & (step < self.reach[axis])
            if self.dilation[axis] > 1:
                allowed = allowed & (step % self.dilation[axis] == 0)
        return allowed

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        pieces = _Pieces.of(self.grid, q_lo, q_hi)
        first, last = [], []
        for axis, n in enumerate(self.grid.shape):
            first.append(np.clip(self._bound(axis, pieces.first[:, axis]), 0, n))
            last.append(np.clip(self._bound(axis, pieces.last[:, axis]) + self.reach[axis], first[-1], n) - 1)
        piece, begin, end = _runs(self.grid, first, last)
        # as a padded list per range
        line = np.repeat(np.arange(len(pieces.number)), pieces.number)[piece]
        counts = np.bincount(line, minlength=len(pieces.number))
        slot = np.arange(len(line)) - np.repeat(np.cumsum(counts) - counts, counts)
        padded = np.zeros((2, len(counts), int(counts.max(initial=1))), np.int64)
        padded[0, line, slot], padded[1, line, slot] = begin, end
        return Ranges(*padded[:, pieces.given])

    def tile_keys(self, tiles: Tiles) -> Int64:
        q, k = _Pieces.of(self.grid, tiles.q_lo, tiles.q_hi), _Pieces.of(self.grid, tiles.k_lo, tiles.k_hi)
        # along each axis, of every piece of queries: bounds of the first key and of the last query's, and the anchor
        reached = [
            (self._bound(axis, low), self._bound(axis, high), self._anchor(axis, low, high))
            for axis, (low, high) in enumerate(zip(q.first.T, q.last.T, strict=True))
        ]
        keys = np.zeros(len(q.given), np.int64)
        # tiles of as many pieces at a time
        number = q.number[q.given] << 31 | k.number[k.given]
        used = 0
        for each in np.unique(number):
            here = np.flatnonzero(number == each)
            mine, theirs = q.given[here], k.given[here]
            q_pieces, k_pieces = range(each >> 31), range(each & (2**31 - 1))
            if len(q_pieces) * len(k_pieces) > _COMPARED:
                never = np.zeros(len(here), np.bool_)
                found = classes(never, never, mine, theirs)
            else:
                pairs = [
                    self._pair(reached, q, q.begin[mine] + i, k, k.begin[theirs] + j)
                    for i in q_pieces
                    for j in k_pieces
                ]
                empty, full = (np.logical_and.reduce([pair == kind for pair in pairs]) for kind in (EMPTY, FULL))
                found = classes(empty, full, q.layout[mine], k.layout[theirs], *pairs)
            keys[here] = np.where(found > FULL, found + used, found)
            used = int(keys.max())
        return keys

    def _pair(
        self, reached: list[tuple[Int64, Int64, Int64]], queries: _Pieces, q: Int64, keys: _Pieces, k: Int64
    ) -> Int64:
        """Tile keys of pairs of pieces, but for their layout."""
        empty, full = np.zeros(len(q), np.bool_), np.ones(len(q), np.bool_)
        parts = []
        for axis, (reach, dilation) in enumerate(zip(self.reach, self.dilation, strict=True)):
            before, after, anchor = (part[q] for part in reached[axis])
            low, high, first = keys.first[k, axis], keys.last[k, axis], queries.first[q, axis]
            empty |= (high < before) | (low >= after + reach)
            if dilation > 1:
                # no difference of coordinates is a multiple
                empty |= (high - first) // dilation * dilation < low - queries.last[q, axis]
                full[:] = False
            else:
                full &= (after <= low) & (before + reach > high)
            parts += [anchor, low - first]
        return classes(empty, full, *parts)


def _runs(grid: Grid, first: list[Int64], last: list[Int64]) -> tuple[Int64, Int64, Int64]:
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


class GridNeighborhood(_OnGrid):
    """Neighbourhood attention on a grid: along each axis ``window`` keys around the query, shifted inwards at borders.

    A query attends the product of its axes' windows: exactly as many keys, wherever it is. Along an axis its neighbours
    are the coordinates ``q + j * dilation``. Of an odd window as many lie before the query as after it; of an even one
    there is one more before it (``window // 2`` before, ``window // 2 - 1`` after), as in NATTEN. Where that reaches
    over a border, the window is shifted until it lies inside, among the same neighbours. Along a causal axis the window
    ends at the query, ``q - (window - 1) * dilation`` to q, and is not shifted: near the beginning are fewer keys.

    Args:
        grid: The order of tokens.
        window: Keys along each axis, the query's own among them; one number for all axes or one for each.
        dilation: Tokens between neighbours; likewise.
        causal: Whether an axis is causal (time, say); likewise.
    Raises:
        PatternError: A window or dilation below 1, or ``window * dilation`` larger than the axis; at use, other lengths
            than the grid's tokens.
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
        self.window, self.dilation = _each("window", window, axes, 1), _each("dilation", dilation, axes, 1)
        if isinstance(causal, (list, tuple)):
            self.causal = tuple(flag("causal", each) for each in causal)
        else:
            self.causal = (flag("causal", causal),) * axes
        if len(self.causal) != axes:
            wanted = f"one bool, or one for each of {axes} axes"
            raise PatternError(message("causal", shown(self.causal), wanted, "Pass causal for the grid's axes."))
        self.reach = tuple(w * d for w, d in zip(self.window, self.dilation, strict=True))
        if any(reach > n for reach, n in zip(self.reach, grid.shape, strict=True)):
            got = f"{self.window} times {self.dilation} on a grid of {grid.shape}"
            remedy = "Lower one of them, or use a larger grid."
            raise PatternError(message("window, dilation", got, "at most the grid's size along each axis", remedy))
        self.__post_init__()

    def _text(self) -> str:
        dilated = f", dilation={_said(self.dilation)}" if max(self.dilation) > 1 else ""
        causal = f", causal={_said(self.causal)}" if any(self.causal) else ""
        return f"GridNeighborhood({self.grid.__repr__()}, {_said(self.window)}{dilated}{causal})"

    def _first(self, axis: int, q: Tensor) -> Tensor:
        n, window, rate = self.grid.shape[axis], self.window[axis], self.dilation[axis]
        if self.causal[axis]:
            return q - (window - 1) * rate
        residue = q % rate
        members = (n - residue + rate - 1) // rate
        return torch.minimum((q // rate - window // 2).clamp(min=0), members - window) * rate + residue

    def _bound(self, axis: int, q: Int64) -> Int64:
        n, window, rate = self.grid.shape[axis], self.window[axis], self.dilation[axis]
        if self.causal[axis]:
            return q - (window - 1) * rate
        return np.clip(q - window // 2 * rate, 0, n - self.reach[axis])

    def _anchor(self, axis: int, first: Int64, last: Int64) -> Int64:
        if self.causal[axis]:
            return np.zeros_like(first)
        before = self.window[axis] // 2 * self.dilation[axis]
        inner = (first >= before) & (last - before <= self.grid.shape[axis] - self.reach[axis])
        return np.where(inner, -1, first)

    def residue_rate(self) -> int:
        # strided views of one axis of tokens: there are none of several
        return self.dilation[0] if len(self.dilation) == 1 else 1

    def restride(self, rate: int, offset: int) -> Pattern | None:
        if self.dilation != (rate,) or offset >= self.grid.tokens:
            return None
        return GridNeighborhood(Grid(-(-(self.grid.tokens - offset) // rate)), self.window, causal=self.causal)

    def _all_pairs(self) -> int:
        counts = zip(self.grid.shape, self.window, self.dilation, self.causal, strict=True)
        return math.prod(n * w - (d * w * (w - 1) // 2 if causal else 0) for n, w, d, causal in counts)


class GridWindows(_OnGrid):
    """Windows of one size over a grid, as in Swin: attention stays inside a window. The last ones may be smaller.

    Shifted windows begin at coordinate ``shift`` and not at 0, and what lies before is a window of its own. That is
    what Swin computes by rolling the image by ``-shift`` and masking what the roll brings together; nothing is rolled
    here.

    Args:
        grid: The order of tokens. With boxes of ``size`` (``Grid(shape, tile=size)``) unshifted windows are tiles.
        size: Tokens of a window along each axis; one number for all axes or one for each.
        shift: Where the first whole window begins, less than the size; likewise.
    Raises:
        PatternError: A size below 1, or a shift that is negative or not less than the size; at use, other lengths than
            the grid's tokens.
    Example:
        >>> rw.GridWindows(rw.Grid((4, 4)), 2, shift=1).to_dense(16)[0, 0].sum(-1).unique()
        tensor([1, 2, 4])

    References:
        Liu et al. (2021), Swin transformer, section 3.2.
    """

    def __init__(self, grid: Grid, size: int | Sequence[int], shift: int | Sequence[int] = 0):
        self.grid = _grid(grid)
        axes = len(grid.shape)
        self.size, self.shift = _each("size", size, axes, 1), _each("shift", shift, axes, 0)
        if any(shift >= size for shift, size in zip(self.shift, self.size, strict=True)):
            got = f"{self.shift} for windows of {self.size}"
            raise PatternError(message("shift", got, "less than the size", "Take the rest of the division by it."))
        self.dilation, self.reach = (1,) * axes, self.size
        self.__post_init__()

    def _text(self) -> str:
        shift = f", shift={_said(self.shift)}" if any(self.shift) else ""
        return f"GridWindows({self.grid.__repr__()}, {_said(self.size)}{shift})"

    def _first(self, axis: int, q: Tensor) -> Tensor:
        return q - (q - self.shift[axis]) % self.size[axis]

    def _bound(self, axis: int, q: Int64) -> Int64:
        return q - self._anchor(axis, q, q)

    def _anchor(self, axis: int, first: Int64, last: Int64) -> Int64:
        return (first - self.shift[axis]) % self.size[axis]

    def _all_pairs(self) -> int:
        def along(n: int, size: int, shift: int) -> int:
            before = min(shift, n)
            windows, rest = divmod(n - before, size)
            return before**2 + windows * size**2 + rest**2

        return math.prod(map(along, self.grid.shape, self.size, self.shift))


def _grid(grid: object) -> Grid:
    if not isinstance(grid, Grid):
        raise PatternError(message("grid", shown(grid), "a Grid", "Make one of the shape: Grid((height, width))."))
    return grid
