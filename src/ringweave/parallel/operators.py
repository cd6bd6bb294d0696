"""The two ``torch.library`` operators of a call with a context: opaque to ``torch.compile``, exchange and all."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedError, message
from ..ops.registered import differentiate, operator, refuse_twice
from ..patterns.function import held
from ..plan import pattern_of
from ..types import acc_dtype

if TYPE_CHECKING:
    from .context import ContextParallel

_contexts: weakref.WeakValueDictionary[str, ContextParallel] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(context: ContextParallel) -> str:
    """A number that stands for a context among an operator's arguments, as long as the context lives.

    As text: dynamo turns an int that differs between compiled calls into a symbol, which no dictionary takes.
    """
    number = str(next(_numbers))
    _contexts[number] = context
    return number


def _context(number: str) -> ContextParallel:
    context = _contexts.get(number)
    if context is None:
        raise UnsupportedError(
            message(
                "context",
                "one that is gone",
                "a live ContextParallel",
                "Keep it as long as its results need gradients.",
            )
        )
    return context


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    backend: str,
    context: str,
    tag: Tensor,
    grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, lse) of the shard, and what backward needs: received bytes of two hops; formats, and the call's name."""
    return _context(context).forward(q, k, v, pattern_of(spec, tables), scale, backend, tag, grads)


def ring_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    received: Tensor,
    relayed: Tensor,
    forms: Tensor,
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    backend: str,
    context: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the shard."""
    kept = (received, relayed, forms)
    return _context(context).backward(dout, dlse, q, k, v, out, lse, kept, pattern_of(spec, tables), scale, backend)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(3)]
    received, relayed = (q.new_empty(size, dtype=torch.uint8) for size in sizes[:2])
    forms = torch.empty(sizes[2], dtype=torch.int64, device="cpu")
    lse = q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse, received, relayed, forms


def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


ring_attention_op = operator(ring_attention, _fake)
ring_attention_backward_op = operator(ring_attention_backward, _fake_backward)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, tables, ctx.spec, ctx.scale, ctx.backend, ctx.context, _tag, _grads = inputs
    # alive until backward has run
    ctx.holder, ctx.held = _contexts.get(ctx.context), held(ctx.spec, tables, q)
    ctx.tables = len(tables)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, v, *output, *tables)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    if ctx.held is not None:
        ctx.held.check()
    q, k, v, out, lse, received, relayed, forms, *tables = ctx.saved_tensors
    rest = (None,) * 6
    # a rank without a slope still owes the others their gradients
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = ring_attention_backward_op(
        dout, dlse, q, k, v, out, lse, received, relayed, forms, tables, ctx.spec, ctx.scale, ctx.backend, ctx.context
    )
    return (dq, dk, dv, [None] * ctx.tables, *rest)


differentiate(ring_attention_op, _setup, _backward)
differentiate(ring_attention_backward_op, None, refuse_twice)
