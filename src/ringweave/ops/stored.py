"""The operator of attention over keys and values that are stored: in pages, in 8 bits, or both.

Forward only, one opaque node for ``torch.compile``. A pattern over pages crosses it as the caller made it; where a
sequence ends is read when it runs, so that growing lengths recompile nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PatternError, ShapeError, UnsupportedError, message
from ..patterns import Keys, Pattern, check_extents
from ..patterns.shifted import placed
from ..plan import pattern_of
from ..precision import Scales
from ..terms import Term, written
from ..torch_compat import require
from ..types import acc_dtype
from . import recovery
from .backend import Inputs, Pages
from .registered import differentiate, operators, refuse_forward_mode, scoring_of, vectorize


def check_pages(table: NDArray[np.int32], lengths: NDArray[np.int32], pages: int, size: int) -> None:
    """Raise ShapeError where a length has no room in its row, or a number that is used is not that of a page."""
    room = table.shape[1] * size
    if lengths.min() < 0 or lengths.max() > room:
        row = int(lengths.argmax() if lengths.max() > room else lengths.argmin())
        got = f"{lengths[row]} tokens in row {row}"
        raise ShapeError(message("lengths", got, f"0 to {room}, which a row has room for", "Add columns to the table."))
    # as unsigned numbers those below 0 are too large
    wrong = (table.view(np.uint32) >= pages) & (np.arange(table.shape[1]) * size < lengths[:, None])
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        got = f"page {table[row, column]} in row {row}, column {column}"
        raise ShapeError(message("table", got, f"0 to {pages - 1}", "Correct it, or let the cache keep the table."))


def last_tokens(pattern: Pattern, lengths: Tensor, nq: int) -> Pattern:
    """A pattern by places in q, where each sequence's last nq tokens are, and in its row of pages.

    Args:
        pattern: A pattern, counted from each sequence's first token.
        lengths: Tokens of each sequence, (B,), on the host.
        nq: Queries.
    Raises:
        ShapeError: A sequence with fewer tokens than queries, and not none.
        PatternError: A LongNet.
    """
    known = lengths.numpy()
    short = (known < nq) & (known > 0)
    if short.any():
        row = int(short.argmax())
        got = f"{nq} queries of row {row}, which has {known[row]} tokens"
        raise ShapeError(message("q", got, "at most as many as each sequence has", "Attend it in a call of its own."))
    if not pattern.combinable:
        remedy = "A LongNet keeps tokens by their place: use Dilated or Segments."
        raise PatternError(message("pattern", repr(pattern), "a relation", remedy))
    return placed(pattern, (lengths.long() - nq).clamp_(min=0), 0, len(lengths))[0]


def stored_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Sequence[Tensor],
    paged: Sequence[Tensor],
    tables: Sequence[Tensor],
    spec: str,
    scale: float,
    q_offset: int,
    backend: str,
    terms: str,
    extras: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse); with (table, lengths) in ``paged`` of the last tokens of each sequence."""
    pattern, stored = pattern_of(spec, tables), Scales(*scales) if scales else None
    if not paged:
        scoring = scoring_of(q, (q.shape[2], k.shape[2]), pattern, q_offset, terms, 0, extras)
        return recovery.forward(Inputs(q, k, v, scale, scoring, None, stored), pattern, q_offset, backend, degrade=True)
    table, lengths = paged
    pages = Pages(table, lengths, k.shape[2])
    if table.device.type == "cpu":
        check_pages(table.numpy(), lengths.numpy(), k.shape[0], pages.size)
    else:
        used = torch.arange(table.shape[1], device=table.device) * pages.size < lengths[:, None]
        require((~used | ((table >= 0) & (table < k.shape[0]))).all(), "pages: one is not in the pool")
    batch, heads, nq, _ = q.shape
    check_extents(pattern, batch, heads)
    known = lengths.cpu()
    moved = last_tokens(pattern, known, nq)
    scoring = scoring_of(q, (nq, pages.capacity), moved, 0, terms, 0, extras)
    inputs = Inputs(q, k, v, scale, scoring, pages, stored)
    return recovery.forward(inputs, moved & Keys(known), 0, backend, degrade=True)


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))


def _refuse(ctx: Any, *_: Any) -> None:
    refuse_gradient("keys and values in pages or in 8 bits")


def refuse_gradient(what: str) -> NoReturn:
    """Raise UnsupportedError: what is stored is for inference."""
    remedy = "Call it under torch.no_grad(), and train with attention() without kv."
    raise UnsupportedError(message(what, "an input that requires gradients", "none: it is forward-only", remedy))


(_op,) = operators((stored_attention, _fake))
differentiate(_op, None, _refuse)
vectorize(_op)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    scale: float,
    backend: str,
    terms: Sequence[Term] = (),
    *,
    scales: Sequence[Tensor] = (),
    paged: Sequence[Tensor] = (),
    q_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a checked call; ``paged``: table and lengths."""
    refuse_forward_mode()
    spec, extras = written(terms) if terms else ("", [])
    args = (q, k, v, scales, paged, pattern.tables, pattern.spec, scale, q_offset, backend, spec, extras)
    return _op(*args)  # type: ignore[no-any-return]
