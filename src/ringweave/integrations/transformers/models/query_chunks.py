"""Chunks of queries for which an indexer scores all keys."""

from __future__ import annotations

from collections.abc import Iterator

# bytes of the scores of one chunk of queries
_CHUNK = 2**24


def at_once(bytes_of_one: int) -> int:
    """Return the number of queries of a chunk with a bounded number of bytes."""
    return max(1, _CHUNK // max(1, bytes_of_one))


def chunks(queries: int, bytes_of_one: int) -> Iterator[slice]:
    """Iterate over ranges of queries, each with a bounded number of bytes."""
    step = at_once(bytes_of_one)
    return (slice(first, min(first + step, queries)) for first in range(0, queries, step))
