"""Dropout of flash-attn 2's functions, and the weights that they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.integrations import flash_attn

from .flash import Options, allowed
from .test_flash_attn import bounds, drawn


def weighed(weights: Tensor, v: Tensor, p: float) -> Tensor:
    """Return (B, Nq, H, D) from signed weights (B, H, Nq, Nk) and values (B, Nk, H, D)."""
    return torch.einsum("bhij,bjhd->bihd", weights.clamp(min=0) / (1 - p), v)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 5)}, {"slopes": (2, 4)}], ids=str)
def test_weights_say_what_was_dropped(options: dict[str, Any]) -> None:
    """Signed weights reproduce output and gradients; their signs are those of about p of the pairs."""
    options = dict(options)
    if shape := options.pop("slopes", None):
        options["alibi_slopes"] = drawn(shape)[0].abs() / 8
    q, k, v = drawn((2, 70, 4, 16), (2, 300, 4, 16), (2, 300, 4, 16))
    leaf = v.clone().requires_grad_()
    torch.manual_seed(3)
    out, lse, weights = flash_attn.flash_attn_func(q, k, leaf, 0.25, return_attn_probs=True, **options)
    after = torch.rand(())
    assert weights.shape == (2, 4, 128, 384)
    assert not weights[:, :, 70:].any()
    assert not weights[..., 300:].any()
    weights = weights[:, :, :70, :300]
    torch.testing.assert_close(weighed(weights, v, 0.25), out)
    _, plain, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    torch.testing.assert_close(lse, plain)
    torch.testing.assert_close(weights.abs().sum(-1), torch.ones(2, 4, 70))
    mask = allowed(70, 300, Options(options.get("causal", False), options.get("window_size", (-1, -1))))
    assert abs(float((weights < 0).sum()) / (8 * int(mask.sum())) - 0.25) < 0.02
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    torch.testing.assert_close(
        grad, (weights.clamp(min=0) / 0.75).sum(2).mT[..., None].expand_as(v), atol=1e-4, rtol=1e-4
    )
    # the weights cost no random numbers
    torch.manual_seed(3)
    again = flash_attn.flash_attn_func(q, k, v, 0.25, **options)
    assert torch.equal(again, out.detach())
    assert torch.equal(torch.rand(()), after)


def test_weights_of_packed_sequences() -> None:
    queries, keys = [30, 0, 150], [40, 7, 150]
    q, k, v = drawn((180, 2, 16), (197, 2, 16), (197, 2, 16))
    for slopes in (None, drawn((3, 2))[0].abs() / 8):
        out, _, weights = flash_attn.flash_attn_varlen_func(
            q,
            k,
            v,
            bounds(queries),
            bounds(keys),
            150,
            150,
            0.5,
            causal=True,
            alibi_slopes=slopes,
            return_attn_probs=True,
        )
        assert weights.shape == (3, 2, 256, 256)
        for b, (one, values) in enumerate(zip(out.split(queries), v.split(keys), strict=True)):
            got = weighed(weights[b : b + 1, :, : len(one), : len(values)], values[None], 0.5)[0]
            torch.testing.assert_close(got, one)
            assert not weights[b, :, len(one) :].any()


def test_dropout_repeats_under_a_seed_and_not_otherwise() -> None:
    q, k, v = drawn((1, 64, 2, 16), (1, 64, 2, 16), (1, 64, 2, 16))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        out = flash_attn.flash_attn_func(*leaves, dropout_p=0.1, causal=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)])
        repeated = torch.autograd.grad(out.square().sum(), leaves)
        assert all(map(torch.equal, results[-1][1:], repeated))
    assert all(map(torch.equal, results[0], results[1]))
    assert not torch.equal(results[0][0], results[2][0])


def test_weights_of_a_call_without_keys() -> None:
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 0, 4, 16)
    out, lse, weights = flash_attn.flash_attn_func(q, k, k, 0.5, return_attn_probs=True)
    assert weights.shape == (2, 4, 128, 0)
    assert not out.any()
    assert bool((lse == torch.inf).all())
    lengths, none = bounds([3, 2]), bounds([0, 0])
    longest = torch.tensor(3), torch.tensor(0)
    _, _, weights = flash_attn.flash_attn_varlen_func(
        q[0],
        k[0],
        k[0],
        lengths,
        none,
        *longest,
        0.5,
        return_attn_probs=True,  # type: ignore[arg-type]
    )
    assert weights.shape == (2, 4, 128, 0)
