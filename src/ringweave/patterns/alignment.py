"""Align queries and keys: the position for ``q_offset="end"``, and the patterns without later keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_sizes
from ..errors import ShapeError, shown
from .algebra import And, Or, PerHead
from .base import Pattern
from .dilated import LongNet
from .fitting import refuse
from .key_padding import KeyPadding
from .local import Causal, SlidingWindow
from .shifted import checked_offset
from .within import Within

#: The value of ``q_offset`` that makes the queries the last tokens.
END = "end"

_Bound = int | Tensor


def first_query(
    pattern: Pattern, q_offset: int | Tensor | str, k_offset: int | Tensor, *, batch: int, nq: int, nk: int
) -> int | Tensor:
    """Return the position of the first query. With ``q_offset="end"`` the queries are the last tokens.

    ``"end"`` is ``k_offset + nk - nq``. Where the pattern has ``KeyPadding``, it is ``stop - nq`` for each batch
    element, because bounds of padding are positions; an element without keys gets 0. No tensor is read.

    Args:
        pattern: A pattern, or a mixture.
        q_offset: The argument of the call.
        k_offset: Position of the first key.
        batch: Batch elements.
        nq: Queries.
        nk: Keys.
    Raises:
        ShapeError: The string is not ``"end"``, or there are more queries than keys.
    """
    if not isinstance(q_offset, str):
        return q_offset
    if q_offset != END:
        wanted = f"an int, an integer tensor () or ({shown(batch)},), or {END!r}"
        remedy = f"Pass {END!r} if the queries are the last tokens, as in a decode step."
        raise ShapeError("q_offset", shown(q_offset), wanted, remedy)
    made_batch = pattern.extents()[0]
    if made_batch is not None and made_batch != batch:
        # the call's check of the pattern reports the wrong batch
        return 0
    k_first = checked_offset("k_offset", k_offset, batch)
    found = padded_keys(pattern)
    if found is None:
        first, last = k_first + (nk - nq), k_first + nk
    else:
        start, stop = found
        first, last = stop - nq, stop
        keys = stop - start
        if isinstance(keys, Tensor):
            first = torch.where(keys > 0, first, 0)
            return first[0] if first.shape == (1,) else first
        if start >= stop:
            return 0
    if not isinstance(first, Tensor) and first < 0:
        got = f"{END!r} for {nq} queries and {last} keys"
        raise ShapeError("q_offset", got, "at most as many queries as keys", "Pass the first position.")
    return first


def first_of_sizes(
    pattern: Pattern, q_offset: int | Tensor | str, k_offset: int | Tensor, *, batch: int, nq: int, nk: int | None
) -> int | Tensor:
    """Return :func:`first_query` for arguments that are not checked yet.

    Raises:
        PatternError: The pattern is not a pattern.
        ShapeError: The string is not ``"end"``, a size is wrong, or there are more queries than keys.
    """
    if not isinstance(q_offset, str):
        return q_offset
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    if nk is None:
        raise ShapeError("nk", None, f"the number of keys, with q_offset={shown(q_offset)}", "Pass nk.")
    nq, nk, _, batch, _ = check_sizes(nq, nk, batch=batch)
    return first_query(pattern, q_offset, k_offset, batch=batch, nq=nq, nk=nk)


def padded_keys(pattern: Pattern) -> tuple[_Bound, _Bound] | None:
    """Return (start, stop) of the keys that ``KeyPadding`` in a pattern leaves; None for a pattern without it.

    Each bound is an int or an int64 tensor (B,) or (1,). Paddings under ``&`` intersect. Under ``|``, and in patterns
    for each head, every part must have one, since the others attend all keys.
    """
    if isinstance(pattern, KeyPadding):
        start, stop = (x.long() if isinstance(x, Tensor) else x for x in (pattern.start, pattern.stop))
        return start, stop
    if isinstance(pattern, Within):
        return padded_keys(pattern.bounds)
    if not isinstance(pattern, (And, Or, PerHead)):
        return None
    parts = pattern.patterns if isinstance(pattern, PerHead) else pattern.parts
    # in two steps: torch.compile cannot trace an assignment in this comprehension
    each = [padded_keys(part) for part in parts]
    found = [keys for keys in each if keys is not None]
    if not found or (len(found) < len(parts) and not isinstance(pattern, And)):
        return None
    start, stop = found[0]
    both = isinstance(pattern, And)
    for other_start, other_stop in found[1:]:
        start, stop = _extreme(start, other_start, largest=both), _extreme(stop, other_stop, largest=not both)
    return start, stop


def _extreme(a: _Bound, b: _Bound, *, largest: bool) -> _Bound:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b.to(a.device)) if largest else torch.minimum(a, b.to(a.device))
    if isinstance(a, Tensor):
        return a.clamp(min=b) if largest else a.clamp(max=b)
    if isinstance(b, Tensor):
        return _extreme(b, a, largest=largest)
    return max(a, b) if largest else min(a, b)


def ends_at_query(pattern: Pattern) -> bool:
    """Tell from a pattern's parts whether no query attends a key after its own position.

    Only causal patterns, windows without keys on the right, and their intersections with any pattern are recognised:
    the answer costs no planning.
    """
    if isinstance(pattern, SlidingWindow):
        return pattern.right == 0
    if not pattern.combinable:
        return isinstance(pattern, LongNet) and pattern.causal
    if isinstance(pattern, Within):
        # queries that are packed apart from keys are the last tokens of their sequences already
        return ends_at_query(pattern.pattern) and not pattern._packed_apart
    if isinstance(pattern, PerHead):
        return all(map(ends_at_query, pattern.patterns))
    return isinstance(pattern, Causal) or (isinstance(pattern, And) and any(map(ends_at_query, pattern.parts)))
