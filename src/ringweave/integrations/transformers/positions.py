"""The positions of a call's queries and keys, and the patterns of padding and of functions that are not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import PatternError, UnsupportedError, in_a_line, shown
from ...patterns import Full, KeyPadding, Pattern, Sinks, from_mask_mod
from ...patterns.algebra import And


class Unread(Exception):  # noqa: N818  (not an error: the caller evaluates the function in another way)
    """A mask function uses an index in a way that has no pattern."""


class Place:
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

    def of_keys(self, table: Tensor) -> Tensor:
        """Return the columns of a table (B, positions) that belong to the call's keys."""
        if self.kv_offset + self.nk > table.shape[-1]:
            raise Unread(f"numbers of {table.shape[-1]} tokens for {self.kv_offset + self.nk}")
        return table[:, self.kv_offset : self.kv_offset + self.nk]

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


def _bound(value: int | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
