"""Dropout of attention weights, by random numbers that depend on a seed and the indices of a pair."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError, shown
from .term import Pairs

#: Number of values of a pair's 16 random bits; the pair is dropped if they are below the threshold.
DROPOUT_LEVELS = 2**16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


class Dropout(NamedTuple):
    """Dropout of a call: a pair is dropped if its 16-bit random number is below the threshold.

    ``seed`` is the 64-bit key of the random generator.
    """

    threshold: int
    seed: int

    @property
    def factor(self) -> float:
        """Factor of the weights that are kept."""
        return DROPOUT_LEVELS / (DROPOUT_LEVELS - self.threshold)

    def kept(self, at: Pairs) -> Tensor:
        """Return a bool tensor of the pairs' shape that is True where a weight is kept."""
        first = at.key[..., ::8]
        steps = torch.arange(at.key.shape[-1], device=at.key.device)
        aligned = first.repeat_interleave(8, -1)[..., : steps.numel()] + steps % 8 == at.key
        if bool(aligned.all()) and bool((first % 8 == 0).all()):
            # eight adjacent keys share a counter
            words = philox(self.seed, first >> 3, at.query, at.head, at.batch)
            halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
            return halves.flatten(-2)[..., : steps.numel()] >= self.threshold
        every = torch.stack(philox(self.seed, at.key >> 3, at.query, at.head, at.batch))
        place = (at.key & 7).expand(every.shape[1:])
        word = every.gather(0, (place >> 1)[None])[0]
        stays: Tensor = (word >> 16 * (place & 1)) & 0xFFFF >= self.threshold
        return stays


def philox(seed: int, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit random words, as int64, for counters of four int64 tensors that broadcast."""
    a, b, c, d = torch.broadcast_tensors(*(x & _WORD for x in counter))
    low, high = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        # the int64 product wraps, which keeps its lower 64 bits correct
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (second >> 32 & _WORD) ^ b ^ low, second & _WORD, (first >> 32 & _WORD) ^ d ^ high, first & _WORD
        low, high = low + _INCREMENTS[0] & _WORD, high + _INCREMENTS[1] & _WORD
    return a, b, c, d


def threshold_of(p: float) -> int:
    """Return the threshold nearest to a drop rate.

    Raises:
        ShapeError: The rate is above 0, and so small or so close to 1 that it would round to 0 or 1.
    """
    threshold = round(p * DROPOUT_LEVELS)
    if p > 0 and not 0 < threshold < DROPOUT_LEVELS:
        wanted = "0, or at least 2 ** -16 and at most 1 - 2 ** -16"
        raise ShapeError("dropout", shown(p), wanted, "It is rounded to a multiple of 2 ** -16.")
    return threshold
