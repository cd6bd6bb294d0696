"""Parts that modules of attention share: checks of sizes and options, norms, rotation, and gradients of zero."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..api import longnet_attention
from ..call import Arguments
from ..checks import check_device, check_dtype, flag, named_device, number, whole
from ..errors import ShapeError, UnsupportedError, shown
from ..hierarchical import hierarchical_attention
from ..types import acc_dtype
from ..weights import attention_weights

# the parameters of the functions that modules call in place of attention
_PARAMETERS = {
    function.__name__: frozenset(inspect.signature(function).parameters)
    for function in (longnet_attention, hierarchical_attention, attention_weights)
}


def accepted_options(function: str, options: Mapping[str, Any], user: str) -> dict[str, Any]:
    """Return those of attention's arguments that another function takes too, for the module or option ``user``.

    Raises:
        UnsupportedError: Another argument does not have its default, so the function would ignore it.
    """
    accepted = {}
    for name, value in options.items():
        default = Arguments._field_defaults[name]
        if name in _PARAMETERS[function]:
            accepted[name] = value
        elif value is not default and (isinstance(value, Tensor) or value != default):
            wanted = f"{default!r}, the default, with {user}"
            raise UnsupportedError(name, shown(value), wanted, "Leave out the option that sets it.")
    return accepted


def refuse_pattern(options: Mapping[str, object], why: str) -> None:
    """Raise UnsupportedError if the options of a module that has its own pattern contain one."""
    if "pattern" in options:
        raise UnsupportedError("pattern", shown(options["pattern"]), "no such option", f"Leave it out: {why}.")


def module_place(device: object, dtype: object) -> dict[str, Any]:
    """Return the checked device and dtype of a module's parameters; each may be None, and the device may be meta."""
    place = None if device is None else named_device(device)
    if place is not None and place.type != "meta":
        check_device(place)
    return {"device": place, "dtype": check_dtype(dtype)}


def module_sizes(embed_dim: int, num_heads: int, num_kv_heads: int | None) -> tuple[int, int, int]:
    """Return the checked sizes of a module; a module has as many key heads as query heads by default."""
    embed_dim = whole("embed_dim", embed_dim, 1, error=ShapeError)
    num_heads = whole("num_heads", num_heads, 1, error=ShapeError)
    kv_heads = whole("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads, 1, error=ShapeError)
    sizes = ("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", kv_heads)
    for (name, size), (of, parts) in itertools.pairwise(sizes):
        if size % parts:
            raise ShapeError(of, parts, f"a divisor of {name}, {size}", f"Change {of} or {name}.")
    return embed_dim, num_heads, kv_heads


def checked_rotary_base(base: float | None, head_dim: int) -> float | None:
    """Check the base of rotary position embeddings: from 1 on, its powers are finite. None is no rotation."""
    if base is None:
        return None
    base = number("rotary_base", base, 1.0, error=ShapeError)
    if head_dim % 2:
        raise ShapeError("head dim", head_dim, "an even number, for rotary_base", "Change num_heads.")
    return base


def head_norms(qk_norm: bool, head_dim: int, **place: Any) -> tuple[nn.RMSNorm | None, nn.RMSNorm | None]:
    """Return the norms of each head's queries and keys, or twice None."""
    if not flag("qk_norm", qk_norm, ShapeError):
        return None, None
    return nn.RMSNorm(head_dim, **place), nn.RMSNorm(head_dim, **place)


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate x, (batch, heads, tokens, channels), by positions (tokens,) or (batch, tokens)."""
    # at least float32: positions rounded to bfloat16 would be off by many tokens
    half, acc = x.shape[-1] // 2, acc_dtype(x.dtype)
    rates = base ** (-torch.arange(half, device=x.device, dtype=acc) / half)
    angles = positions[..., None].to(acc) * rates
    angles = angles if positions.ndim == 1 else angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(acc).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def connected(out: Tensor, unused: Iterable[Tensor]) -> Tensor:
    """Return out with gradients of zero, rather than none, for tensors that it does not depend on.

    DistributedDataParallel waits for a gradient of each parameter, and so does each rank of a context for those of the
    others. The sum of no elements is 0, whatever values the tensor has.
    """
    for x in unused:
        out = out + x[None][:0].sum()
    return out
