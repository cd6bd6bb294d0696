from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from ringweave.errors import ShapeError
from ringweave.memory.pressure import to_system
from ringweave_lab.bench.peak import Peak, _sampled_peak, peak_memory
from ringweave_lab.bench.record import environment, write_lines
from ringweave_lab.tune.measure import Timing, interleaved, ratio


def test_calls_take_turns_after_the_warm_up() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timings = interleaved(calls, rounds=2, warmup=1)
    assert "".join(order) == "abc" * 3
    assert {len(timing.seconds) for timing in timings.values()} == {2}


def test_a_sleep_takes_its_time() -> None:
    timings = interleaved({"short": lambda: time.sleep(0.005), "long": lambda: time.sleep(0.05)}, rounds=3)
    assert 0.05 <= timings["long"].min <= timings["long"].median <= timings["long"].max
    assert timings["short"].min >= 0.005
    assert ratio(timings["long"], timings["short"]).low > 1


def test_a_budget_ends_the_rounds_but_not_the_first() -> None:
    assert len(interleaved({"a": lambda: time.sleep(0.02)}, rounds=50, budget=0.0)["a"].seconds) == 1


def test_ratio_is_of_medians_and_paired() -> None:
    found = ratio(Timing((2.0, 9.0, 4.0)), Timing((1.0, 3.0, 4.0)))
    assert (found.medians, found.paired, found.low, found.high) == (4 / 3, 2.0, 1.0, 3.0)


def test_ratio_of_different_runs_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"timings: got 1 and 2 rounds; wanted timings of one interleaved run"):
        ratio(Timing((1.0,)), Timing((1.0, 2.0)))


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least 1 and 0"):
        interleaved({"a": lambda: None}, rounds=0)


def _sampled(call: Callable[[], object]) -> Peak:
    # as peak_memory does: otherwise the call would reuse pages that the heap has freed
    to_system()
    return _sampled_peak(call)


@pytest.mark.measures
@pytest.mark.parametrize("measure", [lambda call: peak_memory(call), _sampled], ids=["peak", "sampled"])
def test_peak_memory_sees_what_is_freed_before_the_end(measure) -> None:  # type: ignore[no-untyped-def]
    def call() -> object:
        large = np.ones(64 * 2**20, np.uint8)
        time.sleep(0.2)  # give the sampling thread its turn
        del large
        return np.ones(4 * 2**20, np.uint8)

    small = measure(lambda: np.ones(4 * 2**20, np.uint8))
    peak = measure(call)
    assert 60 * 2**20 < peak.nbytes < 90 * 2**20, peak
    assert small.nbytes < 20 * 2**20, small


def test_json_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "figures.jsonl"
    assert write_lines(path, [Timing((1.0, 2.0))]) == 1
    assert write_lines(path, [{"where": environment()}]) == 1
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"seconds": [1.0, 2.0]}
    assert second["where"]["threads"] >= 1
    assert second["where"]["torch"]


def test_another_gpu_than_the_current_one_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring on a GPU makes it current, since events and allocator statistics belong to the current GPU."""
    current, seen = ["cuda:0"], []

    @contextmanager
    def device(name: str) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    def timer(call: Callable[[], object], times: int) -> float:
        call()
        return 1.0

    monkeypatch.setattr(torch.cuda, "device", device)
    for name, figure in (
        ("synchronize", None), ("reset_peak_memory_stats", None), ("memory_allocated", 3), ("max_memory_allocated", 7),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *device, figure=figure: seen.append(current[-1]) or figure)
    interleaved({"call": lambda: seen.append(current[-1])}, rounds=2, device="cuda:1", timer=timer)
    assert peak_memory(lambda: seen.append(current[-1]), device="cuda:1").nbytes == 4
    assert len(seen) == 3 + 2 + 5
    assert set(seen) == {"cuda:1"}
    assert current == ["cuda:0"]
