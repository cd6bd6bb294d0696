"""Patterns made of patterns: intersection, union, complement, and one for each head."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from torch import Tensor

from ..errors import PatternError, message, shown
from .base import Lookback, Pattern
from .fit import nest, refuse
from .tiles import EMPTY, FULL, Int64, Ranges, Tiles, intersect, mix


@dataclass(frozen=True, eq=False, repr=False)
class Combined(Pattern):
    """Patterns under one operator; nested ones of the same kind are flattened."""

    parts: tuple[Pattern, ...]
    sign: ClassVar[str]

    def __post_init__(self) -> None:
        nest(self, 1 + max(part.depth for part in self.parts), sum(part.leaves for part in self.parts))
        super().__post_init__()

    def appended(self, part: Pattern) -> Self:
        """Append one more part; what is known of the others is kept, so that long unions may grow one by one."""
        new = object.__new__(type(self))
        object.__setattr__(new, "parts", (*self.parts, part))
        nest(new, max(self.depth, 1 + part.depth), self.leaves + part.leaves)
        new.write(f"{self.spec}{self.sign}{self._bracketed(part, part.spec)}")
        return new

    def _text(self) -> str:
        return self._join_text([part.spec for part in self.parts])

    def __repr__(self) -> str:
        return self._join_text([repr(part) for part in self.parts])

    def _join_text(self, texts: list[str]) -> str:
        return self.sign.join(self._bracketed(part, text) for text, part in zip(texts, self.parts, strict=True))

    def _bracketed(self, part: Pattern, text: str) -> str:
        # `&` binds tighter than `|`, as in Python
        return f"({text})" if isinstance(self, And) and isinstance(part, Or) else text

    def parts_within(self) -> tuple[Pattern, ...]:
        return self.parts

    def extents(self) -> tuple[int | None, int | None]:
        batch = heads = None
        for part in self.parts:
            b, h = part.extents()
            batch, heads = _agree("batch", batch, b), _agree("heads", heads, h)
        return batch, heads

    def bound(self, heads: int, kv_heads: int | None = None) -> Pattern:
        parts = [part.bound(heads, kv_heads) for part in self.parts]
        same = all(new is old for new, old in zip(parts, self.parts, strict=True))
        return self if same else join(type(self), *parts)

    def select(self, b: int, h: int) -> Pattern:
        chosen = [part.select(b, h) for part in self.parts]
        if all(new is old for new, old in zip(chosen, self.parts, strict=True)):
            return self
        return join(type(self), *chosen)

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        for part in self.parts:
            part.check(nq, nk, q_offset)

    def block_side(self) -> int | None:
        return min((side for part in self.parts if (side := part.block_side()) is not None), default=None)

    def restride(self, rate: int, offset: int) -> Pattern | None:
        parts: list[Pattern] = []
        for part in self.parts:
            strided = part.restride(rate, offset)
            if strided is None:
                return None
            parts.append(strided)
        return join(type(self), *parts)

    def _shard(self, rank: int, ranks: int, heads: int | None) -> Pattern:
        parts = [part._shard(rank, ranks, heads) for part in self.parts]
        same = all(new is old for new, old in zip(parts, self.parts, strict=True))
        return self if same else join(type(self), *parts)

    def _pairwise(self, tiles: Tiles, winner: int, neutral: int) -> Int64:
        keys = self.parts[0].tile_keys(tiles)
        for part in self.parts[1:]:
            # what one part decides, the others are not asked for
            left = np.flatnonzero(keys != winner)
            if not len(left):
                break
            mine, other = keys[left], part.tile_keys(Tiles(*(side[left] for side in tiles)))
            merged = np.where(other == winner, winner, neutral).astype(np.int64)
            open_ = (other != winner) & ~((mine == neutral) & (other == neutral))
            if open_.any():
                merged[open_] = mix(mine[open_], other[open_])
            keys[left] = merged
        return keys


class And(Combined):
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
            result = intersect(result, part.key_ranges(q_lo, q_hi, nk))
        return result

    def tile_keys(self, tiles: Tiles) -> Int64:
        return self._pairwise(tiles, EMPTY, FULL)

    def residue_rate(self) -> int:
        return max(part.residue_rate() for part in self.parts)

    def lookback(self) -> Lookback | None:
        return lookback_of(self.parts, min, min, all)

    def __invert__(self) -> Pattern:
        return join(Or, *(~part for part in self.parts))


class Or(Combined):
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

    def lookback(self) -> Lookback | None:
        return lookback_of(self.parts, max, max, any)

    def __invert__(self) -> Pattern:
        return join(And, *(~part for part in self.parts))


@dataclass(frozen=True, eq=False, repr=False)
class Not(Pattern):
    """Allowed where the part is not; complements of ``&`` and ``|`` are pushed to the leaves (De Morgan)."""

    part: Pattern

    def _text(self) -> str:
        return f"~{self.part.spec}"

    def __repr__(self) -> str:
        return f"~{self.part!r}"

    def parts_within(self) -> tuple[Pattern, ...]:
        return (self.part,)

    def extents(self) -> tuple[int | None, int | None]:
        return self.part.extents()

    def bound(self, heads: int, kv_heads: int | None = None) -> Pattern:
        part = self.part.bound(heads, kv_heads)
        return self if part is self.part else ~part

    def select(self, b: int, h: int) -> Pattern:
        chosen = self.part.select(b, h)
        return self if chosen is self.part else ~chosen

    def _shard(self, rank: int, ranks: int, heads: int | None) -> Pattern:
        part = self.part._shard(rank, ranks, heads)
        return self if part is self.part else ~part

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        self.part.check(nq, nk, q_offset)

    def block_side(self) -> int | None:
        return self.part.block_side()

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

    def lookback(self) -> Lookback | None:
        look = self.part.lookback()
        return None if look is None else look._replace(every=-1, far=not look.far, ahead=sys.maxsize)

    def __invert__(self) -> Pattern:
        return self.part


def lookback_of(
    parts: Sequence[Pattern],
    every: Callable[[Iterable[int]], int],
    ahead: Callable[[Iterable[int]], int],
    far: Callable[[Iterable[bool]], bool],
) -> Lookback | None:
    """How far what is made of some parts looks back; the others say how those of theirs combine."""
    known = [look for part in parts if (look := part.lookback()) is not None]
    if len(known) < len(parts):
        return None
    first, back, every_of, far_of, ahead_of = zip(*known, strict=True)
    return Lookback(max(first), max(back), every(every_of), far(far_of), ahead(ahead_of))


def leaves(pattern: Pattern) -> Iterator[Pattern]:
    """List what a pattern combines, by its operators."""
    if isinstance(pattern, Combined):
        for part in pattern.parts:
            yield from leaves(part)
    elif isinstance(pattern, Not):
        yield from leaves(pattern.part)
    else:
        yield pattern


def replace(pattern: Pattern, change: Callable[[Pattern], Pattern]) -> Pattern:
    """Combine other leaves in the same way."""
    if isinstance(pattern, Combined):
        return join(type(pattern), *(replace(part, change) for part in pattern.parts))
    if isinstance(pattern, Not):
        return ~replace(pattern.part, change)
    return change(pattern)


def _agree(name: str, a: int | None, b: int | None) -> int | None:
    if a is None or b is None or a == b:
        return b if a is None else a
    raise PatternError(
        message("pattern", f"parts made for {name} = {a} and {b}", f"one number of {name}", "Build the parts alike.")
    )


def join(kind: type[Combined], *operands: Pattern) -> Pattern:
    """Join operands under an operator, without repeats and neutral elements; those with one form together become it."""
    parts: list[Pattern] = []
    for operand in operands:
        if not isinstance(operand, Pattern):
            refuse(operand, "operand")
        if not operand.combinable:
            raise PatternError(
                message(
                    "operand",
                    repr(operand),
                    "a relation",
                    "LongNet is a mixture in which a key may count several times; merge() joins it with others.",
                )
            )
        parts += operand.parts if isinstance(operand, kind) else (operand,)
    neutral = "Full()" if kind is And else "~Full()"
    first, last = operands[0], operands[-1]
    if len(operands) == 2 and isinstance(first, kind) and not isinstance(last, kind):
        alone = kind is And or type(last).either is Pattern.either
        if last.spec == neutral or any(last == old for old in first.parts if old.spec == last.spec):
            return first
        if alone:
            return first.appended(last)
    kept: list[Pattern] = []
    by_text: dict[str, list[Pattern]] = {}
    for part in parts if kind is And else _together(parts):
        # few patterns of one text have tables to compare
        alike = by_text.setdefault(part.spec, [])
        if part.spec != neutral and not any(part is old or part == old for old in alike):
            alike.append(part)
            kept.append(part)
    if not kept:
        return parts[0]
    return kept[0] if len(kept) == 1 else kind(tuple(kept))


def _together(parts: list[Pattern]) -> list[Pattern]:
    """Unite parts of a union that have one form together, in the place of the first of them."""
    united: list[Pattern] = []
    place: dict[type[Pattern], int] = {}
    for part in parts:
        first = place.setdefault(type(part), len(united))
        together = united[first].either(part) if first < len(united) else None
        if together is None:
            united.append(part)
        else:
            united[first] = together
    return united


class PerHead(Pattern):
    """Each query head has its own pattern; equal ones share their plan.

    Args:
        patterns: One pattern per query head.
    Raises:
        PatternError: An empty list, or at use another number of heads.
    Example:
        >>> rw.PerHead([rw.Causal(), rw.SlidingWindow(1)]).to_dense(3, heads=2)[0].sum((1, 2))
        tensor([6, 5])
    """

    def __init__(self, patterns: Sequence[Pattern]):
        listed = isinstance(patterns, (list, tuple))
        if not listed or not patterns or not all(isinstance(p, Pattern) and p.combinable for p in patterns):
            got = str([type(p).__name__ for p in patterns[:8]]) if listed else shown(patterns)
            raise PatternError(message("patterns", got, "a list of relations", "Pass one per query head."))
        self.patterns = tuple(patterns)
        nest(self, 1 + max(p.depth for p in patterns), sum(p.leaves for p in patterns))
        self.__post_init__()

    def _text(self) -> str:
        return f"PerHead([{', '.join(p.spec for p in self.patterns)}])"

    def parts_within(self) -> tuple[Pattern, ...]:
        return self.patterns

    def __repr__(self) -> str:
        return f"PerHead([{', '.join(map(repr, self.patterns))}])"

    def extents(self) -> tuple[int | None, int | None]:
        return next((b for b, _ in (p.extents() for p in self.patterns) if b is not None), None), len(self.patterns)

    def bound(self, heads: int, kv_heads: int | None = None) -> Pattern:
        parts = [pattern.bound(heads, kv_heads) for pattern in self.patterns]
        same = all(new is old for new, old in zip(parts, self.patterns, strict=True))
        return self if same else PerHead(parts)

    def select(self, b: int, h: int) -> Pattern:
        return self.patterns[h].select(b, h)

    def _shard(self, rank: int, ranks: int, heads: int | None) -> Pattern:
        count = len(self.patterns) // ranks
        return self if ranks == 1 else PerHead(self.patterns[rank * count : (rank + 1) * count])

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        for pattern in self.patterns:
            pattern.check(nq, nk, q_offset)

    def restride(self, rate: int, offset: int) -> Pattern | None:
        strided = [pattern.restride(rate, offset) for pattern in self.patterns]
        patterns = [pattern for pattern in strided if pattern is not None]
        return PerHead(patterns) if len(patterns) == len(strided) else None

    def block_side(self) -> int | None:
        return min((side for p in self.patterns if (side := p.block_side()) is not None), default=None)

    def lookback(self) -> Lookback | None:
        look = lookback_of(self.patterns, min, max, any)
        # heads that differ in what lies far have none together
        return look if look == lookback_of(self.patterns, min, max, all) else None

    def residue_rate(self) -> int:
        rates = {pattern.residue_rate() for pattern in self.patterns}
        return rates.pop() if len(rates) == 1 else 1

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._only().allows(q, k)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return self._only().key_ranges(q_lo, q_hi, nk)

    def tile_keys(self, tiles: Tiles) -> Int64:
        return self._only().tile_keys(tiles)

    def _only(self) -> Pattern:
        if len(set(self.patterns)) == 1:
            return self.patterns[0]
        raise PatternError(message("pattern", repr(self), "the pattern of one head", "Take it with select(b, h)."))
