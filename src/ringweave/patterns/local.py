"""Patterns of nearness: causal, window, segments, packed documents, prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import PatternError, message, shown
from .base import Derived, Pattern
from .chosen import Sinks
from .numbers import LONGEST, integers, whole, whole_fields
from .tiles import Int64, Ranges, Tiles, classes


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

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((0, np.minimum(q_hi, nk)), rows=len(q_lo))

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((q_lo + 1, nk), rows=len(q_lo))

    def tile_keys(self, tiles: Tiles) -> Int64:
        q_lo, q_hi, k_lo, k_hi = tiles
        return classes(k_lo >= q_hi, k_hi - 1 <= q_lo, q_lo - k_lo)

    def restride(self, rate: int, offset: int) -> Pattern:
        return self


@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(Pattern):
    """A query attends ``left`` keys before itself, itself, and ``right`` keys after.

    Args:
        left: Keys before the query's position.
        right: Keys after it.
    Raises:
        PatternError: A negative width.
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
        whole_fields(self, left=0, right=0)
        super().__post_init__()

    def _text(self) -> str:
        return f"SlidingWindow({self.left}, {self.right})" if self.right else f"SlidingWindow({self.left})"

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k >= q - self.left) & (k <= q + self.right)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((np.maximum(q_lo - self.left, 0), np.minimum(q_hi + self.right, nk)), rows=len(q_lo))

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        before = np.clip(q_hi - 1 - self.left, 0, nk)
        return Ranges.of((0, before), (q_lo + self.right + 1, nk), rows=len(q_lo))

    def tile_keys(self, tiles: Tiles) -> Int64:
        q_lo, q_hi, k_lo, k_hi = tiles
        least, most = q_lo - k_hi + 1, q_hi - 1 - k_lo
        empty = (least > self.left) | (most < -self.right)
        return classes(empty, (least >= -self.right) & (most <= self.left), q_lo - k_lo)

    def restride(self, rate: int, offset: int) -> Pattern:
        return SlidingWindow(self.left // rate, self.right // rate)


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Pattern):
    """Consecutive segments of one length; attention stays inside a segment. The last one may be short.

    Args:
        length: Tokens in a segment.
    Raises:
        PatternError: A length below 1.
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

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return q // self.length == k // self.length

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        length = self.length
        return Ranges.of((q_lo // length * length, np.minimum(((q_hi - 1) // length + 1) * length, nk)), rows=len(q_lo))

    def tile_keys(self, tiles: Tiles) -> Int64:
        q_lo, q_hi, k_lo, k_hi = tiles
        length = self.length
        q_first, q_last, k_first, k_last = q_lo // length, (q_hi - 1) // length, k_lo // length, (k_hi - 1) // length
        empty = (q_last < k_first) | (k_last < q_first)
        full = (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
        # where the next bound lies in the tile (past its end: no bound), and how many segments apart they start
        q_bound = np.minimum(length - q_lo % length, q_hi - q_lo)
        k_bound = np.minimum(length - k_lo % length, k_hi - k_lo)
        return classes(empty, full, q_bound, k_bound, q_first - k_first)

    def restride(self, rate: int, offset: int) -> Pattern | None:
        return Segments(self.length // rate) if self.length % rate == 0 else None


class Documents(Pattern):
    """Packed variable-length documents: a query attends the keys of its own document.

    Args:
        lengths: Tokens of each document, in order; their sum is the sequence length.
        cu_seqlens: The same as cumulative bounds (0, ..., N), as varlen kernels take them; give one of the two.
    Raises:
        PatternError: A length below 1, bounds that do not start at 0 or do not rise, or a sum that is not N.
    Example:
        >>> rw.Documents([1, 2]).to_dense(3)[0, 0].int()
        tensor([[1, 0, 0],
                [0, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """

    def __init__(
        self, lengths: Sequence[int] | Tensor | None = None, *, cu_seqlens: Sequence[int] | Tensor | None = None
    ):
        if (lengths is None) == (cu_seqlens is None):
            given = "neither" if lengths is None else "both"
            raise PatternError(message("lengths, cu_seqlens", given, "exactly one of the two", "Pass lengths=[...]."))
        if cu_seqlens is None:
            name, wanted, sizes = (
                "lengths",
                "documents of at least one token",
                np.array(integers("lengths", lengths), np.int64),
            )
            bounds = np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])
        else:
            name, wanted = "cu_seqlens", "bounds that rise from 0"
            bounds = np.array(integers("cu_seqlens", cu_seqlens), np.int64)
            sizes = np.diff(bounds)
        if len(bounds) < 2 or bounds[0] != 0 or (sizes < 1).any():
            got = (sizes if cu_seqlens is None else bounds).tolist()
            raise PatternError(message(name, shown(got), wanted, "Drop empty documents."))
        whole(f"the sum of {name}" if cu_seqlens is None else name, bounds[-1], 1, LONGEST)
        self._bounds = torch.from_numpy(bounds)
        self.__post_init__()

    @classmethod
    def _own(cls, bounds: Tensor) -> Documents:
        """Wrap a tensor that is already private."""
        pattern = cls.__new__(cls)
        pattern._bounds = bounds
        pattern.__post_init__()
        return pattern

    @property
    def _bounds_np(self) -> Int64:
        # the same memory, in a copy from another process too
        bounds: Int64 = self._bounds.numpy()
        return bounds

    def _text(self) -> str:
        return "Documents(cu_seqlens=_)"

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return (self._bounds,)

    def __repr__(self) -> str:
        sizes = self._bounds.diff().tolist()
        if len(sizes) <= 8:
            return f"Documents({sizes})"
        return f"Documents(<{len(sizes)} documents, {min(sizes)}-{max(sizes)} tokens>)"

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        total = int(self._bounds_np[-1])
        if total != nk or q_offset + nq > nk:
            raise PatternError(
                message(
                    "Documents",
                    f"documents of {total} tokens in all for {nk} keys and queries up to position {q_offset + nq}",
                    "lengths that sum to the number of keys, and every query inside",
                    "Add the padding as a last document, or correct the lengths.",
                )
            )

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        bounds = self._bounds.to(q.device)
        return torch.searchsorted(bounds, q.contiguous(), right=True) == torch.searchsorted(
            bounds, k.contiguous(), right=True
        )

    def _document(self, position: Int64) -> Int64:
        return np.searchsorted(self._bounds_np, position, side="right") - 1

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        start = self._bounds_np[self._document(q_lo)]
        return Ranges.of((start, self._bounds_np[self._document(q_hi - 1) + 1]), rows=len(q_lo))

    def tile_keys(self, tiles: Tiles) -> Int64:
        q_lo, q_hi, k_lo, k_hi = tiles
        q_first, q_last = self._document(q_lo), self._document(q_hi - 1)
        k_first, k_last = self._document(k_lo), self._document(k_hi - 1)
        empty = (q_last < k_first) | (k_last < q_first)
        full = (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
        # documents are consecutive: the bounds in both tiles and the distance of their first documents fix the mask
        q_bounds, k_bounds = self._bounds_in(q_lo, q_first, q_last), self._bounds_in(k_lo, k_first, k_last)
        return classes(empty, full, q_bounds, k_bounds, q_first - k_first)

    def _bounds_in(self, lo: Int64, first: Int64, last: Int64) -> Int64:
        """Number where document bounds lie in a tile side: the place of a single one, else the side itself."""
        place = self._bounds_np[np.minimum(first + 1, len(self._bounds_np) - 1)] - lo
        return np.where(first == last, -1, np.where(last - first == 1, place, 2**20 + lo))

    def restride(self, rate: int, offset: int) -> Pattern | None:
        bounds = torch.unique(-((offset - self._bounds) // rate))
        return Documents(cu_seqlens=bounds) if len(bounds) > 1 and int(bounds[0]) == 0 else None


def _device(given: object) -> torch.device:
    """Take a tensor's own device, and the CPU for lists, whatever the default is."""
    return given.device if isinstance(given, Tensor) else torch.device("cpu")


class Neighborhood(Pattern):
    """Exactly ``window`` keys around each query, shifted inwards at the borders.

    Args:
        window: Attended keys, the query's own among them.
        dilation: Tokens between attended keys.
        tokens: Sequence length.
    Raises:
        PatternError: A window, dilation or length below 1; at use, another length.
    Example:
        >>> rw.Neighborhood(3, tokens=5).to_dense(5)[0, 0].sum(-1)
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
                message(
                    "Neighborhood",
                    f"a pattern for {self.tokens} tokens with {nk} keys and queries up to position {q_offset + nq}",
                    "as many keys, and every query among them",
                    f"Build it with tokens={nk}.",
                )
            )

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        rate = self.dilation
        residue = q % rate
        members = (self.tokens - residue + rate - 1) // rate
        first = torch.minimum((q // rate - self.window // 2).clamp(min=0), (members - self.window).clamp(min=0))
        return (k % rate == residue) & (k // rate >= first) & (k // rate < first + self.window)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        reach = self.window * self.dilation
        return Ranges.of((np.maximum(q_lo - reach, 0), np.minimum(q_hi + reach, nk)), rows=len(q_lo))

    def tile_keys(self, tiles: Tiles) -> Int64:
        # away from the borders a plain dilated window; near them every tile is its own class
        reach = self.window * self.dilation
        inner = (tiles.q_lo >= reach) & (tiles.q_hi + reach <= self.tokens)
        never = np.zeros(len(inner), np.bool_)
        delta = np.clip(tiles.q_lo - tiles.k_lo, -2 * reach - 2**20, 2 * reach + 2**20)
        return classes(
            never,
            never,
            inner.astype(np.int64),
            np.where(inner, delta, tiles.q_lo),
            np.where(inner, 0, tiles.k_lo),
        )

    def residue_rate(self) -> int:
        return self.dilation

    def restride(self, rate: int, offset: int) -> Pattern | None:
        if self.dilation != rate or offset >= self.tokens:
            return None
        return Neighborhood(self.window, tokens=(self.tokens - offset + rate - 1) // rate)


@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(Derived):
    """A prefix that all attend, and causal attention after it: ``k < n or k <= q``.

    Args:
        n: Tokens of the prefix.
    Raises:
        PatternError: A negative n.
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
        return Sinks(self.n) | Causal()
