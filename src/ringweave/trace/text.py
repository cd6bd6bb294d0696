"""Write a graph as text, and compute a text again.

A text is a formula in the notation of Python, such as ``(t0[q] == t0[k]) & (q >= k)``, in which ``t0`` is the first
captured tensor. A value that is used several times has a name: ``x0 = t0[q] - 1; (x0 >= 0) & (t1[x0] <= k)``.
Operations are in the order of the graph, so a trace of the text is the same graph, with the same key. A text is read
from the tree of Python's parser. Nothing is evaluated in it but operations on tensors.
"""

from __future__ import annotations

import ast
import copy
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import PatternError, shown
from .graph import ARGUMENTS, Graph, Node, nodes_in
from .operations import ELEMENTWISE, OPERATORS, SPACES, spelled

_UNARY = {"neg": ast.USub, "pos": ast.UAdd, "invert": ast.Invert}
_BINARY = {
    "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "floordiv": ast.FloorDiv, "mod": ast.Mod,
    "pow": ast.Pow, "and": ast.BitAnd, "or": ast.BitOr, "xor": ast.BitXor, "lshift": ast.LShift, "rshift": ast.RShift,
    "matmul": ast.MatMult,
}  # fmt: skip
_COMPARED = {"lt": ast.Lt, "le": ast.LtE, "gt": ast.Gt, "ge": ast.GtE, "eq": ast.Eq, "ne": ast.NotEq}
_OF_SIGN: dict[type[ast.AST], Callable[..., Any]] = {
    sign: OPERATORS[name][0] for signs in (_UNARY, _BINARY, _COMPARED) for name, sign in signs.items()
}
_NUMBERS = {"one": "new_ones", "zero": "new_zeros"}
_NAMED = {"inf": float("inf"), "nan": float("nan")}
# constants that torch names
_OF_TORCH = torch.dtype, torch.layout, torch.memory_format
_MADE: dict[str, Callable[..., Any]] = {"device": torch.device, "Size": torch.Size}
# most characters of a value that is written again at each use, and most levels of an expression
_SHORT, _DEPTH = 12, 24


# ---- writing ---------------------------------------------------------------------------------------------------------


def text_of(graph: Graph) -> str | None:
    """Return the text of a graph; None if it has an operation or a constant that no text names."""
    try:
        return _Writer(graph).text()
    except LookupError:
        return None


class _Writer:
    """Writes each value into the expression that uses it, or gives it a name if the order of operations would change.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        #: What the expression of each operation is made of: its arguments; for a look-up the table and the indices.
        self.parts: dict[Node, tuple[Any, Any]] = {}
        looked_up: dict[Any, Node] = {}
        for node in graph.nodes:
            self.parts[node] = _continued(node, looked_up) if node.name == "index" else (node.args, node.kwargs)
        self.uses = Counter(nodes_in([graph.result, *self.parts.values()]))
        self.in_parts = {node.args[0] for node in graph.nodes if node.name == "part"}
        self.said: dict[Node, ast.expr] = {}
        self.depth: dict[Node, int] = {}
        #: Values that no line has yet, in the order of their computation.
        self.pending: list[Node] = []
        self.lines: list[str] = []

    def text(self) -> str:
        """Return the text."""
        tensors = itertools.count()
        for node in self.graph.nodes:
            if node.name == "argument":
                self.said[node] = ast.Name(node.args[0])
            elif node.name == "tensor":
                self.said[node] = ast.Name(f"t{next(tensors)}")
            elif node.name == "part":
                of, place = node.args
                self.said[node] = ast.Subscript(self.said[of], ast.Constant(place))
            else:
                self._add(node)
        self._take(nodes_in(self.graph.result))
        return "; ".join([*self.lines, ast.unparse(self._expression(self.graph.result))])

    def _add(self, node: Node) -> None:
        inner = self._take(nodes_in(self.parts[node]))
        said = self.said[node] = self._operation(node)
        self.depth[node] = 1 + max([self.depth[each] for each in inner], default=0)
        self.pending.append(node)
        uses = self.uses[node]
        # a short expression is written again at each use: it is the same node
        repeats = uses > 1 and node.deps and not inner and len(ast.unparse(said)) <= _SHORT
        if (uses != 1 and not repeats) or node in self.in_parts or self.depth[node] >= _DEPTH:
            self._give_names(len(self.pending))

    def _take(self, operands: Iterable[Node]) -> list[Node]:
        """Take the pending values that an operation uses, and return those which its expression contains."""
        order = {node: place for place, node in enumerate(dict.fromkeys(operands))}
        # the expression computes its parts from left to right, after every other pending value
        count, before = 0, len(order)
        while count < len(self.pending) and order.get(self.pending[-1 - count], before) < before:
            count += 1
            before = order[self.pending[-count]]
        others = len(self.pending) - count
        inner = self.pending[others:]
        del self.pending[others:]
        self._give_names(max([place + 1 for place, node in enumerate(self.pending) if node in order], default=0))
        return inner

    def _give_names(self, count: int) -> None:
        """Give names to the first pending values."""
        for node in self.pending[:count]:
            name = f"x{len(self.lines)}"
            self.lines.append(f"{name} = {ast.unparse(self.said[node])}")
            self.said[node], self.depth[node] = ast.Name(name), 0
        del self.pending[:count]

    def _operation(self, node: Node) -> ast.expr:
        name = node.name
        if name == "index":
            table, at = self.parts[node]
            return ast.Subscript(self._expression(table), self._expression(at[0] if len(at) == 1 else at))
        if name in _NUMBERS:
            return ast.Call(ast.Name(name), [self._expression(node.kwargs["dtype"])], [])
        given = [self._expression(x) for x in node.args]
        if name == "call" or node.kwargs:
            named = [ast.keyword(key, self._expression(x)) for key, x in node.kwargs.items()]
            space, name = spelled(node.function)
            if name == "__getitem__":
                return ast.Subscript(given[0], given[1])
            if space == "Tensor":
                # a symbol is no tensor, but has its methods
                return ast.Call(ast.Attribute(given[0], name), given[1:], named)
            return ast.Call(ast.Attribute(ast.Name(space), name), given, named)
        if name in _UNARY:
            return ast.UnaryOp(_UNARY[name](), *given)
        if name in _BINARY:
            return ast.BinOp(given[0], _BINARY[name](), given[1])
        if name in _COMPARED:
            return ast.Compare(given[0], [_COMPARED[name]()], given[1:])
        if _known(name) is None:
            return ast.Call(ast.Attribute(given[0], name), given[1:], [])
        return ast.Call(ast.Name(name), given, [])

    def _expression(self, x: Any) -> ast.expr:
        kind = type(x)
        if kind is Node:
            # a part of two expressions would have the brackets of one of them in both
            return copy.deepcopy(self.said[x]) if self.uses[x] > 1 else self.said[x]
        if kind is tuple or kind is list:
            return (ast.Tuple if kind is tuple else ast.List)([self._expression(each) for each in x])
        if kind is slice:
            parts = [None if part is None else self._expression(part) for part in (x.start, x.stop, x.step)]
            return ast.Slice(*parts)
        if kind in _OF_TORCH:
            return _parsed(str(x))
        if kind is torch.device:
            return _parsed(f"device({str(x)!r})")
        if kind is torch.Size:
            return _parsed(f"Size({tuple(x)})")
        if kind is type(...):
            return ast.Constant(...)
        if kind is dict:
            raise LookupError("a dict has no text")
        return _parsed(repr(x))


def _continued(node: Node, looked_up: dict[Any, Node]) -> tuple[Any, tuple[Any, ...]]:
    """Return the table of a look-up and the indices; for ``t[b][q]`` this is ``t[b]``, which a trace merges."""
    table, at = node.args
    if not all(type(part) is Node or type(part) is int for part in at):
        return table, at
    count = next((count for count in range(len(at) - 1, 0, -1) if (table, at[:count]) in looked_up), 0)
    looked_up[table, at] = node
    return (looked_up[table, at[:count]] if count else table), at[count:]


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


# ---- reading ---------------------------------------------------------------------------------------------------------


class TextFunction:
    """A function that computes a text with its tensors; a pickle holds these.

    Args:
        text: The text.
        tensors: The captured tensors.
        name: Name of the function that the text is of, for messages.
    Raises:
        PatternError: The text is not that of a graph.
    """

    def __init__(self, text: str, tensors: Sequence[Tensor], name: str = "function"):
        self.text, self.tensors, self.__name__ = text, tuple(tensors), name
        self._names = [f"t{number}" for number in range(len(self.tensors))]
        self._lines: list[tuple[str, _Value]] = []
        try:
            *lines, result = ast.parse(text).body
            for line in lines:
                self._lines.append((line.targets[0].id, _value(line.value)))  # type: ignore[attr-defined]
            self._result = _value(result.value)  # type: ignore[attr-defined]
        except (SyntaxError, LookupError, AttributeError, ValueError, RecursionError, MemoryError) as error:
            wanted = "operations that this version of ringweave knows"
            remedy = "Load it with the version that wrote it, or make the pattern anew."
            raise PatternError("the text of a function", shown(text), wanted, remedy) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return TextFunction, (self.text, self.tensors, self.__name__)

    def __call__(self, *args: Any) -> Any:
        """Compute the text at the arguments of a mask, or of a score function."""
        values = dict(zip(ARGUMENTS[-len(args) :], args, strict=True))
        values.update(zip(self._names, self.tensors, strict=True))
        for name, value in self._lines:
            values[name] = value(values)
        return self._result(values)


# computes a value of a text from those of its names
_Value = Callable[[dict[str, Any]], Any]


def _value(node: ast.expr) -> _Value:
    """Return the function that computes an expression.

    Raises:
        LookupError: A text has no such expression.
    """
    return _KINDS[type(node)](node)


def _name(node: ast.Name) -> _Value:
    return operator.itemgetter(node.id) if node.id not in _NAMED else lambda _: _NAMED[node.id]


def _constant(node: ast.Constant) -> _Value:
    return lambda _: node.value


def _unary(node: ast.UnaryOp) -> _Value:
    function, of = _OF_SIGN[type(node.op)], _value(node.operand)
    return lambda values: function(of(values))


def _binary(node: ast.BinOp) -> _Value:
    function, left, right = _OF_SIGN[type(node.op)], _value(node.left), _value(node.right)
    return lambda values: function(left(values), right(values))


def _comparison(node: ast.Compare) -> _Value:
    (sign,), (other,) = node.ops, node.comparators
    function, left, right = _OF_SIGN[type(sign)], _value(node.left), _value(other)
    return lambda values: function(left(values), right(values))


def _subscript(node: ast.Subscript) -> _Value:
    of, at = _value(node.value), _value(node.slice)
    return lambda values: of(values)[at(values)]


def _slice(node: ast.Slice) -> _Value:
    parts = [None if part is None else _value(part) for part in (node.lower, node.upper, node.step)]
    return lambda values: slice(*[None if part is None else part(values) for part in parts])


def _listed(node: ast.Tuple | ast.List) -> _Value:
    kind, parts = (tuple if type(node) is ast.Tuple else list), [_value(part) for part in node.elts]
    return lambda values: kind([part(values) for part in parts])


def _attribute(node: ast.Attribute) -> _Value:
    value = getattr(torch, node.attr)
    if not isinstance(value, _OF_TORCH) or ast.unparse(node.value) != "torch":
        raise LookupError(node.attr)
    return lambda _: value


def _call(node: ast.Call) -> _Value:
    args = [_value(each) for each in node.args]
    if any(each.arg is None for each in node.keywords):
        raise LookupError("**")
    named = {str(each.arg): _value(each.value) for each in node.keywords}
    if isinstance(node.func, ast.Name):
        name = node.func.id
        if name in _NUMBERS:
            # of any argument, since only the dtype counts
            return lambda values: getattr(values["q"], _NUMBERS[name])((), dtype=args[0](values))
        function = _MADE[name] if name in _MADE else _known(name) or _method(name)
    else:
        of, name = node.func.value, node.func.attr  # type: ignore[attr-defined]
        if isinstance(of, ast.Name) and of.id in SPACES:
            function = getattr(SPACES[of.id], name)
            spelled(function)
        else:
            function, args = _method(name), [_value(of), *args]
    return lambda values: function(
        *[each(values) for each in args], **{name: each(values) for name, each in named.items()}
    )


def _known(name: str) -> Callable[..., Any] | None:
    """Return the function of an operation that graphs have by name; None for one that only tensors have."""
    if name not in ELEMENTWISE:
        raise LookupError(name)
    return getattr(torch, name, None) or getattr(F, name, None)


def _method(name: str) -> Callable[..., Any]:
    spelled(getattr(Tensor, name))
    return lambda of, *args, **named: getattr(of, name)(*args, **named)


_KINDS: Mapping[type[ast.AST], Callable[[Any], _Value]] = {
    ast.Name: _name, ast.Constant: _constant, ast.UnaryOp: _unary, ast.BinOp: _binary, ast.Compare: _comparison,
    ast.Subscript: _subscript, ast.Slice: _slice, ast.Tuple: _listed, ast.List: _listed, ast.Attribute: _attribute,
    ast.Call: _call,
}  # fmt: skip
