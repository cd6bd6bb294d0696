"""Messages among the ranks of one process group: bytes, counted, with deadlines.

    transport = Transport(group)
    headers = transport.agree(header, what="plan")          # all ranks' headers; the caller compares
    pending = transport.exchange(sends, receives, stage=1, what="kv")
    ...                                                     # compute, while they fly
    pending.wait()                                          # all is here, or RingError

Nothing but this file and those beside it calls torch.distributed.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...cache import interrupted
from ...errors import RingError, ShapeError, UnsupportedError, in_a_line, message
from ...patterns.validate import seconds, whole
from .lifelines import Lifelines
from .mesh import check_group
from .protocol import Counters, Event, Pending, Tensors
from .rendezvous import bounded
from .watch import FailedError, Failure

if TYPE_CHECKING:
    import torch.distributed as dist

    from .links import Connection, Work

# how many transports were made over each group
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class _Messages:
    """Messages under way; keeps their tensors alive."""

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
        """Return when all have arrived, and what is sent is out of its tensors."""
        if not self.done:
            self._transport._finish(self)


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
        opening: Seconds for which the first message may wait until all ranks have come to theirs; None: the deadline.
    Raises:
        UnsupportedError: No process group, or one that is destroyed or that this process is no member of.
        ShapeError: Seconds or retries that are no positive numbers.
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
        # which one of its group's, as they were made, and how many contexts were made over it
        self._number, self._contexts = 0 if group is None else _made[group], 0
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.deadline = seconds("deadline", deadline)
        self.opening = self.deadline if opening is None else seconds("opening", opening)
        self.retries = whole("retries", retries, 0, error=ShapeError)
        self.counters = Counters(self.size)
        self.trace: list[Event] | None = None
        self.step = 0
        self._group_store: dist.Store | None = None if group is None else group.get_group_store()
        # this transport's part of it
        self._store: dist.Store | None = None
        self._lifelines = Lifelines(self.rank, self.size)
        store = self._group_store
        if store is not None and self.size > 1:
            # a store that does not answer is the first call's failure
            with suppress(RuntimeError, OSError):
                bounded(lambda: self._lifelines.publish(store), self.deadline, lambda: False)
        self._connection: Connection | None = None
        self._generation = 0
        # what is under way, or (with retries) may still be missed by some rank; numbered alike on all ranks
        self._log: deque[_Messages] = deque()
        self._started = 0
        self._closed = False
        self._use = threading.RLock()
        self._process = os.getpid()
        self._ended: Failure | None = None

    def open(self) -> str:
        """Name a context by the transport's number and its own."""
        self._contexts += 1
        return str(self._number) if self._contexts == 1 else f"{self._number}.{self._contexts}"

    @contextmanager
    def using(self) -> Iterator[None]:
        """Enter a call; see :class:`Communicator`.

        Who waited for another thread's call to end would call in an order that no other rank knows; so nobody waits,
        except on a rank that is alone. What raises in the middle of one ends it for all ranks: the others wait for
        messages that will not come.
        """
        if self.size > 1 and interrupted(self._use):
            got = "a call in the middle of this thread's own, as from a signal handler"
            raise UnsupportedError(message("context", got, "calls one after the other", "Set a flag, call later."))
        if not self._use.acquire(blocking=self.size == 1):
            raise self._end(
                f"two threads of rank {self.rank} in one context at once",
                wanted="calls of one thread after the other",
                remedy="Give each thread a context of its own, made and first used in one order on all ranks.",
            ).error(self.rank, None, self.step)
        try:
            self._check_open()
            with self._telling():
                yield
        finally:
            self._use.release()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell all ranks what this one raises in a call, before its first message too."""
        try:
            yield
        except RingError:
            raise
        except BaseException as error:
            if self.size > 1:
                # the others may still wait for this rank to connect
                with suppress(FailedError):
                    self._open()
                self._end(
                    f"rank {self.rank} raised {in_a_line(error)}",
                    wanted="no exception in the middle of a call",
                    remedy="Make new contexts on all ranks, once what was raised there is mended.",
                )
            raise

    def agree(self, header: Tensor, *, what: str) -> Tensor:
        """Gather every rank's header; see :class:`Communicator`."""
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
        self._start(_Messages(self, sends, receives, what, metadata=True)).wait()
        self._forget(int(table[:, 0].min()))
        return table[:, 1:]

    def exchange(self, sends: Tensors, receives: Tensors, *, what: str, stage: int | None = None) -> Pending:
        """Start messages between pairs of ranks; see :class:`Communicator`."""
        for name, messages in (("sends", sends), ("receives", receives)):
            for peer, tensor in messages:
                if not tensor.is_contiguous():
                    got = f"strides {tensor.stride()}"
                    raise ShapeError(message(name, got, "contiguous tensors", "Copy it first."))
                if peer == self.rank or not 0 <= peer < self.size:
                    raise ShapeError(message(name, f"peer {peer}", f"another rank below {self.size}", "Leave it out."))
        return self._start(_Messages(self, sends, receives, what, stage))

    def close(self) -> None:
        """Close the connections and end the thread. A closed transport carries nothing more."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
        self._log.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise UnsupportedError(message("transport", "a call after close()", "an open transport", "Make another."))
        if self.size > 1 and os.getpid() != self._process:
            # its messages would go out among the other's, over the same connections
            got, wanted = "a call of a forked process", "the process that made it"
            raise UnsupportedError(message("transport", got, wanted, "Make groups and contexts after the fork."))

    def _end(self, cause: str, *, wanted: str, remedy: str) -> Failure:
        """End it for all ranks, for what no message shows."""
        self._ended = Failure(self.rank, None, cause, wanted=wanted, remedy=remedy)
        connection = self._connection
        return self._ended if connection is None else connection.end(self._ended)

    def _start(self, pending: _Messages) -> _Messages:
        self._check_open()
        try:
            if self._connection is None and self.size > 1:
                self._connect()
            if self._ended is not None and self._connection is not None:
                raise FailedError(self._connection.end(self._ended))
        except FailedError as error:
            raise self._error(error.failure, pending) from error
        if pending.done:
            return pending
        if self.retries and not pending.metadata:
            # the caller may write into its tensors as soon as wait() returns, while another rank still misses them
            pending.sends = [(peer, tensor.clone()) for peer, tensor in pending.sends]
        pending.number = self._started
        self._started += 1
        self._log.append(pending)
        try:
            self._post(pending)
        except FailedError as error:
            self._recover(error.failure, pending)
        return pending

    def _post(self, pending: _Messages) -> None:
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

    def _await(self, pending: _Messages) -> None:
        while pending.works:
            assert self._connection is not None
            try:
                self._connection.wait(pending.works, number=pending.number, words=pending.what)
                pending.works = []
            except FailedError as error:
                self._recover(error.failure, pending)

    def _finish(self, pending: _Messages) -> None:
        began = time.perf_counter()
        self._await(pending)
        pending.done = True
        self._record(pending, began, time.perf_counter())
        if not self.retries:
            # whatever came before: messages of a call that failed, or of a table that nobody asks for, are never done
            self._log = deque(entry for entry in self._log if entry is not pending)

    def _reached(self) -> int:
        return next((entry.number for entry in self._log if not entry.done), self._started)

    def _forget(self, number: int) -> None:
        while self._log and self._log[0].done and self._log[0].number < number:
            # a repetition for the others' sake: nobody else waits for it
            self._await(self._log[0])
            self._log.popleft()

    def _recover(self, failure: Failure, pending: _Messages) -> None:
        if not failure.transient or self._generation == self.retries:
            raise self._error(failure, pending)
        self._generation += 1
        try:
            self._connect()
        except FailedError as error:
            raise self._error(error.failure, pending) from error

    def _record(self, pending: _Messages, began: float, ended: float) -> None:
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

    def _scope(self) -> dist.Store:
        """Count this transport among the group's, as they are first used, and give it a part of the store."""
        store, rank = self._group_store, self.rank
        assert store is not None

        def scope() -> dist.Store:
            import torch.distributed as dist

            # counted in the store, which lives as long as the group: a group made again starts again
            return dist.PrefixStore(f"ringweave/{store.add(f'ringweave/transports/{rank}', 1)}", store)

        try:
            return bounded(scope, self.opening, lambda: False)
        except (RuntimeError, OSError) as error:
            text = str(error).splitlines()[0][:200]
            raise FailedError(Failure(rank, None, f"rank {rank} lost the rendezvous store ({text})")) from error

    def _open(self) -> Connection:
        """Give the connection of this generation, over which a failure can be told before the ranks meet."""
        import torch.distributed as dist

        from .links import Connection

        if self._connection is None:
            self._store = self._scope() if self._store is None else self._store
            store = dist.PrefixStore(str(self._generation), self._store)
            self._connection = Connection(store, self.rank, self.size, self.deadline)
        return self._connection

    def _connect(self) -> None:
        """Meet the others on fresh connections, and post again what any of them misses."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        assert self._group_store is not None
        seconds = self.deadline if self._generation else self.opening
        first = min(self._open().meet(self._reached(), seconds, self._lifelines, self._group_store))
        for entry in self._log:
            entry.works = []
            if entry.number >= first:
                self._post(entry)

    def _error(self, failure: Failure, pending: _Messages) -> RingError:
        return failure.error(self.rank, pending.stage, self.step)
