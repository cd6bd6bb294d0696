"""If a rank is killed while others compute attention, every survivor raises in time, and no result is wrong."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw
from ringweave.backends import cpu

from ..oracle import Inputs
from ..sampled import is_long
from .jobs_ring import Survived
from .processes import Pool
from .spread import alone, joined
from .test_failure import SOON
from .test_schedules import OneDevice

# each rank is a victim once in each schedule
REPETITIONS = 20 if is_long() else 8


def survivors(pool: Pool, victim: int, x: Inputs, schedule: str, where: str, regroups: bool) -> list[Survived]:
    pool.store.set("killed", "")
    pool.start("tests.parallel.jobs_ring:killed", x, rw.Causal(), schedule, where, victim, regroups)
    found = pool.survivors(victim)
    killed = float(pool.store.get("killed"))
    for each in found:
        assert each.at - killed < SOON, each
        assert each.error.peer == victim
        assert each.right
    return found


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_a_killed_rank(fragile4: Pool, where: str) -> None:
    """G9: in 20 repetitions (8 in a short run), in both schedules and for any rank, every survivor raises RingError within 2 s."""
    x = Inputs.random(700, heads=2, dim=8)
    for repetition in range(REPETITIONS):
        schedule = ("allgather", "ring")[repetition % 2]
        survivors(fragile4, repetition // 2 % 4, x, schedule, where, regroups=False)


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_survivors_regroup_and_continue(fragile4: Pool, schedule: str) -> None:
    """G9: survivors regroup in 3 s, and three ranks compute exact results from the replicated input."""
    x = Inputs.random(700, heads=2, dim=8)
    found = survivors(fragile4, 2, x, schedule, "forward", regroups=True)
    for each in found:
        assert each.regrouped is not None
        assert each.regrouped <= 3.0
    OneDevice.of(x, rw.Causal()).check(joined([each.after for each in found], 700))


def test_ranks_are_lost_until_two_are_left(fragile4: Pool) -> None:
    """G9: each time, the error names the lost rank, and the remaining ranks compute the bits of one device."""
    x = Inputs.random(700, heads=2, dim=8)
    pattern = rw.SlidingWindow(300) & rw.Causal() | rw.Sinks(64) & rw.Causal()
    victims = [1, 2]
    fragile4.start("tests.parallel.jobs_ring:killed_in_turn", x, pattern, victims)
    want = alone(x, pattern)["out"]
    # the second victim is the third of ranks 0, 2 and 3
    for lost in fragile4.survivors(1, 3):
        assert [each.named for each in lost] == [True, True]
        for each in lost:
            if cpu.module() is not None:
                assert torch.equal(each.out, want)
            torch.testing.assert_close(each.out, want)


def test_alone_after_a_failure(fragile4: Pool) -> None:
    """``replicated(fallback="single")`` is exact after a failure if every rank has the whole input; without it the error is raised."""
    x = Inputs.random(500, heads=2, dim=8)
    fragile4.start("tests.parallel.jobs_ring:replicated", x, 1)
    assert fragile4.survivors(1) == [True] * 3


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_a_rank_that_raises_in_a_call_tells_the_others(fragile4: Pool, schedule: str, where: str) -> None:
    """If a rank raises in a call, the others raise long before their deadline of 60 s, and again in the next call."""
    cause = "got rank 2 raised KeyboardInterrupt: here; wanted no exception during a call. Fix the cause on that rank"
    for rank, (said, seconds) in enumerate(fragile4.run("tests.parallel.jobs_ring:raising", schedule, where, 2)):
        assert seconds < 30.0
        assert len(said) == 2
        assert said[0] == "here" if rank == 2 else cause in said[0]
        assert cause in said[1]


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_a_call_from_a_signal_handler_is_refused(fragile4: Pool, schedule: str) -> None:
    """A call from a signal handler is refused before any of its messages meets the interrupted call's."""
    told, *others = fragile4.run("tests.parallel.jobs_ring:nested", schedule)
    assert len(told) >= 2
    assert all("a call during another call of the same thread, such as from a signal handler" in said for said in told)
    assert others == [[]] * 3
