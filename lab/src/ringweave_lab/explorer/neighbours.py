"""The keys that one query of a grid attends, as an image of the grid."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ringweave.patterns import Pattern
from ringweave.patterns.boxes import Grid
from ringweave.patterns.grids import OnGrid
from ringweave.patterns.local import Neighborhood

_SIDE = 128  # maximum number of cells along a side of a frame
_FRAMES = 12  # maximum number of frames of a video that are shown
_AXES = ("frame", "row", "column")


def grid_of(pattern: Pattern) -> Grid | None:
    """Return the first grid that a pattern is made for; None if it has no grid.

    A ``Neighborhood`` counts as a grid of one axis if the pattern has no other grid.
    """
    return _on_grid(pattern) or _on_line(pattern)


def _on_grid(pattern: Pattern) -> Grid | None:
    if isinstance(pattern, OnGrid):
        return pattern.grid
    return next((grid for part in pattern.parts_within() if (grid := _on_grid(part))), None)


def _on_line(pattern: Pattern) -> Grid | None:
    if isinstance(pattern, Neighborhood):
        return Grid(pattern.tokens)
    return next((grid for part in pattern.parts_within() if (grid := _on_line(part))), None)


def shades(shares: NDArray[np.float64]) -> str:
    """Encode shares as bytes in base64: 0 means no pair, 255 every pair, and a share in between gets neither value."""
    level = np.clip(np.round(254 * shares), 1, 254)
    level = np.where(shares <= 0, 0, np.where(shares >= 1, 255, level))
    return base64.b64encode(level.astype(np.uint8).tobytes()).decode("ascii")


def neighbours(pattern: Pattern, grid: Grid, heads: Sequence[int], pixel: str) -> dict[str, Any]:
    """Draw the keys that one query attends.

    Args:
        pattern: A relation on the grid's tokens.
        grid: The order of tokens.
        heads: The heads to draw, one image each.
        pixel: Coordinates of the query, such as ``3,5``. A coordinate beyond the border is moved to the border; any
            other text means the centre.
    Returns:
        Plain values for JSON. ``panels`` has one entry per head, with the number of attended keys and a list of frames;
        an image has one frame, and a grid of one axis is one frame in which the tokens are wrapped row by row.
    Example:
        >>> grid = rw.Grid((4, 4))
        >>> drawn = neighbours(rw.GridNeighborhood(grid, 3), grid, [0], "0,9")
        >>> drawn["place"], drawn["panels"][0]["attended"]
        ('row 0, column 3', 9)
    """
    place = _place(pixel, grid.shape)
    # row-major number of each token
    order = grid.flatten(torch.arange(grid.tokens).view(grid.shape), 0)
    token = int((order == int(np.ravel_multi_index(place, grid.shape))).nonzero())
    volume: tuple[int, ...]
    query: tuple[int, ...]
    if len(grid.shape) == 1:
        width = 2 ** round(math.log2(grid.tokens) / 2)
        volume, query = (1, -(-grid.tokens // width), width), (0, *divmod(token, width))
    else:
        lead = (1,) * (3 - len(grid.shape))
        volume, query = (*lead, *grid.shape), (*(0 for _ in lead), *place)
    first = max(min(query[0] - _FRAMES // 2, volume[0] - _FRAMES), 0)
    shown = range(first, min(first + _FRAMES, volume[0]))
    side = -(-max(volume[1:]) // _SIDE)
    panels = []
    for head in heads:
        allowed = pattern.select(0, head).allows(torch.tensor([token]), torch.arange(grid.tokens))
        image = grid.unflatten(allowed.broadcast_to((grid.tokens,)).contiguous(), 0).numpy().reshape(-1)
        frames = np.append(image, np.zeros(math.prod(volume) - len(image), np.bool_)).reshape(volume)
        panels.append({"attended": int(image.sum()), "frames": [shades(_cells(frames[t], side)) for t in shown]})
    names = _AXES[-len(place) :] if len(place) > 1 else ("token",)
    return {
        "pixel": list(place),
        "place": ", ".join(f"{name} {at}" for name, at in zip(names, place, strict=True)),
        "shape": list(grid.shape),
        "token": token,
        "side": side,
        "rows": -(-volume[1] // side),
        "cols": -(-volume[2] // side),
        "width": volume[2],
        "first": first,
        "query": [query[0] - first, query[1] // side, query[2] // side],
        "panels": panels,
    }


def _place(text: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != len(shape) or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        return tuple(n // 2 for n in shape)
    return tuple(min(int(part), n - 1) for part, n in zip(parts, shape, strict=True))


def _cells(frame: NDArray[np.bool_], side: int) -> NDArray[np.float64]:
    """Return the share of attended pixels in each square of ``side`` x ``side`` pixels."""
    rows, cols = (np.arange(0, n, side) for n in frame.shape)
    sums = np.add.reduceat(np.add.reduceat(frame.astype(np.float64), rows, 0), cols, 1)
    ones = np.add.reduceat(np.add.reduceat(np.ones(frame.shape), rows, 0), cols, 1)
    return np.asarray(sums / ones)
