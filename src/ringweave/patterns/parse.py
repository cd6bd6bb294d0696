"""A parser of the expressions in ``spec``: calls, ``.within``, names, numbers, lists, & | ~; it evaluates no Python."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..cache import PATTERNS, fact
from ..errors import PatternError, shown
from ..names import nearest
from .algebra import And, Or, join
from .base import Pattern
from .boxes import Grid
from .declared import DECLARED
from .function import for_one_call
from .key_padding import KeyPadding
from .shifted import Offsets, Shifted

# names in texts that an earlier release wrote
_OLD: dict[str, Callable[..., object]] = {"Keys": KeyPadding}
_LONGEST = 2**20  # most characters of a user's text
_OPEN = 256  # most nested brackets
_SIGNS = 64  # most signs before one value
_KEPT = 512  # most characters of a text that has its tokens cached
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<float>(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
      | (?P<int>\d+(?:_\d+)*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<text>'[^'\\\n]*'|"[^"\\\n]*")
      | (?P<sign>[][(),=&|~.-])
      | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_NEXT = re.compile(r"\s*(.?)")
_CLOSING = {"(": ")", "[": "]"}
# Python's words that users write in place of & | ~
_WORDS = ("and", "or", "not")
# names that exist in Python only, by the argument that has no text
_IN_PYTHON = {"from_mask_mod": "a function", "from_block_mask": "a BlockMask", "lambda": "a function"}
_TAKES = {"TokenMask": "a function", "BlockTable": "a tensor"}
_NO_MODULE = "Write Causal() in place of rw.Causal()."
# the methods that a text may call
_METHODS = ("within",)


def parse(text: str) -> Pattern:
    """Read a pattern from the Python expression that would build it, without evaluating any Python.

    Args:
        text: An expression such as ``"(SlidingWindow(1024) | Sinks(64)) & Causal()"``: names of patterns and presets
            with numbers, strings, booleans, lists, ``& | ~``, and ``pattern.within(bounds)``.
    Returns:
        The pattern.
    Raises:
        PatternError: The text contains anything else; the message names the column.
    Example:
        >>> rw.patterns.parse("(SlidingWindow(2) | Sinks(1)) & Causal()")
        (SlidingWindow(2) | Sinks(1)) & Causal()
    """
    if not isinstance(text, str):
        raise PatternError("text", shown(text), "the text of a pattern", "Pass a str.")
    if len(text) > _LONGEST:
        raise PatternError("text", f"{len(text)} characters", f"at most {_LONGEST}", "Build the pattern in Python.")
    return _Reader(text, names() | _OLD, iter(())).read()


def rebuild(spec: str, tables: Sequence[Tensor]) -> Pattern:
    """Build the pattern from a ``spec`` of this process and its ``tables``."""

    # tensors are not copied, since plans are cached by their address
    return _Reader(spec, _held(), iter(tables)).read()


@fact
def names() -> dict[str, Callable[..., object]]:
    """Return every name that a text may contain, with its class or function: patterns, presets and Grid."""
    return {"Grid": Grid} | {name: each.make for name, each in DECLARED.items() if each.text}


@fact
def _held() -> dict[str, Callable[..., object]]:
    """Return the names of a ``spec``, with constructors that do not copy their tensors."""
    own = {name: each.make.own for name, each in DECLARED.items() if hasattr(each.make, "own")}
    return names() | own | {"Offsets": Offsets, "Shifted": Shifted}


def of_call(pattern: Pattern) -> Pattern:
    """Return the pattern for one call: ``self``, unless a function in it reads untracked values.

    Plans of the call's pattern are dropped with it.
    """
    if torch.compiler.is_compiling():
        return pattern
    spec = pattern.spec
    if "TokenMask(" not in spec:
        return pattern
    spec, numbered = for_one_call(spec)
    return rebuild(spec, pattern.tables) if numbered else pattern


def split(text: str) -> Iterator[tuple[str, str, int]]:
    """Split text into (kind, token, end); the last kind is "end", or "other" at text that is no token."""
    place, kind = 0, ""
    while kind not in ("end", "other"):
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            kind, token = "other", text[place : place + 20].strip()
        else:
            place, kind, token = match.end(), match.lastgroup, match[match.lastgroup]
        yield kind, token, place


# approximate bytes of one token
_TOKEN_BYTES = 160


def _kept(text: str) -> tuple[tuple[str, str, int], ...]:
    # cached, since a pattern with tables is rebuilt at every call
    if torch.compiler.is_compiling():
        return tuple(split(text))
    tokens: tuple[tuple[str, str, int], ...] | None = PATTERNS.get(("tokens", text))
    if tokens is None:
        tokens = tuple(split(text))
        PATTERNS.put(("tokens", text), tokens, _TOKEN_BYTES * len(tokens))
    return tokens


def _said(error: TypeError) -> str:
    """Write Python's error about arguments as the end of a sentence."""
    text = str(error)
    if text.startswith("got "):
        return text[4:]
    return text.replace("missing a required argument:", "no argument", 1)


class _Open:
    """An open bracket: the function that it calls, its values before the last comma, and the value that is being read.

    ``a & b | c`` is stored as [[a, b], [c]].
    """

    def __init__(self, sign: str, at: int = 0, name: str | None = None, make: Callable[..., object] | None = None):
        self.sign, self.at, self.name, self.make = sign, at, name, make
        self.values: list[object] = []
        self.named: dict[str, object] = {}
        self.begin()

    def begin(self) -> None:
        self.word: str | None = None
        self.groups: list[list[object]] = [[]]
        self.signs = ""
        #: Whether an operand was read, so that an operator, a comma or the end must follow.
        self.full = False

    @property
    def empty(self) -> bool:
        return not (self.full or self.signs or self.word or self.groups != [[]])


class _Reader:
    """A reader of tokens from left to right, with a list of open brackets in place of recursion."""

    def __init__(self, text: str, names: dict[str, Callable[..., object]], tables: Iterator[Tensor]):
        self.text, self.names, self.tables = text, names, tables
        self.tokens = iter(_kept(text) if len(text) <= _KEPT else split(text))
        self.place = self.begin = 0
        self.open = [_Open("")]

    def read(self) -> Pattern:
        kind, token = self._next()
        while kind != "end":
            (self._after if self.open[-1].full else self._operand)(kind, token)
            kind, token = self._next()
        if len(self.open) > 1:
            here = self.open[-1]
            self.begin = here.at
            closing = _CLOSING[here.sign]
            raise self._error(f"{here.name or ''}{here.sign} without {closing!r}", repr(closing), f"Add a {closing!r}.")
        here = self.open[0]
        if not here.full:
            got = "no pattern" if here.empty else "the end after an operator"
            raise self._error(got, "a pattern", "Write a pattern there, such as Causal().")
        result = self._value(here)
        if not isinstance(result, Pattern):
            self.begin = 0
            raise self._error(shown(result), "a pattern", "Write a pattern such as Causal() or SlidingWindow(1024).")
        return result

    def _next(self) -> tuple[str, str]:
        kind, token, self.place = next(self.tokens)
        self.begin = self.place - len(token)
        if kind == "other":
            self.begin = len(self.text) - len(self.text[self.place :].lstrip())
            raise self._error(shown(token), remedy="Combine patterns with & | ~, and remove other signs.")
        return kind, token

    def _following(self) -> str:
        """Return the first character of the next token; empty at the end."""
        match = _NEXT.match(self.text, self.place)
        return match[1] if match is not None else ""

    def _operand(self, kind: str, token: str) -> None:
        """Read a token at the beginning of a value."""
        here = self.open[-1]
        if token in ("~", "-"):
            here.signs += token
            if len(here.signs) > _SIGNS:
                raise self._error(f"more than {_SIGNS} signs in a row", remedy="Remove signs.")
        elif token in ("(", "["):
            self._enter(_Open(token, self.begin))
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
                raise self._error(f"a number of {len(token)} digits", remedy="Write fewer digits.") from None
        else:
            got = f"{token!r} where a value begins"
            raise self._error(got, "a pattern or another value", f"Write a value before {token!r}, or remove it.")

    def _name(self, here: _Open, token: str) -> None:
        after = self._following()
        if after == "(" and token in self.names:
            begin = self.begin
            self._next()
            self._enter(_Open("(", begin, token, self.names[token]))
        elif after == "=" and here.name is not None and here.empty:
            if token in here.named:
                raise self._error(f"{shown(token)} twice", remedy="Pass it once.")
            self._next()
            here.word = token
        elif token in ("True", "False"):
            self._put(token == "True")
        elif token == "_":
            table = next(self.tables, None)
            if table is None:
                remedy = "A text holds no tensors: build this pattern in Python."
                raise self._error("'_', which stands for a tensor", "a value", remedy)
            self._put(table)
        else:
            raise self._unknown(token, after)

    def _unknown(self, name: str, after: str = "") -> PatternError:
        """Return the error of a name that is no value; ``after`` is the sign that follows it."""
        if after == ".":
            return self._error(f"{shown(name)} and a dot", "names without a module", _NO_MODULE)
        if name in _WORDS:
            return self._error(f"the word {name!r}", "& | ~", "Write & for `and`, | for `or`, ~ for `not`.")
        if name == "None":
            return self._error(name, "a value", "Leave the argument out.")
        if name in self.names:
            example = DECLARED[name].example if name in DECLARED else "Grid((32, 32))"
            remedy = f"Write {example}{'' if example.endswith('()') else ', for example'}."
            return self._error(f"{name} without arguments", f"{name}(...)", remedy)
        known = DECLARED.get(name)
        takes = _IN_PYTHON.get(name) or (_TAKES.get(name, "a tensor") if known is not None else None)
        if takes is not None:
            remedy = f"It takes {takes}, and exists in Python only: build this pattern there."
            return self._error(name, "a pattern that has a text", remedy)
        near = nearest(name, [each for each in self.names if each not in _OLD])
        remedy = "dir(ringweave.patterns) lists the patterns." if near is None else f"Did you mean {near}?"
        return self._error(f"the unknown name {shown(name)}", "the name of a pattern or preset", remedy)

    def _after(self, kind: str, token: str) -> None:
        """Read a token after a value."""
        here = self.open[-1]
        if token in ("&", "|"):
            here.full = False
            if token == "|":
                here.groups.append([])
        elif token == ".":
            self._method(here)
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
        elif token in _WORDS:
            raise self._unknown(token)
        else:
            remedy = f"Write & or | before {shown(token)}, or remove it."
            raise self._error(f"{shown(token)} after a value", "an operator, or the end", remedy)

    def _method(self, here: _Open) -> None:
        """Read the call of a method up to its bracket; its result takes the place of the value before the dot."""
        kind, name = self._next()
        value = here.groups[-1].pop()
        if kind != "name" or name not in _METHODS or self._following() != "(":
            wanted = " or ".join(f".{each}(...)" for each in _METHODS)
            raise self._error(f"{shown('.' + name)} after a value", wanted, "Call other methods in Python.")
        make = getattr(self._pattern(value, f".{name}"), name)
        begin = self.begin
        self._next()
        here.full = False
        self._enter(_Open("(", begin, name, make))

    def _enter(self, bracket: _Open) -> None:
        self.open.append(bracket)
        if len(self.open) > _OPEN:
            raise self._error(f"more than {_OPEN} nested brackets", remedy="Remove brackets.")

    def _end(self, here: _Open) -> None:
        """Store the value that a comma or a closing bracket ends, as an argument or a member."""
        value = self._value(here)
        if here.word is not None:
            here.named[here.word] = value
        elif here.named:
            got = "an argument without a name after one with a name"
            raise self._error(got, "arguments with names last", "Give its name, or write it first.")
        else:
            here.values.append(value)
        here.begin()

    def _matches(self, here: _Open, token: str) -> None:
        if here.sign + token not in ("()", "[]"):
            if not here.sign:
                raise self._error(f"{token!r} that closes no bracket", "an open bracket before it", "Remove it.")
            wanted = _CLOSING[here.sign]
            got = f"{token!r} for the {here.sign!r} of column {self._column(here.at)}"
            raise self._error(got, repr(wanted), f"Write {wanted!r}.")

    def _leave(self, token: str) -> None:
        here = self.open[-1]
        self._matches(here, token)
        self.open.pop()
        if here.make is None:
            self._put(here.values if token == "]" else tuple(here.values))
            return
        try:
            made = here.make(*here.values, **here.named)
        except TypeError as error:
            self.begin = here.at
            raise self._misfit(here, here.make, error) from None
        self._put(made)

    def _misfit(self, here: _Open, make: Callable[..., object], error: TypeError) -> PatternError:
        """Return the error of arguments that do not fit a signature."""
        signature = inspect.signature(make)
        try:
            signature.bind(*here.values, **here.named)
        except TypeError as misfit:
            error = misfit
        plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        right = f"{here.name}{inspect.Signature(plain)}"
        return self._error(f"{here.name} with {_said(error)}", right, "Correct its arguments.")

    def _put(self, value: object) -> None:
        """Store a value after applying the signs before it."""
        here = self.open[-1]
        if self._following() == ".":
            # a method binds tighter than the signs, which apply to its result
            here.full = True
            here.groups[-1].append(value)
            return
        for sign in reversed(here.signs):
            if sign == "~":
                value = ~self._pattern(value)
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self._error(f"- before {shown(value)}", "- before a number", "Remove the sign.")
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

    def _pattern(self, value: object, operator: str = "& | ~") -> Pattern:
        if not isinstance(value, Pattern):
            got = f"{operator} on {shown(value)}"
            raise self._error(got, f"patterns under {operator}", "Write a pattern such as Causal().")
        return value

    def _column(self, at: int) -> str:
        """Return the column of a character, counted from 1, and its line if the text has several."""
        line = self.text.count("\n", 0, at)
        column = at - self.text.rfind("\n", 0, at)
        return f"{column} of line {line + 1}" if "\n" in self.text else str(column)

    def _error(
        self,
        got: str,
        wanted: str = "patterns with numbers and lists, and & | ~",
        remedy: str = "Write a pattern such as (SlidingWindow(1024) | Sinks(64)) & Causal().",
    ) -> PatternError:
        name = f"pattern {shown(self.text)}"
        return PatternError(name, f"{got}, at column {self._column(self.begin)}", wanted, remedy)
