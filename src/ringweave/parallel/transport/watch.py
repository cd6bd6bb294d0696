"""How a failure that one rank sees reaches all: a flag in the rendezvous store, and a thread that watches it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...errors import RingError

if TYPE_CHECKING:
    import torch.distributed as dist

PERIOD = 0.2  # seconds between two looks at the flag: a survivor learns of a failure this late, and raises within 2 s
_FLAG, _WAITS = "failed", "waits"


@dataclass(frozen=True)
class Failure:
    """What went wrong: who saw it, who is lost or silent, whether trying again may help; and where nobody
    is, what was wanted and what to do."""

    rank: int
    peer: int | None
    cause: str
    transient: bool = False
    wanted: str = ""
    remedy: str = ""

    def error(self, rank: int, stage: int | None, step: int) -> RingError:
        """Make what a rank raises."""
        return RingError(rank, self.peer, stage, step, self.cause, self.wanted, self.remedy)

    def text(self) -> str:
        """Write it as the flag holds it."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: bytes) -> Failure:
        """Read the failure that a flag holds."""
        return Failure(**json.loads(text))


class Waiting(NamedTuple):
    """A wait in progress: until when in time.monotonic(), for whom, in which of the transport's communications."""

    until: float
    peer: int
    number: int
    words: str


class FailedError(RuntimeError):
    """A connection is over; the failure says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


class Watch:
    """Watches the flag and the deadline of the wait in progress, on a daemon thread.

    The first failure reported among all ranks is the one that every rank raises: a rank that gives up closes its
    connections, which its neighbours would otherwise take for its death. So a failure is written to the store before
    any connection is closed.

    Args:
        store: Store that all ranks share, scoped to one generation of one transport. Its connection is the group's:
            for another torch would look up the host's name (2.13), which takes seconds where the DNS is slow.
        rank: This rank.
        cut: Called once, when a failure is known: must make a wait in progress return.
    """

    def __init__(self, store: dist.Store, rank: int, cut: Callable[[], None]) -> None:
        self.failure: Failure | None = None
        self.waiting: Waiting | None = None  # what the caller's thread waits for
        self._store, self._rank, self._cut = store, rank, cut
        self._report: Failure | None = None
        self._accused_at = 0.0  # when this rank wrote whom it waits for; 0: it has not
        self._known = threading.Event()
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="ringweave-watch", daemon=True)
        self._thread.start()

    def report(self, failure: Failure) -> Failure:
        """Tell all ranks; the failure that was told first, which may be another's. Returns within about a second."""
        self._report = failure
        self._wake.set()
        if not self._known.wait(1.0):
            # the store does not answer: its host may be stopped
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
            text = str(error).split("\n", 1)[0][:200]
            return seen or Failure(self._rank, None, f"rank {self._rank} lost the rendezvous store ({text})")

    def _overdue(self) -> Failure | None:
        """End the wait, once its deadline has passed and every rank in the same state has had time to say so.

        Who is silent may itself wait for another: the last of such a chain is the one to name. Where the chain closes
        (a message was lost, whose sender waits on), the wait for the earliest message is no consequence of the others.
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
        cause = f"no answer of rank {peer} to rank {waiter} in time ({waiting.words})"
        return Failure(self._rank, peer, cause, transient=True)

    def _adopt(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
        self._known.set()
        self._cut()
