"""Messages among the ranks of one process group: bytes, counted, with deadlines.

    transport = Transport(group)
    headers = transport.agree(header, what="plan")          # all ranks' headers; the caller compares
    pending = transport.exchange(sends, receives, stage=1, what="kv")
    ...                                                     # compute, while they fly
    pending.wait()                                          # all is here, or RingError

Nothing but this file and those beside it (link, failure, meeting, regroup) calls torch.distributed.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RingError, ShapeError, message
from .failure import Failure, Watch, bounded, clone
from .meeting import AbsentError, meet

if TYPE_CHECKING:
    import torch.distributed as dist

    from .link import GlooLink, Message, NcclLink

# Gloo's own deadline lies this much after the watch's, which names the silent rank to all before anything closes
_GRACE = 2.0


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

    def __init__(self, size: int) -> None:
        self.sent = [0] * size
        self.received = [0] * size
        self.messages = 0
        self.metadata = 0

    def reset(self) -> None:
        """Start again from zero."""
        self.__init__(len(self.sent))  # type: ignore[misc]


class Pending:
    """Messages under way; keeps their tensors alive. The received ones are the caller's to read after wait()."""

    def __init__(
        self,
        transport: Transport,
        sends: list[tuple[int, Tensor]],
        receives: list[tuple[int, Tensor]],
        *,
        what: str,
        stage: int | None = None,
        metadata: bool = False,
    ) -> None:
        self.sends, self.receives = sends, receives
        self.what, self.stage, self.metadata = what, stage, metadata
        self.number = 0
        self.works: list[tuple[Any, int, Any]] = []
        self.posted = 0.0
        self.done = not sends and not receives
        self._transport = transport

    def wait(self) -> None:
        """Return when everything has arrived and everything sent is out of its tensors.

        Raises:
            RingError: A rank is lost or silent.
        """
        if not self.done:
            self._transport._finish(self)


class Transport:
    """Messages among the ranks of one process group: bytes, counted, with deadlines; failures raise RingError.

    Ranks are those of the group. All ranks make their transports over one group in the same order, and use each from
    one thread. It connects at its first message, with connections of its own: the group serves for its store, ranks and
    size.

    Two ranks must post equally many bytes to each other, which they agree() on beforehand. Gloo answers a longer
    message by aborting the process; a tag made of the length keeps such a pair from meeting: it ends at the deadline.

    Args:
        group: Process group; None for a group of one, which needs no torch.distributed.
        deadline: Seconds for which a wait, or the first connection, may last.
        retries: How often a wait that timed out may be repeated on fresh connections, in the transport's life. All
            ranks meet at the store and repeat everything that any of them misses. Costs a copy of what is sent, until
            the next agreement tells that all have it.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, deadline: float = 30.0, retries: int = 0) -> None:
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.deadline, self.retries = deadline, retries
        self.counters = Counters(self.size)
        self.trace: list[Event] | None = None
        self.step = 0
        self._store: dist.Store | None = None if group is None else group.get_group_store()
        self._links: dict[str, GlooLink | NcclLink] = {}
        self._numbers = [[0] * self.size, [0] * self.size]
        self._watch: Watch | None = None
        self._generation = 0
        self._number = 0
        self._log: deque[Pending] = deque()
        self._closed = False

    def agree(self, header: Tensor, *, what: str) -> Tensor:
        """Every rank's header; the caller compares.

        Args:
            header: int64 (k,), of the same k on all ranks.
            what: Words for errors and the trace.

        Returns:
            int64 (size, k), by rank.

        Raises:
            RingError: A rank is lost or silent.
        """
        if header.dtype != torch.int64 or header.dim() != 1 or header.device.type != "cpu":
            got = f"{header.dtype} {tuple(header.shape)} on {header.device.type}"
            raise ShapeError(message("header", got, "int64 (k,) on the CPU", "Make it so."))
        self.step += 1
        table = torch.empty(self.size, header.numel() + 1, dtype=torch.int64)
        # how far this rank is: what all ranks have is not kept for a repetition
        table[self.rank, 0] = next((entry.number for entry in self._log if not entry.done), self._number)
        table[self.rank, 1:] = header
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [(peer, table[self.rank].view(torch.uint8)) for peer in others]
        receives = [(peer, table[peer].view(torch.uint8)) for peer in others]
        self._start(Pending(self, sends, receives, what=what, metadata=True)).wait()
        while self._log and self._log[0].done and self._log[0].number < int(table[:, 0].min()):
            self._log.popleft()
        return table[:, 1:]

    def all_to_all(
        self, received: Tensor, received_splits: Sequence[int], sent: Tensor, sent_splits: Sequence[int], *, what: str
    ) -> Pending:
        """Start one message to and from each peer; parts of zero bytes move nothing.

        Args:
            received: uint8 (sum of received_splits,), contiguous: the peers' parts in rank order.
            received_splits: Bytes of each rank's part; this rank's own part is left as it is.
            sent: uint8 (sum of sent_splits,), contiguous.
            sent_splits: Bytes for each rank; this rank's own part goes nowhere.
            what: Words for errors and the trace.

        Raises:
            ShapeError: A buffer does not fit its splits.
            RingError: A rank is known to be lost.
        """
        sends = self._parts("sent", sent, sent_splits)
        receives = self._parts("received", received, received_splits)
        return self._start(Pending(self, sends, receives, what=what))

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        *,
        stage: int,
        what: str,
    ) -> Pending:
        """Start messages between pairs of ranks; several to one peer arrive in their order; empty ones move nothing.

        Args:
            sends: (peer, tensor), contiguous, any dtype; peer is another rank.
            receives: (peer, tensor), of as many bytes as the peer sends.
            stage: Stage of the ring, for errors and the trace.
            what: Words for errors and the trace.

        Raises:
            ShapeError: A tensor is not contiguous, or a peer is this rank or none.
            RingError: A rank is known to be lost.
        """
        for name, messages in (("sends", sends), ("receives", receives)):
            for peer, tensor in messages:
                if not tensor.is_contiguous():
                    raise ShapeError(
                        message(name, f"strides {tensor.stride()}", "contiguous tensors", "Copy it first.")
                    )
                if peer == self.rank or not 0 <= peer < self.size:
                    raise ShapeError(message(name, f"peer {peer}", f"another rank below {self.size}", "Leave it out."))
        present = [[(peer, tensor) for peer, tensor in part if tensor.numel()] for part in (sends, receives)]
        return self._start(Pending(self, *present, what=what, stage=stage))

    def close(self) -> None:
        """Close the connections and end the thread. A closed transport carries nothing more."""
        self._closed = True
        if self._watch is not None:
            self._watch.stop()
        self._links.clear()
        self._log.clear()

    def arrived(self, pending: Pending) -> None:
        """Called when messages have arrived, before wait() returns: where tests slow a transport down."""

    def _parts(self, name: str, buffer: Tensor, splits: Sequence[int]) -> list[tuple[int, Tensor]]:
        fits = buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
        if not fits or len(splits) != self.size or sum(splits) != buffer.numel():
            got = f"{buffer.dtype} {tuple(buffer.shape)} for splits {list(splits)}"
            raise ShapeError(message(name, got, f"contiguous uint8 of {self.size} splits' sum", "Pack it by rank."))
        parts = zip(range(self.size), buffer.split(list(splits)), strict=True)
        return [(peer, part) for peer, part in parts if peer != self.rank and part.numel()]

    def _start(self, pending: Pending) -> Pending:
        if self._closed:
            raise RuntimeError(message("transport", "a call after close()", "an open transport", "Make another."))
        if self._watch is None and self.size > 1:
            self._open()
        if pending.done:
            return pending
        pending.number = self._number
        self._number += 1
        self._log.append(pending)
        self._post(pending)
        return pending

    def _post(self, pending: Pending) -> None:
        from .link import LinkError

        self._check(pending)
        link = self._link(pending)
        pending.posted = time.perf_counter()
        try:
            pending.works = [
                (link, peer, work)
                for peer, work in link.post(
                    [self._tagged(0, peer, tensor, pending) for peer, tensor in pending.sends],
                    [self._tagged(1, peer, tensor, pending) for peer, tensor in pending.receives],
                )
            ]
        except LinkError as broken:
            self._raise(pending, self._report(pending, broken.peer, broken.cause, broken.timeout))
        self.counters.messages += len(pending.sends)
        if not pending.metadata:
            for peer, tensor in pending.sends:
                self.counters.sent[peer] += tensor.nbytes

    def _tagged(self, side: int, peer: int, tensor: Tensor, pending: Pending) -> Message:
        from .link import Message

        # 6 bits of the message's number, one for agreements, 24 of a hash of its length: 31, below the links' own tag
        number = self._numbers[side][peer]
        self._numbers[side][peer] += 1
        length = (tensor.nbytes * 2654435761 & 0xFFFFFFFF) >> 8
        return Message(peer, tensor, (number & 63) | pending.metadata << 6 | (length % 0xFFFFFF) << 7)

    def _finish(self, pending: Pending) -> None:
        from .link import LinkError

        watch = self._watch
        assert watch is not None
        began = time.perf_counter()
        until = time.monotonic() + self.deadline
        words = f"{pending.what}, {self.deadline:g} s"
        for link, peer, work in pending.works:
            watch.waiting = (until, peer, words)
            try:
                link.wait(peer, work, max(until - time.monotonic(), 0.0) + _GRACE, lambda: watch.failure is not None)
            except LinkError as broken:
                self._raise(pending, self._report(pending, broken.peer, broken.cause, broken.timeout))
            finally:
                watch.waiting = None
        self.arrived(pending)
        pending.done, pending.works = True, []
        self._record(pending, began, time.perf_counter())
        while self.retries == 0 and self._log and self._log[0].done:
            self._log.popleft()

    def _record(self, pending: Pending, began: float, ended: float) -> None:
        nbytes = 0
        for peer, tensor in pending.receives:
            nbytes += tensor.nbytes
            if not pending.metadata:
                self.counters.received[peer] += tensor.nbytes
        if pending.metadata:
            self.counters.metadata += nbytes
        if self.trace is not None:
            sent = sum(tensor.nbytes for _, tensor in pending.sends)
            for kind, start, size in (("send", pending.posted, sent), ("receive", pending.posted, nbytes)):
                if size:
                    self.trace.append(Event(kind, pending.what, pending.stage, start, ended, size))
            self.trace.append(Event("wait", pending.what, pending.stage, began, ended, nbytes))

    def _open(self) -> None:
        store = self._store
        assert store is not None

        def scope() -> dist.Store:
            import torch.distributed as dist

            own = clone(store)
            # counted in the store, which lives as long as the group: a group made again starts again
            return dist.PrefixStore(f"ringweave/{own.add(f'ringweave/transports/{self.rank}', 1)}", own)

        try:
            self._store = bounded(scope, self.deadline, lambda: False)
        except (RuntimeError, OSError) as error:
            raise RingError(self.rank, None, None, self.step, f"no rendezvous store ({error})") from error
        self._connect()

    def _connect(self) -> list[int]:
        """Meet the others, and connect anew; how far each rank is."""
        import torch.distributed as dist

        from .link import GlooLink

        assert self._store is not None
        store = dist.PrefixStore(str(self._generation), self._store)
        links: dict[str, GlooLink | NcclLink] = {}
        watch = self._watch = Watch(store, self.rank, lambda: _cut(links))
        weakref.finalize(self, watch.stop)
        self._links = links
        self._numbers = [[0] * self.size, [0] * self.size]
        word = next((entry.number for entry in self._log if not entry.done), self._number)
        waited = self.deadline

        def connect() -> list[int]:
            own = clone(store)
            words = meet(dist.PrefixStore("meeting", own), word, self.rank, self.size, waited)
            links["cpu"] = GlooLink(dist.PrefixStore("gloo", own), self.rank, self.size, waited)
            return words

        try:
            return bounded(connect, waited + _GRACE, lambda: watch.failure is not None)
        except AbsentError as absent:
            failure = Failure(
                self.rank, absent.ranks[0], f"ranks {absent.ranks} did not come to connect in {waited:g} s"
            )
        except (RuntimeError, OSError) as error:
            failure = Failure(
                self.rank, None, f"rank {self.rank} could not connect ({str(error).splitlines()[0][:200]})"
            )
        raise self._error(None, watch.report(failure))

    def _link(self, pending: Pending) -> GlooLink | NcclLink:
        tensors = [tensor for _, tensor in (*pending.sends, *pending.receives)]
        device = tensors[0].device.type
        if any(tensor.device.type != device for tensor in tensors):
            raise ShapeError(message("tensors", "several devices", "one", "Move them to one device."))
        if device not in self._links:
            self._links[device] = self._accelerated(device)
        return self._links[device]

    def _accelerated(self, device: str) -> NcclLink:
        import torch.distributed as dist

        from .link import NcclLink

        assert self._store is not None
        if device != "cuda":
            raise ShapeError(message("tensors", f"device {device}", "cpu or cuda", "Move them there."))
        store = dist.PrefixStore(f"{self._generation}/nccl", self._store)
        return NcclLink(store, self.rank, self.size, self.deadline)

    def _check(self, pending: Pending) -> None:
        if self._watch is not None and self._watch.failure is not None:
            self._raise(pending, self._watch.failure)

    def _report(self, pending: Pending, peer: int, cause: str, transient: bool) -> Failure:
        assert self._watch is not None
        words = f"rank {self.rank} lost rank {peer} in {pending.what} ({cause})"
        return self._watch.report(Failure(self.rank, peer, words, transient))

    def _raise(self, pending: Pending, failure: Failure) -> None:
        raise self._error(pending.stage, failure)

    def _error(self, stage: int | None, failure: Failure) -> RingError:
        return RingError(self.rank, failure.peer, stage, self.step, failure.cause)


def _cut(links: dict[str, Any]) -> None:
    for link in list(links.values()):
        link.cut()
