"""The functions of FlashAttention-3 on any device, with gradients: their names, parameters, layouts and returns.

    >>> from ringweave.integrations.flash_attn_interface import flash_attn_func

An output is returned alone, or with its lse, which is -inf for a query without keys; gradients of lse are ignored.
``num_splits``, ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` divide work on a GPU and change no result, and
backward is always ``deterministic``: all of them are ignored. ``qv`` and the factors of 8-bit floats are refused.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..checks import LONGEST, flag, whole
from ..errors import ShapeError, UnsupportedError, shown
from ..names import only
from ..patterns import Pattern, Segments
from .flash_attn.caches import Cache, attend_and_append, new_tokens, numbered, whole_numbers
from .flash_attn.conventions import (
    Inputs,
    Options,
    Result,
    WindowSize,
    attend,
    attend_packed,
    check_layout,
    check_queries,
    checked_bounds,
    longest,
    output_and_lse,
    reaches,
    relation,
    sequences,
    sides,
)
from .flash_attn.installation import install
from .flash_attn.rotary import Rotary

# width of a side without limit beside a limited one: more than all tokens of a call
_NO_LIMIT = 2**30

#: The output, or the output and lse.
Returned = Tensor | tuple[Tensor, Tensor]


def _window(window_size: WindowSize, causal: bool, chunk: int, nq: int, nk: int) -> Pattern:
    """Return the pattern of a window of ``nq`` queries and ``nk`` keys, and of chunks if there are any.

    A side as wide as the sequence has no limit. It excludes no key, so a trace need not know whether a side is.
    """
    before, after = sides(window_size)
    left = None if before < 0 or reaches(before, nk - 1) else before
    right = None if after < 0 or reaches(after, nq - 1) else after
    pattern = relation(left, 0 if flag("causal", causal, ShapeError) else right, _NO_LIMIT)
    chunk = whole("attention_chunk", chunk, -LONGEST, error=ShapeError)
    return pattern & Segments(chunk) if chunk > 0 else pattern


def _refuse(qv: Tensor | None, *descale: Tensor | None) -> None:
    """Raise UnsupportedError for arguments that no call here has."""
    if qv is not None:
        remedy = "Concatenate: q with qv, and k with v, along the head dim."
        raise UnsupportedError("qv", shown(qv), "None", remedy)
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descale, strict=True):
        if x is not None:
            raise UnsupportedError(
                name, shown(x), "None: there is no attention in 8-bit floats", "Convert to bfloat16."
            )


def _returned(result: Result) -> Returned:
    return result.out if result.lse is None else output_and_lse(result, -torch.inf)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute attention with FlashAttention-3's arguments: the last query is at the last key.

    Args:
        q: Queries, (B, Nq, H, D), float32, float16, bfloat16 or float64, any strides.
        k: Keys, (B, Nk, Hkv, D); Hkv divides H.
        v: Values, (B, Nk, Hkv, Dv).
        softmax_scale: Factor of the scores; 1 / sqrt(D) by default.
        causal: Whether later keys are left out; the right side of the window is then 0.
        qv: Refused.
        q_descale: Refused.
        k_descale: Refused.
        v_descale: Refused.
        window_size: (left, right), -1 for a side without limit.
        attention_chunk: Tokens in a chunk, counted from the first key; a query attends its chunk. None at 0.
        softcap: Bound on the scores; none at 0 or below.
        num_splits: Ignored.
        pack_gqa: Ignored.
        deterministic: Ignored.
        sm_margin: Ignored.
        return_attn_probs: Whether to return lse too.
    Returns:
        Output, (B, Nq, H, Dv); with ``return_attn_probs`` also lse, (B, H, Nq) float32.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
        UnsupportedError: A refused argument is given.
    Example:
        >>> from ringweave.integrations.flash_attn_interface import flash_attn_func
        >>> x = torch.randn(2, 100, 4, 32)
        >>> flash_attn_func(x, x, x, causal=True, window_size=(16, 0)).shape
        torch.Size([2, 100, 4, 32])
    """
    _refuse(qv, q_descale, k_descale, v_descale)
    check_layout(q, k, v)
    pattern = _window(window_size, causal, attention_chunk, q.shape[1], k.shape[1])
    options = Options(pattern, softmax_scale, softcap, with_lse=return_attn_probs).checked(len(q), q.shape[2])
    return _returned(attend((q, k, v), options))


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute :func:`flash_attn_func` of one tensor: (B, N, 3, H, D), or (B, N, H + 2 Hkv, D) with ``num_heads_q``.

    Example:
        >>> from ringweave.integrations.flash_attn_interface import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(1, 8, 4 + 2 * 2, 16), num_heads_q=4).shape
        torch.Size([1, 8, 4, 16])
    """
    if isinstance(qkv, Tensor) and qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    else:
        heads = num_heads_q or 0
        rest = qkv.shape[2] - heads if isinstance(qkv, Tensor) and qkv.ndim == 4 else 0
        if heads < 1 or rest < 2 or rest % 2:
            wanted = "(batch, tokens, 3, heads, dim), or all heads in one axis, with num_heads_q"
            raise ShapeError("qkv", shown(qkv), wanted, "Stack them before the heads.")
        q, k, v = qkv.split([heads, rest // 2, rest // 2], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute attention of sequences that are packed end to end; in each, the last query is at the last key.

    Args:
        q: Queries of all sequences, (tokens, H, D).
        k: Keys, (tokens, Hkv, D).
        v: Values, (tokens, Hkv, Dv).
        cu_seqlens_q: Cumulative lengths of the queries, (sequences + 1,) int32.
        cu_seqlens_k: Cumulative lengths of the keys.
        max_seqlen_q: Queries of the longest sequence: a window's right side that is as long has no limit.
        max_seqlen_k: Keys of the longest sequence: a window's left side that is as long has no limit.
        seqused_q: Queries of each sequence that are used, (sequences,) int32; the output of others is 0.
        seqused_k: Keys of each sequence that are used.
        softmax_scale: Factor of the scores; 1 / sqrt(D) by default.
        causal: Whether later keys are left out.
        qv: Refused.
        q_descale: Refused.
        k_descale: Refused.
        v_descale: Refused.
        window_size: (left, right), -1 for a side without limit.
        attention_chunk: Tokens in a chunk, counted from each sequence's first key.
        softcap: Bound on the scores.
        num_splits: Ignored.
        pack_gqa: Ignored.
        deterministic: Ignored.
        sm_margin: Ignored.
        return_attn_probs: Whether to return lse too.
    Returns:
        Output, (tokens, H, Dv); with ``return_attn_probs`` also lse, (H, tokens) float32.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit, or the bounds do not grow from 0.
        UnsupportedError: A refused argument is given.
    Example:
        >>> from ringweave.integrations.flash_attn_interface import flash_attn_varlen_func
        >>> x, bounds = torch.randn(96, 4, 32), torch.tensor([0, 60, 96], dtype=torch.int32)
        >>> flash_attn_varlen_func(x, x, x, bounds, bounds, 60, 60, causal=True).shape
        torch.Size([96, 4, 32])
    """
    _refuse(qv, q_descale, k_descale, v_descale)
    check_layout(q, k, v, packed=True)
    most = longest("max_seqlen_q", max_seqlen_q), longest("max_seqlen_k", max_seqlen_k)
    pattern = _window(window_size, causal, attention_chunk, *most)
    options = Options(pattern, softmax_scale, softcap, with_lse=return_attn_probs)
    options = options.checked(sequences(cu_seqlens_q), q.shape[1])
    bounds = cu_seqlens_q, cu_seqlens_k
    if seqused_q is None and seqused_k is None:
        return _returned(attend_packed((q, k, v), bounds, options))
    return _returned(_attend_used((q, k, v), bounds, (seqused_q, seqused_k), options))


def _attend_used(
    inputs: Inputs, bounds: tuple[Tensor, Tensor], used: tuple[Tensor | None, Tensor | None], options: Options
) -> Result:
    """Compute attention of the first tokens of packed sequences, as many as are used."""
    checked = checked_bounds(bounds, (len(inputs[0]), len(inputs[1])))
    places, new_bounds = [], []
    for name, listed, count in zip(("seqused_q", "seqused_k"), checked, used, strict=True):
        sizes = [b - a for a, b in itertools.pairwise(listed)]
        kept = sizes if count is None else whole_numbers(name, count, 0, len(sizes))
        if any(not 0 <= n <= size for n, size in zip(kept, sizes, strict=True)):
            raise ShapeError(name, shown(kept), f"at most {shown(sizes)}, the tokens of each sequence", "Correct it.")
        device = inputs[0].device
        sequence, step = numbered(kept, device)
        places.append(torch.tensor(listed, device=device)[sequence] + step)
        new_bounds.append(torch.tensor([0, *itertools.accumulate(kept)], device=device))
    q, k, v = inputs
    one = q[places[0]], k[places[1]], v[places[1]]
    out, lse = attend_packed(one, (new_bounds[0], new_bounds[1]), options)
    every = out.new_zeros(len(q), *out.shape[1:]).index_put((places[0],), out)
    if lse is None:
        return Result(every, None)
    return Result(every, lse.new_full((len(lse), len(q)), -torch.inf).index_copy(1, places[0], lse))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Returned:
    """Write new keys and values into a cache in place, and compute attention of the queries over it, without gradients.

    Args:
        q: Queries, (B, Nq, H, D), or packed, (tokens, H, D), with ``cu_seqlens_q``.
        k_cache: Keys, (rows, capacity, Hkv, D), or pages (pages, page, Hkv, D) of any size with a ``page_table``.
        v_cache: Values, in the form of k_cache; the head dim may differ.
        k: New keys, (B, Nnew, Hkv, D), or packed, (tokens, Hkv, D), with ``cu_seqlens_k_new``.
        v: New values.
        qv: Refused.
        rotary_cos: Cosines, (positions, rotary dim / 2), by which new keys and queries are rotated.
        rotary_sin: Sines.
        cache_seqlens: Number of tokens in the cache, an int or (B,) int32; the whole cache by default. It is not
            changed.
        cache_batch_idx: Row of the cache, or of the page table, for each sequence, (B,) int32.
        cache_leftpad: Number of tokens of padding before each sequence, (B,) int32.
        page_table: Page numbers of each sequence, (B, n) int32.
        cu_seqlens_q: Cumulative lengths of packed queries, (B + 1,) int32.
        cu_seqlens_k_new: Cumulative lengths of packed new keys.
        max_seqlen_q: Ignored: the lengths are read.
        rotary_seqlens: First rotary position of each sequence, (B,) int32; ``cache_seqlens`` by default.
        q_descale: Refused.
        k_descale: Refused.
        v_descale: Refused.
        softmax_scale: Factor of the scores; 1 / sqrt(D) by default.
        causal: Whether later keys are left out.
        window_size: (left, right), -1 for a side without limit.
        attention_chunk: Tokens in a chunk, counted from each sequence's first key.
        softcap: Bound on the scores.
        rotary_interleaved: Whether dimensions 0 and 1 rotate together; otherwise 0 and half of the rotary dim.
        scheduler_metadata: Ignored.
        num_splits: Ignored.
        pack_gqa: Ignored.
        sm_margin: Ignored.
        return_softmax_lse: Whether to return lse too.
    Returns:
        Output in the form of q; with ``return_softmax_lse`` also lse, (B, H, Nq) or (H, tokens) float32.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit, or a row of the cache has no room for the new keys.
        PageError: The page table has too few columns.
        UnsupportedError: A refused argument is given.
    Example:
        >>> from ringweave.integrations.flash_attn_interface import flash_attn_with_kvcache
        >>> keys, values = torch.zeros(1, 64, 2, 16), torch.zeros(1, 64, 2, 16)
        >>> q, new = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 2, 16)
        >>> out = flash_attn_with_kvcache(q, keys, values, new, new, cache_seqlens=10, causal=True)
        >>> torch.equal(keys[:, 10], new[:, 0])
        True
    """
    _refuse(qv, q_descale, k_descale, v_descale)
    check_queries(q, packed=cu_seqlens_q is not None)
    of_q = None if cu_seqlens_q is None else checked_bounds((cu_seqlens_q, cu_seqlens_q), (len(q), len(q)))[0]
    sizes = [q.shape[1]] * len(q) if of_q is None else [b - a for a, b in itertools.pairwise(of_q)]
    count = len(sizes)
    cache = Cache.of(q, k_cache, v_cache, page_table, cache_batch_idx, count, "page_table")
    cache.first = whole_numbers("cache_leftpad", cache_leftpad, 0, count)
    cache.stop = whole_numbers("cache_seqlens", cache_seqlens, cache.capacity, count)
    pattern = _window(window_size, causal, attention_chunk, max(sizes, default=0), cache.capacity)
    options = Options(pattern, softmax_scale, softcap, with_lse=return_softmax_lse).checked(count, q.shape[-2])
    rotary = Rotary.of_cache(rotary_cos, rotary_sin, rotary_interleaved, q.shape[-1])
    starts = cache.stop if rotary_seqlens is None else whole_numbers("rotary_seqlens", rotary_seqlens, 0, count)
    new = new_tokens(k, v, cache, cu_seqlens_k_new, rotary, cache_seqlens is not None)
    return _returned(attend_and_append(q, of_q, cache, new, rotary, starts, options))


__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "install",
]
__dir__ = only(__all__)
