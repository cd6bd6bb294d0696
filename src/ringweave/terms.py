"""Score terms: functions that a model applies to scaled scores before the softmax.

    t = scale * <q, k>;  t = term(t) for each term, in order;  weights = softmax of t over the allowed keys

A term is a small frozen record. Like a pattern it crosses the operators as text and tensors. It defines its formula and
gradient once, for arrays of scores of any shape. Kernels that have the formula built in read only the record.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from .checks import flag, number, whole
from .errors import ShapeError, UnsupportedError, shown
from .names import only


class Pairs(NamedTuple):
    """Indices of an array of scores: int64 tensors that broadcast to its shape.

    Attributes:
        batch: Batch element.
        head: Query head of the call.
        row: Index of the query in the call's q.
        column: Index of the key in the call's k.
        query: Position of the query.
        key: Position of the key.
    """

    batch: Tensor
    head: Tensor
    row: Tensor
    column: Tensor
    query: Tensor
    key: Tensor


class Axis(NamedTuple):
    """An axis of a term's table.

    Attributes:
        along: Meaning of its entries: "batch", "heads", "queries" and "keys" have the call's sizes; "distance" has
            2 R + 1 entries, for any R.
        shared: Whether a size of 1 is allowed too, with one entry for all.
    """

    along: str
    shared: bool = False


_CALLS = {"batch": "batch elements", "heads": "query heads", "queries": "queries", "keys": "keys"}
_LETTERS = {"batch": "B", "heads": "Hq", "queries": "Nq", "keys": "Nk", "distance": "2 R + 1"}

#: The declared kinds by name: every subclass of :class:`Term`.
KINDS: dict[str, type[Term]] = {}

# Kernels hold numbers, and their inverses, in float32.
_SMALLEST, _LARGEST = 1e-37, 1e37
# numbers that differ by more than this share of the larger one are different in float32 too
_STEP = 2.0**-23


class Term(ABC):
    """A function applied to scaled scores; base of the kinds of terms in this module.

    A kind is a frozen dataclass with number fields, then one tensor field for each of its ``axes``. Checks, operators,
    backends and ranks know nothing about a kind beyond the attributes and methods declared here.

    Attributes:
        kernel: Name of the kind in kernels. A kernel without this name does not support the kind.
        axes: Axes of each table, by the name of its field and in the order of the fields.
        learns: Names of the tables that gradients reach. The entries of the others are constants, which may be on the
            CPU.
        distances: Whether the formula needs the positions of queries and keys.
        places: Whether the formula needs the indices of queries and keys in q and k.
    """

    kernel: ClassVar[str]
    axes: ClassVar[Mapping[str, tuple[Axis, ...]]] = {}
    learns: ClassVar[tuple[str, ...]] = ()
    distances: ClassVar[bool] = False
    places: ClassVar[bool] = False

    _numbers: ClassVar[tuple[str, ...]]
    _also: ClassVar[str] = ""  # other values that a table accepts, for its error text
    _constant: ClassVar[str] = "Detach it: this kind of term has no gradient for it."
    _spec: str

    def __init_subclass__(cls) -> None:
        fields = {name: kind for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")}
        cls._numbers = tuple(name for name, kind in fields.items() if kind == "float")
        wanted = dict.fromkeys(cls._numbers, "float") | dict.fromkeys(cls.axes, "Tensor")
        if list(fields.items()) != list(wanted.items()):
            raise TypeError(
                f"{cls.__name__} has fields {fields}; a term has floats, then a Tensor for each of its axes"
            )
        if not {*cls.learns} <= {*cls.axes}:
            raise TypeError(f"{cls.__name__} learns {cls.learns}, and its tables are {', '.join(cls.axes)}")
        needed = ["kernel", *["slope"] * (not cls.axes), *["entry"] * bool(cls.learns)]
        if unsaid := [name for name in needed if name not in vars(cls)]:
            raise TypeError(f"{cls.__name__} does not define {' and '.join(unsaid)}")
        if cls.__name__ in KINDS or cls.kernel in {kind.kernel for kind in KINDS.values()}:
            raise TypeError(f"{cls.__name__}, or {cls.kernel!r} in kernels, is declared already")
        KINDS[cls.__name__] = cls

    def __post_init__(self) -> None:
        values = [_float32(name, getattr(self, name)) for name in self._numbers]
        _check_distinct(self._numbers, values)
        for name, value in zip(self._numbers, values, strict=True):
            object.__setattr__(self, name, value)
        text = [repr(value) for value in values]
        for name, axes in self.axes.items():
            table = _floating(name, getattr(self, name), axes, self._also)
            if table.requires_grad:
                self._check_learns(name)
            text.append("_")
        # written once, like a pattern's text, because a trace may turn a number into a symbol
        object.__setattr__(self, "_spec", f"{type(self).__name__}({', '.join(text)})")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Values of the number fields, in order."""
        return tuple([getattr(self, name) for name in self._numbers])

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Values of the tensor fields, in order."""
        return tuple([getattr(self, name) for name in self.axes])

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tables that gradients reach."""
        return tuple([getattr(self, name) for name in self.learns])

    @property
    def spec(self) -> str:
        """Text that :func:`terms_of` reads, with the numbers, and ``_`` for each tensor."""
        return self._spec

    def over(self, *tables: Tensor) -> Term:
        """Return the same term with other tables."""
        return type(self)(*self.numbers, *tables)

    def total(self, name: str, acc: torch.dtype) -> Tensor:
        """Return zeros to which backward adds the gradient of a table.

        Raises:
            ShapeError: The table has no gradient.
        """
        self._check_learns(name)
        # float64, since every pair of a head is added to one of few entries
        dtype = acc if {"queries", "keys"} <= {axis.along for axis in self.axes[name]} else torch.float64
        return torch.zeros_like(getattr(self, name), dtype=dtype, memory_format=torch.contiguous_format)

    def check(self, batch: int, heads: int, nq: int, nk: int, device: torch.device) -> None:
        """Raise ShapeError unless its tables fit a call."""
        sizes = {"batch": batch, "heads": heads, "queries": nq, "keys": nk}
        for name, axes in self.axes.items():
            table = getattr(self, name)
            # constants are few numbers, so those on the CPU are copied to any device
            here = device if name in self.learns or table.device.type != "cpu" else table.device
            for dim, axis in enumerate(axes):
                if axis.along in sizes:
                    _check_place(name, table, dim, sizes[axis.along], axis, here)
            # the owner may have called requires_grad_() since the term was made
            if table.requires_grad and torch.is_grad_enabled():
                self._check_learns(name)

    def _check_learns(self, name: str) -> None:
        if name not in self.learns:
            raise ShapeError(name, "a tensor that requires gradients", "constants", self._constant)

    @classmethod
    @abstractmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Term:
        """Return a random term of this kind that fits a call, on the generator's device."""

    @abstractmethod
    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Return the scores after the term."""

    def slope(self, before: Tensor, after: Tensor, at: Pairs) -> Tensor | None:
        """Return the derivative of the scores after the term by those before it, or None if it is 1.

        A kind without a table must define it.
        """
        return None

    def entry(self, name: str, at: Pairs) -> Tensor:
        """Return each pair's index into a flattened table, int64. A kind that learns must define it."""
        raise NotImplementedError

    def share(self, name: str, before: Tensor, at: Pairs) -> Tensor | float:
        """Return the derivative of the scores after the term by each pair's entry of a table."""
        return 1.0

    def gradient(
        self, before: Tensor, after: Tensor, grad: Tensor, at: Pairs, totals: Sequence[Tensor | None]
    ) -> Tensor:
        """Return the gradient of the scores before the term, and add the gradients of the tables to ``totals``.

        Args:
            before: Scores before the term.
            after: Scores after the term.
            grad: Gradient of the scores after the term.
            at: Indices of the scores.
            totals: Gradient of each table so far; None if it is not needed.
        """
        for name, total in zip(self.axes, totals, strict=True):
            if total is not None:
                share = self.share(name, before, at)
                of_entry = grad if isinstance(share, float) and share == 1.0 else grad * share
                places, grads = torch.broadcast_tensors(self.entry(name, at), of_entry)
                total.view(-1).scatter_add_(0, places.reshape(-1), grads.reshape(-1).to(total.dtype))
        slope = self.slope(before, after, at)
        return grad if slope is None else grad * slope


def _float32(name: str, value: object) -> float:
    """Check a number that float32 can represent, and return it."""
    value = number(name, value, error=ShapeError)
    if value != 0 and not _SMALLEST <= abs(value) <= _LARGEST:
        wanted = f"0, or a number from {_SMALLEST:g} to {_LARGEST:g} of either sign"
        raise ShapeError(name, shown(value), wanted, "Kernels compute in float32; pass such a number.")
    return value


def _check_distinct(names: Sequence[str], values: Sequence[float]) -> None:
    """Raise ShapeError if two numbers differ and may be equal in float32."""
    for i, one in enumerate(values):
        for j, other in enumerate(values[:i]):
            if one != other and abs(one - other) <= _STEP * max(abs(one), abs(other)):
                wanted = f"{names[j]}, {shown(other)}, or a number that differs from it in float32"
                raise ShapeError(names[i], shown(one), wanted, "Kernels compute in float32.")


@final
@dataclass(frozen=True)
class Softcap(Term):
    """A saturating bound on scores: ``cap * tanh(t / cap)``.

    Args:
        cap: Bound on the absolute value of scores, 1e-37 to 1e37.
    Raises:
        ShapeError: The cap is out of this range.
    Example:
        >>> rw.attention(q, k, v, rw.Causal(), terms=rw.Softcap(50.0)).shape
        torch.Size([1, 4, 256, 32])

    References:
        Gemma Team (2024), Gemma 2, section 2 (logit soft-capping).
    """

    kernel: ClassVar[str] = "softcap"

    cap: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap <= 0:
            raise ShapeError("cap", shown(self.cap), "a number above 0", "Leave the term out for no cap.")

    @classmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Softcap:
        """Return a cap that some scores come near."""
        return Softcap(20.0)

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Saturate the scores."""
        return self.cap * torch.tanh(t / self.cap)

    def slope(self, before: Tensor, after: Tensor, at: Pairs) -> Tensor:
        """Return ``1 - tanh^2``."""
        return (1 - (after / self.cap) ** 2).clamp(min=0)


def _floating(name: str, table: object, axes: Sequence[Axis], also: str = "") -> Tensor:
    """Check a floating tensor against its axes and return it; ``also`` names other accepted values in the error."""
    fits = isinstance(table, Tensor) and table.ndim == len(axes) and table.is_floating_point()
    if not fits or min(table.shape) == 0 or table.layout != torch.strided:  # type: ignore[attr-defined]
        sizes = ", ".join(_LETTERS.get(axis.along, axis.along) + " or 1" * axis.shared for axis in axes)
        wanted = f"a floating tensor ({sizes}{',' * (len(axes) == 1)}){also}"
        raise ShapeError(name, shown(table), wanted, "Pass such a tensor.")
    assert isinstance(table, Tensor)
    for dim, axis in enumerate(axes):
        if axis.along == "distance" and table.shape[dim] % 2 == 0:
            got = table.shape[dim]
            raise ShapeError(f"{name}.shape[{dim}]", got, "2 R + 1, an odd number", "Add an entry.")
    return table


def _check_place(name: str, table: Tensor, dim: int, size: int, axis: Axis, device: torch.device) -> None:
    if table.shape[dim] != size and not (axis.shared and table.shape[dim] == 1):
        wanted = f"{size}, the call's {_CALLS[axis.along]}" + (", or 1" if axis.shared else "")
        raise ShapeError(f"{name}.shape[{dim}]", table.shape[dim], wanted, "Make it for the call.")
    if table.device != device:
        remedy = f"Move it with .to({str(device)!r})."
        raise ShapeError(f"{name}.device", table.device, f"{device}, as q", remedy)


@final
@dataclass(frozen=True, eq=False)
class ALiBi(Term):
    """A penalty proportional to distance: ``t - slopes[h] * |q - k|``, for any length.

    Args:
        slopes: One per query head, (Hq,): a tensor or a sequence of numbers. They are constants without gradients.
    Raises:
        ShapeError: The slopes have another shape, or require gradients.
    Example:
        >>> rw.attention(q, k, v, rw.Causal(), terms=rw.ALiBi([0.5, 0.25, 0.125, 0.0625])).shape
        torch.Size([1, 4, 256, 32])

    References:
        Press, Smith, Lewis (2022), Train short, test long, section 3.
    """

    kernel: ClassVar[str] = "alibi"
    axes: ClassVar[Mapping[str, tuple[Axis, ...]]] = {"slopes": (Axis("heads"),)}
    _also: ClassVar[str] = ", or a list of numbers"
    _constant: ClassVar[str] = "Detach them, or use a DistanceBias, whose table learns."
    distances: ClassVar[bool] = True

    slopes: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.slopes, (list, tuple)):
            numbers = [number("slopes", slope, -_LARGEST, _LARGEST, error=ShapeError) for slope in self.slopes]
            object.__setattr__(self, "slopes", torch.tensor(numbers, dtype=torch.float32, device="cpu"))
        super().__post_init__()

    @staticmethod
    def of_heads(heads: int) -> ALiBi:
        """Return the slopes of the paper: a geometric sequence from 2 ** (-8 / heads) if heads is a power of two.

        Otherwise the sequence is that of the next lower power of two, and the remaining slopes are every second one of
        the sequence for twice that power.

        Args:
            heads: Query heads.
        Example:
            >>> rw.ALiBi.of_heads(4).slopes.tolist()
            [0.25, 0.0625, 0.015625, 0.00390625]
        """
        heads = whole("heads", heads, 1, 2**16, error=ShapeError)
        power = 2 ** (heads.bit_length() - 1)
        slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        between = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
        return ALiBi(torch.tensor(slopes + between, dtype=torch.float32, device="cpu"))

    @classmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> ALiBi:
        """Return slopes that are small compared with the scores."""
        return ALiBi(torch.full((heads,), 2.0**-6, device=generator.device))

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Subtract the penalty."""
        return t - self.slopes.to(t.device, t.dtype)[at.head] * (at.query - at.key).abs()


@final
@dataclass(frozen=True, eq=False)
class DistanceBias(Term):
    """A bias by head and distance: ``t + table[h, clip(k - q, -R, R) + R]``.

    Args:
        table: (Hq, 2 R + 1), floating; it may require gradients. Distances beyond R use the outermost entry.
    Raises:
        ShapeError: The table has another shape.
    Example:
        >>> table = torch.zeros(4, 2 * 16 + 1, requires_grad=True)
        >>> rw.attention(q, k, v, rw.Causal(), terms=rw.DistanceBias(table)).shape
        torch.Size([1, 4, 256, 32])

    References:
        Shaw, Uszkoreit, Vaswani (2018), Self-attention with relative position representations (clipped distances);
        Raffel et al. (2020), T5, section 2.1 (a scalar per head and bucket).
    """

    kernel: ClassVar[str] = "distance"
    axes: ClassVar[Mapping[str, tuple[Axis, ...]]] = {"table": (Axis("heads"), Axis("distance"))}
    learns: ClassVar[tuple[str, ...]] = ("table",)
    distances: ClassVar[bool] = True

    table: Tensor

    @staticmethod
    def from_buckets(weight: Tensor, *, max_distance: int = 128, bidirectional: bool = True) -> DistanceBias:
        """Build T5's relative attention bias: one bucket per short distance, wider buckets for longer ones.

        Args:
            weight: (buckets, Hq): weight of the model's embedding; gradients reach it.
            max_distance: Distance at which the last bucket begins.
            bidirectional: Whether keys after the query use half of the buckets, as in an encoder; otherwise they use
                the first bucket, as in a decoder.
        Example:
            >>> bias = rw.DistanceBias.from_buckets(torch.zeros(32, 4))
            >>> bias.table.shape
            torch.Size([4, 257])
        """
        weight = _floating("weight", weight, (Axis("buckets"), Axis("heads")))
        buckets, bidirectional = weight.shape[0], flag("bidirectional", bidirectional, ShapeError)
        least = 4 if bidirectional else 2
        if buckets < least or (bidirectional and buckets % 2):
            wanted = "an even number of at least 4" if bidirectional else "at least 2"
            raise ShapeError("weight.shape[0]", buckets, wanted, "Pass the whole embedding.")
        half = buckets // 2 if bidirectional else buckets
        exact = half // 2
        far = whole("max_distance", max_distance, exact + 1, 2**20, error=ShapeError)
        distance = torch.arange(-far, far + 1, device=weight.device)
        after = (distance > 0) * half if bidirectional else torch.zeros_like(distance)
        steps = distance.abs() if bidirectional else (-distance).clamp(min=0)
        # in float32, because the models compute it so, with the same rounding
        share = torch.log(steps.clamp(min=1).float() / exact) / math.log(far / exact)
        wide = (exact + (share * (half - exact)).long()).clamp(max=half - 1)
        bucket = after + torch.where(steps < exact, steps, wide)
        # Many distances share a bucket and their gradients may cancel, so they are summed in float64 and rounded once.
        return DistanceBias(weight.double()[bucket].T)

    @classmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> DistanceBias:
        """Return a table that is shorter than the distances of the call."""
        return DistanceBias(torch.randn(heads, 65, generator=generator, device=generator.device))

    def _place(self, at: Pairs) -> Tensor:
        reach = self.table.shape[1] // 2
        return (at.key - at.query).clamp(-reach, reach) + reach

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Add the bias to the scores."""
        return t + self.table.to(t.dtype)[at.head, self._place(at)]

    def entry(self, name: str, at: Pairs) -> Tensor:
        """Return the index of the distance in the row of the head."""
        return at.head * self.table.shape[1] + self._place(at)


@final
@dataclass(frozen=True, eq=False)
class Bias(Term):
    """A bias for each pair, from a tensor of the caller: ``t + table[b, h, i, j]``, read tile by tile.

    Only pairs that the pattern allows are read. An entry of -inf gives its pair the weight 0, but does not skip
    computation; only the pattern skips tiles.

    Args:
        table: (B or 1, Hq or 1, Nq, Nk), floating, any strides; it may require gradients, which are summed over
            broadcast dimensions. i and j are indices into q and k, not positions.
    Raises:
        ShapeError: The table has another shape.
    Example:
        >>> bias = torch.randn(1, 4, 256, 256, requires_grad=True)
        >>> rw.attention(q, k, v, rw.Segments(64), terms=rw.Bias(bias)).shape
        torch.Size([1, 4, 256, 32])
    """

    kernel: ClassVar[str] = "bias"
    axes: ClassVar[Mapping[str, tuple[Axis, ...]]] = {
        "table": (Axis("batch", True), Axis("heads", True), Axis("queries"), Axis("keys"))
    }
    learns: ClassVar[tuple[str, ...]] = ("table",)
    places: ClassVar[bool] = True

    table: Tensor

    @classmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Bias:
        """Return a table that all batch elements share."""
        return Bias(torch.randn(1, heads, nq, nk, generator=generator, device=generator.device))

    def _place(self, at: Pairs) -> tuple[Tensor, ...]:
        batch, heads = self.table.shape[:2]
        nq, nk = self.table.shape[2:]
        # indices past the end, in a last tile, are clamped; these pairs are masked
        return at.batch * (batch > 1), at.head * (heads > 1), at.row.clamp(max=nq - 1), at.column.clamp(max=nk - 1)

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Add the bias to the scores."""
        return t + self.table[self._place(at)].to(t.dtype)

    def entry(self, name: str, at: Pairs) -> Tensor:
        """Return the index of the pair's element."""
        b, h, i, j = self._place(at)
        _, heads, nq, nk = self.table.shape
        return ((b * heads + h) * nq + i) * nk + j


_WRITTEN = re.compile(r"(\w+)\(([^)]*)\)")


def as_terms(terms: object) -> tuple[Term, ...]:
    """Return a tuple of terms from one term, a list or tuple, or None (an empty tuple).

    Raises:
        UnsupportedError: The argument, or a member of it, is not a term.
    """
    listed = tuple(terms) if isinstance(terms, (list, tuple)) else () if terms is None else (terms,)
    for term in listed:
        if not isinstance(term, Term):
            *names, last = KINDS
            wanted = f"{', '.join(names)} or {last}"
            raise UnsupportedError("terms", shown(term), wanted, "Pass one, or a sequence of them.")
    return listed


def rounded(term: Term, dtype: torch.dtype) -> Term:
    """Return a term with its learned tables, if any, converted to a dtype; gradients reach the original tables."""
    if not term.learns:
        return term
    named = zip(term.axes, term.tables, strict=True)
    return term.over(*(table.to(dtype) if name in term.learns else table for name, table in named))


def written(terms: Sequence[Term]) -> tuple[str, list[Tensor]]:
    """Return the (text, tensors) of terms, which an operator takes."""
    return ", ".join(term.spec for term in terms), [table for term in terms for table in term.tables]


def tables_in(spec: str) -> int:
    """Count the tensors that belong to a text of :func:`written`."""
    return sum(arguments.split(", ").count("_") for _, arguments in _WRITTEN.findall(spec))


def terms_of(spec: str, tables: Sequence[Tensor]) -> tuple[Term, ...]:
    """Rebuild the terms from the (text, tensors) of :func:`written`.

    Raises:
        UnsupportedError: The text names a kind that is not declared, so another version wrote it.
    """
    rest, terms = iter(tables), []
    for name, arguments in _WRITTEN.findall(spec):
        if name not in KINDS:
            remedy = "Trace or export the call again with this version of ringweave."
            raise UnsupportedError("terms", shown(name), f"one of {', '.join(KINDS)}", remedy)
        values = [next(rest).detach() if each == "_" else float(each) for each in arguments.split(", ")]
        terms.append(KINDS[name](*values))
    return tuple(terms)


#: Number of values of a pair's 16 random bits; the pair is dropped if they are below the threshold.
DROPOUT_LEVELS = 2**16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


class Dropout(NamedTuple):
    """Dropout of a call: a pair is dropped if its 16-bit random number is below the threshold.

    ``seed`` is the 64-bit key of the random generator.
    """

    threshold: int
    seed: int

    @property
    def factor(self) -> float:
        """Factor of the weights that are kept."""
        return DROPOUT_LEVELS / (DROPOUT_LEVELS - self.threshold)

    def kept(self, at: Pairs) -> Tensor:
        """Return a bool tensor of the pairs' shape that is True where a weight is kept."""
        first = at.key[..., ::8]
        steps = torch.arange(at.key.shape[-1], device=at.key.device)
        aligned = first.repeat_interleave(8, -1)[..., : steps.numel()] + steps % 8 == at.key
        if bool(aligned.all()) and bool((first % 8 == 0).all()):
            # eight adjacent keys share a counter
            words = philox(self.seed, first >> 3, at.query, at.head, at.batch)
            halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
            return halves.flatten(-2)[..., : steps.numel()] >= self.threshold
        every = torch.stack(philox(self.seed, at.key >> 3, at.query, at.head, at.batch))
        place = (at.key & 7).expand(every.shape[1:])
        word = every.gather(0, (place >> 1)[None])[0]
        stays: Tensor = (word >> 16 * (place & 1)) & 0xFFFF >= self.threshold
        return stays


def philox(seed: int, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit random words, as int64, for counters of four int64 tensors that broadcast."""
    a, b, c, d = torch.broadcast_tensors(*(x & _WORD for x in counter))
    low, high = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        # the int64 product wraps, which keeps its lower 64 bits correct
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (second >> 32 & _WORD) ^ b ^ low, second & _WORD, (first >> 32 & _WORD) ^ d ^ high, first & _WORD
        low, high = low + _INCREMENTS[0] & _WORD, high + _INCREMENTS[1] & _WORD
    return a, b, c, d


def threshold_of(p: float) -> int:
    """Return the threshold nearest to a drop rate.

    Raises:
        ShapeError: The rate is above 0, and so small or so close to 1 that it would round to 0 or 1.
    """
    threshold = round(p * DROPOUT_LEVELS)
    if p > 0 and not 0 < threshold < DROPOUT_LEVELS:
        wanted = "0, or at least 2 ** -16 and at most 1 - 2 ** -16"
        raise ShapeError("dropout", shown(p), wanted, "It is rounded to a multiple of 2 ** -16.")
    return threshold


class TermOperands(NamedTuple):
    """The terms of a call in order and its dropout, and a view's heads, queries and keys as indices into the call's."""

    terms: tuple[Term, ...]
    dropout: Dropout | None
    heads: Tensor  # (Hq,) int64
    rows: Tensor  # (Nq,) int64
    columns: Tensor  # (Nk,) int64
    offsets: Tensor  # (B, 2) int64, positions of each batch element's first query and first key
    totals: tuple[Tensor | None, ...]  # the sum of each table's gradient, or None if it is not needed

    def seeded(self, seed: int) -> TermOperands:
        """Return the operands with another seed of the dropout, if there is one."""
        return self if self.dropout is None else self._replace(dropout=self.dropout._replace(seed=seed))

    def with_totals(self) -> list[tuple[Term, tuple[Tensor | None, ...]]]:
        """Return each term with the totals of its tables."""
        rest = iter(self.totals)
        return [(term, tuple(next(rest) for _ in term.axes)) for term in self.terms]

    @property
    def names(self) -> frozenset[str]:
        """Names of the terms, and "dropout": the features that a backend needs."""
        dropped = {"dropout"} if self.dropout is not None else set()
        return frozenset(type(term).__name__ for term in self.terms) | dropped

    def pairs(self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Pairs:
        """Return the call's indices and positions of the view's pairs.

        Indices past the end of the view, in a last tile, continue in steps of one.
        """

        def place(index: Tensor, places: Tensor) -> Tensor:
            inside = index.clamp(max=places.numel() - 1)
            return places[inside] + (index - inside)

        row, column = place(row, self.rows), place(column, self.columns)
        first = self.offsets[batch]
        return Pairs(batch, self.heads[head], row, column, row + first[..., 0], column + first[..., 1])

    def apply(self, t: Tensor, at: Pairs, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the scaled scores t before the terms and after each; scores that are not finite end unchanged.

        ``dtype`` is the dtype of the scores if that of t is wider; a score out of its range becomes infinite.
        """
        states = [t]
        for term in self.terms:
            state = term.apply(states[-1], at)
            if dtype is not None:
                narrow = state.to(dtype)
                state = torch.where(narrow.isinf(), narrow.to(t.dtype), state)
            states.append(state)
        if self.terms:
            states[-1] = torch.where(t.isfinite(), states[-1], t)
        return states

    def gradient(self, states: list[Tensor], grad: Tensor, at: Pairs) -> Tensor:
        """Return the gradient of the scaled scores from that of the scores after all terms."""
        # without terms there are no states
        steps = list(zip(self.with_totals(), states, states[1:], strict=False))
        for (term, totals), before, after in reversed(steps):
            grad = term.gradient(before, after, grad, at, totals)
        return grad


__all__ = [*KINDS, "Axis", "Pairs", "Term"]
__dir__ = only(__all__)
