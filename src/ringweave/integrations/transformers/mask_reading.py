"""What a mask function of transformers allows, read by calling it once with symbols in place of index tensors.

transformers builds a mask as a function of four indices, out of closures of closures. Here that function is called with
objects that note what is done to them: ``k <= q`` becomes a set of distances, ``ids[b, q] == ids[b, k]`` a relation of
a table, ``&`` and ``|`` set algebra. So what it computes is read and not what it is called, a model's own function is
read like the library's, and it works in the same way while torch.compile traces. What uses an index in another way is
:class:`Unread`.
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
# all names that code may look up: attributes of symbols, a constant of torch, and a builtin
_NAMES = frozenset({"abs", "bool", "device", "dtype", "new_ones", "new_zeros", "to", "torch"})
# functions in functions, and the numbers that they hold
_MOST_SEEN = 64


class Unread(Exception):  # noqa: N818  (no error: whoever reads goes another way)
    """A mask function does something to an index that has no symbol."""


class Relation:
    """A relation of query and key; the classes below, joined by ``&``, ``|`` and ``~``."""

    # where the library moves masks to the device of others
    device = "cpu"

    def to(self, device: object) -> Relation:
        """Be on every device."""
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
    """Pairs whose ``query - key`` lies in one of some intervals, of places or of a table's numbers.

    Args:
        runs: Ascending disjoint intervals (least, most), both included; None: without an end.
        table: (B, N), whose numbers are subtracted; None: the positions themselves.
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
    """Pairs with equal numbers in a table (B, N); of ``known`` only where the number is not negative."""

    def __init__(self, table: Tensor, known: bool = False):
        self.table, self.known = table, known

    def __and__(self, other: object) -> Relation:
        if isinstance(other, NotNegative) and other.table is self.table:
            return Same(self.table, known=True)
        return super().__and__(other)


class NotNegative(Relation):
    """Pairs of which one side's number in a table is not negative; means something only next to :class:`Same`."""

    def __init__(self, table: Tensor):
        self.table = table


class Chunks(Relation):
    """Pairs in the same chunk of a length, counted from an element's own origin, by place or by a table's numbers."""

    def __init__(self, length: int, origin: Tensor | None, table: Tensor | None):
        self.length, self.origin, self.table = length, origin, table


class Known(Relation):
    """Keys that a bool table (B, N) marks."""

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
    # what everything is joined with, in the library's loops
    for a, b in ((one, other), (other, one)):
        if isinstance(a, Distances) and a.table is None and a.runs == (() if kind is Any_ else ((None, None),)):
            return b
    # parts of one kind may have a form together
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
    """Intervals of integers in order, those that touch as one."""
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
    """A number for each batch element: ``table[b]``."""

    def __init__(self, table: Tensor):
        self.table = table


class Index:
    """A symbol of one of the four indices, or of what was made of it.

    Args:
        axis: ``"b"``, ``"h"``, ``"q"`` or ``"k"``.
        table: (B, N) in which it was looked up.
        shift: What was added.
        origin: (B,) that was subtracted.
        chunk: What it was divided by, rounded down.
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
        """Everything, as the library begins an intersection."""
        return Distances(((None, None),))

    def new_zeros(self, *shape: object, dtype: torch.dtype) -> Relation:
        """Nothing, as the library begins a union."""
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
        # positions are not negative; what is looked up may be
        if from_ == 0 and most is None and self.table is not None:
            return NotNegative(self.table)
        if from_ is not None and from_ <= 0 and most is None and self.table is None:
            return Distances(((None, None),))
        raise Unread("an index compared with a number")


class Difference:
    """``sign * (query - key) + shift``, of positions or of a table's numbers."""

    def __init__(self, sign: int, shift: int, table: Tensor | None):
        self.sign, self.shift, self.table = sign, shift, table

    def between(self, least: int | None, most: int | None) -> Relation:
        """The pairs for which it lies between two numbers, both included."""
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
    """The absolute value of a difference."""

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
    """Notes which tables are read at symbols; everything else runs as it is."""

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
    """Read what a mask function allows, by position.

    The library's functions that read only numbers are called once: equal functions share the relation.

    Args:
        function: ``function(batch, head, query, key)``.
    Raises:
        Unread: It does something that has no symbol.
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
    """Make a key of a mask function: its code, the numbers in its closure, and the same of the functions there.

    None where the function may read more: a tensor or another object, a global name, a default argument, or anything
    through code from outside the library.
    """
    if "abs" in _LIBRARY:
        return None
    seen: list[object] = []
    # code and tuples come with the number of things in them: equal lists are of equal nesting
    left = [function]
    while left:
        each = left.pop()
        if type(each) is int or type(each) is bool or each is None:
            # True equals 1
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
                # a cell without contents
                return None
        else:
            return None
        if len(seen) > _MOST_SEEN:
            return None
    return tuple(seen)
