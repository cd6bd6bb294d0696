"""Define the formula of each kind of score term for tests, dense and independently of the library's class.

A kind of ringweave.terms without an oracle here fails test_terms.py. The rest of the tests derives from both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Oracle:
    """A kind's formula, and for a kind of numbers alone what tests need to draw it and to bound its errors.

    Attributes:
        formula: Of scores (B, Hq, nq, nk), the term's numbers, its table (one of places cut to the call's), and
            key - query, (B or 1, 1, nq, nk).
        some: Numbers with which scores of about 1 are changed.
        drawn: Draws numbers.
        slopes: The least and the steepest slope of scores between two bounds.
    """

    formula: Callable[[Tensor, Numbers, Tensor, Tensor], Tensor]
    some: Numbers = ()
    drawn: Callable[[Random], Numbers] | None = None
    slopes: Callable[[Numbers, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


def _distance(t: Tensor, numbers: Numbers, table: Tensor, distance: Tensor) -> Tensor:
    reach = table.shape[1] // 2
    return t + table[torch.arange(len(table))[:, None, None], (distance.clamp(-reach, reach) + reach).long()]


def _softcap_slopes(numbers: Numbers, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    # steepest at the value nearest to 0
    near = torch.where(low * high < 0, 0.0, torch.minimum(low.abs(), high.abs()))
    far = torch.maximum(low.abs(), high.abs())
    return 1 - torch.tanh(far / numbers[0]) ** 2, 1 - torch.tanh(near / numbers[0]) ** 2


#: Oracles by the name of the class.
ORACLES = {
    "Softcap": Oracle(
        lambda t, numbers, table, distance: numbers[0] * torch.tanh(t / numbers[0]),
        (1.5,),
        lambda r: (r.choice([0.5, 1.5, 1.5, 8.0, 30.0, 50.0, 1e4]),),
        _softcap_slopes,
    ),
    # slopes of heads, or of heads and keys
    "ALiBi": Oracle(lambda t, numbers, table, distance: t - table.view(len(table), 1, -1) * distance.abs()),
    "DistanceBias": Oracle(_distance),
    "Bias": Oracle(lambda t, numbers, table, distance: t + table),
}
