"""Test the torch_sparse backend's strips and refusals, which the conformance tests of every backend do not reach."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw
from ringweave import program
from ringweave.backends import torch_sparse
from ringweave.call import Call
from ringweave.errors import UnsupportedError
from ringweave.plan import branches

from ..cases import PATTERNS
from ..oracle import Inputs
from ..test_conformance import conforms


@pytest.mark.parametrize("pairs", [1, 40_000])
@pytest.mark.parametrize("name", ["sinks", "global", "table_per_head", "dilated"])
def test_strips_of_any_length_are_the_whole(name: str, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of one query tile, or of a few, give the result of the whole."""
    monkeypatch.setattr(torch_sparse, "_PAIRS", pairs)
    conforms(Inputs.random(700, heads=4, kv_heads=2, dim=8), PATTERNS[name](700), "torch_sparse")


@pytest.mark.parametrize("name", list(PATTERNS))
def test_entries_are_the_allowed_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sparse, "_PAIRS", 20_000)
    pattern, sizes = PATTERNS[name](200), (200, 130)
    try:
        plan = pattern.plan(*sizes, heads=4, batch=2, tile=(32, 64))
    except rw.RingweaveError:
        plan = pattern.plan(200, heads=4, batch=2, tile=(32, 64))
    found = torch.zeros(2, 4, plan.nq, plan.nk)
    for strip, b, h in torch_sparse._strips(plan):
        assert strip.first[-1] == strip.key.numel() > 0
        ones = torch.ones(strip.key.numel())
        found[b, h, strip.rows, strip.keys] += strip.matrix(ones).to_dense()
        assert torch.equal(strip.transposed(ones).to_dense().T, strip.matrix(ones).to_dense())
    assert torch.equal(found.bool(), plan.to_dense())
    assert found.max() <= 1


def test_on_a_gpu_it_is_refused() -> None:
    case = Call(1, 2, 2, 64, 64, 16, 16, torch.float32, "cuda")
    (branch,) = branches(rw.SlidingWindow(9), 64, 64)
    with pytest.raises(UnsupportedError, match="only on CPU tensors, and these are on cuda. Use backend='auto'"):
        program.choose_backend("torch_sparse", case, branch)


def test_it_runs_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto does not choose torch_sparse, even if a tuning file says that it was fastest."""
    assert "torch_sparse" not in program.PREFERENCE
    case = Call(1, 2, 2, 64, 64, 16, 16, torch.float32, "cpu")
    (branch,) = branches(rw.SlidingWindow(9), 64, 64)
    monkeypatch.setattr("ringweave.backends.tuning.lookup", lambda *of: program.tuning.Answer("torch_sparse", None))
    assert program.choose_backend("auto", case, branch).name != "torch_sparse"
    others = rw.explain(rw.SlidingWindow(9), 64, as_dict=True)["backend"]["others"]
    assert others["torch_sparse"] == ["used only when named"]
