"""PyTorch's fused attention on a GPU, for full branches and those that are causal from position 0.

A branch runs on the first of PyTorch's fused kernels that supports it. The order depends on the device: cuDNN (from
Hopper on), FlashAttention, then the memory-efficient kernel. The unfused form is never used. The kernels are called as
operators, since PyTorch's public functions do not return lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call, Operands
from ..plan import Branch
from ..torch_compat import aten
from .backend import (  # fmt: skip
    DELTA_CHANNELS,
    Backend,
    Upstream,
    delta_as_channels,
    per_key_head,
    per_query_head,
    with_sign,
)

_HALVES = (torch.bfloat16, torch.float16)
# (forward, backward) of PyTorch's fused kernels
_FUSED = {
    name: (aten(f"{name}_attention"), aten(f"{name}_attention_backward")) for name in ("cudnn", "flash", "efficient")
}
# the memory-efficient backward reads lse in blocks of this many rows
_LSE_ROWS = 32


def kernel_preference(major: int, hip: bool) -> tuple[str, ...]:
    """Return the names of PyTorch's fused kernels for a major compute capability, in order of preference."""
    if hip or major == 8:
        return ("flash", "efficient")
    return ("cudnn", "flash", "efficient") if major >= 9 else ("efficient",)


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str:
    """Return the first kernel in the device's order that PyTorch reports as usable for the inputs."""
    from torch.backends.cuda import (
        SDPAParams,
        can_use_cudnn_attention,
        can_use_efficient_attention,
        can_use_flash_attention,
    )  # fmt: skip

    able = {
        "cudnn": can_use_cudnn_attention,
        "flash": can_use_flash_attention,
        "efficient": can_use_efficient_attention,
    }
    grouped = q.shape[1] != k.shape[1]
    # cuDNN and FlashAttention align a causal mask with the last key; ours starts at the first query's position
    square = not causal or q.shape[2] == k.shape[2]
    for name in kernel_preference(torch.cuda.get_device_capability(q.device)[0], torch.version.hip is not None):
        if None in _FUSED[name]:
            continue
        if name == "efficient":
            # it does not support grouped queries, so its keys are repeated
            keys, values = (per_query_head(x, q.shape[1]) for x in (k, v))
            if able[name](SDPAParams(q, keys, values, None, 0.0, causal, False)):
                return name
        elif square and able[name](SDPAParams(q, k, v, None, 0.0, causal, grouped)):
            return name
    # unsupported_reason lets only such inputs pass that the memory-efficient kernel runs; if not, it raises the reason
    return "efficient"


def dense_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, kernel: str) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) with one of PyTorch's kernels; lse is float32, reshaped to (B, Hq, Nq)."""
    run, _ = _FUSED[kernel]
    if kernel == "flash":
        out, lse = run(q, k, v, 0.0, causal, False, scale=scale)[:2]
    elif kernel == "cudnn":
        out, lse = run(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
    else:
        k, v = (per_query_head(x, q.shape[1]) for x in (k, v))
        out, lse = run(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    return out, lse.reshape(*q.shape[:2], -1)[:, :, : q.shape[2]]


def dense_backward(
    dout: Tensor, operands: Operands, out: Tensor, lse: Tensor, causal: bool, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) with one of PyTorch's fused kernels; each accepts the lse of the others."""
    _, run = _FUSED[kernel]
    q, k, v, scale = operands[:4]
    nq, nk = q.shape[2], k.shape[2]
    if kernel == "flash":
        # required, but not read without dropout
        seed = torch.zeros(2, dtype=torch.int64, device=q.device).view(torch.uint64)
        return run(  # type: ignore[no-any-return]
            dout, q, k, v, out, lse, None, None, nq, nk, 0.0, causal, seed, seed[0], scale=scale
        )
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    if kernel == "cudnn":
        return run(  # type: ignore[no-any-return]
            dout, q, k, v, out, lse[..., None], seed, seed, None, None, None, nq, nk, 0.0, causal, scale=scale
        )
    if torch.version.hip is None:
        # padding rows must have weights of exp(-inf)
        lse = torch.nn.functional.pad(lse, (0, -nq % _LSE_ROWS), value=torch.inf)
    heads, kv_heads = q.shape[1], k.shape[1]
    k, v = (per_query_head(x, heads) for x in (k, v))
    # the kernel takes out's heads for the channels of one row after another, whatever the strides say
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv, _ = run(dout, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale)
    return dq, per_key_head(dk, kv_heads), per_key_head(dv, kv_heads)


def _attended(operands: Operands, branch: Branch) -> Operands:
    """Drop the keys after the last query of a causal branch, since a NaN in them must not be read."""
    if branch.dense_kind != "causal":
        return operands
    return operands._replace(k=operands.k[:, :, : branch.nq], v=operands.v[:, :, : branch.nq])


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of one branch with one fused kernel."""
    q, k, v, scale = with_sign(_attended(operands, branch))[0][:4]
    causal = branch.dense_kind == "causal"
    out, lse = dense_forward(q, k, v, causal, scale, _kernel(q, k, v, causal))
    return out.to(dtype).contiguous(), lse.float().contiguous()


def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients with the kernel's backward; delta is extra channels where it is not rowsum(dout * out)."""
    after = operands.k.shape[2]
    operands, sign = with_sign(_attended(operands, branch))
    q, k, v, scale = operands[:4]
    after -= k.shape[2]
    dout = upstream.dout.to(q.dtype)
    lse, out, dim, causal = upstream.lse.contiguous(), upstream.out, q.shape[3], branch.dense_kind == "causal"
    if out is None:
        dout, q, k, v, out = delta_as_channels(dout, q, k, v, upstream.delta)
    grads = dense_backward(dout, Operands(q, k, v, scale), out, lse, causal, _kernel(q, k, v, causal))
    dq, dk, dv = (x[..., :dim].to(dtype).contiguous() for x in grads)
    if after:
        dk, dv = (torch.nn.functional.pad(x, (0, 0, 0, after)) for x in (dk, dv))
    return dq if sign > 0 else dq * sign, dk, dv


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless the pattern is full or causal, tensors are CUDA, and Dv == D is a multiple of 8."""
    if call.device != "cuda":
        return f"it calls kernels for CUDA tensors, and these are on {call.device}"
    if call.dtype not in (*_HALVES, torch.float32):
        return f"it computes float32, bfloat16 and float16, and got {call.dtype}"
    if call.head_dim != call.value_dim:
        return f"it needs Dv == D, and got D = {call.head_dim}, Dv = {call.value_dim}"
    if call.head_dim % 8 or call.head_dim > 256:
        return f"it needs head dimensions of 8, 16, ... 256, and got {call.head_dim}"
    if call.dtype == torch.bfloat16 and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
        return "PyTorch's fused kernels need compute capability 8 or later for bfloat16"
    if branch.dense_kind == "sparse":
        return "the pattern is neither full nor causal from position 0"
    # the memory-efficient kernel runs the cases that the others do not support
    return f"it calls operators that torch {torch.__version__} does not have" if None in _FUSED["efficient"] else None


def scratch(call: Call, branch: Branch) -> int:
    """Count the float32 sums of dQ, and copies of the inputs with delta as extra channels."""
    if not call.needs_grad:
        return 0
    size = call.dtype.itemsize
    rows, keys = call.batch * branch.head_count * branch.nq, call.batch * branch.head_count * branch.nk
    width = call.head_dim + DELTA_CHANNELS
    return rows * width * 4 + 3 * rows * width * size + 4 * keys * width * size


BACKEND = Backend("flash", forward, backward, unsupported_reason, scratch, planned=False, checked=True, own_delta=True)
