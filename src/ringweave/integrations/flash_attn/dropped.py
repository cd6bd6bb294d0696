"""The weights that ``return_attn_probs`` returns: probabilities, negative where dropout has dropped them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# columns of a matrix of weights that one call computes
_COLUMNS = 256
# flash-attn rounds both sizes of the matrix up to a multiple of this
_ROUNDED = 128


def signed_weights(
    attend: Callable[[Tensor, float], Tensor], state: Tensor, index: Tensor, keys: int, like: Tensor, dropout: float
) -> Tensor:
    """Return (..., H, keys), the weight of each query for each key of its sequence, negative where it was dropped.

    A column of weights is the output for values that are 1 at its key and 0 at others. Each call repeats the seed of
    the call that dropped the weights.

    Args:
        attend: Function of values and a share to drop that returns the output.
        state: State of the random generator before the call that dropped the weights.
        index: Number of each key in its sequence, in the shape of ``like`` without heads and head dim.
        keys: Number of keys of the longest sequence.
        like: Values of the call.
        dropout: Share of the weights that was dropped.
    """
    parts = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        # a call without keys has a matrix without columns
        for start in range(0, max(keys, 1), _COLUMNS):
            columns = torch.arange(start, min(start + _COLUMNS, keys), device=like.device)
            values = (index[..., None, None] == columns).to(like.dtype).expand(*like.shape[:-1], len(columns))
            torch.set_rng_state(state)
            left, every = attend(values, dropout), attend(values, 0.0)
            parts.append(torch.where(left == 0, -every, every))
    return torch.cat(parts, -1)


def rounded_up(weights: Sequence[Tensor], queries: int, keys: int) -> Tensor:
    """Stack matrices (Nq, H, keys) of sequences to (B, H, queries, keys), both sizes rounded up as in flash-attn."""
    rows, columns = (-(-size // _ROUNDED) * _ROUNDED for size in (queries, keys))
    each = [x.transpose(0, 1) for x in weights]
    return torch.stack([F.pad(x, (0, columns - x.shape[2], 0, rows - x.shape[1])) for x in each])
