"""The kinds of score terms: the formula of each, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from ..axes import Axes
from ..checks import flag, number, whole
from ..errors import ShapeError, shown
from .term import KINDS as KINDS
from .term import LARGEST, Axis, Pairs, Term

_BUCKETS = Axes("weight: floating[buckets Hq]")


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


@final
@dataclass(frozen=True, eq=False)
class ALiBi(Term):
    """A penalty proportional to distance: ``t - slopes[h] * |q - k|``, for any length.

    Packed sequences may have different slopes: the penalty of key j is then ``slopes[h, j] * |q - k|``.

    Args:
        slopes: One per query head, (Hq,): a tensor or a sequence of numbers. Or one per query head and key, a tensor
            (Hq, Nk). They are constants without gradients.
    Raises:
        ShapeError: The slopes have another shape, or require gradients.
    Example:
        >>> rw.attention(q, k, v, rw.Causal(), terms=rw.ALiBi([0.5, 0.25, 0.125, 0.0625])).shape
        torch.Size([1, 4, 256, 32])

    References:
        Press, Smith, Lewis (2022), Train short, test long, section 3.
    """

    kernel: ClassVar[str] = "alibi"
    axes: ClassVar[Mapping[str, tuple[Axis, ...]]] = {"slopes": (Axis("heads"), Axis("keys", optional=True))}
    _remedy: ClassVar[str] = "Pass such a tensor, or a list of numbers."
    _constant: ClassVar[str] = "Detach them, or use a DistanceBias, whose table learns."
    distances: ClassVar[bool] = True

    slopes: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.slopes, (list, tuple)):
            numbers = [number("slopes", slope, -LARGEST, LARGEST, error=ShapeError) for slope in self.slopes]
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
        slopes = self.slopes.to(t.device, t.dtype)
        # indices past the end, in a last tile, are clamped; these pairs are masked
        of_pair = slopes[at.head] if slopes.ndim == 1 else slopes[at.head, at.column.clamp(max=slopes.shape[1] - 1)]
        return t - of_pair * (at.query - at.key).abs()


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
        buckets = _BUCKETS.fit(weight=weight)["buckets"]
        bidirectional = flag("bidirectional", bidirectional, ShapeError)
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
