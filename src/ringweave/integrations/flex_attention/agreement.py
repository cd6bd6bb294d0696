"""Compare a score function with the terms that it was recognised as, at some pairs, before the terms are trusted.

A trace runs a function with symbols. A function that asks what its arguments are, or that a reader here misreads, may
compute other values with tensors.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...cache import PATTERNS
from ...terms import Term
from ...terms.term import Pairs
from ...torch_compat import dispatched, version, wrapped
from .symbols import Trace


class Sizes(NamedTuple):
    """Sizes of a call, and the dtype of its scores."""

    batch: int
    heads: int
    nq: int
    nk: int
    dtype: torch.dtype


_SCORES = 0.0, 0.5, -0.5, 3.0, -3.0, 40.0, -40.0
# shares of a value that rounding may change, in float32 and in 16 bits
_ROUNDING, _ROUNDING_OF_HALF = 2.0**-16, 2.0**-7
_HALF = torch.float16, torch.bfloat16
# about the size of a key
_NBYTES = 2**12


def agrees(score_mod: Callable[..., Any], trace: Trace, factor: float, terms: Sequence[Term], sizes: Sizes) -> bool:
    """Return whether terms have the function's values at some pairs; a known function is not evaluated again.

    A function is known by its code and its formula, in which numbers count by value and tables by shape. Where all
    entries that were read are equal, as in a table of zeros, it is compared again once the table is written to. Nothing
    can be compared in a transform or a mode of torch, in which tensors may have no values.

    Args:
        score_mod: The function.
        trace: Its trace.
        factor: Number that multiplies the score.
        terms: The terms after that.
        sizes: Sizes of the call.
    """
    if dispatched() or any(map(wrapped, trace.tensors)):
        return True
    key: Hashable = ("score function", tuple(_codes(score_mod)), tuple(trace.steps), sizes)
    try:
        known = PATTERNS.get(key)
    except TypeError:
        # an argument of an operation cannot be hashed
        key = known = None
    if isinstance(known, bool):
        return known
    tables = tuple([(x.data_ptr(), version(x)) for x in trace.tensors])
    if known is not None and known == tables:
        return True
    scores, at = _pairs(sizes)
    with torch.no_grad():
        # before the function, which may write to its arguments
        biases, found, score = torch.zeros_like(scores), scores * factor, scores.abs()
        for term in terms:
            biases, found = term.apply(biases, at), term.apply(found, at)
    wanted = _evaluated(score_mod, scores, at)
    if wanted is not None and wrapped(wanted):
        return True
    halved = any(x.dtype in _HALF for x in trace.tensors)
    same = wanted is not None and _same(wanted, found, score, _ROUNDING_OF_HALF if halved else _ROUNDING)
    shown = not tables or bool((biases != biases[0]).any())
    if key is not None:
        PATTERNS.put(key, same if shown or not same else tables, _NBYTES)
    return same


def _codes(fn: Any) -> list[object]:
    """Return the code of a function, and that of the functions that it closes over."""
    found, ahead = list[object](), [fn]
    while ahead and len(found) < _MOST:
        fn = ahead.pop()
        while isinstance(fn, (functools.partial, types.MethodType)):
            fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
        found.append(getattr(fn, "__code__", type(fn)))
        for cell in getattr(fn, "__closure__", None) or ():
            try:
                inside = cell.cell_contents
            except ValueError:
                # nothing is bound yet
                continue
            if isinstance(inside, (types.FunctionType, types.MethodType, functools.partial)):
                ahead.append(inside)
    return found


# functions that are looked at, since one may close over itself
_MOST = 16


def _pairs(sizes: Sizes) -> tuple[Tensor, Pairs]:
    """Return scores of several sizes, and pairs of first, last and middle positions, also beyond the edges of tiles."""
    queries, keys, heads, batch = (_some(size) for size in (sizes.nq, sizes.nk, sizes.heads, sizes.batch))
    rows = [
        (_SCORES[(3 * n + m) % len(_SCORES)], batch[(n + m) % len(batch)], heads[(2 * n + m) % len(heads)], q, k)
        for n, q in enumerate(queries)
        for m, k in enumerate(keys)
    ]
    scores, *indices = zip(*rows, strict=True)
    b, h, q, k = (torch.tensor(index, dtype=torch.int64, device="cpu") for index in indices)
    return torch.tensor(scores, dtype=sizes.dtype, device="cpu"), Pairs(b, h, q, k, q, k)


def _some(size: int) -> list[int]:
    """Return up to 8 indices below a size."""
    wanted = dict.fromkeys([0, size - 1, size // 2, 1, 64, size - 2, 5, 128])
    return [index for index in wanted if 0 <= index < size]


def _evaluated(score_mod: Callable[..., Any], scores: Tensor, at: Pairs) -> Tensor | None:
    """Return the function's values; None if it fails."""
    try:
        # with gradients, as in the trace, since the function may keep tables that it makes
        with torch.enable_grad(), _Mapped():
            result = torch.vmap(score_mod)(scores, at.batch, at.head, at.query, at.key)
    except Exception:  # noqa: BLE001
        # whatever a user's function raises; the general path calls it again
        return None
    fits = isinstance(result, Tensor) and result.shape == scores.shape and result.is_floating_point()
    return result.detach().to(scores.dtype) if fits else None


class _Mapped(TorchFunctionMode):
    """Let a function read tensors at the indices of a pair, as the general path does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # imported with the first function
        from .score_probe import ITEM, called, entries_of, places_of

        places = places_of(args[0], args[1]) if func is ITEM else None
        return called(func, args, kwargs or {}) if places is None else entries_of(args[0], *places)


def _same(wanted: Tensor, found: Tensor, score: Tensor, rounding: float) -> bool:
    room = rounding * (wanted.abs() + found.abs() + score)
    near = ((wanted - found).abs() <= room) & room.isfinite()
    return bool((near | (wanted == found) | (wanted.isnan() & found.isnan())).all())
