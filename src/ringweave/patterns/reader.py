"""Read the expressions in ``spec`` from the tree that Python's parser makes of them; nothing is evaluated."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ..cache import process_cache
from ..errors import PatternError, shown
from ..names import nearest
from .algebra import And, Or, join
from .base import Pattern
from .boxes import Grid
from .declared import DECLARED
from .shifted import Offsets, Shifted
from .view import View
from .zone_table import ZoneTable

_LONGEST = 2**20  # most characters of a user's text
_SIGNS = 64  # most signs before one value
# characters of no pattern; Python would read a comment or an escape, and warn of some
_STRANGE = re.compile(r"[^\x20-\x7e\s]|[#\\]", re.ASCII)
_LINE = "\n"
_BLANK = re.compile(r"\s")
_WORD = re.compile(r"\w+|.?")
# the ends of brackets around a value
_CLOSED = re.compile(r"[\s)]*")
_CLOSING = {"(": ")", "[": "]"}
_OPERATORS: dict[type[ast.operator], type[And] | type[Or]] = {ast.BitAnd: And, ast.BitOr: Or}
# Python's words that users write in place of & | ~
_WORDS = ("and", "or", "not")
# names that exist in Python only, by the argument that has no text
_IN_PYTHON = {"from_mask_mod": "a function", "from_block_mask": "a BlockMask", "lambda": "a function"}
_TAKES = {"TokenMask": "a function", "BlockTable": "a tensor", "Selected": "a tensor"}
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
    return _Reader(text, names(), iter(())).read()


def rebuild(spec: str, tables: Sequence[Tensor]) -> Pattern:
    """Build the pattern from a ``spec`` of this process and its ``tables``."""

    # tensors are not copied, since plans are cached by their address
    return _Reader(spec, _held(), iter(tables)).read()


@process_cache
def names() -> dict[str, Callable[..., object]]:
    """Return every name that a text may contain, with its class or function: patterns, presets and Grid."""
    return {"Grid": Grid} | {name: each.make for name, each in DECLARED.items() if each.text}


@process_cache
def _held() -> dict[str, Callable[..., object]]:
    """Return the names of a ``spec``, with constructors that do not copy their tensors."""
    own = {name: each.make.own for name, each in DECLARED.items() if hasattr(each.make, "own")}
    return names() | own | {"Offsets": Offsets, "Shifted": Shifted, "View": View, "ZoneTable": ZoneTable}


def tree(text: str) -> ast.expr:
    """Parse a text to Python's syntax tree, in which a node's column is its place in the text.

    Raises:
        PatternError: The text is no expression of Python.
    """
    return _Reader(text, names(), iter(())).tree()


class _Reader:
    """A reader of one text; it consumes ``tables`` in the order of their underscores."""

    def __init__(self, text: str, names: dict[str, Callable[..., object]], tables: Iterator[Tensor]):
        self.text, self.names, self.tables = text, names, tables

    def read(self) -> Pattern:
        try:
            result = self._value(self.tree())
        except RecursionError:
            raise self._too_deep() from None
        if not isinstance(result, Pattern):
            raise self._error(shown(result), 0, "a pattern", "Write a pattern such as Causal() or SlidingWindow(1024).")
        return result

    def tree(self) -> ast.expr:
        """Parse the text; the columns of nodes are places in it."""
        strange = _STRANGE.search(self.text)
        if strange is not None:
            raise self._strange(strange.start())
        # on one line, since a line's end would end an expression, and without blanks that would indent it
        line = _BLANK.sub(" ", self.text).rstrip()
        blanks = len(line) - len(line.lstrip())
        try:
            tree = ast.parse(line[blanks:], mode="eval").body
        except SyntaxError as error:
            raise self._syntax(error, blanks) from None
        except MemoryError:
            # of Python's parser, for nested operators
            raise self._too_deep() from None
        for node in ast.walk(tree) if blanks else ():
            if isinstance(node, (ast.expr, ast.keyword)):
                node.col_offset += blanks
                node.end_col_offset = (node.end_col_offset or 0) + blanks
        return tree

    # ---- values ------------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> object:
        if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float, str):
            return node.value
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._combined(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.USub)):
            return self._signed(node)
        if isinstance(node, ast.List):
            return [self._value(each) for each in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple([self._value(each) for each in node.elts])
        if isinstance(node, ast.Name) and node.id == "_":
            table = next(self.tables, None)
            if table is None:
                remedy = "A text holds no tensors: build this pattern in Python."
                raise self._error("'_', which stands for a tensor", node.col_offset, "a value", remedy)
            return table
        if isinstance(node, ast.Attribute):
            self._owner(node)
        raise self._refused(node)

    def _owner(self, node: ast.Attribute) -> object:
        """Return the value before a dot; mistakes in it are reported first."""
        if isinstance(node.value, ast.Name):
            raise self._refused(node)
        return self._value(node.value)

    def _combined(self, node: ast.BinOp) -> Pattern:
        # a loop, since a long chain of operators is as deep as it is long
        operator, parts, left = type(node.op), [], node
        while isinstance(left, ast.BinOp) and type(left.op) is operator:
            parts.append(left.right)
            left = left.left  # type: ignore[assignment]
        operands = [self._pattern(self._value(each), each.col_offset) for each in (left, *reversed(parts))]
        return join(_OPERATORS[operator], *operands)

    def _signed(self, node: ast.UnaryOp) -> object:
        signs: list[ast.unaryop] = []
        inner: ast.expr = node
        while isinstance(inner, ast.UnaryOp) and isinstance(inner.op, (ast.Invert, ast.USub)):
            signs.append(inner.op)
            if len(signs) > _SIGNS:
                raise self._error(f"more than {_SIGNS} signs in a row", inner.col_offset, remedy="Remove signs.")
            inner = inner.operand
        value = self._value(inner)
        for sign in reversed(signs):
            if isinstance(sign, ast.Invert):
                value = ~self._pattern(value, inner.col_offset)
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self._error(f"- before {shown(value)}", inner.col_offset, "- before a number", "Remove the sign.")
            else:
                value = -value
        return value

    def _call(self, node: ast.Call) -> object:
        function = node.func
        if isinstance(function, ast.Name):
            name, at = function.id, function.col_offset
            make = self.names.get(name)
            if make is None:
                raise self._unknown(name, at)
        elif isinstance(function, ast.Attribute):
            name, at = function.attr, _end(function) - len(function.attr)
            owner = self._owner(function)
            if name not in _METHODS:
                raise self._refused(function)
            make = getattr(self._pattern(owner, at, f".{name}"), name)
        else:
            raise self._misplaced(self._after(function))
        values = [self._value(each) for each in node.args]
        named: dict[str, object] = {}
        for each in node.keywords:
            if each.arg is None:
                raise self._misplaced(each.col_offset)
            if each.arg in named:
                raise self._error(f"{shown(each.arg)} twice", each.col_offset, remedy="Pass it once.")
            named[each.arg] = self._value(each.value)
        try:
            return make(*values, **named)
        except TypeError as error:
            raise self._misfit(name, at, make, values, named, error) from None

    def _pattern(self, value: object, at: int, operator: str = "& | ~") -> Pattern:
        if not isinstance(value, Pattern):
            got = f"{operator} on {shown(value)}"
            raise self._error(got, at, f"patterns under {operator}", "Write a pattern such as Causal().")
        return value

    # ---- errors ------------------------------------------------------------------------------------------------------

    def _error(
        self,
        got: str,
        at: int,
        wanted: str = "patterns with numbers and lists, and & | ~",
        remedy: str = "Write a pattern such as (SlidingWindow(1024) | Sinks(64)) & Causal().",
    ) -> PatternError:
        place = f"{got}, at column {self._column(at)}"
        return PatternError(f"pattern {shown(self.text)}", place, wanted, remedy)

    def _column(self, at: int) -> str:
        """Return the column of a character, counted from 1, and its line if the text has several."""
        column = at - self.text.rfind(_LINE, 0, at)
        return f"{column} of line {self.text.count(_LINE, 0, at) + 1}" if _LINE in self.text else str(column)

    def _too_deep(self) -> PatternError:
        got = "values or operators that are nested too deeply"
        return self._error(got, 0, "fewer levels", "Write a long chain of operators in brackets of 256 operands.")

    def _syntax(self, error: SyntaxError, blanks: int) -> PatternError:
        """Return the error of a text that is no expression of Python."""
        said, offset = error.msg, error.offset or 0
        # Python reports 0 at the end of the text
        end = len(self.text.rstrip())
        at = min(blanks + offset - 1, end) if offset else end
        sign = self.text[at : at + 1].strip()
        if "was never closed" in said:
            name = re.search(r"\w*$", self.text[:at])[0]  # type: ignore[index]
            wanted = repr(_CLOSING.get(sign, "}"))
            return self._error(f"{name}{sign} without {wanted}", at - len(name), wanted, f"Add a {wanted}.")
        if said.startswith("unmatched"):
            return self._error(f"{sign!r} that closes no bracket", at, "an open bracket before it", "Remove it.")
        if said.startswith("closing parenthesis"):
            opening = self._opening(at)
            wanted = repr(_CLOSING.get(self.text[opening], "}"))
            got = f"{sign!r} for the {self.text[opening]!r} of column {self._column(opening)}"
            return self._error(got, at, wanted, f"Write {wanted}.")
        if said.startswith("too many nested"):
            return self._error("too many nested brackets", at, remedy="Remove brackets.")
        if said.startswith("positional argument"):
            got = "an argument without a name after one with a name"
            return self._error(got, at, "arguments with names last", "Give its name, or write it first.")
        if said.startswith("Exceeds the limit"):
            longest = max(re.finditer(r"\d+", self.text), key=lambda found: len(found[0]))
            got = f"a number of {len(longest[0])} digits"
            return self._error(got, longest.start(), remedy="Write fewer digits.")
        if "forgot a comma" in said:
            both = self.text[at : blanks + (error.end_offset or 0) - 1]
            got = f"{shown(both)}, two values in a row"
            return self._error(got, at, "a comma, & or | between them", "Write one, or remove a value.")
        if not sign:
            got = "the end after an operator" if end else "no pattern"
            return self._error(got, at, "a pattern", "Write a pattern there, such as Causal().")
        return self._misplaced(at)

    def _opening(self, at: int) -> int:
        """Return the place of the last bracket that is open before a character."""
        closed = 0
        for place in range(at - 1, -1, -1):
            closed += (self.text[place] in ")]}") - (self.text[place] in "([{")
            if closed < 0:
                return place
        return 0

    def _after(self, node: ast.expr) -> int:
        """Return the place of the sign after a value and the brackets around it."""
        return _end(node) + len(_CLOSED.match(self.text, _end(node))[0])  # type: ignore[index]

    def _refused(self, node: ast.expr) -> PatternError:
        """Return the error of a node that no pattern contains."""
        if isinstance(node, ast.Constant) and node.value is None:
            return self._unknown("None", node.col_offset)
        if isinstance(node, ast.Name):
            return self._unknown(node.id, node.col_offset)
        if isinstance(node, ast.Attribute):
            module = node.value
            while isinstance(module, ast.Attribute):
                module = module.value
            if isinstance(module, ast.Name):
                got = f"{shown(module.id)} and a dot"
                return self._error(got, module.col_offset, "names without a module", _NO_MODULE)
            wanted = " or ".join(f".{each}(...)" for each in _METHODS)
            got = f"{shown('.' + node.attr)} after a value"
            return self._error(got, _end(node) - len(node.attr), wanted, "Call other methods in Python.")
        if isinstance(node, (ast.BinOp, ast.Compare)):
            return self._misplaced(self._after(node.left))
        if isinstance(node, (ast.BoolOp, ast.IfExp)):
            return self._misplaced(self._after(node.values[0] if isinstance(node, ast.BoolOp) else node.body))
        return self._misplaced(node.col_offset)

    def _misplaced(self, at: int) -> PatternError:
        """Return the error of a word or sign that cannot stand at its place."""
        word = _WORD.match(self.text, at)[0]  # type: ignore[index]
        if word in _WORDS or word == "lambda":
            return self._unknown(word, at)
        # a value begins after these signs, and at the beginning
        begins = self.text[:at].rstrip()[-1:] in "([,=&|~-."
        if begins and word in (",", ")", "]", "=", "&", "|", "."):
            remedy = f"Write a value before {word!r}, or remove it."
            return self._error(f"{word!r} where a value begins", at, "a pattern or another value", remedy)
        if not begins and (word.isalnum() or word in "([~'\"="):
            remedy = f"Write & or | before {shown(word)}, or remove it."
            return self._error(f"{shown(word)} after a value", at, "an operator, or the end", remedy)
        return self._strange(at)

    def _strange(self, at: int) -> PatternError:
        signs = shown(self.text[at : at + 20].strip())
        return self._error(signs, at, remedy="Combine patterns with & | ~, and remove other signs.")

    def _unknown(self, name: str, at: int) -> PatternError:
        """Return the error of a name that is no value."""
        if name in _WORDS:
            return self._error(f"the word {name!r}", at, "& | ~", "Write & for `and`, | for `or`, ~ for `not`.")
        if name == "None":
            return self._error(name, at, "a value", "Leave the argument out.")
        if name in self.names:
            example = DECLARED[name].example if name in DECLARED else "Grid((32, 32))"
            remedy = f"Write {example}{'' if example.endswith('()') else ', for example'}."
            return self._error(f"{name} without arguments", at, f"{name}(...)", remedy)
        known = DECLARED.get(name)
        takes = _IN_PYTHON.get(name) or (_TAKES.get(name, "a tensor") if known is not None else None)
        if takes is not None:
            remedy = f"It takes {takes}, and exists in Python only: build this pattern there."
            return self._error(name, at, "a pattern that has a text", remedy)
        near = nearest(name, self.names)
        remedy = "dir(ringweave.patterns) lists the patterns." if near is None else f"Did you mean {near}?"
        return self._error(f"the unknown name {shown(name)}", at, "the name of a pattern or preset", remedy)

    def _misfit(
        self,
        name: str,
        at: int,
        make: Callable[..., object],
        values: list[object],
        named: dict[str, object],
        error: TypeError,
    ) -> PatternError:
        """Return the error of arguments that do not fit a signature."""
        signature = inspect.signature(make)
        try:
            signature.bind(*values, **named)
        except TypeError as misfit:
            error = misfit
        plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        text = str(error).removeprefix("got ").replace("missing a required argument:", "no argument", 1)
        return self._error(f"{name} with {text}", at, f"{name}{inspect.Signature(plain)}", "Correct its arguments.")


def _end(node: ast.expr) -> int:
    return node.end_col_offset or 0
