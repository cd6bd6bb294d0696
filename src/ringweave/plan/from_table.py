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
from ..patterns.block_sets import BlockSet, MaskBlocks
from ..patterns.tiles import Int64
from .block_plan import BlockPlan, Extent
from .csr import stable_order

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
    nq, nk, heads, batch, tile, q_offset, _ = extent
    blocks = pattern.blocks.to(extent.device)
    lead = blocks.shape[:-2]
    sets = math.prod(lead) if context is None else len(context.of_table)
    room = sets * blocks.shape[-2] * blocks.most + (0 if context is None else context.outside.numel())
    if spare is None:
        spare = blocks.table.device.type != "cpu" and room <= MOST_PLACES
    row_ptr, col, bits, col_ptr, row, bits_t = (_with_room if spare else _exact)(blocks, sets, context)
    device = row_ptr.device
    rank = (2 * row_ptr.diff(dim=1).reshape(-1).clamp(min=1).log2()).floor().to(torch.int16)
    no_masks = torch.zeros(0, tile[0], -(-tile[1] // 32), dtype=torch.int32, device=device)
    return BlockPlan(
        row_ptr=row_ptr.int(),
        col=col.int(),
        mask_id=bits,
        col_ptr=col_ptr.int(),
        row=row.int(),
        mask_id_t=bits_t,
        mask_words=no_masks if context is None else context.mask_words,
        row_set=of_sets(lead, pattern.group or 1, batch, heads, device).int() if context is None else context.row_set,
        order=torch.argsort(-rank, stable=True).int(),
        nq=nq,
        nk=nk,
        q_tile=tile[0],
        kv_tile=tile[1],
        q_offset=q_offset,
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
    if not (device.type != "cpu" if spare is None else spare):
        partial = used & ~full
        held, place = held[partial], place[partial]
        number = (partial.view(-1).cumsum(0) - 1).view(full.shape)
    words = held.reshape(-1, high, 1, wide, 1).expand(-1, -1, side, -1, across // 32)
    words = words.reshape(-1, tile[0], tile[1] // 32).int().neg()
    # mask bits past the ends are 0
    row, col = (place.view(-1) // kv_tiles % q_tiles)[:, None], (place.view(-1) % kv_tiles)[:, None]
    here = row * tile[0] + torch.arange(tile[0], device=device) < nq
    left = (nk - col * tile[1] - torch.arange(0, tile[1], 32, device=device)).clamp(0, 32)
    ends = torch.where(left == 32, -1, (torch.ones_like(left) << left) - 1).int()
    context = TableContext(
        starts=torch.arange(full.numel(), device=device),
        codes=torch.where(full, -1, number).int().view(-1),
        outside=torch.zeros(0, dtype=torch.int64, device=device),
        outside_codes=torch.zeros(0, dtype=torch.int32, device=device),
        mask_words=words & torch.where(here[:, :, None], ends[:, None], 0),
        of_table=torch.arange(sets, device=device),
        of_codes=torch.arange(sets, device=device),
        row_set=of_sets(lead, pattern.group or 1, batch, heads, device).int(),
    )
    tiles = BlockTable.of(MaskBlocks(used.view(*lead, q_tiles, kv_tiles), kv_tiles), tile)
    return from_table(tiles, extent._replace(device=device), spare, context)


def _on_host(blocks: BlockSet, sets: int) -> tuple[Tensor, ...]:
    """Make the lists of a table without a context, on a CPU."""
    rows, width = blocks.shape[-2:]
    counts, col = blocks.lines()
    ends = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
    row_ptr = ends[np.arange(sets)[:, None] * rows + np.arange(rows + 1)]
    row = np.repeat(np.tile(np.arange(rows, dtype=np.int32), sets), counts)
    column = np.repeat(np.arange(sets) * width, row_ptr[:, -1] - row_ptr[:, 0])
    column += col
    below = np.concatenate([np.zeros(1, np.int64), np.bincount(column, minlength=sets * width).cumsum()])
    col_ptr = below[np.arange(sets)[:, None] * width + np.arange(width + 1)]
    if sets * width <= 2**16:
        order = stable_order(column, sets * width)
    else:
        # one set at a time, which stays in a processor's cache
        parts = [(int(each[0]), int(each[-1])) for each in row_ptr]
        order = np.concatenate(
            [lo + stable_order(column[lo:hi] - g * width, width) for g, (lo, hi) in enumerate(parts)]
        )
    bits = torch.full((len(col),), -1, dtype=torch.int32, device="cpu")
    at_row, cols, at_column, rows_of = (torch.from_numpy(each) for each in (row_ptr, col, col_ptr, row[order]))
    return at_row, cols, bits, at_column, rows_of, bits


def _exact(blocks: BlockSet, sets: int, context: TableContext | None) -> tuple[Tensor, ...]:
    """Make the lists of a plan with exact lengths."""
    if context is None and blocks.table.device.type == "cpu":
        return _on_host(blocks, sets)
    rows, width = blocks.shape[-2:]
    area = rows * width
    number = blocks.numbers()
    code: Tensor | None = None
    if context is not None:
        ends = torch.searchsorted(number, area * torch.arange(math.prod(blocks.shape[:-2]) + 1, device=number.device))
        of_table = context.of_table.tolist()
        parts = [number[ends[t] : ends[t + 1]] + (g - t) * area for g, t in enumerate(of_table)]
        number = torch.cat(parts)
        code = context.at(number // area, number % area, area)
        used, free = code != EMPTY, context.free(blocks)
        number, order = torch.cat([number[used], context.outside[free]]).sort()
        code = torch.cat([code[used], context.outside_codes[free]])[order]
    row_ptr = _starts(number, sets, rows, width)
    line = number // width
    col = (number - line * width).int()
    set_number = line // rows
    row = (line - set_number * rows).int()
    column = set_number * width + col
    ends = torch.nn.functional.pad(column.bincount(minlength=sets * width).cumsum(0), (1, 0))
    col_ptr = ends[_lines(sets, width, number.device)]
    if number.device.type == "cpu":
        parts = [(int(each[0]), int(each[-1])) for each in row_ptr]
        order = torch.from_numpy(np.concatenate([lo + stable_order(col.numpy()[lo:hi], width) for lo, hi in parts]))
    else:
        order = column.sort(stable=True).indices
    bits = torch.full_like(col, -1) if code is None else code
    return row_ptr, col, bits, col_ptr, row[order], bits if code is None else code[order]


def _lines(sets: int, lines: int, device: torch.device) -> Tensor:
    """Number the lines through all sets, with the end of each set: (sets, lines + 1)."""
    return torch.arange(sets, device=device)[:, None] * lines + torch.arange(lines + 1, device=device)


def _starts(number: Tensor, sets: int, lines: int, width: int) -> Tensor:
    """Find the starts of lines of ``width`` numbers in a sorted list, and the end of each set: (sets, lines + 1)."""
    return torch.searchsorted(number, (_lines(sets, lines, number.device) * width).to(number.dtype))


def _with_room(blocks: BlockSet, sets: int, context: TableContext | None) -> tuple[Tensor, ...]:
    """Make the lists of a plan with a place for every block that could be set, so that no shape depends on values."""
    listed, (rows, width) = blocks.listed(), blocks.shape[-2:]
    area, device = rows * width, listed.device
    listed = listed.reshape(math.prod(blocks.shape[:-2]), rows, blocks.most)
    set_number = torch.arange(sets, device=device)[:, None, None]
    if context is not None:
        listed = listed[context.of_table]
    place = torch.arange(rows, device=device)[:, None] * width + listed
    code = torch.full((place.numel(),), -1, dtype=torch.int32, device=device)
    if context is not None:
        code = torch.where((listed < width).reshape(-1), context.at(set_number, place, area), EMPTY)
    # places without a tile get the number past the end, and are sorted last
    used = (listed < width).reshape(-1) if context is None else code != EMPTY
    number = torch.where(used, (set_number * area + place).reshape(-1), sets * area)
    if context is not None and context.outside.numel():
        number = torch.cat([number, torch.where(context.free(blocks), context.outside, sets * area)])
        number, order = number.sort(stable=True)
        code = torch.cat([code, context.outside_codes])[order]
    else:
        # they ascend already: used places are only moved to the front
        places = number.numel()
        target = torch.where(used, used.cumsum(0) - 1, places)
        number = torch.full((places + 1,), sets * area, device=device).scatter_(0, target, number)[:places]
        code = torch.full((places + 1,), -1, dtype=torch.int32, device=device).scatter_(0, target, code)[:places]
    line, col = number // width, number % width
    column = torch.where(number < sets * area, line // rows * width + col, sets * width)
    # int32 has half the digits to sort by
    column = column.int() if sets * width < 2**31 else column
    column, order = column.sort(stable=True)
    ptrs = _starts(number, sets, rows, width), _starts(column, sets, width, 1)
    return ptrs[0], col, code, ptrs[1], (line % rows)[order], code[order]


EMPTY = -2
#: Ascending places of tiles in a flat array of a head's tiles, and their codes.
Listed = tuple[Int64, NDArray[np.int32]]
#: Begins, ends and codes of runs of tiles with one code.
Runs = tuple[Int64, Int64, NDArray[np.int32]]


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
    return a.spec == b.spec and all(
        one.data_ptr() == two.data_ptr() for one, two in zip(a.tables, b.tables, strict=True)
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
        inside: tuple[Sequence[Sequence[Runs]], Tensor],
        outside: tuple[Sequence[Sequence[Listed]], Tensor],
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

    def at(self, set_number: Tensor, place: Tensor, area: int) -> Tensor:
        """Look up the codes of tiles with a set block, by joint row set and place in its ``area``; int64 to int32."""
        number = (self.of_codes[set_number] * area + place).reshape(-1)
        return self.codes[torch.searchsorted(self.starts, number, right=True) - 1]

    def free(self, blocks: BlockSet) -> Tensor:
        """Return whether the table's block is not set at each tile of ``outside``, bool (E,)."""
        rows, width = blocks.shape[-2:]
        line = self.outside // width
        return ~blocks.held(self.of_table[line // rows] * rows + line % rows, self.outside % width)


def runs_of(place: Int64, code: NDArray[np.int32]) -> Runs:
    """Join adjacent tiles of equal codes, at ascending places, to runs (begin, end, code)."""
    ends = np.ones(len(place) + 1, np.bool_)
    ends[1:-1] = (place[1:] != place[:-1] + 1) | (code[1:] != code[:-1])
    first, last = np.flatnonzero(ends[:-1]), np.flatnonzero(ends[1:])
    return place[first], place[last] + 1, code[first]
