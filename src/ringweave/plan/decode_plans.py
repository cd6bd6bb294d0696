"""Plans of decoding steps, assembled from rows of tiles that were planned before.

If a relation depends on distance (``Pattern.distance_profile``), queries at equal places in a tile attend the same
tiles, except that later queries skip more tiles between the first keys and their window. So a row of tiles is planned
once for each placement of queries and keys in their tiles, and the plan of a batch, with a placement for each element,
is gathered from such rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
from ..patterns.tiles import Int64
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


class _Elements(NamedTuple):
    """The placement of batch elements; arrays of one entry if all elements have the same.

    Attributes:
        q: Position of the first query.
        k: Position of the first key.
        start: Index of the first key that exists.
        stop: End of the keys that exist, exclusive.
    """

    q: Int64
    k: Int64
    start: Int64
    stop: Int64


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
) -> _Elements | None:
    """Return the placement of elements; None if bounds do not fit the call, so that planning raises the error."""
    q, k = np.full(1, q_offset, np.int64), np.zeros(1, np.int64)
    if offsets is not None:
        q, k = rows_of(offsets.table, 2).T
        q = q + q_offset
    start, stop = np.zeros(1, np.int64), np.full(1, nk, np.int64)
    nowhere = np.zeros(1, np.int64)
    for keys, origin in (*((each, nowhere) for each in by_place), *((each, k) for each in by_position)):
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
    return _Elements(q, k, start, stop)


def _rows(relation: Pattern, look: DistanceProfile, nq: int, tile: tuple[int, int]) -> RowCache:
    rows: RowCache | None = PATTERNS.get(("rows", relation.spec, nq, *tile))
    if rows is None:
        rows = RowCache(relation, look, nq, tile)
        PATTERNS.put(rows.key, rows, rows.nbytes)
    return rows


def _row_set(rows: RowCache, elements: _Elements, nk: int, first_code: int) -> tuple[RowSet, NDArray[np.int32], Int64]:
    """Return the distinct rows of a relation's elements, their masks, and the row of each element."""
    side = rows.tile[1]
    at, over, filled, places = _stand(rows.look, elements, rows.nq, side)
    lines: dict[tuple[int, ...], int] = {}
    like = [lines.setdefault(line, len(lines)) for line in zip(*places, over, at, filled, strict=True)]
    planned, grown = rows.at([line[:4] for line in lines])
    if grown:
        PATTERNS.put(rows.key, rows, rows.nbytes)
    _, _, ptr, col, bits, masks, leading = planned
    number = np.array([planned.known[line[:4]] for line in lines], np.int64)
    over, at, filled = np.array([line[4:] for line in lines], np.int64).T
    begin, length = ptr[number], ptr[number + 1] - ptr[number]
    index = _spread(begin, length)
    line = np.repeat(np.arange(len(lines)), length)
    col, bits = col[index], bits[index]
    later = col >= at[line]
    col = col + np.where(later, over[line], 0)
    rest = nk % side
    if rest and len(leading):
        # a mask that allows all existing keys of the last tile is a full tile
        bits = np.where((col == nk // side) & (bits >= 0) & (leading[bits] == rest), -1, bits)
    partial = bits >= 0
    used, codes = np.unique(bits[partial], return_inverse=True)
    bits[partial] = first_code + codes.reshape(-1)
    if filled.any():
        # insert the skipped tiles, which are full
        between = over * filled
        place = np.arange(len(col)) + np.repeat(np.cumsum(between) - between, length) + later * between[line]
        before = np.bincount(line[~later], minlength=len(lines))
        length = length + between
        line = np.repeat(np.arange(len(lines)), length)
        every = np.arange(len(line)) + np.repeat(at - before - np.cumsum(length) + length, length)
        every[place] = col
        full = np.full(len(line), -1, np.int32)
        full[place] = bits
        col, bits = every, full
    return RowSet(line, col, bits, len(lines)), masks[used], np.array(like, np.int32)


def _stand(
    look: DistanceProfile, elements: _Elements, nq: int, side: int
) -> tuple[list[int], list[int], list[bool], tuple[list[int], ...]]:
    """Reduce placements to equivalent ones near the first keys, which many elements and steps share.

    Returns:
        For each element, the first tile that it may skip, the number of skipped tiles, whether these are full (else
        they are empty), and the reduced placement (q, k, start, stop).
    """
    q, k, start, stop = elements
    first, back, far = np.full(len(q), look.first), np.full(len(q), look.back), np.full(len(q), look.far)
    if nq == 1 and look.every >= 0:
        # the query attends all keys up to itself, so only the places of keys matter
        near = (q <= look.every) & (stop + k == q + 1)
        first, back, far = np.where(near, 0, first), np.where(near, 0, back), far | near
        q, k = np.where(near, stop - 1, q), np.where(near, 0, k)
    # past the first positions only distances matter, so subtract the common part of the positions
    dropped = np.maximum(np.minimum(q, k) - first, 0)
    q, k = q - dropped, k - dropped
    # drop keys ahead of every query's reach, and move queries that are past the reach of all keys
    settled = q >= first
    seen = np.maximum(q + (nq + min(look.ahead, _AHEAD)), first) - k
    stop = np.where(settled, np.minimum(stop, np.maximum(seen, start)), stop)
    q = np.where(settled, np.minimum(q, np.maximum(stop + k, first) + back), q)
    none = start >= stop
    q, k, start, stop = [np.where(none, 0, x) for x in (q, k, start, stop)]
    # skip tiles with all keys further back than ``look.back``
    at = -(-np.maximum(first - k, 0) // side)
    edge = at * side
    at = np.where(far, np.maximum(at, -(-start // side)), at)
    over = np.where(none, 0, np.maximum((q - k - back) // side - at, 0))
    q, stop = q - over * side, stop - over * side
    start = np.where(far, start, np.maximum(start - over * side, np.minimum(start, edge)))
    places = q.tolist(), k.tolist(), start.tolist(), stop.tolist()
    return at.tolist(), over.tolist(), (far & ~none).tolist(), places


def _spread(begin: Int64, length: Int64) -> Int64:
    """Concatenate the index ranges begin[i], ..., begin[i] + length[i] - 1."""
    found: Int64 = np.arange(int(length.sum())) + np.repeat(begin - np.cumsum(length) + length, length)
    return found
