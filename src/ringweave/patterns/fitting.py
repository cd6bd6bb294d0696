"""Check that a pattern fits a call, and say how to make a pattern of another value."""

from __future__ import annotations

import inspect
import types
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import INTEGERS, check_sizes
from ..errors import PatternError, shown
from .base import Pattern
from .declared import DECLARED

# most nested operators, and most patterns under them
_DEPTH, _LEAVES = 64, 2**12


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
    if pattern.tables:
        from .lists import check_rows
        from .shifted import with_offsets

        check_rows(pattern, sizes[0])
        pattern, first = with_offsets(pattern, sizes[4], 0, sizes[3]) if sizes[4] else (pattern, 0)
        sizes = (*sizes[:4], first)
    check_extents(pattern, sizes[3], sizes[2])
    pattern.check(sizes[0], sizes[1], sizes[4])
    return pattern, *sizes


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
