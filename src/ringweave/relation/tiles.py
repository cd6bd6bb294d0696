"""Plan a relation: which tiles of some strips are full, and which are partial with which mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..chunks import chunks
from ..errors import PatternError
from .arrays import Int64, Words, distinct, packed
from .lines import Line, complement, meet
from .node import EMPTY, FULL, Frame, Node, Sides, Tiles
from .rows import Painted, painted

#: Mask numbers of tiles without a mask.
FULL_TILE, EMPTY_TILE = -1, -2
#: Bytes of a listed tile: its place, row, column and mask.
TILE_BYTES = 4 * 8
_ZERO = np.zeros(1, np.int64)


def strips(
    nq: int,
    nk: int,
    tile: tuple[int, int],
    elements: Int64 = _ZERO,
    q_first: Int64 = _ZERO,
    k_first: Int64 = _ZERO,
    *,
    q_offset: int = 0,
    part: slice | Int64 = slice(None),
) -> Frame:
    """Return the strips of some batch elements.

    Args:
        nq: Number of queries.
        nk: Number of keys.
        tile: Queries and keys of a tile.
        elements: (n,) batch elements.
        q_first: (n,) position of the query at place 0 of each.
        k_first: (n,) position of the key at place 0 of each.
        q_offset: Place of the first query.
        part: The strips of each element to return, by number.
    """

    def sides(length: int, side: int, first: Int64, part: slice | Int64, offset: int = 0) -> Sides:
        low = np.arange(0, length, side, dtype=np.int64)[part]
        high = np.minimum(low + side, length) + offset
        low += offset
        if len(elements) == 1:
            number, base = (np.full(len(low), int(each[0]), np.int64) for each in (elements, first))
            return Sides(low + base, high + base, number, base)
        base = first[:, None]
        every = base + low, base + high, elements[:, None], base
        return Sides(*(np.broadcast_to(x, (len(elements), len(low))).reshape(-1) for x in every))

    q, k = sides(nq, tile[0], q_first, part, q_offset), sides(nk, tile[1], k_first, slice(None))
    first = np.repeat(k_first, len(q.lo) // len(elements))
    return Frame(q, k, Sides(first, first + nk, q.element, first), tile, -(-nk // tile[1]))


def limit(tiles: int) -> None:
    """Raise PatternError if the number of tiles does not fit in 32 bits."""
    if tiles >= 2**31:
        raise PatternError("pattern", f"{tiles} tiles", "fewer than 2**31", "Use larger tiles or less.")


class Tiling(NamedTuple):
    """The non-empty tiles of a frame, ascending by place.

    Attributes:
        place: int64; strip ``place // width``, column ``place % width``.
        mask: int64, number of each tile's mask; FULL_TILE for full tiles.
    """

    place: Int64
    mask: Int64


class Masks:
    """Distinct masks of tiles, numbered in the order in which they are added."""

    def __init__(self, tile: tuple[int, int]):
        self.tile = tile
        self.words = tile[0], -(-tile[1] // 32)
        self.index: dict[bytes, int] = {}

    def numbers(self, masks: NDArray[Any]) -> list[int]:
        """Return the numbers of masks in words, (n, ...)."""
        each = np.ascontiguousarray(masks).reshape(-1).view(f"V{4 * self.words[0] * self.words[1]}")
        return [self.index.setdefault(mask, len(self.index)) for mask in each.tolist()]

    def bank(self) -> NDArray[np.int32]:
        """Return the words of all masks, (masks, q_tile, words), in the order of their numbers."""
        return np.frombuffer(bytearray().join(self.index), "<i4").reshape(-1, *self.words)

    def of(self, node: Node, tiles: Tiles) -> Int64:
        """Evaluate tiles by token; return the number of each tile's mask, FULL_TILE or EMPTY_TILE."""
        high, wide = (tiles.q.hi - tiles.q.lo)[tiles.qi], (tiles.k.hi - tiles.k.lo)[tiles.ki]
        found = np.empty(len(tiles.qi), np.int64)
        # a function of positions may take eight bytes for each bit
        for part in chunks(len(found), 8 * self.tile[0] * self.tile[1]):
            # only the rows that exist, since a decoding step has one query
            rows = int(high[part].max())
            words = node.words(tiles.some(part), (rows, self.tile[1]))
            if rows < self.tile[0]:
                words = np.concatenate([words, np.zeros((len(words), self.tile[0] - rows, self.words[1]), "<u4")], 1)
            found[part] = self._of(words, high[part], wide[part])
        return found

    def of_painted(self, strips: Painted) -> Tiling:
        """Return the tiles of painted strips, with their masks numbered."""
        mask = np.full(len(strips.place), FULL_TILE, np.int64)
        count, queries = strips.masks.shape[:2]
        # queries that do not exist attend nothing
        words = np.zeros((count, *self.words), np.uint32)
        words[:, :queries] = strips.masks
        mask[~strips.full] = self.numbers(words)
        return Tiling(strips.place, mask)

    def _of(self, words: Words, high: Int64, wide: Int64) -> Int64:
        found = np.empty(len(words), np.int64)
        # tiles that are clipped at the ends have few sizes
        first, like = distinct(high << 32 | wide)
        for number, place in enumerate(first.tolist()):
            here = np.flatnonzero(like == number) if len(first) > 1 else np.arange(len(words))
            inside = self.inside(int(high[place]), int(wide[place]))
            mine = (words if len(first) == 1 else words[here]) & inside
            every, some = (mine == inside).all((1, 2)), mine.any((1, 2))
            found[here] = np.where(every, FULL_TILE, EMPTY_TILE)
            mixed = np.flatnonzero(some & ~every)
            found[here[mixed]] = self.numbers(mine[mixed])
        return found

    def inside(self, high: int, wide: int) -> Words:
        """Return the words (q_tile, words) of a tile with all of its pairs."""
        rows, columns = np.arange(self.tile[0]) < high, np.arange(self.tile[1]) < wide
        words: Words = packed(rows[None, :, None] & columns)[0]
        return words


def _decided(node: Node, frame: Frame) -> tuple[Line, Line]:
    """Return the tiles of a frame that are known to be full, and the others that may have a pair."""
    every = node.filled(frame)
    return every, meet(node.touched(frame), complement(every, frame.length))


def estimated(node: Node, frame: Frame) -> int:
    """Count the tiles of a frame that are not known to be empty; masks are not evaluated."""
    every, undecided = _decided(node, frame)
    open_ = node.classes(frame.tiles(undecided.places())) != EMPTY
    return int((every.stop - every.start).sum()) + int(open_.sum())


def numbered(node: Node, tiles: Tiles, masks: Masks) -> Int64:
    """Return the number of each tile's mask, FULL_TILE or EMPTY_TILE; one tile of each class is evaluated by token."""
    codes = node.classes(tiles)
    found = np.where(codes == FULL, FULL_TILE, EMPTY_TILE)
    partial = np.flatnonzero(codes > FULL)
    if len(partial):
        some = tiles.some(partial)
        clipped = (tiles.q.hi - tiles.q.lo != masks.tile[0])[some.qi] * 2 + (tiles.k.hi - tiles.k.lo != masks.tile[1])[
            some.ki
        ]
        # tiles that are clipped at the ends have other masks than whole tiles of their class
        first, like = distinct(codes[partial] * 4 + clipped)
        found[partial] = masks.of(node, some.some(first))[like]
    return found


def tiling(node: Node, frame: Frame, masks: Masks) -> Tiling:
    """Return the non-empty tiles of a frame; new masks are added to ``masks``."""
    strips = painted(node, frame)
    if strips is not None:
        return masks.of_painted(strips)
    every, undecided = _decided(node, frame)
    limit(sum(int((line.stop - line.start).sum()) for line in (every, undecided)))
    open_ = undecided.places()
    mask = np.empty(len(open_), np.int64)
    for part in chunks(len(open_), TILE_BYTES):
        mask[part] = numbered(node, frame.tiles(open_[part]), masks)
    kept = mask != EMPTY_TILE
    if not kept.all():
        open_, mask = open_[kept], mask[kept]
    whole = every.places()
    if not len(whole):
        return Tiling(open_, mask)
    # merge two ascending lists
    place = np.empty(len(open_) + len(whole), np.int64)
    at = np.searchsorted(whole, open_) + np.arange(len(open_))
    rest = np.ones(len(place), np.bool_)
    rest[at] = False
    place[at], place[rest] = open_, whole
    both = np.full(len(place), FULL_TILE, np.int64)
    both[at] = mask
    return Tiling(place, both)
