"""What the ranks tell each other before anything moves, and how a difference reads.

Each rank sends a header, a row of int64 words for the fields below, and all raise the same difference: the first field,
in this order, that is not the same everywhere. What comes first explains what comes later: where lengths differ, so do
patterns.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...errors import RingError

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
    "schedule": _Field(str, remedy=_MADE),
    "moves": _Field(Opaque, remedy=_MADE),
    "D": _Field(int),
    "Dv": _Field(int),
    "dtype": _Field(str),
    "requires_grad": _Field(bool),
    "scale": _Field(float),
    "backend": _Field(str, 2),
    "wire": _Field(str, remedy=_MADE),
    "tolerance": _Field(float, remedy=_MADE),
    "deadline": _Field(float, remedy=_MADE),
    "retries": _Field(int, remedy=_MADE),
}
#: Words of a header.
WORDS = sum(field.words for field in _FIELDS.values())
_NONE = 2**63 - 1  # no text, no finite number
_DIGEST = b"\xff"  # which no text in UTF-8 holds


def header(said: Mapping[str, Value]) -> list[int]:
    """The words of what one rank is about to do, by field; what is not said is none."""
    return [word for name in _FIELDS for word in words(name, said)]


def words(name: str, said: Mapping[str, Value]) -> tuple[int, ...]:
    """The words of one field."""
    return _encode(said.get(name), _FIELDS[name])


def compare(said: Mapping[str, Value], every: Tensor, rank: int, step: int) -> None:
    """Raise unless all ranks have sent one header.

    Args:
        said: Of this rank.
        every: (ranks, words), all ranks' headers.
        rank: This rank.
        step: For the error.
    Raises:
        RingError: On all ranks, for the first field that differs.
    """
    same = (every == every[:1]).all(0).tolist()
    if all(same):
        return
    at = 0
    for name, field in _FIELDS.items():
        here = slice(at, at + field.words)
        at += field.words
        if all(same[here]):
            continue
        told = every[:, here].tolist()
        peer = next(other for other, theirs in enumerate(told) if theirs != told[rank])
        mine, theirs = _shown(said.get(name)), _decode(told[peer], field)
        raise RingError(
            rank,
            peer,
            None,
            step,
            f"{name} {mine} here and {theirs} on rank {peer}",
            f"the same {name} on all ranks",
            f"Nothing was moved. {field.remedy}",
        )


@functools.lru_cache(1024)
def text_words(text: str, count: int) -> tuple[int, ...]:
    """Text as it is where it fits, else a digest of it."""
    raw, size = text.encode("utf-8", "surrogatepass"), 8 * count
    if len(raw) > size or b"\0" in raw:
        raw = hashlib.blake2b(raw, digest_size=size - 1).digest() + _DIGEST
    raw = raw.ljust(size, b"\0")
    return struct.unpack(f"<{count}q", raw)


def words_text(found: Sequence[int]) -> str:
    """The text that was made words, or its digest."""
    raw = struct.pack(f"<{len(found)}q", *found)
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


def _decode(found: Sequence[int], field: _Field) -> str:
    if found[0] == _NONE:
        return _shown(None)
    if field.kind is Opaque:
        return "another"
    if field.kind is str:
        return _shown(tuple(found))
    if field.kind is float:
        return _shown(struct.unpack("<d", struct.pack("<q", found[0]))[0])
    return _shown(field.kind(found[0]))


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        value = words_text(value)
    if value is None or value == "":
        return "none"
    said = value if isinstance(value, str) else str(value.shown) if isinstance(value, Opaque) else repr(value)
    return said if len(said) <= 200 else f"{said[:197]}..."


_callers: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()


def caller() -> str:
    """What stands for the calling thread on all ranks alike: empty for the main thread, and for autograd's.

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
    """Whether its name is a number that the process gave it."""
    return re.match(r"Thread-\d+", thread.name) is not None
