"""attn-gym's fused attention over chosen keys, on CUDA, where it is installed (``attn_gym.sparse``, as of 0.0.17).

``gather_attn`` takes one tensor for keys and values, which all heads share. So the key heads become batch elements, and
keys and values adjacent channels; a query is 0 in the channels of the values. Backward repeats the forward.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringweave.backends import list_tiles
from ringweave.backends.backend import Backend, Upstream, with_sign
from ringweave.cache import process_cache
from ringweave.call import Call, Operands
from ringweave.plan import Branch
from ringweave.torch_compat import AUTOGRAD_WITHIN, autograd_within

_WANTED = ("kv_indices", "sliding_window_size", "scale", "return_aux")
_MOST_CHANNELS = 512


@process_cache
def installed() -> bool:
    """Return whether attn-gym is installed, without importing it."""
    return importlib.util.find_spec("attn_gym") is not None


@process_cache
def _module() -> Any:
    """Return attn-gym's module of sparse attention, or the reason why it cannot be used."""
    try:
        module = importlib.import_module("attn_gym.sparse")
    except ImportError as error:
        return f"attn-gym's sparse attention does not load ({error})"
    function = getattr(module, "gather_attn", None)
    if function is None or not {*_WANTED} <= {*inspect.signature(function).parameters}:
        return f"this version of attn-gym has no gather_attn with {', '.join(_WANTED)}: 0.0.17 does"
    return module


class _Packed:
    """The tensors of a branch as ``gather_attn`` takes them: (B Hkv, G or 1, N, D + max(D, Dv))."""

    def __init__(self, operands: Operands, branch: Branch):
        q, k, v, self.scale = operands.map(Tensor.detach)[:4]
        self.heads, self.dim, self.value_dim = (k.shape[0], k.shape[1], -1), k.shape[3], v.shape[3]
        width = max(self.dim, self.value_dim)
        lists = list_tiles.ChosenKeys(branch, k.shape[1], k.device)
        keys, allowed = lists.at(slice(0, q.shape[2]))
        chosen = torch.where(allowed, keys, -1)[:, :, 0].int()
        self.indices = chosen.expand(*k.shape[:2], *chosen.shape[2:]).flatten(0, 1).contiguous()
        self.q = pad(self.by_key_head(q), (0, width))
        self.kv = torch.cat([k, pad(v, (0, width - self.value_dim))], -1).flatten(0, 1)[:, None]

    def by_key_head(self, x: Tensor) -> Tensor:
        """Return (B, Hq, N, ...) as (B Hkv, G, N, ...)."""
        split: Tensor = x.unflatten(1, self.heads[1:])
        return split.flatten(0, 1)

    def by_head(self, x: Tensor) -> Tensor:
        """Undo :meth:`by_key_head`."""
        split: Tensor = x.unflatten(0, self.heads[:2])
        return split.flatten(1, 2)

    def values(self, x: Tensor) -> Tensor:
        """Return the channels of the values."""
        return x[..., self.dim : self.dim + self.value_dim]

    def attend(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        module = _module()
        # a window of 0 keys reads none of these
        unread = self.kv[:, :, :1].detach().expand(-1, -1, self.q.shape[2], -1)
        given = {"sliding_window_size": 0, "scale": self.scale, "return_aux": module.AuxRequest(lse=True)}
        out, further = module.gather_attn(self.q, unread, self.kv, self.indices, **given)
        return out, further.lse


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) in one call."""
    packed = _Packed(with_sign(operands)[0], branch)
    out, lse = packed.attend()
    return packed.by_head(packed.values(out)).to(dtype).contiguous(), packed.by_head(lse).contiguous()


def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients with attn-gym's backward, which has no gradient of lse.

    As in ``flex``, the branch's share is that of dout' = w dout and of a gradient c of its lse. The latter is
    c scale P k for queries, and P^T (c scale q) for keys: what dout = c scale q gives to values.
    """
    operands, sign = with_sign(operands)
    # a query that attends nothing gives nothing to keys
    packed = _Packed(operands._replace(q=operands.q.masked_fill(upstream.lse.isneginf()[..., None], 0.0)), branch)
    dim, scale = packed.dim, packed.scale
    packed.q, packed.kv = packed.q.requires_grad_(), packed.kv.requires_grad_()
    with autograd_within():
        out, part_lse = packed.attend()
    dout, lse, delta = (packed.by_key_head(x) for x in upstream[:3])
    empty = torch.isneginf(part_lse) | torch.isneginf(lse)
    weight = (part_lse - lse).exp().masked_fill(empty, 0.0)[..., None]
    weighted = (dout.float() * weight).masked_fill(empty[..., None], 0.0)
    given = pad(weighted, (dim, out.shape[3] - dim - packed.value_dim)).to(out.dtype)
    of_lse = upstream.out is None
    with autograd_within():
        dq, dkv = torch.autograd.grad(out, (packed.q, packed.kv), given, retain_graph=of_lse)
    dq, dk, dv = dq[..., :dim].float(), dkv[..., :dim].float(), packed.values(dkv)
    if of_lse:
        slope = (weighted * packed.values(out).float()).sum(-1, keepdim=True) - weight * delta[..., None]
        slope = slope.masked_fill(empty[..., None], 0.0) * scale
        dq = dq + slope * out[..., :dim].float()
        given = pad(slope * packed.q[..., :dim].float(), (dim, out.shape[3] - 2 * dim)).to(out.dtype)
        with autograd_within():
            (more,) = torch.autograd.grad(out, (packed.kv,), given)
        dk = dk + more[..., dim : 2 * dim].float()
    dq = packed.by_head(dq).to(dtype)
    dk, dv = (x[:, 0].unflatten(0, packed.heads[:2]).to(dtype).contiguous() for x in (dk, dv))
    return dq if sign > 0 else dq * sign, dk, dv


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless the pattern is lists that query heads share, on CUDA, and attn-gym is installed."""
    lists, reason = branch.lists, list_tiles.unsupported_reason(call, branch)
    if reason is not None or lists is None:
        return reason
    if call.device != "cuda":
        return f"it calls kernels for CUDA tensors, and these are on {call.device}"
    if call.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, and got {call.dtype}"
    channels = call.head_dim + max(call.head_dim, call.value_dim)
    if channels > _MOST_CHANNELS:
        return f"keys and values have at most {_MOST_CHANNELS} channels together, and got {channels}"
    if not lists.serve(call.heads // call.kv_heads):
        return "query heads of one key head have lists of their own"
    if call.needs_grad and not AUTOGRAD_WITHIN:
        return f"its gradients need private names that torch {torch.__version__} does not have"
    if not installed():
        return "attn-gym is not installed: pip install attn-gym"
    module = _module()
    return module if isinstance(module, str) else None


def scratch(call: Call, branch: Branch) -> int:
    """Count the joined keys and values, the queries and outputs with as many channels, and the gradients of these."""
    rows, keys = call.batch * branch.head_count * branch.nq, call.batch * call.kv_heads * branch.nk
    channels = call.head_dim + max(call.head_dim, call.value_dim)
    return (2 * rows + keys) * channels * call.dtype.itemsize * (3 if call.needs_grad else 1)


BACKEND = Backend(
    "attn_gym", forward, backward, unsupported_reason, scratch, planned=False, checked=True, before="gather"
)
