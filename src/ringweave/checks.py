"""Checks of numbers, names, sizes and devices; each returns the plain value or raises an error."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .errors import PatternError, RingweaveError, ShapeError, UnsupportedError, shown
from .types import DTYPES

#: Largest position, length or width; sums and products of two fit into int64.
LONGEST = 2**31 - 1
_LISTED = 2**24  # most members of a list
_GROUPS = 2**24  # most batch elements times heads
# most pairs of a dense relation, a byte each
_DENSE = 2**32
#: Integer dtypes.
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
    """Check a whole number in least..most and return it as an int.

    Accepts numpy's integers, but no tensors, since reading one may wait for a GPU. A number that is symbolic in a trace
    becomes a constant if ``settled`` is set, because texts and shapes are made of it.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise error(name, shown(value), "an int", remedy or f"Pass a whole number, such as int({name}).")
        value = value.item() if isinstance(value, np.integer) else int.__int__(value)
    if settled:
        value = operator.index(value)
    if value < least:
        raise error(name, shown(value), f"at least {least}", remedy or f"Raise {name} to {least} or more.")
    if value > most:
        raise error(name, shown(value), f"at most {most}", f"Lower {name}.")
    return value


def block_sides(block_size: object) -> tuple[int, int]:
    """Return the sides of a block, at least 1 each, from one side or two; raise PatternError otherwise."""
    sides = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sides) != 2:
        raise PatternError("block_size", shown(sides), "one side or two", "Pass (queries, keys).")
    return whole("block_size", sides[0], 1), whole("block_size", sides[1], 1)


def whole_fields(record: object, **least: int) -> None:
    """Convert fields of a frozen record to whole numbers, each with its least value."""
    for name, low in least.items():
        object.__setattr__(record, name, whole(name, getattr(record, name), low))


def flag(name: str, value: object, error: type[RingweaveError] = PatternError) -> bool:
    """Check True or False; values that are only truthy or falsy are refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise error(name, shown(value), "True or False", "Pass a bool.")
    return bool(value)


def number(
    name: str,
    value: object,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    error: type[RingweaveError] = PatternError,
) -> float:
    """Check a finite number in least..most and return it as a float."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise error(name, shown(value), "a number", f"Pass a number, such as float({name}).")
    if isinstance(value, int) and value.bit_length() > 64:
        raise error(name, shown(value), "a finite number", f"Correct {name}.")
    # ldexp returns the same number, and makes a symbolic one of a trace constant
    value = math.ldexp(value, 0)
    if not math.isfinite(value):
        raise error(name, shown(value), "a finite number", f"Correct {name}.")
    if not least <= value <= most:
        wanted, remedy = (f"at least {least:g}", "Raise") if value < least else (f"at most {most:g}", "Lower")
        raise error(name, shown(value), wanted, f"{remedy} {name}.")
    return value


def seconds(name: str, value: object) -> float:
    """Check a time to wait, from a millisecond to thirty years."""
    return number(name, value, 1e-3, 1e9, error=ShapeError)


def one_of(name: str, value: object, names: Sequence[str], wanted: str = "") -> str:
    """Check that a value is one of some names; ``wanted`` begins the error's list of accepted values."""
    if isinstance(value, str) and value in names:
        return value
    raise UnsupportedError(name, shown(value), f"{wanted}one of {', '.join(names)}", f"Use {names[0]!r}.")


def integers(name: str, value: object, least: int = -LONGEST) -> list[int]:
    """Copy whole numbers to a list, from a list, tuple, range or set, or a 1-D array or tensor of integers.

    A list is not converted to an array on the way, because ``torch.compile`` would not know the array's values.
    """
    if isinstance(value, Tensor) and value.ndim == 1 and value.device.type != "meta" and value.dtype in INTEGERS:
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        for bound in (value.min(), value.max()) if value.size else ():
            whole(name, bound, least)
        listed: list[int] = value.tolist()
        return listed
    if not isinstance(value, (list, tuple, range, set, frozenset)):
        raise PatternError(name, shown(value), "a list of ints", f"Pass {name} as a list.")
    try:
        length = len(value)
    except OverflowError:
        length = _LISTED + 1
    if length > _LISTED:
        raise PatternError(name, f"more than {_LISTED} numbers", "a shorter list", f"List fewer {name}.")
    return [whole(name, each, least) for each in value]


def check_sizes(
    nq: int, nk: int | None, heads: int = 1, batch: int = 1, q_offset: int = 0
) -> tuple[int, int, int, int, int]:
    """Check the sizes of a call and return (nq, nk, heads, batch, q_offset) as ints; nk is nq + q_offset by default.

    Raises:
        ShapeError: A size is not a whole number, below 1 (q_offset: below 0), or too large.
    """
    q_offset = _size("q_offset", q_offset, 0)
    nq = _size("nq", nq)
    nk = _size("nk", nq + q_offset if nk is None else nk)
    heads, batch = _size("heads", heads), _size("batch", batch)
    _size("q_offset + nq", q_offset + nq)
    if heads * batch > _GROUPS:
        raise ShapeError("batch, heads", f"{batch} x {heads}", f"at most {_GROUPS} in all", "Split the batch.")
    return nq, nk, heads, batch, q_offset


def _size(name: str, value: object, least: int = 1) -> int:
    return whole(name, value, least, error=ShapeError, remedy="Pass the sizes of a call that is not empty.")


def named_device(device: object) -> torch.device:
    """Convert a name to a device, which need not exist, or the index of an accelerator of this machine.

    Raises:
        ShapeError: The value is another one, or there is no accelerator of this index.
    """
    if isinstance(device, torch.device):
        return device
    if isinstance(device, int) and not isinstance(device, bool):
        kind = torch.accelerator.current_accelerator()
        if kind is None or not 0 <= device < torch.accelerator.device_count():
            raise _absent(device)
        return torch.device(kind.type, device)
    if isinstance(device, str):
        try:
            return torch.device(device)
        except RuntimeError:
            pass
    raise ShapeError("device", shown(device), "a device's name", "Pass 'cpu' or 'cuda'.")


def check_device(device: object) -> torch.device:
    """Check that a device exists on this machine and holds values.

    Raises:
        ShapeError: The value is not a device, or the device does not exist here.
    """
    place = named_device(device)
    try:
        here = place.type != "meta" and torch.empty(0, device=place).device.type == place.type
    except (RuntimeError, AssertionError, NotImplementedError):
        here = False
    if not here:
        raise _absent(device)
    return place


def _absent(device: object) -> ShapeError:
    wanted = "a device of this machine that holds values"
    return ShapeError("device", shown(device), wanted, "Pass 'cpu', or 'cuda' where there is a GPU.")


def check_dtype(dtype: object) -> torch.dtype | None:
    """Check that a dtype is one that attention computes, or None.

    Raises:
        ShapeError: The value is another one.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in DTYPES):
        raise ShapeError("dtype", shown(dtype), "a floating type", "Use float32, float16 or bfloat16.")
    return dtype


def check_context(context: object) -> None:
    """Check that an object is a context, or None.

    Raises:
        UnsupportedError: It is another object.
    """
    if context is not None and not callable(getattr(context, "attend", None)):
        got = type(context).__name__
        raise UnsupportedError("context", got, "a ContextParallel or None", "Construct one from the device mesh.")


def check_dense(nq: int, nk: int, heads: int, batch: int) -> None:
    """Raise ShapeError if a dense relation would be too large."""
    pairs = nq * nk * heads * batch
    if pairs > _DENSE:
        raise ShapeError("to_dense", f"{pairs} pairs", f"at most {_DENSE}", "Ask for a plan, or for the density.")
