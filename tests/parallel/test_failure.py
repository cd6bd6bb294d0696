"""Every failure raises a RingError on every survivor in time, and the error names the lost rank."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

import ringweave as rw

from ..sampled import is_long
from .jobs_failure import READY
from .processes import Pool, environment, fresh, server

JOBS = "tests.parallel.jobs_failure"
HOWS = ["exchange", "all_to_all", "agree", "compute"]
# each rank is a victim, of one job or another
REPETITIONS = 20 if is_long() else 2
# seconds in which a failure is noticed on a busy machine, long before the deadline of 20 or 30 s
SOON = 15.0


def ready(pool: Pool, count: int) -> None:
    """Wait until this many ranks have said that they are about to wait."""
    until = time.monotonic() + 240
    while int(pool.store.add(READY, 0)) < count:
        assert time.monotonic() < until
        time.sleep(0.005)
    pool.store.set(READY, "0")


@pytest.mark.parametrize("how", HOWS)
def test_a_killed_rank_is_told_by_all_in_time(fragile4: Pool, how: str) -> None:
    for repetition in range(REPETITIONS):
        victim = (HOWS.index(how) + repetition) % 4
        fragile4.start(f"{JOBS}:wait_for_the_dead", how, victim, 30.0)
        ready(fragile4, 4)
        killed = fragile4.kill(victim)
        found = fragile4.survivors(victim)
        for seen in found:
            # a computing rank raises at its next communication
            assert seen.at - killed < SOON, (repetition, seen)
            assert seen.error.peer == victim
            assert seen.error.rank != victim
            at_plan = how == "agree" or "plan" in seen.error.cause
            # a computing rank may still be in the exchange when another one, which finished it, reports the loss
            told = how == "compute" and f"rank {seen.error.rank} lost" not in seen.error.cause
            assert seen.error.step in ((1, 2) if told and at_plan else (2,) if at_plan else (1,))
            assert seen.error.stage == (3 if how == "exchange" else seen.error.stage)
            assert "closed" in seen.error.cause or "reset" in seen.error.cause
            assert seen.threads == ["MainThread"]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("how", ["kill", "kill, early", "kill, called", "kill, forked"])
def test_a_rank_killed_before_its_first_call(fragile4: Pool, how: str, size: int) -> None:
    fragile4.store.delete_key("go")
    fragile4.start(f"{JOBS}:before_the_first_call", how, size, 1, 30.0)
    ready(fragile4, 4)
    if how == "kill, called":
        # by now it waits for the others to connect
        time.sleep(0.5)
    killed = fragile4.kill(1)
    fragile4.store.set("go", "")
    for rank, seen in zip([0, 2, 3], fragile4.survivors(1), strict=True):
        if rank == size:
            assert seen is None
            continue
        assert seen.at - killed < SOON, seen
        assert seen.error.peer == 1
        assert seen.error.lost
        assert "lost rank 1 before they were connected (its process has ended)" in seen.error.cause


@pytest.mark.parametrize("size", [3, 4])
def test_a_rank_stopped_before_its_first_call(fragile4: Pool, size: int) -> None:
    deadline = 4.0
    fragile4.start(f"{JOBS}:before_the_first_call", "stop", size, 1, deadline)
    ready(fragile4, 4)
    stopped = fragile4.signal(1, signal.SIGSTOP)
    for seen in fragile4.survivors(1, stopped=1)[: size - 1]:
        # the others called up to a deadline earlier
        assert seen.at - stopped > 0.3
        assert seen.error.peer == 1
        assert "ranks [1] did not connect within 4 s" in seen.error.cause


@pytest.mark.parametrize("size", [3, 4])
def test_an_error_before_the_first_message_is_reported(fragile4: Pool, size: int) -> None:
    found = fragile4.run(f"{JOBS}:before_the_first_call", "error", size, 1, 30.0)[:size]
    assert isinstance(found[1].error, MemoryError)
    for seen in (*found[:1], *found[2:]):
        assert seen.at - found[1].at < SOON
        assert seen.error.cause == "rank 1 raised MemoryError: here"
        assert not seen.error.lost
    fragile4.reopen()


def test_a_rank_that_is_late_is_waited_for(fragile4: Pool) -> None:
    """A late rank is waited for longer than the time to check whether it lives."""
    assert fragile4.run(f"{JOBS}:before_the_first_call", "late", 4, 1, 30.0) == [True] * 4


def test_ranks_with_other_versions(fragile4: Pool) -> None:
    for seen in fragile4.run(f"{JOBS}:before_the_first_call", "version", 4, 1, 30.0):
        assert f"ringweave {rw.__version__} on rank" in seen.error.cause or "ringweave 0.0.0 on" in seen.error.cause
        assert not seen.error.lost
    fragile4.reopen()


def test_ranks_without_a_connection_to_the_lost_one_learn_by_the_flag(fragile4: Pool) -> None:
    """Ranks 1 and 2 wait for rank 0 only; the flag tells them, although their connections are intact."""
    fragile4.start(f"{JOBS}:wait_for_the_dead", "exchange", 3, 30.0, True)
    ready(fragile4, 4)
    killed = fragile4.kill(3)
    for seen in fragile4.survivors(3):
        assert seen.at - killed < SOON
        assert seen.error.peer == 3
        assert "rank 0 lost rank 3" in seen.error.cause


def test_a_rank_that_waits_for_a_busy_one_learns_by_the_flag(fragile4: Pool) -> None:
    """Rank 1 waits for rank 0, which computes; neither's connection is closed, and yet rank 1 hears of rank 3."""
    fragile4.start(f"{JOBS}:wait_for_the_busy", 4.0)
    ready(fragile4, 4)
    fragile4.kill(3)
    found = fragile4.survivors(3)
    for seen in found:
        assert seen.error.peer == 3
        assert "rank 2 lost rank 3" in seen.error.cause
    assert max(found[1].at, found[2].at) < found[0].at


def test_a_rank_that_itself_waits_is_not_blamed(fragile4: Pool) -> None:
    """Ranks 1 and 2 wait for rank 0, which waits for the stopped rank; all deadlines pass at about one time, and only that one is blamed."""
    for _ in range(3):
        fragile4.start(f"{JOBS}:wait_for_the_dead", "exchange", 3, 0.5, True)
        ready(fragile4, 4)
        fragile4.signal(3, signal.SIGSTOP)
        for seen in fragile4.survivors(3, stopped=3):
            assert seen.error.peer == 3
            assert "no answer from rank 3 to rank 0" in seen.error.cause


@pytest.mark.parametrize("how", ["exchange", "all_to_all", "agree"])
def test_a_stopped_rank_is_noticed_at_the_deadline(fragile4: Pool, how: str) -> None:
    fragile4.start(f"{JOBS}:wait_for_the_dead", how, 2, 1.0)
    # stopped before it can hear of a failure
    ready(fragile4, 4)
    stopped = fragile4.signal(2, signal.SIGSTOP)
    for seen in fragile4.survivors(2, stopped=2):
        assert 0.9 < seen.at - stopped < SOON
        assert seen.error.peer == 2
        assert "no answer from rank 2" in seen.error.cause


def test_a_transport_that_failed_stays_failed(fragile4: Pool) -> None:
    texts = fragile4.run(f"{JOBS}:again_after_an_error", 1)
    for rank in (0, 2, 3):
        assert texts[rank] == ["1 2 True", "1 3 True", "1 4 True"]
    # the silent rank is told that the others have given up
    assert texts[1] == ["1 2 True", "1 3 True", "1 4 True"]


@pytest.mark.parametrize("silent", [1, 3])
def test_a_lost_message_is_repeated(fragile4: Pool, silent: int) -> None:
    for result in fragile4.run(f"{JOBS}:repeat", "kv", silent, 1, 1):
        assert result["error"] is None
        assert result["steps"] == 4 * 3
        assert result["right"]
        assert result["generation"] == 1


def test_repetitions_are_bounded(fragile4: Pool) -> None:
    """With more losses than retries every rank raises, and the data received before is right."""
    for result in fragile4.run(f"{JOBS}:repeat", "kv", 2, 1, 99):
        assert isinstance(result["error"], rw.RingError)
        assert result["error"].peer == 2
        assert result["right"]
        assert result["generation"] == 1


@pytest.mark.parametrize("name_the_lost", [True, False])
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_regroup(fragile4: Pool, victim: int, name_the_lost: bool) -> None:
    fragile4.start(f"{JOBS}:survive", victim, name_the_lost)
    ready(fragile4, 4)
    fragile4.kill(victim)
    left = [rank for rank in range(4) if rank != victim]
    for place, result in enumerate(fragile4.survivors(victim)):
        assert result["ranks"] == left
        assert (result["rank"], result["size"]) == (place, 3)
        assert not result["waited"]
        assert result["sum"] == sum(left)


def test_a_rank_that_regroups_too_late_is_left_out(fragile4: Pool) -> None:
    results = fragile4.run(f"{JOBS}:regroup_late", 1)
    assert [results[rank] for rank in (0, 2, 3)] == [[0, 2, 3]] * 3
    assert "came after the others had regrouped as [0, 2, 3]" in results[1]
    fragile4.reopen()


def test_regrouping_twice(fragile4: Pool) -> None:
    assert fragile4.run(f"{JOBS}:regroup_twice") == [[0, 1, 2]] * 3 + [[]]
    fragile4.reopen()


def test_a_lost_store_is_a_failure(fragile4: Pool) -> None:
    ours, theirs = multiprocessing.Pipe()
    host = server().Process(target=_host, args=(theirs,), daemon=True)
    host.start()
    fragile4.start(f"{JOBS}:lose_the_store", ours.recv())
    ready(fragile4, 4)
    killed = time.time()
    host.kill()
    host.join(10)
    for outcome in fragile4.outcomes(240):
        assert outcome.error is None, outcome.trace
        assert "lost the rendezvous store" in outcome.value.error.cause
        assert outcome.value.at - killed < SOON
        assert outcome.value.threads == ["MainThread"]
    fragile4.reopen()


def _host(pipe: object) -> None:
    from .jobs_failure import host_a_store

    host_a_store(pipe)


def test_a_rank_that_never_comes_is_named(fragile4: Pool) -> None:
    errors = fragile4.run(f"{JOBS}:come_late", 1)
    for rank in (0, 2, 3):
        assert errors[rank].peer == 1
        assert "did not connect within" in errors[rank].cause


def test_unequal_buffers_end_at_the_deadline(pool2: Pool) -> None:
    """Buffers of unequal sizes raise at the deadline, where Gloo would abort the process."""
    for peer, cause in pool2.run(f"{JOBS}:unequal"):
        assert peer in (0, 1)
        assert "no answer" in cause


def test_a_forgotten_transport_ends() -> None:
    # separate workers, since jobs of other tests leave the compiler's threads
    with fresh(2) as pool:
        for alive, names in pool.run(f"{JOBS}:forget"):
            assert alive == 2
            assert names == ["MainThread"]


def test_an_open_transport_does_not_keep_the_interpreter_alive() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = f"from {JOBS} import leave_open; leave_open({{}}, {store.port})"
    commands = [[sys.executable, "-c", code.format(rank)] for rank in (0, 1)]
    processes = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) for command in commands
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
            assert "Traceback" not in errors
            assert "terminate" not in errors
    finally:
        for process in processes:
            process.kill()


def test_workers_are_forked_from_one_thread() -> None:
    """Workers are forked while no other thread and no parallel region exists, as the native kernels' thread pools require."""
    with fresh(2) as pool:
        for threads, default in pool.run(f"{JOBS}:fork_safety"):
            assert threads == 1
            assert default == 1


def test_no_process_is_left() -> None:
    psutil = pytest.importorskip("psutil")
    with fresh(2) as pool:
        pool.run(f"{JOBS}:forget")
        pids = pool.pids
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_regroup_is_a_function_by_its_public_name() -> None:
    """The public name regroup is a function, not the module that contains it, which loading would bind to the package's attribute."""
    code = "from ringweave.parallel import regroup; assert callable(regroup), regroup"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=240)


def test_a_ring_error_tells_and_pickles() -> None:
    error = rw.RingError(1, 3, 2, 7, "rank 1 lost rank 3 in kv (connection closed)")
    assert str(error) == (
        "rank 1, step 7, stage 2: got rank 1 lost rank 3 in kv (connection closed); wanted an answer of every rank. "
        "The shard of rank 3 cannot be reached: regroup the survivors and shard again, or restart."
    )
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error)
    assert str(again) == str(error)
    assert isinstance(error, rw.RingweaveError)
    assert isinstance(error, RuntimeError)
    assert "a peer" in str(rw.RingError(0, None, None, 0, "x"))
    assert error.lost
    differs = rw.RingError(
        1, 3, None, 7, "scale 1.0 here and 2.0 on rank 3", "the same scale on all ranks", "Nothing was."
    )
    assert str(differs) == (
        "rank 1, step 7: got scale 1.0 here and 2.0 on rank 3; wanted the same scale on all ranks. Nothing was."
    )
    assert not differs.lost
    for again in (pickle.loads(pickle.dumps(differs)), differs.again()):
        assert vars(again) == vars(differs)
        assert str(again) == str(differs)
