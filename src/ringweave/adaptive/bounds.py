"""Bounds of keys by block, kept as a cache grows: what a decoding step reads to know which blocks could matter."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError, message
from ..patterns.numbers import whole
from ..types import acc_dtype
from .pooling import by_block


class KeyBounds:
    """The least and the largest of every channel over each block of keys, for ``select(method="bounds")``.

    A query's score with any key of a block is at most ``sum_d max(q_d low_d, q_d high_d)``. Appending n tokens costs
    what those n tokens cost, whatever is kept; all is allocated once.

    Args:
        k: Keys so far, (B, Hkv, N, D); N may be 0.
        block_size: Tokens of a block.
        capacity: Tokens that will come at most, N included.
    Attributes:
        low: (B, Hkv, blocks, D), of the keys' dtype (float32 at least), inf where no token is.
        high: As ``low``, -inf where no token is.
        length: Tokens so far.
    Raises:
        ShapeError: More tokens than the capacity, or of another shape.
    Example:
        >>> bounds = rw.adaptive.KeyBounds(k[:, :, :100], block_size=32, capacity=256)
        >>> bounds.append(k[:, :, 100:110])
        >>> rw.adaptive.select(q[:, :, :1], k[:, :, :110], method="bounds", bounds=bounds, top_k=2, block_size=32,
        ...                    q_offset=109)
        BlockTable(<1x4x1x4 blocks, at most 2 a row>, 32)

    References:
        Tang et al. (2024), Quest, section 3.2.
    """

    def __init__(self, k: Tensor, block_size: int = 128, *, capacity: int):
        self.block_size = whole("block_size", block_size, 1, error=ShapeError)
        self.capacity = whole("capacity", capacity, 1, error=ShapeError)
        batch, heads, _, dim = k.shape
        shape = batch, heads, -(-self.capacity // self.block_size), dim
        self.low = torch.full(shape, torch.inf, dtype=acc_dtype(k.dtype), device=k.device)
        self.high = torch.full_like(self.low, -torch.inf)
        self.length = 0
        self.append(k)

    @torch.no_grad()
    def append(self, k: Tensor) -> None:
        """Take in tokens that follow, (B, Hkv, n, D)."""
        batch, heads, _, dim = self.low.shape
        if k.ndim != 4 or (*k.shape[:2], k.shape[3]) != (batch, heads, dim):
            raise ShapeError(
                message("k", tuple(k.shape), f"({batch}, {heads}, n, {dim})", "Append keys of this cache.")
            )
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ShapeError(message("k", f"{end} tokens", f"at most {self.capacity}", "Raise capacity."))
        if k.shape[2] == 0:
            return
        first = self.length // self.block_size
        part = slice(first, (end - 1) // self.block_size + 1)
        room = (first + 1) * self.block_size - self.length
        low, high = self.low[:, :, part], self.high[:, :, part]
        low.copy_(torch.minimum(low, by_block(k, self.block_size, least, room).to(low.dtype)))
        high.copy_(torch.maximum(high, by_block(k, self.block_size, largest, room).to(high.dtype)))
        self.length = end


def least(x: Tensor) -> Tensor:
    """Find the least of each channel of a block, (..., tokens, D) to (..., D)."""
    return x.amin(-2)


def largest(x: Tensor) -> Tensor:
    """Find the largest of each channel of a block."""
    return x.amax(-2)
