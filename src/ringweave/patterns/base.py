"""What may attend: the base class of patterns.

A pattern is a boolean relation over (query position, key position), possibly one per batch and head. It answers three
questions, from cheap to exact:

- ``key_ranges``: for ranges of queries, a few key ranges outside of which nothing is allowed (a superset);
- ``tile_classes``: for given tiles, 0 (empty), 1 (full) or a class number >= 2 such that tiles of one class hold the
  same mask; so a mask is evaluated by token once per class, not once per tile;
- ``allows``: the relation itself, by token, on index tensors. This one is the definition; the others must agree.

Every pattern is also text: ``spec`` is a Python expression that :func:`ringweave.patterns.parse` reads back, with an
underscore in place of each tensor of ``tables``. Text and tensors can cross ``torch.library`` ops, objects cannot.

This module imports nothing that knows of patterns. What patterns offer as methods and other modules compute (operators,
plans, pictures), those modules register here when they load (:func:`provide`).
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from ..errors import PatternError, message
from .cache_key import CacheKey, address_key
from .declared import declare
from .tiles import FULL, Int64, Ranges, Tiles

if TYPE_CHECKING:
    from ..plan.block_plan import BlockPlan
    from ..plan.causality import Causality

# what a pattern writes of itself
_WRITTEN = ("_spec", "_follows", "_spelled_anew", "_fixed")
# functions of other modules by name, or "module:function" of a module that loads at the first use
_provided: dict[str, Callable[..., Any] | str] = {}


def provide(**functions: Callable[..., Any] | str) -> None:
    """Register functions that patterns offer as methods: a callable each, or "module:function" to load when called."""
    _provided.update(functions)


def _function(name: str) -> Any:
    found = _provided[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = _provided[name] = getattr(importlib.import_module(module), attribute)
    return found


class Lookback(NamedTuple):
    """How far back a query looks, where distances are all that a pattern asks for; every head's.

    Attributes:
        first: Queries from here on attend keys from here on by distance alone.
        back: Beyond this distance keys are attended or not as ``far`` says, and those before ``first`` by their place.
        every: Up to this distance before itself a query attends all keys; -1 where it may not attend itself.
        far: See ``back``.
        ahead: Beyond this distance after itself a query attends no key but those before ``first``; ``sys.maxsize``
            where that is not known.
    """

    first: int
    back: int
    every: int
    far: bool
    ahead: int


class Pattern(ABC):
    """Which (head, query, key) triples may attend: immutable, hashable, device-free.

    Combine with ``&``, ``|`` and ``~``; a key allowed by both operands of ``|`` counts once.

    A new pattern defines ``_text``, ``allows``, ``key_ranges`` and ``tile_classes``. It may define ``excluded_ranges``,
    where its complement is bounded; ``extents``, ``select`` and ``bound``, where batch elements or heads differ;
    ``check``, where it fits some lengths only; and ``restride`` and ``lookback``, which make plans cheaper. It may say
    ``tables``, ``residue_rate``, ``block_side`` and ``follows``. It defines no other method of this class. A pattern of
    patterns is a :class:`Composite`, and one that is a name for others is a :class:`Derived`.

    Example:
        >>> rw.SlidingWindow(2) & ~rw.Segments(8) | rw.Sinks(1)
        SlidingWindow(2) & ~Segments(8) | Sinks(1)
        >>> (rw.SlidingWindow(1) | rw.Sinks(1)).to_dense(4, 4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 0, 1, 1]], dtype=torch.int32)
    """

    #: False for mixtures, in which a key may count several times: no set algebra over them.
    combinable: ClassVar[bool] = True
    # numpy's arrays leave an operator to the pattern, which refuses them
    __array_ufunc__ = None

    #: How deep its operators nest, and how many patterns they combine.
    depth: int = 0
    leaves: int = 1

    # ---- what a pattern defines --------------------------------------------------------------------------------------

    @abstractmethod
    def _text(self) -> str:
        """Spell what ``spec`` is to be."""

    @abstractmethod
    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate the relation on broadcast int64 position tensors of one batch and head: bool."""

    @abstractmethod
    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        """Bound, by ranges, every key allowed to any query of [q_lo, q_hi); a superset, sorted or not."""

    @abstractmethod
    def tile_classes(self, tiles: Tiles) -> Int64:
        """Classify tiles: 0 empty, 1 full, else a class number: same class, same extents, same mask."""

    # ---- what a pattern may add --------------------------------------------------------------------------------------

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """List the tensors in the pattern (block tables, document bounds); private copies, never written."""
        return ()

    @property
    def follows(self) -> bool:
        """Whether the pattern is known by what its tensors hold, which others may come to change."""
        return False

    @property
    def residue_rate(self) -> int:
        """Give r > 1 where only keys congruent to the query modulo r are allowed: then a strided view is denser."""
        return 1

    @property
    def block_side(self) -> int | None:
        """Tokens of the blocks that the pattern is made of, if it is: what the side of a tile should be."""
        return None

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        """Give ``key_ranges`` of the complement."""
        return Ranges.of((0, nk), rows=len(q_lo))

    def extents(self) -> tuple[int | None, int | None]:
        """Give (batch, heads) that the pattern is made for; None where it is the same for all."""
        return None, None

    def select(self, b: int, h: int) -> Pattern:
        """Give the pattern of one batch element and head; itself where, and only where, it is the same for all."""
        return self

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        """Give the pattern of a call with so many heads: tables per key head become those of its query heads.

        Args:
            heads: Query heads of all ranks, where they are known.
            kv_heads: Key heads, where they are known.
            rank: Which rank's heads to give, where heads are spread over ranks in order; see :meth:`shard`.
            ranks: How many there are; divides the heads.
        """
        return self

    def check(self, nq: int, nk: int, q_offset: int) -> None:  # noqa: B027  (most patterns fit any length)
        """Raise PatternError where the pattern is made for other lengths."""

    def restride(self, rate: int, offset: int) -> Pattern | None:
        """Restrict to positions offset, offset + rate, ..., renumbered 0, 1, ...; None if it has no such form."""
        return None

    def lookback(self) -> Lookback | None:
        """How far back a query looks, where distances say which keys it attends; None in other patterns."""
        return None

    # ---- text --------------------------------------------------------------------------------------------------------

    _spec: str
    # whether it follows what its tensors hold, or a part of it does
    _follows: bool
    # whether it is spelled anew each time: a function in it may come to read other values
    _spelled_anew: bool

    def __post_init__(self) -> None:
        parts = self.parts_within()
        self.write(self._text(), any(part._follows for part in parts) if parts else self.follows)

    def write(self, text: str, follows: bool) -> None:
        """Be the pattern of a text, which closes it to changes."""
        # Written once: torch.compile guards on text as it is, but would turn changing numbers into symbols.
        object.__setattr__(self, "_follows", follows)
        object.__setattr__(self, "_spelled_anew", follows and "TokenMask(" in text)
        object.__setattr__(self, "_spec", text)

    @property
    def spec(self) -> str:
        """Spell the pattern as a Python expression, ``_`` for each tensor of ``tables`` in turn."""
        return self._text() if self._spelled_anew and not torch.compiler.is_compiling() else self._spec

    @property
    def fixed(self) -> bool:
        """Whether its text is all there is of it: no tensors, and nothing that others may change."""
        known = self.__dict__.get("_fixed")
        if known is None:
            known = not self._follows and not self.tables
            object.__setattr__(self, "_fixed", known)
        return bool(known)

    def parts_within(self) -> tuple[Pattern, ...]:
        """List the patterns that this one is made of; none where it stands for itself."""
        return ()

    # ---- values ------------------------------------------------------------------------------------------------------

    def value(self) -> Hashable:
        """Make a key of a dict: text, and the tables' contents. For many patterns at once; costs a copy."""
        if parts := self.parts_within():
            return self.spec, tuple(part.value() for part in parts)
        arrays = (table.cpu().numpy() for table in self.tables)
        return self.spec, tuple((np.packbits(a) if a.dtype == np.bool_ else a).tobytes() for a in arrays)

    def key(self) -> CacheKey:
        """Make a key of a cache: text, and the tables by address and version."""
        if not self._follows:
            tables = self.tables
            return CacheKey((self._spec, *map(address_key, tables)), tables)
        keys = [part.key() for part in self.parts_within()]
        return CacheKey(
            (self.spec, *(key.value for key in keys)),
            tuple(table for key in keys for table in key.tables),
            tuple(version for key in keys for version in key.versions),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if "_spec" in self.__dict__:
            got = f"an assignment to {name}"
            raise PatternError(message(repr(self), got, "no change: plans are kept by what it was", "Build another."))
        object.__setattr__(self, name, value)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _WRITTEN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # a function has another number in another process
        Pattern.__post_init__(self)

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
        joined: Pattern = _function("intersection")(self, other)
        return joined

    def __or__(self, other: Pattern) -> Pattern:
        joined: Pattern = _function("union")(self, other)
        return joined

    def __rand__(self, other: object) -> NoReturn:
        refuse: Callable[..., NoReturn] = _function("refuse")
        refuse(other, "operand")

    __ror__ = __rand__

    def __invert__(self) -> Pattern:
        inverse: Pattern = _function("complement")(self)
        return inverse

    def within(self, bounds: Pattern) -> Pattern:
        """This pattern inside each document or row, counted from its first key, and nothing across.

        Args:
            bounds: ``Documents``, or ``KeyPadding`` for rows that are padded.
        Returns:
            A pattern; see :class:`ringweave.patterns.within.Within`.
        Raises:
            PatternError: Bounds of another kind, a mixture, or a block table in this pattern.
        Example:
            >>> rw.Sinks(1).within(rw.Documents([2, 1])).to_dense(3)[0, 0].int()
            tensor([[1, 0, 0],
                    [1, 0, 0],
                    [0, 0, 1]], dtype=torch.int32)
        """
        inside: Pattern = _function("within")(self, bounds)
        return inside

    def shard(self, rank: int, ranks: int, heads: int | None = None) -> Pattern:
        """Give the pattern of the heads of one rank, where heads are spread over ranks in order (tensor parallelism).

        Args:
            rank: Which rank.
            ranks: How many; divides the heads.
            heads: Query heads of all ranks: needed where a pattern says what a head does by its number.
        Returns:
            A pattern of ``heads / ranks`` heads; itself where all heads are alike.
        Raises:
            PatternError: Heads that the ranks do not divide, or that cannot be told apart from a rank's own.
        Example:
            >>> rw.PerHead([rw.Causal(), rw.Full(), rw.SlidingWindow(1), rw.Sinks(1)]).shard(1, 2)
            PerHead([SlidingWindow(1), Sinks(1)])
        """
        some: Pattern = _function("shard")(self, rank, ranks, heads)
        return some

    # ---- views of the relation (the layers above do the work) --------------------------------------------------------

    def to_dense(self, nq: int, nk: int | None = None, heads: int = 1, *, batch: int = 1, q_offset: int = 0) -> Tensor:
        """Evaluate the relation to a bool tensor (batch, heads, nq, nk): the definition, for small sizes and tests.

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
            ShapeError: A size below 1, or more than 2**32 pairs in all.
        Example:
            >>> rw.Causal().to_dense(2)
            tensor([[[[ True, False],
                      [ True,  True]]]])
        """
        pattern, nq, nk, heads, batch, q_offset = _function("fitting")(self, nq, nk, heads, batch, q_offset)
        _function("check_dense")(nq, nk, heads, batch)
        q = torch.arange(q_offset, q_offset + nq, device="cpu")[:, None]
        k = torch.arange(nk, device="cpu")[None, :]
        dense = torch.zeros(batch, heads, nq, nk, dtype=torch.bool, device="cpu")
        if pattern.select(0, 0) is pattern:
            return dense.copy_(pattern.allows(q, k))
        for b in range(batch):
            for h in range(heads):
                dense[b, h] = pattern.select(b, h).allows(q, k)
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
        """Plan the tiles that this pattern leaves non-empty; see :func:`ringweave.plan`.

        Example:
            >>> rw.SlidingWindow(128).plan(1024).nnz
            15
        """
        planned: BlockPlan = _function("plan")(
            self, nq, nk, heads=heads, batch=batch, q_offset=q_offset, tile=tile, device=device
        )
        return planned

    def density(self, nq: int, nk: int | None = None, *, heads: int = 1, batch: int = 1, q_offset: int = 0) -> float:
        """Divide allowed pairs by all pairs, exactly, counted from the tiles (never N x N work).

        Example:
            >>> rw.Causal().density(3)
            0.6666666666666666
        """
        share: float = _function("density")(self, nq, nk, heads=heads, batch=batch, q_offset=q_offset)
        return share

    def is_causal(self, nq: int, nk: int | None = None, *, heads: int = 1, batch: int = 1, q_offset: int = 0) -> bool:
        """Tell whether no query attends a key after its own position: exactly, counted from the tiles.

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
        """Count pairs with a key after the query's position, and find the first; its text says it in words.

        Example:
            >>> str(rw.Sinks(32).causality(1024))
            'not causal: 496 pairs see the future, the first is query 0, key 1'
        """
        found: Causality = _function("causality")(self, nq, nk, heads=heads, batch=batch, q_offset=q_offset)
        return found

    def plot(self, tokens: int = 1024, *, heads: int = 1, path: str | Path | None = None) -> str:
        """Draw the relation as SVG text; written to ``path`` (.svg, or .png with matplotlib) when given.

        Example:
            >>> rw.Causal().plot(256).startswith("<svg")
            True
        """
        svg: str = _function("plot")(self, tokens, heads=heads, path=path)
        return svg

    def _repr_svg_(self) -> str:
        batch, heads = self.extents()
        return self.plot(heads=heads or 1) if batch is None else ""


class Composite(Pattern):
    """A pattern that is made of patterns, and differs between batch elements and heads where they do."""

    @abstractmethod
    def parts_within(self) -> tuple[Pattern, ...]:
        """List the patterns that this one is made of."""

    @abstractmethod
    def remade(self, parts: Sequence[Pattern]) -> Pattern:
        """Make the same pattern of other parts."""

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return tuple(table for part in self.parts_within() for table in part.tables)

    def extents(self) -> tuple[int | None, int | None]:
        batch = heads = None
        for part in self.parts_within():
            b, h = part.extents()
            batch, heads = _agree("batch", batch, b), _agree("heads", heads, h)
        return batch, heads

    def select(self, b: int, h: int) -> Pattern:
        return self._of([part.select(b, h) for part in self.parts_within()])

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        return self._of([part.bound(heads, kv_heads, rank, ranks) for part in self.parts_within()])

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        for part in self.parts_within():
            part.check(nq, nk, q_offset)

    def _of(self, parts: Sequence[Pattern]) -> Pattern:
        same = all(new is old for new, old in zip(parts, self.parts_within(), strict=True))
        return self if same else self.remade(parts)


def _agree(name: str, a: int | None, b: int | None) -> int | None:
    if a is None or b is None or a == b:
        return b if a is None else a
    raise PatternError(
        message("pattern", f"parts made for {name} = {a} and {b}", f"one number of {name}", "Build the parts alike.")
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

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=q.device).expand(torch.broadcast_shapes(q.shape, k.shape))

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((0, nk), rows=len(q_lo))

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((0, 0), rows=len(q_lo))

    def tile_classes(self, tiles: Tiles) -> Int64:
        return np.full(len(tiles.q_lo), FULL, np.int64)

    def restride(self, rate: int, offset: int) -> Pattern:
        return self

    def lookback(self) -> Lookback:
        return Lookback(0, 0, sys.maxsize, True, sys.maxsize)


class Derived(Pattern):
    """A named pattern that is defined by other patterns."""

    @property
    @abstractmethod
    def definition(self) -> Pattern:
        """Say what the name stands for."""

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self.definition.allows(q, k)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return self.definition.key_ranges(q_lo, q_hi, nk)

    def excluded_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return (~self.definition).key_ranges(q_lo, q_hi, nk)

    def tile_classes(self, tiles: Tiles) -> Int64:
        return self.definition.tile_classes(tiles)

    @property
    def residue_rate(self) -> int:
        return self.definition.residue_rate

    def restride(self, rate: int, offset: int) -> Pattern | None:
        return self.definition.restride(rate, offset)

    def lookback(self) -> Lookback | None:
        return self.definition.lookback()
