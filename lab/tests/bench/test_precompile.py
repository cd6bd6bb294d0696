"""Test compiling kernels ahead, in a pool of processes that may die."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any, ClassVar

import pytest

import ringweave as rw
from ringweave_lab.campaign import compiling, precompile
from ringweave_lab.tune.problem import FORWARD, Problem


class Pool:
    """A pool that dies while compiling one variant, and with it all waiting ones."""

    fatal = "b"
    processes: ClassVar[list[int]] = []

    def __init__(self, count: int, *rest: Any):
        self.processes.append(count)
        self.broken = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, work: Callable[..., Any], variant: precompile.Variant) -> Future[Any]:
        assert "pattern" not in vars(variant.problem), "what lies on a device is sent to other processes"
        future: Future[Any] = Future()
        name = variant.problem.name
        self.broken |= name == self.fatal
        if self.broken:
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(("too large" if name == "d" else None, {name}))
        return future


def test_a_compiler_that_crashes_costs_its_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "ProcessPoolExecutor", Pool)
    problems = [Problem(name, rw.Causal(), 256, 2, 64) for name in "abcd"]
    assert all(problem.pattern is not None for problem in problems)
    variants = [precompile.Variant(problem, FORWARD) for problem in problems]
    failed, count = precompile.precompile(variants, compiling.HOPPER, 3)
    assert {each.problem.name: reason for each, reason in failed.items()} == {
        "b": "the compiler took its process down", "d": "too large",
    }  # fmt: skip
    assert count == 3
    assert Pool.processes == [3, 1, 3]
