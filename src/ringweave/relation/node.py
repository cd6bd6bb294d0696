"""Relations: trees of ``&``, ``|`` and ``~`` over leaves, and the tiles, pairs and strips at which they are evaluated.

A node answers five questions. ``touched`` and ``filled`` say where tiles may have an allowed pair, and where every pair
is allowed, as intervals of tiles. ``classes`` says of single tiles whether they are empty or full, and numbers the
others so that tiles of one class have the same mask. ``words`` evaluates tiles by token. ``contains`` evaluates pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from .arrays import Bool, Int64, Words, combine_ids
from .lines import Line, complement, meet, union

EMPTY, FULL = 0, 1
#: Positions are in [-FAR, FAR).
FAR = 1 << 31
#: Distance between batch elements on the axis of all elements, more than any sequence has.
ELEMENT_BITS = 32
ELEMENT = 1 << ELEMENT_BITS


class Sides(NamedTuple):
    """Sides of tiles: positions [lo, hi) in a batch element; arrays of one length.

    Attributes:
        lo: First position of each side.
        hi: End of each side, exclusive.
        element: Its batch element.
        first: Position of the call's query or key at place 0 in that element.
    """

    lo: Int64
    hi: Int64
    element: Int64
    first: Int64

    def take(self, chosen: Int64 | slice) -> Sides:
        """Return some of the sides."""
        return Sides(*(side[chosen] for side in self))

    @staticmethod
    def of(lo: Int64, hi: Int64) -> Sides:
        """Return sides in a single sequence, or along an axis of a grid."""
        zero = np.zeros(len(lo), np.int64)
        return Sides(lo, hi, zero, zero)


class Tiles(NamedTuple):
    """Tiles as pairs of sides: tile i has the queries of side ``qi[i]`` and the keys of side ``ki[i]``."""

    q: Sides
    k: Sides
    qi: Int64
    ki: Int64

    def some(self, chosen: Int64 | Bool | slice) -> Tiles:
        """Return some of the tiles."""
        return Tiles(self.q, self.k, self.qi[chosen], self.ki[chosen])

    @staticmethod
    def of(q: Sides, k: Sides) -> Tiles:
        """Return the tiles with side i of both lists."""
        number = np.arange(len(q.lo))
        return Tiles(q, k, number, number)


class Origin(NamedTuple):
    """A batch element, and the positions of the query and of the key at place 0 in it."""

    element: int = 0
    q: int = 0
    k: int = 0


class Frame(NamedTuple):
    """The strips of a plan, which are the rows of tiles of all its batch elements, and its key sides.

    Attributes:
        q: The queries of each strip.
        k: The keys of each tile of a strip, for all batch elements.
        whole: All keys of each strip's batch element.
        tile: Queries and keys of a tile.
        width: Tiles in a strip.
    """

    q: Sides
    k: Sides
    whole: Sides
    tile: tuple[int, int]
    width: int

    @property
    def length(self) -> int:
        """Number of tiles in all strips."""
        return len(self.q.lo) * self.width

    def tiles(self, place: Int64) -> Tiles:
        """Return the tiles at some places: strip ``place // width``, column ``place % width``."""
        strip, col = place // self.width, place % self.width
        elements = len(self.k.lo) // self.width
        key = col if elements == 1 else col + strip // (len(self.q.lo) // elements) * self.width
        return Tiles(self.q, self.k, strip, key)

    def sizes(self) -> tuple[Int64, Int64]:
        """Return the number of queries of each strip, and of keys of each key side."""
        return self.q.hi - self.q.lo, self.k.hi - self.k.lo


class Node(ABC):
    """A relation over (query position, key position), which may differ between batch elements."""

    #: Whether ``touched`` gives few intervals in a strip, so that other parts of ``&`` look only at what it leaves.
    few: bool = False

    @abstractmethod
    def touched(self, frame: Frame, within: Line | None = None) -> Line:
        """Return the tiles that may have an allowed pair; tiles outside of ``within`` do not matter."""

    @abstractmethod
    def filled(self, frame: Frame, within: Line | None = None) -> Line:
        """Return tiles of which every pair is known to be allowed; tiles outside of ``within`` do not matter."""

    @abstractmethod
    def classes(self, tiles: Tiles) -> Int64:
        """Classify tiles: EMPTY, FULL, or a number >= 2; tiles of one number and size have the same mask."""

    @abstractmethod
    def words(self, tiles: Tiles, size: tuple[int, int]) -> Words:
        """Evaluate tiles of at most ``size`` by token: (tiles, rows, words); bits outside of a tile are arbitrary."""

    @abstractmethod
    def contains(self, q: Tensor, k: Tensor, origin: Origin) -> Tensor:
        """Evaluate pairs of positions in a batch element: int64 that broadcast, on any device; bool."""


class _Joined(Node):
    """Parts under ``&`` or ``|``."""

    #: Class of a part that decides, and class of a part that leaves the decision to the others.
    decides: ClassVar[int]
    neutral: ClassVar[int]

    def __init__(self, parts: Sequence[Node]):
        self.parts = tuple(parts)

    def classes(self, tiles: Tiles) -> Int64:
        codes = self.parts[0].classes(tiles)
        for part in self.parts[1:]:
            # tiles that the parts so far have decided are not classified again
            left = np.flatnonzero(codes != self.decides)
            if not len(left):
                break
            mine, other = codes[left], part.classes(tiles.some(left))
            open_ = np.flatnonzero((other != self.decides) & ((mine != self.neutral) | (other != self.neutral)))
            if len(open_):
                other[open_] = combine_ids(mine[open_], other[open_])
            codes[left] = other
        return codes


class And(_Joined):
    """The pairs that every part allows."""

    decides, neutral = EMPTY, FULL

    def _met(self, find: Callable[[Node, Line | None], Line], within: Line | None) -> Line:
        found: Line | None = None
        for part in sorted(self.parts, key=lambda part: not part.few):
            mine = find(part, within if found is None else found)
            found = mine if found is None else meet(found, mine)
        assert found is not None
        return found

    def touched(self, frame: Frame, within: Line | None = None) -> Line:
        return self._met(lambda part, inside: part.touched(frame, inside), within)

    def filled(self, frame: Frame, within: Line | None = None) -> Line:
        return self._met(lambda part, inside: part.filled(frame, inside), within)

    def words(self, tiles: Tiles, size: tuple[int, int]) -> Words:
        out = self.parts[0].words(tiles, size)
        for part in self.parts[1:]:
            out &= part.words(tiles, size)
        return out

    def contains(self, q: Tensor, k: Tensor, origin: Origin) -> Tensor:
        out = self.parts[0].contains(q, k, origin)
        for part in self.parts[1:]:
            out = out & part.contains(q, k, origin)
        return out


class Or(_Joined):
    """The pairs that any part allows."""

    decides, neutral = FULL, EMPTY

    def touched(self, frame: Frame, within: Line | None = None) -> Line:
        return union(*(part.touched(frame, within) for part in self.parts))

    def filled(self, frame: Frame, within: Line | None = None) -> Line:
        return union(*(part.filled(frame, within) for part in self.parts))

    def words(self, tiles: Tiles, size: tuple[int, int]) -> Words:
        out = self.parts[0].words(tiles, size)
        for part in self.parts[1:]:
            out |= part.words(tiles, size)
        return out

    def contains(self, q: Tensor, k: Tensor, origin: Origin) -> Tensor:
        out = self.parts[0].contains(q, k, origin)
        for part in self.parts[1:]:
            out = out | part.contains(q, k, origin)
        return out


class Not(Node):
    """The pairs that a relation does not allow."""

    def __init__(self, part: Node):
        self.part = part

    def touched(self, frame: Frame, within: Line | None = None) -> Line:
        return complement(self.part.filled(frame, within), frame.length)

    def filled(self, frame: Frame, within: Line | None = None) -> Line:
        return complement(self.part.touched(frame, within), frame.length)

    def classes(self, tiles: Tiles) -> Int64:
        codes = self.part.classes(tiles)
        return np.where(codes <= FULL, FULL - codes, codes)

    def words(self, tiles: Tiles, size: tuple[int, int]) -> Words:
        return ~self.part.words(tiles, size)

    def contains(self, q: Tensor, k: Tensor, origin: Origin) -> Tensor:
        return ~self.part.contains(q, k, origin)


class Places(Node):
    """A relation that counts queries and keys by their places in the call, whatever positions these have."""

    def __init__(self, part: Node):
        self.part, self.few = part, part.few

    @staticmethod
    def _placed(sides: Sides) -> Sides:
        return Sides(sides.lo - sides.first, sides.hi - sides.first, sides.element, np.zeros_like(sides.first))

    def _frame(self, frame: Frame) -> Frame:
        q, k, whole = map(self._placed, (frame.q, frame.k, frame.whole))
        return frame._replace(q=q, k=k, whole=whole)

    def touched(self, frame: Frame, within: Line | None = None) -> Line:
        return self.part.touched(self._frame(frame), within)

    def filled(self, frame: Frame, within: Line | None = None) -> Line:
        return self.part.filled(self._frame(frame), within)

    def _tiles(self, tiles: Tiles) -> Tiles:
        return Tiles(self._placed(tiles.q), self._placed(tiles.k), tiles.qi, tiles.ki)

    def classes(self, tiles: Tiles) -> Int64:
        return self.part.classes(self._tiles(tiles))

    def words(self, tiles: Tiles, size: tuple[int, int]) -> Words:
        return self.part.words(self._tiles(tiles), size)

    def contains(self, q: Tensor, k: Tensor, origin: Origin) -> Tensor:
        return self.part.contains(q - origin.q, k - origin.k, Origin(origin.element))
