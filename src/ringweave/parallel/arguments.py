"""Checks of arguments, each said as name, got, wanted, remedy."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import SupportsIndex, cast

from ..errors import PatternError, ShapeError, UnsupportedError, message
from ..patterns import Pattern


def integer(name: str, value: object, least: int, most: int = 2**40) -> int:
    """The value as an int.

    Raises:
        ShapeError: No int, or one that is not in [least, most].
    """
    try:
        # what numpy and torch call an int is one
        found = operator.index(cast(SupportsIndex, value))
    except (TypeError, RuntimeError):
        found = None
    if found is None or isinstance(value, bool):
        wanted = f"an int of at least {least}"
        raise ShapeError(message(name, repr(value), wanted, f"Pass {name} as a whole number."))
    if not least <= found <= most:
        wanted = f"at least {least}" if found < least else f"at most {most}"
        raise ShapeError(message(name, found, wanted, f"Pass {name} within these bounds."))
    return found


def number(name: str, value: object, least: float, most: float = math.inf) -> float:
    """The value as a float.

    Raises:
        ShapeError: No finite number, or one that is not in [least, most].
    """
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not math.isfinite(cast(float, value)) or not least <= cast(float, value) <= most:
        wanted = f"a finite number of at least {least:g}" + ("" if math.isinf(most) else f" and at most {most:g}")
        raise ShapeError(message(name, repr(value), wanted, f"Pass {name} as such a number."))
    return float(cast(float, value))


def seconds(name: str, value: object) -> float:
    """Seconds to wait, from a millisecond to thirty years.

    Raises:
        ShapeError: No such number.
    """
    return number(name, value, 1e-3, 1e9)


def pair_of_heads(heads: object) -> tuple[int, int]:
    """(query heads, key heads).

    Raises:
        ShapeError: No such pair.
    """
    wanted = "query heads, a multiple of key heads"
    if not isinstance(heads, Sequence) or isinstance(heads, str) or len(heads) != 2:
        raise ShapeError(message("heads", repr(heads), wanted, "Pass (Hq, Hkv)."))
    of_queries, of_keys = (integer("heads", count, 1, 2**20) for count in heads)
    if of_queries % of_keys:
        raise ShapeError(message("heads", (of_queries, of_keys), wanted, "Pass (Hq, Hkv)."))
    return of_queries, of_keys


def one_of(name: str, value: object, names: Sequence[str], wanted: str = "") -> str:
    """The value, one of some names.

    Raises:
        UnsupportedError: Another.
    """
    if isinstance(value, str) and value in names:
        return value
    wanted = f"{wanted}one of {', '.join(names)}"
    raise UnsupportedError(message(name, repr(value), wanted, f"Use {names[0]!r}."))


def patterns_of(asked: Pattern | Sequence[Pattern]) -> tuple[Pattern, ...]:
    """One pattern, or several.

    Raises:
        PatternError: Something else, or none.
    """
    if isinstance(asked, Pattern):
        return (asked,)
    found = tuple(asked) if isinstance(asked, Iterable) else (asked,)
    if not found or not all(isinstance(pattern, Pattern) for pattern in found):
        got = [type(pattern).__name__ for pattern in found]
        raise PatternError(message("pattern", got, "a pattern or several", "Pass ringweave patterns."))
    return found
