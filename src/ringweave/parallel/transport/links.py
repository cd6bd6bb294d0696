"""Links, which carry messages by Gloo for CPU tensors and by NCCL for CUDA tensors.

A link is a separate process group created from a store. Its messages cannot mix with those of the caller's groups, and
cutting it affects no other group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UnsupportedError, first_line
from ...torch_compat import coalescing, set_timeout


class Tagged(NamedTuple):
    """One tensor to or from a peer; both sides must use the same tag."""

    peer: int
    tensor: Tensor
    tag: int


class LinkError(RuntimeError):
    """Raised when a message fails: the connection to the peer is lost, or (``timeout``) the peer was silent."""

    def __init__(self, peer: int, cause: str) -> None:
        super().__init__(peer, cause)
        self.peer = peer
        self.cause = cause
        self.timeout = "imed out" in cause


class GlooLink:
    """Messages of CPU tensors over TCP, matched by peer and tag, and in order under equal tags.

    Gloo aborts the process if a message is longer than the buffer posted for it, and this cannot be caught. Tags must
    therefore depend on the length, so that such a pair is never matched.

    Measured against alltoall (2 and 4 ranks on 2 shared cores): equally fast for messages of megabytes. Small messages
    may take one slice of the scheduler, 4 ms instead of 0.3 to 1 ms, if the posting thread is descheduled while it
    holds the pair's lock, on which Gloo's thread spins. In return an error names its peer, and no empty messages are
    sent.
    """

    # a tag that no message has
    CUT = 2**31 - 1

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float) -> None:
        self._rank, self._size = rank, size
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))

    def post(self, sends: list[Tagged], receives: list[Tagged]) -> list[tuple[int, Any]]:
        """Start all messages; return (peer, work) of each, receives first, since they show which peer is silent."""
        works = []
        for messages, start in ((receives, self._group.recv), (sends, self._group.send)):
            for peer, tensor, tag in messages:
                try:
                    works.append((peer, start([tensor], peer, tag)))
                except RuntimeError as error:
                    raise LinkError(peer, first_line(error)) from error
        return works

    def wait(self, peer: int, work: Any, seconds: float, cut: Callable[[], bool]) -> None:
        """Wait until a message is complete, or another thread cuts the link."""
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise LinkError(peer, first_line(error)) from error

    def cut(self) -> None:
        """Close every connection; waits of other threads end immediately with an error.

        The group's abort() and shutdown() do not do this (torch 2.13). A wait that times out does, because it closes
        all pairs.
        """
        scratch = torch.empty(1, dtype=torch.uint8, device="cpu")
        for step in range(1, self._size):
            # A pair that is already closed refuses and leaves the others open, so try every peer.
            with suppress(RuntimeError):
                self._group.recv([scratch], (self._rank + step) % self._size, self.CUT).wait(timedelta(milliseconds=1))


class NcclLink:
    """Messages of CUDA tensors, started together; NCCL ignores tags and matches messages by order.

    A wait blocks the host until the messages are complete, so that no result is computed from a stage that did not
    arrive.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float) -> None:
        options = dist.ProcessGroupNCCL.Options()
        # NCCL's watchdog ends the process when it fires, so its timeout is much longer than the deadlines here.
        set_timeout(options, 10 * seconds + 600)
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        calls = coalescing(self._group)
        if calls is None:
            got = f"CUDA tensors, with torch {torch.__version__}"
            wanted = "a torch that starts NCCL's messages together"
            raise UnsupportedError("context", got, wanted, "Install a torch that pyproject.toml allows.")
        self._begin, self._end = calls

    def post(self, sends: list[Tagged], receives: list[Tagged]) -> list[tuple[int, Any]]:
        """Start all messages in one NCCL group, and return a single work for all peers."""
        messages = [*receives, *sends]
        if not messages:
            return []
        try:
            self._begin()
            for peer, tensor, _ in receives:
                self._group.recv([tensor], peer, 0)
            for peer, tensor, _ in sends:
                self._group.send([tensor], peer, 0)
            return [(messages[0].peer, self._end())]
        except RuntimeError as error:
            raise LinkError(messages[0].peer, first_line(error)) from error

    def wait(self, peer: int, work: Any, seconds: float, cut: Callable[[], bool]) -> None:
        """Wait until the messages are complete, on the current stream and on the host."""
        until = time.perf_counter() + seconds
        pause = 2e-5
        try:
            while not work.is_completed():
                if cut():
                    raise LinkError(peer, "the link was cut")
                if time.perf_counter() > until:
                    raise LinkError(peer, f"Timed out waiting {seconds:.1f} s")
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
            work.wait()
        except LinkError:
            raise
        except RuntimeError as error:
            raise LinkError(peer, first_line(error)) from error

    def cut(self) -> None:
        """Abort the communicator, which ends its kernels even while they wait."""
        with suppress(RuntimeError):
            self._group.abort()


Link = GlooLink | NcclLink
