"""Hooks that return saved tensors in another layout change no gradient, on every path to backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import ringweave as rw
from ringweave.parallel import ContextParallel

from ..parallel.threads import run

N = 64
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "axes reversed": lambda x: reversed_axes(reversed_axes(x).contiguous()),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
}
CASES: dict[str, tuple[rw.Pattern, Callable[[], dict[str, Any]]]] = {
    "causal": (rw.Causal(), dict),
    "branches": (rw.LongNet(segments=(16, 32), rates=(1, 2)), dict),
    "tables": (
        rw.BlockTable(torch.eye(4, dtype=torch.bool), block_size=16) & rw.KeyPadding(torch.tensor([64, 40])),
        dict,
    ),
    "function": (rw.from_mask_mod(lambda b, h, q, k: k <= q), dict),
    "terms": (rw.Causal(), lambda: {"terms": rw.DistanceBias(torch.randn(4, 33, requires_grad=True)), "dropout": 0.2}),
    "sinks": (rw.Causal(), lambda: {"sink_logits": torch.randn(4, requires_grad=True)}),
}


def reversed_axes(x: Tensor) -> Tensor:
    return x.permute(*range(x.ndim)[::-1]) if x.ndim > 1 else x


def gradients(name: str, hooks: AbstractContextManager[Any], **options: Any) -> list[Tensor]:
    torch.manual_seed(3)
    pattern, extras = CASES[name]
    q, k, v = (torch.randn(2, heads, N, dim, requires_grad=True) for heads, dim in ((4, 16), (2, 16), (2, 24)))
    given = extras()
    with hooks:
        out, lse = rw.attention_with_lse(q, k, v, pattern, **given, **options)
    # the gradients of out and lse have another layout too
    loss = (out.mT * torch.randn(2, 4, 24, N)).sum() + (lse.mT * torch.randn(2, N, 4)).sum()
    tables = [given["terms"].table] if "terms" in given else [x for x in given.values() if isinstance(x, Tensor)]
    return list(torch.autograd.grad(loss, [q, k, v, *tables]))


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("way", ["auto", "dense_batched", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_saved_tensors_in_another_layout(name: str, way: str) -> None:
    """Gradients are right on the quick path and through the operators."""
    want = gradients(name, contextlib.nullcontext(), backend=way)
    for layout in LAYOUTS.values():
        same(gradients(name, saved_tensors_hooks(lambda x: x, layout), backend=way), want)


@pytest.mark.parametrize("schedule", ["ring", "allgather"])
def test_around_a_ring(schedule: str) -> None:
    """Messages kept for backward around a ring are bytes, and are restored as bytes."""
    x = [torch.randn(1, heads, N, 16) for heads in (4, 2, 2)]

    def job(transport: Any) -> list[list[Tensor]]:
        ctx = ContextParallel(transport, rw.Causal(), N, heads=(4, 2), schedule=schedule)
        found = []
        for layout in (lambda x: x, *LAYOUTS.values()):
            leaves = [ctx.shard(each, 2).detach().requires_grad_() for each in x]
            with saved_tensors_hooks(lambda x: x, layout):
                out = rw.attention(*leaves, rw.Causal(), context=ctx)
            found.append(list(torch.autograd.grad(out.square().sum(), leaves)))
        return found

    for want, *others in run(2, job):
        for got in others:
            same(got, want)
