"""Tiles and key ranges as arrays, and the class numbers that say which tiles hold the same mask."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
EMPTY, FULL = 0, 1
_RADIX_LIMIT = 2**62


class Tiles(NamedTuple):
    """Tiles as token ranges: queries [q_lo, q_hi) by keys [k_lo, k_hi); arrays of one length."""

    q_lo: Int64
    q_hi: Int64
    k_lo: Int64
    k_hi: Int64


class Ranges(NamedTuple):
    """Per query tile (axis 0) a padded list (axis 1) of key ranges [start, stop); start >= stop is padding."""

    start: Int64
    stop: Int64

    @staticmethod
    def of(*pairs: tuple[Int64 | int, Int64 | int], rows: int) -> Ranges:
        """Stack per-row ranges, broadcasting scalars."""
        start = np.stack([np.broadcast_to(np.asarray(a, np.int64), (rows,)) for a, _ in pairs], 1)
        stop = np.stack([np.broadcast_to(np.asarray(b, np.int64), (rows,)) for _, b in pairs], 1)
        return Ranges(start, stop)

    def cost(self) -> int:
        """Count tokens covered: the size of the candidate list that this superset would give."""
        return int(np.maximum(self.stop - self.start, 0).sum())


def mix(*parts: Int64) -> Int64:
    """Mix numbers to one class >= 2 per element, equal exactly where all parts are equal (mixed radix, no hashing)."""
    total = np.zeros(parts[0].shape, np.int64)
    size = 1
    for part in parts:
        if part.size == 0:
            continue
        low = int(part.min())
        width = int(part.max()) - low + 1
        if size * width >= _RADIX_LIMIT:
            kinds, total = np.unique(total, return_inverse=True)
            size = len(kinds)
            kinds, part = np.unique(part, return_inverse=True)
            low, width = 0, len(kinds)
        total = total * width + (part - low)
        size *= width
    return total + 2


def classes(empty: NDArray[np.bool_], full: NDArray[np.bool_], *parts: Int64) -> Int64:
    """Classify tiles by the two decided cases and, for the rest, what the mask depends on."""
    keys = np.where(full, FULL, EMPTY).astype(np.int64)
    partial = ~(empty | full)
    if partial.any():
        keys[partial] = mix(*(np.broadcast_to(part, keys.shape)[partial] for part in parts))
    return keys


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """Intersect ranges; the smaller operand where there are too many pairs to look at."""
    # every pair of ranges while that stays small; else the smaller superset is superset enough
    if a.start.shape[1] * b.start.shape[1] > 256:
        return a if a.cost() <= b.cost() else b
    start = np.maximum(a.start[:, :, None], b.start[:, None, :]).reshape(len(a.start), -1)
    stop = np.minimum(a.stop[:, :, None], b.stop[:, None, :]).reshape(len(a.start), -1)
    used = np.flatnonzero((stop > start).any(0))
    used = used if len(used) else np.zeros(1, np.int64)
    return Ranges(start[:, used], stop[:, used])
