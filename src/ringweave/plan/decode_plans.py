"""Plans of decoding steps, put together of rows that were planned before.

Where a relation goes by distance (``Pattern.lookback``), queries that stand alike in a tile attend the same tiles, less
those that they pass over between the first keys and the last. So a row of tiles is planned once for each way to stand,
and the plan of a batch, whose elements each stand at a place of their own, is gathered from such rows.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache import PATTERNS
from ..patterns import And, KeyPadding, Or, Pattern, rebuild
from ..patterns.algebra import join
from ..patterns.base import Lookback
from ..patterns.batch_axis import rows_of
from ..patterns.shifted import Offsets, Shifted
from ..patterns.tiles import Int64
from ..patterns.validate import LONGEST
from .block_plan import BlockPlan, Extent
from .csr import RowSet, assemble
from .cuda_sync import waits
from .from_pattern import MOST_IN_A_LINE, rows_of_elements

# rows of tiles that are kept of one relation; a window has as many as it and a tile have keys, until it begins
_MOST_ROWS = 2**13
_ROW_BYTES = 512
# steps of a decoding that goes on, and elements of a batch for which they are planned ahead
_NEXT, _MOST_GOING = 16, 64
# what is farther ahead is not told apart
_AHEAD = 2**40


class _Elements(NamedTuple):
    """Where batch elements stand, one for all where they are alike; by place among the keys that are there.

    Attributes:
        q: Position of the first query.
        k: Position of the first key.
        start: First key that exists.
        stop: The one after the last.
    """

    q: Int64
    k: Int64
    start: Int64
    stop: Int64


class _Planned(NamedTuple):
    """Rows that were planned, end to end, never written again.

    Attributes:
        known: Number of a row by where it stands: (q, k, start, stop).
        codes: Number of a mask by its bytes.
        ptr: Where the tiles of each row begin, and of the last one end.
        col: Key tiles.
        mask_id: As of a plan.
        mask_words: Distinct ones.
        leading: Of a mask that is the first keys for every query, how many; else 0.
    """

    known: dict[tuple[int, ...], int]
    codes: dict[bytes, int]
    ptr: Int64
    col: Int64
    mask_id: NDArray[np.int32]
    mask_words: NDArray[np.int32]
    leading: Int64


class Rows:
    """Rows of tiles of one relation, by where they stand.

    Args:
        relation: One of a single head.
        look: How far it looks back.
        nq: Queries, in one row of tiles.
        tile: Its sides.
    """

    def __init__(self, relation: Pattern, look: Lookback, nq: int, tile: tuple[int, int]):
        self.relation, self.look, self.nq, self.tile = relation, look, nq, tile
        self.key = "rows", relation.spec, nq, *tile
        # one thread plans, the others wait; a signal handler that has interrupted it plans for itself
        self._lock = threading.RLock()
        none = np.zeros(0, np.int64)
        masks = np.zeros((0, tile[0], -(-tile[1] // 32)), np.int32)
        self._empty = self.planned = _Planned({}, {}, np.zeros(1, np.int64), none, none.astype(np.int32), masks, none)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        planned = self.planned
        # masks are held as bytes, too
        return sum(x.nbytes for x in planned[2:]) + planned.mask_words.nbytes + _ROW_BYTES * (1 + len(planned.known))

    def at(self, places: Sequence[tuple[int, ...]]) -> tuple[_Planned, bool]:
        """Rows with those that stand at (q, k, start, stop), and whether some of them were planned for it."""
        with self._lock:
            planned = self.planned
            missing = [*dict.fromkeys(place for place in places if place not in planned.known)]
            if not missing:
                return planned, False
            missing += self._next(missing)
            if len(missing) + len(planned.known) > _MOST_ROWS:
                planned, missing = self._empty, [*dict.fromkeys(places)]
            # at once: what is interrupted changes nothing
            self.planned = self._grown(planned, missing)
            return self.planned, True

    def _next(self, missing: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Where steps will stand that go on from one token to the next: to plan some at once takes little longer."""
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
    """Plan one row of tiles as :func:`build` does, of rows that are kept; None of what does not go by distance."""
    nq, nk, heads, batch, tile, q_offset, device = extent
    taken = _taken_apart(pattern)
    if taken is None:
        return None
    specs, offsets, by_place, by_position = taken
    kinds = _kinds(specs, heads)
    if kinds is None or -(-nk // tile[1]) > MOST_IN_A_LINE:
        return None
    waits(device)
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
    packed = torch.from_numpy(masks[0] if len(masks) == 1 else np.concatenate(masks))
    spread = torch.from_numpy(group).expand(batch, heads)
    return assemble(sets, spread, packed, nq, nk, q_offset, tile, device)


def _taken_apart(
    pattern: Pattern,
) -> tuple[tuple[str, ...], Offsets | None, list[KeyPadding], list[KeyPadding]] | None:
    """The relations that a pattern joins, its offsets, and bounds by place and by position; None of other patterns."""
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


# about, of what is known of a pattern
_PATTERN_BYTES = 2048


def _kinds(specs: tuple[str, ...], heads: int) -> tuple[list[tuple[Pattern, Lookback]], Int64] | None:
    """The different relations of heads, and which of them each has; None where one does not go by distance."""
    key = "kinds", specs, heads
    found = PATTERNS.get(key)
    if found is None:
        found = (_found_kinds(specs, heads),)
        PATTERNS.put(key, found, _PATTERN_BYTES)
    kinds: tuple[list[tuple[Pattern, Lookback]], Int64] | None = found[0]
    return kinds


def _found_kinds(specs: tuple[str, ...], heads: int) -> tuple[list[tuple[Pattern, Lookback]], Int64] | None:
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
        look = each.lookback()
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
    """Where elements stand; None where bounds are not those of the call, which planning says."""
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


def _rows(relation: Pattern, look: Lookback, nq: int, tile: tuple[int, int]) -> Rows:
    rows: Rows | None = PATTERNS.get(("rows", relation.spec, nq, *tile))
    if rows is None:
        rows = Rows(relation, look, nq, tile)
        PATTERNS.put(rows.key, rows, rows.nbytes)
    return rows


def _row_set(rows: Rows, elements: _Elements, nk: int, first_code: int) -> tuple[RowSet, NDArray[np.int32], Int64]:
    """The different rows of a relation's elements, their masks, and which row each element has."""
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
        # all there is of the last tile
        bits = np.where((col == nk // side) & (bits >= 0) & (leading[bits] == rest), -1, bits)
    partial = bits >= 0
    used, codes = np.unique(bits[partial], return_inverse=True)
    bits[partial] = first_code + codes.reshape(-1)
    if filled.any():
        # full tiles in between
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
    look: Lookback, elements: _Elements, nq: int, side: int
) -> tuple[list[int], list[int], list[bool], tuple[list[int], ...]]:
    """How elements stand: from which tile on they pass over how many, whether those are full, and where they are then.

    Where they are, (q, k, start, stop), is near the first keys, so that it is the same for many.
    """
    q, k, start, stop = elements
    first, back, far = np.full(len(q), look.first), np.full(len(q), look.back), np.full(len(q), look.far)
    if nq == 1 and look.every >= 0:
        # all keys up to the query: by place, whatever the relation says of distances
        near = (q <= look.every) & (stop + k == q + 1)
        first, back, far = np.where(near, 0, first), np.where(near, 0, back), far | near
        q, k = np.where(near, stop - 1, q), np.where(near, 0, k)
    # without first keys only distances count
    dropped = np.maximum(np.minimum(q, k) - first, 0)
    q, k = q - dropped, k - dropped
    # keys ahead that no query sees, and queries that are past all keys
    settled = q >= first
    seen = np.maximum(q + (nq + min(look.ahead, _AHEAD)), first) - k
    stop = np.where(settled, np.minimum(stop, np.maximum(seen, start)), stop)
    q = np.where(settled, np.minimum(q, np.maximum(stop + k, first) + back), q)
    none = start >= stop
    q, k, start, stop = [np.where(none, 0, x) for x in (q, k, start, stop)]
    # tiles in which all keys are farther than the relation looks back
    at = -(-np.maximum(first - k, 0) // side)
    edge = at * side
    at = np.where(far, np.maximum(at, -(-start // side)), at)
    over = np.where(none, 0, np.maximum((q - k - back) // side - at, 0))
    q, stop = q - over * side, stop - over * side
    start = np.where(far, start, np.maximum(start - over * side, np.minimum(start, edge)))
    places = q.tolist(), k.tolist(), start.tolist(), stop.tolist()
    return at.tolist(), over.tolist(), (far & ~none).tolist(), places


class Run(NamedTuple):
    """Decoding steps that share a plan, but for the tiles that each passes over.

    Attributes:
        key: What the steps have in common.
        first: The first tile that a step may pass over.
        behind: Keys that this step passes over from there on.
    """

    key: Hashable
    first: int
    behind: int


def _lookback(spec: str) -> Lookback | None:
    found: tuple[Lookback | None] | None = PATTERNS.get(("lookback", spec))
    if found is None:
        pattern = rebuild(spec, ())
        # whether one is cut into strided views may depend on the length
        parts = pattern.parts if isinstance(pattern, Or) else (pattern,)
        found = (pattern.lookback() if all(part.residue_rate == 1 for part in parts) else None,)
        PATTERNS.put(("lookback", spec), found, _PATTERN_BYTES)
    return found[0]


def run_of_lengths(spec: str, keys: int, side: int) -> Run | None:
    """Find the run of a decoding step: one query, the last of its keys. None of a pattern that does not go by distance.

    Steps in which all keys are attended share a plan while those fill as many tiles, of which none is partial. Where
    distances say what is attended, steps share one that end in the same place of a tile.

    Args:
        spec: A pattern without tables.
        keys: How many keys there are.
        side: Keys in a tile.
    """
    look = _lookback(spec)
    if look is None:
        return None
    if keys - 1 <= look.every:
        return Run((side, -(-keys // side)), 0, 0)
    first = -(-look.first // side)
    # a whole tile is left
    behind = min((keys - 1 - look.back) // side - first, (keys - 1) // side - 1) * side
    return (
        Run((side, "alone", keys), 0, 0)
        if look.far or behind < 0
        else Run((side, "last", keys - behind), first, behind)
    )


def _spread(begin: Int64, length: Int64) -> Int64:
    """Indices of pieces, end to end."""
    found: Int64 = np.arange(int(length.sum())) + np.repeat(begin - np.cumsum(length) + length, length)
    return found
