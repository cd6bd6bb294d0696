"""A call that all ranks make together: the header values that they compare, and the resources of its exchanges."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...errors import RingError
from ...memory.workspace import Workspace
from ...types import acc_dtype
from ..transport.protocol import Communicator, Event, Pending
from .header import HEADER_WORDS, TAG_WORDS, Value, compare, encode, encode_field, text_words
from .wire import NATIVE, Wire


@dataclass
class CallCounter:
    """The calls of all contexts over one transport."""

    calls: int = 0  # number of completed calls: forward passes, shared tables and gathered tensors
    ended: RingError | None = None  # the error after which no further call is possible, or None


@dataclass
class CollectiveCall:
    """The header values that ranks compare before an exchange, and the resources of the exchange."""

    transport: Communicator
    wire: Wire = field(default_factory=Wire)  # format of keys and values in messages
    space: Workspace = field(default_factory=Workspace)  # workspace of this context, which provides buffers
    fields: Mapping[str, Value] = field(default_factory=dict)  # values that the ranks compare, by header field
    # counter of the calls, shared by all contexts over the same connections
    counter: CallCounter = field(default_factory=CallCounter)
    seed: int = 0  # dropout seed of the call: this rank's own before the ranks agree, rank 0's afterwards

    def with_fields(self, **fields: Value) -> CollectiveCall:
        """Return a copy with further header fields; the ranks' values must be equal."""
        return replace(self, fields={**self.fields, **fields})

    @contextmanager
    def call_scope(self, tag: Tensor | None = None, **fields: Value) -> Iterator[CollectiveCall]:
        """Enter a call, from one thread at a time.

        After a RingError every later call raises it again, because the ranks may be out of step.

        Args:
            tag: Tag of a forward call; all zeros stands for the name of the calling thread. None for a backward call,
                which is not counted and sends the name of its forward call.
            **fields: Further header fields to compare.
        """
        with self.transport.using():
            if tag is not None:
                name = tuple(tag.tolist())
                fields |= {"tag": name if any(name) else text_words(caller(), TAG_WORDS), "call": self.counter.calls}
            if self.counter.ended is not None:
                raise self.counter.ended.again()
            try:
                yield self.with_fields(**fields)
            except RingError as error:
                # a copy without traceback, since the frames of the original keep tensors alive
                self.counter.ended = error.again()
                raise
            # Count a call only when it is done, so that a rank that fails and tries again is one call behind and the
            # header shows it.
            self.counter.calls += tag is not None

    @property
    def name(self) -> tuple[int, ...]:
        """Number and tag of the call as words, which its backward call sends again."""
        return tuple(word for name in ("call", "tag") for word in encode_field(name, self.fields.get(name)))

    def agree(self, operation: str, forms: Sequence[int] = (), **fields: Value) -> list[int]:
        """Compare the headers of all ranks before any data moves.

        Args:
            operation: Name of the operation.
            forms: Format of this rank's message to each peer; empty for native messages.
            **fields: Further header fields to compare.
        Returns:
            The format of each peer's message to this rank.
        Raises:
            RingError: A field differs. All ranks raise for the first such field.
        """
        ranks, rank = self.transport.size, self.transport.rank
        if ranks == 1:
            return [NATIVE]
        fields = {**self.fields, **fields, "operation": operation}
        mine = torch.tensor([*encode(fields), *(forms or [NATIVE] * ranks)], dtype=torch.int64, device="cpu")
        # a rank sends no message to itself, so the word for that format carries the seed
        mine[HEADER_WORDS + rank] = self.seed
        every = self.transport.agree(mine, what="agree")
        compare(fields, every[:, :HEADER_WORDS], rank, self.transport.call_count)
        self.seed = int(every[0, HEADER_WORDS])
        came: list[int] = every[:, HEADER_WORDS + rank].tolist()
        came[rank] = NATIVE
        return came

    def all_gather(self, x: Tensor, operation: str) -> tuple[list[Tensor], Pending]:
        """Start to gather x, of equal shape and dtype on all ranks.

        Returns:
            The tensors by rank, and the pending messages; the tensors are valid after ``wait()``.
        """
        rank = self.transport.rank
        self.agree(operation)
        every = [x if other == rank else torch.empty_like(x) for other in range(self.transport.size)]
        others = [(other, part) for other, part in enumerate(every) if other != rank]
        return every, self.transport.exchange([(other, x) for other, _ in others], others, what=operation, stage=0)

    def reduce_scatter(self, parts: Sequence[Tensor], operation: str) -> Tensor:
        """Send ``parts[r]`` to rank r, and return the sum of all ranks' parts for this rank, in the order of ranks."""
        rank = self.transport.rank
        self.agree(operation)
        came = [x if other == rank else torch.empty_like(parts[rank]) for other, x in enumerate(parts)]
        others = [other for other in range(self.transport.size) if other != rank]
        sends, receives = ([(other, side[other]) for other in others] for side in (parts, came))
        self.transport.exchange(sends, receives, what=operation, stage=0).wait()
        total = came[0].to(acc_dtype(came[0].dtype), copy=True)
        for part in came[1:]:
            total += part
        return total.to(came[0].dtype)

    def buffer(self, nbytes: int, device: torch.device) -> Tensor:
        """Return a flat uint8 buffer from the workspace."""
        return self.space.take((nbytes,), torch.uint8, device)

    @contextmanager
    def computing(self, what: str, stage: int) -> Iterator[None]:
        """Record a kernel call in the trace."""
        start = time.perf_counter()
        yield
        if self.transport.trace is not None:
            self.transport.trace.append(Event("compute", what, stage, start, time.perf_counter(), 0))


_callers: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()


def caller() -> str:
    """Name the calling thread equally on all ranks; the main thread and autograd's threads have an empty name.

    Threads with a default name are numbered among the live threads of their kind. Python's own numbers count all
    threads of the process, and may differ if one rank has started another thread, such as a logger.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
        return ""
    if thread not in _callers:
        kind = _kind(thread)
        alike = [other.name for other in threading.enumerate() if _kind(other) == kind and _number(other)]
        place = sorted(alike, key=lambda name: (len(name), name)).index(thread.name) if _number(thread) else 0
        _callers[thread] = f"thread {kind} {place}" if place else f"thread {kind}"
    return _callers[thread]


def _kind(thread: threading.Thread) -> str:
    return re.sub(r"^(Thread|ThreadPoolExecutor)-\d+", r"\1", thread.name)


def _number(thread: threading.Thread) -> bool:
    """Return whether the thread has a default name, numbered by the process."""
    return re.match(r"Thread-\d+", thread.name) is not None
