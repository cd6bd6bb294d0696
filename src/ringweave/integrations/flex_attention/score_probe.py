"""Probe a score_mod: record its operations at one pair, to know how it can be evaluated on many pairs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import UnsupportedError
from ...torch_compat import version, wrapped
from .writes import written

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
_PRODUCTS = frozenset(
    getattr(space, name) for name in ("mul", "multiply", "__mul__") for space in (torch, Tensor) if hasattr(space, name)
)
#: Sums over all elements or over one dimension.
SUMS = frozenset([torch.sum, Tensor.sum])
#: Attributes that are the same for one pair and for many.
_SAME = frozenset(getattr(Tensor, name).__get__ for name in ("device", "requires_grad", "is_leaf", "layout"))
ITEM = Tensor.__getitem__


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors in arguments of an operation."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(each, change) for each in value)
    if type(value) is dict:
        return {key: mapped(each, change) for key, each in value.items()}
    if type(value) is slice:
        return slice(*(mapped(each, change) for each in (value.start, value.stop, value.step)))
    return value


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield the tensors and other objects in arguments of an operation."""
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from leaves_of(each)
    elif type(value) is dict:
        for key, each in value.items():
            yield key
            yield from leaves_of(each)
    elif type(value) is slice:
        yield from leaves_of((value.start, value.stop, value.step))
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


def places_of(x: Tensor, index: Any, many: bool = False) -> tuple[list[Tensor | None], tuple[Any, ...]] | None:
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


def called(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operation; ``masked_fill``, of which vmap maps no value in a tensor, by ``torch.where``."""
    if func not in _FILLS or kwargs:
        return func(*args, **kwargs)
    x, mask, value = args
    value = torch.as_tensor(value, device=x.device)
    return torch.where(mask, value.to(x.dtype), x)


def entries_of(x: Tensor, indices: list[Tensor | None], rest: tuple[Any, ...]) -> Tensor:
    """Index a tensor with the result of :func:`places_of`."""
    found: Tensor = torch.ops.aten.index(x, indices)
    return found[rest] if rest else found


# places of the score, and of the query and the key, among the arguments
_SCORE, _BOTH = 0, frozenset([3, 4])


class Reading(NamedTuple):
    """The record of a probe, and the properties of the function that it shows.

    Attributes:
        log: The operations and their arguments, equal for equal functions that read equal values.
        captured: The captured tensors, in the order of their first use.
        once: Whether each operation is the same for all pairs.
        deferred: Positions of operations with results that have one use: rows of tensors that are only indexed further,
            and products of two vectors that are only summed.
        broadcasts: Whether the function computes the same on tensors that broadcast.
        writes: Whether it writes to its arguments or to other tensors that it made.
        nbytes: Bytes of the tensors that it computes for a pair.
    """

    log: list[object]
    captured: list[Tensor]
    once: list[bool]
    deferred: frozenset[int]
    broadcasts: bool
    writes: bool
    nbytes: int

    def same(self, other: Reading) -> bool:
        """Whether two probes saw equal operations on equal values and the same captured tensors."""
        if self.log != other.log or len(self.captured) != len(other.captured):
            return False
        return all(a is b or _same_constant(a, b) for a, b in zip(self.captured, other.captured, strict=True))


def _same_constant(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors without gradients are equal, such as those of one array."""
    if a.requires_grad or b.requires_grad or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(a, b)


class Probe(TorchFunctionMode):
    """Records the operations of a score_mod at one pair."""

    def __init__(self, arguments: Sequence[Tensor]):
        super().__init__()
        #: Names of tensors by id; the tensors are kept, so that no id is used again.
        self.names: dict[int, tuple[str, int]] = {id(x): ("argument", n) for n, x in enumerate(arguments)}
        #: Numbers of the arguments from which a tensor was computed, by id.
        self.of_pair = {id(x): frozenset([n]) for n, x in enumerate(arguments)}
        self.kept: list[Tensor] = list(arguments)
        self.captured: list[Tensor] = []
        self.versions: list[Hashable] = []
        self.log: list[object] = []
        self.once: list[bool] = []
        #: Tensors that attributes of others hold, such as gradients.
        self.held: list[Tensor] = []
        #: The first refusal, which the function may have caught.
        self.refusal: UnsupportedError | None = None
        #: Rows of tensors, and products of vectors: position of the operation, and bytes, by id.
        self.rows: dict[int, tuple[int, int]] = {}
        self.products: dict[int, tuple[int, int]] = {}
        self.used: set[int] = set()
        self.same, self.writes, self.nbytes = True, False, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(leaves_of((args, kwargs)))
        self.log.append((func, *map(self.key, given)))
        tensors = [x for x in given if isinstance(x, Tensor)]
        self.note_write(func, args, kwargs)
        # before the operation, which may raise an error that the function catches
        position = len(self.once)
        self.once.append(False)
        places = places_of(args[0], args[1]) if func is ITEM else None
        of_pair = frozenset[int]().union(*(self.of_pair.get(id(x), ()) for x in tensors))
        if of_pair and func not in _SAME:
            self.note_use(func, tensors, args, kwargs, places)
        result = called(func, args, kwargs) if places is None else entries_of(args[0], *places)
        if of_pair and self.same and isinstance(result, Tensor):
            self.same = self.keeps_dtype(func, tensors, args, kwargs, result)
        for x in leaves_of(result):
            if isinstance(x, Tensor) and id(x) not in self.names:
                self.names[id(x)] = "made", len(self.kept)
                self.kept.append(x)
                if getattr(func, "__name__", "") == "__get__":
                    self.held.append(x)
                if of_pair:
                    self.of_pair[id(x)] = of_pair
                    # tensors of queries alone or of keys alone are small
                    nbytes = x.numel() * x.element_size() * (_SCORE in of_pair or of_pair >= _BOTH)
                    self.nbytes += nbytes
                    if places is not None and x.ndim and self.is_base(args[0]) and _leads(args[1]):
                        self.rows[id(x)] = position, nbytes
                    elif func in _PRODUCTS and _are_vectors(args, kwargs):
                        self.products[id(x)] = position, nbytes
        # an operation without a result has an effect, such as one of no_grad, which each evaluation needs
        self.once[position] = not of_pair and result is not None
        return result

    def reading(self, result: Tensor) -> Reading:
        """Return the reading of a function that returned ``result``."""
        self.used.add(id(result))
        self.log.append(self.key(result))
        if self.refusal:
            raise self.refusal
        if self.versions != [version(x) for x in self.captured]:
            raise impure("a function that writes to a captured tensor")
        rows, products = (
            [known for place, known in each.items() if place not in self.used] for each in (self.rows, self.products)
        )
        return Reading(
            self.log, self.captured,
            # a tensor that is written to has another value in each place
            once=[once and not self.writes for once in self.once],
            deferred=frozenset(position for position, _ in rows + products),
            broadcasts=self.same and len(rows) == len(self.rows) and not self.writes,
            writes=self.writes,
            nbytes=self.nbytes - sum(size for _, size in rows + products),
        )  # fmt: skip

    def key(self, x: object) -> Hashable:
        """Return a value that is equal for equal arguments of two probes."""
        if isinstance(x, Tensor):
            if id(x) not in self.names and wrapped(x):
                # made by code that no mode sees, such as TorchScript
                self.names[id(x)] = "made", len(self.kept)
                self.kept.append(x)
                self.of_pair[id(x)], self.same = frozenset(range(5)), False
            elif id(x) not in self.names:
                self.names[id(x)] = "captured", len(self.captured)
                self.captured.append(x)
                self.versions.append(version(x))
            return self.names[id(x)]
        values = bool, int, float, complex, str, bytes, range, np.generic, torch.dtype, torch.device
        # other objects may be new in each evaluation
        return type(x), repr(x) if isinstance(x, values) else ""

    def is_base(self, x: Tensor) -> bool:
        """Whether a tensor is the same for all pairs, or a row of such a tensor."""
        return id(x) not in self.of_pair or id(x) in self.rows

    def note_use(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any, places: Any) -> None:
        """Note whether an operation on values of a pair is the same on tensors that broadcast, and its operands."""
        if places is not None and self.is_base(tensors[0]) and _leads(args[1]):
            self.used.update(map(id, tensors[1:]))
            return
        if id(tensors[0]) in self.products and func in SUMS and _sums_vector(args, kwargs):
            self.same = False
            return
        self.used.update(map(id, tensors))
        self.same = self.same and (func in _ELEMENTWISE or func in _FILLS) and all(x.ndim == 0 for x in tensors)

    def keeps_dtype(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any, result: Tensor) -> bool:
        """Whether a result has the same dtype for tensors that broadcast.

        torch promotes a number in a 0-dim tensor by other rules beside a tensor with dimensions.
        """
        of_pair = [id(x) in self.of_pair for x in tensors]
        if all(of_pair) or len({x.dtype for x in tensors}) == 1 or func is ITEM or func in _SAME:
            return True

        def with_dimensions(x: Tensor) -> Tensor:
            return torch.ones(1, dtype=x.dtype, device=x.device) if id(x) in self.of_pair else x

        found = called(func, mapped(args, with_dimensions), mapped(kwargs, with_dimensions))
        return bool(found.dtype == result.dtype)

    def note_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note that an operation writes to a tensor; raise UnsupportedError if that is a captured one."""
        for x in leaves_of(written(func, args, kwargs)):
            if isinstance(x, Tensor):
                self.writes = True
                if self.names[id(x)][0] == "captured" or self.shares(x):
                    name = getattr(func, "__name__", "an operation")
                    got = (
                        f"a function that writes to a captured tensor with {'out=' if kwargs.get('out') is x else name}"
                    )
                    self.refusal = self.refusal or impure(got)
                    raise self.refusal

    def shares(self, x: Tensor) -> bool:
        """Whether a tensor that was made in the function shares memory with one that was not."""
        if wrapped(x):
            return False
        storage = x.untyped_storage()
        # an array's memory cannot be resized by torch
        return not storage.resizable() or any(
            not wrapped(other) and other.untyped_storage().data_ptr() == storage.data_ptr()
            for other in (*self.captured, *self.held)
        )


def _leads(index: Any) -> bool:
    """Whether an index is of whole numbers only, for the first dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(type(part) is int or _is_place(part) for part in parts)


def _are_vectors(args: Any, kwargs: Any) -> bool:
    """Whether arguments are two vectors of one floating dtype and length."""
    if kwargs or len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
        return False
    a, b = args
    return bool(a.ndim == b.ndim == 1 and a.shape == b.shape and a.dtype == b.dtype and a.is_floating_point())


def _sums_vector(args: Any, kwargs: Any) -> bool:
    """Whether arguments of a sum are those of the sum of all elements of a vector, as a 0-dim tensor."""
    dims = [*args[1:], *kwargs.values()]
    return set(kwargs) <= {"dim"} and len(dims) < 2 and all(type(dim) is int for dim in dims)


def impure(got: str) -> UnsupportedError:
    """Return the error of a function with effects, or with results that depend on more than its arguments."""
    wanted = "one that computes the same from the same arguments, without other effects"
    return UnsupportedError("score_mod", got, wanted, "Compute what changes before the call, as a tensor to capture.")
