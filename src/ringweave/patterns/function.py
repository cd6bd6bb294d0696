"""Patterns from functions of index tensors, in FlexAttention's signature."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ..errors import PatternError, message
from .base import Pattern
from .tiles import Int64, Ranges, Tiles, mix

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Text can name a function only by number. A backward pass, or a compiled graph, may ask for one after the pattern
# object is gone, so the latest are kept.
_KEPT = 4096
_functions: dict[int, MaskMod] = {}
_numbers: dict[MaskMod, int] = {}
_next_number = itertools.count()
_lock = threading.Lock()


def _number_of(fn: MaskMod) -> int:
    with _lock:
        if fn not in _numbers:
            _numbers[fn] = number = next(_next_number)
            _functions[number] = fn
            if len(_functions) > _KEPT:
                oldest = next(iter(_functions))
                del _numbers[_functions.pop(oldest)]
        return _numbers[fn]


class TokenMask(Pattern):
    """Any function ``fn(b, h, q, k)`` of int64 index tensors, in the signature of FlexAttention's ``mask_mod``.

    The function is called on broadcast index tensors. It is opaque, so planning evaluates every tile that the rest of
    the expression leaves open: write ``TokenMask(fn) & SlidingWindow(1024)`` rather than a window inside ``fn``.

    Args:
        fn: Returns a bool tensor that broadcasts over its arguments. Build it once: each new function is a new pattern.
        batch: The batch element to call it for; every one by default.
        head: The query head to call it for; every one by default.
    Raises:
        PatternError: The function returns something else than bool.
    Example:
        >>> even = rw.TokenMask(lambda b, h, q, k: k % 2 == 0)
        >>> even.to_dense(2, 3)[0, 0].int()
        tensor([[1, 0, 1],
                [1, 0, 1]], dtype=torch.int32)
    """

    def __init__(self, fn: MaskMod, *, batch: int | None = None, head: int | None = None):
        if not callable(fn):
            raise PatternError(message("fn", type(fn).__name__, "a function of (b, h, q, k)", "Pass a mask_mod."))
        self.fn, self._batch, self._head = fn, batch, head
        self._number = _number_of(fn)
        self.__post_init__()

    @classmethod
    def numbered(cls, number: int, batch: int | None = None, head: int | None = None) -> TokenMask:
        """The pattern of a function that was numbered in this process."""
        if number not in _functions:
            raise PatternError(
                message(
                    "TokenMask", f"number {number}", "a function numbered in this process", "Rebuild the pattern here."
                )
            )
        return cls(_functions[number], batch=batch, head=head)

    def _text(self) -> str:
        bound = "".join(
            f", {name}={value}" for name, value in (("batch", self._batch), ("head", self._head)) if value is not None
        )
        return f"TokenMask({self._number}{bound})"

    def __repr__(self) -> str:
        bound = self.spec.split(str(self._number), 1)[1]
        return f"TokenMask({getattr(self.fn, '__name__', type(self.fn).__name__)}{bound}"

    @cached_property
    def _depends(self) -> tuple[bool, bool]:
        # an index that the function uses shows in the shape of its result
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
        result = self._call(zero.expand(2, 1, 1, 1), zero.expand(1, 2, 1, 1), zero, zero)
        shape = (1,) * (4 - result.ndim) + tuple(result.shape)
        return shape[0] > 1, shape[1] > 1

    def _call(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        result = self.fn(b, h, q, k)
        if isinstance(result, bool):
            result = torch.tensor(result, device=q.device)
        if not isinstance(result, Tensor) or result.dtype != torch.bool:
            got = result.dtype if isinstance(result, Tensor) else type(result).__name__
            raise PatternError(
                message(
                    "mask_mod",
                    f"a function that returns {got}",
                    "one that returns bool",
                    "Compare in it, as in q >= k.",
                )
            )
        return result

    def select(self, b: int, h: int) -> Pattern:
        by_batch, by_head = self._depends
        batch = b if by_batch and self._batch is None else self._batch
        head = h if by_head and self._head is None else self._head
        if (batch, head) == (self._batch, self._head):
            return self
        return TokenMask(self.fn, batch=batch, head=head)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        b = torch.full((1, 1, 1, 1), self._batch or 0, device=q.device)
        h = torch.full((1, 1, 1, 1), self._head or 0, device=q.device)
        shape = torch.broadcast_shapes(q.shape, k.shape)
        result = self._call(
            b, h, *(x.expand((1,) * (4 - x.ndim) + tuple(x.shape)) if x.ndim < 4 else x for x in (q, k))
        )
        while result.ndim > len(shape):
            result = result.squeeze(0)
        return result.to(q.device).expand(shape)

    def key_ranges(self, q_lo: Int64, q_hi: Int64, nk: int) -> Ranges:
        return Ranges.of((0, nk), rows=len(q_lo))

    def tile_keys(self, tiles: Tiles) -> Int64:
        return mix(tiles.q_lo, tiles.k_lo)


def from_mask_mod(fn: MaskMod) -> TokenMask:
    """The pattern of a FlexAttention ``mask_mod``; see :class:`TokenMask`.

    Args:
        fn: ``fn(b, h, q, k)`` on int64 index tensors, returning bool.
    Returns:
        A pattern.
    Raises:
        PatternError: The function returns something else than bool.
    Example:
        >>> rw.from_mask_mod(lambda b, h, q, k: q >= k).density(2)
        0.75
    """
    pattern = TokenMask(fn)
    _ = pattern._depends
    return pattern
