"""Patterns of nearby positions: causal, window, segments, neighbourhood, prefix."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..checks import whole, whole_fields
from ..errors import PatternError, shown
from ..relation.node import ELEMENT, Node
from ..relation.opaque import Opaque
from ..relation.shapes import MOST_ZONES, neighborhood, segments
from ..relation.zones import Zones
from .base import Derived, DistanceProfile, Pattern
from .declared import declare
from .tiles import Int64, Ranges, Tiles, intersect, multiples, number_classes

_NO_LIMIT = (
    "For flash-attn's window_size, where -1 means no limit, write Causal() for (-1, 0), Full() for (-1, -1), and the "
    "sequence length in place of another -1."
)


@declare("Causal()", "By position")
@dataclass(frozen=True, eq=False, repr=False)
class Causal(Pattern):
    """A query attends keys at or before its own position.

    Example:
        >>> rw.Causal().to_dense(3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """

    def _text(self) -> str:
        return "Causal()"

    def zones(self, n: int) -> Node:
        return Zones(d=(-ELEMENT, 1))

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((0, np.minimum(q_hi, nk)), rows=len(q_lo))

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((q_lo + 1, nk), rows=len(q_lo))

    def tile_classes(self, tiles: Tiles) -> Int64:
        q_lo, q_hi, k_lo, k_hi = tiles
        return number_classes(k_lo >= q_hi, k_hi - 1 <= q_lo, q_lo - k_lo)

    def restride(self, rate: int, offset: int) -> Pattern:
        return self

    def distance_profile(self) -> DistanceProfile:
        return DistanceProfile(0, 0, sys.maxsize, True, 0)


@declare("SlidingWindow(192, 64)", "By position", hostile="SlidingWindow(2**30, 0)")
@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(Pattern):
    """A query attends ``left`` keys before itself, itself, and ``right`` keys after.

    Args:
        left: Number of keys before the query's position.
        right: Number of keys after it.
    Raises:
        PatternError: A width is negative.
    Example:
        >>> rw.SlidingWindow(1).to_dense(4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)

    References:
        Beltagy, Peters, Cohan (2020), Longformer, section 3.1.
    """

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.left, (tuple, list)) and len(self.left) == 2:
            remedy = f"Pass two numbers: SlidingWindow({', '.join(map(shown, self.left))})."
            remedy += " They count keys before and after the query, as flash-attn's window_size=(left, right) does."
            raise PatternError("left", shown(self.left), "an int", remedy)
        for name in ("left", "right"):
            if type(width := getattr(self, name)) is int and width == -1:
                raise PatternError(name, width, "at least 0", _NO_LIMIT)
        whole_fields(self, left=0, right=0)
        super().__post_init__()

    def _text(self) -> str:
        return f"SlidingWindow({self.left}, {self.right})" if self.right else f"SlidingWindow({self.left})"

    def zones(self, n: int) -> Node:
        return Zones(d=(-self.left, self.right + 1))

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k >= q - self.left) & (k <= q + self.right)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((np.maximum(q_lo - self.left, 0), np.minimum(q_hi + self.right, nk)), rows=len(q_lo))

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        before = np.clip(q_hi - 1 - self.left, 0, nk)
        return Ranges.of((0, before), (q_lo + self.right + 1, nk), rows=len(q_lo))

    def tile_classes(self, tiles: Tiles) -> Int64:
        q_lo, q_hi, k_lo, k_hi = tiles
        least, most = q_lo - k_hi + 1, q_hi - 1 - k_lo
        empty = (least > self.left) | (most < -self.right)
        return number_classes(empty, (least >= -self.right) & (most <= self.left), q_lo - k_lo)

    def restride(self, rate: int, offset: int) -> Pattern:
        return SlidingWindow(self.left // rate, self.right // rate)

    def distance_profile(self) -> DistanceProfile:
        return DistanceProfile(0, self.left, self.left, False, self.right)


@declare("Segments(256)", "By position", hostile="Segments(2**30)")
@dataclass(frozen=True, eq=False, repr=False)
class Segments(Pattern):
    """Consecutive segments of one length; a query attends the keys of its segment. The last segment may be short.

    Args:
        length: Tokens in a segment.
    Raises:
        PatternError: The length is below 1.
    Example:
        >>> rw.Segments(2).to_dense(3)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """

    length: int

    def __post_init__(self) -> None:
        whole_fields(self, length=1)
        super().__post_init__()

    def _text(self) -> str:
        return f"Segments({self.length})"

    def zones(self, n: int) -> Node:
        number = -(-n // self.length)
        if number > MOST_ZONES:
            return Opaque(lambda q, k, element: q // self.length == k // self.length)
        return segments(self.length, n)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return q // self.length == k // self.length

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        length = self.length
        return Ranges.of((q_lo // length * length, np.minimum(((q_hi - 1) // length + 1) * length, nk)), rows=len(q_lo))

    def tile_classes(self, tiles: Tiles) -> Int64:
        q_lo, q_hi, k_lo, k_hi = tiles
        length = self.length
        q_first, q_last, k_first, k_last = q_lo // length, (q_hi - 1) // length, k_lo // length, (k_hi - 1) // length
        empty = (q_last < k_first) | (k_last < q_first)
        full = (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
        # the place of the next bound in each side of the tile (its length without one), and the number of
        # segments between the starts of the two sides
        q_bound = np.minimum(length - q_lo % length, q_hi - q_lo)
        k_bound = np.minimum(length - k_lo % length, k_hi - k_lo)
        return number_classes(empty, full, q_bound, k_bound, q_first - k_first)

    def restride(self, rate: int, offset: int) -> Pattern | None:
        return Segments(self.length // rate) if self.length % rate == 0 else None


@declare("Neighborhood(7, 2, tokens=64)", "By residue", tokens=64, hostile="Neighborhood(7, n // 8, tokens=n)")
class Neighborhood(Pattern):
    """A query attends exactly ``window`` keys around itself; at the borders the window is shifted inwards.

    Args:
        window: Number of attended keys, including the query's position.
        dilation: Distance in tokens between attended keys.
        tokens: Sequence length.
    Raises:
        PatternError: The window, dilation or length is below 1; at use, the length is another one.
    Example:
        >>> rw.patterns.Neighborhood(3, tokens=5).to_dense(5)[0, 0].sum(-1)
        tensor([3, 3, 3, 3, 3])
    """

    def __init__(self, window: int, dilation: int = 1, *, tokens: int):
        self.window, self.dilation = whole("window", window, 1), whole("dilation", dilation, 1)
        self.tokens = whole("tokens", tokens, 1)
        self.__post_init__()

    def _text(self) -> str:
        return f"Neighborhood({self.window}, {self.dilation}, tokens={self.tokens})"

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        if nk != self.tokens or q_offset + nq > nk:
            raise PatternError(
                "Neighborhood",
                f"a pattern for {self.tokens} tokens with {nk} keys and queries up to position {q_offset + nq}",
                f"{self.tokens} keys, and every query among them",
                f"Build it with tokens={nk}.",
            )

    def zones(self, n: int) -> Node:
        return neighborhood(self.window, self.dilation, self.tokens)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        rate = self.dilation
        residue = q % rate
        members = (self.tokens - residue + rate - 1) // rate
        first = torch.minimum((q // rate - self.window // 2).clamp(min=0), (members - self.window).clamp(min=0))
        return (k % rate == residue) & (k // rate >= first) & (k // rate < first + self.window)

    def _bound(self, q: Int64) -> Int64:
        """Return b(q): the first key of a query p is at least b(q) for p >= q, and below b(q) + dilation for p <= q."""
        before, reach = self.window // 2 * self.dilation, self.window * self.dilation
        return np.clip(q - before, 0, max(self.tokens - reach, 0))

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        stop = self._bound(q_hi - 1) + self.window * self.dilation
        near = Ranges.of((self._bound(q_lo), np.minimum(stop, nk)), rows=len(q_lo))
        # far neighbours leave whole tiles empty between them
        return intersect(near, multiples(q_lo, q_hi, nk, self.dilation))

    def tile_classes(self, tiles: Tiles) -> Int64:
        q_lo, q_hi, k_lo, k_hi = tiles
        rate, reach, before = self.dilation, self.window * self.dilation, self.window // 2 * self.dilation
        first, last = self._bound(q_lo), self._bound(q_hi - 1)
        empty = (k_hi <= first) | (k_lo >= last + reach) | ((k_hi - 1 - q_lo) // rate * rate < k_lo - q_hi + 1)
        # Inside the windows of all queries only residues count. Away from the borders the pattern is a dilated window.
        inside = (k_lo >= last + rate - 1) & (k_hi <= first + reach)
        inner = (q_lo >= before) & (q_hi - 1 - before <= self.tokens - reach)
        distance = q_lo - k_lo
        return number_classes(
            empty,
            inside & (rate == 1),
            np.where(inside, 2, inner.astype(np.int64)),
            np.where(inside, distance % rate, np.where(inner, distance, q_lo)),
            np.where(inside | inner, 0, k_lo),
        )

    @property
    def residue_rate(self) -> int:
        return self.dilation

    def restride(self, rate: int, offset: int) -> Pattern | None:
        if self.dilation != rate or offset >= self.tokens:
            return None
        return Neighborhood(self.window, tokens=(self.tokens - offset + rate - 1) // rate)


@declare("PrefixLM(256)", "By position", hostile="PrefixLM(2**30)")
@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(Derived):
    """A prefix that every query attends, and causal attention after it: ``k < n or k <= q``.

    Args:
        n: Tokens in the prefix.
    Raises:
        PatternError: n is negative.
    Example:
        >>> rw.PrefixLM(2).to_dense(3)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """

    n: int

    def __post_init__(self) -> None:
        whole_fields(self, n=0)
        super().__post_init__()

    def _text(self) -> str:
        return f"PrefixLM({self.n})"

    @property
    def definition(self) -> Pattern:
        from .global_tokens import Sinks

        return Sinks(self.n) | Causal()
