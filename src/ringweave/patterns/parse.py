"""Text to pattern: a safe reader of the expressions that ``spec`` writes: calls, names, numbers, lists and & | ~."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..cache import PATTERNS, fact
from ..errors import PatternError, message, shown
from .algebra import And, Or, join
from .base import Pattern
from .boxes import Grid
from .declared import DECLARED
from .function import for_one_call
from .key_padding import KeyPadding
from .shifted import Offsets, Shifted

# names of texts that an earlier release wrote
_OLD: dict[str, Callable[..., object]] = {"Keys": KeyPadding}
_LONGEST = 2**20  # characters of a text from outside
_OPEN = 256  # brackets in brackets
_SIGNS = 64  # of one value
_KEPT = 512  # characters of a text whose tokens are kept
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<float>(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
      | (?P<int>\d+(?:_\d+)*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<text>'[^'\\\n]*'|"[^"\\\n]*")
      | (?P<sign>[][(),=&|~-])
      | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_NEXT = re.compile(r"\s*(.?)")


def parse(text: str) -> Pattern:
    """Read a pattern from the Python expression that would build it, without evaluating any Python.

    Args:
        text: Such as ``"(SlidingWindow(1024) | Sinks(64)) & Causal()"``: pattern and preset names with numbers,
            strings, booleans, lists, and ``& | ~``.
    Returns:
        The pattern.
    Raises:
        PatternError: Anything else in the text, with the place.
    Example:
        >>> rw.patterns.parse("(SlidingWindow(2) | Sinks(1)) & Causal()")
        (SlidingWindow(2) | Sinks(1)) & Causal()
    """
    if not isinstance(text, str):
        raise PatternError(message("text", shown(text), "the text of a pattern", "Pass a str."))
    if len(text) > _LONGEST:
        raise PatternError(
            message("text", f"{len(text)} characters", f"at most {_LONGEST}", "Build the pattern in Python.")
        )
    return _Reader(text, names() | _OLD, iter(())).read()


def rebuild(spec: str, tables: Sequence[Tensor]) -> Pattern:
    """Build the pattern of a ``spec`` and its ``tables``, as written by this process."""

    # around the same tensors: plans are cached by their address
    return _Reader(spec, _held(), iter(tables)).read()


@fact
def names() -> dict[str, Callable[..., object]]:
    """Every name that a text may hold: patterns, and what they are made of besides."""
    return {"Grid": Grid} | {name: each.make for name, each in DECLARED.items() if each.text}


@fact
def _held() -> dict[str, Callable[..., object]]:
    """The names of a ``spec``, each with what makes its pattern around tensors that are already private."""
    own = {name: each.make.own for name, each in DECLARED.items() if hasattr(each.make, "own")}
    return names() | own | {"Offsets": Offsets, "Shifted": Shifted}


def of_call(pattern: Pattern) -> Pattern:
    """Give the pattern for one call: itself, unless a function in it reads what cannot be seen.

    What is planned for the call's pattern goes with it.
    """
    if torch.compiler.is_compiling():
        return pattern
    spec = pattern.spec
    if "TokenMask(" not in spec:
        return pattern
    spec, numbered = for_one_call(spec)
    return rebuild(spec, pattern.tables) if numbered else pattern


def split(text: str) -> Iterator[tuple[str, str, int]]:
    """Split text into kind, token and where it ends; the last is the end, or something that is no token."""
    place, kind = 0, ""
    while kind not in ("end", "other"):
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            kind, token = "other", text[place : place + 20].strip()
        else:
            place, kind, token = match.end(), match.lastgroup, match[match.lastgroup]
        yield kind, token, place


# about, of one token
_TOKEN_BYTES = 160


def _kept(text: str) -> tuple[tuple[str, str, int], ...]:
    # a pattern with tables is read at every call
    if torch.compiler.is_compiling():
        return tuple(split(text))
    tokens: tuple[tuple[str, str, int], ...] | None = PATTERNS.get(("tokens", text))
    if tokens is None:
        tokens = tuple(split(text))
        PATTERNS.put(("tokens", text), tokens, _TOKEN_BYTES * len(tokens))
    return tokens


class _Open:
    """An open bracket: the values that commas ended in it, and the one that is being read.

    ``a & b | c`` is kept as [[a, b], [c]].
    """

    def __init__(self, sign: str, name: str | None = None):
        self.sign, self.name = sign, name
        self.values: list[object] = []
        self.named: dict[str, object] = {}
        self.begin()

    def begin(self) -> None:
        self.word: str | None = None
        self.groups: list[list[object]] = [[]]
        self.signs = ""
        #: Whether an operand stands here, so that an operator, a comma or the end has to follow.
        self.full = False

    @property
    def empty(self) -> bool:
        return not (self.full or self.signs or self.word or self.groups != [[]])


class _Reader:
    """Reads tokens from left to right with a list of open brackets: no length and no depth of a text recurses."""

    def __init__(self, text: str, names: dict[str, Callable[..., object]], tables: Iterator[Tensor]):
        self.text, self.names, self.tables = text, names, tables
        self.tokens = iter(_kept(text) if len(text) <= _KEPT else split(text))
        self.place = 0
        self.open = [_Open("")]

    def read(self) -> Pattern:
        kind, token = self._next()
        while kind != "end":
            (self._after if self.open[-1].full else self._operand)(kind, token)
            kind, token = self._next()
        if len(self.open) > 1:
            raise self._error(f"a {self.open[-1].sign} that is not closed")
        result = self._value(self.open[0]) if self.open[0].full else None
        if not isinstance(result, Pattern):
            raise self._error("nothing" if result is None else f"a {type(result).__name__}")
        return result

    def _next(self) -> tuple[str, str]:
        kind, token, self.place = next(self.tokens)
        if kind == "other":
            raise self._error(shown(token))
        return kind, token

    def _operand(self, kind: str, token: str) -> None:
        """Take a token where a value has to begin."""
        here = self.open[-1]
        if token in ("~", "-"):
            here.signs += token
            if len(here.signs) > _SIGNS:
                raise self._error(f"more than {_SIGNS} signs in a row")
        elif token in ("(", "["):
            self._enter(_Open(token))
        elif token in (")", "]") and here.empty:
            self._leave(token)
        elif kind == "name":
            self._name(here, token)
        elif kind == "text":
            self._put(token[1:-1])
        elif kind in ("int", "float"):
            try:
                self._put(int(token) if kind == "int" else float(token))
            except ValueError:
                raise self._error(f"a number of {len(token)} digits") from None
        else:
            raise self._error(f"{token!r} where a value is due")

    def _name(self, here: _Open, token: str) -> None:
        match = _NEXT.match(self.text, self.place)
        after = match[1] if match is not None else ""
        if after == "(":
            if token not in self.names:
                raise self._error(f"the unknown name {shown(token)}")
            self._next()
            self._enter(_Open("(", token))
        elif after == "=" and here.name is not None and here.empty:
            if token in here.named:
                raise self._error(f"{shown(token)} twice")
            self._next()
            here.word = token
        elif token in ("True", "False"):
            self._put(token == "True")
        elif token == "_":
            table = next(self.tables, None)
            if table is None:
                raise self._error("a table where none is given")
            self._put(table)
        else:
            raise self._error(f"the name {shown(token)} without arguments")

    def _after(self, kind: str, token: str) -> None:
        """Take a token behind a value."""
        here = self.open[-1]
        if token in ("&", "|"):
            here.full = False
            if token == "|":
                here.groups.append([])
        elif token == "," and here.sign:
            self._end(here)
        elif token in (")", "]"):
            if here.name is None and here.sign == "(" and not here.values:
                # brackets around an expression
                self._matches(here, token)
                value = self._value(here)
                self.open.pop()
                self._put(value)
            else:
                self._end(here)
                self._leave(token)
        else:
            raise self._error(f"{shown(token)} behind a value")

    def _enter(self, bracket: _Open) -> None:
        self.open.append(bracket)
        if len(self.open) > _OPEN:
            raise self._error(f"more than {_OPEN} brackets in each other")

    def _end(self, here: _Open) -> None:
        """Take a comma, or the bracket's end: the value is an argument or a member."""
        value = self._value(here)
        if here.word is not None:
            here.named[here.word] = value
        elif here.named:
            raise self._error("a value without a name behind one with a name")
        else:
            here.values.append(value)
        here.begin()

    def _matches(self, here: _Open, token: str) -> None:
        if here.sign + token not in ("()", "[]"):
            raise self._error(f"{token!r} without its beginning")

    def _leave(self, token: str) -> None:
        here = self.open[-1]
        self._matches(here, token)
        self.open.pop()
        if here.name is None:
            self._put(here.values if token == "]" else tuple(here.values))
            return
        try:
            made = self.names[here.name](*here.values, **here.named)
        except TypeError as error:
            raise self._error(f"{here.name} with arguments that do not fit ({error})") from None
        self._put(made)

    def _put(self, value: object) -> None:
        """Let a value stand; the signs before it apply."""
        here = self.open[-1]
        for sign in reversed(here.signs):
            if sign == "~":
                value = ~self._pattern(value)
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self._error(f"- on a {type(value).__name__}")
            else:
                value = -value
        here.signs, here.full = "", True
        here.groups[-1].append(value)

    def _value(self, here: _Open) -> object:
        if len(here.groups) == 1 == len(here.groups[0]):
            return here.groups[0][0]
        groups = [[self._pattern(value) for value in group] for group in here.groups]
        parts = [join(And, *group) if len(group) > 1 else group[0] for group in groups]
        return join(Or, *parts) if len(parts) > 1 else parts[0]

    def _pattern(self, value: object) -> Pattern:
        if not isinstance(value, Pattern):
            raise self._error(f"& | ~ on a {type(value).__name__}")
        return value

    def _error(self, got: str) -> PatternError:
        return PatternError(
            message(
                f"pattern {shown(self.text)}",
                f"{got}, before character {self.place}",
                "pattern names with numbers, lists, & | ~",
                f"Known names: {', '.join(sorted(self.names.keys() - _OLD))}.",
            )
        )
