"""The case ``seeds``: the published tables of the system that ringweave began with, next to ringweave's figures.

The published figures are from a GPU with 8 GB, their sizes are not all known, and several are of functions other than
exact attention. Ringweave's figures are from this machine, and its results are checked. A row therefore does not
compare speeds; only times within a column are comparable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import torch
from torch import Tensor

import ringweave as rw
from ringweave.backends import BACKENDS
from ringweave.backends.backend import Backend
from ringweave.call import Operands
from ringweave.plan import Branch, PlanCache
from ringweave.plan.from_pattern import build

from ...tune.measure import interleaved
from ...tune.problem import FORWARD, Problem, RandomBlocks
from ...tune.session import Say
from ..compare import Comparison, outcomes
from ..record import Measuring, Options, Outcome, Published
from .attention import window_with_sinks

_ROUNDS = 3
_WRONG = "it summed a softmax per block: not attention"
_ZEROS = "it returned zeros"
_SPARSE = "ringweave"  # kernels over a plan, whatever the pattern
_BATCHED = "ringweave:dense_batched"  # rows of equal length in few matrix products
_ENTRIES = "ringweave:torch_sparse"  # torch's sparse matrices

# (published name, milliseconds, MiB or None, defect of the published figure, peer that replaces it)
_AT_4K: tuple[tuple[str, float, float | None, str, str], ...] = (
    ("BlockSparse, original", 68.36, 28.44, _WRONG, _SPARSE),
    ("BlockSparse, optimised", 28.23, 148.13, _WRONG, _BATCHED),
    ("TorchSparse", 540.95, None, _WRONG, _ENTRIES),
)
_LENGTHS = ((4096, 121.91, 39.82), (8192, 148.05, 47.35), (16384, 263.06, 90.79), (32768, 513.46, 197.16),
            (65536, 1003.10, 373.41))  # fmt: skip
_DENSITIES = ((0.1, 1842.60, 8.39), (0.25, 4313.09, 36.67), (0.5, 7518.30, 54.83))

_LONG: tuple[tuple[int, float | None, float, str], ...] = (
    (131072, 6.95, 144.0, f"{_ZEROS}; before that 8065 ms in 925 MB"),
    (262144, None, 288.0, _ZEROS),
)


def measure(options: Options, say: Say) -> Measuring:
    """Measure the rows that this machine can compute; the larger ones only with ``--full``."""
    tokens = options.tokens or (512 if options.quick else 4096)
    heads = options.heads or (1 if options.quick else 2)

    def problem(relation: rw.Pattern | RandomBlocks, tokens: int, heads: int = heads) -> Problem:
        return options.of(Problem("seeds", relation, tokens, heads))

    table = problem(RandomBlocks(0.1, min(128, tokens // 16)), tokens)
    found = _timed(table, (_SPARSE, _BATCHED, _ENTRIES), options, say)
    for name, published, memory, note, peer in _AT_4K:
        yield from _rows(f"4K tokens, 90% sparse: {name}", published, memory, note, found[peer])
    mixture = rw.LongNet([tokens // 8, tokens // 2], [1, 4])
    baseline = _timed(problem(mixture, tokens), (_SPARSE,), options, say)[_SPARSE]
    yield from _rows("4K tokens: ImprovedDilatedAttention", 29.72, 28.27, "it attended across heads", baseline)
    lengths = _LENGTHS if options.full else _LENGTHS[1:3]
    for length, before, after in () if options.sized else lengths:
        found = _timed(problem(RandomBlocks(0.1), length), (_SPARSE, _BATCHED), options, say)
        yield from _rows(f"{length:,} tokens: original", before, None, _WRONG, found[_SPARSE])
        yield from _rows(f"{length:,} tokens: optimised", after, None, _WRONG, found[_BATCHED])
    for density, before, after in _DENSITIES:
        found = _timed(
            problem(RandomBlocks(density, min(128, tokens // 16)), tokens), (_SPARSE, _BATCHED), options, say
        )
        yield from _rows(f"density {density:.0%}: before vectorising", before, None, _WRONG, found[_SPARSE])
        yield from _rows(f"density {density:.0%}: after", after, None, _WRONG, found[_BATCHED])
    # with a user's sizes there is only one long row, with sixteen times their tokens
    for length, milliseconds, held, note in _LONG if options.full else _LONG[:1]:
        if options.sized and length > _LONG[0][0]:
            continue
        length = 16 * tokens if options.sized else length
        long = problem(rw.LongNet([2048, 8192], [1, 4]) if length > 16384 else mixture, length, 1)
        outcome = _timed(long, (_SPARSE,), options, say, rounds=1)[_SPARSE]
        yield from _rows(f"{length // 1024}K tokens around a ring", milliseconds, held, note, outcome)
    yield from _counted(tokens, options, say)
    return (
        "Published figures are of another machine and, where it says so, of another function; ours are of this one, "
        f"checked against float64. ringweave bench seeds {'' if options.full else '--full '}gives every row"
        f"{' again' if options.full else ', to 262,144 tokens'}."
    )


def _timed(
    problem: Problem, peers: Sequence[str], options: Options, say: Say, rounds: int = _ROUNDS
) -> dict[str, Outcome]:
    """Return the outcomes of checked and timed forward calls, by peer."""
    comparison = Comparison([(problem, peers)], (FORWARD,), options.rounds or rounds, 30.0, ends=True)
    found = {each.peer: each for each in outcomes(comparison, say)}
    # auto may have chosen the backend of a peer, which then has no separate outcome
    return {peer: found.get(peer, found[_SPARSE]) for peer in peers}


def _rows(
    what: str, milliseconds: float | None, held: float | None, note: str, outcome: Outcome
) -> Iterator[Published]:
    size = f"{outcome.tokens:,} tokens, {outcome.heads} heads, D {outcome.head_dim}, density {outcome.density:.1%}"
    size += f", {outcome.how}"
    note = outcome.reason or note
    if milliseconds is not None:
        taken = None if outcome.timing is None else outcome.timing.median * 1e3
        yield Published(what, f"{milliseconds:g} ms", size, taken, "ms", note)
    if held is not None:
        peak = None if outcome.peak is None else outcome.peak.nbytes / 2**20
        yield Published(f"{what}: memory", f"{held:g} MB", size, peak, "MiB", note)


def _counted(tokens: int, options: Options, say: Say) -> Iterator[Published]:
    """Return the figures that are not times of calls: cache hits, kernel calls, and the cost of the first plan."""
    say("seeds: counting")
    size = f"{tokens:,} tokens"
    cache = PlanCache()
    steps = 100
    for _ in range(steps):
        # a new pattern each step, as a model's forward makes it
        cache.get(window_with_sinks(tokens // 8, 64), tokens, tokens, tile=(128, 128))
    known = cache.statistics()
    share = 100 * known.hits / (known.hits + known.misses)
    yield Published("pattern cache: hits", "97 %", f"{size}, {steps} steps", share, "%", "")
    q = torch.randn(1, 2, tokens, 64)
    pattern = window_with_sinks(tokens // 8, 64)
    calls = 0

    def counting(name: str) -> Backend:
        backend = BACKENDS[name]

        def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            nonlocal calls
            calls += 1
            return backend.forward(operands, branch, dtype)

        # prepared calls would go past the function that counts
        return dataclasses.replace(backend, forward=forward, prepare=None)

    with patch.dict(BACKENDS, {name: counting(name) for name in BACKENDS}):
        rw.attention(q, q, q, pattern)
    yield Published("kernel launches of a forward pass", "308, then 10", size, float(calls), "", "counted on a CPU")
    timing = interleaved({"plan": lambda: build(pattern, tokens, tokens, tile=(128, 128))}, rounds=5)["plan"]
    yield Published("pattern generation, first pass", "48.74 ms", size, timing.median * 1e3, "ms", "")
