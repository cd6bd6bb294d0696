"""The two ``torch.library`` operators of a call with a context: opaque to ``torch.compile``, exchange and all."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import weakref
from collections.abc import Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

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
)
from ..patterns.function import held
from ..plan import pattern_of
from ..terms import STEPS, Term
from ..torch_compat import untraced
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
    asked: str,
    tensors: Sequence[Tensor],
    fixed: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, lse) of the shard, and what else backward needs; see :class:`Saved`.

    Terms and dropout are those of ``ringweave::attention``, over the whole sequence. What was ``asked`` of the call is
    only compared: its text, and of its tensors shapes, types and, where ``fixed`` has a 1 for them, values.
    """
    pattern, ctx = pattern_of(spec, tables), _context(context)
    q, k, v = map(readable, (q, k, v))
    with ctx.call.calling(tag, scale=scale, backend=backend, device=q.device.type, requires_grad=grads) as call:
        schedule, whole = ctx.schedules.of(pattern, q.shape[0]), (ctx.seq_len, ctx.seq_len)
        inputs = Inputs(q, k, v, scale, scoring_of(q, whole, pattern, 0, terms, threshold, extras))
        also = {"terms": _said(terms, threshold, extras), "arguments": _arguments(asked, tensors, fixed)}
        call = call.saying(**also, **schedule.said)
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
    # a hook of saved tensors may have given them back in another layout
    pattern, ctx, of = (
        pattern_of(spec, tables),
        _context(context),
        Saved(*saved[:3], *map(Tensor.contiguous, saved[3:])),
    )
    dout, q, k, v = map(readable, (dout, of.q, of.k, of.v))
    forms, (number, *tag, seed) = of.forms[: -NAME_WORDS - 1], of.forms[-NAME_WORDS - 1 :].tolist()
    with ctx.call.calling(tag=None, scale=scale, backend=backend, device=q.device.type) as call:
        schedule, whole = ctx.schedules.of(pattern, q.shape[0]), (ctx.seq_len, ctx.seq_len)
        scoring = scoring_of(q, whole, pattern, 0, terms, threshold, extras, learns)
        call = call.saying(call=number, tag=tuple(tag), terms=_said(terms, threshold, extras), **schedule.said)
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


# entries of a tensor that are compared; of a larger one so many, evenly spaced
_ENTRIES = 2**16


def written_argument(value: object, tensors: list[Tensor]) -> str:
    """Write an argument so that equal ones have equal texts, ``_`` for each tensor, which is put to the others."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "learned _" if value.requires_grad else "_"
    if isinstance(value, Term):
        tensors += value.tables
        return f"{'learned ' if any(x.requires_grad for x in value.tables) else ''}{value.spec}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join([written_argument(each, tensors) for each in value])})"
    if dataclasses.is_dataclass(value):
        parts = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
        inside = ", ".join([f"{name}={written_argument(part, tensors)}" for name, part in parts])
        return f"{type(value).__name__}({inside})"
    return repr(value) if isinstance(value, (bool, int, float, str, torch.dtype, NoneType)) else type(value).__name__


def _arguments(asked: str, tensors: Sequence[Tensor], fixed: str) -> Opaque | None:
    """What the ranks compare of a call's other arguments."""
    if not asked:
        return None
    digest = hashlib.blake2b(asked.encode(), digest_size=8)
    for x, one in zip(tensors, fixed, strict=True):
        digest.update(f"{x.dtype}{tuple(x.shape)}".encode())
        if one == "1":
            digest.update(_entries(x).view(torch.uint8).numpy().data)
    shapes = (str(tuple(x.shape)) for x in tensors)
    shown = re.sub(r"\b_\b", lambda _: next(shapes, "_"), asked)
    return Opaque(int.from_bytes(digest.digest(), "little") >> 1, shown)


def _entries(x: Tensor) -> Tensor:
    if x.numel() <= _ENTRIES:
        return x.contiguous().cpu().flatten()
    some = torch.linspace(0, x.numel() - 1, _ENTRIES, dtype=torch.float64, device=x.device).long()
    return x[torch.unravel_index(some, x.shape)].cpu()


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
    q, k, v, tables, ctx.spec, *ctx.rest, extras, _tag, _grads, _asked, tensors, _fixed = inputs
    # alive until backward has run
    ctx.holder, ctx.held = _contexts.get(ctx.rest[2]), held(ctx.spec, tables, q)
    ctx.tables, ctx.compared = len(tables), len(tensors)
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
    return *grads, [None] * ctx.tables, *(None,) * (_EXTRAS - 4), of_extras, *(None,) * 3, [None] * ctx.compared, None


# its results' sizes are not known to a graph, which breaks there unless it is compiled with fullgraph=True
differentiate(ring_attention_op, untraced(_setup), untraced(_backward))
differentiate(ring_attention_backward_op, None, refuse_twice)
