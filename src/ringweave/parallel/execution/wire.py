"""Number formats of messages: native, bfloat16, or 8-bit integers with one scale per token.

Each message has a format. With a tolerance, a sample of rows is encoded and decoded before sending; if the error
exceeds the tolerance, the message is sent in the native format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...checks import one_of
from ...precision import WIRES, scale_of

FORMATS = WIRES
NATIVE, BF16, INT8 = range(3)
_SCALE_BYTES = 4
_SAMPLED = 64


def code(wire: str) -> int:
    """Return the number of a format.

    Raises:
        UnsupportedError: The name is unknown.
    """
    return FORMATS.index(one_of("wire", wire, FORMATS))


def nbytes(form: int, rows: int, channels: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of ``rows`` rows of ``channels`` channels in a format."""
    if form == INT8:
        return rows * (channels + _SCALE_BYTES)
    return rows * channels * (2 if form == BF16 else dtype.itemsize)


def write(out: Tensor, x: Tensor, form: int) -> None:
    """Encode x (..., channels) into a flat uint8 tensor of ``nbytes``."""
    if form == INT8:
        scale = _scale(x)
        body = (x.float() / scale).round_().to(torch.int8)
        out[: body.numel()].view(torch.int8).view(body.shape).copy_(body)
        out[body.numel() :].copy_(scale.contiguous().view(-1).view(torch.uint8))
        return
    dtype = torch.bfloat16 if form == BF16 else x.dtype
    if out.storage_offset() % dtype.itemsize:
        # A message with an odd number of bytes precedes, so a view as dtype would be misaligned. The values are copied
        # first, since a tensor of one element may have a stride with which it has no view as bytes.
        row = torch.empty(x.numel(), dtype=dtype, device=x.device)
        row.view(x.shape).copy_(x)
        out.copy_(row.view(torch.uint8))
    else:
        out.view(dtype).view(x.shape).copy_(x)


def read(data: Tensor, shape: tuple[int, ...], form: int, dtype: torch.dtype) -> Tensor:
    """Decode a flat uint8 tensor; the result is a view of ``data`` if the format is native and the data is aligned."""
    if form == INT8:
        rows = data.numel() // (shape[-1] + _SCALE_BYTES)
        body = data[: rows * shape[-1]].view(torch.int8).view(shape)
        scale = data[rows * shape[-1] :].clone().view(torch.float32).view(*shape[:-1], 1)
        return (body.float() * scale).to(dtype)
    there = torch.bfloat16 if form == BF16 else dtype
    if data.storage_offset() % there.itemsize:
        data = data.clone()
    return data.view(there).view(shape).to(dtype)


def error(x: Tensor, form: int) -> float:
    """Measure a format's relative error (Euclidean norm) on evenly spaced rows of x, (..., tokens, channels)."""
    rows = x[..., :: max(1, x.shape[-2] // _SAMPLED), :].float()
    if form == INT8:
        scale = _scale(rows)
        back = (rows / scale).round() * scale
    else:
        back = rows.to(torch.bfloat16).float()
    size, lost = float(rows.norm()), float((back - rows).norm())
    return lost / size if size else lost


def _scale(x: Tensor) -> Tensor:
    return scale_of(x, 127.0)[..., None]


@dataclass
class WireStatistics:
    """Counters of sent messages since the context was created.

    Attributes:
        messages: Number of sent messages by name of their format.
        native_bytes: Size of all sent messages if they were in the native format.
        sent_bytes: Actual size of all sent messages.
        worst_error: Largest measured relative error of an encoded message.
        refused: Number of messages sent in the native format because their error exceeded the tolerance.
    """

    messages: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORMATS, 0))
    native_bytes: int = 0
    sent_bytes: int = 0
    worst_error: float = 0.0
    refused: int = 0

    def count(self, form: int, sent: int, native: int) -> None:
        """Count a sent message with its size in bytes, actual and in the native format."""
        self.messages[FORMATS[form]] += 1
        self.sent_bytes += sent
        self.native_bytes += native

    @property
    def ratio(self) -> float:
        """Bytes sent over bytes in the native format; 1 if no message was sent."""
        return self.sent_bytes / self.native_bytes if self.native_bytes else 1.0


@dataclass
class Wire:
    """The requested format of messages of keys and values, and counters of the sent ones."""

    form: int = NATIVE
    # largest relative error of an encoded message; None to encode regardless of the error
    tolerance: float | None = None
    statistics: WireStatistics = field(default_factory=WireStatistics)

    def choose(self, tensors: Iterable[Tensor]) -> int:
        """Choose a message's format: the requested one if the error of each of its tensors is within the tolerance."""
        if self.form == NATIVE:
            return NATIVE
        errors = [error(x, self.form) for x in tensors]
        # `not all(<=)` and not `any(>)`, so that a message with a NaN error is sent in the native format
        if self.tolerance is not None and not all(each <= self.tolerance for each in errors):
            self.statistics.refused += 1
            return NATIVE
        self.statistics.worst_error = max(self.statistics.worst_error, *errors)
        return self.form
