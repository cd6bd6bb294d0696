"""Calls of the kernel whose groups of warps take turns: when it can compute a case, and what it is given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...cache import fact
from ...plan import BlockPlan
from . import arguments, kernels
from .launch_config import LaunchConfig, Packing, padded
from .queues import Queue

# rows of one of the two groups
_ROWS = 64


def takes(config: LaunchConfig, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, packing: Packing, queue: Queue,
          scale: float) -> bool:  # fmt: skip
    """Tell whether it computes a case whose keys and values descriptors load: tiles of 128, lists in one piece."""
    return (
        config.pingpong
        and (plan.q_tile, plan.kv_tile) == (config.m, config.n)
        and (packing.heads, packing.rows, packing.parts) == (1, config.m, 1)
        and all(x.shape[3] == padded(x.shape[3]) for x in (q, v))
        and q.dtype == k.dtype == v.dtype
        and queue.splits is None
        # folded into what is exponentiated: else the largest score would be the least
        and scale > 0
        and arguments.describable(q)
    )


def launch(
    config: LaunchConfig, tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], plan: BlockPlan, queue: Queue,
    scale: float, units: int, options: dict[str, Any],
) -> None:  # fmt: skip
    """Launch a program for each multiprocessor, which take the queue in turn; ``scale`` is in powers of two.

    The tensors are (q, k, v, out, lse).
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
    """Describe tiles of (tokens, channels) of (B, H, N, D) with the layout that products read."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, tokens, x.shape[3]], _layout())


@fact
def _layout() -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
