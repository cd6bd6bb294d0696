"""Buffers that are kept from call to call, so that a steady state allocates nothing."""

from __future__ import annotations

import torch
from torch import Tensor


class NamedBuffers:
    """Flat buffers by name that grow to the largest use.

    A buffer is good until its name is taken again; a context runs one call at a time, so names are enough.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """A tensor over the named buffer, its contents undefined."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        key = (name, torch.device(device))
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._buffers[key] = buffer
        return buffer[:nbytes].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """Count the bytes that are held."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def clear(self) -> None:
        """Give them back."""
        self._buffers.clear()
