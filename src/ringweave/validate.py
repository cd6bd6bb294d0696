"""The checks of a call, each said as name, got, wanted, remedy; what autocast makes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .backends.backend import RENAMED
from .call import Arguments, Call, pack
from .errors import ShapeError, UnsupportedError, message, shown
from .kv_cache import PagedCache
from .names import renamed_value
from .patterns import Pattern, check_extents
from .patterns.parse import of_call
from .patterns.shifted import placed
from .patterns.validate import refuse
from .precision import as_precision, store
from .program import compiled, names
from .terms import Term, as_terms, rounded, threshold_of
from .torch_ops import refuse_gradient
from .types import DTYPES

_NUMBERS = (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat)
# room above float32's range for a factor log2(e)
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-37, 1e38


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, hosted: bool = False) -> None:
    """Raise ShapeError unless q, k and v fit each other; ``hosted``: k and v may be on the host, and q on a GPU."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ShapeError(message(name, type(x).__name__, "a tensor", "Pass torch tensors."))
        if x.layout != torch.strided or x.is_nested:
            layout = "nested" if x.is_nested else x.layout
            raise ShapeError(
                message(name, f"a {layout} tensor", "a dense one", "Convert it with .to_dense() or pad it.")
            )
        if x.ndim != 4:
            raise ShapeError(
                message(
                    name,
                    f"shape {tuple(x.shape)}",
                    "(batch, heads, tokens, dim)",
                    "Add or split dimensions to make four.",
                )
            )
        if x.dtype not in DTYPES:
            raise ShapeError(
                message(
                    f"{name}.dtype", x.dtype, "float32, float16, bfloat16 or float64", f"Convert {name} with .to(...)."
                )
            )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ShapeError(message(f"{name}.dtype", x.dtype, f"{q.dtype}, as q", f"Convert with {name}.to(q.dtype)."))
        if x.device != q.device and not (hosted and _on_host(q, k, v)):
            remedy = f"Move it with {name}.to(q.device)."
            if not hosted and _on_host(q, k, v):
                remedy = f"{remedy[:-1]}, or leave k and v there and pass on_oom='stream' to attention()."
            raise ShapeError(message(f"{name}.device", x.device, f"{q.device}, as q", remedy))
        if x.shape[0] != q.shape[0]:
            raise ShapeError(message(f"{name} batch", x.shape[0], f"{q.shape[0]}, as q", "Expand or slice the batch."))
    if k.shape[3] != q.shape[3]:
        raise ShapeError(
            message("k head dim D", k.shape[3], f"{q.shape[3]}, as q", "Project q and k to one dimension.")
        )
    if v.shape[1] != k.shape[1]:
        raise ShapeError(message("v heads", v.shape[1], f"{k.shape[1]}, as k", "Give k and v the same heads."))
    if v.shape[2] != k.shape[2]:
        raise ShapeError(message("v tokens", v.shape[2], f"{k.shape[2]}, as k", "Give k and v the same length."))
    for name, x in (("q", q), ("k", k), ("v", v)):
        for size, what in zip(x.shape, ("batch", "heads", "tokens", "head dim"), strict=True):
            if size == 0:
                raise ShapeError(message(f"{name} {what}", 0, "at least 1", f"Skip the call when {what} is empty."))
    if q.shape[1] % k.shape[1]:
        raise ShapeError(
            message("k heads", k.shape[1], f"a divisor of the {q.shape[1]} query heads", "Repeat or drop key heads.")
        )


# where a copy beside the computing is known; tensors of meta have shapes alone
_STREAMED = frozenset({"cuda", "meta"})


def _on_host(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tell whether keys and values are on the host, and queries on what they could be streamed to."""
    return k.device.type == v.device.type == "cpu" and q.device.type in _STREAMED


# asked once: what torch 2.11 compiles cannot ask
_AUTOCAST = frozenset(
    device
    for device in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", torch.device("privateuseone").type)
    if torch.amp.is_autocast_available(device)
)


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast inputs to autocast's dtype where it is on, as for PyTorch's own attention."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return list(tensors)
    device = tensors[0].device.type
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


class Checked(NamedTuple):
    """A call whose arguments fit, and its tensors.

    Attributes:
        call: The call.
        q: Queries, as they are computed with.
        k: Keys.
        v: Values.
        tensors: The others, in the order of ``call.pack``.
        terms: The score terms.
    """

    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    tensors: list[Tensor]
    terms: tuple[Term, ...]


def checked(given: Arguments) -> Checked:
    """Check the arguments of a call; ``precision`` is applied before (see :func:`converted`).

    Raises:
        ShapeError: Shapes, dtypes or devices do not fit; the message names the argument.
        PatternError: The pattern is made for other lengths, heads or batch.
        UnsupportedError: The named backend cannot run the case.
    """
    q, k, v, pattern, context = given.q, given.k, given.v, given.pattern, given.context
    backend = renamed_value("backend", given.backend, RENAMED)
    check_tensors(q, k, v, hosted=given.on_oom == "stream")
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    bound = of_call(pattern.bound(q.shape[1], k.shape[1]))
    pattern, q_offset = placed(bound, given.q_offset, given.k_offset, q.shape[0])
    if context is not None and pattern is not bound:
        got = "a tensor, or a k_offset, with a context"
        raise UnsupportedError(message("q_offset, k_offset", got, "0 with a context", "Decode on one device."))
    dropout = checked_dropout(given.dropout)
    terms = as_terms(given.terms)
    if context is not None and not callable(getattr(context, "attend", None)):
        got = type(context).__name__
        raise UnsupportedError(message("context", got, "a ContextParallel or None", "Make one of the mesh."))
    # of the whole sequence where ranks share it
    nq, nk = (q.shape[2], k.shape[2]) if context is None else (context.seq_len, context.seq_len)
    check_terms(terms, dropout, pattern, (q.shape[0], q.shape[1], nq, nk), q.device)
    scale = checked_scale(given.scale, q.shape[3])
    if not isinstance(backend, str):
        raise UnsupportedError(message("backend", shown(backend), f"one of {', '.join(names())}", "Use 'auto'."))
    tables = [table for term in terms for table in term.tables]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tables))
    call = Call.of(
        q, k, v, pattern, scale=scale, q_offset=q_offset, backend=backend, needs_grad=needs_grad,
        features=features(terms, dropout), dropout=threshold_of(dropout), on_oom=given.on_oom,
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        if context is None:
            _check_runnable(call)
        else:
            context.check(q, k, pattern, q_offset, backend, call.features)
    if given.sink_logits is not None:
        check_sinks(given.sink_logits, q)
    policy = as_precision(given.precision)
    if policy.table is not None:
        terms = tuple(rounded(term, policy.table) for term in terms)
    if context is not None and policy.wire not in ("native", context.options.wire):
        got = f"{policy.wire!r} of a context whose wire is {context.options.wire!r}"
        raise UnsupportedError(message("precision.wire", got, "that of the context", "Make it with this policy."))
    more: tuple[Tensor, ...] = ()
    if policy.kv is not None:
        _check_stored(given, policy.kv, terms)
        (k, of_k), (v, of_v) = store(k, policy.kv), store(v, policy.kv)
        more = of_k, of_v
    text, tensors = pack(pattern, terms, call.dropout, *more)
    # forward runs where a table's gradient is refused
    learned = sum(x.numel() for term in terms if (x := term.learned) is not None and needs_grad and x.requires_grad)
    return Checked(replace(call, terms=text, kv_dtype=policy.kv, learned=learned), q, k, v, tensors, terms)


def _check_stored(given: Arguments, dtype: torch.dtype, terms: Sequence[Term]) -> None:
    """Raise UnsupportedError for what keys and values in 8 bits do not go with."""
    for name, there in (("context", given.context is not None), ("dropout", bool(given.dropout))):
        if there:
            remedy = "Leave it out: what travels is the wire's, and storing is for inference."
            raise UnsupportedError(message("precision.kv", f"{dtype} with {name}", f"no {name}", remedy))
    learned = [x for term in terms for x in term.tables] + [x for x in (given.sink_logits,) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (given.q, given.k, given.v, *learned)):
        refuse_gradient("precision.kv")


def check_terms(
    terms: Sequence[Term],
    dropout: float,
    pattern: Pattern,
    sizes: tuple[int, int, int, int],
    device: torch.device,
) -> None:
    """Raise unless terms fit a call of (batch, heads, queries, keys)."""
    for term in terms:
        term.check(*sizes, device)
    of_distance = "cu_seqlens_q=" in pattern.spec and {type(term).__name__ for term in terms if term.distances}
    if of_distance:
        # places on two axes, whose difference is no distance
        got = f"{', '.join(sorted(of_distance))} where queries and keys are packed apart"
        raise UnsupportedError(message("terms", got, "one packing for both", "Pad the queries, or add a Bias."))


def converted(given: Arguments) -> tuple[Arguments, torch.dtype | None]:
    """Convert q, k and v as autocast and ``precision.compute`` say; the type of the output, where that is another."""
    q, k, v = autocast(given.q, given.k, given.v)
    compute = as_precision(given.precision).compute
    if compute is None:
        return given._replace(q=q, k=k, v=v), None
    check_tensors(q, k, v, hosted=given.on_oom == "stream")
    return given._replace(q=q.to(compute), k=k.to(compute), v=v.to(compute)), q.dtype


def paged(given: Arguments, cache: PagedCache) -> Checked:
    """Check the arguments of a call over a cache in pages; ``given`` has the cache's k and v.

    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
        PatternError: The pattern is no relation.
        UnsupportedError: A gradient is asked for, or an unknown backend.
    """
    q, pattern, backend = given.q, given.pattern, renamed_value("backend", given.backend, RENAMED)
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    k, v = cache.k, cache.v
    heads = k.shape[1]
    fits = isinstance(q, Tensor) and q.ndim == 4 and q.shape[0] == len(cache.table) and q.shape[3] == k.shape[3]
    if not fits or q.shape[1] % heads or 0 in q.shape:
        wanted = f"({len(cache.table)}, a multiple of {heads}, tokens, {k.shape[3]})"
        raise ShapeError(message("q", shown(q), wanted, "Give each sequence of the cache its queries."))
    if q.dtype not in ((k.dtype,) if cache.scales is None else DTYPES) or q.device != k.device:
        got, dtype = f"{q.dtype} on {q.device}", k.dtype if cache.scales is None else "a floating type"
        raise ShapeError(message("q", got, f"{dtype} on {k.device}, as the cache", "Convert it with .to(...)."))
    terms = () if given.terms is None else as_terms(given.terms)
    for term in terms:
        term.check(q.shape[0], q.shape[1], q.shape[2], cache.table.shape[1] * cache.page, q.device)
    if given.sink_logits is not None:
        check_sinks(given.sink_logits, q)
    learned = [x for term in terms for x in term.tables] + [x for x in (given.sink_logits,) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *learned)):
        refuse_gradient("paged_attention")
    if not isinstance(backend, str) or backend not in names():
        raise UnsupportedError(message("backend", shown(backend), f"one of {', '.join(names())}", "Use 'auto'."))
    scale = checked_scale(given.scale, q.shape[3])
    text, tensors = pack(of_call(pattern), terms, 0, cache.table, cache.lengths, *(cache.scales or ()))
    call = Call.of(
        q, k, v, of_call(pattern), page_table=cache.table, scale=scale, backend=backend, terms=text,
        features=features(terms, 0.0), kv_dtype=None if cache.scales is None else k.dtype,
    )  # fmt: skip
    return Checked(call, q, k, v, tensors, terms)


def features(terms: Sequence[Term], dropout: float) -> frozenset[str]:
    """Name what a call asks for beyond scale and mask."""
    return frozenset([type(term).__name__ for term in terms] + ["dropout"] * bool(dropout))


def check_sinks(sink_logits: Tensor, q: Tensor) -> None:
    """Raise ShapeError unless there is a logit for each query head of q."""
    fits = isinstance(sink_logits, Tensor) and sink_logits.is_floating_point() and sink_logits.ndim == 1
    if not fits or sink_logits.shape[0] != q.shape[1]:
        wanted = f"a floating tensor ({q.shape[1]},): one for each query head"
        raise ShapeError(message("sink_logits", shown(sink_logits), wanted, "Pass the learned logits."))
    if sink_logits.device != q.device:
        remedy = "Move them with .to(q.device)."
        raise ShapeError(message("sink_logits.device", sink_logits.device, f"{q.device}, as q", remedy))


def checked_scale(scale: float | None, dim: int) -> float:
    """The factor of the scores, 1 / sqrt(dim) by default; ShapeError for what is none."""
    if scale is None:
        return 1.0 / math.sqrt(dim)
    if isinstance(scale, Tensor):
        # a number of it would be a constant to autograd, without a word
        remedy = "Multiply q by it and pass scale=1.0: its gradient comes that way."
        raise ShapeError(message("scale", f"a tensor of shape {tuple(scale.shape)}", "a number", remedy))
    if isinstance(scale, bool) or not isinstance(scale, _NUMBERS):
        raise ShapeError(message("scale", shown(scale), "a number", "Leave it out for 1 / sqrt(D)."))
    # a number of few bits would be compared in its own type
    scale = scale.item() if isinstance(scale, np.generic) else scale
    if scale != 0 and not _SMALLEST_SCALE <= abs(scale) <= _LARGEST_SCALE:
        wanted = f"a finite number of float32: 0, or {_SMALLEST_SCALE:g} to {_LARGEST_SCALE:g} of either sign"
        raise ShapeError(message("scale", shown(scale), wanted, "Leave it out for 1 / sqrt(D)."))
    return scale if isinstance(scale, (float, torch.SymFloat)) else float(scale)


def checked_dropout(dropout: float) -> float:
    """The share of weights to drop, as a float; ShapeError for what is none."""
    number = isinstance(dropout, _NUMBERS) and not isinstance(dropout, bool)
    if not number or not 0 <= dropout < 1:
        raise ShapeError(message("dropout", shown(dropout), "a number of at least 0 and below 1", "Leave it out."))
    threshold_of(float(dropout))
    return float(dropout)


def _check_runnable(call: Call) -> None:
    # needs planning, which a trace leaves to the operator; there the same errors come when it runs
    check_extents(call.pattern, call.batch, call.heads)
    call.pattern.check(call.nq, call.nk, call.q_offset)
    if call.backend != "auto":  # which takes every case
        compiled(call)
