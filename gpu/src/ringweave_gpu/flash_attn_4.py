"""flash-attn-4 for plans of full tiles, on Hopper and Blackwell (``flash_attn.cute``, with the interface of 4.0.0b36).

It runs a branch if every tile of its plan is full: a mask within a tile would have to be written for flash-attn-4's
compiler. PyTorch's fused kernels compute full and causal branches (``flash``). FlashAttention-3 does not support block
sparsity and is not used.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringweave.backends.backend import Backend, Upstream, with_sign
from ringweave.cache import derived_values, process_cache
from ringweave.call import Call, Operands
from ringweave.plan import BlockPlan, Branch

_HALVES = (torch.bfloat16, torch.float16)
#: Block sizes (queries, keys) that flash-attn-4 supports, by major compute capability.
SPARSE_TILES = {9: (128, 128), 10: (256, 128)}


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


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of one branch."""
    q, k, v, scale = with_sign(operands)[0][:4]
    rows, _ = _blocks(_plan(branch, q.device))
    by_token = [x.transpose(1, 2) for x in (q, k, v)]
    interface: Any = _cute()
    out, lse = interface.flash_attn_func(*by_token, softmax_scale=scale, block_sparse_tensors=rows, return_lse=True)
    return out.transpose(1, 2).to(dtype).contiguous(), lse.float().contiguous()


def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients.

    flash-attn-4 subtracts dlse from rowsum(dout * out). Without out, zeros are passed as out and -delta as dlse.
    """
    operands, sign = with_sign(operands)
    q, k, v, scale = operands[:4]
    dout, out = upstream.dout.to(q.dtype), upstream.out
    _, columns = _blocks(_plan(branch, q.device))
    dlse = None if out is not None else -upstream.delta.contiguous()
    by_token = [x.transpose(1, 2) for x in (q, k, v, torch.zeros_like(dout) if out is None else out, dout)]
    interface: Any = _cute()
    lse = upstream.lse.contiguous()
    grads = interface._flash_attn_bwd(*by_token, lse, scale, block_sparse_tensors=columns, dlse=dlse)
    dq, dk, dv = (x.transpose(1, 2).to(dtype).contiguous() for x in grads[:3])
    return dq if sign > 0 else dq * sign, dk, dv


def _plan(branch: Branch, device: torch.device | str) -> BlockPlan:
    return branch.plan(device, tile=SPARSE_TILES[torch.cuda.get_device_capability(device)[0]])


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless tensors are 16-bit CUDA, Dv == D is a multiple of 8 up to 128, and all tiles are full."""
    if branch.dense_kind != "sparse":
        return "PyTorch's fused kernels compute full and causal patterns: name 'flash'"
    if call.device != "cuda":
        return f"it calls kernels for CUDA tensors, and these are on {call.device}"
    if call.head_dim != call.value_dim:
        return f"it needs Dv == D, and got D = {call.head_dim}, Dv = {call.value_dim}"
    if call.head_dim % 8:
        return f"it needs head dimensions of 8, 16, ... 128, and got {call.head_dim}"
    if call.dtype not in _HALVES or call.head_dim > 128:
        return f"flash-attn-4 needs a 16-bit type and head dimensions up to 128, and got {call.dtype}, {call.head_dim}"
    if not installed():
        return "flash-attn-4 is not installed: pip install flash-attn-4"
    if not torch.cuda.is_available():
        return "flash-attn-4's sparse kernels depend on the device, and no CUDA device is available"
    tile = SPARSE_TILES.get(torch.cuda.get_device_capability()[0])
    if tile is None or torch.version.hip is not None:
        return "flash-attn-4 supports block sparsity only on Hopper and Blackwell data-centre devices"
    if branch.nq % tile[0] or branch.nk % tile[1]:
        return f"flash-attn-4 needs lengths divisible by its blocks of {tile[0]} x {tile[1]} tokens"
    if branch.plan(f"cuda:{torch.cuda.current_device()}", tile=tile).mask_words.shape[0]:
        return f"the pattern has partial tiles of {tile[0]} x {tile[1]}, and flash-attn-4 is used only for full tiles"
    interface = _cute()
    return interface if isinstance(interface, str) else None


def scratch(call: Call, branch: Branch) -> int:
    """Count the float32 sums of dQ, and the zeros that stand for out."""
    if not call.needs_grad:
        return 0
    rows = call.batch * branch.head_count * branch.nq
    return rows * call.head_dim * (4 + call.dtype.itemsize)


BACKEND = Backend(
    "flash_attn_4", forward, backward, unsupported_reason, scratch, planned=False, checked=True, before="gather",
    own_delta=True,
)  # fmt: skip
