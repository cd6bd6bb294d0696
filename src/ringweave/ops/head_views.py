"""Which heads of the tensors a branch reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..plan import Branch


class Heads:
    """The query heads of a branch, and the key heads that they share.

    Attributes:
        queries: The branch's query heads.
        keys: Its distinct key heads: a slice, so a view, where they are evenly spaced.
        count: How many these are.
        repeat: For each query head its place among ``keys``, where key heads serve unequally many; else None.
    """

    def __init__(self, branch: Branch, ratio: int, remote: bool = False):
        # remote queries come without the other heads
        self.queries = slice(None) if remote else slice(*branch.heads)
        of_query = [head // ratio for head in range(*branch.heads)]
        distinct = sorted(set(of_query))
        step = distinct[1] - distinct[0] if len(distinct) > 1 else 1
        even = distinct == list(range(distinct[0], distinct[-1] + 1, step))
        self.keys: slice | list[int] = slice(distinct[0], distinct[-1] + 1, step) if even else distinct
        self.count = len(distinct)
        share = len(of_query) // self.count
        grouped = of_query == [head for head in distinct for _ in range(share)]
        self.repeat = None if grouped else torch.tensor([distinct.index(head) for head in of_query], device="cpu")

    def of_keys(self, x: Tensor) -> Tensor:
        """Take the distinct key heads of (B, Hkv, ...)."""
        return x[:, self.keys]

    def update(self, x: Tensor, change: Callable[[Tensor, Tensor], object], values: Tensor) -> None:
        """Let ``change(heads, values)`` write to the distinct key heads of (B, Hkv, ...)."""
        some = self.of_keys(x)
        change(some, values)
        if not isinstance(self.keys, slice):
            x[:, self.keys] = some

    def for_kernel(self, x: Tensor) -> Tensor:
        """Repeat distinct key heads as a kernel takes them: once per query head where they do not group."""
        return x if self.repeat is None else x.index_select(1, self.repeat.to(x.device))

    def from_kernel(self, x: Tensor) -> Tensor:
        """Undo ``for_kernel`` for gradients: they are summed over the query heads of each key head."""
        if self.repeat is None:
            return x
        total = x.new_zeros(x.shape[0], self.count, *x.shape[2:])
        return total.index_add_(1, self.repeat.to(x.device), x)
