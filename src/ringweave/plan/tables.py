"""A table of blocks on the tile grid is its own plan: every tile full, no token evaluated, on the table's device.

On a CPU the lists are exact. On a GPU their length would have to be read back, which waits for all that was queued
before; so they get as many places as the table can have blocks, known without reading it, and ``row_ptr`` and
``col_ptr`` say which hold tiles. That path calls nothing whose shape depends on values: it can be captured in a CUDA
graph, and plans anew at every replay. A table within a pattern that has no tables, such as a causal one, is planned
like that too: the pattern's own tiles are planned once, and kept on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns import BlockTable
from .block_plan import BlockPlan

#: Places of a list beyond which a GPU plan is made exact, for one wait: four lists of them take a quarter of a GiB.
MOST_PLACES = 2**24
_AT_ONCE = 2**24


EMPTY = -2


@dataclass(frozen=True)
class Within:
    """The tiles of the pattern that a table lies in, for tables of one shape; all on one device.

    Attributes:
        codes: (P, query tiles, key tiles) int32: EMPTY, -1 full, else an index into ``masks``.
        masks: As a plan's.
        of_table: (G,) int64, which row set of the table each of the joint ones uses.
        of_codes: (G,) int64, which of the P.
        group: (B, Hq) int32, which of the G a batch element and head uses.
    """

    codes: Tensor
    masks: Tensor
    of_table: Tensor
    of_codes: Tensor
    group: Tensor

    @staticmethod
    def of(plan: BlockPlan, table: tuple[int, ...], device: str | torch.device) -> Within:
        """From the pattern's plan on a CPU, and the leading sides of the table: (), (heads,) or (batch, heads)."""
        row, col, bits = plan.listed()
        codes = torch.full((plan.row_ptr.shape[0], plan.q_tiles, plan.kv_tiles), EMPTY, dtype=torch.int32)
        codes[row // plan.q_tiles, row % plan.q_tiles, col] = bits.int()
        batch, heads = plan.group.shape
        number = 1
        for side in table:
            number *= side
        of_table = torch.arange(number).reshape(table).expand(batch, heads)
        pairs = of_table.reshape(-1) * codes.shape[0] + plan.group.reshape(-1).long()
        joint, group = pairs.unique(return_inverse=True)
        moved = (codes, plan.masks, joint // codes.shape[0], joint % codes.shape[0], group.view(batch, heads).int())
        return Within(*(x.to(device) for x in moved))

    def joined(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """(set blocks, their codes) of the joint row sets, (G, query tiles, key tiles) each."""
        codes = self.codes.expand(len(self.of_codes), -1, -1) if len(self.codes) == 1 else self.codes[self.of_codes]
        return table[self.of_table] & (codes != EMPTY), codes


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
    mask = pattern.tables[0].to(device)
    q_tiles, kv_tiles = mask.shape[-2:]
    grid, codes = mask.reshape(-1, q_tiles, kv_tiles), None
    if within is not None:
        grid, codes = within.joined(grid)
    room = grid.shape[0] * q_tiles * pattern.most
    if spare is None:
        spare = mask.device.type != "cpu" and room <= MOST_PLACES
    places = room if spare else None
    group = torch.arange(grid.shape[0], dtype=torch.int32, device=grid.device)
    row_ptr, col, bits = _compressed(grid, codes, places)
    col_ptr, row, bits_t = _compressed(grid.mT, None if codes is None else codes.mT, places)
    counts = row_ptr.diff(dim=1).reshape(-1)
    rank = (2 * counts.clamp(min=1).log2()).floor().to(torch.int16)
    no_masks = torch.zeros(0, tile[0], -(-tile[1] // 32), dtype=torch.int32, device=grid.device)
    return BlockPlan(
        row_ptr=row_ptr,
        col=col,
        bits=bits,
        col_ptr=col_ptr,
        row=row,
        bits_t=bits_t,
        masks=no_masks if within is None else within.masks,
        group=group.view(mask.shape[:-2]).expand(batch, heads).contiguous() if within is None else within.group,
        order=torch.argsort(-rank, stable=True).int(),
        nq=nq,
        nk=nk,
        q_tile=tile[0],
        kv_tile=tile[1],
        counted=not spare,
    )


def _compressed(grid: Tensor, codes: Tensor | None, places: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, indices and codes of the set ones of (groups, lines, blocks); with ``places``, lists of that length."""
    groups, lines, blocks = grid.shape
    counts = grid.sum(-1)
    ends = counts.reshape(-1).cumsum(0)
    first = torch.arange(groups, device=grid.device)[:, None] * lines
    ptr = torch.cat([ends.new_zeros(1), ends])[first + torch.arange(lines + 1, device=grid.device)].int()
    if places is None:
        where = grid.nonzero(as_tuple=True)
        index = where[2].int()
        return ptr, index, torch.full_like(index, -1) if codes is None else codes[where]
    starts = ends.view(groups, lines) - counts
    number = torch.arange(blocks, dtype=torch.int32, device=grid.device)
    # the place past the end takes what is not set
    index = torch.zeros(places + 1, dtype=torch.int32, device=grid.device)
    bits = torch.full_like(index, -1)
    step = max(1, _AT_ONCE // (lines * blocks))
    for first_group in range(0, groups, step):
        part = slice(first_group, first_group + step)
        place = torch.where(grid[part], grid[part].cumsum(-1) - 1 + starts[part, :, None], places).reshape(-1)
        index.scatter_(0, place, number.expand_as(grid[part]).reshape(-1))
        if codes is not None:
            bits.scatter_(0, place, codes[part].reshape(-1))
    return ptr, index[:places], bits[:places]
