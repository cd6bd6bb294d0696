"""The two ``torch.library`` operators of a call, with fakes, and how a call is differentiated.

They take a pattern as text and tables, so that ``torch.compile`` traces a call as one opaque node: planning and
dispatch happen when it runs, and a new table of the same shape recompiles nothing. ``torch.func`` transforms autograd
functions, not operators: under it the same two run as such. What has no derivative raises: an operator alone would
answer a forward-mode derivative with zero.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import UnsupportedError, message
from ..patterns import Pattern
from ..patterns.function import held
from ..patterns.shifted import first_positions
from ..plan import pattern_of
from ..terms import Dropout, Term, terms_of, threshold_of, written
from ..torch_compat import dispatch_modes, forward_mode, transforming, untraced
from ..types import acc_dtype
from . import dispatch, recovery, registered
from .backend import Case, Inputs, Scoring

_library = torch.library.Library("ringweave", "DEF")
# register_fake asks inspect whose line calls it, which looks through all modules that are loaded (6 ms) unless it knows
getattr(inspect, "modulesbyfile", {})[inspect.getabsfile(sys.modules[__name__])] = __name__


def operators(*kernels: tuple[Callable[..., Any], Callable[..., Any]]) -> list[Any]:
    """Define ``ringweave::<name of the kernel>`` for each: its annotations are its schema, the fake tells shapes.

    They belong together, and their overload is named for all their schemas: a graph that another version has left in
    PyTorch's cache on disk may call the first alike and the others otherwise, and must not be found.
    """
    schemas = [_schema(kernel) for kernel, _ in kernels]
    overload = "of_" + hashlib.blake2b("".join(schemas).encode(), digest_size=4).hexdigest()
    return [_operator(*each, schema, overload) for each, schema in zip(kernels, schemas, strict=True)]


def _operator(kernel: Callable[..., Any], fake: Callable[..., Any], schema: str, overload: str) -> Any:
    name = f"{kernel.__name__}.{overload}"
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, untraced(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringweave::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops.ringweave, kernel.__name__), overload)


_SCHEMA = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "Sequence[Tensor]": "Tensor[]", "Sequence[bool]": "bool[]",
    "list[Tensor]": "Tensor[]", "str": "str", "float": "float", "int": "SymInt", "bool": "bool",
}  # fmt: skip


def _schema(kernel: Callable[..., Any]) -> str:
    """Write a kernel's annotations, which are text, as a schema: what ``infer_schema`` does, in no time."""
    *arguments, (_, result) = kernel.__annotations__.items()
    results = result.removeprefix("tuple[").removesuffix("]" if result.startswith("tuple[") else "").split(", ")
    given = ", ".join(f"{_SCHEMA[kind]} {name}" for name, kind in arguments)
    return f"({given}) -> ({', '.join(_SCHEMA[each] for each in results)})"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    q_offset: int,
    backend: str,
    terms: str,
    threshold: int,
    degrade: bool,
    extras: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of the pattern of ``spec`` and ``tables``, with the terms of ``terms`` and ``extras``.

    With a threshold above 0 the last of ``extras`` is the seed of dropout; ``degrade``: in pieces, if memory runs out.
    """
    pattern = pattern_of(spec, tables)
    scoring = scoring_of(q, (q.shape[2], k.shape[2]), pattern, q_offset, terms, threshold, extras)
    return recovery.forward(Inputs(q, k, v, scale, scoring), pattern, q_offset, backend, degrade)


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    q_offset: int,
    backend: str,
    terms: str,
    threshold: int,
    degrade: bool,
    extras: Sequence[Tensor],
    learns: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute (dq, dk, dv, those of ``extras``); nothing for one that ``learns`` says gets none."""
    pattern = pattern_of(spec, tables)
    scoring = scoring_of(q, (q.shape[2], k.shape[2]), pattern, q_offset, terms, threshold, extras, learns)
    inputs = Inputs(q, k, v, scale, scoring)
    # a hook of saved tensors may have given them back in another layout
    out, lse = out.contiguous(), lse.contiguous()
    grads = recovery.backward(dout, dlse, inputs, out, lse, pattern, q_offset, backend, degrade)
    return *grads, table_grads(extras, learns, scoring)


def scoring_of(
    q: Tensor,
    tokens: tuple[int, int],
    pattern: Pattern,
    q_offset: int,
    spec: str,
    threshold: int,
    extras: Sequence[Tensor],
    learns: Sequence[bool] | None = None,
) -> Scoring | None:
    """What an operator's arguments say of terms and dropout, over (queries, keys) tokens; None: nothing.

    Tables that ``learns`` says get gradients get a sum of them, of zeros.
    """
    if not spec and not threshold:
        return None
    (batch, heads), (nq, nk), device = q.shape[:2], tokens, q.device
    flags: Iterator[bool] = iter([False] * len(extras) if learns is None else learns)
    terms, totals = terms_of(spec, extras), list[Tensor | None]()
    for term in terms:
        term.check(batch, heads, nq, nk, device)
        totals.append(term.total(acc_dtype(q.dtype)) if bool(term.tables) and next(flags) else None)
    places = [torch.arange(n, device=device) for n in (heads, nq, nk)]
    dropout = Dropout(threshold, int(extras[-1])) if threshold else None
    first = first_positions(pattern, q_offset, batch, device)
    return Scoring(terms, dropout, places[0], places[1], places[2], first, tuple(totals))


def table_grads(extras: Sequence[Tensor], learns: Sequence[bool], scoring: Scoring | None) -> list[Tensor]:
    """Give the sum for each extra tensor that learns, in its dtype; for the others an empty tensor."""
    totals = () if scoring is None else scoring.totals
    return _by_extra(extras, learns, (total for total in totals if total is not None))


def fake_grads(extras: Sequence[Tensor], learns: Sequence[bool]) -> list[Tensor]:
    """Give the same without values."""
    return _by_extra(extras, learns, (x.new_empty(x.shape) for x, one in zip(extras, learns, strict=True) if one))


def _by_extra(extras: Sequence[Tensor], learns: Sequence[bool], grads: Iterable[Tensor]) -> list[Tensor]:
    rest = iter(grads)
    return [next(rest).to(x.dtype) if one else x.new_empty(0) for x, one in zip(extras, learns, strict=True)]


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))


def _fake_backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Any, ...]:
    extras, learns = rest[-2:]
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *grads, fake_grads(extras, learns)


def differentiate(op: Any, setup: Callable[..., None] | None, backward: Callable[..., Any]) -> None:
    """Give an operator its gradient, as ``torch.library.register_autograd``."""
    torch.library.register_autograd(op.name(), backward, setup_context=setup, lib=_library)


attention_op, attention_backward_op = operators((attention, _fake), (attention_backward, _fake_backward))


class Differentiable(torch.autograd.Function):
    """An operator under ``torch.func``: reverse mode, once; and ``vmap``."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Refuse: the tangent of what is not a function of tangents would be zero."""
        _refuse("a forward-mode derivative", "Use reverse mode: torch.func.vjp, jacrev or grad.")


def refuse_forward_mode() -> None:
    """Raise UnsupportedError under forward-mode differentiation, of which an operator alone knows nothing."""
    if forward_mode():
        Differentiable.jvp(None)


def _refuse(got: str, remedy: str) -> NoReturn:
    raise UnsupportedError(message("attention", got, "reverse-mode derivatives of first order", remedy))


def refuse_twice(ctx: Any, *_: Any) -> NoReturn:
    """Refuse the gradient of a gradient."""
    _refuse("a second derivative", "Call the formula on small dense tensors for one.")


class _Backward(Differentiable):
    backward = staticmethod(refuse_twice)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """As the operator, the gradients of a list side by side."""
        *grads, of_extras = attention_backward_op(*args)
        return *grads, *of_extras

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing: it has no derivative."""


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tables, ctx.spec, *ctx.rest, extras = inputs
    # alive until backward has run
    ctx.held = held(ctx.spec, tables, q)
    ctx.tables = len(tables)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *savable((*tables, *extras)))


def savable(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Give what can be kept for backward: a pattern may be made in inference mode, for calls outside of it."""
    return (x.clone() if x.is_inference() else x for x in tensors)


def _gradients(
    call: Callable[..., Any], ctx: Any, learns: list[bool], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, ...]:
    """(dq, dk, dv, then those of the extra tensors)."""
    if ctx.held is not None:
        ctx.held.check()
    if dout is None and dlse is None:
        return (None,) * (3 + len(learns))
    q, k, v, out, lse, *tables = ctx.saved_tensors
    tables, extras = tables[: ctx.tables], tables[ctx.tables :]
    dout = torch.zeros_like(out) if dout is None else dout
    *grads, of_extras = call(dout, dlse, q, k, v, out, lse, tables, ctx.spec, *ctx.rest, extras, learns)
    return *grads, *(grad if one else None for grad, one in zip(of_extras, learns, strict=True))


class _Attention(Differentiable):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        """As the operator; autograd sees no tensors in a list."""
        return attention_op(*args[:11], list(args[11:]))  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what backward takes."""
        _setup(ctx, (*inputs[:11], inputs[11:]), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        def call(*args: Any) -> tuple[Any, ...]:
            found = _Backward.apply(*args)  # type: ignore[no-untyped-call]
            return *found[:3], found[3:]

        dq, dk, dv, *of_extras = _gradients(call, ctx, list(ctx.needs_input_grad[11:]), *grads)
        return dq, dk, dv, *(None,) * 8, *of_extras


def _backward_compiled(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    dq, dk, dv, *of_extras = _gradients(attention_backward_op, ctx, list(ctx.needs_input_grad[11]), *grads)
    return dq, dk, dv, [None] * ctx.tables, *(None,) * 7, of_extras


differentiate(attention_op, _setup, _backward_compiled)
differentiate(attention_backward_op, None, refuse_twice)


def vectorize(op: Any) -> None:
    """Give an operator its rule under ``torch.vmap``."""

    def run(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        # tables, seeds and functions may know batch elements, which folded ones would be others of
        apart = any(x if isinstance(x, (list, tuple)) else isinstance(x, str) and "TokenMask(" in x for x in args)
        results = (_one_by_one if apart else _folded)(op, info.batch_size, in_dims, args)
        several = isinstance(results, tuple)
        dims = tuple(0 if isinstance(x, Tensor) else [0] * len(x) for x in results)
        return results, dims if several else 0

    torch.library.register_vmap(op, run, lib=_library)


def _one_by_one(op: Any, count: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    def at(x: Any, dim: Any, i: int) -> Any:
        if isinstance(x, (list, tuple)):
            return [at(y, place, i) for y, place in zip(x, dim or [None] * len(x), strict=True)]
        return x if dim is None else x.select(dim, i)

    each = [op(*(at(x, dim, i) for x, dim in zip(args, in_dims, strict=True))) for i in range(count)]
    return tuple(
        torch.stack(x) if isinstance(x[0], Tensor) else [torch.stack(y) for y in zip(*x, strict=True)]
        for x in zip(*each, strict=True)
    )


def _folded(op: Any, count: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """Take what is mapped for more batch elements."""

    def folded(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.movedim(dim, 0) if dim is not None else x.expand(count, *x.shape)
        return x.flatten(0, 1)

    results = op(*(folded(x, dim) for x, dim in zip(args, in_dims, strict=True)))
    return tuple(x.unflatten(0, (count, -1)) if isinstance(x, Tensor) else x for x in results)


vectorize(attention_op)
vectorize(attention_backward_op)


def said(terms: Sequence[Term], dropout: float) -> tuple[str, int, list[Tensor]]:
    """Terms and dropout as operators take them: text, a threshold, and tensors, a new seed the last of them."""
    spec, extras = written(terms) if terms else ("", [])
    threshold = threshold_of(dropout)
    if threshold:
        extras.append(torch.randint(-(2**63), 2**63 - 1, (), device="cpu"))
    return spec, threshold, extras


def attend(
    inputs: Inputs,
    pattern: Pattern,
    q_offset: int,
    backend: str,
    terms: Sequence[Term] = (),
    dropout: float = 0.0,
    degrade: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a checked call, with its derivatives."""
    q, k, v, scale = inputs[:4]
    spec, threshold, extras = said(terms, dropout)
    args = (q, k, v, pattern.tables, pattern.spec, scale, q_offset, backend, spec, threshold, degrade)
    if torch.compiler.is_compiling():
        refuse_forward_mode()
        return attention_op(*args, extras)  # type: ignore[no-any-return]
    if "torch.utils.flop_counter" in sys.modules:
        registered.register()
    if forward_mode() or transforming(q, k, v, *args[3], *extras):
        return _Attention.apply(*args, *extras)  # type: ignore[no-any-return, no-untyped-call]
    return attention_op(*args, extras)  # type: ignore[no-any-return]


_FORWARD, _BACKWARD = 2, 5  # matrix products


def _pairs(case: Case, tables: Sequence[Tensor], spec: str, q_offset: int, backend: str) -> int:
    if any(type(table) is not Tensor for table in tables):
        # tensors without values: as many as there may be
        return case.batch * case.heads * case.nq * case.nk
    steps = dispatch.program(pattern_of(spec, tables), case, q_offset, backend)
    return sum(
        branch.plan().computed_pairs() if chosen.planned or branch.structure == "sparse" else branch.pairs()
        for branch, chosen in steps
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, *call: Any, **_: Any) -> int:
    tables, spec, scale, q_offset, backend = call[:5]
    case = Case.of(Inputs(q, k, v, scale))
    return _FORWARD * (case.head_dim + case.value_dim) * _pairs(case, tables, spec, q_offset, backend)


def _backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *call: Any, **_: Any) -> int:
    return _forward(q, k, v, *call[2:]) * _BACKWARD // _FORWARD


@functools.cache
def register() -> None:
    """Tell counters, those that count already too. Their module imports triton: called once somebody else has."""
    from torch.utils import flop_counter

    formulas: dict[Any, Any] = {
        torch.ops.ringweave.attention: _forward,
        torch.ops.ringweave.attention_backward: _backward,
    }
    for packet, formula in formulas.items():
        flop_counter.register_flop_formula(packet, get_raw=True)(formula)
    for mode in dispatch_modes():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(registry, dict):
            registry.update({packet: flop_counter.flop_registry[packet] for packet in formulas})
