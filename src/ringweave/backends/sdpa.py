"""PyTorch's fused CPU kernel for full and causal patterns, without a mask tensor or a plan."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..call import Call, Operands
from ..plan import Branch
from ..torch_compat import aten
from ..types import acc_dtype
from .backend import Backend, Upstream, delta_as_channels, per_key_head, per_query_head, with_sign
from .overflow import is_large, may_overflow, nan_rows_out_of_range, sums_in_range

_forward, _backward = aten("flash_attention_for_cpu"), aten("flash_attention_for_cpu_backward")


def _rows_apart(x: Tensor) -> Tensor:
    """Copy a tensor with repeated or overlapping rows, which PyTorch's matrix products do not support."""
    return x if x.stride(2) >= x.shape[3] else x.contiguous()


def _products_overflow(operands: Operands, branch: Branch) -> bool:
    """Return whether products may leave the range of float32 in PyTorch's kernel, which scales after multiplying."""
    return may_overflow(operands._replace(scale=max(abs(operands.scale), 1.0)), branch)


def _in_range(operands: Operands) -> tuple[Operands, float]:
    """Move a power of two from the scale to q, so that products are in range if scores are; return the power too.

    dq has to be multiplied by the power.
    """
    if not 0 < abs(operands.scale) < 1 or operands.q.dtype == torch.float16:
        # products of float16 numbers are always in range, and small queries would be rounded
        return operands, 1.0
    power = 2.0 ** (math.frexp(abs(operands.scale))[1] - 1)
    return operands._replace(q=operands.q * power, scale=operands.scale / power), power


def _widens(dtype: torch.dtype, scale: float) -> bool:
    """Return whether inputs are widened to float32, since PyTorch's kernel multiplies bfloat16 without widening it."""
    return dtype == torch.bfloat16 and is_large(scale)


def _attended(operands: Operands, branch: Branch) -> Operands:
    """Drop keys and values that no query may attend, since a NaN in them must not be read; widen the others if due."""
    q, k, v = operands[:3]
    count = q.shape[2] if branch.dense_kind == "causal" else k.shape[2]
    attended = operands._replace(k=k[:, :, :count], v=v[:, :, :count])
    return attended.map(Tensor.float) if _widens(q.dtype, operands.scale) else attended


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of dense attention; key heads are repeated for grouped queries, as PyTorch does on a CPU."""
    attended = _attended(operands, branch)
    risky = _products_overflow(attended, branch)
    q, k, v, scale = with_sign(_in_range(attended)[0] if risky else attended)[0][:4]
    heads = q.shape[1]
    tensors = map(_rows_apart, (q, per_query_head(k, heads), per_query_head(v, heads)))
    out, lse = _forward(*tensors, 0.0, branch.dense_kind == "causal", scale=scale)
    out, lse = out.to(dtype).contiguous(), lse.contiguous()
    if risky and may_overflow(attended, branch):
        nan_rows_out_of_range(out, lse, operands, branch)
    return out, lse


@sums_in_range
def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of dense attention; delta is passed as extra channels if it is not rowsum(dout * out)."""
    dout, lse, delta, out = upstream[:4]
    dead = torch.isneginf(lse)
    if bool(dead.any()):
        # a query that attends nothing, or that another rank computes in a shared tile, has weights of 0
        lse = lse.masked_fill(dead, torch.inf)
    every_key = operands.k.shape[2]
    operands, power = _attended(operands, branch), 1.0
    if _products_overflow(operands, branch):
        operands, power = _in_range(operands)
    operands, sign = with_sign(operands)
    q, k, v, scale = operands[:4]
    broken_keys = ~k.isfinite().all(-1)
    some_keys = bool(broken_keys.any())
    if some_keys:
        # Rows that attend such a key are NaN already, or have a score of -inf. Within a block of the kernel, the key
        # would make rows NaN that do not attend it.
        k = k.masked_fill(broken_keys[..., None], 0.0)
    heads = q.shape[1]
    keys, values = per_query_head(k, heads), per_query_head(v, heads)
    dout, queries = dout.to(q.dtype), q
    if out is None:
        dout, queries, keys, values, out = delta_as_channels(dout, q, keys, values, delta)
    else:
        out = out.to(q.dtype)
    causal, broken = branch.dense_kind == "causal", lse.isnan()
    some = bool(broken.any())
    if some:
        # Within a block of the kernel, rows of NaN would make gradients of keys NaN that they do not attend. They are
        # excluded here, and the keys that they attend become NaN below.
        dout, queries, out = (x.masked_fill(broken[..., None], 0.0) for x in (dout, queries, out))
        lse = lse.masked_fill(broken, torch.inf)
    tensors = map(_rows_apart, (dout, queries, keys, values, out))
    dq, dk, dv = _backward(*tensors, lse.to(acc_dtype(q.dtype)), 0.0, causal, scale=scale)
    if some_keys:
        dk, dv = (x.masked_fill(per_query_head(broken_keys[..., None], heads), 0.0) for x in (dk, dv))
    if some:
        last = torch.where(broken, torch.arange(q.shape[2], device=q.device) if causal else k.shape[2], -1).amax(2)
        reached = torch.arange(k.shape[2], device=q.device) <= last[..., None]
        dq, dk, dv = (
            x.masked_fill(rows[..., None], torch.nan) for x, rows in ((dq, broken), (dk, reached), (dv, reached))
        )

    def of_keys(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x[..., : q.shape[3]], (0, 0, 0, every_key - k.shape[2]))
        return per_key_head(x, k.shape[1]).to(dtype)

    dq = dq[..., : q.shape[3]].to(dtype).contiguous()
    return dq if sign * power == 1 else dq * (sign * power), of_keys(dk), of_keys(dv)


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless the pattern is full or causal, tensors are on a CPU, and Dv == D."""
    if branch.dense_kind == "sparse":
        return "the pattern is neither full nor causal from position 0, and a dense mask would need N x N memory"
    if call.device != "cpu":
        return f"it calls PyTorch's CPU kernel, and the tensors are on {call.device}"
    if _forward is None or _backward is None:
        return f"it calls an operator that torch {torch.__version__} does not have"
    if call.head_dim != call.value_dim:
        return f"PyTorch's kernel needs Dv == D, and got D = {call.head_dim}, Dv = {call.value_dim}"
    return None


def scratch(call: Call, branch: Branch) -> int:
    """Count the key heads repeated for grouped queries, and widened inputs; the kernel's internal blocks are small."""
    size, rows = call.dtype.itemsize, 0 if call.heads == call.kv_heads else call.heads * call.nk
    if _widens(call.dtype, call.scale):
        # queries, keys, values and output; in backward their gradients for each query head, and copies of these
        size, rows = 4, rows + call.heads * call.nq + call.kv_heads * call.nk
        rows += call.needs_grad * 2 * call.heads * (call.nq + call.nk)
    return call.batch * rows * (call.head_dim + call.value_dim) * size


BACKEND = Backend("sdpa", forward, backward, unsupported_reason, scratch, planned=False, own_delta=True)
