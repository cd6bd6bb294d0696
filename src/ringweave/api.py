"""The attention functions: they look up or check a call and pass it to its program or to the operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar

import torch
from torch import Tensor

from .call import Arguments, Operands, pack
from .checks import flag
from .errors import PatternError, ShapeError, UnsupportedError, shown
from .merge import merge, with_sinks
from .patterns import Causal, Full, Pattern
from .precision import Precision
from .program_cache import find, keep
from .terms import Term
from .terms.term import ScoreMod, as_listed, as_terms, has_functions
from .torch_compat import uncompiled
from .torch_ops import attend, run
from .types import FIRST_POSITION, AttentionOutput, Pages
from .validate import check_on_oom, check_sinks, checked, converted, paged

if TYPE_CHECKING:
    from .kv_cache import PagedCache
    from .parallel import ContextParallel
    from .patterns import Grid

F = TypeVar("F", bound=Callable[..., Any])


def _public(function: F) -> F:
    """Let a function recognise a ``q_offset`` that was not passed, and hide ``**unknown`` from its signature.

    The function itself is returned: a wrapper would cost each call, and would be traced by torch.compile.
    """
    defaults = function.__kwdefaults__
    assert defaults is not None
    defaults["q_offset"] = FIRST_POSITION
    signature = inspect.signature(function)
    listed = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return function


@_public
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern = Full(),  # noqa: B008  (immutable)
    *,
    scale: float | None = None,
    q_offset: int | Tensor | Literal["end"] = 0,
    k_offset: int | Tensor = 0,
    backend: str = "auto",
    context: ContextParallel | None = None,
    terms: Term | ScoreMod | Sequence[Term | ScoreMod] | None = (),
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    precision: Precision | None = None,
    on_oom: str = "degrade",
    **unknown: Never,
) -> Tensor:
    """Compute exact attention over the pairs that a pattern allows, differentiable in q, k and v.

    ``out[i] = sum_j softmax_j(scale * <q[i], k[j]>) v[j]`` over the allowed j. A row that attends nothing gives 0. Cost
    and memory grow with the pattern's non-empty tiles.

    Args:
        q: Queries, (B, Hq, Nq, D), float32, float16 or bfloat16 (float64: reference, dense_batched, sdpa), any
            strides.
        k: Keys, (B, Hkv, Nk, D), dtype and device of q; Hkv divides Hq (grouped queries).
        v: Values, (B, Hkv, Nk, Dv).
        pattern: Pattern that says which (head, query, key) triples may attend.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        q_offset: Position of the first query: an int, an integer tensor () or (B,), or ``"end"``. Queries are then the
            last tokens, as in a decode step over a cache: the position is k_offset + Nk - Nq, or stop - Nq for each
            batch element of a ``KeyPadding``. A tensor is read when the plan is made, so a changed value recompiles
            nothing.
        k_offset: Position of the first key, an int or an integer tensor () or (B,): the number of keys that a cache has
            dropped. Patterns, terms and the bounds of ``KeyPadding`` count positions, so they do not move with it.
        backend: ``"auto"`` or the name of a backend; see :func:`ringweave.explain`.
        context: Ranks that share the sequence; q, k, v and the output are then this rank's shards.
        terms: Score terms, applied in order to the scaled scores: Softcap, ALiBi, DistanceBias, Bias, or a function
            ``score_mod(score, b, h, q, k)`` as FlexAttention's, of 0-dim tensors: b and h are indices, q and k
            positions. A function that is score terms runs as these, and ``torch.where(allowed, score, -inf)`` around
            them narrows the pattern. Any other function is computed in tiles with torch, which is slower;
            :func:`ringweave.explain` tells which. Gradients reach every tensor that it captures. It is read at each
            call, so it may be new in each. Functions are for tensors on the CPU.
        sink_logits: (Hq,), one learned logit per head that joins the denominator and has no value.
        dropout: Share of the weights that are dropped after the softmax, rounded to a multiple of 2 ** -16; the others
            grow by 1 / (1 - dropout). Each call draws a seed from torch's default generator. Pass it in training only.
        precision: Dtypes that inputs and intermediates are rounded to, such as ``Precision(kv=torch.int8)``; None
            rounds nothing beyond the dtypes of the inputs.
        on_oom: Action when memory runs out. ``"degrade"`` computes the same result in pieces, forward and backward, and
            logs the cost. ``"stream"`` degrades too, and lets k and v be on the host while q is on a GPU: the attended
            keys are copied in pieces, and their gradients are made on the host. ``"raise"`` raises. ``"sparsify"``
            degrades, then leaves out far keys with a warning, which changes the result. With a context every choice
            raises.
    Returns:
        Output, (B, Hq, Nq, Dv), dtype of q.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit; the message names the argument.
        PatternError: The pattern is made for other lengths, heads or batch sizes.
        UnsupportedError: The named backend cannot run the case; or a function of ``terms`` has effects, or is not score
            terms and is combined with another precision than ``compute``, with a transform of ``torch.func``, or with a
            context if it has no graph that ranks can compare.
        RingError: With a context, a rank is lost or the ranks' calls differ.
    Example:
        >>> rw.attention(q, k, v, (rw.SlidingWindow(64) | rw.Sinks(4)) & rw.Causal()).shape
        torch.Size([1, 4, 256, 32])

        Gradients reach the tensors that a function among the terms captures:

        >>> factors = torch.ones(4, requires_grad=True)
        >>> score_mod = lambda score, b, h, i, j: score * factors[h] - 0.1 * (i - j).abs()
        >>> rw.attention(q, k, v, rw.Causal(), terms=score_mod).sum().backward()
        >>> factors.grad.shape
        torch.Size([4])

    References:
        Dao et al. (2022), FlashAttention, section 3 (tiling and recomputation); here over non-empty tiles only.
    """
    if unknown:
        from .foreign_arguments import refuse_unknown

        refuse_unknown("attention", unknown)
    given = Arguments(
        q, k, v, pattern, scale, q_offset, backend, k_offset, context, terms, sink_logits, dropout, precision, on_oom
    )
    return _attend(given, with_lse=False)[0]


@_public
def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern = Full(),  # noqa: B008  (immutable)
    *,
    scale: float | None = None,
    q_offset: int | Tensor | Literal["end"] = 0,
    k_offset: int | Tensor = 0,
    backend: str = "auto",
    context: ContextParallel | None = None,
    terms: Term | ScoreMod | Sequence[Term | ScoreMod] | None = (),
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    precision: Precision | None = None,
    on_oom: str = "degrade",
    **unknown: Never,
) -> AttentionOutput:
    """Compute attention and the log-sum-exp of each row, both differentiable; :func:`ringweave.merge` takes them.

    ``lse[i] = log sum_j exp(scale * <q[i], k[j]>)`` over the allowed j, and -inf for a row that attends nothing. The
    arguments are those of :func:`ringweave.attention`.

    Args:
        q: Queries, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D).
        v: Values, (B, Hkv, Nk, Dv).
        pattern: Pattern that says which (head, query, key) triples may attend.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        q_offset: Position of the first query, or ``"end"``.
        k_offset: Position of the first key.
        backend: ``"auto"`` or the name of a backend.
        context: Ranks that share the sequence.
        terms: Score terms and functions of scores, applied in order to the scaled scores.
        sink_logits: (Hq,), one learned logit per head; lse includes it.
        dropout: Share of the weights that are dropped; lse does not depend on it.
        precision: Dtypes that inputs and intermediates are rounded to.
        on_oom: ``"degrade"``, ``"stream"``, ``"raise"`` or ``"sparsify"``.
    Returns:
        ``AttentionOutput(out, lse)``: (B, Hq, Nq, Dv) in q's dtype and (B, Hq, Nq) in float32 (float64 for float64).
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
        PatternError: The pattern does not fit the call.
        UnsupportedError: The named backend cannot run the case.
    Example:
        >>> out, lse = rw.attention_with_lse(q, k, v, rw.Causal())
        >>> torch.testing.assert_close(lse[..., 0], (q[:, :, 0] * k[:, :, 0]).sum(-1) / 32**0.5)
    """
    if unknown:
        from .foreign_arguments import refuse_unknown

        refuse_unknown("attention_with_lse", unknown)
    given = Arguments(
        q, k, v, pattern, scale, q_offset, backend, k_offset, context, terms, sink_logits, dropout, precision, on_oom
    )
    return AttentionOutput(*_attend(given))


def _with_sinks(given: Arguments, out: Tensor, lse: Any) -> tuple[Tensor, Any]:
    """Join learned sinks, if a call has them, to its result."""
    if given.sink_logits is None:
        return out, lse
    check_sinks(given.sink_logits, given.q)
    return with_sinks(out, lse, given.sink_logits)


def _attend(given: Arguments, with_lse: bool = True) -> tuple[Tensor, Any]:
    """Compute (out, lse) by the program of an equal earlier call, or check the call first.

    Without ``with_lse``, lse may be None. Learned sinks are applied after the results of branches and ranks are merged.
    """
    key = None
    if not torch.compiler.is_dynamo_compiling():
        key, program, lists, pairs = find(given)
        if program is not None and program.over_lists is not None:
            needs_lse = with_lse or given.sink_logits is not None
            found = program.over_lists.forward(*given[:3], needs_lse, lists=lists)
            if found is not None:
                return _with_sinks(given, *found)
        elif program is not None:
            q, k, v = given[:3]
            call, tables = program.call, program.tables
            if call.features and program.terms is None:
                tables = tuple(pack(call.pattern, as_terms(given.terms), call.dropout))
            return _with_sinks(given, *run(program, q, k, v, tables, with_lse or given.sink_logits is not None))
        if key is not None and pairs is not None:
            given = given._replace(pattern=pairs)
    sharded = any(map(_is_sharded, given[:3]))
    check_on_oom(given.on_oom, given.context, sharded)
    if given.on_oom == "sparsify":
        from .oom_retry import sparsified

        k = given.k
        tokens = k.shape[2] if isinstance(k, Tensor) and k.ndim == 4 else 0
        return sparsified(
            lambda p: _attend(given._replace(pattern=p, on_oom="degrade"), with_lse), given.pattern, tokens
        )
    if sharded:
        # imported here because it loads torch.distributed
        from .parallel.sharded import attend_sharded

        return attend_sharded(_attend, given)
    if has_functions(given.terms):
        of_functions: tuple[Tensor, Any] = _attend_scored(given, with_lse)
        return of_functions
    asked, dtype = converted(given)
    call, q, k, v, tensors, checked_terms = checked(asked)
    if asked.context is not None:
        out, lse = asked.context.attend(call, (q, k, v), tensors, given._replace(terms=checked_terms))
    elif key is not None and call.kv_dtype is None:
        out, lse = run(keep(key, call, Operands(q, k, v, call.scale)), q, k, v, tensors)
    else:
        out, lse = attend(call, q, k, v, tensors)
    if asked.sink_logits is not None:
        out, lse = with_sinks(out, lse, asked.sink_logits)
    return (out if dtype is None else out.to(dtype)), lse


@uncompiled(
    "Score functions are read at each call. Pass score terms, or call it outside of code that is compiled with "
    "fullgraph=True; other compiled code breaks its graph here."
)
def _attend_scored(given: Arguments, with_lse: bool) -> tuple[Tensor, Any]:
    """Compute (out, lse) of a call with functions among its terms."""
    # imported with the first function
    from .score_functions import calls

    asked, dtype = converted(given)
    call = calls.scored(asked)
    if call.found.score is not None:
        out, lse = _attend(calls.by_terms(call), with_lse)
    else:
        out, lse = calls.attend(call)
        if asked.sink_logits is not None:
            check_sinks(asked.sink_logits, asked.q)
            out, lse = with_sinks(out, lse, asked.sink_logits)
    return (out if dtype is None else out.to(dtype)), lse


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    pattern: Pattern = Causal(),  # noqa: B008  (immutable)
    *,
    scale: float | None = None,
    terms: Term | ScoreMod | Sequence[Term | ScoreMod] | None = (),
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute attention of sequences that are packed end to end on one axis; each attends only itself.

    The pattern counts positions from each sequence's first key. A sequence may have other numbers of queries than of
    keys, also none. Its last query is then at its last key, as in flash-attn and in a decode step over a cache: query i
    of n is at position i + keys - n. A query that attends no key gives 0.

    Args:
        q: Queries of all sequences, (tokens, Hq, D).
        k: Keys, (tokens, Hkv, D).
        v: Values, (tokens, Hkv, Dv).
        cu_seqlens_q: Cumulative lengths of the sequences' queries, (sequences + 1,): 0, ..., tokens.
        cu_seqlens_k: Cumulative lengths of their keys; None if they are those of the queries.
        pattern: A relation; causal by default.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        terms: Score terms, as in :func:`ringweave.attention`, with distances in each sequence; with cu_seqlens_k, not
            beside a Bias. A function gets 0 as b, and tokens of the packed axis as q and k; with cu_seqlens_k it may
            not depend on them.
        sink_logits: (Hq,), one learned logit per head.
        dropout: Share of the weights that are dropped.
        backend: ``"auto"`` or the name of a backend.
    Returns:
        Output, (tokens, Hq, Dv), dtype of q.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
        PatternError: The bounds do not increase from 0, or the pattern cannot count from a sequence's first key.
        UnsupportedError: The named backend cannot run the case.
    Example:
        >>> packed = torch.randn(96, 4, 32)
        >>> rw.varlen_attention(packed, packed, packed, [0, 60, 96], pattern=rw.SlidingWindow(16)).shape
        torch.Size([96, 4, 32])
    """
    # imported with the first packed call
    from .patterns import Documents

    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise ShapeError(name, shown(x), "(tokens, heads, dim)", "Concatenate the sequences along dim 0.")
    if cu_seqlens_k is None:
        documents = Documents(cu_seqlens=cu_seqlens_q)
    else:
        documents = Documents(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = attention(
        q,
        k,
        v,
        pattern.within(documents) if isinstance(pattern, Pattern) else pattern,
        scale=scale,
        q_offset=0,
        terms=terms,
        sink_logits=sink_logits,
        dropout=dropout,
        backend=backend,
    )
    return out[0].transpose(0, 1)


def paged_attention(
    q: Tensor,
    cache: PagedCache,
    pattern: Pattern = Causal(),  # noqa: B008  (immutable)
    *,
    scale: float | None = None,
    terms: Term | Sequence[Term] | None = None,
    sink_logits: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute attention of the last tokens of each sequence over its pages of a cache, without copying them together.

    The result is that of :func:`ringweave.attention` for each sequence alone, with ``q_offset="end"``. Pages in which
    the pattern allows nothing are not read. There is no backward: a cache holds no gradients. A CUDA graph can capture
    a call after a call with the same lengths; a replay with other lengths is a device-side assertion.

    Args:
        q: Queries of the last Nq tokens of each sequence, (B, Hq, Nq, D), on the device of the cache and in its dtype;
            in any dtype for a cache of 8 bits. Their keys and values are in the cache already. Rows of an empty
            sequence give 0.
        cache: Keys and values.
        pattern: A relation that counts positions from each sequence's first token; causal by default.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        terms: Score terms, applied in order to the scaled scores, and no functions; a Bias has one column for each
            token that a row of the page table has room for.
        sink_logits: (Hq,), one learned logit per head that joins the denominator and has no value.
        backend: ``"auto"``, or a backend that reads pages: cpu, triton, dense_batched, reference.
    Returns:
        Output, (B, Hq, Nq, Dv), dtype of q.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit, a sequence has fewer tokens than queries, or a page number is
            out of range (on a GPU this is a device-side assertion).
        PatternError: The pattern is made for other lengths, heads or batch sizes, or is a LongNet.
        UnsupportedError: An input requires gradients, or the named backend cannot read pages.
    Example:
        >>> cache = rw.PagedCache.empty(batch=1, length=512, heads=4, dim=32)
        >>> cache.append(k, v)
        >>> window = (rw.SlidingWindow(64) | rw.Sinks(4)) & rw.Causal()
        >>> whole = rw.attention(q, k, v, window)
        >>> torch.testing.assert_close(rw.paged_attention(q[:, :, -1:], cache, window), whole[:, :, -1:])

    References:
        Kwon et al. (2023), PagedAttention, section 4.1.
    """
    return attend_pages(q, cache, pattern, scale, terms, sink_logits, backend, with_lse=False)[0]


def attend_pages(
    q: Tensor,
    cache: PagedCache,
    pattern: Pattern,
    scale: float | None = None,
    terms: Term | Sequence[Term] | None = None,
    sink_logits: Tensor | None = None,
    backend: str = "auto",
    *,
    with_lse: bool = True,
) -> tuple[Tensor, Any]:
    """Compute (out, lse) of :func:`paged_attention`; without ``with_lse``, lse may be None."""
    # by an attribute of the class: an import in each call would take half a microsecond
    if not hasattr(cache, "_book"):
        raise ShapeError("cache", type(cache).__name__, "a PagedCache", "Create one with PagedCache.empty.")
    # a trace could not follow the lengths, which it knows as symbols
    traced = torch.compiler.is_dynamo_compiling()
    fewest, most = (0, 0) if traced else cache._ends
    given = Arguments(q, cache.k, cache.v, pattern, scale, most, backend, terms=terms, sink_logits=sink_logits)
    key = None
    if not traced:
        key, program, *_ = find(given, cache, fewest)
        if program is not None and program.over_pages is not None:
            pages = Pages(cache.table, cache.lengths, cache.page)
            needs_lse = with_lse or sink_logits is not None
            found = program.over_pages.forward(q, cache.k, cache.v, needs_lse, pages, most, cache.scales)
            if found is not None:
                return _with_sinks(given, *found)
    call, q, k, v, tensors, _ = paged(given, cache)
    out, lse = attend(call, q, k, v, tensors)
    if key is not None:
        keep(
            key, call, Operands(q, k, v, call.scale, None, Pages(cache.table, cache.lengths, cache.page), cache.scales)
        )
    return (out, lse) if sink_logits is None else with_sinks(out, lse, sink_logits)


@_public
def longnet_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segments: Sequence[int],
    rates: Sequence[int],
    causal: bool = False,
    offset: str | int = "interleaved",
    heads: str = "shared",
    detach_weights: bool = False,
    scale: float | None = None,
    q_offset: int | Literal["end"] = 0,
    backend: str = "auto",
    context: ContextParallel | None = None,
) -> Tensor:
    """Compute LongNet's dilated attention: a mixture of dilated branches, merged by their log-sum-exp.

    ``out = sum_b exp(lse_b - LSE) out_b``. A key that two branches attend counts twice; for a union in which it counts
    once, use :class:`ringweave.Dilated` with ``|``. Branches run on strided views: nothing is padded or dropped.

    Args:
        q: Queries, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D).
        v: Values, (B, Hkv, Nk, Dv).
        segments: Segment length of each branch, in tokens.
        rates: Dilation rate of each branch; divides its segment.
        causal: Whether keys after the query are left out.
        offset: Residue that a head keeps: ``"interleaved"``, ``"grouped"`` or an int; see :class:`ringweave.LongNet`.
        heads: ``"shared"`` or ``"partitioned"``.
        detach_weights: Whether backward treats the branch weights as constants, as published implementations do; the
            exact gradient includes them.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        q_offset: Position of the first query; ``"end"`` for Nk - Nq, as in a decode step.
        backend: ``"auto"`` or the name of a backend.
        context: Ranks that share the sequence; q, k and v are then this rank's shards.
    Returns:
        Output, (B, Hq, Nq, Dv), dtype of q; a position that no branch of a head keeps gives 0.
    Raises:
        PatternError: The lists differ in length, a rate does not divide its segment, or an option is unknown.
        ShapeError: Shapes, dtypes or devices do not fit.
        UnsupportedError: The named backend cannot run the case.
    Example:
        >>> rw.longnet_attention(q, k, v, segments=[64, 256], rates=[1, 4], causal=True).shape
        torch.Size([1, 4, 256, 32])

    References:
        Ding et al. (2023), LongNet: scaling transformers to 1,000,000,000 tokens, section 2.2.
    """
    # imported with the first LongNet
    from .patterns import LongNet

    pattern = LongNet(segments, rates, causal=causal, offset=offset, heads=heads)
    # A head that runs one branch has no weights to detach.
    if not flag("detach_weights", detach_weights) or pattern.heads == "partitioned":
        return attention(q, k, v, pattern, scale=scale, q_offset=q_offset, backend=backend, context=context)
    parts = [
        attention_with_lse(
            q,
            k,
            v,
            LongNet([segment], [rate], causal=causal, offset=offset),
            scale=scale,
            q_offset=q_offset,
            backend=backend,
            context=context,
        )
        for segment, rate in zip(pattern.segments, pattern.rates, strict=True)
    ]
    return merge([part.out for part in parts], [part.lse.detach() for part in parts]).out


def neighborhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | Sequence[int],
    *,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    scale: float | None = None,
    terms: Term | ScoreMod | Sequence[Term | ScoreMod] | None = (),
    backend: str = "auto",
) -> Tensor:
    """Compute NATTEN's neighborhood attention on tokens, images or video: each query attends the window around itself.

    Along an axis, query i attends ``window`` keys of its dilation group, the indices congruent to i modulo
    ``dilation``. The window is centred on the query and shifted inwards at borders. An even window has one more key
    before the query than after it. Along a causal axis it ends at the query and is cut off at the first key. Tokens are
    laid out by :class:`ringweave.Grid`, so that a tile of the plan is a compact box; q, k and v may have any strides.

    Args:
        q: Queries, (B, Hq, *grid, D), where grid is (n,), (height, width) or (time, height, width).
        k: Keys, (B, Hkv, *grid, D); Hkv divides Hq.
        v: Values, (B, Hkv, *grid, Dv).
        window: Keys along each axis, one number for all axes or one for each. NATTEN calls it kernel_size.
        dilation: Step between the keys of a window, one number for all axes or one for each.
        is_causal: Whether an axis is causal, one bool for all axes or one for each.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        terms: Score terms, as in :func:`ringweave.attention`. Rows and columns of a Bias, and q and k of a function,
            are the grid's tokens in row-major order. Terms of distance need a grid of one axis.
        backend: ``"auto"`` or the name of a backend.
    Returns:
        Output, (B, Hq, *grid, Dv), dtype of q.
    Raises:
        ShapeError: The number of dimensions, or a grid, does not fit.
        PatternError: A window or dilation is below 1, ``window * dilation`` exceeds the grid's size along an axis, or
            ``is_causal`` is not one bool or one for each axis.
        UnsupportedError: A term counts distances on a grid of several axes, or the named backend cannot run the case.
    Example:
        >>> image = torch.randn(1, 4, 24, 20, 32)
        >>> rw.neighborhood_attention(image, image, image, window=(7, 5), dilation=(1, 2)).shape
        torch.Size([1, 4, 24, 20, 32])

    References:
        Hassani et al. (2023), Neighborhood attention transformer, section 3; Hassani, Shi (2022), Dilated neighborhood
        attention transformer, section 3.
    """
    # imported with the first grid
    from .patterns import Grid, GridNeighborhood

    shape = _grid_shape(q, k, v)
    grid, axes = Grid(shape), len(shape)
    causal = is_causal if isinstance(is_causal, (list, tuple)) else [is_causal] * axes
    if len(causal) != axes:
        wanted = f"one bool, or one for each of the {axes} grid axes"
        raise PatternError("is_causal", shown(is_causal), wanted, f"Pass {axes} bools.")
    pattern = GridNeighborhood(grid, window, dilation, [flag("is_causal", each) for each in causal])
    out = attention(
        grid.flatten(q, 2),
        grid.flatten(k, 2),
        grid.flatten(v, 2),
        pattern,
        scale=scale,
        q_offset=0,
        terms=[_on_grid(term, grid) for term in as_listed(terms)],
        backend=backend,
    )
    return grid.unflatten(out, 2)


def _grid_shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the grid's shape; raise ShapeError unless q, k and v have the same."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not 4 <= x.ndim <= 6:
            wanted = "(batch, heads, *grid, dim) with 1 to 3 grid axes"
            raise ShapeError(name, shown(x), wanted, "Move the heads before the grid's axes.")
        grid = tuple(x.shape[2:-1])
        if 0 in grid:
            raise ShapeError(f"{name} grid", grid, "at least 1 token along each axis", "Skip the empty call.")
        if grid != tuple(q.shape[2:-1]):
            wanted = f"{tuple(q.shape[2:-1])}, as q"
            raise ShapeError(f"{name} grid", grid, wanted, "Queries and keys are tokens of one grid.")
    return tuple(q.shape[2:-1])


def _on_grid(term: Term | ScoreMod, grid: Grid) -> Term | ScoreMod:
    """Return a term or a function for tokens in the grid's order."""
    if len(grid.shape) == 1:
        # the order of one axis is the axis
        return term
    if not isinstance(term, Term):
        return _function_on_grid(term, grid)
    if term.distances:
        got = f"{type(term).__name__} on a grid of {len(grid.shape)} axes"
        remedy = "Pass a Bias, with rows and columns for the tokens in row-major order."
        raise UnsupportedError("terms", got, "terms that count no distances", remedy)
    tables = []
    for table, axes in zip(term.tables, term.axes.values(), strict=True):
        for dim, axis in enumerate(axes[: table.ndim]):
            # attention checks the shape of a table
            if axis.along in ("queries", "keys") and table.shape[dim] == grid.tokens:
                table = grid.flatten(table.unflatten(dim, grid.shape), dim)
        tables.append(table)
    return term.over(*tables) if tables else term


def _function_on_grid(function: ScoreMod, grid: Grid) -> ScoreMod:
    """Return a function of tokens in the grid's order; ``function`` gets their indices in row-major order."""
    tokens = grid.flatten(torch.arange(grid.tokens, device="cpu").view(grid.shape), 0)

    def on_grid(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return function(score, b, h, tokens[q], tokens[k])

    return on_grid


def _is_sharded(x: object) -> bool:
    """Tell whether a value is a DTensor, without importing torch.distributed.tensor."""
    return type(x) is not Tensor and hasattr(x, "device_mesh") and hasattr(x, "placements")


__all__ = [
    "attention",
    "attention_with_lse",
    "longnet_attention",
    "neighborhood_attention",
    "paged_attention",
    "varlen_attention",
]
