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
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from .errors import ShapeError, UnsupportedError, message, shown
from .patterns.numbers import flag, number, whole


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


class Term(ABC):
    """What becomes of a score: one of the terms of this module."""

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Its tensors: none or one."""
        return ()

    @property
    def learned(self) -> Tensor | None:
        """Its tensor, where gradients may reach it."""
        return None

    def total(self, acc: torch.dtype) -> Tensor:
        """Make zeros for the sum of its table's gradient."""
        assert self.learned is not None
        return torch.zeros_like(self.learned, dtype=acc, memory_format=torch.contiguous_format)

    @property
    def spec(self) -> str:
        """The text that :func:`terms_of` reads, ``_`` for the tensor."""
        return f"{type(self).__name__}(_)"

    @abstractmethod
    def check(self, batch: int, heads: int, nq: int, nk: int, device: torch.device) -> None:
        """Raise ShapeError unless it fits a call."""

    @abstractmethod
    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Give the scores after it."""

    def gradient(self, after: Tensor, grad: Tensor, at: Pairs, total: Tensor | None) -> Tensor:
        """The gradient of the scores before it, of that after it; what the table gets is added to ``total``.

        Args:
            after: The scores after it.
            grad: Their gradient.
            at: Where they stand.
            total: The table's gradient so far; None: not wanted.
        """
        return grad


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

    cap: float
    _spec: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        cap = number("cap", self.cap, error=ShapeError)
        # scores are multiplied by 1 / cap, which float32 holds too
        if not 1e-37 <= cap <= 1e37:
            wanted = "a number above 0, of 1e-37 to 1e37"
            raise ShapeError(message("cap", shown(self.cap), wanted, "Leave the term out for no cap."))
        object.__setattr__(self, "cap", cap)
        # written once, as a pattern's: a trace may leave a number open
        object.__setattr__(self, "_spec", f"Softcap({cap!r})")

    @property
    def spec(self) -> str:
        """Its text."""
        return self._spec

    def check(self, batch: int, heads: int, nq: int, nk: int, device: torch.device) -> None:
        """Fit every call."""

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Saturate the scores."""
        return self.cap * torch.tanh(t / self.cap)

    def gradient(self, after: Tensor, grad: Tensor, at: Pairs, total: Tensor | None) -> Tensor:
        """Multiply by ``1 - tanh^2``."""
        return grad * (1 - (after / self.cap) ** 2).clamp(min=0)


def _floating(name: str, table: object, ndim: int, wanted: str) -> Tensor:
    fits = isinstance(table, Tensor) and table.ndim == ndim and table.is_floating_point()
    if not fits or min(table.shape) == 0 or table.layout != torch.strided:  # type: ignore[attr-defined]
        raise ShapeError(message(name, shown(table), wanted, "Pass such a tensor."))
    assert isinstance(table, Tensor)
    return table


def _check_place(name: str, table: Tensor, dim: int, size: int, what: str, device: torch.device, *, one: bool) -> None:
    if table.shape[dim] != size and not (one and table.shape[dim] == 1):
        wanted = f"{size}, the call's {what}" + (", or 1" if one else "")
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

    slopes: Tensor

    def __post_init__(self) -> None:
        slopes = self.slopes
        if isinstance(slopes, (list, tuple)):
            numbers = [number("slopes", slope, error=ShapeError) for slope in slopes]
            slopes = torch.tensor(numbers, dtype=torch.float32, device="cpu")
        slopes = _floating("slopes", slopes, 1, "a floating tensor (Hq,), or a list of numbers")
        if slopes.requires_grad:
            remedy = "Detach them, or use a DistanceBias, whose table learns."
            raise ShapeError(message("slopes", "a tensor that requires gradients", "constants", remedy))
        object.__setattr__(self, "slopes", slopes)

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

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The slopes."""
        return (self.slopes,)

    def check(self, batch: int, heads: int, nq: int, nk: int, device: torch.device) -> None:
        """Raise ShapeError unless there is a slope for each query head."""
        # a few numbers: from the CPU they are taken to any device
        here = device if self.slopes.device.type != "cpu" else self.slopes.device
        _check_place("slopes", self.slopes, 0, heads, "query heads", here, one=False)

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Subtract the penalty."""
        return t - self.slopes.to(t.device, t.dtype)[at.head] * (at.query - at.key).abs()


@dataclass(frozen=True, eq=False)
class _Learned(Term):
    """A term with a table that may learn."""

    table: Tensor

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The table."""
        return (self.table,)

    @property
    def learned(self) -> Tensor | None:
        """The table."""
        return self.table


@final
@dataclass(frozen=True, eq=False)
class DistanceBias(_Learned):
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

    def __post_init__(self) -> None:
        table = _floating("table", self.table, 2, "a floating tensor (Hq, 2 R + 1)")
        if table.shape[1] % 2 == 0:
            raise ShapeError(message("table.shape[1]", table.shape[1], "2 R + 1, an odd number", "Add an entry."))

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
        weight = _floating("weight", weight, 2, "a floating tensor (buckets, Hq)")
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

    def total(self, acc: torch.dtype) -> Tensor:
        """Make zeros in float64: every pair of a head is added to few entries."""
        return super().total(torch.float64)

    def check(self, batch: int, heads: int, nq: int, nk: int, device: torch.device) -> None:
        """Raise ShapeError unless the table has the call's query heads and device."""
        _check_place("table", self.table, 0, heads, "query heads", device, one=False)

    def _entry(self, at: Pairs) -> Tensor:
        reach = self.table.shape[1] // 2
        return (at.key - at.query).clamp(-reach, reach) + reach

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Add the bias."""
        return t + self.table.to(t.dtype)[at.head, self._entry(at)]

    def gradient(self, after: Tensor, grad: Tensor, at: Pairs, total: Tensor | None) -> Tensor:
        """Add to the table; the scores pass it on."""
        if total is not None:
            places = at.head * self.table.shape[1] + self._entry(at)
            _add(total, places, grad)
        return grad


@final
@dataclass(frozen=True, eq=False)
class Bias(_Learned):
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

    def __post_init__(self) -> None:
        _floating("table", self.table, 4, "a floating tensor (B or 1, Hq or 1, Nq, Nk)")

    def check(self, batch: int, heads: int, nq: int, nk: int, device: torch.device) -> None:
        """Raise ShapeError unless the table has the call's sizes and device."""
        sizes = (batch, "batch elements"), (heads, "query heads"), (nq, "queries"), (nk, "keys")
        for dim, (size, what) in enumerate(sizes):
            _check_place("table", self.table, dim, size, what, device, one=dim < 2)

    def _entry(self, at: Pairs) -> tuple[Tensor, ...]:
        batch, heads = self.table.shape[:2]
        nq, nk = self.table.shape[2:]
        # the places past the end of a tile are masked
        return at.batch * (batch > 1), at.head * (heads > 1), at.row.clamp(max=nq - 1), at.column.clamp(max=nk - 1)

    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Add the bias."""
        return t + self.table[self._entry(at)].to(t.dtype)

    def gradient(self, after: Tensor, grad: Tensor, at: Pairs, total: Tensor | None) -> Tensor:
        """Add to the table; the scores pass it on."""
        if total is not None:
            b, h, i, j = self._entry(at)
            _, heads, nq, nk = self.table.shape
            _add(total, ((b * heads + h) * nq + i) * nk + j, grad)
        return grad


def _add(total: Tensor, places: Tensor, grad: Tensor) -> None:
    places, grad = torch.broadcast_tensors(places, grad)
    total.view(-1).scatter_add_(0, places.reshape(-1), grad.reshape(-1).to(total.dtype))


_KINDS: dict[str, type[Term]] = {kind.__name__: kind for kind in (Softcap, ALiBi, DistanceBias, Bias)}
#: What a term may be called, in refusals.
NAMES = tuple(_KINDS)
_WRITTEN = re.compile(r"(\w+)\(([^)]*)\)")


def as_terms(terms: object) -> tuple[Term, ...]:
    """The terms of a call, of one or a sequence; of None none.

    Raises:
        UnsupportedError: Something else.
    """
    listed = tuple(terms) if isinstance(terms, (list, tuple)) else () if terms is None else (terms,)
    for term in listed:
        if not isinstance(term, Term):
            wanted = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
            raise UnsupportedError(message("terms", shown(term), wanted, "Pass one, or a sequence of them."))
    return listed


def rounded(term: Term, dtype: torch.dtype) -> Term:
    """A term whose table of biases, if it has one, is read in another type; gradients reach the table."""
    return term if term.learned is None else type(term)(term.learned.to(dtype))  # type: ignore[call-arg]


def written(terms: Sequence[Term]) -> tuple[str, list[Tensor]]:
    """(text, tensors) of terms, as they cross an operator."""
    return ", ".join(term.spec for term in terms), [table for term in terms for table in term.tables]


def terms_of(spec: str, tables: Sequence[Tensor]) -> tuple[Term, ...]:
    """The terms of what :func:`written` wrote."""
    rest = iter(tables)

    def term(name: str, argument: str) -> Term:
        value = next(rest).detach() if argument == "_" else float(argument)
        return _KINDS[name](value)  # type: ignore[call-arg]

    return tuple(term(*found.groups()) for found in _WRITTEN.finditer(spec))


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
