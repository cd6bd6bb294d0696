"""Calls of the kernels: strides, paddings, block sizes and queues."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from ...plan import BlockPlan, Branch
from . import kernels, schedule
from .blocks import Blocks, Device, choose, padded

_LOG2_E = math.log2(math.e)


def forward(q: Tensor, k: Tensor, v: Tensor, branch: Branch, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One launch."""
    q, k, v = map(_readable, (q, k, v))
    plan = branch.plan(q.device)
    batch, heads, nq, _ = q.shape
    out = torch.empty(batch, heads, nq, v.shape[3], dtype=dtype, device=q.device)
    lse = torch.empty(batch, heads, nq, dtype=torch.float32, device=q.device)
    blocks = _blocks("forward", q, v, plan)
    ratio = heads // k.shape[1]
    queue = schedule.row_queue(plan, ratio, _head_bytes(k, v))
    live = schedule.masks(plan).live_keys if plan.masks.shape[0] else plan.masks
    with _on(q):
        kernels.forward[(queue.numel() * (plan.q_tile // blocks.m),)](
            q, k, v, out, lse, queue, plan.group, plan.row_ptr, plan.col, plan.bits, plan.masks, live,
            *_steps(q, k, v), heads, ratio, nq, k.shape[2], plan.q_tiles, scale * _LOG2_E,
            **_sizes(q, v, plan, blocks), FOLDED=scale > 0, WIDE=_wide(plan, q, k, v),
        )  # fmt: skip
    return out, lse


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, 0 where lse is -inf, in one launch."""
    dout, out = _readable(dout), _readable(out)
    batch, heads, nq, dim = out.shape
    result = torch.empty(batch, heads, nq, dtype=torch.float32, device=out.device)
    rows = max(16, min(128, 8192 // padded(dim)))
    slope = result if dlse is None else dlse
    with _on(out):
        kernels.delta[(batch * heads * triton.cdiv(nq, rows),)](
            dout, out, lse, slope, result, *_steps(dout, out), *lse.stride(), *slope.stride(), heads, nq,
            DV=dim, PAD_DV=padded(dim), BLOCK_M=rows, SLOPED=dlse is not None,
            WIDE=_far(rows, dout, out), num_warps=4,
        )  # fmt: skip
    return result


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    branch: Branch,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Two launches: dQ by rows, dK and dV by columns."""
    q, k, v, dout = map(_readable, (q, k, v, dout.to(q.dtype)))
    plan = branch.plan(q.device)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
    heads, nq, nk = q.shape[1], q.shape[2], k.shape[2]
    ratio = heads // k.shape[1]
    # live positions and transposed masks; without masks the kernels read none of them
    sides = schedule.masks(plan) if plan.masks.shape[0] else schedule.Masks(plan.masks, plan.masks, plan.masks)
    steps = (*_steps(q, k, v, dout), *lse.stride(), *delta.stride())
    wide = _wide(plan, q, k, v, dout)
    rows, columns = (_blocks(kernel, q, v, plan) for kernel in ("backward_q", "backward_kv"))
    row_queue = schedule.row_queue(plan, ratio, _head_bytes(k, v))
    column_queue = schedule.column_queue(plan, ratio, _head_bytes(q, dout) * ratio)
    with _on(q):
        kernels.backward_q[(row_queue.numel() * (plan.q_tile // rows.m),)](
            q, k, v, dout, lse, delta, dq, row_queue, plan.group, plan.row_ptr, plan.col, plan.bits, plan.masks,
            sides.live_keys, *steps, heads, ratio, nq, nk, plan.q_tiles, scale,
            **_sizes(q, v, plan, rows), WIDE=wide,
        )  # fmt: skip
        kernels.backward_kv[(column_queue.numel() * (plan.kv_tile // columns.n),)](
            q, k, v, dout, lse, delta, dk, dv, column_queue, plan.group, plan.col_ptr, plan.row, plan.bits_t,
            sides.transposed, sides.live_queries, *steps, heads, ratio, nq, nk, plan.kv_tiles, scale,
            **_sizes(q, v, plan, columns), WIDE=wide,
        )  # fmt: skip
    return dq, dk, dv


def _readable(x: Tensor) -> Tensor:
    """Any strides but in the last dimension."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _steps(*tensors: Tensor) -> list[int]:
    """Strides over batch, heads and tokens."""
    return [step for x in tensors for step in x.stride()[:3]]


def _head_bytes(*tensors: Tensor) -> int:
    return sum(x.shape[2] * x.shape[3] * x.element_size() for x in tensors)


def _far(rows: int, *tensors: Tensor) -> bool:
    """Whether 32 bits are too few for addresses within a block."""
    return any(rows * x.stride(2) >= 2**31 for x in tensors)


def _wide(plan: BlockPlan, *tensors: Tensor) -> bool:
    return _far(max(plan.q_tile, plan.kv_tile), *tensors)


def _sizes(q: Tensor, v: Tensor, plan: BlockPlan, blocks: Blocks) -> dict[str, Any]:
    return {
        "D": q.shape[3],
        "DV": v.shape[3],
        "PAD_D": padded(q.shape[3]),
        "PAD_DV": padded(v.shape[3]),
        "Q_TILE": plan.q_tile,
        "KV_TILE": plan.kv_tile,
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "MASKED": plan.masks.shape[0] > 0,
        "STAGES": blocks.stages,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def _blocks(kernel: str, q: Tensor, v: Tensor, plan: BlockPlan) -> Blocks:
    sides = (plan.q_tile, plan.kv_tile)
    return choose(kernel, q.shape[3], v.shape[3], q.element_size(), sides, _device(q.device))


@functools.cache
def _device(device: torch.device) -> Device:
    if torch.version.hip is not None:
        return Device("cdna", 64 * 1024)
    if device.type != "cuda":
        # the interpreter: any will do
        return Device("ampere", 99 * 1024)
    properties = torch.cuda.get_device_properties(device)
    return Device.of_cuda(properties.major, getattr(properties, "shared_memory_per_block_optin", 99 * 1024))


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
