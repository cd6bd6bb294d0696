"""Products of weights with rows that may be NaN or infinite.

A weight is 0 where a pair is not attended, and 0 * NaN is NaN. So a product of a matrix of weights carries a NaN from a
value, or from a gradient of out, to rows that do not attend it. Backends multiply first and look at the result:
only if it is not finite, they compute it again with :func:`attended_product`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attended_product(weights: Tensor, attended: Tensor, x: Tensor) -> Tensor:
    """Compute ``weights @ x``, where an element of x that is not finite reaches only the rows that attend it.

    Args:
        weights: Weights, (..., M, N), 0 where not attended.
        attended: 1 where row m attends row n of x, else 0; (..., M, N), dtype of the weights.
        x: Values, (..., N, C).
    """
    product = weights @ x.masked_fill(~x.isfinite(), 0.0)
    for value, found in ((torch.nan, x.isnan()), (torch.inf, x.isposinf()), (-torch.inf, x.isneginf())):
        if bool(found.any()):
            reached = attended @ found.to(attended.dtype) > 0
            # not masked_fill of the product: inf - inf and a weight of NaN are NaN
            product = product + torch.zeros_like(product).masked_fill_(reached, value)
    return product


def spread(out: Tensor, lse: Tensor) -> bool:
    """Return whether a row of out is not finite although its scores are, so that its product may be wrong."""
    # A sum is quick. It may overflow, and then the rows are looked at.
    return not math.isfinite(out.sum()) and bool((~out.isfinite().all(-1) & (lse < torch.inf)).any())


def broken(delta: Tensor) -> bool:
    """Return whether a row of out, or its gradient, may not be finite.

    The delta of such a row is not, since NaN times a number, and inf times a number, are not.
    """
    return not math.isfinite(delta.sum())
