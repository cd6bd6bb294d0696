"""The checks of a call, each said as name, got, wanted, remedy; what autocast makes of its tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .errors import ShapeError, UnsupportedError, message, shown
from .ops.backend import Case, Inputs
from .ops.dispatch import names, program
from .patterns import Pattern, check_extents
from .patterns.fit import refuse
from .patterns.parse import of_call
from .patterns.shifted import placed
from .terms import Term, as_terms, threshold_of

if TYPE_CHECKING:
    from .parallel import ContextParallel

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NUMBERS = (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat)
# terms that are made of positions
_OF_DISTANCE = frozenset({"ALiBi", "DistanceBias"})
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


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    scale: float | None,
    q_offset: int | Tensor,
    backend: str,
    k_offset: int | Tensor = 0,
    dropout: float = 0.0,
    terms: object = (),
    context: ContextParallel | None = None,
    hosted: bool = False,
) -> tuple[Pattern, float, int, tuple[Term, ...], float]:
    """Raise a typed error unless the call can run; what to use: pattern, scale, q_offset, terms and dropout."""
    check_tensors(q, k, v, hosted=hosted)
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    pattern = of_call(pattern.bound(q.shape[1], k.shape[1]))
    given, (pattern, q_offset) = pattern, placed(pattern, q_offset, k_offset, q.shape[0])
    if context is not None and pattern is not given:
        got = "a tensor, or a k_offset, with a context"
        raise UnsupportedError(message("q_offset, k_offset", got, "0 with a context", "Decode on one device."))
    dropout = checked_dropout(dropout)
    terms = as_terms(terms)
    if context is not None and not callable(getattr(context, "attend", None)):
        got = type(context).__name__
        raise UnsupportedError(message("context", got, "a ContextParallel or None", "Make one of the mesh."))
    # of the whole sequence where ranks share it
    nq, nk = (q.shape[2], k.shape[2]) if context is None else (context.seq_len, context.seq_len)
    for term in terms:
        term.check(q.shape[0], q.shape[1], nq, nk, q.device)
    asked = extras(terms, dropout)
    if asked & _OF_DISTANCE and "cu_seqlens_q=" in pattern.spec:
        # places on two axes, whose difference is no distance
        got = f"{', '.join(sorted(asked & _OF_DISTANCE))} where queries and keys are packed apart"
        raise UnsupportedError(message("terms", got, "one packing for both", "Pad the queries, or add a Bias."))
    scale = checked_scale(scale, q.shape[3])
    if not isinstance(backend, str):
        raise UnsupportedError(message("backend", shown(backend), f"one of {', '.join(names())}", "Use 'auto'."))
    if not torch.compiler.is_compiling():
        if context is None:
            tables = [table for term in terms for table in term.tables]
            needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tables))
            case = dataclasses.replace(Case.of(Inputs(q, k, v, scale), needs_grad), extras=asked)
            _check_runnable(case, pattern, q_offset, backend)
        else:
            context.check(q, k, pattern, q_offset, backend, asked)
    return pattern, scale, q_offset, terms, dropout


def extras(terms: Sequence[Term], dropout: float) -> frozenset[str]:
    """What a call asks for beyond scale and mask, by name."""
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


def _check_runnable(case: Case, pattern: Pattern, q_offset: int, backend: str) -> None:
    # needs planning, which a trace leaves to the operator; there the same errors come when it runs
    check_extents(pattern, case.batch, case.heads)
    pattern.check(case.nq, case.nk, q_offset)
    if backend != "auto":  # which takes every case
        program(pattern, case, q_offset, backend)
