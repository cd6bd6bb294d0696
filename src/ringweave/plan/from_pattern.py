"""Plan a pattern, in time and memory that grow with the non-empty tiles.

For each query tile, a few key ranges contain every allowed key. The tiles in those ranges are classified (empty, full,
or one of a few masks), one tile of each class is evaluated by token, and the masks are deduplicated. Everything is
vectorised over tiles; the only Python loop runs over the distinct patterns among batch and heads.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache import PATTERNS
from ..checks import check_device
from ..errors import PatternError, ShapeError
from ..patterns import And, Not, Pattern
from ..patterns.algebra import Combined
from ..patterns.base import parts_of
from ..patterns.shifted import Shifted
from ..relation import node as relation
from ..relation.node import ELEMENT_BITS
from ..relation.tiles import Masks, strips, tiling
from ..relation.transforms import by_place, simplified
from ..patterns.batch_axis import Shared
from ..patterns.fitting import check_extents
from ..patterns.tiles import EMPTY, FULL, Int64, Ranges, Tiles, unique_ids
from ..patterns.within import batched, by_head, check_bounds, elements
from .block_plan import BlockPlan, Extent
from .csr import RowSet, assemble, limit
from .cuda_sync import record_stream, require_no_capture, wait_for_stream
from .tile_size import check_tile_size, default_tile_size

if TYPE_CHECKING:
    from ..patterns.table import BlockTable
    from .from_table import CodeList, TableContext

_EVALUATED_AT_ONCE = 2**24  # mask bits
_TILES_AT_ONCE = 2**18
_TILES_SAMPLED = 2**22
_FIRST_BITS = np.array([(1 << n) - 1 for n in range(9)], np.uint8)
#: Most tiles in a row or in a column.
MOST_IN_A_LINE = 2**24
#: A pattern, and the starts of its distinct batch elements on the axis of all elements.
_Alike = tuple[Pattern, Int64]


def build(
    pattern: Pattern,
    nq: int,
    nk: int,
    *,
    heads: int = 1,
    batch: int = 1,
    q_offset: int = 0,
    tile: tuple[int, int],
    device: str | torch.device = "cpu",
) -> BlockPlan:
    """Plan a pattern without the cache; see :func:`ringweave.plan`."""
    _check(pattern, nq, nk, heads, batch, tile, device)
    extent = Extent(nq, nk, heads, batch, tile, q_offset, str(device))
    planned = _by_table(pattern, extent)
    if planned is not None:
        return planned
    patterns, group = distinct(pattern, extent)
    for each, _ in patterns:
        check_bounds(each, nq, nk, q_offset)
    masks = MaskIndex(tile)
    sets = [_rows(each, starts, nq, nk, q_offset, tile, masks) for each, starts in patterns]
    return assemble(sets, group, masks.packed(), nq, nk, q_offset, tile, device)


def _by_table(pattern: Pattern, extent: Extent) -> BlockPlan | None:
    """Plan a pattern from the blocks of its table; None without a table, or if its blocks do not fit the tiles."""
    if not pattern.tables:
        return None
    # imported with the first pattern that may contain a block table
    from .from_lists import from_lists, listed

    chosen = listed(pattern)
    if chosen is not None and extent.device == "cpu":
        return from_lists(*chosen, extent)
    from ..patterns.table import BlockTable
    from .from_table import fine, from_fine_table, from_table, split

    parts, q_offset = split(pattern, extent.tile), extent.q_offset
    if parts is None and not isinstance(pattern, BlockTable):
        return None
    pattern.check(extent.nq, extent.nk, q_offset)
    if parts is not None and q_offset and parts[0].blocks.shape[-2] > 1:
        parts = None
    if parts is not None and parts[0] is pattern:
        return from_table(parts[0], extent)
    if parts is not None and _by_context(parts[0], math.prod(extent.tiles)):
        table, every, none = parts
        context = _table_context(every.spec, none.spec, extent, table.blocks.shape[:-2], table.group or 1)
        return from_table(table, extent, context=context)
    if isinstance(pattern, BlockTable) and fine(pattern, extent.tile):
        return from_fine_table(pattern, extent) if q_offset == 0 or pattern.blocks.shape[-2] == 1 else None
    return None


def distinct(pattern: Pattern, extent: Extent) -> tuple[list[_Alike], NDArray[np.int32]]:
    """Return the distinct patterns of all batch elements and heads, and the row set that each uses, (B, Hq) int32."""
    heads, batch = extent.heads, extent.batch
    group = np.zeros((batch, heads), np.int32)
    found: list[_Alike] = []
    known: dict[Hashable, Int64] = {}
    count = 0
    apart = heads > 1 and by_head(pattern)
    for h in range(heads if apart else 1):
        each = batched(pattern, h)
        if each is None:
            return _one_by_one(pattern, extent)
        value = each.value() if apart else None
        if value not in known:
            starts, like = elements(each, batch)
            known[value] = count + like
            count += len(starts)
            # positions need the axis of all elements only if the elements differ
            found.append((each.part if isinstance(each, Shared) else each, starts))
        group[:, h:] = known[value][:, None]
    return found, group


def _one_by_one(pattern: Pattern, extent: Extent) -> tuple[list[_Alike], NDArray[np.int32]]:
    """Compute :func:`distinct` for a pattern that must be selected for one batch element at a time."""
    # errors of the whole pattern name the batch element; those of a selected pattern cannot
    pattern.check(extent.nq, extent.nk, extent.q_offset)
    heads, batch = extent.heads, extent.batch
    distinct: dict[Hashable, tuple[int, Pattern]] = {}
    known: dict[int, tuple[int, Pattern]] = {}
    group = np.zeros((batch, heads), np.int32)
    for b in range(batch):
        for h in range(heads):
            each = pattern.select(b, h)
            numbered = known.get(id(each))
            if numbered is None:
                # kept alive with its number, so that its id is not reused
                numbered = known[id(each)] = (distinct.setdefault(each.value(), (len(distinct), each))[0], each)
            group[b, h] = numbered[0]
    return [(each, np.zeros(1, np.int64)) for _, each in distinct.values()], group


def _table_context(every: str, none: str, extent: Extent, table: tuple[int, ...], group: int = 1) -> TableContext:
    key = "context", every, none, extent, tuple(table), group
    context: TableContext | None = PATTERNS.get(key)
    if context is None:
        context = _new_context(every, none, extent, table, group)
        record_stream(context, torch.device(extent.device))
        PATTERNS.put(key, context, context.nbytes)
    else:
        # a graph that is being captured may read it for the life of the process
        wait_for_stream(context, torch.device(extent.device))
    return context


def _new_context(every: str, none: str, extent: Extent, table: tuple[int, ...], group: int = 1) -> TableContext:
    from ..patterns.reader import rebuild
    from .from_table import TableContext, of_sets, runs_of

    nq, nk, heads, batch, tile, q_offset, device = extent
    require_no_capture(device)
    q_tiles, kv_tiles = extent.tiles
    step = max(1, _TILES_AT_ONCE // kv_tiles)
    masks = MaskIndex(tile)

    def listed(each: Pattern, starts: Int64) -> Iterator[CodeList]:
        # some rows at a time: adjacent tiles become runs, which are few even if the tiles are many
        for first in range(0, q_tiles, step):
            tiles = _rows(each, starts, nq, nk, q_offset, tile, masks, slice(first, first + step))
            yield (first + tiles.row) * kv_tiles + tiles.col, tiles.mask_id

    full, of_full = distinct(rebuild(every, ()), extent)
    inside = [[runs_of(*part) for part in listed(*each)] for each in full]
    empty, of_empty = distinct(rebuild(none, ()), extent)
    outside = [list(listed(*each)) for each in empty]
    sets = of_sets(table, group, batch, heads, "cpu")
    of_inside, of_outside, words = (torch.from_numpy(each) for each in (of_full, of_empty, masks.packed()))
    return TableContext.of((inside, of_inside), (outside, of_outside), words, sets, q_tiles * kv_tiles, device)


def _by_context(table: BlockTable, tiles: int) -> bool:
    """Return whether to plan the patterns around a table for all tiles, and cache that for other tables."""
    if table.tables[0].device.type != "cpu":
        return True
    from ..patterns.block_sets import ListedBlocks

    # On the host, planning the whole pattern finds equal rows of a mask, and computes only the set tiles of many.
    return tiles <= _TILES_AT_ONCE and (isinstance(table.blocks, ListedBlocks) or table.blocks.shape[-2] == 1)


def _check(
    pattern: Pattern,
    nq: int,
    nk: int,
    heads: int,
    batch: int,
    tile: tuple[int, int],
    device: str | torch.device,
) -> None:
    check_tile_size(tile)
    tiles = max(-(-nq // tile[0]), -(-nk // tile[1]))
    if tiles > MOST_IN_A_LINE:
        got = f"{tiles} tiles in a line"
        raise ShapeError("tile", got, f"at most {MOST_IN_A_LINE}", "Use larger tiles, or shorter sequences.")
    if not pattern.combinable:
        raise PatternError("pattern", repr(pattern), "a relation", "A LongNet has one plan per branch: see explain().")
    kind = torch.device(device).type
    if kind not in ("cpu", "meta"):
        check_device(device)
    check_extents(pattern, batch, heads, read=kind != "meta")


def rows_of_elements(
    pattern: Pattern, nq: int, nk: int, batch: int, tile: tuple[int, int], masks: dict[bytes, int]
) -> tuple[RowSet, Int64]:
    """Return the row sets of one head of a pattern with bounds, and the row set of each batch element; no checks.

    Mask numbers are those of ``masks``, to which new masks are added.
    """
    each = batched(pattern, 0)
    assert each is not None
    starts, like = elements(each, batch)
    return _rows(each, starts, nq, nk, 0, tile, MaskIndex(tile, masks)), like


def _rows(
    pattern: Pattern,
    starts: Int64,
    nq: int,
    nk: int,
    q_offset: int,
    tile: tuple[int, int],
    masks: MaskIndex,
    part: slice = slice(None),
) -> RowSet:
    """Return the row sets of distinct batch elements, which begin at ``starts`` on the pattern's axis."""
    q_tile, kv_tile = tile
    lo = np.arange(0, nq, q_tile, dtype=np.int64)[part]
    hi = np.minimum(lo + q_tile, nq)
    q_lo, q_hi = ((starts[:, None] + side + q_offset).reshape(-1) for side in (lo, hi))
    row, col = _candidates(pattern.key_ranges(q_lo, q_hi, nk), kv_tile, -(-nk // kv_tile))
    k_lo = col * kv_tile
    k_hi = np.minimum(k_lo + kv_tile, nk)
    if len(starts) > 1:
        base = np.repeat(starts, len(lo))[row]
        k_lo += base
        k_hi += base
    return classified(pattern, row, col, Tiles(q_lo[row], q_hi[row], k_lo, k_hi), masks, len(starts))


def relation_rows(
    pattern: Pattern,
    starts: Int64,
    nq: int,
    nk: int,
    q_offset: int,
    tile: tuple[int, int],
    masks: Masks,
    part: slice = slice(None),
) -> RowSet:
    elements = starts >> ELEMENT_BITS
    node, first, n = placed_relation(pattern, elements, nq, nk, q_offset)
    frame = strips(nq, nk, tile, elements=elements, q_first=first[0], k_first=first[1], q_offset=q_offset, part=part)
    tiles = tiling(node, frame, masks)
    return RowSet(*np.divmod(tiles.place, frame.width), tiles.mask.astype(np.int32), len(starts))


def placed_relation(pattern, elements, nq, nk, q_offset):
    shifted = parts_of(pattern, Shifted)
    zero = np.zeros_like(elements)
    if not shifted:
        return simplified(pattern.zones(max(nk, nq + q_offset))), (zero, zero), 0
    q, k = shifted[0].offsets._now
    n = max(nk + int(k.max()), nq + q_offset + int(q.max()))
    if len(q) > 1:
        q, k = q[elements], k[elements]
    else:
        q, k = zero + q, zero + k
    return simplified(_by_position(pattern, n)), (q, k), n


def _by_position(pattern, n):
    if isinstance(pattern, Shifted):
        return pattern.zones(n)
    if isinstance(pattern, Combined):
        kind = relation.And if isinstance(pattern, And) else relation.Or
        return kind([_by_position(part, n) for part in pattern.parts])
    if isinstance(pattern, Not):
        return relation.Not(_by_position(pattern.part, n))
    return by_place(pattern.zones(n))


def classified(pattern: Pattern, row: Int64, col: Int64, tiles: Tiles, masks: MaskIndex, sets: int) -> RowSet:
    """Return the row sets of the given tiles without those that are empty; new masks are added to ``masks``."""
    q_tile, kv_tile = masks.tile
    keys = pattern.tile_classes(tiles)
    bits = np.full(len(row), MaskIndex.FULL, np.int32)
    bits[keys == EMPTY] = MaskIndex.EMPTY
    partial = (keys > FULL).nonzero()[0]
    if len(partial):
        some = Tiles(*(side[partial] for side in tiles))
        # tiles that are clipped at the ends have other masks than whole tiles of their class
        clipped = (some.q_hi - some.q_lo != q_tile) * 2 + (some.k_hi - some.k_lo != kv_tile)
        first, like = unique_ids(keys[partial] * 4 + clipped)
        bits[partial] = masks.add(pattern, Tiles(*(side[first] for side in some)))[like]
    kept = bits != MaskIndex.EMPTY
    if not kept.all():
        row, col, bits = row[kept], col[kept], bits[kept]
    return RowSet(row, col, bits, sets)


def estimate_tiles(pattern: Pattern, nq: int, nk: int, *, heads: int = 1, q_offset: int = 0, sample: int = 64) -> float:
    """Estimate the tiles of default size in all heads of one batch element, from a sample of query tiles.

    The cost depends only on the sampled rows, not on the length; masks are not evaluated.
    """
    q_tile, kv_tile = default_tile_size(nq), default_tile_size(nk)
    rows = -(-nq // q_tile)
    sample = max(1, min(sample, _TILES_SAMPLED * kv_tile // nk))
    lo = np.unique(np.linspace(0, rows - 1, min(rows, sample)).round().astype(np.int64)) * q_tile
    q_lo, q_hi = lo + q_offset, np.minimum(lo + q_tile, nq) + q_offset
    counts: dict[Hashable, float] = {}
    total = 0.0
    alike = pattern.select(0, 0) is pattern
    for head in range(1 if alike else heads):
        each = pattern.select(0, head)
        key = each.value()
        if key not in counts:
            row, col = _candidates(each.key_ranges(q_lo, q_hi, nk), kv_tile, -(-nk // kv_tile))
            k_lo = col * kv_tile
            keys = each.tile_classes(Tiles(q_lo[row], q_hi[row], k_lo, np.minimum(k_lo + kv_tile, nk)))
            counts[key] = float((keys != EMPTY).sum()) / len(lo) * rows
        total += counts[key]
    return total * heads if alike else total


def _candidates(ranges: Ranges, kv_tile: int, kv_tiles: int) -> tuple[Int64, Int64]:
    """Return the tiles that the ranges touch, by row and ascending, each once."""
    start = np.minimum(np.maximum(ranges.start, 0) // kv_tile, kv_tiles)
    stop = np.minimum(-(-np.maximum(ranges.stop, 0) // kv_tile), kv_tiles)
    stop[ranges.stop <= ranges.start] = 0
    if start.shape[1] > 1:
        # both in one number, which sorts quicker than by an order of the starts
        both = np.sort(start << 32 | stop, axis=1)
        start, stop = both >> 32, both & (2**32 - 1)
        covered = np.maximum.accumulate(stop, axis=1)
        start[:, 1:] = np.maximum(start[:, 1:], covered[:, :-1])
    length = np.maximum(stop - start, 0)
    flat = length.reshape(-1)
    ends = np.cumsum(flat)
    total = int(ends[-1])
    limit(total)
    col = np.arange(total) - np.repeat(ends - flat - start.reshape(-1), flat)
    row = np.repeat(np.arange(len(start)), length.sum(1))
    return row, col


class MaskIndex:
    """Distinct packed masks, numbered; full and empty masks have codes of their own."""

    FULL, EMPTY = -1, -2

    def __init__(self, tile: tuple[int, int], index: dict[bytes, int] | None = None):
        self.tile = tile
        self.words = (tile[0], -(-tile[1] // 32))
        self.index = {} if index is None else index

    def add(self, pattern: Pattern, sample: Tiles) -> NDArray[np.int32]:
        """Evaluate the pattern on tiles by token; return for each its mask number, FULL or EMPTY."""
        q_tile, kv_tile = self.tile
        codes = np.empty(len(sample.q_lo), np.int32)
        # only the rows that exist, since a decoding step has one query
        high = int((sample.q_hi - sample.q_lo).max(initial=1))
        rows, columns = np.arange(high)[:, None], np.arange(kv_tile)
        step = max(1, _EVALUATED_AT_ONCE // (high * kv_tile))
        for begin in range(0, len(codes), step):
            q_lo, q_hi, k_lo, k_hi = (side[begin : begin + step, None, None] for side in sample)
            q, k = q_lo + rows, k_lo + columns
            existing = q < q_hi
            # positions past the ends are clamped, since a function may index tables by them
            for side, end in ((q, q_hi - 1), (k, k_hi - 1)):
                np.minimum(side, end, out=side)
            allowed = pattern.allows(torch.from_numpy(q), torch.from_numpy(k)).expand(len(q), high, kv_tile).numpy()
            inside = _FIRST_BITS.take(np.minimum(np.maximum(k_hi - k_lo - columns[::8], 0), 8)) * existing
            bits = np.packbits(allowed, axis=2, bitorder="little") & inside
            full, empty = (bits == inside).reshape(len(bits), -1).all(1), ~bits.reshape(len(bits), -1).any(1)
            part = codes[begin : begin + len(bits)]
            part[full], part[empty] = self.FULL, self.EMPTY
            mixed = (~(full | empty)).nonzero()[0]
            masks = np.zeros((len(mixed), q_tile, 4 * self.words[1]), np.uint8)
            masks[:, :high, : kv_tile // 8] = bits[mixed]
            part[mixed] = self.numbers(masks)
        return codes

    def numbers(self, masks: NDArray[Any]) -> list[int]:
        """Return the numbers of packed masks, (n, ...)."""
        each = np.ascontiguousarray(masks).reshape(-1).view(f"V{4 * self.words[0] * self.words[1]}")
        return [self.index.setdefault(mask, len(self.index)) for mask in each.tolist()]

    def packed(self) -> NDArray[np.int32]:
        """Return the masks in the order of their numbers."""
        return np.frombuffer(bytearray().join(self.index), "<i4").reshape(-1, *self.words)
