"""What is planned: the attention calls of a step over one sequence, and how wide their heads are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from ...errors import PatternError, ShapeError, message, shown
from ...patterns import Pattern
from ...patterns.validate import whole
from ...plan import Branch


@dataclass(frozen=True)
class Widths:
    """Channels of a head, and what a value takes.

    Attributes:
        key: Channels of q and k.
        value: Channels of v.
        itemsize: Bytes of a value of q, k and v.
    """

    key: int = 128
    value: int = 128
    itemsize: int = 2

    @staticmethod
    def of(head_dim: int, itemsize: int) -> Widths:
        """Heads whose keys and values are of one width; ShapeError for what is no such number."""
        head_dim = whole("head_dim", head_dim, 1, error=ShapeError)
        return Widths(head_dim, head_dim, whole("itemsize", itemsize, 1, error=ShapeError))

    @property
    def bytes_of_key(self) -> int:
        """What a key and its value take."""
        return (self.key + self.value) * self.itemsize

    @property
    def bytes_of_query(self) -> int:
        """What a query takes, and its output and log-sum-exp, in float32, on the way back."""
        return self.key * self.itemsize + self.bytes_back

    @property
    def bytes_back(self) -> int:
        """What an output and its log-sum-exp take."""
        return 4 * (self.value + 1)

    @property
    def pair(self) -> int:
        """How many operations a query and a key take."""
        return 2 * (self.key + self.value)


@dataclass(frozen=True)
class Workload:
    """Attention calls over one sequence that share a placement, such as those of interleaved layers.

    Attributes:
        calls: The branches of each call.
        tokens: Length of the sequence.
        heads: Query heads and key heads.
        widths: Channels and bytes.
    """

    calls: Sequence[Sequence[Branch]]
    tokens: int
    heads: tuple[int, int]
    widths: Widths = Widths()

    @property
    def ratio(self) -> int:
        """Query heads of a key head."""
        return self.heads[0] // self.heads[1]

    @property
    def branches(self) -> list[Branch]:
        """The branches of all calls."""
        return list(chain.from_iterable(self.calls))


def patterns_of(asked: Pattern | Sequence[Pattern]) -> tuple[Pattern, ...]:
    """One pattern or several, as a tuple.

    Raises:
        PatternError: Something else, or none.
    """
    if isinstance(asked, Pattern):
        return (asked,)
    patterns = tuple(asked) if isinstance(asked, Iterable) else (asked,)
    if not patterns or not all(isinstance(pattern, Pattern) for pattern in patterns):
        got = [type(pattern).__name__ for pattern in patterns]
        raise PatternError(message("pattern", got, "a pattern or several", "Pass ringweave patterns."))
    return patterns


def pair_of_heads(heads: object) -> tuple[int, int]:
    """(query heads, key heads), checked.

    Raises:
        ShapeError: No such pair.
    """
    wanted = "query heads, a multiple of key heads"
    if not isinstance(heads, Sequence) or isinstance(heads, str) or len(heads) != 2:
        raise ShapeError(message("heads", shown(heads), wanted, "Pass (Hq, Hkv)."))
    of_queries, of_keys = (whole("heads", count, 1, 2**20, error=ShapeError) for count in heads)
    if of_queries % of_keys:
        raise ShapeError(message("heads", (of_queries, of_keys), wanted, "Pass (Hq, Hkv)."))
    return of_queries, of_keys
