"""Triton kernels over a plan's tiles, forward and backward, for CUDA and ROCm; nothing here is loaded until it is used.

Tested in Triton's interpreter and compiled offline for real devices. Speed on a GPU is unmeasured so far.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from ...plan import Branch
from ..backend import Backend, Case

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DIM = 256


@functools.cache
def installed() -> bool:
    """Whether triton can be imported; it is not."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU: its own switch, set before they are loaded."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def forward(q: Tensor, k: Tensor, v: Tensor, branch: Branch, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One kernel."""
    from . import launch

    return launch.forward(q, k, v, branch, scale, dtype)


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
    """Two kernels, without atomics: the same bits each time."""
    from . import launch

    return launch.backward(dout, q, k, v, out, lse, delta, branch, scale, dtype)


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """One kernel."""
    from . import launch

    return launch.delta(dout, out, lse, dlse)


def refusal(case: Case, branch: Branch) -> str | None:
    """CUDA and ROCm tensors of up to 32 bits, head dimensions up to 256, tiles with sides that are powers of two."""
    if case.device != "cuda" and not (case.device == "cpu" and interpreted()):
        return f"it runs on CUDA and ROCm tensors, and these are on {case.device}"
    if not installed():
        return "triton is not installed: pip install triton"
    if case.dtype not in _DTYPES:
        return f"it computes float32, bfloat16 and float16, and got {case.dtype}"
    if case.device == "cpu" and case.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 there"
    for name, dim in (("D", case.head_dim), ("Dv", case.value_dim)):
        if dim > _MAX_DIM:
            return f"it needs head dimensions of at most {_MAX_DIM}, and got {name} = {dim}"
    sides = branch.tile
    if any(side & (side - 1) for side in sides):
        return f"it needs tiles with sides that are powers of two, and got {sides[0]} x {sides[1]}"
    return None


def scratch(case: Case, branch: Branch) -> int:
    """A queue entry per tile of queries or keys, and the masks once more, packed along queries."""
    plan = branch.plan()
    queues = 4 * case.batch * (branch.head_count * plan.q_tiles + case.kv_heads * plan.kv_tiles)
    return (
        queues + 2 * plan.masks.numel() * 4 + (case.batch * branch.head_count * branch.nq * 4 if case.needs_grad else 0)
    )


BACKEND = Backend("triton", forward, backward, refusal, scratch, delta=delta)
