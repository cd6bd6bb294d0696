"""Test the search for launch configurations with a simulated clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from ringweave.backends.triton.launch_config import Device, LaunchConfig, Request, launch_config_for
from ringweave.backends.tuning import KernelKey
from ringweave_lab.tune.descent import STEP, candidates, descend
from ringweave_lab.tune.overrides import misfit

HOPPER, AMPERE = Device("hopper", 227 * 1024), Device("ampere", 99 * 1024)
FIELDS = ["m", "n", "warps", "stages", "resident", "described"]


def request(
    kernel: str = "forward", dim: int = 128, tile: tuple[int, int] = (128, 128), device: Device = HOPPER, size: int = 2
) -> Request:
    kind = KernelKey(kernel, "here", "bfloat16" if size == 2 else "float32", (dim, dim), tile, False)
    return Request(kind, size, device, launch_config_for(kernel, dim, dim, size, tile, device))


class Clock:
    """Compute seconds by a function of the configuration; a rule gives a reason for refusing some."""

    def __init__(
        self, seconds: Callable[[LaunchConfig], float], broken: Callable[[LaunchConfig], bool] = lambda blocks: False
    ):
        self.seconds, self.broken = seconds, broken
        self.turns: list[list[LaunchConfig]] = []

    def __call__(self, blocks: Sequence[LaunchConfig]) -> dict[LaunchConfig, float | str]:
        self.turns.append(list(blocks))
        return {each: "it does not compile" if self.broken(each) else self.seconds(each) for each in blocks}


def always() -> bool:
    return True


@pytest.mark.parametrize("kernel", ["forward", "backward_q", "backward_kv"])
@pytest.mark.parametrize("device", [HOPPER, AMPERE])
@pytest.mark.parametrize("tile", [(128, 128), (64, 64), (16, 128)])
def test_candidates_differ_in_one_field_and_can_be_taken(kernel: str, device: Device, tile: tuple[int, int]) -> None:
    of = request(kernel, tile=tile, device=device)
    best = of.usual
    found = dict(candidates(best, of))
    assert sorted(found) == sorted(FIELDS)
    for name, others in found.items():
        for each in others:
            assert misfit(of, each) is None
            assert {field for field in FIELDS if getattr(each, field) != getattr(best, field)} == {name}
    if device is AMPERE:
        assert found["described"] == []


def test_the_least_is_found_field_by_field() -> None:
    of = request(dim=64)

    def seconds(blocks: LaunchConfig) -> float:
        return 1 + abs(blocks.n - 64) / 64 + abs(blocks.stages - 3) / 3 + (blocks.resident != 1) + blocks.described

    clock = Clock(seconds)
    found = descend(of.usual, of, clock, always)
    assert found.start == of.usual
    assert found.best == dataclasses.replace(of.usual, n=64, stages=3, resident=1, described=False)
    assert found.seconds[found.best] == 1
    # each round times new configurations beside the best so far, which is timed first
    assert all(len(turn) >= 2 for turn in clock.turns)
    news = [each for turn in clock.turns for each in turn[1:]]
    assert len(news) == len(set(news))
    assert len(news) < 40


def test_a_step_with_too_small_a_gain_is_not_taken() -> None:
    of = request(dim=64)
    assert descend(of.usual, of, Clock(lambda blocks: STEP + 0.01 if blocks.n == 64 else 1.0), always).best == of.usual
    assert descend(of.usual, of, Clock(lambda blocks: STEP - 0.01 if blocks.n == 64 else 1.0), always).best.n == 64


def test_a_configuration_that_does_not_compile_is_skipped_with_its_reason() -> None:
    of = request(dim=64)
    clock = Clock(lambda blocks: blocks.n + 9 * blocks.stages, broken=lambda blocks: blocks.n == 32)
    found = descend(of.usual, of, clock, always)
    assert (found.best.n, found.best.stages) == (64, 1)
    assert {each.n for each in found.reasons} == {32}
    assert set(found.reasons.values()) == {"it does not compile"}
    assert not found.reasons.keys() & found.seconds.keys()


def test_the_search_ends_with_the_time() -> None:
    of = request(dim=64)
    left = iter([True, True])
    clock = Clock(lambda blocks: blocks.n)
    found = descend(of.usual, of, clock, lambda: next(left, False))
    assert len(clock.turns) <= 2
    assert found.best.n == 32
    assert descend(of.usual, of, Clock(lambda blocks: 1.0), lambda: False).seconds == {}


def test_where_the_best_itself_fails_the_search_ends() -> None:
    of = request(dim=64)
    found = descend(of.usual, of, Clock(lambda blocks: 1.0, broken=lambda blocks: blocks == of.usual), always)
    assert found.best == of.usual
    assert found.reasons[of.usual] == "it does not compile"
