"""What the ranks tell each other before anything moves, how a difference reads, and the call that they agreed on.

Each rank sends a header, a row of int64 words for the fields below, and all raise the same difference: the first field,
in this order, that is not the same everywhere. What comes first explains what comes later: where lengths differ, so do
patterns.
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
_FIRST = "Make new contexts, and use them first, in the same order on all ranks."


@dataclass(frozen=True)
class Opaque:
    """What is compared by a digest, and shown by each rank's own."""

    digest: int
    shown: object


class _Field(NamedTuple):
    kind: type
    words: int = 1  # of the header
    remedy: str = _CALLS


# a tuple: words of text
Value = bool | int | float | str | tuple[int, ...] | Opaque | None
#: Words of a tag: 32 bytes of its text; a longer one is compared by a digest.
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
# of a header
_WORDS = sum(field.words for field in _FIELDS.values())
#: Words of a call's name.
NAME_WORDS = 1 + TAG_WORDS
_NONE = 2**63 - 1  # no text, no finite number
_DIGEST = b"\xff"  # which no text in UTF-8 holds


@dataclass
class Progress:
    """How far the calls over one transport are.

    Attributes:
        calls: How many were made: forward calls, tables and shards.
        ended: The error that ended them.
    """

    calls: int = 0
    ended: RingError | None = None


@dataclass
class Agreement:
    """What the ranks agree on before each exchange of a context, and the means of what they then do.

    Attributes:
        transport: Moves bytes.
        wire: How keys and values travel.
        space: Where buffers come from, the context's own.
        said: What the ranks compare, by field of the header.
        progress: How far the calls are, of all contexts that share the connections.
        seed: Of a call's dropout: the rank's own, and once they have agreed that of rank 0.
    """

    transport: Communicator
    wire: Wire = field(default_factory=Wire)
    space: Workspace = field(default_factory=Workspace)
    said: Mapping[str, Value] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    seed: int = 0

    def saying(self, **said: Value) -> Agreement:
        """Say more of the next exchange, which the ranks compare as well."""
        return replace(self, said={**self.said, **said})

    @contextmanager
    def calling(self, tag: Tensor | None = None, **said: Value) -> Iterator[Agreement]:
        """Enter a call, of one thread at a time, and none after one in which ranks differed: who knows what met next.

        ``tag`` is a forward call's, empty for that of the calling thread; None for a backward call, which is no call of
        its own but says its forward's. ``said`` is what the ranks compare besides.
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
                # without the frames that it came through, which hold tensors
                self.progress.ended = error.again()
                raise
            # not before it is done: a rank that fails and tries again is one behind, and told so
            self.progress.calls += tag is not None

    @property
    def name(self) -> tuple[int, ...]:
        """Name the call, for its backward: its number and tag, as words."""
        return tuple(word for name in ("call", "tag") for word in _encode(self.said.get(name), _FIELDS[name]))

    def agree(self, operation: str, forms: Sequence[int] = (), **said: Value) -> list[int]:
        """Compare what the ranks are about to do, before anything is moved.

        Args:
            operation: Which one.
            forms: The format of this rank's message to each peer; none: native.
            **said: What the ranks compare besides.
        Returns:
            The format of each peer's message to this rank.
        Raises:
            RingError: On all ranks, for the first field that differs.
        """
        ranks, rank = self.transport.size, self.transport.rank
        if ranks == 1:
            return [NATIVE]
        said = {**self.said, **said, "operation": operation}
        header = [word for name, each in _FIELDS.items() for word in _encode(said.get(name), each)]
        mine = torch.tensor([*header, *(forms or [NATIVE] * ranks)], dtype=torch.int64, device="cpu")
        # a rank sends itself no message: the word for its format is free
        mine[_WORDS + rank] = self.seed
        every = self.transport.agree(mine, what="agree")
        _compare(said, every[:, :_WORDS], rank, self.transport.step)
        self.seed = int(every[0, _WORDS])
        came: list[int] = every[:, _WORDS + rank].tolist()
        came[rank] = NATIVE
        return came

    def all_gather(self, x: Tensor, operation: str) -> tuple[list[Tensor], Pending]:
        """Begin to give every rank's x, of one shape and type, to all; they are there when the messages are."""
        rank = self.transport.rank
        self.agree(operation)
        every = [x if other == rank else torch.empty_like(x) for other in range(self.transport.size)]
        others = [(other, part) for other, part in enumerate(every) if other != rank]
        return every, self.transport.exchange([(other, x) for other, _ in others], others, what=operation, stage=0)

    @contextmanager
    def computing(self, what: str, stage: int) -> Iterator[None]:
        """Record a kernel call in the trace."""
        start = time.perf_counter()
        yield
        if self.transport.trace is not None:
            self.transport.trace.append(Event("compute", what, stage, start, time.perf_counter(), 0))


def _compare(said: Mapping[str, Value], every: Tensor, rank: int, step: int) -> None:
    """Raise for the first field in which the ranks' headers, (ranks, words), differ."""
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
    """Write text as words: as it is where it fits, else a digest of it."""
    raw, size = text.encode("utf-8", "surrogatepass"), 8 * count
    if len(raw) > size or b"\0" in raw:
        raw = hashlib.blake2b(raw, digest_size=size - 1).digest() + _DIGEST
    raw = raw.ljust(size, b"\0")
    return struct.unpack(f"<{count}q", raw)


def words_text(words: Sequence[int]) -> str:
    """Read the text that was made words, or its digest."""
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
    """Name the calling thread, on all ranks alike: empty for the main thread, and for autograd's.

    Threads without a name of their own are numbered among those of their kind that live, since a process counts all:
    one rank alone may have had another, to log with.
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
    """Tell whether its name is a number that the process gave it."""
    return re.match(r"Thread-\d+", thread.name) is not None
