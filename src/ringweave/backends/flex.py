"""PyTorch's FlexAttention over a branch's plan, compiled with ``torch.compile`` at the first call of each kind.

A kind comprises the device, the dtype and all sizes, including those of the mask's tables. Each kind has a separate
compiled function, so a call with another size neither recompiles an existing one nor falls back to FlexAttention's
dense form. FlexAttention's gradient kernel is only accessible through its forward: backward repeats the forward, and
autograd computes the branch's share of the gradients.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..cache import COMPILED, derived_values
from ..call import Call, Operands
from ..plan import Branch
from ..terms import KINDS, Term
from ..terms.operands import TermOperands
from ..terms.term import written
from ..torch_compat import AUTOGRAD_WITHIN, autograd_within
from .backend import Backend, Upstream

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# FlexAttention's default tile; smaller tiles are not multiples of the blocks that its kernels are compiled with
_TILE = 128
# limit of a BlockMask's size, which has an entry for every tile, empty or not
_MASK_BYTES = 2**32
_KINDS = 64

Attend = Callable[[Tensor, Tensor, Tensor, Any, float, bool, TermOperands | None], tuple[Tensor, Tensor]]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float, grouped: bool, terms: TermOperands | None
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) with lse in natural logarithms. This is the function that is compiled."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert terms is not None
        return terms.apply(score, terms.pairs(b, h, i, j))[-1]

    out, further = flex_attention(
        q, k, v, block_mask=block_mask, scale=scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True),
        score_mod=None if terms is None else score_mod,
    )  # fmt: skip
    assert further.lse is not None
    return out, further.lse


def compiled(kind: tuple[object, ...]) -> Attend:
    """Return the compiled function of a kind.

    torch.compile caches its results per code object, and falls back to eager beyond a number of variants of one code
    object. So every kind gets a copy of the code, and evicting a function here also frees the compiler's results.
    """
    made: Attend | None = COMPILED.get(kind)
    if made is None:
        own = types.FunctionType(_attend.__code__.replace(), _attend.__globals__, "flex_attention")
        made = torch.compile(own, dynamic=False, fullgraph=True)
        COMPILED.put(kind, made, 1)
    return made


def _mask(branch: Branch, device: torch.device) -> Any:
    """Return the branch's BlockMask, cached with its plan."""
    plan = branch.plan(device, tile=_TILE)
    known = derived_values(plan)
    if "flex" not in known:
        known["flex"] = plan.to_block_mask()
    return known["flex"]


def _part(operands: Operands, branch: Branch) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a branch as FlexAttention returns them."""
    q, k, v, scale, terms = operands[:5]
    if terms is not None:
        terms = terms._replace(terms=tuple(_ready(term, q.device) for term in terms.terms))
    spec, tables = written(() if terms is None else terms.terms)
    about = spec, *((x.shape, x.dtype, x.stride()) for x in tables)
    grouped = q.shape[1] != k.shape[1]
    mask = _mask(branch, q.device)
    plan = branch.plan(q.device, tile=_TILE)
    of_mask = (plan.row_ptr.shape[0], max(plan.mask_words.shape[0] - 1, 0).bit_length())
    kind = (q.device, q.dtype, q.shape, k.shape, v.shape, scale, q.requires_grad, *of_mask, about)
    return compiled(kind)(q, k, v, mask, scale, grouped, terms)


def _ready(term: Term, device: torch.device) -> Term:
    """Return a term with float32 tables on the device, since a score_mod can convert an entry but not its table."""
    # the table of a bias with an entry for every pair is too large to convert
    return term if term.places else term.over(*(table.to(device, torch.float32) for table in term.tables))


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) in one call of FlexAttention; views are copied, so that strides do not cause recompilation."""
    out, lse = _part(operands.map(lambda x: x.detach().contiguous()), branch)
    empty = torch.isneginf(lse)
    return out.masked_fill(empty[..., None], 0.0).to(dtype).contiguous(), lse.float().contiguous()


def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients by repeating the forward and differentiating it with autograd.

    Let P be the branch's softmax weights and w = exp(branch lse - whole lse). Then the whole's weights are w P, and the
    branch's share of the score gradients is w P (dP - delta). Given dout' = w dout and
    dlse' = rowsum(dout' * out) - w delta, autograd computes P (dout' v - rowsum(dout' * out) + dlse'), which is equal.
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
    """Count a BlockMask's bytes: partial and full tile lists by rows and by columns, and the mask's table."""
    tiles = -(-branch.nq // _TILE) * -(-branch.nk // _TILE)
    return 5 * 4 * tiles * call.batch * branch.head_count


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless tensors are CUDA with up to 32 bits, D and Dv are 16 to 256, and the BlockMask fits."""
    if call.device == "cpu":
        return "FlexAttention compiled for a CPU returns no lse and has no backward"
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
        return "FlexAttention's gradients of terms' tables have not been tested (detach the tables)"
    if _mask_bytes(call, branch) > _MASK_BYTES:
        needed = _mask_bytes(call, branch) / 2**30
        return f"a BlockMask has an entry for every tile, empty or not, and this one would take {needed:.0f} GiB"
    return None


def scratch(call: Call, branch: Branch) -> int:
    """Count the BlockMask, the copied views, and for backward the repeated forward's results."""
    size = call.dtype.itemsize
    keys = call.batch * call.kv_heads * branch.nk * (call.head_dim + call.value_dim)
    rows = call.batch * branch.head_count * branch.nq
    copies = (rows * call.head_dim + keys) * size if branch.rate > 1 else 0
    again = rows * (2 * call.value_dim * size + 12) if call.needs_grad else 0
    return _mask_bytes(call, branch) + copies + again


def terms(device: str) -> Iterable[str]:
    """Return the terms supported in a score_mod: all without tables, and the tested ones with tables."""
    return [*(name for name, kind in KINDS.items() if not kind.axes), "ALiBi", "DistanceBias", "Bias"]


BACKEND = Backend("flex", forward, backward, unsupported_reason, scratch, terms=terms)
