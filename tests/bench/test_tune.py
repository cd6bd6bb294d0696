from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from torch import Tensor

import ringweave as rw
from ringweave.bench import tune as tuned
from ringweave.bench.tune import fastest, store, tune
from ringweave.bench.workload import Workload
from ringweave.ops import cpu, dispatch, gather, tuning


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))


def workload(pattern: rw.Pattern, tokens: int = 256, heads: int = 2) -> Workload:
    return Workload("test", pattern, tokens, heads, 16)


def test_what_can_run_is_checked_timed_and_stored() -> None:
    choices = tune(workload(rw.Causal()), rounds=2)
    assert [choice.direction for choice in choices] == ["forward", "forward + backward"]
    for choice in choices:
        assert set(choice.timings) == {"sdpa", "gather"} | ({"cpu"} if cpu.module() is not None else set())
        assert choice.backend in choice.timings
        assert choice.reasons["flash"] == "it calls kernels for CUDA tensors, and these are on cpu"
        assert "reference" not in choice.reasons
        assert {len(timing.seconds) for timing in choice.timings.values()} == {2}
    path = store(choices)
    assert path == str(tuning.store())
    call = {"heads": 2, "head_dim": 16, "as_dict": True}
    for choice, needs_grad in zip(choices, (False, True), strict=True):
        found = rw.explain(rw.Causal(), 256, needs_grad=needs_grad, **call)["backend"]  # type: ignore[call-overload]
        assert found["chosen"] == [{"backend": choice.backend, "branches": 1}]
        assert found["measured"] == 1


def test_each_kind_of_branch_is_measured_once() -> None:
    """The heads' residues of one rate are of one kind."""
    choices = tune(workload(rw.LongNet([256, 1024], [1, 4]), 4096), directions=("forward",), rounds=1)
    assert [(choice.workload.tokens, choice.workload.heads) for choice in choices] == [(4096, 2), (1024, 1)]


def test_a_wrong_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> tuple[Tensor, Tensor]:
        out, lse = gather.forward(*arguments)  # type: ignore[arg-type]
        return out * 1.01, lse

    def broken(*arguments: object) -> tuple[Tensor, Tensor]:
        raise RuntimeError("out of something\nand more")

    for name, forward in (("gather", wrong), ("sdpa", broken), ("cpu", broken)):
        backend = dataclasses.replace(dispatch.BACKENDS[name], forward=forward)
        monkeypatch.setitem(dispatch.BACKENDS, name, backend)
    (choice,) = tune(workload(rw.Causal()), directions=("forward",), rounds=1)
    assert choice.timings == {}
    assert choice.reasons["gather"].startswith("wrong: root mean square error")
    assert choice.reasons["sdpa"] == "RuntimeError: out of something"
    assert choice.backend is None
    assert store([choice]) is None
    assert tuning.store() is not None
    assert not tuning.store().exists()  # type: ignore[union-attr]


def test_a_backend_that_auto_prefers_stays_where_it_is_about_as_fast() -> None:
    assert fastest({"gather": 1.04, "flex": 1.0}) == "gather"
    assert fastest({"gather": 1.06, "flex": 1.0}) == "flex"
    assert fastest({"flex": 1.0, "triton": 1.01, "gather": 9.0}) == "triton"
    assert fastest({"flex": 1.0, "triton": 1.06, "gather": 9.0}) == "flex"
    assert tuned.CLOSE == 1.05
