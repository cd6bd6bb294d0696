"""What may attend: the pattern base class and its set algebra.

A pattern is a boolean relation over (query position, key position), possibly one per batch and head. It answers three
questions, from cheap to exact:

- ``key_ranges``: for ranges of queries, a few key ranges outside of which nothing is allowed (a superset);
- ``tile_keys``: for given tiles, 0 (empty), 1 (full) or a class number >= 2 such that tiles of one class hold the
  same mask; so a mask is evaluated by token once per class, not once per tile;
- ``allows``: the relation itself, by token, on index tensors. This one is the definition; the others must agree.

Every pattern is also text: ``spec`` is a Python expression that :func:`ringweave.patterns.parse` reads back, with an
underscore in place of each tensor of ``tables``. Text and tensors can cross ``torch.library`` ops, objects cannot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PatternError, message

if TYPE_CHECKING:
    from ..plan.block_plan import BlockPlan

Int64 = NDArray[np.int64]
EMPTY, FULL = 0, 1
_RADIX_LIMIT = 2**62


class Tiles(NamedTuple):
    """Tiles as token ranges: queries [q_lo, q_hi) by keys [k_lo, k_hi); arrays of one length."""

    q_lo: Int64
    q_hi: Int64
    k_lo: Int64
    k_hi: Int64


class Ranges(NamedTuple):
    """Per query tile (axis 0) a padded list (axis 1) of key ranges [start, stop); start >= stop is padding."""

    start: Int64
    stop: Int64

    @staticmethod
    def of(*pairs: tuple[Int64 | int, Int64 | int], rows: int) -> Ranges:
        """Stack per-row ranges, broadcasting scalars."""
        start = np.stack([np.broadcast_to(np.asarray(a, np.int64), (rows,)) for a, _ in pairs], 1)
        stop = np.stack([np.broadcast_to(np.asarray(b, np.int64), (rows,)) for _, b in pairs], 1)
        return Ranges(start, stop)

    def cost(self) -> int:
        """Tokens covered: the size of the candidate list that this superset would give."""
        return int(np.maximum(self.stop - self.start, 0).sum())


def mix(*parts: Int64) -> Int64:
    """One class number >= 2 per element, equal exactly where all parts are equal (mixed radix, no hashing)."""
    total = np.zeros(parts[0].shape, np.int64)
    size = 1
    for part in parts:
        if part.size == 0:
            continue
        low = int(part.min())
        width = int(part.max()) - low + 1
        if size * width >= _RADIX_LIMIT:
            kinds, total = np.unique(total, return_inverse=True)
            size = len(kinds)
            kinds, part = np.unique(part, return_inverse=True)
            low, width = 0, len(kinds)
        total = total * width + (part - low)
        size *= width
    return total + 2


def classes(empty: NDArray[np.bool_], full: NDArray[np.bool_], *parts: Int64) -> Int64:
    """Tile keys from the two decided cases and, for the rest, what the mask depends on."""
    keys = np.where(full, FULL, EMPTY).astype(np.int64)
    partial = ~(empty | full)
    if partial.any():
        keys[partial] = mix(*(np.broadcast_to(part, keys.shape)[partial] for part in parts))
    return keys


class Pattern(ABC):
    """Which (head, query, key) triples may attend: immutable, hashable, device-free.

    Combine with ``&``, ``|`` and ``~``; a key allowed by both operands of ``|`` counts once.

    Example:
        >>> rw.SlidingWindow(2) & rw.Causal() | rw.Sinks(1)
        SlidingWindow(2) & Causal() | Sinks(1)
        >>> (rw.SlidingWindow(1) | rw.Sinks(1)).to_dense(4, 4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 0, 1, 1]], dtype=torch.int32)
    """

    #: False for mixtures, in which a key may count several times: no set algebra over them.
    combinable: ClassVar[bool] = True

    # ---- what a pattern is -------------------------------------------------------------------------------------------

    #: The pattern as a Python expression, ``_`` for each tensor of ``tables`` in turn.
    spec: str

    def __post_init__(self) -> None:
        # Written once: torch.compile guards on text as it is, but would turn changing numbers into symbols.
        object.__setattr__(self, "spec", self._text())

    @abstractmethod
    def _text(self) -> str:
        """What ``spec`` is to be."""

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Tensors that the pattern is made of (block tables, document bounds); private copies, never written."""
        return ()

    @abstractmethod
    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """The relation on broadcast int64 position tensors of one batch and head: bool."""

    @abstractmethod
    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        """Key ranges that hold every key allowed to any query of [q_lo, q_hi); a superset, sorted or not."""

    @abstractmethod
    def tile_keys(self, tiles: Tiles) -> Int64:
        """0 where a tile is empty, 1 where full, else a class number: same class, same extents, same mask."""

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        """``key_ranges`` of the complement."""
        return Ranges.of((0, nk), rows=len(q_lo))

    # ---- what a pattern may add --------------------------------------------------------------------------------------

    def extents(self) -> tuple[int | None, int | None]:
        """(batch, heads) that the pattern is made for; None where it is the same for all."""
        return None, None

    def select(self, b: int, h: int) -> Pattern:
        """The pattern of one batch element and head."""
        return self

    def check(self, nq: int, nk: int, q_offset: int) -> None:  # noqa: B027  (most patterns fit any length)
        """Raise PatternError where the pattern is made for other lengths."""

    def grid(self) -> int | None:
        """Side of the blocks that the pattern is made of, if it is: tiles of that side are full or empty."""
        return None

    def residue_rate(self) -> int:
        """r > 1 where only keys congruent to the query modulo r are allowed: then a strided view is denser."""
        return 1

    def restride(self, rate: int, offset: int) -> Pattern | None:
        """The pattern among positions offset, offset + rate, ..., renumbered 0, 1, ...; None if it has no such form."""
        return None

    # ---- values ------------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Pattern) or self.spec != other.spec:
            return False
        mine, theirs = self.tables, other.tables
        return all(
            a is b or (a.shape == b.shape and a.device == b.device and torch.equal(a, b))
            for a, b in zip(mine, theirs, strict=True)
        )

    def __hash__(self) -> int:
        return hash(self.spec)

    def __repr__(self) -> str:
        return self.spec

    def __and__(self, other: Pattern) -> Pattern:
        return _join(And, self, other)

    def __or__(self, other: Pattern) -> Pattern:
        return _join(Or, self, other)

    def __invert__(self) -> Pattern:
        return Not(self)

    # ---- views of the relation (the layers above do the work) --------------------------------------------------------

    def to_dense(self, nq: int, nk: int | None = None, heads: int = 1, *, batch: int = 1, q_offset: int = 0) -> Tensor:
        """The relation as a bool tensor (batch, heads, nq, nk): the definition, for small sizes and tests.

        Args:
            nq: Queries, at positions q_offset, q_offset + 1, ...
            nk: Keys; nq + q_offset by default.
            heads: Query heads.
            batch: Batch elements.
            q_offset: Position of the first query.
        Returns:
            Bool tensor (batch, heads, nq, nk).
        Raises:
            PatternError: The pattern is made for other sizes.
        Example:
            >>> rw.Causal().to_dense(2)
            tensor([[[[ True, False],
                      [ True,  True]]]])
        """
        nk = nq + q_offset if nk is None else nk
        check_extents(self, batch, heads)
        self.check(nq, nk, q_offset)
        q = torch.arange(q_offset, q_offset + nq)[:, None]
        k = torch.arange(nk)[None, :]
        dense = torch.zeros(batch, heads, nq, nk, dtype=torch.bool)
        for b in range(batch):
            for h in range(heads):
                dense[b, h] = self.select(b, h).allows(q, k)
        return dense

    def plan(
        self,
        nq: int,
        nk: int | None = None,
        *,
        heads: int = 1,
        batch: int = 1,
        q_offset: int = 0,
        tile: int | tuple[int, int] | None = None,
        device: str | torch.device = "cpu",
    ) -> BlockPlan:
        """The tiles that this pattern leaves non-empty; see :func:`ringweave.plan`.

        Example:
            >>> rw.SlidingWindow(128).plan(1024).nnz
            15
        """
        from ..plan import plan

        return plan(self, nq, nk, heads=heads, batch=batch, q_offset=q_offset, tile=tile, device=device)

    def density(self, nq: int, nk: int | None = None, *, heads: int = 1, batch: int = 1, q_offset: int = 0) -> float:
        """Allowed pairs over all pairs, exactly, counted from the tiles (never N x N work).

        Example:
            >>> rw.Causal().density(3)
            0.6666666666666666
        """
        from ..plan import density

        return density(self, nq, nk, heads=heads, batch=batch, q_offset=q_offset)

    def plot(self, tokens: int = 1024, *, heads: int = 1, path: str | None = None) -> str:
        """A picture of the relation as SVG text; written to ``path`` (.svg, or .png with matplotlib) when given.

        Example:
            >>> rw.Causal().plot(256).startswith("<svg")
            True
        """
        from ..picture import plot

        return plot(self, tokens, heads=heads, path=path)

    def _repr_svg_(self) -> str:
        batch, heads = self.extents()
        return self.plot(heads=heads or 1) if batch is None else ""


@dataclass(frozen=True, eq=False, repr=False)
class Full(Pattern):
    """Every query attends every key.

    Example:
        >>> rw.Full().density(10)
        1.0
    """

    def _text(self) -> str:
        return "Full()"

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=q.device).expand(torch.broadcast_shapes(q.shape, k.shape))

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((0, nk), rows=len(q_lo))

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((0, 0), rows=len(q_lo))

    def tile_keys(self, tiles: Tiles) -> Int64:
        return np.full(len(tiles.q_lo), FULL, np.int64)

    def restride(self, rate: int, offset: int) -> Pattern:
        return self


class Derived(Pattern):
    """A named pattern that is defined by other patterns."""

    @property
    @abstractmethod
    def definition(self) -> Pattern:
        """What the name stands for."""

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self.definition.allows(q, k)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return self.definition.key_ranges(q_lo, q_hi, nk)

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return (~self.definition).key_ranges(q_lo, q_hi, nk)

    def tile_keys(self, tiles: Tiles) -> Int64:
        return self.definition.tile_keys(tiles)

    def residue_rate(self) -> int:
        return self.definition.residue_rate()

    def restride(self, rate: int, offset: int) -> Pattern | None:
        return self.definition.restride(rate, offset)


@dataclass(frozen=True, eq=False, repr=False)
class _Combined(Pattern):
    parts: tuple[Pattern, ...]
    sign: ClassVar[str]

    def _text(self) -> str:
        return self._join_text([part.spec for part in self.parts])

    def __repr__(self) -> str:
        return self._join_text([repr(part) for part in self.parts])

    def _join_text(self, texts: list[str]) -> str:
        # `&` binds tighter than `|`, as in Python
        pairs = zip(texts, self.parts, strict=True)
        return self.sign.join(f"({t})" if isinstance(self, And) and isinstance(p, Or) else t for t, p in pairs)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return tuple(table for part in self.parts for table in part.tables)

    def extents(self) -> tuple[int | None, int | None]:
        batch = heads = None
        for part in self.parts:
            b, h = part.extents()
            batch, heads = _agree("batch", batch, b), _agree("heads", heads, h)
        return batch, heads

    def select(self, b: int, h: int) -> Pattern:
        chosen = [part.select(b, h) for part in self.parts]
        if all(new is old for new, old in zip(chosen, self.parts, strict=True)):
            return self
        result = chosen[0]
        for part in chosen[1:]:
            result = _join(type(self), result, part)
        return result

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        for part in self.parts:
            part.check(nq, nk, q_offset)

    def grid(self) -> int | None:
        return min((side for part in self.parts if (side := part.grid()) is not None), default=None)

    def restride(self, rate: int, offset: int) -> Pattern | None:
        result: Pattern | None = None
        for part in self.parts:
            strided = part.restride(rate, offset)
            if strided is None:
                return None
            result = strided if result is None else _join(type(self), result, strided)
        return result

    def _pairwise(self, tiles: Tiles, winner: int, neutral: int) -> Int64:
        keys = self.parts[0].tile_keys(tiles)
        for part in self.parts[1:]:
            other = part.tile_keys(tiles)
            decided = (keys == winner) | (other == winner)
            both = (keys == neutral) & (other == neutral)
            merged = np.where(decided, winner, neutral).astype(np.int64)
            open_ = ~(decided | both)
            if open_.any():
                merged[open_] = mix(keys[open_], other[open_])
            keys = merged
        return keys


class And(_Combined):
    """Allowed by every part."""

    sign: ClassVar[str] = " & "

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        result = self.parts[0].allows(q, k)
        for part in self.parts[1:]:
            result = result & part.allows(q, k)
        return result

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        result = self.parts[0].key_ranges(q_lo, q_hi, nk)
        for part in self.parts[1:]:
            result = _intersect(result, part.key_ranges(q_lo, q_hi, nk))
        return result

    def tile_keys(self, tiles: Tiles) -> Int64:
        return self._pairwise(tiles, EMPTY, FULL)

    def residue_rate(self) -> int:
        return max(part.residue_rate() for part in self.parts)

    def __invert__(self) -> Pattern:
        return _join_all(Or, [~part for part in self.parts])


class Or(_Combined):
    """Allowed by at least one part; a key allowed by several counts once."""

    sign: ClassVar[str] = " | "

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        result = self.parts[0].allows(q, k)
        for part in self.parts[1:]:
            result = result | part.allows(q, k)
        return result

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        every = [part.key_ranges(q_lo, q_hi, nk) for part in self.parts]
        return Ranges(np.concatenate([r.start for r in every], 1), np.concatenate([r.stop for r in every], 1))

    def tile_keys(self, tiles: Tiles) -> Int64:
        return self._pairwise(tiles, FULL, EMPTY)

    def __invert__(self) -> Pattern:
        return _join_all(And, [~part for part in self.parts])


@dataclass(frozen=True, eq=False, repr=False)
class Not(Pattern):
    """Allowed where the part is not; complements of ``&`` and ``|`` are pushed to the leaves (De Morgan)."""

    part: Pattern

    def _text(self) -> str:
        return f"~{self.part.spec}"

    def __repr__(self) -> str:
        return f"~{self.part!r}"

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return self.part.tables

    def extents(self) -> tuple[int | None, int | None]:
        return self.part.extents()

    def select(self, b: int, h: int) -> Pattern:
        chosen = self.part.select(b, h)
        return self if chosen is self.part else ~chosen

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        self.part.check(nq, nk, q_offset)

    def grid(self) -> int | None:
        return self.part.grid()

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return ~self.part.allows(q, k)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return self.part.excluded_ranges(q_lo, q_hi, nk)

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return self.part.key_ranges(q_lo, q_hi, nk)

    def tile_keys(self, tiles: Tiles) -> Int64:
        keys = self.part.tile_keys(tiles)
        return np.where(keys <= FULL, FULL - keys, keys)

    def restride(self, rate: int, offset: int) -> Pattern | None:
        strided = self.part.restride(rate, offset)
        return None if strided is None else ~strided

    def __invert__(self) -> Pattern:
        return self.part


def check_extents(pattern: Pattern, batch: int, heads: int) -> None:
    """Raise PatternError where the pattern is made for another number of batch elements or heads."""
    made_batch, made_heads = pattern.extents()
    for name, made, got in (("batch", made_batch, batch), ("heads", made_heads, heads)):
        if made is not None and made != got:
            raise PatternError(
                message(
                    f"pattern {pattern!r}",
                    f"a call with {name} = {got}",
                    f"{name} = {made}, which the pattern is made for",
                    f"Pass tensors with {made} query {name}, or build the pattern for {got}.",
                )
            )


def _agree(name: str, a: int | None, b: int | None) -> int | None:
    if a is None or b is None or a == b:
        return b if a is None else a
    raise PatternError(
        message("pattern", f"parts made for {name} = {a} and {b}", f"one number of {name}", "Build the parts alike.")
    )


def _join(kind: type[_Combined], a: Pattern, b: Pattern) -> Pattern:
    if not isinstance(b, Pattern):
        raise PatternError(
            message(
                "operand",
                type(b).__name__,
                "a ringweave pattern",
                "Combine patterns with & | ~, or wrap a function in from_mask_mod.",
            )
        )
    for operand in (a, b):
        if not operand.combinable:
            raise PatternError(
                message(
                    "operand",
                    repr(operand),
                    "a relation",
                    "LongNet is a mixture in which a key may count several times; merge() joins it with others.",
                )
            )
    parts = (a.parts if isinstance(a, kind) else (a,)) + (b.parts if isinstance(b, kind) else (b,))
    neutral = "Full()" if kind is And else "~Full()"
    kept: list[Pattern] = []
    for part in parts:
        if part.spec != neutral and not any(part is old or part == old for old in kept):
            kept.append(part)
    if not kept:
        return parts[0]
    return kept[0] if len(kept) == 1 else kind(tuple(kept))


def _join_all(kind: type[_Combined], parts: list[Pattern]) -> Pattern:
    result = parts[0]
    for part in parts[1:]:
        result = _join(kind, result, part)
    return result


def _intersect(a: Ranges, b: Ranges) -> Ranges:
    # every pair of ranges while that stays small; else the smaller superset is superset enough
    if a.start.shape[1] * b.start.shape[1] > 256:
        return a if a.cost() <= b.cost() else b
    start = np.maximum(a.start[:, :, None], b.start[:, None, :]).reshape(len(a.start), -1)
    stop = np.minimum(a.stop[:, :, None], b.stop[:, None, :]).reshape(len(a.start), -1)
    used = np.flatnonzero((stop > start).any(0))
    used = used if len(used) else np.zeros(1, np.int64)
    return Ranges(start[:, used], stop[:, used])
