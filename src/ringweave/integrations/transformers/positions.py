"""The positions of a call's queries and keys, and the patterns of padding and of functions that are not read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cache import PATTERNS
from ...errors import PatternError, UnsupportedError, in_a_line, shown
from ...patterns import Documents, Full, KeyPadding, Pattern, Segments, Sinks, from_mask_mod
from ...patterns.algebra import And, join
from ...patterns.recorded import unrecorded
from ...patterns.traced import bounds_of_keys, of_distances, of_documents
from ...trace.graph import UntraceableError
from ...trace.relation import ALL, Runs
from ...types import Place

# estimated size of a pattern of segments
_BYTES = 2**10


class MisreadError(UntraceableError):
    """A function computes another mask for tensors than for symbols, or raises an error, so it has no graph."""


class Chunks(NamedTuple):
    """Chunks of consecutive tokens.

    Attributes:
        length: Tokens in a chunk.
        origins: First position of a chunk in each batch element; None for 0.
    """

    length: int
    origins: tuple[int, ...] | None


class Positions:
    """The positions of a call's queries and keys; patterns relate their indices.

    Args:
        batch: Number of batch elements.
        nq: Number of queries.
        nk: Number of keys.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
    """

    def __init__(self, batch: int, nq: int, nk: int, q_offset: int | Tensor, kv_offset: int):
        self.batch, self.nq, self.nk, self.kv_offset = batch, nq, nk, kv_offset
        self.row: Tensor | None = None
        if isinstance(q_offset, Tensor):
            if nq != 1:
                got = f"{nq} queries at a position that is a tensor"
                remedy = "Do not compile the prefill, or give it a cache that knows its length."
                raise UnsupportedError("q_offset", got, "an int, or one query", remedy)
            # one query: the pattern is bounds of keys, which may stay on the device; any query index will do
            self.row = q_offset - kv_offset
            self.first = nk - 1
        else:
            self.first = q_offset - kv_offset

    def place(self, device: torch.device) -> Place:
        """Return the indices of a mask function, which has one head, with tables on a device."""
        return Place(self.batch, 1, self.nq, self.nk, self.first + self.kv_offset, self.kv_offset, device=device)

    def at_distances(self, runs: Runs) -> Pattern | None:
        """Return the pattern of some distances between query and key; None if they are too many intervals."""
        if self.row is None:
            return of_distances(runs, self.first - self.nk + 1, self.first + self.nq - 1)
        pattern: Pattern = Full().__invert__()
        for least, most in runs:
            stop = self.nk if least == -math.inf else (self.row - int(least) + 1).clamp(0, self.nk).view(1)
            start = 0 if most == math.inf else (self.row - int(most)).clamp(0, self.nk).view(1)
            pattern = pattern | (Full() if (least, most) == ALL.runs[0] else KeyPadding(stop, start))
        return pattern

    def in_chunks(self, runs: Runs, chunks: Chunks) -> Pattern | None:
        """Return the pattern of some distances inside of chunks; None where another one must be found."""
        n, first, length = self.nk, self.first, chunks.length
        origins = (0,) if chunks.origins is None else chunks.origins[: self.batch]
        near = self.at_distances(runs)
        inside = self.row is None and 0 <= first <= n - self.nq
        if near is None or not inside or (chunks.origins is not None and len(origins) < self.batch):
            return None
        # tokens of the first key's chunk that come before it
        before = [(self.kv_offset - origin) % length for origin in origins]
        if max(before) + n <= length:
            return near
        if self.nq == 1:
            starts = [first - (first + each) % length for each in before]
            stops = torch.tensor([min(start + length, n) for start in starts], device="cpu")
            return joined([near, KeyPadding(stops, torch.tensor([max(start, 0) for start in starts], device="cpu"))])
        if any(before):
            at = torch.tensor(before, device="cpu")[:, None] + torch.arange(n, device="cpu")
            return near & Documents.own(ids=at // length).read()
        # one object for equal patterns, as of distances
        key = "chunks", length, near.spec
        found: Pattern | None = PATTERNS.get(key)
        if found is None:
            found = near & Segments(length)
            PATTERNS.put(key, found, _BYTES)
        return found

    def documents(self, numbers: Tensor) -> Documents:
        """Return the documents of the keys by the numbers (B, positions) of all tokens."""
        return of_documents(numbers[: self.batch, self.kv_offset : self.kv_offset + self.nk])

    def padding(self, mask: Tensor) -> tuple[KeyPadding, Sinks | None] | None:
        """Return the patterns of the keys that exist, bounds and perhaps a mask, or None if all are known to exist.

        Padding on the left and on the right becomes bounds of keys; padding between keys also needs a mask of keys.
        Both restrict keys only: a query that is padding attends keys like any other query.

        Args:
            mask: (B or 1, positions) bool; missing positions at the end do not exist.
        """
        if mask.ndim != 2 or (mask.shape[0] != 1 and mask.shape[0] != self.batch):
            wanted = f"({self.batch}, tokens)"
            raise PatternError("attention_mask", shown(mask), wanted, "Pass the padding of each element.")
        missing = self.kv_offset + self.nk - mask.shape[1]
        mask = mask[:, self.kv_offset : self.kv_offset + self.nk].bool()
        if missing > 0:
            mask = torch.nn.functional.pad(mask, (0, missing))
        return None if not torch.compiler.is_compiling() and bool(mask.all()) else bounds_of_keys(mask)

    def function(self, function: Callable[..., Any], why: Exception) -> Pattern:
        """Return the pattern of a mask function that is called with index tensors, tile by tile, during planning.

        Raises:
            UnsupportedError: torch.compile traces the call, or the query's position is a tensor.
        """
        if torch.compiler.is_compiling() or self.row is not None:
            got = f"a function that cannot be read as a pattern ({in_a_line(why)})"
            remedy = "Compile the model without fullgraph, or write the mask with comparisons of indices only."
            raise UnsupportedError("mask_function", got, "comparisons of indices and of tables", remedy)
        offset = self.kv_offset

        def of_places(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            result: Tensor = function(b, h, q + offset, k + offset)
            return result

        return unrecorded(of_places, str(why)) if isinstance(why, MisreadError) else from_mask_mod(of_places)


def joined(patterns: list[Pattern]) -> Pattern:
    """Intersect patterns, with one KeyPadding and one mask of keys: torch.compile cannot compare two of them."""
    pattern: Pattern | None = None
    bounds: KeyPadding | None = None
    mask: Tensor | None = None
    for each in patterns:
        for part in each.parts if isinstance(each, And) else (each,):
            if isinstance(part, KeyPadding):
                bounds = part if bounds is None else _overlap(bounds, part)
            elif isinstance(part, Sinks) and part.tables:
                (known,) = part.tables
                mask = known if mask is None else mask & known
            else:
                pattern = part if pattern is None else pattern & part
    found = [each for each in (pattern, bounds, None if mask is None else Sinks.own(mask)) if each is not None]
    return found[0] if len(found) == 1 else join(And, *(found or (Full(),)))


def _overlap(one: KeyPadding, other: KeyPadding) -> KeyPadding:
    stop = _bound(one.stop).minimum(_bound(other.stop))
    # for an empty range start must not exceed stop
    return KeyPadding(stop, _bound(one.start).maximum(_bound(other.start)).minimum(stop))


def _bound(value: int | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
