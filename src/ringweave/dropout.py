"""Which pairs dropout drops: a function of seed, batch element, head and positions, and of nothing else.

So they are the same on every backend, tile size, number of threads and rank; backward draws them again. The numbers
are those of Philox4x32 with 10 rounds: the counter (k // 8, q, head, batch) gives 16 bits for each of 8 keys.

References:
    Salmon, Moraes, Dror, Shaw (2011), Parallel random numbers: as easy as 1, 2, 3, section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .errors import ShapeError, message, shown
from .terms import Pairs

#: A pair is dropped where its 16 bits are below the threshold.
STEPS = 2**16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


class Dropout(NamedTuple):
    """Dropout of a call.

    Attributes:
        threshold: Of 2 ** 16 numbers, those that drop.
        seed: The key of all pairs, of 64 bits.
    """

    threshold: int
    seed: int

    @property
    def factor(self) -> float:
        """What kept weights are multiplied by."""
        return STEPS / (STEPS - self.threshold)

    def kept(self, at: Pairs) -> Tensor:
        """Which pairs stay: bool, of the pairs' shape."""
        first = at.key[..., ::8]
        steps = torch.arange(at.key.shape[-1], device=at.key.device)
        aligned = first.repeat_interleave(8, -1)[..., : steps.numel()] + steps % 8 == at.key
        if bool(aligned.all()) and bool((first % 8 == 0).all()):
            # keys side by side share their counters
            words = philox(self.seed, first >> 3, at.query, at.head, at.batch)
            halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
            return halves.flatten(-2)[..., : steps.numel()] >= self.threshold
        every = torch.stack(philox(self.seed, at.key >> 3, at.query, at.head, at.batch))
        place = (at.key & 7).expand(every.shape[1:])
        word = every.gather(0, (place >> 1)[None])[0]
        stays: Tensor = (word >> 16 * (place & 1)) & 0xFFFF >= self.threshold
        return stays


def philox(seed: int, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits, as int64, for counters of four int64 tensors that broadcast."""
    a, b, c, d = torch.broadcast_tensors(*(x & _WORD for x in counter))
    low, high = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        # of int64, whose product wraps: the lower 64 bits are right
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (second >> 32 & _WORD) ^ b ^ low, second & _WORD, (first >> 32 & _WORD) ^ d ^ high, first & _WORD
        low, high = low + _INCREMENTS[0] & _WORD, high + _INCREMENTS[1] & _WORD
    return a, b, c, d


def threshold_of(p: float) -> int:
    """The threshold nearest to a drop rate.

    Raises:
        ShapeError: A rate above 0 so small, or so near to 1, that it would become 0 or 1.
    """
    threshold = round(p * STEPS)
    if p > 0 and not 0 < threshold < STEPS:
        wanted = "0, or at least 2 ** -16 and at most 1 - 2 ** -16"
        raise ShapeError(message("dropout", shown(p), wanted, "It is rounded to a multiple of 2 ** -16."))
    return threshold
