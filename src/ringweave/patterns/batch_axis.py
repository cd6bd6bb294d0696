"""Put all batch elements on one position axis, so that one pass plans the whole batch.

Positions of element b begin at ``b * ELEMENT``, and the tiles of all elements are tiles of one long sequence.
``Spans`` are documents, or rows of the batch, as ranges of queries and keys on this axis. ``Shared`` puts a pattern
that is the same for all elements on this axis; patterns with different bounds per element compute with such positions
directly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..relation import placed as relation
from ..relation.node import Node
from ..relation.zones import Zones
from ..torch_compat import outside_transforms, wrapped
from .base import Composite, Pattern, parts_of
from .cache_key import CacheKey
from .tiles import EMPTY, FULL, Int64, Ranges, Tiles, combine_ids

#: Positions of a batch element on the axis of all elements; more than any sequence has.
ELEMENT_BITS = 32
ELEMENT = 1 << ELEMENT_BITS
_END = 2**62
P = TypeVar("P", Tensor, Int64)


class Pieces(NamedTuple):
    """The parts of tiles inside documents, in the order of the tiles.

    Attributes:
        tile: Tile of each part.
        document: Document that it lies in.
        inside: The part, counted from the first key of its document.
        margins: Queries and keys of the tile before and after the part.
    """

    tile: Int64
    document: Int64
    inside: Tiles
    margins: Tiles

    def some(self, chosen: NDArray[np.bool_]) -> Pieces:
        """Return some of the parts; ``self`` for all of them."""
        if chosen.all():
            return self
        inside, margins = (Tiles(*(side[chosen] for side in each)) for each in (self.inside, self.margins))
        return Pieces(self.tile[chosen], self.document[chosen], inside, margins)


@dataclass(frozen=True, eq=False, repr=False)
class Spans:
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

    @staticmethod
    def of(q_first: Int64, q_stop: Int64, origin: Int64, k_first: Int64, k_stop: Int64, one: bool) -> Spans:
        """Append a document after all others, so that for every position some document ends after it."""
        sides = [np.append(side, _END) for side in (q_first, q_stop, origin, k_first, k_stop)]
        return Spans(sides[0], sides[1], sides[2], sides[3], sides[4], one)

    def documents(self) -> relation.Documents:
        """Return the documents that have queries and keys as zones."""
        used = (self.q_first < self.q_stop) & (self.k_first < self.k_stop)
        q, k = (self.q_first[used], self.q_stop[used]), (self.k_first[used], self.k_stop[used])
        return relation.Documents(Zones(q, k, each=not self.one), self.origin[used])

    def lengths(self) -> tuple[Int64, Int64]:
        """Return the number of queries and of keys of each document."""
        return (self.q_stop - self.q_first)[:-1], (self.k_stop - self.k_first)[:-1]

    def overlaps(self, tiles: Tiles) -> Pieces:
        """Cut tiles into their parts inside the documents; empty parts are left out."""
        base = tiles.q_lo & -ELEMENT
        own = Tiles(*(side - base for side in tiles)) if self.one else tiles
        first = np.searchsorted(self.q_stop, own.q_lo, side="right")
        first = np.maximum(first, np.searchsorted(self.k_stop, own.k_lo, side="right"))
        last = np.searchsorted(self.q_first, own.q_hi, side="left")
        last = np.minimum(last, np.searchsorted(self.k_first, own.k_hi, side="left"))
        tile, document = _listed(first, last - first)
        whole = Tiles(*(side[tile] for side in own))
        q_lo, q_hi = np.maximum(whole.q_lo, self.q_first[document]), np.minimum(whole.q_hi, self.q_stop[document])
        k_lo, k_hi = np.maximum(whole.k_lo, self.k_first[document]), np.minimum(whole.k_hi, self.k_stop[document])
        q_moved, k_moved = base[tile] - self.origin[document], base[tile] - self.k_first[document]
        pieces = Pieces(
            tile,
            document,
            Tiles(q_lo + q_moved, q_hi + q_moved, k_lo + k_moved, k_hi + k_moved),
            Tiles(q_lo - whole.q_lo, whole.q_hi - q_hi, k_lo - whole.k_lo, whole.k_hi - k_hi),
        )
        return pieces.some((q_lo < q_hi) & (k_lo < k_hi))

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int, inner: Pattern) -> Ranges:
        """Compute :meth:`Pattern.key_ranges` of ``inner`` inside the documents."""
        base = q_lo & -ELEMENT
        tile, document, inside, _ = self.overlaps(Tiles(q_lo, q_hi, base, base + ELEMENT))
        if not len(tile):
            return Ranges.of((0, 0), rows=len(q_lo))
        length = (self.k_stop - self.k_first)[document]
        found = inner.key_ranges(inside.q_lo, inside.q_hi, int(length.max()))
        key = (self.k_first[document] & (ELEMENT - 1))[:, None]
        begin, end = (np.clip(side, 0, length[:, None]) + key for side in found)
        # A tile with several documents gets one range around them, which is tight: inner documents are short.
        start, stop = np.zeros((2, len(q_lo), begin.shape[1]), np.int64)
        count = np.bincount(tile, minlength=len(q_lo))
        alone = count[tile] == 1
        start[tile[alone]], stop[tile[alone]] = begin[alone], end[alone]
        if not alone.all():
            tile, begin, end = tile[~alone], begin[~alone], end[~alone]
            used = end > begin
            low, high = np.full(len(q_lo), nk, np.int64), np.zeros(len(q_lo), np.int64)
            np.minimum.at(low, tile, np.where(used, begin, nk).min(1))
            np.maximum.at(high, tile, np.where(used, end, 0).max(1))
            start[count > 1, 0], stop[count > 1, 0] = low[count > 1], high[count > 1]
        return Ranges(start, stop)

    def tile_classes(self, tiles: Tiles, inner: Pattern) -> Int64:
        """Compute :meth:`Pattern.tile_classes` of ``inner`` inside the documents."""
        pieces = self.overlaps(tiles)
        keys = np.zeros(len(tiles.q_lo), np.int64)
        if not len(pieces.tile):
            return keys
        code = inner.tile_classes(pieces.inside)
        pieces, code = pieces.some(code != EMPTY), code[code != EMPTY]
        tile, number = pieces.tile, combine_ids(code, *pieces.margins)
        keys[tile] = np.where((code == FULL) & (sum(pieces.margins) == 0), FULL, number)
        count = np.bincount(tile, minlength=len(keys))
        several = np.flatnonzero(count > 1)
        if len(several):
            # a tile with several documents is identified by the numbers of all its parts
            row, place = _listed(np.zeros(len(several), np.int64), count[several])
            parts = np.zeros((len(several), int(count.max())), np.int64)
            parts[row, place] = number[count[tile] > 1]
            keys[several] = np.unique(parts, axis=0, return_inverse=True)[1].reshape(-1) + number.max() + 1
        return keys

    def allows(self, q: Tensor, k: Tensor, inner: Pattern) -> Tensor:
        """Compute :meth:`Pattern.allows` of ``inner`` inside the documents."""
        q_doc, q_in = self._document(q, self.q_first, self.q_stop, self.origin)
        k_doc, k_in = self._document(k, self.k_first, self.k_stop, self.k_first)
        return (q_doc >= 0) & (q_doc == k_doc) & inner.allows(q_in, k_in)

    def _document(self, position: Tensor, first: Int64, stop: Int64, origin: Int64) -> tuple[Tensor, Tensor]:
        """Return the document of each position, -1 outside of documents, and the position in it."""
        base = position & -ELEMENT
        own = (position & (ELEMENT - 1) if self.one else position).contiguous()
        starts, stops, origins = (torch.from_numpy(side).to(position.device) for side in (first, stop, origin))
        doc = torch.searchsorted(stops, own, right=True)
        inside = starts[doc] <= own
        return torch.where(inside, doc, -1), base + torch.where(inside, own - origins[doc], 0)


def _listed(first: Int64, count: Int64) -> tuple[Int64, Int64]:
    """Return the pairs (i, x) with first[i] <= x < first[i] + count[i], as two arrays."""
    count = np.maximum(count, 0)
    line = np.repeat(np.arange(len(count)), count)
    return line, np.arange(len(line)) - np.repeat(np.cumsum(count) - count - first, count)


def of_element(position: P) -> P:
    """Return positions in their batch elements; queries before the first key of a document have negative ones."""
    return ((position + ELEMENT // 2) & (ELEMENT - 1)) - ELEMENT // 2


class Shared(Composite):
    """A pattern that is the same for all batch elements, on the axis of all elements.

    Args:
        part: The pattern, on positions of one element.
    """

    def __init__(self, part: Pattern):
        self.part = part
        self.__post_init__()

    def _text(self) -> str:
        return self.part.spec

    def parts_within(self) -> tuple[Pattern, ...]:
        return (self.part,)

    def remade(self, parts: Sequence[Pattern]) -> Pattern:
        return Shared(parts[0])

    def zones(self, n: int) -> Node:
        return self.part.zones(n)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self.part.allows(of_element(q), of_element(k))

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return self.part.key_ranges(of_element(q_lo), of_element(q_hi), nk)

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return self.part.excluded_ranges(of_element(q_lo), of_element(q_hi), nk)

    def tile_classes(self, tiles: Tiles) -> Int64:
        return self.part.tile_classes(Tiles(*map(of_element, tiles)))


class Bounds(Pattern):
    """A pattern with bounds in tensors, which are read only when a plan is made.

    Therefore it can be built where values are unknown, such as inside ``torch.compile``.
    """

    def __post_init__(self) -> None:
        self.write(self._text(), follows=bool(self.tables), function=False)

    #: Whether the tensors are copies that nothing writes to, rather than the caller's own.
    private: ClassVar[bool] = False

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


def bounds_in(pattern: Pattern) -> list[Bounds]:
    """Return the patterns inside a pattern that have bounds in tensors."""
    return [each for each in parts_of(pattern, Bounds) if each.tables]  # type: ignore[type-abstract]


def rows_of(table: Tensor, sides: int) -> Int64:
    """Copy an integer tensor to the host, with leading axes of length 1 up to ``sides`` axes."""
    with outside_transforms(table):
        rows: Int64 = table.detach().cpu().numpy().astype(np.int64)
    return rows[(None,) * (sides - rows.ndim)]
