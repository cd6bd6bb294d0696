"""Plans of decoding steps, assembled from rows of tiles that were planned before.

If a relation depends on distance (``Pattern.distance_profile``), queries at equal places in a tile attend the same
tiles, except that later queries skip more tiles between the first keys and their window. So a row of tiles is planned
once for each placement of queries and keys in their tiles, and the plan of a batch, with a placement for each element,
is gathered from such rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache import PATTERNS
from ..checks import LONGEST
from ..patterns import And, KeyPadding, Pattern, rebuild
from ..patterns.algebra import join
from ..patterns.base import DistanceProfile
from ..patterns.batch_axis import rows_of
from ..patterns.shifted import Offsets, Shifted
from ..relation.arrays import Int64
from .block_plan import BlockPlan, Extent
from .csr import RowSet, assemble
from .cuda_sync import require_no_capture
from .from_pattern import MOST_IN_A_LINE, rows_of_elements

# most cached rows of tiles per relation; a window needs at most one per key of the window and of a tile
_MOST_ROWS = 2**13
_ROW_BYTES = 512
# decoding steps that are planned ahead, and the most batch elements for which they are
_NEXT, _MOST_GOING = 16, 64
# larger distances ahead are treated as this one, so that sums fit into int64
_AHEAD = 2**40


@dataclass(frozen=True)
class Placement:
    """Where the queries and keys of batch elements stand; arrays of one entry if all elements have the same.

    Query i is at position q + i, and key j at position k + j. Keys before ``start`` and from ``stop`` on do not exist::

        keys          k . . . . [ start = = = = = = = = = = stop ) . . .
        queries                                 q = = = q + nq
        positions     -------------------------------------------------->
    """

    q: Int64
    k: Int64
    start: Int64
    stop: Int64


class Reach(NamedTuple):
    """The fields of a distance profile that hold for each element."""

    first: Int64
    back: Int64
    far: NDArray[np.bool_]
    ahead: int


class Skip(NamedTuple):
    """Tiles between the first keys and a window, which a canonical placement leaves out of each element's row.

    Attributes:
        at: The first tile to insert.
        tiles: Number of tiles to insert.
        full: Whether they are full; otherwise they are empty.
    """

    at: Int64
    tiles: Int64
    full: NDArray[np.bool_]


class _Planned(NamedTuple):
    """Planned rows of tiles, concatenated; immutable.

    Attributes:
        known: Number of a row by its placement (q, k, start, stop).
        codes: Number of a mask by its bytes.
        ptr: Start of each row's tiles, and the end of the last row's.
        col: Key tiles.
        mask_id: Mask number of each tile, as in a plan.
        mask_words: Distinct masks.
        leading: For each mask, n if it allows exactly the first n keys to every query, else 0.
    """

    known: dict[tuple[int, ...], int]
    codes: dict[bytes, int]
    ptr: Int64
    col: Int64
    mask_id: NDArray[np.int32]
    mask_words: NDArray[np.int32]
    leading: Int64


class RowCache:
    """A cache of rows of tiles of one relation, by placement.

    Args:
        relation: The relation of a single head.
        look: Its distance profile.
        nq: Number of queries, which fit in one row of tiles.
        tile: Sides of a tile.
    """

    def __init__(self, relation: Pattern, look: DistanceProfile, nq: int, tile: tuple[int, int]):
        self.relation, self.look, self.nq, self.tile = relation, look, nq, tile
        self.key = "rows", relation.spec, nq, *tile
        # one thread plans at a time
        self._lock = threading.Lock()
        none = np.zeros(0, np.int64)
        masks = np.zeros((0, tile[0], -(-tile[1] // 32)), np.int32)
        self._empty = self.planned = _Planned({}, {}, np.zeros(1, np.int64), none, none.astype(np.int32), masks, none)

    @property
    def nbytes(self) -> int:
        """Bytes of the cached rows."""
        planned = self.planned
        # masks count twice, as words and as bytes in ``codes``
        return sum(x.nbytes for x in planned[2:]) + planned.mask_words.nbytes + _ROW_BYTES * (1 + len(planned.known))

    def at(self, places: Sequence[tuple[int, ...]]) -> tuple[_Planned, bool]:
        """Return rows that include the given placements (q, k, start, stop), and whether some had to be planned."""
        with self._lock:
            planned = self.planned
            missing = [*dict.fromkeys(place for place in places if place not in planned.known)]
            if not missing:
                return planned, False
            missing += self._next(missing)
            if len(missing) + len(planned.known) > _MOST_ROWS:
                planned, missing = self._empty, [*dict.fromkeys(places)]
            # one assignment, so that an interrupted thread leaves the old rows
            self.planned = self._grown(planned, missing)
            return self.planned, True

    def _next(self, missing: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the next placements of decodings that advance token by token; planning them too costs little."""
        if len(missing) > _MOST_GOING:
            return []
        known = self.planned.known
        going = [(q, k, start, stop) for q, k, start, stop in missing if (q - 1, k, start, stop - 1) in known]
        found = ((q + i, k, start, stop + i) for q, k, start, stop in going for i in range(1, _NEXT))
        return [*dict.fromkeys(place for place in found if place not in known and place not in missing)]

    def _grown(self, planned: _Planned, places: list[tuple[int, ...]]) -> _Planned:
        q, k, start, stop = torch.tensor(places, device="cpu").T
        side = self.tile[1]
        nk = -(-max(int(stop.max()), self.look.first, 1) // side) * side
        pattern = Shifted(self.relation, Offsets(torch.stack([q, k], 1))) & KeyPadding(stop.clone(), start.clone())
        codes = dict(planned.codes)
        rows, like = rows_of_elements(pattern, self.nq, nk, len(places), self.tile, codes)
        ends = np.cumsum(np.bincount(rows.row, minlength=rows.sets))
        length = np.diff(ends, prepend=0)[like]
        tiles = _spread(ends[like] - length, length)
        fresh = np.frombuffer(b"".join([*codes][len(planned.codes) :]), "<i4").reshape(
            -1, *planned.mask_words.shape[1:]
        )
        return _Planned(
            planned.known | {place: len(planned.known) + i for i, place in enumerate(places)},
            codes,
            np.concatenate([planned.ptr, planned.ptr[-1] + np.cumsum(length)]),
            np.concatenate([planned.col, rows.col[tiles]]),
            np.concatenate([planned.mask_id, rows.mask_id[tiles]]),
            np.concatenate([planned.mask_words, fresh]),
            np.concatenate([planned.leading, self._leading(fresh)]),
        )

    def _leading(self, masks: NDArray[np.int32]) -> Int64:
        bits = np.unpackbits(masks[:, : self.nq].view(np.uint8), axis=2, bitorder="little").astype(bool)
        count = bits[:, 0].sum(1)
        first = np.arange(bits.shape[2]) < count[:, None]
        return np.where((bits == first[:, None]).all((1, 2)), count, 0)


def gathered(pattern: Pattern, extent: Extent) -> BlockPlan | None:
    """Plan one row of tiles from cached rows; None if the pattern does not depend on distance."""
    nq, nk, heads, batch, tile, q_offset, device = extent
    taken = _taken_apart(pattern)
    if taken is None:
        return None
    specs, offsets, by_place, by_position = taken
    kinds = _kinds(specs, heads)
    if kinds is None or -(-nk // tile[1]) > MOST_IN_A_LINE:
        return None
    require_no_capture(device)
    elements = _elements(offsets, by_place, by_position, nq, nk, batch, q_offset)
    if elements is None:
        return None
    relations, of_head = kinds
    sets, masks, group = list[RowSet](), list[NDArray[np.int32]](), np.empty((len(elements.q), heads), np.int32)
    count = codes = 0
    for number, (relation, look) in enumerate(relations):
        relation.check(nq, nk + int(elements.k.max()), int(elements.q.max()))
        row_set, of_set, like = _row_set(_rows(relation, look, nq, tile), elements, nk, codes)
        group[:, of_head == number] = (count + like)[:, None]
        sets.append(row_set)
        masks.append(of_set)
        count, codes = count + row_set.sets, codes + len(of_set)
    packed = masks[0] if len(masks) == 1 else np.concatenate(masks)
    return assemble(sets, np.broadcast_to(group, (batch, heads)), packed, nq, nk, q_offset, tile, device)


def _taken_apart(
    pattern: Pattern,
) -> tuple[tuple[str, ...], Offsets | None, list[KeyPadding], list[KeyPadding]] | None:
    """Split a pattern into its relations, offsets, bounds on places and bounds on positions; None if it has others."""
    by_place, by_position, relations = list[KeyPadding](), list[KeyPadding](), list[str]()
    offsets: Offsets | None = None
    for part in pattern.parts if isinstance(pattern, And) else (pattern,):
        if isinstance(part, KeyPadding):
            by_place.append(part)
            continue
        inside: Pattern = part
        if isinstance(part, Shifted):
            if offsets is not None or relations:
                return None
            inside, offsets = part.pattern, part.offsets
        elif offsets is not None:
            return None
        for each in inside.parts if isinstance(inside, And) else (inside,):
            if isinstance(each, KeyPadding):
                (by_place if offsets is None else by_position).append(each)
            elif each.fixed:
                relations.append(each.spec)
            else:
                return None
    return tuple(relations), offsets, by_place, by_position


# approximate bytes of an entry about a pattern
_PATTERN_BYTES = 2048


def _kinds(specs: tuple[str, ...], heads: int) -> tuple[list[tuple[Pattern, DistanceProfile]], Int64] | None:
    """Return the distinct relations of heads, and each head's number; None if one does not depend on distance."""
    key = "kinds", specs, heads
    found = PATTERNS.get(key)
    if found is None:
        found = (_found_kinds(specs, heads),)
        PATTERNS.put(key, found, _PATTERN_BYTES)
    kinds: tuple[list[tuple[Pattern, DistanceProfile]], Int64] | None = found[0]
    return kinds


def _found_kinds(specs: tuple[str, ...], heads: int) -> tuple[list[tuple[Pattern, DistanceProfile]], Int64] | None:
    parts = [rebuild(spec, ()) for spec in specs or ("Full()",)]
    whole = join(And, *parts)
    made = whole.extents()[1]
    if made not in (None, heads):
        return None
    found: dict[str, tuple[int, Pattern]] = {}
    of_head = np.zeros(heads, np.int64)
    for h in range(1 if made is None else heads):
        each = whole.select(0, h)
        of_head[h] = found.setdefault(each.spec, (len(found), each))[0]
    relations = []
    for _, each in found.values():
        look = each.distance_profile()
        if look is None:
            return None
        relations.append((each, look))
    return relations, of_head


def _elements(
    offsets: Offsets | None,
    by_place: list[KeyPadding],
    by_position: list[KeyPadding],
    nq: int,
    nk: int,
    batch: int,
    q_offset: int,
) -> Placement | None:
    """Return the placement of elements; None if bounds do not fit the call, so that planning raises the error."""
    q, k = np.full(1, q_offset, np.int64), np.zeros(1, np.int64)
    if offsets is not None:
        q, k = rows_of(offsets.table, 2).T
        q = q + q_offset
    start, stop = np.zeros(1, np.int64), np.full(1, nk, np.int64)
    origins = [np.zeros(1, np.int64)] * len(by_place) + [k] * len(by_position)
    for keys, origin in zip(by_place + by_position, origins, strict=True):
        low, high = keys._now
        if (low < 0).any() or (low > high).any() or (high > nk + origin.max()).any():
            return None
        if len({len(low), len(start), len(k), 1}) > 2:
            return None
        start, stop = np.maximum(start, low - origin), np.minimum(stop, high - origin)
    rows = max(len(q), len(start))
    wrong = (q < 0).any() or (q > LONGEST - nq).any() or (k < 0).any() or (k > LONGEST - nk).any()
    if wrong or rows not in (1, batch):
        return None
    q, k, start, stop = np.broadcast_arrays(q, k, start, np.maximum(stop, start))
    return Placement(q, k, start, stop)


def _rows(relation: Pattern, look: DistanceProfile, nq: int, tile: tuple[int, int]) -> RowCache:
    rows: RowCache | None = PATTERNS.get(("rows", relation.spec, nq, *tile))
    if rows is None:
        rows = RowCache(relation, look, nq, tile)
        PATTERNS.put(rows.key, rows, rows.nbytes)
    return rows


def _row_set(rows: RowCache, elements: Placement, nk: int, first_code: int) -> tuple[RowSet, NDArray[np.int32], Int64]:
    """Return the distinct rows of a relation's elements, their masks, and the row of each element."""
    placement, skip = canonical(elements, rows.look, rows.nq, rows.tile[1])
    fields = np.stack([placement.q, placement.k, placement.start, placement.stop, *skip], 1)
    distinct: dict[tuple[int, ...], int] = {}
    like = [distinct.setdefault(each, len(distinct)) for each in map(tuple, fields.tolist())]
    places = [each[:4] for each in distinct]
    planned, grown = rows.at(places)
    if grown:
        PATTERNS.put(rows.key, rows, rows.nbytes)
    at, tiles, full = np.array([each[4:] for each in distinct], np.int64).T
    skip = Skip(at, tiles, full > 0)
    row_set = _shift_from(_cached(planned, places), skip)
    leading, rest = planned.leading, nk % rows.tile[1]
    if rest and len(leading):
        # a mask that allows all existing keys of the last tile is a full tile
        mask_id, last = row_set.mask_id, row_set.col == nk // rows.tile[1]
        row_set.mask_id = np.where(last & (mask_id >= 0) & (leading[mask_id] == rest), -1, mask_id)
    partial = row_set.mask_id >= 0
    used, codes = np.unique(row_set.mask_id[partial], return_inverse=True)
    row_set.mask_id[partial] = first_code + codes.reshape(-1)
    return _insert_full_tiles(row_set, skip), planned.mask_words[used], np.array(like, np.int32)


def _cached(planned: _Planned, places: Sequence[tuple[int, ...]]) -> RowSet:
    """Return the planned rows of the given placements."""
    number = np.array([planned.known[place] for place in places], np.int64)
    length = planned.ptr[number + 1] - planned.ptr[number]
    index = _spread(planned.ptr[number], length)
    return RowSet(np.repeat(np.arange(len(places)), length), planned.col[index], planned.mask_id[index], len(places))


def _shift_from(rows: RowSet, skip: Skip) -> RowSet:
    """Move the tiles from ``skip.at`` on behind the skipped tiles."""
    col = rows.col + np.where(rows.col >= skip.at[rows.row], skip.tiles[rows.row], 0)
    return RowSet(rows.row, col, rows.mask_id, rows.sets)


def _insert_full_tiles(rows: RowSet, skip: Skip) -> RowSet:
    """Insert the skipped tiles of the rows in which they are full."""
    count = np.where(skip.full, skip.tiles, 0)
    if not count.any():
        return rows
    row = np.concatenate([rows.row, np.repeat(np.arange(rows.sets), count)])
    col = np.concatenate([rows.col, _spread(skip.at, count)])
    mask_id = np.concatenate([rows.mask_id, np.full(len(row) - len(rows.row), -1, np.int32)])
    # linear, as the stable sort merges two ascending lists
    order = np.argsort(row << 32 | col, kind="stable")
    return RowSet(row[order], col[order], mask_id[order], rows.sets)


def canonical(placement: Placement, profile: DistanceProfile, nq: int, side: int) -> tuple[Placement, Skip]:
    """Reduce placements to equivalent ones near the first keys, which many elements and steps share."""
    placement, reach = attend_all(placement, profile, nq)
    return skip_tiles(drop_unreachable(drop_common(placement, reach), reach, nq), reach, side)


def attend_all(p: Placement, profile: DistanceProfile, nq: int) -> tuple[Placement, Reach]:
    """Move a single query that attends all keys up to itself next to the last key; only the keys' indices matter."""
    near = (p.q <= profile.every) & (p.stop + p.k == p.q + 1) & (nq == 1)
    reach = Reach(np.where(near, 0, profile.first), np.where(near, 0, profile.back), near | profile.far, profile.ahead)
    return replace(p, q=np.where(near, p.stop - 1, p.q), k=np.where(near, 0, p.k)), reach


def drop_common(p: Placement, reach: Reach) -> Placement:
    """Subtract the common part of the positions: past the first ones, only distances matter."""
    common = np.maximum(np.minimum(p.q, p.k) - reach.first, 0)
    return replace(p, q=p.q - common, k=p.k - common)


def drop_unreachable(p: Placement, reach: Reach, nq: int) -> Placement:
    """Drop keys ahead of every query's reach, and move queries that are past the reach of all keys."""
    settled = p.q >= reach.first
    seen = np.maximum(p.q + (nq + min(reach.ahead, _AHEAD)), reach.first) - p.k
    stop = np.where(settled, np.minimum(p.stop, np.maximum(seen, p.start)), p.stop)
    q = np.where(settled, np.minimum(p.q, np.maximum(stop + p.k, reach.first) + reach.back), p.q)
    empty = p.start >= stop
    return Placement(*np.where(empty, 0, (q, p.k, p.start, stop)))


def skip_tiles(p: Placement, reach: Reach, side: int) -> tuple[Placement, Skip]:
    """Skip tiles with all keys further back than ``reach.back``, and move queries and keys back across them."""
    edge = -(-np.maximum(reach.first - p.k, 0) // side)
    at = np.where(reach.far, np.maximum(edge, -(-p.start // side)), edge)
    exists = p.stop > 0
    tiles = np.where(exists, np.maximum((p.q - p.k - reach.back) // side - at, 0), 0)
    moved = tiles * side
    start = np.where(reach.far, p.start, np.maximum(p.start - moved, np.minimum(p.start, edge * side)))
    return Placement(p.q - moved, p.k, start, p.stop - moved), Skip(at, tiles, reach.far & exists)


def _spread(begin: Int64, length: Int64) -> Int64:
    """Concatenate the index ranges begin[i], ..., begin[i] + length[i] - 1."""
    found: Int64 = np.arange(int(length.sum())) + np.repeat(begin - np.cumsum(length) + length, length)
    return found
