"""Checks of a call's arguments, with errors of the form name, got, wanted, remedy; conversion by autocast.

Arguments that look like a mistake, and are not one for certain, are warned about once in a process.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .axes import Axes
from .cache import process_cache
from .call import Arguments, Call, pack
from .checks import check_context
from .errors import ShapeError, UnsupportedError, shown
from .patterns import Pattern, check_extents
from .patterns.alignment import END, ends_at_query, first_query, padded_keys
from .patterns.base import parts_of
from .patterns.batch_axis import Packing
from .patterns.fitting import refuse
from .patterns.global_tokens import check_places
from .patterns.lists import check_rows
from .patterns.shifted import with_offsets
from .precision import as_precision, quantize_rows
from .program import check_name, compiled
from .terms import Term
from .terms.dropout import threshold_of
from .terms.term import as_terms, rounded, written
from .torch_compat import AUTOCAST
from .torch_ops import refuse_gradient
from .types import DTYPES, FIRST_POSITION, Place

if TYPE_CHECKING:
    from .kv_cache import PagedCache

_NUMBERS = (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat)
ON_OOM = ("raise", "degrade", "stream", "sparsify")
_PACKAGE = str(Path(__file__).parent)
_INPUTS = Axes("q: float[B Hq Nq D]; k: q[B Hkv Nk D]; v: q[B Hkv Nk Dv]; Hq % Hkv")
_OVER_PAGES = Axes("q: dtype[B Hq Nq D]; Hq % Hkv")
_SINKS = Axes("sink_logits: floating[Hq]")
# the axes that may be empty in calls that allow it
_SIZES = ("B", "Hq", "Hkv", "Nq", "Nk")
# remedies for queries with other numbers of axes
_GRID = "Flatten the tokens to one dimension, or call neighborhood_attention for a grid."
_OTHER_RANKS = {3: "Pass q[None] for a batch of one; packed sequences are for varlen_attention.", 5: _GRID, 6: _GRID}
# Kernels multiply the scale by log2(e): the bounds leave room for that in float32.
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-37, 1e38


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, hosted: bool = False, empty: bool = False) -> None:
    """Raise ShapeError unless q, k and v fit each other.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        hosted: Whether k and v may be on the host and q on a GPU.
        empty: Whether there may be no batch element, head or token.
    """
    remedy = _OTHER_RANKS.get(q.ndim, "") if isinstance(q, Tensor) else ""
    _INPUTS.fit(q=q, k=k, v=v, anywhere=True, empty=_SIZES if empty else (), remedy=remedy)
    if not q.device == k.device == v.device:
        _check_devices(q, k, v, hosted)


# devices whose copies can overlap with computation; meta is for calls on shapes
_STREAMED = frozenset({"cuda", "meta"})


def _check_devices(q: Tensor, k: Tensor, v: Tensor, hosted: bool) -> None:
    """Raise ShapeError unless k and v are on the host, from which they may be streamed to the device of q."""
    on_host = k.device.type == v.device.type == "cpu" and q.device.type in _STREAMED
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device and not (hosted and on_host):
            remedy = f"Move it with {name}.to(q.device)."
            if on_host:
                remedy = f"{remedy[:-1]}, or leave k and v there and pass on_oom='stream' to attention()."
            raise ShapeError(f"{name}.device", x.device, f"{q.device}, as q", remedy)
    # imported for keys and values on the host
    from .plugins import host_program

    host_program()


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast inputs to autocast's dtype if it is enabled, as PyTorch's own attention does."""
    for x in tensors:
        if not isinstance(x, Tensor):
            return list(tensors)
    device = tensors[0].device.type
    if device not in AUTOCAST or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


class Checked(NamedTuple):
    """A checked call and its tensors.

    Attributes:
        call: The call.
        q: Queries, in the type that is computed with.
        k: Keys, in 8 bits if the call stores them so.
        v: Values, in 8 bits if the call stores them so.
        tensors: The other tensors, in the order of ``call.pack``.
        terms: The score terms.
    """

    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    tensors: list[Tensor]
    terms: tuple[Term, ...]


def checked(given: Arguments) -> Checked:
    """Check the arguments of a call whose tensors are :func:`converted` already.

    Raises:
        ShapeError: Shapes, dtypes or devices do not fit; the message names the argument.
        PatternError: The pattern is made for other lengths, heads or batch sizes.
        UnsupportedError: The named backend cannot run the case.
    """
    q, k, v, context = given.q, given.k, given.v, given.context
    check_tensors(q, k, v, hosted=given.on_oom == "stream")
    bound, pattern, q_offset = positions(given)
    terms, dropout = _terms(given, pattern)
    scale = checked_scale(given.scale, q.shape[3])
    check_name(given.backend)
    tables = [table for term in terms for table in term.tables]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tables))
    call = Call.of(
        q, k, v, pattern, scale=scale, q_offset=q_offset, backend=given.backend, needs_grad=needs_grad,
        terms=written(terms)[0], dropout=threshold_of(dropout), on_oom=given.on_oom,
    )  # fmt: skip
    # These checks may plan, so a trace skips them: the operator raises the same errors when it runs.
    if not torch.compiler.is_compiling():
        if context is not None:
            context.check(call, q, k)
        else:
            _check_runnable(call)
            _warn_of_mistakes(given, bound)
    if given.sink_logits is not None:
        check_sinks(given.sink_logits, q)
    return _with_precision(given, call, terms)


def positions(given: Arguments) -> tuple[Pattern, Pattern, int]:
    """Return the pattern bound to the call's heads, the same with tensor offsets, and the first query's position."""
    q, k, pattern = given.q, given.k, given.pattern
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    bound = pattern.bound(q.shape[1], k.shape[1])._for_call()
    whole = getattr(given.context, "seq_len", None)
    if bound.has_function and isinstance(whole, int):
        bound = _recognised(bound, q, whole, whole)
    asked = 0 if given.q_offset is FIRST_POSITION else given.q_offset
    first = first_query(bound, asked, given.k_offset, batch=q.shape[0], nq=q.shape[2], nk=k.shape[2])
    if given.context is None:
        check_rows(bound, q.shape[2])
        if type(first) is type(given.k_offset) is int and first == given.k_offset == 0:
            check_places(bound, max(q.shape[2], k.shape[2]))
    pattern = bound
    if (
        bound.has_function
        and given.context is None
        and type(first) is type(given.k_offset) is int
        and not given.k_offset
    ):
        pattern = _recognised(bound, q, q.shape[2], k.shape[2], first)
    pattern, q_offset = with_offsets(pattern, first, given.k_offset, q.shape[0])
    if given.context is not None and (pattern is not bound or isinstance(given.q_offset, str)):
        got = "'end', a tensor, or a k_offset, with a context"
        raise UnsupportedError("q_offset, k_offset", got, "0 with a context", "Decode on one device.")
    return bound, pattern, q_offset


def _recognised(pattern: Pattern, q: Tensor, nq: int, nk: int, first: int = 0) -> Pattern:
    return pattern._recognised(Place(q.shape[0], q.shape[1], nq, nk, first))


def _terms(given: Arguments, pattern: Pattern) -> tuple[tuple[Term, ...], float]:
    """Return the score terms and the share of dropped weights."""
    q = given.q
    dropout = checked_dropout(given.dropout)
    terms = as_terms(given.terms)
    check_terms(terms, dropout, pattern, (q.shape[0], q.shape[1], *lengths(given)), q.device)
    return terms, dropout


def lengths(given: Arguments) -> tuple[int, int]:
    """Return (queries, keys) of the whole sequence, also if ranks share it.

    Raises:
        UnsupportedError: The context is not a context.
    """
    context = given.context
    if context is None:
        return given.q.shape[2], given.k.shape[2]
    check_context(context)
    return context.seq_len, context.seq_len


def _with_precision(given: Arguments, call: Call, terms: tuple[Term, ...]) -> Checked:
    """Round the terms' tables, store keys and values in 8 bits, and pack the tensors, as the policy says."""
    k, v, context, policy = given.k, given.v, given.context, as_precision(given.precision)
    if policy.table is not None:
        terms = tuple(rounded(term, policy.table) for term in terms)
    if context is not None and policy.wire not in ("native", context.options.wire):
        got = f"{policy.wire!r} of a context whose wire is {context.options.wire!r}"
        raise UnsupportedError("precision.wire", got, "the wire of the context", "Make the context with this policy.")
    more: tuple[Tensor, ...] = ()
    if policy.kv is not None:
        _check_stored(given, policy.kv, terms)
        (k, of_k), (v, of_v) = quantize_rows(k, policy.kv), quantize_rows(v, policy.kv)
        more = of_k, of_v
    tensors = pack(call.pattern, terms, call.dropout, *more)
    # Set after the checks, so that forward runs even on a named backend that refuses the gradient of a table.
    learned = sum(x.numel() for term in terms for x in term.learned if call.needs_grad and x.requires_grad)
    # torch.compile traces replace() field by field, in each layer
    if policy.kv is not None or learned or policy.summation_order != call.summation_order:
        call = replace(call, kv_dtype=policy.kv, summation_order=policy.summation_order, learned=learned)
    return Checked(call, given.q, k, v, tensors, terms)


def _check_stored(given: Arguments, dtype: torch.dtype, terms: Sequence[Term]) -> None:
    """Raise UnsupportedError if keys and values in 8 bits cannot be combined with the other arguments."""
    for name, given_too in (("context", given.context is not None), ("dropout", bool(given.dropout))):
        if given_too:
            remedy = f"Leave out {name} or kv: storage in 8 bits is for inference on one device."
            raise UnsupportedError("precision.kv", f"{dtype} with {name}", f"no {name}", remedy)
    tensors = [x for x in given if isinstance(x, Tensor)] + [table for term in terms for table in term.tables]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        refuse_gradient("precision.kv")


def check_terms(
    terms: Sequence[Term],
    dropout: float,
    pattern: Pattern,
    sizes: tuple[int, int, int, int],
    device: torch.device,
) -> None:
    """Raise an error unless the terms fit a call of sizes (batch, heads, queries, keys)."""
    for term in terms:
        term.check(*sizes, device)
    if any(term.distances for term in terms) and pattern.tables:
        positioned = sorted({type(term).__name__ for term in terms if term.distances or term.places})
        check_distances(", ".join(positioned), pattern, by_index=any(term.places for term in terms))


def check_distances(names: str, pattern: Pattern, *, by_index: bool) -> None:
    """Raise UnsupportedError if the difference of two positions is not a distance of tokens.

    Args:
        names: Names of the terms, for messages.
        pattern: The pattern of the call.
        by_index: Whether they need the indices of queries too. Queries that are packed apart from keys have positions
            that are not their indices.
    """
    # imported where a pattern may contain a tree
    from .patterns.tree import Tree

    packings = parts_of(pattern, Packing)  # type: ignore[type-abstract]
    if apart := [each for each in packings if each._packed_apart]:
        got = f"{names} where queries and keys are packed apart"
        if by_index:
            remedy = "Pass an ALiBi or DistanceBias without a Bias and without a function, or pad the queries."
            raise UnsupportedError("terms", got, "one packing for both, or terms that only count distances", remedy)
        if len(apart) > 1 or not pattern._packed_apart:
            # other parts count positions in the whole sequence, or in other documents
            remedy = "Write all of it as pattern.within(documents)."
            raise UnsupportedError("terms", f"{got}, with {pattern}", "a pattern inside the documents", remedy)
    if trees := parts_of(pattern, Tree):
        got = f"{names} with {trees[0]!r}, on which tokens that follow each other on a path are apart"
        wanted = "terms that count no distances"
        remedy = "Add a Bias of the distances of tree.positions(), or give each path a row."
        raise UnsupportedError("terms", got, wanted, remedy)


def converted(given: Arguments) -> tuple[Arguments, torch.dtype | None]:
    """Convert q, k and v to the dtype of autocast or ``precision.compute``.

    Returns:
        (arguments, dtype): the arguments with converted tensors, and the dtype of the output if it differs from theirs.
    """
    q, k, v = autocast(given.q, given.k, given.v)
    compute = as_precision(given.precision).compute
    if compute is None:
        same = q is given.q and k is given.k and v is given.v
        return given if same else given._replace(q=q, k=k, v=v), None
    check_tensors(q, k, v, hosted=given.on_oom == "stream")
    return given._replace(q=q.to(compute), k=k.to(compute), v=v.to(compute)), q.dtype


def paged(given: Arguments, cache: PagedCache) -> Checked:
    """Check the arguments of a call over a paged cache; ``given`` has the cache's k and v.

    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
        PatternError: The pattern is not a relation.
        UnsupportedError: An input requires gradients, or the backend is unknown.
    """
    q, pattern, backend = given.q, given.pattern, given.backend
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    cache.check()
    k, v = cache.k, cache.v
    heads, dtype = k.shape[1], k.dtype if cache.scales is None else DTYPES
    remedy = "Pass queries for every sequence of the cache."
    _OVER_PAGES.fit(q=q, B=len(cache.table), Hkv=heads, D=k.shape[3], dtype=dtype, device=k.device, remedy=remedy)
    terms = () if given.terms is None else as_terms(given.terms)
    for term in terms:
        term.check(q.shape[0], q.shape[1], q.shape[2], cache.table.shape[1] * cache.page, q.device)
    if given.sink_logits is not None:
        check_sinks(given.sink_logits, q)
    learned = [x for term in terms for x in term.tables] + [x for x in (given.sink_logits,) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *learned)):
        refuse_gradient("paged_attention")
    check_name(backend)
    scale = checked_scale(given.scale, q.shape[3])
    pattern = pattern.bound(q.shape[1], heads)
    check_rows(pattern, q.shape[2])
    pattern = pattern._for_call()
    if pattern.has_function:
        # the last key for which the pages have room; a step is one row, in which nothing is recognised
        last = cache.table.shape[1] * cache.page
        pattern = _recognised(pattern, q, 1, last, last - 1)
    tensors = pack(pattern, terms, 0, cache.table, cache.lengths, *(cache.scales or ()))
    call = Call.of(q, k, v, pattern, page_table=cache.table, scale=scale, backend=backend, terms=written(terms)[0])
    return Checked(call, q, k, v, tensors, terms)


def check_sinks(sink_logits: Tensor, q: Tensor) -> None:
    """Raise ShapeError unless ``sink_logits`` has one logit for each query head of q."""
    remedy = "Pass the learned logits, one for each query head, not tokens: those are the pattern Sinks."
    _SINKS.fit(sink_logits=sink_logits, Hq=q.shape[1], device=q.device, remedy=remedy)


def checked_scale(scale: float | None, dim: int, name: str = "scale") -> float:
    """Return the factor of the scores, 1 / sqrt(dim) for None; raise ShapeError if it is not a finite number."""
    if scale is None:
        return 1.0 / math.sqrt(dim)
    if isinstance(scale, Tensor):
        # Reading the number would silently cut its gradient.
        remedy = f"Multiply q by it and pass {name}=1.0: the gradient then reaches it."
        raise ShapeError(name, f"a tensor of shape {tuple(scale.shape)}", "a number", remedy)
    if isinstance(scale, bool) or not isinstance(scale, _NUMBERS):
        raise ShapeError(name, shown(scale), "a number", "Leave it out for 1 / sqrt(D).")
    # A numpy number is compared in its own type, where the bounds may overflow.
    scale = scale.item() if isinstance(scale, np.generic) else scale
    if scale != 0 and not _SMALLEST_SCALE <= abs(scale) <= _LARGEST_SCALE:
        wanted = f"a finite number of float32: 0, or {_SMALLEST_SCALE:g} to {_LARGEST_SCALE:g} of either sign"
        raise ShapeError(name, shown(scale), wanted, "Leave it out for 1 / sqrt(D).")
    return scale if isinstance(scale, (float, torch.SymFloat)) else float(scale)


def checked_dropout(dropout: float, name: str = "dropout") -> float:
    """Return the share of weights to drop as a float; raise ShapeError if it is not in [0, 1)."""
    number = isinstance(dropout, _NUMBERS) and not isinstance(dropout, bool)
    if not number or not 0 <= dropout < 1:
        raise ShapeError(name, shown(dropout), "a number of at least 0 and below 1", "Leave it out.")
    threshold_of(float(dropout))
    return float(dropout)


def check_on_oom(on_oom: object, context: object = None, sharded: bool = False) -> None:
    """Raise UnsupportedError unless ``on_oom`` is a known policy that the call supports.

    Args:
        on_oom: The policy.
        context: The context if ranks share the call.
        sharded: Whether the inputs are DTensors.
    """
    if not isinstance(on_oom, str) or on_oom not in ON_OOM:
        wanted = f"one of {', '.join(ON_OOM)}"
        raise UnsupportedError("on_oom", shown(on_oom), wanted, "Use 'degrade': it changes no result.")
    if on_oom == "stream" and (context is not None or sharded):
        got = "'stream' where ranks share the call"
        remedy = "Leave it out: ranks keep their shards on their devices."
        raise UnsupportedError("on_oom", got, "'raise' or 'degrade'", remedy)
    if on_oom == "sparsify" and (context is not None or sharded or torch.compiler.is_compiling()):
        got = "'sparsify' where ranks share the call, or under torch.compile"
        remedy = "Use 'degrade', or a sparser pattern from the start."
        raise UnsupportedError("on_oom", got, "'raise' or 'degrade'", remedy)


def _check_runnable(call: Call) -> None:
    check_extents(call.pattern, call.batch, call.heads)
    call.pattern.check(call.nq, call.nk, call.q_offset)
    # auto has a backend for every call
    if call.backend != "auto":
        compiled(call)


# ---- mistakes that are not certain -----------------------------------------------------------------------------------

# No published model has as many key heads; tokens in their place are often more.
_MANY_HEADS = 256
_AT_FIRST = (
    "q_offset: got 0 by default, with fewer queries than keys and a causal pattern, so the last keys are never "
    f"attended; wanted the position of the first query. Pass q_offset={END!r} if the queries are the last tokens, or "
    "q_offset=0 if they are the first."
)
_TOKENS_FIRST = (
    "q, k, v: got more heads than tokens; wanted (batch, heads, tokens, dim). If they are (batch, tokens, heads, dim), "
    "pass q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2)."
)


def _warn_of_mistakes(given: Arguments, pattern: Pattern) -> None:
    """Warn of decoding at the first position, and of tensors that look like (B, N, H, D)."""
    nq, (heads, nk) = given.q.shape[2], given.k.shape[1:3]
    if given.q_offset is FIRST_POSITION and nq < nk and ends_at_query(pattern):
        padding = padded_keys(pattern)
        # Bounds in tensors are not read. Keys after the end of the padding do not exist, so none of them is missed.
        if padding is None or (isinstance(padding[1], int) and nq < padding[1]):
            _warn_once(_AT_FIRST)
    # a pattern that is made for this number of heads confirms it
    if heads >= max(_MANY_HEADS, 8 * nk) and pattern.extents()[1] is None:
        _warn_once(_TOKENS_FIRST)


@process_cache
def _warn_once(text: str) -> None:
    """Issue a UserWarning at the first caller outside of the package, once in a process."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, level)
