"""Attention as functions: the boundary that checks a call once and hands it to the operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .call import Arguments, Operands, pack
from .errors import ShapeError, message, shown
from .kv_cache import PagedCache, Pages
from .merge import merge, with_sinks
from .oom_retry import check_on_oom, sparsified
from .patterns import Causal, Documents, Full, LongNet, Pattern
from .patterns.validate import flag
from .precision import NATIVE, Precision, as_precision
from .program import find, find_paged, keep, keep_paged
from .terms import Term, as_terms
from .torch_ops import attend, run
from .types import AttentionOutput
from .validate import check_sinks, checked, converted, paged

if TYPE_CHECKING:
    from .parallel import ContextParallel


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern = Full(),  # noqa: B008  (immutable)
    *,
    scale: float | None = None,
    q_offset: int | Tensor = 0,
    k_offset: int | Tensor = 0,
    backend: str = "auto",
    context: ContextParallel | None = None,
    terms: Term | Sequence[Term] | None = (),
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    precision: Precision | None = None,
    on_oom: str = "degrade",
) -> Tensor:
    """Compute exact attention over the pairs that a pattern allows, differentiable in q, k and v.

    ``out[i] = sum_j softmax_j(scale * <q[i], k[j]>) v[j]`` over the allowed j; a row that attends nothing gives 0. Cost
    and memory grow with the pattern's non-empty tiles.

    Args:
        q: Queries, (B, Hq, Nq, D), float32, float16 or bfloat16 (float64: reference, dense_batched, sdpa), any
            strides.
        k: Keys, (B, Hkv, Nk, D), dtype and device of q; Hkv divides Hq (grouped queries).
        v: Values, (B, Hkv, Nk, Dv).
        pattern: Which (head, query, key) triples may attend.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        q_offset: Position of the first query; Nk - Nq for a decode step over a cache. An int, or an integer tensor ()
            or (B,), which is read when the plan is made: a changed value recompiles nothing.
        k_offset: Position of the first key, alike: how many a cache has dropped. Positions are what patterns and terms
            count by, so the bounds of ``KeyPadding`` do not move with it.
        backend: ``"auto"``, or one by name; see :func:`ringweave.explain`.
        context: Ranks that share the sequence; q, k and v are then this rank's shards, and so is the output.
        terms: What is added to or made of the scaled scores, in order: Softcap, ALiBi, DistanceBias, Bias.
        sink_logits: (Hq,): one learned logit a head that joins the denominator and has no value.
        dropout: Share of the weights that are dropped after the softmax, the others grow by 1 / (1 - dropout), rounded
            to a multiple of 2 ** -16. Drawn from torch's default generator, one seed a call; pass it in training only.
        precision: What is rounded to what, such as ``Precision(kv=torch.int8)``; None: nothing beyond the types given.
        on_oom: When memory runs out: ``"degrade"`` computes the same in pieces, forward and backward, and logs what it
            costs; ``"stream"`` degrades, and k and v may be on the host while q is on a GPU: what is attended comes in
            pieces, and their gradients are made on the host; ``"raise"`` raises; ``"sparsify"`` degrades, then, with a
            warning, leaves out far keys, which is another answer. With a context a rank raises, whatever is asked.
    Returns:
        Output, (B, Hq, Nq, Dv), dtype of q.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit; the message names the argument.
        PatternError: The pattern is made for other lengths, heads or batch.
        UnsupportedError: The named backend cannot run the case.
        RingError: With a context: a rank is lost, or ranks call differently.
    Example:
        >>> rw.attention(q, k, v, (rw.SlidingWindow(64) | rw.Sinks(4)) & rw.Causal()).shape
        torch.Size([1, 4, 256, 32])

    References:
        Dao et al. (2022), FlashAttention, section 3 (tiling and recomputation); here over non-empty tiles only.
    """
    given = Arguments(
        q, k, v, pattern, scale, q_offset, backend, k_offset, context, terms, sink_logits, dropout, precision, on_oom
    )
    return _attend(given, with_lse=False)[0]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern = Full(),  # noqa: B008  (immutable)
    *,
    scale: float | None = None,
    q_offset: int | Tensor = 0,
    k_offset: int | Tensor = 0,
    backend: str = "auto",
    context: ContextParallel | None = None,
    terms: Term | Sequence[Term] | None = (),
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    precision: Precision | None = None,
    on_oom: str = "degrade",
) -> AttentionOutput:
    """Compute attention and each row's log-sum-exp, which makes partial results mergeable; both are differentiable.

    ``lse[i] = log sum_j exp(scale * <q[i], k[j]>)`` over the allowed j, -inf where there are none.

    Args:
        q: Queries, (B, Hq, Nq, D); all arguments as of :func:`ringweave.attention`.
        k: Keys, (B, Hkv, Nk, D).
        v: Values, (B, Hkv, Nk, Dv).
        pattern: Which (head, query, key) triples may attend.
        scale: Factor of the scores.
        q_offset: Position of the first query.
        k_offset: Position of the first key.
        backend: ``"auto"``, or one by name.
        context: Ranks that share the sequence.
        terms: What is added to or made of the scaled scores, in order.
        sink_logits: (Hq,): learned logits; lse includes them.
        dropout: Share of the weights that are dropped; lse is as without.
        precision: What is rounded to what.
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
    given = Arguments(
        q, k, v, pattern, scale, q_offset, backend, k_offset, context, terms, sink_logits, dropout, precision, on_oom
    )
    return AttentionOutput(*_attend(given))


def _attend(given: Arguments, with_lse: bool = True) -> tuple[Tensor, Any]:
    """Compute (out, lse) by the program of an equal call, or after the checks; without ``with_lse``, lse may be None.

    The learned sinks join after all branches and ranks are merged.
    """
    key = None
    if not torch.compiler.is_dynamo_compiling():
        key, program = find(given)
        if program is not None:
            q, k, v = given[:3]
            call, tables = program.call, program.tables
            if call.features and program.terms is None:
                tables = tuple(pack(call.pattern, as_terms(given.terms), call.dropout)[1])
            if given.sink_logits is None:
                return run(program, q, k, v, tables, with_lse)
            check_sinks(given.sink_logits, q)
            return with_sinks(*run(program, q, k, v, tables), given.sink_logits)
    sharded = any(map(_is_sharded, given[:3]))
    check_on_oom(given.on_oom, given.context, sharded)
    if given.on_oom == "sparsify":
        k = given.k
        tokens = k.shape[2] if isinstance(k, Tensor) and k.ndim == 4 else 0
        return sparsified(
            lambda p: _attend(given._replace(pattern=p, on_oom="degrade"), with_lse), given.pattern, tokens
        )
    if sharded:
        # loads torch.distributed
        from .parallel.sharded import attend_sharded

        return attend_sharded(_attend, given)
    asked, dtype = converted(given)
    call, q, k, v, tensors, checked_terms = checked(asked)
    if asked.context is not None:
        native = as_precision(given.precision) == NATIVE
        shared = given._replace(terms=checked_terms, precision=None if native else given.precision)
        out, lse = asked.context.attend(call, (q, k, v), tensors, shared)
    elif key is not None and call.kv_dtype is None:
        out, lse = run(keep(key, call, Operands(q, k, v, call.scale)), q, k, v, tensors)
    else:
        out, lse = attend(call, q, k, v, tensors)
    if asked.sink_logits is not None:
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
    terms: Term | Sequence[Term] | None = (),
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute attention of sequences that lie end to end on one axis, without padding; none attends another.

    The pattern is counted from each sequence's own first key. Where a sequence has fewer queries than keys they are its
    last tokens, as in a step over caches.

    Args:
        q: Queries of all sequences, (tokens, Hq, D).
        k: Keys, (tokens, Hkv, D).
        v: Values, (tokens, Hkv, Dv).
        cu_seqlens_q: Cumulative bounds of the sequences' queries, (sequences + 1,): 0, ..., tokens.
        cu_seqlens_k: Those of their keys, where they are others.
        pattern: A relation; causal by default.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        terms: As of :func:`ringweave.attention`; those of distances need queries and keys with the same bounds.
        sink_logits: (Hq,): learned logits.
        dropout: Share of the weights that are dropped.
        backend: ``"auto"``, or one by name.
    Returns:
        Output, (tokens, Hq, Dv), dtype of q.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
        PatternError: Bounds that are none, or a pattern that cannot be counted from a sequence's start.
        UnsupportedError: The named backend cannot run the case.
    Example:
        >>> packed = torch.randn(96, 4, 32)
        >>> rw.varlen_attention(packed, packed, packed, [0, 60, 96], pattern=rw.SlidingWindow(16)).shape
        torch.Size([96, 4, 32])
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise ShapeError(message(name, shown(x), "(tokens, heads, dim)", "Pack the sequences end to end."))
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
    """Compute attention of the last tokens of each sequence over the pages that hold it, read through the table.

    What :func:`ringweave.attention` gives for each sequence by itself at ``q_offset = lengths - Nq``. Pages in which
    the pattern allows nothing are not touched. Forward only: a cache is no place for gradients.

    Args:
        q: Queries, (B, Hq, Nq, D), dtype (where that has 8 bits: any) and device of the cache: of the last Nq tokens of
            each sequence, whose keys and values are in the cache already. What stands for an empty sequence gives 0.
        cache: Keys and values.
        pattern: A relation, counted from each sequence's first token; causal by default.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        terms: What is added to or made of the scaled scores, in order; a Bias has a column for every token of
            which a row of the table has room.
        sink_logits: (Hq,): one learned logit a head that joins the denominator and has no value.
        backend: ``"auto"``, or one that reads pages: cpu, triton, dense_batched, reference.
    Returns:
        Output, (B, Hq, Nq, Dv), dtype of q.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit; a sequence with fewer tokens than queries; a page number
            out of range (on a GPU an assertion there).
        PatternError: The pattern is made for other lengths, heads or batch, or is a LongNet.
        UnsupportedError: A gradient is asked for, or the named backend reads no pages.
    Example:
        >>> cache = rw.PagedCache.empty(batch=1, length=512, heads=4, dim=32)
        >>> cache.append(k, v)
        >>> window = (rw.SlidingWindow(64) | rw.Sinks(4)) & rw.Causal()
        >>> at_once = rw.attention(q, k, v, window)
        >>> torch.testing.assert_close(rw.paged_attention(q[:, :, -1:], cache, window), at_once[:, :, -1:])

    References:
        Kwon et al. (2023), PagedAttention, section 4.1.
    """
    if not isinstance(cache, PagedCache):
        raise ShapeError(message("cache", type(cache).__name__, "a PagedCache", "Make one with PagedCache.empty."))
    given = Arguments(q, cache.k, cache.v, pattern, scale, 0, backend, terms=terms, sink_logits=sink_logits)
    key = None
    if not torch.compiler.is_dynamo_compiling():
        key, program, keys = find_paged(given, cache)
        if program is not None and program.prepared is not None:
            pages = Pages(cache.table, cache.lengths, cache.page)
            found = program.prepared.forward(q, cache.k, cache.v, sink_logits is not None, pages, keys)
            if found is not None and sink_logits is None:
                return found[0]
            if found is not None and sink_logits is not None:
                check_sinks(sink_logits, q)
                return with_sinks(*found, sink_logits).out
    call, q, k, v, tensors, _ = paged(given, cache)
    out, lse = attend(call, q, k, v, tensors)
    if key is not None:
        keep_paged(key, call, cache)
    return out if sink_logits is None else with_sinks(out, lse, sink_logits).out


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
    q_offset: int = 0,
    backend: str = "auto",
    context: ContextParallel | None = None,
) -> Tensor:
    """Compute LongNet's dilated attention: a mixture of dilated branches, merged by their log-sum-exp.

    ``out = sum_b exp(lse_b - LSE) out_b``. A key that two branches see counts twice; for a union in which it counts
    once, use :class:`ringweave.Dilated` with ``|``. Branches run over strided views, nothing is padded or dropped.

    Args:
        q: Queries, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D).
        v: Values, (B, Hkv, Nk, Dv).
        segments: Segment length of each branch, in tokens.
        rates: Dilation rate of each branch; divides its segment.
        causal: Whether keys after the query are left out.
        offset: ``"interleaved"``, ``"grouped"`` or an int: which residue a head keeps; see :class:`ringweave.LongNet`.
        heads: ``"shared"`` or ``"partitioned"``.
        detach_weights: Treat the branch weights as constants in the backward pass, as published implementations do;
            the exact gradient includes them.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        q_offset: Position of the first query.
        backend: ``"auto"``, or one by name.
        context: Ranks that share the sequence; q, k and v are then this rank's shards.
    Returns:
        Output, (B, Hq, Nq, Dv), dtype of q; a position that no branch of a head keeps gives 0.
    Raises:
        PatternError: Lists of different lengths, a rate that does not divide its segment, an unknown option.
        ShapeError: Shapes, dtypes or devices do not fit.
        UnsupportedError: The named backend cannot run the case.
    Example:
        >>> rw.longnet_attention(q, k, v, segments=[64, 256], rates=[1, 4], causal=True).shape
        torch.Size([1, 4, 256, 32])

    References:
        Ding et al. (2023), LongNet: scaling transformers to 1,000,000,000 tokens, section 2.2.
    """
    pattern = LongNet(segments, rates, causal=causal, offset=offset, heads=heads)
    # heads that run one branch each have nothing to weigh
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


def _is_sharded(x: object) -> bool:
    """Tell whether something is a DTensor, without loading what makes them."""
    return type(x) is not Tensor and hasattr(x, "device_mesh") and hasattr(x, "placements")


__all__ = ["attention", "attention_with_lse", "longnet_attention", "paged_attention", "varlen_attention"]
