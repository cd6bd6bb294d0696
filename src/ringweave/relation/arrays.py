"""Arrays of int64: lists of ranges, and numbers for distinct values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
Words = NDArray[np.uint32]
_RADIX_LIMIT = 2**62


def listed(first: Int64, count: Int64) -> tuple[Int64, Int64]:
    """Return the pairs (i, x) with first[i] <= x < first[i] + count[i], as two arrays."""
    count = np.maximum(count, 0)
    line = np.repeat(np.arange(len(count)), count)
    return line, np.arange(len(line)) - np.repeat(np.cumsum(count) - count - first, count)


def combine_ids(*parts: Int64) -> Int64:
    """Combine numbers to one number >= 2 per element; numbers are equal exactly if all parts are (mixed radix)."""
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


def distinct(numbers: Int64) -> tuple[Int64, Int64]:
    """Return a place of each distinct number, in ascending order, and which of these each number equals."""
    if not len(numbers):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    low = int(numbers.min())
    size = int(numbers.max()) - low + 1
    if size > 8 * len(numbers) + 1024:
        _, first, like = np.unique(numbers, return_index=True, return_inverse=True)
        return first, like.reshape(-1)
    # the numbers are dense: a table of them needs no sort
    place = np.full(size, -1, np.int64)
    place[numbers - low] = np.arange(len(numbers))
    used = np.flatnonzero(place >= 0)
    first = place[used]
    place[used] = np.arange(len(used))
    return first, place[numbers - low]


def number_rows(rows: NDArray[Any]) -> Int64:
    """Number the distinct rows of an array from 0."""
    if not rows.shape[1]:
        return np.zeros(len(rows), np.int64)
    each = np.ascontiguousarray(rows).view(f"V{rows.itemsize * rows.shape[1]}").ravel()
    known: dict[Any, int] = {}
    return np.fromiter((known.setdefault(row, len(known)) for row in each.tolist()), np.int64, len(each))


def padded(line: Int64, values: Int64, lines: int, filler: int = 0) -> Int64:
    """Arrange values of ascending lines as rows of equal length, (lines, most values of a line)."""
    count = np.bincount(line, minlength=lines)
    _, slot = listed(np.zeros(lines, np.int64), count)
    rows = np.full((lines, int(count.max(initial=0))), filler, np.int64)
    rows[line, slot] = values
    return rows


def packed(dense: Bool) -> Words:
    """Pack bools (n, rows, columns) into words of 32 columns, the lowest bit first."""
    n, rows, columns = dense.shape
    out = np.zeros((n, rows, -(-columns // 32) * 4), np.uint8)
    out[:, :, : -(-columns // 8)] = np.packbits(dense, axis=2, bitorder="little")
    return out.view("<u4")


def unpacked(words: Words, columns: int) -> Bool:
    """Reverse :func:`packed`."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=2, bitorder="little")
    return bits[:, :, :columns].view(np.bool_)
