from __future__ import annotations

import itertools
from typing import Any

import pytest

import ringweave as rw


def blocks(density: float) -> rw.Pattern:
    return rw.patterns.random_blocks(256, density, block_size=32)


def densities(schedule: rw.adaptive.SparsitySchedule, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(schedule.density)
        schedule.step()
    return found


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("cosine", 0.5), ("cubic", 0.875)])
def test_it_is_held_goes_down_and_is_held(shape: str, middle: float) -> None:
    schedule = rw.adaptive.SparsitySchedule(blocks, start=0.5, end=0.1, warmup=10, ramp=20, shape=shape)
    found = densities(schedule, 40)
    assert found[:11] == [0.5] * 11
    assert found[30:] == [0.1] * 10
    assert all(after < before for before, after in itertools.pairwise(found[10:31]))
    assert found[20] == pytest.approx(0.5 - 0.4 * middle)
    quarter = {"linear": 0.25, "cosine": (1 - 0.5**0.5) / 2, "cubic": 1 - 0.75**3}[shape]
    assert found[15] == pytest.approx(0.5 - 0.4 * quarter)


def test_it_moves_now_and_then_and_ends_at_the_end() -> None:
    schedule = rw.adaptive.SparsitySchedule(blocks, start=1.0, end=0.2, ramp=10, shape="linear", every=4)
    assert densities(schedule, 13) == pytest.approx([1.0] * 4 + [0.68] * 4 + [0.36] * 2 + [0.2] * 3)


def test_a_pattern_is_made_once_for_a_density() -> None:
    made: list[float] = []

    def make(density: float) -> rw.Pattern:
        made.append(density)
        return blocks(density)

    schedule = rw.adaptive.SparsitySchedule(make, start=1.0, end=0.25, warmup=2, ramp=6, shape="linear", every=3)
    seen = []
    for _ in range(12):
        assert schedule.pattern is schedule.pattern
        seen.append(schedule.pattern.density(256))
        schedule.step()
    assert made == [1.0, 0.625, 0.25]
    assert seen == [1.0] * 5 + [pytest.approx(0.625, abs=0.05)] * 3 + [0.25] * 4


def test_a_loaded_schedule_continues() -> None:
    options: dict[str, Any] = {"start": 0.5, "end": 0.1, "warmup": 3, "ramp": 9, "shape": "cosine"}
    whole = densities(rw.adaptive.SparsitySchedule(blocks, **options), 20)
    first, second = (rw.adaptive.SparsitySchedule(blocks, **options) for _ in range(2))
    assert densities(first, 7) == whole[:7]
    second.load_state_dict(first.state_dict())
    assert second.pattern.density(256) == first.pattern.density(256)
    assert densities(second, 13) == whole[7:]
