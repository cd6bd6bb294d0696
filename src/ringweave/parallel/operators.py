"""The two ``torch.library`` operators of a call with a context: opaque to ``torch.compile``, exchange and all."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..dropout import STEPS
from ..errors import UnsupportedError, message
from ..ops.backend import Inputs, readable
from ..ops.registered import (
    differentiate,
    fake_grads,
    operators,
    refuse_twice,
    savable,
    scoring_of,
    table_grads,
    untraced,
)
from ..patterns.function import held
from ..plan import pattern_of
from ..types import acc_dtype
from .execution import executor
from .execution.agreement import NAME_WORDS, Opaque, text_words

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
        forms: The format of each message, by hop and rank, the call's name, and the seed of its dropout.
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
    terms: str,
    threshold: int,
    extras: Sequence[Tensor],
    tag: Tensor,
    grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, lse) of the shard, and what else backward needs; see :class:`Saved`.

    Terms and dropout are those of ``ringweave::attention``, over the whole sequence.
    """
    pattern, ctx = pattern_of(spec, tables), _context(context)
    q, k, v = map(readable, (q, k, v))
    schedule, whole = ctx.schedules.of(pattern, q.shape[0]), (ctx.seq_len, ctx.seq_len)
    inputs = Inputs(q, k, v, scale, scoring_of(q, whole, pattern, 0, terms, threshold, extras))
    also = {"terms": _said(terms, threshold, extras), "requires_grad": grads}
    with ctx.call.calling(tag, scale=scale, backend=backend, **also, **schedule.said) as call:
        call.seed = int(extras[-1]) if threshold else 0
        out, lse, received, forms = executor.forward(schedule, call, inputs, backend)
    kept = [*received, *(torch.empty(0, dtype=torch.uint8, device=q.device) for _ in range(2 - len(received)))]
    forms = torch.cat([forms.flatten(), torch.tensor([*call.name, call.seed], dtype=torch.int64, device="cpu")])
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
    terms: str,
    threshold: int,
    extras: Sequence[Tensor],
    learns: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """(dq, dk, dv) of the shard, and of ``extras`` the sums over the pairs that this rank has computed."""
    pattern, ctx, of = pattern_of(spec, tables), _context(context), Saved(*saved)
    dout, q, k, v = map(readable, (dout, of.q, of.k, of.v))
    forms, (number, *tag, seed) = of.forms[: -NAME_WORDS - 1], of.forms[-NAME_WORDS - 1 :].tolist()
    schedule, whole = ctx.schedules.of(pattern, q.shape[0]), (ctx.seq_len, ctx.seq_len)
    scoring = scoring_of(q, whole, pattern, 0, terms, threshold, extras, learns)
    also = {"terms": _said(terms, threshold, extras)}
    with ctx.call.calling(tag=None, scale=scale, backend=backend, **also, **schedule.said) as call:
        call = call.saying(call=number, tag=tuple(tag))
        call.seed = seed
        computed = executor.Computed(of.out, of.lse, (of.received, of.relayed), forms.view(-1, ctx.size))
        inputs = Inputs(q, k, v, scale, scoring)
        grads = executor.backward(schedule, call, inputs, computed, (dout, dlse), backend)
    return *grads, table_grads(extras, learns, scoring)


def _said(terms: str, threshold: int, extras: Sequence[Tensor]) -> Opaque | None:
    """What the ranks compare of terms and dropout: their text, and the shapes of tables."""
    if not terms and not threshold:
        return None
    shapes = iter(extras)
    shown = re.sub("_", lambda _: str(tuple(next(shapes).shape)), terms)
    shown = ", ".join(([shown] if terms else []) + ([f"dropout {threshold / STEPS:.6g}"] if threshold else []))
    return Opaque(text_words(f"{shown} {threshold}", 1)[0], shown)


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(3)]
    received, relayed = (q.new_empty(size, dtype=torch.uint8) for size in sizes[:2])
    forms = torch.empty(sizes[2], dtype=torch.int64, device="cpu")
    lse = q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse, received, relayed, forms


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, saved: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[:3])
    return dq, dk, dv, fake_grads(*rest[-2:])


ring_attention_op, ring_attention_backward_op = operators(
    (ring_attention, _fake), (ring_attention_backward, _fake_backward)
)


# the place of ``extras`` among the operator's arguments
_EXTRAS = list(ring_attention.__annotations__).index("extras")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, tables, ctx.spec, *ctx.rest, extras, _tag, _grads = inputs
    # alive until backward has run
    ctx.holder, ctx.held = _contexts.get(ctx.rest[2]), held(ctx.spec, tables, q)
    ctx.tables = len(tables)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, v, *output, *savable((*tables, *extras)))


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    if ctx.held is not None:
        ctx.held.check()
    # read once: checkpointing computes again what it gives out
    every, count = ctx.saved_tensors, len(Saved._fields)
    saved, tables, extras = Saved(*every[:count]), every[count : count + ctx.tables], every[count + ctx.tables :]
    learns = list(ctx.needs_input_grad[_EXTRAS])
    # a rank whose results nobody uses still owes the others their gradients
    dout = torch.zeros_like(saved.out) if dout is None else dout
    *grads, sums = ring_attention_backward_op(dout, dlse, saved, tables, ctx.spec, *ctx.rest, extras, learns)
    of_extras = [grad if one else None for grad, one in zip(sums, learns, strict=True)]
    return *grads, [None] * ctx.tables, *(None,) * (_EXTRAS - 4), of_extras, None, None


# its results' sizes are not known to a graph, which breaks there unless it is compiled with fullgraph=True
differentiate(ring_attention_op, untraced(_setup), untraced(_backward))
differentiate(ring_attention_backward_op, None, refuse_twice)
