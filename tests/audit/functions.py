"""Attention functions that are right, and ones with the faults that the field's have; each with what was asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

import ringweave as rw
from ringweave.patterns import Pattern

N, BATCH, HEADS, KV_HEADS = 40, 2, 4, 2
LENGTHS = torch.tensor([40, 29])
STARTS = torch.tensor([0, 11])
CAUSAL = rw.Causal()
WINDOW = rw.SlidingWindow(12)
PACKED = CAUSAL.within(rw.Documents([11, 16, 13]))
LEFT = CAUSAL & rw.Keys(N, STARTS)
RIGHT = CAUSAL & rw.Keys(LENGTHS)
SINKS = (WINDOW | rw.Sinks(3)) & CAUSAL
CHUNKS = rw.Segments(8) & CAUSAL

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense(pattern: Pattern, nq: int = N, nk: int = N, q_offset: int = 0) -> Tensor:
    return pattern.to_dense(nq, nk, HEADS, batch=BATCH, q_offset=q_offset)


def masked(allowed: Tensor, bias: Tensor | None = None, lowest: float = -torch.inf) -> Function:
    """As eager attention is written in most models."""

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
    """A softmax for each tile of keys, summed."""
    allowed = dense(CAUSAL)
    return sum(  # type: ignore[return-value]
        masked(allowed & (torch.arange(N) // 16 == tile))(q, k, v) for tile in range(-(-N // 16))
    )


def swapped_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Key heads interleaved where they should be repeated side by side."""
    k, v = (x.repeat(1, HEADS // KV_HEADS, 1, 1) for x in (k, v))
    return masked(dense(CAUSAL))(q, k, v)


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A global token that is in the window as well, and counted in both."""
    bias = torch.zeros(N).index_fill(0, torch.tensor([0]), 2.0**0.5).square().clamp(min=1).log()
    return masked(dense(CAUSAL), bias)(q, k, v)


def crossed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(dense(CAUSAL))(q, k.flip(0), v.flip(0))


def in_tiles(pattern: Pattern, side: int) -> Tensor:
    allowed = dense(pattern)
    tiles = F.pad(allowed.float(), (0, -N % side, 0, -N % side))
    tiles = F.max_pool2d(tiles, side).repeat_interleave(side, 2).repeat_interleave(side, 3)
    return tiles[:, :, :N, :N] > 0


def heads(*patterns: Pattern) -> Pattern:
    return rw.PerHead(list(patterns))


SLOPES = torch.tensor([0.5, 0.25, 4.0, 16.0])
DISTANCES = (torch.arange(N)[:, None] - torch.arange(N)).abs()
LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0])
HEADWISE = heads(CAUSAL, WINDOW, rw.SlidingWindow(3), CHUNKS)


@dataclass(frozen=True)
class Case:
    """A function, what was asked of it, and what its audit has to say."""

    fn: Function
    asked: Pattern
    says: str = "agrees with"
    q_offset: int = 0
    nq: int = N
    nk: int = N
    options: dict[str, object] = field(default_factory=dict)


FAULTS = {
    "window one short": Case(ours(rw.SlidingWindow(11)), WINDOW, r"this is SlidingWindow\(11\), asked was SlidingWindow\(12\)"),
    "window one long": Case(fused(dense(rw.SlidingWindow(13))), WINDOW, r"this is SlidingWindow\(13\), asked"),
    "window dropped": Case(fused(None, is_causal=True), WINDOW & CAUSAL, r"SlidingWindow\(12\) is ignored"),
    "window to both sides": Case(ours(rw.SlidingWindow(12, 12)), WINDOW, r"this is SlidingWindow\(12, 12\), asked"),
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
        fused(dense(CAUSAL, 8, N)), CAUSAL, "the mask is that of queries 32 positions earlier", q_offset=32, nq=8
    ),
    "causal one late": Case(masked(dense(CAUSAL, N, N, 1)), CAUSAL, "1 positions later"),
    "sinks dropped": Case(ours(WINDOW & CAUSAL), SINKS, r"Sinks\(3\) is ignored"),
    "one sink fewer": Case(ours((WINDOW | rw.Sinks(2)) & CAUSAL), SINKS, r"Sinks\(2\)\) & Causal\(\), asked was"),
    "a learned sink where none is": Case(ours(CAUSAL, sink_logits=LOGITS), CAUSAL, "learned sinks .* and none was asked"),
    "learned sink dropped": Case(ours(CAUSAL), CAUSAL, "learned sinks are missing", options={"sinks": True}),
    "chunks misaligned": Case(
        masked(dense(rw.Segments(8) & CAUSAL, N + 3, N + 3)[:, :, 3:, 3:]), CHUNKS, r"this is Causal\(\) & Documents\("
    ),
    "chunks of another length": Case(ours(rw.Segments(9) & CAUSAL), CHUNKS, r"this is Segments\(9\) & Causal\(\)"),
    "key heads interleaved": Case(swapped_heads, CAUSAL, "query head 1 reads key head 1, not 0"),
    "last ragged tile visible": Case(
        masked(dense(WINDOW) | (torch.arange(N) >= 32) & (torch.arange(N) >= 32)[:, None]), WINDOW, "future visible from token 32"
    ),
    "whole tiles": Case(masked(in_tiles(rw.SlidingWindow(5), 8)), rw.SlidingWindow(5), "whole tiles of 8 x 8"),
    "one row's mask for all": Case(masked(dense(LEFT)[1:].expand(2, -1, -1, -1)), LEFT, "the mask of row 1 is taken"),
    "one head's mask for all": Case(masked(dense(HEADWISE)[:, 1:2].expand(-1, 4, -1, -1)), HEADWISE, "the mask of head 1 is"),
    "heads exchanged": Case(masked(dense(HEADWISE).flip(1)), HEADWISE, "heads have each other's masks"),
    "transposed": Case(masked(dense(WINDOW).mT), WINDOW, "queries and keys are exchanged"),
    "softmax per tile": Case(per_tile, CAUSAL, "weights of a row sum to 3"),
    "a token counted twice": Case(twice, CAUSAL, "key 0 counts 2 times"),
    "rows exchanged": Case(crossed, CAUSAL, "row 0 reads values of row 1"),
    "dropout left on": Case(ours(CAUSAL, dropout=0.3), CAUSAL, "dropout is on"),
    "a bias that nobody asked for": Case(
        masked(dense(CAUSAL), -0.1 * DISTANCES), CAUSAL, "a bias is at work, and none was asked for"
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
    "soft cap": Case(ours(CAUSAL, terms=rw.Softcap(20.0)), CAUSAL),
    "learned sinks": Case(ours(CAUSAL, sink_logits=LOGITS), CAUSAL, options={"sinks": True}),
    "a mixture counts twice": Case(
        ours(rw.LongNet([8, 16], [1, 1], causal=True)), rw.LongNet([8, 16], [1, 1], causal=True)
    ),
    "dilated": Case(ours(rw.Dilated(3, 4)), rw.Dilated(3, 4)),
    "nothing": Case(ours(~rw.Full()), ~rw.Full()),
    "rows without keys": Case(ours(rw.Keys(N, 20) & CAUSAL), rw.Keys(N, 20) & CAUSAL),
}  # fmt: skip
