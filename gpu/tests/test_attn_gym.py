"""Test the wrapper of attn-gym against a dense form of its documented function, and its refusals."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave import program
from ringweave.backends import BACKENDS
from ringweave.call import Call
from ringweave.plan import Branch, branches
from ringweave_gpu import attn_gym, trial
from tests.cases import _chosen
from tests.oracle import Inputs
from tests.test_conformance import conforms, run


class AuxRequest(NamedTuple):
    lse: bool = False


def gather_attn(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor,
    kv_indices: Tensor,
    attention_sink: Tensor | None = None,
    *,
    sliding_window_size: int = 512,
    scale: float | None = None,
    return_aux: AuxRequest | None = None,
) -> tuple[Tensor, AuxRequest]:
    """Compute attn-gym's ``gather_attn`` as its documentation has it; its lse has no gradient."""
    batch, _, tokens, channels = query.shape
    assert sparse_kv.shape[:2] == (batch, 1)
    assert local_kv.shape == (batch, 1, tokens, channels)
    assert kv_indices.shape[:2] == (batch, tokens)
    assert kv_indices.dtype == torch.int32
    assert sliding_window_size == 0
    assert scale is not None
    assert scale > 0
    assert return_aux == AuxRequest(True)
    inside = (kv_indices >= 0) & (kv_indices < sparse_kv.shape[2])
    index = torch.where(inside, kv_indices, 0).long().flatten(1)[..., None].expand(-1, -1, channels)
    kv = sparse_kv[:, 0].gather(1, index).unflatten(1, kv_indices.shape[1:]).float()
    scores = torch.einsum("bgnc,bnkc->bgnk", query.float(), kv) * scale
    scores = scores.masked_fill(~inside[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    return torch.einsum("bgnk,bnkc->bgnc", weights, kv).to(query.dtype), AuxRequest(lse.detach())  # type: ignore[arg-type]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a module that computes on a CPU, and let the backend run there."""
    made = types.ModuleType("attn_gym.sparse")
    made.gather_attn, made.AuxRequest = gather_attn, AuxRequest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attn_gym", types.ModuleType("attn_gym"))
    monkeypatch.setitem(sys.modules, "attn_gym.sparse", made)
    monkeypatch.setattr(attn_gym, "installed", lambda: True)
    attn_gym._module.cache_clear()

    def as_on_a_gpu(case: Call, branch: Branch) -> str | None:
        return attn_gym.unsupported_reason(dataclasses.replace(case, device="cuda"), branch)

    monkeypatch.setitem(BACKENDS, "attn_gym", dataclasses.replace(attn_gym.BACKEND, unsupported_reason=as_on_a_gpu))
    yield made
    attn_gym._module.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "pattern",
    [
        rw.Selected(_chosen(130, 9)),
        rw.Selected(_chosen(130, 3, 20), 20) & rw.Causal(),
        rw.Selected(_chosen(130, 5, lead=(2,)), heads="kv"),
        rw.Selected(_chosen(130, 5, lead=(2, 1))) & ~rw.Strided(3),
    ],
    ids=["keys", "blocks", "by key head", "by batch element"],
)
@pytest.mark.parametrize("dims", [(16, 24), (24, 16)])
def test_results(pattern: rw.Pattern, dtype: torch.dtype, dims: tuple[int, int], module: Any) -> None:
    """Out, lse and gradients, that of lse included, with more and with fewer channels in values than in keys."""
    sizes = {"heads": 4, "kv_heads": 2, "batch": 2, "dim": dims[0], "value_dim": dims[1]}
    conforms(Inputs.random(130, dtype=dtype, **sizes), pattern, "attn_gym")


def test_scales_and_other_branches(module: Any) -> None:
    """A negative scale, and lists beside a window, which another backend computes."""
    x = Inputs.random(130, heads=4, kv_heads=2)
    conforms(x, rw.Selected(_chosen(130, 9)), "attn_gym", scale=-0.4)
    of = Inputs.random(1, 130, heads=4, kv_heads=2)
    conforms(of, rw.Selected(_chosen(130, 9)[:1]), "attn_gym", q_offset=129)


def test_keys_that_no_list_names_are_not_read(module: Any) -> None:
    x = Inputs.random(130, heads=2)
    pattern = rw.Selected(_chosen(130, 9).clamp(max=99))
    clean = run(x, pattern, "attn_gym")
    x.k[:, :, 100:] = x.v[:, :, 100:] = torch.nan
    dirty = run(x, pattern, "attn_gym")
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_it_passes_its_trial(needs_grad: bool, module: Any) -> None:
    case = Call(1, 4, 2, 500, 500, 32, 16, torch.float32, "cpu", needs_grad)
    assert trial.check(BACKENDS["attn_gym"], case, "selected") is None


def case(dtype: torch.dtype = torch.bfloat16, dim: int = 64, device: str = "cuda") -> Call:
    return Call(1, 4, 2, 256, 256, dim, dim, dtype, device)


def refused(about: Call, pattern: rw.Pattern) -> str:
    return str(attn_gym.unsupported_reason(about, branches(pattern, 256, 256, heads=4)[0]))


def test_refusals(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = rw.Selected(_chosen(256, 9))
    assert refused(case(), lists) == "None"
    assert "it computes lists of keys" in refused(case(), rw.SlidingWindow(9))
    assert "these are on cpu" in refused(case(device="cpu"), lists)
    assert "got torch.float64" in refused(case(torch.float64), lists)
    assert "at most 512 channels together, and got 640" in refused(case(dim=320), lists)
    own = rw.Selected(_chosen(256, 9, lead=(4,)))
    assert refused(case(), own) == "query heads of one key head have lists of their own"
    del module.gather_attn
    attn_gym._module.cache_clear()
    assert "this version of attn-gym has no gather_attn" in refused(case(), lists)
    monkeypatch.setitem(sys.modules, "attn_gym.sparse", None)
    attn_gym._module.cache_clear()
    assert "attn-gym's sparse attention does not load" in refused(case(), lists)
    monkeypatch.setattr(attn_gym, "installed", lambda: False)
    assert refused(case(), lists) == "attn-gym is not installed: pip install attn-gym"


@pytest.mark.parametrize(("reason", "name"), [(None, "attn_gym"), ("it is wrong", "gather")])
def test_auto_takes_it_after_its_check(
    reason: str | None, name: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "reason", lambda backend, call, branch: reason)
    branch = branches(rw.Selected(_chosen(256, 9)), 256, 256, heads=4)[0]
    assert program.choose_backend("auto", case(), branch).name == name
