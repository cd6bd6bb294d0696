"""Test that cold plans are cold, and that goals belong to patterns that are planned."""

from __future__ import annotations

from typing import Any

import pytest

import ringweave as rw
from ringweave_lab.bench import Options, run_case
from ringweave_lab.bench.cases import planning


def test_cold_plans_are_of_patterns_made_anew_and_without_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern keeps values that it computed, and caches keep parts of plans: neither may shorten a cold plan."""
    seen: list[rw.Pattern] = []
    build = planning.build

    def watched(pattern: rw.Pattern, *sizes: Any, **options: Any) -> Any:
        from ringweave.cache import PATTERNS

        assert not any(pattern is each for each in seen)
        assert len(PATTERNS) == 0
        seen.append(pattern)
        return build(pattern, *sizes, **options)

    monkeypatch.setattr(planning, "build", watched)
    names = [record.workload for record in run_case("planning", Options(quick=True, rounds=1)).records]  # type: ignore[union-attr]
    assert len(seen) == 2 * len(names)
    assert len(set(names)) >= len(names) - 4


def test_goals_are_of_cases_that_are_measured() -> None:
    named = {(cold.name, cold.tokens) for n in (2**16, 2**20) for cold in planning._flat(n)}
    assert {*planning._GOALS} <= named
    assert {*planning._LONG} <= {name for name, _ in named}
