"""Evaluate a score_mod on many pairs at once, with gradients of the tensors that it captures.

FlexAttention defines a score_mod for one pair: it gets 0-dim tensors and returns one. ``torch.vmap`` evaluates any such
function on many pairs. A function of elementwise operations and of tables that are read at a pair's indices has the
same result on tensors that broadcast, which is faster. A probe at one pair records the operations, and decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import ShapeError, UnsupportedError, shown
from ...types import acc_dtype

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_UNARY = """abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil
    cos cosh deg2rad erf erfc erfinv exp exp2 expm1 fix floor frac isfinite isinf isnan lgamma log log10 log1p log2
    logical_not logit nan_to_num neg negative positive rad2deg reciprocal round rsqrt sgn sigmoid sign signbit
    sin sinc sinh sqrt square tan tanh trunc relu celu elu gelu hardsigmoid hardswish hardtanh leaky_relu
    logsigmoid mish relu6 selu silu softplus softsign tanhshrink __abs__ __neg__ __invert__ __pos__"""
_BINARY = """add arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp clamp_max
    clamp_min clip copysign div divide eq equal_to false_divide float_power floor_divide fmax fmin fmod ge
    greater greater_equal gt heaviside hypot le lerp less less_equal logaddexp logaddexp2 logical_and logical_or
    logical_xor lt maximum minimum mul multiply ne not_equal pow remainder rsub sub subtract true_divide where
    xlogy addcmul addcdiv __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__
    __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __and__ __rand__ __or__ __ror__ __xor__
    __rxor__ __lshift__ __rlshift__ __rshift__ __rrshift__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__"""
_CASTS = """to type float double half bfloat16 int long short bool byte char type_as clone detach contiguous zeros_like
    ones_like full_like"""
_SPACES = torch, Tensor, F
#: Operations that compute each element from the same elements of their arguments.
_ELEMENTWISE = frozenset(
    getattr(space, name) for name in f"{_UNARY} {_BINARY} {_CASTS}".split() for space in _SPACES if hasattr(space, name)
)
_FILLS = frozenset([torch.masked_fill, Tensor.masked_fill])
#: Attributes that are the same for one pair and for many.
_SAME = frozenset(getattr(Tensor, name).__get__ for name in ("device", "requires_grad", "is_leaf", "layout"))
_ITEM = Tensor.__getitem__


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors in arguments of an operation."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(each, change) for each in value)
    if type(value) is dict:
        return {key: _mapped(each, change) for key, each in value.items()}
    if type(value) is slice:
        return slice(*(_mapped(each, change) for each in (value.start, value.stop, value.step)))
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors and other objects in arguments of an operation."""
    if type(value) in (tuple, list):
        for each in value:
            yield from _leaves(each)
    elif type(value) is dict:
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif type(value) is slice:
        yield from _leaves((value.start, value.stop, value.step))
    else:
        yield value


def _is_place(part: object, many: bool = False) -> bool:
    """Whether a part of an index is a whole number in a 0-dim tensor, or with ``many`` any tensor of whole numbers."""
    whole = isinstance(part, Tensor) and not part.is_floating_point() and part.dtype != torch.bool
    return whole and (many or part.ndim == 0)  # type: ignore[attr-defined]


def _dims(part: Any) -> int:
    """Count the dimensions that a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _places(x: Tensor, index: Any, many: bool = False) -> tuple[list[Tensor | None], tuple[Any, ...]] | None:
    """Split an index with 0-dim tensors into the indices of each dimension and the index of the remaining dimensions.

    ``Tensor.__getitem__`` would read the 0-dim tensors as numbers, which vmap forbids.
    With ``many`` the tensors are those of many pairs, in an index of nothing else.

    Returns:
        (indices, rest); None for an index without such tensors.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not any(_is_place(part, many) for part in parts):
        return None
    if many and not all(type(part) is int or _is_place(part, many) for part in parts):
        return None
    used = sum(map(_dims, parts))
    if used > x.ndim:
        raise IndexError(f"too many indices for tensor of dimension {x.ndim}")
    dim, indices, rest = 0, list[Tensor | None](), list[Any]()
    for part in parts:
        skipped = x.ndim - used if part is Ellipsis else _dims(part)
        if _is_place(part, many):
            indices.append(part)
        elif type(part) is int:
            indices.append(torch.tensor(part, device=x.device))
        else:
            indices += [None] * skipped
            rest.append(part)
        dim += skipped
    while indices[-1] is None:
        indices.pop()
    return indices, () if all(part is Ellipsis for part in rest) else tuple(rest)


class _Table:
    """A captured tensor that needs a gradient, and the gradients of the entries that were read from it.

    The gradient of an ordinary index is as large as the tensor, for each chunk of pairs.
    """

    def __init__(self, x: Tensor, widens: bool):
        #: Whether entries of 16 bits are converted to float32, in which their many gradients are not rounded.
        self.widens = widens
        #: The tensor apart from its own graph.
        self.leaf = x.detach().requires_grad_()
        self.values = self.leaf.detach()
        self.reads: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def add_to(self, total: Tensor) -> None:
        """Add the gradients of the entries to a contiguous tensor in the captured tensor's shape."""
        for indices, grad in self.reads:
            flat, place = 1, None
            for size, index in zip(total.shape, indices, strict=False):
                index = torch.where(index < 0, index + size, index)
                place = index if place is None else place * size + index
                flat *= size
            assert place is not None
            by_entry = total.view(flat, *total.shape[len(indices) :])
            by_entry.index_add_(0, place.reshape(-1), grad.reshape(-1, *by_entry.shape[1:]).to(total.dtype))


class _Read(torch.autograd.Function):
    """Entries of a table; the gradient is noted in the table. ``token`` makes autograd call backward."""

    @staticmethod
    def forward(token: Tensor, table: _Table, *indices: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.index(table.values, indices)
        return found.to(acc_dtype(found.dtype)) if table.widens else found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.table, *indices = inputs
        ctx.save_for_backward(*indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.table.reads.append((ctx.saved_tensors, grad))
        return (None,) * (2 + len(ctx.saved_tensors))

    @staticmethod
    def vmap(info: Any, in_dims: Any, token: Tensor, table: _Table, *indices: Tensor) -> tuple[Tensor, int]:
        dims = in_dims[2:]
        rank = max(index.ndim - (dim is not None) for index, dim in zip(indices, dims, strict=True))
        moved = []
        for index, dim in zip(indices, dims, strict=True):
            if dim is not None:
                index = index.movedim(dim, 0)
                index = index.reshape(index.shape[0], *(1,) * (rank + 1 - index.ndim), *index.shape[1:])
            moved.append(index)
        return _Read.apply(token, table, *moved), 0  # type: ignore[no-untyped-call]


class _Probe(TorchFunctionMode):
    """Records the operations of a score_mod at one pair."""

    def __init__(self, arguments: Sequence[Tensor]):
        super().__init__()
        #: Names of tensors by id; the tensors are kept, so that no id is used again.
        self.names: dict[int, tuple[str, int]] = {id(x): ("argument", n) for n, x in enumerate(arguments)}
        self.of_pair = set(self.names)
        self.kept: list[object] = list(arguments)
        self.captured: list[Tensor] = []
        self.log: list[object] = []
        self.broadcasts, self.writes, self.nbytes = True, False, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_leaves((args, kwargs)))
        self.log.append((func, *map(self.key, given)))
        tensors = [x for x in given if isinstance(x, Tensor)]
        self.note_write(func, args, kwargs)
        places = _places(args[0], args[1]) if func is _ITEM else None
        self.broadcasts = self.broadcasts and self.same_when_broadcast(func, tensors, places)
        result = func(*args, **kwargs) if places is None else _entries(args[0], *places)
        of_pair = any(id(x) in self.of_pair for x in tensors)
        for x in _leaves(result):
            if isinstance(x, Tensor) and id(x) not in self.names:
                self.names[id(x)] = "made", len(self.kept)
                self.kept.append(x)
                if of_pair:
                    self.of_pair.add(id(x))
                    self.nbytes += x.numel() * x.element_size()
        return result

    def key(self, x: object) -> Hashable:
        """Return a value that is equal for equal arguments of two probes."""
        if isinstance(x, Tensor):
            if id(x) not in self.names:
                self.names[id(x)] = "captured", len(self.captured)
                self.captured.append(x)
            return self.names[id(x)]
        if x is None or isinstance(x, (bool, int, float, complex, str, torch.dtype, torch.device)):
            return type(x), repr(x)
        self.kept.append(x)
        return "object", id(x)

    def same_when_broadcast(self, func: Any, tensors: list[Tensor], places: Any) -> bool:
        """Whether an operation computes the same on tensors that broadcast as on 0-dim tensors of a pair."""
        if not any(id(x) in self.of_pair for x in tensors) or func in _SAME:
            return True
        if places is not None:
            indices, rest = places
            return not rest and id(tensors[0]) not in self.of_pair and len(indices) == tensors[0].ndim
        if func in _FILLS and len(tensors) > 2:
            # it takes no value for each pair
            return False
        return (func in _ELEMENTWISE or func in _FILLS) and all(x.ndim == 0 for x in tensors)

    def note_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note that an operation writes to its first argument; raise UnsupportedError if that is a captured tensor."""
        name = getattr(func, "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or name in _WRITES or bool(kwargs.get("inplace"))
        # activation functions take ``inplace`` by position, too
        in_place = in_place or (getattr(func, "__module__", "") == F.__name__ and any(x is True for x in args))
        targets = [args[0]] if in_place else list(_leaves(kwargs.get("out")))
        for x in targets:
            if isinstance(x, Tensor):
                self.writes, self.broadcasts = True, False
                if self.names[id(x)][0] == "captured":
                    raise _impure(f"a function that writes to a captured tensor with {name or 'out='}")


_WRITES = frozenset(
    ["__setitem__", "__set__", *(f"__i{name}__" for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"
    ))]
)  # fmt: skip


def _entries(x: Tensor, indices: list[Tensor | None], rest: tuple[Any, ...]) -> Tensor:
    found: Tensor = torch.ops.aten.index(x, indices)
    return found[rest] if rest else found


class _Evaluation(TorchFunctionMode):
    """Reads captured tensors from their tables."""

    def __init__(self, tables: dict[int, _Table], token: Tensor | None, many: bool):
        super().__init__()
        self.tables, self.token, self.many = tables, token, many
        #: Tensors with gradients that were made inside, by id.
        self.made: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ITEM and (places := _places(args[0], args[1], self.many)) is not None:
            result = self.entries(args[0], *places)
        elif self.token is None:
            return func(*args, **kwargs)
        else:
            result = func(*_mapped(args, self.own), **_mapped(kwargs, self.own))
        if self.token is not None:
            self.made.update(id(x) for x in _leaves(result) if isinstance(x, Tensor) and x.requires_grad)
        return result

    def entries(self, x: Tensor, indices: list[Tensor | None], rest: tuple[Any, ...]) -> Tensor:
        """Return entries of a tensor at a pair's indices."""
        table = self.tables.get(id(x))
        if table is None or any(each is None for each in indices):
            return _entries(self.own(x), [None if each is None else self.own(each) for each in indices], rest)
        found: Tensor = _Read.apply(self.token, table, *indices)  # type: ignore[no-untyped-call]
        return found[rest] if rest else found

    def own(self, x: Tensor) -> Tensor:
        """Return the leaf of a captured tensor's table; other tensors as they are."""
        table = self.tables.get(id(x))
        if table is not None:
            return table.leaf
        if self.token is not None and x.requires_grad and id(x) not in self.made:
            raise _impure("a function that captures another tensor with a gradient at another pair")
        return x


class Pairs(NamedTuple):
    """Indices of pairs as a score_mod takes them, shaped to broadcast to the scores.

    Scores are (R, queries, keys), the first two (R, 1, 1), the third (R, queries, 1) and the last (R, 1, keys), or all
    are (P,).
    """

    b: Tensor
    h: Tensor
    q: Tensor
    k: Tensor


class Changed(NamedTuple):
    """The gradients of a chunk of pairs: of the scores, and of captured tensors as a whole and by entries.

    Attributes:
        scores: Gradient of the scores, or None for a function that does not use them.
        tables: The captured tensors that need gradients, in the order of ``ScoreFunction.captured``.
        whole: The gradient of each captured tensor, or None, besides that in ``tables``.
    """

    scores: Tensor | None
    tables: list[_Table]
    whole: list[Tensor | None]

    def finite(self) -> bool:
        """Whether all gradients of captured tensors are finite."""
        grads = [x for x in self.whole if x is not None] + [grad for table in self.tables for _, grad in table.reads]
        return all(bool(grad.sum().isfinite()) for grad in grads)

    def add_to(self, totals: Sequence[Tensor]) -> None:
        """Add the gradients of captured tensors to their totals."""
        for total, table, whole in zip(totals, self.tables, self.whole, strict=True):
            table.add_to(total)
            if whole is not None:
                total.add_(whole)


class ScoreFunction:
    """A score_mod that was probed.

    Args:
        fn: The score_mod.
        dtype: Dtype of the scores.
        device: Device of the scores.
    Attributes:
        captured: The tensors that it captures, in the order of their first use.
        nbytes: Bytes of the tensors that it computes for a pair.
    """

    def __init__(self, fn: ScoreMod, dtype: torch.dtype, device: torch.device):
        self.fn, self.dtype, self.device = fn, dtype, device
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        #: Autocast of the caller, which does not last until backward.
        self.autocast = autocast
        probe, result = self._probe()
        again, same = self._probe()
        if not _equal(probe, again) or not torch.equal(result.nan_to_num(), same.nan_to_num()):
            raise _impure("a function that returns another result for the same arguments")
        self._first = probe
        self.captured, self.nbytes = probe.captured, probe.nbytes
        self.broadcasts, self.writes = probe.broadcasts, probe.writes

    def check(self) -> None:
        """Raise UnsupportedError if the function reads other values than in the forward pass."""
        if not _equal(self._first, self._probe()[0]):
            raise _impure("a function that reads other values in backward than in forward")

    def _probe(self) -> tuple[_Probe, Tensor]:
        """Evaluate the function at the first pair."""
        found: list[_Probe] = []

        def recorded(*arguments: Tensor) -> Tensor:
            found.append(probe := _Probe(arguments))
            with probe:
                result = self.fn(*arguments)
            return _checked(result)

        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        score = torch.full((1, 1, 1), 0.5, dtype=self.dtype, device=self.device)
        with torch.no_grad(), self._autocast():
            result = _over_grid(recorded, score, Pairs(zero, zero.clone(), zero[:, None], zero[:, None]))
        return found[0], result

    def _autocast(self) -> torch.autocast:
        enabled, dtype = self.autocast
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=False)

    def __call__(self, scores: Tensor, at: Pairs) -> Tensor:
        """Return the function of scores, without gradients."""
        with torch.no_grad():
            return self._evaluate(scores, at, {}, None)

    def differentiable(self, scores: Tensor, at: Pairs, learns: Sequence[bool]) -> tuple[Tensor, Differentiated]:
        """Return the function of scores, and an object that computes gradients.

        Args:
            scores: The scores.
            at: Their pairs.
            learns: Whether the gradient of each captured tensor is needed.
        """
        tables = {id(x): _Table(x, self.broadcasts) for x, learn in zip(self.captured, learns, strict=True) if learn}
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            token = torch.zeros((), dtype=self.dtype, device=self.device, requires_grad=True)
            result = self._evaluate(leaf, at, tables, token)
        return result.detach(), Differentiated(result, leaf, token, list(tables.values()))

    def _evaluate(self, scores: Tensor, at: Pairs, tables: dict[int, _Table], token: Tensor | None) -> Tensor:
        def evaluated(*arguments: Tensor) -> Tensor:
            if self.writes:
                arguments = tuple(x.clone() for x in arguments)
            mode = _Evaluation(tables, token, self.broadcasts)
            mode.made.update(map(id, arguments))
            with mode:
                return self.fn(*arguments)

        with self._autocast():
            if self.broadcasts:
                result = evaluated(scores, *at)
            elif scores.ndim == 1:
                result = torch.vmap(evaluated)(scores, *at)
            else:
                result = _over_grid(evaluated, scores, Pairs(at.b[:, 0, 0], at.h[:, 0, 0], at.q[:, :, 0], at.k[:, 0]))
        return result.to(scores.dtype).expand(scores.shape)


class Differentiated(NamedTuple):
    """A score_mod's result on a chunk of pairs, with its graph."""

    result: Tensor
    scores: Tensor
    token: Tensor
    tables: list[_Table]

    def backward(self, grad: Tensor) -> Changed:
        """Return the gradients for the gradient of the result."""
        if not self.result.requires_grad:
            return Changed(None, self.tables, [None] * len(self.tables))
        inputs = [self.scores, self.token, *(table.leaf for table in self.tables)]
        of_scores, _, *whole = torch.autograd.grad(self.result, inputs, grad, allow_unused=True)
        return Changed(of_scores, self.tables, list(whole))


def _over_grid(fn: ScoreMod, scores: Tensor, at: Pairs) -> Tensor:
    """Map a function over scores (R, queries, keys) with indices (R,), (R,), (R, queries) and (R, keys)."""
    over_keys = torch.vmap(fn, (0, None, None, None, 0))
    over_queries = torch.vmap(over_keys, (0, None, None, 0, None))
    result: Tensor = torch.vmap(over_queries)(scores, *at)
    return result


def _checked(result: object) -> Tensor:
    if not isinstance(result, Tensor) or result.ndim != 0 or not result.is_floating_point():
        got = f"a function that returns {shown(result)}"
        raise ShapeError("score_mod", got, "one that returns a 0-dim floating tensor", "Return the changed score.")
    return result


def _equal(one: _Probe, other: _Probe) -> bool:
    """Whether two probes saw equal operations on equal values and the same captured tensors."""
    if one.log != other.log or len(one.captured) != len(other.captured):
        return False
    return all(a is b or _same_constant(a, b) for a, b in zip(one.captured, other.captured, strict=True))


def _same_constant(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors without gradients are equal, such as those of one array."""
    if a.requires_grad or b.requires_grad or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(a, b)


def _impure(got: str) -> UnsupportedError:
    wanted = "one that computes the same from the same arguments, without other effects"
    return UnsupportedError("score_mod", got, wanted, "Compute what changes before the call, as a tensor to capture.")
