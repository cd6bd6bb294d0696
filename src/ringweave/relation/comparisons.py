"""Zones of comparisons: the pairs for which a value of the query and a value of the key compare.

A comparison cuts rectangles of queries and keys into smaller ones. Queries with equal values are cut as one. So several
comparisons under ``&`` cut what the ones before them leave, and never list the pairs that another one excludes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .arrays import Int64, listed
from .node import ELEMENT


class Runs(NamedTuple):
    """Runs of equal values in the positions of queries or of keys, ascending, on the axis of all batch elements.

    Attributes:
        start: First position of each run.
        stop: End of each run, exclusive.
        value: Value of each run, or its row of values.
    """

    start: Int64
    stop: Int64
    value: NDArray[Any]

    @staticmethod
    def of(table: NDArray[Any], first: int = 0) -> Runs:
        """Return the runs of a table (B, N), or (B, N, columns), of positions that begin with ``first``."""
        rows, n = table.shape[:2]
        edge = np.ones((rows, n), np.bool_)
        differs = table[:, 1:] != table[:, :-1]
        edge[:, 1:] = differs if table.ndim == 2 else differs.any(-1)
        place = np.flatnonzero(edge)
        base, value = place // n * (ELEMENT - n) + first, table.reshape(rows * n, *table.shape[2:])[place]
        return Runs(place + base, np.append(place[1:], rows * n) + base, value)

    def valued(self, value: Int64) -> Runs:
        """Return runs with other values; neighbours with one value merge, also over the end of a batch element."""
        first = np.flatnonzero(np.append(True, value[1:] != value[:-1]))
        return Runs(self.start[first], self.stop[np.append(first[1:], len(value)) - 1], value[first])


class Rectangles(NamedTuple):
    """Disjoint rectangles of queries and keys, ascending by queries, then by keys; queries are equal or apart.

    Attributes:
        q0: First query of each.
        q1: End of its queries, exclusive.
        k0: First key.
        k1: End of its keys, exclusive.
    """

    q0: Int64
    q1: Int64
    k0: Int64
    k1: Int64

    @staticmethod
    def whole(batch: int, first: int, nq: int, nk: int) -> Rectangles:
        """Return a rectangle for each batch element: nq queries from position ``first`` on, and nk keys from 0 on."""
        base = np.arange(batch) * ELEMENT
        return Rectangles(base + first, base + first + nq, base, base + nk)

    def runs(self, q: Runs, most: int) -> tuple[Int64, Int64] | None:
        """Return the pairs of a rectangle and a run of queries that meet; None if they are more than ``most``."""
        first = np.searchsorted(q.stop, self.q0, "right")
        count = np.searchsorted(q.start, self.q1, "left") - first
        return None if int(count.sum()) > most else listed(first, count)

    def cut(self, number: Int64, q: Runs, run: Int64, low: Int64, high: Int64) -> Rectangles:
        """Return parts of rectangles: of each given number, the queries of a run with the keys [low, high)."""
        k0, k1 = np.maximum(self.k0[number], low), np.minimum(self.k1[number], high)
        used = k0 < k1
        number, run, k0, k1 = number[used], run[used], k0[used], k1[used]
        q0, q1 = np.maximum(self.q0[number], q.start[run]), np.minimum(self.q1[number], q.stop[run])
        if ((q0[1:] < q0[:-1]) | (q0[1:] == q0[:-1]) & (k0[1:] < k0[:-1])).any():
            order = np.lexsort((k0, q0))
            q0, q1, k0, k1 = (side[order] for side in (q0, q1, k0, k1))
        if not len(q0):
            return Rectangles(q0, q1, k0, k1)
        # neighbours merge
        first = np.flatnonzero(np.append(True, (q0[1:] != q0[:-1]) | (k0[1:] != k1[:-1])))
        return Rectangles(q0[first], q1[first], k0[first], k1[np.append(first[1:], len(q0)) - 1])

    def zones(self) -> tuple[Int64, Int64]:
        """Return the rectangles as zones, and the batch element of each.

        Successive queries merge if each of them has one run of keys, and the ends of these stay or move by one.

        Returns:
            (zones, 6): q0, q1, k0, k1, d0 and d1 of each zone, positions counted in the batch element. Zones with equal
            queries have equal bands. And (zones,).
        """
        group = np.append(True, self.q0[1:] != self.q0[:-1])[: len(self.q0)]
        alone = group & np.append(group[1:], True)[: len(group)]
        single = self.q1 - self.q0 == 1
        low, high = np.diff(self.k0), np.diff(self.k1)
        follows = alone[1:] & alone[:-1] & (self.q0[1:] == self.q1[:-1]) & (low >> 1 == 0) & (high >> 1 == 0)
        # ends of several queries in a row stay where they are
        follows &= (single[1:] & single[:-1]) | (low + high == 0)
        first = _stretches(np.where(follows, 2 * low + high, -1), len(group))
        last = np.append(first[1:], len(group)) - 1 if len(first) else first
        q0, q1, k0, k1 = self.q0[first], self.q1[last], self.k0[first], self.k1[last]
        d0, d1 = (
            np.where(side[first] == side[last], free, side[first] - q0)
            for side, free in ((self.k0, -ELEMENT), (self.k1, ELEMENT))
        )
        element = q0 + ELEMENT // 2 >> 32
        base = element * ELEMENT
        return np.stack([q0 - base, q1 - base, k0 - base, k1 - base, d0, d1], 1), element


def _stretches(code: Int64, items: int) -> Int64:
    """Return the first of each stretch of items, in which each follows the one before in one way.

    Args:
        code: (items - 1,) how each item but the first follows the one before; below 0: it begins a stretch.
        items: Number of items.
    """
    if items < 2:
        return np.arange(items)
    apart = code < 0
    other = ~apart & np.append(False, code[1:] != code[:-1])
    # the second item of a stretch follows in any way, so no stretch begins right after another
    place = np.arange(len(code))
    before = np.maximum.accumulate(np.where(other, 0, place))
    odd = (place - before) % 2 == 1
    begins = apart | (other & (odd != apart[before]))
    return np.append(0, np.flatnonzero(begins) + 1)


def _distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct values, ascending; np.unique hashes them, which takes longer where they are in order."""
    ordered = np.sort(values)
    found: NDArray[Any] = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return found


class Comparison(Protocol):
    """A comparison of values of queries and keys.

    Attributes:
        size: About as many rectangles as it cuts all pairs into.
    """

    size: int

    def cut(self, pairs: Rectangles, most: int) -> Rectangles | None:
        """Return the parts of rectangles with the pairs that hold; None if they are more than ``most``."""


class AtMost:
    """The pairs with ``u <= v``, or with ``no`` the others, where u is a value of the query and v one of the key.

    The keys are cut to pieces in which v ascends or descends. In a piece, the keys of a query are one interval.
    """

    def __init__(self, u: Runs, v: Runs, no: bool = False):
        values = _distinct(v.value)
        self.no, self.count = no, len(values)
        # u <= v exactly if the number of values below u is at most that below v
        self.q = u.valued(np.searchsorted(values, u.value))
        rank = np.searchsorted(values, v.value)
        # a piece may go over the end of a batch element, since rectangles are cut at it
        rises = (rank[1:] > rank[:-1]).astype(np.int64)
        self.first = _stretches(rises, len(rank))
        self.last = np.append(self.first[1:], len(rank))
        self.falls = np.append(rises, -1)[self.first] == 0
        number = np.repeat(np.arange(len(self.first)), self.last - self.first)
        # ascending: the pieces one after the other, and the values in each
        self.line = np.where(self.falls[number], self.count - 1 - rank, rank) + number * (self.count + 1)
        self.start, self.begin, self.end = v.start, v.start[self.first], v.stop[self.last - 1]
        self.size = len(self.q.start) * len(self.first)

    def cut(self, pairs: Rectangles, most: int) -> Rectangles | None:
        found = pairs.runs(self.q, most)
        if found is None:
            return None
        number, run = found
        first = np.searchsorted(self.end, pairs.k0, "right")
        count = (np.searchsorted(self.begin, pairs.k1, "left") - first)[number]
        if int(count.sum()) > most:
            return None
        of, piece = listed(first[number], count)
        number, run = number[of], run[of]
        rank, falls = self.q.value[run], self.falls[piece]
        bound = np.where(falls, self.count - rank, rank) + piece * (self.count + 1)
        place = np.searchsorted(self.line, bound)
        turn = np.where(place == self.last[piece], self.end[piece], self.start[np.minimum(place, len(self.start) - 1)])
        after = falls == self.no
        low, high = np.where(after, turn, self.begin[piece]), np.where(after, self.end[piece], turn)
        return pairs.cut(number, self.q, run, low, high)


class Listed:
    """The pairs for which the key's value is in the query's list.

    Args:
        q: Runs of queries; a value is the number of a list.
        number: Number of the list of each entry.
        entry: Entries of the lists, in any order and repeated or not.
        k: Runs of keys with their values.
    """

    def __init__(self, q: Runs, number: Int64, entry: NDArray[Any], k: Runs):
        values = _distinct(k.value)
        at = np.minimum(np.searchsorted(values, entry), len(values) - 1)
        # values of no key, and NaN, are left out
        known = values[at] == entry
        pairs = np.unique(number[known] * len(values) + at[known])
        lists = int(q.value.max()) + 1
        self.q, self.k, self.rank = q, k, pairs % len(values)
        self.count = np.bincount(pairs // len(values), minlength=lists)
        self.first = np.cumsum(self.count) - self.count
        rank = np.searchsorted(values, k.value)
        self.order = np.argsort(rank, kind="stable")
        self.line = rank[self.order] * (len(rank) + 1) + self.order
        each = np.bincount(rank, minlength=len(values))[self.rank]
        total = np.bincount(pairs // len(values), each, lists)
        self.size = int(total[q.value].sum())

    def cut(self, pairs: Rectangles, most: int) -> Rectangles | None:
        found = pairs.runs(self.q, most)
        if found is None:
            return None
        number, run = found
        count = self.count[self.q.value[run]]
        if int(count.sum()) > most:
            return None
        of, entry = listed(self.first[self.q.value[run]], count)
        number, run = number[of], run[of]
        # the runs of keys with an entry's value, in the rectangle
        low, high = np.searchsorted(self.k.stop, pairs.k0, "right"), np.searchsorted(self.k.start, pairs.k1, "left")
        base = self.rank[entry] * (len(self.order) + 1)
        first, stop = (np.searchsorted(self.line, base + side[number]) for side in (low, high))
        if int((stop - first).sum()) > most:
            return None
        of, place = listed(first, stop - first)
        key = self.order[place]
        return pairs.cut(number[of], self.q, run[of], self.k.start[key], self.k.stop[key])
