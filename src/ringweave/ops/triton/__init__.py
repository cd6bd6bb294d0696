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
from ..backend import EXTRAS, Backend, Case, Inputs, Upstream

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DIM = 512
# multiprocessors of a large device, where the device is not asked
_UNITS = 132


@functools.cache
def installed() -> bool:
    """Tell whether triton can be imported; it is not."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Tell whether Triton runs kernels on the CPU: its own switch, set before they are loaded."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def forward(inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Launch one kernel; a second where long lists are split."""
    from . import launch

    with launch.explained():
        return launch.forward(inputs, branch, dtype)


def backward(upstream: Upstream, inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Launch two kernels, and those that join split lists; without atomics: the same bits each time."""
    from . import launch

    with launch.explained():
        return launch.backward(upstream, inputs, branch, dtype)


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Launch one kernel."""
    from . import launch

    with launch.explained():
        return launch.delta(dout, out, lse, dlse)


def refusal(case: Case, branch: Branch) -> str | None:
    """Refuse all but CUDA and ROCm tensors of up to 32 bits, head dimensions up to 512, sides of powers of two."""
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
    """Count queues by rows and columns, masks packed along queries too, partial sums of long lists."""
    from . import queues

    plan = branch.plan()
    ratio = branch.head_count // case.kv_heads if branch.head_count % case.kv_heads == 0 else 1
    queue = queues.row_queue(plan, ratio, 1, 1, _UNITS)
    rows, held = queue.slots * plan.q_tile, queue.records.numel() + 2 * plan.masks.numel()
    if not case.needs_grad:
        return 4 * (held + rows * (case.value_dim + 1))
    queue = queues.column_queue(plan, ratio, 1, _UNITS)
    columns = queue.slots * plan.kv_tile
    partial = max(rows * max(case.value_dim + 1, case.head_dim), columns * (case.head_dim + case.value_dim))
    delta = case.batch * branch.head_count * branch.nq
    return 4 * (held + queue.records.numel() + partial + delta)


BACKEND = Backend(
    "triton",
    forward,
    backward,
    refusal,
    scratch,
    delta=delta,
    checked=True,
    compiled=True,
    tiled=True,
    extras=EXTRAS,
    paged=True,
    stored=True,
)
