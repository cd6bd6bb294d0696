"""Intervals of tiles on a line, on which strips (rows of tiles) follow one another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arrays import Int64, listed


class Line(NamedTuple):
    """Ascending intervals [start, stop) that do not overlap."""

    start: Int64
    stop: Int64

    def places(self) -> Int64:
        """List the places in the intervals."""
        return listed(self.start, self.stop - self.start)[1]

    def within(self, strips: Int64, width: int) -> tuple[Int64, Int64]:
        """Return the first and the last place, as columns [first, end), of the intervals in each strip."""
        begin = strips * width
        first = np.searchsorted(self.stop, begin, "right")
        last = np.searchsorted(self.start, begin + width, "left") - 1
        used = first <= last
        if not len(self.start):
            return np.zeros_like(strips), np.zeros_like(strips)
        first, last = np.minimum(first, len(self.start) - 1), np.maximum(last, 0)
        low, high = np.maximum(self.start[first] - begin, 0), np.minimum(self.stop[last] - begin, width)
        return np.where(used, low, 0), np.where(used, high, 0)


_ZERO = np.zeros(1, np.int64)
NONE = Line(np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(*lines: Line) -> Line:
    """Return the places in any of some lists of intervals, which may overlap and stand in any order."""
    some = [line for line in lines if len(line.start)]
    if not some:
        return NONE
    start, stop = (np.concatenate(sides) if len(some) > 1 else sides[0] for sides in zip(*some, strict=True))
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, stop = start[order], stop[order]
    stop = np.maximum.accumulate(stop)
    gap = np.flatnonzero(start[1:] > stop[:-1]) + 1
    if len(gap) == len(start) - 1:
        return Line(start, stop)
    return Line(start[np.concatenate([_ZERO, gap])], stop[np.concatenate([gap, [len(start)]]) - 1])


def complement(line: Line, length: int) -> Line:
    """Return the places in [0, length) outside of the intervals."""
    start, stop = np.concatenate([_ZERO, line.stop]), np.concatenate([line.start, [length]])
    used = start < stop
    return Line(start[used], stop[used])


def meet(a: Line, b: Line) -> Line:
    """Return the places in both."""
    if len(b.start) < len(a.start):
        a, b = b, a
    first = np.searchsorted(b.stop, a.start, "right")
    i, j = listed(first, np.searchsorted(b.start, a.stop, "left") - first)
    return Line(np.maximum(a.start[i], b.start[j]), np.minimum(a.stop[i], b.stop[j]))


def by_strip(line: Line, width: int) -> tuple[Int64, Int64, Int64]:
    """Cut intervals at the ends of strips; return the strip of each, and its columns [first, end)."""
    first = line.start // width
    i, strip = listed(first, (line.stop - 1) // width - first + 1)
    base = strip * width
    return strip, np.maximum(line.start[i] - base, 0), np.minimum(line.stop[i] - base, width)
