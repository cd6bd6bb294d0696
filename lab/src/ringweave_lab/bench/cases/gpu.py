"""The case ``kernels`` on a GPU: the Triton kernels next to the vendors' kernels.

Results are checked on sampled rows of two key heads. Kernels are timed in turn as replays of CUDA graphs, short ones
several times between two events, since a launch from Python takes longer than many kernels. Backward is timed alone, on
a retained autograd graph. The peak is the best square matrix product of the same type so far in the run. When the time
is used up, no further comparison starts, and the result reports this.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave.patterns import Pattern

from ...tune.measure import interleaved
from ...tune.problem import BACKWARD, BOTH, FORWARD, Problem, RandomBlocks
from ...tune.session import FAILURES, Peer, Say
from ..compare import Comparison, outcomes
from ..record import Measuring, Options, Outcome, Rule, Target, over_first, targets

OWN = "ringweave:triton"
_ALL = (OWN, "flex", "flex:tma", "ringweave:flash")
_DENSE = ("sdpa:cudnn", "sdpa:flash")
#: Seconds after which no further comparison starts; the last ones are large, and the whole case ends in ten minutes.
BUDGET = 440.0


def part(
    problem: Problem, names: Sequence[str | Peer] = _ALL, *, dense: bool = False, whole: bool = False
) -> Comparison:
    """Compare kernels on one problem.

    Args:
        problem: Problem to compute.
        names: Sparse kernels; ratios are over the first.
        dense: Whether dense attention is timed too.
        whole: Whether to time forward and backward together, with peak memory, instead of separately.
    """
    entries: list[tuple[Problem, Sequence[str | Peer]]] = [(problem, names)]
    if dense:
        entries.append((dataclasses.replace(problem, name=f"{problem.name}, dense", relation=rw.Full()), _DENSE))
    directions = (BOTH,) if whole else (FORWARD, BACKWARD)
    return Comparison(entries, directions, 10, memory=whole, ends=True, failures=FAILURES)


def _problem(name: str, relation: Pattern | RandomBlocks, tokens: int, heads: int = 16, head_dim: int = 128) -> Problem:
    return Problem(name, relation, tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda")


def _series(densities: Sequence[float], tokens: int) -> Comparison:
    """Return the comparison of densities of one length."""
    first, *rest = (_problem("densities", RandomBlocks(density), tokens) for density in densities)
    of = part(first, (OWN,))
    return dataclasses.replace(of, entries=[*of.entries, *((each, (OWN,)) for each in rest)])


#: Comparisons by the names that ``ringweave bench kernels --part`` accepts.
PARTS = {
    "16K": part(_problem("stage A", RandomBlocks(0.1), 16384), _ALL, dense=True),
    "32K": part(_problem("stage A", RandomBlocks(0.1), 32768), _ALL, dense=True),
    "65K": part(_problem("stage A", RandomBlocks(0.1), 65536), _ALL),
    "causal": part(_problem("causal", rw.Causal(), 16384), _ALL),
    "window": part(_problem("window", rw.SlidingWindow(1023, 0), 65536), _ALL),
    "documents": part(_problem("documents", rw.Documents([2731] * 24) & rw.Causal(), 24 * 2731)),
    "sinks": part(_problem("sinks", (rw.SlidingWindow(1023, 0) | rw.Global(4)) & rw.Causal(), 65536)),
    "densities": _series((0.5, 0.25, 0.1, 0.05, 0.02, 0.01), 32768),
    "D 64": part(_problem("90% sparse", RandomBlocks(0.1), 65536, 8, 64), dense=True),
    "D 256": part(_problem("D 256", RandomBlocks(0.1), 16384, 8, 256), (OWN, "flex")),
    "64 x 64": part(_problem("64 x 64, top 64", RandomBlocks(block_size=64, chosen=64), 109632, 7)),
    "million": part(_problem("a million tokens", RandomBlocks(0.01), 2**20), (OWN,), whole=True),
}
QUICK = (
    part(_problem("stage A", RandomBlocks(0.1), 16384), (OWN, "ringweave:flash"), dense=True),
    _series((0.5, 0.05), 16384),
    part(_problem("64 x 64, top 64", RandomBlocks(block_size=64, chosen=64), 16384, 7), (OWN,)),
)


def _teraflops(each: Outcome) -> float | None:
    return None if each.gflops is None else each.gflops / 1e3


def _milliseconds(each: Outcome) -> float | None:
    return None if each.timing is None else each.timing.median * 1e3


def _extra_memory(each: Outcome) -> float | None:
    """Return the memory of forward and backward beyond inputs, out, lse and gradients, as a share of these."""
    item = 4 if each.dtype == "float32" else 2
    rows, keys = each.heads * each.tokens, each.kv_heads * each.tokens
    held = rows * (each.head_dim * item + 4)  # out and lse
    gradients = (rows + 2 * keys) * each.head_dim * item
    tensors = held + 2 * gradients + rows * each.head_dim * item  # q, k, v and dout as well
    return None if each.peak is None else max(0.0, each.peak.nbytes - held - gradients) / tensors


def _stage(direction: str, first: float, last: float) -> tuple[Rule, ...]:
    """Return targets for TFLOP/s of active tiles, in two stages, and for the ratio to FlexAttention's time."""
    own = {"workload": "stage A", "peer": OWN, "direction": direction}
    return (
        Rule("stage A: {direction}", own, _teraflops, first, unit="TFLOP/s"),
        Rule("stage C: {direction}", own, _teraflops, last, unit="TFLOP/s"),
        Rule("{direction}: FlexAttention's time over ringweave's", own | {"peer": "flex"}, over_first, 1.3),
    )


def _at_most(name: str, tokens: int, bound: float) -> Rule:
    """Return the upper bound on a kernel's forward milliseconds at one length."""
    own = {"workload": name, "peer": OWN, "direction": FORWARD}
    return Rule("{workload}: forward", own, _milliseconds, bound, at_least=False, unit="ms", tokens=tokens)


TARGETS = (
    *_stage(FORWARD, 480.0, 600.0),
    *_stage(BACKWARD, 320.0, 500.0),
    *(
        Rule("{workload}: FlexAttention's time over ringweave's", {"workload": name, "peer": "flex",
             "direction": FORWARD}, over_first, 1.2)
        for name in ("causal", "window")
    ),
    _at_most("90% sparse", 65536, 3.0),
    _at_most("64 x 64, top 64", 109632, 4.0),
    Rule(
        "forward + backward in one go: memory beyond its tensors", {"workload": "a million tokens", "peer": OWN},
        _extra_memory, 0.05, at_least=False, unit="%",
    ),
)  # fmt: skip
_LINEAR = 1.15


def linear(records: Sequence[Outcome]) -> list[Target]:
    """Return the slowest time per tile over the fastest, among the densities of one length."""
    made = []
    for direction in (FORWARD, BACKWARD):
        of = "densities", OWN, direction
        series = [each for each in records if (each.workload, each.peer, each.direction) == of]
        if not series:
            continue
        # tiles have the same size at every density, so operations per second are proportional to tiles per second
        rates = [each.gflops for each in series if each.gflops]
        low, high = min(each.density for each in series), max(each.density for each in series)
        size = f"{series[0].tokens:,} tokens, density {low:.1%} to {high:.1%}"
        figure = max(rates) / min(rates) if len(rates) == len(series) else None
        reason = next((each.reason for each in series if each.reason), None)
        what = f"{direction}: time per tile, slowest over fastest"
        made.append(Target(what, size, figure, _LINEAR, False, reason=reason))
    return made


def matmul_peak(dtype: torch.dtype, device: str, side: int = 8192) -> float:
    """Return the operations per second of a square matrix product, the best of ten samples."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / interleaved({"product": lambda: a @ b}, rounds=10, device=device)["product"].min


def asked(options: Options) -> list[Comparison]:
    """Return the comparisons to measure: all, one, the quick ones, or stage A at the user's length.

    Raises:
        UnsupportedError: The part is unknown.
    """
    if options.part is not None and options.part not in PARTS:
        raise UnsupportedError("part", repr(options.part), f"one of {', '.join(PARTS)}", "Name one of them.")
    parts = list(PARTS.values()) if options.part is None else [PARTS[options.part]]
    parts = list(QUICK) if options.quick else parts
    rounds = options.rounds or (5 if options.quick else 10)
    return [
        dataclasses.replace(
            each, entries=[(options.of(problem), names) for problem, names in each.entries], rounds=rounds
        )
        for each in (parts if options.tokens is None else parts[:1])
    ]


def measure(options: Options, say: Say, clock: Callable[[], float] = time.perf_counter) -> Measuring:
    """Measure the comparisons one after another, and compare the figures with their targets.

    Raises:
        UnsupportedError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "device", repr(options.device), "a CUDA device", "Run it where torch.cuda.is_available()."
        )
    dtype = options.dtype or torch.bfloat16
    start, peak = clock(), 0.0
    records: list[Outcome] = []
    left: list[str] = []
    for each in asked(options):
        problem = each.entries[0][0]
        if clock() - start > BUDGET:
            left.append(f"{problem.name} at {problem.tokens:,} tokens")
            continue
        peak = max(peak, matmul_peak(dtype, options.device))
        records += yield from outcomes(each, say, peak=peak)
        torch.cuda.empty_cache()
    yield from targets(TARGETS, records)
    yield from linear(records)
    said = f"Matrix product of {str(dtype).removeprefix('torch.')}: {peak / 1e12:,.0f} TFLOP/s."
    return said + (f" No time was left for {', '.join(left)}." if left else "")
