"""Tile sizes: the numbers of queries and keys in a tile of a plan."""

from __future__ import annotations

import numpy as np

from ..errors import ShapeError, shown
from ..patterns import Pattern

DEFAULT_TILE_SIZE = 128
#: Longest side of a tile.
MOST_SIDE = 1024
# Block sizes that are used as tile sizes; the overhead of smaller tiles is too large.
_BLOCK_TILE_SIZES = (32, 128)


def default_tile_size(n: int) -> int:
    """Return the tile size for a length: 128, or the least power of two >= 16 that covers a shorter sequence."""
    return min(DEFAULT_TILE_SIZE, max(16, 1 << (n - 1).bit_length()))


def check_tile_size(tile: object) -> tuple[int, int]:
    """Check a tile size, a number or (queries, keys), and return (q_tile, kv_tile).

    Raises:
        ShapeError: A number is not a multiple of 16, or too large.
    """
    both = tile if isinstance(tile, (tuple, list)) else (tile, tile)
    if len(both) == 2 and all(_fits(size) for size in both):
        return int(both[0]), int(both[1])
    raise ShapeError("tile", shown(tuple(both)), f"multiples of 16 from 16 to {MOST_SIDE}, one or two", "Use 128.")


def _fits(size: object) -> bool:
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        return False
    return 16 <= int(size) <= MOST_SIDE and int(size) % 16 == 0


def tile_size_of(tile: int | tuple[int, int] | None, pattern: Pattern, nq: int, nk: int) -> tuple[int, int]:
    """Return (q_tile, kv_tile) for a number, both or None; None uses the pattern's own tile size if it is suitable."""
    if tile is None:
        own = pattern.tile_size
        if own is not None and _BLOCK_TILE_SIZES[0] <= own <= _BLOCK_TILE_SIZES[1] and own % 16 == 0:
            return own, own
        return default_tile_size(nq), default_tile_size(nk)
    return check_tile_size(tile)
