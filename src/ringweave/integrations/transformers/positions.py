"""Conversion of a mask function's relation of positions to a pattern over the queries and keys of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...cache import PATTERNS
from ...errors import PatternError, UnsupportedError, in_a_line, shown
from ...patterns import Causal, Documents, Full, KeyPadding, Pattern, Sinks, SlidingWindow, from_mask_mod
from ...patterns.algebra import And
from .mask_reading import All, Any_, Chunks, Distances, Known, NotNegative, Relation, Same, Unread

# estimated size of a cached pattern per character of its text: it and each of its parts are an object with a text
_BYTES_OF_TEXT = 64


class Place:
    """The positions of a call's queries and keys; it converts relations of positions to patterns of their indices.

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

    # ---- relations ---------------------------------------------------------------------------------------------------

    def pattern(self, relation: Relation) -> Pattern:
        """Convert a relation of positions to a pattern of indices.

        Raises:
            Unread: The relation depends on another one that is missing.
        """
        if isinstance(relation, All):
            return self._every(relation.parts)
        if isinstance(relation, Any_):
            pattern = self.pattern(relation.parts[0])
            for part in relation.parts[1:]:
                pattern = pattern | self.pattern(part)
            return pattern
        return self._every((relation,))

    def packing(self, relation: Relation) -> Same | None:
        """Return the part of a relation that separates packed documents, or None."""
        parts = relation.parts if isinstance(relation, All) else (relation,)
        return next((part for part in parts if isinstance(part, Same)), None)

    def _every(self, parts: tuple[Relation, ...]) -> Pattern:
        packed = next((part for part in parts if isinstance(part, Same)), None)
        if any(isinstance(part, Chunks) and part.table is not None for part in parts) and packed is not None:
            # chunks are counted within documents, so they separate the documents too
            parts = tuple(part for part in parts if part is not packed)
        return joined([self._one(part, packed) for part in parts])

    def _one(self, part: Relation, packed: Same | None) -> Pattern:
        if isinstance(part, Distances):
            # within a document positions increase by one, so their differences are those of the indices
            if part.table is not None and packed is None:
                raise Unread("positions of packed sequences without their numbers")
            return self.near(part.runs)
        if isinstance(part, Same):
            return self.documents(part.table, part.known)
        if isinstance(part, Chunks):
            return self._chunks(part, packed)
        if isinstance(part, Known):
            known = self.padding(part.table)
            return Full() if known is None else known
        if isinstance(part, (All, Any_)):
            # a part of an intersection also restricts the unions and intersections in it
            inner = part if packed is None else type(part)(tuple(_beside(each, packed) for each in part.parts))
            return self.pattern(inner)
        assert isinstance(part, NotNegative)
        raise Unread("document numbers that are compared only with 0")

    def near(self, runs: tuple[tuple[int | None, int | None], ...]) -> Pattern:
        """Return the pairs with a distance (query - key) in one of the intervals."""
        if self.row is not None:
            pattern = _not(Full())
            for least, most in runs:
                stop = self.nk if least is None else (self.row - least + 1).clamp(0, self.nk).view(1)
                start = 0 if most is None else (self.row - most).clamp(0, self.nk).view(1)
                pattern = pattern | (Full() if least is None and most is None else KeyPadding(stop, start))
            return pattern
        if torch.compiler.is_compiling():
            return _intervals(runs)
        # drop bounds that no pair of the call reaches: dense patterns become Full, and decoding steps share a pattern
        nearest, farthest = self.first - self.nk + 1, self.first + self.nq - 1
        reached: tuple[tuple[int | None, int | None], ...] = ()
        for least, most in runs:
            low = None if least is None or least <= nearest else least
            reached += ((low, None if most is None or most >= farthest else most),)
        # return one object for equal intervals, because attention looks up a pattern's prepared call by identity
        same: Pattern | None = PATTERNS.get(("intervals", reached))
        if same is None:
            same = _intervals(reached)
            PATTERNS.put(("intervals", reached), same, len(same.spec) * _BYTES_OF_TEXT)
        return same

    def documents(self, table: Tensor, known: bool) -> Documents:
        """Return the pairs with equal numbers in a table (B, positions); if ``known``, without negative numbers."""
        if self.row is not None:
            raise Unread("packed sequences with a static cache")
        if self.kv_offset + self.nk > table.shape[-1]:
            raise Unread(f"numbers of {table.shape[-1]} tokens for {self.kv_offset + self.nk}")
        ids = table[:, self.kv_offset : self.kv_offset + self.nk]
        return Documents(ids=ids if known else ids - ids.amin())

    def _chunks(self, part: Chunks, packed: Same | None) -> Pattern:
        length, origin = part.length, part.origin
        if self.row is not None:
            if part.table is not None:
                raise Unread("chunks of packed sequences with a static cache")
            zero = 0 if origin is None else origin
            start = (self.row + self.kv_offset - zero).div(length, rounding_mode="floor") * length + zero
            start = (start - self.kv_offset).view(-1)
            return KeyPadding((start + length).clamp(0, self.nk), start.clamp(0, self.nk))
        if part.table is None:
            device = "cpu" if origin is None else origin.device
            at = torch.arange(self.kv_offset, self.kv_offset + self.nk, device=device)[None]
        elif packed is None:
            raise Unread("chunks of packed sequences without their numbers")
        else:
            at = part.table[:, self.kv_offset : self.kv_offset + self.nk]
        at = at if origin is None else at - origin[:, None]
        # number chunks by their first position: inductor (torch 2.13, CPU) computes the quotient wrongly
        chunk = at - at.remainder(length)
        if packed is not None and part.table is not None:
            # count the changes of chunk or document: chunks of different documents have equal numbers
            numbers = packed.table[:, self.kv_offset : self.kv_offset + self.nk]
            change = (chunk.diff(dim=-1) != 0) | (numbers.diff(dim=-1) != 0)
            return Documents(ids=torch.nn.functional.pad(change.long().cumsum(-1), (1, 0)))
        return Documents(ids=chunk - chunk.amin())

    # ---- padding -----------------------------------------------------------------------------------------------------

    def padding(self, mask: Tensor) -> Pattern | None:
        """Return the pattern of the keys that exist, or None if all are known to exist.

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
        compiling = torch.compiler.is_compiling()
        if not compiling and bool(mask.all()):
            return None
        some = mask.any(-1)
        start = mask.int().argmax(-1)
        stop = torch.where(some, self.nk - mask.flip(-1).int().argmax(-1), 0)
        keys = KeyPadding(stop, start)
        # the bounds skip tiles without reading the mask, so they are kept beside it
        return keys if not compiling and bool((mask.sum(-1) == stop - start).all()) else keys & Sinks(mask)

    # ---- functions that are not read ---------------------------------------------------------------------------------

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

        return from_mask_mod(of_places)


def bounds_of(pattern: Pattern) -> KeyPadding | None:
    """Return the bounds of keys in a pattern from :meth:`Place.padding`; a layer's pattern counts from their start."""
    return next((part for part in pattern.parts_within() or (pattern,) if isinstance(part, KeyPadding)), None)


def joined(patterns: list[Pattern]) -> Pattern:
    """Intersect patterns, with one KeyPadding for all bounds: torch.compile cannot compare two of them."""
    pattern: Pattern | None = None
    keys: KeyPadding | None = None
    for each in patterns:
        for part in each.parts if isinstance(each, And) else (each,):
            if not isinstance(part, KeyPadding):
                pattern = part if pattern is None else pattern & part
            elif keys is None:
                keys = part
            else:
                stop = _bound(keys.stop).minimum(_bound(part.stop))
                # for an empty range start must not exceed stop
                keys = KeyPadding(stop, _bound(keys.start).maximum(_bound(part.start)).minimum(stop))
    if pattern is None:
        return Full() if keys is None else keys
    return pattern if keys is None else pattern & keys


def _beside(part: Relation, packed: Same) -> Relation:
    return part & packed if isinstance(part, (Distances, Chunks, All)) else part


def _not(pattern: Pattern) -> Pattern:
    # torch.compile does not trace the operator ~
    return pattern.__invert__()


def _intervals(runs: tuple[tuple[int | None, int | None], ...]) -> Pattern:
    """Return the pairs with a distance (query - key) in one of the intervals."""
    pattern = _not(Full())
    for least, most in runs:
        pattern = pattern | _interval(least, most)
    return pattern


def _interval(least: int | None, most: int | None) -> Pattern:
    """Return the pairs with a distance (query - key) in one interval; None is an open end."""
    if least is not None and most is not None and least <= 0 <= most:
        return SlidingWindow(most, -least)
    pattern: Pattern = Full()
    if least is not None:
        pattern = pattern & _from(least)
    if most is not None:
        pattern = pattern & _not(_from(most + 1))
    return pattern


def _from(least: int) -> Pattern:
    """Return the pairs with a distance (query - key) of at least a number."""
    if least == 0:
        return Causal()
    return Causal() | SlidingWindow(0, -least) if least < 0 else Causal() & _not(SlidingWindow(least - 1))


def _bound(value: int | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
