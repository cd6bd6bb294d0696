"""The graph of a function: its operations, with the dtype and the shape of each result for one pair."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache import process_cache
from ..errors import in_a_line
from ..torch_compat import without_function_modes
from .operations import ELEMENTWISE, FUNCTIONS, OPERATORS, Function, name_of

#: Bits of the arguments that a value depends on.
SCORE, B, H, Q, K = 1, 2, 4, 8, 16
#: Names of the arguments of a mask and of a score function, with their bits.
MASK_ARGUMENTS = ("b", "h", "q", "k")
ARGUMENTS = ("score", *MASK_ARGUMENTS)
BITS = {"score": SCORE, "b": B, "h": H, "q": Q, "k": K}

Kind = tuple[torch.dtype, tuple[int, ...]]


class UntraceableError(Exception):
    """A function does something that a graph cannot record; the text says what."""


class Node:
    """An operation of a graph, an argument of the function, or a captured tensor.

    Attributes:
        name: Name of a known operation, or "call" for any other function; "argument", "tensor", and "part" for a member
            of a result; "one" and "zero" for these numbers where ``new_ones`` and ``new_zeros`` made them. Named
            arguments change the meaning of an operation: ``div`` may round.
        args: Nodes and constants, also in tuples, lists and slices; for an argument of the function, its name.
        kwargs: Named constants and nodes; empty for most operations.
        deps: Bits of the arguments that the value depends on.
        number: Position in the graph.
        value: The result, if it depends on no argument.
    """

    __slots__ = ("_function", "args", "deps", "kind", "kwargs", "name", "number", "value")

    def __init__(
        self,
        name: str,
        function: Function | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deps: int,
        number: int,
    ):
        self.name, self._function, self.args, self.kwargs = name, function, args, kwargs
        self.deps, self.number = deps, number
        self.value: Any = None
        #: Dtype and shape of the value of one pair, once they are known.
        self.kind: Kind | None = None

    @property
    def function(self) -> Function:
        """The operation. Operators of Python are found by name, since torch.compile cannot guard them."""
        return OPERATORS[self.name][0] if self._function is None else self._function

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the value of one pair."""
        return kind_of(self)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value of one pair; () for a number."""
        return kind_of(self)[1]

    def __repr__(self) -> str:
        if self.name == "argument":
            return str(self.args[0])
        if self.name == "tensor":
            return f"t{self.number}{list(self.value.shape)}"
        name = name_of(self._function) if self.name == "call" else self.name
        named = [f"{key}={value!r}" for key, value in self.kwargs.items()]
        return f"{name}({', '.join([*map(repr, self.args), *named])})"


class Graph:
    """What a function computes.

    Args:
        nodes: Operations in the order of computation; operands come before their uses.
        result: The result: a node, a constant, or nested tuples and lists of these.
        tensors: Captured tensors, in the order of their first use.
        key: Equal for graphs that compute the same from equal tensors.
    """

    __slots__ = ("_typed", "key", "nodes", "result", "tensors")

    def __init__(self, nodes: list[Node], result: Any, tensors: list[Tensor], key: Hashable):
        self.nodes, self.result, self.tensors, self.key = nodes, result, tensors, key
        self._typed = False

    def without_values(self) -> Graph:
        """Return the graph without its tensors, so that it keeps none of them alive."""
        self.typed()
        copies: dict[Node, Node] = {}
        for node in self.nodes:
            args, kwargs = filled_in(node.args, copies), filled_in(node.kwargs, copies)
            copy = copies[node] = Node(node.name, node._function, args, kwargs, node.deps, node.number)
            value = node.value
            copy.kind = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else node.kind
        return Graph([*copies.values()], filled_in(self.result, copies), [], self.key)

    def typed(self) -> Graph:
        """Compute the kinds of all nodes in order, since those of a long formula are nested deeply; return the graph.

        Raises:
            UntraceableError: An operation fails for one pair, or its result is not one tensor.
        """
        if not self._typed:
            for node in self.nodes:
                if node.deps:
                    kind_of(node)
            self._typed = True
        return self


def nodes_in(x: Any) -> list[Node]:
    """Return the nodes in nested arguments, in order.

    torch.compile traces this function often; a generator would take several times as long to trace.
    """
    kind = type(x)
    if kind is Node:
        return [x]
    if kind is dict:
        x = x.values()
    elif kind is slice:
        x = (x.start, x.stop, x.step)
    elif kind is not tuple and kind is not list:
        return []
    found: list[Node] = []
    for each in x:
        kind = type(each)
        if kind is Node:
            found.append(each)
        elif kind is tuple or kind is list or kind is dict or kind is slice:
            found += nodes_in(each)
    return found


def deps_of(x: Any) -> int:
    """Return the bits of the arguments that nested arguments depend on."""
    bits = 0
    for node in nodes_in(x):
        bits |= node.deps
    return bits


def kind_of(node: Node) -> Kind:
    """Return dtype and shape of a node's value for one pair; torch computes them, once for each kind of numbers.

    Raises:
        UntraceableError: The operation fails for one pair, or its result is not one tensor.
    """
    if node.kind is None:
        with without_function_modes():
            node.kind = _kind(node)
    return node.kind


def _kind(node: Node) -> Kind:
    if node.value is not None:
        if not isinstance(node.value, Tensor):
            raise UntraceableError(f"{node!r} is not one tensor")
        return node.value.dtype, tuple(node.value.shape)
    for each in nodes_in(node.args):
        if each.kind is None:
            each.kind = _kind(each)
    for each in nodes_in(node.kwargs):
        if each.kind is None:
            each.kind = _kind(each)
    if node.name == "index":
        return _indexed(node)
    operands = _numbers(node)
    if operands is None or torch.compiler.is_compiling():
        return _computed(node)
    return _kind_of_numbers(node.name, operands, torch.get_default_dtype())


def _numbers(node: Node) -> tuple[Hashable, ...] | None:
    """Return everything about the operands of an elementwise operation on numbers that its result's kind depends on."""
    if node.name not in ELEMENTWISE or node.kwargs:
        return None
    found: list[Hashable] = []
    for x in node.args:
        kind = type(x)
        if kind is Node:
            dtype, shape = x.kind
            if shape:
                return None
            found.append(dtype)
        elif kind is int or kind is float or kind is bool:
            found.append(kind.__name__)
        elif kind is torch.dtype:
            found.append((x,))
        else:
            return None
    return tuple(found)


_PLAIN = {"int": 1, "float": 1.0, "bool": True}


@process_cache
def _kind_of_numbers(name: str, operands: tuple[Hashable, ...], default: torch.dtype) -> Kind:
    """Return the kind of a number: there are as many as operations and dtypes, and ``default`` is torch's own now."""
    given: list[Any] = []
    for x in operands:
        if isinstance(x, torch.dtype):
            given.append(example((x, ())))
        else:
            given.append(x[0] if isinstance(x, tuple) else _PLAIN[str(x)])
    return _tried(FUNCTIONS[name], given, name)


def _computed(node: Node) -> Kind:
    operands = nodes_in((node.args, node.kwargs))
    examples = [example(kind_of(x)) for x in operands]

    def one(*values: Tensor) -> Any:
        given = dict(zip(operands, values, strict=True))
        return node.function(*filled_in(node.args, given), **filled_in(node.kwargs, given))

    if node.name != "call":
        return _tried(one, examples, node.name)
    # as it will be evaluated: vmap refuses a function that reads a value
    dtype, shape = _tried(torch.vmap(one), [x[None] for x in examples], name_of(node.function))
    return dtype, shape[1:]


def _tried(function: Function, args: Sequence[Any], name: str) -> Kind:
    try:
        result = function(*args)
        return result.dtype, tuple(result.shape)
    except Exception as error:
        # whatever torch raises for these arguments, or another result than one tensor
        raise UntraceableError(f"{name} fails for one pair: {in_a_line(error)}") from error


def example(kind: Kind) -> Tensor:
    """Return a tensor of a dtype and a shape, in the memory of one number.

    A meta tensor would have no memory, but the first operation on one imports the compiler, which takes a second.
    """
    dtype, shape = kind
    # not 0, by which integers cannot be divided
    return torch.ones((), dtype=dtype, device="cpu").expand(shape)


def filled_in(x: Any, values: Mapping[Node, Any]) -> Any:
    """Return nested arguments with values in place of nodes."""
    kind = type(x)
    if kind is Node:
        return values[x]
    if kind is tuple or kind is list:
        return kind([filled_in(each, values) for each in x])
    if kind is dict:
        return {name: filled_in(each, values) for name, each in x.items()}
    if kind is slice:
        return slice(*[filled_in(each, values) for each in (x.start, x.stop, x.step)])
    return x


_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def _indexed(node: Node) -> Kind:
    """Return the kind of an indexed tensor; each number takes one dimension, and leaves the order of the others."""
    base, at = node.args
    dtype, shape = base.kind
    used = sum([part is not None and part is not Ellipsis for part in at])
    if used > len(shape):
        raise UntraceableError(f"{used} indices for a tensor of {len(shape)} dimensions")
    left, sides = list(shape), []
    for part in at:
        kind = type(part)
        if part is Ellipsis:
            skipped = len(shape) - used
            sides += left[:skipped]
            left = left[skipped:]
        elif part is None:
            sides.append(1)
        elif kind is slice:
            if nodes_in(part):
                raise UntraceableError("it slices by a tensor")
            sides.append(len(range(*part.indices(left.pop(0)))))
        elif kind is int:
            size = left.pop(0)
            if not -size <= part < size:
                raise UntraceableError(f"index {part} for a side of {size}")
        elif kind is Node and part.kind is not None and part.kind[0] in _WHOLE and not part.kind[1]:
            left.pop(0)
        else:
            raise UntraceableError("it indexes by bool, or by a tensor of several values")
    return dtype, (*sides, *left)
