"""A value that changes a call, for every option of the attention functions and of the modules.

The tests that go through all options derive from ``VALUES``: test_options.py, test_contract.py, test_found_programs.py
and parallel/test_scored.py. An option of ``Arguments`` without an entry fails test_options.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ringweave as rw

BATCH, HEADS, TOKENS, DIM = 2, 2, 64, 8


def learned(*shape: int) -> Tensor:
    """Return random parameters, equal at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


#: For each option of ``Arguments``, a function that makes a value other than its default for a call of ``tokens`` tokens.
VALUES: dict[str, Callable[[int], Any]] = {
    "pattern": lambda tokens: rw.SlidingWindow(5),
    "scale": lambda tokens: 0.9,
    "q_offset": lambda tokens: 3,
    "k_offset": lambda tokens: 2,
    "backend": lambda tokens: "dense_batched",
    "context": lambda tokens: rw.ContextParallel(None, rw.Causal(), tokens, heads=(HEADS, HEADS)),
    "terms": lambda tokens: rw.DistanceBias(learned(HEADS, 9)),
    "sink_logits": lambda tokens: learned(HEADS),
    "dropout": lambda tokens: 0.4,
    "precision": lambda tokens: rw.Precision(compute=torch.bfloat16),
    "on_oom": lambda tokens: "raise",
}


class ScoreFunction:
    """A function of scores with a table that learns.

    Attributes:
        tables: The table, (HEADS, 9).
    """

    def __init__(self, table: Tensor):
        self.tables = (table,)


class Distances(ScoreFunction):
    """A bias by distance, which is a term."""

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.tables[0][h, (k - q).clamp(-4, 4) + 4]


class Products(ScoreFunction):
    """A factor by distance, which is no term."""

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * torch.sigmoid(self.tables[0][h, (k - q).clamp(-4, 4) + 4]) * 3


#: Values of other kinds, by option and kind, which go another way through a call than the value of ``VALUES``.
KINDS: dict[str, dict[str, Callable[[int], Any]]] = {
    "terms": {
        "a function that is a term": lambda tokens: Distances(learned(HEADS, 9)),
        "a function in tiles": lambda tokens: Products(learned(HEADS, 9)),
        "a term and a function": lambda tokens: [rw.Softcap(2.0), Products(learned(HEADS, 9))],
    }
}
