"""A table of blocks: the currency of content-based and other dynamic patterns."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PatternError, message
from .base import Pattern
from .checks import at_least
from .tiles import Int64, Ranges, Tiles, classes


class BlockTable(Pattern):
    """The block of (query, key) is set in a table; per batch and per head if the table is.

    The table is copied, so a pattern never changes: a new table is a new pattern, and no stale plan can be served.

    Args:
        mask: Bool, (blocks of queries, blocks of keys), (Hq, ., .) or (B, Hq, ., .), where 1 stands for any
            number of heads or batch elements; or None with ``indices``.
        block_size: Tokens in a block's side, or (query side, key side).
        indices: Integer tensor (..., blocks of queries, n): key blocks of each query block; with ``counts``.
        counts: Integer tensor (..., blocks of queries): how many of ``indices`` count, from the first.
        key_blocks: Blocks of keys, needed with ``indices``.
    Raises:
        PatternError: A mask that is not bool or has another rank, an index out of range; at use, another length.
            On a GPU nothing is read back to check indices: one out of range stops the device with an assertion.
    Example:
        >>> table = rw.BlockTable(torch.tensor([[True, False], [True, True]]), block_size=2)
        >>> table.to_dense(4)[0, 0].int()
        tensor([[1, 1, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 1],
                [1, 1, 1, 1]], dtype=torch.int32)
    """

    def __init__(
        self,
        mask: Tensor | None = None,
        block_size: int | tuple[int, int] = 128,
        *,
        indices: Tensor | None = None,
        counts: Tensor | None = None,
        key_blocks: int | None = None,
    ):
        if (mask is None) == (indices is None):
            raise PatternError(message("mask, indices", "neither or both", "exactly one", "Pass mask= or indices=."))
        if mask is None:
            assert indices is not None
            mask = _from_indices(indices, counts, key_blocks)
        sides = (block_size, block_size) if isinstance(block_size, int) else block_size
        for side in sides:
            at_least("block_size", side, 1)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim not in (2, 3, 4) or 0 in mask.shape:
            got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise PatternError(
                message(
                    "mask",
                    got,
                    "a bool tensor (q, k), (heads, q, k) or (batch, heads, q, k)",
                    "Convert it with .bool().",
                )
            )
        self.block_size = sides
        self.most = mask.shape[-1] if indices is None else min(indices.shape[-1], mask.shape[-1])
        self._mask = mask.detach().clone(memory_format=torch.contiguous_format)
        self._blocks_np: NDArray[np.bool_] | None = None
        self.__post_init__()

    @classmethod
    def _own(cls, mask: Tensor, block_size: tuple[int, int], most: int | None = None) -> BlockTable:
        """A pattern around a tensor that is already private (a slice of another pattern's, or an op's argument)."""
        pattern = cls.__new__(cls)
        pattern.block_size, pattern._mask, pattern._blocks_np = block_size, mask, None
        pattern.most = mask.shape[-1] if most is None else most
        pattern.__post_init__()
        return pattern

    def _text(self) -> str:
        side = self.block_size
        # only plans made on a GPU need the bound
        bound = f", {self.most}" if self._mask.device.type != "cpu" and self.most < self._mask.shape[-1] else ""
        return f"BlockTable(_, {side[0] if side[0] == side[1] else side}{bound})"

    #: At most so many blocks are set in a row of blocks, as far as known without reading the table.
    most: int

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return (self._mask,)

    @property
    def mask(self) -> Tensor:
        """A copy of the table."""
        return self._mask.clone()

    def __repr__(self) -> str:
        shape = "x".join(str(n) for n in self._mask.shape)
        return f"BlockTable(<{shape} blocks>, {self.spec.split(', ', 1)[1]}"

    def extents(self) -> tuple[int | None, int | None]:
        # a side of 1 broadcasts
        batch, heads = (1, 1, *self._mask.shape)[-4:-2]
        return (batch if batch > 1 else None), (heads if heads > 1 else None)

    def select(self, b: int, h: int) -> Pattern:
        mask = self._mask
        if mask.ndim == 2:
            return self
        if mask.ndim == 4:
            mask = mask[b if mask.shape[0] > 1 else 0]
        return BlockTable._own(mask[h if mask.shape[0] > 1 else 0], self.block_size, self.most)

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        wanted = (-(-(q_offset + nq) // self.block_size[0]), -(-nk // self.block_size[1]))
        if tuple(self._mask.shape[-2:]) != wanted:
            raise PatternError(
                message(
                    "BlockTable",
                    f"a table of {tuple(self._mask.shape[-2:])} blocks of {self.block_size}",
                    f"{wanted} blocks for queries up to position {q_offset + nq} and {nk} keys",
                    "Build the table for these lengths, ceil(tokens / block_size) a side.",
                )
            )

    def grid(self) -> int | None:
        return self.block_size[0] if self.block_size[0] == self.block_size[1] else None

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._mask.to(q.device)[q // self.block_size[0], k // self.block_size[1]]

    @property
    def _blocks(self) -> NDArray[np.bool_]:
        if self._blocks_np is None:
            self._blocks_np = self._mask.cpu().numpy()
        return self._blocks_np

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        size_q, size_k = self.block_size
        first, last = q_lo // size_q, (q_hi - 1) // size_q
        used = self._blocks[first].copy()
        for step in range(1, int((last - first).max(initial=0)) + 1):
            used |= self._blocks[np.minimum(first + step, last)]
        # runs of used blocks, as a padded list per row
        edges = np.diff(np.pad(used, ((0, 0), (1, 1))).view(np.int8), axis=1)
        rows, begin = np.nonzero(edges == 1)
        _, end = np.nonzero(edges == -1)
        counts = np.bincount(rows, minlength=len(q_lo))
        slot = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        start = np.zeros((len(q_lo), max(int(counts.max(initial=0)), 1)), np.int64)
        stop = np.zeros_like(start)
        start[rows, slot] = begin * size_k
        stop[rows, slot] = np.minimum(end * size_k, nk)
        return Ranges(start, stop)

    def tile_keys(self, tiles: Tiles) -> Int64:
        size_q, size_k = self.block_size
        r0, r1 = tiles.q_lo // size_q, (tiles.q_hi - 1) // size_q
        c0, c1 = tiles.k_lo // size_k, (tiles.k_hi - 1) // size_k
        high = int((r1 - r0).max(initial=0)) + 1
        wide = int((c1 - c0).max(initial=0)) + 1
        if high == wide == 1:
            return self._blocks[r0, c0].astype(np.int64)
        rows = np.minimum(r0[:, None] + np.arange(high), r1[:, None])
        columns = np.minimum(c0[:, None] + np.arange(wide), c1[:, None])
        inside = self._blocks[rows[:, :, None], columns[:, None, :]].reshape(len(r0), -1)
        full = inside.all(1)
        empty = ~inside.any(1)
        open_ = ~(full | empty)
        blocks = np.zeros(len(r0), np.int64)
        if open_.any():
            packed = np.packbits(inside[open_], axis=1)
            blocks[open_] = np.unique(packed, axis=0, return_inverse=True)[1].reshape(-1)
        return classes(empty, full, blocks, tiles.q_lo % size_q, tiles.k_lo % size_k)

    def restride(self, rate: int, offset: int) -> Pattern | None:
        if any(side % rate for side in self.block_size):
            return None
        return BlockTable._own(self._mask, (self.block_size[0] // rate, self.block_size[1] // rate), self.most)


def _from_indices(indices: Tensor, counts: Tensor | None, key_blocks: int | None) -> Tensor:
    if counts is None or key_blocks is None or counts.shape != indices.shape[:-1]:
        got = "None" if counts is None else str(tuple(counts.shape))
        raise PatternError(
            message(
                "counts, key_blocks",
                f"{got}, {key_blocks}",
                f"counts of shape {tuple(indices.shape[:-1])} and the number of key blocks",
                "Pass both beside indices.",
            )
        )
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    wrong = listed & ((indices < 0) | (indices >= key_blocks))
    if indices.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"indices: one that counts is not in 0..{key_blocks - 1}")
    elif wrong.any():
        used = indices[listed]
        raise PatternError(
            message("indices", f"{int(used.min())}..{int(used.max())}", f"0..{key_blocks - 1}", "Correct the indices.")
        )
    # the column past the end takes the entries that do not count
    target = torch.where(listed & ~wrong, indices, key_blocks).long()
    mask = torch.zeros(*indices.shape[:-1], key_blocks + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, target, True)[..., :-1]
