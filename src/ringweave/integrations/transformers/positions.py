"""Relations of positions, which a mask function states, as patterns of the places of a call's queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...cache import PATTERNS
from ...errors import PatternError, UnsupportedError, in_a_line, message, shown
from ...patterns import Causal, Documents, Full, KeyPadding, Pattern, Sinks, SlidingWindow, from_mask_mod
from ...patterns.algebra import And
from .mask_reading import All, Any_, Chunks, Distances, Known, NotNegative, Relation, Same, Unread

# of a pattern, for each character: it and its parts each have their text, and an object
_BYTES_OF_TEXT = 64


class Place:
    """Where a call's queries and keys lie, and relations of positions as patterns of places.

    Args:
        batch: Batch elements.
        nq: Queries.
        nk: Keys.
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
                raise UnsupportedError(message("q_offset", got, "an int, or one query", remedy))
            # one query: what it attends are bounds of keys, which need not be waited for. It stands at the last place
            self.row = q_offset - kv_offset
            self.first = nk - 1
        else:
            self.first = q_offset - kv_offset

    # ---- relations ---------------------------------------------------------------------------------------------------

    def pattern(self, relation: Relation) -> Pattern:
        """A relation of positions as a pattern of places.

        Raises:
            Unread: It means something only next to another one, which is not there.
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
        """Which table packs sequences side by side, if one does."""
        parts = relation.parts if isinstance(relation, All) else (relation,)
        return next((part for part in parts if isinstance(part, Same)), None)

    def _every(self, parts: tuple[Relation, ...]) -> Pattern:
        packed = next((part for part in parts if isinstance(part, Same)), None)
        if any(isinstance(part, Chunks) and part.table is not None for part in parts) and packed is not None:
            # chunks are numbered inside of sequences
            parts = tuple(part for part in parts if part is not packed)
        return joined([self._one(part, packed) for part in parts])

    def _one(self, part: Relation, packed: Same | None) -> Pattern:
        if isinstance(part, Distances):
            # inside a packed sequence positions rise one by one: they are as far apart as places are
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
            # what holds for a whole intersection holds for the unions in it
            inner = part if packed is None else type(part)(tuple(_beside(each, packed) for each in part.parts))
            return self.pattern(inner)
        assert isinstance(part, NotNegative)
        raise Unread("numbers of sequences that are compared with 0 alone")

    def near(self, runs: tuple[tuple[int | None, int | None], ...]) -> Pattern:
        """Pairs whose distance, query less key, lies in one of some intervals."""
        if self.row is not None:
            pattern = _not(Full())
            for least, most in runs:
                stop = self.nk if least is None else (self.row - least + 1).clamp(0, self.nk).view(1)
                start = 0 if most is None else (self.row - most).clamp(0, self.nk).view(1)
                pattern = pattern | (Full() if least is None and most is None else KeyPadding(stop, start))
            return pattern
        if torch.compiler.is_compiling():
            return _intervals(runs)
        # without bounds that no pair reaches: dense patterns are known as such, and steps of a decoding have the same
        nearest, farthest = self.first - self.nk + 1, self.first + self.nq - 1
        reached: tuple[tuple[int | None, int | None], ...] = ()
        for least, most in runs:
            low = None if least is None or least <= nearest else least
            reached += ((low, None if most is None or most >= farthest else most),)
        # the same object for the same intervals: attention finds the call of a pattern by identity
        same: Pattern | None = PATTERNS.get(("intervals", reached))
        if same is None:
            same = _intervals(reached)
            PATTERNS.put(("intervals", reached), same, len(same.spec) * _BYTES_OF_TEXT)
        return same

    def documents(self, table: Tensor, known: bool) -> Documents:
        """Pairs with one number in a table (B, positions); of ``known`` only numbers from 0 on."""
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
        # the first place of a chunk, and not its number: inductor (torch 2.13, CPU) computes such quotients wrong
        chunk = at - at.remainder(length)
        if packed is not None and part.table is not None:
            # numbered anew where a sequence begins: chunks of two sequences have equal numbers
            numbers = packed.table[:, self.kv_offset : self.kv_offset + self.nk]
            change = (chunk.diff(dim=-1) != 0) | (numbers.diff(dim=-1) != 0)
            return Documents(ids=torch.nn.functional.pad(change.long().cumsum(-1), (1, 0)))
        return Documents(ids=chunk - chunk.amin())

    # ---- padding -----------------------------------------------------------------------------------------------------

    def padding(self, mask: Tensor) -> Pattern | None:
        """The keys that exist, of a bool (B, positions) or shorter; None where that is known to be all.

        Padding to the left, to the right or of both is bounds of keys. Padding between keys costs a mask of keys more.
        Both are about keys alone: what a query attends does not depend on whether a key of its place exists.
        """
        if mask.ndim != 2 or (mask.shape[0] != 1 and mask.shape[0] != self.batch):
            wanted = f"({self.batch}, tokens)"
            raise PatternError(message("attention_mask", shown(mask), wanted, "Pass the padding of each element."))
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
        # bounds leave tiles out, which they know without looking at the mask
        return keys if not compiling and bool((mask.sum(-1) == stop - start).all()) else keys & Sinks(mask)

    # ---- what is not read --------------------------------------------------------------------------------------------

    def function(self, function: Callable[..., Any], why: Exception) -> Pattern:
        """A mask function as one of index tensors, which planning calls for every tile.

        Raises:
            UnsupportedError: While torch.compile traces, or with a position that is a tensor.
        """
        if torch.compiler.is_compiling() or self.row is not None:
            got = f"a function that is read as no pattern ({in_a_line(why)})"
            remedy = "Compile the model without fullgraph, or write the mask with comparisons of indices alone."
            raise UnsupportedError(message("mask_function", got, "comparisons of indices and of tables", remedy))
        offset = self.kv_offset

        def of_places(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            result: Tensor = function(b, h, q + offset, k + offset)
            return result

        return from_mask_mod(of_places)


def bounds_of(pattern: Pattern) -> KeyPadding | None:
    """The bounds of keys in what :meth:`Place.padding` made: from the first of them a pattern of a user is counted."""
    return next((part for part in pattern.parts_within() or (pattern,) if isinstance(part, KeyPadding)), None)


def joined(patterns: list[Pattern]) -> Pattern:
    """Patterns joined by ``&``, bounds of keys as one: torch.compile cannot ask whether two are the same."""
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
                # bounds that leave nothing meet
                keys = KeyPadding(stop, _bound(keys.start).maximum(_bound(part.start)).minimum(stop))
    if pattern is None:
        return Full() if keys is None else keys
    return pattern if keys is None else pattern & keys


def _beside(part: Relation, packed: Same) -> Relation:
    return part & packed if isinstance(part, (Distances, Chunks, All)) else part


def _not(pattern: Pattern) -> Pattern:
    # the operator itself is not traced by torch.compile
    return pattern.__invert__()


def _intervals(runs: tuple[tuple[int | None, int | None], ...]) -> Pattern:
    """Pairs whose distance lies in one of some intervals."""
    pattern = _not(Full())
    for least, most in runs:
        pattern = pattern | _interval(least, most)
    return pattern


def _interval(least: int | None, most: int | None) -> Pattern:
    """Pairs whose distance, query less key, is at least one number and at most another."""
    if least is not None and most is not None and least <= 0 <= most:
        return SlidingWindow(most, -least)
    pattern: Pattern = Full()
    if least is not None:
        pattern = pattern & _from(least)
    if most is not None:
        pattern = pattern & _not(_from(most + 1))
    return pattern


def _from(least: int) -> Pattern:
    """Pairs whose distance is at least a number."""
    if least == 0:
        return Causal()
    return Causal() | SlidingWindow(0, -least) if least < 0 else Causal() & _not(SlidingWindow(least - 1))


def _bound(value: int | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
