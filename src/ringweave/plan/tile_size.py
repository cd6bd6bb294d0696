"""Tile sizes: the numbers of queries and keys in a tile of a plan."""

from __future__ import annotations

import numpy as np

from ..errors import ShapeError, shown
from ..patterns import Pattern

DEFAULT_TILE = 128
# Sides of blocks that are used as tile sides; the overhead of smaller tiles is too large.
_BLOCK_SIDES = (32, 128)


def default_tile(n: int) -> int:
    """Return the tile side for a length: 128, or the least power of two >= 16 that covers a shorter sequence."""
    return min(DEFAULT_TILE, max(16, 1 << (n - 1).bit_length()))


def check_tile(tile: object) -> tuple[int, int]:
    """Check one tile side or both, and return (q_tile, kv_tile).

    Raises:
        ShapeError: A side is not a multiple of 16, or too large.
    """
    sides = tile if isinstance(tile, (tuple, list)) else (tile, tile)
    if len(sides) == 2 and all(_is_side(side) for side in sides):
        return int(sides[0]), int(sides[1])
    raise ShapeError("tile", shown(tuple(sides)), "multiples of 16 from 16 to 1024, one or two", "Use 128.")


def _is_side(side: object) -> bool:
    if isinstance(side, bool) or not isinstance(side, (int, np.integer)):
        return False
    return 16 <= int(side) <= 1024 and int(side) % 16 == 0


def tile_sides(tile: int | tuple[int, int] | None, pattern: Pattern, nq: int, nk: int) -> tuple[int, int]:
    """Return (q_tile, kv_tile) for a side, both sides or None; None uses the pattern's block side if it is suitable."""
    if tile is None:
        side = pattern.block_side
        if side is not None and _BLOCK_SIDES[0] <= side <= _BLOCK_SIDES[1] and side % 16 == 0:
            return side, side
        return default_tile(nq), default_tile(nk)
    return check_tile(tile)
