"""PyTorch's FlexAttention over a branch's plan, compiled by ``torch.compile`` at the first call of each kind.

A kind is the device, the type and all sizes, of the mask's tables too: each has a compiled function of its own, so a
call of another size neither recompiles it nor falls back to FlexAttention's dense form. FlexAttention has no kernel for
gradients apart from its own forward: backward computes the forward once more, and asks autograd for the branch's share
of the whole.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..cache import COMPILED, beside
from ..call import Call, Operands
from ..plan import Branch
from ..terms import KINDS, Term, TermOperands, written
from ..torch_compat import AUTOGRAD_WITHIN, autograd_within
from .backend import Backend, Upstream

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# FlexAttention's own tile: smaller ones are not divided by the blocks that its kernels are compiled with
_TILE = 128
# a BlockMask has a place for every tile, empty or not
_MASK_BYTES = 2**32
_KINDS = 64

Attend = Callable[[Tensor, Tensor, Tensor, Any, float, bool, TermOperands | None], tuple[Tensor, Tensor]]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float, grouped: bool, scoring: TermOperands | None
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse), lse in natural logarithms: what is compiled."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert scoring is not None
        return scoring.apply(score, scoring.pairs(b, h, i, j))[-1]

    out, further = flex_attention(
        q, k, v, block_mask=block_mask, scale=scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True),
        score_mod=None if scoring is None else score_mod,
    )  # fmt: skip
    assert further.lse is not None
    return out, further.lse


def compiled(kind: tuple[object, ...]) -> Attend:
    """Compile the function of a kind.

    The compiler keeps what it compiled with the code, and gives up beyond some variants of one: so every kind gets a
    copy of the code, and what is forgotten here is freed there.
    """
    made: Attend | None = COMPILED.get(kind)
    if made is None:
        own = types.FunctionType(_attend.__code__.replace(), _attend.__globals__, "flex_attention")
        made = torch.compile(own, dynamic=False, fullgraph=True)
        COMPILED.put(kind, made, 1)
    return made


def _mask(branch: Branch, device: torch.device) -> Any:
    """Make the branch a BlockMask, which is kept as long as its plan."""
    plan = branch.plan(device, tile=_TILE)
    known = beside(plan)
    if "flex" not in known:
        known["flex"] = plan.to_block_mask()
    return known["flex"]


def _part(operands: Operands, branch: Branch) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a branch, as FlexAttention gives them."""
    q, k, v, scale, scoring = operands[:5]
    if scoring is not None:
        scoring = scoring._replace(terms=tuple(_ready(term, q.device) for term in scoring.terms))
    spec, tables = written(() if scoring is None else scoring.terms)
    about = spec, *((x.shape, x.dtype, x.stride()) for x in tables)
    grouped = q.shape[1] != k.shape[1]
    mask = _mask(branch, q.device)
    plan = branch.plan(q.device, tile=_TILE)
    of_mask = (plan.row_ptr.shape[0], max(plan.mask_words.shape[0] - 1, 0).bit_length())
    kind = (q.device, q.dtype, q.shape, k.shape, v.shape, scale, q.requires_grad, *of_mask, about)
    return compiled(kind)(q, k, v, mask, scale, grouped, scoring)


def _ready(term: Term, device: torch.device) -> Term:
    """Give a term whose table a score_mod can index: it may convert what it read, and not what it reads from."""
    # a bias of all pairs is read as it lies
    return term if term.places or not term.tables else term.over(term.tables[0].to(device, torch.float32))


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Call FlexAttention once; views are copied, so that strides do not multiply what is compiled."""
    out, lse = _part(operands.map(lambda x: x.detach().contiguous()), branch)
    empty = torch.isneginf(lse)
    return out.masked_fill(empty[..., None], 0.0).to(dtype).contiguous(), lse.float().contiguous()


def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the forward once more, and its gradients by autograd.

    With P the branch's own weights and w = exp(its lse - the whole lse), the whole's weights are w P, and the branch's
    share of the score gradients is w P (dP - delta). Autograd computes P (dout' v - rowsum(dout' * out) + dlse') from
    dout' = w dout and dlse' = rowsum(dout' * out) - w delta: the same.
    """
    dout, lse, delta, _ = upstream
    with autograd_within():
        leaves = operands.map(lambda x: x.detach().contiguous().requires_grad_())
        part, part_lse = _part(leaves, branch)
    with torch.no_grad():
        empty = torch.isneginf(part_lse) | torch.isneginf(lse)
        weight = (part_lse - lse).exp().masked_fill(empty, 0.0)
        part_dout = (dout.float() * weight[..., None]).masked_fill(empty[..., None], 0.0).to(operands.q.dtype)
        mean = (part_dout.float() * part.float()).sum(-1)
        part_dlse = (mean - weight * delta).masked_fill(empty, 0.0)
    with autograd_within():
        dq, dk, dv = torch.autograd.grad((part, part_lse), leaves[:3], (part_dout, part_dlse.to(part_lse.dtype)))
    return dq.to(dtype).contiguous(), dk.to(dtype).contiguous(), dv.to(dtype).contiguous()


def _mask_bytes(call: Call, branch: Branch) -> int:
    """Count a BlockMask's bytes: lists of partial and full tiles by rows and columns, and the table of its mask."""
    tiles = -(-branch.nq // _TILE) * -(-branch.nk // _TILE)
    return 5 * 4 * tiles * call.batch * branch.head_count


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Refuse all but CUDA tensors of up to 32 bits, head dimensions from 16, and tiles that fit a dense table."""
    if call.device == "cpu":
        return "FlexAttention compiled for a CPU gives no lse and has no backward"
    if call.device != "cuda":
        return f"it runs on CUDA and ROCm tensors, and these are on {call.device}"
    if call.dtype not in _DTYPES:
        return f"it computes float32, bfloat16 and float16, and got {call.dtype}"
    for name, dim in (("D", call.head_dim), ("Dv", call.value_dim)):
        if not 16 <= dim <= 256:
            return f"it needs head dimensions of 16 to 256, and got {name} = {dim}"
    if call.needs_grad and not AUTOGRAD_WITHIN:
        return f"its gradients need private names that torch {torch.__version__} does not have"
    if call.learned:
        return "FlexAttention's gradients of terms' tables were never measured (detach the tables)"
    if _mask_bytes(call, branch) > _MASK_BYTES:
        needed = _mask_bytes(call, branch) / 2**30
        return f"a BlockMask has a place for every tile, empty or not, and this one would take {needed:.0f} GiB"
    return None


def scratch(call: Call, branch: Branch) -> int:
    """Count the BlockMask; views copied once; backward, the forward's results."""
    size = call.dtype.itemsize
    keys = call.batch * call.kv_heads * branch.nk * (call.head_dim + call.value_dim)
    rows = call.batch * branch.head_count * branch.nq
    copies = (rows * call.head_dim + keys) * size if branch.rate > 1 else 0
    again = rows * (2 * call.value_dim * size + 12) if call.needs_grad else 0
    return _mask_bytes(call, branch) + copies + again


def terms(device: str) -> Iterable[str]:
    """Name the terms that a score_mod computes: those of one score, and the tables that were tried."""
    return [*(name for name, kind in KINDS.items() if not kind.axes), "ALiBi", "DistanceBias", "Bias"]


BACKEND = Backend("flex", forward, backward, unsupported_reason, scratch, terms=terms)
