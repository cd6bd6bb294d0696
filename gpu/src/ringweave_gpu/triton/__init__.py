"""Triton kernels over a plan's tiles, forward and backward, for CUDA and ROCm. Triton is imported at the first call.

On an H200 the kernels were right, and faster than FlexAttention over the same plans: ``auto`` takes them on that
generation, for the kinds of calls that were measured, once a check on the user's machine passed. Elsewhere a call names
them, or a trial on the user's machine found them right and faster (``trial.py``).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from ringweave.backends.backend import Backend, Trials, Upstream
from ringweave.cache import process_cache
from ringweave.call import Call, Operands
from ringweave.plan import Branch
from ringweave.precision import STORED
from ringweave.terms import KINDS

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DIM = 512
# multiprocessors of a large device, for estimates that must not query the device
_UNITS = 132


@process_cache
def installed() -> bool:
    """Return whether triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU; its variable must be set before kernels are loaded."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) with one kernel, and a second one if long lists are split."""
    from . import launch

    with launch.as_unsupported():
        return launch.forward(operands, branch, dtype)


def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) with two kernels, and further ones that join split lists.

    The kernels use no floating-point atomics, so the bits are the same each time.
    """
    from . import launch

    with launch.as_unsupported():
        return launch.backward(upstream, operands, branch, dtype)


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Compute delta with one kernel."""
    from . import launch

    with launch.as_unsupported():
        return launch.delta(dout, out, lse, dlse)


def terms(device: str) -> Iterable[str]:
    """Return the kinds of terms that the kernels implement."""
    if not _runs_on(device) or not installed():
        # this backend cannot run at all, and :func:`unsupported_reason` says why
        return KINDS
    from .kernels.score_terms import KINDS as COMPILED

    return [name for name, kind in KINDS.items() if kind.kernel in COMPILED]


def _runs_on(device: str) -> bool:
    return device == "cuda" or (device == "cpu" and interpreted())


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless tensors are CUDA or ROCm with up to 32 bits, D, Dv <= 512 and tiles powers of two."""
    if not _runs_on(call.device):
        return f"it runs on CUDA and ROCm tensors, and these are on {call.device}"
    if not installed():
        return "triton is not installed: pip install triton"
    if call.dtype not in _DTYPES:
        return f"it computes float32, bfloat16 and float16, and got {call.dtype}"
    if call.device == "cpu" and call.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 there"
    for name, dim in (("D", call.head_dim), ("Dv", call.value_dim)):
        if dim > _MAX_DIM:
            return f"it needs head dimensions of at most {_MAX_DIM}, and got {name} = {dim}"
    if call.learned:
        return "its kernels compute no gradients of terms' tables (detach the tables)"
    tile = branch.tile
    if any(size & (size - 1) for size in tile):
        return f"it needs tile sizes that are powers of two, and got {tile[0]} x {tile[1]}"
    return None


def untried(call: Call, branch: Branch) -> str | None:
    """Return why auto does not take the kernels without a trial; None for the kinds of calls measured on Hopper."""
    wanted = "used only when named, or where a trial finds it right and faster: ringweave tune --gpu"
    if not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9:
        return wanted
    widths = {1 << (dim - 1).bit_length() for dim in (call.head_dim, call.value_dim)}
    plain = not (call.features or call.paged or call.kv_dtype)
    measured = plain and call.dtype in (torch.bfloat16, torch.float16) and widths <= {64, 128}
    tiles = branch.dense_kind == "sparse" and branch.lists is None
    return None if measured and tiles else wanted


def scratch(call: Call, branch: Branch) -> int:
    """Count the row and column queues, the transposed masks, and the partial sums of long lists."""
    from . import queues

    plan = branch.plan()
    ratio = branch.head_count // call.kv_heads if branch.head_count % call.kv_heads == 0 else 1
    queue = queues.row_queue(plan, ratio, 1, 1, _UNITS)
    rows, held = queue.slots * plan.q_tile, queue.records.numel() + 2 * plan.mask_words.numel()
    if not call.needs_grad:
        return 4 * (held + rows * (call.value_dim + 1))
    queue = queues.column_queue(plan, ratio, 1, _UNITS)
    columns = queue.slots * plan.kv_tile
    partial = max(rows * max(call.value_dim + 1, call.head_dim), columns * (call.head_dim + call.value_dim))
    delta = call.batch * branch.head_count * branch.nq
    return 4 * (held + queue.records.numel() + partial + delta)


def trials() -> Trials:
    """Return the trials that decide where auto uses the kernels."""
    from .. import trial

    return trial


BACKEND = Backend(
    "triton",
    forward,
    backward,
    unsupported_reason,
    scratch,
    delta=delta,
    checked=True,
    before="flex",
    tiled=True,
    terms=terms,
    dropout=True,
    paged=True,
    kv_dtypes=tuple(STORED),
    trials=trials,
    untried=untried,
)
