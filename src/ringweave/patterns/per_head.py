"""One pattern per head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import PatternError, message, shown
from .algebra import lookback_of
from .base import Lookback, Pattern
from .fit import nest
from .tiles import Int64, Ranges, Tiles


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
