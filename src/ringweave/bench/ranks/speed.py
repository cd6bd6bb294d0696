"""Wall-clock: 2 ranks of 1 thread against 1 rank of 2 threads, on the same work, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import ringweave as rw

from ...parallel import ContextParallel, Transport
from ..case import Options, Target
from ..compare import Outcome, outcome
from ..measure import Timing, ratio
from ..workload import Inputs, Oracle, Workload, sample_rows
from .group import Ranks

_WINDOW, _BOUND = 1024, 0.85
_NOTHING = torch.zeros(1, dtype=torch.int64)


def measure(ranks: Ranks, options: Options, folder: Path) -> list[Target | Outcome]:
    """Both types, or the one that is asked for."""
    dtypes = (options.dtype,) if options.dtype else (torch.float32, torch.bfloat16)
    return [record for dtype in dtypes for record in _of(ranks, options, dtype)]


def _of(ranks: Ranks, options: Options, dtype: torch.dtype) -> list[Target | Outcome]:
    tokens = options.tokens or (8192 if options.quick else 32768)
    pattern = rw.SlidingWindow(_WINDOW) & rw.Causal()
    name = str(dtype).removeprefix("torch.")
    work = Workload(f"window, {name}", pattern, tokens, options.heads or 8, 64, 1, dtype)
    inputs = work.inputs()
    found: list[list[float]] = [[], []]

    def job(carrier: Transport) -> tuple[list[list[float]], str | None]:
        ctx = ContextParallel(carrier, pattern, tokens, heads=(work.heads, work.key_heads))
        wrong = _wrong(ctx, work, inputs)
        if int(carrier.agree(torch.tensor([wrong is not None]).long(), what="speed").max()):
            return found, wrong
        shards = Inputs(*(ctx.shard(x, 2) for x in inputs))
        calls = (lambda: _call(inputs, pattern), lambda: _call(shards, pattern, ctx))
        for _ in range(1 + (options.rounds or (3 if options.quick else 7))):
            for number, (call, threads) in enumerate(zip(calls, (2, 1), strict=True)):
                torch.set_num_threads(threads)
                carrier.agree(_NOTHING, what="speed")
                # alone: rank 1 waits for the next agreement, without a core
                found[number].append(_seconds(call) if number or ranks.rank == 0 else 0.0)
        return [seconds[1:] for seconds in found], None

    every = ranks.on(2, job)
    return records(work, every, options)


def records(
    work: Workload, every: list[tuple[list[list[float]], str | None]], options: Options
) -> list[Target | Outcome]:
    """The two timings and their ratio, next to its target.

    Args:
        work: What was computed.
        every: By rank the seconds of one rank and of two, or what is wrong with the result.
        options: Sizes that were asked for.
    """
    name = str(work.dtype).removeprefix("torch.")
    size = f"{work.tokens:,} tokens, window {_WINDOW:,}, {work.heads} heads, D 64, forward + backward"
    what = f"{name}: speed of 2 ranks x 1 thread over 1 rank x 2 threads"
    wrong = every[0][1]
    if wrong is not None:
        return [Target(what, size, None, None, True, reason=f"wrong: {wrong}; not timed")]
    alone = Timing(tuple(every[0][0][0]))
    # a round is over when the slower rank is
    together = Timing(tuple(max(both) for both in zip(*(seconds[1] for seconds, _ in every), strict=True)))
    records: list[Target | Outcome] = []
    for peer, timing in (("1 rank x 2 threads", alone), ("2 ranks x 1 thread", together)):
        fields = {
            "timing": timing, "over_first": ratio(timing, alone), "how": "interleaved rounds",
            "gflops": work.flops(backward=True) / timing.median / 1e9,
        }  # fmt: skip
        records.append(outcome(work, "forward + backward", peer, fields))
    # at other sizes than the design's, no target
    bound = None if options.quick or options.tokens or options.heads else _BOUND
    return [*records, Target(what, size, alone.median / together.median, bound, True)]


def _call(x: Inputs, pattern: rw.Pattern, context: ContextParallel | None = None) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv)."""
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    out = rw.attention(q, k, v, pattern, context=context)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), x.dout))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _wrong(ctx: ContextParallel, work: Workload, inputs: Inputs) -> str | None:
    """What is wrong with the two ranks' result, by the float64 oracle on some rows; rank 0 looks."""
    torch.set_num_threads(1)
    rows = sample_rows(work.tokens)
    dout = torch.zeros_like(inputs.dout)
    dout[:, :, rows] = inputs.dout[:, :, rows]
    shards = Inputs(*(ctx.shard(x, 2) for x in inputs._replace(dout=dout)))
    found = [ctx.unshard(x, 2) for x in _call(shards, work.pattern, ctx)]
    if ctx.rank:
        return None
    oracle = Oracle(work.pattern, inputs, rows)
    return oracle.check_gradients(*found).excess(oracle.limit)
