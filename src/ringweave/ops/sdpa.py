"""PyTorch's own dense kernel for full and causal patterns: no mask tensor, no plan."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import Branch
from .backend import Backend, Case, Upstream, delta_as_channels

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def forward(q: Tensor, k: Tensor, v: Tensor, branch: Branch, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Dense attention; key heads are repeated for grouped queries, as PyTorch does on a CPU."""
    heads = q.shape[1]
    out, lse = _forward(
        q, _per_query_head(k, heads), _per_query_head(v, heads), 0.0, branch.structure == "causal", scale=scale
    )
    return out.to(dtype).contiguous(), lse.contiguous()


def backward(
    upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, branch: Branch, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of dense attention; delta goes in through further channels where the kernel's own is another."""
    dout, lse, delta, out = upstream
    heads, kv_heads = q.shape[1], k.shape[1]
    keys, values = _per_query_head(k, heads), _per_query_head(v, heads)
    slopes = dout.to(q.dtype)
    queries = q
    if out is None:
        slopes, queries, keys, values, out = delta_as_channels(slopes, q, keys, values, delta)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq, dk, dv = _backward(
        slopes, queries, keys, values, out, lse.to(wide), 0.0, branch.structure == "causal", scale=scale
    )

    def per_kv_head(x: Tensor) -> Tensor:
        x = x[..., : q.shape[3]]
        return x if kv_heads == heads else x.unflatten(1, (kv_heads, heads // kv_heads)).sum(2)

    return dq[..., : q.shape[3]].to(dtype).contiguous(), per_kv_head(dk).to(dtype), per_kv_head(dv).to(dtype)


def refusal(case: Case, branch: Branch) -> str | None:
    """Dense patterns on a CPU with equal head dimensions."""
    if branch.structure == "sparse":
        return "the pattern is neither full nor causal from position 0, and a dense mask would need N x N memory"
    if case.device != "cpu":
        return f"it calls PyTorch's CPU kernel, and the tensors are on {case.device}"
    if case.head_dim != case.value_dim:
        return f"PyTorch's kernel needs Dv == D, and got D = {case.head_dim}, Dv = {case.value_dim}"
    return None


def scratch(case: Case, branch: Branch) -> int:
    """Key heads repeated for grouped queries; the kernel's own blocks are small."""
    if case.heads == case.kv_heads:
        return 0
    return case.batch * case.heads * case.nk * (case.head_dim + case.value_dim) * case.dtype.itemsize


BACKEND = Backend("sdpa", forward, backward, refusal, scratch, planned=False)
