"""Propagation of failures to all ranks, by a flag in the rendezvous store and a thread that watches it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...errors import RingError, first_line

if TYPE_CHECKING:
    import torch.distributed as dist

PERIOD = 0.2  # seconds between two reads of the flag; a survivor learns of a failure this late and raises within 2 s
_FLAG, _WAITS = "failed", "waits"


@dataclass(frozen=True)
class Failure:
    """A failure of a connection.

    Attributes:
        rank: Rank that detected it.
        peer: Rank that is lost or silent, or None.
        cause: Description.
        transient: Whether a retry may help.
        wanted: Expected behaviour, if no rank is lost or silent; else empty.
        remedy: Advice for the user, if no rank is lost or silent; else empty.
    """

    rank: int
    peer: int | None
    cause: str
    transient: bool = False
    wanted: str = ""
    remedy: str = ""

    def error(self, rank: int, stage: int | None, step: int) -> RingError:
        """Return the error that a rank raises."""
        return RingError(rank, self.peer, stage, step, self.cause, self.wanted, self.remedy)

    def text(self) -> str:
        """Return the failure as the text of the flag."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: bytes) -> Failure:
        """Return the failure from the text of the flag."""
        return Failure(**json.loads(text))


class Waiting(NamedTuple):
    """A wait in progress: its end in time.monotonic(), the awaited peer, and the number and words of the message."""

    until: float
    peer: int
    number: int
    words: str


class FailedError(RuntimeError):
    """Raised when a connection has ended; ``failure`` is the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


class Watch:
    """A daemon thread that watches the flag and the deadline of the wait in progress.

    Every rank raises the first failure that any rank reports. A failure is written to the store before connections are
    closed, because the neighbours of a rank that gives up would take its closed connections for its death.

    Args:
        store: Store that all ranks share, scoped to one generation of one transport. It uses the group's connection: a
            new one would make torch (2.13) look up the host's name, which takes seconds with a slow DNS.
        rank: This rank.
        cut: Called once when a failure is known; must make a wait in progress return.
    """

    def __init__(self, store: dist.Store, rank: int, cut: Callable[[], None]) -> None:
        self.failure: Failure | None = None
        self.waiting: Waiting | None = None  # the wait of the caller's thread
        self._store, self._rank, self._cut = store, rank, cut
        self._report: Failure | None = None
        self._accused_at = 0.0  # time at which this rank wrote the peer that it waits for; 0 if it has not
        self._known = threading.Event()
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="ringweave-watch", daemon=True)
        self._thread.start()

    def report(self, failure: Failure) -> Failure:
        """Report a failure to all ranks; return the first reported one, which may be another rank's.

        Returns within about a second.
        """
        self._report = failure
        self._wake.set()
        if not self._known.wait(1.0):
            # the store does not answer; its host may be stopped
            self._adopt(failure)
        assert self.failure is not None
        return self.failure

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._wake.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(PERIOD)
            self._wake.clear()
            if self._stopped:
                return
            failure = self._look()
            if failure is not None:
                self._adopt(failure)
                return

    def _look(self) -> Failure | None:
        seen = self._report
        try:
            seen = seen or self._overdue()
            if seen is not None:
                return Failure.parse(self._store.compare_set(_FLAG, "", seen.text()))
            return Failure.parse(self._store.get(_FLAG)) if self._store.check([_FLAG]) else None
        except RuntimeError as error:
            cause = f"rank {self._rank} lost the rendezvous store ({first_line(error)})"
            return seen or Failure(self._rank, None, cause)

    def _overdue(self) -> Failure | None:
        """Return a failure if the wait's deadline has passed and other waiting ranks have had time to say so.

        A silent rank may itself wait for another rank, so the failure names the last rank of the chain of waits. If the
        chain is a cycle (after the loss of a message its sender waits too), the wait for the earliest message is the
        cause of the others, so the failure names that wait.
        """
        waiting, now = self.waiting, time.monotonic()
        if waiting is None or now < waiting.until:
            if self._accused_at:
                self._store.delete_key(f"{_WAITS}/{self._rank}")
                self._accused_at = 0.0
            return None
        if not self._accused_at:
            self._store.set(f"{_WAITS}/{self._rank}", f"{waiting.number} {waiting.peer}")
            self._accused_at = now
        if now < self._accused_at + 2 * PERIOD:
            return None
        waits = [(waiting.number, self._rank, waiting.peer)]
        while self._store.check([f"{_WAITS}/{waits[-1][2]}"]):
            waiter = waits[-1][2]
            number, peer = map(int, self._store.get(f"{_WAITS}/{waiter}").split())
            waits.append((number, waiter, peer))
            if peer in [rank for _, rank, _ in waits]:
                break
        closed = waits[-1][2] in [rank for _, rank, _ in waits]
        _, waiter, peer = min(waits) if closed else waits[-1]
        cause = f"no answer from rank {peer} to rank {waiter} in time ({waiting.words})"
        return Failure(self._rank, peer, cause, transient=True)

    def _adopt(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
        self._known.set()
        self._cut()
