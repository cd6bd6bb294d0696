"""A table of blocks on the tile grid is its own plan: every tile full, no token evaluated, on the table's device.

On a CPU the lists are exact. On a GPU their length would have to be read back, which waits for all that was queued
before; so they get as many places as the table can have blocks, known without reading it, and ``row_ptr`` and
``col_ptr`` say which hold tiles. That path calls nothing whose shape depends on values: it can be captured in a CUDA
graph, and plans anew at every replay. A table combined with patterns that have none, such as a causal one or a
window, is planned like that too: their tiles are planned once, and kept on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..patterns import BlockTable
from ..patterns.blocks import Blocks
from ..patterns.tiles import Int64
from .block_plan import BlockPlan
from .radix import stable_order

#: Ascending places of tiles among all of a head, and their codes.
Listed = tuple[Int64, NDArray[np.int32]]
#: Where runs of tiles with one code begin and end, and their codes.
Runs = tuple[Int64, Int64, NDArray[np.int32]]
#: Places of a list beyond which a GPU plan is made exact, for one wait: four lists of them take a quarter of a GiB.
MOST_PLACES = 2**24
EMPTY = -2


@dataclass(frozen=True)
class Around:
    """The tiles of a pattern that has one table in it, where that is set and where it is not; all on one device.

    A combination of a table and of patterns without one is, at a tile, one of two: what it would be with every block
    set, or with none. Both are known before the table. Of the first, tiles side by side with one code are a run: a
    causal pattern has three in a row of tiles, whatever the length. Of the second, all that are not empty are listed.

    Attributes:
        starts: (S,) int64, ascending, the first 0: where a run begins in a flat array (P, query tiles, key tiles).
            Of equal ones the last counts.
        codes: (S,) int32: EMPTY, -1 full, else an index into ``masks``.
        outside: (E,) int64, ascending: tiles where the table is not set, in a flat array (G, query tiles, key tiles).
        outside_codes: (E,) int32.
        masks: As a plan's.
        of_table: (G,) int64, which row set of the table each of the joint ones uses.
        of_codes: (G,) int64, which of the P.
        group: (B, Hq) int32, which of the G a batch element and head uses.
    """

    starts: Tensor
    codes: Tensor
    outside: Tensor
    outside_codes: Tensor
    masks: Tensor
    of_table: Tensor
    of_codes: Tensor
    group: Tensor

    @staticmethod
    def of(
        inside: tuple[Sequence[Sequence[Runs]], Tensor],
        outside: tuple[Sequence[Sequence[Listed]], Tensor],
        masks: Tensor,
        table: tuple[int, ...],
        area: int,
        device: str | torch.device,
    ) -> Around:
        """From the tiles with every block set and with none, and the leading sides of the table.

        Args:
            inside: With every block set, the runs of each distinct pattern, in parts, and (B, Hq) int32 which pattern
                each uses.
            outside: The same with no block set, and all its tiles listed.
            masks: As a plan's.
            table: (), (heads,) or (batch, heads).
            area: Tiles of a head.
            device: Where it goes.
        """
        runs = [(n * area + begin, n * area + end, code) for n, of in enumerate(inside[0]) for begin, end, code in of]
        begin, end, code = (np.concatenate(part) for part in zip(*runs, strict=True))
        # what comes after a run is empty, unless another run begins there
        starts = np.concatenate([np.zeros(1, np.int64), end, begin])
        codes = np.concatenate([np.full(1 + len(end), EMPTY, np.int32), code])
        order = np.argsort(starts, kind="stable")
        of_table = torch.arange(math.prod(table)).reshape(table).expand(inside[1].shape)
        number = (of_table * len(inside[0]) + inside[1]) * len(outside[0]) + outside[1]
        joint, group = number.unique(return_inverse=True)
        joint, of_outside = joint // len(outside[0]), (joint % len(outside[0])).tolist()
        tiles = [(n * area + place, code) for n, of in enumerate(of_outside) for place, code in outside[0][of]]
        place, code = (np.concatenate(part) for part in zip(*tiles, strict=True))
        of_inside = joint % len(inside[0])
        known = map(torch.from_numpy, (starts[order], codes[order], place, code))
        moved = (*known, masks, joint // len(inside[0]), of_inside, group.int())
        return Around(*(x.to(device) for x in moved))

    def at(self, set_number: Tensor, place: Tensor, area: int) -> Tensor:
        """The codes of tiles with a set block, by joint row set and place in its ``area``; int32, of int64."""
        number = (self.of_codes[set_number] * area + place).reshape(-1)
        return self.codes[torch.searchsorted(self.starts, number, right=True) - 1]

    def free(self, blocks: Blocks) -> Tensor:
        """(E,) whether the table is not set at the tiles outside of it."""
        rows, width = blocks.shape[-2:]
        line = self.outside // width
        return ~blocks.held(self.of_table[line // rows] * rows + line % rows, self.outside % width)


def runs_of(place: Int64, code: NDArray[np.int32]) -> Runs:
    """Tiles at ascending places, each with a code, as runs (begin, end, code) of neighbours with one code."""
    ends = np.ones(len(place) + 1, np.bool_)
    ends[1:-1] = (place[1:] != place[:-1] + 1) | (code[1:] != code[:-1])
    first, last = np.flatnonzero(ends[:-1]), np.flatnonzero(ends[1:])
    return place[first], place[last] + 1, code[first]


def from_table(
    pattern: BlockTable,
    nq: int,
    nk: int,
    heads: int,
    batch: int,
    tile: tuple[int, int],
    device: str | torch.device,
    spare: bool | None = None,
    around: Around | None = None,
) -> BlockPlan:
    """The plan of a table whose blocks are the tiles.

    Args:
        pattern: The table.
        nq: Queries.
        nk: Keys.
        heads: Query heads.
        batch: Batch elements.
        tile: Its block size.
        device: Where the plan goes; the table is copied there.
        spare: Whether the lists may have places to spare; by default on anything but a CPU, where they are few enough.
        around: The pattern that the table is a part of.
    """
    blocks = pattern.blocks.to(device)
    lead = blocks.shape[:-2]
    sets = math.prod(lead) if around is None else len(around.of_table)
    room = sets * blocks.shape[-2] * blocks.most + (0 if around is None else around.outside.numel())
    if spare is None:
        spare = blocks.table.device.type != "cpu" and room <= MOST_PLACES
    row_ptr, col, bits, col_ptr, row, bits_t = (_with_room if spare else _exact)(blocks, sets, around)
    device = row_ptr.device
    group = torch.arange(sets, dtype=torch.int32, device=device)
    rank = (2 * row_ptr.diff(dim=1).reshape(-1).clamp(min=1).log2()).floor().to(torch.int16)
    no_masks = torch.zeros(0, tile[0], -(-tile[1] // 32), dtype=torch.int32, device=device)
    return BlockPlan(
        row_ptr=row_ptr.int(),
        col=col.int(),
        bits=bits,
        col_ptr=col_ptr.int(),
        row=row.int(),
        bits_t=bits_t,
        masks=no_masks if around is None else around.masks,
        group=group.view(lead).expand(batch, heads).contiguous() if around is None else around.group,
        order=torch.argsort(-rank, stable=True).int(),
        nq=nq,
        nk=nk,
        q_tile=tile[0],
        kv_tile=tile[1],
        counted=not spare,
    )


def _exact(blocks: Blocks, sets: int, around: Around | None) -> tuple[Tensor, ...]:
    """The lists of a plan, no longer than they are."""
    rows, width = blocks.shape[-2:]
    area = rows * width
    number = blocks.numbers()
    code: Tensor | None = None
    if around is not None:
        ends = torch.searchsorted(number, area * torch.arange(math.prod(blocks.shape[:-2]) + 1, device=number.device))
        of_table = around.of_table.tolist()
        parts = [number[ends[t] : ends[t + 1]] + (g - t) * area for g, t in enumerate(of_table)]
        number = torch.cat(parts)
        code = around.at(number // area, number % area, area)
        used, free = code != EMPTY, around.free(blocks)
        number, order = torch.cat([number[used], around.outside[free]]).sort()
        code = torch.cat([code[used], around.outside_codes[free]])[order]
    line = number // width
    col = number - line * width
    column = line // rows * width + col
    order = _by_column(column, sets * width)
    bits = torch.full_like(col, -1, dtype=torch.int32) if code is None else code
    ptrs = _starts(number, sets, rows, width), _starts(column[order], sets, width, 1)
    return ptrs[0], col, bits, ptrs[1], (line % rows)[order], bits if code is None else code[order]


def _by_column(column: Tensor, bound: int) -> Tensor:
    if column.device.type == "cpu":
        return torch.from_numpy(stable_order(column.numpy(), bound))
    return column.sort(stable=True).indices


def _starts(number: Tensor, sets: int, lines: int, width: int) -> Tensor:
    """(sets, lines + 1): where each line of ``width`` numbers begins among ascending ones, and the last one's end."""
    line = torch.arange(sets, device=number.device)[:, None] * lines + torch.arange(lines + 1, device=number.device)
    return torch.searchsorted(number, (line * width).to(number.dtype))


def _with_room(blocks: Blocks, sets: int, around: Around | None) -> tuple[Tensor, ...]:
    """The lists of a plan with a place for every block that could be set; no shape depends on what is."""
    listed, (rows, width) = blocks.listed(), blocks.shape[-2:]
    area, device = rows * width, listed.device
    listed = listed.reshape(-1, rows, blocks.most)
    set_number = torch.arange(sets, device=device)[:, None, None]
    if around is not None:
        listed = listed[around.of_table]
    place = torch.arange(rows, device=device)[:, None] * width + listed
    code = torch.full((place.numel(),), -1, dtype=torch.int32, device=device)
    if around is not None:
        code = torch.where((listed < width).reshape(-1), around.at(set_number, place, area), EMPTY)
    # what is not set has the number past the end
    used = (listed < width).reshape(-1) if around is None else code != EMPTY
    number = torch.where(used, (set_number * area + place).reshape(-1), sets * area)
    if around is not None and around.outside.numel():
        number = torch.cat([number, torch.where(around.free(blocks), around.outside, sets * area)])
        number, order = number.sort(stable=True)
        code = torch.cat([code, around.outside_codes])[order]
    else:
        # they ascend already: what is set moves up
        places = number.numel()
        target = torch.where(used, used.cumsum(0) - 1, places)
        number = torch.full((places + 1,), sets * area, device=device).scatter_(0, target, number)[:places]
        code = torch.full((places + 1,), -1, dtype=torch.int32, device=device).scatter_(0, target, code)[:places]
    line, col = number // width, number % width
    column = torch.where(number < sets * area, line // rows * width + col, sets * width).int()
    column, order = column.sort(stable=True)
    ptrs = _starts(number, sets, rows, width), _starts(column, sets, width, 1)
    return ptrs[0], col, code, ptrs[1], (line % rows)[order], code[order]
