"""The weights that ``return_attn_probs`` returns: probabilities, negative where dropout has dropped them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...weights import by_columns

# flash-attn rounds both sizes of the matrix up to a multiple of this
_ROUNDED = 128


def signed_weights(
    attend: Callable[[Tensor, float], Tensor], state: Tensor, index: Tensor, keys: int, like: Tensor, dropout: float
) -> Tensor:
    """Return (..., H, keys), the weight of each query for each key of its sequence, negative where it was dropped.

    Each call repeats the seed of the call that dropped the weights.

    Args:
        attend: Function of values and a share to drop that returns the output.
        state: State of the random generator before the call that dropped the weights.
        index: Number of each key in its sequence, in the shape of ``like`` without heads and head dim.
        keys: Number of keys of the longest sequence.
        like: Values of the call.
        dropout: Share of the weights that was dropped.
    """

    def signed(values: Tensor) -> Tensor:
        values = values[..., None, :].expand(*like.shape[:-1], -1)
        torch.set_rng_state(state)
        left, every = attend(values, dropout), attend(values, 0.0)
        return torch.where(left == 0, -every, every)

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return by_columns(signed, index, keys, like.dtype)


def rounded_up(weights: Sequence[Tensor], queries: int, keys: int) -> Tensor:
    """Stack matrices (Nq, H, keys) of sequences to (B, H, queries, keys), both sizes rounded up as in flash-attn."""
    rows, columns = (-(-size // _ROUNDED) * _ROUNDED for size in (queries, keys))
    each = [x.transpose(0, 1) for x in weights]
    return torch.stack([F.pad(x, (0, columns - x.shape[2], 0, rows - x.shape[1])) for x in each])
