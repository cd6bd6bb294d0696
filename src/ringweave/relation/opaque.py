"""Relations that can only be evaluated token by token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .arrays import Bool, Int64, Words, combine_ids, packed
from .lines import NONE, Line
from .node import Frame, Node, Origin, Tiles

#: A function of positions of queries and keys, and of their batch elements; int64 arrays that broadcast.
Evaluate = Callable[[Int64, Int64, Int64], Bool]


class Opaque(Node):
    """A relation given by a function. Every tile that other operands leave open is evaluated."""

    def __init__(self, evaluate: Evaluate):
        self.evaluate = evaluate

    def touched(self, frame: Frame, within: Line | None = None) -> Line:
        return Line(np.zeros(1, np.int64), np.full(1, frame.length, np.int64))

    def filled(self, frame: Frame, within: Line | None = None) -> Line:
        return NONE

    def classes(self, tiles: Tiles) -> Int64:
        return combine_ids(tiles.q.lo[tiles.qi], tiles.k.lo[tiles.ki], tiles.q.element[tiles.qi])

    def words(self, tiles: Tiles, size: tuple[int, int]) -> Words:
        (q, q_end, element), (k, k_end, _) = (
            (sides.lo[i], sides.hi[i] - 1, sides.element[i]) for sides, i in ((tiles.q, tiles.qi), (tiles.k, tiles.ki))
        )
        # positions past the ends are clamped, since a function may index tables by them
        rows = np.minimum(q[:, None] + np.arange(size[0]), q_end[:, None])
        columns = np.minimum(k[:, None] + np.arange(size[1]), k_end[:, None])
        allowed = self.evaluate(rows[:, :, None], columns[:, None], element[:, None, None])
        return packed(np.broadcast_to(allowed, (len(q), *size)))

    def contains(self, q: Int64, k: Int64, origin: Origin) -> Bool:
        shape = np.broadcast_shapes(q.shape, k.shape)
        return np.broadcast_to(self.evaluate(q, k, np.full(1, origin.element, np.int64)), shape)
