"""Argument checks that the library shares: each returns the plain value, or says name, got, wanted, remedy."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..errors import PatternError, RingweaveError, ShapeError, UnsupportedError, message, shown

if TYPE_CHECKING:
    from .base import Pattern

#: No position, length or width is larger: sums and products of two fit into int64.
LONGEST = 2**31 - 1
_LISTED = 2**24  # members of a list
_GROUPS = 2**24  # batch elements times heads
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
