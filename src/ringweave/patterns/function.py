"""Patterns from functions of index tensors, in FlexAttention's signature.

A function is traced at each call (package ``trace``). Its graph, with the tensors that it reads, is what it computes in
that call, so it does not matter where its values come from. A call computes with the pattern of the pairs if the graph
is recognised (``traced``), and else with :class:`Recorded`, which evaluates the graph.

A function that no graph records is called instead. Its values could change unnoticed, so each call evaluates it
again.

The text of a pattern names a graph by a number, since graphs cannot cross ``torch.library`` operators. A number is
never reused. In compiled code a pattern is named by a number in a tensor instead, its :class:`Ticket`. A new function
is then another input of the same compiled code, and the operator traces the function when it runs, as an eager call
does.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache import PATTERNS
from ..checks import whole
from ..errors import PatternError, in_a_line, shown
from ..relation.node import Node
from ..relation.opaque import Opaque
from ..torch_compat import (
    dispatched,
    outside_transforms,
    transforming,
    uncompiled,
    vmap_enabled,
    wrapped,
)
from ..trace.comparison import agrees, codes
from ..trace.evaluate import Formula, constants_of
from ..trace.graph import B, Graph, H, UntraceableError, deps_of
from ..trace.graph import Node as GraphNode
from ..trace.relation import Place
from ..trace.symbols import trace
from ..trace.vmapped import mapped
from . import traced
from .algebra import PerHead
from .base import Pattern, parts_of
from .cache_key import CacheKey
from .declared import declare
from .key_padding import KeyPadding

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# positions of the first query and the first key, at which a function is tried
_FIRST = 0, 0
#: Exceptions of a function called with index tensors: a wrong arity, an ``if`` on many values, a wrong index.
_RAISED = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, NameError, ArithmeticError, AssertionError)
# estimated size of a graph, and of a pattern without its tables
_BYTES = 4 * 2**10
# Fewer queries than this are evaluated: a step of decoding reads a row, and recognition would compute all of its sides.
_FEW = 16


class MaskFunction:
    """What a mask function computes, with a number.

    Attributes:
        number: Number in the text of patterns.
        name: Name of the function, for messages.
        graph: Its graph without the values of tensors; None if no graph records it.
        why: The reason for that.
    """

    def __init__(
        self, fn: Callable[..., Any], graph: Graph | None, why: str = "", *, pairs: bool = False, vouched: bool = False
    ):
        self.number = next(_numbers)
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.graph, self.why = graph, why
        #: Whether it is called, and was made for one call.
        self.single = graph is None and not vouched
        #: Whether its call has reached the backward pass, in which no new mask may appear.
        self.complete = False
        #: Whether each of its tensors requires a gradient; such a tensor is identified by its contents.
        self.learns: tuple[bool, ...] = ()
        self._formula = None if graph is None else Formula(graph)
        self._fn = fn if graph is None else None
        # whether the function is one of 0-dim tensors
        self._pairs = pairs
        #: Tensors that its caller named, for their ids.
        self.kept: tuple[Tensor, ...] = ()
        # functions that compute this graph, by their code
        self._compared: set[Hashable] = set()
        # digests of masks by the digests of their indices
        self._masks: dict[bytes, bytes] = {}

    def constants(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Return what the graph reads of its tensors, such as their sums."""
        if self._formula is None or self.graph is None:
            return []
        return constants_of(self._formula, self.graph, tables)

    def at(self, constants: Sequence[Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate the mask at indices of four dimensions, which broadcast.

        Raises:
            PatternError: The function fails, does not return bool of its arguments' shape, or has changed between a
                call and its gradient.
        """
        try:
            if self._formula is not None:
                device = next((x.device for x in constants), q.device)
                at = {name: x.to(device) for name, x in zip("bhqk", (b, h, q, k), strict=True)}
                with torch.no_grad(), vmap_enabled():
                    found = self._formula.at(constants, at)
                # a tensor of one element stands for it
                return found.reshape(found.shape[:4])
            assert self._fn is not None
            with vmap_enabled():
                result: Any = (mapped if self._pairs else _called)(self._fn, b, h, q, k)
        except PatternError:
            raise
        except _RAISED as error:
            raise _failed(error) from error
        if isinstance(result, bool):
            result = torch.tensor(result, device=q.device)
        _check_kind(result, result.dtype if isinstance(result, Tensor) else None)
        if wrapped(result):
            raise PatternError(
                "mask_mod",
                "a function that reads a tensor of a transform of torch.func",
                "tensors with values",
                "Call attention for each of them, or pass the masks as a table.",
            )
        indices = torch.broadcast_shapes(*(x.shape for x in (b, h, q, k)))
        sides = zip(reversed(result.shape), reversed(indices), strict=False)
        if result.ndim > 4 or any(side not in (1, most) for side, most in sides):
            raise _misshapen(result.shape, indices)
        if not self.single:
            return result  # type: ignore[no-any-return]
        place, content = _digest(b, h, q, k), _digest(result)
        known = self._masks.get(place) if self.complete else self._masks.setdefault(place, content)
        if known != content:
            raise changed("values that cannot be followed until its gradients are computed")
        return result  # type: ignore[no-any-return]

    def computes(self, fn: Callable[..., Any], graph: Graph, place: Place) -> bool:
        """Return whether a function computes its graph, which is this one; known code is not called again.

        A function that asks for the type of its arguments may compute other pairs for symbols than for tensors.
        """
        known = codes(fn)
        if known in self._compared:
            return True
        if transforming() or dispatched() or 0 in place[:4] or not isinstance(graph.result, GraphNode):
            # tensors may have no values to compare, and there may be no pair; a constant depends on no argument
            return True
        # a function that counts its calls has another graph in each
        with vmap_enabled():
            if not agrees(fn, graph, place.lengths()) and trace(fn).key == graph.key:
                return False
        self._compared.add(known)
        return True


def _called(fn: Callable[..., Any], *indices: Tensor) -> Any:
    return fn(*indices)


_numbers = itertools.count()
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
        return called(fn, str(error), named, pairs=pairs)
    if function is None:
        _check_result(graph.result)
        function = _by_key[key] = MaskFunction(fn, graph.without_values())
        function.learns = tuple([x.requires_grad for x in graph.tensors])
        _functions[function.number] = function
        # kept, so that equal functions have one number, also after the first of them is gone
        PATTERNS.put(key, function, _BYTES)
    return Recorded(function, tuple(graph.tensors), graph, fn, pairs=pairs)


def called(fn: Callable[..., Any], why: str, named: Sequence[Tensor] | None = None, *, pairs: bool = False) -> Recorded:
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


class Recorded(Pattern):
    """A mask function as it computes in one call: its graph, and the tensors that it reads.

    Args:
        function: The function.
        tables: The tensors.
        graph: The graph with the values of its tensors, for recognition.
        fn: The function that was traced.
        pairs: Whether it is one of 0-dim tensors.
        batch: The batch element to evaluate it for; by default every one.
        head: The query head to evaluate it for; by default every one.
        ticket: The ticket that named it in compiled code.
    """

    looks_up = True
    function: MaskFunction
    ticket: Ticket | None
    _tables: tuple[Tensor, ...]
    _graph: Graph | None
    _fn: Callable[..., Any] | None
    _pairs: bool
    _batch: int | None
    _head: int | None
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
        ticket: Ticket | None = None,
    ):
        # a call makes one, so attributes are not set one by one
        self.__dict__.update(
            function=function, _tables=tables, _graph=graph, _fn=fn, _pairs=pairs,
            _batch=batch, _head=head, ticket=ticket,
            # the last query and the last key of a call, at which a function that is called may be tried
            _place=[_FIRST],
            # what the graph reads of the tensors, once it is computed
            _computed=[],
            _spec="", _follows=True, has_function=True,
        )  # fmt: skip

    def _chosen(self, batch: int | None, head: int | None, ticket: Ticket | None = None) -> Recorded:
        """Return the pattern of a batch element, a head, or both."""
        if (batch, head, ticket) == (self._batch, self._head, self.ticket):
            return self
        one = {"batch": batch, "head": head}
        return Recorded(self.function, self._tables, self._graph, self._fn, pairs=self._pairs, ticket=ticket, **one)

    def _text(self) -> str:
        return f"TokenMask({self.function.number}{', _' * len(self._tables)}{_bound(self._batch, self._head)})"

    def __repr__(self) -> str:
        return f"TokenMask({self.function.name}{_bound(self._batch, self._head)})"

    @property
    def said(self) -> str:
        """How a call computes the function, for a report."""
        if self.function.graph is None:
            return f"{self.function.name} is called at each call: {self.function.why}"
        return f"{self.function.name} is evaluated in tiles: its pairs are no pattern, or too many zones"

    def __reduce__(self) -> tuple[Any, ...]:
        raise pickle.PicklingError(f"{self!r} belongs to one call: pickle the pattern that was passed to it")

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return _constants(self._tables)

    def key(self) -> CacheKey:
        return CacheKey.following(self._text(), self._tables)

    def value(self) -> Hashable:
        return self.key().value

    def _owners(self) -> list[object]:
        return [self.function] if self.function.graph is None else []

    def at_place(self, place: Place) -> Place:
        """Return the indices of a call, with one batch element and head where the mask does not depend on them."""
        by_batch, by_head = self._depends()
        return place._replace(batch=place.batch if by_batch else 1, heads=place.heads if by_head else 1)

    def compared(self, place: Place) -> Recorded:
        """Return this pattern if the function computes its graph at a call; else one that calls the function."""
        if self._graph is None or self._fn is None or self.function.computes(self._fn, self._graph, place):
            return self
        why = "it computes other pairs for tensors than for the symbols of a trace"
        return called(self._fn, why, pairs=self._pairs)._chosen(self._batch, self._head)

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
            tables = () if known[0] is None else known[0].tables
            PATTERNS.put(key, known, _BYTES + read.nbytes + sum(table.nbytes for table in tables))
        return this if known[0] is None else known[0]

    # ---- the pattern -------------------------------------------------------------------------------------------------

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        # the last query and the last key are positions of every call
        self._place[0] = q_offset + nq - 1, nk - 1

    def _depends(self) -> tuple[bool, bool]:
        """Return whether the mask depends on the batch element and on the head."""
        if self.function.graph is not None:
            deps = deps_of(self.function.graph.result)
            return bool(deps & B), bool(deps & H)
        return self.tried(*_FIRST) or self.tried(*self._place[0]) or (True, True)

    def tried(self, q: int, k: int) -> tuple[bool, bool] | None:
        """Call the function at a pair, and return on which axes it has broadcast; None without such a position."""
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
        try:
            result = self._at(zero.expand(2, 1, 1, 1), zero.expand(1, 2, 1, 1), zero + q, zero + k)
        except PatternError as error:
            # a table may begin at the first query of a call, so a position that is out of bounds is no mistake
            if _out_of_bounds(error.__cause__):
                return None
            raise
        shape = (1,) * (4 - result.ndim) + tuple(result.shape)
        return shape[0] > 1, shape[1] > 1

    def select(self, b: int, h: int) -> Recorded:
        by_batch, by_head = self._depends()
        batch = b if by_batch and self._batch is None else self._batch
        head = h if by_head and self._head is None else self._head
        return self._chosen(batch, head, self.ticket)

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        return _of_rank(self, heads, rank, ranks)

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


def _bound(batch: int | None, head: int | None) -> str:
    return "".join(f", {name}={value}" for name, value in (("batch", batch), ("head", head)) if value is not None)


def _constants(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # no gradient passes through a mask, and operators would compute one of each tensor that requires it
    return tuple([table.detach() if table.requires_grad else table for table in tables])


def _of_rank(pattern: Recorded | TokenMask, heads: int | None, rank: int, ranks: int) -> Pattern:
    """Return the heads of a rank; see :meth:`Pattern.bound`."""
    if ranks == 1 or pattern._head is not None or not pattern._depends()[1]:
        return pattern
    if heads is None:
        remedy = "Pass heads=, the number of heads of all ranks."
        raise PatternError("heads", None, "a number, for a function that reads the head", remedy)
    count = heads // ranks
    return PerHead([pattern._chosen(pattern._batch, head) for head in range(rank * count, (rank + 1) * count)])


@declare("TokenMask(lambda b, h, q, k: (q // 64 + k // 64) % 3 == 0)", "By table, function or head", text=False)
class TokenMask(Pattern):
    """A function ``fn(b, h, q, k)`` of 0-dim int64 indices, in the signature of FlexAttention's ``mask_mod``.

    The function is traced at each call, so that the call has the values that it reads then, wherever they come from:
    closures, globals, attributes, objects, arrays. A function with the pairs of a pattern is planned like it. The pairs
    of another one are evaluated in every tile that the other operands leave open: write
    ``TokenMask(fn) & SlidingWindow(1024)`` rather than a window inside such a function.

    A function cannot be traced if it needs an index as a number, as ``if`` and ``int()`` do, draws random numbers, or
    writes to a tensor. It is then called on index tensors that broadcast. Its values could change unnoticed, so each
    call evaluates it again, and ``torch.compile`` refuses it, unless ``tables`` names the tensors that it reads.

    Parameters, other tensors that require gradients, and tensors of up to 1 MiB are compared by contents. A write to
    another tensor is noticed if it changes torch's version counter. A write through ``.data`` does not, nor does a
    fused optimizer of a parameter that the function reads through ``detach()``. No gradient passes through a mask.

    Args:
        fn: Function that returns a bool for each pair.
        tables: Tensors that a function reads which cannot be traced; its other values are then assumed to be constant.
        batch: The batch element to call it for; by default every one.
        head: The query head to call it for; by default every one.
    Raises:
        PatternError: The function fails, or does not return bool of one pair; or, at a gradient, it reads tensors that
            were changed after the call.
    Example:
        >>> even = rw.TokenMask(lambda b, h, q, k: k % 2 == 0)
        >>> even.to_dense(2, 3)[0, 0].int()
        tensor([[1, 0, 1],
                [1, 0, 1]], dtype=torch.int32)
    """

    looks_up = True

    @uncompiled("Make patterns of functions outside of code that is compiled with fullgraph=True, and pass them in.")
    def __init__(
        self, fn: MaskMod, *, tables: Sequence[Tensor] | None = None, batch: int | None = None, head: int | None = None
    ):
        if not callable(fn) or isinstance(fn, type):
            raise PatternError("fn", shown(fn), "a function of (b, h, q, k)", "Pass a mask_mod.")
        batch = None if batch is None else whole("batch", batch, 0)
        head = None if head is None else whole("head", head, 0)
        if tables is not None and not (
            isinstance(tables, (list, tuple)) and all(isinstance(table, Tensor) for table in tables)
        ):
            raise PatternError("tables", type(tables).__name__, "a list of tensors", "Pass tables=[...].")
        self._of(fn, None if tables is None else tuple(tables), batch, head)

    @classmethod
    def _of_pairs(cls, fn: MaskMod) -> TokenMask:
        """Make the pattern of a function of 0-dim tensors, which is mapped over the pairs if it cannot be traced."""
        return cls.__new__(cls)._of(fn, None, None, None, pairs=True)

    def _of(
        self, fn: MaskMod, named: tuple[Tensor, ...] | None, batch: int | None, head: int | None, pairs: bool = False
    ) -> TokenMask:
        self.fn, self._named, self._batch, self._head, self._pairs = fn, named, batch, head, pairs
        now = recorded(fn, named, pairs=pairs)
        if now.function.graph is None:
            # a function that is no mask is refused when the pattern is made
            now.tried(*_FIRST)
        # kept, so that its number stays the same
        self._function = now.function
        # its present values, which torch.compile uses, and the name of the pattern in compiled code
        self._tables, self._number = now._tables, _numbered(fn, named, now._tables)
        self.write(now._chosen(batch, head)._text(), follows=True, function=True)
        return self

    def _chosen(self, batch: int | None, head: int | None) -> TokenMask:
        """Return the pattern of a batch element, a head, or both."""
        return TokenMask.__new__(TokenMask)._of(self.fn, self._named, batch, head, self._pairs)

    def _now(self) -> Recorded:
        """Return the function as it computes now."""
        return recorded(self.fn, self._named, pairs=self._pairs)._chosen(self._batch, self._head)

    def _for_call(self) -> Pattern:
        return self if torch.compiler.is_compiling() else self._now()

    def _owners(self) -> list[object]:
        return self._now()._owners()

    @classmethod
    def own(cls, number: int | Tensor, *tables: Tensor, batch: int | None = None, head: int | None = None) -> Recorded:
        """Build the pattern of a numbered function with these tensors.

        A number in a tensor comes from compiled code, and names a :class:`Ticket`.
        """
        if isinstance(number, Tensor):
            number = int(number)
            ticket = _tickets.get(number)
            if ticket is not None:
                return ticket.now(tables)._chosen(batch, head, ticket)
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

    def _text(self) -> str:
        return self._now()._text()

    def __repr__(self) -> str:
        return f"TokenMask({getattr(self.fn, '__name__', type(self.fn).__name__)}{_bound(self._batch, self._head)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # pickled with its function, which the pickler must be able to pickle
        if self._pairs:
            return TokenMask._of_pairs, (self.fn,)
        return functools.partial(TokenMask, tables=self._named, batch=self._batch, head=self._head), (self.fn,)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return self._number, *_constants(self._tables)
        return self._now().tables

    def key(self) -> CacheKey:
        return self._now().key()

    def value(self) -> Hashable:
        return self.key().value

    def stays_equal(self, other: Pattern) -> bool:
        # another function object may read other values later
        return super().stays_equal(other) and isinstance(other, TokenMask) and self.fn is other.fn

    def _depends(self) -> tuple[bool, bool]:
        """Return whether the mask depends on the batch element and on the head."""
        return self._now()._depends()

    def select(self, b: int, h: int) -> Pattern:
        now = self._now()
        found = now.select(b, h)
        return self if found is now else self._chosen(found._batch, found._head)

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        return _of_rank(self, heads, rank, ranks)

    def zones(self, n: int | None) -> Node:
        return self._now().zones(n)


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
            raise (
                changed("a tensor that was changed")
                if self._functions
                else changed("bounds that were changed", "KeyPadding")
            )


def _contents(tables: tuple[Tensor, ...]) -> Hashable:
    return CacheKey.following("", tables).value


def changed(what: str, name: str = "TokenMask") -> PatternError:
    """Return the error of a pattern that reads or contains other values than at its last inspection."""
    return PatternError(
        name,
        f"a function that reads {what}" if name == "TokenMask" else what,
        "the same values as when the call or the compiled code was made",
        "Change it after backward; with torch.compile wrap the function again, or change a tensor in place.",
    )


# ---- compiled code ---------------------------------------------------------------------------------------------------


class Ticket:
    """A pattern of a function as compiled code knows it: by a number in a tensor, which keeps the ticket alive.

    Attributes:
        fn: The function.
        named: Tensors that the caller named.
        tables: Tensors that it read when the pattern was built.
        used: Functions that forward passes of compiled code used; two are enough to refuse every backward pass.
    """

    def __init__(self, fn: MaskMod, named: tuple[Tensor, ...] | None, tables: tuple[Tensor, ...]):
        self.fn, self.named, self.tables = fn, named, tables
        self.used: set[MaskFunction] = set()

    def now(self, tables: Sequence[Tensor]) -> Recorded:
        """Return the function as it computes now; ``tables`` are the tensors that the compiled graph passes.

        Raises:
            PatternError: The function cannot be traced, or the compiled graph has changed the tensors.
        """
        if len(tables) != len(self.tables) or not all(map(_same, self.tables, tables)):
            # a write inside the graph reaches the function's own tensor only after the graph
            raise changed("tensors that compiled code changed before the call")
        now = recorded(self.fn, self.named)
        if now.function.single:
            raise PatternError(
                "mask_mod",
                f"a function that cannot be traced: {now.function.why}",
                "one of operations on its arguments and on tensors",
                "Use tensor operations, such as & and torch.where; or say what it reads with tables=[...].",
            )
        return now


def _numbered(fn: MaskMod, named: tuple[Tensor, ...] | None, tables: tuple[Tensor, ...]) -> Tensor:
    """Return the tensor () on the CPU that names a pattern of a function in compiled code."""
    place = next(_numbers)
    number, ticket = torch.tensor(place, device="cpu"), Ticket(fn, named, tables)
    # a graph that waits for its backward pass holds the tensor
    number._ticket = ticket  # type: ignore[attr-defined]
    _tickets[place] = ticket
    return number


_tickets: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()


def note_use(pattern: Pattern) -> None:
    """Note the functions of a compiled forward pass, for its gradient."""
    for mask in parts_of(pattern, Recorded):
        if mask.ticket is not None and len(mask.ticket.used) < 2:
            mask.ticket.used.add(mask.function)


def check_use(pattern: Pattern) -> None:
    """Raise PatternError if a compiled backward pass might use other values of a function than its forward pass."""
    for mask in parts_of(pattern, Recorded):
        if mask.ticket is not None and mask.ticket.used != {mask.function}:
            raise changed("other values")


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors share memory or have equal values; a compiled graph may pass a copy."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)


# ---- errors ----------------------------------------------------------------------------------------------------------


def _check_result(result: Any) -> None:
    """Raise PatternError unless the result of a graph is a bool of one pair."""
    if isinstance(result, GraphNode):
        _check_kind(result, result.dtype)
        if any(side != 1 for side in result.shape):
            raise _misshapen(result.shape, ())
    elif not isinstance(result, bool):
        _check_kind(result, None)


def _check_kind(result: object, dtype: torch.dtype | None) -> None:
    if dtype != torch.bool:
        kind = type(result)
        got = f"{kind.__module__}.{kind.__qualname__}" if dtype is None else dtype
        raise PatternError(
            "mask_mod", f"a function that returns {got}", "one that returns bool", "Compare in it, as in q >= k."
        )


def _misshapen(shape: Sequence[int], indices: Sequence[int]) -> PatternError:
    return PatternError(
        "mask_mod",
        f"a function that returns shape {tuple(shape)} for indices {tuple(indices)}",
        "a shape that broadcasts to that of its arguments",
        "Compute element by element.",
    )


def _failed(error: Exception) -> PatternError:
    """Return the error of a function that raised another."""
    said = f"a function that raises {in_a_line(error)}"
    wanted = "one of four index tensors (b, h, q, k)"
    remedy = "Use tensor operations, such as & and torch.where, in place of `and` and `if`."
    if _out_of_bounds(error):
        wanted = "tables with an entry for each position of the call"
        remedy = "Queries are at positions from q_offset on, and keys from 0 on: subtract, clamp, or enlarge."
    return PatternError("mask_mod", said, wanted, remedy)


def _out_of_bounds(error: BaseException | None) -> bool:
    """Return whether a function failed because a position is not in its tables."""
    said = str(error).lower()
    return isinstance(error, LookupError) or (isinstance(error, RuntimeError) and "out of " in said)


def _digest(*tensors: Tensor) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for x in tensors:
        digest.update(repr(tuple(x.shape)).encode())
        digest.update(x.detach().cpu().contiguous().numpy().data)
    return digest.digest()


def from_mask_mod(fn: MaskMod, *, tables: Sequence[Tensor] | None = None) -> TokenMask:
    """Make a pattern of a FlexAttention ``mask_mod``; see :class:`TokenMask`.

    Args:
        fn: Function ``fn(b, h, q, k)`` of int64 index tensors that returns bool.
        tables: Tensors that a function reads which cannot be traced.
    Returns:
        A pattern.
    Raises:
        PatternError: The function fails, or does not return bool of one pair.
    Example:
        >>> rw.from_mask_mod(lambda b, h, q, k: q >= k).density(2)
        0.75
    """
    return TokenMask(fn, tables=tables)
