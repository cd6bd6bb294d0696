"""Test the documents of packed steps, their check, and that no cache has a plan of new documents."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave_lab.bench import Options, run_case
from ringweave_lab.bench.cases import packed
from ringweave_lab.bench.record import StepCost
from ringweave_lab.tune.problem import Problem


@pytest.mark.parametrize(("tokens", "documents"), [(16384, 40), (512, 256), (300, 299), (8, 1)])
def test_packings_have_equal_lengths_in_new_orders(tokens: int, documents: int) -> None:
    """Every packing has the same lengths, so that steps compute equally many pairs."""
    few = list(itertools.islice(packed.packings(tokens, documents), 5))
    for bounds in few:
        assert (int(bounds[0]), int(bounds[-1]), len(bounds)) == (0, tokens, documents + 1)
        assert int(bounds.diff().min()) >= 1
        assert torch.equal(bounds.diff().sort().values, few[0].diff().sort().values)
    if 1 < documents < tokens - 1:
        assert len({tuple(bounds.tolist()) for bounds in few}) == 5


def problem(window: int | None = None) -> Problem:
    return Problem("packed", rw.Causal() if window is None else rw.SlidingWindow(window), 256, 2, 16)


@pytest.mark.parametrize("window", [None, 16])
def test_each_new_step_plans_and_the_same_one_does_not(window: int | None) -> None:
    from ringweave.cache import PLANS

    new, same = packed.steps(problem(window), packed.packings(256, 7))
    same()
    before = PLANS.misses
    for _ in range(3):
        same()
    assert PLANS.misses == before
    for count in range(1, 4):
        new()
        assert PLANS.misses == before + count


def test_a_second_run_in_a_process_finds_no_plan() -> None:
    """The documents of a run are those of the run before; its plans must not be found."""
    from ringweave.cache import PLANS

    for _ in range(2):
        new, _ = packed.steps(problem(), packed.packings(256, 7))
        before = PLANS.misses
        new()
        assert PLANS.misses == before + 1


def test_steps_with_wrong_documents_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that attends with the documents of the step before is found, since two orders are checked."""
    first: list[rw.Pattern] = []
    right = rw.attention

    def stale(q: Any, k: Any, v: Any, pattern: rw.Pattern) -> Any:
        first[:] = first or [pattern]
        return right(q, k, v, first[0])

    monkeypatch.setattr(rw, "attention", stale)
    with pytest.raises(UnsupportedError, match="packed: got a wrong result"):
        packed.steps(problem(), packed.packings(256, 7))


def test_sizes_have_no_goals_of_others() -> None:
    records = run_case("packed", Options(quick=True, tokens=128, heads=1, rounds=1)).records
    assert all(isinstance(record, StepCost) and record.tokens == 128 and record.heads == 1 for record in records)
