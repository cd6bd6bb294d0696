"""Tensors that a call does not use, connected to its output for backward."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def connected(out: Tensor, unused: Iterable[Tensor]) -> Tensor:
    """Return out with gradients of zero, rather than none, for tensors that it does not depend on.

    DistributedDataParallel waits for a gradient of each parameter, and so does each rank of a context for those of the
    others. The sum of no elements is 0, whatever values the tensor has.
    """
    for x in unused:
        out = out + x[None][:0].sum()
    return out
