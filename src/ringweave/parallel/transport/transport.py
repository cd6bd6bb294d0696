"""Messages among the ranks of one process group: bytes, counted, with deadlines.

    transport = Transport(group)
    headers = transport.agree(header, what="plan")          # all ranks' headers; the caller compares
    pending = transport.exchange(sends, receives, stage=1, what="kv")
    ...                                                     # compute, while they fly
    pending.wait()                                          # all is here, or RingError

Nothing but this file and those beside it (connection, link, meeting, failure, survivors, mesh) calls torch.distributed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import RingError, ShapeError, UnsupportedError, message
from ...patterns.numbers import seconds, whole
from .counters import Counters, Event
from .mesh import check_group
from .pending import Pending
from .watch import FailedError, Failure, bounded

if TYPE_CHECKING:
    import torch.distributed as dist

    from .connection import Connection

__all__ = ["Counters", "Event", "Pending", "Transport"]

# how many transports were made over each group
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Transport:
    """Messages among the ranks of one process group: bytes, counted, with deadlines; failures raise RingError.

    Ranks are those of the group. All ranks make their transports over one group in the same order, first use them in
    one order, and use each from one thread at a time. It connects at its first message, with connections of its own:
    the group serves for its store, ranks and size. The store's host must outlive all messages: a lost store is a
    failure, since no other could be told.

    Two ranks must post equally many bytes to each other, which they agree() on beforehand. Gloo answers a longer
    message by aborting the process; a tag made of the length keeps such a pair from meeting: it ends at the deadline.

    Args:
        group: Process group; None for a group of one, which needs no torch.distributed.
        deadline: Seconds for which a wait may last.
        retries: How often a wait that timed out may be repeated on fresh connections, in the transport's life. All
            ranks meet at the store, each at its next message and within the deadline, and repeat everything that any of
            them misses. Costs a copy of what is sent, until the next agreement tells that all have it.
        opening: Seconds for which the first message may wait until all ranks have come to theirs.
    Raises:
        UnsupportedError: No process group, or one that is destroyed or that this process is no member of.
        ShapeError: Seconds or retries that are no positive numbers.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, deadline: float = 30.0, retries: int = 0, opening: float = 60.0
    ) -> None:
        if group is not None:
            check_group(group)
            _made[group] = _made.get(group, 0) + 1
        #: which one of its group's, as they were made
        self.number = 0 if group is None else _made[group]
        #: how many contexts were made over it
        self.contexts = 0
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.deadline, self.opening = seconds("deadline", deadline), seconds("opening", opening)
        self.retries = whole("retries", retries, 0, error=ShapeError)
        self.counters = Counters(self.size)
        self.trace: list[Event] | None = None
        self.step = 0
        self._store: dist.Store | None = None if group is None else group.get_group_store()
        self._connection: Connection | None = None
        self._generation = 0
        # what is under way, or (with retries) may still be missed by some rank; numbered alike on all ranks
        self._log: deque[Pending] = deque()
        self._number = 0
        self._closed = False
        self._use = threading.RLock()
        self._misuse: Failure | None = None

    @contextmanager
    def using(self) -> Iterator[None]:
        """One call, of one thread.

        Who waited for another thread's call to end would call in an order that no other rank knows; so nobody waits,
        except on a rank that is alone.

        Raises:
            RingError: Another thread is in a call; this and all later calls raise, on all ranks.
            UnsupportedError: It is closed.
        """
        if not self._use.acquire(blocking=self.size == 1):
            raise self._misused().error(self.rank, None, self.step)
        try:
            self._check_open()
            yield
        finally:
            self._use.release()

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
        table = torch.empty(self.size, header.numel() + 1, dtype=torch.int64, device="cpu")
        table[self.rank, 0] = self._reached()
        table[self.rank, 1:] = header
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [(peer, table[self.rank].view(torch.uint8)) for peer in others]
        receives = [(peer, table[peer].view(torch.uint8)) for peer in others]
        self._start(Pending(self, sends, receives, what=what, metadata=True)).wait()
        self._forget(int(table[:, 0].min()))
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
        if self._connection is not None:
            self._connection.close()
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

    def _check_open(self) -> None:
        if self._closed:
            raise UnsupportedError(message("transport", "a call after close()", "an open transport", "Make another."))

    def _misused(self) -> Failure:
        """End it for all ranks, as the second thread."""
        self._misuse = Failure(
            self.rank,
            None,
            f"two threads of rank {self.rank} in one context at once",
            wanted="calls of one thread after the other",
            remedy="Give each thread a context of its own, made and first used in one order on all ranks.",
        )
        connection = self._connection
        return self._misuse if connection is None else connection.end(self._misuse)

    def _start(self, pending: Pending) -> Pending:
        self._check_open()
        try:
            if self._connection is None and self.size > 1:
                self._scope()
                self._connect()
            if self._misuse is not None and self._connection is not None:
                raise FailedError(self._connection.end(self._misuse))
        except FailedError as error:
            raise self._error(error.failure, pending) from error
        if pending.done:
            return pending
        if self.retries and not pending.metadata:
            # the caller may write into its tensors as soon as wait() returns, while another rank still misses them
            pending.sends = [(peer, tensor.clone()) for peer, tensor in pending.sends]
        pending.number = self._number
        self._number += 1
        self._log.append(pending)
        try:
            self._post(pending)
        except FailedError as error:
            self._recover(error.failure, pending)
        return pending

    def _post(self, pending: Pending) -> None:
        assert self._connection is not None
        receives = pending.receives
        if pending.done:
            # this rank has them, and may have written over them: only the others miss something
            receives = [(peer, torch.empty_like(tensor)) for peer, tensor in receives]
        pending.posted = time.perf_counter()
        pending.works = self._connection.post(pending.sends, receives, kind=int(pending.metadata), words=pending.what)
        self.counters.messages += len(pending.sends)
        if not pending.metadata:
            for peer, tensor in pending.sends:
                self.counters.sent[peer] += tensor.nbytes

    def _await(self, pending: Pending) -> None:
        while pending.works:
            assert self._connection is not None
            try:
                self._connection.wait(pending.works, number=pending.number, words=pending.what)
                pending.works = []
            except FailedError as error:
                self._recover(error.failure, pending)

    def _finish(self, pending: Pending) -> None:
        began = time.perf_counter()
        self._await(pending)
        self.arrived(pending)
        pending.done = True
        self._record(pending, began, time.perf_counter())
        if not self.retries:
            self._forget(self._reached())

    def _reached(self) -> int:
        return next((entry.number for entry in self._log if not entry.done), self._number)

    def _forget(self, number: int) -> None:
        while self._log and self._log[0].done and self._log[0].number < number:
            # a repetition for the others' sake: nobody else waits for it
            self._await(self._log[0])
            self._log.popleft()

    def _recover(self, failure: Failure, pending: Pending) -> None:
        if not failure.transient or self._generation == self.retries:
            raise self._error(failure, pending)
        self._generation += 1
        try:
            self._connect()
        except FailedError as error:
            raise self._error(error.failure, pending) from error

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
            for kind, size in (("send", sent), ("receive", nbytes)):
                if size:
                    self.trace.append(Event(kind, pending.what, pending.stage, pending.posted, ended, size))
            self.trace.append(Event("wait", pending.what, pending.stage, began, ended, nbytes))

    def _scope(self) -> None:
        store, rank = self._store, self.rank
        assert store is not None

        def scope() -> dist.Store:
            import torch.distributed as dist

            # counted in the store, which lives as long as the group: a group made again starts again
            return dist.PrefixStore(f"ringweave/{store.add(f'ringweave/transports/{rank}', 1)}", store)

        try:
            self._store = bounded(scope, self.opening, lambda: False)
        except (RuntimeError, OSError) as error:
            text = str(error).splitlines()[0][:200]
            raise FailedError(Failure(rank, None, f"rank {rank} lost the rendezvous store ({text})")) from error

    def _connect(self) -> None:
        """Meet the others on fresh connections, and post again what any of them misses."""
        import torch.distributed as dist

        from .connection import Connection

        if self._connection is not None:
            self._connection.close()
        assert self._store is not None
        store = dist.PrefixStore(str(self._generation), self._store)
        self._connection = Connection(store, self.rank, self.size, self.deadline)
        seconds = self.deadline if self._generation else self.opening
        first = min(self._connection.meet(self._reached(), seconds))
        for entry in self._log:
            entry.works = []
            if entry.number >= first:
                self._post(entry)

    def _error(self, failure: Failure, pending: Pending) -> RingError:
        return failure.error(self.rank, pending.stage, self.step)
