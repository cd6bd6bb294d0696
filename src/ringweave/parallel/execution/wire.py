"""How numbers travel: as they are, as bfloat16, or as 8-bit integers with a scale per token.

A format is chosen per message. Under a tolerance, some rows are encoded and decoded before sending; where that errs by
more, the message goes as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...patterns.validate import one_of
from ...precision import WIRES, scale_of

FORMATS = WIRES
NATIVE, BF16, INT8 = range(3)
_SCALE_BYTES = 4
_SAMPLED = 64


def code(wire: str) -> int:
    """Give the number of a format.

    Raises:
        UnsupportedError: An unknown name.
    """
    return FORMATS.index(one_of("wire", wire, FORMATS))


def nbytes(form: int, rows: int, channels: int, dtype: torch.dtype) -> int:
    """Count the bytes of rows of channels in a format."""
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
        # behind a message of an odd number of bytes
        out.copy_(x.to(dtype).contiguous().view(-1).view(torch.uint8))
    else:
        out.view(dtype).view(x.shape).copy_(x)


def read(data: Tensor, shape: tuple[int, ...], form: int, dtype: torch.dtype) -> Tensor:
    """Decode a flat uint8 tensor; a view of it in the native format, where it is aligned."""
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
    """Measure a format's relative error (Euclidean norm) on some rows of (..., tokens, channels), evenly chosen."""
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
    """What encoding did since the context was made.

    Attributes:
        messages: Sent messages by format's name.
        native_bytes: What all of them would have taken as they are.
        sent_bytes: What they took.
        worst_error: The largest measured relative error of one that was sent encoded.
        refused: Messages that went as they are because encoding erred beyond the tolerance.
    """

    messages: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORMATS, 0))
    native_bytes: int = 0
    sent_bytes: int = 0
    worst_error: float = 0.0
    refused: int = 0

    def count(self, form: int, sent: int, native: int) -> None:
        """Count a message that is sent: its bytes, and what they would be in the native format."""
        self.messages[FORMATS[form]] += 1
        self.sent_bytes += sent
        self.native_bytes += native

    @property
    def ratio(self) -> float:
        """Divide bytes sent by bytes as they are; 1 where nothing was sent."""
        return self.sent_bytes / self.native_bytes if self.native_bytes else 1.0


@dataclass
class Wire:
    """How messages of keys and values are asked to travel, and how they did.

    Attributes:
        form: The format that is asked for.
        tolerance: Largest relative error of an encoded message; None: encoded whatever the error.
        statistics: What encoding did.
    """

    form: int = NATIVE
    tolerance: float | None = None
    statistics: WireStatistics = field(default_factory=WireStatistics)

    def choose(self, tensors: Iterable[Tensor]) -> int:
        """Choose a message's format: what is asked for, where it errs within the tolerance on each of its tensors."""
        if self.form == NATIVE:
            return NATIVE
        errors = [error(x, self.form) for x in tensors]
        # written so that NaN, in any of them, goes as it is
        if self.tolerance is not None and not all(each <= self.tolerance for each in errors):
            self.statistics.refused += 1
            return NATIVE
        self.statistics.worst_error = max(self.statistics.worst_error, *errors)
        return self.form
