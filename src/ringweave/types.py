"""Records and types that cross layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Types of queries, keys and values.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class AttentionOutput(NamedTuple):
    """Attention's result with what makes it mergeable.

    Attributes:
        out: (B, Hq, Nq, Dv), dtype of the queries.
        lse: (B, Hq, Nq), log-sum-exp of each row's scaled scores, natural log, float32
            (float64 for float64 queries); -inf where a row attends nothing.
    """

    out: Tensor
    lse: Tensor


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over inputs of a type are kept in, lse among them: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
