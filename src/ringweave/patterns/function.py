"""Patterns from functions of index tensors, in FlexAttention's signature.

A pattern follows its function. Every call inspects the variables that the function closes over, its defaults, and the
globals that its code names (:class:`Reads`). Numbers, text, tensors, containers and functions of these are compared by
value. Anything else that the function reads could change unnoticed, so every call then evaluates the function again.

A pattern's text names a function by a number. A number identifies a function and the values that it reads, except
tensors. It is never reused, and is valid while a pattern or a pending backward pass holds it.

In compiled code a pattern is named by a number in a tensor instead, its :class:`Ticket`. A new function is then another
input of the same graph, and the operator follows the function's values when it runs, as an eager call does.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..cache import LRUCache
from ..checks import whole
from ..errors import PatternError, in_a_line, shown
from ..relation.node import Node
from ..relation.opaque import Opaque
from ..torch_compat import uncompiled, wrapped
from .algebra import PerHead
from .base import Pattern, parts_of
from .cache_key import CacheKey
from .declared import declare
from .key_padding import KeyPadding

V = TypeVar("V")
# positions of the first query and the first key, at which a function is tried
_FIRST = 0, 0
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: Exceptions of a function called with index tensors: a wrong arity, an ``if`` on many values, a wrong index.
_RAISED = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, NameError, ArithmeticError, AssertionError)

_VALUES = frozenset({type(None), bool, int, str, bytes, range, type(...), torch.Size, torch.dtype, torch.device})
# modules that are taken to be constant, with their functions and classes
_LIBRARIES = frozenset(
    {"torch", "numpy", "math", "cmath", "operator", "builtins", "functools", "itertools", "ringweave"}
)
# names through which code can read variables that it does not name
_BACK_DOORS = frozenset({"globals", "__globals__", "vars", "eval", "exec", "__import__", "open"})
_IMPORT = dis.opmap["IMPORT_NAME"]
_MOST = 10_000


class Reads:
    """The values that a function reads at present.

    Args:
        fn: The function.
        named: Tensors that the caller names; the caller thereby asserts that other untracked values do not change.
    Attributes:
        state: All values except tensors; equal states compute equal results from equal tensors.
        tables: The tensors, each once; empty if ``unseen`` is set.
        kept: Objects that the state contains by ``id``; the owner of the state must keep them alive.
        unseen: Description of a value that could change unnoticed; None if there is none.
    """

    def __init__(self, fn: Callable[..., object], named: Sequence[Tensor] | None = None):
        self.tables: list[Tensor] = []
        self.kept: list[object] = list(named or ())
        self.unseen: str | None = None
        self._known: dict[int, int] = {}
        for table in named or ():
            self.value(table, "a table")
        try:
            state = self.value(fn, "itself")
        except RecursionError:
            state = self.opaque(fn, "values that are nested too deeply")
        self.state: Hashable = named is None, tuple(map(id, named or ())), state
        if named is not None:
            self.unseen = None
        elif self.unseen:
            self.tables.clear()

    def value(self, x: Any, name: str) -> Hashable:
        kind = type(x)
        if kind in _VALUES:
            return kind, x
        if kind in (float, complex):
            return kind, repr(x)
        if issubclass(kind, np.generic) and x.dtype.kind in "biufc":
            return kind, x.tobytes()
        if id(x) in self._known:
            return "again", self._known[id(x)]
        self._known[id(x)] = len(self._known)
        if len(self._known) > _MOST:
            return self.opaque(x, f"more than {_MOST} values, {name}")
        if kind in (Tensor, torch.nn.Parameter) and _has_version(x):
            self.tables.append(x)
            return Tensor
        if kind in (tuple, list):
            return kind, *(self.value(each, name) for each in list(x))
        if kind in (set, frozenset):
            return kind, frozenset(self.value(each, name) for each in list(x))
        if kind is dict:
            # copied to a list, since another thread may add to the dict
            return kind, *((self.value(key, name), self.value(each, name)) for key, each in list(x.items()))
        if kind is functools.partial:
            return kind, *(self.value(part, name) for part in (x.func, x.args, x.keywords, vars(x)))
        if kind is types.FunctionType:
            return self.function(x)
        if kind is types.MethodType:
            # each access makes a new method object, so its parts are compared
            return kind, self.value(x.__func__, name), self.opaque(x.__self__, name)
        if _of_library(x):
            self.kept.append(x)
            return "same", id(x)
        return self.opaque(x, name)

    def opaque(self, x: object, name: str) -> Hashable:
        self.unseen = self.unseen or f"{name}, a {type(x).__qualname__}"
        self.kept.append(x)
        return "same", id(x)

    def function(self, fn: types.FunctionType) -> Hashable:
        code, of = fn.__code__, f"of {fn.__qualname__}"
        self.kept += [fn, code]
        inside = [self.value(x, f"a default {of}") for x in (fn.__defaults__, fn.__kwdefaults__)]
        inside.append(self.value(vars(fn), f"an attribute {of}"))
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                inside.append(self.value(cell.cell_contents, f"the variable {name} {of}"))
            except ValueError:
                inside.append("nothing yet")
        if not _constant(fn.__globals__.get("__name__")):
            for each in _nested(code):
                for name in each.co_names:
                    if name in fn.__globals__:
                        inside.append((name, self.value(fn.__globals__[name], f"the global {name} {of}")))
                    elif name in _BACK_DOORS:
                        inside.append(self.opaque(fn, f"the variables behind {name} {of}"))
                if _IMPORT in each.co_code[::2]:
                    names = [step.argval for step in dis.get_instructions(each) if step.opcode == _IMPORT]
                    inside += [self.opaque(fn, f"the module {name} {of}") for name in names if not _constant(name)]
        return "function", id(fn), id(code), tuple(inside)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _has_version(x: Tensor) -> bool:
    """Return whether each write to a tensor can be noticed, by its version or its contents."""
    counted = not x.is_inference() or x.device.type == "cpu"
    return counted and x.layout == torch.strided and not vars(x) and not wrapped(x)


def _of_library(x: Any) -> bool:
    # decided by type: reading attributes of an object could run code
    kind = type(x)
    if issubclass(kind, types.ModuleType):
        return _constant(x.__name__)
    if kind is types.BuiltinFunctionType:
        # a bound method reads its object, so only functions of modules are constant
        return type(x.__self__) in (types.NoneType, types.ModuleType) and _constant(x.__module__)
    return issubclass(kind, type) and _constant(x.__module__)


def _constant(name: object) -> bool:
    return str(name).partition(".")[0].removeprefix("_") in _LIBRARIES


def _refused(what: str) -> PatternError:
    return PatternError(
        "mask_mod",
        f"a function that reads {what}, which could change unnoticed",
        "numbers, strings, tensors, and functions of such",
        "Read a number or a tensor instead, pass it as a default argument, or say what it reads with tables=[...].",
    )


class Holder:
    """A function with a number, and the values that it read when it got the number.

    A function with untracked values gets another holder, with another number, for each call.

    Attributes:
        number: Number of the function in text.
        fn: The function.
        named: Tensors that the caller named.
        reads: The values that it read; None for the holder of a single call.
    """

    def __init__(self, fn: MaskMod, named: tuple[Tensor, ...] | None, reads: Reads | None):
        self.number = next(_numbers)
        self.fn, self.named, self.reads = fn, named, reads
        #: As in ``reads``; None for the holder of a single call.
        self.unseen = None if reads is None else reads.unseen
        #: Caches of plans and programs of its patterns, which are dropped with it.
        self.stores: weakref.WeakKeyDictionary[LRUCache[Any], LRUCache[Any]] = weakref.WeakKeyDictionary()
        #: Positions (query, key) of a call, at which the function may be tried.
        self.place = _FIRST
        #: Whether a single call has reached its backward pass, in which no new mask may appear.
        self.complete = False
        # digests of masks by the digests of their indices
        self._masks: dict[bytes, bytes] = {}

    def now(self) -> tuple[Holder, tuple[Tensor, ...]]:
        """Return the holder of the function's present values, and the tensors that it reads."""
        if self.reads is None:
            return self, ()
        reads = Reads(self.fn, self.named)
        same = reads.state == self.reads.state
        return self if same else _holder_of(self.fn, self.named, reads), tuple(reads.tables)

    def tables(self) -> tuple[Tensor, ...]:
        """Return the tensors that the function reads.

        Raises:
            PatternError: The function reads other values than when it got its number.
        """
        now, tables = self.now()
        if now is not self:
            raise changed("other values")
        return tables

    def check(self, indices: Sequence[Tensor], mask: Tensor) -> None:
        """Raise PatternError if a mask of a single call differs from an earlier mask of the same indices."""
        if self.reads is None:
            place, content = _digest(*indices), _digest(mask)
            known = self._masks.get(place) if self.complete else self._masks.setdefault(place, content)
            if known != content:
                raise changed("values that cannot be followed until its gradients are computed")


def _digest(*tensors: Tensor) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for x in tensors:
        digest.update(repr(tuple(x.shape)).encode())
        digest.update(x.detach().cpu().contiguous().numpy().data)
    return digest.digest()


class Ticket:
    """A pattern of a function as compiled code knows it: by a number in a tensor, which keeps the ticket alive.

    Attributes:
        holder: The function when the pattern was built.
        tables: Tensors that it read then.
        used: Holders that forward passes of compiled code used; two are enough to refuse every backward pass.
    """

    def __init__(self, holder: Holder, tables: tuple[Tensor, ...]):
        self.holder, self.tables = holder, tables
        self.used: set[Holder] = set()

    def now(self, tables: Sequence[Tensor]) -> tuple[Holder, tuple[Tensor, ...]]:
        """Return the holder and the tensors of the present values; ``tables`` are those that the graph passes.

        Raises:
            PatternError: The function reads untracked values, or the graph has changed the tensors.
        """
        if len(tables) != len(self.tables) or not all(map(_same, self.tables, tables)):
            # a write inside the graph reaches the function's own tensor only after the graph
            raise changed("tensors that compiled code changed before the call")
        holder, live = self.holder.now()
        if holder.unseen:
            raise _refused(holder.unseen)
        return holder, live


def _numbered(holder: Holder, tables: tuple[Tensor, ...]) -> Tensor:
    """Return the tensor () on the CPU that names a pattern of a function in compiled code."""
    place = next(_numbers)
    number, ticket = torch.tensor(place, device="cpu"), Ticket(holder, tables)
    # a graph that waits for its backward pass holds the tensor
    number._ticket = ticket  # type: ignore[attr-defined]
    _tickets[place] = ticket
    return number


def note_use(pattern: Pattern) -> None:
    """Note the functions of a compiled forward pass, for its gradient."""
    for mask in functions_in(pattern):
        if mask._ticket is not None and len(mask._ticket.used) < 2:
            mask._ticket.used.add(mask._holder)


def check_use(pattern: Pattern) -> None:
    """Raise PatternError if a compiled backward pass might use other values of a function than its forward pass."""
    for mask in functions_in(pattern):
        if mask._ticket is not None and mask._ticket.used != {mask._holder}:
            raise changed("other values")


def functions_in(pattern: Pattern) -> list[TokenMask]:
    """Return the functions inside a pattern."""
    return parts_of(pattern, TokenMask) if pattern.has_function else []


_numbers = itertools.count()
_tickets: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()
_holders: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
_by_state: weakref.WeakValueDictionary[Hashable, Holder] = weakref.WeakValueDictionary()


def _holder_of(fn: MaskMod, named: tuple[Tensor, ...] | None, reads: Reads) -> Holder:
    # two threads may make two holders at the same time; equal patterns are then planned twice
    holder = _by_state.get(reads.state)
    if holder is None:
        holder = Holder(fn, named, reads)
        _holders[holder.number] = _by_state[reads.state] = holder
    return holder


class Pinned:
    """The functions and bounds that a call's pattern follows, kept to check in the backward pass that none changed.

    Args:
        pattern: The call's pattern.
        tables: Its tensors in this call.
    """

    def __init__(self, pattern: Pattern, tables: Sequence[Tensor]):
        self._held = [(holder, _contents(holder.tables())) for holder in pattern._holders()]
        bounds = parts_of(pattern, KeyPadding)
        self._tables = tuple(x for x in tables if not wrapped(x)) if bounds else ()
        self._read = _contents(self._tables)

    def check(self) -> None:
        """Raise PatternError if a function reads other values than in the forward pass, or bounds were changed."""
        for holder, read in self._held:
            holder.complete = True
            if _contents(holder.tables()) != read:
                raise changed("a tensor that was changed")
        if _contents(self._tables) != self._read:
            raise changed("bounds that were changed", "KeyPadding")


def _contents(tables: tuple[Tensor, ...]) -> Hashable:
    return CacheKey.following("", tables).value


@declare("TokenMask(lambda b, h, q, k: (q // 64 + k // 64) % 3 == 0)", "By table, function or head", text=False)
class TokenMask(Pattern):
    """A function ``fn(b, h, q, k)`` of int64 index tensors, in the signature of FlexAttention's ``mask_mod``.

    The function is called on broadcast index tensors. It is opaque, so planning evaluates every tile that the other
    operands leave open: write ``TokenMask(fn) & SlidingWindow(1024)`` rather than a window inside ``fn``.

    The pattern follows the values that the function reads as closure variables, globals and defaults: numbers, tensors,
    and containers and functions of these. If one has changed, the next call uses the new mask. If the function reads
    anything else (an object, an attribute of a module, a numpy array), every call evaluates it again, which is slow,
    and ``torch.compile`` refuses it, unless ``tables`` names the tensors that it reads. Parameters, other tensors that
    require gradients, and tensors of up to 1 MiB are compared by contents. A write to another tensor is noticed if it
    changes torch's version counter. A write through ``.data`` does not, nor does a fused optimizer of a parameter that
    the function reads through ``detach()``. A function must return equal masks for equal arguments, so it must not draw
    random numbers. No gradient passes through a mask.

    Args:
        fn: Function that returns a bool tensor broadcastable to its arguments. Build it once: each new function is a
            new pattern.
        tables: Tensors that the function reads and the pattern cannot find; other values that it cannot find are then
            assumed to be constant. Tensors that it finds are followed too.
        batch: The batch element to call it for; by default every one.
        head: The query head to call it for; by default every one.
    Raises:
        PatternError: The function fails, does not return bool of its arguments' shape, changes values that it reads, or
            reads a value that was changed between a call and its gradient.
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
        named = None if tables is None else tuple(tables)
        reads = Reads(fn, named)
        holder, read = _holder_of(fn, named, reads), tuple(reads.tables)
        self._of(holder, read, batch, head, _numbered(holder, read))
        self._probe(*_FIRST)
        if holder.now()[0] is not holder:
            raise PatternError(
                "mask_mod",
                "a function that reads values that it changes itself",
                "a function that changes nothing",
                "Remove the counter or cache; or make it an attribute of an object, and name the tensors that the "
                "function reads with tables=[...].",
            )

    def _of(
        self,
        holder: Holder,
        tables: tuple[Tensor, ...],
        batch: int | None,
        head: int | None,
        number: Tensor | None = None,
        ticket: Ticket | None = None,
    ) -> TokenMask:
        # the name of a pattern in compiled code, and the ticket of a pattern that was rebuilt from such a name
        self._number, self._ticket = number, ticket
        self.fn, self._named, self._batch, self._head = holder.fn, holder.named, batch, head
        # the holder when the pattern was built, which torch.compile uses, and the holder at the last inspection
        self._holder = self._seen = holder
        self._tables = tables
        self.write(self._text(), follows=True, function=True)
        return self

    def _present(self) -> tuple[Holder, tuple[Tensor, ...]]:
        """Inspect the function; return the holder of its present values, and its tensors."""
        if torch.compiler.is_compiling():
            return self._holder, self._tables
        seen, tables = self._seen.now()
        if seen is not self._seen:
            object.__setattr__(self, "_seen", seen)
        return seen, tables

    def _holders(self) -> list[Holder]:
        return [self._present()[0]]

    def _for_call(self) -> Pattern:
        if torch.compiler.is_compiling():
            return self
        holder = self._present()[0]
        if not holder.unseen:
            return self
        single = Holder(self.fn, self._named, None)
        _holders[single.number] = single
        return TokenMask.__new__(TokenMask)._of(single, (), self._batch, self._head)

    def _chosen(self, batch: int | None, head: int | None) -> TokenMask:
        now = self._present()
        return TokenMask.__new__(TokenMask)._of(*now, batch, head, _numbered(*now))

    @classmethod
    def own(cls, number: int | Tensor, *tables: Tensor, batch: int | None = None, head: int | None = None) -> TokenMask:
        """Build the pattern of a numbered function, which must read exactly these tensors at present.

        A number in a tensor comes from compiled code, and names a :class:`Ticket`.
        """
        if isinstance(number, Tensor):
            number = int(number)
            ticket = _tickets.get(number)
            if ticket is not None:
                return cls.__new__(cls)._of(*ticket.now(tables), batch, head, ticket=ticket)
        holder = _holders.get(number)
        if holder is None:
            raise PatternError(
                "TokenMask",
                f"number {number}, of a function that no longer exists",
                "a function of this process",
                "Keep a reference to the pattern until its gradients are computed.",
            )
        if holder.unseen:
            # a call has a number of its own, so this number comes from a compiled graph
            raise _refused(holder.unseen)
        live = holder.tables()
        if len(live) != len(tables) or not all(map(_same, live, tables)):
            raise changed("other tensors")
        return cls.__new__(cls)._of(holder, live, batch, head)

    def _text(self) -> str:
        return self._spelled(*self._present())

    def _spelled(self, holder: Holder, tables: tuple[Tensor, ...]) -> str:
        return f"TokenMask({holder.number}{', _' * len(tables)}{self._bound()})"

    def _bound(self) -> str:
        chosen = (("batch", self._batch), ("head", self._head))
        return "".join(f", {name}={value}" for name, value in chosen if value is not None)

    def __repr__(self) -> str:
        return f"TokenMask({getattr(self.fn, '__name__', type(self.fn).__name__)}{self._bound()})"

    def __reduce__(self) -> tuple[Any, ...]:
        # pickled with its function, which the pickler must be able to pickle
        return functools.partial(TokenMask, tables=self._named, batch=self._batch, head=self._head), (self.fn,)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        if self._number is not None and torch.compiler.is_compiling():
            return self._number, *_constants(self._tables)
        return _constants(self._present()[1])

    def key(self) -> CacheKey:
        holder, tables = self._present()
        if holder.unseen:
            return CacheKey(object())  # equal to no other key
        return CacheKey.following(self._spelled(holder, tables), tables)

    def value(self) -> Hashable:
        return self.key().value

    def stays_equal(self, other: Pattern) -> bool:
        # another function object may read other values later
        return super().stays_equal(other) and isinstance(other, TokenMask) and self.fn is other.fn

    def _probe(self, q: int, k: int) -> tuple[bool, bool] | None:
        """Return whether the mask depends on the batch element and on the head; None if it has no such position.

        If the function uses an index, its result is broadcast along the axis of that index.
        """
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
        try:
            result = self._call(zero.expand(2, 1, 1, 1), zero.expand(1, 2, 1, 1), zero + q, zero + k)
        except PatternError as error:
            # a table may begin at the first query of a call, so a position that is out of bounds is no mistake
            if _out_of_bounds(error.__cause__):
                return None
            raise
        shape = (1,) * (4 - result.ndim) + tuple(result.shape)
        return shape[0] > 1, shape[1] > 1

    def _depends(self) -> tuple[bool, bool]:
        return self._probe(*_FIRST) or self._probe(*self._holder.place) or (True, True)

    def check(self, nq: int, nk: int, q_offset: int) -> None:
        # the last query and the last key are positions of every call
        self._holder.place = q_offset + nq - 1, nk - 1

    def _call(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            result = self.fn(b, h, q, k)
        except PatternError:
            raise
        except _RAISED as error:
            said = f"a function that raises {in_a_line(error)}"
            wanted = "one of four index tensors (b, h, q, k)"
            remedy = "Use tensor operations, such as & and torch.where, in place of `and` and `if`."
            if _out_of_bounds(error):
                wanted = "tables with an entry for each position of the call"
                remedy = "Queries are at positions from q_offset on, and keys from 0 on: subtract, clamp, or enlarge."
            raise PatternError("mask_mod", said, wanted, remedy) from error
        if isinstance(result, bool):
            result = torch.tensor(result, device=q.device)
        if not isinstance(result, Tensor) or result.dtype != torch.bool:
            kind = type(result)
            got = result.dtype if isinstance(result, Tensor) else f"{kind.__module__}.{kind.__qualname__}"
            raise PatternError(
                "mask_mod", f"a function that returns {got}", "one that returns bool", "Compare in it, as in q >= k."
            )
        indices = torch.broadcast_shapes(*(x.shape for x in (b, h, q, k)))
        sides = zip(reversed(result.shape), reversed(indices), strict=False)
        if result.ndim > 4 or any(side not in (1, most) for side, most in sides):
            raise PatternError(
                "mask_mod",
                f"a function that returns shape {tuple(result.shape)} for indices {tuple(indices)}",
                "a shape that broadcasts to that of its arguments",
                "Compute element by element.",
            )
        self._holder.check((b, h, q, k), result)
        return result

    def select(self, b: int, h: int) -> Pattern:
        by_batch, by_head = self._depends()
        batch = b if by_batch and self._batch is None else self._batch
        head = h if by_head and self._head is None else self._head
        if (batch, head) == (self._batch, self._head):
            return self
        return self._chosen(batch, head)

    def bound(self, heads: int | None, kv_heads: int | None = None, rank: int = 0, ranks: int = 1) -> Pattern:
        if ranks == 1 or self._head is not None or not self._depends()[1]:
            return self
        if heads is None:
            remedy = "Pass heads=, the number of heads of all ranks."
            raise PatternError("heads", None, "a number, for a function that reads the head", remedy)
        count = heads // ranks
        return PerHead([self._chosen(self._batch, head) for head in range(rank * count, (rank + 1) * count)])

    def zones(self, n: int | None) -> Node:
        return Opaque(self._evaluate)

    def _evaluate(self, q: Tensor, k: Tensor, element: Tensor) -> Tensor:
        b = torch.full((1, 1, 1, 1), self._batch or 0, device=q.device)
        h = torch.full((1, 1, 1, 1), self._head or 0, device=q.device)
        shape = torch.broadcast_shapes(q.shape, k.shape)
        four = (1,) * (4 - len(shape)) + tuple(shape)
        result = self._call(b, h, *(x.expand((1,) * (4 - x.ndim) + tuple(x.shape)) for x in (q, k)))
        return result.to(q.device).expand(four).reshape(shape)


def _constants(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # no gradient passes through a mask, and operators would compute one of each tensor that requires it
    return tuple([table.detach() if table.requires_grad else table for table in tables])


def _out_of_bounds(error: BaseException | None) -> bool:
    """Return whether a function failed because a position is not in its tables."""
    said = str(error).lower()
    return isinstance(error, LookupError) or (isinstance(error, RuntimeError) and "out of " in said)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors share memory or have equal values; a compiled graph may pass a copy."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)


def changed(what: str, name: str = "TokenMask") -> PatternError:
    """Return the error of a pattern that reads or contains other values than at its last inspection."""
    return PatternError(
        name,
        f"a function that reads {what}" if name == "TokenMask" else what,
        "the same values as when the call or the compiled code was made",
        "Change it after backward; with torch.compile wrap the function again, or change a tensor in place.",
    )


def from_mask_mod(fn: MaskMod, *, tables: Sequence[Tensor] | None = None) -> TokenMask:
    """Make a pattern of a FlexAttention ``mask_mod``; see :class:`TokenMask`.

    Args:
        fn: Function ``fn(b, h, q, k)`` of int64 index tensors that returns bool.
        tables: Tensors that the function reads and the pattern cannot find.
    Returns:
        A pattern.
    Raises:
        PatternError: The function fails, does not return bool, or changes values that it reads.
    Example:
        >>> rw.from_mask_mod(lambda b, h, q, k: q >= k).density(2)
        0.75
    """
    return TokenMask(fn, tables=tables)
