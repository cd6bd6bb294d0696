"""Test the state machine of a connection, with threads as ranks over one store, and the choice of the wait to blame."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ringweave.parallel.transport.connection import Connection, State
from ringweave.parallel.transport.failure import ConnectionFailure, FailedError, Wait, wait_to_blame
from ringweave.parallel.transport.lifelines import Lifelines


def connections(store: dist.Store, size: int, deadline: float = 20.0) -> list[Connection]:
    return [Connection(store, rank, size, deadline, Lifelines(store, rank, size)) for rank in range(size)]


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run jobs on a thread each, and return their results or FailedErrors."""
    results: list[Any] = [None] * len(jobs)

    def work(place: int) -> None:
        try:
            results[place] = jobs[place]()
        except FailedError as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def pair() -> Any:
    """Return two connections in the state CONNECTING."""
    pair = connections(dist.HashStore(), 2)
    yield pair
    for connection in pair:
        connection.close()


def test_a_connection_runs_when_all_ranks_have_met(pair: list[Connection]) -> None:
    assert [each.state for each in pair] == [State.CONNECTING] * 2
    assert together([lambda: pair[0].connect(3, 10.0), lambda: pair[1].connect(5, 10.0)]) == [[3, 5]] * 2
    assert [each.state for each in pair] == [State.RUNNING] * 2

    def swap(connection: Connection) -> torch.Tensor:
        received = torch.zeros(4)
        peer = 1 - connection.rank
        sends, receives = [(peer, torch.full((4,), float(connection.rank)))], [(peer, received)]
        connection.wait(connection.post(sends, receives, kind=0, words="kv"), number=0, words="kv")
        return received

    assert [x.tolist() for x in together([lambda: swap(pair[0]), lambda: swap(pair[1])])] == [[1.0] * 4, [0.0] * 4]


def test_the_first_failure_fails_all_ranks_for_good(pair: list[Connection]) -> None:
    together([lambda: pair[0].connect(0, 10.0), lambda: pair[1].connect(0, 10.0)])
    first, second = ConnectionFailure(0, None, "first"), ConnectionFailure(1, None, "second")
    assert pair[0].fail(first) == first
    # rank 1 learns of the first failure although it reports another
    assert pair[1].fail(second) == first
    assert pair[0].fail(second) == first
    for each in pair:
        assert (each.state, each.failure) == (State.FAILED, first)
        with pytest.raises(FailedError, match="first"):
            each.post([], [], kind=0, words="kv")


def test_a_failure_ends_the_wait_of_another_rank(pair: list[Connection]) -> None:
    together([lambda: pair[0].connect(0, 10.0), lambda: pair[1].connect(0, 10.0)])
    works = pair[1].post([], [(0, torch.zeros(4))], kind=0, words="kv")
    failure = ConnectionFailure(0, None, "out of memory")
    waited, _ = together([lambda: pair[1].wait(works, number=0, words="kv"), lambda: pair[0].fail(failure)])
    assert isinstance(waited, FailedError)
    assert waited.failure == failure


def test_a_failure_reported_before_the_ranks_meet_fails_all_ranks(pair: list[Connection]) -> None:
    failure = ConnectionFailure(0, None, "out of memory")
    assert pair[0].fail(failure) == failure
    with pytest.raises(FailedError) as caught:
        pair[1].connect(0, 20.0)
    # at its deadline it would have another cause
    assert caught.value.failure == failure
    with pytest.raises(FailedError):
        pair[0].connect(0, 20.0)


def test_a_rank_that_waits_to_connect_can_be_failed(pair: list[Connection]) -> None:
    failure = ConnectionFailure(0, None, "two threads")

    def report() -> None:
        time.sleep(0.1)
        pair[0].fail(failure)

    caught, _ = together([lambda: pair[0].connect(0, 20.0), report])
    assert isinstance(caught, FailedError)
    assert caught.failure == failure


def test_an_absent_rank_is_named_at_the_deadline() -> None:
    two = connections(dist.HashStore(), 3)[:2]
    begin = time.monotonic()
    for error in together([lambda: two[0].connect(0, 0.5), lambda: two[1].connect(0, 0.5)]):
        assert isinstance(error, FailedError)
        assert error.failure.peer == 2
        assert error.failure.cause == "ranks [2] did not connect within 0.5 s"
    assert time.monotonic() - begin >= 0.5
    for each in two:
        each.close()


def test_the_silent_rank_is_named_and_not_the_rank_that_waits_for_it() -> None:
    """Rank 0 waits for the silent rank 2, and rank 1 for rank 0."""
    three = connections(dist.HashStore(), 3, deadline=0.3)
    together([lambda each=each: each.connect(0, 10.0) for each in three])

    def wait(rank: int, peer: int) -> None:
        works = three[rank].post([], [(peer, torch.zeros(1))], kind=0, words="kv")
        three[rank].wait(works, number=7, words="kv")

    for error in together([lambda: wait(0, 2), lambda: wait(1, 0)]):
        assert isinstance(error, FailedError)
        assert error.failure.peer == 2
        assert error.failure.cause == "no answer from rank 2 to rank 0 in time (kv, 0.3 s)"
        assert error.failure.transient
    for each in three:
        each.close()


@given(st.data())
def test_the_blamed_wait_explains_the_others(data: st.DataObject) -> None:
    """The end of the chain of waits is blamed; in a closed chain, the wait for the earliest message."""
    size = data.draw(st.integers(2, 8))
    numbers = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    peers = [data.draw(st.sampled_from([peer for peer in range(size) if peer != rank])) for rank in range(size)]
    waiting = [True, *data.draw(st.lists(st.booleans(), min_size=size - 1, max_size=size - 1))]
    waits = [Wait(numbers[rank], rank, peers[rank]) for rank in range(size)]
    blamed = wait_to_blame(waits[0], lambda rank: waits[rank] if waiting[rank] else None)
    # the ranks that rank 0 waits for, directly or through others
    chain = [0]
    while waiting[chain[-1]] and peers[chain[-1]] not in chain:
        chain.append(peers[chain[-1]])
    if waiting[chain[-1]]:
        assert blamed == min(waits[rank] for rank in chain)
    else:
        assert blamed.peer == chain[-1]
        assert not waiting[blamed.peer]
