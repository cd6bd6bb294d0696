"""Cases of a few patterns: ``attention``, ``backends``, ``dilated``, ``crossover`` and others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import ringweave as rw
from ringweave.backends import BACKENDS, cpu
from ringweave.call import Operands
from ringweave.errors import UnsupportedError
from ringweave.plan.branches import Branch
from ringweave.plan.subplan import CutBranch
from ringweave.program import candidates

from ...tune import Finding, tune
from ...tune.measure import interleaved
from ...tune.problem import DIRECTIONS, FORWARD, Problem, RandomBlocks
from ...tune.search import Candidate, whole
from ...tune.session import Say
from ..compare import Comparison, outcomes
from ..peers import peers
from ..record import Measuring, Options, Outcome, Target


def window_with_sinks(window: int, sinks: int) -> rw.Pattern:
    """Return the pattern of most cases: a causal window, and the first tokens for all later queries."""
    return rw.SlidingWindow(window) & rw.Causal() | rw.Sinks(sinks) & rw.Causal()


def attention(options: Options, say: Say) -> Measuring:
    """Compare a window and a random table with all peers."""
    tokens = options.tokens or (1024 if options.quick else 8192)
    heads, rounds = (2, 3) if options.quick else (8, 5)
    others = ("sdpa", "gather_scatter", "sdpa+mask", *(() if options.quick else ("flex",)))
    records: list[Outcome] = []
    for name, relation in (("window + sinks", window_with_sinks(tokens // 8, 64)), ("random 10%", RandomBlocks(0.1))):
        entry = options.of(Problem(name, relation, tokens, heads)), ("ringweave", "ringweave:*", *others)
        records += yield from outcomes(Comparison([entry], rounds=options.rounds or rounds), say)
    return _against_dense(records)


def backends(options: Options, say: Say) -> Measuring:
    """Compare every backend that this machine can run, including those that auto never chooses, on a random table."""
    tokens = options.tokens or (512 if options.quick else 4096)
    problem = options.of(Problem("random 10%", RandomBlocks(0.1, min(128, tokens // 16)), tokens, 2))
    names = [f"ringweave:{name}" for name in BACKENDS]
    able = [each.name for each in peers(*names) if each.supports(problem, True) is None]
    entry = problem, ("ringweave", *able, "sdpa", "gather_scatter")
    records = yield from outcomes(Comparison([entry], rounds=options.rounds or 3), say)
    return _against_dense(records)


def dilated(options: Options, say: Say) -> Measuring:
    """Compare a mixture and a relation that are sparse by residue with dense attention."""
    tokens = options.tokens or (1024 if options.quick else 16384)
    segments = [max(tokens // share, 64) // 16 * 16 for share in (16, 4, 1)]
    flex = () if options.quick else ("flex",)
    records: list[Outcome] = []
    for name, pattern, others in (
        ("LongNet", rw.LongNet(segments, [1, 4, 16], causal=True), ()),
        ("window | dilated", rw.SlidingWindow(256) | rw.Dilated(32, 16), flex),
    ):
        problem = options.of(Problem(name, pattern, tokens, 4 if options.quick else 8))
        entry = problem, ("ringweave", "ringweave:*", "sdpa", *others)
        records += yield from outcomes(Comparison([entry], rounds=options.rounds or 3), say)
    return _against_dense(records)


def _against_dense(records: Sequence[Outcome]) -> str:
    return " ".join(
        f"{each.workload}, {each.direction}: sdpa takes {each.over_first.medians:.2f} x "
        f"ringweave's time at density {each.density:.3f}."
        for each in records
        if each.peer == "sdpa" and each.over_first is not None
    )


def memory(options: Options, say: Say) -> Measuring:
    """Measure the peak memory of a narrow window, which grows with the tokens and not with their square."""
    records: list[Outcome] = []
    for tokens in [options.tokens] if options.tokens else ([2048, 4096] if options.quick else [32768, 262144]):
        problem = options.of(Problem("window + sinks", window_with_sinks(512, 64), tokens, 1))
        entry = problem, ("ringweave", "ringweave:*", *(("sdpa",) if tokens <= 32768 else ()))
        records += yield from outcomes(Comparison([entry], rounds=1), say)
    last = [each for each in records if (each.direction, each.peer) == (FORWARD, "ringweave")][-1]
    scores = last.heads * last.tokens**2 * 4
    held = "not measured" if last.peak is None else f"{last.peak.nbytes / 2**20:,.0f} MiB"
    return (
        f"{last.tokens:,} tokens: {held} at the peak of forward; all N x N scores would be {scores / 2**30:,.1f} GiB."
    )


def crossover(options: Options, say: Say) -> Measuring:
    """Compare random tables, from sparse to full, with dense attention."""
    tokens = options.tokens or (1024 if options.quick else 8192)
    densities = (0.25, 1.0) if options.quick else (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
    records: list[Outcome] = []
    for density in densities:
        entry = options.of(Problem(f"random {density:.0%}", RandomBlocks(density), tokens, 4)), ("ringweave", "sdpa")
        comparison = Comparison([entry], rounds=options.rounds or 3, budget=20.0, memory=False)
        records += yield from outcomes(comparison, say)
    return " ".join(f"{direction}: {_crossing(records, direction)}" for direction in DIRECTIONS)


def _crossing(records: Sequence[Outcome], direction: str) -> str:
    """Return a text with the density at which both take equally long, interpolated in the logarithm of the ratio."""
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


def ordering(options: Options, say: Say) -> Measuring:
    """Time the kernel, which starts long rows first, in turn with one that starts rows in index order."""
    tokens = options.tokens or (1024 if options.quick else 8192)
    share = tokens // 32
    documents = rw.Documents([share] * 16 + [tokens - 16 * share])
    ratios: list[float] = []
    for name, pattern in (
        ("causal", rw.Causal()),
        ("window + sinks", window_with_sinks(tokens // 8, 64)),
        ("one long document of 17, the last", documents),
        ("global last tokens", rw.SlidingWindow(64, 64) | rw.Global([*range(tokens - 64, tokens)])),
    ):
        problem = options.of(Problem(name, pattern, tokens, 2 if options.quick else 8))
        say(f"ordering {name}")
        calls = _starts(problem)
        if calls is None:
            return f"No kernel of ringweave's runs on {options.device} here."
        first, second = (call() for call in calls.values())
        if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
            raise UnsupportedError(name, "other bits in another order", "the same", "Report it.")
        timings = interleaved(calls, rounds=options.rounds or (3 if options.quick else 15), device=options.device)
        ratios.append(timings["rows in order"].median / timings["longest first"].median)
        size = f"{problem.tokens:,} tokens, {problem.heads} heads, {torch.get_num_threads()} threads"
        yield Target(f"{name}: rows in their own order over longest first", size, ratios[-1], None, True)
    return f"Rows in their own order take {min(ratios):.2f} to {max(ratios):.2f} times as long; the bits are the same."


def _starts(problem: Problem) -> dict[str, Callable[[], tuple[Tensor, Tensor]]] | None:
    """Return a kernel's calls by the order in which rows start; None if there is no kernel."""
    n, heads, dtype = problem.tokens, problem.heads, problem.dtype
    branch = Branch.whole(problem.pattern, n, n, heads=heads)
    q, k, v = problem.inputs()[:3]
    inputs = Operands(q, k, v, problem.head_dim**-0.5)
    if problem.device == "cpu":
        if cpu.module() is None:
            return None
        return {
            "longest first": lambda: cpu.forward(inputs, branch, dtype),
            "rows in order": lambda: cpu.forward(inputs, branch, dtype, longest_first=False),
        }
    kernel = BACKENDS["triton"]
    if kernel.unsupported_reason(problem.case(False), branch) is not None:
        return None
    plan = branch.plan()
    in_order = replace(plan, launch_order=torch.arange(plan.launch_order.numel(), dtype=plan.launch_order.dtype))
    cut = CutBranch.of(branch, in_order)
    return {
        "longest first": lambda: kernel.forward(inputs, branch, dtype),
        "rows in order": lambda: kernel.forward(inputs, cut, dtype),
    }


def tuned(options: Options, say: Say) -> Measuring:
    """Tune shapes, then check the tuned choice and auto's default, and time them in turn.

    The figures are new measurements, not those that led to the choice. No choice is stored.
    """
    tokens = options.tokens or (1024 if options.quick else 8192)
    heads, rounds = (2, 3) if options.quick else (8, 7)
    if options.device != "cpu":
        return "A GPU has trials: ringweave tune --gpu."
    budget = 1.0 if options.quick else 15.0
    said = ["Heuristic time over tuned time:"]
    for name, relation in (
        ("narrow window", rw.SlidingWindow(64)),
        ("window + sinks", window_with_sinks(tokens // 8, 64)),
        ("random 10%", RandomBlocks(0.1)),
        ("causal", rw.Causal()),
    ):
        problem = options.of(Problem(name, relation, tokens, heads, dtype=torch.float32))
        before: Finding | None = None
        for choice in tune(problem, rounds=options.rounds or rounds, budget=budget, say=say):
            found = yield from outcomes(_again(choice, before, options.rounds or rounds), say)
            said.append(f"{name}, {choice.direction}: {_said(found)}.")
            before = choice
    return " ".join(said)


def _said(found: list[Outcome]) -> str:
    ratio = found[1].over_first
    if ratio is None:
        return "not measured"
    same = found[0].how == found[1].how
    return "the heuristic stays" if same else f"{ratio.medians:.2f} x ({found[0].how})"


def _again(choice: Finding, before: Finding | None, rounds: int) -> Comparison:
    """Return the comparison of the tuned choice with the default."""
    usual, chosen = _usual(choice, False), choice.chosen
    own = choice.direction == FORWARD
    tuned = (usual if chosen is None else chosen).peer(None if own or before is None else before.chosen, "tuned")
    heuristic = _usual(choice, not own).peer(None if own else usual, "heuristic")
    return Comparison([(choice.problem, [tuned, heuristic])], [choice.direction], rounds, memory=False)


def _usual(choice: Finding, needs_grad: bool) -> Candidate:
    """Return the candidate that auto takes for a branch without stored choices."""
    usual = candidates(choice.problem.case(needs_grad), whole(choice.problem))
    return Candidate(next(backend.name for backend, reason in usual if reason is None))
