"""Count the pairs that a pattern allows in cells (squares of tokens), without evaluating every pair.

Cells are classified like the tiles of a plan, level by level. Empty and full cells are counted by their areas, and one
cell represents all others of its class. The remaining cells are divided further or, if small, evaluated by token.
A million tokens therefore cost about as much as a thousand. If a pattern is opaque (a mask function) and too large for
this, the remaining cells are sampled, and the count is marked as not exact.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..checks import whole
from ..errors import ShapeError
from ..patterns import Causal, Full, LongNet, Pattern
from ..patterns.fitting import fitting, refuse
from ..patterns.located import located
from ..plan.branches import branches
from ..plan.causality import causality
from ..relation.arrays import Int64, combine_ids, distinct, unpacked
from ..relation.node import FULL, Node, Origin, Sides, Tiles
from ..units import count, percent

Shares = NDArray[np.float64]

CELLS = 64
_FINE = 128  # maximum number of cells along a side where smaller ones show a rate
PANELS = 8

_EVALUATED = 2**24  # maximum number of pairs evaluated by token at one level
_CELLS = 2**21  # maximum number of cells classified at one level
_CUT = 16  # smaller cells along a side of a divided cell
_PLANNED = 2**20  # maximum number of tiles that a caption counts


@dataclass(frozen=True)
class Panel:
    """Shares of allowed pairs per cell (queries, keys), for heads with equal patterns; above 1 if branches overlap."""

    heads: tuple[int, ...]
    shares: Shares

    @property
    def caption(self) -> str:
        """Text that names the heads, such as ``head 0``, ``heads 0-3`` or ``heads 0, 4, 8, ...``."""
        first, last = self.heads[0], self.heads[-1]
        if first == last:
            return f"head {first}"
        if last - first == len(self.heads) - 1:
            return f"heads {first}-{last}"
        return "heads " + ", ".join(map(str, self.heads[:3])) + (", ..." if len(self.heads) > 3 else "")


@dataclass(frozen=True)
class Picture:
    """The contents of a pattern's picture."""

    title: str
    caption: str
    tokens: int
    side: int  # tokens along a cell's side
    panels: tuple[Panel, ...]  # one per distinct head, at most PANELS


def picture(pattern: Pattern, tokens: int, *, heads: int = 1, cells: int = CELLS) -> Picture:
    """Count a pattern's allowed pairs by cells, for each distinct head.

    Args:
        pattern: A relation or a LongNet. If batch elements differ, the first one is drawn.
        tokens: Number of queries and of keys.
        heads: Query heads; 1 means the number of heads that the pattern is made for.
        cells: Maximum number of cells along a side; with no more tokens than this a cell is one pair. The default is
            doubled if that shows a dilation rate.
    Returns:
        The panels and texts of a picture.
    Raises:
        ShapeError: A size is below 1.
        PatternError: The pattern is made for other lengths or heads.
    Example:
        >>> picture(rw.Causal(), 4).panels[0].shares[1]
        array([1., 1., 0., 0.])
    """
    tokens, heads, cells = (
        whole(name, value, 1, error=ShapeError, remedy=f"Ask for at least one of the {name}.")
        for name, value in (("tokens", tokens), ("heads", heads), ("cells", cells))
    )
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    batch, made = pattern.extents()
    heads = made if made is not None and heads == 1 else heads
    pattern = fitting(pattern, tokens, tokens, heads, batch or 1)[0]
    groups: dict[tuple[Layer, ...], list[int]] = {}
    for head in range(heads):
        groups.setdefault(layers(pattern, tokens, head, heads), []).append(head)
    side = -(-tokens // cells)
    # a cell as large as a rate contains as many pairs as its neighbours, whatever the rate keeps
    rates = {rate for parts in groups for part in parts for rate in (part.rate, part.pattern.residue_rate) if rate > 1}
    if cells == CELLS and rates and side >= min(rates):
        side = max(min(side, -(-tokens // _FINE)), min(rates) // 2)
    sides = np.minimum(side, tokens - np.arange(0, tokens, side))
    panels, allowed, exact = [], 0.0, True
    for parts, members in list(groups.items())[:PANELS]:
        pairs, counted = allowed_pairs(parts, tokens, side)
        panels.append(Panel(tuple(members), pairs / np.multiply.outer(sides, sides)))
        allowed += float(pairs.sum()) * len(members)
        exact &= counted
    shown = sum(len(panel.heads) for panel in panels)
    texts = [count(tokens, "token")]
    if heads > 1:
        texts.append(f"{heads} heads" if shown == heads else f"{shown} of {heads} heads")
    if batch is not None:
        texts.append(f"the first of {batch} batch elements")
    texts.append(f"density {'' if exact else 'about '}{percent(allowed / (shown * tokens**2))}")
    hidden = sorted(rate for rate in rates if side > 1 and rate <= side)
    if hidden:
        number = "a rate" if len(hidden) == 1 else "rates"
        texts.append(f"cells of {side} x {side} tokens hide {number} of {', '.join(map(str, hidden))}")
    if exact:
        texts += _planned(pattern, groups, tokens, heads, batch)
    return Picture(repr(pattern), ", ".join(texts), tokens, side, tuple(panels))


def _planned(
    pattern: Pattern, groups: Collection[tuple[Layer, ...]], tokens: int, heads: int, batch: int | None
) -> list[str]:
    """Return the caption's texts on tiles and causality, if planning for them takes no longer than drawing."""
    # the relations that planning would look at tile by tile
    parts = {part.pattern for each in groups for part in each}

    def tiles(part: Pattern) -> int:
        here = located(part, (tokens, tokens))
        line = here.node.touched(here.strips(tokens, tokens, (128, 128)))
        return int((line.stop - line.start).sum())

    texts = []
    if batch is None and sum(map(tiles, parts)) <= _PLANNED:
        views = branches(pattern, tokens, tokens, heads=heads)
        plans = [view.plan() for view in views]
        sides = sorted({(plan.q_tile, plan.kv_tile) for plan in plans}, reverse=True)
        sizes = " or ".join(f"{q} x {k}" for q, k in sides)
        number = sum(plan.tiles for plan in plans)
        strided = f" in {count(len(plans), 'strided view')}" if any(view.rate > 1 for view in views) else ""
        texts.append(f"{count(number, 'tile')} of {sizes}{strided}")
    after = [part & ~Causal() for part in parts if part != Full()]
    if sum(map(tiles, after)) <= _PLANNED:
        texts.append(str(causality(pattern, tokens, heads=heads, batch=batch or 1)))
    return texts


class Layer(NamedTuple):
    """A relation of one batch element and head over the positions first, first + rate, and so on."""

    pattern: Pattern
    rate: int
    first: int


def layers(pattern: Pattern, tokens: int, head: int, heads: int) -> tuple[Layer, ...]:
    """Return the layers of a head: the pattern itself, or the branches of a LongNet."""
    if not isinstance(pattern, LongNet):
        return (Layer(pattern.select(0, head), 1, 0),)
    split = branches(pattern, tokens, tokens, heads=heads)
    return tuple(Layer(b.pattern, b.rate, b.k_first) for b in split if head in range(*b.heads))


def allowed_pairs(parts: tuple[Layer, ...], tokens: int, side: int) -> tuple[Shares, bool]:
    """Count allowed pairs per cell of ``side`` x ``side`` tokens.

    Args:
        parts: Layers of a head; a pair counts once for each layer that allows it.
        tokens: Number of queries and of keys.
        side: Tokens along a cell's side; the last cells may be smaller.
    Returns:
        Numbers of pairs (queries, keys), and whether they are exact: False if some cells were sampled.
    Example:
        >>> allowed_pairs(layers(rw.Causal(), 4, 0, 1), 4, 2)[0]
        array([[3., 0.],
               [4., 3.]])
    """
    lo = np.arange(0, tokens, side, dtype=np.int64)
    hi = np.minimum(lo + side, tokens)
    row, col = (index.reshape(-1) for index in np.indices((len(lo), len(lo))))
    total, exact = np.zeros((len(lo), len(lo))), True
    for pattern, rate, first in parts:
        length = -(-(tokens - first) // rate)
        counter = _Counter(located(pattern, (length, length)).node)
        a, b = -((first - lo) // rate), -((first - hi) // rate)
        total += counter.pairs(_Cells(a[row], b[row], a[col], b[col])).reshape(total.shape)
        exact &= counter.exact
    return total, exact


class _Cells(NamedTuple):
    """Cells as ranges of queries [q_lo, q_hi) and keys [k_lo, k_hi)."""

    q_lo: Int64
    q_hi: Int64
    k_lo: Int64
    k_hi: Int64

    def some(self, chosen: Int64) -> _Cells:
        return _Cells(*(side[chosen] for side in self))

    def sizes(self) -> tuple[Int64, Int64]:
        return self.q_hi - self.q_lo, self.k_hi - self.k_lo

    def tiles(self) -> Tiles:
        return Tiles.of(Sides.of(self.q_lo, self.q_hi), Sides.of(self.k_lo, self.k_hi))


class _Counter:
    """A counter of the pairs that one relation, of one batch element and head, allows in cells of any size."""

    def __init__(self, node: Node):
        self.node, self.exact = node, True
        self.random = torch.Generator("cpu").manual_seed(0)

    def pairs(self, cells: _Cells) -> Shares:
        """Return the allowed pairs of each cell; ``exact`` becomes False if some are estimates."""
        height, width = cells.sizes()
        result = np.zeros(len(height))
        used = np.flatnonzero((height > 0) & (width > 0))
        codes = self.node.classes(cells.some(used).tiles())
        result[used] = np.where(codes == FULL, height[used] * width[used], 0.0)
        open_ = codes > FULL
        used = used[open_]
        if used.size:
            # cells of one class and size have the same mask, so one of them is counted
            first, like = distinct(combine_ids(codes[open_], height[used], width[used]))
            result[used] = self._open(cells.some(used[first]))[like]
        return result

    def _open(self, cells: _Cells) -> Shares:
        height, width = cells.sizes()
        number = len(height)
        if float((height * width).sum()) <= _EVALUATED:
            return self._by_token(cells, int(height.max()), int(width.max()))
        if number * _CUT**2 > _CELLS:
            self.exact = False
            return self._sampled(cells)
        part = np.tile(np.arange(_CUT**2), number)
        parent = np.repeat(np.arange(number), _CUT**2)
        down, along = (-(-int(side.max()) // _CUT) for side in (height, width))
        q_lo, k_lo = cells.q_lo[parent] + part // _CUT * down, cells.k_lo[parent] + part % _CUT * along
        q_hi, k_hi = np.minimum(q_lo + down, cells.q_hi[parent]), np.minimum(k_lo + along, cells.k_hi[parent])
        finer = self.pairs(_Cells(q_lo, q_hi, k_lo, k_hi)).reshape(number, -1)
        return np.asarray(finer.sum(1))

    def _by_token(self, cells: _Cells, height: int, width: int) -> Shares:
        tiles, high, wide = cells.tiles(), *cells.sizes()
        result = np.zeros(len(high))
        step = max(1, _EVALUATED // 4 // (height * width))
        for begin in range(0, len(result), step):
            part = slice(begin, begin + step)
            allowed = unpacked(self.node.words(tiles.some(part), (height, width)), width)
            rows, columns = np.arange(height) < high[part, None], np.arange(width) < wide[part, None]
            result[part] = (allowed & rows[:, :, None] & columns[:, None]).sum((1, 2))
        return result

    def _sampled(self, cells: _Cells) -> Shares:
        number = len(cells.q_lo)
        points = max(1, int((_EVALUATED / number) ** 0.5))
        result = np.zeros(number)
        step = max(1, _EVALUATED // 4 // points**2)
        for begin in range(0, number, step):
            q_lo, q_hi, k_lo, k_hi = (torch.from_numpy(side[begin : begin + step]) for side in cells)
            q, k = self._spread(q_lo, q_hi, points), self._spread(k_lo, k_hi, points)
            allowed = self.node.contains(q[:, :, None], k[:, None], Origin())
            share = allowed.double().mean((1, 2))
            result[begin : begin + step] = (share * (q_hi - q_lo) * (k_hi - k_lo)).numpy()
        return result

    def _spread(self, lo: torch.Tensor, hi: torch.Tensor, points: int) -> torch.Tensor:
        # evenly spread with a jitter: a regular grid would alias with a regular pattern
        jitter = torch.rand(len(lo), points, generator=self.random, device="cpu")
        place = (torch.arange(points, device="cpu") + jitter) / points
        return torch.minimum(lo[:, None] + (place * (hi - lo)[:, None]).long(), hi[:, None] - 1)
