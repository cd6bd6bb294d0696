"""Test which kinds of score terms the Triton kernels declare."""

from __future__ import annotations

import pytest

from ringweave.terms import KINDS, Term
from ringweave_gpu import triton
from tests.test_terms import raised  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(not triton.installed(), reason="triton is not installed")


def test_the_kernels_know_every_kind() -> None:
    """The kernels' list contains every kind: a missing one would be refused or left to slower backends."""
    from ringweave_gpu.triton.kernels import score_terms

    assert set(score_terms.KINDS) == {kind.kernel for kind in KINDS.values()}
    assert len(set(score_terms.KINDS.values())) == len(score_terms.KINDS)


def test_a_kind_that_triton_does_not_know(raised: type[Term]) -> None:  # noqa: F811
    assert triton.BACKEND.lacks(frozenset({"Raised", "Softcap"}), "cuda") == {"Raised"}
    # a device without any backend raises so, whatever the terms
    assert not triton.BACKEND.lacks(frozenset({"Raised"}), "cpu")
