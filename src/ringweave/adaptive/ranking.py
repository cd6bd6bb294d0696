"""Exact choices of the best-scored keys or blocks, of which equal scores prefer the earlier one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..chunks import at_once
from ..torch_compat import are_plain_cpu

# fills lists until they are sorted: more than any column
_LAST = torch.iinfo(torch.int32).max


class Scored(NamedTuple):
    """The scores of some rows of queries against columns: keys, or blocks of keys.

    Attributes:
        scores: Scores, (..., rows, columns), float32 or float64, in memory that nothing else uses. NaN is never chosen.
        allowed: Whether a row may choose a column, bool, broadcastable to the scores.
        forced: Whether a row chooses a column before all others, in the same form; None if it need not.
        amount: Number of columns that a row chooses, at least 1, broadcastable to (..., rows); None for the most.
        columns: Number of each column, (columns,) int32; None for 0, 1, ...
    """

    scores: Tensor
    allowed: Tensor
    forced: Tensor | None = None
    amount: Tensor | None = None
    columns: Tensor | None = None


def rows_at_once(scores: int, device: torch.device) -> int:
    """Return the number of rows of a chunk, if a row has this number of scores in all batch elements and heads."""
    # a score, and its integer in the order of scores
    return at_once(8 * scores, device)


def choose(
    score_of_rows: Callable[[range], Scored], most: int, *, rows: int, scores: int, device: torch.device
) -> Tensor:
    """Choose the best-scored of the allowed columns for each row, exactly, a chunk of rows at a time.

    Args:
        score_of_rows: Function that scores some rows.
        most: The most columns that a row chooses.
        rows: Number of rows.
        scores: Number of scores of a row in all batch elements and heads, with those that it is computed from.
        device: Device of the scores.
    Returns:
        The lists of all rows, (..., rows, most) int32, ascending, with -1 at the end of a row with fewer columns.
    """
    step = rows_at_once(scores, device)
    chunks = [best(score_of_rows(range(begin, min(begin + step, rows))), most) for begin in range(0, rows, step)]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, -2)


def best(scored: Scored, most: int) -> Tensor:
    """Choose the best-scored of the allowed columns for a few rows; see :func:`choose`. The scores are changed."""
    key = _ordered(scored.scores)
    if scored.forced is not None:
        key.masked_fill_(scored.forced, torch.iinfo(key.dtype).max)
    key.masked_fill_(~scored.allowed, torch.iinfo(key.dtype).min)
    columns = scored.columns
    if columns is None:
        columns = torch.arange(key.shape[-1], dtype=torch.int32, device=key.device)
    count = min(most, key.shape[-1])
    amount = None if scored.amount is None else scored.amount.clamp(max=count)[..., None]
    return torch.nn.functional.pad(_largest(key, columns, count, amount), (0, most - count), value=-1)


def _ordered(scores: Tensor) -> Tensor:
    """Return integers in the order of the scores, equal for equal scores; NaN is the least integer.

    -0.0 equals 0.0. The scores are changed.
    """
    whole_type = torch.int64 if scores.dtype == torch.float64 else torch.int32
    least, most = torch.iinfo(whole_type).min, torch.iinfo(whole_type).max
    lacking = scores.isnan()
    bits = scores.add_(0.0).view(whole_type)  # adding 0.0 turns -0.0 into 0.0
    bits = torch.where(bits < 0, bits ^ most, bits)
    return bits.masked_fill_(lacking, least)


def _largest(key: Tensor, columns: Tensor, count: int, amount: Tensor | None) -> Tensor:
    """Return the columns of the largest keys of each row, ascending, then -1; the least integer is never chosen."""
    least = torch.iinfo(key.dtype).min
    found, index = key.topk(count, -1, sorted=amount is not None)
    last = (
        found.amin(-1, keepdim=True) if amount is None else found.gather(-1, (amount - 1).expand(*found.shape[:-1], 1))
    )
    room = count if amount is None else amount
    # first, since a trace cannot follow the other check
    if not torch.compiler.is_compiling() and are_plain_cpu((key,)):
        tied = ((key >= last).sum(-1, keepdim=True) > room) & (last > least)
        if not tied.any():
            # reading a value costs no synchronisation on a CPU, and without ties topk has chosen already
            lacking = (found == least) if amount is None else (found == least) | (found < last)
            listed = columns[index].masked_fill_(lacking, _LAST).sort(-1).values
            return listed.masked_fill_(listed == _LAST, -1)
    more = key > last
    same = (key == last) & (last > least)
    # among the keys that equal the last one, the earliest fill the row
    room = room - more.sum(-1, keepdim=True, dtype=torch.int32)
    chosen = more | (same & (same.cumsum(-1, dtype=torch.int32) <= room))
    place = torch.where(chosen, chosen.cumsum(-1, dtype=torch.int32) - 1, count).long()
    listed = columns.new_full((*key.shape[:-1], count + 1), -1)
    # not in place, which torch.vmap does not take
    return listed.scatter(-1, place, columns.expand(place.shape))[..., :count]
