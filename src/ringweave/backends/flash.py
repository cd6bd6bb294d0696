"""Vendor kernels on a GPU: PyTorch's fused attention for dense branches, flash-attn-4 for plans of full tiles.

A dense branch (full, or causal from position 0) runs on the first of PyTorch's fused kernels that supports it. The
order depends on the device: cuDNN (from Hopper on), FlashAttention, then the memory-efficient kernel. The unfused form
is never used. The kernels are called as operators, since PyTorch's public functions do not return lse. A sparse branch
runs on flash-attn-4 if it is installed (``flash_attn.cute``, with the interface of 4.0.0b36), on Hopper and Blackwell,
if every tile of its plan is full: a mask within a tile would have to be written for flash-attn-4's compiler.
FlashAttention-3 does not support block sparsity and is not used.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..cache import derived_values, process_cache
from ..call import Call, Operands
from ..plan import BlockPlan, Branch
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
#: Block sizes (queries, keys) that flash-attn-4 supports, by major compute capability.
SPARSE_TILES = {9: (128, 128), 10: (256, 128)}


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
    dq, dk, dv, _ = run(dout, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale)
    return dq, per_key_head(dk, kv_heads), per_key_head(dv, kv_heads)


def _attended(operands: Operands, branch: Branch) -> Operands:
    """Drop the keys after the last query of a causal branch, since a NaN in them must not be read."""
    if branch.dense_kind != "causal":
        return operands
    return operands._replace(k=operands.k[:, :, : branch.nq], v=operands.v[:, :, : branch.nq])


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of one branch with one fused kernel."""
    operands, _ = with_sign(_attended(operands, branch))
    if branch.dense_kind == "sparse":
        out, lse = _sparse_forward(operands, branch)
    else:
        q, k, v, scale = operands[:4]
        causal = branch.dense_kind == "causal"
        out, lse = dense_forward(q, k, v, causal, scale, _kernel(q, k, v, causal))
    return out.to(dtype).contiguous(), lse.float().contiguous()


def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients with the kernel's backward.

    Where delta is not rowsum(dout * out), it is passed as extra channels or as a gradient of lse.
    """
    after = operands.k.shape[2]
    operands, sign = with_sign(_attended(operands, branch))
    q, k, v, scale = operands[:4]
    after -= k.shape[2]
    dout = upstream.dout.to(q.dtype)
    lse, delta, out, dim = upstream.lse.contiguous(), upstream.delta, upstream.out, q.shape[3]
    if branch.dense_kind == "sparse":
        grads = _sparse_backward(dout, operands, out, lse, delta, branch)
    else:
        causal = branch.dense_kind == "causal"
        if out is None:
            dout, q, k, v, out = delta_as_channels(dout, q, k, v, delta)
        grads = dense_backward(dout, Operands(q, k, v, scale), out, lse, causal, _kernel(q, k, v, causal))
    dq, dk, dv = (x[..., :dim].to(dtype).contiguous() for x in grads)
    if after:
        dk, dv = (torch.nn.functional.pad(x, (0, 0, 0, after)) for x in (dk, dv))
    return dq if sign > 0 else dq * sign, dk, dv


@process_cache
def installed() -> bool:
    """Return whether flash-attn-4 is installed, without importing it."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # flash_attn is not installed, or an older release does not load
        return False


@process_cache
def _cute() -> ModuleType | str:
    """Return flash-attn-4's interface module, or the reason why it cannot be used."""
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        return f"flash-attn-4 does not load ({error})"
    for name, wanted in (("flash_attn_func", "block_sparse_tensors"), ("_flash_attn_bwd", "dlse")):
        function = getattr(interface, name, None)
        if function is None or wanted not in inspect.signature(function).parameters:
            return f"this version of flash-attn-4 has no {name} with {wanted}: 4.0.0b36 does"
    return interface


def _blocks(plan: BlockPlan) -> tuple[Any, Any]:
    """Return flash-attn-4's tile lists of a plan, by rows and by columns; they are cached with the plan."""
    known = derived_values(plan)
    if "flash" not in known:
        sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
        known["flash"] = tuple(
            sparsity.BlockSparseTensorsTorch(
                mask_block_cnt=torch.zeros_like(counts),
                mask_block_idx=torch.zeros_like(index[..., :1]),
                full_block_cnt=counts,
                full_block_idx=index,
                block_size=(plan.q_tile, plan.kv_tile),
            )
            for counts, index in (padded_lists(plan, "rows"), padded_lists(plan, "columns"))
        )
    lists: tuple[Any, Any] = known["flash"]
    return lists


def padded_lists(plan: BlockPlan, side: str) -> tuple[Tensor, Tensor]:
    """Pad a plan's tile lists to equal length.

    Args:
        plan: The plan.
        side: ``"rows"`` or ``"columns"``.

    Returns:
        int32 counts (B, Hq, lines) and indices (B, Hq, lines, longest list), which are zero beyond the counts.
    """
    ptr, tiles = (plan.row_ptr, plan.col) if side == "rows" else (plan.col_ptr, plan.row)
    counts = ptr.diff(dim=1)
    place = torch.arange(max(1, int(counts.max())), device=plan.device)
    entry = (ptr[:, :-1, None] + place).clamp(max=max(0, tiles.shape[0] - 1)).long()
    listed = tiles[entry] if tiles.shape[0] else torch.zeros_like(entry, dtype=torch.int32)
    index = torch.where(place < counts[..., None], listed, 0)
    group = plan.row_set.long()
    return counts[group].contiguous(), index[group].contiguous()


def _sparse_forward(operands: Operands, branch: Branch) -> tuple[Tensor, Tensor]:
    q, k, v, scale = operands[:4]
    rows, _ = _blocks(_plan(branch, q.device))
    by_token = [x.transpose(1, 2) for x in (q, k, v)]
    interface: Any = _cute()
    out, lse = interface.flash_attn_func(*by_token, softmax_scale=scale, block_sparse_tensors=rows, return_lse=True)
    return out.transpose(1, 2), lse


def _sparse_backward(
    dout: Tensor, operands: Operands, out: Tensor | None, lse: Tensor, delta: Tensor, branch: Branch
) -> tuple[Tensor, ...]:
    """Compute the gradients with flash-attn-4.

    flash-attn-4 subtracts dlse from rowsum(dout * out). Without out, zeros are passed as out and -delta as dlse.
    """
    q, k, v, scale = operands[:4]
    _, columns = _blocks(_plan(branch, q.device))
    dlse = None if out is not None else -delta.contiguous()
    by_token = [x.transpose(1, 2) for x in (q, k, v, torch.zeros_like(dout) if out is None else out, dout)]
    interface: Any = _cute()
    grads = interface._flash_attn_bwd(*by_token, lse, scale, block_sparse_tensors=columns, dlse=dlse)
    return tuple(x.transpose(1, 2) for x in grads[:3])


def _plan(branch: Branch, device: torch.device | str) -> BlockPlan:
    return branch.plan(device, tile=SPARSE_TILES[torch.cuda.get_device_capability(device)[0]])


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless tensors are CUDA, Dv == D is a multiple of 8, and flash-attn-4 runs a sparse pattern."""
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
        return _sparse_refusal(call, branch)
    # the memory-efficient kernel runs the cases that the others do not support
    return f"it calls operators that torch {torch.__version__} does not have" if None in _FUSED["efficient"] else None


def _sparse_refusal(call: Call, branch: Branch) -> str | None:
    if not installed():
        return "the pattern is neither full nor causal from position 0, and flash-attn-4 is not installed"
    if not torch.cuda.is_available():
        return "flash-attn-4's sparse kernels depend on the device, and no CUDA device is available"
    tile = SPARSE_TILES.get(torch.cuda.get_device_capability()[0])
    if tile is None or torch.version.hip is not None:
        return "flash-attn-4 supports block sparsity only on Hopper and Blackwell data-centre devices"
    if call.dtype not in _HALVES or call.head_dim > 128:
        return f"flash-attn-4 needs a 16-bit type and head dimensions up to 128, and got {call.dtype}, {call.head_dim}"
    if branch.nq % tile[0] or branch.nk % tile[1]:
        return f"flash-attn-4 needs lengths divisible by its blocks of {tile[0]} x {tile[1]} tokens"
    if branch.plan(f"cuda:{torch.cuda.current_device()}", tile=tile).mask_words.shape[0]:
        return f"the pattern has partial tiles of {tile[0]} x {tile[1]}, and flash-attn-4 is used only for full tiles"
    interface = _cute()
    return interface if isinstance(interface, str) else None


def scratch(call: Call, branch: Branch) -> int:
    """Count the float32 sums of dQ, and copies of the inputs with delta as extra channels."""
    if not call.needs_grad:
        return 0
    size = call.dtype.itemsize
    rows, keys = call.batch * branch.head_count * branch.nq, call.batch * branch.head_count * branch.nk
    width = call.head_dim + DELTA_CHANNELS
    return rows * width * 4 + 3 * rows * width * size + 4 * keys * width * size


BACKEND = Backend("flash", forward, backward, unsupported_reason, scratch, planned=False, checked=True)
