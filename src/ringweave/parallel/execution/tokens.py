"""Places of tokens in a shard, a buffer or a message."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..planning.placement import Int64


@dataclass(frozen=True, eq=False)
class Tokens:
    """Ascending places on an axis of tokens."""

    count: int
    span: tuple[int, int, int] | None  # (start, stop, step) if they are evenly spaced, else None
    index: Tensor | None  # int64 (count,) if they are not evenly spaced, else None

    @staticmethod
    def at(places: Int64) -> Tokens:
        """Create the object from an array of places."""
        if len(places) == 0:
            return Tokens(0, (0, 0, 1), None)
        step = int(places[1] - places[0]) if len(places) > 1 else 1
        first, last = int(places[0]), int(places[-1])
        if step > 0 and bool((np.diff(places) == step).all()):
            return Tokens(len(places), (first, last + 1, step), None)
        return Tokens(len(places), None, torch.from_numpy(np.ascontiguousarray(places)))

    @property
    def adjacent(self) -> bool:
        """Whether the places are consecutive."""
        return self.span is not None and self.span[2] == 1

    def of(self, x: Tensor) -> Tensor:
        """Return these tokens of x, (..., tokens, channels), as a view if they are evenly spaced, else as a copy."""
        if self.span is not None:
            return x[..., slice(*self.span), :]
        assert self.index is not None
        return x.index_select(-2, self.index.to(x.device))

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write values to these places of x."""
        if self.span is not None:
            x[..., slice(*self.span), :] = values
        else:
            assert self.index is not None
            x.index_copy_(x.ndim - 2, self.index.to(x.device), values.to(x.dtype))

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add values to these places of x; places are distinct, so the order of additions is the order of calls."""
        if self.span is not None:
            x[..., slice(*self.span), :] += values
        else:
            self.put(x, self.of(x) + values)
