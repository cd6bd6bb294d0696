"""Named cases of ``ringweave bench``: what is measured, at which sizes, against whom."""

from __future__ import annotations

import itertools
import math
import time

import torch

import ringweave as rw

from ..errors import UnsupportedError, message
from ..plan.build import build
from . import kernels, ring, tuned
from .case import BenchCase, CaseResult, Options, PlanCost
from .compare import Outcome, Say, compare, silent
from .measure import interleaved
from .peers import chosen_backend, peers, sparse_backends
from .workload import Workload


def window_with_sinks(window: int, sinks: int) -> rw.Pattern:
    """The pattern that most cases run: a causal window, and the first tokens for all later queries."""
    return rw.SlidingWindow(window) & rw.Causal() | rw.Sinks(sinks) & rw.Causal()


def _workload(name: str, pattern: rw.Pattern, tokens: int, options: Options, heads: int) -> Workload:
    dtype = options.dtype or torch.float32
    return Workload(name, pattern, tokens, options.heads or heads, 64, 1, dtype, options.device)


def _names(workload: Workload, *others: str) -> list[str]:
    """ringweave as auto runs it, its other sparse backends, and others."""
    mine = sparse_backends(workload, besides=chosen_backend(workload, backward=True))
    return ["ringweave", *mine, *others]


def _attention(options: Options, say: Say) -> CaseResult:
    tokens = options.tokens or (1024 if options.quick else 8192)
    heads, rounds = (2, 3) if options.quick else (8, 5)
    records: list[Outcome] = []
    least = 1.25 / max(tokens // 128, 1)
    for name, pattern in (
        ("window + sinks", window_with_sinks(tokens // 8, 64)),
        ("random 10%", rw.random_blocks(tokens, max(0.1, least))),
    ):
        workload = _workload(name, pattern, tokens, options, heads)
        chosen = _names(workload, "sdpa", "gather_scatter", "sdpa+mask", *(() if options.quick else ("flex",)))
        records += compare(workload, peers(*chosen), rounds=options.rounds or rounds, say=say)
    return CaseResult("attention", tuple(records), " ".join(_against(records, "sdpa")))


def _against(records: list[Outcome], peer: str) -> list[str]:
    said = []
    for record in records:
        if record.peer == peer and record.over_first is not None:
            said.append(
                f"{record.workload}, {record.direction}: {peer} takes {record.over_first.medians:.2f} x "
                f"ringweave's time at density {record.density:.3f}."
            )
    return said


def _planning(options: Options, say: Say) -> CaseResult:
    records: list[PlanCost] = []
    lengths = [2**n for n in ((14, 15, 16) if options.quick else (14, 15, 16, 17, 18, 19, 20))]
    window = window_with_sinks(4096, 64)
    jobs = [("window + sinks", window, n) for n in ([options.tokens] if options.tokens else lengths)]
    table = options.tokens or (8192 if options.quick else 65536)
    jobs.append(("random 10%", rw.random_blocks(table, max(0.1, 1.25 / max(table // 128, 1))), table))
    for name, pattern, tokens in jobs:
        say(f"planning {name}, {tokens} tokens")

        def cold(pattern: rw.Pattern = pattern, tokens: int = tokens) -> object:
            return build(pattern, tokens, tokens, tile=(128, 128), device=options.device)

        timing = interleaved({"plan": cold}, rounds=options.rounds or 5, device=options.device)["plan"]
        plan = build(pattern, tokens, tokens, tile=(128, 128), device=options.device)
        records.append(PlanCost(name, repr(pattern), tokens, plan.nnz, timing, plan.nbytes))
    linear = [record for record in records if record.workload == "window + sinks"]
    first, last = linear[0], linear[-1]
    said = (
        f"From {first.tokens:,} to {last.tokens:,} tokens: {last.tiles / first.tiles:.1f} x the tiles, "
        f"{last.timing.median / first.timing.median:.1f} x the time, {last.nbytes / first.nbytes:.1f} x the bytes; "
        f"N squared would be {(last.tokens / first.tokens) ** 2:.0f} x."
    )
    return CaseResult("planning", tuple(records), said)


def _memory(options: Options, say: Say) -> CaseResult:
    lengths = [options.tokens] if options.tokens else ([4096, 8192] if options.quick else [32768, 262144])
    records: list[Outcome] = []
    for tokens in lengths:
        workload = _workload("window + sinks", window_with_sinks(512, 64), tokens, options, 1)
        others = ("sdpa",) if tokens <= 32768 else ()
        records += compare(workload, peers(*_names(workload, *others)), rounds=1, say=say)
    last = next(r for r in reversed(records) if r.direction == "forward" and r.peer == "ringweave")
    scores = last.heads * last.tokens**2 * 4
    held = "not measured" if last.peak is None else f"{last.peak.nbytes / 2**20:,.0f} MiB"
    said = (
        f"{last.tokens:,} tokens: {held} at the peak of forward; all N x N scores would be {scores / 2**30:,.1f} GiB."
    )
    return CaseResult("memory", tuple(records), said)


def _dilated(options: Options, say: Say) -> CaseResult:
    tokens = options.tokens or (2048 if options.quick else 16384)
    segments = [max(tokens // 16, 64), max(tokens // 4, 64), tokens]
    heads = 4 if options.quick else 8
    records: list[Outcome] = []
    for name, pattern in (
        ("LongNet", rw.LongNet([s // 16 * 16 for s in segments], [1, 4, 16], causal=True)),
        ("window | dilated", rw.SlidingWindow(256) | rw.Dilated(32, 16)),
    ):
        workload = _workload(name, pattern, tokens, options, heads)
        others = ("sdpa",) if options.quick or name == "LongNet" else ("sdpa", "flex")
        records += compare(workload, peers(*_names(workload, *others)), rounds=options.rounds or 3, say=say)
    return CaseResult("dilated", tuple(records), " ".join(_against(records, "sdpa")))


def _crossover(options: Options, say: Say) -> CaseResult:
    tokens = options.tokens or (1024 if options.quick else 8192)
    densities = (0.25, 1.0) if options.quick else (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
    records: list[Outcome] = []
    for density in densities:
        density = max(density, 1.25 / max(tokens // 128, 1)) if density < 1 else 1.0
        workload = _workload(f"random {density:.0%}", rw.random_blocks(tokens, density), tokens, options, 4)
        records += compare(
            workload, peers("ringweave", "sdpa"), rounds=options.rounds or 3, budget=20.0, memory=False, say=say
        )
    said = [f"{direction}: {_crossing(records, direction)}" for direction in ("forward", "forward + backward")]
    return CaseResult("crossover", tuple(records), " ".join(said))


def _crossing(records: list[Outcome], direction: str) -> str:
    """Where the two take equally long: between measured densities, linear in density and the logarithm of the ratio."""
    points = [
        (record.density, math.log(record.over_first.medians))
        for record in records
        if record.direction == direction and record.peer == "sdpa" and record.over_first is not None
    ]
    for (low, above), (high, below) in itertools.pairwise(points):
        if above > 0 >= below:
            return f"dense SDPA is faster above density {low + (high - low) * above / (above - below):.2f}."
    if not points:
        return "nothing was measured."
    return "ringweave is faster at every density." if points[-1][1] > 0 else "dense SDPA is faster at every density."


USUAL = Options()

CASES: dict[str, BenchCase] = {
    case.name: case
    for case in (
        BenchCase("attention", "window + sinks and 90%-sparse random tiles; all peers side by side", _attention),
        BenchCase("kernels", "share of the processor's peak over densities, sizes and types; overheads", kernels.run),
        BenchCase("planning", "cold plans from 16K to 1M tokens: time and bytes per non-empty tile", _planning),
        BenchCase("memory", "peak memory of a window at 32K and 262K tokens", _memory),
        BenchCase("dilated", "LongNet's mixture and a dilated relation against dense attention", _dilated),
        BenchCase("crossover", "sparse against dense over densities from 5% to 100%", _crossover),
        BenchCase("tune", "what ringweave tune gains over the usual choice, on four shapes", tuned.run),
        BenchCase("ring", "context parallelism: speed on 2 processes, bytes, modelled efficiency", ring.run),
    )
}


def run_case(name: str, options: Options = USUAL, say: Say = silent) -> CaseResult:
    """Run a named case.

    Args:
        name: One of ``CASES``.
        options: Sizes.
        say: Told what happens next.
    Raises:
        UnsupportedError: No case of that name.
    Example:
        >>> run_case("planning", Options(quick=True)).records[0].workload
        'window + sinks'
    """
    if name not in CASES:
        raise UnsupportedError(message("case", repr(name), f"one of {', '.join(CASES)}", "See ringweave bench --list."))
    start = time.perf_counter()
    result = CASES[name].run(options, say)
    say(f"{name}: done in {time.perf_counter() - start:.0f} s")
    return result
