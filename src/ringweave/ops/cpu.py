"""The native CPU kernel: block-sparse forward and backward over a plan's tiles, on strided views, without copies."""

from __future__ import annotations

import functools
import importlib
import os
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedError, message
from ..plan import BlockPlan, Branch
from ..terms import ALiBi, Bias, DistanceBias, Softcap, Term
from .backend import EXTRAS, Backend, Case, Inputs, Scoring, Upstream
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
    "tile_mass": (f"q k lse values {_PLAN.format(columns='')}", ""),
    "Prepared.forward": ("q q_strides k k_strides v v_strides out lse keys first threads", ""),
    "Prepared.backward": (
        "dout dout_strides q q_strides k k_strides v v_strides out lse dlse dq dk dv threads",
        "",
    ),
}


@functools.cache
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
        if found[: len(wanted)] != wanted or not {*by_name.split()} <= {*found}:
            got = f"{name}({', '.join(found)}), of another version of ringweave"
            remedy = "Install ringweave again; in a checkout, build the extension again."
            raise UnsupportedError(message("ringweave._cpu", got, f"{name}({', '.join(wanted)}, ...)", remedy))


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


def forward(inputs: Inputs, branch: Branch, dtype: torch.dtype, *, longest_first: bool = True) -> tuple[Tensor, Tensor]:
    """Call the kernel once; rows start in their own order only to measure what the other is worth."""
    native = module()
    assert native is not None
    plan = branch.plan("cpu")
    q, k, v = inputs[:3]
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device="cpu")
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="cpu")
    extras, pages = _extras(inputs.scoring), inputs.pages
    stored = {} if pages is None else {"table": pages.table, "lengths": pages.lengths}
    if inputs.scales is not None:
        stored |= {"k_scale": inputs.scales.k, "v_scale": inputs.scales.v}
        # floats of 8 bits are passed as bytes
        k, v = (x if x.dtype == torch.int8 else x.view(torch.uint8) for x in (k, v))
    below = native.forward(
        q, k, v, out, lse, *_rows(plan), *_rest(plan, inputs.scale), **extras, **stored, longest_first=longest_first
    )
    # a term may hide a score that is out of range, or make one that is not
    if may_overflow(inputs, branch) if extras else below:
        spoil(out, lse, inputs, branch)
    return out, lse


def prepared(inputs: Inputs, plan: BlockPlan, columns: bool = False) -> Prepared:
    """Check a call like these inputs, of tensors without terms, and cut it into work, by columns for backward."""
    native = module()
    assert native is not None
    sides = plan.q_tile, plan.kv_tile
    q, k, v = (x.detach() for x in inputs[:3])
    call = native.Prepared(q, k, v, *_rows(plan), plan.masks, plan.group, *sides, inputs.scale, variant())
    if columns:
        call.columns(plan.col_ptr, plan.row, plan.bits_t)
    return call  # type: ignore[no-any-return]


def backward(upstream: Upstream, inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Call the kernel once: dK and dV by columns, dQ summed in a fixed order; the same bits on any thread count."""
    native = module()
    assert native is not None
    plan = branch.plan("cpu")
    q, k, v, scale = inputs[:4]
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device="cpu") for x in (q, k, v))
    rows = (upstream.lse, upstream.delta.float())
    columns = (plan.col_ptr, plan.row, plan.bits_t)
    grads = _grads(inputs.scoring)
    native.backward(
        upstream.dout.to(q.dtype), q, k, v, *rows, dq, dk, dv, *_rows(plan), *columns, *_rest(plan, scale),
        **_extras(inputs.scoring), table_grads=grads,
    )  # fmt: skip
    if inputs.scoring is not None:
        _add(inputs.scoring, grads)
    return dq, dk, dv


def tile_mass(inputs: Inputs, lse: Tensor, plan: BlockPlan, first: Tensor, per_row: bool) -> Tensor:
    """Sum the weights in each tile, (T,) or per row (T, q_tile); the kernel finds ``first`` by itself."""
    native = module()
    assert native is not None
    q, k, _, scale = inputs[:4]
    values = torch.empty(plan.tiles, plan.q_tile if per_row else 1, dtype=torch.float32, device="cpu")
    native.tile_mass(q, k, lse.contiguous(), values, *_rows(plan), *_rest(plan, scale))
    return values if per_row else values[:, 0]


# what its 32-bit distances hold
_FARTHEST = 2**29
_KINDS = {Softcap: "softcap", ALiBi: "alibi", DistanceBias: "distance", Bias: "bias"}


def _extras(scoring: Scoring | None) -> dict[str, object]:
    """Terms and dropout as the kernel takes them."""
    if scoring is None:
        return {}
    heads, dropout = scoring.heads, scoring.dropout
    if int(scoring.offsets.max()) > _FARTHEST:
        got = f"a position of {int(scoring.offsets.max())} with terms or dropout"
        raise UnsupportedError(message("offsets", got, f"at most {_FARTHEST}", "Use backend='gather'."))

    def term(one: Term) -> tuple[str, float, Tensor | None]:
        return _KINDS[type(one)], one.cap if isinstance(one, Softcap) else 0.0, _table(one, heads)

    return {
        "terms": [term(one) for one in scoring.terms],
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
    if isinstance(term, Bias):
        return 1 if term.table.shape[1] > 1 else None
    return 0


def _table(term: Term, heads: Tensor) -> Tensor | None:
    """A term's table of some query heads; only one of all pairs is taken in the types of the inputs, as it lies."""
    if not term.tables:
        return None
    table, dim = term.tables[0], _heads_in(term)
    if dim is not None and table.shape[dim] != heads.numel():
        table = table.index_select(dim, heads)
    if isinstance(term, Bias):
        return table if table.dtype in _DTYPES else table.float()
    return table.float().contiguous()


def _grads(scoring: Scoring | None) -> list[Tensor | None]:
    """Where the kernel writes the gradients of terms' tables."""
    grads: list[Tensor | None] = []
    for term, total in zip(scoring.terms, scoring.totals, strict=True) if scoring is not None else ():
        table = None if total is None or scoring is None else _table(term, scoring.heads)
        grads.append(None if table is None else torch.empty(table.shape, dtype=torch.float32, device="cpu"))
    return grads


def _add(scoring: Scoring, grads: list[Tensor | None]) -> None:
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
    return plan.row_ptr, plan.col, plan.bits


def _rest(plan: BlockPlan, scale: float) -> tuple[object, ...]:
    return plan.masks, plan.group, plan.q_tile, plan.kv_tile, scale, torch.get_num_threads(), variant()


def refusal(case: Case, branch: Branch) -> str | None:
    """Refuse all but CPU tensors of up to 32 bits with head dimensions in steps of 8."""
    if case.device != "cpu":
        return f"it runs on CPU tensors, and these are on {case.device}"
    if module() is None:
        return "the native kernel is not there: ringweave was installed without a C++ compiler"
    if case.dtype not in _DTYPES:
        return f"it computes float32, bfloat16 and float16, and got {case.dtype}"
    if case.extras and branch.rate * (branch.q_offset + branch.nq + branch.nk) > _FARTHEST:
        return f"it takes terms and dropout at positions below {_FARTHEST}"
    for name, dim in (("D", case.head_dim), ("Dv", case.value_dim)):
        if dim % 8 or dim > 512:
            return f"it needs head dimensions of 8, 16, ... 512, and got {name} = {dim}"
    return None


def scratch(case: Case, branch: Branch) -> int:
    """Count a few tiles per thread; backward, sums of dQ for a window, and 16-bit dK and dV kept between windows."""
    lanes = 512
    forward_bytes = torch.get_num_threads() * 4 * lanes * (2 * case.head_dim + 2 * case.value_dim + 64)
    if not case.needs_grad:
        return forward_bytes
    size = case.dtype.itemsize
    gradients = (
        case.batch
        * size
        * (case.heads * case.nq * case.head_dim + case.kv_heads * case.nk * (case.head_dim + case.value_dim))
    )
    every_sum = case.batch * case.heads * case.nq * case.head_dim * 4
    sums = min(max(2**23, gradients // 64), every_sum)
    kept = case.nk * (case.head_dim + case.value_dim) if size == 2 and every_sum > sums else 0
    # of a table a sum in whole numbers, where they broke, and the gradient that is made of both
    return forward_bytes + sums + kept + (8 + 1 + 4) * case.learned


BACKEND = Backend(
    "cpu",
    forward,
    backward,
    refusal,
    scratch,
    delta=delta,
    tiled=True,
    extras=EXTRAS,
    paged=True,
    stored=True,
)
