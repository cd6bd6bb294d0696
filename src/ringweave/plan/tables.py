"""A table of blocks on the tile grid is its own plan: every tile full, no token evaluated, on the table's device.

On a CPU the lists are exact. On a GPU their length would have to be read back, which waits for all that was queued
before; so they get as many places as the table can have blocks, known without reading it, and ``row_ptr`` and
``col_ptr`` say which hold tiles. That path calls nothing whose shape depends on values: it can be captured in a CUDA
graph, and plans anew at every replay. A table within a pattern that has no tables, such as a causal one, is planned
like that too: the pattern's own tiles are planned once, and kept on the device.
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

#: Places of a list beyond which a GPU plan is made exact, for one wait: four lists of them take a quarter of a GiB.
MOST_PLACES = 2**24
EMPTY = -2


@dataclass(frozen=True)
class Within:
    """The tiles of the pattern that a table lies in, for tables of one shape; all on one device.

    Tiles side by side with one code are a run: a causal pattern has three in a row of tiles, whatever the length.

    Attributes:
        starts: (S,) int64, ascending, the first 0: where a run begins in a flat array (P, query tiles, key tiles).
            Of equal ones the last counts.
        codes: (S,) int32: EMPTY, -1 full, else an index into ``masks``.
        masks: As a plan's.
        of_table: (G,) int64, which row set of the table each of the joint ones uses.
        of_codes: (G,) int64, which of the P.
        group: (B, Hq) int32, which of the G a batch element and head uses.
    """

    starts: Tensor
    codes: Tensor
    masks: Tensor
    of_table: Tensor
    of_codes: Tensor
    group: Tensor

    @staticmethod
    def of(
        runs: Sequence[tuple[Int64, Int64, NDArray[np.int32]]],
        masks: Tensor,
        group: Tensor,
        table: tuple[int, ...],
        device: str | torch.device,
    ) -> Within:
        """From runs (begin, end, code) of tiles with a code each, and the leading sides of the table.

        Args:
            runs: As of ``runs_of``, by places in a flat array (P, query tiles, key tiles), ascending.
            masks: As a plan's.
            group: (B, Hq) int32, which of the P a batch element and head uses.
            table: (), (heads,) or (batch, heads).
            device: Where it goes.
        """
        begin, end, code = (np.concatenate(part) for part in zip(*runs, strict=True))
        # what comes after a run is empty, unless another run begins there
        starts = np.concatenate([np.zeros(1, np.int64), end, begin])
        codes = np.concatenate([np.full(1 + len(end), EMPTY, np.int32), code])
        order = np.argsort(starts, kind="stable")
        sets = int(group.max()) + 1
        of_table = torch.arange(math.prod(table)).reshape(table).expand(group.shape)
        joint, joined = (of_table * sets + group.long()).unique(return_inverse=True)
        moved = (torch.from_numpy(starts[order]), torch.from_numpy(codes[order]), masks, joint // sets, joint % sets)
        return Within(*(x.to(device) for x in (*moved, joined.int())))

    def at(self, set_number: Tensor, place: Tensor, area: int) -> Tensor:
        """The codes of tiles, by joint row set and place in its ``area`` of tiles; int32, for broadcast int64."""
        number = (self.of_codes[set_number] * area + place).reshape(-1)
        return self.codes[torch.searchsorted(self.starts, number, right=True) - 1]


def runs_of(place: Int64, code: NDArray[np.int32]) -> tuple[Int64, Int64, NDArray[np.int32]]:
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
    within: Within | None = None,
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
        within: The pattern that the table is intersected with.
    """
    blocks = pattern.blocks.to(device)
    lead = blocks.shape[:-2]
    sets = math.prod(lead) if within is None else len(within.of_table)
    room = sets * blocks.shape[-2] * blocks.most
    if spare is None:
        spare = blocks.table.device.type != "cpu" and room <= MOST_PLACES
    row_ptr, col, bits, col_ptr, row, bits_t = (_with_room if spare else _exact)(blocks, sets, within)
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
        masks=no_masks if within is None else within.masks,
        group=group.view(lead).expand(batch, heads).contiguous() if within is None else within.group,
        order=torch.argsort(-rank, stable=True).int(),
        nq=nq,
        nk=nk,
        q_tile=tile[0],
        kv_tile=tile[1],
        counted=not spare,
    )


def _exact(blocks: Blocks, sets: int, within: Within | None) -> tuple[Tensor, ...]:
    """The lists of a plan, no longer than they are."""
    rows, width = blocks.shape[-2:]
    area = rows * width
    number = blocks.numbers()
    code: Tensor | None = None
    if within is not None:
        ends = torch.searchsorted(number, area * torch.arange(math.prod(blocks.shape[:-2]) + 1, device=number.device))
        of_table = within.of_table.tolist()
        parts = [number[ends[t] : ends[t + 1]] + (g - t) * area for g, t in enumerate(of_table)]
        number = torch.cat(parts)
        code = within.at(number // area, number % area, area)
        used = code != EMPTY
        number, code = number[used], code[used]
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
    """(sets, lines + 1): the numbers of the lines of each set, and of the one after."""
    return torch.arange(sets, device=device)[:, None] * lines + torch.arange(lines + 1, device=device)


def _starts(number: Tensor, sets: int, lines: int, width: int) -> Tensor:
    """(sets, lines + 1): where each line of ``width`` numbers begins among ascending ones, and the last one's end."""
    return torch.searchsorted(number, (_lines(sets, lines, number.device) * width).to(number.dtype))


def _with_room(blocks: Blocks, sets: int, within: Within | None) -> tuple[Tensor, ...]:
    """The lists of a plan with a place for every block that could be set; no shape depends on what is."""
    listed, (rows, width) = blocks.listed(), blocks.shape[-2:]
    device, most = listed.device, blocks.most
    listed = listed.reshape(math.prod(blocks.shape[:-2]), rows, most)
    set_number = torch.arange(sets, device=device)[:, None, None]
    if within is not None:
        listed = listed[within.of_table]
    used, code = listed < width, None
    if within is not None:
        place = torch.arange(rows, device=device)[:, None] * width + listed
        code = within.at(set_number, place, rows * width)
        used &= (code != EMPTY).view_as(used)
    places = listed.numel()
    ends = torch.nn.functional.pad(used.sum(-1).reshape(-1).cumsum(0), (1, 0))
    row_ptr = ends[_lines(sets, rows, device)]
    # the place past the end takes what is not set
    flat = used.reshape(-1)
    target = torch.where(flat, flat.cumsum(0) - 1, places)
    col = torch.zeros(places + 1, dtype=torch.int32, device=device).scatter_(0, target, listed.reshape(-1))[:places]
    bits = torch.full((places + 1,), -1, dtype=torch.int32, device=device)
    # blocks that are not set come after all columns
    column = torch.where(used, set_number * width + listed, sets * width).reshape(-1)
    # half the digits to sort by
    column = column.int() if sets * width < 2**31 else column
    column, order = column.sort(stable=True)
    bits_t = bits[:places]
    if code is not None:
        code = torch.where(flat, code, -1)
        bits_t = code[order]
        bits.scatter_(0, target, code)
    row = order // max(most, 1) % rows
    return row_ptr, col, bits[:places], _starts(column, sets, width, 1), row, bits_t
