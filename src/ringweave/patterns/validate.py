"""Checks of numbers, sizes and patterns for the whole library; each returns the plain value or raises an error."""

from __future__ import annotations

import inspect
import math
import operator
import types
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PatternError, RingweaveError, ShapeError, UnsupportedError, shown
from .base import Pattern, provide
from .declared import DECLARED

#: Largest position, length or width; sums and products of two fit into int64.
LONGEST = 2**31 - 1
_LISTED = 2**24  # most members of a list
_GROUPS = 2**24  # most batch elements times heads
# most pairs of a dense relation, a byte each
_DENSE = 2**32
# most nested operators, and most patterns under them
_DEPTH, _LEAVES = 64, 2**12
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


def whole_fields(pattern: Pattern, **least: int) -> None:
    """Convert fields of a frozen pattern to whole numbers, each with its least value."""
    for name, low in least.items():
        object.__setattr__(pattern, name, whole(name, getattr(pattern, name), low))


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
    """Convert a name to a device, which need not exist; raise ShapeError for any other value."""
    if isinstance(device, torch.device):
        return device
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
        wanted = "a device of this machine that holds values"
        raise ShapeError("device", shown(device), wanted, "Pass 'cpu', or 'cuda' where there is a GPU.")
    return place


def nest(pattern: Pattern, depth: int, number: int) -> None:
    """Set a pattern's ``depth`` and ``leaves``; raise PatternError if the parser and planner would refuse it."""
    remedy = "Write chosen tokens as one Sinks([...]), and other unions as a BlockTable or from_mask_mod."
    if depth > _DEPTH:
        raise PatternError("pattern", f"operators nested {depth} deep", f"at most {_DEPTH}", remedy)
    if number > _LEAVES:
        raise PatternError("pattern", f"{number} patterns combined", f"at most {_LEAVES}", remedy)
    object.__setattr__(pattern, "depth", depth)
    object.__setattr__(pattern, "leaves", number)


def refuse(value: object, name: str = "pattern") -> NoReturn:
    """Raise PatternError for a value that is not a pattern, and say how to make a pattern of it."""
    got = f"the function {value.__name__}" if isinstance(value, types.FunctionType) else shown(value)
    raise PatternError(name, got, "a ringweave pattern", _way(value))


def _way(value: object) -> str:
    """Say how to make the pattern that a value of another type probably means."""
    if type(value).__name__ == "BlockMask":
        return "Take FlexAttention's masks through rw.from_block_mask(mask)."
    if isinstance(value, str):
        return "Read it with rw.patterns.parse(text)."
    if isinstance(value, (Tensor, np.ndarray)):
        return _way_of_mask(value)
    if isinstance(value, types.UnionType):
        return "It is a union of classes: call each class, as in Causal() | Sinks(64)."
    if value is None or isinstance(value, (bool, np.bool_)):
        return "Pass rw.Full() to attend all keys, rw.Causal() for causal attention."
    if isinstance(value, (list, tuple)) and any(isinstance(each, Pattern) for each in value):
        return "Combine them with & | ~, or give each head one with rw.PerHead([...])."
    if call := called(value):
        return call
    if callable(value) and not isinstance(value, type):
        return "Wrap a function of (b, h, q, k) with rw.from_mask_mod(fn)."
    return "Combine patterns with & | ~, or wrap a function in rw.from_mask_mod."


def _way_of_mask(mask: Tensor | NDArray[Any]) -> str:
    """Say how to make the pattern that a mask or a bias means, by its dtype and shape."""
    if isinstance(mask, Tensor):
        kind = "b" if mask.dtype == torch.bool else "f" if mask.is_floating_point() else "i"
        kind = "" if kind == "i" and mask.dtype not in INTEGERS else kind
        start = ""
    else:
        kind = {"u": "i"}.get(mask.dtype.kind, mask.dtype.kind)
        start = "Make it a tensor with mask = torch.from_numpy(mask). "
    shape, ndim = mask.shape, mask.ndim
    if ndim not in (1, 2, 3, 4) or kind not in tuple("bif") or (ndim == 1 and kind == "f"):
        return (
            "Build the pattern by rules, such as rw.Causal(), or from a bool mask: rw.BlockTable(mask, block_size=1)."
        )
    if ndim == 1:
        if kind == "b":
            return f"{start}For a mask of keys write rw.Sinks(mask)."
        return f"{start}For lengths write rw.KeyPadding(mask); for cumulative bounds rw.Documents(cu_seqlens=mask)."
    dense = "mask" if kind == "b" else "mask.bool()"
    pairs = f"rw.BlockTable({dense}, block_size=1)"
    if ndim == 4 and shape[1] == shape[2] == 1:
        # a padding mask that is shaped to be broadcast over heads and queries; as floats, 0 is a key and -inf none
        keys = f"mask[:, 0, 0]{' == 0' if kind == 'f' else '' if kind == 'b' else '.bool()'}"
        return f"{start}For a padding mask write rw.Sinks({keys}), & rw.Causal() for causal attention."
    if kind == "f":
        lead = {2: "[None, None]", 3: "[None]", 4: ""}[ndim]
        padding = "For a padding mask (B, N) of ones and zeros write rw.Sinks(mask.bool()). "
        start += padding if ndim == 2 and shape[0] != shape[1] else ""
        return f"{start}For a bias that is added to scores pass rw.Full() and terms=rw.Bias(mask{lead})."
    if ndim == 2 and shape[0] != shape[1]:
        return (
            f"{start}For a padding mask (B, N) write rw.KeyPadding(mask.sum(1)), or rw.Sinks({dense}) where it has "
            f"holes or begins with padding; for a mask of pairs {pairs}."
        )
    return f"{start}For a mask of pairs write {pairs}; a rule such as rw.Causal() is faster where one fits."


def called(value: object) -> str:
    """Say that a pattern's class, or a preset, has to be called; empty for other values."""
    preset = isinstance(value, types.FunctionType) and getattr(DECLARED.get(value.__name__), "make", None) is value
    pattern = isinstance(value, type) and issubclass(value, Pattern) and not inspect.isabstract(value)
    if not preset and not pattern:
        return ""
    name: str = value.__name__  # type: ignore[attr-defined]
    example = DECLARED[name].example if name in DECLARED else f"{name}(...)"
    return f"Call it: {example}{'' if example.endswith(('()', '(...)')) else ', for example'}."


def made_by(pattern: Pattern) -> str:
    """Say which preset made a pattern and for which length, as an addition to an error; empty if none did."""
    made = pattern._made_by
    return "" if made is None else f" (made by {made[0]} for {made[1]} tokens)"


def made_again(pattern: Pattern, tokens: int) -> str:
    """Say how to make a preset's pattern again for another length; empty for other patterns."""
    made = pattern._made_by
    return "" if made is None else f"Make it for this length: {made[0]}({tokens}, ...)."


def fitting(
    pattern: Pattern,
    nq: int,
    nk: int | None,
    heads: int = 1,
    batch: int = 1,
    q_offset: int = 0,
    kv_heads: int | None = None,
) -> tuple[Pattern, int, int, int, int, int]:
    """Check a pattern and the sizes of a call; return the bound pattern and (nq, nk, heads, batch, q_offset) as ints.

    Raises:
        PatternError: The value is not a pattern, or is made for other sizes.
        ShapeError: A size is not a whole number, below 1 (q_offset: below 0), or too large.
    """
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    sizes = check_sizes(nq, nk, heads, batch, q_offset)
    pattern = pattern.bound(sizes[2], kv_heads)
    check_extents(pattern, sizes[3], sizes[2])
    pattern.check(sizes[0], sizes[1], sizes[4])
    return pattern, *sizes


def check_dense(nq: int, nk: int, heads: int, batch: int) -> None:
    """Raise ShapeError if a dense relation would be too large."""
    pairs = nq * nk * heads * batch
    if pairs > _DENSE:
        raise ShapeError("to_dense", f"{pairs} pairs", f"at most {_DENSE}", "Ask for a plan, or for the density.")


def check_extents(pattern: Pattern, batch: int, heads: int, *, read: bool = True) -> None:
    """Raise PatternError if the pattern is made for another number of batch elements or heads.

    Args:
        pattern: A pattern.
        batch: Number of batch elements.
        heads: Number of query heads.
        read: Whether the pattern's tables will be read, so that they must hold values.
    """
    made_batch, made_heads = pattern.extents()
    for name, what, made, got in (
        ("batch", "batch elements", made_batch, batch),
        ("heads", "query heads", made_heads, heads),
    ):
        if made is not None and made != got:
            raise PatternError(
                f"pattern {pattern!r}",
                f"a call with {name} = {got}",
                f"{name} = {made}, which the pattern is made for",
                f"Pass tensors with {made} {what}, or build the pattern for {got}.",
            )
    if read and any(table.device.type == "meta" for table in pattern.tables):
        raise PatternError(
            f"pattern {pattern!r}", "a table on the meta device", "values", "Build it from a table with values."
        )


provide(refuse=refuse, fitting=fitting, check_dense=check_dense)
