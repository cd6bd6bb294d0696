"""Call a function of 0-dim index tensors for many values at once, as FlexAttention calls its functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..trace.vmapped import ScalarIndices


def per_pair(fn: Callable[..., Tensor], *arguments: Tensor, narrow: Sequence[int] = ()) -> Tensor:
    """Return the results of a function for each element of tensors that broadcast.

    The function gets 0-dim tensors, so a reduction in it (``(x[q] * y[k]).sum()``) is one of each element.

    Args:
        fn: The function, which ``torch.vmap`` must be able to map.
        arguments: Its arguments, which broadcast to one shape.
        narrow: Dimensions that have length 1 in the result if the function does not use them.
    """
    # torch.broadcast_shapes takes as long as several operations
    shape = np.broadcast_shapes(*[x.shape for x in arguments])
    dims = [dim for dim, size in enumerate(shape) if size != 1]
    wide = [x.reshape((1,) * (len(shape) - x.ndim) + tuple(x.shape)) for x in arguments]
    squeezed = [x.reshape([size for size in x.shape if size != 1]) for x in wide]
    unused: set[int] = set()

    def results() -> Tensor:
        mapped = fn
        for dim in reversed(dims):
            along = tuple(0 if x.shape[dim] != 1 else None for x in wide)
            mapped = torch.vmap(mapped, along, None if dim in unused else 0)
        with ScalarIndices():
            return mapped(*squeezed)

    for dim in narrow:
        if dim in dims:
            unused.add(dim)
            try:
                results()
            except ValueError:
                # vmap refuses to return a result that depends on the dimension
                unused.discard(dim)
    return results().reshape([1 if dim in unused else size for dim, size in enumerate(shape)])
