"""The attention functions of flash-attn 2, with its names, parameters, layouts and returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ...axes import Axes
from ...checks import LONGEST, flag
from ...errors import ShapeError, UnsupportedError
from ...names import only
from ...patterns import Pattern
from ...torch_ops import Differentiable
from ...weights import by_columns
from .caches import Cache, attend_and_append, attend_packed_cache, new_tokens, whole_numbers
from .conventions import (
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
from .rotary import Rotary

#: The result of a function: the output, or the output, lse and weights with ``return_attn_probs``.
Returned = Tensor | tuple[Tensor, Tensor, Tensor]

_EMPTY_ROW = torch.inf
# flash-attn rounds both sizes of the matrix of weights up to a multiple of this
_ROUNDED = 128


def window(window_size: WindowSize, causal: bool, nk: int) -> Pattern:
    """Return the pattern of flash-attn 2's window: a side of ``nk`` keys or more has no limit.

    A side of -1 beside a limited side is ``nk`` keys wide, which is a limit for queries before the first key.
    """
    left, right = sides(window_size)
    right = 0 if flag("causal", causal, ShapeError) else right
    wide = left >= 0 and reaches(left, nk)
    # keys before the first one do not exist: a left side of any width is right, and a trace need not know its kind
    left = -1 if wide else left
    if right > 0:
        wide = reaches(right, nk)
        right = -1 if wide else right
    if wide is None and right:
        got = f"{window_size} with a max_seqlen_k that the compiler does not know"
        raise UnsupportedError("window_size", got, "a causal call, or a plain int", "Pass max_seqlen_k as an int.")
    if left < 0:
        return relation(None, None if right < 0 else right, nk)
    return relation(left, nk if right < 0 else right, nk)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute attention with flash-attn 2's arguments: the last query is at the last key.

    Query i attends the keys from ``i + Nk - Nq - left`` to ``i + Nk - Nq + right``. A query without keys gives 0.

    Args:
        q: Queries, (B, Nq, H, D), float32, float16, bfloat16 or float64, any strides.
        k: Keys, (B, Nk, Hkv, D); Hkv divides H.
        v: Values, (B, Nk, Hkv, D).
        dropout_p: Share of the weights that are dropped, by ringweave's generator: other weights than flash-attn's.
        softmax_scale: Factor of the scores; 1 / sqrt(D) by default.
        causal: Whether later keys are left out; the right side of the window is then 0.
        window_size: (left, right), -1 for a side without limit; a tensor of two numbers is taken too.
        softcap: Bound on the scores, before ALiBi; none at 0 or below.
        alibi_slopes: (H,) or (B, H), float32: the score of a pair decreases by its slope times its distance.
        deterministic: Ignored: backward always repeats its bits.
        return_attn_probs: Whether to return lse and weights too.
    Returns:
        Output, (B, Nq, H, D). With ``return_attn_probs`` also lse, (B, H, Nq) float32, inf for a query without keys,
        and the weights, negative where they were dropped, empty without dropout. Gradients of lse are ignored.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
        UnsupportedError: Both softcap and dropout are given.
    Example:
        >>> from ringweave.integrations.flash_attn import flash_attn_func
        >>> x = torch.randn(2, 100, 4, 32)
        >>> flash_attn_func(x, x, x, causal=True, window_size=(16, 0)).shape
        torch.Size([2, 100, 4, 32])
    """
    check_layout(q, k, v)
    pattern = window(window_size, causal, k.shape[1])
    options = Options(pattern, softmax_scale, softcap, alibi_slopes, dropout_p, return_attn_probs)
    options = options.checked(len(q), q.shape[2])
    state = torch.get_rng_state() if return_attn_probs and options.dropout else None
    result = attend((q, k, v), options)

    def weights(state: Tensor) -> Tensor:
        keys = torch.arange(k.shape[1], device=q.device).expand(k.shape[:2])
        found = _signed_weights(
            lambda values, p: attend((q, k, values), options._replace(dropout=p, with_lse=False)).out,
            state, keys, k.shape[1], v, options.dropout,
        )  # fmt: skip
        return _rounded_up(found.unbind(0), q.shape[1], k.shape[1])

    return _returned(result, return_attn_probs, q, state, weights)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute :func:`flash_attn_func` of keys and values in one tensor, (B, Nk, 2, Hkv, D).

    Example:
        >>> from ringweave.integrations.flash_attn import flash_attn_kvpacked_func
        >>> flash_attn_kvpacked_func(torch.randn(1, 8, 4, 16), torch.randn(1, 9, 2, 2, 16), causal=True).shape
        torch.Size([1, 8, 4, 16])
    """
    k, v = _unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute :func:`flash_attn_func` of queries, keys and values in one tensor, (B, N, 3, H, D).

    Example:
        >>> from ringweave.integrations.flash_attn import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(1, 8, 3, 4, 16), causal=True).shape
        torch.Size([1, 8, 4, 16])
    """
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Returned:
    """Compute attention of sequences that are packed end to end; in each, the last query is at the last key.

    A sequence may have no queries, no keys, or more queries than keys; queries without keys give 0. So do queries after
    the last bound, which belong to no sequence.

    Args:
        q: Queries of all sequences, (tokens, H, D).
        k: Keys, (tokens, Hkv, D); with a ``block_table``, pages (pages, page, Hkv, D).
        v: Values, in the form of k.
        cu_seqlens_q: Cumulative lengths of the queries, (sequences + 1,) int32: 0, ..., tokens.
        cu_seqlens_k: Cumulative lengths of the keys.
        max_seqlen_q: Queries of the longest sequence; the results do not depend on it.
        max_seqlen_k: Keys of the longest sequence: a side of the window that is as long has no limit.
        dropout_p: Share of the weights that are dropped.
        softmax_scale: Factor of the scores; 1 / sqrt(D) by default.
        causal: Whether later keys are left out.
        window_size: (left, right), -1 for a side without limit.
        softcap: Bound on the scores, before ALiBi.
        alibi_slopes: (H,) or (sequences, H), float32.
        deterministic: Ignored: backward always repeats its bits.
        return_attn_probs: Whether to return lse and weights too.
        block_table: Page numbers of each sequence, (sequences, n) int32; backward is refused.
    Returns:
        Output, (tokens, H, D). With ``return_attn_probs`` also lse, (H, tokens) float32, and the weights.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit, or the bounds do not grow from 0.
        UnsupportedError: Both softcap and dropout are given, or pages with dropout; in backward, pages.
    Example:
        >>> from ringweave.integrations.flash_attn import flash_attn_varlen_func
        >>> x, bounds = torch.randn(96, 4, 32), torch.tensor([0, 60, 96], dtype=torch.int32)
        >>> flash_attn_varlen_func(x, x, x, bounds, bounds, 60, 60, causal=True).shape
        torch.Size([96, 4, 32])
    """
    check_queries(q, packed=True)
    most = longest("max_seqlen_q", max_seqlen_q), longest("max_seqlen_k", max_seqlen_k)
    pattern = window(window_size, causal, most[1])
    options = Options(pattern, softmax_scale, softcap, alibi_slopes, dropout_p, return_attn_probs)
    options = options.checked(sequences(cu_seqlens_q), q.shape[1])
    bounds = cu_seqlens_q, cu_seqlens_k
    if block_table is not None:
        result = _over_pages((q, k, v), bounds, block_table, options)
        return _returned(result, return_attn_probs, q, None, lambda state: state)
    check_layout(q, k, v, packed=True)
    state = torch.get_rng_state() if return_attn_probs and options.dropout else None
    result = attend_packed((q, k, v), bounds, options)

    def weights(state: Tensor) -> Tensor:
        keys = torch.arange(len(k), device=q.device)
        first = cu_seqlens_k.long()[torch.searchsorted(cu_seqlens_k.long(), keys, right=True) - 1]
        found = _signed_weights(
            lambda values, p: attend_packed((q, k, values), bounds, options._replace(dropout=p, with_lse=False)).out,
            state, keys - first, most[1], v, options.dropout,
        )  # fmt: skip
        each = found[: cu_seqlens_q[-1]].split(cu_seqlens_q.diff().tolist())
        return _rounded_up(each, *most)

    return _returned(result, return_attn_probs, q, state, weights)


def _over_pages(inputs: Inputs, bounds: tuple[Tensor, Tensor], table: Tensor, options: Options) -> Result:
    """Compute attention of packed queries over pages, without dropout; a backward pass is refused."""
    if options.dropout:
        remedy = "Leave dropout out, or pass packed keys and values without a table."
        raise UnsupportedError("block_table", f"dropout_p={options.dropout}", "inference", remedy)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        # the room of the table bounds each sequence of keys
        of_q, of_k = checked_bounds(bounds, (len(q), LONGEST))
        sizes = [b - a for a, b in itertools.pairwise(of_k)]
        cache = Cache.of(q, k, v, table, None, len(sizes), "block_table")
        cache.stop = sizes
        cache.check_room([0] * len(sizes))
        out, lse = attend_packed_cache(q, of_q, cache, options)
        return (out,) if lse is None else (out, lse)

    out, *lse = WithoutBackward.apply(attended, *inputs)  # type: ignore[no-untyped-call]
    return Result(out, lse[0] if lse else None)


class WithoutBackward(Differentiable):
    """Outputs that depend on inputs, and refuse their gradients rather than leave them out."""

    @staticmethod
    def forward(call: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of a call on inputs."""
        return call(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        """Raise UnsupportedError."""
        remedy = "Pass packed keys and values, without a table."
        raise UnsupportedError("block_table", "a backward pass", "inference", remedy)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute :func:`flash_attn_varlen_func` of keys and values in one tensor, (tokens, 2, Hkv, D).

    Example:
        >>> from ringweave.integrations.flash_attn import flash_attn_varlen_kvpacked_func
        >>> bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> q, kv = torch.randn(8, 4, 16), torch.randn(8, 2, 2, 16)
        >>> flash_attn_varlen_kvpacked_func(q, kv, bounds, bounds, 5, 5, causal=True).shape
        torch.Size([8, 4, 16])
    """
    k, v = _unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Compute :func:`flash_attn_varlen_func` of queries, keys and values in one tensor, (tokens, 3, H, D).

    Example:
        >>> from ringweave.integrations.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(8, 3, 4, 16), bounds, 5, causal=True).shape
        torch.Size([8, 4, 16])
    """
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into a cache in place, and compute attention of the queries over it, without gradients.

    The last query of a sequence is at its last key, new keys included. Pages are read where they are.

    Args:
        q: Queries, (B, Nq, H, D).
        k_cache: Keys, (rows, capacity, Hkv, D), or pages (pages, page, Hkv, D) of any size with a ``block_table``.
        v_cache: Values, in the form of k_cache.
        k: New keys, (B, Nnew, Hkv, D), which are written from ``cache_seqlens`` on.
        v: New values.
        rotary_cos: Cosines, (positions, rotary dim / 2), by which new keys and queries are rotated.
        rotary_sin: Sines.
        cache_seqlens: Number of tokens in the cache, an int or (B,) int32; the whole cache by default. It is not
            changed.
        cache_batch_idx: Row of the cache for each sequence, (B,) int32.
        cache_leftpad: Number of tokens of padding before each sequence, (B,) int32; ``cache_seqlens`` includes them.
        block_table: Page numbers of each sequence, (B, n) int32.
        softmax_scale: Factor of the scores; 1 / sqrt(D) by default.
        causal: Whether later keys are left out.
        window_size: (left, right), -1 for a side without limit.
        softcap: Bound on the scores, before ALiBi.
        rotary_interleaved: Whether dimensions 0 and 1 rotate together; otherwise 0 and half of the rotary dim.
        alibi_slopes: (H,) or (B, H), float32.
        num_splits: Ignored: a row's result does not depend on how its keys are divided.
        return_softmax_lse: Whether to return lse too.
    Returns:
        Output, (B, Nq, H, D); with ``return_softmax_lse`` also lse, (B, H, Nq) float32, inf for a query without keys.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit, or a row of the cache has no room for the new keys.
        PageError: The block table has too few columns.
        UnsupportedError: A block table is combined with ``cache_batch_idx`` or ``cache_leftpad``.
    Example:
        >>> from ringweave.integrations.flash_attn import flash_attn_with_kvcache
        >>> keys, values = torch.zeros(1, 64, 2, 16), torch.zeros(1, 64, 2, 16)
        >>> q, new = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 2, 16)
        >>> out = flash_attn_with_kvcache(q, keys, values, new, new, cache_seqlens=10, causal=True)
        >>> torch.equal(keys[:, 10], new[:, 0])
        True
    """
    check_queries(q)
    count = len(q)
    for name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if block_table is not None and x is not None:
            remedy = f"Leave {name} out: the table says where a sequence is."
            raise UnsupportedError(name, "a tensor with block_table", "one of the two", remedy)
    cache = Cache.of(q, k_cache, v_cache, block_table, cache_batch_idx, count, "block_table")
    cache.first = whole_numbers("cache_leftpad", cache_leftpad, 0, count)
    cache.stop = whole_numbers("cache_seqlens", cache_seqlens, cache.capacity, count)
    pattern = window(window_size, causal, cache.capacity)
    options = Options(pattern, softmax_scale, softcap, alibi_slopes, with_lse=return_softmax_lse)
    options = options.checked(count, q.shape[2])
    rotary = Rotary.of_cache(rotary_cos, rotary_sin, rotary_interleaved, q.shape[3])
    new = new_tokens(k, v, cache, None, rotary, cache_seqlens is not None)
    result = attend_and_append(q, None, cache, new, rotary, cache.stop, options)
    return output_and_lse(result, _EMPTY_ROW) if return_softmax_lse else result.out


_STACKED = {
    (name, members, ndim): Axes(f"{name}: [{'B ' * (ndim == 5)}N {members} H D]")
    for name, members in (("qkv", 3), ("kv", 2))
    for ndim in (4, 5)
}


def _unpacked(name: str, packed: Tensor, members: int, ndim: int) -> tuple[Tensor, ...]:
    # the dtype and the axes of the parts are checked with them
    given: dict[str, Any] = {name: packed}
    _STACKED[name, members, ndim].fit(**given, empty=("B", "N", "H", "D"), remedy="Stack them before the heads.")
    return packed.unbind(-3)


def _returned(
    result: Result, probabilities: bool, q: Tensor, state: Tensor | None, weights: Callable[[Tensor], Tensor]
) -> Returned:
    """Return the output, or three values; ``weights`` computes the last one from the random state before the call."""
    if not probabilities:
        return result.out
    out, lse = output_and_lse(result, _EMPTY_ROW)
    return out, lse, q.new_empty(0) if state is None else weights(state)


def _signed_weights(
    attend: Callable[[Tensor, float], Tensor], state: Tensor, index: Tensor, keys: int, like: Tensor, dropout: float
) -> Tensor:
    """Return (..., H, keys), the weight of each query for each key of its sequence, negative where it was dropped.

    Each call repeats the seed of the call that dropped the weights.

    Args:
        attend: Function of values and a share to drop that returns the output.
        state: State of the random generator before the call that dropped the weights.
        index: Number of each key in its sequence, in the shape of ``like`` without heads and head dim.
        keys: Number of keys of the longest sequence.
        like: Values of the call.
        dropout: Share of the weights that was dropped.
    """

    def signed(values: Tensor) -> Tensor:
        values = values[..., None, :].expand(*like.shape[:-1], -1)
        torch.set_rng_state(state)
        left, every = attend(values, dropout), attend(values, 0.0)
        return torch.where(left == 0, -every, every)

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return by_columns(signed, index, keys, like.dtype)


def _rounded_up(weights: Sequence[Tensor], queries: int, keys: int) -> Tensor:
    """Stack matrices (Nq, H, keys) of sequences to (B, H, queries, keys), both sizes rounded up as in flash-attn."""
    rows, columns = (-(-size // _ROUNDED) * _ROUNDED for size in (queries, keys))
    each = [x.transpose(0, 1) for x in weights]
    return torch.stack([F.pad(x, (0, columns - x.shape[2], 0, rows - x.shape[1])) for x in each])


__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
__dir__ = only(__all__)
