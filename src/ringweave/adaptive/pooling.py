"""Blocks of tokens as one row each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..types import acc_dtype

# numbers that a CPU reduces at a time
_AT_ONCE = 2**18


def by_block(x: Tensor, side: int, reduce: Callable[[Tensor], Tensor], first: int | None = None) -> Tensor:
    """Reduce blocks of tokens, (..., N, D) to (..., blocks, D), without a copy of the tokens.

    Args:
        x: Tokens, at their last dimension but one.
        side: Tokens of a block.
        reduce: Takes (..., blocks, tokens, D) to (..., blocks, D).
        first: Tokens of the first block, where that is cut; ``side`` by default.
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
        block_size: Tokens of a block; the last one may have fewer, and is averaged over what it has.
        first: Tokens of the first block, where that is cut too; ``block_size`` by default.
    Returns:
        Means, (..., blocks, D).
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
    """Let a CPU reduce some blocks at a time: what is widened, or read more than once, stays in its cache."""

    def some(part: Tensor) -> Tensor:
        if part.device.type != "cpu" or torch.compiler.is_compiling():
            return reduce(part)
        step = max(1, _AT_ONCE * part.shape[-3] // max(1, part.numel()))
        return torch.cat([reduce(each) for each in part.split(step, -3)], -2)

    return some
