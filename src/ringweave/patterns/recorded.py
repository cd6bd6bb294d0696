"""The pattern of a mask function in one call.

A function is traced at each call (package ``trace``), so it does not matter where its values come from. A call computes
with the pattern of the pairs if the graph is recognised (``traced``), and else with :class:`Recorded`, which evaluates
the graph. A function that no graph records is called instead. Its values could change unnoticed, so each call evaluates
it again.
"""

from __future__ import annotations

import pickle
import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache import PATTERNS
from ..errors import PatternError
from ..relation.node import Node
from ..relation.opaque import Opaque
from ..torch_compat import outside_transforms, wrapped
from ..trace.graph import B, Graph, H, UntraceableError, deps_of
from ..trace.symbols import trace
from ..trace.text import TextFunction
from ..types import Place
from . import traced
from .algebra import PerHead
from .base import Pattern, parts_of
from .cache_key import CacheKey, changed
from .key_padding import KeyPadding
from .mask_function import MaskFunction, called, check_result, out_of_bounds

#: Positions of the first query and the first key, at which a function is tried.
FIRST = 0, 0
# estimated size of a graph, and of a pattern without its tables
_BYTES = 4 * 2**10
# Fewer queries than this are evaluated: a step of decoding reads a row, and recognition would compute all of its sides.
_FEW = 16
# the first pairs, at which a function is compared with its text; tables may have no entries for more
_TRIED = Place(2, 2, 64, 64), Place(1, 1, 64, 64), Place(1, 1, 8, 8), Place(1, 1, 1, 1)


_functions: weakref.WeakValueDictionary[int, MaskFunction] = weakref.WeakValueDictionary()
_by_key: weakref.WeakValueDictionary[Hashable, MaskFunction] = weakref.WeakValueDictionary()


def recorded(fn: Callable[..., Any], named: Sequence[Tensor] | None = None, *, pairs: bool = False) -> Recorded:
    """Return the pattern of a function as it computes now.

    Args:
        fn: The function.
        named: Tensors that the caller names; if no graph records the function, it depends on these alone.
        pairs: Whether the function is one of 0-dim tensors, as FlexAttention's are. A graph serves both.
    Raises:
        PatternError: The function has a graph and returns no mask.
    """
    try:
        with outside_transforms():
            graph = trace(fn)
            key = "mask function", graph.key
            function = PATTERNS.get(key)
            if function is None:
                graph.typed()
                function = _by_key.get(key)
    except UntraceableError as error:
        return unrecorded(fn, str(error), named, pairs=pairs)
    if function is None:
        check_result(graph.result)
        function = _by_key[key] = MaskFunction(fn, graph.without_values())
        function.learns = tuple([x.requires_grad for x in graph.tensors])
        _functions[function.number] = function
        # kept, so that equal functions have one number, also after the first of them is gone
        PATTERNS.put(key, function, _BYTES)
    return Recorded(function, tuple(graph.tensors), graph, fn, pairs=pairs)


def unrecorded(
    fn: Callable[..., Any], why: str, named: Sequence[Tensor] | None = None, *, pairs: bool = False
) -> Recorded:
    """Return the pattern of a function that is called for the pairs; arguments as in :func:`recorded`.

    Args:
        why: Why no graph records it.
    """
    key = "called", id(fn), tuple(map(id, named or ()))
    function = None if named is None else _by_key.get(key)
    if function is None:
        function = MaskFunction(fn, None, why, pairs=pairs, vouched=named is not None)
        _functions[function.number] = function
        if named is not None:
            # the ids are those of objects that it keeps alive
            function.kept = tuple(named)
            _by_key[key] = function
    return Recorded(function, tuple(named or ()))


class OfFunction(Pattern):
    """A pattern of a function, for all batch elements and heads, or for one of them."""

    looks_up = True
    _batch: int | None
    _head: int | None

    @abstractmethod
    def _depends(self) -> tuple[bool, bool]:
        """Return whether the mask depends on the batch element and on the head."""

    @abstractmethod
    def _chosen(self, batch: int | None, head: int | None) -> Pattern:
        """Return the pattern of a batch element, a head, or both."""

    def value(self) -> Hashable:
        return self.key().value

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        if ranks == 1 or self._head is not None or not self._depends()[1]:
            return self
        if heads is None:
            remedy = "Pass heads=, the number of heads of all ranks."
            raise PatternError("heads", None, "a number, for a function that reads the head", remedy)
        count = heads // ranks
        return PerHead([self._chosen(self._batch, head) for head in range(rank * count, (rank + 1) * count)])


class Recorded(OfFunction):
    """A mask function as it computes in one call: its graph, and the tensors that it reads.

    Args:
        function: The function.
        tables: The tensors.
        graph: The graph with the values of its tensors, for recognition.
        fn: The function that was traced.
        pairs: Whether it is one of 0-dim tensors.
        batch: The batch element to evaluate it for; by default every one.
        head: The query head to evaluate it for; by default every one.
        used: The functions that compiled code used under its name there; see ``function.Ticket``.
    """

    function: MaskFunction
    used: set[MaskFunction] | None
    _tables: tuple[Tensor, ...]
    _graph: Graph | None
    _fn: Callable[..., Any] | None
    _pairs: bool
    _place: list[tuple[int, int]]
    _computed: list[list[Tensor]]

    def __init__(
        self,
        function: MaskFunction,
        tables: tuple[Tensor, ...],
        graph: Graph | None = None,
        fn: Callable[..., Any] | None = None,
        *,
        pairs: bool = False,
        batch: int | None = None,
        head: int | None = None,
        used: set[MaskFunction] | None = None,
    ):
        # a call makes one, so attributes are not set one by one
        self.__dict__.update(
            function=function, _tables=tables, _graph=graph, _fn=fn, _pairs=pairs,
            _batch=batch, _head=head, used=used,
            # the last query and the last key of a call, at which a function that is called may be tried
            _place=[FIRST],
            # what the graph reads of the tensors, once it is computed
            _computed=[],
            _spec="", _follows=True, has_function=True,
        )  # fmt: skip

    def _chosen(self, batch: int | None, head: int | None, used: set[MaskFunction] | None = None) -> Recorded:
        used = self.used if used is None else used
        if (batch, head) == (self._batch, self._head) and used is self.used:
            return self
        one = {"batch": batch, "head": head}
        return Recorded(self.function, self._tables, self._graph, self._fn, pairs=self._pairs, used=used, **one)

    def _text(self) -> str:
        return f"TokenMask({self.function.number}{', _' * len(self._tables)}{chosen_text(self._batch, self._head)})"

    def __repr__(self) -> str:
        return f"TokenMask({self.name}{chosen_text(self._batch, self._head)})"

    @property
    def name(self) -> str:
        """The name of the function that was traced, since functions with equal graphs may have others."""
        return self.function.name if self._fn is None else called(self._fn)

    @property
    def formula(self) -> str:
        """The function's name and the beginning of its text in a line."""
        return f"{self.name}: {self.function.formula}"

    @property
    def said(self) -> str:
        """How a call computes the function, for a report."""
        if self.function.graph is None:
            return f"{self.name} is called at each call: {self.function.why}"
        return f"{self.formula}, evaluated in tiles: its pairs are no pattern, or too many zones"

    def __reduce__(self) -> tuple[Any, ...]:
        raise pickle.PicklingError(f"{self!r} belongs to one call: pickle the pattern that was passed to it")

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return without_gradients(self._tables)

    def key(self) -> CacheKey:
        return CacheKey.following(self._text(), self._tables)

    def _owners(self) -> list[object]:
        return [self.function] if self.function.graph is None else []

    def at_place(self, place: Place) -> Place:
        """Return the indices of a call, with one batch element and head where the mask does not depend on them."""
        by_batch, by_head = self._depends()
        return place._replace(batch=place.batch if by_batch else 1, heads=place.heads if by_head else 1)

    def compared(self, place: Place) -> Recorded:
        """Return this pattern if the function computes its graph at a call; else one that calls the function."""
        if self._graph is None or self._fn is None:
            return self
        how = self.function.disagreement(self._fn, self._graph, place)
        return unrecorded(self._fn, how, pairs=self._pairs)._chosen(self._batch, self._head) if how else self

    def relation(self, place: Place) -> Pattern | None:
        """Return the pattern with the pairs of the graph over the positions of a call; None without one."""
        if self._graph is None or self._batch is not None or self._head is not None:
            return None
        try:
            with outside_transforms(*self._tables):
                return traced.of_graph(self._graph, place)
        except (UntraceableError, PatternError):
            # also of more operators than a pattern may have
            return None

    def written(self) -> TextFunction | None:
        """Return the function of a text, with the present values; None for a function that no text describes."""
        if self._graph is None or self._fn is None or self.function.text is None:
            return None
        place = next(filter(self._has_pairs, map(self.at_place, _TRIED)), None)
        if place is None or self.compared(place) is not self:
            return None
        try:
            made = TextFunction(self.function.text, [_alone(x) for x in self._graph.tensors], called(self._fn))
            return made if trace(made).key == self._graph.key else None
        except (PatternError, UntraceableError):
            return None

    def _has_pairs(self, place: Place) -> bool:
        """Return whether the function has a value at each pair; its tables may be too short."""
        b, h, q, k = place.lengths().values()
        try:
            self._at(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q.view(-1, 1), k.view(1, 1, 1, -1))
        except PatternError:
            return False
        return True

    def _recognised(self, place: Place) -> Pattern:
        place = self.at_place(place)
        this = self.compared(place)
        if this._graph is None or place.nq < _FEW:
            return this
        read = this.key()
        key = "recognised mask", read.value, place
        known: tuple[Pattern | None] | None = PATTERNS.get(key)
        if known is None:
            known = (this.relation(place),)
            read.check(this)
            tables = () if known[0] is None else known[0].tables
            PATTERNS.put(key, known, _BYTES + read.nbytes + sum(table.nbytes for table in tables))
        return this if known[0] is None else known[0]

    # ---- the pattern -------------------------------------------------------------------------------------------------

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        # the last query and the last key are positions of every call
        self._place[0] = q_offset + nq - 1, nk - 1

    def _depends(self) -> tuple[bool, bool]:
        if self.function.graph is not None:
            deps = deps_of(self.function.graph.result)
            return bool(deps & B), bool(deps & H)
        return self.tried(*FIRST) or self.tried(*self._place[0]) or (True, True)

    def tried(self, q: int, k: int) -> tuple[bool, bool] | None:
        """Call the function at a pair, and return on which axes it has broadcast; None without such a position."""
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
        try:
            result = self._at(zero.expand(2, 1, 1, 1), zero.expand(1, 2, 1, 1), zero + q, zero + k)
        except PatternError as error:
            # a table may begin at the first query of a call, so a position that is out of bounds is no mistake
            if out_of_bounds(error.__cause__):
                return None
            raise
        shape = (1,) * (4 - result.ndim) + tuple(result.shape)
        return shape[0] > 1, shape[1] > 1

    def select(self, b: int, h: int) -> Recorded:
        by_batch, by_head = self._depends()
        batch = b if by_batch and self._batch is None else self._batch
        head = h if by_head and self._head is None else self._head
        return self._chosen(batch, head)

    def zones(self, n: int | None) -> Node:
        return Opaque(self._evaluate)

    def _evaluate(self, q: Tensor, k: Tensor, element: Tensor) -> Tensor:
        b = torch.full((1, 1, 1, 1), self._batch or 0, device=q.device)
        h = torch.full((1, 1, 1, 1), self._head or 0, device=q.device)
        shape = torch.broadcast_shapes(q.shape, k.shape)
        four = (1,) * (4 - len(shape)) + tuple(shape)
        result = self._at(b, h, *(x.expand((1,) * (4 - x.ndim) + tuple(x.shape)) for x in (q, k)))
        return result.to(q.device).expand(four).reshape(shape)

    def _at(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if not self._computed:
            self._computed.append(self.function.constants(self._tables))
        return self.function.at(self._computed[0], b, h, q, k)


def formulas(pattern: Pattern) -> list[str]:
    """Return the formulas of a call's functions, each once."""
    return list(dict.fromkeys([mask.formula for mask in parts_of(pattern, Recorded)]))


def chosen_text(batch: int | None, head: int | None) -> str:
    """Return the text of a chosen batch element and head."""
    return "".join(f", {name}={value}" for name, value in (("batch", batch), ("head", head)) if value is not None)


def _alone(x: Tensor) -> Tensor:
    """Return a tensor with its values alone, as a pickle should hold it: without autograd and the rest of a storage."""
    if not x.requires_grad and x.untyped_storage().nbytes() <= x.nbytes:
        # itself, so that a pickle of several patterns holds it once
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)


def without_gradients(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Detach tensors: no gradient passes through a mask, and operators would compute one of each that requires it."""
    return tuple([table.detach() if table.requires_grad else table for table in tables])


def numbered(number: int, tables: Sequence[Tensor], batch: int | None, head: int | None) -> Recorded:
    """Return the pattern of the function with a number, and with tensors of an operator."""
    function = _functions.get(number)
    if function is None:
        raise PatternError(
            "TokenMask",
            f"number {number}, of a function that no longer exists",
            "a function of this process",
            "Keep a reference to the pattern until its gradients are computed.",
        )
    # operators get tensors without gradients
    learns = function.learns or (False,) * len(tables)
    given = [x.detach().requires_grad_() if learn else x for x, learn in zip(tables, learns, strict=True)]
    return Recorded(function, tuple(given), batch=batch, head=head)


# ---- what a call keeps for its gradient ------------------------------------------------------------------------------


class Pinned:
    """The functions and bounds that a call's pattern follows, kept to check in the backward pass that none changed.

    Args:
        pattern: The call's pattern.
        tables: Its tensors in this call.
    """

    def __init__(self, pattern: Pattern, tables: Sequence[Tensor]):
        masks = parts_of(pattern, Recorded)
        self._functions = [mask.function for mask in masks]
        followed = [x for mask in masks for x in mask._tables] + list(tables if parts_of(pattern, KeyPadding) else ())
        self._tables = tuple(x for x in followed if not wrapped(x))
        self._read = _contents(self._tables)

    def check(self) -> None:
        """Raise PatternError if a tensor that a function or bounds read was changed after the forward pass."""
        for function in self._functions:
            function.complete = True
        if _contents(self._tables) != self._read:
            if self._functions:
                raise changed("a tensor that was changed")
            raise changed("bounds that were changed", "KeyPadding")


def _contents(tables: tuple[Tensor, ...]) -> Hashable:
    return CacheKey.following("", tables).value
