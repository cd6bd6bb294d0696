"""Rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import acc_dtype


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate x, (batch, heads, tokens, channels), by positions (tokens,) or (batch, tokens)."""
    # at least float32: positions rounded to bfloat16 would be off by many tokens
    half, acc = x.shape[-1] // 2, acc_dtype(x.dtype)
    rates = base ** (-torch.arange(half, device=x.device, dtype=acc) / half)
    angles = positions[..., None].to(acc) * rates
    angles = angles if positions.ndim == 1 else angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(acc).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
