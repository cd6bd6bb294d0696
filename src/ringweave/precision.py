"""Choose the dtypes of computation, communication and storage: one policy for calls, modules, contexts and caches.

Keys and values may be stored in 8 bits with one scale for each token and head. A scale for several tokens, such as a
page, would grow as the page fills. Earlier tokens would then be rounded again, and their bits would depend on the order
of writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import one_of
from .errors import UnsupportedError, shown

#: Formats in which keys and values may be sent between ranks.
WIRES = ("native", "bf16", "int8")
#: Orders in which the keys of a dilated or strided pattern may be summed.
SUMMATION_ORDERS = ("fixed", "fast")
#: Dtypes of stored keys and values, with the largest number of each.
STORED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_COMPUTED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Precision:
    """A precision policy; by default nothing is rounded beyond the dtypes of the tensors.

    Args:
        compute: Dtype to which queries, keys and values are converted before multiplication: float32, bfloat16, float16
            or float64; None keeps theirs. The output has the dtype of q. Float32 is never multiplied as TF32.
        wire: Format of keys and values sent between ranks: ``"native"``, ``"bf16"`` or ``"int8"``.
        table: Dtype to which the tables of Bias and DistanceBias are converted; None keeps theirs.
        kv: Dtype of stored keys and values: ``torch.int8`` or ``torch.float8_e4m3fn``, with a scale for each token and
            key head; None keeps theirs. Stored keys and values are for inference: the call has no gradients.
        summation_order: Order of sums over the keys of dilated and strided patterns on the CPU kernel. ``"fixed"``
            gives a row the same bits in every call. ``"fast"`` saves 15 to 35 % of forward's time at rates from 16 on;
            a row's bits then depend on the sizes of the call.
    Raises:
        UnsupportedError: A dtype or format is not one of these.
    Example:
        >>> policy = rw.Precision(kv=torch.int8)
        >>> rw.attention(q, k, v, rw.Causal(), precision=policy).shape
        torch.Size([1, 4, 256, 32])

    References:
        Micikevicius et al. (2022), FP8 formats for deep learning, section 3 (e4m3).
    """

    compute: torch.dtype | None = None
    wire: str = "native"
    table: torch.dtype | None = None
    kv: torch.dtype | None = None
    summation_order: str = "fixed"

    def __post_init__(self) -> None:
        takes: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("compute", (None, *_COMPUTED)),
            ("table", (None, *_COMPUTED)),
            ("kv", (None, *STORED)),
        )
        for name, known in takes:
            got = getattr(self, name)
            if (got is not None and not isinstance(got, torch.dtype)) or got not in known:
                wanted = "one of " + ", ".join(map(str, known))
                raise UnsupportedError(f"precision.{name}", shown(got), wanted, "Leave it out.")
        one_of("precision.wire", self.wire, WIRES)
        one_of("precision.summation_order", self.summation_order, SUMMATION_ORDERS)


#: The policy that rounds nothing.
NATIVE = Precision()


def as_precision(precision: object) -> Precision:
    """Return the policy of an argument; None means the native one."""
    if precision is None:
        return NATIVE
    if not isinstance(precision, Precision):
        got = type(precision).__name__
        raise UnsupportedError("precision", got, "a Precision or None", "Make one: rw.Precision(kv=...).")
    return precision


class Scales(NamedTuple):
    """Factors of the rows of stored keys and values, float32, in the shapes of k and v without the channels."""

    k: Tensor
    v: Tensor


def scale_of(x: Tensor, most: float) -> Tensor:
    """Return the scales of rows (..., channels) that map each row's largest magnitude to ``most``.

    A row with an element that is not finite gets the scale NaN, so that all its elements are read as NaN.
    """
    scale = (x.float().abs().amax(-1) / most).clamp_(min=torch.finfo(torch.float32).tiny)
    return scale.masked_fill_(scale.isinf(), torch.nan)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round rows (..., channels) to 8 bits and return (codes, scales (...))."""
    scale = scale_of(x, STORED[dtype])
    codes = x.float() / scale[..., None]
    # NaN has no code in int8; the scale makes such a row NaN
    codes = codes.nan_to_num_(0.0)
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scale


def as_codes(x: Tensor) -> Tensor:
    """View 8-bit floats as bytes, since extensions and indexed writes do not take them; return others as they are."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def dequantize_rows(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of stored rows: codes times scales."""
    return x.to(dtype) * scale[..., None]
