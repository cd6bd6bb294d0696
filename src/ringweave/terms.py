"""Score terms: what a model adds to a scaled score, besides which pairs exist.

    t = scale * <q, k>;  t = term(t) for each term, in order;  weights = softmax of t over the allowed keys

A term is a small frozen record. It crosses the operators as a pattern does, as text and tensors, and says its formula
once, for arrays of scores of any shape, with its gradient; kernels that compute it themselves read the record.
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
    """Where an array of scores stands: int64 index tensors that broadcast to its shape.

    Attributes:
        batch: Batch element.
        head: Query head of the call.
        row: Place of the query in the call's q.
        column: Place of the key in the call's k.
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
        along: What its entries are for: "batch", "heads", "queries" and "keys" have the call's sizes; "distance" has
            2 R + 1 entries, for any R.
        shared: Whether a size of 1, one entry for all, is allowed too.
    """

    along: str
    shared: bool = False


_CALLS = {"batch": "batch elements", "heads": "query heads", "queries": "queries", "keys": "keys"}
_LETTERS = {"batch": "B", "heads": "Hq", "queries": "Nq", "keys": "Nk", "distance": "2 R + 1"}

#: The declared kinds by name: every subclass of :class:`Term`.
KINDS: dict[str, type[Term]] = {}


class Term(ABC):
    """What becomes of a score: one of the terms of this module.

    A kind is a frozen dataclass: its fields are numbers, and one tensor if it has ``axes``. What is declared here is
    all that checks, operators, backends and ranks know of a kind.

    Attributes:
        kernel: The name by which kernels know the kind. A kernel that has no such name refuses it.
        axes: The axes of its table; without axes it has no table.
        learns: Whether gradients reach the table; else its entries are constants, which may lie on the CPU.
        distances: Whether the formula needs the positions of queries and keys.
        places: Whether the formula needs their places in q and k.
    """

    kernel: ClassVar[str]
    axes: ClassVar[tuple[Axis, ...]] = ()
    learns: ClassVar[bool] = False
    distances: ClassVar[bool] = False
    places: ClassVar[bool] = False

    _numbers: ClassVar[tuple[str, ...]]
    _table: ClassVar[str]  # the tensor's field, or ""
    _also: ClassVar[str] = ""  # what else the field takes, for its error
    _spec: str

    def __init_subclass__(cls) -> None:
        fields = {name: kind for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")}
        cls._numbers = tuple(name for name, kind in fields.items() if kind == "float")
        tensors = [name for name, kind in fields.items() if kind == "Tensor"]
        if list(fields) != [*cls._numbers, *tensors] or len(tensors) != bool(cls.axes):
            raise TypeError(f"{cls.__name__} has fields {fields}; a term has floats, then a Tensor if it has axes")
        wanted = ["kernel", *["slope"] * (not cls.axes), *["entry"] * cls.learns]
        if unsaid := [name for name in wanted if name not in vars(cls)]:
            raise TypeError(f"{cls.__name__} does not say its {' and '.join(unsaid)}")
        if cls.__name__ in KINDS or cls.kernel in {kind.kernel for kind in KINDS.values()}:
            raise TypeError(f"{cls.__name__}, {cls.kernel!r} to kernels, is declared already")
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
        # written once, as a pattern's: a trace may leave a number open
        object.__setattr__(self, "_spec", f"{type(self).__name__}({', '.join(text)})")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Its numbers, in the order of its fields."""
        return tuple(map(self.__getattribute__, self._numbers))

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Its tensors: none or one."""
        return (getattr(self, self._table),) if self._table else ()

    @property
    def learned(self) -> Tensor | None:
        """Its tensor, where gradients may reach it."""
        return getattr(self, self._table) if self.learns else None

    @property
    def spec(self) -> str:
        """The text that :func:`terms_of` reads: its numbers, and ``_`` for the tensor."""
        return self._spec

    def over(self, table: Tensor) -> Term:
        """Make the same term with another table."""
        return type(self)(*self.numbers, table)  # type: ignore[call-arg]

    def total(self, acc: torch.dtype) -> Tensor:
        """Make zeros for the sum of its table's gradient."""
        assert self.learned is not None
        # every pair of a head is added to the few entries of a table of distances
        few = any(axis.along == "distance" for axis in self.axes)
        dtype = torch.float64 if few else acc
        return torch.zeros_like(self.learned, dtype=dtype, memory_format=torch.contiguous_format)

    def check(self, batch: int, heads: int, nq: int, nk: int, device: torch.device) -> None:
        """Raise ShapeError unless its table fits a call."""
        sizes = {"batch": batch, "heads": heads, "queries": nq, "keys": nk}
        for table in self.tables:
            # constants are a few numbers: from the CPU they are taken to any device
            here = device if self.learns or table.device.type != "cpu" else table.device
            for dim, axis in enumerate(self.axes):
                if axis.along in sizes:
                    _check_place(self._table, table, dim, sizes[axis.along], axis, here)

    @classmethod
    @abstractmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Term:
        """Draw a term of this kind that fits a call, on the generator's device."""

    @abstractmethod
    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Give the scores after it."""

    def slope(self, before: Tensor, after: Tensor) -> Tensor | None:
        """What the gradient of the scores after it is multiplied by; None: 1. A kind without a table says it."""
        return None

    def entry(self, at: Pairs) -> Tensor:
        """Where each pair reads the flattened table, int64. A kind that learns says it."""
        raise NotImplementedError

    def gradient(self, before: Tensor, after: Tensor, grad: Tensor, at: Pairs, total: Tensor | None) -> Tensor:
        """The gradient of the scores before it, of that after it; what the table gets is added to ``total``.

        Args:
            before: The scores before it.
            after: The scores after it.
            grad: Their gradient.
            at: Where they stand.
            total: The table's gradient so far; None: not wanted.
        """
        if total is not None:
            places, grads = torch.broadcast_tensors(self.entry(at), grad)
            total.view(-1).scatter_add_(0, places.reshape(-1), grads.reshape(-1).to(total.dtype))
        slope = self.slope(before, after)
        return grad if slope is None else grad * slope


@final
@dataclass(frozen=True)
class Softcap(Term):
    """Scores that saturate: ``cap * tanh(t / cap)``.

    Args:
        cap: What no score exceeds: 1e-37 to 1e37.
    Raises:
        ShapeError: A number out of that range.
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
        # scores are multiplied by 1 / cap, which float32 holds too
        if not 1e-37 <= self.cap <= 1e37:
            wanted = "a number above 0, of 1e-37 to 1e37"
            raise ShapeError(message("cap", shown(given), wanted, "Leave the term out for no cap."))

    @classmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Softcap:
        """A cap that some scores come near."""
        return Softcap(20.0)

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Saturate the scores."""
        return self.cap * torch.tanh(t / self.cap)

    def slope(self, before: Tensor, after: Tensor) -> Tensor:
        """``1 - tanh^2``."""
        return (1 - (after / self.cap) ** 2).clamp(min=0)


def _floating(name: str, table: object, axes: Sequence[Axis], also: str = "") -> Tensor:
    """Check a floating tensor with some axes; ``also`` says what else would do."""
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
    """A penalty that grows with distance: ``t - slopes[h] * |q - k|``, without a table, for any length.

    Args:
        slopes: One per query head, (Hq,): a tensor, or a sequence of numbers. They are constants: without gradients.
    Raises:
        ShapeError: Slopes of another shape, or that require gradients.
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
        """The slopes of the paper: a geometric sequence from 2 ** (-8 / heads), its gaps filled for other counts.

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
        """Slopes that are small beside the scores."""
        return ALiBi(torch.full((heads,), 2.0**-6, device=generator.device))

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Subtract the penalty."""
        return t - self.slopes.to(t.device, t.dtype)[at.head] * (at.query - at.key).abs()


@final
@dataclass(frozen=True, eq=False)
class DistanceBias(Term):
    """A bias by head and distance: ``t + table[h, clip(k - q, -R, R) + R]``.

    Args:
        table: (Hq, 2 R + 1), floating; it may require gradients. What lies farther than R takes the last entry.
    Raises:
        ShapeError: A table of another shape.
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
        """T5's relative attention bias: a bucket for each short distance, wider ones for farther keys.

        Args:
            weight: (buckets, Hq): of the model's embedding; gradients reach it.
            max_distance: Where the last bucket begins.
            bidirectional: Whether keys after the query have half of the buckets (an encoder); a decoder's have the
                first bucket.
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
        # in float32, as the models round it
        share = torch.log(steps.clamp(min=1).float() / exact) / math.log(far / exact)
        wide = (exact + (share * (half - exact)).long()).clamp(max=half - 1)
        bucket = after + torch.where(steps < exact, steps, wide)
        # many distances share a bucket, and what they give it may cancel: it is summed in float64, and rounded once
        return DistanceBias(weight.double()[bucket].T)

    @classmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> DistanceBias:
        """A table that ends before the distances do."""
        return DistanceBias(torch.randn(heads, 65, generator=generator, device=generator.device))

    def _place(self, at: Pairs) -> Tensor:
        reach = self.table.shape[1] // 2
        return (at.key - at.query).clamp(-reach, reach) + reach

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Add the bias."""
        return t + self.table.to(t.dtype)[at.head, self._place(at)]

    def entry(self, at: Pairs) -> Tensor:
        """That of the distance, in the row of the head."""
        return at.head * self.table.shape[1] + self._place(at)


@final
@dataclass(frozen=True, eq=False)
class Bias(Term):
    """The caller's own bias of each pair: ``t + table[b, h, i, j]``, read tile by tile.

    Only the pairs that the pattern allows are read. An entry of -inf leaves its pair without weight; to leave out
    tiles, say so in the pattern.

    Args:
        table: (B or 1, Hq or 1, Nq, Nk), floating, any strides; it may require gradients, which are summed over what
            it is broadcast over. i and j are places in q and k, not positions.
    Raises:
        ShapeError: A table of another shape.
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
        """A table for all batch elements."""
        return Bias(torch.randn(1, heads, nq, nk, generator=generator, device=generator.device))

    def _place(self, at: Pairs) -> tuple[Tensor, ...]:
        batch, heads = self.table.shape[:2]
        nq, nk = self.table.shape[2:]
        # the places past the end of a tile are masked
        return at.batch * (batch > 1), at.head * (heads > 1), at.row.clamp(max=nq - 1), at.column.clamp(max=nk - 1)

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Add the bias."""
        return t + self.table[self._place(at)].to(t.dtype)

    def entry(self, at: Pairs) -> Tensor:
        """The pair's element."""
        b, h, i, j = self._place(at)
        _, heads, nq, nk = self.table.shape
        return ((b * heads + h) * nq + i) * nk + j


_WRITTEN = re.compile(r"(\w+)\(([^)]*)\)")


def as_terms(terms: object) -> tuple[Term, ...]:
    """The terms of a call, of one or a sequence; of None none.

    Raises:
        UnsupportedError: Something else.
    """
    listed = tuple(terms) if isinstance(terms, (list, tuple)) else () if terms is None else (terms,)
    for term in listed:
        if not isinstance(term, Term):
            *names, last = KINDS
            wanted = f"{', '.join(names)} or {last}"
            raise UnsupportedError(message("terms", shown(term), wanted, "Pass one, or a sequence of them."))
    return listed


def rounded(term: Term, dtype: torch.dtype) -> Term:
    """A term whose table of biases, if it has one, is read in another type; gradients reach the table."""
    return term if term.learned is None else term.over(term.learned.to(dtype))


def written(terms: Sequence[Term]) -> tuple[str, list[Tensor]]:
    """(text, tensors) of terms, as they cross an operator."""
    return ", ".join(term.spec for term in terms), [table for term in terms for table in term.tables]


def tables_in(spec: str) -> int:
    """Count the tensors of what :func:`written` wrote."""
    return spec.count("(_")


def terms_of(spec: str, tables: Sequence[Tensor]) -> tuple[Term, ...]:
    """The terms of what :func:`written` wrote.

    Raises:
        UnsupportedError: A kind that is not declared: the text of another version.
    """
    rest, terms = iter(tables), []
    for name, arguments in _WRITTEN.findall(spec):
        if name not in KINDS:
            remedy = "Trace or export the call again with this version of ringweave."
            raise UnsupportedError(message("terms", shown(name), f"one of {', '.join(KINDS)}", remedy))
        values = [next(rest).detach() if each == "_" else float(each) for each in arguments.split(", ")]
        terms.append(KINDS[name](*values))
    return tuple(terms)


#: A pair is dropped where its 16 bits are below the threshold.
STEPS = 2**16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


class Dropout(NamedTuple):
    """Dropout of a call.

    Attributes:
        threshold: Of 2 ** 16 numbers, those that drop.
        seed: The key of all pairs, of 64 bits.
    """

    threshold: int
    seed: int

    @property
    def factor(self) -> float:
        """What kept weights are multiplied by."""
        return STEPS / (STEPS - self.threshold)

    def kept(self, at: Pairs) -> Tensor:
        """Which pairs stay: bool, of the pairs' shape."""
        first = at.key[..., ::8]
        steps = torch.arange(at.key.shape[-1], device=at.key.device)
        aligned = first.repeat_interleave(8, -1)[..., : steps.numel()] + steps % 8 == at.key
        if bool(aligned.all()) and bool((first % 8 == 0).all()):
            # keys side by side share their counters
            words = philox(self.seed, first >> 3, at.query, at.head, at.batch)
            halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
            return halves.flatten(-2)[..., : steps.numel()] >= self.threshold
        every = torch.stack(philox(self.seed, at.key >> 3, at.query, at.head, at.batch))
        place = (at.key & 7).expand(every.shape[1:])
        word = every.gather(0, (place >> 1)[None])[0]
        stays: Tensor = (word >> 16 * (place & 1)) & 0xFFFF >= self.threshold
        return stays


def philox(seed: int, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits, as int64, for counters of four int64 tensors that broadcast."""
    a, b, c, d = torch.broadcast_tensors(*(x & _WORD for x in counter))
    low, high = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        # of int64, whose product wraps: the lower 64 bits are right
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (second >> 32 & _WORD) ^ b ^ low, second & _WORD, (first >> 32 & _WORD) ^ d ^ high, first & _WORD
        low, high = low + _INCREMENTS[0] & _WORD, high + _INCREMENTS[1] & _WORD
    return a, b, c, d


def threshold_of(p: float) -> int:
    """The threshold nearest to a drop rate.

    Raises:
        ShapeError: A rate above 0 so small, or so near to 1, that it would become 0 or 1.
    """
    threshold = round(p * STEPS)
    if p > 0 and not 0 < threshold < STEPS:
        wanted = "0, or at least 2 ** -16 and at most 1 - 2 ** -16"
        raise ShapeError(message("dropout", shown(p), wanted, "It is rounded to a multiple of 2 ** -16."))
    return threshold


class TermOperands(NamedTuple):
    """What is done to scores and weights besides scale and mask, and where a view's queries and keys stand in the call.

    Attributes:
        terms: In their order.
        dropout: None: no weight is dropped.
        heads: (Hq,) int64, the call's heads that are the view's.
        rows: (Nq,) int64, places in the call's q.
        columns: (Nk,) int64, places in the call's k.
        offsets: (B, 2) int64, the positions of each batch element's first query and first key.
        totals: Per term what its table's gradient is added to; None: nothing.
    """

    terms: tuple[Term, ...]
    dropout: Dropout | None
    heads: Tensor
    rows: Tensor
    columns: Tensor
    offsets: Tensor
    totals: tuple[Tensor | None, ...]

    def seeded(self, seed: int) -> TermOperands:
        """Change the seed of the dropout, and nothing else."""
        return self if self.dropout is None else self._replace(dropout=self.dropout._replace(seed=seed))

    @property
    def names(self) -> frozenset[str]:
        """What a backend has to be able to do."""
        dropped = {"dropout"} if self.dropout is not None else set()
        return frozenset(type(term).__name__ for term in self.terms) | dropped

    def pairs(self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Pairs:
        """Where pairs of the view stand; what lies past its end, in a last tile, goes on by ones."""

        def place(index: Tensor, places: Tensor) -> Tensor:
            inside = index.clamp(max=places.numel() - 1)
            return places[inside] + (index - inside)

        row, column = place(row, self.rows), place(column, self.columns)
        first = self.offsets[batch]
        return Pairs(batch, self.heads[head], row, column, row + first[..., 0], column + first[..., 1])

    def apply(self, t: Tensor, at: Pairs, held: torch.dtype | None = None) -> list[Tensor]:
        """The scores before the terms, and after each. One that is not finite stays so, whatever a term makes of it.

        ``held``: the type of scores where t is wider; one that it cannot hold is infinite.
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
        """The gradient of scaled scores, of that of what the terms made of them."""
        steps = list(zip(self.terms, states, states[1:], self.totals, strict=False))
        for term, before, after, total in reversed(steps):
            grad = term.gradient(before, after, grad, at, total)
        return grad
