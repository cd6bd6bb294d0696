"""Plan the lists of keys that a model chose, query by query.

A list filtered by other patterns is a shorter list, so ``Selected & relation`` evaluates the relation at listed keys
only. There are two kinds of plans. In tiles of many queries, the tiles and masks are the union of the lists. In tiles
of one query, each listed block of keys is a tile, or the listed keys are packed to tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache import process_cache
from ..chunks import chunks
from ..patterns import Full
from ..patterns.lists import Lists
from ..patterns.located import Located, located
from ..patterns.within import check_bounds
from ..relation.arrays import Int64
from ..relation.node import ELEMENT_BITS
from ..relation.tiles import EMPTY_TILE, FULL_TILE, Masks, limit, numbered
from .block_plan import BlockPlan, Extent, PackedPlan, pack_masks
from .csr import RowSet, assemble
from .from_pattern import distinct
from .from_table import of_sets


def from_lists(lists: Lists, extent: Extent) -> BlockPlan:
    """Plan lists in tiles of several queries, with masks of the keys that each query lists; on a CPU."""
    sets, row_set = _sets(lists, extent)
    found, masks, whole = [], Masks(extent.tile), _whole_tiles(extent)
    for each in sets:
        row, col, mask_id = list[Int64](), list[Int64](), list[NDArray[np.int32]]()
        for first, union in _unions(each, lists, extent):
            part_row, part_col = np.nonzero(union.any((2, 3)))
            row.append(part_row + first)
            col.append(part_col)
            chosen = union[part_row, part_col]
            cut = (part_row + first == extent.tiles[0] - 1).astype(int), (part_col == extent.tiles[1] - 1).astype(int)
            mixed = (chosen != whole[cut]).any((1, 2))
            numbers = np.full(len(chosen), FULL_TILE, np.int32)
            numbers[mixed] = masks.numbers(chosen[mixed])
            mask_id.append(numbers)
        found.append(RowSet(np.concatenate(row), np.concatenate(col), np.concatenate(mask_id)))
    limit(sum(len(each.row) for each in found))
    sizes = extent.nq, extent.nk, extent.q_offset, extent.tile, extent.device
    return assemble(found, row_set, masks.bank(), *sizes)


def by_query(lists: Lists, extent: Extent, group: int) -> BlockPlan:
    """Plan lists in tiles of one query and the heads that share its list; on a CPU.

    Args:
        lists: The lists.
        extent: The extent of the call; its tile is (1, ``lists.tile``).
        group: Number of adjacent query heads that share each list.
    Returns:
        A plan for ``group * nq`` queries: query i of head h is row ``group * i + h`` of a key head. It is a
        :class:`PackedPlan` if keys are packed.
    """
    return _grouped(_packed(lists, extent) if lists.packed else _in_blocks(lists, extent), group)


def _in_blocks(lists: Lists, extent: Extent) -> BlockPlan:
    """Plan lists in tiles of one query and a listed block, or a part of it."""
    sets, row_set = _sets(lists, extent)
    masks, side = Masks(extent.tile), extent.tile[1]
    found = []
    for blocks, filter_ in sets:
        parts = lists.block // side
        row, place = (blocks < lists.blocks.key_blocks).nonzero()
        col = blocks[row, place].astype(np.int64)
        if parts > 1:
            row, col = np.repeat(row, parts), (col[:, None] * parts + np.arange(parts)).reshape(-1)
        inside = col * side < extent.nk
        if not inside.all():
            row, col = row[inside], col[inside]
        numbers = np.full(len(row), FULL_TILE, np.int32)
        if filter_ is not None:
            frame = filter_.strips(extent.nq, extent.nk, extent.tile, q_offset=extent.q_offset)
            numbers = numbered(filter_.node, frame.tiles(row * frame.width + col), masks).astype(np.int32)
            kept = numbers != EMPTY_TILE
            row, col, numbers = row[kept], col[kept], numbers[kept]
        found.append(RowSet(row, col, numbers))
    sizes = extent.nq, extent.nk, extent.q_offset, extent.tile, extent.device
    return assemble(found, row_set, masks.bank(), *sizes)


def _packed(lists: Lists, extent: Extent) -> PackedPlan:
    """Plan lists in tiles of one query and the keys that it attends, packed together."""
    sets, row_set = _sets(lists, extent)
    nq, side = extent.nq, extent.tile[1]
    row_ptr = np.zeros((len(sets), nq + 1), np.int64)
    keys, mask_id, tiles = list[NDArray[np.int32]](), list[NDArray[np.int32]](), 0
    for number, each in enumerate(sets):
        row, key = _every_pair(each, lists, extent)
        counts = np.bincount(row, minlength=nq)
        used = -(-counts // side)
        ends = np.cumsum(used)
        limit((tiles + int(ends[-1])) * side)
        row_ptr[number, 1:] = ends
        row_ptr[number] += tiles
        tiles += int(ends[-1])
        places = np.zeros(int(ends[-1]) * side, np.int32)
        # the keys of a row are adjacent, and the next row begins another tile
        places[np.arange(len(row)) + ((ends - used) * side - np.cumsum(counts) + counts)[row]] = key
        keys.append(places)
        # mask n of the plan has the first n + 1 keys of a tile
        mask_id.append(np.full(int(ends[-1]), FULL_TILE, np.int32))
        rest = counts % side
        mask_id[-1][ends[rest > 0] - 1] = rest[rest > 0] - 1
    chosen = np.concatenate(keys) if tiles else np.zeros(side, np.int32)
    unused = torch.zeros(0, dtype=torch.int32, device="cpu")
    return PackedPlan(
        row_ptr=torch.from_numpy(row_ptr).int(), col=torch.arange(tiles, dtype=torch.int32, device="cpu"),
        mask_id=torch.from_numpy(np.concatenate(mask_id)), col_ptr=unused.new_zeros(len(sets), 1), row=unused,
        mask_id_t=unused, mask_words=_prefixes(side), row_set=torch.from_numpy(row_set), launch_order=unused,
        nq=nq, nk=max(tiles, 1) * side, q_tile=1, kv_tile=side, chosen=torch.from_numpy(chosen),
    )  # fmt: skip


@process_cache
def _prefixes(side: int) -> Tensor:
    """Return the masks of one row with the first 1, 2, ... side - 1 keys of a tile."""
    return pack_masks(torch.ones(side - 1, side, dtype=torch.bool, device="cpu").tril()[:, None])


def _every_pair(each: _Set, lists: Lists, extent: Extent) -> tuple[Int64, Int64]:
    """Return all allowed pairs of a set as (query, key), by query and then by key."""
    parts = []
    for part in chunks(extent.nq, 8 * each.blocks.shape[1] * lists.block):
        row, key = _pairs(each, lists, extent, range(part.start, part.stop))
        parts.append((row + part.start, key))
    rows, keys = zip(*parts, strict=True)
    return np.concatenate(rows), np.concatenate(keys)


def _grouped(plan: BlockPlan, group: int) -> BlockPlan:
    """Convert a plan in tiles of one query to one with a row for each head of ``group`` that shares its list."""
    return dataclasses.replace(
        plan,
        mask_words=plan.mask_words.expand(-1, group, -1).contiguous(),
        row_set=plan.row_set[:, ::group].contiguous(),
        nq=plan.nq * group,
        q_tile=group,
        q_offset=0,
    )


class _Set(NamedTuple):
    """The lists of some heads or batch elements, (Nq, n), ascending with fillers at the end, and their relation.

    The relation is that of one batch element; None if it keeps all listed keys.
    """

    blocks: NDArray[np.int32]
    relation: Located | None


def filters(lists: Lists, extent: Extent) -> tuple[list[Located | None], NDArray[np.int32]]:
    """Return the distinct relations of single batch elements that filter lists, and which each (b, h) uses, (B, Hq).

    None keeps all listed keys.
    """
    found, of_relation = distinct(lists.relation, extent)
    relations: list[Located | None] = []
    for each, starts in found:
        check_bounds(each, extent.nq, extent.nk, extent.q_offset)
        here = located(each, (extent.q_offset + extent.nq, extent.nk), starts >> ELEMENT_BITS)
        relations += [None if isinstance(each, Full) else here.one(number) for number in range(len(starts))]
    return relations, of_relation


def listed_keys(blocks: Tensor, size: int, q: Tensor, nk: int, relation: Located | None) -> tuple[Tensor, Tensor]:
    """Return the keys that lists name, and whether the queries attend them; int64 and bool (..., R, n * size).

    Args:
        blocks: The lists of R queries, (..., R, n).
        size: Number of keys in a block.
        q: Places of the queries, (R,) int64.
        nk: Number of keys.
        relation: What filters the lists; None keeps all keys.
    """
    keys = blocks.long()
    if size > 1:
        keys = (keys[..., None] * size + torch.arange(size, device=keys.device)).flatten(-2)
    allowed = keys < nk
    # a function may index tables by the keys, so those that do not exist are clamped
    keys = torch.where(allowed, keys, 0)
    # no function is called with no pairs, which torch.vmap could not map
    if relation is not None and keys.numel():
        # the leading sides as one: a function takes four sides
        flat = keys.reshape(-1, *keys.shape[-2:])
        allowed &= relation.allows(q[:, None], flat).expand(flat.shape).reshape(keys.shape)
    return keys, allowed


def _sets(lists: Lists, extent: Extent) -> tuple[list[_Set], NDArray[np.int32]]:
    """Return the distinct lists with their relations, and the one that each batch element and head uses, (B, Hq)."""
    lists.check(extent.nq, extent.nk, extent.q_offset)
    table = lists.blocks.listed().numpy()
    of_lists = of_sets(table.shape[:-2], lists.group or 1, extent.batch, extent.heads, "cpu").numpy()
    relations, of_relation = filters(lists, extent)
    joint, row_set = np.unique(of_lists * len(relations) + of_relation, return_inverse=True)
    rows = slice(extent.q_offset, extent.q_offset + extent.nq) if table.shape[-2] > 1 else slice(None)
    each_list = table.reshape(-1, *table.shape[-2:])[:, rows]
    sets = [_Set(each_list[n // len(relations)], relations[n % len(relations)]) for n in joint.tolist()]
    return sets, row_set.reshape(of_lists.shape).astype(np.int32)


def _pairs(each: _Set, lists: Lists, extent: Extent, rows: range) -> tuple[Int64, Int64]:
    """Return the allowed pairs of some rows as (row, key), rows counted from the first one."""
    blocks = each.blocks[rows.start : rows.stop]
    used = int((blocks < lists.blocks.key_blocks).sum(1).max(initial=0))
    q = torch.arange(rows.start, rows.stop, device="cpu") + extent.q_offset
    found = listed_keys(torch.from_numpy(blocks[:, :used]), lists.block, q, extent.nk, each.relation)
    keys, allowed = (x.numpy() for x in found)
    return np.repeat(np.arange(len(keys)), allowed.sum(1)), keys[allowed]


def _whole_tiles(extent: Extent) -> NDArray[np.int32]:
    """Return the masks of full tiles, (2, 2, q_tile, words): by whether a tile is in the last row and column."""
    (q_tile, kv_tile), (rows, columns) = extent.tile, extent.tiles
    dense = np.zeros((2, 2, q_tile, -(-kv_tile // 32) * 32), np.bool_)
    for last in np.ndindex(2, 2):
        high = extent.nq - (rows - 1) * q_tile if last[0] else q_tile
        wide = extent.nk - (columns - 1) * kv_tile if last[1] else kv_tile
        dense[last][:high, :wide] = True
    return np.packbits(dense, axis=3, bitorder="little").view("<i4")


def _unions(each: _Set, lists: Lists, extent: Extent) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """Yield masks of some rows of tiles, (tiles, key tiles, q_tile, words), with the number of the first row."""
    q_tile, kv_tile = extent.tile
    rows, columns = extent.tiles
    width = -(-kv_tile // 32) * 32
    for part in chunks(rows, q_tile * columns * width):
        queries = range(part.start * q_tile, min(part.stop * q_tile, extent.nq))
        tiles = part.stop - part.start
        dense = np.zeros((tiles * q_tile, columns * width), np.bool_)
        row, key = _pairs(each, lists, extent, queries)
        dense[row, key if width == kv_tile else key // kv_tile * width + key % kv_tile] = True
        bits = np.packbits(dense, axis=1, bitorder="little").view("<i4")
        yield part.start, bits.reshape(tiles, q_tile, columns, width // 32).transpose(0, 2, 1, 3)
