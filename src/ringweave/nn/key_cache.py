"""Keys, values and summaries of earlier tokens, for decoding steps of modules that choose their keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError


class KeyCache:
    """Tensors that a module keeps of earlier tokens, by name, (B, heads, rows, channels), without gradients.

    A module's ``empty_cache()`` makes it, and each call with ``cache=`` appends the tokens of the call. Buffers double
    when they are full, so the cost of appending does not grow with the number of tokens in the cache.

    Attributes:
        length: Number of tokens so far, which is the position of the next one.
    """

    def __init__(self) -> None:
        self.length = 0
        self._buffers: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}

    def read(self, name: str) -> Tensor | None:
        """Return the tensor of a name, (B, heads, rows, channels); None if nothing was appended."""
        return self._buffers[name][:, :, : self._rows[name]] if name in self._buffers else None

    def append(self, name: str, x: Tensor) -> Tensor:
        """Append rows to the tensor of a name, and return all of its rows."""
        rows = self._rows.get(name, 0)
        end = rows + x.shape[2]
        buffer = self._buffers.get(name)
        if buffer is None or end > buffer.shape[2]:
            larger = x.new_empty(*x.shape[:2], max(end, 2 * rows), x.shape[3])
            if buffer is not None:
                self._check(x, buffer)
                larger[:, :, :rows] = buffer[:, :, :rows]
            self._buffers[name] = buffer = larger
        self._check(x, buffer)
        buffer[:, :, rows:end] = x
        self._rows[name] = end
        return buffer[:, :, :end]

    def replace(self, name: str, x: Tensor) -> None:
        """Keep a copy of x under a name, in place of an earlier tensor."""
        self._buffers[name], self._rows[name] = x.clone(), x.shape[2]

    def last(self, name: str, x: Tensor, keep: int) -> Tensor:
        """Return the kept rows followed by x, and keep the last ``keep`` rows of both."""
        old = self.read(name)
        if old is not None:
            self._check(x, old)
            x = torch.cat([old, x], 2)
        self.replace(name, x[:, :, max(0, x.shape[2] - keep) :])
        return x

    def _check(self, x: Tensor, kept: Tensor) -> None:
        got, wanted = ((t.shape[0], t.dtype, t.device) for t in (x, kept))
        if got != wanted:
            remedy = "Pass the next tokens of the batch for which the cache was made."
            raise ShapeError("batch, dtype, device", got, f"those of the cache, {wanted}", remedy)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {self._rows[name]} rows" for name in self._buffers)
        return f"KeyCache(<{self.length} tokens{sizes and '; ' + sizes}>)"
