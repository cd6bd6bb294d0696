"""Groups of worker processes on this machine's loopback: Gloo, one thread each, with bounded time, and no process left behind.

    results = pool4.run("tests.parallel.jobs_ring:forward", pattern, tensors)    # by rank; the workers' exceptions are raised
    result = forked(function, argument)                                          # one process, without a group
    with fresh(4) as pool:                                                       # for tests that kill
        pool.start("tests.parallel.jobs_failure:exchange")
        pool.kill(2)
        outcomes = pool.outcomes(10.0)

A job is a function of a module, called on every rank with the same arguments, after torch.distributed's default group was
made. The test's process hosts the rendezvous store, as torchrun's agent does. After a failure a pool replaces dead and
unresponsive workers, and all make a new default group.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringweave.errors import RingError

# A fork server must not run a parallel region or hold a thread before it forks. Processes that later ask for several
# threads let idle ones sleep: spinning threads take the cores from the others.
_QUIET = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_QUIET["OMP_WAIT_POLICY"] = "passive"
_STARTING = threading.Lock()
# torch resolves ::ffff:127.0.0.1 for every connection to a store, at both ends; with a slow DNS this limits it to 1 s
# instead of 5
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


class Outcome(NamedTuple):
    """The outcome of a job on one rank: a value, an exception with its traceback, or neither if the process died."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    dead: bool = False


class WorkerError(RuntimeError):
    """A worker died, did not answer in time, or raised an exception that cannot be pickled."""


def server() -> multiprocessing.context.ForkServerContext:
    """Return the fork server, a process that has imported torch and ringweave and forks workers in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    # torch loads its compiler at the first call of an operator, which would cost each worker a second
    names = ("compose", "failure", "functions", "models", "order", "ring", "sharded", "transport")
    loaded = ["torch", "torch.distributed", "torch._dynamo", "ringweave", "transformers.modeling_utils", __name__]
    context.set_forkserver_preload([*loaded, *(f"{__package__}.jobs_{name}" for name in names)])
    with _STARTING:
        before = {name: os.environ.get(name) for name in _QUIET}
        os.environ.update(_QUIET)
        try:
            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
    return context


def environment() -> dict[str, str]:
    """Return the environment of a process that is started, not forked: one thread, and this project's tests importable."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **_QUIET, "PYTHONPATH": path}


class _Member(NamedTuple):
    process: Any
    pipe: connection.Connection


class Pool:
    """`size` workers with one default group.

    Attributes:
        store: The rendezvous store, hosted here; jobs find the same keys in `rendezvous()`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._members: list[_Member | None] = [None] * size
        self._ended: set[int] = set()
        self._groups = 0
        self._open = False
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [member.process.pid for member in self._members if member is not None]

    def run(self, job: str, *args: Any, timeout: float = 240.0) -> list[Any]:
        """Call "module:function" with the arguments on every rank, and return the results by rank.

        The first exception of a worker is raised unchanged, with all ranks' tracebacks as notes.
        """
        self.start(job, *args)
        outcomes = self.outcomes(timeout)
        for outcome in outcomes:
            if outcome.error is not None:
                for rank, other in enumerate(outcomes):
                    outcome.error.add_note(f"rank {rank}: " + (other.trace or ("dead" if other.dead else "returned")))
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    def start(self, job: str, *args: Any) -> None:
        """Start a job on all ranks."""
        if not self._open:
            self._mend()
        for member in self._members:
            assert member is not None
            member.pipe.send_bytes(pickle.dumps((job, args)))

    def outcomes(self, timeout: float, stopped: int | None = None) -> list[Outcome]:
        """Return the job's outcome on each rank; ranks that exceed the time are killed, and stopped ones at the end."""
        found: dict[int, Outcome] = {}
        until = time.monotonic() + timeout
        while len(set(range(self.size)) - set(found) - {stopped}) and time.monotonic() < until:
            pipes = {m.pipe: rank for rank, m in enumerate(self._members) if m is not None and rank not in found}
            for pipe in connection.wait(list(pipes), max(0.0, until - time.monotonic())):
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    found[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self._ended.add(rank)
                    found[rank] = Outcome(error=WorkerError(f"rank {rank} died"), dead=True)
        for rank in range(self.size):
            if rank not in found:
                self.kill(rank)
                found[rank] = (
                    Outcome(dead=True)
                    if rank == stopped
                    else Outcome(error=WorkerError(f"rank {rank}: no answer in {timeout:g} s"), trace="killed")
                )
        self._open = not any(outcome.error or outcome.dead for outcome in found.values())
        return [found[rank] for rank in range(self.size)]

    def survivors(self, *victims: int, timeout: float = 240.0, stopped: int | None = None) -> list[Any]:
        """Return the results of all ranks but the victims, which must be dead; no other rank may have failed."""
        outcomes = self.outcomes(timeout, stopped)
        assert [rank for rank, outcome in enumerate(outcomes) if outcome.dead] == sorted(victims)
        left = [outcome for outcome in outcomes if not outcome.dead]
        for outcome in left:
            assert outcome.error is None, outcome.trace
        return [outcome.value for outcome in left]

    def reopen(self) -> None:
        """Give the next job a new default group, because the last job spoilt the present one."""
        self._open = False

    def kill(self, rank: int) -> float:
        """Kill a worker with SIGKILL by its id, and return the time.time() of it."""
        self._ended.add(rank)
        return self.signal(rank, signal.SIGKILL)

    def signal(self, rank: int, number: int) -> float:
        """Send a worker a signal by its id, and return the time.time() of it."""
        member = self._members[rank]
        assert member is not None
        now = time.time()
        if member.process.is_alive():
            os.kill(member.process.pid, number)
        return now

    def close(self) -> None:
        """End all workers."""
        for rank, member in enumerate(self._members):
            if member is not None:
                self.kill(rank)
                member.process.join(10)
                member.pipe.close()
                self._members[rank] = None
        self._open = False
        atexit.unregister(self.close)

    def _mend(self) -> None:
        """Replace dead workers and make a new default group: the old one may be out of step."""
        self._groups += 1
        for rank, member in enumerate(self._members):
            if member is not None:
                if rank not in self._ended:
                    continue
                member.process.join(10)
                member.pipe.close()
            ours, theirs = multiprocessing.Pipe()
            process = server().Process(target=_serve, args=(theirs, rank, self.size, self.store.port), daemon=True)
            process.start()
            theirs.close()
            self._members[rank] = _Member(process, ours)
        self._ended.clear()
        self._open = True
        self.run(f"{__name__}:_begin", self._groups)


def forked(job: Callable[..., Any], *args: Any, timeout: float = 240.0) -> Any:
    """Return the result of a function in a new process, which has loaded torch and ringweave but computed nothing."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = server().Process(target=_answer, args=(theirs, job, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise WorkerError(f"no answer in {timeout:g} s")
        outcome: Outcome = pickle.loads(ours.recv_bytes())
    except EOFError:
        raise WorkerError("died") from None
    finally:
        process.kill()
        process.join(10)
        ours.close()
    if outcome.error is not None:
        outcome.error.add_note(outcome.trace)
        raise outcome.error
    return outcome.value


@contextmanager
def fresh(size: int) -> Iterator[Pool]:
    """Yield a separate pool for tests that kill or stop workers, and end it at exit."""
    pool = Pool(size)
    try:
        yield pool
    finally:
        pool.close()


def ring_error(call: Callable[[], Any]) -> RingError:
    """Return, inside a job, the RingError that a call raises."""
    try:
        call()
    except RingError as error:
        return error
    raise AssertionError("no error")


def ring_mesh() -> DeviceMesh:
    """Return, inside a job, a mesh of all ranks for context parallelism."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def rendezvous() -> dist.Store:
    """Return, inside a job, the store of the test's process, in the scope of this default group's test."""
    return _STORE[0]


_STORE: list[dist.Store] = []
_PLACE: list[tuple[int, int]] = []


def _begin(number: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    rank, size = _PLACE[0]
    store = dist.PrefixStore(f"group{number}", _STORE[0])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=240))


def _serve(pipe: connection.Connection, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    _STORE.append(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=240)))
    _PLACE.append((rank, size))
    while True:
        try:
            name, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        _answer(pipe, _call, (name, args), f"rank {rank}")


def _call(name: str, args: tuple[Any, ...]) -> Any:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)(*args)


def _answer(pipe: connection.Connection, job: Callable[..., Any], args: tuple[Any, ...], who: str = "") -> None:
    try:
        outcome = Outcome(job(*args))
    except Exception as error:  # noqa: BLE001  it goes to the test that asked for the job
        outcome = Outcome(error=error, trace=traceback.format_exc())
    try:
        answer = pickle.dumps(outcome)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        answer = pickle.dumps(Outcome(error=WorkerError(f"{who}: {error}"), trace=outcome.trace))
    pipe.send_bytes(answer)
