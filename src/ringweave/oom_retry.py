"""What a call does when memory runs out: the same function with less at once; with nothing left, the first error.

The library makes these attempts in order, each when the one before it runs out of memory too:

1. It gives back what is cached, and makes the call again.
2. It computes some key heads and their query heads at a time.
3. It computes some queries of one key head at a time. A pattern that is made for all queries, such as a table with
   several rows of blocks, is not cut.

In each attempt keys and values that are on the host come in pieces (host_offload.py), where the call asked for that.
Backward computes the scores again, as always. A row sees its keys in their order, so where pieces are whole tiles of
the same sides the native kernel gives the same bits; gradients of keys are sums over pieces of queries, in float32.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .call import Call, Operands
from .errors import PatternError, ShapeError, UnsupportedError, is_out_of_memory, message, shown
from .patterns import Pattern, SlidingWindow
from .plan.from_pattern import DEFAULT_TILE
from .program import Program, Returned
from .types import acc_dtype

R = TypeVar("R")

ON_OOM = ("raise", "degrade", "stream", "sparsify")
_FEWER = 4  # a fourth of the queries of the attempt before
_log = logging.getLogger("ringweave")
_told: set[str] = set()


class Split(NamedTuple):
    """How a call is cut.

    Attributes:
        groups: Into how many groups of key heads.
        rows: How many queries a piece has at most.
    """

    groups: int
    rows: int


class Piece(NamedTuple):
    """Some query heads and rows of a call, and the key heads that they read."""

    heads: slice
    kv_heads: slice
    rows: slice


def forward(program: Program, operands: Operands) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a program, in pieces where memory does not suffice for the whole."""
    call = program.call

    def whole() -> tuple[Tensor, Tensor]:
        return program.forward(operands)

    def cut_up(cut: Split) -> tuple[Tensor, Tensor]:
        q, v = operands.q, operands.v
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))
        for piece, some, part in _pieces(operands, call, cut):
            place = (slice(None), piece.heads, piece.rows)
            out[place], lse[place] = program.again(part).forward(some)
        return out, lse

    return _retry("forward", operands, call, whole, cut_up)


def backward(program: Program, operands: Operands, returned: Returned) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) of a program, in pieces where memory does not suffice for the whole."""
    call = program.call

    def fresh() -> None:
        # what was added before memory ran out
        for total in () if operands.terms is None else operands.terms.totals:
            if total is not None:
                total.zero_()

    def whole() -> tuple[Tensor, Tensor, Tensor]:
        fresh()
        return program.backward(operands, returned)

    def cut_up(cut: Split) -> tuple[Tensor, Tensor, Tensor]:
        fresh()
        q, k, v = operands[:3]
        dout, dlse, out, lse = returned
        # sums over pieces are not rounded to 16 bits between them
        summed = cut.rows < q.shape[2]
        acc = acc_dtype(q.dtype) if summed else q.dtype
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        sums: tuple[Tensor, Tensor] | None = None
        for piece, some, part in _pieces(operands, call, cut):
            place = (slice(None), piece.heads, piece.rows)
            mine = Returned(dout[place], None if dlse is None else dlse[place], out[place], lse[place])
            of_q, of_k, of_v = program.again(part).backward(some, mine, acc)
            dq[place] = of_q
            sums = (of_k, of_v) if piece.rows.start == 0 or sums is None else (sums[0].add_(of_k), sums[1].add_(of_v))
            if piece.rows.stop == q.shape[2]:
                dk[:, piece.kv_heads], dv[:, piece.kv_heads] = sums
        return dq, dk, dv

    return _retry("backward", operands, call, whole, cut_up)


def sparsified(call: Callable[[Pattern], R], pattern: Pattern, tokens: int) -> R:
    """Make a call with ever fewer keys near each query, until there is memory for it; each step is warned of.

    Args:
        call: Computes a pattern.
        pattern: The pattern that was asked for.
        tokens: Positions that it spans.
    """
    asked, window, first = pattern, tokens, None
    while True:
        try:
            return call(pattern)
        except (MemoryError, RuntimeError) as error:
            window //= 2
            if not is_out_of_memory(error) or not asked.combinable or window < DEFAULT_TILE:
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


def _retry(direction: str, operands: Operands, call: Call, whole: Callable[[], R], cut_up: Callable[[Split], R]) -> R:
    """Try one split after the other."""
    try:
        return whole()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if call.on_oom == "raise":
            error.add_note("ringweave: on_oom='degrade' computes the same in pieces that need less memory.")
            raise
        first = error
    # its frames hold what was allocated
    first.__traceback__ = None
    for cut in _splits(operands, call):
        if cut is None:
            # loaded when it is needed
            from .memory import trim

            trim()
        _tell(direction, operands, cut)
        try:
            return whole() if cut is None else cut_up(cut)
        except (UnsupportedError, PatternError, ShapeError):
            # a named backend, or the pattern, knows no such pieces
            continue
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None
    first.add_note(
        "ringweave: memory also ran out after caches were given back, and in pieces of one key head and few queries. "
        "Free memory, shorten the sequence or the batch, or, if another answer will do, pass on_oom='sparsify'."
    )
    raise first


def _splits(operands: Operands, call: Call) -> Iterator[Split | None]:
    """What is tried in order; None: the whole, once more."""
    yield None
    heads, groups, nq = operands.k.shape[1], 1, operands.q.shape[2]
    while groups < heads:
        groups *= next(n for n in range(2, heads + 1) if heads // groups % n == 0)
        if not _apart(operands, call, groups):
            groups = 1
            break
        yield Split(groups, nq)
    rows = nq
    # whole tiles; where keys lie in pages there are few queries
    while rows > DEFAULT_TILE and operands.pages is None:
        rows = -(-rows // (_FEWER * DEFAULT_TILE)) * DEFAULT_TILE
        yield Split(groups, rows)


def _apart(operands: Operands, call: Call, groups: int) -> bool:
    """Tell whether a pattern's heads can be taken apart."""
    try:
        call.pattern.shard(0, groups, operands.q.shape[1])
    except PatternError:
        return False
    return True


def _pieces(operands: Operands, call: Call, cut: Split) -> Iterator[tuple[Piece, Operands, Call]]:
    """The pieces of a call with what they are computed of: all of a group's rows, one group after the other."""
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


def _tell(direction: str, operands: Operands, cut: Split | None) -> None:
    """Log a split, once."""
    if cut is None:
        what, cost = "after caches were given back", "plans are made again"
    elif cut.rows == operands.q.shape[2]:
        what = "in pieces of key heads"
        cost = f"{cut.groups} calls, as many plans, and one result more of a piece"
    else:
        what = "in pieces of queries"
        pieces = cut.groups * -(-operands.q.shape[2] // cut.rows)
        cost = f"{pieces} calls that read all keys each" + ", gradients of keys in float32" * (direction == "backward")
    _say("memory ran out: attention goes on", f"{direction} {what}", cost)


def _say(why: str, what: str, cost: str) -> None:
    if what not in _told:
        _told.add(what)
        _log.warning("%s, %s (the same result; cost: %s)", why, what, cost)


def check_on_oom(on_oom: object, context: object = None, sharded: bool = False) -> None:
    """Raise UnsupportedError for what is no way to go on, and for one that ranks could not go together."""
    if not isinstance(on_oom, str) or on_oom not in ON_OOM:
        wanted = f"one of {', '.join(ON_OOM)}"
        raise UnsupportedError(message("on_oom", shown(on_oom), wanted, "Use 'degrade': it changes no result."))
    if on_oom == "stream" and (context is not None or sharded):
        got = "'stream' where ranks share the call"
        remedy = "Leave it out: ranks hold their shards on their devices."
        raise UnsupportedError(message("on_oom", got, "'raise' or 'degrade'", remedy))
    if on_oom == "sparsify" and (context is not None or sharded or torch.compiler.is_compiling()):
        got = "'sparsify' where ranks share the call, or under torch.compile"
        remedy = "Use 'degrade', or a sparser pattern from the start."
        raise UnsupportedError(message("on_oom", got, "'raise' or 'degrade'", remedy))
