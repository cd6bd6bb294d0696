"""Patterns of residues: dilated and strided relations, and LongNet's mixture of dilated branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..checks import LONGEST, check_dense, flag, integers, whole, whole_fields
from ..errors import PatternError, shown
from ..relation.node import Node
from ..relation.zones import D, Residue, Zones
from .base import Derived, Pattern
from .declared import declare
from .fitting import fitting
from .local import Causal, Segments, SlidingWindow


@declare("Strided(8)", "By residue", tokens=64, hostile="Strided(2**30)")
@dataclass(frozen=True, eq=False, repr=False)
class Strided(Pattern):
    """A query attends the keys at distances that are multiples of ``stride``.

    Args:
        stride: Distance in tokens between attended keys.
    Raises:
        PatternError: The stride is below 1.
    Example:
        >>> rw.Strided(2).to_dense(3)[0, 0].int()
        tensor([[1, 0, 1],
                [0, 1, 0],
                [1, 0, 1]], dtype=torch.int32)

    References:
        Child et al. (2019), Generating long sequences with sparse transformers, section 4.3.
    """

    stride: int

    def __post_init__(self) -> None:
        whole_fields(self, stride=1)
        super().__post_init__()

    def _text(self) -> str:
        return f"Strided({self.stride})"

    def zones(self, n: int | None) -> Node:
        return Zones(residue=Residue(D, self.stride, 1))

    @property
    def residue_rate(self) -> int:
        return self.stride


@declare("Dilated(3, 4)", "By residue", tokens=64, hostile="Dilated(3, 2**29)")
@dataclass(frozen=True, eq=False, repr=False)
class Dilated(Derived):
    """A window with holes: ``abs(q - k) <= window * rate`` and ``(q - k) % rate == 0``.

    Unlike :class:`LongNet` it is a relation: it can be combined with other patterns, and a key counts once. It is
    computed in strided views, where it is a plain window, if that takes fewer tiles.

    Args:
        window: Number of attended keys on either side.
        rate: Distance in tokens between attended keys.
    Raises:
        PatternError: The window is negative, or the rate is below 1.
    Example:
        >>> rw.Dilated(1, 2).to_dense(4)[0, 0].int()
        tensor([[1, 0, 1, 0],
                [0, 1, 0, 1],
                [1, 0, 1, 0],
                [0, 1, 0, 1]], dtype=torch.int32)

    References:
        Beltagy, Peters, Cohan (2020), Longformer, section 3.1.
    """

    window: int
    rate: int

    def __post_init__(self) -> None:
        whole_fields(self, window=0, rate=1)
        whole("window * rate", self.window * self.rate, 0, LONGEST)
        super().__post_init__()

    def _text(self) -> str:
        return f"Dilated({self.window}, {self.rate})"

    @property
    def definition(self) -> Pattern:
        reach = self.window * self.rate
        return SlidingWindow(reach, reach) & Strided(self.rate)

    @property
    def residue_rate(self) -> int:
        return self.rate


class StridedView(NamedTuple):
    """Heads (start, stop, step), and the positions congruent to ``offset`` modulo ``rate``."""

    heads: tuple[int, int, int]
    rate: int
    offset: int


@declare(
    "LongNet([16, 64], [1, 4], causal=True)",
    "By residue",
    tokens=64,
    heads=4,
    hostile="LongNet([64, 2**30], [1, 2**20])",
)
class LongNet(Pattern):
    """LongNet's mixture of dilated branches: softmax over the multiset of their keys.

    Branch b cuts the sequence into segments of ``segments[b]`` tokens. In each segment a head attends among the tokens
    at positions congruent to its offset modulo ``rates[b]``, as queries and as keys. The branches are merged by their
    log-sum-exp. A key that two branches attend counts twice, unlike in ``A | B``, so a LongNet is not a relation, and
    the set operators refuse it.

    Args:
        segments: Segment lengths in tokens, one per branch; each a multiple of its rate.
        rates: Dilation rates, one per branch.
        causal: Whether keys after the query are left out.
        offset: ``"interleaved"`` (h mod r, the paper), ``"grouped"`` (contiguous head groups, floor(h * r / H)) or an
            int.
        heads: ``"shared"`` (every head runs every branch) or ``"partitioned"`` (each head group runs one branch;
            earlier groups have one head more if the branches do not divide the heads).
    Raises:
        PatternError: The lists have different lengths, a rate does not divide its segment, or an option is unknown.
    Example:
        >>> rw.LongNet([2, 4], [1, 2]).to_dense(4)[0, 0]
        tensor([[2, 1, 1, 0],
                [1, 1, 0, 0],
                [1, 0, 2, 1],
                [0, 0, 1, 1]], dtype=torch.int32)

    References:
        Ding et al. (2023), LongNet: scaling transformers to 1,000,000,000 tokens, sections 2.2 and 2.3. Unlike the
        paper, ringweave neither pads nor drops a last segment that is short.
    """

    combinable: ClassVar[bool] = False

    def __init__(
        self,
        segments: Sequence[int],
        rates: Sequence[int],
        causal: bool = False,
        offset: str | int = "interleaved",
        heads: str = "shared",
    ):
        self.segments: tuple[int, ...] = tuple(integers("segments", segments, 1))
        self.rates: tuple[int, ...] = tuple(integers("rates", rates, 1))
        self.causal = flag("causal", causal)
        if len(self.segments) != len(self.rates) or not self.segments:
            raise PatternError(
                "segments, rates",
                f"{len(self.segments)} segments and {len(self.rates)} rates",
                "one rate per segment, at least one",
                "Pass lists of one length.",
            )
        for segment, rate in zip(self.segments, self.rates, strict=True):
            if segment % rate:
                raise PatternError(
                    "segments, rates",
                    f"segment {segment} with rate {rate}",
                    "segments divisible by their rates",
                    f"Use segment {segment // rate * rate or rate} or {-(-segment // rate) * rate}.",
                )
        if isinstance(offset, str) and offset not in ("interleaved", "grouped"):
            raise PatternError("offset", shown(offset), "'interleaved', 'grouped' or an int >= 0", "Name one of them.")
        self.offset = offset if isinstance(offset, str) else whole("offset", offset, 0)
        if not isinstance(heads, str) or heads not in ("shared", "partitioned"):
            raise PatternError("heads", shown(heads), "'shared' or 'partitioned'", "Name one of them.")
        self.heads = heads
        self.__post_init__()

    def _text(self) -> str:
        rest = "".join(
            f", {name}={value!r}"
            for name, value, default in (
                ("causal", self.causal, False),
                ("offset", self.offset, "interleaved"),
                ("heads", self.heads, "shared"),
            )
            if value != default
        )
        return f"LongNet({list(self.segments)}, {list(self.rates)}{rest})"

    def views(self, heads: int) -> list[tuple[StridedView, Pattern]]:
        """Return the branches for a number of query heads, each a view of heads and positions and a relation inside.

        Raises:
            PatternError: The heads are partitioned, and there are fewer heads than branches.
        """
        count = len(self.segments)
        if self.heads == "partitioned" and count > heads:
            raise PatternError(
                "heads",
                f"{heads} heads for {count} branches",
                "at least one head per branch when heads='partitioned'",
                "Use heads='shared', or drop branches.",
            )
        views: list[tuple[StridedView, Pattern]] = []
        last = 0
        for branch, (segment, rate) in enumerate(zip(self.segments, self.rates, strict=True)):
            first, last = last, last + heads // count + (branch < heads % count)
            owned = range(first, last) if self.heads == "partitioned" else range(heads)
            inside: Pattern = Segments(segment // rate)
            if self.causal:
                inside = inside & Causal()
            by_offset: dict[int, list[int]] = {}
            for head in owned:
                by_offset.setdefault(self._offset(head, rate, heads), []).append(head)
            for offset, members in sorted(by_offset.items()):
                step = members[1] - members[0] if len(members) > 1 else 1
                views.append((StridedView((members[0], members[-1] + 1, step), rate, offset), inside))
        return views

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        shared = self.heads == "shared"
        every = shared and isinstance(self.offset, int)
        # each rank's first head has residue 0 modulo every rate, as head 0 has
        aligned = heads is not None and all(heads // ranks % rate == 0 for rate in self.rates)
        if ranks == 1 or every or (shared and self.offset == "interleaved" and aligned):
            return self
        wanted = f"heads that attend the same keys on {ranks} ranks as on one"
        remedy = "Use an int as offset; or pass heads=, and use so many ranks that each rate divides a rank's heads."
        raise PatternError("pattern", repr(self), wanted, remedy)

    def _offset(self, head: int, rate: int, heads: int) -> int:
        if isinstance(self.offset, int):
            return self.offset % rate
        return head % rate if self.offset == "interleaved" else head * rate // heads

    def to_dense(self, nq: int, nk: int | None = None, heads: int = 1, *, batch: int = 1, q_offset: int = 0) -> Tensor:
        """Count the branches in which each query attends each key: int32 (batch, heads, nq, nk)."""
        _, nq, nk, heads, batch, q_offset = fitting(self, nq, nk, heads, batch, q_offset)
        check_dense(nq, nk, heads, batch)
        q = torch.arange(q_offset, q_offset + nq, device="cpu")[:, None]
        k = torch.arange(nk, device="cpu")[None, :]
        dense = torch.zeros(batch, heads, nq, nk, dtype=torch.int32, device="cpu")
        for (owned, rate, offset), inside in self.views(heads):
            kept = (q % rate == offset) & (k % rate == offset)
            dense[:, slice(*owned)] += (kept & inside.allows(q // rate, k // rate)).int()
        return dense

    def _refuse(self) -> NoReturn:
        raise PatternError(
            "pattern",
            repr(self),
            "a relation",
            "A LongNet is a mixture of branches: use attention or explain, or plan the relation of one branch.",
        )

    def zones(self, n: int | None) -> Node:
        self._refuse()

    def __invert__(self) -> Pattern:
        self._refuse()
