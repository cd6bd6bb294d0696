"""What carries messages between two ranks: Gloo for CPU tensors, NCCL for CUDA tensors.

A link is a process group of its own, made from a store: nothing that the caller's groups carry can mix with its
messages, and cutting it breaks nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor


class Message(NamedTuple):
    """One tensor to or from a peer; both sides must give the same tag."""

    peer: int
    tensor: Tensor
    tag: int


class LinkError(RuntimeError):
    """A message failed: the connection to a peer is gone, or (timeout) the peer kept silent."""

    def __init__(self, peer: int, cause: str) -> None:
        super().__init__(peer, cause)
        self.peer = peer
        self.cause = cause
        self.timeout = "imed out" in cause


def _first_line(error: BaseException) -> str:
    # torch appends a stack of C++ frames, Gloo a file name in front
    return str(error).split("\n", 1)[0].split("] ", 1)[-1][:200]


class GlooLink:
    """Messages between CPU tensors: TCP, matched by peer and tag, one after another under one tag.

    A message that is longer than the buffer posted for it aborts the process inside Gloo, and nothing can catch that:
    tags must therefore depend on the length, so that such a pair never meets.

    Measured against alltoall (2 and 4 ranks on 2 shared cores): as fast for megabytes. Small messages may take a slice
    of the scheduler, 4 ms against 0.3 to 1, when the posting thread is put off its core: it holds the pair's lock,
    which Gloo's thread tries again and again. In return an error names its peer, and who has nothing to say sends
    nothing.
    """

    # a tag that no message has
    CUT = 2**31 - 1

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float) -> None:
        self._rank, self._size = rank, size
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))

    def post(self, sends: list[Message], receives: list[Message]) -> list[tuple[int, Any]]:
        """Start all messages; (peer, work) of each, receives first, since they tell who is silent."""
        works = []
        for messages, start in ((receives, self._group.recv), (sends, self._group.send)):
            for peer, tensor, tag in messages:
                try:
                    works.append((peer, start([tensor], peer, tag)))
                except RuntimeError as error:
                    raise LinkError(peer, _first_line(error)) from error
        return works

    def wait(self, peer: int, work: Any, seconds: float, cut: Callable[[], bool]) -> None:
        """Until a message is through. The wait ends early when another thread cuts the link."""
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise LinkError(peer, _first_line(error)) from error

    def cut(self) -> None:
        """Close every connection: waits of other threads end at once, with an error.

        Neither abort() nor shutdown() of the group does that (torch 2.13). A wait that times out does: it closes all
        pairs.
        """
        scratch = torch.empty(1, dtype=torch.uint8, device="cpu")
        for step in range(1, self._size):
            # a pair that is closed already refuses, and leaves the others open: so every peer is tried
            with suppress(RuntimeError):
                self._group.recv([scratch], (self._rank + step) % self._size, self.CUT).wait(timedelta(milliseconds=1))


class NcclLink:
    """Messages between CUDA tensors, started together; NCCL ignores tags and matches by order.

    A wait blocks the host until the messages are through: a result computed from a stage that never arrived must not
    exist.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float) -> None:
        options = dist.ProcessGroupNCCL.Options()
        # NCCL's own watchdog ends the process when it fires: the deadlines here come first
        options._timeout = timedelta(seconds=10 * seconds + 600)
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)

    def post(self, sends: list[Message], receives: list[Message]) -> list[tuple[int, Any]]:
        """Start all messages in one NCCL group; the one work stands for all peers."""
        messages = [*receives, *sends]
        if not messages:
            return []
        try:
            self._group._start_coalescing()
            for peer, tensor, _ in receives:
                self._group.recv([tensor], peer, 0)
            for peer, tensor, _ in sends:
                self._group.send([tensor], peer, 0)
            return [(messages[0].peer, self._group._end_coalescing())]
        except RuntimeError as error:
            raise LinkError(messages[0].peer, _first_line(error)) from error

    def wait(self, peer: int, work: Any, seconds: float, cut: Callable[[], bool]) -> None:
        """Until the messages are through, by the stream that is current and by the host."""
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
            raise LinkError(peer, _first_line(error)) from error

    def cut(self) -> None:
        """Abort the communicator: its kernels end, whatever they wait for."""
        with suppress(RuntimeError):
            self._group.abort()
