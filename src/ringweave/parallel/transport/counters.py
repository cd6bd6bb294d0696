"""What a transport has carried, and when."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """One line of a trace; times from time.perf_counter(), start to end."""

    kind: str
    what: str
    stage: int | None
    start: float
    end: float
    nbytes: int


class Counters:
    """What a transport has carried: payload bytes by peer, messages sent, and bytes of agreements received.

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
