"""Patterns of nearby positions: causal, window, segments, neighbourhood, prefix."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import whole, whole_fields
from ..errors import PatternError, shown
from ..relation.node import ELEMENT, FAR, Node
from ..relation.opaque import Opaque
from ..relation.shapes import MOST_ZONES, neighborhood, segments
from ..relation.zones import Zones
from .base import Derived, Pattern
from .declared import declare
from .global_tokens import Sinks

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

    def zones(self, n: int | None) -> Node:
        return Zones(d=(-ELEMENT, 1))


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

    def zones(self, n: int | None) -> Node:
        return Zones(d=(-self.left, self.right + 1))


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

    def zones(self, n: int | None) -> Node:
        if n is None or n // self.length > MOST_ZONES:
            return Opaque(lambda q, k, element: q // self.length == k // self.length)
        return segments(self.length, n)


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

    def zones(self, n: int | None) -> Node:
        return neighborhood(self.window, self.dilation, self.tokens, queries=(-FAR, FAR))

    @property
    def residue_rate(self) -> int:
        return self.dilation


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
        return Sinks(self.n) | Causal()
