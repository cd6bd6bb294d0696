"""The two ``torch.library`` operators of a call with a context; ``torch.compile`` does not trace into the exchange.

A score function cannot cross an operator. A call with one has an autograd function.
"""

from __future__ import annotations

import dataclasses
import functools
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
from ..precision import NATIVE
from ..terms import Term
from ..terms.dropout import DROPOUT_LEVELS
from ..terms.function import ScoreFunction
from ..torch_compat import digest, transforming, untraced
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
    if given.precision == NATIVE:
        given = given._replace(precision=None)
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
    function: ScoreFunction | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a shard by the operator, or with a function; see :meth:`ContextParallel.attend`."""
    refuse_forward_mode()
    if not torch.compiler.is_compiling() and transforming(*inputs):
        remedy = "Differentiate with torch.autograd, and fold a mapped dimension into the batch."
        raise UnsupportedError("context", "a torch.func transform", "a call without one", remedy)
    learned = tensors if function is None else function.captured
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *learned))
    compared: list[Tensor] = []
    written = ", ".join([f"{name}={written_argument(value, compared)}" for name, value in other_arguments(given)])
    fixed = "".join(["0" if x.requires_grad else "1" for x in compared])
    compared = [x.detach() for x in compared]
    if function is not None:
        of_call = Compared(tag, str(int(grads)), fixed, written, compared)
        of_rank = RankCall(session, call, tensors, function)
        out, lse, *_ = _OfFunction.apply(*inputs, of_rank, of_call, *learned)  # type: ignore[no-untyped-call]
        return out, lse
    shared = "\n".join([session.number, str(int(grads)), fixed, written])
    others = [tag, *compared]
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
    about = Call.read(call, q, k, v, tensors, scale, q_offset, dropout)
    return RankCall(_session(number), about, tensors).forward(
        (q, k, v), Compared(others[0], grads, fixed, written, others[1:])
    )


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
    of = Saved(*saved)
    about = Call.read(call, of.q, of.k, of.v, tensors, scale, q_offset, dropout)
    return RankCall(_session(shared.partition("\n")[0]), about, tensors).backward(dout, dlse, of, tensors, learns)


class Compared(NamedTuple):
    """What the ranks compare of a call besides its sizes, its pattern and its terms, and the call's tag."""

    tag: Tensor
    grads: str  # "1" if gradients are needed, else "0"
    fixed: str  # for each tensor "1" if its values are compared, else "0"
    written: str  # the other arguments as text
    tensors: Sequence[Tensor]  # the tensors in these arguments


@dataclasses.dataclass(frozen=True, eq=False)
class RankCall:
    """A rank's part of a call.

    Attributes:
        session: The session of the context.
        call: The call.
        tensors: Its tensors besides q, k and v, in the order of ``call.pack``.
        function: Its score function, or None.
    """

    session: Session
    call: Call
    tensors: Sequence[Tensor]
    function: ScoreFunction | None = None

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The schedule, which an object that lives until backward holds until then."""
        return self.session.schedules.of(self.call.pattern, self.call.batch)

    def forward(
        self, inputs: tuple[Tensor, Tensor, Tensor], compared: Compared
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute (out, lse) of the shard, and the other tensors that backward needs."""
        call, (q, k, v) = self.call, map(readable, inputs)
        fields: dict[str, Value] = {
            "scale": call.scale,
            "backend": call.backend,
            "device": q.device.type,
            "requires_grad": compared.grads == "1",
        }
        with self.session.call.call_scope(compared.tag, **fields) as agreed:
            operands = self._operands((q, k, v))
            arguments = _arguments_field(compared.written, compared.tensors, compared.fixed)
            also = {"terms": _terms_field(call, self.tensors), "arguments": arguments}
            agreed = agreed.with_fields(**also, **self.schedule.header)
            agreed.seed = int(call.by_field(self.tensors).dropout[0]) if call.dropout else 0
            out, lse, received, forms = executor.forward(self.schedule, agreed, operands, call.backend)
        saved = [*received, *(torch.empty(0, dtype=torch.uint8, device=q.device) for _ in range(2 - len(received)))]
        forms = torch.cat([forms.flatten(), torch.tensor([*agreed.name, agreed.seed], dtype=torch.int64, device="cpu")])
        # A compiled graph relies on the shapes and strides of the fake operator, which are contiguous.
        return out.contiguous(), lse.contiguous(), saved[0], saved[1], forms

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, tensors: Sequence[Tensor], learns: Sequence[bool]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Compute (dq, dk, dv) of the shard, and this rank's part of the gradients of ``tensors``.

        Args:
            dout: Gradient of out.
            dlse: Gradient of lse, or None.
            saved: The tensors of forward.
            tensors: Those of the call, or those that its function captures.
            learns: Whether each of them needs a gradient.
        """
        # A hook on saved tensors may return them in another memory layout.
        of, call = Saved(*saved[:3], *map(Tensor.contiguous, saved[3:])), self.call
        dout, q, k, v = map(readable, (dout, of.q, of.k, of.v))
        forms, (number, *tag, seed) = of.forms[: -NAME_WORDS - 1], of.forms[-NAME_WORDS - 1 :].tolist()
        fields: dict[str, Value] = {"scale": call.scale, "backend": call.backend, "device": q.device.type}
        with self.session.call.call_scope(tag=None, **fields) as agreed:
            operands = self._operands((q, k, v), tensors, learns)
            terms = _terms_field(call, self.tensors)
            agreed = agreed.with_fields(call=number, tag=tuple(tag), terms=terms, **self.schedule.header)
            agreed.seed = seed
            forms = forms.view(-1, agreed.transport.size)
            computed = executor.Computed(of.out, of.lse, (of.received, of.relayed), forms)
            grads = executor.backward(self.schedule, agreed, operands, computed, (dout, dlse), call.backend)
        return *grads, table_grads(tensors, learns, operands)

    def _operands(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        tensors: Sequence[Tensor] | None = None,
        learns: Sequence[bool] | None = None,
    ) -> Operands:
        """Return the operands, with terms or a function over positions of the whole sequence."""
        q, k, v = inputs
        call, tokens = self.call, self.session.schedules.placement.tokens
        function = None
        if self.function is not None:
            function, learns = self.function.begin(tensors, learns), None
        by_field = call.by_field(self.tensors)
        terms = term_operands(call, (tokens, tokens), q.device, by_field, learns, function=function)
        return Operands(q, k, v, call.scale, terms)


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
    hashed = hashlib.blake2b(written.encode(), digest_size=8)
    for x, one in zip(tensors, fixed, strict=True):
        hashed.update(f"{x.dtype}{tuple(x.shape)}".encode())
        if one == "1":
            hashed.update(digest(_entries(x)))
    shapes = (str(tuple(x.shape)) for x in tensors)
    shown = re.sub(r"\b_\b", lambda _: next(shapes, "_"), written)
    return Digest(int.from_bytes(hashed.digest(), "little") >> 1, shown)


def _entries(x: Tensor) -> Tensor:
    if x.numel() <= _ENTRIES:
        return x
    some = torch.linspace(0, x.numel() - 1, _ENTRIES, dtype=torch.float64, device=x.device).long()
    return x[torch.unravel_index(some, x.shape)]


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


class _OfFunction(torch.autograd.Function):
    """A rank's call with a score function, differentiable in q, k, v and the tensors that the function captures."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RankCall, compared: Compared, *captured: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute (out, lse) and the other tensors that backward needs."""
        # the caller's autocast does not last until backward
        with torch.autocast(q.device.type, enabled=False):
            found = call.forward((q, k, v), compared)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*found[2:])
        ctx.save_for_backward(q, k, v, *found, *savable(captured))
        return found

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        """Compute (dq, dk, dv) and this rank's part of the gradients of the captured tensors."""
        # Read once: under checkpointing each access of saved_tensors may compute forward again.
        every, learns = ctx.saved_tensors, list(ctx.needs_input_grad[5:])
        # Other ranks need this rank's part of their gradients even if its output does not contribute to the loss.
        dout = torch.zeros_like(every[3]) if dout is None else dout
        dq, dk, dv, *sums = _backward_of_function(ctx.call, learns, dout, dlse, *every)
        return dq, dk, dv, None, None, *[grad if one else None for grad, one in zip(sums, learns, strict=True)]


class _BackwardOfFunction(torch.autograd.Function):
    backward = staticmethod(refuse_twice)

    @staticmethod
    def forward(
        ctx: Any, call: RankCall, learns: list[bool], dout: Tensor, dlse: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute the gradients of all tensors as separate outputs."""
        count = len(Saved._fields)
        with torch.autocast(dout.device.type, enabled=False):
            *grads, sums = call.backward(dout, dlse, Saved(*saved[:count]), saved[count:], learns)
        return *grads, *sums


# compiled autograd would trace the tiles
_backward_of_function = untraced(lambda *args: _BackwardOfFunction.apply(*args))  # type: ignore[no-untyped-call]
