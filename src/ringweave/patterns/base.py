"""The base class of patterns.

A pattern is a boolean relation over (query position, key position), which may differ between batch elements and heads.
``zones`` returns it as data: a tree of ``&``, ``|`` and ``~`` over lists of zones. A zone has the pairs with a query
and a key in two ranges, and their distance in a band. Plans, pairs and pictures follow from that: package ``relation``.

Every pattern is also text: ``spec`` is a Python expression that :func:`ringweave.patterns.parse` reads back, with an
underscore in place of each tensor of ``tables``. Text and tensors can cross ``torch.library`` ops, objects cannot.

Operators, plans and pictures of patterns are made by modules that import this one, so their methods import them late.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..checks import check_dense
from ..errors import PatternError
from ..relation.node import Node
from ..relation.zones import Zones
from ..types import Causality, Place
from .cache_key import CacheKey, TableId
from .declared import declare

if TYPE_CHECKING:
    from ..plan.block_plan import BlockPlan

P = TypeVar("P", bound="Pattern")
# attributes that a pattern derives from the others; they are not pickled
_WRITTEN = ("_spec", "_fixed", "_called")
_CALLED = re.compile(r"(\w+)\(")
_NUMBER = re.compile(r"TokenMask\(\d+")


class Pattern(ABC):
    """A relation that says which keys each query of each head may attend: immutable, hashable, without a device.

    Combine patterns with ``&``, ``|`` and ``~``; a key that both operands of ``|`` allow counts once.

    A new pattern defines ``_text`` and ``zones``. It may define

    - ``extents`` and ``select``, if batch elements or heads differ; ``check``, if it fits certain lengths only;
    - the property ``residue_rate``, which makes plans cheaper;
    - the property ``tables``, if it has tensors; ``bound`` and the property ``tile_size``, if they contain blocks;
    - ``by_place``, if its tensors have a row for each query of a call, wherever the call begins;
    - ``_packed_apart`` and ``_among_keys``, if queries and keys may be packed with different lengths.

    It overrides no other method of this class. A pattern that contains patterns derives from :class:`Composite`, and a
    name for another pattern from :class:`Derived`.

    Example:
        >>> rw.SlidingWindow(2) & ~rw.Segments(8) | rw.Sinks(1)
        SlidingWindow(2) & ~Segments(8) | Sinks(1)
        >>> (rw.SlidingWindow(1) | rw.Sinks(1)).to_dense(4, 4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 0, 1, 1]], dtype=torch.int32)
    """

    #: False for mixtures, in which a key may count several times; set operators refuse them.
    combinable: ClassVar[bool] = True
    # Makes numpy's operators return NotImplemented, so that `array & pattern` reaches __rand__, which raises.
    __array_ufunc__ = None

    #: Whether it is a list of chosen tokens, so that a union of two may be one list: see :meth:`_either`.
    lists_tokens: ClassVar[bool] = False
    #: Whether it looks positions up in a grid or a function, which have no negative ones.
    looks_up: ClassVar[bool] = False
    #: Whether it counts queries and keys by their places in a call, whatever positions the call gives them.
    by_place: ClassVar[bool] = False
    #: Whether the positions of its parts count from each document or batch element, which differ in length.
    counts_apart: ClassVar[bool] = False
    #: Depth of its nested operators, and number of patterns that they combine.
    depth: int = 0
    leaves: int = 1
    # The preset that made the pattern, and the number of tokens that it was made for; error messages name both.
    _made_by: tuple[str, int] | None = None

    # ---- methods that a pattern defines ------------------------------------------------------------------------------

    @abstractmethod
    def _text(self) -> str:
        """Return the text of ``spec``."""

    @abstractmethod
    def zones(self, n: int | None) -> Node:
        """Return the relation of one batch element and head, or of all elements on their axis.

        Args:
            n: End of all positions: no query or key has a position from there on. None if it is unknown; the relation
                is then asked for pairs only.
        """

    # ---- methods that a pattern may add ------------------------------------------------------------------------------

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Tensors of the pattern (block tables, document bounds): private copies, or tensors that it follows."""
        return ()

    @property
    def residue_rate(self) -> int:
        """The largest known r such that a query attends only keys congruent to it modulo r; 1 if there is none.

        A pattern with r > 1 is denser in a strided view.
        """
        return 1

    @property
    def tile_size(self) -> int | None:
        """The tile size that suits the pattern: the tokens in a side of the blocks that it consists of; else None."""
        return None

    @property
    def _packed_apart(self) -> bool:
        """Whether it counts all positions in documents that have separate bounds for queries and for keys."""
        return False

    def _among_keys(self, place: Tensor) -> Tensor:
        """Return the places of queries on the axis of keys, so that differences of places are distances.

        In documents that are packed apart, the last query of each is at its last key. A document that has fewer keys
        than queries begins before its first key, perhaps at a negative place.

        Args:
            place: Places of queries on their axis, int64.
        """
        return place

    def _allowed_pairs(self, nq: int, nk: int) -> int | None:
        """Return the number of allowed pairs by a formula; None without one."""
        return None

    def _either(self, other: Pattern) -> Pattern | None:
        """Return one pattern that stands for ``self | other``, both lists of tokens of one type; None without one."""
        return None

    def extents(self) -> tuple[int | None, int | None]:
        """Return the (batch, heads) that the pattern is made for; None for a side on which it does not depend."""
        return None, None

    def select(self, b: int, h: int) -> Pattern:
        """Return the pattern of one batch element and head; ``self`` if and only if it is the same for all of them."""
        return self

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        """Return the pattern for a call with these heads: a table per key head is assigned to query heads.

        Args:
            heads: Query heads of all ranks, or None if unknown.
            kv_heads: Key heads, or None if unknown.
            rank: Rank to return the heads of, when heads are distributed over ranks in order; see :meth:`shard`.
            ranks: Number of ranks; divides the heads.
        """
        return self

    def check(self, nq: int, nk: int, q_offset: int) -> None:  # noqa: B027  (most patterns fit any length)
        """Raise PatternError if the pattern is made for other lengths."""

    # ---- text --------------------------------------------------------------------------------------------------------

    _spec: str
    # whether this pattern, or a part of it, follows tensors that their owner may write to: caches identify it by these
    _follows: bool
    #: Whether a function is part of the pattern. It may read new values, so ``spec`` is then written at each access.
    has_function: bool

    def __post_init__(self) -> None:
        follows = function = False
        # a loop in place of any(): torch.compile traces each element of a generator in a frame of its own
        for part in self.parts_within():
            follows, function = follows or part._follows, function or part.has_function
        self.write(self._text(), follows, function)

    def write(self, text: str, follows: bool, function: bool) -> None:
        """Store the pattern's text, and whether it follows tensors and contains a function.

        Attributes cannot be assigned afterwards.
        """
        # Stored, not computed: torch.compile guards on a stored string, but would make symbols of changing numbers.
        object.__setattr__(self, "_follows", follows)
        object.__setattr__(self, "has_function", function)
        if function and not torch.compiler.is_dynamo_compiling():
            # only compiled code reads it; a tensor names the function there, so that graphs serve every function
            text = _NUMBER.sub("TokenMask(_", text)
        object.__setattr__(self, "_spec", text)

    @property
    def spec(self) -> str:
        """The pattern as a Python expression, with ``_`` for each tensor of ``tables`` in turn."""
        return self._text() if self.has_function and not torch.compiler.is_compiling() else self._spec

    @property
    def fixed(self) -> bool:
        """Whether the text defines the pattern completely: it has no tensors and follows none."""
        known = self.__dict__.get("_fixed")
        if known is None:
            known = not self._follows and not self.tables
            object.__setattr__(self, "_fixed", known)
        return bool(known)

    @property
    def _constant(self) -> bool:
        """Whether nothing changes its pairs: it follows no tensors, and its own are copies that nothing writes to."""
        parts = self.parts_within()
        return all(part._constant for part in parts) if parts else not self._follows

    def parts_within(self) -> tuple[Pattern, ...]:
        """Return the patterns that this one consists of; empty unless it is a composite."""
        return ()

    # ---- values ------------------------------------------------------------------------------------------------------

    def value(self) -> Hashable:
        """Return a hashable value, the text and the tables' contents; this copies the tables."""
        if parts := self.parts_within():
            return self.spec, tuple(part.value() for part in parts)
        return self.spec, tuple(map(_contents, self.tables))

    def key(self) -> CacheKey:
        """Return a cache key: the text, and the tables by storage and version."""
        if not self._follows:
            tables = self.tables
            return CacheKey((self._spec, *map(TableId, tables)), sum([table.nbytes for table in tables]))
        keys = [part.key() for part in self.parts_within()]
        return CacheKey(
            (self.spec, *(key.value for key in keys)),
            sum(key.nbytes for key in keys),
            tuple(version for key in keys for version in key.versions),
        )

    def _for_call(self) -> Pattern:
        """Return the pattern for one call: ``self``, with functions as they compute now."""
        return self

    def _recognised(self, place: Place) -> Pattern:
        """Return the pattern for one call with patterns in place of functions with the same pairs, where it has some.

        Args:
            place: The positions of the call.
        """
        return self

    def _owners(self) -> list[object]:
        """Return the functions in it that no graph identifies; caches drop their entries with a function."""
        return [owner for part in self.parts_within() for owner in part._owners()] if self.has_function else []

    def __setattr__(self, name: str, value: Any) -> None:
        if "_spec" in self.__dict__:
            got = f"an assignment to {name}"
            wanted = "no change: caches hold plans of the pattern as it was made"
            raise PatternError(repr(self), got, wanted, "Build another.")
        object.__setattr__(self, name, value)

    def _with(self, **attributes: Any) -> Self:
        """Return a copy with the same text and other attributes."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **attributes)
        return other

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _WRITTEN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # written again: a function has another number in another process
        self.write(self._text(), self._follows, self.has_function)

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

    def stays_equal(self, other: Pattern) -> bool:
        """Return whether the patterns are equal and remain so, whatever is written to the tensors that they follow.

        ``==`` compares what two tensors contain now; only a pattern that stays equal may replace another.
        """
        if self is other:
            return True
        if type(self) is not type(other) or self.spec != other.spec:
            return False
        mine, theirs = self.parts_within(), other.parts_within()
        if mine:
            return len(mine) == len(theirs) and all(a.stays_equal(b) for a, b in zip(mine, theirs, strict=True))
        if not self._follows:
            return self == other
        return all(a is b for a, b in zip(self.tables, other.tables, strict=True))

    def __repr__(self) -> str:
        return self.spec

    def __and__(self, other: Pattern) -> Pattern:
        from .algebra import intersection

        return intersection(self, other)

    def __or__(self, other: Pattern) -> Pattern:
        from .algebra import union

        return union(self, other)

    def __rand__(self, other: object) -> NoReturn:
        from .fitting import refuse

        refuse(other, "operand")

    __ror__ = __rand__

    def __invert__(self) -> Pattern:
        from .algebra import Not

        return Not(self)

    def __bool__(self) -> NoReturn:
        # `a and b` would be b, and `not a` False: a wrong pattern without an error
        got = f"{self!r} in `and`, `or`, `not` or a condition"
        remedy = "Write `a & b` for `a and b`, `a | b` for `a or b`, `~a` for `not a`, and `a is None` for a condition."
        raise PatternError("pattern", got, "an operator of patterns: `&`, `|` or `~`", remedy)

    def within(self, bounds: Pattern) -> Pattern:
        """Apply this pattern inside each document or row, counted from its first key; no pair crosses a bound.

        Args:
            bounds: ``Documents``, ``KeyPadding`` for padded rows, or a ``Tree``, on which positions count along paths.
        Returns:
            A pattern; see :class:`ringweave.patterns.within.Within`.
        Raises:
            PatternError: The bounds are of another kind, or this pattern is a mixture or contains a block table.
                :class:`ringweave.Selected` may be in documents: its rows are those of the call, and its indices then
                count keys or blocks from the first key of the query's document.
        Example:
            >>> rw.Sinks(1).within(rw.Documents([2, 1])).to_dense(3)[0, 0].int()
            tensor([[1, 0, 0],
                    [1, 0, 0],
                    [0, 0, 1]], dtype=torch.int32)
        """
        from .within import within

        return within(self, bounds)

    def shard(self, rank: int, ranks: int, heads: int | None = None) -> Pattern:
        """Return the pattern of one rank's heads, when heads are distributed over ranks in order (tensor parallelism).

        Args:
            rank: The rank.
            ranks: Number of ranks; divides the heads.
            heads: Query heads of all ranks; required if the pattern depends on the number of a head.
        Returns:
            A pattern of ``heads / ranks`` heads; ``self`` if all heads are equal.
        Raises:
            PatternError: The ranks do not divide the heads, or ``heads`` is required and missing.
        Example:
            >>> rw.PerHead([rw.Causal(), rw.Full(), rw.SlidingWindow(1), rw.Sinks(1)]).shard(1, 2)
            PerHead([SlidingWindow(1), Sinks(1)])
        """
        from .algebra import shard

        return shard(self, rank, ranks, heads)

    # ---- views of the relation, computed by the layers above ---------------------------------------------------------

    def to_dense(self, nq: int, nk: int | None = None, heads: int = 1, *, batch: int = 1, q_offset: int = 0) -> Tensor:
        """Evaluate the relation to a bool tensor (batch, heads, nq, nk), for small sizes and tests.

        Args:
            nq: Number of queries, at positions q_offset, q_offset + 1, ...
            nk: Number of keys; nq + q_offset by default.
            heads: Number of query heads.
            batch: Number of batch elements.
            q_offset: Position of the first query.
        Returns:
            Bool tensor (batch, heads, nq, nk).
        Raises:
            PatternError: The pattern is made for other sizes.
            ShapeError: A size is below 1, or there are more than 2**32 pairs.
        Example:
            >>> rw.Causal().to_dense(2)
            tensor([[[[ True, False],
                      [ True,  True]]]])
        """
        from .fitting import fitting
        from .located import located

        pattern, nq, nk, heads, batch, q_offset = fitting(self, nq, nk, heads, batch, q_offset)
        check_dense(nq, nk, heads, batch)
        q = torch.arange(q_offset, q_offset + nq, device="cpu")[:, None]
        k = torch.arange(nk, device="cpu")[None, :]
        dense = torch.zeros(batch, heads, nq, nk, dtype=torch.bool, device="cpu")
        differs = pattern.select(0, 0) is not pattern
        # a function may depend on both, whatever it is made for
        apart = [differs and (side is not None or pattern.has_function) for side in pattern.extents()]
        for b in range(batch if apart[0] else 1):
            for h in range(heads if apart[1] else 1):
                some = slice(b, b + 1) if apart[0] else slice(None), slice(h, h + 1) if apart[1] else slice(None)
                dense[some] = located(pattern.select(b, h), (q_offset + nq, nk)).allows(q, k)
        return dense

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate the relation of one batch element and head on int64 positions that broadcast: bool."""
        from .located import allows

        return allows(self, q, k)

    def plan(
        self,
        nq: int,
        nk: int | None = None,
        *,
        heads: int = 1,
        batch: int = 1,
        q_offset: int = 0,
        tile: int | tuple[int, int] | None = None,
        device: str | int | torch.device = "cpu",
    ) -> BlockPlan:
        """Plan the non-empty tiles of this pattern; see :func:`ringweave.plan`.

        Example:
            >>> rw.SlidingWindow(128).plan(1024).nnz
            15
        """
        from ..plan import plan

        return plan(self, nq, nk, heads=heads, batch=batch, q_offset=q_offset, tile=tile, device=device)

    def density(self, nq: int, nk: int | None = None, *, heads: int = 1, batch: int = 1, q_offset: int = 0) -> float:
        """Return the share of allowed pairs, counted exactly from the tiles (never N x N work).

        Example:
            >>> rw.Causal().density(3)
            0.6666666666666666
        """
        from ..plan import density

        return density(self, nq, nk, heads=heads, batch=batch, q_offset=q_offset)

    def is_causal(self, nq: int, nk: int | None = None, *, heads: int = 1, batch: int = 1, q_offset: int = 0) -> bool:
        """Return whether no query attends a key after its own position, counted exactly from the tiles.

        Example:
            >>> (rw.SlidingWindow(192) & rw.Causal() | rw.Sinks(32)).is_causal(1024)  # the first queries see all sinks
            False
            >>> ((rw.SlidingWindow(192) | rw.Sinks(32)) & rw.Causal()).is_causal(1024)
            True
        """
        return self.causality(nq, nk, heads=heads, batch=batch, q_offset=q_offset).is_causal

    def causality(
        self, nq: int, nk: int | None = None, *, heads: int = 1, batch: int = 1, q_offset: int = 0
    ) -> Causality:
        """Count the pairs with a key after the query's position, and find the first; ``str`` of the result says both.

        Example:
            >>> str(rw.Sinks(32).causality(1024))
            'not causal: 496 pairs see the future, the first is query 0, key 1'
        """
        from ..plan.causality import causality

        return causality(self, nq, nk, heads=heads, batch=batch, q_offset=q_offset)

    def plot(self, tokens: int = 1024, *, heads: int = 1, path: str | Path | None = None) -> str:
        """Draw the relation as SVG text, and write it to ``path`` if given (.svg, or .png with matplotlib).

        Example:
            >>> rw.Causal().plot(256).startswith("<svg")
            True
        """
        from ..reports.picture import plot

        return plot(self, tokens, heads=heads, path=path)

    def _repr_svg_(self) -> str:
        batch, heads = self.extents()
        return self.plot(heads=heads or 1) if batch is None else ""


def _contents(table: Tensor) -> Hashable:
    array = table.cpu().numpy()
    packed = np.packbits(array) if array.dtype == np.bool_ else array
    # equal bytes are other values in another shape or dtype
    return array.shape, array.dtype, packed.tobytes()


def names_in(spec: str) -> set[str]:
    """Return the names of the patterns in a text, without building them."""
    return set(_CALLED.findall(spec))


def parts_of(pattern: Pattern, kind: type[P]) -> list[P]:
    """Return the patterns of a kind inside a pattern, itself included, in the order of the text."""
    found = [pattern] if isinstance(pattern, kind) else []
    for part in pattern.parts_within():
        found += parts_of(part, kind)
    return found


class Composite(Pattern):
    """A pattern that consists of patterns, and depends on batch elements and heads as they do."""

    @abstractmethod
    def parts_within(self) -> tuple[Pattern, ...]:
        """Return the patterns that this one consists of."""

    @abstractmethod
    def remade(self, parts: Sequence[Pattern]) -> Pattern:
        """Build the same pattern from other parts."""

    @property
    def tables(self) -> tuple[Tensor, ...]:
        tables: list[Tensor] = []
        for part in self.parts_within():
            tables += part.tables
        return tuple(tables)

    def extents(self) -> tuple[int | None, int | None]:
        batch = heads = None
        for part in self.parts_within():
            b, h = part.extents()
            batch, heads = agree("batch", batch, b), agree("heads", heads, h)
        return batch, heads

    def select(self, b: int, h: int) -> Pattern:
        return self.with_parts([part.select(b, h) for part in self.parts_within()])

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        return self.with_parts([part.bound(heads, kv_heads, rank, ranks) for part in self.parts_within()])

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        for part in self.parts_within():
            part.check(nq, nk, q_offset)

    def _for_call(self) -> Pattern:
        return self.with_parts([part._for_call() for part in self.parts_within()]) if self.has_function else self

    def with_parts(self, parts: Sequence[Pattern]) -> Pattern:
        """Return ``self`` with other parts; ``self`` if they are the same objects."""
        for new, old in zip(parts, self.parts_within(), strict=True):
            if new is not old:
                return self.remade(parts)
        return self


def agree(name: str, a: int | None, b: int | None) -> int | None:
    """Return the number of batch elements or heads that two parts are made for; raise PatternError for two numbers."""
    if a is None or b is None or a == b:
        return b if a is None else a
    raise PatternError(
        "pattern", f"parts made for {name} = {a} and {b}", f"one number of {name}", "Build the parts for one call."
    )


@declare("Full()", "By position")
@dataclass(frozen=True, eq=False, repr=False)
class Full(Pattern):
    """Every query attends every key.

    Example:
        >>> rw.Full().density(10)
        1.0
    """

    def _text(self) -> str:
        return "Full()"

    def zones(self, n: int | None) -> Node:
        return Zones()


class Derived(Pattern):
    """A name for a pattern that other patterns define."""

    @property
    @abstractmethod
    def definition(self) -> Pattern:
        """The pattern that the name denotes."""

    def zones(self, n: int | None) -> Node:
        return self.definition.zones(n)

    @property
    def residue_rate(self) -> int:
        return self.definition.residue_rate
