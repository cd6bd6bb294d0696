"""Recognise score functions that are score terms, by the structure of their formulas.

A function is recognised if its result is the score, possibly multiplied by a number, under a chain of soft caps and
added biases. A bias is recognised if it depends on the head and the distance of the pair, on either the query or the
key, or if it looks up a table of the caller by batch element, head, query and key. Nothing is inferred from numbers.
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
from .symbols import ARGUMENTS, BATCH, HEAD, KEY, QUERY, SCORE, Symbol, UntraceableError, computed, symbols_in, traced


class Sizes(NamedTuple):
    """Sizes of a call, and the dtype of its scores."""

    batch: int
    heads: int
    nq: int
    nk: int
    dtype: torch.dtype


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
    result = traced(score_mod, sizes.dtype)
    if not isinstance(result, Symbol) or SCORE not in result.uses:
        raise UntraceableError("its result does not depend on the score")
    try:
        return _chain(result, sizes)
    except RecursionError as error:
        raise UntraceableError("its formula is nested too deeply") from error


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
        try:
            return inner._replace(terms=(*inner.terms, Softcap(capped[1])))
        except ShapeError as error:
            raise UntraceableError(f"its cap is {capped[1]}") from error
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
    """Return the terms that add a bias; a sum that is no term is split."""
    term = _bias(bias, sign, sizes)
    if term is not None:
        return [term]
    name, args = _operation(bias)
    if name == "neg":
        return _biases(args[0], -sign, sizes)
    if name in ("add", "sub") and len(args) == 2:
        return [*_biases(args[0], sign, sizes), *_biases(args[1], -sign if name == "sub" else sign, sizes)]
    raise UntraceableError(
        "its bias depends on query and key by neither their distance nor a table of the caller by b, h, q and k"
    )


def _bias(bias: Any, sign: int, sizes: Sizes) -> Term | None:
    uses = set(bias.uses) if isinstance(bias, Symbol) else set()
    # the only batch element and the only head are 0
    uses -= {name for name, size in ((BATCH, sizes.batch), (HEAD, sizes.heads)) if size == 1}
    if BATCH not in uses and _Positions().by_distance(bias):
        return _alibi(bias, sign, uses, sizes) or _distance_bias(bias, sign, uses, sizes)
    table = _looked_up(bias, sizes) if sign == 1 else None
    if table is None and not {QUERY, KEY} <= uses:
        table = _by_side(bias, sign, uses, sizes)
    if table is None:
        return None
    return Bias(table) if table.is_floating_point() else None


def _values(bias: Any, sign: int, places: dict[str, Tensor], sizes: Sizes) -> Tensor:
    """Compute a bias for index tensors that broadcast; it gets 0-dim tensors."""

    def of_pair(*indices: Tensor) -> Tensor:
        value = computed(bias, dict(zip(ARGUMENTS[1:], indices, strict=True)))
        value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=sizes.dtype, device="cpu")
        if value.ndim or value.is_complex():
            raise UntraceableError("its bias is not one number for each pair")
        return (-value if sign < 0 else value).to(sizes.dtype)

    try:
        return per_pair(of_pair, *places.values())
    except (RuntimeError, LookupError, TypeError, ValueError) as error:
        raise UntraceableError(f"its bias cannot be tabulated: {type(error).__name__}") from error


def _places(sizes: Sizes, **lengths: Tensor) -> dict[str, Tensor]:
    """Return index tensors of four dimensions, 0 unless given."""
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    places = {name: lengths.get(name, zero) for name in ARGUMENTS[1:]}
    shapes = {name: [-1 if i == j else 1 for j in range(4)] for i, name in enumerate(places)}
    return {name: x.reshape(shapes[name]) for name, x in places.items()}


def _alibi(bias: Any, sign: int, uses: set[str], sizes: Sizes) -> ALiBi | None:
    """Return the term of slopes without gradients times the absolute distance, or None for another bias."""
    sign, (name, args) = -sign, _operation(bias)
    while name == "neg":
        sign, (name, args) = -sign, _operation(args[0])
    if name != "mul" or len(args) != 2 or not {QUERY, KEY} <= uses:
        return None
    for slope, distance in (args, args[::-1]):
        own = sign
        name, of = _operation(distance)
        if name == "neg":
            own, (name, of) = -own, _operation(of[0])
        apart = _Positions().slopes(of[0]) if name == "abs" else None
        if apart in ((1, -1), (-1, 1)) and not (isinstance(slope, Symbol) and slope.uses - {HEAD}):
            heads = {HEAD: torch.arange(sizes.heads, device="cpu")}
            slopes = _values(slope, own, _places(sizes, **heads), sizes)[0, :, 0, 0]
            return None if slopes.requires_grad else ALiBi(slopes)
    return None


def _distance_bias(bias: Any, sign: int, uses: set[str], sizes: Sizes) -> DistanceBias:
    """Tabulate a bias by head and distance, for every distance of the call."""
    lengths = {}
    if HEAD in uses:
        lengths[HEAD] = torch.arange(sizes.heads, device="cpu")
    before, after = (sizes.nq - 1, sizes.nk - 1) if KEY in uses or QUERY in uses else (0, 0)
    if before or after:
        # a query at 0 and a key at the distance stand for all pairs of this distance
        lengths[KEY] = torch.arange(-before, after + 1, device="cpu")
    table = _values(bias, sign, _places(sizes, **lengths), sizes)[0, :, 0]
    if table.requires_grad and not bool(table.isfinite().all()):
        # the gradient of an entry that no pair uses is 0, and its product with an infinite derivative is NaN
        raise UntraceableError("its bias is not finite at a distance, and needs gradients")
    reach = max(before, after)
    if before != after:
        # distances that no pair of the call has
        table = torch.nn.functional.pad(table, (reach - before, reach - after))
    return DistanceBias(table.expand(sizes.heads, -1))


def _by_side(bias: Any, sign: int, uses: set[str], sizes: Sizes) -> Tensor:
    """Tabulate a bias that depends on the query or the key, not both."""
    size = {BATCH: sizes.batch, HEAD: sizes.heads, QUERY: sizes.nq, KEY: sizes.nk}
    lengths = {name: torch.arange(size[name], device="cpu") for name in uses}
    table = _values(bias, sign, _places(sizes, **lengths), sizes)
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
            elif each != slice(None):
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
    """How values of a trace depend on query and key; a value that is used several times is looked at once."""

    def __init__(self) -> None:
        self._by_distance: dict[int, bool] = {}
        self._slopes: dict[int, tuple[int, int] | None] = {}

    def by_distance(self, x: Any) -> bool:
        """Return whether a value depends on query and key by their distance alone."""
        if not isinstance(x, Symbol):
            return all(map(self.by_distance, symbols_in(x)))
        if id(x) not in self._by_distance:
            self._by_distance[id(x)] = self._is_by_distance(x)
        return self._by_distance[id(x)]

    def _is_by_distance(self, x: Symbol) -> bool:
        if not x.uses & {QUERY, KEY}:
            return True
        slopes = self.slopes(x)
        if slopes is not None:
            return slopes[0] == -slopes[1]
        name, args = _operation(x)
        if name == "compare" and len(args) == 2:
            left, right = map(self.slopes, args)
            if left is not None and right is not None and left[0] - right[0] == right[1] - left[1]:
                return True
        return x.function is not None and self.by_distance((x.args, x.kwargs))

    def slopes(self, x: Any) -> tuple[int, int] | None:
        """Return the factors of query and key in a value that is linear in them, exactly; None for another value."""
        if not isinstance(x, Symbol) or not x.uses & {QUERY, KEY}:
            return 0, 0
        if id(x) not in self._slopes:
            self._slopes[id(x)] = self._slopes_of(x)
        return self._slopes[id(x)]

    def _slopes_of(self, x: Symbol) -> tuple[int, int] | None:
        if x.function is None:
            return (1, 0) if x.args[0] == QUERY else (0, 1)
        name, args = _operation(x)
        # float32 holds every position up to 2 ** 24
        if name in ("float", "double") or (name == "to" and args[1:] in _WIDE):
            return self.slopes(args[0])
        if name == "neg":
            inner = self.slopes(args[0])
            return None if inner is None else (-inner[0], -inner[1])
        if name in ("add", "sub") and len(args) == 2:
            left, right = map(self.slopes, args)
            if left is None or right is None or not all(map(_is_whole, args)):
                return None
            sign = -1 if name == "sub" else 1
            return left[0] + sign * right[0], left[1] + sign * right[1]
        return None


_WIDE = {(dtype,) for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)}


def _is_whole(x: Any) -> bool:
    """Return whether a summand is a position or a whole number, so that the sum is exact."""
    if isinstance(x, Symbol):
        return bool(x.uses & {QUERY, KEY})
    if isinstance(x, Tensor):
        return not x.is_floating_point() and not x.is_complex()
    return type(x) is int
