"""TokenMask: a function of index tensors as a pattern, in FlexAttention's signature.

In compiled code a pattern is named by a number in a tensor, its :class:`Ticket`. A new function is then another input
of the same compiled code, and the operator traces the function when it runs, as an eager call does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import whole
from ..errors import PatternError, shown
from ..relation.node import Node
from ..torch_compat import uncompiled
from .base import Pattern, parts_of
from .cache_key import CacheKey, changed
from .declared import declare
from .mask_function import NUMBERS, MaskFunction, called
from .recorded import FIRST, OfFunction, Recorded, chosen_text, numbered, recorded, without_gradients

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@declare("TokenMask(lambda b, h, q, k: (q // 64 + k // 64) % 3 == 0)", "By table, function or head", text=False)
class TokenMask(OfFunction):
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

    A pickle holds the operations of the function as text, and the tensors that it reads. It loads where the function
    does not exist, and computes with the values of the time at which it was made, whatever the function reads later. An
    operation that gives the default dtype, such as ``q / 3``, gives that of the process that calls it. The queues of
    ``torch.multiprocessing`` share the memory of the tensors, so the copy follows these. A function that cannot be
    traced, or has operations without a name, is pickled itself.

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
            now.tried(*FIRST)
        # kept, so that its number stays the same
        self._function = now.function
        # its present values, which torch.compile uses, and the name of the pattern in compiled code
        self._tables, self._number = now._tables, _numbered(fn, named, now._tables)
        self.write(now._chosen(batch, head)._text(), follows=True, function=True)
        return self

    def _chosen(self, batch: int | None, head: int | None) -> TokenMask:
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
                return ticket.now(tables)._chosen(batch, head, ticket.used)
        return numbered(number, tables, batch, head)

    def _text(self) -> str:
        return self._now()._text()

    def __repr__(self) -> str:
        return f"TokenMask({called(self.fn)}{chosen_text(self._batch, self._head)})"

    def __reduce__(self) -> tuple[Any, ...]:
        written = self._now().written()
        if written is not None:
            return functools.partial(TokenMask, batch=self._batch, head=self._head), (written,)
        # pickled with its function, which the pickler must be able to pickle
        if self._pairs:
            return TokenMask._of_pairs, (self.fn,)
        return functools.partial(TokenMask, tables=self._named, batch=self._batch, head=self._head), (self.fn,)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return self._number, *without_gradients(self._tables)
        return self._now().tables

    def key(self) -> CacheKey:
        return self._now().key()

    def stays_equal(self, other: Pattern) -> bool:
        # another function object may read other values later
        return super().stays_equal(other) and isinstance(other, TokenMask) and self.fn is other.fn

    def _depends(self) -> tuple[bool, bool]:
        return self._now()._depends()

    def select(self, b: int, h: int) -> Pattern:
        now = self._now()
        found = now.select(b, h)
        return self if found is now else self._chosen(found._batch, found._head)

    def zones(self, n: int | None) -> Node:
        return self._now().zones(n)


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
                "Use tensor operations, such as & and torch.where; or name the tensors that it reads: tables=[...].",
            )
        return now


def _numbered(fn: MaskMod, named: tuple[Tensor, ...] | None, tables: tuple[Tensor, ...]) -> Tensor:
    """Return the tensor () on the CPU that names a pattern of a function in compiled code."""
    place = next(NUMBERS)
    number, ticket = torch.tensor(place, device="cpu"), Ticket(fn, named, tables)
    # a graph that waits for its backward pass holds the tensor
    number._ticket = ticket  # type: ignore[attr-defined]
    _tickets[place] = ticket
    return number


_tickets: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()


def note_use(pattern: Pattern) -> None:
    """Note the functions of a compiled forward pass, for its gradient."""
    for mask in parts_of(pattern, Recorded):
        if mask.used is not None and len(mask.used) < 2:
            mask.used.add(mask.function)


def check_use(pattern: Pattern) -> None:
    """Raise PatternError if a compiled backward pass might use other values of a function than its forward pass."""
    for mask in parts_of(pattern, Recorded):
        if mask.used is not None and mask.used != {mask.function}:
            raise changed("other values")


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors share memory or have equal values; a compiled graph may pass a copy."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)


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
