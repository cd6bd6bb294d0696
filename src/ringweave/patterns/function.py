"""Patterns from functions of index tensors, in FlexAttention's signature.

A pattern follows its function: what that reads is looked at in every call, and a changed number or tensor is another
mask. Text can name a function only by number. A number stands for a function and the values that it reads, tensors
apart; it is never given again, and lasts as long as a pattern, or a backward pass to come, holds on to it.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import PatternError, in_a_line, message
from ..recent import Recent
from ..torch_compat import wrapped
from .base import Pattern
from .key import Key, address_key
from .numbers import whole
from .per_head import PerHead
from .reads import Reads, content_key, read
from .tiles import Int64, Ranges, Tiles, mix

V = TypeVar("V")
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# of values with one function
_KEPT = 16
#: What a function may raise that is called with index tensors: a wrong arity, an ``if`` on many values, a wrong index.
_RAISED = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, NameError, ArithmeticError, AssertionError)


class Holder:
    """A function with the values that it read when its number was given.

    Attributes:
        number: Stands for it in text.
        fn: The function.
        named: Tensors that the caller named.
        state: The values.
    """

    def __init__(self, fn: MaskMod, named: tuple[Tensor, ...] | None, reads: Reads):
        self.number = next(_numbers)
        self.fn, self.named, self.state = fn, named, reads.state
        # whose addresses are in the state
        self._kept = reads.kept
        #: what refers to its patterns goes with it
        self.stores: weakref.WeakKeyDictionary[Recent[Any], Recent[Any]] = weakref.WeakKeyDictionary()

    def tables(self) -> tuple[Tensor, ...]:
        """Read the tensors that the function reads.

        Raises:
            PatternError: It reads other values now than those that the number stands for.
        """
        reads = read(self.fn, self.named)
        if reads.state != self.state:
            raise changed("other values")
        return reads.tables

    def key(self) -> Hashable:
        """Identify what its tensors are now."""
        return table_keys(self.tables())


_numbers = itertools.count()
_holders: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
_by_state: weakref.WeakValueDictionary[Hashable, Holder] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    # another thread may hold it
    os.register_at_fork(after_in_child=_renew_lock)


def _holder_of(fn: MaskMod, named: tuple[Tensor, ...] | None, reads: Reads) -> Holder:
    with _lock:
        holder = _by_state.get(reads.state)
        if holder is None:
            holder = Holder(fn, named, reads)
            _holders[holder.number] = _by_state[reads.state] = holder
        return holder


def holders(spec: str) -> list[Holder]:
    """List the functions that a text names, as far as they live."""
    if "TokenMask(" not in spec:
        return []
    known = (_holders.get(int(number)) for number in re.findall(r"TokenMask\((\d+)", spec))
    return [holder for holder in known if holder is not None]


def store_of(spec: str, common: Recent[V]) -> Recent[V]:
    """Choose where to keep what refers to a pattern: with its function, where it has one, else in common."""
    held = holders(spec)
    return held[0].stores.setdefault(common, Recent(common.max_bytes, _KEPT)) if held else common


def table_keys(tables: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """Identify tensors that others may write to, while they live."""
    return tuple(content_key(table) or address_key(table) for table in tables)


class Held:
    """What a call's pattern follows, held until its backward pass, which must find it as it was.

    Args:
        spec: The call's pattern.
        tables: Its tensors.
    """

    def __init__(self, spec: str, tables: Sequence[Tensor]):
        self._held = [(holder, holder.key()) for holder in holders(spec)]
        # one that a transform stands in for has no contents, and nobody else's hands on it
        self._tables = tuple(x for x in tables if not wrapped(x)) if "Keys(" in spec else ()
        self._read = table_keys(self._tables)

    def check(self) -> None:
        """Raise PatternError where something holds something else than it did."""
        for holder, key in self._held:
            if holder.key() != key:
                raise changed("a tensor that was changed")
        if table_keys(self._tables) != self._read:
            raise changed("bounds that were changed", "Keys")


def held(spec: str, tables: Sequence[Tensor], q: Tensor) -> Held | None:
    """Hold what a call's pattern follows; None where it follows nothing, or is being traced."""
    follows = "TokenMask(" in spec or "Keys(" in spec
    return Held(spec, tables) if follows and type(q) in (Tensor, torch.nn.Parameter) else None


class TokenMask(Pattern):
    """Any function ``fn(b, h, q, k)`` of int64 index tensors, in the signature of FlexAttention's ``mask_mod``.

    The function is called on broadcast index tensors. It is opaque, so planning evaluates every tile that the rest of
    the expression leaves open: write ``TokenMask(fn) & SlidingWindow(1024)`` rather than a window inside ``fn``.

    The pattern follows what the function reads: numbers, tensors, and functions of such, as variables around it,
    globals, attributes of modules, defaults. Where one has changed, the next call uses the new mask. What could change
    unseen (an array of numpy, an object that a library made) is refused, unless ``tables`` says what is read. A write
    to a tensor of more than 1 MiB counts once torch knows of it: not through ``.data``. A function must give the same
    for the same: no random numbers.

    Args:
        fn: Returns a bool tensor that broadcasts over its arguments. Build it once: each new function is a new pattern.
        tables: Tensors that it reads, where they cannot be found by themselves; what else it reads is then taken to
            stay as it is. Those that can be found count too.
        batch: The batch element to call it for; every one by default.
        head: The query head to call it for; every one by default.
    Raises:
        PatternError: The function fails, returns something else than bool of its arguments' shape, reads what could
            change unseen, or, between a call and its gradient, what was changed.
    Example:
        >>> even = rw.TokenMask(lambda b, h, q, k: k % 2 == 0)
        >>> even.to_dense(2, 3)[0, 0].int()
        tensor([[1, 0, 1],
                [1, 0, 1]], dtype=torch.int32)
    """

    def __init__(
        self, fn: MaskMod, *, tables: Sequence[Tensor] | None = None, batch: int | None = None, head: int | None = None
    ):
        if not callable(fn) or isinstance(fn, type):
            raise PatternError(message("fn", type(fn).__name__, "a function of (b, h, q, k)", "Pass a mask_mod."))
        batch = None if batch is None else whole("batch", batch, 0)
        head = None if head is None else whole("head", head, 0)
        if tables is not None and not (
            isinstance(tables, (list, tuple)) and all(isinstance(table, Tensor) for table in tables)
        ):
            raise PatternError(message("tables", type(tables).__name__, "a list of tensors", "Pass tables=[...]."))
        named = None if tables is None else tuple(tables)
        reads = read(fn, named)
        self._of(_holder_of(fn, named, reads), reads.tables, batch, head)
        self._depends()

    def _of(self, holder: Holder, tables: tuple[Tensor, ...], batch: int | None, head: int | None) -> None:
        self.fn, self._named, self._batch, self._head = holder.fn, holder.named, batch, head
        # as it was made, which is what torch.compile sees; and as it was last seen
        self._holder = self._seen = holder
        self._tables = tables
        self.__post_init__()

    @classmethod
    def numbered(cls, number: int, *tables: Tensor, batch: int | None = None, head: int | None = None) -> TokenMask:
        """Make the pattern of a function that has a number, which reads just these tensors now."""
        holder = _holders.get(number)
        if holder is None:
            raise PatternError(
                message(
                    "TokenMask",
                    f"number {number}, of a function that is gone",
                    "one that lives in this process",
                    "Keep the pattern as long as its results need gradients.",
                )
            )
        live = holder.tables()
        if len(live) != len(tables) or not all(map(_same, live, tables)):
            raise changed("other tensors")
        pattern = cls.__new__(cls)
        pattern._of(holder, live, batch, head)
        return pattern

    def _text(self) -> str:
        reads = read(self.fn, self._named)
        holder = self._seen
        if reads.state != holder.state:
            holder = _holder_of(self.fn, self._named, reads)
            object.__setattr__(self, "_seen", holder)
        return f"TokenMask({holder.number}{', _' * len(reads.tables)}{self._bound()})"

    def _bound(self) -> str:
        chosen = (("batch", self._batch), ("head", self._head))
        return "".join(f", {name}={value}" for name, value in chosen if value is not None)

    def __repr__(self) -> str:
        return f"TokenMask({getattr(self.fn, '__name__', type(self.fn).__name__)}{self._bound()})"

    def __reduce__(self) -> tuple[Any, ...]:
        # with its function, by whatever means the pickler has
        return _make, (self.fn, self._named, self._batch, self._head)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return self._tables if torch.compiler.is_compiling() else read(self.fn, self._named).tables

    def key(self) -> Key:
        tables = self.tables
        keys = [content_key(table) for table in tables]
        large = tuple(table for table, key in zip(tables, keys, strict=True) if key is None)
        return Key((self.spec, *keys, *map(address_key, large)), large, tuple(map(address_key, tables)))

    def value(self) -> Hashable:
        return self.key().value

    def _depends(self) -> tuple[bool, bool]:
        # an index that the function uses shows in the shape of its result
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
        result = self._call(zero.expand(2, 1, 1, 1), zero.expand(1, 2, 1, 1), zero, zero)
        shape = (1,) * (4 - result.ndim) + tuple(result.shape)
        return shape[0] > 1, shape[1] > 1

    def _call(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            result = self.fn(b, h, q, k)
        except PatternError:
            raise
        except _RAISED as error:
            said = f"a function that raises {in_a_line(error)}"
            wanted = "one of four index tensors (b, h, q, k)"
            remedy = "Use tensor operations, such as & and torch.where, in place of `and` and `if`."
            raise PatternError(message("mask_mod", said, wanted, remedy)) from error
        if isinstance(result, bool):
            result = torch.tensor(result, device=q.device)
        if not isinstance(result, Tensor) or result.dtype != torch.bool:
            kind = type(result)
            got = result.dtype if isinstance(result, Tensor) else f"{kind.__module__}.{kind.__qualname__}"
            raise PatternError(
                message(
                    "mask_mod",
                    f"a function that returns {got}",
                    "one that returns bool",
                    "Compare in it, as in q >= k.",
                )
            )
        indices = torch.broadcast_shapes(*(x.shape for x in (b, h, q, k)))
        sides = zip(reversed(result.shape), reversed(indices), strict=False)
        if result.ndim > 4 or any(side not in (1, most) for side, most in sides):
            raise PatternError(
                message(
                    "mask_mod",
                    f"a function that returns shape {tuple(result.shape)} for indices {tuple(indices)}",
                    "a shape that broadcasts to that of its arguments",
                    "Compute element by element.",
                )
            )
        return result

    def select(self, b: int, h: int) -> Pattern:
        by_batch, by_head = self._depends()
        batch = b if by_batch and self._batch is None else self._batch
        head = h if by_head and self._head is None else self._head
        if (batch, head) == (self._batch, self._head):
            return self
        reads = read(self.fn, self._named)
        chosen = TokenMask.__new__(TokenMask)
        chosen._of(_holder_of(self.fn, self._named, reads), reads.tables, batch, head)
        return chosen

    def _shard(self, rank: int, ranks: int, heads: int | None) -> Pattern:
        if ranks == 1 or self._head is not None or not self._depends()[1]:
            return self
        if heads is None:
            remedy = "Pass heads=, those of all ranks."
            raise PatternError(message("heads", None, "a number, for a function that reads the head", remedy))
        reads, count = read(self.fn, self._named), heads // ranks
        holder, chosen = _holder_of(self.fn, self._named, reads), list[Pattern]()
        for head in range(rank * count, (rank + 1) * count):
            one = TokenMask.__new__(TokenMask)
            one._of(holder, reads.tables, self._batch, head)
            chosen.append(one)
        return PerHead(chosen)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        b = torch.full((1, 1, 1, 1), self._batch or 0, device=q.device)
        h = torch.full((1, 1, 1, 1), self._head or 0, device=q.device)
        shape = torch.broadcast_shapes(q.shape, k.shape)
        four = (1,) * (4 - len(shape)) + tuple(shape)
        result = self._call(b, h, *(x.expand((1,) * (4 - x.ndim) + tuple(x.shape)) for x in (q, k)))
        return result.to(q.device).expand(four).reshape(shape)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((0, nk), rows=len(q_lo))

    def tile_keys(self, tiles: Tiles) -> Int64:
        return mix(tiles.q_lo, tiles.k_lo)


def _make(fn: MaskMod, named: tuple[Tensor, ...] | None, batch: int | None, head: int | None) -> TokenMask:
    return TokenMask(fn, tables=named, batch=batch, head=head)


def _same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are one, or of one value: a compiled graph may pass a copy."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)


def changed(what: str, name: str = "TokenMask") -> PatternError:
    """Make the error of a pattern that holds other things than when it was last looked at."""
    return PatternError(
        message(
            name,
            f"a function that reads {what}" if name == "TokenMask" else what,
            "what it read when the call, or the compiled code, was made",
            "Change it after backward; with torch.compile wrap the function again, or change a tensor in place.",
        )
    )


def from_mask_mod(fn: MaskMod, *, tables: Sequence[Tensor] | None = None) -> TokenMask:
    """Make a pattern of a FlexAttention ``mask_mod``; see :class:`TokenMask`.

    Args:
        fn: ``fn(b, h, q, k)`` on int64 index tensors, returning bool.
        tables: Tensors that it reads, where they cannot be found by themselves.
    Returns:
        A pattern.
    Raises:
        PatternError: The function fails, returns something else than bool, or reads what could change unseen.
    Example:
        >>> rw.from_mask_mod(lambda b, h, q, k: q >= k).density(2)
        0.75
    """
    return TokenMask(fn, tables=tables)
