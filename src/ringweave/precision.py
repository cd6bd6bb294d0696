"""In what types attention is computed, moved and kept: one policy for calls, modules, contexts and caches.

Keys and values may be stored in 8 bits, each token's row of a head times a scale of its own. A scale for more tokens,
such as a page's, would have to grow as a page fills: what is there already would be rounded again, and a row's bits
would depend on how it came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import UnsupportedError, message, shown
from .patterns.validate import one_of

#: How keys and values may travel between ranks.
WIRES = ("native", "bf16", "int8")
#: What keys and values may be stored in, and the largest number that each type holds.
STORED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_COMPUTED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Precision:
    """What is rounded to what; by default nothing beyond the types that tensors have.

    Args:
        compute: What queries, keys and values are converted to before they are multiplied: float32, bfloat16, float16
            or float64; the output has the type of q. None: as they are. Float32 is never multiplied as TF32.
        accumulate: What sums are in: float32, and float64 of float64 inputs; nothing else is computed.
        wire: What keys and values travel as between ranks: ``"native"``, ``"bf16"`` or ``"int8"``.
        table: What the tables of Bias and DistanceBias are read as; None: as they are.
        kv: What keys and values are stored in: ``torch.int8`` or ``torch.float8_e4m3fn``, with a scale for each token
            and key head, or None: as they are. For inference: such a call has no gradients.
    Raises:
        UnsupportedError: A type that is none of these.
    Example:
        >>> policy = rw.Precision(kv=torch.int8)
        >>> rw.attention(q, k, v, rw.Causal(), precision=policy).shape
        torch.Size([1, 4, 256, 32])

    References:
        Micikevicius et al. (2022), FP8 formats for deep learning, section 3 (e4m3).
    """

    compute: torch.dtype | None = None
    accumulate: torch.dtype = torch.float32
    wire: str = "native"
    table: torch.dtype | None = None
    kv: torch.dtype | None = None

    def __post_init__(self) -> None:
        takes: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("compute", (None, *_COMPUTED)),
            ("accumulate", (torch.float32,)),
            ("table", (None, *_COMPUTED)),
            ("kv", (None, *STORED)),
        )
        for name, known in takes:
            got = getattr(self, name)
            if (got is not None and not isinstance(got, torch.dtype)) or got not in known:
                wanted = "one of " + ", ".join(map(str, known)) if len(known) > 1 else str(known[0])
                raise UnsupportedError(message(f"precision.{name}", shown(got), wanted, "Leave it out."))
        one_of("precision.wire", self.wire, WIRES)


#: Nothing rounded.
NATIVE = Precision()


def as_precision(precision: object) -> Precision:
    """Give the policy of an argument; none is the native one."""
    if precision is None:
        return NATIVE
    if not isinstance(precision, Precision):
        got = type(precision).__name__
        raise UnsupportedError(message("precision", got, "a Precision or None", "Make one: rw.Precision(kv=...)."))
    return precision


class Scales(NamedTuple):
    """What the rows of stored keys and values are multiplied by: float32, their shapes without the channels."""

    k: Tensor
    v: Tensor


def scale_of(x: Tensor, most: float) -> Tensor:
    """Give the scale of rows (..., channels), of which the largest element becomes ``most``.

    A row that holds what is not finite has the scale NaN: it is NaN where it is read, and no number.
    """
    scale = (x.float().abs().amax(-1) / most).clamp_(min=torch.finfo(torch.float32).tiny)
    return scale.masked_fill_(scale.isinf(), torch.nan)


def store(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round rows (..., channels) to 8 bits: (what is stored, scales (...))."""
    scale = scale_of(x, STORED[dtype])
    codes = x.float() / scale[..., None]
    # a row of NaN is one by its scale
    codes = codes.nan_to_num_(0.0)
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scale


def widened(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What stored rows stand for."""
    return x.to(dtype) * scale[..., None]
