"""Patterns that consist of patterns: intersection, union, complement, and one pattern per head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from ..checks import whole
from ..errors import PatternError, shown
from ..relation import node as relation
from ..relation.node import Node
from ..types import Place
from .base import Composite, Pattern, agree
from .declared import declare
from .fitting import called, nest, refuse

# most operands in a row in a text
_GROUP = 256


class _Operator(Composite):
    """Base of the operators: the properties that follow from the parts."""

    def _recognised(self, place: Place) -> Pattern:
        return self.with_parts([part._recognised(place) for part in self.parts_within()]) if self.has_function else self

    @property
    def tile_size(self) -> int | None:
        return min((size for part in self.parts_within() if (size := part.tile_size) is not None), default=None)


@dataclass(frozen=True, eq=False, repr=False)
class Combined(_Operator):
    """Patterns under one operator; nested operators of the same kind are flattened."""

    parts: tuple[Pattern, ...]
    sign: ClassVar[str]

    def __post_init__(self) -> None:
        depth = leaves = 0
        for part in self.parts:
            depth, leaves = max(depth, part.depth), leaves + part.leaves
        nest(self, 1 + depth, leaves)
        super().__post_init__()

    def appended(self, part: Pattern) -> Self:
        """Append a part and reuse the text of the others, so that building a long union is not quadratic."""
        new = object.__new__(type(self))
        object.__setattr__(new, "parts", (*self.parts, part))
        nest(new, max(self.depth, 1 + part.depth), self.leaves + part.leaves)
        whole = len(self.parts) % _GROUP == 0
        text = new._text() if whole else f"{self.spec}{self.sign}{self._bracketed(part, part.spec)}"
        new.write(text, self._follows or part._follows, self.has_function or part.has_function)
        return new

    def _text(self) -> str:
        return self._join_text([part.spec for part in self.parts])

    def __repr__(self) -> str:
        return self._join_text([repr(part) for part in self.parts])

    def _join_text(self, texts: list[str]) -> str:
        operands = [self._bracketed(part, text) for text, part in zip(texts, self.parts, strict=True)]
        # a long chain is written in groups, since Python's parser nests one level for each operator of a chain
        ends = range(_GROUP, len(operands), _GROUP)
        groups = [f"({self.sign.join(operands[end - _GROUP : end])})" for end in ends]
        return self.sign.join(groups + operands[len(ends) * _GROUP :])

    def _bracketed(self, part: Pattern, text: str) -> str:
        # `&` binds tighter than `|`, as in Python
        return f"({text})" if isinstance(self, And) and isinstance(part, Or) else text

    def parts_within(self) -> tuple[Pattern, ...]:
        return self.parts

    def remade(self, parts: Sequence[Pattern]) -> Pattern:
        return join(type(self), *parts)


class And(Combined):
    """The intersection: a pair is allowed if every part allows it."""

    sign: ClassVar[str] = " & "

    def zones(self, n: int | None) -> Node:
        return relation.And([part.zones(n) for part in self.parts])

    @property
    def residue_rate(self) -> int:
        return max(part.residue_rate for part in self.parts)

    def __invert__(self) -> Pattern:
        return join(Or, *_complements(self.parts))


class Or(Combined):
    """The union: a pair is allowed if any part allows it; a key that several parts allow counts once."""

    sign: ClassVar[str] = " | "

    def zones(self, n: int | None) -> Node:
        return relation.Or([part.zones(n) for part in self.parts])

    def __invert__(self) -> Pattern:
        return join(And, *_complements(self.parts))


def _complements(parts: Sequence[Pattern]) -> list[Pattern]:
    # torch.compile does not trace the operator ~
    return [part.__invert__() for part in parts]


@dataclass(frozen=True, eq=False, repr=False)
class Not(_Operator):
    """The complement of a pattern; complements of ``&`` and ``|`` are pushed to the leaves (De Morgan)."""

    part: Pattern

    def _text(self) -> str:
        return f"~{self.part.spec}"

    def __repr__(self) -> str:
        return f"~{self.part!r}"

    def parts_within(self) -> tuple[Pattern, ...]:
        return (self.part,)

    def remade(self, parts: Sequence[Pattern]) -> Pattern:
        return ~parts[0]

    def zones(self, n: int | None) -> Node:
        return relation.Not(self.part.zones(n))

    def __invert__(self) -> Pattern:
        return self.part


def leaves(pattern: Pattern) -> Iterator[Pattern]:
    """Iterate over the operands of a pattern's nested operators."""
    if isinstance(pattern, Combined):
        for part in pattern.parts:
            yield from leaves(part)
    elif isinstance(pattern, Not):
        yield from leaves(pattern.part)
    else:
        yield pattern


def replace(pattern: Pattern, change: Callable[[Pattern], Pattern]) -> Pattern:
    """Apply ``change`` to each leaf of a pattern's operators, and combine the results in the same way."""
    if isinstance(pattern, Combined):
        return join(type(pattern), *(replace(part, change) for part in pattern.parts))
    if isinstance(pattern, Not):
        return ~replace(pattern.part, change)
    return change(pattern)


def join(kind: type[Combined], *operands: Pattern) -> Pattern:
    """Join operands under an operator; drop repeated and neutral operands, and unite lists of tokens."""
    parts: list[Pattern] = []
    for operand in operands:
        if not isinstance(operand, Pattern):
            refuse(operand, "operand")
        if not operand.combinable:
            raise PatternError(
                "operand",
                repr(operand),
                "a relation",
                "LongNet is a mixture in which a key may count several times; join its output with merge().",
            )
        parts += operand.parts if isinstance(operand, kind) else (operand,)
    neutral = "Full()" if kind is And else "~Full()"
    first, last = operands[0], operands[-1]
    if len(operands) == 2 and isinstance(first, kind) and not isinstance(last, kind):
        alone = kind is And or not last.lists_tokens
        if last.spec == neutral or any(last.stays_equal(old) for old in first.parts):
            return first
        if alone:
            return first.appended(last)
    kept: list[Pattern] = []
    by_text: dict[str, list[Pattern]] = {}
    for part in parts if kind is And else _together(parts):
        # only patterns of equal text are compared, so that a long union is not quadratic
        alike = by_text.setdefault(part.spec, [])
        if part.spec != neutral and not any(part.stays_equal(old) for old in alike):
            alike.append(part)
            kept.append(part)
    if not kept:
        return parts[0]
    return kept[0] if len(kept) == 1 else kind(tuple(kept))


def _together(parts: list[Pattern]) -> list[Pattern]:
    """Unite the lists of chosen tokens of each type, at the place of the first one."""
    united: list[Pattern] = []
    place: dict[type[Pattern], int] = {}
    for part in parts:
        first = place.setdefault(type(part), len(united))
        known = united[first] if first < len(united) else None
        together = None if known is None else known._either(part)
        if together is None:
            united.append(part)
        else:
            united[first] = together
    return united


@declare(
    "PerHead([Causal(), SlidingWindow(128), Strided(64), Causal()])",
    "By table, function or head",
    heads=4,
    hostile="PerHead([Strided(2**30), SlidingWindow(2**30, 0)])",
)
class PerHead(_Operator):
    """One pattern for each query head; heads with equal patterns share their plan.

    Args:
        patterns: One pattern per query head.
    Raises:
        PatternError: The list is empty or contains a mixture; at use, the number of heads is another one, or patterns
            are made for different numbers of batch elements.
    Example:
        >>> rw.PerHead([rw.Causal(), rw.SlidingWindow(1)]).to_dense(3, heads=2)[0].sum((1, 2))
        tensor([6, 5])
    """

    def __init__(self, patterns: Sequence[Pattern]):
        listed = isinstance(patterns, (list, tuple))
        if not listed or not patterns or not all(isinstance(p, Pattern) and p.combinable for p in patterns):
            remedies = [called(p) for p in patterns] if listed else []
            remedy = next(filter(None, remedies), "Pass one per query head.")
            raise PatternError("patterns", shown(patterns), "a list of relations", remedy)
        self.patterns = tuple(patterns)
        nest(self, 1 + max(p.depth for p in patterns), sum(p.leaves for p in patterns))
        self.__post_init__()

    def _text(self) -> str:
        return f"PerHead([{', '.join(p.spec for p in self.patterns)}])"

    def parts_within(self) -> tuple[Pattern, ...]:
        return self.patterns

    def _recognised(self, place: Place) -> Pattern:
        # the place has one head inside of another PerHead, but part h is that of head h there, too
        heads = enumerate(self.patterns)
        return self.with_parts([part._recognised(place._replace(heads=1, h0=h)) for h, part in heads])

    def __repr__(self) -> str:
        return f"PerHead([{', '.join(map(repr, self.patterns))}])"

    def extents(self) -> tuple[int | None, int | None]:
        batch, heads = None, len(self.patterns)
        for part in self.patterns:
            # the number of query heads is known here, also to tables per key head
            of_batch, of_heads = part.bound(heads).extents()
            batch = agree("batch", batch, of_batch)
            agree("heads", heads, of_heads)
        return batch, heads

    def remade(self, parts: Sequence[Pattern]) -> Pattern:
        return PerHead(list(parts))

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        if ranks == 1:
            return super().bound(heads, kv_heads)
        count = len(self.patterns) // ranks
        mine = self.patterns[rank * count : (rank + 1) * count]
        # a part that differs between heads is asked for those of its rank, too
        return PerHead([part.bound(len(self.patterns), kv_heads, rank, ranks) for part in mine])

    def select(self, b: int, h: int) -> Pattern:
        return self.patterns[h].select(b, h)

    @property
    def residue_rate(self) -> int:
        rates = {pattern.residue_rate for pattern in self.patterns}
        return rates.pop() if len(rates) == 1 else 1

    def zones(self, n: int | None) -> Node:
        return self._only().zones(n)

    def _only(self) -> Pattern:
        if len(set(self.patterns)) == 1:
            return self.patterns[0]
        raise PatternError("pattern", repr(self), "the pattern of one head", "Get it with select(b, h).")


def shard(pattern: Pattern, rank: int, ranks: int, heads: int | None) -> Pattern:
    """See :meth:`Pattern.shard`."""
    ranks = whole("ranks", ranks, 1)
    rank = whole("rank", rank, 0, ranks - 1)
    heads = None if heads is None else whole("heads", heads, 1)
    bound = pattern if heads is None else pattern.bound(heads)
    made = bound.extents()[1]
    if heads is not None and heads != (made or heads):
        wanted = f"{made}, which {pattern!r} is made for"
        raise PatternError("heads", heads, wanted, "Pass the number of heads of all ranks.")
    made = heads or made
    if made is not None and made % ranks:
        raise PatternError("ranks", ranks, f"a divisor of the {made} query heads", "Use fewer ranks.")
    return bound.bound(heads, None, rank, ranks)


def intersection(a: Pattern, b: Pattern) -> Pattern:
    """Return the pattern ``a & b``."""
    return join(And, a, b)


def union(a: Pattern, b: Pattern) -> Pattern:
    """Return the pattern ``a | b``."""
    return join(Or, a, b)
