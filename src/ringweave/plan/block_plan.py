"""The tiles to compute, as tensors; kernels read a plan and never the pattern."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_device
from ..torch_compat import register_pytree

_TENSORS = ("row_ptr", "col", "mask_id", "col_ptr", "row", "mask_id_t", "mask_words", "row_set", "launch_order")
_LISTS = ("col", "mask_id", "row", "mask_id_t")
_SIZES = ("nq", "nk", "q_tile", "kv_tile", "q_offset", "counted")


class Extent(NamedTuple):
    """The sizes and the device of a plan.

    Attributes:
        nq: Number of queries.
        nk: Number of keys.
        heads: Number of query heads.
        batch: Number of batch elements.
        tile: Sides of a tile, (q_tile, kv_tile).
        q_offset: Position of the first query.
        device: Device of the plan's tensors.
    """

    nq: int
    nk: int
    heads: int
    batch: int
    tile: tuple[int, int]
    q_offset: int = 0
    device: str | torch.device = "cpu"

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of query tiles and of key tiles."""
        return -(-self.nq // self.tile[0]), -(-self.nk // self.tile[1])


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """The non-empty tiles of a pattern by rows and by columns, with the masks of partial tiles.

    All (batch, head) pairs with equal tiles share one of G row sets. All tensors are int32 on one device. Sizes grow
    with the non-empty tiles (nnz), never with N squared. On a GPU the plan of a block table is made without reading
    values back, so its lists may be longer than nnz; no pointer refers to the unused places at their end.

    Attributes:
        row_ptr: (G, query tiles + 1), offsets into ``col`` and ``mask_id``; the last is nnz.
        col: (capacity,), key tiles of each query tile, ascending.
        mask_id: (capacity,), -1 if every pair of the tile inside the lengths is allowed, else an index into
            ``mask_words``.
        col_ptr: (G, key tiles + 1), offsets into ``row`` and ``mask_id_t``.
        row: (capacity,), query tiles of each key tile, ascending.
        mask_id_t: (capacity,), ``mask_id`` in column order.
        mask_words: (M, q_tile, ceil(kv_tile / 32)), distinct masks, key c of a row at bit c % 32 of word c // 32.
        row_set: (B, Hq), index of the row set of each batch element and head.
        launch_order: (G * query tiles,), rows g * tiles + i as they are launched: longest first, neighbours together.
        nq: Number of queries, at positions q_offset and after.
        nk: Number of keys.
        q_tile: Queries in a tile.
        kv_tile: Keys in a tile.
        q_offset: Position of the first query.
        counted: Whether the host knows nnz; the lists then have no unused places.
    """

    row_ptr: Tensor
    col: Tensor
    mask_id: Tensor
    col_ptr: Tensor
    row: Tensor
    mask_id_t: Tensor
    mask_words: Tensor
    row_set: Tensor
    launch_order: Tensor
    nq: int
    nk: int
    q_tile: int
    kv_tile: int
    q_offset: int = 0
    counted: bool = True

    @property
    def q_tiles(self) -> int:
        """Number of query tiles in a row set."""
        return self.row_ptr.shape[1] - 1

    @property
    def kv_tiles(self) -> int:
        """Number of key tiles in a row set."""
        return self.col_ptr.shape[1] - 1

    @property
    def nnz(self) -> int:
        """Number of non-empty tiles of all row sets; waits for the device unless ``counted`` is set."""
        return self.capacity if self.counted else int(self.row_ptr[-1, -1])

    @property
    def capacity(self) -> int:
        """Length of the lists, at least nnz; on a CPU it equals nnz."""
        return self.col.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, including unused places."""
        # a loop, which is faster than a generator: programs read this at each step
        total = 0
        for name in _TENSORS:
            total += getattr(self, name).nbytes
        return total

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.col.device

    @property
    def tiles(self) -> int:
        """Number of non-empty tiles over batch and heads, which a kernel computes."""
        per_group = (self.row_ptr[:, -1] - self.row_ptr[:, 0]).long()
        return int(per_group[self.row_set.long()].sum())

    @functools.cached_property
    def density(self) -> float:
        """Share of allowed pairs, over batch and heads; cached."""
        return self.pairs() / self._all

    @functools.cached_property
    def computed_density(self) -> float:
        """Share of pairs inside the non-empty tiles, which a kernel computes; cached."""
        return self.computed_pairs() / self._all

    @property
    def _all(self) -> int:
        return self.row_set.numel() * self.nq * self.nk

    def pairs(self) -> int:
        """Count allowed (query, key) pairs over batch and heads."""
        row, area, bits = self._areas()
        if self.mask_words.shape[0]:
            area = torch.where(bits < 0, area, set_bits(self.mask_words)[bits.clamp(min=0)])
        return self._summed(row, area)

    def computed_pairs(self) -> int:
        """Count pairs inside the non-empty tiles over batch and heads."""
        return self._summed(*self._areas()[:2])

    def _areas(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each tile its row, its number of pairs inside the lengths, and its mask_id."""
        row, col, bits = self.listed()
        height = (self.nq - row % self.q_tiles * self.q_tile).clamp(max=self.q_tile)
        return row, height * (self.nk - col * self.kv_tile).clamp(max=self.kv_tile), bits

    def _summed(self, row: Tensor, area: Tensor) -> int:
        per_group = torch.zeros(self.row_ptr.shape[0], dtype=torch.int64, device=self.device)
        per_group.index_add_(0, row // self.q_tiles, area)
        return int(per_group[self.row_set.long()].sum())

    def listed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tiles as (row, col, mask_id), int64 (nnz,) each; row i of row set g is g * query tiles + i."""
        counts = self.row_ptr.diff(dim=1).reshape(-1).long()
        row = torch.arange(counts.numel(), device=self.device).repeat_interleave(counts)
        return row, self.col[: row.numel()].long(), self.mask_id[: row.numel()].long()

    def tile_rows(self) -> Tensor:
        """Return the query tile of each tile, int64 (nnz,)."""
        return self.listed()[0] % self.q_tiles

    def first_tiles(self) -> Tensor:
        """Return the index of each first tile, (B, Hq) int64, if tiles are ordered by batch element, head and row."""
        counts = (self.row_ptr[:, -1] - self.row_ptr[:, 0]).long()[self.row_set.long()]
        return (counts.reshape(-1).cumsum(0) - counts.reshape(-1)).view(counts.shape)

    def to(self, device: torch.device | str | int) -> BlockPlan:
        """Return the plan on a device; on the CPU its lists have no unused places."""
        device = check_device(device)
        moved = {name: getattr(self, name).to(device) for name in _TENSORS}
        if device.type != "cpu" or self.counted:
            return dataclasses.replace(self, **moved)
        nnz = self.nnz
        for name in _LISTS:
            moved[name] = moved[name][:nnz].clone()
        return dataclasses.replace(self, **moved, counted=True)

    def to_dense(self) -> Tensor:
        """Return the relation as a bool tensor (B, Hq, nq, nk), for tests and small sizes."""
        groups = self.row_ptr.shape[0]
        tiles = torch.zeros(
            groups, self.q_tiles, self.kv_tiles, self.q_tile, self.kv_tile, dtype=torch.bool, device="cpu"
        )
        full = torch.ones(1, self.q_tile, self.kv_tile, dtype=torch.bool, device="cpu")
        shapes = torch.cat([unpack_masks(self.mask_words.cpu(), self.kv_tile), full])
        row, col, bits = (x.cpu() for x in self.listed())
        tiles[row // self.q_tiles, row % self.q_tiles, col] = shapes[bits]
        dense = tiles.permute(0, 1, 3, 2, 4).reshape(groups, self.q_tiles * self.q_tile, self.kv_tiles * self.kv_tile)
        return dense[:, : self.nq, : self.nk][self.row_set.long().cpu()]

    def to_block_mask(self) -> Any:
        """Convert the plan to FlexAttention's ``BlockMask``; its ``mask_mod`` reads the packed masks.

        Returns:
            A ``torch.nn.attention.flex_attention.BlockMask`` on the plan's device. Its ``mask_mod`` takes places in q
            and k, which begin at 0 for any ``q_offset`` of the plan.
        """
        from .interop import to_block_mask

        return to_block_mask(self)

    def __repr__(self) -> str:
        # reading the density of a plan on another device would wait for it
        known = self.device.type == "cpu" or "density" in self.__dict__
        tiles = f"{self.nnz} non-empty" if self.counted else f"at most {self.capacity} non-empty"
        return (
            f"BlockPlan({self.nq} x {self.nk} tokens, tiles {self.q_tile} x {self.kv_tile}, {tiles}, "
            f"{self.row_ptr.shape[0]} group(s), {self.mask_words.shape[0]} masks, "
            f"{f'density {self.density:.4f}, ' if known else ''}{self.device})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class PackedPlan(BlockPlan):
    """A plan of rows on packed keys: its key n is key ``chosen[n]`` of the call; it has no lists by columns."""

    chosen: Tensor = field(kw_only=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return super().nbytes + self.chosen.nbytes


def pack_masks(dense: Tensor) -> Tensor:
    """Pack bool (M, q_tile, kv_tile) to int32 (M, q_tile, ceil(kv_tile / 32)), lowest bit first."""
    width = dense.shape[-1]
    dense = torch.nn.functional.pad(dense, (0, -width % 32))
    # summed as int64, then wrapped around, since bit 31 is the sign of an int32
    weights = torch.ones(32, dtype=torch.int64, device=dense.device) << torch.arange(32, device=dense.device)
    words = (dense.unflatten(-1, (-1, 32)) * weights).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def unpack_masks(masks: Tensor, kv_tile: int) -> Tensor:
    """Undo ``pack_masks``: bool (M, q_tile, kv_tile)."""
    bits = (masks[..., None] >> torch.arange(32, dtype=torch.int32, device=masks.device)) & 1
    return bits.flatten(-2)[..., :kv_tile].bool()


def set_bits(masks: Tensor) -> Tensor:
    """Count the allowed pairs of each packed mask: int64 (M,); temporary tensors are as large as the masks."""
    x = masks - ((masks >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).sum((1, 2))


def _flatten(plan: BlockPlan) -> tuple[list[Any], Any]:
    return [getattr(plan, name) for name in _TENSORS], tuple(getattr(plan, name) for name in _SIZES)


def _unflatten(tensors: Any, sizes: Any) -> BlockPlan:
    return BlockPlan(*tensors, *sizes)


register_pytree(BlockPlan, _flatten, _unflatten, "ringweave.BlockPlan")
