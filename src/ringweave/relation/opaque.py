"""Relations that can only be evaluated token by token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .arrays import Int64, Words, combine_ids, packed
from .lines import NONE, Line
from .node import Frame, Node, Origin, Tiles

#: A function of positions of queries and keys, and of their batch elements: int64 that broadcast; it returns bool.
Evaluate = Callable[[Tensor, Tensor, Tensor], Tensor]


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
        # positions past the ends are clamped, since a function may index tables by them
        rows = np.minimum(tiles.q.lo[tiles.qi, None] + np.arange(size[0]), tiles.q.hi[tiles.qi, None] - 1)
        columns = np.minimum(tiles.k.lo[tiles.ki, None] + np.arange(size[1]), tiles.k.hi[tiles.ki, None] - 1)
        sides = rows[:, :, None], columns[:, None], tiles.q.element[tiles.qi, None, None]
        allowed = self.evaluate(*map(torch.from_numpy, sides))
        return packed(allowed.expand(len(rows), *size).numpy())

    def contains(self, q: Tensor, k: Tensor, origin: Origin) -> Tensor:
        shape = torch.broadcast_shapes(q.shape, k.shape)
        allowed = self.evaluate(q, k, torch.full((), origin.element, device=q.device))
        return allowed if allowed.shape == shape else allowed.expand(shape)
