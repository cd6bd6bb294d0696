"""Correct attention functions and functions with common faults, each with the pattern that it should compute.

``compare`` finds the ``FAULTS``, the named rule of the kit finds each of the ``KERNELS``, and ``leaks`` the ``LEAKS``.
The table of audit/functions.md names them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

import ringweave as rw
from ringweave.patterns import Pattern
from tests.oracle import attention as definition

N, BATCH, HEADS, KV_HEADS = 40, 2, 4, 2
LENGTHS = torch.tensor([40, 29])
STARTS = torch.tensor([0, 11])
CAUSAL = rw.Causal()
WINDOW = rw.SlidingWindow(12)
PACKED = CAUSAL.within(rw.Documents([11, 16, 13]))
LEFT = CAUSAL & rw.KeyPadding(N, STARTS)
RIGHT = CAUSAL & rw.KeyPadding(LENGTHS)
SINKS = (WINDOW | rw.Sinks(3)) & CAUSAL
CHUNKS = rw.Segments(8) & CAUSAL

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense(pattern: Pattern, nq: int = N, nk: int = N, q_offset: int = 0) -> Tensor:
    return pattern.to_dense(nq, nk, HEADS, batch=BATCH, q_offset=q_offset)


def masked(allowed: Tensor, bias: Tensor | None = None, lowest: float = -torch.inf) -> Function:
    """Eager attention as most models implement it."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
        scores = scores if bias is None else scores + bias
        weights = torch.where(allowed, scores, lowest).softmax(-1)
        return weights.nan_to_num(0.0).to(v.dtype) @ v

    return fn


def fused(allowed: Tensor | None, **options: object) -> Function:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=True, **options)  # type: ignore[arg-type]


def ours(pattern: Pattern, **options: object) -> Function:
    return lambda q, k, v: rw.attention(q, k, v, pattern, **options)  # type: ignore[arg-type]


def per_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sum a separate softmax of each tile of keys."""
    allowed = dense(CAUSAL)
    return sum(  # type: ignore[return-value]
        masked(allowed & (torch.arange(N) // 16 == tile))(q, k, v) for tile in range(-(-N // 16))
    )


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Count a token twice that is global and in the window."""
    bias = torch.zeros(N).index_fill(0, torch.tensor([0]), 2.0**0.5).square().clamp(min=1).log()
    return masked(dense(CAUSAL), bias)(q, k, v)


def in_tiles(pattern: Pattern, side: int) -> Tensor:
    allowed = dense(pattern)
    tiles = F.pad(allowed.float(), (0, -N % side, 0, -N % side))
    tiles = F.max_pool2d(tiles, side).repeat_interleave(side, 2).repeat_interleave(side, 3)
    return tiles[:, :, :N, :N] > 0


Change = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    return x


def side_by_side(x: Tensor) -> Tensor:
    """Repeat each key head for its query heads."""
    return x.repeat_interleave(HEADS // x.shape[1], 1)


def in_turn(x: Tensor) -> Tensor:
    """Repeat key heads in turn, so that query heads read the wrong ones."""
    return x.repeat(1, HEADS // x.shape[1], 1, 1)


def causal(
    scores: Change = same, k: Change = same, v: Change = same, weights: Change = same, q: Change = same,
    shared: tuple[Change, Change] = (side_by_side, side_by_side),
) -> Function:  # fmt: skip
    """Return causal attention with one step changed."""

    def fn(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries, keys, values = q(queries), k(shared[0](keys)), v(shared[1](values))
        found = scores((queries @ keys.mT).float() * queries.shape[-1] ** -0.5)
        found = found.masked_fill(~dense(CAUSAL), -torch.inf)
        return weights(found.softmax(-1)).to(values.dtype) @ values

    return fn


def largest(scores: Tensor) -> Tensor:
    """Keep the eight largest allowed scores of a row."""
    seen = scores.masked_fill(~dense(CAUSAL), -torch.inf)
    return scores.masked_fill(seen < seen.topk(8, -1).values[..., -1:], -torch.inf)


def of_head(head: int, change: Change) -> Change:
    return lambda x: torch.where(torch.arange(x.shape[1])[:, None, None] == head, change(x), x)


def of_last_row(change: Change) -> Change:
    return lambda x: torch.cat((x[:, :, :-1], change(x)[:, :, -1:]), 2)


def in_type(dtype: torch.dtype) -> Function:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True, enable_gqa=True)
        return found.to(q.dtype)

    return fn


def tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute in the layout (B, N, H, D)."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return fused(None, is_causal=True)(q, k, v).transpose(1, 2).contiguous().transpose(1, 2)


def in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([ours(CAUSAL, q_offset=n)(q[:, :, n : n + 7], k, v) for n in range(0, N, 7)], 2)


def in_a_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Merge the attention to the keys of one rank after the other."""
    parts = [
        rw.attention_with_lse(q, k[:, :, n : n + 10], v[:, :, n : n + 10], CAUSAL, q_offset=-n) if n == 0 else
        rw.attention_with_lse(q, k, v, CAUSAL & rw.KeyPadding(n + 10, n)) for n in range(0, N, 10)
    ]  # fmt: skip
    return rw.merge([out for out, _ in parts], [lse for _, lse in parts])[0]


def running(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute a running softmax over tiles with powers of two."""
    k, v = side_by_side(k).float(), side_by_side(v).float()
    most, total, out = torch.full((BATCH, HEADS, N, 1), -1e30), torch.zeros(BATCH, HEADS, N, 1), torch.zeros(q.shape)
    for tile in range(0, N, 16):
        keys = slice(tile, tile + 16)
        scores = q.float() @ k[:, :, keys].mT * (q.shape[-1] ** -0.5 * 1.44269504)
        scores = scores.masked_fill(~dense(CAUSAL)[..., keys], -torch.inf)
        now = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, kept = torch.exp2(scores - now), torch.exp2(most - now)
        out, total, most = out * kept + weights @ v[:, :, keys], total * kept + weights.sum(-1, keepdim=True), now
    return (out / total).to(q.dtype)


def raw(allowed: Tensor) -> Function:
    """Return NaN for rows without keys, as a plain softmax does."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ side_by_side(k).mT).float() * q.shape[-1] ** -0.5
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1).to(v.dtype) @ side_by_side(v)

    return fn


def heads(*patterns: Pattern) -> Pattern:
    return rw.PerHead(list(patterns))


SLOPES = torch.tensor([0.5, 0.25, 4.0, 16.0])
DISTANCES = (torch.arange(N)[:, None] - torch.arange(N)).abs()
LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0])
HEADWISE = heads(CAUSAL, WINDOW, rw.SlidingWindow(3), CHUNKS)


@dataclass(frozen=True)
class Case:
    """A function, the requested pattern, and the expected sentence of the audit."""

    fn: Function
    asked: Pattern
    says: str = "agrees with"
    q_offset: int = 0
    nq: int = N
    nk: int = N
    options: dict[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


FAULTS = {
    "window one short": Case(ours(rw.SlidingWindow(11)), WINDOW, r"attends SlidingWindow\(11\) instead of SlidingWindow\(12\)"),
    "window one long": Case(fused(dense(rw.SlidingWindow(13))), WINDOW, r"attends SlidingWindow\(13\) instead of"),
    "window dropped": Case(fused(None, is_causal=True), WINDOW & CAUSAL, r"SlidingWindow\(12\) is ignored"),
    "window to both sides": Case(ours(rw.SlidingWindow(12, 12)), WINDOW, r"attends SlidingWindow\(12, 12\) instead of"),
    "left padding ignored": Case(fused(None, is_causal=True), LEFT, "padding is ignored, in row 1"),
    "right padding ignored": Case(fused(None, is_causal=True), RIGHT, "padding is ignored, in row 1"),
    "packing ignored": Case(fused(None, is_causal=True), PACKED, "packing is ignored: documents attend each other"),
    "packed sinks of the row": Case(
        ours(SINKS & rw.Documents([11, 16, 13])), SINKS.within(rw.Documents([11, 16, 13])),
        "positions are counted from the start of the row",
    ),
    "future": Case(fused(None), CAUSAL, "future visible from token 0"),
    "future from a token on": Case(
        masked(dense(CAUSAL) | (torch.arange(N) >= 17)[:, None]), CAUSAL, "future visible from token 17"
    ),
    "causal from the top left over a cache": Case(
        fused(dense(CAUSAL, 8, N)), CAUSAL, "the mask is shifted: it fits queries 32 positions earlier", q_offset=32, nq=8
    ),
    "causal one late": Case(masked(dense(CAUSAL, N, N, 1)), CAUSAL, "1 positions later"),
    "sinks dropped": Case(ours(WINDOW & CAUSAL), SINKS, r"Sinks\(3\) is ignored"),
    "one sink fewer": Case(ours((WINDOW | rw.Sinks(2)) & CAUSAL), SINKS, r"Sinks\(2\)\) & Causal\(\) instead of"),
    "a learned sink where none is": Case(ours(CAUSAL, sink_logits=LOGITS), CAUSAL, "learned sinks .* but no sinks were requested"),
    "learned sink dropped": Case(ours(CAUSAL), CAUSAL, "learned sinks are missing", options={"sinks": True}),
    "chunks misaligned": Case(
        masked(dense(rw.Segments(8) & CAUSAL, N + 3, N + 3)[:, :, 3:, 3:]), CHUNKS, r"attends Causal\(\) & Documents\("
    ),
    "chunks of another length": Case(ours(rw.Segments(9) & CAUSAL), CHUNKS, r"attends Segments\(9\) & Causal\(\)"),
    "key heads interleaved": Case(
        causal(shared=(in_turn, in_turn)), CAUSAL, "head 1 of row 0 reads keys and values of key head 1, not 0"
    ),
    "keys of another head": Case(
        causal(shared=(in_turn, side_by_side)), CAUSAL, "head 1 of row 0 reads keys of key head 1, not 0"
    ),
    "values of another head": Case(
        causal(shared=(side_by_side, in_turn)), CAUSAL, "head 1 of row 0 reads values of key head 1, not 0"
    ),
    "one head reads another's keys": Case(
        causal(k=of_head(3, lambda x: x.roll(2, 1))), CAUSAL, "head 3 of row 0 reads keys of key head 0, not 1"
    ),
    "last ragged tile visible": Case(
        masked(dense(WINDOW) | (torch.arange(N) >= 32) & (torch.arange(N) >= 32)[:, None]), WINDOW, "future visible from token 32"
    ),
    "whole tiles": Case(masked(in_tiles(rw.SlidingWindow(5), 8)), rw.SlidingWindow(5), "whole tiles of 8 x 8"),
    "one row's mask for all": Case(masked(dense(LEFT)[1:].expand(2, -1, -1, -1)), LEFT, "the mask of row 1 is used for every row"),
    "one head's mask for all": Case(masked(dense(HEADWISE)[:, 1:2].expand(-1, 4, -1, -1)), HEADWISE, "the mask of head 1 is used for every head"),
    "heads exchanged": Case(masked(dense(HEADWISE).flip(1)), HEADWISE, "the masks of heads are exchanged: head 0 uses the mask of head"),
    "transposed": Case(masked(dense(WINDOW).mT), WINDOW, "queries and keys are exchanged"),
    "softmax per tile": Case(per_tile, CAUSAL, "weights of a row sum to 3"),
    "a token counted twice": Case(twice, CAUSAL, "key 0 counts 2 times"),
    "rows exchanged": Case(
        causal(k=lambda x: x.flip(0), v=lambda x: x.flip(0)), CAUSAL, "head 0 of row 0 reads keys and values of row 1"
    ),
    "keys of another row": Case(causal(k=lambda x: x.roll(1, 0)), CAUSAL, "head 0 of row 0 reads keys of row 1, not 0"),
    "values of another row": Case(causal(v=lambda x: x.roll(1, 0)), CAUSAL, "head 0 of row 0 reads values of row 1, not 0"),
    "queries of another row": Case(causal(q=lambda x: x.roll(1, 0)), CAUSAL, "not a softmax of q k"),
    "keys one token late": Case(causal(k=lambda x: x.roll(1, 2)), CAUSAL, "not a softmax of q k"),
    "values one token late": Case(causal(v=lambda x: x.roll(1, 2)), CAUSAL, "pairs missing"),
    "no scale": Case(causal(q=lambda x: x * x.shape[-1] ** 0.5), CAUSAL, "multiplied by 1, not by 0.25"),
    "scale of 1 / D": Case(causal(q=lambda x: x * x.shape[-1] ** -0.5), CAUSAL, "multiplied by 0.0625, not by 0.25"),
    "given scale ignored": Case(causal(), CAUSAL, "multiplied by 0.25, not by 0.1", options={"scale": 0.1}),
    "temperature": Case(causal(scores=lambda x: x / 1.1), CAUSAL, "multiplied by 0.227, not by 0.25"),
    "temperature of one head": Case(causal(scores=of_head(2, lambda x: x / 1.1)), CAUSAL, "head 2 of row 0 is off"),
    "scores negated": Case(causal(scores=torch.neg), CAUSAL, "multiplied by -0.25"),
    "scores ignored": Case(causal(scores=lambda x: 0 * x), CAUSAL, "multiplied by .*, not by 0.25"),
    "a soft cap without a request": Case(ours(CAUSAL, terms=rw.Softcap(20.0)), CAUSAL, "capped at 20, not by 0.25"),
    "soft cap dropped": Case(ours(CAUSAL), CAUSAL, "multiplied by 0.25, not by 0.25 and capped at 20", options={"softcap": 20.0}),
    "scores clamped": Case(causal(scores=lambda x: x.clamp(-1, 1)), CAUSAL, "not a softmax of q k"),
    "scores without their sign": Case(causal(scores=torch.abs), CAUSAL, "not a softmax of q k"),
    "top-k": Case(causal(scores=largest), CAUSAL, "not a softmax of q k"),
    "small weights dropped": Case(
        causal(weights=lambda x: x * (x > 0.1 * x.amax(-1, keepdim=True))), CAUSAL, "not a softmax of q k"
    ),
    "keys normalised": Case(causal(k=lambda x: F.normalize(x, dim=-1)), CAUSAL, "not a softmax of q k|multiplied by"),
    "wrong in the last query only": Case(causal(scores=of_last_row(lambda x: x * 1.5)), CAUSAL, "query 39 of head 0"),
    "wrong for a head dimension of 16": Case(
        causal(k=lambda x: x * (1.25 if x.shape[-1] == 16 else 1)), CAUSAL, "multiplied by 0.31"
    ),
    "mask of -20 in float16": Case(masked(dense(CAUSAL), lowest=-20.0), CAUSAL, "future visible from token 0", dtype=torch.float16),
    "mask of -100 in bfloat16": Case(masked(dense(CAUSAL), lowest=-100.0), CAUSAL, "future visible from token 0", dtype=torch.bfloat16),
    "mask of -110 in float32": Case(masked(dense(CAUSAL), lowest=-110.0), CAUSAL, "future visible from token 0"),
    "added mask of -20 in float16": Case(
        masked(dense(rw.Full()), -20.0 * ~dense(CAUSAL)), CAUSAL, "future visible", dtype=torch.float16
    ),
    "added mask of -100 in bfloat16": Case(
        masked(dense(rw.Full()), -100.0 * ~dense(CAUSAL)), CAUSAL, "future visible", dtype=torch.bfloat16
    ),
    "added mask of -110 in float32": Case(masked(dense(rw.Full()), -110.0 * ~dense(CAUSAL)), CAUSAL, "future visible"),
    "mask of -110 for one pair": Case(
        masked(dense(CAUSAL) | (torch.arange(N * N) == 5 * N + 17).view(N, N), -110.0 * (DISTANCES.triu(1) > 0)), CAUSAL,
        "1 pair extra, the first is row 0, head 0, query 5, key 17|2 pairs|8 pairs extra",
    ),
    "mask after the softmax": Case(
        lambda q, k, v: ((q @ side_by_side(k).mT * 0.25).softmax(-1) * dense(CAUSAL)) @ side_by_side(v), CAUSAL, "sum to"
    ),
    "masked scores of 0": Case(masked(dense(CAUSAL), lowest=0.0), CAUSAL, "future visible from token 0"),
    "one late on the right": Case(ours(rw.SlidingWindow(12, 5)), rw.SlidingWindow(12, 4), r"attends SlidingWindow\(12, 5\)"),
    "one early on the right": Case(ours(rw.SlidingWindow(12, 3)), rw.SlidingWindow(12, 4), r"attends SlidingWindow\(12, 3\)"),
    "last key of each tile lost": Case(masked(dense(CAUSAL) & (torch.arange(N) % 16 != 15)), CAUSAL, "pairs missing"),
    "first key of the last tile lost": Case(masked(dense(CAUSAL) & (torch.arange(N) != 32)), CAUSAL, "pairs missing"),
    "a document's boundary one late": Case(
        ours(CAUSAL.within(rw.Documents([12, 15, 13]))), PACKED, "pairs missing.*pairs extra"
    ),
    "padding one short": Case(ours(CAUSAL & rw.KeyPadding(torch.tensor([40, 30]))), RIGHT, "padding|pairs? extra"),
    "first row attends nothing": Case(masked(dense(CAUSAL) & (torch.arange(N) > 0)[:, None]), CAUSAL, "pairs missing"),
    "dropout left on": Case(ours(CAUSAL, dropout=0.3), CAUSAL, "dropout is on"),
    "a bias without a request": Case(
        masked(dense(CAUSAL), -0.1 * DISTANCES), CAUSAL, "a bias is applied, but none was requested"
    ),
}  # fmt: skip

SOUND = {
    "full": Case(fused(None), rw.Full()),
    "causal": Case(fused(None, is_causal=True), CAUSAL),
    "causal by numbers": Case(masked(dense(CAUSAL), lowest=torch.finfo(torch.float32).min), CAUSAL),
    "causal by minus ten thousand": Case(masked(dense(CAUSAL), lowest=-1e4), CAUSAL),
    "window": Case(ours(WINDOW), WINDOW),
    "window, eager": Case(masked(dense(WINDOW)), WINDOW),
    "window and sinks": Case(ours(SINKS), SINKS),
    "left padding": Case(masked(dense(LEFT)), LEFT),
    "right padding": Case(ours(RIGHT), RIGHT),
    "packed": Case(ours(PACKED), PACKED),
    "chunks": Case(masked(dense(CHUNKS)), CHUNKS),
    "per head": Case(ours(HEADWISE), HEADWISE),
    "a step over a cache": Case(ours(WINDOW, q_offset=32), WINDOW, q_offset=32, nq=8),
    "one query over a cache": Case(fused(None), CAUSAL, q_offset=39, nq=1),
    "extreme bias": Case(ours(CAUSAL, terms=rw.ALiBi(SLOPES)), CAUSAL, options={"bias": True}),
    "extreme bias, eager": Case(
        masked(dense(CAUSAL), -SLOPES[:, None, None] * DISTANCES), CAUSAL, options={"bias": True}
    ),
    "soft cap": Case(
        ours(CAUSAL, terms=rw.Softcap(20.0)), CAUSAL, "scores capped at 20|, capped at 20", options={"softcap": "fitted"}
    ),
    "soft cap that is given": Case(ours(CAUSAL, terms=rw.Softcap(20.0)), CAUSAL, options={"softcap": 20.0}),
    "a scale of its own": Case(ours(CAUSAL, scale=1.0), CAUSAL, "scores times 1", options={"scale": "fitted"}),
    "a scale that is given": Case(ours(CAUSAL, scale=0.02), CAUSAL, options={"scale": 0.02}),
    "float16 inside": Case(in_type(torch.float16), CAUSAL, "computed in float16"),
    "bfloat16 inside": Case(in_type(torch.bfloat16), CAUSAL, "computed in bfloat16"),
    "float64 inside": Case(in_type(torch.float64), CAUSAL),
    "sinks of 20": Case(ours(CAUSAL, sink_logits=torch.full((HEADS,), 20.0)), CAUSAL, options={"sinks": True}),
    "NaN padding": Case(raw(dense(LEFT)), LEFT),
    "tokens before heads": Case(tokens_first, CAUSAL),
    "queries in chunks": Case(in_chunks, CAUSAL),
    "merged around a ring": Case(in_a_ring, CAUSAL),
    "a running softmax of powers of two": Case(running, CAUSAL),
    "top-k of all": Case(causal(scores=lambda x: x.masked_fill(x < x.topk(N, -1).values[..., -1:], -torch.inf)), CAUSAL),
    "learned sinks": Case(ours(CAUSAL, sink_logits=LOGITS), CAUSAL, options={"sinks": True}),
    "a mixture counts twice": Case(
        ours(rw.LongNet([8, 16], [1, 1], causal=True)), rw.LongNet([8, 16], [1, 1], causal=True)
    ),
    "dilated": Case(ours(rw.Dilated(3, 4)), rw.Dilated(3, 4)),
    "nothing": Case(ours(~rw.Full()), ~rw.Full()),
    "rows without keys": Case(ours(rw.KeyPadding(N, 20) & CAUSAL), rw.KeyPadding(N, 20) & CAUSAL),
}  # fmt: skip


# ---- kernels, as the kit calls them ----------------------------------------------------------------------------------


def exact(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None = None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return definition(q.double(), k.double(), v.double(), allowed, scale)[0].to(q.dtype)


def whole_tiles(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    n = allowed.shape[-1]
    tiles = F.pad(allowed, (0, -n % 16)).unflatten(-1, (-1, 16)).any(-1)
    return exact(q, k, v, tiles.repeat_interleave(16, -1)[..., :n])


def interleaved(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    ratio = q.shape[1] // k.shape[1]
    return exact(q, k.repeat(1, ratio, 1, 1), v.repeat(1, ratio, 1, 1), allowed)


def a_softmax_a_tile(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    tile = torch.arange(allowed.shape[-1]) // 16
    return sum(exact(q, k, v, allowed & (tile == n)) for n in range(int(tile[-1]) + 1))  # type: ignore[return-value]


def detached(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return exact(q, k, v.detach(), allowed)


def uniform(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Return the mean of all values for rows without keys."""
    return exact(q, k, v, allowed | ~allowed.any(-1, keepdim=True))


def by_address(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Assume that tensors are contiguous."""
    q, k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v))
    return exact(q, k, v, allowed)


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    out = exact(q, k, v, allowed)
    v.mul_(2.0) if not v.requires_grad else None
    return out


def without_scale(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    return exact(q, k, v, allowed)


def first_256_keys(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return exact(q, k, v, allowed & (torch.arange(k.shape[2]) < 256))


def multiples_of_64(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    place = torch.arange(k.shape[2])
    return exact(q, k, v, allowed & ((place % 64 != 0) | (place == 0)))


def one_dimension(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return exact(q, k.roll(1, -1) if q.shape[-1] == 128 else k, v, allowed)


def one_value_dimension(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return exact(q, k, v.roll(1, -1) if v.shape[-1] == 96 else v, allowed)


def wide_heads(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Leave out channels from 192 on."""
    return exact(q[..., :192], k[..., :192], v, allowed, q.shape[-1] ** -0.5)


def third_element(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    out = exact(q, k, v, allowed)
    return torch.cat((out[:2], out[:1].expand_as(out[2:])))


def one_batch_size(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return exact(q, k, v.flip(0) if len(q) == 4 else v, allowed)


def one_length(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Forget an incomplete last tile."""
    return exact(q, k, v, allowed & (torch.arange(k.shape[2]) < (112 if k.shape[2] == 128 else 10**6)))


def one_query(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return exact(q, k, v, allowed & (torch.arange(k.shape[2]) > 0) if q.shape[2] == 1 else allowed)


def from_the_left(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """Give queries over a cache the first positions."""
    allowed = pattern.to_dense(q.shape[2], k.shape[2], q.shape[1], batch=len(q), q_offset=0) > 0
    return exact(q, k, v, allowed)


def binary_lse(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = definition(q.double(), k.double(), v.double(), allowed, q.shape[-1] ** -0.5)
    return out.to(q.dtype), (lse * 1.44269504).float()


class _Unscaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 1.01


def gradient_of_keys(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return exact(q, _Unscaled.apply(k), v, allowed)


def added_mask(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Add a mask to the scores, which keeps NaN of keys that no query attends."""
    scores = side(k, q) @ q.double().mT * q.shape[-1] ** -0.5
    bias = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -1e300)
    weights = (scores.mT + bias).softmax(-1) * allowed.any(-1, keepdim=True)
    return (weights @ side(v, q)).to(q.dtype)


def side(x: Tensor, q: Tensor) -> Tensor:
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], 1)


KERNELS = {
    "whole tiles of keys": (whole_tiles, "exact"),
    "key heads of a kernel interleaved": (interleaved, "exact"),
    "scale ignored": (without_scale, "exact"),
    "keys from 256 on dropped": (first_256_keys, "exact"),
    "keys at multiples of 64 lost": (multiples_of_64, "exact"),
    "wrong for D = 128 only": (one_dimension, "exact"),
    "wrong for values of 96 channels only": (one_value_dimension, "exact"),
    "channels from 192 on dropped": (wide_heads, "exact"),
    "wrong from the third batch element on": (third_element, "exact"),
    "wrong for a batch of 4 only": (one_batch_size, "exact"),
    "wrong for 128 keys only": (one_length, "exact"),
    "wrong for one query only": (one_query, "exact"),
    "queries over a cache counted from the left": (from_the_left, "exact"),
    "lse to the base 2": (binary_lse, "exact"),
    "leak into the rest of a tile": (whole_tiles, "leaks"),
    "a softmax for each tile of a kernel": (a_softmax_a_tile, "row_sums"),
    "rows without keys give a mean": (uniform, "row_sums"),
    "no gradient of values": (detached, "gradients"),
    "gradient of keys 1 % long": (gradient_of_keys, "gradients"),
    "takes inputs for contiguous": (by_address, "strides"),
    "writes to its inputs": (scaled_in_place, "repeated"),
    "NaN of unattended keys spreads": (added_mask, "unattended_nan"),
}


def careful(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the definition without reading keys that no query attends."""
    seen = allowed.any(2).unflatten(1, (k.shape[1], -1)).any(2)[..., None]
    k, v = (torch.where(seen, x, 0.0).double() for x in (k, v))
    out, lse = definition(q.double(), k, v, allowed, scale)
    return out.to(q.dtype), lse.float()


RIGHT_KERNELS: dict[str, Callable[..., object]] = {
    "the definition in float64": careful,
    "ringweave's own": rw.attention_with_lse,
}


# ---- whole functions of tokens, as leaks calls them ------------------------------------------------------------------


def layer(pattern: Pattern, tokens: int = 12) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        y = x[:, None]
        return x + masked(pattern.to_dense(tokens, batch=len(x)))(y, y, y)[:, 0]

    return fn


def only_with_gradients(x: Tensor) -> Tensor:
    return layer(rw.Full() if torch.is_grad_enabled() else CAUSAL)(x)


def by_content(x: Tensor) -> Tensor:
    """Attend the whole row if a token is large."""
    return layer(rw.Full() if bool((x > 3).any()) else CAUSAL)(x)


def padded_with_nan(pattern: Pattern) -> Callable[[Tensor], Tensor]:
    """Return a function with NaN in rows without keys and in gradients next to them."""
    allowed = pattern.to_dense(12)

    def fn(x: Tensor) -> Tensor:
        y = x[:, None]
        return (y @ y.mT).masked_fill(~allowed, -torch.inf).softmax(-1).matmul(y)[:, 0]

    return fn


LEAKS: dict[str, Callable[[Tensor], Tensor]] = {
    "the next token is mixed in": lambda x: layer(CAUSAL)(x) + x.roll(-1, 1),
    "a mean over the row": lambda x: layer(CAUSAL)(x) + x.mean(1, keepdim=True),
    "a mean over the batch": lambda x: layer(CAUSAL)(x) + x.mean(0),
    "leaks with gradients on only": only_with_gradients,
    "leaks by content": by_content,
    "the future beside NaN padding": padded_with_nan((CAUSAL | rw.SlidingWindow(0, 1)) & rw.KeyPadding(12, 3)),
}
LEAKLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "a causal layer": layer(CAUSAL),
    "NaN padding with gradients": padded_with_nan(CAUSAL & rw.KeyPadding(12, 3)),
}
