"""G2, G3, G11 and the model's efficiency: what the planning code says, without ranks."""

from __future__ import annotations

import time

import numpy as np

import ringweave as rw

from ..parallel.choice import Choice, choose
from ..parallel.cost import Machine, Widths
from ..parallel.placement import block_for
from ..patterns import Pattern
from ..plan import branches
from .case import Options, Target
from .compare import Say

_TILE = 128
_LONG, _MILLION = 2048 * _TILE, 2**20
_HEADS = 32, 8


def documents(tokens: int, seed: int, *, median: int = 2048, sigma: float = 1.2, longest: int = 32768) -> list[int]:
    """Lengths as corpora have them, most short, a few long: log-normal, cut at ``longest``, that fill a sequence."""
    generator = np.random.default_rng(seed)
    found: list[int] = []
    while sum(found) < tokens:
        length = int(np.exp(generator.normal(np.log(median), sigma)))
        found.append(min(max(length, 16), longest, tokens - sum(found)))
    return found


def measure(options: Options, say: Say) -> list[Target]:
    """All of it."""
    return [*_placements(options, say), _planning(say), *_model(options, say)]


def chosen(pattern: Pattern, tokens: int, ranks: int, heads: tuple[int, int] = _HEADS) -> Choice:
    """The placement that a context would choose."""
    program = branches(pattern, tokens, tokens, heads=heads[0])
    return choose([program], tokens, ranks, block_for(tokens, ranks, _TILE), heads[0] // heads[1])


def full_ring(tokens: int, ranks: int, key_heads: int) -> float:
    """Bytes that a rank receives where all keys and values go around."""
    return tokens * (ranks - 1) / ranks * key_heads * Widths().bytes_of_key


def _placements(options: Options, say: Say) -> list[Target]:
    corpora = [rw.Documents(documents(_LONG, seed)) & rw.Causal() for seed in range(1 if options.quick else 6)]
    cases: list[tuple[str, list[Pattern], int, tuple[int, int], float | None]] = [
        ("32-tile window", [rw.SlidingWindow(32 * _TILE) & rw.Causal()], _LONG, _HEADS, 0.02),
        ("documents", [*corpora], _LONG, _HEADS, 0.30),
        ("dilated, rate 16", [rw.Dilated(512, 16)], _LONG, _HEADS, 0.0),
        ("longformer, two-sided", [rw.longformer(256, 1)], 512 * _TILE, (8, 8), 0.05),
        ("causal", [rw.Causal()], _LONG, _HEADS, None),
    ]
    made = []
    for name, patterns, tokens, heads, bound in cases:
        say(f"placing {name}")
        found = [chosen(pattern, tokens, 8, heads).estimate for pattern in patterns]
        size = f"{tokens // _TILE:,} tiles, 8 ranks, {heads[0]}:{heads[1]} heads, "
        # log-normal lengths: each corpus has its own placement
        size += f"{found[0].name} placement" if len(found) == 1 else f"worst of {len(found)} corpora"
        share = max(each.bytes_worst for each in found) / full_ring(tokens, 8, heads[1])
        balance = max(each.imbalance for each in found)
        if bound is not None:
            made.append(Target(f"G2 {name}: busiest rank's bytes over a full ring's", size, share, bound, False, "%"))
        made.append(Target(f"G3 {name}: most work over mean", size, balance, 1.05, False))
    return made


def _planning(say: Say) -> Target:
    """Of this process's own time: the machine may be shared. Each window is another one, so that none is cached."""
    say("planning 8,192 tiles on 64 ranks")
    taken = []
    for number in range(5):
        pattern = rw.SlidingWindow(32 * _TILE - number) & rw.Causal()
        begin = time.process_time()
        chosen(pattern, 8192 * _TILE, 64)
        taken.append(time.process_time() - begin)
    size = "8,192 tiles, 64 ranks, plan and placement, best of 5, processor time"
    return Target("G11 planning of a window", size, min(taken) * 1e3, 50.0, False, "ms")


def _model(options: Options, say: Say) -> list[Target]:
    patterns: dict[str, Pattern] = {
        "4K window": rw.SlidingWindow(4096) & rw.Causal(),
        "dilated, rate 16": rw.Dilated(512, 16),
        "documents of 8K": rw.Documents([8192] * (_MILLION // 8192)) & rw.Causal(),
    }
    counts = (8, 256) if options.quick else (8, 32, 64, 128, 256)
    made = []
    for name, pattern in patterns.items():
        say(f"modelling {name}")
        worst = min(chosen(pattern, _MILLION, ranks).estimate.efficiency for ranks in counts)
        size = (
            f"1M tokens, 32:8 heads, D 128, bfloat16, {' to '.join(map(str, (counts[0], counts[-1])))} GPUs, modelled"
        )
        made.append(Target(f"model, {name}: efficiency", size, worst, 0.8, True, "%"))
    found = chosen(patterns["4K window"], _MILLION, 256).estimate
    ring = full_ring(_MILLION, 256, _HEADS[1]) / Machine().bandwidth
    size = "1M tokens, 256 GPUs, modelled"
    made.append(Target("model, 4K window: a full ring's efficiency", size, found.ideal / ring, None, True, "%"))
    return made
