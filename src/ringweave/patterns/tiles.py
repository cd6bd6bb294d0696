"""Tiles and key ranges as arrays, and class numbers of tiles; tiles of one class have the same mask."""

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
    """A padded list (axis 1) of key ranges [start, stop) for each query tile (axis 0); start >= stop is padding."""

    start: Int64
    stop: Int64

    @staticmethod
    def of(*pairs: tuple[Int64 | int, Int64 | int], rows: int) -> Ranges:
        """Stack pairs of starts and stops, each an array over rows or a number for all rows."""
        start, stop = np.empty((2, rows, len(pairs)), np.int64)
        for i, (first, end) in enumerate(pairs):
            start[:, i], stop[:, i] = first, end
        return Ranges(start, stop)

    def cost(self) -> int:
        """Count the tokens in the ranges, a measure of the candidate tiles that they give."""
        return int(np.maximum(self.stop - self.start, 0).sum())


def combine_ids(*parts: Int64) -> Int64:
    """Combine numbers to one class >= 2 per element; classes are equal exactly if all parts are (mixed radix)."""
    total = np.zeros(parts[0].shape, np.int64)
    size = 1
    for part in parts if total.size else ():
        low = int(part.min())
        width = int(part.max()) - low + 1
        if width == 1:
            continue
        if size * width >= _RADIX_LIMIT:
            kinds, total = np.unique(total, return_inverse=True)
            size = len(kinds)
            kinds, part = np.unique(part, return_inverse=True)
            low, width = 0, len(kinds)
        total = total * width + (part - low) if size > 1 else np.subtract(part, low, dtype=np.int64)
        size *= width
    return total + 2


def unique_ids(numbers: Int64) -> tuple[Int64, Int64]:
    """Return a place of each distinct number, in ascending order, and which of these each number equals."""
    order = numbers.argsort()
    ascending = numbers[order]
    new = np.zeros(len(order), np.int64)
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    like = np.empty_like(order)
    like[order] = new.cumsum()
    new[:1] = 1
    return order[new.nonzero()[0]], like


def number_classes(empty: NDArray[np.bool_], full: NDArray[np.bool_], *parts: Int64) -> Int64:
    """Classify tiles as empty or full, and the others by ``parts``, the numbers that determine their mask."""
    keys = full.astype(np.int64)  # FULL is 1, EMPTY 0
    partial = (~(empty | full)).nonzero()[0]
    if len(partial):
        keys[partial] = combine_ids(*(part[partial] for part in parts))
    return keys


def multiples(q_lo: Int64, q_hi: Int64, nk: int, period: int) -> Ranges:
    """Return the ranges of keys at distances that are multiples of a period; all keys if the period is short."""
    width = int((q_hi - q_lo).max(initial=1))
    if period <= 2 * width:
        return Ranges.of((0, nk), rows=len(q_lo))
    # one range per multiple, as wide as the query tile
    first = (q_lo % period)[:, None] + np.arange(-1, -(-nk // period))[None, :] * period
    return Ranges(np.clip(first, 0, nk), np.clip(first + (q_hi - q_lo)[:, None], 0, nk))


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """Intersect ranges pair by pair; return the smaller operand, also a superset, if there are too many pairs."""
    if min(a.start.shape[1], b.start.shape[1]) > 1 and a.start.shape[1] * b.start.shape[1] > 256:
        return a if a.cost() <= b.cost() else b
    start = np.maximum(a.start[:, :, None], b.start[:, None, :]).reshape(len(a.start), -1)
    stop = np.minimum(a.stop[:, :, None], b.stop[:, None, :]).reshape(len(a.start), -1)
    if start.shape[1] > 1:
        used = np.flatnonzero((stop > start).any(0))
        used = used if len(used) else np.zeros(1, np.int64)
        start, stop = start.take(used, 1), stop.take(used, 1)
    return Ranges(start, stop)


class StridedView(NamedTuple):
    """Heads (start, stop, step), and the positions congruent to ``offset`` modulo ``rate``."""

    heads: tuple[int, int, int]
    rate: int
    offset: int
