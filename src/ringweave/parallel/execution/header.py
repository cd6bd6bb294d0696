"""The headers that ranks compare before any data moves, and the error for a difference.

Each rank sends a header, a row of int64 words for the fields below. All ranks raise for the same field: the first one,
in this order, that differs. The order puts causes before consequences: if lengths differ, the patterns differ too.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...errors import RingError

_CALLS = "Make a new context, and the same calls in the same order on all ranks."
_MADE = "Make a new context, with the same arguments on all ranks."
_FIRST = "Make new contexts, and create and first use them in the same order on all ranks."


@dataclass(frozen=True)
class Digest:
    """A value that ranks compare by a digest; an error shows this rank's text, and another's if the header has room.

    Attributes:
        digest: The digest.
        shown: The value as text.
    """

    digest: int
    shown: str

    @functools.cached_property
    def words(self) -> tuple[int, ...]:
        """The digest, and the beginning of the text as words."""
        raw = self.shown.encode("ascii", "replace")
        raw = raw if len(raw) <= 8 * _SHOWN_WORDS else raw[: 8 * _SHOWN_WORDS - 3] + b"..."
        return self.digest, *text_words(raw.decode(), _SHOWN_WORDS)


# words of a digest's text in a header
_SHOWN_WORDS = 24


class _Field(NamedTuple):
    kind: type
    words: int = 1  # size in the header; of a digest only the first word is compared
    remedy: str = _CALLS


# a tuple holds words of text
Value = bool | int | float | str | tuple[int, ...] | Digest | None
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
    "placement": _Field(Digest, remedy=_MADE),
    "nodes": _Field(int, remedy=_MADE),
    "batch": _Field(int),
    "pattern": _Field(Digest, 1 + _SHOWN_WORDS),
    "schedule": _Field(str, 2, _MADE),
    "moves": _Field(Digest, remedy=_MADE),
    "D": _Field(int),
    "Dv": _Field(int),
    "dtype": _Field(str),
    "device": _Field(str),
    "requires_grad": _Field(bool),
    "scale": _Field(float),
    "terms": _Field(Digest),
    "arguments": _Field(Digest),
    "backend": _Field(str, 2),
    "wire": _Field(str, remedy=_MADE),
    "tolerance": _Field(float, remedy=_MADE),
    "deadline": _Field(float, remedy=_MADE),
    "retries": _Field(int, remedy=_MADE),
}
#: Number of words in a header.
HEADER_WORDS = sum(field.words for field in _FIELDS.values())
#: Words of a call's name.
NAME_WORDS = 1 + TAG_WORDS
_NONE = 2**63 - 1  # encodes None; no text and no finite number has this value
_DIGEST = b"\xff"  # last byte of a digest; UTF-8 text never contains it


def compare(fields: Mapping[str, Value], every: Tensor, rank: int, step: int) -> None:
    """Raise RingError for the first field in which the headers (ranks, words) differ."""
    same = (every == every[:1]).all(0).tolist()
    if all(same):
        return
    at = 0
    for name, kind in _FIELDS.items():
        words = every[:, at : at + kind.words].tolist()
        at += kind.words
        # the text of a digest is not compared
        compared = [row[:1] if kind.kind is Digest else row for row in words]
        peer = next((other for other, theirs in enumerate(compared) if theirs != compared[rank]), None)
        if peer is None:
            continue
        mine, theirs = _shown(fields.get(name)), _decode(words[peer], kind)
        if kind.kind is Digest and words[peer][0] != _NONE and words[peer][1:] == words[rank][1:]:
            theirs = f"another {theirs}".rstrip()
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


def encode(fields: Mapping[str, Value]) -> list[int]:
    """Encode the values of a header's fields as words; absent fields are None.

    Raises:
        KeyError: A header has no field of a name, so ranks would not compare its values.
    """
    words = {name: encode_field(name, value) for name, value in fields.items()}
    return [word for name, field in _FIELDS.items() for word in words.get(name, (_NONE,) * field.words)]


def encode_field(name: str, value: Value) -> tuple[int, ...]:
    """Encode the value of one field as words."""
    return _encode(value, _FIELDS[name])


def _encode(value: Value, field: _Field) -> tuple[int, ...]:
    if value is None:
        return (_NONE,) * field.words
    if isinstance(value, Digest):
        return value.words if field.words > 1 else (value.digest,)
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
    if field.kind is Digest:
        return words_text(words[1:])
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
    text = value if isinstance(value, str) else str(value.shown) if isinstance(value, Digest) else repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
