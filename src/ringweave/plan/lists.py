"""A plan's lists of tiles: sorted, and assembled from row sets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import PatternError, message
from ..patterns.tiles import Int64
from .block_plan import BlockPlan

_ALIGNED = 16  # elements: 64 bytes


@dataclass
class RowSet:
    """The non-empty tiles of one row set, in row order."""

    row: NDArray[np.int64]
    col: NDArray[np.int64]
    bits: NDArray[np.int32]


def stable_order(keys: Int64, bound: int) -> Int64:
    """Sort keys in [0, bound) stably, ascending: numpy sorts 16 bits by counting, so 16 at a time."""
    order: Int64 = np.argsort(keys.astype(np.uint16), kind="stable")
    for low in range(16, (bound - 1).bit_length(), 16):
        order = order[np.argsort((keys[order] >> low).astype(np.uint16), kind="stable")]
    return order


def assemble(
    sets: list[RowSet],
    group: torch.Tensor,
    masks: torch.Tensor,
    nq: int,
    nk: int,
    q_offset: int,
    tile: tuple[int, int],
    device: str | torch.device,
) -> BlockPlan:
    """Make a plan of its row sets: the lists by columns, the launch order, and all of it in one piece of memory."""
    q_tiles, kv_tiles = -(-nq // tile[0]), -(-nk // tile[1])
    row_ptr, col_ptr, row_t, bits_t = [], [], [], []
    base = 0
    for tiles in sets:
        row_ptr.append(base + _offsets(tiles.row, q_tiles))
        col_ptr.append(base + _offsets(tiles.col, kv_tiles))
        by_column = stable_order(tiles.col, kv_tiles)
        row_t.append(tiles.row[by_column])
        bits_t.append(tiles.bits[by_column])
        base += len(tiles.row)
    limit(base)
    counts = np.concatenate([np.diff(ptr) for ptr in row_ptr])

    arrays = {
        "row_ptr": np.stack(row_ptr),
        "col": np.concatenate([tiles.col for tiles in sets]),
        "bits": np.concatenate([tiles.bits for tiles in sets]),
        "col_ptr": np.stack(col_ptr),
        "row": np.concatenate(row_t),
        "bits_t": np.concatenate(bits_t),
        "masks": masks.numpy(),
        "group": group.numpy(),
        "order": _launch_order(counts),
    }
    # in one piece: one copy to a device, and small plans take little more than their elements
    sizes = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays.values()]
    whole = torch.empty(sum(sizes), dtype=torch.int32, device="cpu")
    for part, array in zip(whole.split(sizes), arrays.values(), strict=True):
        np.copyto(part.numpy()[: array.size], array.reshape(-1), casting="unsafe")
    parts = zip(arrays.items(), whole.to(device).split(sizes), strict=True)
    return BlockPlan(
        **{name: part[: array.size].view(array.shape) for (name, array), part in parts},
        nq=nq,
        nk=nk,
        q_tile=tile[0],
        kv_tile=tile[1],
        q_offset=q_offset,
    )


def limit(tiles: int) -> None:
    """Raise PatternError where numbers of tiles do not fit 32 bits."""
    if tiles >= 2**31:
        raise PatternError(message("pattern", f"{tiles} tiles", "fewer than 2**31", "Use larger tiles or less."))


def _offsets(index: Int64, size: int) -> Int64:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(index, minlength=size))])


def _launch_order(counts: Int64) -> Int64:
    # longest first by classes of half an octave: rows of about one length keep their neighbours, who share keys
    rank = np.floor(2 * np.log2(np.maximum(counts, 1))).astype(np.int16)
    return np.argsort(-rank, kind="stable")
