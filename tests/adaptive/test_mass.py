"""The attention mass of tiles, against the dense definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.adaptive import tile_mass

from ..oracle import Inputs


def dense_mass(x: Inputs, pattern: rw.Pattern, q_offset: int, scale: float, lse: Tensor | None = None) -> Tensor:
    """Return the weights of all pairs, (B, Hq, Nq, Nk) float64."""
    q, k = x.q.double(), x.k.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    allowed = pattern.to_dense(q.shape[2], k.shape[2], heads=q.shape[1], batch=q.shape[0], q_offset=q_offset)
    scores = (q @ k.mT * scale).masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse.double()
    return torch.exp(scores - lse.masked_fill(lse.isneginf(), 0)[..., None])


def in_tiles(weights: Tensor, plan: rw.BlockPlan) -> Tensor:
    """Return the sums over the keys of tiles, (B, Hq, Nq, key tiles)."""
    missing = -weights.shape[-1] % plan.kv_tile
    return torch.nn.functional.pad(weights, (0, missing)).unflatten(-1, (-1, plan.kv_tile)).sum(-1)


CASES = {
    "causal": (rw.Causal(), 200, 200, 0, 2, 2),
    "window": ((rw.SlidingWindow(40) | rw.Sinks(3)) & rw.Causal(), 131, 131, 0, 4, 2),
    "decode": (rw.Causal(), 1, 300, 299, 4, 1),
    "chunk": (rw.SlidingWindow(70) & rw.Causal(), 77, 261, 184, 2, 1),
    "empty rows": (rw.Segments(64) & ~rw.SlidingWindow(20, 20), 96, 96, 0, 2, 2),
    "heads": (rw.PerHead([rw.Causal(), rw.SlidingWindow(9), rw.Causal(), rw.Full()]), 140, 140, 0, 4, 2),
    "full": (rw.Full(), 64, 333, 0, 3, 1),
}


@pytest.mark.parametrize("backend", ["cpu", "dense_batched"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str, backend: str) -> None:
    pattern, nq, nk, q_offset, heads, kv_heads = CASES[name]
    x = Inputs.random(nq, nk, batch=2, heads=heads, kv_heads=kv_heads, dim=24)
    for scale in (0.3, -0.2):
        lse = rw.attention_with_lse(x.q, x.k, x.v, pattern, scale=scale, q_offset=q_offset).lse
        got = tile_mass(x.q, x.k, lse, pattern, per="row", scale=scale, q_offset=q_offset, backend=backend)
        want = in_tiles(dense_mass(x, pattern, q_offset, scale), got.plan)
        torch.testing.assert_close(got.to_dense().double(), want, rtol=2e-5, atol=1e-6)
        whole = tile_mass(x.q, x.k, lse, pattern, scale=scale, q_offset=q_offset, backend=backend)
        torch.testing.assert_close(whole.values, got.by_tile(), rtol=1e-5, atol=1e-5)
        assert whole.to_dense().shape == (2, heads, got.plan.q_tiles, got.plan.kv_tiles)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    x = Inputs.random(150, heads=2, dim=32, dtype=dtype)
    lse = rw.attention_with_lse(x.q, x.k, x.v, rw.Causal()).lse
    got = tile_mass(x.q, x.k, lse, rw.Causal(), per="row")
    want = in_tiles(dense_mass(x, rw.Causal(), 0, 32**-0.5), got.plan)
    assert got.values.dtype == lse.dtype
    # 16-bit inputs: products are exact, lse is rounded once
    torch.testing.assert_close(got.to_dense().double(), want, rtol=1e-5, atol=1e-6)


def test_of_a_larger_attention_it_is_the_recall() -> None:
    x = Inputs.random(256, batch=2, heads=4, kv_heads=2, dim=32)
    lse = rw.attention_with_lse(x.q, x.k, x.v, rw.Causal()).lse
    table = rw.adaptive.select(x.q, x.k, top_k=3, block_size=32) & rw.Causal()
    got = tile_mass(x.q, x.k, lse, table)
    want = dense_mass(x, table, 0, 32**-0.5, lse).sum()
    torch.testing.assert_close(got.values.double().sum(), want, rtol=1e-5, atol=0)
    pair, row, col = got.tiles()
    again = torch.zeros_like(got.to_dense())
    again[pair // 4, pair % 4, row, col] = got.values
    assert torch.equal(again, got.to_dense())


@pytest.mark.parametrize("backend", ["cpu", "dense_batched"])
def test_under_autocast_the_masses_of_a_query_sum_to_one(backend: str) -> None:
    x = Inputs.random(200, batch=2, heads=4, kv_heads=2, dim=16)
    q, pattern = 3 * x.q, rw.SlidingWindow(70) & rw.Causal()
    with torch.autocast("cpu", torch.bfloat16):
        lse = rw.attention_with_lse(q, x.k, x.v, pattern).lse
        mass = tile_mass(q, x.k, lse, pattern, per="row", backend=backend)
    sums = mass.to_dense().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-4)


def test_unattended_keys_and_queries_have_no_effect() -> None:
    """NaN in keys and queries without pairs has no effect, and a row without keys holds 0."""
    x = Inputs.random(160, heads=2, dim=16)
    pattern = rw.KeyPadding(stop=100) & rw.Causal()
    lse = rw.attention_with_lse(x.q, x.k, x.v, pattern).lse
    want = tile_mass(x.q, x.k, lse, pattern)
    x.k[:, :, 100:] = torch.nan
    empty = rw.KeyPadding(stop=0)
    nothing = rw.attention_with_lse(x.q, x.k, x.v, empty | pattern & ~rw.Sinks(160)).lse
    for backend in ("cpu", "dense_batched"):
        got = tile_mass(x.q, x.k, lse, pattern, backend=backend)
        torch.testing.assert_close(got.values, want.values, rtol=1e-5, atol=1e-6)
        held = tile_mass(x.q, x.k, torch.full_like(nothing, -torch.inf), pattern, backend=backend)
        assert torch.equal(held.values, torch.zeros_like(held.values))


def test_terms() -> None:
    x = Inputs.random(130, heads=2, dim=16)
    terms = [rw.ALiBi.of_heads(2), rw.Softcap(3.0)]
    lse = rw.attention_with_lse(x.q, x.k, x.v, rw.Causal(), terms=terms).lse
    got = tile_mass(x.q, x.k, lse, rw.Causal(), per="row", terms=terms)
    torch.testing.assert_close(got.to_dense().sum(-1), torch.ones(1, 2, 130), rtol=1e-5, atol=1e-5)
    with pytest.raises(rw.UnsupportedError, match="no masses of scores with terms"):
        tile_mass(x.q, x.k, lse, rw.Causal(), terms=terms, backend="cpu")


def test_threads_change_no_bits() -> None:
    x = Inputs.random(500, batch=2, heads=4, kv_heads=2, dim=32)
    lse = rw.attention_with_lse(x.q, x.k, x.v, rw.Causal()).lse
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(tile_mass(x.q, x.k, lse, rw.Causal(), backend="cpu").values)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_transforms_see_no_derivative() -> None:
    x = Inputs.random(64)
    lse = rw.attention_with_lse(x.q, x.k, x.v, rw.Causal()).lse

    def held(q: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        return tile_mass(q, x.k, lse, rw.Causal(), backend=backend).values

    values, tangents = torch.func.jvp(held, (x.q,), (x.q,))
    torch.testing.assert_close(values, held(x.q))
    assert not tangents.any()
    assert not torch.func.grad(lambda q: held(q).sum())(x.q).any()
    with pytest.raises(rw.UnsupportedError, match="backend: got 'cpu'"):
        torch.func.grad(lambda q: held(q, "cpu").sum())(x.q)
    with pytest.raises(rw.UnsupportedError, match=r"tile_mass: got tensors inside of torch\.vmap"):
        torch.vmap(held)(x.q[None])
