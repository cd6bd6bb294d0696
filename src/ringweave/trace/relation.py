"""Recognise the pairs that the graph of a mask function allows.

The normal form is a tree of ``and``, ``or`` and ``not`` over seven leaves, which are data:

- :class:`Distances`: q - k is in a union of intervals;
- :class:`Side`: a table of the queries alone, or of the keys alone (and of batch element and head) allows the pair;
- :class:`Order` and :class:`Equal`: u <= v and u == v, where u is a function of the query, and v one of the key;
- :class:`Lookup`: an entry of a table at u and v;
- :class:`Member`: v is in the query's list;
- :class:`Open`: anything else, which must be evaluated.

The graph proves on which side a value depends. The value is then computed for all positions of the call, in time linear
in their number. So a leaf is exact, whatever operations the functions of one side consist of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .evaluate import elementwise, evaluated
from .graph import MASK_ARGUMENTS, B, Graph, H, K, Node, Q, UntraceableError, deps_of, nodes_in

#: Ascending disjoint intervals (least, most), both included; infinite for an open end.
Runs: TypeAlias = tuple[tuple[float, float], ...]
#: Most intervals in a set of distances that is found by tabulation.
MOST_RUNS = 256
# most leaves of a relation: `^` doubles them, and so does an absolute value in a sum
_MOST_LEAVES = 512
# Factors and constants up to which a sum of positions does not overflow, and sums of tables that do not.
_LARGE, _RANGE = 2**31, 2**63
# float32 represents the sums and differences of positions up to this one exactly
_EXACT = 2**23
_INTEGERS = frozenset([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
_FLOATS = frozenset([torch.float64, torch.float32, torch.float16, torch.bfloat16])
_LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor", "logical_not": "invert"}
_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
_MIRROR = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
_CPU = torch.device("cpu")
_MAXIMA = ("abs", "maximum", "minimum")
_SAME_VALUE = ("to", "long", "int", "clone", "contiguous")


class Place(NamedTuple):
    """The indices of a call: their numbers, the first query, key and head, and the device of computed tables.

    An index with one value is a number, so a function of it may be recognised where one of the index is not.
    """

    batch: int
    heads: int
    nq: int
    nk: int
    q0: int = 0
    k0: int = 0
    h0: int = 0
    device: torch.device = _CPU

    def lengths(self) -> dict[str, Tensor]:
        """Return the index vectors of the call."""
        first = {"b": (0, self.batch), "h": (self.h0, self.heads), "q": (self.q0, self.nq), "k": (self.k0, self.nk)}
        return {name: torch.arange(start, start + count, device=self.device) for name, (start, count) in first.items()}


# ---- leaves, and their combinations ----------------------------------------------------------------------------------


class Distances(NamedTuple):
    """Pairs with ``q - k`` in one of several intervals."""

    runs: Runs


class Side(NamedTuple):
    """Pairs that a bool table (B or 1, H or 1, Nq or 1, Nk or 1) of one side allows."""

    table: Tensor


class Order(NamedTuple):
    """Pairs with ``u <= v``: tables (B or 1, H or 1, Nq or 1, 1) and (B or 1, H or 1, 1, Nk or 1)."""

    u: Tensor
    v: Tensor


class Equal(NamedTuple):
    """Pairs with ``u == v``, tables as in :class:`Order`; ``same`` if both are one function of the position."""

    u: Tensor
    v: Tensor
    same: bool


class Lookup(NamedTuple):
    """Pairs that a bool table allows at indices that broadcast to (B, H, Nq, Nk)."""

    table: Tensor
    at: tuple[Tensor, ...]


class Member(NamedTuple):
    """Pairs for which ``v``, (B or 1, H or 1, 1, Nk), is in the query's list ``rows``, (B or 1, H or 1, Nq, 1, T)."""

    rows: Tensor
    v: Tensor


class Open(NamedTuple):
    """Pairs that a node of a graph allows, which must be evaluated."""

    node: Node
    graph: Graph


class Not(NamedTuple):
    """The pairs that a leaf does not allow."""

    part: Relation


class And(NamedTuple):
    """The pairs that every part allows."""

    parts: tuple[Relation, ...]


class Or(NamedTuple):
    """The pairs that any part allows."""

    parts: tuple[Relation, ...]


Relation: TypeAlias = Distances | Side | Order | Equal | Lookup | Member | Open | Not | And | Or
ALL, NOTHING = Distances(((-math.inf, math.inf),)), Distances(())


def joined(kind: type[And] | type[Or], parts: list[Relation]) -> Relation:
    """Join pairs: sets of distances merge, and everything or nothing disappears."""
    unit, zero = (ALL, NOTHING) if kind is And else (NOTHING, ALL)
    runs: Runs | None = None
    rest: list[Relation] = []
    for each in parts:
        for part in each.parts if isinstance(each, (And, Or)) and type(each) is kind else (each,):
            if isinstance(part, Distances):
                runs = part.runs if runs is None else (_overlaps if kind is And else _united)(runs, part.runs)
            elif not any(part is old for old in rest):
                rest.append(part)
    if runs == zero.runs:
        return zero
    if runs is not None and runs != unit.runs:
        rest.insert(0, Distances(runs))
    return rest[0] if len(rest) == 1 else kind(tuple(rest)) if rest else unit


def side(table: Tensor) -> Relation:
    """Return the pairs that a table of one side allows."""
    if torch.compiler.is_compiling():
        # compiled code does not know the values
        return Side(table)
    return ALL if bool(table.all()) else Side(table) if bool(table.any()) else NOTHING


def negated(x: Relation) -> Relation:
    """Return all other pairs; complements of ``and`` and ``or`` are pushed to the leaves."""
    if isinstance(x, Distances):
        # the gaps between the intervals, and the two ends
        ends = (-math.inf, *(end for least, most in x.runs for end in (least - 1, most + 1)), math.inf)
        gaps = zip(ends[::2], ends[1::2], strict=True)
        return Distances(tuple((a, b) for a, b in gaps if a <= b and a < math.inf and b > -math.inf))
    if isinstance(x, Side):
        return Side(~x.table)
    if isinstance(x, Not):
        return x.part
    if isinstance(x, (And, Or)):
        return joined(Or if type(x) is And else And, [negated(part) for part in x.parts])
    return Not(x)


def leaves(x: Relation) -> Iterator[Relation]:
    """Iterate over the leaves of a relation."""
    if isinstance(x, (And, Or)):
        for part in x.parts:
            yield from leaves(part)
    elif isinstance(x, Not):
        yield from leaves(x.part)
    else:
        yield x


def _overlaps(one: Runs, other: Runs) -> Runs:
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other]
    return tuple(run for run in both if run[0] <= run[1])


def _united(one: Runs, other: Runs) -> Runs:
    """Return the union of two sets of whole numbers; intervals that overlap or touch merge."""
    found: list[tuple[float, float]] = []
    for least, most in sorted((*one, *other)):
        if found and least <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], most)
        else:
            found.append((least, most))
    return tuple(found)


# ---- recognition -----------------------------------------------------------------------------------------------------


def as_relation(graph: Graph, place: Place, counted: Collection[Node] = ()) -> Relation:
    """Return the pairs of a call that the graph of a mask function allows.

    Args:
        graph: The graph.
        place: Indices of the call.
        counted: Captured tables that count tokens: in all pairs that matter, entries at q and at k differ by q - k.
    Raises:
        UntraceableError: The result is not one bool for each pair, or a value of one side cannot be computed for all
            positions, such as an entry of a table that is too short.
    """
    if 0 in place[:4]:
        graph.typed()
        return NOTHING
    try:
        return Reader(graph, place, counted).pairs()
    except RecursionError:
        return Open(graph.result, graph)


def distances_of(graph: Graph, counted: Collection[Node] = (), given: Node | None = None) -> Runs | None:
    """Return the distances of the pairs that the graph of a mask function allows; None if they depend on the call.

    Args:
        graph: The graph.
        counted: As in :func:`as_relation`.
        given: A condition that holds in all pairs that matter.
    Raises:
        UntraceableError: The result is not one bool for each pair.
    """
    reader = _OfAnyCall(graph, Place(2, 2, 2, 2), counted, given)
    try:
        found = reader.pairs()
    except (_DependsOnCall, RecursionError):
        return None
    return found.runs if isinstance(found, Distances) else None


class Linear(NamedTuple):
    """A sum of whole numbers: factors of nodes, and a constant."""

    terms: dict[Node, int]
    constant: int

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """Return the sum with a multiple of another one."""
        terms = dict(self.terms)
        for node, times in other.terms.items():
            terms[node] = terms.get(node, 0) + times * factor
        return Linear({node: times for node, times in terms.items() if times}, self.constant + factor * other.constant)

    def negative(self) -> Linear:
        """Return the sum with the other sign."""
        return Linear({}, 0).plus(self, -1)

    def slope(self, name: str) -> int:
        """Return the factor of an argument."""
        return sum(times for node, times in self.terms.items() if _is_argument(node, name))


class Reader:
    """Reads the nodes of a graph for the positions of a call.

    Args:
        graph: The graph.
        place: Indices of the call.
        counted: As in :func:`as_relation`.
        given: As in :func:`distances_of`.

    While torch.compile traces, the values of captured tables are unknown, and lengths may be. Positions and factors are
    below 2**31 in every call. A comparison of other whole numbers is left as it is written, since moving a term might
    overflow. Values are not tabulated by distance, and entries at both sides are left open.
    """

    def __init__(self, graph: Graph, place: Place, counted: Collection[Node] = (), given: Node | None = None):
        self.graph, self.place, self.counted, self.given = graph, place, counted, given
        #: Bits of the arguments with several values.
        self.several = (B if place.batch > 1 else 0) | (H if place.heads > 1 else 0) | Q | K
        self._read: dict[tuple[Node, bool], Relation] = {}
        self._linear: dict[Node, Linear] = {}
        self._by_distance: dict[Node, bool] = {}
        self._tables: dict[Node, Tensor] = {}
        self._wholes: dict[Node, Linear | None] = {}

    # ---- logic

    def pairs(self) -> Relation:
        """Return the pairs of the graph.

        Raises:
            UntraceableError: As of :func:`as_relation`.
        """
        result = self.graph.typed().result
        if not _is_bool(result):
            raise UntraceableError("its result is not a bool for each pair")
        return self.read(result)

    def read(self, x: Any, no: bool = False) -> Relation:
        """Return the pairs where a bool holds, or with ``no`` where it does not."""
        if type(x) is not Node:
            return ALL if bool(x) != no else NOTHING
        if x is self.given:
            return NOTHING if no else ALL
        found = self._read.get((x, no))
        if found is None:
            found = self._logic(x, no)
            listed = list(leaves(found))
            if len(listed) > _MOST_LEAVES or (_two_sided(x) and any(type(leaf) is Open for leaf in listed)):
                # a set of distances as a whole may have fewer intervals than its parts
                whole = self._of_distance(x) if self.by_distance(x) else None
                if whole is not None:
                    found = negated(whole) if no else whole
                elif len(listed) > _MOST_LEAVES:
                    found = Not(Open(x, self.graph)) if no else Open(x, self.graph)
            self._read[x, no] = found
        return found

    def _logic(self, x: Node, no: bool) -> Relation:
        name, args = _LOGICAL.get(x.name, x.name), x.args
        if name in ("one", "zero"):
            return ALL if (name == "one") != no else NOTHING
        if not x.kwargs and all(map(_is_bool, args[:1] if name in ("to", "bool", "clone", "contiguous") else args)):
            found = self._of_bools(x, name, no)
            if found is not None:
                return found
        if name in _OPPOSITE and not x.kwargs:
            found = self._compared(_OPPOSITE[name] if no else name, *args)
            if found is not None:
                return found
        if not _two_sided(x):
            table = self.table(x)
            return side(~table if no else table)
        found = self._looked_up(x) or self._member(x) or Open(x, self.graph)
        return Not(found) if no else found

    def _of_bools(self, x: Node, name: str, no: bool) -> Relation | None:
        args = x.args
        if name == "invert":
            return self.read(args[0], not no)
        if name in ("to", "bool", "clone", "contiguous"):
            return self.read(args[0], no)
        if name in ("and", "or", "mul", "add"):
            kind = And if (name in ("and", "mul")) != no else Or
            parts = operands(x, name)
            moved = self._of_equals(parts) if name in ("and", "mul") else ()
            return joined(kind, [self._of_keys(each, no) if each in moved else self.read(each, no) for each in parts])
        if name == "where":
            c, a, b = args
            return joined(Or, [self._both(c, False, a, no), self._both(c, True, b, no)])
        if name in ("xor", "ne", "eq") and _two_sided(x) and any(map(_two_sided, args)):
            a, b = args
            same = (name == "eq") != no
            return joined(Or, [self._both(a, False, b, not same), self._both(a, True, b, same)])
        return None

    def _both(self, a: Any, not_a: bool, b: Any, not_b: bool) -> Relation:
        return joined(And, [self.read(a, not_a), self.read(b, not_b)])

    def _of_equals(self, parts: list[Any]) -> set[Node]:
        """Return conditions on a function of the query that must equal the same function of the key.

        They are conditions on the key, too, and patterns have masks of keys.
        """
        found: set[Node] = set()
        of_query = [part for part in parts if _side(part) == "q"]
        for equal in parts if of_query else ():
            if type(equal) is Node and equal.name == "eq" and not equal.kwargs and self._same(*equal.args):
                mine = equal.args[0] if _side(equal.args[0]) == "q" else equal.args[1]
                found |= {part for part in of_query if _only_through(part, mine)}
        return found

    def _of_keys(self, x: Node, no: bool) -> Relation:
        """Return a condition on the query, computed for the keys."""
        lengths = self.place.lengths()
        table = self.computed(x, {**lengths, "q": lengths["k"]}).transpose(2, 3)
        return side(~table if no else table)

    # ---- comparisons

    def _compared(self, name: str, a: Any, b: Any) -> Relation | None:
        """Return the pairs of a comparison; None if it is no relation of sums or of sides."""
        left, right = self.linear(a), self.linear(b)
        found = None
        if left is not None and right is not None and _holds(a, b) and _holds(b, a):
            difference = left.plus(right, -1)
            if name in ("ge", "gt"):
                difference = difference.negative()
            if name in ("lt", "gt"):
                difference = Linear(difference.terms, difference.constant + 1)
            found = self._zero(difference, name == "ne") if name in ("eq", "ne") else self._at_most(difference)
        return self._as_written(name, a, b) if found is None else found

    def _at_most(self, x: Linear) -> Relation | None:
        """Return the pairs with x <= 0."""
        largest = self._largest(x)
        if largest is not None:
            node, rest, parts = largest
            times = x.terms[node]
            # times * max(parts) is at most a number if each part is, and with a negative factor if one is
            kind = And if (times > 0) == (node.name != "minimum") else Or
            found = []
            for part in parts:
                one = self._at_most(rest.plus(part, times))
                if one is None:
                    return None
                found.append(one)
            whole = joined(kind, found)
            return whole if sum(1 for _ in leaves(whole)) <= _MOST_LEAVES else None
        line = self.distance(x)
        if line is not None:
            # times * (q - k) + constant <= 0
            times, constant = line
            if times == 0:
                return ALL if constant <= 0 else NOTHING
            if times > 0:
                return Distances(((-math.inf, -constant // times),))
            return Distances(((-(-constant // -times), math.inf),))
        if x.constant <= 0 and all(_is_argument(node) and times < 0 for node, times in x.terms.items()):
            return ALL  # positions are not negative
        sides = self._sides(x)
        if sides is None:
            return self._tabulated(x, lambda value: value <= 0)
        if not self._in_range(x):
            return None
        u, v = sides
        return side(u <= v) if u.shape[2] == 1 or v.shape[3] == 1 else Order(u, v)

    def _zero(self, x: Linear, no: bool) -> Relation | None:
        """Return the pairs with x == 0, or with ``no`` the others."""
        if self._largest(x) is not None:
            least, most = self._at_most(x.negative()), self._at_most(x)
            if least is None or most is None:
                return None
            found = joined(And, [least, most])
            return negated(found) if no else found
        line = self.distance(x)
        if line is not None:
            times, constant = line
            if times == 0:
                found = NOTHING if constant else ALL
            else:
                found = NOTHING if constant % times else Distances(((-constant // times,) * 2,))
            return negated(found) if no else found
        sides = self._sides(x)
        if sides is None:
            return self._tabulated(x, (lambda value: value != 0) if no else (lambda value: value == 0))
        u, v = sides
        if u.shape[2] == 1 or v.shape[3] == 1:
            return side((u != v) if no else (u == v))
        equal = Equal(u, v, self._mirrored(x))
        return Not(equal) if no else equal

    def _as_written(self, name: str, a: Any, b: Any) -> Relation | None:
        """Compare a value of the query with one of the key as torch does, without moving a term."""
        if {_side(a), _side(b)} != {"q", "k"} or not (_is_number(a) and _is_number(b)):
            return None
        if _side(a) == "k":
            a, b, name = b, a, _MIRROR[name]
        u, v = self.table(a), self.table(b)
        common = torch.promote_types(a.dtype, b.dtype)
        u, v = u.to(common), v.to(common)
        if common in _FLOATS:
            if torch.compiler.is_compiling() or bool(u.isnan().any() | v.isnan().any()):
                return None
        elif common not in _INTEGERS:
            return None
        if name in ("eq", "ne"):
            equal = Equal(u, v, self._same(a, b))
            return equal if name == "eq" else Not(equal)
        if name in ("le", "gt"):
            return Order(u, v) if name == "le" else Not(Order(u, v))
        # u >= v is -u <= -v, and ~ of whole numbers reverses their order without overflow
        reverse = torch.neg if common in _FLOATS else torch.bitwise_not
        greater = Order(reverse(u), reverse(v))
        return greater if name == "ge" else Not(greater)

    # ---- sums of whole numbers

    def linear(self, x: Any) -> Linear | None:
        """Return a value of whole numbers as a sum; None for another value."""
        if type(x) is int or type(x) is bool:
            return Linear({}, int(x)) if abs(x) < _RANGE // 4 else None
        if not _is_number(x) or (x.dtype not in _INTEGERS and x.dtype != torch.bool):
            return None
        found = self._linear.get(x)
        if found is None:
            found = self._sum(x)
            if abs(found.constant) > _LARGE or any(abs(times) > _LARGE for times in found.terms.values()):
                found = Linear({x: 1}, 0)
            self._linear[x] = found
        return found

    def _sum(self, x: Node) -> Linear:
        alone, args = Linear({x: 1}, 0), x.args
        if not x.deps and isinstance(x.value, Tensor) and not torch.compiler.is_compiling():
            return Linear({}, int(x.value))
        if _is_argument(x) and not x.deps & self.several:
            return Linear({}, self.place.h0 if x.deps & H else 0)
        if x.deps and not x.deps & self.several and not torch.compiler.is_compiling():
            # one value in the whole call, such as an entry for the only head
            return Linear({}, int(self.table(x)))
        if x.kwargs or x.dtype not in (torch.int64, torch.int32):
            return alone
        found = alone
        if x.name in ("add", "sub") and len(args) == 2:
            a, b = map(self.linear, args)
            found = alone if a is None or b is None else a.plus(b, -1 if x.name == "sub" else 1)
        elif x.name == "neg":
            a = self.linear(args[0])
            found = alone if a is None else a.negative()
        elif x.name == "mul":
            a, b = map(self.linear, args)
            if a is not None and b is not None and not (a.terms and b.terms):
                found = a.plus(a, b.constant - 1) if a.terms else b.plus(b, a.constant - 1)
        elif x.name in _SAME_VALUE and type(args[0]) is Node and args[0].dtype in _INTEGERS:
            # a position fits int32, and any other value fits int64
            inner = self.linear(args[0])
            if inner is not None and (x.dtype == torch.int64 or _is_argument(args[0])):
                found = inner
        if x.dtype == torch.int32 and found is not alone and not self._in_range(found, 2**31):
            return alone
        return found

    def _in_range(self, x: Linear, bound: int = _RANGE) -> bool:
        """Return whether a sum, and each of its parts in any order, is below a bound."""
        if len(x.terms) == 1 and not x.constant and bound == 2**31:
            return next(iter(x.terms.values())) == 1
        if any(map(_two_sided, x.terms)):
            return False
        return sum(self._most(node) * abs(times) for node, times in x.terms.items()) + abs(x.constant) < bound

    def _most(self, x: Node) -> int:
        """Return a bound on the absolute value of a term of one side."""
        if not torch.compiler.is_compiling():
            return _size(self.table(x))
        if _is_argument(x):
            return _LARGE
        return 1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max + 1

    def whole(self, x: Any) -> Linear | None:
        """Return a value of whole numbers as a sum, also one converted to floats that have its terms exactly."""
        if type(x) is not Node or x.dtype not in (torch.float32, torch.float64):
            return self.linear(x)
        if x not in self._wholes:
            # a sum may be a part of many sums
            self._wholes[x] = self._whole(x)
        return self._wholes[x]

    def _whole(self, x: Node) -> Linear | None:
        if x.name in ("to", "float", "double"):
            return self.whole(x.args[0])
        if x.name not in ("add", "sub", "neg") or x.kwargs:
            return None
        parts = [self.whole(each) for each in x.args]
        sums = [part for part in parts if part is not None and all(map(_is_argument, part.terms))]
        if len(sums) < len(parts):
            return None
        sizes = [abs(times) * self._end(node) for part in sums for node, times in part.terms.items()]
        if sum(sizes) + sum(abs(part.constant) for part in sums) >= _EXACT:
            return None
        return sums[0].negative() if x.name == "neg" else sums[0].plus(sums[1], -1 if x.name == "sub" else 1)

    def _end(self, argument: Node) -> int:
        place = self.place
        ends = {"b": place.batch, "h": place.h0 + place.heads, "q": place.q0 + place.nq, "k": place.k0 + place.nk}
        return ends[argument.args[0]]

    def _largest(self, x: Linear) -> tuple[Node, Linear, list[Linear]] | None:
        """Return a term that is a maximum or a minimum of sums of both sides, the other terms, and these sums."""
        for node, times in x.terms.items():
            if node.name in _MAXIMA and not node.kwargs and _two_sided(node):
                # torch.compile traces no `:=` in a list here
                found = [self.linear(each) for each in node.args]
                parts = [part for part in found if part is not None]
                if len(parts) < len(node.args):
                    return None
                if node.name == "abs":
                    parts.append(parts[0].negative())
                return node, x.plus(Linear({node: 1}, 0), -times), parts
        return None

    def distance(self, x: Linear) -> tuple[int, int] | None:
        """Return (factor, constant) of a multiple of q - k and a number, or None."""
        # the factors of q and of k, for positions and for each table that counts tokens
        slopes: dict[Node | None, dict[str, int]] = {}
        for node, times in x.terms.items():
            table, at = self._position(node)
            if at not in ("q", "k"):
                return None
            factors = slopes.setdefault(table, {"q": 0, "k": 0})
            factors[at] += times
        if any(factors["q"] != -factors["k"] for factors in slopes.values()):
            return None
        return sum(factors["q"] for factors in slopes.values()), x.constant

    def _position(self, x: Node) -> tuple[Node | None, str]:
        """Return the table and the index of a token's position: None and the argument for the argument itself."""
        if _is_argument(x):
            return None, x.args[0]
        if x.name == "index" and x.args[0] in self.counted and type(x.args[1]) is tuple:
            *element, token = x.args[1]
            if type(token) is Node and _is_argument(token) and not deps_of(element) & (Q | K):
                return x.args[0], token.args[0]
        return None, ""

    def _sides(self, x: Linear) -> tuple[Tensor, Tensor] | None:
        """Return u of the query and v of the key with x = u - v modulo 2**64; None if a term depends on both."""
        if any(map(_two_sided, x.terms)):
            return None
        u = torch.full((1, 1, 1, 1), x.constant, device=self.place.device)
        v = torch.zeros_like(u)
        for node, times in x.terms.items():
            table = self.table(node).long() * times
            if node.deps & K:
                v = v - table
            else:
                u = u + table
        return u, v

    def _mirrored(self, x: Linear) -> bool:
        """Return whether x is f(q) - f(k) for one function f."""
        q = {self._formula(node): times for node, times in x.terms.items() if node.deps & Q}
        k = {self._formula(node): -times for node, times in x.terms.items() if node.deps & K}
        return q == k and not x.constant and all(node.deps & (Q | K) for node in x.terms)

    def _same(self, a: Any, b: Any) -> bool:
        """Return whether values are one function of the query and of the key."""
        return {_side(a), _side(b)} == {"q", "k"} and self._formula(a) == self._formula(b)

    def _formula(self, x: Any) -> Any:
        """Return the formula of a value with one name for the query and the key."""
        if type(x) is not Node:
            return tuple(map(self._formula, x)) if type(x) in (tuple, list) else repr(x)
        if not x.deps:
            return (x.number,)
        if _is_argument(x):
            return "position" if x.deps & (Q | K) else x.args[0]
        return x.name, str(x.function), *map(self._formula, (*x.args, *x.kwargs.items()))

    # ---- values by distance

    def by_distance(self, x: Any) -> bool:
        """Return whether a value depends on query and key by their distance alone."""
        if torch.compiler.is_compiling():
            return False
        if type(x) is not Node:
            return all(map(self.by_distance, nodes_in(x)))
        if not x.deps & (Q | K):
            return True
        found = self._by_distance.get(x)
        if found is None:
            found = self._by_distance[x] = self._depends_on_distance(x)
        return found

    def _depends_on_distance(self, x: Node) -> bool:
        sums = self.whole(x)
        if x.name in _OPPOSITE and not x.kwargs:
            a, b = map(self.linear, x.args)
            sums = None if a is None or b is None else a.plus(b, -1)
        if sums is not None and sums.terms != {x: 1}:
            rest = [node for node in sums.terms if not (_is_argument(node, "q") or _is_argument(node, "k"))]
            if sums.slope("q") == -sums.slope("k") and all(map(self.by_distance, rest)):
                return True
        return _two_sided(x) and self.by_distance((x.args, x.kwargs))

    def distances(self) -> dict[str, Tensor]:
        """Return indices with every distance of the call: a query at 0 and keys at minus the distances."""
        place, zero = self.place, torch.zeros(1, dtype=torch.int64, device=self.place.device)
        first, last = place.q0 - place.k0 - place.nk + 1, place.q0 - place.k0 + place.nq - 1
        return {"b": zero, "h": zero + place.h0, "q": zero, "k": -torch.arange(first, last + 1, device=place.device)}

    def _of_distance(self, x: Node) -> Distances | None:
        """Tabulate a bool of the distance alone."""
        if x.deps & (B | H) & self.several:
            return None
        return self._runs(self.computed(x, self.distances()).flatten())

    def _tabulated(self, x: Linear, holds: Callable[[Tensor], Tensor]) -> Distances | None:
        """Tabulate whether a sum of the distance alone holds; None for another sum, or for too many intervals."""
        others = [node for node in x.terms if not _is_argument(node)]
        known = x.slope("q") == -x.slope("k") and all(map(self.by_distance, others))
        if not known or any(node.deps & (B | H) & self.several for node in x.terms):
            return None
        at = self.distances()
        total, most = torch.full_like(at["k"], x.constant), abs(x.constant)
        for node, times in x.terms.items():
            values = self.computed(node, at).long().flatten()
            total, most = total + values * times, most + _size(values) * abs(times)
        return self._runs(holds(total)) if most < _RANGE else None

    def _runs(self, holds: Tensor) -> Distances | None:
        first = self.place.q0 - self.place.k0 - self.place.nk + 1
        edges = torch.nn.functional.pad(holds.int(), (1, 1)).diff()
        starts, stops = (edges == 1).nonzero().flatten() + first, (edges == -1).nonzero().flatten() + first - 1
        if len(starts) > MOST_RUNS:
            return None
        return Distances(tuple(zip(starts.tolist(), stops.tolist(), strict=True)))

    # ---- look-ups

    def _looked_up(self, x: Node) -> Lookup | None:
        """Return an entry of a table at indices of one side each; a function of entries is an entry of a table."""
        found = None if torch.compiler.is_compiling() else self._entries(x)
        if found is None:
            return None
        table, at = found
        indices = [
            torch.tensor(part, device=table.device).reshape(1, 1, 1, 1) if type(part) is int else self.table(part)
            for part in at
        ]
        for part, count in zip(indices, table.shape, strict=True):
            if int(part.amin()) < -count or int(part.amax()) >= count:
                raise UntraceableError("an index is out of range")
        return Lookup(table, tuple(part.long() for part in indices))

    def _entries(self, x: Node) -> tuple[Tensor, tuple[Any, ...]] | None:
        if x.name == "index" and not x.args[0].deps and isinstance(x.args[0].value, Tensor):
            table, at = x.args[0].value, x.args[1] if type(x.args[1]) is tuple else (x.args[1],)
            known = all(type(part) is int or (type(part) is Node and not _two_sided(part)) for part in at)
            return (table.detach().to(self.place.device), at) if known and len(at) == table.ndim else None
        if not elementwise(x) or x.kwargs or len(x.args) > 2:
            return None
        dependent = [each for each in x.args if type(each) is Node and each.deps]
        inner = self._entries(dependent[0]) if len(dependent) == 1 else None
        if inner is None or not all(type(each) in (Node, int, float, bool) for each in x.args):
            return None
        fill = [inner[0] if each is dependent[0] else each.value if type(each) is Node else each for each in x.args]
        if len(fill) == 2:
            # as of numbers: the dtype of a whole table would win over that of one number
            a, b = (
                torch.empty((), dtype=each.dtype, device="cpu") if isinstance(each, Tensor) else each for each in fill
            )
            common = torch.result_type(a, b)
            fill = [each.to(common) if isinstance(each, Tensor) else each for each in fill]
        return x.function(*fill), inner[1]

    def _member(self, x: Node) -> Member | None:
        """Return whether a value of the key is in a list of the query."""
        if x.name != "call" or getattr(x.function, "__name__", "") != "any":
            return None
        # a number of one row, so it is over the only dimension, however that is written
        equal = x.args[0]
        if type(equal) is not Node or equal.name != "eq" or len(equal.shape) != 1:
            return None
        rows, v = equal.args if _side(equal.args[0]) == "q" else equal.args[::-1]
        if type(rows) is not Node or type(v) is not Node or (_side(rows), _side(v)) != ("q", "k"):
            return None
        if len(rows.shape) != 1 or v.shape not in ((), (1,)) or rows.dtype != v.dtype:
            return None
        keys = self.table(v)
        return Member(self.table(rows), keys if v.shape == () else keys[..., 0])

    # ---- values

    def table(self, x: Node) -> Tensor:
        """Compute a value for all positions of its side, (B or 1, H or 1, Nq or 1, Nk or 1)."""
        found = self._tables.get(x)
        if found is None:
            found = self._tables[x] = self.computed(x, self.place.lengths())
        return found

    def computed(self, x: Node, lengths: Mapping[str, Tensor], grad: bool = False) -> Tensor:
        """Compute a value for some indices of each argument, with gradients of the captured tensors if asked."""
        at = {
            name: lengths[name].reshape([-1 if i == j else 1 for j in range(4)])
            for i, name in enumerate(MASK_ARGUMENTS)
        }
        try:
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                return evaluated(Graph(self.graph.nodes, x, self.graph.tensors, None), at)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise UntraceableError(f"a value of one side cannot be computed: {error}"[:120]) from error


class _DependsOnCall(Exception):  # noqa: N818  (no error: the reader goes on in another way)
    """The pairs of a mask depend on the call."""


class _OfAnyCall(Reader):
    """Reads pairs without the positions of a call."""

    def computed(self, x: Node, lengths: Mapping[str, Tensor], grad: bool = False) -> Tensor:
        """Raise: a computed value depends on the call."""
        raise _DependsOnCall

    def _end(self, argument: Node) -> int:
        raise _DependsOnCall


def _is_bool(x: Any) -> bool:
    return type(x) is bool or (_is_number(x) and x.dtype == torch.bool)


def _is_number(x: Any) -> bool:
    return type(x) is Node and x.shape == ()


def _is_argument(x: Node, name: str | None = None) -> bool:
    return x.name == "argument" and (name is None or x.args[0] == name)


def _two_sided(x: Any) -> bool:
    deps = deps_of(x)
    return bool(deps & Q and deps & K)


def _only_through(x: Node, mine: Node) -> bool:
    """Return whether a value depends on the query through another value alone."""
    ahead: list[Node] = [x]
    seen: set[Node] = set()
    while ahead:
        node = ahead.pop()
        if node is mine or not node.deps & Q or node in seen:
            continue
        if node.name == "argument":
            return False
        seen.add(node)
        ahead += nodes_in((node.args, node.kwargs))
    return True


def _side(x: Any) -> str:
    deps = deps_of(x) & (Q | K)
    return {0: "", Q: "q", K: "k"}.get(deps, "both")


def _size(values: Tensor) -> int:
    """Return the largest absolute value of whole numbers."""
    return max(-int(values.amin()), int(values.amax()))


def operands(x: Node, name: str) -> list[Any]:
    """Return the operands of nested ``and`` or ``or`` in order: a long chain would need a deep stack."""
    found: list[Any] = []
    left: list[Any] = [x]
    while left:
        each = left.pop()
        known = type(each) is Node and _LOGICAL.get(each.name, each.name) == name and not each.kwargs
        if known and all(map(_is_bool, each.args)):
            left += reversed(each.args)
        else:
            found.append(each)
    return found


def _holds(number: Any, x: Any) -> bool:
    """Return whether a value has the dtype's range for a number; torch wraps a number to the dtype of a tensor."""
    if type(number) is not int or type(x) is not Node or x.dtype not in _INTEGERS:
        return True
    info = torch.iinfo(x.dtype)
    return info.min <= number <= info.max
