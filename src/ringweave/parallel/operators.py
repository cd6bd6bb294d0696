"""The two ``torch.library`` operators of a call with a context; ``torch.compile`` does not trace into the exchange."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import weakref
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.backend import readable
from ..call import Arguments, Call, Operands, term_operands
from ..errors import UnsupportedError
from ..terms import Term
from ..terms.dropout import DROPOUT_LEVELS
from ..torch_compat import transforming, untraced
from ..torch_ops import (
    differentiate,
    fake_grads,
    followed,
    operators,
    pinned,
    refuse_forward_mode,
    refuse_twice,
    savable,
    table_grads,
)
from ..types import acc_dtype
from .execution import executor
from .execution.collective import CollectiveCall
from .execution.header import NAME_WORDS, Digest, Value, text_words
from .execution.schedule import Schedule
from .schedules import Schedules

_sessions: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Session:
    """The schedules and calls of a context, which its tagged handles share.

    An operator's arguments name a session by its number while it is alive. The number is text, because dynamo turns an
    int that differs between compiled calls into a symbol, which cannot be a dictionary key.
    """

    def __init__(self, schedules: Schedules, call: CollectiveCall):
        self.schedules, self.call = schedules, call
        self.number = str(next(_numbers))
        _sessions[self.number] = self


def _session(number: str) -> Session:
    session = _sessions.get(number)
    if session is None:
        remedy = "Keep the context until the gradients of its results are computed."
        raise UnsupportedError("context", "one that was deleted", "a live ContextParallel", remedy)
    return session


class Saved(NamedTuple):
    """The tensors that forward saves for backward."""

    q: Tensor  # queries of the shard
    k: Tensor  # keys of the shard
    v: Tensor  # values of the shard
    out: Tensor  # outputs, in q's dtype
    lse: Tensor  # log-sum-exp of the rows
    received: Tensor  # bytes received in the first exchange, if the schedule keeps them; else empty
    relayed: Tensor  # bytes received in the second exchange, if there is one and the schedule keeps them; else empty
    forms: Tensor  # int64: the format of each message by exchange and rank, then the call's name, then its dropout seed


#: Arguments that are sharded, or that the operator compares in other header fields.
_COMPARED = frozenset({"q", "k", "v", "pattern", "scale", "backend", "context", "dropout"})


def other_arguments(given: Arguments) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the remaining arguments that differ from their defaults; the ranks compare them too."""
    for name, value in given._asdict().items():
        if name not in _COMPARED and (isinstance(value, Tensor) or value != given._field_defaults[name]):
            yield name, value


def attend(
    session: Session,
    tag: Tensor,
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    tensors: Sequence[Tensor],
    given: Arguments,
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a shard by the operator; see :meth:`ContextParallel.attend`."""
    refuse_forward_mode()
    if not torch.compiler.is_compiling() and transforming(*inputs):
        remedy = "Differentiate with torch.autograd, and fold a mapped dimension into the batch."
        raise UnsupportedError("context", "a torch.func transform", "a call without one", remedy)
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *tensors))
    compared: list[Tensor] = []
    written = ", ".join([f"{name}={written_argument(value, compared)}" for name, value in other_arguments(given)])
    fixed = "".join(["0" if x.requires_grad else "1" for x in compared])
    shared = "\n".join([session.number, str(int(grads)), fixed, written])
    others = [tag, *[x.detach() for x in compared]]
    out, lse, *_ = ring_attention_op(*inputs, tensors, call.text, *call.numbers, others, shared)
    return out, lse


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    call: str,
    scale: float,
    q_offset: int,
    dropout: int,
    others: Sequence[Tensor],
    shared: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute (out, lse) of the shard, and return the other tensors that backward needs (see :class:`Saved`).

    ``call`` is the text that ``ringweave::attention`` takes; its terms and dropout use positions in the whole sequence.
    ``others`` holds the tag, then the tensors that the ranks compare. ``shared`` has four lines: the context's number;
    1 if gradients are needed, else 0; for each compared tensor 1 if its values are compared, else 0; the compared text.
    """
    number, grads, fixed, written = shared.split("\n", 3)
    about, session = Call.read(call, q, k, v, tensors, scale, q_offset, dropout), _session(number)
    q, k, v = map(readable, (q, k, v))
    fields: dict[str, Value] = {
        "scale": scale,
        "backend": about.backend,
        "device": q.device.type,
        "requires_grad": grads == "1",
    }
    with session.call.call_scope(others[0], **fields) as agreed:
        schedule, operands = _prepared(session, about, (q, k, v), tensors)
        also = {"terms": _terms_field(about, tensors), "arguments": _arguments_field(written, others[1:], fixed)}
        agreed = agreed.with_fields(**also, **schedule.header)
        agreed.seed = int(about.by_field(tensors).dropout[0]) if about.dropout else 0
        out, lse, received, forms = executor.forward(schedule, agreed, operands, about.backend)
    saved = [*received, *(torch.empty(0, dtype=torch.uint8, device=q.device) for _ in range(2 - len(received)))]
    forms = torch.cat([forms.flatten(), torch.tensor([*agreed.name, agreed.seed], dtype=torch.int64, device="cpu")])
    # A compiled graph relies on the shapes and strides of the fake operator, which are contiguous.
    return out.contiguous(), lse.contiguous(), saved[0], saved[1], forms


def ring_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: Sequence[Tensor],
    tensors: Sequence[Tensor],
    call: str,
    scale: float,
    q_offset: int,
    dropout: int,
    shared: str,
    learns: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute (dq, dk, dv) of the shard, and gradients of ``tensors`` summed over the pairs that this rank computed."""
    # A hook on saved tensors may return them in another memory layout.
    of = Saved(*saved[:3], *map(Tensor.contiguous, saved[3:]))
    about = Call.read(call, of.q, of.k, of.v, tensors, scale, q_offset, dropout)
    session = _session(shared.partition("\n")[0])
    dout, q, k, v = map(readable, (dout, of.q, of.k, of.v))
    forms, (number, *tag, seed) = of.forms[: -NAME_WORDS - 1], of.forms[-NAME_WORDS - 1 :].tolist()
    with session.call.call_scope(tag=None, scale=scale, backend=about.backend, device=q.device.type) as agreed:
        schedule, operands = _prepared(session, about, (q, k, v), tensors, learns)
        agreed = agreed.with_fields(call=number, tag=tuple(tag), terms=_terms_field(about, tensors), **schedule.header)
        agreed.seed = seed
        computed = executor.Computed(of.out, of.lse, (of.received, of.relayed), forms.view(-1, agreed.transport.size))
        grads = executor.backward(schedule, agreed, operands, computed, (dout, dlse), about.backend)
    return *grads, table_grads(tensors, learns, operands)


def _prepared(
    session: Session,
    call: Call,
    inputs: tuple[Tensor, ...],
    tensors: Sequence[Tensor],
    learns: Sequence[bool] | None = None,
) -> tuple[Schedule, Operands]:
    """Return the schedule of a call, and its operands with terms over positions of the whole sequence."""
    schedule, tokens = session.schedules.of(call.pattern, call.batch), session.schedules.placement.tokens
    terms = term_operands(call, (tokens, tokens), inputs[0].device, call.by_field(tensors), learns)
    q, k, v = inputs
    return schedule, Operands(q, k, v, call.scale, terms)


def _terms_field(call: Call, tensors: Sequence[Tensor]) -> Digest | None:
    """Return the header value for terms and dropout: their text with the shapes of tables; None without either."""
    if not call.terms and not call.dropout:
        return None
    tables = iter(call.by_field(tensors).terms)
    shown = re.sub(r"\b_\b", lambda _: str(tuple(next(tables).shape)), call.terms)
    drops = f"dropout {call.dropout / DROPOUT_LEVELS:.6g}"
    shown = ", ".join(([shown] if call.terms else []) + ([drops] if call.dropout else []))
    return Digest(text_words(f"{shown} {call.dropout}", 1)[0], shown)


# The ranks compare at most this many entries of a tensor; of a larger tensor they compare evenly spaced entries.
_ENTRIES = 2**16


def written_argument(value: object, tensors: list[Tensor]) -> str:
    """Write an argument as text, equal for equal arguments; tensors become ``_`` and are appended to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "learned _" if value.requires_grad else "_"
    if isinstance(value, Term):
        # a rank whose table does not learn would leave its share out of the gradient
        tables = [written_argument(table, tensors) for table in value.tables]
        return f"{type(value).__name__}({', '.join([*map(repr, value.numbers), *tables])})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join([written_argument(each, tensors) for each in value])})"
    if dataclasses.is_dataclass(value):
        parts = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
        inside = ", ".join([f"{name}={written_argument(part, tensors)}" for name, part in parts])
        return f"{type(value).__name__}({inside})"
    return repr(value) if isinstance(value, (bool, int, float, str, torch.dtype, NoneType)) else type(value).__name__


def _arguments_field(written: str, tensors: Sequence[Tensor], fixed: str) -> Digest | None:
    """Return the header value for a call's remaining arguments; None if all have their defaults."""
    if not written:
        return None
    digest = hashlib.blake2b(written.encode(), digest_size=8)
    for x, one in zip(tensors, fixed, strict=True):
        digest.update(f"{x.dtype}{tuple(x.shape)}".encode())
        if one == "1":
            digest.update(_entries(x).view(torch.uint8).numpy().data)
    shapes = (str(tuple(x.shape)) for x in tensors)
    shown = re.sub(r"\b_\b", lambda _: next(shapes, "_"), written)
    return Digest(int.from_bytes(digest.digest(), "little") >> 1, shown)


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
    return dq, dk, dv, fake_grads(rest[0], rest[-1])


ring_attention_op, ring_attention_backward_op = operators(
    (ring_attention, _fake), (ring_attention_backward, _fake_backward)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, tensors, *ctx.call, others, ctx.shared = inputs
    # The registry is weak: this reference keeps the session alive until backward has run.
    ctx.holder = _sessions.get(ctx.shared.partition("\n")[0])
    pattern = followed(ctx.call[0], tensors, q)
    ctx.pinned, ctx.others = None if pattern is None else pinned(pattern, tensors, q), len(others)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, v, *output, *savable(tensors))


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    if ctx.pinned is not None:
        ctx.pinned.check()
    # Read once: under checkpointing each access of saved_tensors may compute forward again.
    every, count = ctx.saved_tensors, len(Saved._fields)
    saved, tensors = Saved(*every[:count]), every[count:]
    learns = list(ctx.needs_input_grad[3])
    # Other ranks need this rank's part of their gradients even if its output does not contribute to the loss.
    dout = torch.zeros_like(saved.out) if dout is None else dout
    args = dout, dlse, saved, tensors, *ctx.call, ctx.shared, learns
    *grads, sums = ring_attention_backward_op(*args)
    of_tensors = [grad if one else None for grad, one in zip(sums, learns, strict=True)]
    return *grads, of_tensors, *[None] * len(ctx.call), [None] * ctx.others, None


# The graph does not know the sizes of the operator's outputs, so it breaks there unless compiled with fullgraph=True.
differentiate(ring_attention_op, untraced(_setup), untraced(_backward))
differentiate(ring_attention_backward_op, None, refuse_twice)
