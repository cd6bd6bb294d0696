"""Checks of numbers, sizes and patterns, shared by the library: each returns the plain value or raises an error."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import PatternError, RingweaveError, ShapeError, UnsupportedError, message, shown
from .base import Pattern, provide

#: No position, length or width is larger: sums and products of two fit into int64.
LONGEST = 2**31 - 1
_LISTED = 2**24  # members of a list
_GROUPS = 2**24  # batch elements times heads
# pairs of a dense relation: a byte each
_DENSE = 2**32
# operators within operators, and patterns under them
_DEPTH, _LEAVES = 64, 2**12
#: Types of whole numbers.
INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def whole(
    name: str,
    value: object,
    least: int,
    most: int = LONGEST,
    *,
    error: type[RingweaveError] = PatternError,
    remedy: str | None = None,
    settled: bool = True,
) -> int:
    """Check a whole number of least..most, as an int; numpy's are taken, no tensors: reading one may wait for a GPU.

    What a trace leaves open is settled, unless it is not to be: texts and shapes are made of it.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise error(message(name, shown(value), "an int", remedy or f"Pass a whole number, such as int({name})."))
        value = value.item() if isinstance(value, np.integer) else int.__int__(value)
    if settled:
        value = operator.index(value)
    if value < least:
        raise error(message(name, shown(value), f"at least {least}", remedy or f"Raise {name} to {least} or more."))
    if value > most:
        raise error(message(name, shown(value), f"at most {most}", f"Lower {name}."))
    return value


def whole_fields(pattern: Pattern, **least: int) -> None:
    """Let fields of a frozen pattern be whole numbers, each with its least value."""
    for name, low in least.items():
        object.__setattr__(pattern, name, whole(name, getattr(pattern, name), low))


def flag(name: str, value: object, error: type[RingweaveError] = PatternError) -> bool:
    """Check True or False, and nothing that only counts as one of them."""
    if not isinstance(value, (bool, np.bool_)):
        raise error(message(name, shown(value), "True or False", "Pass a bool."))
    return bool(value)


def number(
    name: str,
    value: object,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    error: type[RingweaveError] = PatternError,
) -> float:
    """A finite number of least..most as a float."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise error(message(name, shown(value), "a number", f"Pass a number, such as float({name})."))
    if isinstance(value, int) and value.bit_length() > 64:
        raise error(message(name, shown(value), "a finite number", f"Correct {name}."))
    # the same number, which a trace may not leave open
    value = math.ldexp(value, 0)
    if not math.isfinite(value):
        raise error(message(name, shown(value), "a finite number", f"Correct {name}."))
    if not least <= value <= most:
        wanted, remedy = (f"at least {least:g}", "Raise") if value < least else (f"at most {most:g}", "Lower")
        raise error(message(name, shown(value), wanted, f"{remedy} {name}."))
    return value


def seconds(name: str, value: object) -> float:
    """A time to wait, from a millisecond to thirty years."""
    return number(name, value, 1e-3, 1e9, error=ShapeError)


def one_of(name: str, value: object, names: Sequence[str], wanted: str = "") -> str:
    """The value, which is one of some names; ``wanted`` says what else would do."""
    if isinstance(value, str) and value in names:
        return value
    raise UnsupportedError(message(name, shown(value), f"{wanted}one of {', '.join(names)}", f"Use {names[0]!r}."))


def integers(name: str, value: object, least: int = -LONGEST) -> list[int]:
    """List whole numbers anew: of a list, tuple, range or set, or of a 1-D array or tensor of integers.

    Of a list nothing becomes an array: ``torch.compile`` would not know its values.
    """
    if isinstance(value, Tensor) and value.ndim == 1 and value.device.type != "meta" and value.dtype in INTEGERS:
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        for bound in (value.min(), value.max()) if value.size else ():
            whole(name, bound, least)
        listed: list[int] = value.tolist()
        return listed
    if not isinstance(value, (list, tuple, range, set, frozenset)):
        raise PatternError(message(name, shown(value), "a list of ints", f"Pass {name} as a list."))
    try:
        length = len(value)
    except OverflowError:
        length = _LISTED + 1
    if length > _LISTED:
        raise PatternError(message(name, f"more than {_LISTED} numbers", "a shorter list", f"List fewer {name}."))
    return [whole(name, each, least) for each in value]


def check_sizes(
    nq: int, nk: int | None, heads: int = 1, batch: int = 1, q_offset: int = 0
) -> tuple[int, int, int, int, int]:
    """Check (nq, nk, heads, batch, q_offset) of a call, as ints, nk being nq + q_offset by default.

    Raises:
        ShapeError: One that is no whole number, below 1 (q_offset: 0) or too large.
    """
    q_offset = _size("q_offset", q_offset, 0)
    nq = _size("nq", nq)
    nk = _size("nk", nq + q_offset if nk is None else nk)
    heads, batch = _size("heads", heads), _size("batch", batch)
    _size("q_offset + nq", q_offset + nq)
    if heads * batch > _GROUPS:
        raise ShapeError(message("batch, heads", f"{batch} x {heads}", f"at most {_GROUPS} in all", "Split the batch."))
    return nq, nk, heads, batch, q_offset


def _size(name: str, value: object, least: int = 1) -> int:
    return whole(name, value, least, error=ShapeError, remedy="Pass the sizes of the call, none of them empty.")


def named_device(device: object) -> torch.device:
    """Name a device, which need not be here; ShapeError for what is no name of one."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, str):
        try:
            return torch.device(device)
        except RuntimeError:
            pass
    raise ShapeError(message("device", shown(device), "a device's name", "Pass 'cpu' or 'cuda'."))


def check_device(device: object) -> torch.device:
    """Check that a device is here and holds values.

    Raises:
        ShapeError: No device, or none of this machine.
    """
    place = named_device(device)
    try:
        here = place.type != "meta" and torch.empty(0, device=place).device.type == place.type
    except (RuntimeError, AssertionError, NotImplementedError):
        here = False
    if not here:
        wanted = "a device of this machine that holds values"
        raise ShapeError(message("device", shown(device), wanted, "Pass 'cpu', or 'cuda' where there is a GPU."))
    return place


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


provide(refuse=refuse, fitting=fitting, check_dense=check_dense)
