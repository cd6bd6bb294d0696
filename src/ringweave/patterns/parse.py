"""Text to pattern: a safe reader of the expressions that ``spec`` writes: calls, names, numbers, lists and & | ~."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ..errors import PatternError, message
from . import presets
from .base import Full, Pattern
from .blocks import ListedBlocks, MaskBlocks
from .dilated import Dilated, LongNet, Strided
from .function import TokenMask
from .heads import PerHead
from .local import Causal, Documents, Neighborhood, PrefixLM, Segments, SlidingWindow
from .table import BlockTable
from .tokens import Global, Periodic, Sinks

PRESETS: dict[str, Callable[..., Pattern]] = {
    function.__name__: function
    for function in (
        presets.bigbird,
        presets.dilated_blocks,
        presets.local_global,
        presets.longformer,
        presets.natten_1d,
        presets.random_blocks,
        presets.sparse_transformer_fixed,
        presets.variable,
    )
}
WRITABLE: dict[str, Callable[..., Pattern]] = {
    kind.__name__: kind
    for kind in (
        Full, Causal, SlidingWindow, Global, Sinks, Segments, Dilated, Strided, Documents, PrefixLM, PerHead, LongNet,
        Neighborhood, Periodic,
    )
} | PRESETS  # fmt: skip


def parse(text: str) -> Pattern:
    """Read a pattern from the Python expression that would build it, without evaluating any Python.

    Args:
        text: Such as ``"SlidingWindow(1024) & Causal() | Sinks(64)"``: pattern and preset names with numbers,
            strings, booleans, lists, and ``& | ~``.
    Returns:
        The pattern.
    Raises:
        PatternError: Anything else in the text, with the place.
    Example:
        >>> rw.patterns.parse("SlidingWindow(2) & Causal() | Sinks(1)")
        SlidingWindow(2) & Causal() | Sinks(1)
    """
    return _Reader(text, WRITABLE, iter(())).read()


def rebuild(spec: str, tables: Sequence[Tensor]) -> Pattern:
    """The pattern of a ``spec`` and its ``tables``, as written by this process."""

    def table(tensor: Tensor, block_size: int | tuple[int, int], key_blocks: int | None = None) -> Pattern:
        sides = (block_size, block_size) if isinstance(block_size, int) else block_size
        blocks = MaskBlocks(tensor, tensor.shape[-1]) if key_blocks is None else ListedBlocks(tensor, key_blocks)
        return BlockTable.of(blocks, sides)

    def documents(cu_seqlens: Tensor) -> Pattern:
        return Documents._own(cu_seqlens)

    # around the same tensors: plans are cached by their address
    names = WRITABLE | {"BlockTable": table, "Documents": documents, "TokenMask": TokenMask.numbered}
    return _Reader(spec, names, iter(tables)).read()


class _Reader:
    def __init__(self, text: str, names: dict[str, Callable[..., Pattern]], tables: Iterator[Tensor]):
        self.text, self.names, self.tables = text, names, tables

    def read(self) -> Pattern:
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._error(f"text that is not an expression ({error})") from None
        result = self._value(tree.body)
        if not isinstance(result, Pattern):
            raise self._error(f"a {type(result).__name__}")
        return result

    def _value(self, node: ast.AST) -> object:
        match node:
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in self.names:
                named = {word.arg: self._value(word.value) for word in keywords if word.arg is not None}
                if len(named) != len(keywords):
                    raise self._error("**keywords")
                values = [self._value(arg) for arg in args]
                try:
                    return self.names[name](*values, **named)
                except TypeError as error:
                    raise self._error(f"{name} with arguments that do not fit ({error})") from None
            case ast.Call(func=ast.Name(id=name)):
                raise self._error(f"the unknown name {name}")
            case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
                return self._pattern(left) & self._pattern(right)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._pattern(left) | self._pattern(right)
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return ~self._pattern(operand)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Constant(value=bool() | int() | float() | str() as constant):
                return constant
            case ast.List(elts=items) | ast.Tuple(elts=items):
                values = [self._value(item) for item in items]
                return tuple(values) if isinstance(node, ast.Tuple) else values
            case ast.Name(id="_"):
                table = next(self.tables, None)
                if table is None:
                    raise self._error("a table where none is given")
                return table
            case _:
                raise self._error(f"{ast.unparse(node)!r} ({type(node).__name__})")

    def _pattern(self, node: ast.AST) -> Pattern:
        value = self._value(node)
        if not isinstance(value, Pattern):
            raise self._error(f"& | ~ on a {type(value).__name__}")
        return value

    def _error(self, got: str) -> PatternError:
        return PatternError(
            message(
                f"pattern {self.text!r}",
                got,
                "pattern names with numbers, lists, & | ~",
                f"Known names: {', '.join(sorted(self.names))}.",
            )
        )
