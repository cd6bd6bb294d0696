"""Compute a call that ran out of memory: the same function in smaller pieces, then the first error.

The library makes these attempts in order, each after the previous one ran out of memory:

1. Clear the caches and repeat the call.
2. Compute some key heads and their query heads at a time.
3. Compute some queries of one key head at a time. This is skipped for a pattern that cannot be cut by queries, such as
   a table with several rows of blocks.

In each attempt, keys and values on the host are copied in pieces by ringweave-gpu if the call asked for that. Backward
recomputes the scores, as always. Every row sees its keys in the same order, so if pieces are whole tiles of the same
sides the native kernel gives the same bits. Gradients of keys are summed over pieces of queries in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .call import Call, Operands
from .errors import PatternError, ShapeError, UnsupportedError, is_out_of_memory, warn_once
from .patterns import Pattern, SlidingWindow
from .plan.tile_size import DEFAULT_TILE_SIZE
from .program import Program, Returned
from .types import acc_dtype

R = TypeVar("R")

_FEWER = 4  # each attempt has a quarter of the queries of the previous one


class Split(NamedTuple):
    """A division of a call into pieces.

    Attributes:
        groups: Number of groups of key heads.
        rows: Maximum number of queries in a piece.
    """

    groups: int
    rows: int


class Piece(NamedTuple):
    """Query heads and rows of a call, and the key heads that they read."""

    heads: slice
    kv_heads: slice
    rows: slice


def forward(program: Program, operands: Operands, first: BaseException) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a program that ran out of memory with the error ``first``, in pieces if it has to be."""
    call = program.call

    def whole() -> tuple[Tensor, Tensor]:
        return program.forward(operands)

    def cut_up(cut: Split) -> tuple[Tensor, Tensor]:
        q, v = operands.q, operands.v
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))
        for piece, some, part in _pieces(operands, call, cut):
            place = (slice(None), piece.heads, piece.rows)
            out[place], lse[place] = program.for_call(part).forward(some)
        return out, lse

    return _retry("forward", operands, call, first, whole, cut_up)


def backward(
    program: Program, operands: Operands, returned: Returned, first: BaseException
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) of a program that ran out of memory with the error ``first``, in pieces if it has to be."""
    call = program.call

    def fresh() -> None:
        # discard the partial sums of an attempt that ran out of memory
        if operands.terms is not None:
            operands.terms.restart()

    def whole() -> tuple[Tensor, Tensor, Tensor]:
        fresh()
        return program.backward(operands, returned)

    def cut_up(cut: Split) -> tuple[Tensor, Tensor, Tensor]:
        fresh()
        q, k, v = operands[:3]
        dout, dlse, out, lse = returned
        # sums over pieces of queries stay in float32 until the last piece
        summed = cut.rows < q.shape[2]
        acc = acc_dtype(q.dtype) if summed else q.dtype
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        sums: tuple[Tensor, Tensor] | None = None
        for piece, some, part in _pieces(operands, call, cut):
            place = (slice(None), piece.heads, piece.rows)
            mine = Returned(dout[place], None if dlse is None else dlse[place], out[place], lse[place])
            of_q, of_k, of_v = program.for_call(part).backward(some, mine, acc)
            dq[place] = of_q
            sums = (of_k, of_v) if piece.rows.start == 0 or sums is None else (sums[0].add_(of_k), sums[1].add_(of_v))
            if piece.rows.stop == q.shape[2]:
                dk[:, piece.kv_heads], dv[:, piece.kv_heads] = sums
        return dq, dk, dv

    return _retry("backward", operands, call, first, whole, cut_up)


def sparsified(call: Callable[[Pattern], R], pattern: Pattern, tokens: int) -> R:
    """Halve a window around each query until the call fits in memory, with a warning at each step.

    Args:
        call: Function that computes a pattern.
        pattern: The requested pattern.
        tokens: Number of positions that it spans.
    """
    asked, window, first = pattern, tokens, None
    while True:
        try:
            return call(pattern)
        except (MemoryError, RuntimeError) as error:
            window //= 2
            if not is_out_of_memory(error) or not asked.combinable or window < DEFAULT_TILE_SIZE:
                raise
            first = error
        first.__traceback__ = None
        pattern = asked & SlidingWindow(window)
        warnings.warn(
            f"memory ran out, and on_oom='sparsify' changes the answer: each query attends only those keys of "
            f"{asked!r} that are at most {window} positions away",
            RuntimeWarning,
            stacklevel=3,
        )


def _retry(
    direction: str,
    operands: Operands,
    call: Call,
    first: BaseException,
    whole: Callable[[], R],
    cut_up: Callable[[Split], R],
) -> R:
    """Run the whole call again without caches, then each split in order until one fits in memory."""
    if call.on_oom == "raise":
        first.add_note("ringweave: on_oom='degrade' computes the same result in pieces that need less memory.")
        raise first
    # the frames of the traceback keep tensors alive
    first.__traceback__ = None
    for cut in _splits(operands, call):
        if cut is None:
            # imported only when needed
            from .memory import trim

            trim()
        _log_once(direction, operands, cut)
        try:
            return whole() if cut is None else cut_up(cut)
        except (UnsupportedError, PatternError, ShapeError):
            # the named backend or the pattern does not support these pieces
            continue
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None
    first.add_note(
        "ringweave: memory also ran out after the caches were cleared, and in pieces of one key head and few queries. "
        "Free memory, shorten the sequence or the batch, or, if an approximation will do, pass on_oom='sparsify'."
    )
    raise first


def _splits(operands: Operands, call: Call) -> Iterator[Split | None]:
    """Yield the splits to try, in order; None repeats the whole call."""
    yield None
    heads, groups, nq = operands.k.shape[1], 1, operands.q.shape[2]
    while groups < heads:
        groups *= next(n for n in range(2, heads + 1) if heads // groups % n == 0)
        if not _apart(operands, call, groups):
            groups = 1
            break
        yield Split(groups, nq)
    rows = nq
    # whole tiles; calls over pages have few queries and are not cut
    while rows > DEFAULT_TILE_SIZE and operands.pages is None:
        rows = -(-rows // (_FEWER * DEFAULT_TILE_SIZE)) * DEFAULT_TILE_SIZE
        yield Split(groups, rows)


def _apart(operands: Operands, call: Call, groups: int) -> bool:
    """Whether a pattern can be divided into groups of heads."""
    try:
        call.pattern.shard(0, groups, operands.q.shape[1])
    except PatternError:
        return False
    return True


def _pieces(operands: Operands, call: Call, cut: Split) -> Iterator[tuple[Piece, Operands, Call]]:
    """Yield each piece of a call with its operands and its call, group by group with all rows of a group."""
    nq, asked = operands.q.shape[2], operands.terms
    for group in range(cut.groups):
        heads, kv_heads = (
            slice(x.shape[1] * group // cut.groups, x.shape[1] * (group + 1) // cut.groups) for x in operands[:2]
        )
        part = call.pattern if cut.groups == 1 else call.pattern.shard(group, cut.groups, operands.q.shape[1])
        for start in range(0, nq, cut.rows):
            rows = slice(start, min(start + cut.rows, nq))
            terms = None if asked is None else asked._replace(heads=asked.heads[heads], rows=asked.rows[rows])
            mine = itemgetter((slice(None), kv_heads))
            some = operands._replace(q=operands.q[:, heads, rows], terms=terms).of_keys(mine)
            yield Piece(heads, kv_heads, rows), some, call.part(some, part, call.q_offset + start)


def _log_once(direction: str, operands: Operands, cut: Split | None) -> None:
    """Log a split, once per process."""
    if cut is None:
        what, cost = "after the caches were cleared", "plans are made again"
    elif cut.rows == operands.q.shape[2]:
        what = "in pieces of key heads"
        cost = f"{cut.groups} calls, one plan for each, and memory for the result of a piece"
    else:
        what = "in pieces of queries"
        pieces = cut.groups * -(-operands.q.shape[2] // cut.rows)
        cost = f"{pieces} calls that each read all keys" + ", gradients of keys in float32" * (direction == "backward")
    what = f"{direction} {what}"
    warn_once(what, f"memory ran out: attention continues, {what} (the same result; cost: {cost})")
