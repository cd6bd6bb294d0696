"""Links, which carry messages by Gloo for CPU tensors and NCCL for CUDA tensors, and a transport's connection of links.

A link is a separate process group created from a store. Its messages cannot mix with those of the caller's groups, and
cutting it affects no other group.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ShapeError, UnsupportedError, first_line
from ...torch_compat import coalescing, set_timeout
from .lifelines import Lifelines
from .protocol import Tensors
from .rendezvous import AbsentError, bounded, meet
from .watch import FailedError, Failure, Waiting, Watch


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
Work = tuple[Link, int, Any]  # link, peer, torch's work
# A link's deadline is this many seconds after the watch's, so that the watch first reports the silent rank to all.
_GRACE = 3.0
# seconds of waiting for ranks to connect, after which their processes are checked
_LATE = 0.3


class Connection:
    """A watch over the store's flag, one link per kind of device, and the message counts to and from each peer.

    After a failure the connection carries no more messages; a new one in another scope of the store replaces it.

    Args:
        store: Store that all ranks share, in the scope of this connection.
        rank: This rank.
        size: Number of ranks.
        deadline: Longest wait, in seconds.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: float) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self._store = store
        links: dict[str, Link] = {}
        self._links = links
        self._sent, self._received = [0] * size, [0] * size
        self._watch = Watch(store, rank, lambda: _cut(links))
        # the watch's thread must end before the interpreter does, even if close() is never called
        self._stop = weakref.finalize(self, self._watch.stop)

    @property
    def failure(self) -> Failure | None:
        """The failure that ended the connection, or None."""
        return self._watch.failure

    def end(self, failure: Failure) -> Failure:
        """Report a failure that no message reveals, from any thread; return the first reported failure."""
        return self._watch.report(failure)

    def meet(self, number: int, seconds: float, lifelines: Lifelines, group_store: dist.Store) -> list[int]:
        """Wait for all ranks, at most ``seconds``, then connect and return every rank's ``number``.

        Raises:
            FailedError: A rank's process has ended, a rank did not come in time or has another version of ringweave, or
                the store is lost.
        """
        rank, size, links, watch = self.rank, self.size, self._links, self._watch
        store = self._store
        late = time.monotonic() + _LATE
        own = str(sys.modules[__package__.partition(".")[0]].__version__)

        def connect() -> list[list[str]]:
            def come(where: str, word: str) -> list[str]:
                look = functools.partial(lifelines.look, group_store)
                return meet(dist.PrefixStore(where, store), word, rank, size, seconds, look)

            every = [text.split(" ", 2) for text in come("meeting", f"{number} {own} {lifelines.said}")]
            lifelines.learn([said for _, _, said in every])
            # Meet again, because a rank may have died while it waited. Gloo would wait for it and block the store.
            come("all", "")
            links["cpu"] = GlooLink(dist.PrefixStore("gloo", store), rank, size, seconds)
            return every

        def ended() -> int | None:
            return lifelines.ended() if time.monotonic() > late else None

        try:
            every = bounded(connect, 2 * seconds, lambda: watch.failure is not None or ended() is not None)
        except AbsentError as absent:
            cause = f"ranks {absent.ranks} did not connect within {seconds:g} s"
            failure = Failure(rank, absent.ranks[0], cause)
        except (RuntimeError, OSError) as error:
            dead, cause = ended(), f"rank {rank} could not connect ({first_line(error)})"
            if dead is not None:
                cause = f"rank {rank} lost rank {dead} before they were connected (its process has ended)"
            failure = Failure(rank, dead, cause)
        else:
            other = next((other for other, (_, version, _) in enumerate(every) if version != own), None)
            if other is None:
                return [int(number) for number, _, _ in every]
            cause = f"ringweave {own} on rank {rank} and {every[other][1]} on rank {other}"
            remedy = "Install the same version on all ranks."
            failure = Failure(rank, other, cause, wanted="one version of ringweave", remedy=remedy)
        raise FailedError(watch.report(failure))

    def post(self, sends: Tensors, receives: Tensors, *, kind: int, words: str) -> list[Work]:
        """Start messages of a kind, 0 or 1; messages of different kinds are never matched. Each work needs a wait().

        Raises:
            FailedError: A rank is lost; the failure's text contains ``words``.
        """
        if self._watch.failure is not None:
            raise FailedError(self._watch.failure)
        outgoing = [_numbered(self._sent, peer, tensor, kind) for peer, tensor in sends]
        incoming = [_numbered(self._received, peer, tensor, kind) for peer, tensor in receives]
        link = self._link({tensor.device.type for _, tensor in (*sends, *receives)})
        try:
            return [(link, peer, work) for peer, work in link.post(outgoing, incoming)]
        except LinkError as error:
            raise self._failed(error, words) from error

    def wait(self, works: Sequence[Work], *, number: int, words: str) -> None:
        """Wait for the messages that post() started; ``number`` identifies them and is the same on all ranks.

        Raises:
            FailedError: A rank is lost, or is silent until the deadline.
        """
        watch = self._watch
        until = time.monotonic() + self.deadline
        try:
            for link, peer, work in works:
                watch.waiting = Waiting(until, peer, number, f"{words}, {self.deadline:g} s")
                seconds = max(until - time.monotonic(), 0.0) + _GRACE
                link.wait(peer, work, seconds, lambda: watch.failure is not None)
        except LinkError as error:
            raise self._failed(error, words) from error
        finally:
            watch.waiting = None

    def close(self) -> None:
        """End the watch's thread and close the links."""
        self._stop()
        self._links.clear()

    def _failed(self, error: LinkError, words: str) -> FailedError:
        cause = f"rank {self.rank} lost rank {error.peer} in {words} ({error.cause})"
        return FailedError(self._watch.report(Failure(self.rank, error.peer, cause, error.timeout)))

    def _link(self, devices: set[str]) -> Link:
        (device,) = devices if len(devices) == 1 else ("several",)
        if device not in ("cpu", "cuda"):
            raise ShapeError("tensors", f"device {sorted(devices)}", "all on cpu or on cuda", "Move them.")
        if device not in self._links:
            store = dist.PrefixStore("nccl", self._store)
            self._links[device] = NcclLink(store, self.rank, self.size, self.deadline)
        return self._links[device]


def _numbered(numbers: list[int], peer: int, tensor: Tensor, kind: int) -> Tagged:
    # 31 bits: 6 of the message's number, one of its kind, 24 of a hash of its length; always below GlooLink.CUT
    number = numbers[peer]
    numbers[peer] += 1
    length = (tensor.nbytes * 2654435761 & 0xFFFFFFFF) >> 8
    return Tagged(peer, tensor, (number & 63) | kind << 6 | (length % 0xFFFFFF) << 7)


def _cut(links: dict[str, Link]) -> None:
    for link in list(links.values()):
        link.cut()
