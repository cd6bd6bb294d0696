"""Reading a mask function of transformers by calling it once with symbols in place of index tensors.

transformers builds a mask as a function of four indices from nested closures. This module calls that function with
symbols that record operations: ``k <= q`` becomes a set of distances, ``ids[b, q] == ids[b, k]`` a relation of a table,
``&`` and ``|`` set algebra. The result depends on the computation and not on function names, so functions of models and
users are read too, also while torch.compile traces. Any other use of an index raises :class:`Unread`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from ...cache import PATTERNS

MaskFunction = Callable[..., Any]

_RELATION_BYTES = 2 * 2**10
_LIBRARY = vars(masking_utils)
_contents = operator.attrgetter("cell_contents")
# the only names that the code of a cached function may look up: attributes of symbols, torch's dtypes, and a builtin
_NAMES = frozenset({"abs", "bool", "device", "dtype", "new_ones", "new_zeros", "to", "torch"})
# bound on the functions and numbers in a cached function
_MOST_SEEN = 64


class Unread(Exception):  # noqa: N818  (not an error: the caller evaluates the function in another way)
    """A mask function uses an index in a way that symbols do not support."""


class Relation:
    """A relation of query and key; combine relations with ``&``, ``|`` and ``~``."""

    # transformers moves masks to each other's device
    device = "cpu"

    def to(self, device: object) -> Relation:
        """Return self: a relation has no device."""
        return self

    def __and__(self, other: object) -> Relation:
        return _joined(All, self, other)

    def __or__(self, other: object) -> Relation:
        return _joined(Any_, self, other)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Relation:
        raise Unread("a complement")

    def __bool__(self) -> bool:
        raise Unread("the truth of a mask")


class Distances(Relation):
    """Pairs with ``query - key`` in one of several intervals, where both are positions or numbers of a table.

    Args:
        runs: Ascending disjoint intervals (least, most), both included; None for an open end.
        table: (B, N), the number of each position; None for the positions themselves.
    """

    def __init__(self, runs: tuple[tuple[int | None, int | None], ...], table: Tensor | None = None):
        self.runs, self.table = runs, table

    def __and__(self, other: object) -> Relation:
        if isinstance(other, Distances) and other.table is self.table:
            cut = tuple(run for a in self.runs for b in other.runs if (run := _overlap(a, b)) is not None)
            return Distances(cut, self.table)
        return super().__and__(other)

    def __or__(self, other: object) -> Relation:
        if isinstance(other, Distances) and other.table is self.table:
            return Distances(_united([*self.runs, *other.runs]), self.table)
        return super().__or__(other)

    def __invert__(self) -> Relation:
        rest: Relation = Distances(((None, None),), self.table)
        for least, most in self.runs:
            below = () if least is None else ((None, least - 1),)
            above = () if most is None else ((most + 1, None),)
            rest = rest & Distances((*below, *above), self.table)
        return rest


class Same(Relation):
    """Pairs with equal numbers in a table (B, N); if ``known``, only pairs with numbers that are not negative."""

    def __init__(self, table: Tensor, known: bool = False):
        self.table, self.known = table, known

    def __and__(self, other: object) -> Relation:
        if isinstance(other, NotNegative) and other.table is self.table:
            return Same(self.table, known=True)
        return super().__and__(other)


class NotNegative(Relation):
    """Pairs in which the number of one side in a table is not negative; supported only together with :class:`Same`."""

    def __init__(self, table: Tensor):
        self.table = table


class Chunks(Relation):
    """Pairs in the same chunk of positions or of a table's numbers, counted from each batch element's origin."""

    def __init__(self, length: int, origin: Tensor | None, table: Tensor | None):
        self.length, self.origin, self.table = length, origin, table


class Known(Relation):
    """Pairs with a key that a bool table (B, N) marks."""

    def __init__(self, table: Tensor):
        self.table = table


class All(Relation):
    """Pairs in every part."""

    def __init__(self, parts: tuple[Relation, ...]):
        self.parts = parts


class Any_(Relation):  # noqa: N801  (typing has the name)
    """Pairs in at least one part."""

    def __init__(self, parts: tuple[Relation, ...]):
        self.parts = parts


def _joined(kind: type[All] | type[Any_], one: Relation, other: object) -> Relation:
    if not isinstance(other, Relation):
        raise Unread(f"a mask joined with {type(other).__name__}")
    # transformers starts its loops with everything or nothing, which changes nothing
    for a, b in ((one, other), (other, one)):
        if isinstance(a, Distances) and a.table is None and a.runs == (() if kind is Any_ else ((None, None),)):
            return b
    # merge parts that have a common form, such as two sets of distances
    parts: list[Relation] = []
    for part in (*_parts(kind, one), *_parts(kind, other)):
        for place, old in enumerate(parts):
            together = _together(kind, old, part)
            if together is not None:
                parts[place] = together
                break
        else:
            parts.append(part)
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def _together(kind: type[All] | type[Any_], one: Relation, other: Relation) -> Relation | None:
    if isinstance(one, Distances) and isinstance(other, Distances) and one.table is other.table:
        return one & other if kind is All else one | other
    if kind is All and isinstance(one, Same) and isinstance(other, NotNegative) and one.table is other.table:
        return Same(one.table, known=True)
    return None


def _parts(kind: type[All] | type[Any_], relation: Relation) -> tuple[Relation, ...]:
    return relation.parts if isinstance(relation, kind) else (relation,)


def _overlap(
    a: tuple[int | None, int | None], b: tuple[int | None, int | None]
) -> tuple[int | None, int | None] | None:
    least = b[0] if a[0] is None else a[0] if b[0] is None else max(a[0], b[0])
    most = b[1] if a[1] is None else a[1] if b[1] is None else min(a[1], b[1])
    return None if least is not None and most is not None and least > most else (least, most)


def _united(runs: list[tuple[int | None, int | None]]) -> tuple[tuple[int | None, int | None], ...]:
    """Sort intervals of integers, and merge those that overlap or touch."""
    left = list(runs)
    joined: list[tuple[int | None, int | None]] = []
    while left:
        first = left[0]
        for run in left:
            if run[0] is None or (first[0] is not None and run[0] < first[0]):
                first = run
        left.remove(first)
        last = joined[-1] if joined else None
        if last is not None and (last[1] is None or first[0] is None or first[0] <= last[1] + 1):
            most = None if last[1] is None or first[1] is None else max(last[1], first[1])
            joined[-1] = (last[0], most)
        else:
            joined.append(first)
    return tuple(joined)


class Offset:
    """The symbol of a number for each batch element, ``table[b]``."""

    def __init__(self, table: Tensor):
        self.table = table


class Index:
    """The symbol of one of the four indices, or of a value computed from it.

    Args:
        axis: ``"b"``, ``"h"``, ``"q"`` or ``"k"``.
        table: (B, N), the table that the index was looked up in.
        shift: Number that was added.
        origin: (B,), numbers that were subtracted.
        chunk: Divisor of a division that rounds down.
    """

    device = "cpu"

    def __init__(
        self,
        axis: str,
        table: Tensor | None = None,
        shift: int = 0,
        origin: Tensor | None = None,
        chunk: int | None = None,
    ):
        self.axis, self.table, self.shift, self.origin, self.chunk = axis, table, shift, origin, chunk

    def new_ones(self, *shape: object, dtype: torch.dtype) -> Relation:
        """Return all pairs; transformers starts intersections with them."""
        return Distances(((None, None),))

    def new_zeros(self, *shape: object, dtype: torch.dtype) -> Relation:
        """Return no pairs; transformers starts unions with them."""
        return Distances(())

    def __add__(self, other: object) -> Index:
        if not isinstance(other, int) or self.chunk is not None:
            raise Unread(f"an index and {type(other).__name__} added")
        return Index(self.axis, self.table, self.shift + other, self.origin)

    __radd__ = __add__

    def __sub__(self, other: object) -> Any:
        if isinstance(other, Index):
            return _difference(self, other)
        if isinstance(other, Offset) and self.origin is None and self.chunk is None:
            return Index(self.axis, self.table, self.shift, other.table)
        if isinstance(other, int):
            return self + -other
        raise Unread(f"an index less {type(other).__name__}")

    def __floordiv__(self, other: object) -> Index:
        if not isinstance(other, int) or self.chunk is not None or self.shift:
            raise Unread("an index divided in another way")
        return Index(self.axis, self.table, 0, self.origin, other)

    def __le__(self, other: object) -> Relation:
        return self._compared(other, None, 0)

    def __lt__(self, other: object) -> Relation:
        return self._compared(other, None, -1)

    def __ge__(self, other: object) -> Relation:
        return self._compared(other, 0, None)

    def __gt__(self, other: object) -> Relation:
        return self._compared(other, 1, None)

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, Index) or {self.axis, other.axis} != {"q", "k"}:
            raise Unread("an index equal to something else")
        alike = self.table is other.table and self.origin is other.origin and self.chunk == other.chunk
        if not alike or self.shift != other.shift:
            raise Unread("indices of different kinds that are equal")
        if self.chunk is not None:
            return Chunks(self.chunk, self.origin, self.table)
        return Distances(((0, 0),)) if self.table is None else Same(self.table)

    def __ne__(self, other: object) -> Any:
        raise Unread("indices that differ")

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        raise Unread("the truth of an index")

    def _compared(self, other: object, least: int | None, most: int | None) -> Relation:
        if isinstance(other, Index):
            return _difference(self, other).between(least, most)
        if (
            not isinstance(other, int)
            or self.axis not in ("q", "k")
            or self.chunk is not None
            or self.origin is not None
        ):
            raise Unread("an index compared with something else")
        from_ = None if least is None else other - self.shift + least
        # positions are never negative, but numbers of a table may be
        if from_ == 0 and most is None and self.table is not None:
            return NotNegative(self.table)
        if from_ is not None and from_ <= 0 and most is None and self.table is None:
            return Distances(((None, None),))
        raise Unread("an index compared with a number")


class Difference:
    """The symbol of ``sign * (query - key) + shift``, where both are positions or numbers of a table."""

    def __init__(self, sign: int, shift: int, table: Tensor | None):
        self.sign, self.shift, self.table = sign, shift, table

    def between(self, least: int | None, most: int | None) -> Relation:
        """Return the pairs for which the difference is between two numbers, both included."""
        low = None if least is None else least - self.shift
        high = None if most is None else most - self.shift
        if self.sign < 0:
            low, high = (None if high is None else -high), (None if low is None else -low)
        return Distances(((low, high),) if low is None or high is None or low <= high else (), self.table)

    def __neg__(self) -> Difference:
        return Difference(-self.sign, -self.shift, self.table)

    def __abs__(self) -> Magnitude:
        return Magnitude(self)

    def __le__(self, other: int) -> Relation:
        return self.between(None, _number(other))

    def __lt__(self, other: int) -> Relation:
        return self.between(None, _number(other) - 1)

    def __ge__(self, other: int) -> Relation:
        return self.between(_number(other), None)

    def __gt__(self, other: int) -> Relation:
        return self.between(_number(other) + 1, None)


class Magnitude:
    """The symbol of a difference's absolute value."""

    def __init__(self, inner: Difference):
        self.inner = inner

    def __le__(self, other: int) -> Relation:
        return self.inner.between(-_number(other), _number(other))

    def __lt__(self, other: int) -> Relation:
        return self <= _number(other) - 1


def _number(x: object) -> int:
    if not isinstance(x, int):
        raise Unread(f"a distance compared with {type(x).__name__}")
    return x


def _difference(one: Index, other: Index) -> Difference:
    fits = {one.axis, other.axis} == {"q", "k"} and one.chunk is None and other.chunk is None
    if not fits or one.table is not other.table or one.origin is not other.origin:
        raise Unread("a difference of indices of different kinds")
    return Difference(1 if one.axis == "q" else -1, one.shift - other.shift, one.table)


class _Looking(TorchFunctionMode):
    """A mode that turns table lookups with symbols into symbols, and runs other functions unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, at = args
            if isinstance(at, Index) and at.axis == "b":
                return Offset(table)
            if isinstance(at, tuple) and len(at) == 2 and isinstance(at[0], Index) and isinstance(at[1], Index):
                place = at[1]
                whole = at[0].axis == "b" and place.table is None and place.origin is None and not place.shift
                if not whole or place.chunk is not None or place.axis not in ("q", "k"):
                    raise Unread("a table looked up in another way")
                if table.dtype == torch.bool:
                    if place.axis != "k":
                        raise Unread("queries that a table marks")
                    return Known(table)
                return Index(place.axis, table)
        return func(*args, **(kwargs or {}))


def read(function: MaskFunction) -> Relation:
    """Return the relation of positions that a mask function computes.

    Equal functions of transformers share a cached relation if they depend on numbers only.

    Args:
        function: ``function(batch, head, query, key)``.
    Raises:
        Unread: The function uses an index in a way that symbols do not support.
    """
    of = None if torch.compiler.is_compiling() else _all_it_reads(function)
    key = None if of is None else ("mask function", of)
    result = None if key is None else PATTERNS.get(key)
    if result is not None:
        return result  # type: ignore[no-any-return]
    with _Looking():
        result = function(Index("b"), Index("h"), Index("q"), Index("k"))
    if not isinstance(result, Relation):
        raise Unread(f"a mask that is {type(result).__name__}")
    if key is not None:
        PATTERNS.put(key, result, _RELATION_BYTES)
    return result


def _all_it_reads(function: object) -> Hashable | None:
    """Return a cache key of a mask function: its code, the numbers in its closure, and the keys of the functions there.

    Return None if the function may read more: a tensor or another object, a global name, a default argument, or
    anything through code from outside transformers.
    """
    if "abs" in _LIBRARY:
        return None
    seen: list[object] = []
    # code objects fix the size of their closures and tuples are listed with theirs, so equal lists have equal nesting
    left = [function]
    while left:
        each = left.pop()
        if type(each) is int or type(each) is bool or each is None:
            # the type is part of the key because True == 1
            seen += (type(each), each)
        elif type(each) is tuple:
            seen.append(len(each))
            left += each
        elif type(each) is FunctionType and each.__globals__ is _LIBRARY:
            code, closure = each.__code__, each.__closure__ or ()
            if not _NAMES.issuperset(code.co_names) or CodeType in map(type, code.co_consts):
                return None
            if each.__defaults__ or each.__kwdefaults__:
                return None
            seen.append(code)
            try:
                left += map(_contents, closure)
            except ValueError:
                # an empty cell
                return None
        else:
            return None
        if len(seen) > _MOST_SEEN:
            return None
    return tuple(seen)
