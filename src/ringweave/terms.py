"""Score terms: functions that a model applies to scaled scores before the softmax.

    t = scale * <q, k>;  t = term(t) for each term, in order;  weights = softmax of t over the allowed keys

A term is a small frozen record. Like a pattern it crosses the operators as text and tensors. It defines its formula and
gradient once, for arrays of scores of any shape. Kernels that have the formula built in read only the record.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from .errors import ShapeError, UnsupportedError, message, shown
from .patterns.validate import flag, number, whole


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


class Term(ABC):
    """A function applied to scaled scores; base of the kinds of terms in this module.

    A kind is a frozen dataclass with number fields, and one tensor field if it has ``axes``. Checks, operators,
    backends and ranks know nothing about a kind beyond the attributes and methods declared here.

    Attributes:
        kernel: Name of the kind in kernels. A kernel without this name does not support the kind.
        axes: Axes of its table; a kind without axes has no table.
        learns: Whether gradients reach the table; otherwise its entries are constants, which may be on the CPU.
        distances: Whether the formula needs the positions of queries and keys.
        places: Whether the formula needs the indices of queries and keys in q and k.
    """

    kernel: ClassVar[str]
    axes: ClassVar[tuple[Axis, ...]] = ()
    learns: ClassVar[bool] = False
    distances: ClassVar[bool] = False
    places: ClassVar[bool] = False

    _numbers: ClassVar[tuple[str, ...]]
    _table: ClassVar[str]  # name of the tensor field, or ""
    _also: ClassVar[str] = ""  # other values that the field accepts, for its error text
    _spec: str

    def __init_subclass__(cls) -> None:
        fields = {name: kind for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")}
        cls._numbers = tuple(name for name, kind in fields.items() if kind == "float")
        tensors = [name for name, kind in fields.items() if kind == "Tensor"]
        if list(fields) != [*cls._numbers, *tensors] or len(tensors) != bool(cls.axes):
            raise TypeError(f"{cls.__name__} has fields {fields}; a term has floats, then a Tensor if it has axes")
        wanted = ["kernel", *["slope"] * (not cls.axes), *["entry"] * cls.learns]
        if unsaid := [name for name in wanted if name not in vars(cls)]:
            raise TypeError(f"{cls.__name__} does not define {' and '.join(unsaid)}")
        if cls.__name__ in KINDS or cls.kernel in {kind.kernel for kind in KINDS.values()}:
            raise TypeError(f"{cls.__name__}, or {cls.kernel!r} in kernels, is declared already")
        cls._table = tensors[0] if tensors else ""
        KINDS[cls.__name__] = cls

    def __post_init__(self) -> None:
        text = []
        for name in self._numbers:
            value = number(name, getattr(self, name), error=ShapeError)
            object.__setattr__(self, name, value)
            text.append(repr(value))
        if self._table:
            _floating(self._table, getattr(self, self._table), self.axes, self._also)
            text.append("_")
        # written once, like a pattern's text, because a trace may turn a number into a symbol
        object.__setattr__(self, "_spec", f"{type(self).__name__}({', '.join(text)})")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Values of the number fields, in order."""
        return tuple(map(self.__getattribute__, self._numbers))

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Tuple of the table, empty for a kind without one."""
        return (getattr(self, self._table),) if self._table else ()

    @property
    def learned(self) -> Tensor | None:
        """The table if gradients reach it, else None."""
        return getattr(self, self._table) if self.learns else None

    @property
    def spec(self) -> str:
        """Text that :func:`terms_of` reads, with the numbers, and ``_`` for the tensor."""
        return self._spec

    def over(self, table: Tensor) -> Term:
        """Return the same term with another table."""
        return type(self)(*self.numbers, table)  # type: ignore[call-arg]

    def total(self, acc: torch.dtype) -> Tensor:
        """Return zeros to which backward adds the gradient of the table."""
        assert self.learned is not None
        # float64, since every pair of a head is added to one of few entries
        few = any(axis.along == "distance" for axis in self.axes)
        dtype = torch.float64 if few else acc
        return torch.zeros_like(self.learned, dtype=dtype, memory_format=torch.contiguous_format)

    def check(self, batch: int, heads: int, nq: int, nk: int, device: torch.device) -> None:
        """Raise ShapeError unless its table fits a call."""
        sizes = {"batch": batch, "heads": heads, "queries": nq, "keys": nk}
        for table in self.tables:
            # constants are few numbers, so those on the CPU are copied to any device
            here = device if self.learns or table.device.type != "cpu" else table.device
            for dim, axis in enumerate(self.axes):
                if axis.along in sizes:
                    _check_place(self._table, table, dim, sizes[axis.along], axis, here)

    @classmethod
    @abstractmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Term:
        """Return a random term of this kind that fits a call, on the generator's device."""

    @abstractmethod
    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Return the scores after the term."""

    def slope(self, before: Tensor, after: Tensor) -> Tensor | None:
        """Return the derivative of the scores after the term by those before it, or None if it is 1.

        A kind without a table must define it.
        """
        return None

    def entry(self, at: Pairs) -> Tensor:
        """Return each pair's index into the flattened table, int64. A kind that learns must define it."""
        raise NotImplementedError

    def gradient(self, before: Tensor, after: Tensor, grad: Tensor, at: Pairs, total: Tensor | None) -> Tensor:
        """Return the gradient of the scores before the term, and add the gradient of the table to ``total``.

        Args:
            before: Scores before the term.
            after: Scores after the term.
            grad: Gradient of the scores after the term.
            at: Indices of the scores.
            total: Gradient of the table so far; None if it is not needed.
        """
        if total is not None:
            places, grads = torch.broadcast_tensors(self.entry(at), grad)
            total.view(-1).scatter_add_(0, places.reshape(-1), grads.reshape(-1).to(total.dtype))
        slope = self.slope(before, after)
        return grad if slope is None else grad * slope


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
        given = self.cap
        super().__post_init__()
        # kernels multiply by 1 / cap, so float32 must be able to represent it as well
        if not 1e-37 <= self.cap <= 1e37:
            wanted = "a number above 0, of 1e-37 to 1e37"
            raise ShapeError(message("cap", shown(given), wanted, "Leave the term out for no cap."))

    @classmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Softcap:
        """Return a cap that some scores come near."""
        return Softcap(20.0)

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Saturate the scores."""
        return self.cap * torch.tanh(t / self.cap)

    def slope(self, before: Tensor, after: Tensor) -> Tensor:
        """Return ``1 - tanh^2``."""
        return (1 - (after / self.cap) ** 2).clamp(min=0)


def _floating(name: str, table: object, axes: Sequence[Axis], also: str = "") -> Tensor:
    """Check a floating tensor against its axes and return it; ``also`` names other accepted values in the error."""
    fits = isinstance(table, Tensor) and table.ndim == len(axes) and table.is_floating_point()
    if not fits or min(table.shape) == 0 or table.layout != torch.strided:  # type: ignore[attr-defined]
        sizes = ", ".join(_LETTERS.get(axis.along, axis.along) + " or 1" * axis.shared for axis in axes)
        wanted = f"a floating tensor ({sizes}{',' * (len(axes) == 1)}){also}"
        raise ShapeError(message(name, shown(table), wanted, "Pass such a tensor."))
    assert isinstance(table, Tensor)
    for dim, axis in enumerate(axes):
        if axis.along == "distance" and table.shape[dim] % 2 == 0:
            got = table.shape[dim]
            raise ShapeError(message(f"{name}.shape[{dim}]", got, "2 R + 1, an odd number", "Add an entry."))
    return table


def _check_place(name: str, table: Tensor, dim: int, size: int, axis: Axis, device: torch.device) -> None:
    if table.shape[dim] != size and not (axis.shared and table.shape[dim] == 1):
        wanted = f"{size}, the call's {_CALLS[axis.along]}" + (", or 1" if axis.shared else "")
        raise ShapeError(message(f"{name}.shape[{dim}]", table.shape[dim], wanted, "Make it for the call."))
    if table.device != device:
        remedy = f"Move it with .to({str(device)!r})."
        raise ShapeError(message(f"{name}.device", table.device, f"{device}, as q", remedy))


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
    axes: ClassVar[tuple[Axis, ...]] = (Axis("heads"),)
    _also: ClassVar[str] = ", or a list of numbers"
    distances: ClassVar[bool] = True

    slopes: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.slopes, (list, tuple)):
            numbers = [number("slopes", slope, error=ShapeError) for slope in self.slopes]
            object.__setattr__(self, "slopes", torch.tensor(numbers, dtype=torch.float32, device="cpu"))
        super().__post_init__()
        if self.slopes.requires_grad:
            remedy = "Detach them, or use a DistanceBias, whose table learns."
            raise ShapeError(message("slopes", "a tensor that requires gradients", "constants", remedy))

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
    axes: ClassVar[tuple[Axis, ...]] = (Axis("heads"), Axis("distance"))
    learns: ClassVar[bool] = True
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
            raise ShapeError(message("weight.shape[0]", buckets, wanted, "Pass the whole embedding."))
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

    def entry(self, at: Pairs) -> Tensor:
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
    axes: ClassVar[tuple[Axis, ...]] = (Axis("batch", True), Axis("heads", True), Axis("queries"), Axis("keys"))
    learns: ClassVar[bool] = True
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

    def entry(self, at: Pairs) -> Tensor:
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
            raise UnsupportedError(message("terms", shown(term), wanted, "Pass one, or a sequence of them."))
    return listed


def rounded(term: Term, dtype: torch.dtype) -> Term:
    """Return a term with its learned table, if any, converted to a dtype; gradients reach the original table."""
    return term if term.learned is None else term.over(term.learned.to(dtype))


def written(terms: Sequence[Term]) -> tuple[str, list[Tensor]]:
    """Return the (text, tensors) of terms, which an operator takes."""
    return ", ".join(term.spec for term in terms), [table for term in terms for table in term.tables]


def tables_in(spec: str) -> int:
    """Count the tensors that belong to a text of :func:`written`."""
    return spec.count("(_")


def terms_of(spec: str, tables: Sequence[Tensor]) -> tuple[Term, ...]:
    """Rebuild the terms from the (text, tensors) of :func:`written`.

    Raises:
        UnsupportedError: The text names a kind that is not declared, so another version wrote it.
    """
    rest, terms = iter(tables), []
    for name, arguments in _WRITTEN.findall(spec):
        if name not in KINDS:
            remedy = "Trace or export the call again with this version of ringweave."
            raise UnsupportedError(message("terms", shown(name), f"one of {', '.join(KINDS)}", remedy))
        values = [next(rest).detach() if each == "_" else float(each) for each in arguments.split(", ")]
        terms.append(KINDS[name](*values))
    return tuple(terms)


#: Number of values of a pair's 16 random bits; the pair is dropped if they are below the threshold.
STEPS = 2**16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


class Dropout(NamedTuple):
    """Dropout of a call.

    Attributes:
        threshold: A pair is dropped if its 16-bit random number is below it.
        seed: 64-bit key of the random generator.
    """

    threshold: int
    seed: int

    @property
    def factor(self) -> float:
        """Factor of the weights that are kept."""
        return STEPS / (STEPS - self.threshold)

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
    threshold = round(p * STEPS)
    if p > 0 and not 0 < threshold < STEPS:
        wanted = "0, or at least 2 ** -16 and at most 1 - 2 ** -16"
        raise ShapeError(message("dropout", shown(p), wanted, "It is rounded to a multiple of 2 ** -16."))
    return threshold


class TermOperands(NamedTuple):
    """The terms and dropout of a call, and the indices of a view's heads, queries and keys in the call.

    Attributes:
        terms: Terms in the order of their application.
        dropout: Dropout, or None.
        heads: (Hq,) int64, query heads of the view as indices into the call's.
        rows: (Nq,) int64, queries of the view as indices into the call's q.
        columns: (Nk,) int64, keys of the view as indices into the call's k.
        offsets: (B, 2) int64, positions of each batch element's first query and first key.
        totals: For each term the sum of its table's gradient, or None if there is none.
    """

    terms: tuple[Term, ...]
    dropout: Dropout | None
    heads: Tensor
    rows: Tensor
    columns: Tensor
    offsets: Tensor
    totals: tuple[Tensor | None, ...]

    def seeded(self, seed: int) -> TermOperands:
        """Return the operands with another seed of the dropout, if there is one."""
        return self if self.dropout is None else self._replace(dropout=self.dropout._replace(seed=seed))

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

    def apply(self, t: Tensor, at: Pairs, held: torch.dtype | None = None) -> list[Tensor]:
        """Return the scores before the terms and after each; scores that are not finite stay unchanged at the end.

        Args:
            t: Scaled scores.
            at: Indices of the scores.
            held: Dtype of the scores, if that of t is wider; a score out of its range becomes infinite.
        """
        states = [t]
        for term in self.terms:
            state = term.apply(states[-1], at)
            if held is not None:
                narrow = state.to(held)
                state = torch.where(narrow.isinf(), narrow.to(t.dtype), state)
            states.append(state)
        if self.terms:
            states[-1] = torch.where(t.isfinite(), states[-1], t)
        return states

    def gradient(self, states: list[Tensor], grad: Tensor, at: Pairs) -> Tensor:
        """Return the gradient of the scaled scores from that of the scores after all terms."""
        steps = list(zip(self.terms, states, states[1:], self.totals, strict=False))
        for term, before, after, total in reversed(steps):
            grad = term.gradient(before, after, grad, at, total)
        return grad
