"""The connection of a transport's ranks: a state machine with one thread.

    CONNECTING --- all ranks have met, and links join them ---> RUNNING
        |                                                          |
        | a rank is absent or has ended,                           | a message failed, a wait is overdue,
        | or any rank reported a failure                           | or any rank reported a failure
        +------------------------> FAILED <------------------------+

All ranks fail with the failure that was reported first. The thread writes a failure to the rendezvous store before it
cuts the links, because the neighbours of a rank that gives up would take its closed connections for its death.

The thread alone uses the store while ranks connect and reads failures from it. A store that does not answer therefore
blocks the thread and never a caller: callers wait for a change of state, and for a limited time.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...errors import ShapeError, first_line
from .failure import ConnectionFailure, FailedError, Wait, wait_to_blame
from .lifelines import Lifelines
from .links import GlooLink, Link, LinkError, NcclLink, Tagged
from .protocol import Tensors
from .rendezvous import bounded

Work = tuple[Link, int, Any]  # link, peer, torch's work
# seconds between two reads of the failure flag; a survivor learns of a failure this late and raises within 2 s
PERIOD = 0.2
# A link's deadline is this many seconds after the connection's: the thread first reports the silent rank to all.
_GRACE = 3.0
# seconds of waiting for ranks to connect, after which their processes are checked
_LATE = 0.3
# seconds after which a failure counts as reported although the store, or its host, does not answer
_REPORTING = 1.0
_THREAD = "ringweave-connection"


class State(enum.Enum):
    """The state of a connection."""

    CONNECTING = enum.auto()
    RUNNING = enum.auto()
    FAILED = enum.auto()


class Connection:
    """Links to all ranks, one per kind of device, and a thread that detects failures and reports them to all ranks.

    After a failure the connection carries no more messages; a new one in another scope of the store replaces it.

    Args:
        store: Store that all ranks share, in the scope of this connection. It uses the group's connection to its
            host: a new one would make torch (2.13) look up the host's name, which takes seconds with a slow DNS.
        rank: This rank.
        size: Number of ranks.
        deadline: Longest wait for a message, in seconds.
        lifelines: This process's lifelines to the other ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: float, lifelines: Lifelines) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self.state = State.CONNECTING
        self.failure: ConnectionFailure | None = None  # not None in state FAILED
        self._store, self._lifelines = store, lifelines
        self._links: dict[str, Link] = {}
        self._sent, self._received = [0] * size, [0] * size
        self._numbers: list[int] = []  # each rank's number, known in state RUNNING
        self._error = ""  # the reason why the thread could not connect
        self._reported: ConnectionFailure | None = None
        # the wait of the caller's thread: its end in time.monotonic(), itself, and its description
        self._waiting: tuple[float, Wait, str] | None = None
        self._overdue_since = 0.0  # time at which this rank wrote an overdue wait to the store; 0 if it has not
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    # ---- the caller's side -------------------------------------------------------------------------------------------

    def connect(self, number: int, seconds: float) -> list[int]:
        """Wait for all ranks, at most ``seconds``, then connect and return every rank's ``number``.

        Raises:
            FailedError: A rank's process has ended, a rank did not come in time or has another version of ringweave, or
                the store is lost.
        """
        self._start(functools.partial(self._connect, number, seconds))
        began, ended = time.monotonic(), None
        # only this thread can check the processes while the other one waits for an ended process
        while self.state is State.CONNECTING and not self._error and ended is None:
            with self._changed:
                self._changed.wait_for(lambda: self.state is not State.CONNECTING or self._error, 0.05)
            now = time.monotonic()
            ended = self._lifelines.ended() if now > began + _LATE else None
            if now > began + 2 * seconds:
                self._error = f"no answer in {2 * seconds:.1f} s"
        if self.state is State.CONNECTING:
            ended = self._lifelines.ended() if ended is None else ended
            cause = f"rank {self.rank} could not connect ({self._error})"
            if ended is not None:
                cause = f"rank {self.rank} lost rank {ended} before they were connected (its process has ended)"
            self.fail(ConnectionFailure(self.rank, ended, cause))
        if self.failure is not None:
            raise FailedError(self.failure)
        return self._numbers

    def post(self, sends: Tensors, receives: Tensors, *, kind: int, words: str) -> list[Work]:
        """Start messages of a kind, 0 or 1; messages of different kinds are never matched. Each work needs a wait().

        Raises:
            FailedError: A rank is lost; the failure's text contains ``words``.
        """
        if self.failure is not None:
            raise FailedError(self.failure)
        outgoing = [_numbered(self._sent, peer, tensor, kind) for peer, tensor in sends]
        incoming = [_numbered(self._received, peer, tensor, kind) for peer, tensor in receives]
        link = self._link({tensor.device.type for _, tensor in (*sends, *receives)})
        try:
            return [(link, peer, work) for peer, work in link.post(outgoing, incoming)]
        except LinkError as error:
            raise self._lost(error, words) from error

    def wait(self, works: Sequence[Work], *, number: int, words: str) -> None:
        """Wait for the messages that post() started; ``number`` identifies them and is the same on all ranks.

        Raises:
            FailedError: A rank is lost, or is silent until the deadline.
        """
        until = time.monotonic() + self.deadline
        try:
            for link, peer, work in works:
                self._waiting = until, Wait(number, self.rank, peer), f"{words}, {self.deadline:g} s"
                seconds = max(until - time.monotonic(), 0.0) + _GRACE
                link.wait(peer, work, seconds, lambda: self.state is State.FAILED)
        except LinkError as error:
            raise self._lost(error, words) from error
        finally:
            self._waiting = None

    def fail(self, failure: ConnectionFailure) -> ConnectionFailure:
        """Report a failure to all ranks, from any thread; return the first reported one, perhaps another rank's."""
        self._reported = failure
        self._start()
        self._wake.set()
        with self._changed:
            self._changed.wait_for(lambda: self.state is State.FAILED, _REPORTING)
        self._fail(failure)
        assert self.failure is not None
        return self.failure

    def stop(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        # the garbage collector may call this on any thread
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def close(self) -> None:
        """End the thread and close the links."""
        self.stop()
        self._links.clear()

    def _lost(self, error: LinkError, words: str) -> FailedError:
        cause = f"rank {self.rank} lost rank {error.peer} in {words} ({error.cause})"
        return FailedError(self.fail(ConnectionFailure(self.rank, error.peer, cause, error.timeout)))

    def _link(self, devices: set[str]) -> Link:
        (device,) = devices if len(devices) == 1 else ("several",)
        if device not in ("cpu", "cuda"):
            raise ShapeError("tensors", f"device {sorted(devices)}", "all on cpu or on cuda", "Move them.")
        if device not in self._links:
            store = dist.PrefixStore("nccl", self._store)
            self._links[device] = NcclLink(store, self.rank, self.size, self.deadline)
        return self._links[device]

    # ---- the thread's side -------------------------------------------------------------------------------------------

    def _start(self, connecting: Callable[[], None] | None = None) -> None:
        """Start the thread, unless it has started."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(connecting,), name=_THREAD, daemon=True)
                self._thread.start()

    def _run(self, connecting: Callable[[], None] | None) -> None:
        try:
            if connecting is not None:
                connecting()
        except FailedError as error:
            self._reported = error.failure
        except (RuntimeError, OSError) as error:
            with self._changed:
                self._error = first_line(error) or type(error).__name__
                self._changed.notify_all()
        while not self._closed:
            failure = self._read_failure()
            if failure is not None:
                self._fail(failure)
                break
            self._wake.wait(PERIOD)
            self._wake.clear()

    def _connect(self, number: int, seconds: float) -> None:
        """Meet the other ranks, compare versions, and link to all of them; then the connection runs."""
        own = str(sys.modules[__package__.partition(".")[0]].__version__)
        met = self._meet("meeting", f"{number} {own} {self._lifelines.address}", seconds)
        numbers, versions, addresses = zip(*[word.split(" ", 2) for word in met], strict=True)
        for other, version in enumerate(versions):
            if version != own:
                cause = f"ringweave {own} on rank {self.rank} and {version} on rank {other}"
                wanted, remedy = "one version of ringweave", "Install the same version on all ranks."
                raise FailedError(ConnectionFailure(self.rank, other, cause, wanted=wanted, remedy=remedy))
        self._lifelines.learn(addresses)
        # Meet again, because a rank may have died while it waited. Gloo would wait for it and block the store.
        self._meet("all", "", seconds)
        self._links["cpu"] = GlooLink(dist.PrefixStore("gloo", self._store), self.rank, self.size, seconds)
        with self._changed:
            self._numbers = [int(each) for each in numbers]
            if self.state is State.CONNECTING:
                self.state = State.RUNNING
            self._changed.notify_all()

    def _meet(self, where: str, word: str, seconds: float) -> list[str]:
        """Write a word to the store, wait until all ranks have written theirs, and return the words by rank."""
        store = dist.PrefixStore(where, self._store)
        store.set(str(self.rank), word)
        missing = list(range(self.size))
        until, pause = time.monotonic() + seconds, 0.002
        while True:
            # one check per rank, since few ranks are absent and an error has to name them
            while missing and store.check([str(missing[0])]):
                missing.pop(0)
            if not missing:
                return [store.get(str(other)).decode() for other in range(self.size)]
            if time.monotonic() > until:
                absent = [other for other in missing if not store.check([str(other)])]
                if absent:
                    cause = f"ranks {absent} did not connect within {seconds:g} s"
                    raise FailedError(ConnectionFailure(self.rank, absent[0], cause))
            self._lifelines.look()
            failure = self._read_failure()
            if failure is not None or self._closed:
                raise FailedError(failure or ConnectionFailure(self.rank, None, "the connection is closed"))
            self._wake.wait(pause)
            pause = min(2 * pause, 0.05)

    def _read_failure(self) -> ConnectionFailure | None:
        """Return the first failure that any rank has reported, after writing this rank's report to the store."""
        own = self._reported
        try:
            own = own or self._overdue()
            return ConnectionFailure.first(self._store, own)
        except RuntimeError as error:
            cause = f"rank {self.rank} lost the rendezvous store ({first_line(error)})"
            return own or ConnectionFailure(self.rank, None, cause)

    def _overdue(self) -> ConnectionFailure | None:
        """Return a failure if the wait's deadline has passed and other waiting ranks have had time to say so."""
        waiting, now = self._waiting, time.monotonic()
        if waiting is None or now < waiting[0]:
            if self._overdue_since:
                Wait.delete(self._store, self.rank)
                self._overdue_since = 0.0
            return None
        _, wait, words = waiting
        if not self._overdue_since:
            wait.write(self._store)
            self._overdue_since = now
        if now < self._overdue_since + 2 * PERIOD:
            return None
        blamed = wait_to_blame(wait, functools.partial(Wait.read, self._store))
        cause = f"no answer from rank {blamed.peer} to rank {blamed.waiter} in time ({words})"
        return ConnectionFailure(self.rank, blamed.peer, cause, transient=True)

    def _fail(self, failure: ConnectionFailure) -> None:
        """Enter the state FAILED and cut the links, unless another failure came first."""
        with self._changed:
            if self.state is State.FAILED:
                return
            self.failure, self.state = failure, State.FAILED
            self._changed.notify_all()
        for link in list(self._links.values()):
            link.cut()


def part_of_store(store: dist.Store, rank: int, seconds: float) -> dist.Store:
    """Return the part of a group's store for a transport, numbered by the order in which its transports are first used.

    Raises:
        FailedError: The store does not answer.
    """
    try:
        # The count is kept in the group's store, so that a re-created group starts from zero.
        number = bounded(lambda: store.add(f"ringweave/transports/{rank}", 1), seconds)
    except (RuntimeError, OSError) as error:
        cause = f"rank {rank} lost the rendezvous store ({first_line(error)})"
        raise FailedError(ConnectionFailure(rank, None, cause)) from error
    return dist.PrefixStore(f"ringweave/{number}", store)


def _numbered(numbers: list[int], peer: int, tensor: Tensor, kind: int) -> Tagged:
    # 31 bits: 6 of the message's number, one of its kind, 24 of a hash of its length; always below GlooLink.CUT
    number = numbers[peer]
    numbers[peer] += 1
    length = (tensor.nbytes * 2654435761 & 0xFFFFFFFF) >> 8
    return Tagged(peer, tensor, (number & 63) | kind << 6 | (length % 0xFFFFFF) << 7)
