"""The numbers in a pattern's text with the names of their parameters, and the Python that builds the pattern."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import ringweave
from ringweave.patterns.parse import names, split


@dataclass(frozen=True)
class Spot:
    """A number in the text of a pattern.

    Attributes:
        name: Name of the parameter, such as ``SlidingWindow left`` or ``LongNet rates 2``; unique in the text.
        begin: Index of its first character.
        end: Index after its last character.
        value: The number.
    """

    name: str
    begin: int
    end: int
    value: int | float


@dataclass
class _Open:
    """An open bracket.

    Attributes:
        call: Name of the call that the bracket belongs to; None for a list, a tuple or a plain bracket.
        listed: Whether the bracket is a list's or a tuple's.
        index: Number of the argument or member that is being read.
        word: Keyword of that argument, if it has one.
    """

    call: str | None
    listed: bool
    index: int = 0
    word: str | None = None


def spots(text: str) -> list[Spot]:
    """Return the numbers in the text of a valid pattern.

    Example:
        >>> [spot.name for spot in spots("SlidingWindow(9) | SlidingWindow(64)")]
        ['SlidingWindow #1 left', 'SlidingWindow #2 left']
        >>> [spot.name for spot in spots("SlidingWindow(9, right=2) | LongNet([64, 256], [1, 4])")]
        ['SlidingWindow left', 'SlidingWindow right', 'LongNet segments 1', 'LongNet segments 2', 'LongNet rates 1', 'LongNet rates 2']
    """  # noqa: E501
    found: list[Spot] = []
    stack = [_Open(None, False)]
    tokens = list(split(text))
    calls = [token for (kind, token, _), (_, after, _) in itertools.pairwise(tokens) if kind == "name" and after == "("]
    number, seen, tuples = Counter(calls), Counter[str](), _tuples(text)
    call: str | None = None
    for (kind, token, place), (_, after, _) in itertools.pairwise(tokens):
        here = stack[-1]
        if kind == "name" and after == "(":
            seen[token] += 1
            # a pattern that occurs several times is numbered
            call = token if number[token] == 1 else f"{token} #{seen[token]}"
        elif kind == "name" and after == "=":
            here.word = token
        elif token in ("(", "[") and kind == "sign":
            stack.append(_Open(call, call is None and (token == "[" or place in tuples)))
            call = None
        elif token in (")", "]") and kind == "sign":
            stack.pop()
        elif token == "," and kind == "sign":
            here.index, here.word = here.index + 1, None
        elif kind in ("int", "float"):
            value = int(token) if kind == "int" else float(token)
            found.append(Spot(_named(stack), place - len(token), place, value))
    return found


def _tuples(text: str) -> set[int]:
    """Return the places of the opening brackets that have a comma at their own level."""
    opened: list[int] = []
    found = set()
    for kind, token, place in split(text):
        if kind == "sign" and token in ("(", "["):
            opened.append(place)
        elif kind == "sign" and token in (")", "]"):
            opened.pop()
        elif kind == "sign" and token == ",":
            found.add(opened[-1])
    return found


def _named(stack: list[_Open]) -> str:
    """Name the value that is read: the innermost call around it, the parameter, and the place in a list."""
    place = ""
    for here in reversed(stack):
        if here.call is not None:
            parameters = list(inspect.signature(names()[here.call.partition(" ")[0]]).parameters)
            named = here.word or (parameters[here.index] if here.index < len(parameters) else "")
            return f"{here.call} {named}{place}".strip()
        if here.listed:
            place = f" {here.index + 1}{place}"
    return "number"


def python(text: str) -> str:
    """Return the call of ``attention`` with the pattern of a text.

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
