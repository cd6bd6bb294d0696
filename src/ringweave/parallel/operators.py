"""The two ``torch.library`` operators of a call with a context: opaque to ``torch.compile``, exchange and all."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError, message
from ..ops.backend import Inputs, readable
from ..ops.registered import differentiate, operator, refuse_twice
from ..patterns.function import held
from ..plan import pattern_of
from ..types import acc_dtype
from .execution import executor
from .execution.agreement import NAME_WORDS

if TYPE_CHECKING:
    from .context import ContextParallel

_contexts: weakref.WeakValueDictionary[str, ContextParallel] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(context: ContextParallel) -> str:
    """Give a context a number, which stands for it among an operator's arguments as long as it lives.

    As text: dynamo turns an int that differs between compiled calls into a symbol, which no dictionary takes.
    """
    number = str(next(_numbers))
    _contexts[number] = context
    return number


def _context(number: str) -> ContextParallel:
    context = _contexts.get(number)
    if context is None:
        remedy = "Keep it as long as its results need gradients."
        raise UnsupportedError(message("context", "one that is gone", "a live ContextParallel", remedy))
    return context


class Saved(NamedTuple):
    """What backward needs of forward.

    Attributes:
        q: Queries of the shard.
        k: Keys.
        v: Values.
        out: The results, in q's type.
        lse: Their log-sum-exp.
        received: The bytes that the first hop brought, where the schedule keeps them.
        relayed: Those of the second.
        forms: The format of each message, by hop and rank, and the call's name.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    received: Tensor
    relayed: Tensor
    forms: Tensor


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
    """(out, lse) of the shard, and what else backward needs; see :class:`Saved`."""
    pattern, ctx = pattern_of(spec, tables), _context(context)
    q, k, v = map(readable, (q, k, v))
    schedule = ctx.schedules.of(pattern, q.shape[0])
    with ctx.call.calling(tag, scale=scale, backend=backend, requires_grad=grads, **schedule.said) as call:
        out, lse, received, forms = executor.forward(schedule, call, Inputs(q, k, v, scale), backend)
    kept = [*received, *(torch.empty(0, dtype=torch.uint8, device=q.device) for _ in range(2 - len(received)))]
    forms = torch.cat([forms.flatten(), torch.tensor(call.name, dtype=torch.int64, device="cpu")])
    # a compiled graph relies on the shapes and strides that the fake operator tells
    return out.contiguous(), lse.contiguous(), kept[0], kept[1], forms


def ring_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: Sequence[Tensor],
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    backend: str,
    context: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the shard."""
    pattern, ctx, of = pattern_of(spec, tables), _context(context), Saved(*saved)
    dout, q, k, v = map(readable, (dout, of.q, of.k, of.v))
    forms, (number, *tag) = of.forms[:-NAME_WORDS], of.forms[-NAME_WORDS:].tolist()
    schedule = ctx.schedules.of(pattern, q.shape[0])
    with ctx.call.calling(tag=None, scale=scale, backend=backend, **schedule.said) as call:
        call = call.saying(call=number, tag=tuple(tag))
        computed = executor.Computed(of.out, of.lse, (of.received, of.relayed), forms.view(-1, ctx.size))
        return executor.backward(schedule, call, Inputs(q, k, v, scale), computed, (dout, dlse), backend)


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(3)]
    received, relayed = (q.new_empty(size, dtype=torch.uint8) for size in sizes[:2])
    forms = torch.empty(sizes[2], dtype=torch.int64, device="cpu")
    lse = q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse, received, relayed, forms


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, saved: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[:3])
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
    # read once: checkpointing computes again what it gives out
    every, count = ctx.saved_tensors, len(Saved._fields)
    saved, tables = Saved(*every[:count]), every[count:]
    # a rank whose results nobody uses still owes the others their gradients
    dout = torch.zeros_like(saved.out) if dout is None else dout
    grads = ring_attention_backward_op(dout, dlse, saved, tables, ctx.spec, ctx.scale, ctx.backend, ctx.context)
    return (*grads, [None] * ctx.tables, *(None,) * 6)


differentiate(ring_attention_op, _setup, _backward)
differentiate(ring_attention_backward_op, None, refuse_twice)
