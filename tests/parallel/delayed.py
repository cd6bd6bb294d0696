"""A communicator with delayed messages: the order of events then shows whether communication and computing overlap."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ringweave.parallel.transport.protocol import Communicator, Pending


class Late:
    """Messages that do not arrive before a given time."""

    def __init__(self, pending: Pending, carrier: Delayed, seconds: float) -> None:
        self.pending, self.carrier = pending, carrier
        self.until: float | None = time.perf_counter() + seconds
        carrier.flown += seconds

    def wait(self) -> None:
        """Wait for the messages, then for the rest of the delay."""
        self.pending.wait()
        if self.until is not None:
            left, self.until = max(self.until - time.perf_counter(), 0.0), None
            self.carrier.slept += left
            time.sleep(left)


class Delayed:
    """A communicator over a simulated slow wire: a message arrives ``latency`` + bytes / ``bandwidth`` after it is posted.

    Only wait() blocks, and only for the rest of that time. Agreements are not delayed.

    Args:
        carrier: Carries the messages.
        latency: Seconds for any message.
        bandwidth: Bytes received per second, by all messages of one call together.
    """

    def __init__(self, carrier: Communicator, *, latency: float, bandwidth: float = float("inf")) -> None:
        self.carrier, self.latency, self.bandwidth = carrier, latency, bandwidth
        #: total seconds of delay, and the part of them that wait() slept
        self.flown = self.slept = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.carrier, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # a recorder of traces sets it
        setattr(self.carrier, name, value) if name == "trace" else super().__setattr__(name, value)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        *,
        what: str,
        stage: int | None = None,
    ) -> Pending:
        """Start delayed messages."""
        pending = self.carrier.exchange(sends, receives, what=what, stage=stage)
        nbytes = [tensor.nbytes for _, tensor in (*sends, *receives)]
        if not sum(nbytes):
            return pending
        return Late(pending, self, self.latency + sum(nbytes[len(sends) :]) / self.bandwidth)
