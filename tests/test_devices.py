"""Tensors that the library allocates are on the device that it documents, whatever torch's default device is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import ringweave as rw
from ringweave.patterns import Pattern

from .cases import MIXTURES, PATTERNS

_CONSTRUCTORS = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
_SOURCE = Path(rw.__file__).parent


@pytest.mark.parametrize("name", list(PATTERNS | MIXTURES))
def test_a_default_device_changes_nothing(name: str) -> None:
    make = (PATTERNS | MIXTURES)[name]

    def results(pattern: Pattern) -> list[object]:
        # tiles of 17 and 33 tokens, so that plans are built and not found
        tokens = 75
        found: list[object] = [pattern.to_dense(tokens, heads=4), pattern.density(tokens, heads=4)]
        if pattern.combinable:
            plan = rw.PlanCache().get(pattern, tokens, tokens, heads=4, tile=(16, 48))
            found += [plan.to_dense(), plan.to_block_mask().kv_indices]
            found.append(rw.attention_weights(q.detach(), k, pattern).to_dense())
        out, lse = rw.attention_with_lse(q, k, v, pattern)
        found += [out, lse, *torch.autograd.grad(out.sum(), q)]
        return [*found, rw.explain(pattern, tokens, heads=4, kv_heads=2)]

    q, k, v = torch.randn(1, 4, 75, 8, requires_grad=True), torch.randn(1, 2, 75, 8), torch.randn(1, 2, 75, 8)
    want = results(make(75))
    with torch.device("meta"):
        got = results(make(75))
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_context_under_a_default_device() -> None:
    q = torch.randn(1, 4, 64, 8, requires_grad=True)
    want = rw.attention(q, q, q, rw.Documents([30, 34]))
    for schedule in ("allgather", "ring"):
        with torch.device("meta"):
            pattern = rw.Documents([30, 34])
            context = rw.ContextParallel(None, pattern, 64, heads=(4, 4), schedule=schedule)
            out = rw.attention(*(context.shard(q, 2) for _ in range(3)), pattern, context=context)
            got = context.unshard(out, 2)
            (out**2).sum().backward()
        torch.testing.assert_close(got, want.detach())


def test_every_constructor_names_its_device() -> None:
    missing = []
    for path in _SOURCE.rglob("*.py"):
        if "tune" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            # ``**place`` is what module_place returns: a device and a dtype
            named = any(word.arg == "device" or ast.unparse(word) == "**place" for word in node.keywords)
            if of_torch and (
                (node.func.attr in _CONSTRUCTORS and not named) or (node.func.attr == "Generator" and not node.args)
            ):
                missing.append(f"{path.name}:{node.lineno}")
    assert not missing


def test_an_index_names_the_accelerator_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """``device=local_rank`` is the accelerator's device, as in torch.nn; an index without a device is refused."""
    refused = r"device: got {}; wanted a device of this machine that holds values\. Pass 'cpu', or 'cuda'"
    modules = (
        lambda device: rw.nn.MultiheadAttention(8, 2, device=device),
        lambda device: rw.nn.NeighborhoodAttention(8, 2, 3, device=device),
        lambda device: rw.nn.MixtureOfBlockAttention(8, 2, block_size=8, top_k=2, device=device),
    )
    count = torch.accelerator.device_count()
    for device in (count, -1, 2**70):
        for make in (*modules, lambda device: rw.plan(rw.Causal(), 64, device=device)):
            with pytest.raises(rw.ShapeError, match=refused.format(device)):
                make(device)
    # meta holds the parameters where there is no accelerator
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for make in modules:
        assert {x.device.type for x in make(1).parameters()} == {"meta"}
        with pytest.raises(rw.ShapeError, match=refused.format(2)):
            make(2)
    assert rw.PlanCache().get(rw.Causal(), 64, 64, tile=(32, 32), device=1).device.type == "meta"
    with pytest.raises(rw.ShapeError, match="device: got True; wanted a device's name"):
        modules[0](True)
