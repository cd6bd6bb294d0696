"""Plan tables of blocks on the tile grid: every tile is full, no token is evaluated, all on the table's device.

On a CPU the lists are exact. On a GPU their exact length would have to be read back, which waits for all queued work.
So the lists get as many places as the table can have blocks, known without reading it, and ``row_ptr`` and ``col_ptr``
tell which places hold tiles. No shape on that path depends on values, so it can be captured in a CUDA graph, which
plans again at every replay. A table combined with patterns without tables, such as a causal pattern or a window, is
planned in this way, too: the tiles of the other patterns are planned once and cached on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..patterns import BlockTable, Full, Pattern
from ..patterns.algebra import leaves, replace
from ..patterns.block_sets import BlockSet
from ..relation.arrays import Int64
from .block_plan import BlockPlan, Extent
from .csr import TileList, to_csr

#: Most places of a list; a larger GPU plan is made exact, at the cost of one wait. Four such lists take 256 MiB.
MOST_PLACES = 2**24
# most words of masks that are made for all tiles of a fine table
_MOST_WORDS = 2**26


def from_table(
    pattern: BlockTable, extent: Extent, spare: bool | None = None, context: TableContext | None = None
) -> BlockPlan:
    """Plan a table with blocks that are the tiles.

    Args:
        pattern: The table.
        extent: The extent; its tile is the table's block size, and its offset is 0 unless the table has a single row.
            The table is copied to its device.
        spare: Whether the lists may have unused places; by default if the device is not a CPU and there are at most
            ``MOST_PLACES``.
        context: The other patterns that the table is combined with.
    """
    blocks = pattern.blocks.to(extent.device)
    lead = blocks.shape[:-2]
    sets = math.prod(lead) if context is None else len(context.of_table)
    room = sets * blocks.shape[-2] * blocks.most + (0 if context is None else context.outside.numel())
    if spare is None:
        spare = blocks.table.device.type != "cpu" and room <= MOST_PLACES
    tiles = table_tiles(blocks, spare)
    if context is not None:
        tiles = context.combine(tiles, blocks, spare)
        return _planned(tiles, sets, context.row_set, context.mask_words, extent, spare)
    row_set = of_sets(lead, pattern.group or 1, extent.batch, extent.heads, blocks.table.device).int()
    no_masks = torch.zeros(0, extent.tile[0], -(-extent.tile[1] // 32), dtype=torch.int32, device=row_set.device)
    return _planned(tiles, sets, row_set, no_masks, extent, spare)


def table_tiles(blocks: BlockSet, spare: bool) -> TileList:
    """List the set blocks of each table as the tiles of a row set.

    Args:
        blocks: The tables.
        spare: Whether to list a place for every block that a row could have, so that nothing is read back.
    """
    rows, width = blocks.shape[-2:]
    sets, device = math.prod(blocks.shape[:-2]), blocks.table.device
    if not spare and device.type == "cpu":
        # numpy takes a fraction of torch's time
        counts, column = (each.numpy() for each in blocks.lines())
        of_set = np.repeat(np.arange(sets), counts.reshape(sets, rows).sum(1))
        row = np.repeat(np.tile(np.arange(rows, dtype=np.int32), sets), counts)
        return TileList(*map(torch.from_numpy, (of_set, row, column)))
    set_number, row_number = torch.arange(sets, device=device), torch.arange(rows, device=device)
    if not spare:
        lengths, col = blocks.lines()
        per_set = set_number.repeat_interleave(lengths.view(sets, rows).sum(1))
        return TileList(per_set, row_number.repeat(sets).repeat_interleave(lengths), col)
    listed = blocks.listed().reshape(sets, rows, blocks.most)
    in_use = torch.where(listed < width, set_number[:, None, None], -1)
    return TileList(in_use.reshape(-1), row_number[:, None].expand(listed.shape).reshape(-1), listed.reshape(-1))


def _planned(tiles: TileList, sets: int, row_set: Tensor, mask_words: Tensor, extent: Extent, spare: bool) -> BlockPlan:
    lists = to_csr(tiles, sets, extent.tiles, spare=spare)
    rank = (2 * lists.row_ptr.diff(dim=1).reshape(-1).clamp(min=1).log2()).floor().to(torch.int16)
    return BlockPlan(
        **{name: each.int() for name, each in lists._asdict().items()},
        mask_words=mask_words,
        row_set=row_set,
        launch_order=torch.argsort(-rank, stable=True).int(),
        nq=extent.nq,
        nk=extent.nk,
        q_tile=extent.tile[0],
        kv_tile=extent.tile[1],
        q_offset=extent.q_offset,
        counted=not spare,
    )


def fine(pattern: BlockTable, tile: tuple[int, int]) -> bool:
    """Return whether blocks divide the tiles, cover whole words of masks, and are few enough to process them all."""
    high, wide = pattern.block_size
    # masks of larger blocks have few distinct values, so the general path, which deduplicates them, is better
    fills = high <= 16 and tile[0] % high == 0 and tile[1] % wide == 0 and wide % 32 == 0
    return fills and math.prod(pattern.blocks.shape) * high * wide // 32 <= _MOST_WORDS


def from_fine_table(pattern: BlockTable, extent: Extent, spare: bool | None = None) -> BlockPlan:
    """Plan a table with blocks that are parts of the tiles, such as a list of key blocks for every token.

    A tile's mask is made of its blocks. On a GPU a mask is made for every tile, so that nothing is read back.

    Args:
        pattern: A table that :func:`fine` accepts.
        extent: As in :func:`from_table`.
        spare: As in :func:`from_table`.
    """
    nq, nk, heads, batch, tile, *_ = extent
    blocks, (side, across) = pattern.blocks.to(extent.device), pattern.block_size
    lead, rows, width = blocks.shape[:-2], *blocks.shape[-2:]
    sets, (q_tiles, kv_tiles) = math.prod(lead), extent.tiles
    high, wide = tile[0] // side, tile[1] // across
    mask = blocks.mask().view(sets, rows, width)
    device = mask.device

    def of_tiles(mask: Tensor, past: bool) -> Tensor:
        sides = (0, kv_tiles * wide - width, 0, q_tiles * high - rows)
        padded = torch.nn.functional.pad(mask, sides, value=past)
        return padded.view(sets, q_tiles, high, kv_tiles, wide).transpose(2, 3)

    held = of_tiles(mask, False)
    used, full = held.flatten(3).any(3), of_tiles(mask, True).flatten(3).all(3)
    place = torch.arange(full.numel(), device=device).view(full.shape)
    number = place
    spare = device.type != "cpu" if spare is None else spare
    partial = used if spare else used & ~full
    if not spare:
        held, place = held[partial], place[partial]
        number = (partial.view(-1).cumsum(0) - 1).view(full.shape)
    words = held.reshape(-1, high, 1, wide, 1).expand(-1, -1, side, -1, across // 32)
    words = words.reshape(-1, tile[0], tile[1] // 32).int().neg()
    # mask bits past the ends are 0
    row, col = (place.view(-1) // kv_tiles % q_tiles)[:, None], (place.view(-1) % kv_tiles)[:, None]
    here = row * tile[0] + torch.arange(tile[0], device=device) < nq
    left = (nk - col * tile[1] - torch.arange(0, tile[1], 32, device=device)).clamp(0, 32)
    ends = torch.where(left == 32, -1, (torch.ones_like(left) << left) - 1).int()
    words &= torch.where(here[:, :, None], ends[:, None], 0)
    mask_id = torch.where(full, -1, number).int()
    of_set, of_row, of_col = (torch.arange(side, device=device) for side in full.shape)
    tiles = TileList(
        torch.where(used, of_set[:, None, None], -1).view(-1),
        of_row[:, None].expand(full.shape).reshape(-1),
        of_col.expand(full.shape).reshape(-1),
        mask_id.view(-1),
    )
    if not spare:
        tiles = _some(tiles, tiles.set >= 0)
    row_set = of_sets(lead, pattern.group or 1, batch, heads, device).int()
    return _planned(tiles, sets, row_set, words, extent, spare)


def _some(tiles: TileList, chosen: Tensor) -> TileList:
    """Return tiles by index or mask."""
    return TileList(*(None if each is None else each[chosen] for each in tiles))  # type: ignore[arg-type]


EMPTY = -2
#: Ascending places of tiles in a flat array of a head's tiles, and their codes.
CodeList = tuple[Int64, NDArray[np.int32]]
#: Begins, ends and codes of runs of tiles with one code.
CodeRuns = tuple[Int64, Int64, NDArray[np.int32]]


def split(pattern: Pattern, tile: tuple[int, int]) -> tuple[BlockTable, Pattern, Pattern] | None:
    """Split a pattern into its only table, on the tile grid, and itself with every block set and with none set."""
    tables = [leaf for leaf in leaves(pattern) if leaf.tables]
    table = tables[0] if tables else None
    if not isinstance(table, BlockTable) or table.block_size != tile:
        return None
    if not all(_same(table, leaf) for leaf in tables):
        return None
    every = replace(pattern, lambda leaf: Full() if leaf.tables else leaf)
    return table, every, replace(pattern, lambda leaf: ~Full() if leaf.tables else leaf)


def of_sets(lead: tuple[int, ...], group: int, batch: int, heads: int, device: str | torch.device) -> Tensor:
    """Return the row set of each batch element and head, (B, Hq) int64.

    The table has leading sides (), (H,) or (B, H), and ``group`` query heads share each of its heads.
    """
    sets = torch.arange(math.prod(lead), device=device).view(lead)
    if lead and group > 1:
        sets = sets[..., None].expand(*lead, group).flatten(-2)
    return sets.expand(batch, heads).contiguous()


def _same(a: Pattern, b: Pattern) -> bool:
    """Return whether two patterns are the same table in memory, without reading it."""
    # the table of one head begins where that of all heads does
    return a.spec == b.spec and all(
        (one.data_ptr(), one.shape, one.stride()) == (two.data_ptr(), two.shape, two.stride())
        for one, two in zip(a.tables, b.tables, strict=True)
    )


@dataclass(frozen=True, eq=False, repr=False)
class TableContext:
    """The tiles of a pattern with one table in it, for blocks that are set and for blocks that are not; on one device.

    At each tile, a combination of a table with other patterns equals the combination with every block set, or the one
    with no block set. Both are planned before the table is known. The tiles of the first are stored as runs of adjacent
    tiles with one code: a causal pattern has three runs per row of tiles at any length. The non-empty tiles of the
    second are listed.

    Attributes:
        starts: (S,) int64, ascending, beginning with 0: starts of runs in a flat array (P, query tiles, key tiles), for
            P distinct patterns. Of equal starts the last is valid.
        codes: (S,) int32: EMPTY, -1 full, else an index into ``mask_words``.
        outside: (E,) int64, ascending: non-empty tiles with no block set, in a flat array (G, query tiles, key tiles),
            for G joint row sets.
        outside_codes: (E,) int32, codes of these tiles.
        mask_words: Masks, as in a plan.
        of_table: (G,) int64, row set of the table that each joint row set uses.
        of_codes: (G,) int64, pattern, of P, that each joint row set uses.
        row_set: (B, Hq) int32, joint row set of each batch element and head.
    """

    starts: Tensor
    codes: Tensor
    outside: Tensor
    outside_codes: Tensor
    mask_words: Tensor
    of_table: Tensor
    of_codes: Tensor
    row_set: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, each.name).nbytes for each in fields(self))

    @staticmethod
    def of(
        inside: tuple[Sequence[Sequence[CodeRuns]], Tensor],
        outside: tuple[Sequence[Sequence[CodeList]], Tensor],
        masks: Tensor,
        table: Tensor,
        area: int,
        device: str | torch.device,
    ) -> TableContext:
        """Build a context from the tiles with every block set and with none, and the table's row sets.

        Args:
            inside: For every block set, the runs of each distinct pattern, in parts, and the pattern that each batch
                element and head uses, (B, Hq) int32.
            outside: For no block set, the listed tiles of each distinct pattern, in parts, and the pattern that each
                batch element and head uses, (B, Hq) int32.
            masks: Masks, as in a plan.
            table: (B, Hq), row set of the table that each uses.
            area: Number of tiles of a head.
            device: Device of the context.
        """
        runs = [(n * area + begin, n * area + end, code) for n, of in enumerate(inside[0]) for begin, end, code in of]
        begin, end, code = (np.concatenate(part) for part in zip(*runs, strict=True))
        # tiles after a run are empty, unless another run begins there
        starts = np.concatenate([np.zeros(1, np.int64), end, begin])
        codes = np.concatenate([np.full(1 + len(end), EMPTY, np.int32), code])
        order = np.argsort(starts, kind="stable")
        number = (table * len(inside[0]) + inside[1]) * len(outside[0]) + outside[1]
        joint, group = number.unique(return_inverse=True)
        joint, of_outside = joint // len(outside[0]), (joint % len(outside[0])).tolist()
        tiles = [(n * area + place, code) for n, of in enumerate(of_outside) for place, code in outside[0][of]]
        place, code = (np.concatenate(part) for part in zip(*tiles, strict=True))
        of_inside = joint % len(inside[0])
        known = map(torch.from_numpy, (starts[order], codes[order], place, code))
        moved = (*known, masks, joint // len(inside[0]), of_inside, group.int())
        return TableContext(*(x.to(device) for x in moved))

    def at(self, joint: Tensor, place: Tensor, area: int) -> Tensor:
        """Look up the codes of tiles with a set block, by joint row set and place in its ``area``; int64 to int32."""
        return self.codes[torch.searchsorted(self.starts, self.of_codes[joint] * area + place, right=True) - 1]

    def combine(self, tiles: TileList, blocks: BlockSet, spare: bool) -> TileList:
        """Return the tiles of the joint row sets for a table's tiles; ``spare`` as in :func:`table_tiles`."""
        rows, width = blocks.shape[-2:]
        sets, joint = math.prod(blocks.shape[:-2]), torch.arange(len(self.of_table), device=self.of_table.device)
        if spare:
            own = TileList(*(x.view(sets, -1)[self.of_table].view(-1) for x in tiles[:3]))
            joint = joint.repeat_interleave(tiles.set.numel() // sets)
        else:
            ends = torch.searchsorted(tiles.set, torch.arange(sets + 1, device=tiles.set.device)).tolist()
            parts = [slice(ends[t], ends[t + 1]) for t in self.of_table.tolist()]
            own = TileList(*(torch.cat([x[part] for part in parts]) for x in tiles[:3]))
            joint = torch.cat([joint[g].expand(part.stop - part.start) for g, part in enumerate(parts)])
        # the tiles of the pattern with every block set, looked up at the set blocks
        mask_id = self.at(joint, own.row * width + own.col, rows * width)
        inside = own._replace(set=torch.where((own.set < 0) | (mask_id == EMPTY), -1, joint), mask_id=mask_id)
        if not spare:
            inside = _some(inside, inside.set >= 0)
        if not self.outside.numel():
            return inside
        # the tiles of the pattern with no block set, where the table's block is not set
        line, col = self.outside // width, self.outside % width
        of_set, row = line // rows, line % rows
        free = ~blocks.held(self.of_table[of_set] * rows + row, col)
        outside = TileList(torch.where(free, of_set, -1), row, col, self.outside_codes)
        if not spare:
            outside = _some(outside, free)
        pairs = zip(inside, outside, strict=True)
        every = TileList(*(torch.cat([a, b]) for a, b in pairs if a is not None and b is not None))
        number = torch.where(every.set < 0, len(self.of_table), every.set) * rows + every.row
        return _some(every, (number * width + every.col).sort(stable=True).indices)


def runs_of(place: Int64, code: NDArray[np.int32]) -> CodeRuns:
    """Join adjacent tiles of equal codes, at ascending places, to runs (begin, end, code)."""
    ends = np.ones(len(place) + 1, np.bool_)
    ends[1:-1] = (place[1:] != place[:-1] + 1) | (code[1:] != code[:-1])
    first, last = np.flatnonzero(ends[:-1]), np.flatnonzero(ends[1:])
    return place[first], place[last] + 1, code[first]
