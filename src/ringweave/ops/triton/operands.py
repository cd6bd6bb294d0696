"""Tensors as the kernels take them: strides, and descriptors of tiles."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...plan import BlockPlan
from .launch_config import padded


def strides(*tensors: Tensor) -> tuple[int, list[int]]:
    """Find what divides the strides over batch, heads and tokens; it, and these divided by it.

    16 elements where some have 8 bits, 8 or 1: loads of 16 bytes at a time need strides that as many elements divide.
    """
    # where a dimension has one element or none its stride says nothing: it may be anything
    steps = [step if side > 1 else 0 for x in tensors for step, side in zip(x.stride()[:3], x.shape, strict=False)]
    units = (16, 8) if any(x.element_size() == 1 for x in tensors) else (8,)
    unit = next((unit for unit in units if all(step % unit == 0 for step in steps)), 1)
    return unit, [step // unit for step in steps]


def wide(plan: BlockPlan, *tensors: Tensor) -> bool:
    """Tell whether 32 bits are too few for addresses within a tile."""
    return any(max(plan.q_tile, plan.kv_tile) * x.stride(2) >= 2**31 for x in tensors)


def head_bytes(*tensors: Tensor) -> int:
    """Count the bytes of one head of all the tensors."""
    return sum(x.shape[2] * x.shape[3] * x.element_size() for x in tensors)


def describable(*tensors: Tensor) -> bool:
    """Tell whether descriptors can describe tensors: from 16 bytes to 16 bytes, nothing broadcast, nothing empty."""
    return all(
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and x.stride(3) == 1
        and all(step > 0 and step * x.element_size() % 16 == 0 for step in x.stride()[:3])
        for x in tensors
    )


def described(x: Tensor, tokens: int) -> TensorDescriptor:
    """Describe tiles of (tokens, channels) of (B, H, N, D)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, tokens, padded(x.shape[3])])
