"""The numbers in a pattern's text, each with what it means there, and the Python that builds the pattern."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import ringweave
from ringweave.patterns.parse import names, split


@dataclass(frozen=True)
class Spot:
    """A number in the text of a pattern.

    Attributes:
        name: What it is there, such as ``SlidingWindow left`` or ``LongNet rates 2``.
        begin: Its first character.
        end: The character behind its last one.
        value: The number.
    """

    name: str
    begin: int
    end: int
    value: int | float


@dataclass
class _Open:
    """An open bracket: whose it is, if a call's, and which argument or member is read."""

    call: str | None
    sign: str
    index: int = 0
    word: str | None = None


def spots(text: str) -> list[Spot]:
    """Find the numbers in the text of a pattern that can be read.

    Example:
        >>> [spot.name for spot in spots("SlidingWindow(9, right=2) | LongNet([64, 256], [1, 4])")]
        ['SlidingWindow left', 'SlidingWindow right', 'LongNet segments 1', 'LongNet segments 2', 'LongNet rates 1', 'LongNet rates 2']
    """  # noqa: E501
    found: list[Spot] = []
    stack = [_Open(None, "")]
    tokens = list(split(text))
    call: str | None = None
    for (kind, token, place), (_, after, _) in itertools.pairwise(tokens):
        here = stack[-1]
        if kind == "name" and after == "(":
            call = token
        elif kind == "name" and after == "=":
            here.word = token
        elif token in ("(", "[") and kind == "sign":
            stack.append(_Open(call, token))
            call = None
        elif token in (")", "]") and kind == "sign":
            stack.pop()
        elif token == "," and kind == "sign":
            here.index, here.word = here.index + 1, None
        elif kind in ("int", "float"):
            value = int(token) if kind == "int" else float(token)
            found.append(Spot(_named(stack), place - len(token), place, value))
    return found


def _named(stack: list[_Open]) -> str:
    """Name the value that is read: by the innermost call around it, its parameter, and its place in a list."""
    place = ""
    for here in reversed(stack):
        if here.call is not None:
            parameters = list(inspect.signature(names()[here.call]).parameters)
            named = here.word or (parameters[here.index] if here.index < len(parameters) else "")
            return f"{here.call} {named}{place}".strip()
        if here.sign == "[":
            place = f" {here.index + 1}{place}"
    return "number"


def python(text: str) -> str:
    """Write the call of attention that takes the pattern of a text.

    Example:
        >>> python("SlidingWindow(9) & Causal()")
        'out = rw.attention(q, k, v, rw.SlidingWindow(9) & rw.Causal())'
    """
    return f"out = rw.attention(q, k, v, {''.join(_prefixed(text)).strip()})"


def _prefixed(text: str) -> Iterator[str]:
    done = 0
    tokens = list(split(text))
    for (kind, token, place), (_, after, _) in itertools.pairwise(tokens):
        begin = place - len(token)
        if kind == "name" and after == "(":
            yield " ".join(text[done:begin].split("\n"))
            yield f"rw.{token}" if token in ringweave.__all__ else f"rw.patterns.{token}"
            done = place
    yield " ".join(text[done:].split("\n"))
