"""Messages between the ranks of one process group, with byte counters and deadlines.

    transport = Transport(group)
    headers = transport.agree(header, what="plan")          # all ranks' headers; the caller compares
    pending = transport.exchange(sends, receives, stage=1, what="kv")
    ...                                                     # compute while the messages travel
    pending.wait()                                          # all messages have arrived, or RingError

Only the files of this folder call torch.distributed.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import seconds, whole
from ...errors import RingError, ShapeError, UnsupportedError, in_a_line
from .connection import Connection, Work, part_of_store
from .failure import ConnectionFailure, FailedError
from .lifelines import Lifelines
from .mesh import check_group
from .protocol import Counters, Event, Pending, Tensors
from .rendezvous import bounded

# number of transports created over each group
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class _Pending:
    """Pending messages, which keep their tensors alive."""

    def __init__(
        self,
        transport: Transport,
        sends: Tensors,
        receives: Tensors,
        what: str,
        stage: int | None = None,
        metadata: bool = False,
    ) -> None:
        self.sends, self.receives = ([each for each in part if each[1].numel()] for part in (sends, receives))
        self.what, self.stage, self.metadata = what, stage, metadata
        self.number = 0
        self.works: list[Work] = []
        self.posted = 0.0
        self.done = not self.sends and not self.receives
        self._transport = transport

    def wait(self) -> None:
        """Return when all messages have arrived and the sent tensors may be overwritten."""
        if not self.done:
            self._transport._finish(self)

    def post(self, connection: Connection, counters: Counters) -> None:
        """Start the messages, or repeat them over a new connection, and count the sent bytes."""
        receives = self.receives
        if self.done:
            # This rank has received these messages and the caller may have overwritten the tensors, so the repetition
            # for other ranks is received into new ones.
            receives = [(peer, torch.empty_like(tensor)) for peer, tensor in receives]
        self.posted = time.perf_counter()
        self.works = connection.post(self.sends, receives, kind=int(self.metadata), words=self.what)
        counters.messages += len(self.sends)
        if not self.metadata:
            for peer, tensor in self.sends:
                counters.sent[peer] += tensor.nbytes

    def record(self, counters: Counters, trace: list[Event] | None, began: float, ended: float) -> None:
        """Count the received bytes, and trace the messages and the wait for them between two times."""
        received = sum(tensor.nbytes for _, tensor in self.receives)
        if self.metadata:
            counters.metadata += received
        else:
            for peer, tensor in self.receives:
                counters.received[peer] += tensor.nbytes
        if trace is not None:
            sent = sum(tensor.nbytes for _, tensor in self.sends)
            for kind, nbytes in (("send", sent), ("receive", received)):
                if nbytes:
                    trace.append(Event(kind, self.what, self.stage, self.posted, ended, nbytes))
            trace.append(Event("wait", self.what, self.stage, began, ended, received))


class Transport:
    """Messages between the ranks of one process group, with byte counters and deadlines; failures raise RingError.

    Ranks are numbered as in the group. All ranks must create their transports over a group in the same order, first use
    them in the same order, and use each transport from one thread at a time. A transport creates separate connections
    at its first message, and uses only the store, rank and size of the group. The store's host must outlive all
    messages. A lost store is a failure, since ranks could no longer report other failures to each other.

    The size that a rank sends must equal the size that its peer receives; ranks ensure this by a previous agree().
    Gloo aborts the process if a message is longer than its buffer. Tags that depend on the length keep such a pair from
    being matched, so it times out at the deadline instead.

    Args:
        group: Process group; None for a group of one, which does not need torch.distributed.
        deadline: Longest wait, in seconds.
        retries: Number of times, in the transport's lifetime, that a timed-out wait may be repeated on new connections.
            All ranks then meet at the store, each at its next message and within the deadline, and repeat every message
            that any rank misses. Retries need a copy of each sent message until the next agreement shows that all ranks
            have received it.
        opening: Longest wait, in seconds, of the first message for all ranks to connect; None for the deadline.
    Raises:
        UnsupportedError: ``group`` is not a process group, is destroyed, or does not contain this process.
        ShapeError: ``deadline`` or ``opening`` is not a positive number, or ``retries`` is negative or not an integer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        deadline: float = 30.0,
        retries: int = 0,
        opening: float | None = None,
    ) -> None:
        if group is not None:
            check_group(group)
            _made[group] = _made.get(group, 0) + 1
        # number of this transport among its group's, in order of creation, and number of contexts created over it
        self._number, self._contexts = 0 if group is None else _made[group], 0
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.deadline = seconds("deadline", deadline)
        self.opening = self.deadline if opening is None else seconds("opening", opening)
        self.retries = whole("retries", retries, 0, error=ShapeError)
        self.counters = Counters(self.size)
        self.trace: list[Event] | None = None
        self.call_count = 0
        # the group's store, and the part of it that belongs to this transport
        self._group_store: dist.Store | None = None if group is None else group.get_group_store()
        self._store: dist.Store | None = None
        if self._group_store is not None and self.size > 1:
            self._lifelines = Lifelines(self._group_store, self.rank, self.size)
            # if the store does not answer, the first call reports the failure
            with suppress(RuntimeError, OSError):
                bounded(self._lifelines.publish, self.deadline)
        self._connection: Connection | None = None
        self._generation = 0
        # Pending messages and, with retries, messages that some rank may still miss. All ranks number them equally.
        self._log: deque[_Pending] = deque()
        self._started = 0
        self._closed = False
        self._use = threading.RLock()
        self._process = os.getpid()
        self._ended: ConnectionFailure | None = None

    def open(self) -> str:
        """Return a context's name: the transport's number and, from the second context on, the context's number."""
        self._contexts += 1
        return str(self._number) if self._contexts == 1 else f"{self._number}.{self._contexts}"

    @contextmanager
    def using(self) -> Iterator[None]:
        """Enter a call; see :class:`Communicator`.

        If another thread is in a call, this raises instead of waiting, unless the group has one rank: after a wait the
        order of calls could differ between ranks. An exception during a call ends the transport on all ranks, because
        the other ranks wait for messages that will not come.
        """
        if self.size > 1 and self._use._is_owned():  # type: ignore[attr-defined]
            got = "a call during another call of the same thread, such as from a signal handler"
            raise UnsupportedError("context", got, "one call at a time", "Set a flag there and call later.")
        if not self._use.acquire(blocking=self.size == 1):
            raise self._end(
                f"two threads of rank {self.rank} in one context concurrently",
                wanted="calls from one thread at a time",
                remedy="Give each thread a separate context, created and first used in the same order on all ranks.",
            ).error(self.rank, None, self.call_count)
        try:
            self._check_open()
            try:
                yield
            except RingError:
                raise
            except BaseException as error:
                self._report(error)
                raise
        finally:
            self._use.release()

    def _report(self, error: BaseException) -> None:
        """Report an exception in a call to all ranks, even before this rank's first message."""
        if self.size > 1:
            # other ranks may still wait for this rank to connect, so open a connection for the report
            with suppress(FailedError):
                self._open()
            self._end(
                f"rank {self.rank} raised {in_a_line(error)}",
                wanted="no exception during a call",
                remedy="Fix the cause on that rank, then create new contexts on all ranks.",
            )

    def agree(self, header: Tensor, *, what: str) -> Tensor:
        """Gather every rank's header; see :class:`Communicator`."""
        if header.dtype != torch.int64 or header.dim() != 1 or header.device.type != "cpu":
            got = f"{header.dtype} {tuple(header.shape)} on {header.device.type}"
            raise ShapeError("header", got, "int64 (k,) on the CPU", "Convert the header.")
        self.call_count += 1
        table = torch.empty(self.size, header.numel() + 1, dtype=torch.int64, device="cpu")
        table[self.rank, 0] = self._reached()
        table[self.rank, 1:] = header
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [(peer, table[self.rank].view(torch.uint8)) for peer in others]
        receives = [(peer, table[peer].view(torch.uint8)) for peer in others]
        self._start(_Pending(self, sends, receives, what, metadata=True)).wait()
        self._forget(int(table[:, 0].min()))
        return table[:, 1:]

    def exchange(self, sends: Tensors, receives: Tensors, *, what: str, stage: int | None = None) -> Pending:
        """Start messages between pairs of ranks; see :class:`Communicator`."""
        _check("sends", sends, self.rank, self.size)
        _check("receives", receives, self.rank, self.size)
        return self._start(_Pending(self, sends, receives, what, stage))

    def close(self) -> None:
        """Close the connections and end their thread; later calls raise."""
        self._closed = True
        if self._connection is not None:
            self._stop()
            self._connection.close()
        self._log.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise UnsupportedError("transport", "a call after close()", "an open transport", "Create another.")
        if self.size > 1 and os.getpid() != self._process:
            # the forked process would mix its messages with the parent's on the same connections
            got, wanted = "a call of a forked process", "the process that created it"
            raise UnsupportedError("transport", got, wanted, "Create groups and contexts after the fork.")

    def _end(self, cause: str, *, wanted: str, remedy: str) -> ConnectionFailure:
        """End the transport on all ranks, for a failure that no message would reveal."""
        self._ended = ConnectionFailure(self.rank, None, cause, wanted=wanted, remedy=remedy)
        connection = self._connection
        return self._ended if connection is None else connection.fail(self._ended)

    def _start(self, pending: _Pending) -> _Pending:
        self._check_open()
        try:
            if self._connection is None and self.size > 1:
                self._connect()
            if self._ended is not None and self._connection is not None:
                raise FailedError(self._connection.fail(self._ended))
        except FailedError as error:
            raise error.failure.error(self.rank, pending.stage, self.call_count) from error
        if pending.done:
            return pending
        if self.retries and not pending.metadata:
            # after wait() the caller may overwrite its tensors while another rank still misses their messages
            pending.sends = [(peer, tensor.clone()) for peer, tensor in pending.sends]
        pending.number = self._started
        self._started += 1
        self._log.append(pending)
        assert self._connection is not None
        try:
            pending.post(self._connection, self.counters)
        except FailedError as error:
            self._recover(error.failure, pending)
        return pending

    def _await(self, pending: _Pending) -> None:
        while pending.works:
            assert self._connection is not None
            try:
                self._connection.wait(pending.works, number=pending.number, words=pending.what)
                pending.works = []
            except FailedError as error:
                self._recover(error.failure, pending)

    def _finish(self, pending: _Pending) -> None:
        began = time.perf_counter()
        self._await(pending)
        pending.done = True
        pending.record(self.counters, self.trace, began, time.perf_counter())
        if not self.retries:
            # Remove this entry even if earlier ones remain: the messages of a failed call, or of a table without a call
            # of result(), are never done.
            self._log = deque(entry for entry in self._log if entry is not pending)

    def _reached(self) -> int:
        return next((entry.number for entry in self._log if not entry.done), self._started)

    def _forget(self, number: int) -> None:
        while self._log and self._log[0].done and self._log[0].number < number:
            # a repetition for other ranks; no caller on this rank waits for it
            self._await(self._log[0])
            self._log.popleft()

    def _recover(self, failure: ConnectionFailure, pending: _Pending) -> None:
        if not failure.transient or self._generation == self.retries:
            raise failure.error(self.rank, pending.stage, self.call_count)
        self._generation += 1
        try:
            self._connect()
        except FailedError as error:
            raise error.failure.error(self.rank, pending.stage, self.call_count) from error

    def _open(self) -> Connection:
        """Return the connection of this generation; a failure can be reported over it before the ranks meet."""
        if self._connection is None:
            if self._store is None:
                assert self._group_store is not None
                self._store = part_of_store(self._group_store, self.rank, self.opening)
            store = dist.PrefixStore(str(self._generation), self._store)
            self._connection = Connection(store, self.rank, self.size, self.deadline, self._lifelines)
            # the connection's thread must end with this transport, and before the interpreter does, without close()
            self._stop = weakref.finalize(self, self._connection.stop)
        return self._connection

    def _connect(self) -> None:
        """Connect to all ranks again, and repeat the messages that any rank misses."""
        if self._connection is not None:
            self._stop()
            self._connection.close()
            self._connection = None
        seconds = self.deadline if self._generation else self.opening
        connection = self._open()
        first = min(connection.connect(self._reached(), seconds))
        for entry in self._log:
            entry.works = []
            if entry.number >= first:
                entry.post(connection, self.counters)


def _check(name: str, messages: Tensors, rank: int, size: int) -> None:
    """Raise ShapeError unless all tensors are contiguous and all peers are other ranks."""
    for peer, tensor in messages:
        if not tensor.is_contiguous():
            raise ShapeError(name, f"strides {tensor.stride()}", "contiguous tensors", "Call .contiguous() first.")
        if peer == rank or not 0 <= peer < size:
            raise ShapeError(name, f"peer {peer}", f"another rank below {size}", "Omit it.")
