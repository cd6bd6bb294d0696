"""The native CPU kernel: block-sparse forward and backward over a plan's tiles, on strided views, without copies."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cache import fact
from ..call import Call, Operands
from ..errors import UnsupportedError, message
from ..kv_cache import Pages
from ..plan import BlockPlan, Branch
from ..precision import STORED
from ..terms import KINDS, Term, TermOperands
from . import forks
from .backend import Backend, Upstream
from .overflow import may_overflow, spoil

if TYPE_CHECKING:
    from .._cpu import Prepared

#: Names a lower instruction set than the best of the machine, for tests and comparisons.
VARIANT = "RINGWEAVE_CPU_VARIANT"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# what is passed to the extension's functions: by place, and by name
_PLAN = "row_ptr col bits {columns}masks group q_tile kv_tile scale threads variant"
_NAMED = "terms rows columns q_offset k_offset heads drop seed"
_PARAMETERS = {
    "forward": (f"q k v out lse {_PLAN.format(columns='')}", f"{_NAMED} table lengths k_scale v_scale longest_first"),
    "backward": (
        f"dout q k v lse delta dq dk dv {_PLAN.format(columns='col_ptr row bits_t ')}",
        f"{_NAMED} table_grads",
    ),
    "delta": ("dout out dlse delta threads variant", ""),
    "term_kinds": ("", ""),
    "tile_mass": (f"q k lse values {_PLAN.format(columns='')}", ""),
    "Prepared.forward": ("q q_strides k k_strides v v_strides out lse keys first threads table lengths", ""),
    "Prepared.backward": (
        "dout dout_strides q q_strides k k_strides v v_strides out lse dlse dq dk dv threads",
        "",
    ),
}


@fact
def module() -> ModuleType | None:
    """Import the extension module; None where the package was built without a compiler.

    Raises:
        UnsupportedError: It was built from other sources.
    """
    try:
        native = importlib.import_module("ringweave._cpu")
    except ImportError:
        return None
    check_interface(native)
    return native


def check_interface(native: ModuleType) -> None:
    """Raise UnsupportedError unless the extension's functions take what this module passes: they say it themselves."""
    for name, (by_place, by_name) in _PARAMETERS.items():
        function: Any = native
        for part in name.split("."):
            function = getattr(function, part, None)
        signature = "" if function is None else function.__nb_signature__[0][0]
        found = re.findall(r"[(,] ?(\w+): ", signature)
        wanted = by_place.split()
        if function is None or found[: len(wanted)] != wanted or not {*by_name.split()} <= {*found}:
            got = f"{name}({', '.join(found)}), of another version of ringweave"
            remedy = "Install ringweave again; in a checkout, build the extension again."
            raise UnsupportedError(message("ringweave._cpu", got, f"{name}({', '.join([*wanted, '...'])})", remedy))


def variant() -> str:
    """Name the instruction set in use: the best of the machine, or what ``RINGWEAVE_CPU_VARIANT`` names.

    Raises:
        UnsupportedError: The machine cannot run the named one, or there is no kernel.
    """
    native = module()
    variants = [] if native is None else native.variants()
    asked = os.environ.get(VARIANT, "")
    if not variants or (asked and asked not in variants):
        raise UnsupportedError(
            message(VARIANT, repr(asked), f"one of {', '.join(variants) or 'none: there is no kernel'}", "Unset it.")
        )
    return asked or str(variants[0])


def forward(
    operands: Operands, branch: Branch, dtype: torch.dtype, *, longest_first: bool = True
) -> tuple[Tensor, Tensor]:
    """Call the kernel once; rows start in their own order only to measure what the other is worth."""
    native = module()
    assert native is not None
    plan = branch.plan("cpu")
    q, k, v = operands[:3]
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device="cpu")
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="cpu")
    given, pages = _term_arguments(operands.terms), operands.pages
    stored = {} if pages is None else {"table": pages.table, "lengths": pages.lengths}
    if operands.scales is not None:
        stored |= {"k_scale": operands.scales.k, "v_scale": operands.scales.v}
        # floats of 8 bits are passed as bytes
        k, v = (x if x.dtype == torch.int8 else x.view(torch.uint8) for x in (k, v))
    below = native.forward(
        q, k, v, out, lse, *_rows(plan), *_rest(plan, operands.scale), **given, **stored, longest_first=longest_first
    )
    # a term may hide a score that is out of range, or make one that is not
    if may_overflow(operands, branch) if given else below:
        spoil(out, lse, operands, branch)
    return out, lse


def prepared(operands: Operands, plan: BlockPlan, columns: bool = False) -> Prepared:
    """Check a call like these inputs, of tensors without terms, and cut it into work, by columns for backward."""
    native = module()
    assert native is not None
    sides = plan.q_tile, plan.kv_tile
    q, k, v = operands.q.detach(), operands.k.detach(), operands.v.detach()
    args = q, k, v, *_rows(plan), plan.mask_words, plan.row_set, *sides, operands.scale, variant()
    call = native.Prepared(*args, *(() if operands.pages is None else (operands.pages.table, plan.nk)))
    if columns:
        call.columns(plan.col_ptr, plan.row, plan.mask_id_t)
    return call  # type: ignore[no-any-return]


def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Call the kernel once: dK and dV by columns, dQ summed in a fixed order; the same bits on any thread count."""
    native = module()
    assert native is not None
    plan = branch.plan("cpu")
    q, k, v, scale = operands[:4]
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device="cpu") for x in (q, k, v))
    rows = (upstream.lse, upstream.delta.float())
    columns = (plan.col_ptr, plan.row, plan.mask_id_t)
    grads = _grads(operands.terms)
    native.backward(
        upstream.dout.to(q.dtype), q, k, v, *rows, dq, dk, dv, *_rows(plan), *columns, *_rest(plan, scale),
        **_term_arguments(operands.terms), table_grads=grads,
    )  # fmt: skip
    if operands.terms is not None:
        _add(operands.terms, grads)
    return dq, dk, dv


def tile_mass(operands: Operands, lse: Tensor, plan: BlockPlan, first: Tensor, per_row: bool) -> Tensor:
    """Sum the weights in each tile, (T,) or per row (T, q_tile); the kernel finds ``first`` by itself."""
    native = module()
    assert native is not None
    q, k, _, scale = operands[:4]
    values = torch.empty(plan.tiles, plan.q_tile if per_row else 1, dtype=torch.float32, device="cpu")
    native.tile_mass(q, k, lse.contiguous(), values, *_rows(plan), *_rest(plan, scale))
    return values if per_row else values[:, 0]


# what its 32-bit distances hold
_FARTHEST = 2**29


def _term_arguments(scoring: TermOperands | None) -> dict[str, object]:
    """Terms and dropout as the kernel takes them."""
    if scoring is None:
        return {}
    heads, dropout = scoring.heads, scoring.dropout
    if int(scoring.offsets.max()) > _FARTHEST:
        got = f"a position of {int(scoring.offsets.max())} with terms or dropout"
        raise UnsupportedError(message("offsets", got, f"at most {_FARTHEST}", "Use backend='dense_batched'."))

    return {
        "terms": [(term.kernel, list(term.numbers), _table(term, heads)) for term in scoring.terms],
        "rows": scoring.rows.int(),
        "columns": scoring.columns.int(),
        "q_offset": scoring.offsets[:, 0].int(),
        "k_offset": scoring.offsets[:, 1].int(),
        "heads": heads.int(),
        "drop": 0 if dropout is None else dropout.threshold,
        "seed": 0 if dropout is None else dropout.seed,
    }


def _heads_in(term: Term) -> int | None:
    """The dimension of query heads in a term's table, if it has one."""
    along = [axis.along for axis in term.axes]
    dim = along.index("heads") if "heads" in along else None
    return None if dim is None or (term.axes[dim].shared and term.tables[0].shape[dim] == 1) else dim


def _table(term: Term, heads: Tensor) -> Tensor | None:
    """A term's table of some query heads; only one of all pairs is taken in the types of the inputs, as it lies."""
    if not term.axes:
        return None
    table, dim = term.tables[0], _heads_in(term)
    if dim is not None and table.shape[dim] != heads.numel():
        table = table.index_select(dim, heads)
    if term.places:
        return table if table.dtype in _DTYPES else table.float()
    return table.float().contiguous()


def _grads(scoring: TermOperands | None) -> list[Tensor | None]:
    """Where the kernel writes the gradients of terms' tables."""
    grads: list[Tensor | None] = []
    for term, total in zip(scoring.terms, scoring.totals, strict=True) if scoring is not None else ():
        table = None if total is None or scoring is None else _table(term, scoring.heads)
        grads.append(None if table is None else torch.empty(table.shape, dtype=torch.float32, device="cpu"))
    return grads


def _add(scoring: TermOperands, grads: list[Tensor | None]) -> None:
    for term, total, grad in zip(scoring.terms, scoring.totals, grads, strict=True):
        dim = _heads_in(term)
        if total is None or grad is None:
            continue
        if dim is None or total.shape == grad.shape:
            total.add_(grad)
        else:
            total.index_add_(dim, scoring.heads, grad.to(total.dtype))


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Compute delta in one pass over both tensors."""
    native = module()
    assert native is not None
    result = torch.empty(out.shape[:3], dtype=torch.float32, device="cpu")
    native.delta(dout, out, None if dlse is None else dlse.detach(), result, torch.get_num_threads(), variant())
    return result.masked_fill_(torch.isneginf(lse), 0.0)


def _rows(plan: BlockPlan) -> tuple[Tensor, ...]:
    return plan.row_ptr, plan.col, plan.mask_id


def _rest(plan: BlockPlan, scale: float) -> tuple[object, ...]:
    return plan.mask_words, plan.row_set, plan.q_tile, plan.kv_tile, scale, torch.get_num_threads(), variant()


def terms(device: str) -> Iterable[str]:
    """Name the terms of which the extension says that it computes them."""
    native = module() if device == "cpu" else None
    if native is None:
        # nothing runs here, and :func:`unsupported_reason` says why
        return KINDS
    known = set(native.term_kinds())
    return [name for name, kind in KINDS.items() if kind.kernel in known]


def unsupported_reason(call: Call, branch: Branch) -> str | None:
    """Refuse all but CPU tensors of up to 32 bits with head dimensions in steps of 8."""
    if call.device != "cpu":
        return f"it runs on CPU tensors, and these are on {call.device}"
    if module() is None:
        return "the native kernel is not there: ringweave was installed without a C++ compiler"
    if call.dtype not in _DTYPES:
        return f"it computes float32, bfloat16 and float16, and got {call.dtype}"
    if call.features and branch.rate * (branch.q_offset + branch.nq + branch.nk) > _FARTHEST:
        return f"it takes terms and dropout at positions below {_FARTHEST}"
    for name, dim in (("D", call.head_dim), ("Dv", call.value_dim)):
        if dim % 8 or dim > 512:
            return f"it needs head dimensions of 8, 16, ... 512, and got {name} = {dim}"
    return None


def scratch(call: Call, branch: Branch) -> int:
    """Count a few tiles per thread; backward, sums of dQ for a window, and 16-bit dK and dV kept between windows."""
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
    every_sum = call.batch * call.heads * call.nq * call.head_dim * 4
    sums = min(max(2**23, gradients // 64), every_sum)
    kept = call.nk * (call.head_dim + call.value_dim) if size == 2 and every_sum > sums else 0
    # of a table a sum in whole numbers, where they broke, and the gradient that is made of both
    return forward_bytes + sums + kept + (8 + 1 + 4) * call.learned


BACKEND = Backend(
    "cpu",
    forward,
    backward,
    unsupported_reason,
    scratch,
    delta=delta,
    tiled=True,
    terms=terms,
    dropout=True,
    paged=True,
    kv_dtypes=tuple(STORED),
)


class PreparedCall:
    """A small call with everything but its tensors worked out: kernel arguments, plan and results' shapes.

    Args:
        operands: Tensors of its shapes and types, without terms.
        branch: The whole call.
        plan: Its plan.
        first: The first tile of keys that lies later in a longer cache, by as many tiles as that has more.
    """

    def __init__(self, operands: Operands, branch: Branch, plan: BlockPlan, first: int = 0):
        q, k, v, self.scale = operands[:4]
        self.shapes = q.shape, k.shape, v.shape
        # one element each: empty_like of these takes half the time that sizes and strides take
        self._out = torch.empty(1, dtype=q.dtype, device="cpu").expand(*q.shape[:3], v.shape[3])
        self._lse = torch.empty(1, dtype=torch.float32, device="cpu").expand(q.shape[:3])
        self._threads, self._first, self._branch = torch.get_num_threads(), first, branch
        self.plan, self._forward = plan, prepared(operands, plan)
        self._backward: Prepared | None = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool, pages: Pages | None = None, keys: int = 0
    ) -> tuple[Tensor, Any] | None:
        """Compute (out, lse), lse maybe None where it is not asked for; None where this takes another way.

        That is where channels are not adjacent, or scores are infinite and lse is not asked for or lengths are others,
        or a page table is wrong. With ``pages`` all sequences have ``keys`` tokens.
        """
        of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        if of_q[3] != 1 or of_k[3] != 1 or of_v[3] != 1:
            return None
        if self._threads > 1:
            forks.check(q.device)
        out = torch.empty_like(self._out)
        lse = torch.empty_like(self._lse) if with_lse else None
        if self._forward.forward(
            q.data_ptr(), of_q, k.data_ptr(), of_k, v.data_ptr(), of_v, out.data_ptr(),
            0 if lse is None else lse.data_ptr(), keys or k.shape[2], self._first, self._threads,
            *(() if pages is None else (pages.table.data_ptr(), pages.lengths.data_ptr())),
        ):  # fmt: skip
            if lse is None or pages is not None or k.shape != self.shapes[1]:
                return None
            spoil(out, lse, Operands(q, k, v, self.scale), self._branch)
        return out, lse

    def backward(
        self, plan: Callable[[], BlockPlan | None], saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Compute (dq, dk, dv) from (q, k, v, out, lse); ``plan`` gives that of backward, None to take another way."""
        q, k, v, out, lse = saved
        if (q.shape, k.shape, v.shape) != self.shapes or not out.is_contiguous() or not lse.is_contiguous():
            return None
        if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
            return None
        # addresses are passed: a hook of saved tensors may have given them back in another type
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
