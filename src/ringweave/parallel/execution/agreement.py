"""The headers that ranks compare before any data moves, the error for a difference, and the agreed call.

Each rank sends a header, a row of int64 words for the fields below. All ranks raise for the same field: the first one,
in this order, that differs. The order puts causes before consequences: if lengths differ, the patterns differ too.
"""

from __future__ import annotations

import hashlib
import re
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import RingError
from ...memory.workspace import Workspace
from ..transport.protocol import Communicator, Event, Pending
from .wire import NATIVE, Wire

_CALLS = "Make a new context, and the same calls in the same order on all ranks."
_MADE = "Make a new context, with the same arguments on all ranks."
_FIRST = "Make new contexts, and create and first use them in the same order on all ranks."


@dataclass(frozen=True)
class Opaque:
    """A value that ranks compare by its digest; an error shows only this rank's value."""

    digest: int
    shown: object


class _Field(NamedTuple):
    kind: type
    words: int = 1  # size in the header
    remedy: str = _CALLS


# a tuple holds words of text
Value = bool | int | float | str | tuple[int, ...] | Opaque | None
#: Words of a tag. They hold text of up to 32 bytes; a longer tag is replaced by its digest.
TAG_WORDS = 4
_FIELDS = {
    "operation": _Field(str),
    "context": _Field(str, remedy=_FIRST),
    "call": _Field(int),
    "tag": _Field(str, TAG_WORDS),
    "shape": _Field(str),
    "version": _Field(int),
    "seq_len": _Field(int, remedy=_MADE),
    "heads": _Field(str, 2, _MADE),
    "placement": _Field(Opaque, remedy=_MADE),
    "nodes": _Field(int, remedy=_MADE),
    "batch": _Field(int),
    "pattern": _Field(Opaque),
    "schedule": _Field(str, 2, _MADE),
    "moves": _Field(Opaque, remedy=_MADE),
    "D": _Field(int),
    "Dv": _Field(int),
    "dtype": _Field(str),
    "device": _Field(str),
    "requires_grad": _Field(bool),
    "scale": _Field(float),
    "terms": _Field(Opaque),
    "arguments": _Field(Opaque),
    "backend": _Field(str, 2),
    "wire": _Field(str, remedy=_MADE),
    "tolerance": _Field(float, remedy=_MADE),
    "deadline": _Field(float, remedy=_MADE),
    "retries": _Field(int, remedy=_MADE),
}
# number of words in a header
_WORDS = sum(field.words for field in _FIELDS.values())
#: Words of a call's name.
NAME_WORDS = 1 + TAG_WORDS
_NONE = 2**63 - 1  # encodes None; no text and no finite number has this value
_DIGEST = b"\xff"  # last byte of a digest; UTF-8 text never contains it


@dataclass
class Progress:
    """The progress of all calls over one transport.

    Attributes:
        calls: Number of completed calls: forward passes, shared tables and gathered tensors.
        ended: The error after which no further call is possible, or None.
    """

    calls: int = 0
    ended: RingError | None = None


@dataclass
class Agreement:
    """The header values that ranks compare before an exchange, and the resources of the exchange.

    Attributes:
        transport: Transport that carries the messages.
        wire: Format of keys and values in messages.
        space: Workspace of this context, which provides buffers.
        said: Values that the ranks compare, by header field.
        progress: Progress of the calls, shared by all contexts over the same connections.
        seed: Dropout seed of the call: this rank's own before the ranks agree, rank 0's afterwards.
    """

    transport: Communicator
    wire: Wire = field(default_factory=Wire)
    space: Workspace = field(default_factory=Workspace)
    said: Mapping[str, Value] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    seed: int = 0

    def saying(self, **said: Value) -> Agreement:
        """Return a copy with more header values to compare in the next exchange."""
        return replace(self, said={**self.said, **said})

    @contextmanager
    def calling(self, tag: Tensor | None = None, **said: Value) -> Iterator[Agreement]:
        """Enter a call, from one thread at a time.

        After a RingError every later call raises it again, because the ranks may be out of step.

        Args:
            tag: Tag of a forward call; all zeros stands for the name of the calling thread. None for a backward call,
                which is not counted and sends the name of its forward call.
            **said: Further header values to compare.
        """
        with self.transport.using():
            if tag is not None:
                name = tuple(tag.tolist())
                said |= {"tag": name if any(name) else text_words(caller(), TAG_WORDS), "call": self.progress.calls}
            if self.progress.ended is not None:
                raise self.progress.ended.again()
            try:
                yield self.saying(**said)
            except RingError as error:
                # a copy without traceback, since the frames of the original keep tensors alive
                self.progress.ended = error.again()
                raise
            # Count a call only when it is done, so that a rank that fails and tries again is one call behind and the
            # header shows it.
            self.progress.calls += tag is not None

    @property
    def name(self) -> tuple[int, ...]:
        """Number and tag of the call as words, which its backward call sends again."""
        return tuple(word for name in ("call", "tag") for word in _encode(self.said.get(name), _FIELDS[name]))

    def agree(self, operation: str, forms: Sequence[int] = (), **said: Value) -> list[int]:
        """Compare the headers of all ranks before any data moves.

        Args:
            operation: Name of the operation.
            forms: Format of this rank's message to each peer; empty for native messages.
            **said: Further header values to compare.
        Returns:
            The format of each peer's message to this rank.
        Raises:
            RingError: A field differs. All ranks raise for the first such field.
        """
        ranks, rank = self.transport.size, self.transport.rank
        if ranks == 1:
            return [NATIVE]
        said = {**self.said, **said, "operation": operation}
        header = [word for name, each in _FIELDS.items() for word in _encode(said.get(name), each)]
        mine = torch.tensor([*header, *(forms or [NATIVE] * ranks)], dtype=torch.int64, device="cpu")
        # a rank sends no message to itself, so the word for that format carries the seed
        mine[_WORDS + rank] = self.seed
        every = self.transport.agree(mine, what="agree")
        _compare(said, every[:, :_WORDS], rank, self.transport.step)
        self.seed = int(every[0, _WORDS])
        came: list[int] = every[:, _WORDS + rank].tolist()
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


def _compare(said: Mapping[str, Value], every: Tensor, rank: int, step: int) -> None:
    """Raise RingError for the first field in which the headers (ranks, words) differ."""
    same = (every == every[:1]).all(0).tolist()
    if all(same):
        return
    at = 0
    for name, kind in _FIELDS.items():
        here = slice(at, at + kind.words)
        at += kind.words
        if all(same[here]):
            continue
        told = every[:, here].tolist()
        peer = next(other for other, theirs in enumerate(told) if theirs != told[rank])
        mine, theirs = _shown(said.get(name)), _decode(told[peer], kind)
        raise RingError(
            rank,
            peer,
            None,
            step,
            f"{name} {mine} here and {theirs} on rank {peer}",
            f"the same {name} on all ranks",
            f"Nothing was moved. {kind.remedy}",
        )


def text_words(text: str, count: int) -> tuple[int, ...]:
    """Encode text as words, directly if it fits, else as a digest."""
    raw, size = text.encode("utf-8", "surrogatepass"), 8 * count
    if len(raw) > size or b"\0" in raw:
        raw = hashlib.blake2b(raw, digest_size=size - 1).digest() + _DIGEST
    raw = raw.ljust(size, b"\0")
    return struct.unpack(f"<{count}q", raw)


def words_text(words: Sequence[int]) -> str:
    """Decode words to text, or to the beginning of a digest."""
    raw = struct.pack(f"<{len(words)}q", *words)
    return f"#{raw[:4].hex()}" if raw.endswith(_DIGEST) else raw.rstrip(b"\0").decode("utf-8", "replace")


def _encode(value: Value, field: _Field) -> tuple[int, ...]:
    if value is None:
        return (_NONE,) * field.words
    if isinstance(value, Opaque):
        return (value.digest,)
    if isinstance(value, tuple):
        return value
    if isinstance(value, str):
        return text_words(value, field.words)
    if field.kind is float:
        return struct.unpack("<q", struct.pack("<d", value))
    return (int(value),)


def _decode(words: Sequence[int], field: _Field) -> str:
    if words[0] == _NONE:
        return _shown(None)
    if field.kind is Opaque:
        return "another"
    if field.kind is str:
        return _shown(tuple(words))
    if field.kind is float:
        return _shown(struct.unpack("<d", struct.pack("<q", words[0]))[0])
    return _shown(field.kind(words[0]))


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        value = words_text(value)
    if value is None or value == "":
        return "none"
    said = value if isinstance(value, str) else str(value.shown) if isinstance(value, Opaque) else repr(value)
    return said if len(said) <= 200 else f"{said[:197]}..."


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
