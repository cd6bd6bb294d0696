"""ringweave's own backends hold the rules of the kit for others' kernels."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw
from ringweave.patterns import Pattern
from ringweave_audit import conformance
from tests.cases import PATTERNS
from tests.test_conformance import RUNNABLE, SPARSE


def kernel(backend: str) -> conformance.Kernel:
    """Return a backend as a kernel in the kit's form."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, scale: float, q_offset: int
    ) -> rw.AttentionResult:
        return rw.attention_with_lse(q, k, v, pattern, scale=scale, q_offset=q_offset, backend=backend)

    return conformance.Kernel(attend, backend)


@pytest.mark.parametrize("rule", list(conformance.RULES))
@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_kit(backend: str, rule: str) -> None:
    """The backend passes the rules of the conformance kit for others' kernels."""
    verdict = conformance.judge(kernel(backend), rule, examples=40 if backend == "sdpa" else 10)
    assert verdict.failure is None, verdict.failure
    # sdpa refuses patterns other than full and causal
    assert verdict.tried >= (1 if backend == "sdpa" else 10)


@pytest.mark.parametrize("rule", ["row_sums", "leaks"])
@pytest.mark.parametrize("backend", ["reference", *SPARSE])
@pytest.mark.parametrize("name", list(PATTERNS))
def test_row_sums_and_leaks(name: str, backend: str, rule: str) -> None:
    conformance.RULES[rule](kernel(backend), conformance.Trial(PATTERNS[name](97), 97, 97, heads=4, kv_heads=4, dim=8))
