"""Sort a plan's lists of tiles, and assemble plans from row sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import PatternError
from ..patterns.tiles import Int64
from .block_plan import BlockPlan
from .cuda_sync import waits

_ALIGNED = 16  # elements: 64 bytes


@dataclass(eq=False, repr=False)
class RowSet:
    """The non-empty tiles of one or several row sets, in row order; rows are numbered through all sets."""

    row: NDArray[np.int64]
    col: NDArray[np.int64]
    mask_id: NDArray[np.int32]
    sets: int = 1


def stable_order(keys: Int64, bound: int) -> Int64:
    """Return the stable ascending order of keys in [0, bound), 16 bits at a time: numpy radix-sorts 16-bit integers."""
    order: Int64 = np.argsort(keys.astype(np.uint16), kind="stable")
    for low in range(16, (bound - 1).bit_length(), 16):
        order = order[np.argsort((keys[order] >> low).astype(np.uint16), kind="stable")]
    return order


def assemble(
    sets: list[RowSet],
    group: NDArray[np.int32],
    masks: NDArray[np.int32],
    nq: int,
    nk: int,
    q_offset: int,
    tile: tuple[int, int],
    device: str | torch.device,
) -> BlockPlan:
    """Assemble a plan from row sets: add the lists by columns and the launch order, in one piece of memory."""
    waits(device)
    q_tiles, kv_tiles = -(-nq // tile[0]), -(-nk // tile[1])
    limit(sum(len(each.row) for each in sets))
    count = sum(each.sets for each in sets)
    row, col, bits = _side_by_side(sets, q_tiles)
    column = row // q_tiles
    row_ptr = _offsets(row + column, count, q_tiles)
    column *= kv_tiles + 1
    column += col
    col_ptr = _offsets(column, count, kv_tiles)
    if q_tiles > 1:
        by_column = stable_order(column, count * (kv_tiles + 1))
        row = row[by_column]
        row %= q_tiles
        bits_t = bits[by_column]
    else:
        # one row of tiles is already in column order
        row, bits_t = np.zeros(len(row), np.int64), bits
    del column

    arrays: dict[str, NDArray[Any]] = {
        "row_ptr": row_ptr,
        "col": col,
        "mask_id": bits,
        "col_ptr": col_ptr,
        "row": row,
        "mask_id_t": bits_t,
        "mask_words": masks,
        "row_set": group,
        "order": _launch_order((row_ptr[:, 1:] - row_ptr[:, :-1]).reshape(-1)),
    }
    # one piece of memory needs one copy to a device, and small plans take little more than their elements
    sizes = [size for array in arrays.values() for size in (array.size, -array.size % _ALIGNED)]
    whole = torch.empty(sum(sizes), dtype=torch.int32, device="cpu")
    memory, begin = whole.numpy(), 0
    for array in arrays.values():
        memory[begin : begin + array.size] = array.reshape(-1)
        begin += -(-array.size // _ALIGNED) * _ALIGNED
    parts = zip(arrays.items(), whole.to(device).split_with_sizes(sizes)[::2], strict=True)
    tensors: dict[str, Any] = {
        name: part if array.ndim == 1 else part.view(array.shape) for (name, array), part in parts
    }
    return BlockPlan(
        **tensors,
        nq=nq,
        nk=nk,
        q_tile=tile[0],
        kv_tile=tile[1],
        q_offset=q_offset,
    )


def _side_by_side(sets: list[RowSet], q_tiles: int) -> tuple[Int64, Int64, NDArray[np.int32]]:
    """Concatenate (row, col, mask_id) of all sets, with rows numbered through all sets."""
    if len(sets) == 1:
        return sets[0].row, sets[0].col, sets[0].mask_id
    row, col, bits = (np.concatenate([getattr(each, name) for each in sets]) for name in ("row", "col", "mask_id"))
    first = np.cumsum([0, *(each.sets for each in sets)])
    ends = np.cumsum([0, *(len(each.row) for each in sets)])
    for before, begin, end in zip(first[1:], ends[1:], ends[2:], strict=False):
        row[begin:end] += before * q_tiles
    return row, col, bits


def limit(tiles: int) -> None:
    """Raise PatternError if the number of tiles does not fit in 32 bits."""
    if tiles >= 2**31:
        raise PatternError("pattern", f"{tiles} tiles", "fewer than 2**31", "Use larger tiles or less.")


def _offsets(place: Int64, sets: int, lines: int) -> Int64:
    """Return (sets, lines + 1): the starts of the elements of each line of each set, and the end of the last line.

    Args:
        place: Place of each element's line among these.
        sets: Number of sets.
        lines: Number of lines in a set.
    """
    counts: Int64 = np.bincount(place + 1, minlength=sets * (lines + 1))
    return counts.cumsum().reshape(sets, lines + 1)


def _launch_order(counts: Int64) -> Int64:
    # Longest first, by classes of half an octave: rows of similar lengths stay beside neighbours that share keys.
    rank = (2 * np.log2(np.maximum(counts, 1))).astype(np.int16)
    return (-rank).argsort(kind="stable")
