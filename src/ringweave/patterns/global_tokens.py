"""Patterns of chosen tokens: global tokens and attention sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import integers, whole, whole_fields
from ..errors import PatternError, shown
from ..relation.node import FAR, Node, Or
from ..relation.zones import K, Residue, Zones
from .base import Composite, DistanceProfile, Pattern
from .batch_axis import ELEMENT, ELEMENT_BITS, Bounds
from .declared import declare
from .fitting import made_again, made_by
from .tiles import Int64, Ranges, Tiles, number_classes

# the most first tokens that are listed one by one to be joined with others
_WRITTEN_OUT = 1024
# a mask is divided into at most _PIECES pieces of at least _PIECE tokens, to bound the keys that it marks
_PIECE, _PIECES = 128, 64


@declare("Sinks(64)", "By chosen tokens", hostile="Sinks(range(0, n, 1000))")
class Sinks(Bounds):
    """Keys that every query attends, such as the first tokens of a sequence, or the tokens that a mask marks.

    ``Causal() & Sinks(mask)`` is causal attention over the keys that exist, for padding at any place.

    Args:
        tokens: Positions as a list, or a 1-D array or tensor of integers; or an int n for the first n; or a bool tensor
            (N,), or (B, N) for each batch element, which is copied, and read when a plan is made.
    Raises:
        PatternError: Positions are not ints, negative or repeated; at use, a bool tensor does not have one value for
            each key, or a call whose queries begin at position 0 does not have a listed token.
    Example:
        >>> rw.Sinks(1).to_dense(3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 0, 0],
                [1, 0, 0]], dtype=torch.int32)
        >>> rw.Sinks(torch.tensor([True, False, True])).to_dense(1, 3)[0, 0].int()
        tensor([[1, 0, 1]], dtype=torch.int32)

    References:
        Xiao et al. (2023), Efficient streaming language models with attention sinks.
    """

    _mask: Tensor | None = None

    private: ClassVar[bool] = True

    def __init__(self, tokens: int | Sequence[int] | Tensor):
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.bool:
            alone = isinstance(tokens, (int, float, str, np.number))
            self.tokens: int | tuple[int, ...] = whole("tokens", tokens, 0) if alone else _positions(tokens)
            self.__post_init__()
            return
        if tokens.ndim not in (1, 2) or not tokens.numel() or tokens.layout != torch.strided:
            wanted = "a bool tensor (N,) or (B, N)"
            raise PatternError("tokens", shown(tokens), wanted, "Mark the chosen tokens of each row.")
        self._hold(tokens.detach().clone())

    def _hold(self, mask: Tensor) -> Self:
        self.tokens, self._mask = (), mask
        self.__post_init__()
        return self

    @classmethod
    def own(cls, tokens: int | Sequence[int] | Tensor) -> Self:
        """Build the pattern of tokens; a bool tensor is not copied, and must not be written to."""
        return cls.__new__(cls)._hold(tokens) if isinstance(tokens, Tensor) else cls(tokens)

    lists_tokens = True

    def _either(self, other: Pattern) -> Pattern | None:
        if not isinstance(other, Sinks) or self.tables or other.tables:
            return None
        for one, two in ((self, other), (other, self)):
            # the first tokens of one contain all tokens of the other
            if isinstance(one.tokens, int) and one.tokens > two._last:
                return one
        if any(isinstance(x.tokens, int) and x.tokens > _WRITTEN_OUT for x in (self, other)):
            return None
        mine, theirs = (range(x.tokens) if isinstance(x.tokens, int) else x.tokens for x in (self, other))
        return type(self)._of(_shortest(sorted({*mine, *theirs})))

    @property
    def _last(self) -> int:
        return self.tokens - 1 if isinstance(self.tokens, int) else self.tokens[-1]

    @classmethod
    def _of(cls, tokens: int | tuple[int, ...]) -> Self:
        """Build the pattern of positions that were checked."""
        pattern = cls.__new__(cls)
        pattern.tokens = tokens
        pattern.__post_init__()
        return pattern

    def _text(self) -> str:
        if self._mask is not None:
            return f"{type(self).__name__}(_)"
        return f"{type(self).__name__}({self.tokens if isinstance(self.tokens, int) else list(self.tokens)})"

    def __repr__(self) -> str:
        if self._mask is None:
            return self.spec
        return f"{type(self).__name__}(<{' x '.join(map(str, self._mask.shape))} tokens>)"

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return () if self._mask is None else (self._mask,)

    def extents(self) -> tuple[int | None, int | None]:
        mask = self._mask
        return (len(mask) if mask is not None and mask.ndim == 2 and len(mask) > 1 else None), None

    def select(self, b: int, h: int) -> Pattern:
        return self if self._mask is None or self.extents()[0] is None else type(self).own(self._mask[b])

    def _make(self) -> NDArray[np.bool_] | None:
        return None if self._mask is None else np.atleast_2d(self._mask.cpu().numpy()).copy()

    def bound_ids(self) -> tuple[Int64, ...]:
        known: dict[bytes, int] = {}
        return (np.array([known.setdefault(row.tobytes(), len(known)) for row in self._now]),)

    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        if self._mask is not None and self._mask.shape[-1] != nk:
            got, remedy = f"a mask of {self._mask.shape[-1]} tokens for {nk} keys", "Mark the tokens of this length."
            raise PatternError("Sinks", got, f"a mask of {nk} tokens", remedy)

    def _is_chosen(self, position: Tensor) -> Tensor:
        if self._mask is not None:
            mask = torch.from_numpy(self._now).reshape(-1).to(position.device)
            return mask[_place(position, *self._now.shape)]
        if isinstance(self.tokens, int):
            return (position >= 0) & (position < self.tokens)
        return torch.isin(position, torch.tensor(self.tokens, device=position.device))

    def zones(self, n: int) -> Node:
        base, first, stop, ptr = self._chosen_runs()
        each = len(base) > 1
        # each batch element has its own tokens
        q = (base - FAR, base + FAR) if each else (-FAR, FAR)
        return Zones(q, (first, stop), ptr=ptr, each=each)

    def _chosen_runs(self) -> tuple[Int64, Int64, Int64, Int64]:
        """Return the starts of batch elements, and the runs of chosen tokens: first, end, first run of each element."""
        if isinstance(self.tokens, int) and self._mask is None:
            some = int(self.tokens > 0)
            first, stop = np.zeros(some, np.int64), np.full(some, self.tokens, np.int64)
            return np.zeros(1, np.int64), first, stop, np.array([0, some], np.int64)
        if self._mask is None:
            token = np.asarray(self.tokens, np.int64)
            row = np.zeros_like(token)
        else:
            row, token = np.nonzero(self._now)
        elements = 1 if self._mask is None else len(self._now)
        place = token + row * ELEMENT
        new = np.flatnonzero(np.diff(place, prepend=-2) > 1)
        last = np.append(new, len(place))[1:] - 1
        counts = np.bincount(row[new], minlength=elements)
        return np.arange(elements) * ELEMENT, place[new], place[last] + 1, np.append(0, np.cumsum(counts))

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._is_chosen(k) & torch.ones_like(q, dtype=torch.bool)

    def _runs(self) -> list[tuple[int, int]]:
        if isinstance(self.tokens, int):
            return [(0, self.tokens)]
        listed = np.asarray(self.tokens)
        breaks = np.flatnonzero(np.diff(listed) > 1)
        first = np.concatenate([listed[:1], listed[breaks + 1]])
        last = np.concatenate([listed[breaks], listed[-1:]])
        return [(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        if self._mask is not None:
            return self._marked(q_lo)
        return Ranges.of(*((min(a, nk), min(b, nk)) for a, b in self._runs()), rows=len(q_lo))

    def _marked(self, q_lo: Int64) -> Ranges:
        """Return the pieces of the sequence that contain marked keys, for each tile's batch element."""
        mask = self._now
        n = mask.shape[1]
        side = max(_PIECE, -(-n // _PIECES))
        used = np.logical_or.reduceat(mask, np.arange(0, n, side), axis=1)
        first = np.arange(used.shape[1]) * side
        row = q_lo >> ELEMENT_BITS if len(mask) > 1 else np.zeros_like(q_lo)
        return Ranges(np.broadcast_to(first, (len(q_lo), len(first))), np.where(used[row], first + side, 0))

    def _subset(self, lo: Int64, hi: Int64) -> tuple[Int64, Int64]:
        """Count the chosen tokens of each tile side, and number their sets of places relative to its start."""
        if isinstance(self.tokens, int):
            count = np.maximum(np.minimum(self.tokens, hi) - np.maximum(lo, 0), 0)
            # queries may begin before position 0
            return count, count + (np.maximum(-lo, 0) << 31)
        # few tiles contain chosen tokens; these are compared by the tokens' places in them
        number = np.zeros(len(lo), np.int64)
        known: dict[bytes, int] = {}
        if self._mask is not None:
            mask = self._now
            before = np.append(0, np.cumsum(mask))
            first = _place(lo, *mask.shape)
            count = before[first + (hi - lo)] - before[first]
            held = np.flatnonzero((count > 0) & (count < hi - lo))
            sides, inverse = np.unique(np.stack([first, first + (hi - lo)])[:, held], axis=1, return_inverse=True)
            flat = mask.reshape(-1)
            numbers = [known.setdefault(flat[a:b].tobytes(), 1 + len(known)) for a, b in sides.T]
            number[held] = np.array(numbers, np.int64)[inverse.reshape(-1)]
            return count, np.where(count == hi - lo, -1, number)
        listed = np.asarray(self.tokens, np.int64)
        first, last = np.searchsorted(listed, lo), np.searchsorted(listed, hi)
        held = np.flatnonzero(last > first)
        sides, inverse = np.unique(np.stack([lo[held], first[held], last[held]]), axis=1, return_inverse=True)
        numbers = [known.setdefault((listed[a:b] - start).tobytes(), 1 + len(known)) for start, a, b in sides.T]
        number[held] = np.array(numbers, np.int64)[inverse.reshape(-1)]
        return last - first, number

    def tile_classes(self, tiles: Tiles) -> Int64:
        count, subset = self._subset(tiles.k_lo, tiles.k_hi)
        return number_classes(count == 0, count == tiles.k_hi - tiles.k_lo, subset)

    def restride(self, rate: int, offset: int) -> Pattern:
        if self._mask is not None:
            chosen = self._mask[..., offset::rate].contiguous()
            return type(self).own(chosen if chosen.numel() else 0)
        if isinstance(self.tokens, int):
            return type(self)(max(0, -((offset - self.tokens) // rate)))
        return type(self)([(t - offset) // rate for t in self.tokens if t % rate == offset])

    def distance_profile(self) -> DistanceProfile | None:
        return None if self.tables else DistanceProfile(self._last + 1, 0, -1, False, 0)


def _positions(tokens: object) -> int | tuple[int, ...]:
    listed = sorted(integers("tokens", tokens, 0))
    if len(set(listed)) != len(listed):
        raise PatternError("tokens", shown(listed), "distinct positions", "Drop the repeated ones.")
    return _shortest(listed)


def _shortest(listed: list[int]) -> int | tuple[int, ...]:
    """Replace ascending positions by their number if they are the first ones."""
    return len(listed) if not listed or listed[-1] == len(listed) - 1 else tuple(listed)


@declare("Global([0, 1, 2, 3, 512, 513, 514, 515])", "By chosen tokens", hostile="Global([0, n - 1])")
class Global(Sinks):
    """Tokens that attend every key and that every query attends.

    Args:
        tokens: As in :class:`Sinks`; a bool tensor marks tokens that are both queries and keys.
    Raises:
        PatternError: As in :class:`Sinks`; at use, also if queries are past the last token of a bool tensor.
    Example:
        >>> rw.Global([1]).to_dense(3)[0, 0].int()
        tensor([[0, 1, 0],
                [1, 1, 1],
                [0, 1, 0]], dtype=torch.int32)

    References:
        Beltagy, Peters, Cohan (2020), Longformer, section 3.1; Zaheer et al. (2020), BigBird, section 2.
    """

    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        if self._mask is not None and (self._mask.shape[-1] != nk or q_offset + nq > nk):
            got = f"a mask of {self._mask.shape[-1]} tokens for {nk} keys and queries up to position {q_offset + nq}"
            wanted = f"a mask of {nk} tokens, and every query among them"
            remedy = "Mark the tokens of this length; Sinks(mask) marks keys alone."
            raise PatternError("Global", got, wanted, remedy)

    def zones(self, n: int) -> Node:
        base, first, stop, ptr = self._chosen_runs()
        keys = super().zones(n)
        element = np.repeat(base, np.diff(ptr))
        queries = Zones((first, stop), (element - FAR, element + FAR), each=len(base) > 1)
        return Or([keys, queries])

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._is_chosen(k) | self._is_chosen(q)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        keys = super().key_ranges(q_lo, q_hi, nk)
        count, _ = self._subset(q_lo, q_hi)
        everything = np.where(count > 0, nk, 0)[:, None]
        return Ranges(
            np.concatenate([np.zeros_like(everything), keys.start], 1), np.concatenate([everything, keys.stop], 1)
        )

    def tile_classes(self, tiles: Tiles) -> Int64:
        q_count, q_subset = self._subset(tiles.q_lo, tiles.q_hi)
        k_count, k_subset = self._subset(tiles.k_lo, tiles.k_hi)
        full = (q_count == tiles.q_hi - tiles.q_lo) | (k_count == tiles.k_hi - tiles.k_lo)
        return number_classes((q_count == 0) & (k_count == 0), full, q_subset, k_subset)


def check_places(pattern: Pattern, tokens: int) -> None:
    """Raise PatternError if a pattern lists a token that a whole sequence does not have.

    Their :meth:`Pattern.check` cannot tell, since a chunk, a decoding step or a document may have fewer tokens.

    Args:
        pattern: The pattern.
        tokens: Number of tokens in the sequence.
    """
    for each in _listing(pattern, tokens):
        first = next(token for token in each.tokens if token >= tokens)  # type: ignore[union-attr]
        got = f"token {first}{made_by(pattern)} for a sequence of {tokens}"
        remedy = made_again(pattern, tokens) or "List the tokens of this length, or mark them in a bool tensor."
        raise PatternError(type(each).__name__, got, f"tokens from 0 to {tokens - 1}", remedy)


def within_length(pattern: Pattern, tokens: int) -> Pattern:
    """Return a pattern without the listed tokens that a sequence of some tokens does not have: the same pairs of it."""
    if not _listing(pattern, tokens):
        return pattern
    if isinstance(pattern, Sinks):
        return type(pattern)([token for token in pattern.tokens if token < tokens])  # type: ignore[union-attr]
    assert isinstance(pattern, Composite)
    return pattern.with_parts([within_length(part, tokens) for part in pattern.parts_within()])


def _listing(pattern: Pattern, tokens: int) -> list[Sinks]:
    """Return the parts of a pattern that list tokens past a length; inside of documents, lengths differ."""
    if isinstance(pattern, Sinks):
        return [pattern] if isinstance(pattern.tokens, tuple) and pattern.tokens[-1:] >= (tokens,) else []
    if pattern.counts_apart:
        return []
    return [each for part in pattern.parts_within() for each in _listing(part, tokens)]


P = TypeVar("P", Tensor, NDArray[np.int64])


def _place(position: P, rows: int, n: int) -> P:
    """Convert positions on the axis of all batch elements to places in a flat (rows, n) array."""
    inside = position & (ELEMENT - 1)
    return inside + (position >> ELEMENT_BITS) * n if rows > 1 else inside


@declare("Periodic(256, 192, 256)", "By chosen tokens", hostile="Periodic(2**30, 0, 1)")
@dataclass(frozen=True, eq=False, repr=False)
class Periodic(Pattern):
    """Keys that every query attends, at ``start <= k % period < stop``.

    Args:
        period: Tokens after which the choice repeats.
        start: First chosen token of a period.
        stop: End of the chosen tokens of a period, exclusive.
    Raises:
        PatternError: ``0 <= start < stop <= period`` does not hold.
    Example:
        >>> rw.patterns.Periodic(3, 2, 3).to_dense(1, 6)[0, 0].int()
        tensor([[0, 0, 1, 0, 0, 1]], dtype=torch.int32)
    """

    period: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        whole_fields(self, start=0)
        whole_fields(self, stop=self.start + 1)
        whole_fields(self, period=self.stop)
        super().__post_init__()

    def _text(self) -> str:
        return f"Periodic({self.period}, {self.start}, {self.stop})"

    def zones(self, n: int) -> Node:
        return Zones(residue=Residue(K, self.period, self.stop - self.start), phase=self.start)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        phase = k % self.period
        return (phase >= self.start) & (phase < self.stop) & torch.ones_like(q, dtype=torch.bool)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        width = int((q_hi - q_lo).max()) if len(q_lo) else 1
        if self.period <= 2 * width:
            return Ranges.of((0, nk), rows=len(q_lo))
        first = np.arange(0, nk, self.period) + self.start
        return Ranges.of(*((min(a, nk), min(a + self.stop - self.start, nk)) for a in first.tolist()), rows=len(q_lo))

    def tile_classes(self, tiles: Tiles) -> Int64:
        def chosen_before(position: Int64) -> Int64:
            whole, rest = position // self.period, position % self.period
            return whole * (self.stop - self.start) + np.clip(rest - self.start, 0, self.stop - self.start)

        count = chosen_before(tiles.k_hi) - chosen_before(tiles.k_lo)
        return number_classes(count == 0, count == tiles.k_hi - tiles.k_lo, tiles.k_lo % self.period)
