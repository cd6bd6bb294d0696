"""Sort a plan's lists of tiles, and assemble plans from row sets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..relation.arrays import Int64
from ..relation.tiles import limit
from .block_plan import BlockPlan
from .cuda_sync import require_no_capture

_ALIGNED = 16  # elements: 64 bytes
_PART = 2**11  # tiles of a set, on average, from which on sets are sorted one by one


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


class TileList(NamedTuple):
    """The non-empty tiles of row sets, a place for each; they ascend by set, row and column.

    Attributes:
        set: int64, row set of each tile; below 0 in an unused place, which may stand anywhere.
        row: Query tile in its set.
        col: Key tile.
        mask_id: int32, as in a plan; None if all tiles are full.
    """

    set: Tensor
    row: Tensor
    col: Tensor
    mask_id: Tensor | None = None


class Csr(NamedTuple):
    """The lists of a plan, named as in :class:`~ringweave.plan.BlockPlan`; unused places are at their ends."""

    row_ptr: Tensor
    col: Tensor
    mask_id: Tensor
    col_ptr: Tensor
    row: Tensor
    mask_id_t: Tensor


def to_csr(tiles: TileList, sets: int, sides: tuple[int, int], *, spare: bool = False) -> Csr:
    """List tiles by rows and by columns.

    Args:
        tiles: The tiles.
        sets: Number of row sets.
        sides: Rows and columns of a set.
        spare: Whether places may be unused. If so, no shape depends on values, and none is read back.
    """
    if tiles.set.device.type == "cpu" and not spare:
        return _on_host(tiles, sets, sides)
    return _on_device(tiles, sets, sides, spare)


def _on_device(tiles: TileList, sets: int, sides: tuple[int, int], spare: bool) -> Csr:
    rows, width = sides
    number = (tiles.set * rows + tiles.row) * width + tiles.col
    mask_id = torch.full_like(number, -1, dtype=torch.int32) if tiles.mask_id is None else tiles.mask_id
    if spare:
        # unused places get the number past the end, and used ones move to the front
        used, places = tiles.set >= 0, number.numel()
        target = torch.where(used, used.cumsum(0) - 1, places)
        last = torch.full((places + 1,), sets * rows * width, device=number.device)
        number = last.scatter_(0, target, torch.where(used, number, last[:places]))[:places]
        full = torch.full((places + 1,), -1, dtype=torch.int32, device=number.device)
        mask_id = full.scatter_(0, target, mask_id)[:places]
    line, col = number // width, number % width
    column = torch.where(number < sets * rows * width, line // rows * width + col, sets * width)
    # int32 has half the digits to sort by
    column, order = (column.int() if sets * width < 2**31 else column).sort(stable=True)
    ptrs = _starts(number, sets, rows, width), _starts(column, sets, width, 1)
    return Csr(ptrs[0], col, mask_id, ptrs[1], (line % rows)[order], mask_id[order])


def _starts(number: Tensor, sets: int, lines: int, width: int) -> Tensor:
    """Find the starts of lines of ``width`` numbers in a sorted list, and the end of each set: (sets, lines + 1)."""
    line = torch.arange(sets, device=number.device)[:, None] * lines + torch.arange(lines + 1, device=number.device)
    return torch.searchsorted(number, (line * width).to(number.dtype))


def _on_host(tiles: TileList, sets: int, sides: tuple[int, int]) -> Csr:
    group, row, col = tiles.set.numpy(), tiles.row.numpy(), tiles.col.numpy()
    mask_id = np.full(len(col), -1, np.int32) if tiles.mask_id is None else tiles.mask_id.numpy()
    rows, width = sides
    # One set at a time needs no large temporary array; sets that are too small for a loop are sorted together.
    joined = 1 if len(col) >= _PART * sets else sets
    row_ptr, col_ptr = np.empty((sets, rows + 1), np.int64), np.empty((sets, width + 1), np.int64)
    row_t, mask_id_t = row, mask_id
    # one row of tiles is already in column order
    if rows > 1:
        row_t = np.empty_like(row)
        mask_id_t = mask_id if tiles.mask_id is None else np.empty_like(mask_id)
    ends = np.searchsorted(group, np.arange(0, sets + 1, joined))
    for part, (lo, hi) in enumerate(itertools.pairwise(ends.tolist())):
        line, column = row[lo:hi], col[lo:hi]
        if joined > 1:
            line, column = group * (rows + 1) + line, group * (width + 1) + column
        here = slice(part * joined, (part + 1) * joined)
        np.add(_offsets(line, joined, rows), lo, out=row_ptr[here])
        np.add(_offsets(column, joined, width), lo, out=col_ptr[here])
        if row_t is not row:
            order = stable_order(column, joined * (width + 1))
            row[lo:hi].take(order, out=row_t[lo:hi], mode="clip")
            if mask_id_t is not mask_id:
                mask_id[lo:hi].take(order, out=mask_id_t[lo:hi], mode="clip")
    return Csr(*map(torch.from_numpy, (row_ptr, col, mask_id, col_ptr, row_t, mask_id_t)))


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
    require_no_capture(device)
    q_tiles, kv_tiles = -(-nq // tile[0]), -(-nk // tile[1])
    whole = sets[0] if len(sets) == 1 else _side_by_side(sets, q_tiles)
    limit(len(whole.row))
    of_set = whole.row // q_tiles if whole.sets > 1 else np.zeros_like(whole.row)
    row = whole.row - of_set * q_tiles if whole.sets > 1 else whole.row
    tiles = of_set, row, whole.col, whole.mask_id
    lists = to_csr(TileList(*map(torch.from_numpy, tiles)), whole.sets, (q_tiles, kv_tiles))
    arrays: dict[str, NDArray[Any]] = {name: each.numpy() for name, each in lists._asdict().items()}
    arrays |= {
        "mask_words": masks,
        "row_set": group,
        "launch_order": _launch_order(lists.row_ptr.diff(dim=1).reshape(-1).numpy()),
    }
    # one piece of memory needs one copy to a device, and small plans take little more than their elements
    sizes = [size for array in arrays.values() for size in (array.size, -array.size % _ALIGNED)]
    packed = torch.empty(sum(sizes), dtype=torch.int32, device="cpu")
    memory, begin = packed.numpy(), 0
    for array in arrays.values():
        memory[begin : begin + array.size] = array.reshape(-1)
        begin += -(-array.size // _ALIGNED) * _ALIGNED
    parts = zip(arrays.items(), packed.to(device).split_with_sizes(sizes)[::2], strict=True)
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


def _side_by_side(sets: list[RowSet], q_tiles: int) -> RowSet:
    """Concatenate row sets, with rows numbered through all sets."""
    limit(sum(len(each.row) for each in sets))
    row, col, mask_id = (np.concatenate([getattr(each, name) for each in sets]) for name in ("row", "col", "mask_id"))
    first = np.cumsum([0, *(each.sets for each in sets)])
    ends = np.cumsum([0, *(len(each.row) for each in sets)])
    for before, begin, end in zip(first[1:], ends[1:], ends[2:], strict=False):
        row[begin:end] += before * q_tiles
    return RowSet(row, col, mask_id, int(first[-1]))


def _offsets(place: Int64, sets: int, lines: int) -> Int64:
    """Return (sets, lines + 1): the starts of the elements of each line of each set, and the end of the last line.

    Args:
        place: Place of each element's line among these.
        sets: Number of sets.
        lines: Number of lines in a set.
    """
    starts = np.zeros(sets * (lines + 1), np.int64)
    np.cumsum(np.bincount(place, minlength=len(starts))[:-1], out=starts[1:])
    return starts.reshape(sets, lines + 1)


def _launch_order(counts: Int64) -> Int64:
    # Longest first, by classes of half an octave: rows of similar lengths stay beside neighbours that share keys.
    rank = (2 * np.log2(np.maximum(counts, 1))).astype(np.int16)
    return (-rank).argsort(kind="stable")
