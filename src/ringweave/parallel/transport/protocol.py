"""The interface of a transport, by which ranks agree and exchange messages, with its counters and trace events."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

#: Messages: (peer, tensor).
Tensors = Sequence[tuple[int, Tensor]]


class Event(NamedTuple):
    """One event of a trace; start and end are times of time.perf_counter()."""

    kind: str
    what: str
    stage: int | None
    start: float
    end: float
    nbytes: int


class Counters:
    """The counters of a transport: payload bytes by peer, sent messages, and received bytes of agreements.

    Sent bytes are counted when a message is posted, received bytes after it arrives. Repeated messages count again.
    """

    sent: list[int]
    received: list[int]
    messages: int
    metadata: int

    def __init__(self, size: int) -> None:
        self._size = size
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        self.sent, self.received = [0] * self._size, [0] * self._size
        self.messages = self.metadata = 0


class Pending(Protocol):
    """Pending messages. The caller may read the received tensors after wait()."""

    def wait(self) -> None:
        """Return when all messages have arrived and the sent tensors may be overwritten.

        Raises:
            RingError: A rank is lost or silent.
        """
        ...


@runtime_checkable
class Communicator(Protocol):
    """The ranks of one group, seen from one of them.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        deadline: Longest wait, in seconds.
        retries: Number of times that a timed-out wait may be repeated.
        call_count: Number of agreements so far.
        counters: Counters of messages and bytes.
        trace: List that collects events while a trace is recorded, else None.
    """

    rank: int
    size: int
    deadline: float
    retries: int
    call_count: int
    counters: Counters
    trace: list[Event] | None

    def open(self) -> str:
        """Return a name for a new context, equal on all ranks if they create their contexts in the same order."""
        ...

    def using(self) -> AbstractContextManager[None]:
        """Enter a call; only one thread may be in a call at a time.

        Raises:
            RingError: Another thread is in a call. This call and all later ones raise, on all ranks.
            UnsupportedError: The transport is closed.
        """
        ...

    def agree(self, header: Tensor, *, what: str) -> Tensor:
        """Gather every rank's header into (size, k); the caller compares them.

        Args:
            header: int64 (k,), of equal length on all ranks.
            what: Description for errors and the trace.
        Raises:
            RingError: A rank is lost or silent.
        """
        ...

    def exchange(self, sends: Tensors, receives: Tensors, *, what: str, stage: int | None = None) -> Pending:
        """Start messages between pairs of ranks.

        Messages to one peer arrive in the order of ``sends``. Empty tensors send no message.

        Args:
            sends: (peer, tensor) pairs; the tensors are contiguous, of any dtype, and the peer is another rank.
            receives: (peer, tensor) pairs; each tensor has the size in bytes of the tensor that the peer sends.
            what: Description for errors and the trace.
            stage: Stage of the ring, for errors and the trace.

        Raises:
            ShapeError: A tensor is not contiguous, or a peer is this rank or not a rank of the group.
            RingError: A rank is known to be lost.
        """
        ...

    def close(self) -> None:
        """Close the connections; later calls raise."""
        ...
