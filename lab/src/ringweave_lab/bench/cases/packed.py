"""The case ``packed``: training steps in which every step packs other documents, over steps with the same ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave.plan.from_pattern import build

from ...tune.measure import Runnable, interleaved, on_one_thread
from ...tune.oracle import Oracle, sample_rows
from ...tune.problem import Problem, Sample
from ...tune.session import Built, Say
from ..record import Measuring, Options, StepCost, Target

#: Bound on the time of a step with new documents over that of a step with the same.
BOUND = 1.05
_LENGTHS = (2**14, 2**16)
_DOCUMENTS = (40, 400, 4000)  # at most half as many as tokens
_WINDOWS = (None, 256)
_SECONDS = 20.0  # of a row, after which no round starts
_FEWEST = 3


def packings(tokens: int, documents: int) -> Iterator[Tensor]:
    """Yield bounds of documents, (documents + 1,), without end: the same lengths, each time in another random order.

    The lengths are 0.5 to 1.5 times their mean, at random. Every order allows equally many pairs, so that steps differ
    only in the work that new documents cause.
    """
    random = np.random.default_rng(0)
    ends = np.cumsum(random.uniform(0.5, 1.5, documents))
    # at least one token for each document
    spread = (ends / ends[-1] * (tokens - documents)).round().astype(np.int64) + np.arange(1, documents + 1)
    lengths = np.diff(spread, prepend=0)
    while True:
        yield torch.from_numpy(np.concatenate([[0], np.cumsum(random.permutation(lengths))]))


def _pattern(relation: rw.Pattern, bounds: Tensor) -> rw.Pattern:
    return relation.within(rw.Documents(cu_seqlens=bounds))


def _step(relation: rw.Pattern, documents: Iterator[Tensor], inputs: Sample) -> Callable[[], tuple[Tensor, ...]]:
    """Return a training step, which makes its pattern from the next bounds, as a training loop does."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rw.attention(q, k, v, _pattern(relation, next(documents)))

    return Built(attend, relation, "ringweave").forward_backward(inputs)


def steps(problem: Problem, documents: Iterator[Tensor]) -> tuple[Runnable, Runnable]:
    """Return training steps with new documents and with the same ones, each checked against the oracle.

    Args:
        problem: Sizes, and the relation inside each document.
        documents: Bounds of documents, as from :func:`packings`.
    Raises:
        UnsupportedError: A result is wrong.
    """
    # plans of an earlier run would make documents known
    rw.memory.trim()
    inputs, relation = problem.inputs(), problem.pattern
    first, second = next(documents), next(documents)
    for bounds in (first, second):
        oracle = Oracle(_pattern(relation, bounds), inputs, sample_rows(problem.tokens))
        results = _step(relation, itertools.repeat(bounds), oracle.sliced)()
        excess = oracle.check_gradients(*results).excess(oracle.limit)
        if excess is not None:
            raise UnsupportedError(problem.name, f"a wrong result: {excess}", "the oracle's result", "Report it.")
    return _step(relation, documents, inputs), _step(relation, itertools.repeat(first), inputs)


def measure(options: Options, say: Say) -> Measuring:
    """Time steps with the same documents, steps with new ones, and plans of new ones in turn."""
    lengths = [options.tokens] if options.tokens else [2048] if options.quick else _LENGTHS
    ratios: list[float] = []
    for tokens, most, window in itertools.product(lengths, _DOCUMENTS, _WINDOWS):
        count = min(most, tokens // 2)
        relation = rw.Causal() if window is None else rw.SlidingWindow(window)
        problem = options.of(Problem("packed", relation, tokens, 2 if options.quick else 4))
        size = f"{tokens:,} tokens, {count:,} documents, {'no window' if window is None else f'window {window:,}'}"
        say(f"packed, {size}")
        documents = packings(tokens, count)
        new, same = steps(problem, documents)

        def plan(problem: Problem = problem, documents: Iterator[Tensor] = documents) -> object:
            pattern, n = _pattern(problem.pattern, next(documents)), problem.tokens
            return build(pattern, n, n, heads=problem.heads, tile=(128, 128), device=problem.device)

        timings = interleaved(
            {"same": same, "new": new, "plan": plan}, rounds=options.rounds or (3 if options.quick else 9),
            device=options.device, budget=_SECONDS, fewest=_FEWEST, timer=on_one_thread(options.device),
        )  # fmt: skip
        dtype = str(problem.dtype).removeprefix("torch.")
        cost = StepCost(tokens, count, window, problem.heads, problem.head_dim, dtype, **timings)
        ratios.append(cost.over_same)
        yield cost
        if not options.sized:
            yield Target("step, new documents over the same", size, ratios[-1], BOUND, False)
    return f"A step with new documents takes {min(ratios):.2f} to {max(ratios):.2f} times one with the same."
