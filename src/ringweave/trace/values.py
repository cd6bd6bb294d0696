"""The values of a graph at the positions of a call: exact sums of whole numbers, and tables of one side.

The graph proves on which side of a pair a value depends. The value is then computed for all positions of the call, in
time linear in their number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..types import Place
from .evaluate import evaluated
from .graph import MASK_ARGUMENTS, B, Graph, H, K, Node, Q, UntraceableError, deps_of, nodes_in

# Factors and constants up to which a sum of positions does not overflow, and sums of tables that do not.
_LARGE, RANGE = 2**31, 2**63
# float32 represents the sums and differences of positions up to this one exactly
_EXACT = 2**23
INTEGERS = frozenset([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
#: Comparisons with their opposites.
OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
_MAXIMA = ("abs", "maximum", "minimum")
#: Operations that return their operand, or convert it to another dtype.
COPIES = ("to", "clone", "contiguous")


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
        return sum(times for node, times in self.terms.items() if is_argument(node, name))


class Values:
    """The values of a graph at the positions of a call.

    Args:
        graph: The graph.
        place: Indices of the call.
        counted: Captured tables that count tokens: in all pairs that matter, entries at q and at k differ by q - k.
    """

    def __init__(self, graph: Graph, place: Place, counted: Collection[Node] = ()):
        self.graph, self.place, self.counted = graph, place, counted
        #: Bits of the arguments with several values.
        self.several = (B if place.batch > 1 else 0) | (H if place.heads > 1 else 0) | Q | K
        self._linear: dict[Node, Linear] = {}
        self._by_distance: dict[Node, bool] = {}
        self._tables: dict[Node, Tensor] = {}
        self._wholes: dict[Node, Linear | None] = {}

    # ---- sums of whole numbers

    def linear(self, x: Any) -> Linear | None:
        """Return a value of whole numbers as a sum; None for another value."""
        if type(x) is int or type(x) is bool:
            return Linear({}, int(x)) if abs(x) < RANGE // 4 else None
        if not is_number(x) or (x.dtype not in INTEGERS and x.dtype != torch.bool):
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
        if is_argument(x) and not x.deps & self.several:
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
        elif x.name in COPIES and type(args[0]) is Node and args[0].dtype in INTEGERS:
            # a position fits int32, and any other value fits int64
            inner = self.linear(args[0])
            if inner is not None and (x.dtype == torch.int64 or is_argument(args[0])):
                found = inner
        if x.dtype == torch.int32 and found is not alone and not self.in_range(found, 2**31):
            return alone
        return found

    def in_range(self, x: Linear, bound: int = RANGE) -> bool:
        """Return whether a sum, and each of its parts in any order, is below a bound."""
        if len(x.terms) == 1 and not x.constant and bound == 2**31:
            return next(iter(x.terms.values())) == 1
        if any(map(two_sided, x.terms)):
            return False
        return sum(self._most(node) * abs(times) for node, times in x.terms.items()) + abs(x.constant) < bound

    def _most(self, x: Node) -> int:
        """Return a bound on the absolute value of a term of one side."""
        if not torch.compiler.is_compiling():
            return size_of(self.table(x))
        if is_argument(x):
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
        if x.name == "to":
            return self.whole(x.args[0])
        if x.name not in ("add", "sub", "neg") or x.kwargs:
            return None
        parts = [self.whole(each) for each in x.args]
        sums = [part for part in parts if part is not None and all(map(is_argument, part.terms))]
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

    def largest(self, x: Linear) -> tuple[Node, Linear, list[Linear]] | None:
        """Return a term that is a maximum or a minimum of sums of both sides, the other terms, and these sums."""
        for node, times in x.terms.items():
            if node.name in _MAXIMA and not node.kwargs and two_sided(node):
                # torch.compile traces no `:=` in a list here
                found = [self.linear(each) for each in node.args]
                parts = [part for part in found if part is not None]
                if len(parts) < len(node.args) or (node.name == "abs" and _may_wrap(node, parts[0])):
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
        if is_argument(x):
            return None, x.args[0]
        if x.name == "index" and x.args[0] in self.counted:
            *element, token = x.args[1]
            if type(token) is Node and is_argument(token) and not deps_of(element) & (Q | K):
                return x.args[0], token.args[0]
        return None, ""

    def sides(self, x: Linear) -> tuple[Tensor, Tensor] | None:
        """Return u of the query and v of the key with x = u - v modulo 2**64; None if a term depends on both."""
        if any(map(two_sided, x.terms)):
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

    def mirrored(self, x: Linear) -> bool:
        """Return whether x is f(q) - f(k) for one function f."""
        q = {self._formula(node): times for node, times in x.terms.items() if node.deps & Q}
        k = {self._formula(node): -times for node, times in x.terms.items() if node.deps & K}
        return q == k and not x.constant and all(node.deps & (Q | K) for node in x.terms)

    def same(self, a: Any, b: Any) -> bool:
        """Return whether values are one function of the query and of the key."""
        return {side_of(a), side_of(b)} == {"q", "k"} and self._formula(a) == self._formula(b)

    def _formula(self, x: Any) -> Any:
        """Return the formula of a value with one name for the query and the key."""
        if type(x) is not Node:
            return tuple(map(self._formula, x)) if type(x) in (tuple, list) else repr(x)
        if not x.deps:
            return (x.number,)
        if is_argument(x):
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
        if x.name in OPPOSITE and not x.kwargs:
            a, b = map(self.linear, x.args)
            sums = None if a is None or b is None else a.plus(b, -1)
        if sums is not None and sums.terms != {x: 1}:
            rest = [node for node in sums.terms if not (is_argument(node, "q") or is_argument(node, "k"))]
            if sums.slope("q") == -sums.slope("k") and all(map(self.by_distance, rest)):
                return True
        return two_sided(x) and self.by_distance((x.args, x.kwargs))

    def distances(self) -> dict[str, Tensor]:
        """Return indices with every distance of the call: a query at 0 and keys at minus the distances."""
        place, zero = self.place, torch.zeros(1, dtype=torch.int64, device=self.place.device)
        first, last = place.q0 - place.k0 - place.nk + 1, place.q0 - place.k0 + place.nq - 1
        return {"b": zero, "h": zero + place.h0, "q": zero, "k": -torch.arange(first, last + 1, device=place.device)}

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


class DependsOnCallError(Exception):
    """A value depends on the call."""


class ValuesOfAnyCall(Values):
    """Values that are known without the positions of a call."""

    def computed(self, x: Node, lengths: Mapping[str, Tensor], grad: bool = False) -> Tensor:
        """Raise: a computed value depends on the call."""
        raise DependsOnCallError

    def _end(self, argument: Node) -> int:
        raise DependsOnCallError


def _may_wrap(x: Node, part: Linear) -> bool:
    """Return whether the absolute value of the least number of a small dtype, which is that number, may be met."""
    # a sum of positions or tables in int32 does not meet it, and a tabulated value of int64 is checked
    return x.dtype not in (torch.int64, torch.uint8) and part.terms == {x.args[0]: 1}


def is_bool(x: Any) -> bool:
    """Return whether a value is a bool for each pair."""
    return type(x) is bool or (is_number(x) and x.dtype == torch.bool)


def is_number(x: Any) -> bool:
    """Return whether a value is a number for each pair."""
    return type(x) is Node and x.shape == ()


def is_argument(x: Node, name: str | None = None) -> bool:
    """Return whether a node is an argument, or the one with a name."""
    return x.name == "argument" and (name is None or x.args[0] == name)


def two_sided(x: Any) -> bool:
    """Return whether a value depends on query and key."""
    deps = deps_of(x)
    return bool(deps & Q and deps & K)


def side_of(x: Any) -> str:
    """Return "q" or "k" for a value of one side, "both", or ""."""
    deps = deps_of(x) & (Q | K)
    return {0: "", Q: "q", K: "k"}.get(deps, "both")


def size_of(values: Tensor) -> int:
    """Return the largest absolute value of whole numbers."""
    return max(-int(values.amin()), int(values.amax()))
