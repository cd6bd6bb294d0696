"""Plan a pattern, in time and memory that grow with the non-empty tiles.

The pattern's zones give the tiles that are full, and those that may have an allowed pair, as intervals of each row of
tiles. The tiles between are classified, one tile of each class is evaluated by token, and the masks are deduplicated.
Everything is vectorised over tiles; the only Python loop runs over the distinct patterns among batch and heads.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache import PATTERNS
from ..checks import check_device
from ..chunks import at_once, chunks
from ..errors import PatternError, ShapeError
from ..patterns import Pattern
from ..patterns.fitting import check_extents
from ..patterns.lists import lists_of
from ..patterns.located import located
from ..patterns.within import batched, by_head, check_bounds, elements
from ..relation.arrays import Int64
from ..relation.node import ELEMENT_BITS
from ..relation.tiles import TILE_BYTES, Masks, estimated, tiling
from .block_plan import BlockPlan, Extent
from .csr import RowSet, assemble
from .cuda_sync import record_stream, require_no_capture, wait_for_stream
from .tile_size import check_tile_size, default_tile_size

if TYPE_CHECKING:
    from ..patterns.table import BlockTable
    from .from_table import CodeList, TableContext

_TILES_SAMPLED = 2**22
# most tiles in a row or in a column
_MOST_IN_A_LINE = 2**24
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
    masks = Masks(tile)
    sets = [_rows(each, starts, nq, nk, q_offset, tile, masks) for each, starts in patterns]
    return assemble(sets, group, masks.bank(), nq, nk, q_offset, tile, device)


def _by_table(pattern: Pattern, extent: Extent) -> BlockPlan | None:
    """Plan a pattern from the blocks of its table; None without a table, or if its blocks do not fit the tiles."""
    if not pattern.tables:
        return None
    lists = lists_of(pattern)
    if lists is not None and extent.device == "cpu":
        # imported with the first list of keys
        from .from_lists import from_lists

        return from_lists(lists, extent)
    # imported with the first pattern that may contain a block table
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
            found.append((each, starts))
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
    masks = Masks(tile)

    def listed(each: Pattern, starts: Int64) -> Iterator[CodeList]:
        # some rows at a time: adjacent tiles become runs, which are few even if the tiles are many
        for part in chunks(q_tiles, TILE_BYTES * kv_tiles):
            tiles = _rows(each, starts, nq, nk, q_offset, tile, masks, part)
            yield (part.start + tiles.row) * kv_tiles + tiles.col, tiles.mask_id

    full, of_full = distinct(rebuild(every, ()), extent)
    inside = [[runs_of(*part) for part in listed(*each)] for each in full]
    empty, of_empty = distinct(rebuild(none, ()), extent)
    outside = [list(listed(*each)) for each in empty]
    sets = of_sets(table, group, batch, heads, "cpu")
    of_inside, of_outside, words = (torch.from_numpy(each) for each in (of_full, of_empty, masks.bank()))
    return TableContext.of((inside, of_inside), (outside, of_outside), words, sets, q_tiles * kv_tiles, device)


def _by_context(table: BlockTable, tiles: int) -> bool:
    """Return whether to plan the patterns around a table for all tiles, and cache that for other tables."""
    if table.tables[0].device.type != "cpu":
        return True
    from ..patterns.block_sets import ListedBlocks

    # On the host, planning the whole pattern finds equal rows of a mask, and computes only the set tiles of many.
    return tiles <= at_once(TILE_BYTES) and (isinstance(table.blocks, ListedBlocks) or table.blocks.shape[-2] == 1)


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
    if tiles > _MOST_IN_A_LINE:
        got = f"{tiles} tiles in a line"
        raise ShapeError("tile", got, f"at most {_MOST_IN_A_LINE}", "Use larger tiles, or shorter sequences.")
    if not pattern.combinable:
        raise PatternError("pattern", repr(pattern), "a relation", "A LongNet has one plan per branch: see explain().")
    kind = torch.device(device).type
    if kind not in ("cpu", "meta"):
        check_device(device)
    check_extents(pattern, batch, heads, read=kind != "meta")


def _rows(
    pattern: Pattern,
    starts: Int64,
    nq: int,
    nk: int,
    q_offset: int,
    tile: tuple[int, int],
    masks: Masks,
    part: slice = slice(None),
) -> RowSet:
    """Return the row sets of distinct batch elements, which begin at ``starts`` on the pattern's axis."""
    here = located(pattern, (q_offset + nq, nk), starts >> ELEMENT_BITS)
    frame = here.strips(nq, nk, tile, q_offset=q_offset, part=part)
    tiles = tiling(here.node, frame, masks)
    row = tiles.place // frame.width
    return RowSet(row, tiles.place - row * frame.width, tiles.mask.astype(np.int32), len(starts))


def estimate_tiles(pattern: Pattern, nq: int, nk: int, *, heads: int = 1, q_offset: int = 0, sample: int = 64) -> float:
    """Estimate the tiles of default size in all heads of one batch element, from a sample of query tiles.

    The cost depends only on the sampled rows, not on the length; masks are not evaluated.
    """
    q_tile, kv_tile = default_tile_size(nq), default_tile_size(nk)
    rows = -(-nq // q_tile)
    sample = max(1, min(sample, _TILES_SAMPLED * kv_tile // nk))
    some = np.unique(np.linspace(0, rows - 1, min(rows, sample)).round().astype(np.int64))
    counts: dict[Hashable, float] = {}
    total = 0.0
    alike = pattern.select(0, 0) is pattern
    for head in range(1 if alike else heads):
        each = pattern.select(0, head)
        key = each.value()
        if key not in counts:
            here = located(each, (q_offset + nq, nk))
            frame = here.strips(nq, nk, (q_tile, kv_tile), q_offset=q_offset, part=some)
            counts[key] = estimated(here.node, frame) / len(some) * rows
        total += counts[key]
    return total * heads if alike else total
