"""Records and dtypes that several layers use."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Dtypes of queries, keys and values.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class NotGiven(int):
    """A default that can be told from the same number passed by the caller. It is equal to that number."""


#: Default of ``q_offset``.
FIRST_POSITION = NotGiven(0)


class AttentionOutput(NamedTuple):
    """The result of attention, with the log-sum-exp that makes partial results mergeable.

    Attributes:
        out: Output, (B, Hq, Nq, Dv), dtype of the queries.
        lse: Log-sum-exp of each row's scaled scores, (B, Hq, Nq), natural log, float32 (float64 for float64 queries);
            -inf where a row attends nothing.
    """

    out: Tensor
    lse: Tensor


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over inputs of a dtype, and of lse: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
