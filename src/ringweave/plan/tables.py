"""A table of blocks on the tile grid is its own plan: every tile full, no token evaluated, on the table's device.

On a CPU the lists are exact. On a GPU their length would have to be read back, which waits for all that was queued
before; so they get as many places as the table can have blocks, known without reading it, and ``row_ptr`` and
``col_ptr`` say which hold tiles. That path calls nothing whose shape depends on values: it can be captured in a CUDA
graph, and plans anew at every replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..patterns import BlockTable
from .block_plan import BlockPlan

#: Places of a list beyond which a GPU plan is made exact, for one wait: four lists of them take a quarter of a GiB.
MOST_PLACES = 2**24
_AT_ONCE = 2**24


def from_table(
    pattern: BlockTable,
    nq: int,
    nk: int,
    heads: int,
    batch: int,
    tile: tuple[int, int],
    device: str | torch.device,
    spare: bool | None = None,
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
    """
    mask = pattern.tables[0].to(device)
    q_tiles, kv_tiles = mask.shape[-2:]
    table = mask.reshape(-1, q_tiles, kv_tiles)
    places = table.shape[0] * q_tiles * pattern.most
    if spare is None:
        spare = mask.device.type != "cpu" and places <= MOST_PLACES
    group = torch.arange(table.shape[0], dtype=torch.int32, device=table.device).reshape(mask.shape[:-2])
    row_ptr, col = _compressed(table, places if spare else None)
    col_ptr, row = _compressed(table.transpose(1, 2), places if spare else None)
    counts = row_ptr.diff(dim=1).reshape(-1)
    rank = (2 * counts.clamp(min=1).log2()).floor().to(torch.int16)
    full = torch.full_like(col, -1)
    return BlockPlan(
        row_ptr=row_ptr,
        col=col,
        bits=full,
        col_ptr=col_ptr,
        row=row,
        bits_t=full,
        masks=torch.zeros(0, tile[0], -(-tile[1] // 32), dtype=torch.int32, device=table.device),
        group=group.expand(batch, heads).contiguous(),
        order=torch.argsort(-rank, stable=True).int(),
        nq=nq,
        nk=nk,
        q_tile=tile[0],
        kv_tile=tile[1],
    )


def _compressed(grid: Tensor, places: int | None) -> tuple[Tensor, Tensor]:
    """Offsets and indices of the set blocks of (groups, lines, blocks); with ``places``, of that fixed length."""
    groups, lines, blocks = grid.shape
    counts = grid.sum(-1)
    ends = counts.reshape(-1).cumsum(0)
    first = torch.arange(groups, device=grid.device)[:, None] * lines
    ptr = torch.cat([ends.new_zeros(1), ends])[first + torch.arange(lines + 1, device=grid.device)].int()
    if places is None:
        return ptr, grid.nonzero()[:, 2].int()
    starts = ends.view(groups, lines) - counts
    number = torch.arange(blocks, dtype=torch.int32, device=grid.device)
    # the place past the end takes what is not set
    index = torch.zeros(places + 1, dtype=torch.int32, device=grid.device)
    step = max(1, _AT_ONCE // (lines * blocks))
    for part, start in zip(grid.split(step), starts.split(step), strict=True):
        place = torch.where(part, part.cumsum(-1) - 1 + start[..., None], places)
        index.scatter_(0, place.reshape(-1), number.expand_as(part).reshape(-1))
    return ptr, index[:places]
