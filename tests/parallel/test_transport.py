"""Test messages among ranks: contents, exact byte counts, traces."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from ringweave.parallel.transport.transport import Transport

from .jobs_transport import part
from .processes import Pool

JOBS = "tests.parallel.jobs_transport"


@pytest.fixture
def pool(size: int, request: pytest.FixtureRequest) -> Pool:
    return request.getfixturevalue(f"pool{size}")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_to_all(pool: Pool, size: int) -> None:
    for rank, result in enumerate(pool.run(f"{JOBS}:all_to_all", 3)):
        others = [peer for peer in range(size) if peer != rank]
        assert result["sent"] == [3 * part(rank, peer) if peer != rank else 0 for peer in range(size)]
        assert result["received"] == [3 * part(peer, rank) if peer != rank else 0 for peer in range(size)]
        assert result["messages"] == 3 * sum(part(rank, peer) > 0 for peer in others)
        assert result["metadata"] == 0
        arriving = [event for event in result["trace"] if event.kind == "receive"]
        assert sum(event.nbytes for event in arriving) == sum(result["received"])
        assert all(event.what == "tiles" and event.stage is None for event in arriving)


@pytest.mark.parametrize("size", [2, 4])
def test_exchange(pool: Pool, size: int) -> None:
    stages = [stage for stage in (1, 2) if stage % size]
    for result in pool.run(f"{JOBS}:exchange"):
        trace = result["trace"]
        # the last is waited for first
        assert [(e.kind, e.stage) for e in trace if e.kind == "wait"] == [("wait", s) for s in reversed(stages)]
        for stage in stages:
            (sent,) = [e for e in trace if (e.kind, e.stage) == ("send", stage)]
            (received,) = [e for e in trace if (e.kind, e.stage) == ("receive", stage)]
            assert sent.nbytes == received.nbytes == 40_000 * stage + 18
            assert sent.start <= sent.end
            assert sent.what == "kv"
        # both were posted before either wait
        assert max(e.start for e in trace if e.kind == "send") <= min(e.start for e in trace if e.kind == "wait")


def test_exchange_of_floats(pool2: Pool) -> None:
    pool2.run(f"{JOBS}:floats")


@pytest.mark.parametrize("size", [2, 4])
def test_agree(pool: Pool, size: int) -> None:
    for tables, step, metadata, payload in pool.run(f"{JOBS}:agree"):
        assert tables == [[[rank, 10 * step, -(2**62)] for rank in range(size)] for step in range(3)]
        assert step == 3
        assert payload == 0
        # three numbers of the caller, and one of the transport
        assert metadata == 3 * (size - 1) * 4 * 8


@pytest.mark.parametrize("size", [4, 8])
def test_random_traffic(pool: Pool, size: int) -> None:
    pool.run(f"{JOBS}:random_traffic", 40 if size == 4 else 10)


def test_refusals(pool2: Pool) -> None:
    for texts in pool2.run(f"{JOBS}:refusals"):
        assert [text.split(":")[0] for text in texts] == ["sends", "sends", "header"]
        assert all("wanted" in text for text in texts)


def test_nothing_is_left(pool2: Pool) -> None:
    for names, before, after in pool2.run(f"{JOBS}:threads"):
        assert names == []
        assert after <= before


def test_an_exchange_without_a_wait_keeps_no_later_memory(pool2: Pool) -> None:
    """An exchange without a wait, such as of a failed call, keeps no memory of later calls."""
    assert pool2.run(f"{JOBS}:kept") == [[False, False]] * 2


def test_a_fork_sends_nothing(pool2: Pool) -> None:
    """A forked child sends nothing on the shared connections: other ranks would take its messages for its parent's."""
    assert pool2.run(f"{JOBS}:forked") == [(7, 3)] * 2


def test_a_delayed_message_flies_while_the_caller_computes(pool2: Pool) -> None:
    for trace, waited in pool2.run(f"{JOBS}:overlap"):
        (wait,) = [e for e in trace if (e.kind, e.stage) == ("wait", 1)]
        (compute,) = [e for e in trace if e.kind == "compute"]
        (receive,) = [e for e in trace if (e.kind, e.stage) == ("receive", 1)]
        assert receive.start <= compute.start < compute.end <= wait.start
        # the first message's 0.2 s were over when the wait began; no computing hides the second message
        assert wait.end - wait.start < 0.1
        assert waited >= 0.19


def test_a_group_of_one_needs_no_process_group() -> None:
    before = threading.active_count()
    transport = Transport(None)
    assert (transport.rank, transport.size) == (0, 1)
    assert transport.agree(torch.tensor([3, 4]), what="plan").tolist() == [[3, 4]]
    transport.exchange([], [], what="kv").wait()
    assert (transport.counters.sent, transport.counters.messages, transport.counters.metadata) == ([0], 0, 0)
    assert not dist.is_initialized()
    assert threading.active_count() == before
    transport.close()
