"""Recognise the graph of a score function as score terms: soft caps and biases after a factor, under a mask.

The graph proves what a bias depends on, and its values are then computed for all positions that it depends on.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_compat import wrapped
from ..types import Place
from .graph import MASK_ARGUMENTS, SCORE, B, Graph, H, K, Node, Q, UntraceableError, deps_of
from .operations import name_of
from .values import COPIES, Values

#: Name of a kind of ``ringweave.terms``, and its number or table.
Term = tuple[str, float | Tensor]
# Operations on the score that are read; a longer formula would have as many tables of distances.
_MOST = 64


class Terms(NamedTuple):
    """A score function: ``factor * score`` under the terms at the pairs that all masks allow, and -inf at others.

    Attributes:
        factor: Number that first multiplies the score.
        terms: The terms, in order.
        masks: Graphs of (b, h, q, k) that return a bool, and whether they allow the pairs where it is False.
    """

    factor: float
    terms: tuple[Term, ...]
    masks: tuple[tuple[Graph, bool], ...]


def as_terms(graph: Graph, place: Place) -> Terms:
    """Return a score function as terms.

    Raises:
        UntraceableError: The function is no sequence of terms; the text says why.
    """
    try:
        return _Formula(graph, place).read()
    except (RecursionError, OverflowError) as error:
        # more operations than Python's stack has room for, or a bias that is added more often than floats can count
        raise UntraceableError("its formula is nested too deeply") from error


class _Formula:
    """The formula of a score function, read for the positions of a call."""

    def __init__(self, graph: Graph, place: Place):
        self.graph, self.place, self.positions = graph.typed(), place, Values(graph, place)
        self.dtype = next(node.dtype for node in graph.nodes if node.name == "argument" and node.deps == SCORE)

    def read(self) -> Terms:
        """Read the formula from its last operation to the score."""
        x: Any = self.graph.result
        if not _of_score(x):
            raise UntraceableError("its result does not depend on the score")
        if x.shape != () or not x.dtype.is_floating_point:
            raise UntraceableError("its result is not one floating number for each pair")
        masks = list[tuple[Graph, bool]]()
        while (masked := _masked(x)) is not None:
            x, condition, no = masked
            graph = self.graph
            masks.append((Graph(graph.nodes, condition, graph.tensors, (graph.key, condition.number)), no))
        terms, factor, scaled = list[Term](), 1.0, False
        for _ in range(_MOST):
            if x.name == "argument":
                return Terms(factor, tuple(terms), tuple(masks))
            x, before, by = self._step(x)
            if before and scaled:
                raise UntraceableError("it multiplies the score after a soft cap or a bias")
            terms[:0] = before
            if by is not None:
                factor, scaled = factor * by, True
        raise UntraceableError("its formula is nested too deeply")

    def _step(self, x: Node) -> tuple[Node, list[Term], float | None]:
        """Return the score before an operation, and the terms that the operation is, or the factor."""
        name, args = x.name, x.args
        if name in COPIES and x.dtype == args[0].dtype == self.dtype:
            return args[0], [], None
        if name in ("add", "sub") and len(args) == 2 and not x.kwargs:
            left, right = map(_of_score, args)
            if left != right and not (name == "sub" and right):
                score, bias = args if left else args[::-1]
                return score, self._biases(bias, -1 if name == "sub" else 1), None
        capped = _capped(x)
        if capped is not None:
            return capped[0], [("Softcap", capped[1])], None
        if name == "neg":
            return args[0], [], -1.0
        if name in ("mul", "div") and not x.kwargs:
            score, number = _factored(x)
            factor = _number(number)
            if factor and _of_score(score):
                return score, [], factor if name == "mul" else 1 / factor
        raise UntraceableError(f"{_called(x)} of the score is no score term")

    # ---- biases

    def _biases(self, bias: Any, sign: int) -> list[Term]:
        """Return the terms that add a bias.

        A sum that is no term is split, and a summand of several sums is one term.
        """
        terms = list[Term]()
        # Counts of the summands by number. Numbers increase in the graph, so all sums of a summand are split before it.
        summands, counts, numbers = dict[int, Node](), dict[int, int](), list[tuple[Any, int]]()

        def add(summand: Any, count: int) -> None:
            if type(summand) is not Node:
                numbers.append((summand, count))
                return
            summands[summand.number] = summand
            counts[summand.number] = counts.get(summand.number, 0) + count

        add(bias, sign)
        while summands:
            number = max(summands)
            summand, count = summands.pop(number), counts.pop(number)
            term, name, args = self._bias(summand, count), summand.name, summand.args
            splits = not summand.kwargs and summand.dtype in _WIDE
            if term is not None:
                terms.append(term)
            elif name == "neg" and splits:
                add(args[0], -count)
            elif name in ("add", "sub") and len(args) == 2 and splits:
                add(args[0], count)
                add(args[1], -count if name == "sub" else count)
            else:
                by = "neither their distance nor a table of the caller by b, h, q and k"
                raise UntraceableError(f"its bias depends on query and key by {by}")
        return [*terms, *(self._distance_bias(number, count) for number, count in numbers)]

    def _bias(self, x: Node, count: int) -> Term | None:
        """Return the term that adds a bias ``count`` times, or None."""
        if not count:
            # 0, unless a value is infinite
            raise UntraceableError("its bias subtracts a value from itself")
        deps = self._deps(x)
        if not deps & B and self.positions.by_distance(x):
            return self._alibi(x, count) or self._distance_bias(x, count)
        table = self._entry(x) if count == 1 else None
        if table is None and deps & (Q | K) != Q | K:
            table = self._by_side(x, count)
        return ("Bias", table) if table is not None and table.is_floating_point() else None

    def _deps(self, x: Any) -> int:
        """Return the bits of what a value depends on; the only batch element and the only head are 0."""
        return deps_of(x) & ~(B if self.place.batch == 1 else 0) & ~(H if self.place.heads == 1 else 0)

    def _values(self, x: Any, **positions: Tensor) -> Tensor:
        """Compute a value at positions, 0 unless given, along four dimensions."""
        if type(x) is not Node:
            return torch.tensor(x, dtype=self.dtype, device="cpu").reshape(1, 1, 1, 1)
        if x.shape != () or x.dtype.is_complex:
            raise UntraceableError("its bias is not one number for each pair")
        zero = torch.zeros(1, dtype=torch.int64, device="cpu")
        return self.positions.computed(x, {name: positions.get(name, zero) for name in MASK_ARGUMENTS}, grad=True)

    def _alibi(self, x: Node, count: int) -> Term | None:
        """Return the term of slopes without gradients times the absolute distance, or None for another bias."""
        count, product = -count, x
        while product.name == "neg":
            count, product = -count, product.args[0]
        # the dtype in which the function rounds the product, or has it exactly
        if product.name != "mul" or product.dtype not in (self.dtype, torch.int64):
            return None
        for slope, distance in (product.args, product.args[::-1]):
            own = count
            if type(distance) is Node and distance.name == "neg":
                own, distance = -own, distance.args[0]
            if self._is_absolute(distance) and not self._deps(slope) & ~H:
                slopes = self._values(slope, h=self._all("h"))[0, :, 0, 0]
                if slopes.requires_grad:
                    return None
                return "ALiBi", (slopes.to(self.dtype) * float(own)).expand(self.place.heads)
        return None

    def _is_absolute(self, x: Any) -> bool:
        """Return whether a value is the distance between query and key."""
        if type(x) is not Node or x.name != "abs":
            return False
        line = self.positions.whole(x.args[0])
        return line is not None and self.positions.distance(line) in ((1, 0), (-1, 0))

    def _distance_bias(self, x: Any, count: int) -> Term:
        """Tabulate a bias by head and distance, for every distance of the call."""
        place, deps, at = self.place, self._deps(x), dict[str, Tensor]()
        if deps & H:
            at["h"] = self._all("h")
        first = last = 0
        if deps & (Q | K):
            first, last = place.k0 - place.q0 - place.nq + 1, place.k0 - place.q0 + place.nk - 1
        if first or last:
            # a query at 0 and a key at the distance stand for all pairs of this distance
            at["k"] = torch.arange(first, last + 1, device="cpu")
        table = self._values(x, **at)[0, :, 0].to(self.dtype) * float(count)
        if table.requires_grad and not bool(table.isfinite().all()):
            # the gradient of an entry that no pair uses is 0, and its product with an infinite derivative is NaN
            raise UntraceableError("its bias is not finite at a distance, and needs gradients")
        reach = max(-first, last)
        if -first != last:
            # distances that no pair of the call has
            table = torch.nn.functional.pad(table, (reach + first, reach - last))
        return "DistanceBias", table.expand(place.heads, -1)

    def _by_side(self, x: Node, count: int) -> Tensor:
        """Tabulate a bias that depends on the query or the key, not both."""
        place, deps = self.place, self._deps(x)
        bits = zip(MASK_ARGUMENTS, (B, H, Q, K), strict=True)
        at = {name: self._all(name) for name, bit in bits if deps & bit}
        table = self._values(x, **at).to(self.dtype) * float(count)
        if table.requires_grad:
            # the gradient of a Bias is a table of all pairs
            raise UntraceableError("its bias of queries or keys needs gradients, which the term sums for all pairs")
        return table.expand(-1, -1, place.nq, place.nk)

    def _all(self, name: str) -> Tensor:
        return self.place.lengths()[name]

    def _entry(self, x: Any) -> Tensor | None:
        """Return the caller's table as (B or 1, H or 1, Nq, Nk) if the bias is an entry of it, or None."""
        indices: list[Any] = []
        while x.deps:
            if x.name != "index":
                return None
            x, index = x.args
            indices.append(index)
        table, place = x.value, self.place
        sizes = dict(zip(MASK_ARGUMENTS, place[:4], strict=True))
        firsts = {"b": 0, "h": place.h0, "q": place.q0, "k": place.k0}
        # names of the axes that were indexed
        axes: list[str | None] = [None] * table.ndim
        for index in reversed(indices):
            dim = -1
            for each in index:
                dim = next((i for i in range(dim + 1, len(axes)) if axes[i] is None), len(axes))
                if dim == len(axes):
                    return None
                if type(each) is int and -table.shape[dim] <= each < table.shape[dim]:
                    table = table.select(dim, each)
                    del axes[dim]
                    dim -= 1
                elif (shifted := _shifted(each)) is not None:
                    name, first = shifted
                    first += firsts[name]
                    if name in axes or not 0 <= first <= table.shape[dim] - sizes[name]:
                        return None
                    table, axes[dim] = table.narrow(dim, first, sizes[name]), name
                elif each != slice(None):
                    return None
        if None in axes or not {"q", "k"} <= set(axes):
            return None
        found: Tensor = table.permute([axes.index(name) for name in MASK_ARGUMENTS if name in axes])
        for dim, name in enumerate(MASK_ARGUMENTS):
            if name not in axes:
                found = found.unsqueeze(dim)
        return found


# a sum of fewer bits wraps, or is rounded so that its summands show
_WIDE = frozenset([torch.float32, torch.float64, torch.int64])


def _called(x: Node) -> str:
    return name_of(x.function) if x.name == "call" else x.name


def _of_score(x: Any) -> bool:
    return type(x) is Node and bool(x.deps & SCORE)


def _masked(x: Node) -> tuple[Node, Node, bool] | None:
    """Return (score, condition, whether it is negated) of a score that is -inf elsewhere, or None for another value."""
    if x.kwargs or len(x.args) != 3:
        return None
    if x.name == "where":
        condition, held, other = x.args
    elif x.name == "masked_fill":
        other, condition, held = x.args
    else:
        return None
    no = _is_lowest(held)
    if type(condition) is not Node or _of_score(condition) or not (no or _is_lowest(other)):
        return None
    score = other if no else held
    return (score, condition, no) if _of_score(score) else None


def _is_lowest(x: Any) -> bool:
    return _constant(x) == -math.inf


def _capped(x: Node) -> tuple[Node, float] | None:
    """Return (score, cap) of ``cap * tanh(score / cap)`` in any of its spellings, or None."""
    if x.name != "mul":
        return None
    tanh, factor = _factored(x)
    cap = _number(factor)
    if not cap or type(tanh) is not Node or tanh.name != "tanh":
        return None
    inner = tanh.args[0]
    if inner.name not in ("mul", "div") or inner.kwargs:
        return None
    score, number = _factored(inner)
    by = _number(number)
    same = by is not None and by == (cap if inner.name == "div" else 1 / cap)
    return (score, abs(cap)) if same and _of_score(score) else None


def _factored(x: Node) -> tuple[Any, Any]:
    """Return the operands of a product or quotient, that with the score first if it may be."""
    left, right = x.args
    return (left, right) if x.name == "div" or _of_score(left) else (right, left)


def _shifted(x: Any) -> tuple[str, int] | None:
    """Return the name of an argument and the whole number that is added to it, or None for another index."""
    if type(x) is not Node:
        return None
    if x.name == "argument":
        return x.args[0], 0
    if x.name not in ("add", "sub") or x.kwargs:
        return None
    base, number = x.args
    if type(base) is int and x.name == "add":
        base, number = number, base
    if type(base) is not Node or base.name != "argument" or type(number) is not int:
        return None
    return base.args[0], number if x.name == "add" else -number


def _constant(x: Any) -> float | None:
    """Return the value of a number, or of a tensor without dimensions and gradient; None for anything else."""
    if type(x) is Node:
        x = x.value
        if not isinstance(x, Tensor) or x.ndim or x.requires_grad or x.is_complex() or x.dtype == torch.bool:
            return None
        x = None if wrapped(x) else x.item()
    return float(x) if type(x) in (int, float) else None


def _number(x: Any) -> float | None:
    """Return the value of a finite constant; None for anything else."""
    value = _constant(x)
    return value if value is not None and math.isfinite(value) else None
