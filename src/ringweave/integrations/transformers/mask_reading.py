"""Reading a mask function of transformers by calling it once with symbols in place of index tensors.

transformers builds a mask as a function of four indices from nested closures. This module calls that function with
symbols. Comparisons of symbols return builders of patterns: ``k <= q`` builds a set of distances,
``ids[b, q] == ids[b, k]`` documents, and ``&`` and ``|`` combine builders. A builder then makes the pattern of each
:class:`~.positions.Place`. The result depends on the computation and not on function names, so functions of models and
users are read too, also while torch.compile traces. Any other use of an index raises :class:`Unread`. Outside of
torch.compile, a pattern is compared with its function at a few pairs before it is trusted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from ...cache import PATTERNS
from ...patterns import Causal, Documents, Full, KeyPadding, Pattern, SlidingWindow
from ...torch_compat import dispatched, transforming
from .positions import Place, Unread, joined

MaskFunction = Callable[..., Any]
# intervals (least, most) of distances, both included; infinite for an open end
Runs = tuple[tuple[float, float], ...]
_ALL: Runs = ((-math.inf, math.inf),)

# estimated size of a cached pattern per character of its text: it and each of its parts are an object with a text
_BYTES_OF_TEXT = 64
_BUILDER_BYTES = 2 * 2**10
_LIBRARY = vars(masking_utils)
_contents = operator.attrgetter("cell_contents")
# the only names that the code of a cached function may look up: attributes of symbols, torch's dtypes, and a builtin
_NAMES = frozenset({"abs", "bool", "device", "dtype", "new_ones", "new_zeros", "to", "torch"})
# bound on the functions and numbers in a cached function
_MOST_SEEN = 64
# bounds on the distances near which a pattern is compared with its function, and on the sequence for it
_MOST_EDGES, _LONGEST = 8, 2**20


class Pairs:
    """A builder of the pattern of some pairs (query, key); combine builders with ``&``, ``|`` and ``~``."""

    # transformers moves masks to each other's device
    device = "cpu"
    #: The part of an intersection that separates packed documents.
    packing: Same | None = None
    #: Whether the function depends on numbers only, and whether it was then compared with the builder's pattern.
    of_numbers = compared = False

    def parts_of(self) -> tuple[Pairs, ...]:
        """Return the builders that it combines; itself if it combines none."""
        return (self,)

    def pattern(self, place: Place, packed: Same | None = None) -> Pattern:
        """Build the pattern over the queries and keys of a call.

        Args:
            place: Positions of the call's queries and keys.
            packed: Packed documents to which the pattern is restricted elsewhere.
        Raises:
            Unread: The pairs have no pattern there.
        """
        raise NotImplementedError

    def to(self, device: object) -> Pairs:
        """Return self: a builder has no device."""
        return self

    def __and__(self, other: object) -> Pairs:
        return _joined(All, self, other)

    def __or__(self, other: object) -> Pairs:
        return _joined(Any_, self, other)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Pairs:
        raise Unread("a complement")

    def __bool__(self) -> bool:
        raise Unread("the truth of a mask")


class Distances(Pairs):
    """Pairs with ``query - key`` in one of several intervals, where both are positions or numbers of a table.

    Args:
        runs: Ascending disjoint intervals (least, most), both included.
        table: (B, N), the number of each position; None for the positions themselves.
    """

    def __init__(self, runs: Runs, table: Tensor | None = None):
        self.runs, self.table = runs, table

    def pattern(self, place: Place, packed: Same | None = None) -> Pattern:
        # within a document positions increase by one, so their differences are those of the indices
        if self.table is not None and packed is None:
            raise Unread("positions of packed sequences without their numbers")
        if place.row is not None:
            pattern = _not(Full())
            for least, most in self.runs:
                stop = place.nk if least == -math.inf else (place.row - int(least) + 1).clamp(0, place.nk).view(1)
                start = 0 if most == math.inf else (place.row - int(most)).clamp(0, place.nk).view(1)
                pattern = pattern | (Full() if (least, most) == _ALL[0] else KeyPadding(stop, start))
            return pattern
        if torch.compiler.is_compiling():
            return _intervals(self.runs)
        # drop bounds that no pair of the call reaches: dense patterns become Full, and decoding steps share a pattern
        nearest, farthest = place.first - place.nk + 1, place.first + place.nq - 1
        reached: Runs = ()
        for least, most in self.runs:
            # an interval with two bounds is one window, which is planned faster than the complement of another
            reached += (((-math.inf if least <= nearest else least), math.inf) if most >= farthest else (least, most),)
        # return one object for equal intervals, because attention looks up a pattern's prepared call by identity
        same: Pattern | None = PATTERNS.get(("intervals", reached))
        if same is None:
            same = _intervals(reached)
            PATTERNS.put(("intervals", reached), same, len(same.spec) * _BYTES_OF_TEXT)
        return same

    def __invert__(self) -> Pairs:
        # the gaps between the intervals, and the two ends
        ends = (-math.inf, *(end for least, most in self.runs for end in (least - 1, most + 1)), math.inf)
        gaps = zip(ends[::2], ends[1::2], strict=True)
        runs = tuple((low, high) for low, high in gaps if low <= high and low < math.inf and high > -math.inf)
        return Distances(runs, self.table)


class Same(Pairs):
    """Pairs with equal numbers in a table (B, N); if ``known``, only pairs with numbers that are not negative."""

    def __init__(self, table: Tensor, known: bool = False):
        self.table, self.known = table, known

    def pattern(self, place: Place, packed: Same | None = None) -> Documents:
        if place.row is not None:
            raise Unread("packed sequences with a static cache")
        ids = place.of_keys(self.table)
        return Documents(ids=ids if self.known else ids - ids.amin())


class NotNegative(Pairs):
    """Pairs in which the number of one side in a table is not negative; supported only together with :class:`Same`."""

    def __init__(self, table: Tensor):
        self.table = table

    def pattern(self, place: Place, packed: Same | None = None) -> Pattern:
        raise Unread("document numbers that are compared only with 0")


class Chunks(Pairs):
    """Pairs in the same chunk of positions or of a table's numbers, counted from each batch element's origin."""

    def __init__(self, length: int, origin: Tensor | None, table: Tensor | None):
        self.length, self.origin, self.table = length, origin, table

    def pattern(self, place: Place, packed: Same | None = None) -> Pattern:
        length, origin = self.length, self.origin
        if self.table is not None and packed is None:
            raise Unread("chunks of packed sequences without their numbers")
        if place.row is not None:
            if self.table is not None:
                raise Unread("chunks of packed sequences with a static cache")
            zero = 0 if origin is None else origin
            start = (place.row + place.kv_offset - zero).div(length, rounding_mode="floor") * length + zero
            start = (start - place.kv_offset).view(-1)
            return KeyPadding((start + length).clamp(0, place.nk), start.clamp(0, place.nk))
        if self.table is None:
            device = "cpu" if origin is None else origin.device
            at = torch.arange(place.kv_offset, place.kv_offset + place.nk, device=device)[None]
        else:
            at = place.of_keys(self.table)
        at = at if origin is None else at - origin[:, None]
        # number chunks by their first position: inductor (torch 2.13, CPU) computes the quotient wrongly
        chunk = at - at.remainder(length)
        if self.table is None or packed is None:
            return Documents(ids=chunk - chunk.amin())
        # count the changes of chunk or document: chunks of different documents have equal numbers
        change = (chunk.diff(dim=-1) != 0) | (place.of_keys(packed.table).diff(dim=-1) != 0)
        return Documents(ids=torch.nn.functional.pad(change.long().cumsum(-1), (1, 0)))


class Known(Pairs):
    """Pairs with a key that a bool table (B, N) marks."""

    def __init__(self, table: Tensor):
        self.table = table

    def pattern(self, place: Place, packed: Same | None = None) -> Pattern:
        known = place.padding(self.table)
        return Full() if known is None else known


class All(Pairs):
    """Pairs in every part."""

    def __init__(self, parts: tuple[Pairs, ...]):
        self.parts = parts
        self.packing = next((part for part in parts if isinstance(part, Same)), None)

    def parts_of(self) -> tuple[Pairs, ...]:
        return tuple(inner for part in self.parts for inner in part.parts_of())

    def pattern(self, place: Place, packed: Same | None = None) -> Pattern:
        parts, own = self.parts, self.packing
        if own is not None and any(isinstance(part, Chunks) and part.table is not None for part in parts):
            # chunks are counted within documents, so they separate the documents too
            parts = tuple(part for part in parts if part is not own)
        within = packed if own is None else own
        return joined([part.pattern(place, within) for part in parts])


class Any_(Pairs):  # noqa: N801  (typing has the name)
    """Pairs in at least one part."""

    def __init__(self, parts: tuple[Pairs, ...]):
        self.parts = parts

    def parts_of(self) -> tuple[Pairs, ...]:
        return tuple(inner for part in self.parts for inner in part.parts_of())

    def pattern(self, place: Place, packed: Same | None = None) -> Pattern:
        pattern = self.parts[0].pattern(place, packed)
        for part in self.parts[1:]:
            pattern = pattern | part.pattern(place, packed)
        return pattern


def _joined(kind: type[All] | type[Any_], one: Pairs, other: object) -> Pairs:
    if not isinstance(other, Pairs):
        raise Unread(f"a mask joined with {type(other).__name__}")
    # transformers starts its loops with everything or nothing, which changes nothing
    for a, b in ((one, other), (other, one)):
        if isinstance(a, Distances) and a.table is None and a.runs == (() if kind is Any_ else _ALL):
            return b
    # merge parts that have a common form, such as two sets of distances
    parts: list[Pairs] = []
    for part in (*_parts(kind, one), *_parts(kind, other)):
        for place, old in enumerate(parts):
            together = _together(kind, old, part)
            if together is not None:
                parts[place] = together
                break
        else:
            parts.append(part)
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def _parts(kind: type[All] | type[Any_], pairs: Pairs) -> tuple[Pairs, ...]:
    return pairs.parts if isinstance(pairs, kind) else (pairs,)


def _together(kind: type[All] | type[Any_], one: Pairs, other: Pairs) -> Pairs | None:
    """Return two parts as one builder, or None if they have no common form."""
    if isinstance(one, Distances) and isinstance(other, Distances) and one.table is other.table:
        merged = _overlaps(one.runs, other.runs) if kind is All else _united([*one.runs, *other.runs])
        return Distances(merged, one.table)
    if kind is All and isinstance(one, Same) and isinstance(other, NotNegative) and one.table is other.table:
        return Same(one.table, known=True)
    return None


def _overlaps(one: Runs, other: Runs) -> Runs:
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other]
    return tuple(run for run in both if run[0] <= run[1])


def _united(runs: list[tuple[float, float]]) -> Runs:
    """Sort intervals of integers, and merge those that overlap or touch."""
    joined: list[tuple[float, float]] = []
    for least, most in sorted(runs):
        if joined and least <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], most)
        else:
            joined.append((least, most))
    return tuple(joined)


def _not(pattern: Pattern) -> Pattern:
    # torch.compile does not trace the operator ~
    return pattern.__invert__()


def _intervals(runs: Runs) -> Pattern:
    """Return the pairs with a distance (query - key) in one of the intervals."""
    pattern = _not(Full())
    for least, most in runs:
        pattern = pattern | _interval(least, most)
    return pattern


def _interval(least: float, most: float) -> Pattern:
    """Return the pairs with a distance (query - key) in one interval."""
    if -math.inf < least <= 0 <= most < math.inf:
        return SlidingWindow(int(most), -int(least))
    pattern: Pattern = Full()
    if least > -math.inf:
        pattern = pattern & _from(int(least))
    if most < math.inf:
        pattern = pattern & _not(_from(int(most) + 1))
    return pattern


def _from(least: int) -> Pattern:
    """Return the pairs with a distance (query - key) of at least a number."""
    if least == 0:
        return Causal()
    return Causal() | SlidingWindow(0, -least) if least < 0 else Causal() & _not(SlidingWindow(least - 1))


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

    def new_ones(self, *shape: object, dtype: torch.dtype) -> Pairs:
        """Return all pairs; transformers starts intersections with them."""
        return Distances(_ALL)

    def new_zeros(self, *shape: object, dtype: torch.dtype) -> Pairs:
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

    def __le__(self, other: object) -> Pairs:
        return self._compared(other, -math.inf, 0)

    def __lt__(self, other: object) -> Pairs:
        return self._compared(other, -math.inf, -1)

    def __ge__(self, other: object) -> Pairs:
        return self._compared(other, 0, math.inf)

    def __gt__(self, other: object) -> Pairs:
        return self._compared(other, 1, math.inf)

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

    def _compared(self, other: object, least: float, most: float) -> Pairs:
        if isinstance(other, Index):
            return _difference(self, other).between(least, most)
        if (
            not isinstance(other, int)
            or self.axis not in ("q", "k")
            or self.chunk is not None
            or self.origin is not None
        ):
            raise Unread("an index compared with something else")
        from_ = other - self.shift + least
        # positions are never negative, but numbers of a table may be
        if from_ == 0 and most == math.inf and self.table is not None:
            return NotNegative(self.table)
        if -math.inf < from_ <= 0 and most == math.inf and self.table is None:
            return Distances(_ALL)
        raise Unread("an index compared with a number")


class Difference:
    """The symbol of ``sign * (query - key) + shift``, where both are positions or numbers of a table."""

    def __init__(self, sign: int, shift: int, table: Tensor | None):
        self.sign, self.shift, self.table = sign, shift, table

    def between(self, least: float, most: float) -> Pairs:
        """Return the pairs for which the difference is between two numbers, both included."""
        low, high = least - self.shift, most - self.shift
        if self.sign < 0:
            low, high = -high, -low
        return Distances(((low, high),) if low <= high else (), self.table)

    def __neg__(self) -> Difference:
        return Difference(-self.sign, -self.shift, self.table)

    def __abs__(self) -> Magnitude:
        return Magnitude(self)

    def __le__(self, other: int) -> Pairs:
        return self.between(-math.inf, _number(other))

    def __lt__(self, other: int) -> Pairs:
        return self.between(-math.inf, _number(other) - 1)

    def __ge__(self, other: int) -> Pairs:
        return self.between(_number(other), math.inf)

    def __gt__(self, other: int) -> Pairs:
        return self.between(_number(other) + 1, math.inf)


class Magnitude:
    """The symbol of a difference's absolute value."""

    def __init__(self, inner: Difference):
        self.inner = inner

    def __le__(self, other: int) -> Pairs:
        return self.inner.between(-_number(other), _number(other))

    def __lt__(self, other: int) -> Pairs:
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


def read(function: MaskFunction) -> Pairs:
    """Return the builder of the pattern that a mask function computes.

    Equal functions of transformers share a cached builder if they depend on numbers only.

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
    if not isinstance(result, Pairs):
        raise Unread(f"a mask that is {type(result).__name__}")
    if isinstance(result, Same):
        # an intersection knows its packing
        result = All((result,))
    if key is not None:
        result.of_numbers = True
        PATTERNS.put(key, result, _BUILDER_BYTES)
    return result


def compare(function: MaskFunction, pairs: Pairs, place: Place) -> None:
    """Raise Unread unless a builder's pattern allows the pairs that its function allows, at corners and some others.

    A function of numbers is compared once, over a sequence in which all its distances occur. Any other function is
    compared in the first call of its structure and reading; inside of transforms it is not.

    Args:
        function: The function.
        pairs: Its builder.
        place: Positions of the call's queries and keys.
    """
    if place.row is not None or transforming() or dispatched():
        return
    parts, edges = pairs.parts_of(), _edges(pairs)
    reading = tuple((type(part), *(part.runs if isinstance(part, Distances) else ())) for part in parts)
    key = None if pairs.of_numbers else ("compared", _structure(function), reading)
    if key is not None and PATTERNS.get(key) is not None:
        return
    if pairs.of_numbers:
        n = min(2 * max((abs(edge) for edge in edges), default=0) + 64, _LONGEST)
        place = Place(1, n, n, 0, 0)
    pattern = pairs.pattern(place)
    q, k = _sample(place, edges)
    tables = (getattr(part, name, None) for part in parts for name in ("table", "origin"))
    device = next((table.device for table in tables if isinstance(table, Tensor)), q.device)
    for b in {0, place.batch - 1}:
        at = (torch.full_like(q, b), torch.zeros_like(q), q + place.kv_offset, k + place.kv_offset)
        index = tuple(x.to(device) for x in at)
        wanted = function(*index)
        if not isinstance(wanted, Tensor) or wanted.shape != q.shape:
            # it computes with single indices
            wanted = torch.vmap(function)(*index)
        if not torch.equal(pattern.select(b, 0).allows(q, k), wanted.cpu()):
            raise Unread(f"a mask that differs from its reading, {pattern}")
    if key is None:
        pairs.compared = True
    else:
        PATTERNS.put(key, pairs, _BUILDER_BYTES)


def _edges(pairs: Pairs) -> list[int]:
    """Return the distances at which a builder's pairs begin or end."""
    found: set[int] = set()
    for part in pairs.parts_of():
        if isinstance(part, Distances):
            found |= {int(end) for run in part.runs for end in run if math.isfinite(end)}
        elif isinstance(part, Chunks):
            found.add(part.length)
    return sorted(found, key=abs)[-_MOST_EDGES:]


def _sample(place: Place, edges: list[int]) -> tuple[Tensor, Tensor]:
    """Return indices of queries and keys of some pairs of a call: corners, neighbours and pairs near the edges."""
    first, stop, nk = place.first, place.first + place.nq, place.nk
    rows = {first, first + 1, first + place.nq // 3, first + place.nq // 2, stop - 2, stop - 1}
    rows |= {first + edge + more for edge in edges for more in (0, 1)}
    near = {step for edge in (0, *edges) for step in (edge - 1, edge, edge + 1)}
    found = [
        (q, k)
        for q in sorted(rows)
        if first <= q < stop
        for k in sorted({0, nk // 2, nk - 1, (7 * q + 3) % nk, *(q - step for step in near)})
        if 0 <= k < nk
    ]
    q, k = torch.tensor(found, device="cpu").T
    return q, k


def _structure(function: object) -> Hashable:
    """Return the code of a function and of the functions in its closure, and the types of the other values there."""
    seen: list[object] = []
    left = [function]
    while left and len(seen) <= _MOST_SEEN:
        each = left.pop()
        if type(each) is tuple:
            seen.append(len(each))
            left += each
        elif type(each) is FunctionType:
            seen.append(each.__code__)
            left += map(_contents, each.__closure__ or ())
        else:
            seen.append(each if type(each) is int else type(each))
    return tuple(seen)


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
