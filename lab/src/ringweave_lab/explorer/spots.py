"""The numbers in a pattern's text with the names of their parameters, and the Python that builds the pattern."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import ringweave
from ringweave.patterns.reader import names, tree


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


def spots(text: str) -> list[Spot]:
    """Return the numbers in the text of a valid pattern.

    Example:
        >>> [spot.name for spot in spots("SlidingWindow(9) | SlidingWindow(64)")]
        ['SlidingWindow #1 left', 'SlidingWindow #2 left']
        >>> [spot.name for spot in spots("SlidingWindow(9, right=2) | LongNet([64, 256], [1, 4])")]
        ['SlidingWindow left', 'SlidingWindow right', 'LongNet segments 1', 'LongNet segments 2', 'LongNet rates 1', 'LongNet rates 2']
    """  # noqa: E501
    parsed = tree(text)
    calls = _calls(parsed)
    number, seen = Counter(name for _, name in calls), Counter[str]()
    titles = {}
    for node, name in calls:
        seen[name] += 1
        # a pattern that occurs several times is numbered
        titles[node] = name if number[name] == 1 else f"{name} #{seen[name]}"
    return sorted(_numbers(parsed, titles, "number"), key=lambda spot: spot.begin)


def _calls(node: ast.expr) -> list[tuple[ast.Call, str]]:
    """Return the calls in a text in their order, with the names that they call."""
    found = [(_name(each.func), each) for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [(call, name) for (_, name), call in sorted(found, key=lambda each: each[0])]


def _name(function: ast.expr) -> tuple[int, str]:
    """Return the place of a called name, and the name; a method's stands behind its pattern."""
    name = function.attr if isinstance(function, ast.Attribute) else function.id  # type: ignore[attr-defined]
    return (function.end_col_offset or 0) - len(name), name


def _numbers(node: ast.AST, titles: dict[ast.Call, str], name: str) -> Iterator[Spot]:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield Spot(name, node.col_offset, node.end_col_offset or 0, node.value)  # type: ignore[arg-type]
    elif isinstance(node, ast.Call):
        yield from _numbers(node.func, titles, name)
        called = _name(node.func)[1]
        parameters = list(inspect.signature(names()[called]).parameters) if called in names() else ["bounds"]
        words = [*zip(parameters, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
        for word, value in words:
            yield from _numbers(value, titles, f"{titles[node]} {word}")
    elif isinstance(node, (ast.List, ast.Tuple)):
        for place, each in enumerate(node.elts, 1):
            yield from _numbers(each, titles, f"{name} {place}")
    else:
        for child in ast.iter_child_nodes(node):
            yield from _numbers(child, titles, name)


def python(text: str) -> str:
    """Return the call of ``attention`` with the pattern of a text.

    Example:
        >>> python("SlidingWindow(9) & Causal()")
        'out = rw.attention(q, k, v, rw.SlidingWindow(9) & rw.Causal())'
    """
    written = " ".join(text.split("\n"))
    for node, name in reversed(_calls(tree(text))):
        if isinstance(node.func, ast.Name):
            module = "rw" if name in ringweave.__all__ else "rw.patterns"
            written = f"{written[: node.func.col_offset]}{module}.{written[node.func.col_offset :]}"
    return f"out = rw.attention(q, k, v, {written.strip()})"
