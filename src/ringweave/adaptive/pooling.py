"""Reductions of token blocks to one row each (means and bounds), and a rank's runs of consecutive tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..types import acc_dtype

if TYPE_CHECKING:
    from ..parallel import ContextParallel

from ..axes import Axes
from ..checks import whole
from ..chunks import at_once
from ..errors import ShapeError

_KEYS = Axes("k: [B Hkv n D]")


def by_block(x: Tensor, side: int, reduce: Callable[[Tensor], Tensor], first: int | None = None) -> Tensor:
    """Reduce blocks of tokens, (..., N, D) to (..., blocks, D), without copying the tokens.

    Args:
        x: Tokens, (..., N, D).
        side: Tokens per block.
        reduce: Function from (..., blocks, tokens, D) to (..., blocks, D).
        first: Tokens of the first block, if it is shorter; ``side`` by default.
    """
    n = x.shape[-2]
    head = min(n, side if first is None else first)
    head = 0 if head == side else head
    body = head + (n - head) // side * side
    parts = [x[..., :head, :].unsqueeze(-3)] if head else []
    if body > head:
        parts.append(x[..., head:body, :].unflatten(-2, (-1, side)))
    if n > body:
        parts.append(x[..., body:, :].unsqueeze(-3))
    reduced = [reduce(part) for part in parts]
    return reduced[0] if len(reduced) == 1 else torch.cat(reduced, -2)


def block_means(x: Tensor, block_size: int, *, first: int | None = None) -> Tensor:
    """Average blocks of tokens, in float32 (float64 for float64); differentiable.

    Args:
        x: Tokens, (..., N, D).
        block_size: Tokens per block; the last block may have fewer and is averaged over those.
        first: Tokens of the first block, if it is shorter too; ``block_size`` by default.
    Returns:
        The means, (..., blocks, D).
    Example:
        >>> rw.adaptive.block_means(torch.tensor([[1.0], [3.0], [8.0]]), 2)
        tensor([[2.],
                [8.]])
    """
    acc = acc_dtype(x.dtype)

    def means(part: Tensor) -> Tensor:
        return part.mean(-2, dtype=acc)

    return by_block(x, block_size, means if acc == x.dtype else in_cache(means), first)


def in_cache(reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Reduce a few blocks per step on a CPU, so that widened or repeatedly read data stays in its cache."""

    def some(part: Tensor) -> Tensor:
        if part.device.type != "cpu" or torch.compiler.is_compiling():
            return reduce(part)
        # an element and its widened copy
        step = at_once(8 * part.numel() // max(1, part.shape[-3]))
        return torch.cat([reduce(each) for each in part.split(step, -3)], -2)

    return some


class TokenRun(NamedTuple):
    """Tokens [begin, end) of a shard, which have consecutive positions from `position` on."""

    begin: int
    end: int
    position: int


def token_runs(context: ContextParallel | None, tokens: int) -> list[TokenRun]:
    """Split a rank's tokens into runs of consecutive positions, without padding."""
    if context is None:
        return [TokenRun(0, tokens, 0)]
    positions = context.positions.numpy()
    positions = positions[positions < tokens]
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    bounds = [0, *cuts.tolist(), len(positions)]
    return [TokenRun(a, b, int(positions[a])) for a, b in itertools.pairwise(bounds) if b > a]


class KeyBounds:
    """The minimum and maximum of every channel over each block of keys, for ``select(method="bounds")``.

    A query's score with any key of a block is at most ``sum_d max(q_d low_d, q_d high_d)``. The cost of appending n
    tokens depends on n only, not on the cache. All memory is allocated at construction.

    Args:
        k: Keys so far, (B, Hkv, N, D); N may be 0.
        block_size: Tokens per block.
        capacity: Maximum number of tokens, including N.
    Attributes:
        low: Minima, (B, Hkv, blocks, D), in the keys' dtype or float32 if that is wider; inf in blocks without tokens.
        high: Maxima, with the shape and dtype of ``low``; -inf in blocks without tokens.
        length: Number of tokens so far.
    Raises:
        ShapeError: The tokens exceed the capacity, or have another shape.
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
        """Append the next n keys, (B, Hkv, n, D)."""
        batch, heads, _, dim = self.low.shape
        _KEYS.fit(k=k, B=batch, Hkv=heads, D=dim, anywhere=True, empty=("n",), remedy="Append keys of this cache.")
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ShapeError("k", f"{end} tokens", f"at most {self.capacity}", "Raise capacity.")
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
    """Return the minimum of each channel of a block, (..., tokens, D) to (..., D)."""
    return x.amin(-2)


def largest(x: Tensor) -> Tensor:
    """Return the maximum of each channel of a block, (..., tokens, D) to (..., D)."""
    return x.amax(-2)
