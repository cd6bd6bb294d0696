"""Places along the token axis of a tensor, as a strided view where they allow it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..planning.placement import Int64


@dataclass(frozen=True, eq=False)
class Tokens:
    """Some places of an axis of tokens, ascending.

    Attributes:
        count: How many.
        span: (start, stop, step), where they are evenly spaced.
        index: (count,) int64, where they are not.
    """

    count: int
    span: tuple[int, int, int] | None
    index: Tensor | None

    @staticmethod
    def at(places: Int64) -> Tokens:
        """Make them of an array of places."""
        if len(places) == 0:
            return Tokens(0, (0, 0, 1), None)
        step = int(places[1] - places[0]) if len(places) > 1 else 1
        first, last = int(places[0]), int(places[-1])
        if step > 0 and bool((np.diff(places) == step).all()):
            return Tokens(len(places), (first, last + 1, step), None)
        return Tokens(len(places), None, torch.from_numpy(np.ascontiguousarray(places)))

    @property
    def adjacent(self) -> bool:
        """Tell whether they lie side by side."""
        return self.span is not None and self.span[2] == 1

    def of(self, x: Tensor) -> Tensor:
        """Take these tokens of (..., tokens, channels): a view of an even spacing, else a copy."""
        if self.span is not None:
            return x[..., slice(*self.span), :]
        assert self.index is not None
        return x.index_select(-2, self.index.to(x.device))

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write them."""
        if self.span is not None:
            x[..., slice(*self.span), :] = values
        else:
            assert self.index is not None
            x.index_copy_(x.ndim - 2, self.index.to(x.device), values.to(x.dtype))

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add to them; every place is there once, so the order of additions is that of the calls."""
        if self.span is not None:
            x[..., slice(*self.span), :] += values
        else:
            self.put(x, self.of(x) + values)
