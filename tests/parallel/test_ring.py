"""Test the ring schedule: its memory, its skipped stages, and messages that overlap with computing."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw
from ringweave.parallel import ContextParallel, Transport

from .processes import Pool
from .threads import run

LONG = 16384


@pytest.mark.parametrize(
    ("pattern", "placement"),
    [
        (rw.Full(), "contiguous"),
        (rw.Causal(), "zigzag"),
        (rw.SlidingWindow(512), "contiguous"),
        (rw.SlidingWindow(3000), "contiguous"),
        (rw.Documents([5000, 7000, LONG - 12000]), "contiguous"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value).split("(", maxsplit=1)[0],
)
def test_live_keys(pattern: rw.Pattern, placement: str) -> None:
    """G7: keys and values in memory are at most 1.1 times the shard and the two largest stages."""

    def job(transport: Transport) -> tuple[int, int]:
        ctx = ContextParallel(transport, pattern, LONG, heads=(1, 1), schedule="ring", placement=placement)
        q, k, v = (torch.randn(1, 1, ctx.local, 64) for _ in range(3))
        transport.trace = []
        rw.attention(q, k, v, pattern, context=ctx)
        shard = k.nbytes + v.nbytes
        # messages are split: a stage is all data from one peer
        stages = sorted((n for n in transport.counters.received), reverse=True)
        return shard + ctx.call.space.statistics().held, shard + sum(stages[:2])

    for live, allowed in run(4, job):
        assert live <= 1.1 * allowed


@pytest.mark.parametrize("schedule", ["ring", "allgather"])
def test_steps_allocate_no_new_buffers(schedule: str) -> None:
    """Receive, send and kernel buffers are returned to the workspace after each step and used again."""

    def job(transport: Transport) -> tuple[int, int, int]:
        pattern = rw.SlidingWindow(700) | rw.Sinks(40) | rw.Dilated(512, 4)
        ctx = ContextParallel(transport, pattern, 2048, heads=(2, 2), schedule=schedule, placement="zigzag")
        q, k, v = (torch.randn(1, 2, ctx.local, 16, requires_grad=True) for _ in range(3))

        def step() -> None:
            rw.attention(q, k, v, pattern, context=ctx).sum().backward()

        for _ in range(3):
            step()
        before = ctx.call.space.statistics()
        for _ in range(10):
            step()
        now = ctx.call.space.statistics()
        ctx.close()
        assert ctx.call.space.statistics().held == 0
        return now.taken - before.taken, (now.taken - now.reused) - (before.taken - before.reused), now.asked

    for taken, new, left in run(3, job):
        assert taken >= 30
        assert (new, left) == (0, 0)


def test_empty_stages_are_skipped() -> None:
    """A window that reaches only its neighbour takes one message out and one in, for any number of ranks."""

    def job(transport: Transport) -> tuple[int, list[int], int]:
        pattern = rw.SlidingWindow(100)
        ctx = ContextParallel(transport, pattern, 4096, heads=(2, 2), schedule="ring", placement="contiguous")
        x = torch.randn(1, 2, ctx.local, 16)
        with ctx.trace() as trace:
            rw.attention(x, x, x, pattern, context=ctx)
        computed = sum(event.kind == "compute" for event in trace.events)
        return transport.counters.messages, transport.counters.received, computed

    for rank, (messages, received, computed) in enumerate(run(8, job)):
        assert messages == (rank < 7)
        assert [peer for peer, size in enumerate(received) if size] == ([rank - 1] if rank else [])
        assert computed == 1 + (rank > 0)


@pytest.mark.measures
def test_communication_is_hidden(pool4: Pool) -> None:
    """G8: if messages take less time than a stage's computation, at least 0.9 of their time is hidden by it."""
    for flown, slept, stages, order in pool4.run("tests.parallel.jobs_ring:overlapped", 0.05, timeout=240):
        assert flown == pytest.approx(3 * 0.05)
        assert slept <= 0.1 * flown
        assert stages == [0, 1, 2, 3]
        # stage s + 1 was posted before stage s was computed
        assert order == sorted(order)
    # longer messages are waited for, so this test's clock is right
    for flown, slept, _, _ in pool4.run("tests.parallel.jobs_ring:overlapped", 3.0, timeout=240):
        assert slept > 0.1 * flown
