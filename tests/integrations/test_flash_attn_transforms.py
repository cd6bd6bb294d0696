"""flash-attn's functions in transforms and whole graphs, and outputs that callers write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ringweave.errors import UnsupportedError
from ringweave.integrations import flash_attn, flash_attn_interface

MODULES: dict[str, Any] = {"2": flash_attn, "3": flash_attn_interface}
BOUNDS = torch.tensor([0, 10, 24], dtype=torch.int32)
Call = Callable[..., Any]


def calls(version: str, heads: int = 2) -> dict[str, tuple[Call, Tensor]]:
    """Return calls of each form on one tensor, with keywords for more."""
    torch.manual_seed(0)
    module = MODULES[version]
    return {
        "dense": (
            lambda x, **more: module.flash_attn_func(x, x, x, causal=True, **more),
            torch.randn(2, 12, heads, 16),
        ),
        "packed": (
            lambda x, **more: module.flash_attn_varlen_func(x, x, x, BOUNDS, BOUNDS, 14, 14, causal=True, **more),
            torch.randn(24, heads, 16),
        ),
        "stacked": (
            lambda x, **more: module.flash_attn_qkvpacked_func(torch.stack([x] * 3, 2), causal=True, **more),
            torch.randn(1, 12, heads, 16),
        ),
    }


@pytest.mark.parametrize("name", ["dense", "packed", "stacked"])
@pytest.mark.parametrize("version", MODULES)
def test_transforms_of_calls_that_return_lse(version: str, name: str) -> None:
    call, x = calls(version)[name]

    def out(y: Tensor) -> Tensor:
        return call(y, return_attn_probs=True)[0]

    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(call(leaf).square().sum(), leaf)
    grad = torch.func.grad(lambda y: out(y).square().sum())
    assert torch.equal(grad(x), want)
    assert torch.equal(torch.vmap(out)(torch.stack([x, 2 * x])), torch.stack([call(x), call(2 * x)]))
    torch.testing.assert_close(torch.vmap(grad)(torch.stack([x, x]))[1], want)
    with pytest.raises(UnsupportedError, match="forward-mode derivative"):
        torch.func.jvp(out, (x,), (x,))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ["dense", "packed", "stacked"])
@pytest.mark.parametrize("version", MODULES)
def test_outputs_take_writes(version: str, name: str, heads: int) -> None:
    """Also where the output of one head needs no other order of its elements."""
    call, x = calls(version, heads)[name]
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(call(leaf).square().sum(), leaf)
    for more in ({}, {"return_attn_probs": True}):
        found = call(leaf, **more)
        out = found[0] if more else found
        if more:
            found[1].mul_(3)
        out.mul_(2)
        loss = out.square().sum() + (found[1].sum() if more else 0)
        (got,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(got, 4 * want)


def test_pages_in_transforms() -> None:
    """Attention over pages goes through vmap, and refuses derivatives by its own errors."""
    torch.manual_seed(0)
    q, pages = torch.randn(24, 2, 16), torch.randn(4, 16, 2, 16)
    table = torch.tensor([[0], [2]], dtype=torch.int32)
    for more in ({}, {"return_attn_probs": True}):

        def call(x: Tensor) -> Tensor:
            found = flash_attn.flash_attn_varlen_func(
                x, pages, pages, BOUNDS, BOUNDS, 14, 14, causal=True, block_table=table, **more  # noqa: B023
            )  # fmt: skip
            return found if isinstance(found, Tensor) else found[0]

        assert torch.equal(torch.vmap(call)(torch.stack([q, 2 * q])), torch.stack([call(q), call(2 * q)]))
        with pytest.raises(UnsupportedError, match="block_table: got a backward pass"):
            torch.func.grad(lambda x: call(x).sum())(q)
        with pytest.raises(UnsupportedError, match="forward-mode derivative"):
            torch.func.jvp(call, (q,), (q,))
        out = call(q.clone().requires_grad_())
        with pytest.raises(UnsupportedError, match="block_table: got a backward pass"):
            out.mul_(2).sum().backward()


#: The ends of two sequences of queries, and of their keys, in a buffer of 32 tokens.
STOPS = [((9, 20), (9, 20)), ((9, 20), (0, 32)), ((0, 0), (0, 0)), ((4, 32), (5, 7))]


@pytest.mark.parametrize(
    ("version", "slopes"),
    [("2", None), ("3", None), ("2", torch.tensor([0.5, 0.25])), ("2", torch.tensor([[0.5, 0.25], [0.1, 0.9]]))],
    ids=str,
)
def test_compiled_packs_that_end_before_the_buffer(version: str, slopes: Tensor | None) -> None:
    """Tokens after the last bound give 0 in one graph too, have no gradients, and reach no other token."""

    def call(x: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor]:
        function, terms = MODULES[version].flash_attn_varlen_func, {} if slopes is None else {"alibi_slopes": slopes}
        return function(x, x, x, of_q, of_k, 32, 32, causal=True, return_attn_probs=True, **terms)[:2]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for stops in STOPS:
        x, rest = torch.randn(32, 2, 16), max(stops[0][-1], stops[1][-1])
        x[rest:] = torch.nan
        of_q, of_k = (torch.tensor([0, *each], dtype=torch.int32) for each in stops)
        found = []
        for each in (call, compiled):
            leaf = x.clone().requires_grad_()
            out, lse = each(leaf, of_q, of_k)
            assert not out[stops[0][-1] :].any()
            found.append((out.detach(), lse.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
        assert not found[1][2][rest:].any()
    assert counter.frame_count == 1


@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (5, -1), (3, 4), (-1, 4)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("version", MODULES)
def test_longest_sequences_that_the_graph_computes(version: str, causal: bool, window: tuple[int, int]) -> None:
    """One graph, if the result does not depend on the number; version 2 refuses such a window in a whole graph."""
    _, x = calls(version)["packed"]

    def call(x: Tensor, bounds: Tensor) -> Tensor:
        longest = bounds.diff().max().item()
        function = MODULES[version].flash_attn_varlen_func
        return function(x, x, x, bounds, bounds, longest, longest, causal=causal, window_size=window)

    torch._dynamo.reset()
    whole = version == "3" or causal or window == (-1, -1)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        got = torch.compile(call, fullgraph=whole, backend="aot_eager")(x, BOUNDS)
    torch.testing.assert_close(got, call(x, BOUNDS))
