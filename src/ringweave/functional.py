"""Attention as functions: the boundary that checks a call once and hands it to the operators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checks import autocast, check_call, check_sinks, check_tensors
from .errors import ShapeError, UnsupportedError, message, shown
from .merge import merge, with_sinks
from .ops import prepared
from .ops.backend import Inputs
from .ops.recovery import check_on_oom, sparsified
from .ops.registered import attend
from .patterns import Causal, Documents, Full, LongNet, Pattern
from .patterns.numbers import flag
from .precision import NATIVE, Precision, as_precision, store
from .terms import Term, as_terms, rounded
from .types import AttentionOutput

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
        q: Queries, (B, Hq, Nq, D), float32, float16 or bfloat16 (float64: reference, gather and sdpa), any strides.
        k: Keys, (B, Hkv, Nk, D), dtype and device of q; Hkv divides Hq (grouped queries).
        v: Values, (B, Hkv, Nk, Dv).
        pattern: Which (head, query, key) triples may attend.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        q_offset: Position of the first query; Nk - Nq for a decode step over a cache. An int, or an integer tensor ()
            or (B,), which is read when the plan is made: a changed value recompiles nothing.
        k_offset: Position of the first key, alike: how many a cache has dropped. Positions are what patterns and terms
            count by, so the bounds of ``Keys`` do not move with it.
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
    if not torch.compiler.is_dynamo_compiling() and _is_bare(
        k_offset, context, terms, sink_logits, dropout, precision, on_oom
    ):
        _, call = prepared.find(q, k, v, pattern, scale, q_offset, backend)
        found = None if call is None else call(q, k, v, on_oom == "degrade", False)
        if found is not None:
            return found[0]
    return attention_with_lse(
        q, k, v, pattern, scale=scale, q_offset=q_offset, k_offset=k_offset, backend=backend, context=context,
        terms=terms, sink_logits=sink_logits, dropout=dropout, precision=precision, on_oom=on_oom,
    ).out  # fmt: skip


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
    # all arguments, also those that somebody adds later; dynamo takes locals() where no variable is a closure's
    given = None if context is None else locals()
    key, call = None, None
    if not torch.compiler.is_dynamo_compiling() and _is_bare(
        k_offset, context, terms, sink_logits, dropout, precision, on_oom
    ):
        key, call = prepared.find(q, k, v, pattern, scale, q_offset, backend)
        found = None if call is None else call(q, k, v, on_oom == "degrade")
        if found is not None:
            return AttentionOutput(*found)
    sharded = any(map(_is_sharded, (q, k, v)))
    check_on_oom(on_oom, context, sharded)
    if on_oom == "sparsify":
        again = functools.partial(
            attention_with_lse, q, k, v, scale=scale, q_offset=q_offset, k_offset=k_offset, backend=backend,
            terms=terms, sink_logits=sink_logits, dropout=dropout, precision=precision,
        )  # fmt: skip
        return sparsified(again, pattern, k.shape[2] if isinstance(k, Tensor) and k.ndim == 4 else 0)
    if sharded:
        # loads torch.distributed
        from .parallel.sharded import attend_sharded

        return attend_sharded(
            attention_with_lse,
            q,
            k,
            v,
            pattern,
            terms=as_terms(terms),
            sink_logits=sink_logits,
            dropout=dropout,
            scale=scale,
            q_offset=q_offset,
            k_offset=k_offset,
            backend=backend,
            context=context,
            precision=precision,
            on_oom=on_oom,
        )
    q, k, v = autocast(q, k, v)
    policy, dtype, hosted = as_precision(precision), None, on_oom == "stream"
    if policy.compute is not None:
        check_tensors(q, k, v, hosted=hosted)
        dtype = q.dtype
        q, k, v = q.to(policy.compute), k.to(policy.compute), v.to(policy.compute)
    pattern, scale, q_offset, terms, dropout = check_call(
        q,
        k,
        v,
        pattern,
        scale=scale,
        q_offset=q_offset,
        k_offset=k_offset,
        backend=backend,
        context=context,
        terms=terms,
        dropout=dropout,
        hosted=hosted,
    )
    if sink_logits is not None:
        check_sinks(sink_logits, q)
    if policy.table is not None:
        terms = tuple(map(functools.partial(rounded, dtype=policy.table), terms))
    if context is not None and policy.wire not in ("native", context.options.wire):
        got = f"{policy.wire!r} of a context whose wire is {context.options.wire!r}"
        raise UnsupportedError(message("precision.wire", got, "that of the context", "Make it with this policy."))
    if policy.kv is not None:
        learned = [x for term in terms for x in term.tables] + [x for x in (sink_logits,) if x is not None]
        result = _stored(
            Inputs(q, k, v, scale), pattern, q_offset, backend, terms, dropout, context, policy.kv, learned
        )
    elif context is not None:
        assert given is not None
        given |= {"terms": terms, "precision": None if policy == NATIVE else policy}
        asked = {name: value for name, value in given.items() if name not in _COMPARED and _is_said(name, value)}
        result = AttentionOutput(*context.attend(Inputs(q, k, v, scale), pattern, backend, terms, dropout, asked))
    else:
        degrade = on_oom != "raise"
        if key is not None and call is None:
            call = prepared.make(key, Inputs(q, k, v, scale), pattern, q_offset, backend)
            found = None if call is None else call(q, k, v, degrade)
            if found is not None:
                return AttentionOutput(*found)
        result = AttentionOutput(*attend(Inputs(q, k, v, scale), pattern, q_offset, backend, terms, dropout, degrade))
    if sink_logits is not None:
        result = with_sinks(result.out, result.lse, sink_logits)
    return result if dtype is None else AttentionOutput(result.out.to(dtype), result.lse)


_DEFAULTS = {name: each.default for name, each in inspect.signature(attention_with_lse).parameters.items()}
# arguments that ranks have parts of, or that a context compares as they are once they are checked
_COMPARED = frozenset({"q", "k", "v", "pattern", "scale", "backend", "context", "dropout"})


def _is_said(name: str, value: object) -> bool:
    """Tell whether an argument is another than its default."""
    return isinstance(value, Tensor) or value != _DEFAULTS[name]


def _stored(
    inputs: Inputs,
    pattern: Pattern,
    q_offset: int,
    backend: str,
    terms: Sequence[Term],
    dropout: float,
    context: ContextParallel | None,
    dtype: torch.dtype,
    learned: Sequence[Tensor],
) -> AttentionOutput:
    """Round keys and values to 8 bits, and attend to what is stored."""
    from .ops import stored

    q, k, v, scale = inputs[:4]
    for name, there in (("context", context is not None), ("dropout", bool(dropout))):
        if there:
            remedy = "Leave it out: what travels is the wire's, and storing is for inference."
            raise UnsupportedError(message("precision.kv", f"{dtype} with {name}", f"no {name}", remedy))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *learned)):
        stored.refuse_gradient("precision.kv")
    (k, of_k), (v, of_v) = store(k, dtype), store(v, dtype)
    found = stored.attend(q, k, v, pattern, scale, backend, terms, scales=(of_k, of_v), q_offset=q_offset)
    return AttentionOutput(*found)


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


def _is_bare(
    k_offset: object,
    context: object,
    terms: object,
    sink_logits: object,
    dropout: object,
    precision: object,
    on_oom: object,
) -> bool:
    """Tell whether a call asks for nothing but a pattern, a scale, a position and a backend."""
    return (
        context is sink_logits is None
        # what modules and integrations pass
        and (precision is None or precision is NATIVE)
        and (terms is None or (type(terms) in (tuple, list) and not terms))
        and (type(dropout) is float and dropout == 0.0)
        and (type(k_offset) is int and k_offset == 0)
        and type(on_oom) is str
        and (on_oom == "degrade" or on_oom == "raise")
    )


def _is_sharded(x: object) -> bool:
    """Tell whether something is a DTensor, without loading what makes them."""
    return type(x) is not Tensor and hasattr(x, "device_mesh") and hasattr(x, "placements")


__all__ = ["attention", "attention_with_lse", "longnet_attention", "varlen_attention"]
