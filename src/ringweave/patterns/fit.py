"""Whether patterns fit a call, and one another: each check says name, got, wanted, remedy."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from ..errors import PatternError, ShapeError, message
from .base import Pattern
from .numbers import check_sizes

# pairs of a dense relation: a byte each
_DENSE = 2**32
# operators within operators, and patterns under them
_DEPTH, _LEAVES = 64, 2**12


def nest(pattern: Pattern, depth: int, number: int) -> None:
    """Say what a pattern combines; PatternError where that is more than reading and planning are made for."""
    remedy = "Write chosen tokens as one Sinks([...]), and other unions as a BlockTable or from_mask_mod."
    if depth > _DEPTH:
        raise PatternError(message("pattern", f"operators nested {depth} deep", f"at most {_DEPTH}", remedy))
    if number > _LEAVES:
        raise PatternError(message("pattern", f"{number} patterns combined", f"at most {_LEAVES}", remedy))
    object.__setattr__(pattern, "depth", depth)
    object.__setattr__(pattern, "leaves", number)


def refuse(value: object, name: str = "pattern") -> NoReturn:
    """Raise PatternError for what is no pattern, with the way to make one of it."""
    remedy = "Combine patterns with & | ~, or wrap a function in from_mask_mod."
    if type(value).__name__ == "BlockMask":
        remedy = "Take FlexAttention's masks through from_block_mask."
    elif isinstance(value, str):
        remedy = "Read text with ringweave.patterns.parse."
    elif isinstance(value, Tensor):
        remedy = "Make a BlockTable of a table of blocks."
    elif isinstance(value, type) and issubclass(value, Pattern):
        remedy = f"Call it: {value.__name__}(...)."
    raise PatternError(message(name, type(value).__name__, "a ringweave pattern", remedy))


def fitting(
    pattern: Pattern,
    nq: int,
    nk: int | None,
    heads: int = 1,
    batch: int = 1,
    q_offset: int = 0,
    kv_heads: int | None = None,
) -> tuple[Pattern, int, int, int, int, int]:
    """The pattern of a call, and (nq, nk, heads, batch, q_offset), as ints; nk is nq + q_offset by default.

    Raises:
        PatternError: What is no pattern, or one that is made for other sizes.
        ShapeError: A size that is no whole number, below 1 (q_offset: 0) or too large.
    """
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    sizes = check_sizes(nq, nk, heads, batch, q_offset)
    pattern = pattern.bound(sizes[2], kv_heads)
    check_extents(pattern, sizes[3], sizes[2])
    pattern.check(sizes[0], sizes[1], sizes[4])
    return pattern, *sizes


def check_dense(nq: int, nk: int, heads: int, batch: int) -> None:
    """Raise ShapeError where a dense relation would be too large."""
    pairs = nq * nk * heads * batch
    if pairs > _DENSE:
        raise ShapeError(
            message("to_dense", f"{pairs} pairs", f"at most {_DENSE}", "Ask for a plan, or for the density.")
        )


def check_extents(pattern: Pattern, batch: int, heads: int, *, read: bool = True) -> None:
    """Raise PatternError where the pattern is made for another number of batch elements or heads.

    Args:
        pattern: A pattern.
        batch: Batch elements.
        heads: Query heads.
        read: Whether its tables will be read, so that they have to hold values.
    """
    made_batch, made_heads = pattern.extents()
    for name, made, got in (("batch", made_batch, batch), ("heads", made_heads, heads)):
        if made is not None and made != got:
            raise PatternError(
                message(
                    f"pattern {pattern!r}",
                    f"a call with {name} = {got}",
                    f"{name} = {made}, which the pattern is made for",
                    f"Pass tensors with {made} query {name}, or build the pattern for {got}.",
                )
            )
    if read and any(table.device.type == "meta" for table in pattern.tables):
        raise PatternError(
            message(f"pattern {pattern!r}", "a table on the meta device", "values", "Build it of a table with values.")
        )
