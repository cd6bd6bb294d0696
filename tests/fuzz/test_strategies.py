"""A call that fails is shown with nothing that the failure does not need."""

from __future__ import annotations

from hypothesis import HealthCheck, find, settings

from .calls import Call
from .strategies import calls
from .trees import Tree

QUIET = settings(max_examples=500, database=None, derandomize=True, suppress_health_check=[*HealthCheck])


def test_a_failure_is_shown_by_a_plain_call() -> None:
    """Where more than two keys in strided memory fail, all else of the call is plain."""

    def fails(call: Call) -> bool:
        return call.layouts[1] != "contiguous" and call.sizes.nk > 2

    call = find(calls("dense_batched"), fails, settings=QUIET)
    assert call.tree == Tree("Full")
    assert call.layouts == ("contiguous", "heads last", "contiguous", "contiguous")
    assert (call.sizes.batch, call.sizes.heads, call.sizes.nk) == (1, 1, 3)
    assert (call.dtype, call.scale, call.first, call.broken) == ("float32", None, None, None)
    assert not any((call.score_terms, call.dead, call.packed, call.forked, call.poisoned))
