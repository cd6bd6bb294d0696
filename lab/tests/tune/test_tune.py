from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from torch import Tensor

import ringweave as rw
from ringweave.backends import BACKENDS, cpu, dense_batched, tuning
from ringweave_lab.tune import save_answers, search, tune
from ringweave_lab.tune.measure import Timing
from ringweave_lab.tune.problem import Problem
from ringweave_lab.tune.search import CLOSE, TILE_SIZES, Candidate, Search, fastest, pick, tile_sizes, whole
from ringweave_lab.tune.session import Entry


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))


def problem(pattern: rw.Pattern, tokens: int = 256, heads: int = 2) -> Problem:
    return Problem("test", pattern, tokens, heads, 16)


def test_what_can_run_is_checked_timed_and_stored() -> None:
    choices = tune(problem(rw.Causal()), rounds=2)
    assert [choice.direction for choice in choices] == ["forward", "forward + backward"]
    for choice in choices:
        own = {each.backend for each in choice.timings if each.usual}
        assert own == {"sdpa", "dense_batched"} | ({"cpu"} if cpu.module() is not None else set())
        assert choice.chosen in choice.timings
        assert choice.reasons[Candidate("flash")] == "it calls kernels for CUDA tensors, and these are on cpu"
        assert not any(each.backend == "reference" for each in choice.reasons)
        assert {len(timing.seconds) for timing in choice.timings.values()} == {2}
    path = save_answers(choices)
    assert path == str(tuning.tuning_file())
    call = {"heads": 2, "head_dim": 16, "as_dict": True}
    for choice, needs_grad in zip(choices, (False, True), strict=True):
        found = rw.explain(rw.Causal(), 256, needs_grad=needs_grad, **call)["backend"]  # type: ignore[call-overload]
        assert found["chosen"] == [{"backend": choice.backend, "branches": 1}]
        assert found["measured"] == 1


def test_each_kind_of_branch_is_measured_once() -> None:
    """Residues of one rate are one kind of branch, which is measured once."""
    choices = tune(problem(rw.LongNet([256, 1024], [1, 4]), 4096), directions=("forward",), rounds=1)
    assert [(choice.problem.tokens, choice.problem.heads) for choice in choices] == [(4096, 2), (1024, 1)]


def test_a_wrong_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> tuple[Tensor, Tensor]:
        out, lse = dense_batched.forward(*arguments)  # type: ignore[arg-type]
        return out * 1.01, lse

    def broken(*arguments: object) -> tuple[Tensor, Tensor]:
        raise RuntimeError("out of something\nand more")

    for name, forward in (("dense_batched", wrong), ("sdpa", broken), ("cpu", broken)):
        backend = dataclasses.replace(BACKENDS[name], forward=forward)
        monkeypatch.setitem(BACKENDS, name, backend)
    (choice,) = tune(problem(rw.Causal()), directions=("forward",), rounds=1)
    assert choice.timings == {}
    assert choice.reasons[Candidate("dense_batched")].startswith("wrong: root mean square error")
    assert choice.reasons[Candidate("sdpa")] == "RuntimeError: out of something"
    assert choice.backend is None
    assert save_answers([choice]) is None
    assert not tuning.tuning_file().exists()


def test_a_backend_that_auto_prefers_stays_where_it_is_about_as_fast() -> None:
    assert fastest({"flex": 1.04, "dense_batched": 1.0}) == "flex"
    assert fastest({"flex": 1.06, "dense_batched": 1.0}) == "dense_batched"
    assert fastest({"triton": 1.0, "flex": 1.01, "dense_batched": 9.0}) == "flex"
    assert fastest({"triton": 1.0, "flex": 1.06, "dense_batched": 9.0}) == "triton"
    assert CLOSE == 1.05


def test_other_tiles_are_chosen_only_where_they_are_clearly_faster() -> None:
    own, other, far = Candidate("cpu"), Candidate("cpu", (64, 64)), Candidate("dense_batched", (32, 32))
    same = Timing((1.0, 1.0, 1.0))
    assert pick({own: same, other: Timing((0.96, 0.96, 0.96))}) == own
    assert pick({own: same, other: Timing((0.9, 0.9, 0.9))}) == other
    assert pick({own: same, other: Timing((0.9,) * 3), far: Timing((0.8,) * 3)}) == far
    # faster by medians alone, but not within most rounds
    assert pick({own: Timing((1.0, 2.0, 3.0)), other: Timing((1.0, 1.96, 0.5))}) == own
    assert pick({}) is None


def test_sides_suit_the_length_and_the_device() -> None:
    assert tile_sizes(whole(problem(rw.SlidingWindow(9), 4096)), "cpu") == [
        each for each in TILE_SIZES if each != (128, 128)
    ]
    assert tile_sizes(whole(problem(rw.SlidingWindow(9), 60)), "cpu") == [(32, 32)]
    table = rw.patterns.random_blocks(4096, 0.5, block_size=64)
    assert (128, 128) in tile_sizes(whole(problem(table, 4096)), "cpu")
    # tiles other than its grid's would require reading the table at every plan
    assert tile_sizes(whole(problem(table, 4096)), "cuda") == []
    assert tile_sizes(whole(problem(rw.SlidingWindow(9), 4096)), "cuda")
    # a plan of 8 million tiles of 32 x 32 is too large to try
    assert tile_sizes(whole(problem(rw.Causal(), 2**17, heads=1)), "cpu")[0] == (64, 64)


class Stand:
    """A simulated clock: a candidate's seconds by the order of checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]):
        self.seconds, self.timed = seconds, []
        check = Search.time

        def time(of: Search, calls: dict[Candidate, Entry], part: float) -> dict[Candidate, Timing]:
            self.timed.append([str(each) for each in calls])
            return {each: Timing((seconds.get(str(each), 9.0),) * 3) for each in check(of, calls, part)}

        monkeypatch.setattr(Search, "time", time)


def test_tiles_are_tried_for_backends_near_the_fastest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand = Stand(monkeypatch, {"dense_batched": 1.0, "cpu": 1.6, "sdpa": 1.4, "dense_batched, tiles of 64 x 64": 0.5})
    (choice,) = tune(problem(rw.Causal(), 100), directions=("forward",), rounds=1)
    tiles = [f"dense_batched, tiles of {side}" for side in ("32 x 32", "64 x 64", "64 x 128", "128 x 64")]
    # sdpa is nearly as fast and has no tiles; cpu has tiles and is slower
    assert stand.timed[1:] == [["dense_batched", "sdpa", *tiles]]
    assert choice.chosen == Candidate("dense_batched", (64, 64))
    assert save_answers([choice]) is not None
    kept = json.loads((tmp_path / "tuning.json").read_text())["entries"]
    assert [each["tile"] for each in kept.values()] == [[64, 64]]


def test_backward_is_measured_behind_the_forward_that_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    Stand(monkeypatch, {"sdpa": 1.0})
    forward, backward = tune(problem(rw.Causal(), 100), rounds=1)
    assert forward.first is None
    assert forward.chosen == backward.first == Candidate("sdpa")


def test_no_candidate_is_checked_once_the_seconds_are_gone() -> None:
    (choice,) = tune(problem(rw.SlidingWindow(9), 500), directions=("forward",), rounds=5, budget=0.0)
    assert {len(timing.seconds) for timing in choice.timings.values()} == {1}
    assert all(each.usual for each in choice.timings)
    late = [reason for each, reason in choice.reasons.items() if not each.usual]
    assert late
    assert set(late) == {"the time limit was reached"}


def test_the_seconds_begin_when_the_backends_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds count from the end of the checks: a backend that compiles for a minute leaves them to the rest, and tiles."""
    now = [0.0]
    monkeypatch.setattr(search.time, "monotonic", lambda: now[0])
    parts: list[float] = []
    check = Search.check

    def slow(of: Search, candidates: list[Candidate], until: float | None) -> dict[Candidate, Entry]:
        found = check(of, candidates, until)
        now[0] += 60.0
        return found

    def time(of: Search, calls: dict[Candidate, Entry], part: float) -> dict[Candidate, Timing]:
        parts.append(round(part - of.spent(), 3))
        return dict.fromkeys(calls, Timing((1.0,)))

    monkeypatch.setattr(Search, "check", slow)
    monkeypatch.setattr(Search, "time", time)
    tune(problem(rw.SlidingWindow(9), 100), directions=("forward",), rounds=1, budget=600.0)
    assert parts == [0.2, 0.9]


def test_wrong_tiles_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> tuple[Tensor, Tensor]:
        out, lse = dense_batched.forward(*arguments)  # type: ignore[arg-type]
        return (out if arguments[1].tile_size is None else out * 1.01), lse  # type: ignore[attr-defined]

    monkeypatch.setitem(BACKENDS, "dense_batched", dataclasses.replace(dense_batched.BACKEND, forward=wrong))
    monkeypatch.setattr(search, "NEAR", 1e9)
    (choice,) = tune(problem(rw.SlidingWindow(9), 200), directions=("forward",), rounds=1)
    of_gather = {each: reason for each, reason in choice.reasons.items() if each.backend == "dense_batched"}
    assert len(of_gather) == len(tile_sizes(whole(choice.problem), "cpu"))
    assert all(reason.startswith("wrong: root mean square error") for reason in of_gather.values())
    assert Candidate("dense_batched") in choice.timings
