"""The input of planning: the attention calls of a step over one sequence, and the widths of their heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from ...checks import whole
from ...errors import PatternError, ShapeError, shown
from ...patterns import Pattern
from ...plan import Branch


@dataclass(frozen=True)
class Widths:
    """Channels of a head, and bytes per element."""

    key: int = 128  # channels of q and k
    value: int = 128  # channels of v
    itemsize: int = 2  # bytes per element of q, k and v

    @staticmethod
    def of(head_dim: int, itemsize: int) -> Widths:
        """Return the widths of heads with equally wide keys and values; ShapeError unless both numbers are positive."""
        head_dim = whole("head_dim", head_dim, 1, error=ShapeError)
        return Widths(head_dim, head_dim, whole("itemsize", itemsize, 1, error=ShapeError))

    @property
    def bytes_of_key(self) -> int:
        """Bytes of a key and its value."""
        return (self.key + self.value) * self.itemsize

    @property
    def bytes_of_query(self) -> int:
        """Bytes of a query and of its returned output and log-sum-exp in float32."""
        return self.key * self.itemsize + self.bytes_back

    @property
    def bytes_back(self) -> int:
        """Bytes of an output and its log-sum-exp in float32."""
        return 4 * (self.value + 1)

    @property
    def pair(self) -> int:
        """Number of operations per pair of a query and a key."""
        return 2 * (self.key + self.value)


@dataclass(frozen=True)
class Workload:
    """Attention calls over one sequence that share a placement, such as those of interleaved layers."""

    calls: Sequence[Sequence[Branch]]  # the branches of each call
    tokens: int  # length of the sequence
    heads: tuple[int, int]
    widths: Widths = Widths()  # channels and bytes of a head

    @property
    def ratio(self) -> int:
        """Number of query heads per key head."""
        return self.heads[0] // self.heads[1]

    @property
    def branches(self) -> list[Branch]:
        """The branches of all calls."""
        return list(chain.from_iterable(self.calls))


def patterns_of(pattern: Pattern | Sequence[Pattern]) -> tuple[Pattern, ...]:
    """Return one pattern or several as a tuple.

    Raises:
        PatternError: There is no pattern, or an element is not a pattern.
    """
    if isinstance(pattern, Pattern):
        return (pattern,)
    patterns = tuple(pattern) if isinstance(pattern, Iterable) else (pattern,)
    if not patterns or not all(isinstance(pattern, Pattern) for pattern in patterns):
        got = [type(pattern).__name__ for pattern in patterns]
        raise PatternError("pattern", got, "a pattern or several", "Pass ringweave patterns.")
    return patterns


def pair_of_heads(heads: object) -> tuple[int, int]:
    """Check and return (query heads, key heads).

    Raises:
        ShapeError: It is not a pair of positive integers, or the first is not a multiple of the second.
    """
    wanted = "query heads, a multiple of key heads"
    if not isinstance(heads, Sequence) or isinstance(heads, str) or len(heads) != 2:
        raise ShapeError("heads", shown(heads), wanted, "Pass (Hq, Hkv).")
    of_queries, of_keys = (whole("heads", count, 1, 2**20, error=ShapeError) for count in heads)
    if of_queries % of_keys:
        raise ShapeError("heads", (of_queries, of_keys), wanted, "Pass (Hq, Hkv).")
    return of_queries, of_keys
