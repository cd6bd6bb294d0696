"""The native CPU kernel: block-sparse forward and backward over a plan's tiles, on strided views without copies."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import Call, Operands
from ..environment import CPU_VARIANT
from ..errors import UnsupportedError
from ..merge import merge_into as merge_with_torch
from ..native import module as module
from ..patterns.base import parts_of
from ..patterns.lists import Lists
from ..patterns.shifted import Offsets
from ..patterns.within import by_head
from ..plan import BlockPlan, Branch, Spacing
from ..plan.block_plan import PackedPlan
from ..plan.subplan import CutBranch
from ..precision import STORED, as_codes
from ..terms import KINDS, Term
from ..terms.operands import TermOperands
from ..torch_compat import are_plain_cpu
from . import forks
from .backend import Backend, Part, Prepared, PreparedStep, Upstream, readable
from .overflow import is_small, may_overflow, nan_rows_out_of_range, sums_in_range

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# kMostChannels in csrc/problem.h
_MOST_CHANNELS = 640
# most query heads that are rows of a tile
_MOST_ROWS = 256
# rows of a tile are padded to a multiple of this number of lanes
_LANES = 16


def variant() -> str:
    """Return the instruction set in use: the one that ``RINGWEAVE_CPU_VARIANT`` names, or the machine's best.

    Raises:
        UnsupportedError: The machine cannot run the named instruction set, or the native kernel is missing.
    """
    native = module()
    variants = [] if native is None else native.variants()
    asked = os.environ.get(CPU_VARIANT, "")
    if not variants or (asked and asked not in variants):
        raise UnsupportedError(
            CPU_VARIANT, repr(asked), f"one of {', '.join(variants) or 'none: no native kernel'}", "Unset it."
        )
    return asked or str(variants[0])


def forward(
    operands: Operands, branch: Branch, dtype: torch.dtype, *, longest_first: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of one branch in one kernel call.

    ``longest_first=False`` starts rows in plan order; only a benchmark uses it, to measure the gain of the default.
    """
    native = module()
    assert native is not None
    plan, terms, group = _work(operands, branch)
    q, k, v = operands[:3]
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device="cpu")
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="cpu")
    given, pages = _term_arguments(terms), operands.pages
    stored: dict[str, object] = {} if pages is None else {"table": pages.table, "lengths": pages.lengths}
    stored |= {"group": group, "chosen": _chosen(plan)} if group > 1 else {"spacing": branch.spacing}
    if operands.scales is not None:
        stored |= {"k_scale": operands.scales.k, "v_scale": operands.scales.v}
        k, v = as_codes(k), as_codes(v)
    below = native.forward(
        q=q, k=k, v=v, scale=operands.scale, out=out, lse=lse, **_plan(plan), **_processor(), **given, **stored,
        longest_first=longest_first,
    )  # fmt: skip
    # a term may hide a score that is out of range, or move a score out of range, so the kernel's flag does not suffice
    if may_overflow(operands, branch) if given else below:
        nan_rows_out_of_range(out, lse, operands, branch)
    return out, lse


def _work(operands: Operands, branch: Branch, backward: bool = False) -> tuple[BlockPlan, TermOperands | None, int]:
    """Return the plan of a branch, the score terms of its rows, and how many query heads a tile has as rows.

    Query heads that share lists attend the same keys for each query. So query i of head h is row ``i * group + h`` of
    its key head, and the kernel reads and writes these rows in place. It reads key n of packed lists at ``chosen[n]``.
    Backward of packed lists runs in tiles of many queries if the rows leave many vector lanes empty.
    """
    group, terms = operands.q.shape[1] // operands.k.shape[1], operands.terms
    lists = shared_lists(branch, group, frozenset() if terms is None else terms.names)
    # measured: with fewer rows, tiles of many queries are faster for neighbours that choose the same keys
    if lists is None or (backward and lists.packed and 8 * group < 5 * -(-group // _LANES) * _LANES):
        return branch.plan("cpu"), terms, 1
    plan = branch.plan_by_query(group)
    if terms is not None:
        chosen = _chosen(plan)
        columns = terms.columns if chosen is None else terms.columns[chosen.long()]
        queries = terms.rows.repeat_interleave(group)
        terms = terms._replace(heads=terms.heads[::group], rows=queries, columns=columns)
    return plan, terms, group


def shared_lists(branch: Branch, group: int, features: frozenset[str]) -> Lists | None:
    """Return the lists that groups of query heads share, with the same terms and without dropout; else None.

    The pattern, the heads and the terms decide, and no length does, so that a row has the same bits in every chunk and
    step.
    """
    # the lists of a cut branch are those of the whole call's queries and keys
    if not 1 < group <= _MOST_ROWS or branch.rate > 1 or isinstance(branch, CutBranch):
        return None
    lists = branch.lists
    if lists is None or not lists.serve(group) or by_head(lists.relation):
        return None
    same_terms = all(name in KINDS and not KINDS[name].axes and not KINDS[name].distances for name in features)
    return lists if same_terms else None


def _chosen(plan: BlockPlan) -> Tensor | None:
    """Return the keys of packed lists; None for another plan."""
    return plan.chosen if isinstance(plan, PackedPlan) else None


def prepared(
    operands: Operands,
    plan: BlockPlan,
    backward: bool = False,
    spacing: Spacing | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the checked kernel arguments and work list for calls with inputs and terms like these.

    With ``backward`` the work is that of backward, without terms. ``dtype`` is that of the output, q's or float32.
    """
    native = module()
    assert native is not None
    q, k, v = (x.detach() for x in operands[:3])
    return native.Prepared(
        q=q, k=k, v=v, scale=operands.scale, **_plan(plan, backward), spacing=spacing, variant=variant(),
        wide=dtype is not None and dtype != q.dtype, backward=backward, **_term_arguments(operands.terms),
    )  # fmt: skip


@sums_in_range
def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) of one branch in one kernel call.

    dK and dV are computed by columns, and dQ is summed in a fixed order, so the bits do not depend on the number of
    threads.
    """
    native = module()
    assert native is not None
    plan, terms, group = _work(operands, branch, backward=True)
    q, k, v, scale = operands[:4]
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device="cpu") for x in (q, k, v))
    grads, chosen = _grads(terms), _chosen(plan)
    native.backward(
        dout=readable(upstream.dout.to(q.dtype)), q=q, k=k, v=v, scale=scale, lse=upstream.lse,
        delta=upstream.delta.float(), dq=dq, dk=dk, dv=dv, table_grads=grads, chosen=chosen,
        group=group, **_plan(plan, chosen is None), **_processor(), **_term_arguments(terms),
    )  # fmt: skip
    if terms is not None:
        _add(terms, grads)
    return dq, dk, dv


def tile_mass(operands: Operands, lse: Tensor, plan: BlockPlan, per_row: bool) -> Tensor:
    """Sum the weights in each tile, (T,) or per row (T, q_tile)."""
    native = module()
    assert native is not None
    q, k, _, scale = operands[:4]
    values = torch.empty(plan.tiles, plan.q_tile if per_row else 1, dtype=torch.float32, device="cpu")
    native.tile_mass(q=q, k=k, scale=scale, lse=lse.contiguous(), values=values, **_plan(plan), **_processor())
    return values if per_row else values[:, 0]


def choose(q: Tensor, k: Tensor, weights: Tensor) -> Callable[[float, BlockPlan, Tensor], None] | None:
    """Return a function of scale, plan and index that writes the best keys; None for inputs that it does not take.

    Rows of query tiles without keys are not written.
    """
    native, dim = module(), q.shape[3]
    fits = q.dtype in _DTYPES and dim % 8 == 0 and dim <= _MOST_CHANNELS
    if native is None or not fits or q.device.type != "cpu" or not are_plain_cpu((q, k, weights)):
        return None

    def chosen(scale: float, plan: BlockPlan, index: Tensor) -> None:
        # the kernel takes the sign of the scale; its size is a factor of the weights
        factor, rows = weights.float() * abs(scale), _plan(plan)
        rows["row_set"] = plan.row_set.expand(q.shape[0], q.shape[2]).contiguous()
        native.choose(
            q=readable(q.transpose(1, 2)), k=readable(k[:, None]), weights=factor.transpose(1, 2),
            scale=math.copysign(1.0, scale), index=index, **rows, **_processor(),
        )  # fmt: skip

    return chosen


# the kernel computes distances in 32 bits
_FARTHEST = 2**29


def _term_arguments(terms: TermOperands | None) -> dict[str, object]:
    """Return terms and dropout as keyword arguments of the kernel."""
    if terms is None:
        return {}
    heads, dropout = terms.heads, terms.dropout
    if int(terms.offsets.max()) > _FARTHEST:
        got = f"a position of {int(terms.offsets.max())} with terms or dropout"
        raise UnsupportedError("offsets", got, f"at most {_FARTHEST}", "Use backend='dense_batched'.")

    return {
        "terms": [(term.kernel, list(term.numbers), _table(term, heads)) for term in terms.terms],
        "rows": terms.rows.int(),
        "columns": terms.columns.int(),
        "q_offset": terms.offsets[:, 0].int(),
        "k_offset": terms.offsets[:, 1].int(),
        "heads": heads.int(),
        "drop": 0 if dropout is None else dropout.threshold,
        "seed": 0 if dropout is None else dropout.seed,
    }


def _heads_in(term: Term) -> int | None:
    """Return the dimension of query heads in a term's table; None if the table has no heads or all share it."""
    # a kind that the kernel knows has at most one table
    for table, axes in zip(term.tables, term.axes.values(), strict=True):
        for dim, axis in enumerate(axes):
            if axis.along == "heads" and not (axis.shared and table.shape[dim] == 1):
                return dim
    return None


def _table(term: Term, heads: Tensor) -> Tensor | None:
    """Return a term's table for the given query heads, as float32 and contiguous.

    A table with an entry for every pair is too large to copy: the kernel reads it in its own layout, and in float32,
    bfloat16 or float16.
    """
    if not term.axes:
        return None
    table, dim = term.tables[0], _heads_in(term)
    if dim is not None and table.shape[dim] != heads.numel():
        table = table.index_select(dim, heads)
    if term.places:
        return table if table.dtype in _DTYPES else table.float()
    return table.float().contiguous()


def _grads(terms: TermOperands | None) -> list[Tensor | None]:
    """Allocate the float32 gradients of terms' tables for the kernel; None for a table without gradient."""
    grads: list[Tensor | None] = []
    for term, totals in terms.with_totals() if terms is not None else ():
        table = None if terms is None or totals in ((), (None,)) else _table(term, terms.heads)
        grads.append(None if table is None else torch.empty(table.shape, dtype=torch.float32, device="cpu"))
    return grads


def _add(terms: TermOperands, grads: list[Tensor | None]) -> None:
    for (term, totals), grad in zip(terms.with_totals(), grads, strict=True):
        dim = _heads_in(term)
        if grad is None or totals[0] is None:
            continue
        total = totals[0]
        if dim is None or total.shape == grad.shape:
            total.add_(grad)
        else:
            total.index_add_(dim, terms.heads, grad.to(total.dtype))


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Compute delta in one pass over dout and out."""
    native = module()
    assert native is not None
    result = torch.empty(out.shape[:3], dtype=torch.float32, device="cpu")
    native.delta(dout, out, None if dlse is None else dlse.detach(), result, torch.get_num_threads(), variant())
    return result.masked_fill_(torch.isneginf(lse), 0.0)


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into (out, lse) in place, as :func:`ringweave.merge.merge_into` does.

    On float32 CPU tensors the kernel merges, in one pass. A row's bits then do not depend on strides and other rows.
    PyTorch's functions round an element of a full vector differently from a single element.
    """
    native = module() if out.device.type == "cpu" else None
    dim = out.shape[-1]
    floats = out.dtype == part_out.dtype == part_lse.dtype == torch.float32
    if native is None or not floats or dim % 8 or dim > _MOST_CHANNELS:
        merge_with_torch(out, lse, part_out, part_lse)
    elif out.numel():
        native.merge(out, lse, readable(part_out), part_lse, torch.get_num_threads(), variant())


_ROWS = ("row_ptr", "col", "mask_id", "mask_words", "row_set", "q_tile", "kv_tile")
_COLUMNS = ("col_ptr", "row", "mask_id_t")


def _plan(plan: BlockPlan, columns: bool = False) -> dict[str, Tensor | int]:
    """Return a plan's rows, and with ``columns`` its columns, as the extension's functions take them."""
    return {name: getattr(plan, name) for name in (_ROWS + _COLUMNS if columns else _ROWS)}


def _processor() -> dict[str, int | str]:
    return {"threads": torch.get_num_threads(), "variant": variant()}


def terms(device: str) -> Iterable[str]:
    """Return the kinds of terms that the extension reports as supported."""
    native = module() if device == "cpu" else None
    if native is None:
        # this backend cannot run at all, and :func:`unsupported_reason` says why
        return KINDS
    known = set(native.term_kinds())
    return [name for name, kind in KINDS.items() if kind.kernel in known]


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Return a reason unless tensors are on a CPU, have up to 32 bits, and head dimensions are multiples of 8."""
    if call.device != "cpu":
        return f"it runs on CPU tensors, and these are on {call.device}"
    if module() is None:
        return "the native kernel is missing: ringweave was installed without a C++ compiler, or with wheel.cmake=false"
    if call.dtype not in _DTYPES:
        return f"it computes float32, bfloat16 and float16, and got {call.dtype}"
    if call.features and _last_position(call, branch) > _FARTHEST:
        return f"it supports terms and dropout only at positions below {_FARTHEST}"
    for name, dim in (("D", call.head_dim), ("Dv", call.value_dim)):
        if dim % 8 or dim > _MOST_CHANNELS:
            return f"it needs head dimensions of 8, 16, ... {_MOST_CHANNELS}, and got {name} = {dim}"
    return None


def _last_position(call: Call, branch: Branch) -> int:
    """Return a number that no position exceeds; offsets that a transform holds are checked when the operator runs."""
    last = branch.rate * (branch.q_offset + branch.nq + branch.nk)
    offsets = [part for part in parts_of(call.pattern, Offsets) if part.readable()]
    return max(last, *(max(each.most()) + max(call.nq, call.nk) for each in offsets)) if offsets else last


def scratch(call: Call, branch: Branch) -> int:
    """Count a few tiles per thread; for backward also sums of windows and of keys."""
    lanes = 512
    forward_bytes = torch.get_num_threads() * 4 * lanes * (2 * call.head_dim + 2 * call.value_dim + 64)
    if not call.needs_grad:
        return forward_bytes
    size = call.dtype.itemsize
    gradients = (
        call.batch
        * size
        * (call.heads * call.nq * call.head_dim + call.kv_heads * call.nk * (call.head_dim + call.value_dim))
    )
    # sums of dK and dV of one key head, and what a window of queries keeps
    packs = branch.lists is not None and branch.lists.packed
    packed = call.nk * (call.head_dim + call.value_dim + 32) * 8 + 2**24 if packs else 0
    every_sum = call.batch * call.heads * call.nq * call.head_dim * 4
    sums = min(max(2**23, gradients // 64), every_sum)
    kept = call.nk * (call.head_dim + call.value_dim) if size == 2 and every_sum > sums else 0
    # per learned table element: an 8-byte integer sum, a byte that marks NaN or overflow, and the float32 gradient
    return forward_bytes + sums + kept + packed + (8 + 1 + 4) * call.learned


class PreparedCall:
    """Kernel arguments, plan and shapes of the results of a small call in one part.

    Args:
        operands: Example tensors with the call's shapes and types, and the terms that all its calls share.
        part: The part.
        dtype: Dtype of the output of forward, q's or float32; None is q's.
    """

    def __init__(self, operands: Operands, part: Part, *, dtype: torch.dtype | None = None):
        branch, plan = part
        q, k, v, self.scale = operands[:4]
        self.shapes = q.shape, k.shape, v.shape
        # templates of one element: empty_like of an expanded tensor takes half the time of empty with sizes
        self._out = torch.empty(1, dtype=dtype or q.dtype, device="cpu").expand(*q.shape[:3], v.shape[3])
        self._lse = torch.empty(1, dtype=torch.float32, device="cpu").expand(q.shape[:3])
        self._threads, self._branch = torch.get_num_threads(), branch
        self._scored = operands.terms is not None
        # the general path computes gradients of terms, and looks for sums out of range
        self._in_general = self._scored or is_small(self.scale)
        self.plans, self._forward = (plan,), prepared(operands, plan, spacing=branch.spacing, dtype=dtype)
        self._backward: Any = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Any] | None:
        """Compute (out, lse); see :class:`Prepared`.

        The general path handles channels that are not adjacent, and scores out of range if lse is not requested.
        """
        of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        if of_q[3] != 1 or of_k[3] != 1 or of_v[3] != 1:
            return None
        if self._threads > 1:
            forks.check(q.device)
        out = torch.empty_like(self._out)
        lse = torch.empty_like(self._lse) if with_lse else None
        below = self._forward.forward(
            q.data_ptr(), of_q, k.data_ptr(), of_k, v.data_ptr(), of_v, out.data_ptr(),
            0 if lse is None else lse.data_ptr(), self._threads,
        )  # fmt: skip
        # as in forward, the flag does not suffice with terms
        if may_overflow(Operands(q, k, v, self.scale), self._branch) if self._scored else below:
            if lse is None:
                return None
            nan_rows_out_of_range(out, lse, Operands(q, k, v, self.scale), self._branch)
        return out, lse

    def backward(
        self, plan: Callable[[], BlockPlan | None], saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Compute (dq, dk, dv); see :class:`Prepared`."""
        q, k, v, out, lse = saved
        if self._in_general:
            return None
        if (q.shape, k.shape, v.shape) != self.shapes or not out.is_contiguous() or not lse.is_contiguous():
            return None
        if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
            return None
        # raw addresses are passed, and a saved-tensor hook may have returned the tensors in another type
        if not q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype or lse.dtype != torch.float32:
            return None
        forks.check(q.device)
        native = self._backward
        if native is None:
            found = plan()
            if found is None:
                return None
            native = self._backward = prepared(Operands(q, k, v, self.scale), found, True)
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        native.backward(
            dout.data_ptr(), dout.stride(), q.data_ptr(), q.stride(), k.data_ptr(), k.stride(), v.data_ptr(),
            v.stride(), out.data_ptr(), lse.data_ptr(), 0 if dlse is None else dlse.data_ptr(), dq.data_ptr(),
            dk.data_ptr(), dv.data_ptr(), self._threads,
        )  # fmt: skip
        return dq, dk, dv


class PreparedUnion:
    """The prepared calls of a union's parts, which are merged in float32; for forward only.

    Args:
        parts: The prepared call of each part, with a float32 output; at least one.
        dtype: Dtype of the output.
    """

    def __init__(self, parts: Sequence[PreparedCall], dtype: torch.dtype):
        self._parts, self._dtype = parts, dtype
        self.plans = tuple(plan for part in parts for plan in part.plans)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Any] | None:
        """Compute (out, lse); return None if the call needs the general path, as :meth:`PreparedCall.forward` does."""
        whole: tuple[Tensor, Any] | None = None
        for part in self._parts:
            found = part.forward(q, k, v, True)
            if found is None:
                return None
            if whole is None:
                whole = found
            else:
                merge_into(*whole, *found)
        assert whole is not None
        return whole[0].to(self._dtype), whole[1] if with_lse else None

    def backward(self, *args: object) -> None:
        """Return None: backward takes the general path."""


def prepare(operands: Operands, parts: Sequence[Part]) -> Prepared:
    """Prepare the kernel arguments of a small call; several parts are merged in float32."""
    if len(parts) == 1:
        return PreparedCall(operands, parts[0])
    return PreparedUnion([PreparedCall(operands, part, dtype=torch.float32) for part in parts], operands.q.dtype)


def step(call: Call, operands: Operands) -> PreparedStep | None:
    """Prepare the decoding steps of a call's kind; None if the general path computes them."""
    # imported with the first step
    from .decoding import prepare_step

    return prepare_step(call, operands)


def by_query(call: Call, branch: Branch) -> BlockPlan | None:
    """Return the plan of a call in which query heads share lists of keys; None for other calls."""
    group = call.heads // call.kv_heads
    return None if shared_lists(branch, group, call.features) is None else branch.plan_by_query(group)


BACKEND = Backend(
    "cpu",
    forward,
    backward,
    unsupported_reason,
    scratch,
    mass=tile_mass,
    choose=choose,
    delta=delta,
    tiled=True,
    terms=terms,
    dropout=True,
    paged=True,
    kv_dtypes=tuple(STORED),
    prepare=prepare,
    step=step,
    by_query=by_query,
)
