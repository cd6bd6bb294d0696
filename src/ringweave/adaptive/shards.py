"""Where a rank's tokens stand, as runs of them that are consecutive."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from ..parallel import ContextParallel


class Stretch(NamedTuple):
    """Tokens [begin, end) of a shard, which stand side by side from a position on."""

    begin: int
    end: int
    position: int


def stretches(context: ContextParallel | None, tokens: int) -> list[Stretch]:
    """Split a rank's tokens where their positions are not consecutive; padding is left out."""
    if context is None:
        return [Stretch(0, tokens, 0)]
    positions = context.positions.numpy()
    positions = positions[positions < tokens]
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    bounds = [0, *cuts.tolist(), len(positions)]
    return [Stretch(a, b, int(positions[a])) for a, b in itertools.pairwise(bounds) if b > a]
