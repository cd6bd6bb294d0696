"""Compare a score function with the terms that it was recognised as, at some pairs, before the terms are trusted.

A trace runs a function with symbols. A function that asks what its arguments are, or that a reader here misreads, may
compute other values with tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cache import PATTERNS
from ...terms import Term
from ...terms.term import Pairs
from ...torch_compat import dispatched, version, wrapped
from ...trace.opaque import Mapped, codes
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
    key: Hashable = ("score function", codes(score_mod), tuple(trace.steps), sizes)
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
        with torch.enable_grad(), Mapped():
            result = torch.vmap(score_mod)(scores, at.batch, at.head, at.query, at.key)
    except Exception:  # noqa: BLE001
        # whatever a user's function raises; the general path calls it again
        return None
    fits = isinstance(result, Tensor) and result.shape == scores.shape and result.is_floating_point()
    return result.detach().to(scores.dtype) if fits else None


def _same(wanted: Tensor, found: Tensor, score: Tensor, rounding: float) -> bool:
    room = rounding * (wanted.abs() + found.abs() + score)
    near = ((wanted - found).abs() <= room) & room.isfinite()
    return bool((near | (wanted == found) | (wanted.isnan() & found.isnan())).all())
