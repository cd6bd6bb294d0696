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
