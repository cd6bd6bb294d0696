"""Small records that cross layers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionOutput(NamedTuple):
    """Attention's result with what makes it mergeable.

    Attributes:
        out: (B, Hq, Nq, Dv), dtype of the queries.
        lse: (B, Hq, Nq), log-sum-exp of each row's scaled scores, natural log, float32
            (float64 for float64 queries); -inf where a row attends nothing.
    """

    out: Tensor
    lse: Tensor
