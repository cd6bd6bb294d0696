"""Put all batch elements on one position axis, so that one pass plans the whole batch.

Positions of element b begin at ``b * ELEMENT``, and the tiles of all elements are tiles of one long sequence.
``Spans`` are documents, or rows of the batch, as ranges of queries and keys on this axis. Patterns with different
bounds per element have their zones on it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ..relation import placed as relation
from ..relation.arrays import Int64
from ..relation.node import Node
from ..relation.transforms import placed
from ..relation.zones import Zones
from ..torch_compat import outside_transforms, wrapped
from .base import Pattern, parts_of
from .cache_key import CacheKey


class Spans(NamedTuple):
    """Documents in their order, as ranges of queries and of keys on the axis of all batch elements.

    Attributes:
        q_first: First query of each document.
        q_stop: End of its queries, exclusive.
        origin: Position on the axis of the query position 0 of the document. A document with fewer queries than keys
            begins after it, and one with more queries before it, at negative positions.
        k_first: First key of each document, at position 0 of the document.
        k_stop: End of its keys, exclusive.
        one: Whether all batch elements have the documents of the first element.
    """

    q_first: Int64
    q_stop: Int64
    origin: Int64
    k_first: Int64
    k_stop: Int64
    one: bool

    def documents(self) -> relation.Documents:
        """Return the documents that have queries and keys as zones."""
        used = (self.q_first < self.q_stop) & (self.k_first < self.k_stop)
        q, k = (self.q_first[used], self.q_stop[used]), (self.k_first[used], self.k_stop[used])
        return relation.Documents(Zones(q, k, each=not self.one), self.origin[used], k[0])

    def inside(self, node: Node) -> Node:
        """Return a relation inside each document, with positions counted from its first key."""
        return placed(node, self.documents())

    def lengths(self) -> tuple[Int64, Int64]:
        """Return the number of queries and of keys of each document."""
        return self.q_stop - self.q_first, self.k_stop - self.k_first


class Bounds(Pattern):
    """A pattern with bounds in tensors, which are read only when a plan is made.

    Therefore it can be built where values are unknown, such as inside ``torch.compile``.
    """

    def __post_init__(self) -> None:
        self.write(self._text(), follows=bool(self.tables), function=False)

    #: Whether the tensors are copies that nothing writes to, rather than the caller's own.
    private: ClassVar[bool] = False

    @property
    def _constant(self) -> bool:
        return self.private or not self.tables

    def stays_equal(self, other: Pattern) -> bool:
        return self == other if self.private else super().stays_equal(other)

    # contents of the tensors when ``read`` was called; None: each method reads them again
    _made: Any = None

    def read(self) -> Self:
        """Return the same pattern with the present contents of its tensors."""
        return self._with(_made=self._make())

    @property
    def _now(self) -> Any:
        return self._make() if self._made is None else self._made

    @abstractmethod
    def _make(self) -> Any:
        """Read the tensors; raise PatternError if their contents are invalid."""

    @abstractmethod
    def bound_ids(self) -> tuple[Int64, ...]:
        """Return arrays (B,) of numbers that are all equal if and only if batch elements have equal bounds."""

    @abstractmethod
    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        """Raise PatternError if the bounds do not fit these lengths."""

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        if self.readable():
            self.fits(nq, nk, q_offset)

    def readable(self) -> bool:
        """Return whether the tensors can be read without waiting for a device; others are read only for plans."""
        return all(
            table.device.type == "cpu" and type(table) in (Tensor, torch.nn.Parameter) and not wrapped(table)
            for table in self.tables
        )

    def key(self) -> CacheKey:
        return CacheKey.following(self.spec, self.tables)


class Enclosing(Bounds):
    """Bounds that a pattern may be counted within: ``pattern.within(bounds)``."""

    @abstractmethod
    def inside(self, node: Node) -> Node:
        """Return a relation inside these bounds, with positions counted from the first key of each part."""

    @abstractmethod
    def sizes(self) -> tuple[Int64, Int64]:
        """Return the number of queries and of keys of each part."""


class Packing(Enclosing):
    """Sequences that share a row of the batch, so that a pattern with it already counts the tokens of whole rows."""


def bounds_in(pattern: Pattern) -> list[Bounds]:
    """Return the patterns inside a pattern that have bounds in tensors."""
    return [each for each in parts_of(pattern, Bounds) if each.tables]  # type: ignore[type-abstract]


def rows_of(table: Tensor, sides: int) -> Int64:
    """Copy an integer tensor to the host, with leading axes of length 1 up to ``sides`` axes."""
    with outside_transforms(table):
        rows: Int64 = table.detach().cpu().numpy().astype(np.int64)
    return rows[(None,) * (sides - rows.ndim)]
