"""The native CPU kernel: block-sparse forward and backward over a plan's tiles, on strided views, without copies."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from ..errors import UnsupportedError, message
from ..plan import BlockPlan, Branch
from .backend import Backend, Case, Inputs, Upstream
from .overflow import spoil

#: Names a lower instruction set than the best of the machine, for tests and comparisons.
VARIANT = "RINGWEAVE_CPU_VARIANT"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def module() -> ModuleType | None:
    """The extension module, or None where the package was built without a compiler."""
    try:
        return importlib.import_module("ringweave._cpu")
    except ImportError:
        return None


def variant() -> str:
    """The instruction set in use: the best of the machine, or the one that ``RINGWEAVE_CPU_VARIANT`` names.

    Raises:
        UnsupportedError: The machine cannot run the named one, or there is no kernel.
    """
    native = module()
    found = [] if native is None else native.variants()
    asked = os.environ.get(VARIANT, "")
    if not found or (asked and asked not in found):
        raise UnsupportedError(
            message(VARIANT, repr(asked), f"one of {', '.join(found) or 'none: there is no kernel'}", "Unset it.")
        )
    return asked or str(found[0])


def forward(inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One call of the kernel."""
    native = module()
    assert native is not None
    plan = branch.plan("cpu")
    q, k, v = inputs[:3]
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device="cpu")
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="cpu")
    if native.forward(q, k, v, out, lse, *_rows(plan), *_rest(plan, inputs.scale)):
        spoil(out, lse, inputs, branch)
    return out, lse


def backward(upstream: Upstream, inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """One call of the kernel: dK and dV by columns, dQ summed in a fixed order; the same bits on any thread count."""
    native = module()
    assert native is not None
    plan = branch.plan("cpu")
    q, k, v, scale = inputs[:4]
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device="cpu") for x in (q, k, v))
    rows = (upstream.lse, upstream.delta.float())
    columns = (plan.col_ptr, plan.row, plan.bits_t)
    native.backward(upstream.dout.to(q.dtype), q, k, v, *rows, dq, dk, dv, *_rows(plan), *columns, *_rest(plan, scale))
    return dq, dk, dv


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """In one pass over both tensors."""
    native = module()
    assert native is not None
    result = torch.empty(out.shape[:3], dtype=torch.float32, device="cpu")
    slope = None if dlse is None else dlse.detach()
    native.delta(dout, out, slope, result, torch.get_num_threads(), variant())
    return result.masked_fill_(torch.isneginf(lse), 0.0)


def _rows(plan: BlockPlan) -> tuple[Tensor, ...]:
    return plan.row_ptr, plan.col, plan.bits


def _rest(plan: BlockPlan, scale: float) -> tuple[object, ...]:
    return plan.masks, plan.group, plan.q_tile, plan.kv_tile, scale, torch.get_num_threads(), variant()


def refusal(case: Case, branch: Branch) -> str | None:
    """CPU tensors of up to 32 bits with head dimensions in steps of 8."""
    if case.device != "cpu":
        return f"it runs on CPU tensors, and these are on {case.device}"
    if module() is None:
        return "the native kernel is not there: ringweave was installed without a C++ compiler"
    if case.dtype not in _DTYPES:
        return f"it computes float32, bfloat16 and float16, and got {case.dtype}"
    for name, dim in (("D", case.head_dim), ("Dv", case.value_dim)):
        if dim % 8 or dim > 256:
            return f"it needs head dimensions of 8, 16, ... 256, and got {name} = {dim}"
    return None


def scratch(case: Case, branch: Branch) -> int:
    """Per thread a few tiles; backward, sums of dQ for a window, and what 16-bit dK and dV keep between windows."""
    lanes = 512
    forward_bytes = torch.get_num_threads() * 4 * lanes * (2 * case.head_dim + 2 * case.value_dim + 64)
    if not case.needs_grad:
        return forward_bytes
    size = case.dtype.itemsize
    gradients = (
        case.batch
        * size
        * (case.heads * case.nq * case.head_dim + case.kv_heads * case.nk * (case.head_dim + case.value_dim))
    )
    every_sum = case.batch * case.heads * case.nq * case.head_dim * 4
    sums = min(max(2**23, gradients // 64), every_sum)
    kept = case.nk * (case.head_dim + case.value_dim) if size == 2 and every_sum > sums else 0
    return forward_bytes + sums + kept


BACKEND = Backend("cpu", forward, backward, refusal, scratch, delta=delta, tiled=True)
