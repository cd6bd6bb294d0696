"""Heads of 576 and 640 channels, such as those of latent attention: every entry of the kernel takes them."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw
from ringweave.backends import cpu
from ringweave.environment import CPU_VARIANT
from ringweave.merge import merge_into

from ..oracle import Inputs
from ..test_conformance import conforms
from .plans import DTYPES, VARIANTS, case, random_masks, shared_case
from .test_pages import paged, ragged_case

WIDE = [(576, 512), (576, 576), (640, 640), (8, 640)]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))


@every_variant
@every_dtype
@pytest.mark.parametrize("dims", WIDE, ids=str)
def test_results_and_gradients(dims: tuple[int, int], dtype: str, variant: str) -> None:
    """Results and all gradients of tiles with many queries are within the calibrated error."""
    shared_case(130, 100, (64, 32), dtype=dtype, dims=dims).check(variant)


@every_variant
@every_dtype
@pytest.mark.parametrize("dims", WIDE, ids=str)
@pytest.mark.parametrize("nq", [1, 3])
def test_few_queries(nq: int, dims: tuple[int, int], dtype: str, variant: str) -> None:
    """Decoding steps that join sums over several blocks of keys are within the calibrated error."""
    mask = random_masks(1, nq, 2500, 32, 128, density=0.9)
    case(nq, 2500, (32, 128), dtype=dtype, heads=2, kv_heads=1, dims=dims, masks=mask).check(variant)


@every_variant
@every_dtype
@pytest.mark.parametrize("nq", [1, 40])
def test_pages(nq: int, dtype: str, variant: str) -> None:
    """Keys in pages give the bits of adjacent keys."""
    each = ragged_case(nq, 64, dtype, dims=(576, 512))
    for got, want in zip(paged(each, 32, variant), each.forward(variant), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("pattern", [rw.Causal(), (rw.SlidingWindow(70) | rw.Dilated(9, 16)) & rw.Causal()], ids=str)
@every_dtype
def test_prepared_steps(dtype: str, pattern: rw.Pattern) -> None:
    """Prepared decoding steps, also of unions, which are merged, and over pages have the bits of whole rows."""
    n = 300
    q, k, v = (torch.randn(2, h, n, d).to(DTYPES[dtype]) for h, d in ((4, 576), (1, 576), (1, 512)))
    whole = rw.attention(q, k, v, pattern, backend="cpu")
    cache = rw.PagedCache.empty(batch=2, length=n, heads=1, dim=576, value_dim=512, page=16, dtype=k.dtype)
    cache.append(k[:, :, :280], v[:, :, :280])
    for at in range(280, n):
        cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
        one, keys, values = q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1]
        assert torch.equal(rw.attention(one, keys, values, pattern, q_offset="end"), whole[:, :, at : at + 1])
        assert torch.equal(rw.paged_attention(one, cache, pattern), whole[:, :, at : at + 1])


@pytest.mark.parametrize("name", ["causal", "dilated"])
def test_auto_chooses_the_kernel(name: str) -> None:
    """``auto`` computes heads of 576 channels with the kernel."""
    pattern = {"causal": rw.Causal(), "dilated": rw.Dilated(20, 5) & rw.Causal()}[name]
    x = Inputs.random(190, heads=2, kv_heads=1, dim=576, value_dim=512)
    conforms(x, pattern, "auto")
    chosen = rw.explain(pattern, 190, heads=2, kv_heads=1, head_dim=576, value_dim=512, as_dict=True)
    assert {branch["backend"] for branch in chosen["branches"]} == {"cpu"}


@every_variant
def test_merge(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's merge of 640 channels is that of PyTorch's functions, to rounding."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    parts = [(torch.randn(2, 3, 5, 640), torch.randn(2, 3, 5)) for _ in range(2)]
    (out, lse), (want, want_lse) = ([x.clone() for x in parts[0]] for _ in range(2))
    cpu.merge_into(out, lse, *parts[1])
    merge_into(want, want_lse, *parts[1])
    torch.testing.assert_close((out, lse), (want, want_lse))


@every_variant
@every_dtype
def test_tile_mass(dtype: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of weights by tile are those of dense weights, and all weights sum to the number of rows."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    q, k = torch.randn(1, 2, 100, 640).to(DTYPES[dtype]), torch.randn(1, 1, 100, 640).to(DTYPES[dtype])
    _, lse = rw.attention_with_lse(q, k, k, rw.Causal(), backend="cpu")
    found = rw.adaptive.tile_mass(q, k, lse, rw.Causal(), tile=32, backend="cpu")
    want = rw.adaptive.tile_mass(q.float(), k.float(), lse, rw.Causal(), tile=32, backend="dense_batched")
    torch.testing.assert_close(found.values, want.values, rtol=1e-5 if dtype == "fp32" else 1e-3, atol=1e-6)
    torch.testing.assert_close(found.values.sum(), torch.tensor(200.0), rtol=1e-3, atol=0)
