"""The two ``torch.library`` operators of a call, with fakes, and how a call is differentiated.

They take a pattern as text and tables, so that ``torch.compile`` traces a call as one opaque node: planning and
dispatch happen when it runs, and a new table of the same shape recompiles nothing. ``torch.func`` transforms autograd
functions, not operators: under it the same two run as such. What has no derivative raises: an operator alone would
answer a forward-mode derivative with zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import UnsupportedError, message
from ..patterns import Pattern
from ..patterns.function import held
from ..plan import pattern_of
from ..types import acc_dtype
from . import flops
from .backend import Inputs
from .dispatch import run_backward, run_forward

_library = torch.library.Library("ringweave", "DEF")


def operator(kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``ringweave::<name of the kernel>``; the kernel's annotations are its schema, the fake tells shapes."""
    name = kernel.__name__
    _library.define(name + torch.library.infer_schema(kernel, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    untraced = torch._disable_dynamo(kernel)

    def run(*args: Any) -> Any:
        # as under torch.library.custom_op, which imports the compiler (a second) to say so where nobody has yet
        return (untraced if "torch._dynamo" in sys.modules else kernel)(*args)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringweave::{name}", fake, lib=_library)
    return getattr(torch.ops.ringweave, name).default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    q_offset: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the pattern that ``spec`` and ``tables`` spell."""
    return run_forward(Inputs(q, k, v, scale), pattern_of(spec, tables), q_offset, backend)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    pattern = pattern_of(spec, tables)
    return run_backward(dout, dlse, Inputs(q, k, v, scale), out, lse, pattern, q_offset, backend)


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def differentiate(op: Any, setup: Callable[..., None] | None, backward: Callable[..., Any]) -> None:
    """Give an operator its gradient, as ``torch.library.register_autograd``."""
    torch.library.register_autograd(op.name(), backward, setup_context=setup, lib=_library)


attention_op = operator(attention, _fake)
attention_backward_op = operator(attention_backward, _fake_backward)


class Differentiable(torch.autograd.Function):
    """An operator under ``torch.func``: reverse mode, once; and ``vmap``."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Refuse: the tangent of what is not a function of tangents would be zero."""
        _refuse("a forward-mode derivative", "Use reverse mode: torch.func.vjp, jacrev or grad.")


def refuse_forward_mode() -> None:
    """Raise UnsupportedError under forward-mode differentiation, of which an operator alone knows nothing."""
    if forward_ad._current_level >= 0:
        Differentiable.jvp(None)


def _refuse(got: str, remedy: str) -> NoReturn:
    raise UnsupportedError(message("attention", got, "reverse-mode derivatives of first order", remedy))


def refuse_twice(ctx: Any, *_: Any) -> NoReturn:
    """The gradient of a gradient."""
    _refuse("a second derivative", "Call the formula on small dense tensors for one.")


class _Backward(Differentiable):
    forward = staticmethod(attention_backward_op)
    backward = staticmethod(refuse_twice)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: it has no derivative."""


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tables, ctx.spec, ctx.scale, ctx.q_offset, ctx.backend = inputs
    # alive until backward has run
    ctx.held = held(ctx.spec, tables, q)
    ctx.tables = len(tables)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *tables)


def _gradients(call: Callable[..., Any], ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    if ctx.held is not None:
        ctx.held.check()
    q, k, v, out, lse, *tables = ctx.saved_tensors
    if dout is None and dlse is None:
        return None, None, None
    dout = torch.zeros_like(out) if dout is None else dout
    return call(dout, dlse, q, k, v, out, lse, tables, ctx.spec, ctx.scale, ctx.q_offset, ctx.backend)  # type: ignore[no-any-return]


class _Attention(Differentiable):
    forward = staticmethod(attention_op)
    setup_context = staticmethod(_setup)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return *_gradients(_Backward.apply, ctx, *grads), *(None,) * 5


def _backward_compiled(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    return *_gradients(attention_backward_op, ctx, *grads), [None] * ctx.tables, *(None,) * 4


differentiate(attention_op, _setup, _backward_compiled)
differentiate(attention_backward_op, None, refuse_twice)


def _fold(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[list[Any], Callable[[Tensor], Tensor]]:
    """Arguments with the mapped dimension folded into the batch, and the way back."""
    count = info.batch_size

    def folded(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.movedim(dim, 0) if dim is not None else x.expand(count, *x.shape)
        return x.flatten(0, 1)

    values = []
    for x, dim in zip(args, in_dims, strict=True):
        if isinstance(x, (list, tuple)):
            if any(place is not None for place in dim or ()):
                got = "torch.vmap over the tables of a pattern"
                raise UnsupportedError(
                    message("pattern", got, "one pattern for all", "Give the table a batch dimension instead.")
                )
            values.append(x)
        else:
            values.append(folded(x, dim))
    return values, lambda x: x.unflatten(0, (count, -1))


def _vmapped(op: Any) -> Callable[..., Any]:
    def run(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        values, unfold = _fold(info, in_dims, *args)
        found = op(*values)
        return tuple(unfold(x) for x in found), (0,) * len(found)

    return run


torch.library.register_vmap("ringweave::attention", _vmapped(attention_op), lib=_library)
torch.library.register_vmap("ringweave::attention_backward", _vmapped(attention_backward_op), lib=_library)


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, q_offset: int, backend: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked call, with its derivatives."""
    args = (q, k, v, pattern.tables, pattern.spec, scale, q_offset, backend)
    if torch.compiler.is_compiling():
        refuse_forward_mode()
        return attention_op(*args)  # type: ignore[no-any-return]
    if "torch.utils.flop_counter" in sys.modules:
        flops.register()
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return _Attention.apply(*args)  # type: ignore[no-any-return, no-untyped-call]
    return attention_op(*args)  # type: ignore[no-any-return]
