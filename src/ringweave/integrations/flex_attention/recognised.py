"""Recognise score functions that are score terms, by the structure of their formulas.

A function is recognised if its result is the score, possibly multiplied by a number, under a chain of soft caps and
added biases. A bias is recognised if it depends on the head and the distance of the pair, on either the query or the
key, or if it looks up a table of the caller by batch element, head, query and key. Nothing is inferred from numbers.
The terms are compared with the function at some pairs before they are trusted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ShapeError
from ...patterns.per_pair import per_pair
from ...terms import ALiBi, Bias, DistanceBias, Softcap, Term
from .agreement import Sizes, agrees
from .symbols import ARGUMENTS, BATCH, HEAD, KEY, QUERY, SCORE, Symbol, UntraceableError, computed, symbols_in, traced


class Recognised(NamedTuple):
    """A score function as terms.

    Attributes:
        factor: Number by which it first multiplies the score.
        terms: The terms, in order.
    """

    factor: float
    terms: tuple[Term, ...]


def recognised(score_mod: Callable[..., Any] | None, sizes: Sizes) -> Recognised:
    """Return a score function as terms.

    Raises:
        UntraceableError: The function is not recognised; the text says why.
    """
    if score_mod is None:
        return Recognised(1.0, ())
    result, trace = traced(score_mod, sizes.dtype)
    if not isinstance(result, Symbol) or SCORE not in result.uses:
        raise UntraceableError("its result does not depend on the score")
    try:
        found = _chain(result, sizes)
    except RecursionError as error:
        raise UntraceableError("its formula is nested too deeply") from error
    except ShapeError as error:
        raise UntraceableError(f"a term does not take its values: {error}") from error
    if not agrees(score_mod, trace, found.factor, found.terms, sizes):
        raise UntraceableError("it computes another value than its formula does when it is traced")
    return found


# ---- the formula of the score ----------------------------------------------------------------------------------------


def _names() -> dict[Any, str]:
    spellings: dict[str, list[Any]] = {
        "add": [operator.add, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__],
        "sub": [operator.sub, torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__],
        "rsub": [torch.rsub, Tensor.__rsub__],
        "mul": [operator.mul, torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__],
        "div": [
            *(operator.truediv, torch.div, torch.divide, torch.true_divide),
            *(Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.__truediv__),
        ],
        "rdiv": [Tensor.__rdiv__, Tensor.__rtruediv__],
        "neg": [operator.neg, torch.neg, torch.negative, Tensor.neg, Tensor.negative, Tensor.__neg__],
        "abs": [operator.abs, torch.abs, torch.absolute, Tensor.abs, Tensor.absolute, Tensor.__abs__],
        "tanh": [torch.tanh, Tensor.tanh, torch.nn.functional.tanh],
        "getitem": [operator.getitem, Tensor.__getitem__],
        "float": [Tensor.float],
        "double": [Tensor.double],
        "to": [Tensor.to, Tensor.type],
        "compare": [],
    }
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        own = [getattr(operator, name), getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"__{name}__")]
        spellings["compare"] += own
    for name in ("less", "less_equal", "greater", "greater_equal", "not_equal"):
        spellings["compare"] += [getattr(torch, name), getattr(Tensor, name)]
    return {function: name for name, functions in spellings.items() for function in functions}


_NAMES = _names()


def _operation(x: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the name and the arguments of a known operation of two numbers or one; ("", ()) for another value."""
    if not isinstance(x, Symbol) or x.function is None:
        return "", ()
    name, args = _NAMES.get(x.function, ""), x.args
    if x.kwargs or not name:
        return "", ()
    if name in ("rsub", "rdiv"):
        name, args = name[1:], args[::-1]
    return name, args


def _number(x: Any) -> float | None:
    """Return the value of a number, or of a tensor with one entry and no gradient; None for anything else."""
    if isinstance(x, Tensor):
        if x.numel() != 1 or x.ndim or x.requires_grad or x.is_complex() or x.dtype == torch.bool:
            return None
        x = x.item()
    if isinstance(x, (bool, complex)) or not isinstance(x, (int, float)):
        return None
    value = float(x)
    return value if math.isfinite(value) else None


def _of_score(x: Any) -> bool:
    return isinstance(x, Symbol) and SCORE in x.uses


def _chain(x: Symbol, sizes: Sizes) -> Recognised:
    """Read the formula from its last operation to the score."""
    if x.function is None:
        return Recognised(1.0, ())
    name, args = _operation(x)
    if name in ("float", "double", "to") and _keeps(name, args[1:], sizes.dtype):
        return _chain(args[0], sizes)
    if name in ("add", "sub") and len(args) == 2:
        left, right = args
        if _of_score(left) != _of_score(right) and not (name == "sub" and _of_score(right)):
            before, bias = (left, right) if _of_score(left) else (right, left)
            inner = _chain(before, sizes)
            return inner._replace(terms=(*inner.terms, *_biases(bias, -1 if name == "sub" else 1, sizes)))
    capped = _capped(name, args)
    if capped is not None:
        inner = _chain(capped[0], sizes)
        return inner._replace(terms=(*inner.terms, Softcap(capped[1])))
    scaled, factor = _scaled(name, args, sizes)
    if scaled is None:
        raise UntraceableError(f"{_called(x)} of the score is no score term")
    if scaled.terms:
        raise UntraceableError("it multiplies the score after a soft cap or a bias")
    return scaled._replace(factor=scaled.factor * factor)


def _called(x: Symbol) -> str:
    return _operation(x)[0] or getattr(x.function, "__name__", "an operation").strip("_")


def _keeps(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Return whether a conversion is to the dtype of the scores."""
    if name == "to":
        return len(args) == 1 and args[0] is dtype
    return not args and dtype == (torch.float32 if name == "float" else torch.float64)


def _scaled(name: str, args: tuple[Any, ...], sizes: Sizes) -> tuple[Recognised | None, float]:
    if name == "neg":
        return _chain(args[0], sizes), -1.0
    if name in ("mul", "div") and len(args) == 2:
        left, right = args if _of_score(args[0]) or name == "div" else args[::-1]
        factor = _number(right)
        if factor and _of_score(left):
            return _chain(left, sizes), factor if name == "mul" else 1 / factor
    return None, 1.0


def _capped(name: str, args: tuple[Any, ...]) -> tuple[Symbol, float] | None:
    """Return (score, cap) of ``cap * tanh(score / cap)`` in any of its spellings, or None."""
    if name != "mul" or len(args) != 2:
        return None
    factor, inner = args if isinstance(args[1], Symbol) and _of_score(args[1]) else args[::-1]
    cap, (tanh, of) = _number(factor), _operation(inner)
    if not cap or tanh != "tanh" or len(of) != 1:
        return None
    name, args = _operation(of[0])
    if len(args) != 2:
        return None
    left, right = args if _of_score(args[0]) or name == "div" else args[::-1]
    by = _number(right)
    same = by is not None and ((name == "div" and by == cap) or (name == "mul" and by == 1 / cap))
    return (left, abs(cap)) if same and _of_score(left) else None


# ---- biases ----------------------------------------------------------------------------------------------------------


def _biases(bias: Any, sign: int, sizes: Sizes) -> list[Term]:
    """Return the terms that add a bias; a sum that is no term is split, and a summand of several sums is one term."""
    terms, positions = list[Term](), _Positions(max(sizes.nq, sizes.nk))
    # Counts of the summands by number. Numbers increase in the trace, so all sums of a summand are split before it.
    sums, counts, constants = dict[int, Symbol](), dict[int, int](), list[tuple[Any, int]]()

    def add(summand: Any, count: int) -> None:
        if not isinstance(summand, Symbol):
            constants.append((summand, count))
            return
        sums[summand.number] = summand
        counts[summand.number] = counts.get(summand.number, 0) + count

    add(bias, sign)
    while sums:
        number = max(sums)
        summand, count = sums.pop(number), counts.pop(number)
        term = _bias(summand, count, sizes, positions)
        name, args = _operation(summand)
        if term is not None:
            terms.append(term)
        elif name == "neg":
            add(args[0], -count)
        elif name in ("add", "sub") and len(args) == 2:
            add(args[0], count)
            add(args[1], -count if name == "sub" else count)
        else:
            raise UntraceableError(
                "its bias depends on query and key by neither their distance nor a table of the caller by b, h, q and k"
            )
    for summand, count in constants:
        terms.append(_distance_bias(summand, count, set(), sizes))
    return terms


def _bias(bias: Symbol, count: int, sizes: Sizes, positions: _Positions) -> Term | None:
    """Return the term that adds a bias ``count`` times, or None."""
    if not count:
        # 0, unless a value is infinite
        raise UntraceableError("its bias subtracts a value from itself")
    # the only batch element and the only head are 0
    uses = {*bias.uses} - {name for name, size in ((BATCH, sizes.batch), (HEAD, sizes.heads)) if size == 1}
    if BATCH not in uses and positions.by_distance(bias):
        return _alibi(bias, count, uses, sizes, positions) or _distance_bias(bias, count, uses, sizes)
    table = _looked_up(bias, sizes) if count == 1 else None
    if table is None and not {QUERY, KEY} <= uses:
        table = _by_side(bias, count, uses, sizes)
    if table is None:
        return None
    return Bias(table) if table.is_floating_point() else None


def _values(bias: Any, count: int, places: dict[str, Tensor], sizes: Sizes) -> Tensor:
    """Compute a bias, times a number, for index tensors that broadcast; it gets 0-dim tensors."""

    def of_pair(*indices: Tensor) -> Tensor:
        value = computed(bias, dict(zip(ARGUMENTS[1:], indices, strict=True)))
        value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=sizes.dtype, device="cpu")
        if value.ndim or value.is_complex():
            raise UntraceableError("its bias is not one number for each pair")
        return value if count == 1 else -value if count == -1 else value * count

    try:
        return per_pair(of_pair, *places.values())
    except (RuntimeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise UntraceableError(f"its bias cannot be tabulated: {type(error).__name__}") from error


def _places(sizes: Sizes, **lengths: Tensor) -> dict[str, Tensor]:
    """Return index tensors of four dimensions, 0 unless given."""
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    places = {name: lengths.get(name, zero) for name in ARGUMENTS[1:]}
    shapes = {name: [-1 if i == j else 1 for j in range(4)] for i, name in enumerate(places)}
    return {name: x.reshape(shapes[name]) for name, x in places.items()}


def _alibi(bias: Symbol, count: int, uses: set[str], sizes: Sizes, positions: _Positions) -> ALiBi | None:
    """Return the term of slopes without gradients times the absolute distance, or None for another bias."""
    count, (name, args) = -count, _operation(bias)
    while name == "neg":
        count, (name, args) = -count, _operation(args[0])
    if name != "mul" or len(args) != 2 or not {QUERY, KEY} <= uses:
        return None
    for slope, distance in (args, args[::-1]):
        own = count
        name, of = _operation(distance)
        if name == "neg":
            own, (name, of) = -own, _operation(of[0])
        apart = positions.line(of[0]) if name == "abs" else None
        if apart in ((1, -1, 0), (-1, 1, 0)) and not (isinstance(slope, Symbol) and slope.uses - {HEAD}):
            heads = {HEAD: torch.arange(sizes.heads, device="cpu")}
            slopes = _values(slope, own, _places(sizes, **heads), sizes)[0, :, 0, 0]
            # the dtype in which the function rounds the product
            rounded = torch.get_default_dtype() if type(slope) is float else slopes.dtype
            differs = rounded.is_floating_point and rounded != sizes.dtype
            return None if slopes.requires_grad or differs else ALiBi(slopes.to(sizes.dtype))
    return None


def _distance_bias(bias: Any, count: int, uses: set[str], sizes: Sizes) -> DistanceBias:
    """Tabulate a bias by head and distance, for every distance of the call."""
    lengths = {}
    if HEAD in uses:
        lengths[HEAD] = torch.arange(sizes.heads, device="cpu")
    before, after = (sizes.nq - 1, sizes.nk - 1) if KEY in uses or QUERY in uses else (0, 0)
    if before or after:
        # a query at 0 and a key at the distance stand for all pairs of this distance
        lengths[KEY] = torch.arange(-before, after + 1, device="cpu")
    table = _values(bias, count, _places(sizes, **lengths), sizes)[0, :, 0].to(sizes.dtype)
    if table.requires_grad and not bool(table.isfinite().all()):
        # the gradient of an entry that no pair uses is 0, and its product with an infinite derivative is NaN
        raise UntraceableError("its bias is not finite at a distance, and needs gradients")
    reach = max(before, after)
    if before != after:
        # distances that no pair of the call has
        table = torch.nn.functional.pad(table, (reach - before, reach - after))
    return DistanceBias(table.expand(sizes.heads, -1))


def _by_side(bias: Any, count: int, uses: set[str], sizes: Sizes) -> Tensor:
    """Tabulate a bias that depends on the query or the key, not both."""
    size = {BATCH: sizes.batch, HEAD: sizes.heads, QUERY: sizes.nq, KEY: sizes.nk}
    lengths = {name: torch.arange(size[name], device="cpu") for name in uses}
    table = _values(bias, count, _places(sizes, **lengths), sizes).to(sizes.dtype)
    if table.requires_grad:
        # the gradient of a Bias is a table of all pairs
        raise UntraceableError("its bias of queries or keys needs gradients, which the term sums for all pairs")
    return table.expand(-1, -1, sizes.nq, sizes.nk)


def _looked_up(bias: Any, sizes: Sizes) -> Tensor | None:
    """Return the caller's table as (B or 1, Hq or 1, Nq, Nk) if the bias is an entry of it, or None."""
    indices: list[Any] = []
    while isinstance(bias, Symbol):
        name, args = _operation(bias)
        if name != "getitem":
            return None
        bias, index = args
        indices.append(index if isinstance(index, tuple) else (index,))
    if not isinstance(bias, Tensor):
        return None
    axes: list[str | None] = [None] * bias.ndim  # names of axes that were indexed
    size = {BATCH: sizes.batch, HEAD: sizes.heads, QUERY: sizes.nq, KEY: sizes.nk}
    for index in reversed(indices):
        dim = -1
        for each in index:
            dim = next((i for i in range(dim + 1, len(axes)) if axes[i] is None), len(axes))
            if dim == len(axes):
                return None
            if type(each) is int and -bias.shape[dim] <= each < bias.shape[dim]:
                bias = bias.select(dim, each)
                del axes[dim]
                dim -= 1
            elif isinstance(each, Symbol) and each.function is None and each.args[0] in size:
                name = each.args[0]
                if name in axes or bias.shape[dim] < size[name]:
                    return None
                bias, axes[dim] = bias.narrow(dim, 0, size[name]), name
            elif not (type(each) is slice and each.start is each.stop is each.step is None):
                return None
    if None in axes or not {QUERY, KEY} <= set(axes):
        return None
    order = [axes.index(name) for name in ARGUMENTS[1:] if name in axes]
    table: Tensor = bias.permute(order)
    for dim, name in enumerate(ARGUMENTS[1:]):
        if name not in axes:
            table = table.unsqueeze(dim)
    return table


# ---- dependence on the distance --------------------------------------------------------------------------------------


class _Positions:
    """How values of a trace depend on query and key; a value that is used several times is looked at once.

    Args:
        most: Largest number of positions.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_distance: dict[int, bool] = {}
        self._lines: dict[int, _Line | None] = {}

    def by_distance(self, x: Any) -> bool:
        """Return whether a value depends on query and key by their distance alone."""
        if not isinstance(x, Symbol):
            return all(map(self.by_distance, symbols_in(x)))
        if x.number not in self._by_distance:
            self._by_distance[x.number] = self._is_by_distance(x)
        return self._by_distance[x.number]

    def _is_by_distance(self, x: Symbol) -> bool:
        if not x.uses & {QUERY, KEY}:
            return True
        line = self.line(x)
        if line is not None:
            return line[0] == -line[1]
        name, args = _operation(x)
        if name == "compare" and len(args) == 2:
            left, right = map(self.line, args)
            if left is not None and right is not None and left[0] - right[0] == right[1] - left[1]:
                return True
        return x.function is not None and self.by_distance((x.args, x.kwargs))

    def line(self, x: Any) -> _Line | None:
        """Return (a, b, c) of a value that is exactly a * query + b * key + c; None for another value."""
        if not isinstance(x, Symbol) or not x.uses & {QUERY, KEY}:
            return 0, 0, _whole(x)
        if x.number not in self._lines:
            line = self._line_of(x)
            # float32 holds every whole number up to 2 ** 24
            exact = line is not None and (abs(line[0]) + abs(line[1])) * self.most + abs(line[2]) <= 2**24
            self._lines[x.number] = line if exact else None
        return self._lines[x.number]

    def _line_of(self, x: Symbol) -> _Line | None:
        if x.function is None:
            return (1, 0, 0) if x.args[0] == QUERY else (0, 1, 0)
        name, args = _operation(x)
        if name in ("float", "double") or (name == "to" and args[1:] in _WIDE):
            return self.line(args[0])
        if name == "neg":
            inner = self.line(args[0])
            return None if inner is None else (-inner[0], -inner[1], -inner[2])
        if name in ("add", "sub") and len(args) == 2:
            left, right = map(self.line, args)
            if left is None or right is None:
                return None
            sign = -1 if name == "sub" else 1
            return left[0] + sign * right[0], left[1] + sign * right[1], left[2] + sign * right[2]
        return None


_Line = tuple[int, int, float]
_WIDE = {(dtype,) for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)}


def _whole(x: Any) -> float:
    """Return the value of a whole number, so that a sum with it is exact; NaN for another value."""
    if isinstance(x, Tensor) and not x.is_floating_point():
        x = _number(x)
        x = None if x is None else int(x)
    return x if type(x) is int else math.nan
