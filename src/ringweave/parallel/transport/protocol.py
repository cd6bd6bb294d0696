"""What a transport is: ranks that agree, and exchange messages; and what it tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

#: Messages: (peer, tensor).
Tensors = Sequence[tuple[int, Tensor]]


class Event(NamedTuple):
    """One line of a trace; times from time.perf_counter(), start to end."""

    kind: str
    what: str
    stage: int | None
    start: float
    end: float
    nbytes: int


class Counters:
    """Count what a transport has carried: payload bytes by peer, messages sent, and bytes of agreements received.

    Sent bytes count when they are posted, received bytes when they have arrived; a repeated message counts again.
    """

    sent: list[int]
    received: list[int]
    messages: int
    metadata: int

    def __init__(self, size: int) -> None:
        self._size = size
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self.sent, self.received = [0] * self._size, [0] * self._size
        self.messages = self.metadata = 0


class Pending(Protocol):
    """Messages under way. The received ones are the caller's to read after wait()."""

    def wait(self) -> None:
        """Return when everything has arrived and everything sent is out of its tensors.

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
        deadline: Seconds for which a wait may last.
        retries: How often a wait may be repeated.
        step: Agreements so far.
        counters: What was carried.
        trace: When, while somebody records it.
    """

    rank: int
    size: int
    deadline: float
    retries: int
    step: int
    counters: Counters
    trace: list[Event] | None

    def open(self) -> str:
        """Name a context that is made over it, alike on all ranks that make theirs in one order."""
        ...

    def using(self) -> AbstractContextManager[None]:
        """Enter a call; one thread may be in one at a time.

        Raises:
            RingError: Another thread is in a call; this and all later calls raise, on all ranks.
            UnsupportedError: It is closed.
        """
        ...

    def agree(self, header: Tensor, *, what: str) -> Tensor:
        """Gather every rank's header, int64 (k,) of one k, by rank: (size, k); the caller compares.

        Raises:
            RingError: A rank is lost or silent, which ``what`` says in the error and in the trace.
        """
        ...

    def exchange(self, sends: Tensors, receives: Tensors, *, what: str, stage: int | None = None) -> Pending:
        """Start messages between pairs of ranks; several to one peer arrive in their order; empty ones move nothing.

        Args:
            sends: (peer, tensor), contiguous, any dtype; peer is another rank.
            receives: (peer, tensor), of as many bytes as the peer sends.
            what: Words for errors and the trace.
            stage: Stage of the ring, for errors and the trace.

        Raises:
            ShapeError: A tensor is not contiguous, or a peer is this rank or none.
            RingError: A rank is known to be lost.
        """
        ...

    def close(self) -> None:
        """Close the connections. What is closed carries nothing more."""
        ...
