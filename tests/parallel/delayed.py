"""A transport whose messages take time to arrive, without taking the caller's: overlap shows in the order of events."""

from __future__ import annotations

import time
from typing import Any

from ringweave.parallel.transport.transport import Pending, Transport


class Delayed(Transport):
    """A transport over a slow wire: what is posted arrives ``latency`` + bytes / ``bandwidth`` later.

    Only wait() blocks, and only for what is left of that time. Agreements are not delayed.

    Args:
        group: As of Transport.
        latency: Seconds for any message.
        bandwidth: Bytes received per second, by all messages of one call together.
        **options: As of Transport.
    """

    def __init__(self, group: Any, *, latency: float, bandwidth: float = float("inf"), **options: Any) -> None:
        super().__init__(group, **options)
        self.latency, self.bandwidth = latency, bandwidth
        #: seconds that messages took by their delay, and of those the ones that wait() had to make up
        self.flown = self.slept = 0.0

    def arrived(self, pending: Pending) -> None:
        """Wait for what is left of the delay."""
        if pending.metadata:
            return
        nbytes = sum(tensor.nbytes for _, tensor in pending.receives)
        left = pending.posted + self.latency + nbytes / self.bandwidth - time.perf_counter()
        self.flown += self.latency + nbytes / self.bandwidth
        if left > 0:
            self.slept += left
            time.sleep(left)
