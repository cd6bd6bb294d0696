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
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..types import Place
from .evaluate import elementwise
from .graph import B, Graph, H, Node, Q, UntraceableError, nodes_in
from .values import (
    COPIES,
    INTEGERS,
    OPPOSITE,
    RANGE,
    DependsOnCallError,
    Linear,
    Values,
    ValuesOfAnyCall,
    is_argument,
    is_bool,
    is_number,
    side_of,
    size_of,
    two_sided,
)

#: Ascending disjoint intervals (least, most), both included; infinite for an open end.
Runs: TypeAlias = tuple[tuple[float, float], ...]
#: Most intervals in a set of distances that is found by tabulation.
MOST_RUNS = 256
# most leaves of a relation: `^` doubles them, and so does an absolute value in a sum
_MOST_LEAVES = 512
_FLOATS = frozenset([torch.float64, torch.float32, torch.float16, torch.bfloat16])
_LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor", "logical_not": "invert"}
_MIRROR = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


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
        return Reader(Values(graph, place, counted)).pairs()
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
    reader = Reader(ValuesOfAnyCall(graph, Place(2, 2, 2, 2), counted), given)
    try:
        found = reader.pairs()
    except (DependsOnCallError, RecursionError):
        return None
    return found.runs if isinstance(found, Distances) else None


class Reader:
    """Reads the nodes of a graph as pairs.

    Args:
        values: The values of the graph at the positions of a call.
        given: As in :func:`distances_of`.

    While torch.compile traces, the values of captured tables are unknown, and lengths may be. Positions and factors are
    below 2**31 in every call. A comparison of other whole numbers is left as it is written, since moving a term might
    overflow. Values are not tabulated by distance, and entries at both sides are left open.
    """

    def __init__(self, values: Values, given: Node | None = None):
        self.graph, self.values, self.given = values.graph, values, given
        self._read: dict[tuple[Node, bool], Relation] = {}

    # ---- logic

    def pairs(self) -> Relation:
        """Return the pairs of the graph.

        Raises:
            UntraceableError: As of :func:`as_relation`.
        """
        result = self.graph.typed().result
        if not is_bool(result):
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
            if len(listed) > _MOST_LEAVES or (two_sided(x) and any(type(leaf) is Open for leaf in listed)):
                # a set of distances as a whole may have fewer intervals than its parts
                whole = self._of_distance(x) if self.values.by_distance(x) else None
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
        if not x.kwargs and all(map(is_bool, args[:1] if name in COPIES else args)):
            found = self._of_bools(x, name, no)
            if found is not None:
                return found
        if name in OPPOSITE and not x.kwargs:
            found = self._compared(OPPOSITE[name] if no else name, *args)
            if found is not None:
                return found
        if not two_sided(x):
            table = self.values.table(x)
            return side(~table if no else table)
        found = self._looked_up(x) or self._member(x) or Open(x, self.graph)
        return Not(found) if no else found

    def _of_bools(self, x: Node, name: str, no: bool) -> Relation | None:
        args = x.args
        if name == "invert":
            return self.read(args[0], not no)
        if name in COPIES:
            return self.read(args[0], no)
        if name in ("and", "or", "mul", "add"):
            kind = And if (name in ("and", "mul")) != no else Or
            parts = operands(x, name)
            moved = self._of_equals(parts) if name in ("and", "mul") else ()
            return joined(kind, [self._of_keys(each, no) if each in moved else self.read(each, no) for each in parts])
        if name == "where":
            c, a, b = args
            return joined(Or, [self._both(c, False, a, no), self._both(c, True, b, no)])
        if name in ("xor", "ne", "eq") and two_sided(x) and any(map(two_sided, args)):
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
        of_query = [part for part in parts if side_of(part) == "q"]
        for equal in parts if of_query else ():
            if type(equal) is Node and equal.name == "eq" and not equal.kwargs and self.values.same(*equal.args):
                mine = equal.args[0] if side_of(equal.args[0]) == "q" else equal.args[1]
                found |= {part for part in of_query if _only_through(part, mine)}
        return found

    def _of_keys(self, x: Node, no: bool) -> Relation:
        """Return a condition on the query, computed for the keys."""
        lengths = self.values.place.lengths()
        table = self.values.computed(x, {**lengths, "q": lengths["k"]}).transpose(2, 3)
        return side(~table if no else table)

    # ---- comparisons

    def _compared(self, name: str, a: Any, b: Any) -> Relation | None:
        """Return the pairs of a comparison; None if it is no relation of sums or of sides."""
        left, right = self.values.linear(a), self.values.linear(b)
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
        largest = self.values.largest(x)
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
        line = self.values.distance(x)
        if line is not None:
            # times * (q - k) + constant <= 0
            times, constant = line
            if times == 0:
                return ALL if constant <= 0 else NOTHING
            if times > 0:
                return Distances(((-math.inf, -constant // times),))
            return Distances(((-(-constant // -times), math.inf),))
        if x.constant <= 0 and all(is_argument(node) and times < 0 for node, times in x.terms.items()):
            return ALL  # positions are not negative
        sides = self.values.sides(x)
        if sides is None:
            return self._tabulated(x, lambda value: value <= 0)
        if not self.values.in_range(x):
            return None
        u, v = sides
        return side(u <= v) if u.shape[2] == 1 or v.shape[3] == 1 else Order(u, v)

    def _zero(self, x: Linear, no: bool) -> Relation | None:
        """Return the pairs with x == 0, or with ``no`` the others."""
        if self.values.largest(x) is not None:
            least, most = self._at_most(x.negative()), self._at_most(x)
            if least is None or most is None:
                return None
            found = joined(And, [least, most])
            return negated(found) if no else found
        line = self.values.distance(x)
        if line is not None:
            times, constant = line
            if times == 0:
                found = NOTHING if constant else ALL
            else:
                found = NOTHING if constant % times else Distances(((-constant // times,) * 2,))
            return negated(found) if no else found
        sides = self.values.sides(x)
        if sides is None:
            return self._tabulated(x, (lambda value: value != 0) if no else (lambda value: value == 0))
        u, v = sides
        if u.shape[2] == 1 or v.shape[3] == 1:
            return side((u != v) if no else (u == v))
        equal = Equal(u, v, self.values.mirrored(x))
        return Not(equal) if no else equal

    def _as_written(self, name: str, a: Any, b: Any) -> Relation | None:
        """Compare a value of the query with one of the key as torch does, without moving a term."""
        if {side_of(a), side_of(b)} != {"q", "k"} or not (is_number(a) and is_number(b)):
            return None
        if side_of(a) == "k":
            a, b, name = b, a, _MIRROR[name]
        u, v = self.values.table(a), self.values.table(b)
        common = torch.promote_types(a.dtype, b.dtype)
        u, v = u.to(common), v.to(common)
        if common in _FLOATS:
            if torch.compiler.is_compiling() or bool(u.isnan().any() | v.isnan().any()):
                return None
        elif common not in INTEGERS:
            return None
        if name in ("eq", "ne"):
            equal = Equal(u, v, self.values.same(a, b))
            return equal if name == "eq" else Not(equal)
        if name in ("le", "gt"):
            return Order(u, v) if name == "le" else Not(Order(u, v))
        # u >= v is -u <= -v, and ~ of whole numbers reverses their order without overflow
        reverse = torch.neg if common in _FLOATS else torch.bitwise_not
        greater = Order(reverse(u), reverse(v))
        return greater if name == "ge" else Not(greater)

    def _of_distance(self, x: Node) -> Distances | None:
        """Tabulate a bool of the distance alone."""
        if x.deps & (B | H) & self.values.several:
            return None
        return self._runs(self.values.computed(x, self.values.distances()).flatten())

    def _tabulated(self, x: Linear, holds: Callable[[Tensor], Tensor]) -> Distances | None:
        """Tabulate whether a sum of the distance alone holds; None for another sum, or for too many intervals."""
        others = [node for node in x.terms if not is_argument(node)]
        known = x.slope("q") == -x.slope("k") and all(map(self.values.by_distance, others))
        if not known or any(node.deps & (B | H) & self.values.several for node in x.terms):
            return None
        at = self.values.distances()
        total, most = torch.full_like(at["k"], x.constant), abs(x.constant)
        for node, times in x.terms.items():
            values = self.values.computed(node, at).long().flatten()
            total, most = total + values * times, most + size_of(values) * abs(times)
        return self._runs(holds(total)) if most < RANGE else None

    def _runs(self, holds: Tensor) -> Distances | None:
        first = self.values.place.q0 - self.values.place.k0 - self.values.place.nk + 1
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
            torch.tensor(part, device=table.device).reshape(1, 1, 1, 1)
            if type(part) is int
            else self.values.table(part)
            for part in at
        ]
        for part, count in zip(indices, table.shape, strict=True):
            if int(part.amin()) < -count or int(part.amax()) >= count:
                raise UntraceableError("an index is out of range")
        return Lookup(table, tuple(part.long() for part in indices))

    def _entries(self, x: Node) -> tuple[Tensor, tuple[Any, ...]] | None:
        if x.name == "index" and not x.args[0].deps and isinstance(x.args[0].value, Tensor):
            table, at = x.args[0].value, x.args[1]
            known = all(type(part) is int or (type(part) is Node and not two_sided(part)) for part in at)
            return (table.detach().to(self.values.place.device), at) if known and len(at) == table.ndim else None
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
        if x.name != "call" or not x.args or getattr(x.function, "__name__", "") != "any":
            return None
        # a number of one row, so it is over the only dimension, however that is written
        equal = x.args[0]
        if type(equal) is not Node or equal.name != "eq" or len(equal.shape) != 1:
            return None
        rows, v = equal.args if side_of(equal.args[0]) == "q" else equal.args[::-1]
        if type(rows) is not Node or type(v) is not Node or (side_of(rows), side_of(v)) != ("q", "k"):
            return None
        if len(rows.shape) != 1 or v.shape not in ((), (1,)) or rows.dtype != v.dtype:
            return None
        keys = self.values.table(v)
        return Member(self.values.table(rows), keys if v.shape == () else keys[..., 0])


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


def operands(x: Node, name: str) -> list[Any]:
    """Return the operands of nested ``and`` or ``or`` in order: a long chain would need a deep stack."""
    found: list[Any] = []
    left: list[Any] = [x]
    while left:
        each = left.pop()
        known = type(each) is Node and _LOGICAL.get(each.name, each.name) == name and not each.kwargs
        if known and all(map(is_bool, each.args)):
            left += reversed(each.args)
        else:
            found.append(each)
    return found


def _holds(number: Any, x: Any) -> bool:
    """Return whether a value has the dtype's range for a number; torch wraps a number to the dtype of a tensor."""
    if type(number) is not int or type(x) is not Node or x.dtype not in INTEGERS:
        return True
    info = torch.iinfo(x.dtype)
    return info.min <= number <= info.max
