"""Connections of one transport to its peers, from their meeting to the first failure."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ...errors import ShapeError, message
from .links import GlooLink, LinkError, Message, NcclLink
from .rendezvous import AbsentError, meet
from .watch import FailedError, Failure, Waiting, Watch, bounded

if TYPE_CHECKING:
    Work = tuple[GlooLink | NcclLink, int, Any]  # link, peer, torch's work

# a link's own deadline lies this much after the watch's, which names the silent rank to all before anything closes
_GRACE = 3.0


class Connection:
    """A watch over the store's flag, a link for each kind of device, and the numbers of messages to and from each peer.

    After a failure it carries nothing more: another one, in another scope of the store, takes its place.

    Args:
        store: Store that all ranks share, in the scope of this connection.
        rank: This rank.
        size: Number of ranks.
        deadline: Seconds for which a wait may last.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: float) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self._store = store
        links: dict[str, GlooLink | NcclLink] = {}
        self._links = links
        self._sent, self._received = [0] * size, [0] * size
        self._watch = Watch(store, rank, lambda: _cut(links))
        # the watch's thread must end before the interpreter does, whether or not anybody calls close()
        self._stop = weakref.finalize(self, self._watch.stop)

    @property
    def failure(self) -> Failure | None:
        """The failure that ended it."""
        return self._watch.failure

    def end(self, failure: Failure) -> Failure:
        """Tell all ranks of a failure that no message shows, from any thread; the one that was told first."""
        return self._watch.report(failure)

    def meet(self, word: int, seconds: float) -> list[int]:
        """Wait for all ranks, so long at most, then connect: every rank's word.

        Raises:
            FailedError: A rank did not come in time, or the store is lost.
        """
        rank, size, links, watch = self.rank, self.size, self._links, self._watch
        store = self._store

        def connect() -> list[int]:
            words = meet(dist.PrefixStore("meeting", store), word, rank, size, seconds)
            links["cpu"] = GlooLink(dist.PrefixStore("gloo", store), rank, size, seconds)
            return words

        try:
            return bounded(connect, 2 * seconds, lambda: watch.failure is not None)
        except AbsentError as absent:
            peer, cause = absent.ranks[0], f"ranks {absent.ranks} did not come to connect in {seconds:g} s"
        except (RuntimeError, OSError) as error:
            peer, cause = None, f"rank {rank} could not connect ({str(error).splitlines()[0][:200]})"
        raise FailedError(watch.report(Failure(rank, peer, cause)))

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], *, kind: int, words: str
    ) -> list[Work]:
        """Start messages; each needs its wait().

        Args:
            sends: (peer, tensor).
            receives: (peer, tensor).
            kind: 0 or 1: messages of unequal kinds never meet.
            words: What it is, for errors.

        Raises:
            FailedError: A rank is lost.
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
        """Until all messages are through.

        Args:
            works: Of post().
            number: Number of the communication, the same on all ranks.
            words: What it is, for errors.

        Raises:
            FailedError: A rank is lost, or silent for as long as the deadline.
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
        """End the watch's thread, and close the links."""
        self._stop()
        self._links.clear()

    def _failed(self, error: LinkError, words: str) -> FailedError:
        cause = f"rank {self.rank} lost rank {error.peer} in {words} ({error.cause})"
        return FailedError(self._watch.report(Failure(self.rank, error.peer, cause, error.timeout)))

    def _link(self, devices: set[str]) -> GlooLink | NcclLink:
        (device,) = devices if len(devices) == 1 else ("several",)
        if device not in ("cpu", "cuda"):
            raise ShapeError(message("tensors", f"device {sorted(devices)}", "all on cpu or on cuda", "Move them."))
        if device not in self._links:
            store = dist.PrefixStore("nccl", self._store)
            self._links[device] = NcclLink(store, self.rank, self.size, self.deadline)
        return self._links[device]


def _numbered(numbers: list[int], peer: int, tensor: Tensor, kind: int) -> Message:
    # 6 bits of the message's number, one of its kind, 24 of a hash of its length: 31, and below the link's own tag
    number = numbers[peer]
    numbers[peer] += 1
    length = (tensor.nbytes * 2654435761 & 0xFFFFFFFF) >> 8
    return Message(peer, tensor, (number & 63) | kind << 6 | (length % 0xFFFFFF) << 7)


def _cut(links: dict[str, GlooLink | NcclLink]) -> None:
    for link in list(links.values()):
        link.cut()
