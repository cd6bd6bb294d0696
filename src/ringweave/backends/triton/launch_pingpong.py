"""Calls of the pingpong kernel, in which two groups of warps multiply in turn: its conditions and its arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...cache import fact
from ...plan import BlockPlan
from . import arguments, kernels
from .launch_config import LaunchConfig, Packing, padded
from .queues import Queue

# rows of one of the two groups of warps
_ROWS = 64


def takes(config: LaunchConfig, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, packing: Packing, queue: Queue,
          scale: float) -> bool:  # fmt: skip
    """Return whether the kernel supports a case with describable keys and values: tiles of 128, no split lists."""
    return (
        config.pingpong
        and (plan.q_tile, plan.kv_tile) == (config.m, config.n)
        and (packing.heads, packing.rows, packing.parts) == (1, config.m, 1)
        and all(x.shape[3] == padded(x.shape[3]) for x in (q, v))
        and q.dtype == k.dtype == v.dtype
        and queue.splits is None
        # the scale is applied after the row's maximum is taken, which a scale below 0 would turn into the minimum
        and scale > 0
        and arguments.describable(q)
    )


def launch(
    config: LaunchConfig, tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], plan: BlockPlan, queue: Queue,
    scale: float, units: int, options: dict[str, Any],
) -> None:  # fmt: skip
    """Launch one program per multiprocessor; the programs take items of the queue in turn.

    The tensors are (q, k, v, out, lse). ``scale`` includes the factor log2(e), since the kernel uses powers of two.
    """
    q, k, v, out, lse = tensors
    heads, nq, nk = q.shape[1], q.shape[2], k.shape[2]
    kernels.pingpong[(min(queue.items, units),)](
        _described(q, _ROWS), _described(k, config.n), _described(v, config.n), out, lse, queue.records,
        plan.col, plan.mask_id, plan.mask_words, queue.items, heads, heads // k.shape[1], nq, nk, scale,
        D=q.shape[3], DV=v.shape[3], KV_TILE=config.n, STAGES=config.stages, MASKED=plan.mask_words.shape[0] > 0,
        RAGGED=nk % plan.kv_tile > 0, num_warps=4, **options,
    )  # fmt: skip


def _described(x: Tensor, tokens: int) -> Any:
    """Return a descriptor of tiles (tokens, channels) of a tensor (B, H, N, D), in the layout that products read."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, tokens, x.shape[3]], _layout())


@fact
def _layout() -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
