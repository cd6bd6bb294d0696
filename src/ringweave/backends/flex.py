"""PyTorch's FlexAttention over a branch's plan, compiled with ``torch.compile`` at the first call of each kind.

A kind comprises the device, the dtype and all sizes, including those of the mask's tables. Each kind has a separate
compiled function, so a call with another size neither recompiles an existing one nor falls back to FlexAttention's
dense form, and a new plan of the same sizes compiles nothing. Lengths are padded to a few for each power of two, so
that a new length is seldom a new kind. FlexAttention's gradient kernel is only accessible through its forward: backward
repeats the forward, and autograd computes the branch's share of the gradients, and those of the terms' tables.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..cache import COMPILED, derived_values, process_cache
from ..call import Call, Operands
from ..chunks import at_once
from ..errors import warn_once
from ..plan import BlockPlan, Branch, unpack_masks
from ..plan.cuda_sync import record_stream, require_no_capture, wait_for_stream
from ..plan.interop import to_block_mask
from ..plan.subplan import CutBranch
from ..terms import Term
from ..terms.operands import TermOperands
from ..terms.term import written
from ..torch_compat import AUTOGRAD_WITHIN, autograd_within
from .backend import Backend, Upstream, by_formula

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# FlexAttention's default tile; smaller tiles are not multiples of the blocks that its kernels are compiled with
_TILE = 128
# limit of a BlockMask's size, which has an entry for every tile, empty or not
_MASK_BYTES = 2**32
#: Up to this many queries count as a decoding step, which has another number of keys each time.
FEW = 16

Attend = Callable[[Tensor, Tensor, Tensor, Any, float, bool, TermOperands | None], tuple[Tensor, Tensor]]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float, grouped: bool, terms: TermOperands | None
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) with lse in natural logarithms. This is the function that is compiled."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert terms is not None
        # scores are traced in q's dtype, and a term would convert its whole table to it
        return terms.apply(score.float(), terms.pairs(b, h, i, j))[-1]

    out, further = flex_attention(
        q, k, v, block_mask=block_mask, scale=scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True),
        score_mod=None if terms is None else score_mod,
    )  # fmt: skip
    assert further.lse is not None
    return out, further.lse


@process_cache
def installed() -> bool:
    """Return whether triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def compiled(kind: tuple[object, ...]) -> Attend:
    """Return the compiled function of a kind.

    torch.compile caches its results per code object, and falls back to eager beyond a number of variants of one code
    object. So every kind gets a copy of the code, and evicting a function here also frees the compiler's results.
    """
    made: Attend | None = COMPILED.get(kind)
    if made is None:
        warn_once(
            "flex", "FlexAttention compiles for each kind of call (sizes, dtype, terms) at its first call, for seconds"
        )
        own = types.FunctionType(_attend.__code__.replace(), _attend.__globals__, "flex_attention")
        made = torch.compile(own, dynamic=False, fullgraph=True)
        COMPILED.put(kind, made, 1)
    return made


@dataclass(frozen=True, eq=False)
class Mask:
    """A plan as FlexAttention takes it.

    Attributes:
        block_mask: The BlockMask.
        tensors: Its tensors.
        dead: Keys that no query attends, bool (B, Hkv, Nk, 1); None if there is none.
    """

    block_mask: Any
    tensors: tuple[Tensor, ...]
    dead: Tensor | None

    @staticmethod
    def of(branch: Branch, device: torch.device, kv_heads: int) -> Mask:
        """Return a branch's mask for its padded lengths, cached with its plan."""
        plan = branch.plan(device, tile=_TILE)
        known, key = derived_values(plan), ("flex", kv_heads)
        mask: Mask | None = known.get(key)
        if mask is None:
            require_no_capture(device)
            block_mask = to_block_mask(plan, padded(plan.nq, plan.nk))
            tensors = [x for x in block_mask.as_tuple() if isinstance(x, Tensor)]
            held = (cell.cell_contents for cell in block_mask.mask_mod.__closure__)
            mask = Mask(block_mask, (*tensors, *(x for x in held if isinstance(x, Tensor))), _dead(plan, kv_heads))
            record_stream(mask, device)
            known[key] = mask
        else:
            wait_for_stream(mask, device)
        return mask


def _dead(plan: BlockPlan, kv_heads: int) -> Tensor | None:
    """Return the keys that no query attends: FlexAttention multiplies their values, and NaN, by weights of 0."""
    row, col, code = plan.listed()
    side, masks = plan.kv_tile, plan.mask_words
    # bits are unpacked as int32, twice
    some = at_once(8 * plan.q_tile * side, plan.device)
    parts = [unpack_masks(part, side).any(1) for part in masks.split(some) if len(part)]
    living = torch.cat([torch.ones(1, side, dtype=torch.bool, device=plan.device), *parts]).int()
    # each kind of tile of a column once
    found = (((row // plan.q_tiles) * plan.kv_tiles + col) * (len(masks) + 1) + code + 1).unique()
    attended = living.new_zeros(plan.row_ptr.shape[0] * plan.kv_tiles, side)
    attended.index_add_(0, found // (len(masks) + 1), living[found % (len(masks) + 1)])
    of_set = (attended > 0).view(-1, plan.kv_tiles * side)[:, : plan.nk]
    dead = ~of_set[plan.row_set.long()].unflatten(1, (kv_heads, -1)).any(2)
    return dead[..., None] if bool(dead.any()) else None


def padded(nq: int, nk: int) -> tuple[int, int]:
    """Return the numbers of queries and keys that FlexAttention computes for a call.

    There are at most eight of each between two powers of two. The queries of a decoding step stay as they are, and its
    keys are padded to a power of two, since their number grows by one with each step.
    """

    def step(n: int) -> int:
        return max(_TILE, (1 << (n - 1).bit_length()) // 16)

    if nq <= FEW:
        return nq, max(_TILE, 1 << (nk - 1).bit_length())
    return -(-nq // step(nq)) * step(nq), -(-nk // step(nk)) * step(nk)


def _longer(x: Tensor, tokens: int) -> Tensor:
    """Pad (..., N, C) with zeros to a number of tokens, contiguous."""
    more = tokens - x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, more)) if more else x.contiguous()


def _part(operands: Operands, mask: Mask, nq: int) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of the first ``nq`` queries of a branch as FlexAttention returns them."""
    q, k, v, scale, terms = operands[:5]
    spec, tables = written(() if terms is None else terms.terms)
    about = spec, *((x.shape, x.dtype, x.stride(), x.requires_grad) for x in tables)
    grouped = q.shape[1] != k.shape[1]
    sizes = tuple((x.shape, x.dtype) for x in mask.tensors)
    kind = (q.device, q.dtype, q.shape, k.shape, v.shape, scale, q.requires_grad, sizes, about)
    out, lse = compiled(kind)(q, k, v, mask.block_mask, scale, grouped, terms)
    return out[:, :, :nq], lse[:, :, :nq]


def _prepared(operands: Operands, branch: Branch) -> tuple[Operands, Mask]:
    """Return the operands as FlexAttention takes them, and the mask.

    Keys that no query attends are 0. Tensors are padded, and views are copied, so that strides do not cause
    compilation.
    """
    q, k, v, _, terms = operands.map(Tensor.detach)[:5]
    mask = Mask.of(branch, q.device, k.shape[1])
    if mask.dead is not None:
        k, v = k.masked_fill(mask.dead, 0.0), v.masked_fill(mask.dead, 0.0)
    queries, keys = mask.block_mask.seq_lengths
    if terms is not None:
        rows, columns = _longer(terms.rows[:, None], queries)[:, 0], _longer(terms.columns[:, None], keys)[:, 0]
        terms = terms._replace(terms=tuple(_ready(terms, q.device)), rows=rows, columns=columns)
    return operands._replace(q=_longer(q, queries), k=_longer(k, keys), v=_longer(v, keys), terms=terms), mask


def _ready(terms: TermOperands, device: torch.device) -> Iterator[Term]:
    """Yield the terms with float32 tables on the device, since a score_mod can convert an entry but not its table."""
    for term, totals in terms.with_totals():
        # the table of a bias with an entry for every pair is too large to convert, unless its gradient is as large
        tables = (
            table.detach() if term.places and total is None else table.detach().to(device, torch.float32)
            for table, total in zip(term.tables, totals, strict=True)
        )  # fmt: skip
        yield term.over(*tables)


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) in one call of FlexAttention."""
    out, lse = _part(*_prepared(operands, branch), operands.q.shape[2])
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
    dout, lse, delta = upstream[:3]
    # a query that attends nothing gives nothing to keys, and a NaN in a key, which has made its rows NaN, nothing to
    # queries that do not attend it
    alone = torch.isneginf(lse)[..., None]
    cleaned = operands._replace(q=operands.q.masked_fill(alone, 0.0), k=operands.k.nan_to_num(0.0, inf, -inf))
    leaves, mask = _prepared(cleaned, branch)
    leaves = leaves.map(lambda x: x.requires_grad_())
    terms, totals = leaves.terms, list[Tensor]()
    tables = list[Tensor]()
    if terms is not None:
        for term, sums in terms.with_totals():
            learned = [(t, total) for t, total in zip(term.tables, sums, strict=True) if total is not None]
            tables += [table.requires_grad_() for table, _ in learned]
            totals += [total for _, total in learned]
    with autograd_within():
        part, part_lse = _part(leaves, mask, operands.q.shape[2])
    with torch.no_grad():
        empty = torch.isneginf(part_lse) | torch.isneginf(lse)
        weight = (part_lse - lse).exp().masked_fill(empty, 0.0)
        part_dout = (dout.float() * weight[..., None]).masked_fill(empty[..., None], 0.0).to(operands.q.dtype)
        mean = (part_dout.float() * part.float()).sum(-1)
        part_dlse = (mean - weight * delta).masked_fill(empty, 0.0)
    with autograd_within():
        given = part_dout, part_dlse.to(part_lse.dtype)
        dq, dk, dv, *of_tables = torch.autograd.grad((part, part_lse), (*leaves[:3], *tables), given)
    for total, grad in zip(totals, of_tables, strict=True):
        total.add_(grad)
    dq, dk, dv = (x[:, :, : own.shape[2]] for x, own in zip((dq, dk, dv), operands[:3], strict=True))
    if mask.dead is not None:
        dk, dv = dk.masked_fill(mask.dead, 0.0), dv.masked_fill(mask.dead, 0.0)
    return dq.to(dtype).contiguous(), dk.to(dtype).contiguous(), dv.to(dtype).contiguous()


def _mask_bytes(call: Call, branch: Branch) -> int:
    """Count a BlockMask's bytes: partial and full tile lists by rows and by columns, and the mask's table."""
    queries, keys = padded(branch.nq, branch.nk)
    tiles = -(-queries // _TILE) * -(-keys // _TILE)
    return 5 * 4 * tiles * call.batch * branch.head_count


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless tensors are CUDA with up to 32 bits, D and Dv are 16 to 256, and the BlockMask fits."""
    if call.device == "cpu":
        return "FlexAttention compiled for a CPU returns no lse and has no backward"
    if call.device != "cuda":
        return f"it runs on CUDA and ROCm tensors, and these are on {call.device}"
    if not installed():
        return "PyTorch compiles it with triton, which is not installed: pip install triton"
    if call.dtype not in _DTYPES:
        return f"it computes float32, bfloat16 and float16, and got {call.dtype}"
    for name, dim in (("D", call.head_dim), ("Dv", call.value_dim)):
        if not 16 <= dim <= 256:
            return f"it needs head dimensions of 16 to 256, and got {name} = {dim}"
    if call.needs_grad and not AUTOGRAD_WITHIN:
        return f"its gradients need private names that torch {torch.__version__} does not have"
    if isinstance(branch, CutBranch) and any(side % _TILE for side in branch.tile):
        # other branches are planned anew
        return f"its kernels need tiles of multiples of {_TILE}, and the part of a plan has {branch.tile}"
    if _mask_bytes(call, branch) > _MASK_BYTES:
        needed = _mask_bytes(call, branch) / 2**30
        return f"a BlockMask has an entry for every tile, empty or not, and this one would take {needed:.0f} GiB"
    return None


def scratch(call: Call, branch: Branch) -> int:
    """Count the BlockMask, the copied views, and for backward the repeated forward's results."""
    size, lengths = call.dtype.itemsize, padded(branch.nq, branch.nk)
    keys = call.batch * call.kv_heads * lengths[1] * (call.head_dim + call.value_dim)
    rows = call.batch * branch.head_count * lengths[0]
    copied = branch.rate > 1 or lengths != (branch.nq, branch.nk)
    copies = (rows * call.head_dim + keys) * size if copied else 0
    again = rows * (2 * call.value_dim * size + 12) if call.needs_grad else 0
    return _mask_bytes(call, branch) + copies + again


BACKEND = Backend("flex", forward, backward, unsupported_reason, scratch, terms=by_formula, least_queries=FEW + 1)
