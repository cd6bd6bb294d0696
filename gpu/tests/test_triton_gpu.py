"""Test the Triton backend on a GPU: conformance in all dtypes, and equal bits in repeated calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import ringweave as rw
from ringweave.patterns import Pattern
from ringweave_gpu import triton
from tests.on_gpu import DEVICE, EVERYTHING
from tests.oracle import NAMES, Inputs
from tests.test_conformance import conforms, run
from tests.test_precision import KV
from tests.test_terms import make

from .stored import stored_conforms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not triton.installed(), reason="triton is not installed")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def poison() -> None:
    """Fill freed memory of small and large pools with NaN, so that elements without a write show in torch.empty."""
    held = [torch.full((2**17,), torch.nan, device=DEVICE) for _ in range(64)]
    held.append(torch.full((2**26,), torch.nan, device=DEVICE))
    torch.cuda.synchronize()
    held.clear()


def agrees(x: Inputs, pattern: Pattern, q_offset: int = 0, scale: float | None = None) -> None:
    poison()
    conforms(x.to(DEVICE), pattern, "triton", q_offset=q_offset, scale=scale)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", [name for name in EVERYTHING if name != "table"])
def test_every_pattern(name: str, dtype: str) -> None:
    x = Inputs.random(257, heads=4, kv_heads=2, batch=2, dim=64, dtype=DTYPES[dtype])
    agrees(x, EVERYTHING[name](257))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("name", ["sinks", "per_head", "longnet_causal", "table_per_head"])
@pytest.mark.parametrize("tokens", [1, 63, 1000])
def test_lengths_and_groups(tokens: int, name: str, heads: tuple[int, int], dtype: str) -> None:
    x = Inputs.random(tokens, heads=heads[0], kv_heads=heads[1], dim=24, value_dim=40, dtype=DTYPES[dtype])
    agrees(x, EVERYTHING[name](tokens))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("dim", "value_dim", "block"),
    [(16, 16, 32), (64, 64, 64), (80, 128, 128), (128, 128, 64), (128, 128, 128), (256, 256, 128), (512, 512, 64)],
)
def test_dims_and_tiles(dim: int, value_dim: int, block: int, dtype: str) -> None:
    x = Inputs.random(600, heads=4, kv_heads=2, dim=dim, value_dim=value_dim, dtype=DTYPES[dtype])
    agrees(x, rw.patterns.random_blocks(600, 0.4, block_size=block) & rw.Causal())


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    "names", [("softcap", "distance"), ("alibi", "bias"), ("shared_bias",), ("distance", "softcap")]
)
def test_terms_and_dropout(names: tuple[str, ...], dtype: str) -> None:
    """Terms and dropout equal the CPU's dense_batched, which test_terms.py tests, and repeat to the bit."""
    n, found = 300, []
    x = Inputs.random(n, heads=4, kv_heads=2, batch=2, dim=64, dtype=DTYPES[dtype])
    pattern = (rw.SlidingWindow(90) | rw.Sinks(3)) & rw.Causal()
    for device, backend in (("cpu", "dense_batched"), (DEVICE, "triton"), (DEVICE, "triton")):
        leaves = [y.to(device).requires_grad_() for y in (x.q, x.k, x.v)]
        terms = [term.over(*(x.detach().to(device) for x in term.tables)) for term in make(names, n, DTYPES[dtype])]
        torch.manual_seed(5)
        out = rw.attention(*leaves, pattern, terms=terms, dropout=0.2, backend=backend)
        found.append([y.float().cpu() for y in (out, *torch.autograd.grad(out, leaves, x.dout.to(device)))])
    for wanted, got, again in zip(*found, strict=True):
        assert torch.equal(got, again)
        assert float((got - wanted).norm() / wanted.norm()) <= 8 * torch.finfo(DTYPES[dtype]).eps


@pytest.mark.parametrize("kv", list(KV))
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("nq", "dim"), [(1, 128), (5, 64), (600, 128), (257, 24)])
def test_keys_and_values_of_8_bits(nq: int, dim: int, dtype: str, kv: str) -> None:
    x = Inputs.random(nq, 600, heads=8, kv_heads=2, dim=dim, dtype=DTYPES[dtype]).to(DEVICE)
    for pattern in (rw.Causal(), (rw.SlidingWindow(90) | rw.Sinks(3)) & rw.Causal()):
        poison()
        stored_conforms(x, pattern, KV[kv], q_offset=600 - nq)


@pytest.mark.parametrize("block", [64, 128])
def test_plans_without_masks(block: int) -> None:
    x = Inputs.random(640, heads=4, kv_heads=2, dim=128, dtype=torch.bfloat16)
    agrees(x, rw.patterns.random_blocks(640, 0.4, block_size=block))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (2, 2)], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("nq", [1, 5, 16])
def test_few_queries_over_many_keys(nq: int, heads: tuple[int, int], dtype: str) -> None:
    nk = 20_000
    x = Inputs.random(nq, nk, heads=heads[0], kv_heads=heads[1], dim=64, dtype=DTYPES[dtype])
    agrees(x, rw.Causal(), q_offset=nk - nq)
    agrees(x, (rw.SlidingWindow(9000) | rw.Sinks(4)) & rw.Causal(), q_offset=nk - nq)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_long_rows_and_columns(dtype: str) -> None:
    """Rows and columns of global tokens span the sequence; they are split, and stay exact."""
    x = Inputs.random(6000, heads=2, kv_heads=1, dim=64, dtype=DTYPES[dtype])
    agrees(x, rw.SlidingWindow(64) | rw.Global(1))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_empty_rows_and_unattended_nan(dtype: str) -> None:
    table = torch.ones(2, 2, dtype=torch.bool)
    table[1] = False
    pattern = rw.patterns.Periodic(1000, 0, 80) & rw.BlockTable(table, 128)
    x = Inputs.random(200, heads=2, dim=64, dtype=DTYPES[dtype]).to(DEVICE)
    clean = run(x, pattern, "triton")
    assert torch.isneginf(clean["lse"][:, :, 128:]).all()
    assert (clean["out"][:, :, 128:] == 0).all()
    for tensor, first in ((x.k, 80), (x.v, 80), (x.q, 128), (x.dout, 128)):
        tensor[:, :, first:] = torch.nan
    dirty = run(x, pattern, "triton")
    for name in NAMES:
        assert torch.equal(clean[name], dirty[name]), name


def test_strides() -> None:
    base = torch.randn(2, 700, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    q, k = base.transpose(1, 2), base.transpose(1, 2)[:, ::2]
    v = torch.randn(1, 2, 1400, 64, dtype=torch.bfloat16, device=DEVICE).expand(2, -1, -1, -1)[:, :, ::2]
    got = rw.attention_with_lse(q, k, v, rw.Causal(), backend="triton")
    want = rw.attention_with_lse(*(x.contiguous() for x in (q, k, v)), rw.Causal(), backend="triton")
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_more_elements_than_32_bits_count() -> None:
    """Keys past the 2**31-th element give the results of a contiguous copy of them."""
    nk, window = 2**24 + 1000, 300
    k = torch.zeros(1, 1, nk, 128, dtype=torch.bfloat16, device=DEVICE)
    k[:, :, -512:] = torch.randn(1, 1, 512, 128, device=DEVICE)
    q = torch.randn(1, 2, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    pattern = rw.SlidingWindow(window) & rw.Causal()
    got = rw.attention(q, k, k, pattern, q_offset=nk - 16, backend="triton")
    end = k[:, :, -512:].contiguous()
    want = rw.attention(q, end, end, pattern, q_offset=512 - 16, backend="reference")
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", ["causal", "global", "sinks", "table_per_head"])
def test_the_same_bits_each_time(name: str) -> None:
    x = Inputs.random(3000, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16).to(DEVICE)
    pattern = EVERYTHING[name](3000)
    want = run(x, pattern, "triton")
    for _ in range(5):
        poison()
        got = run(x, pattern, "triton")
        for result in NAMES:
            assert torch.equal(got[result], want[result]), result


@pytest.mark.parametrize("name", ["causal", "sinks", "longnet", "full"])
def test_descriptors_and_addresses_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringweave_gpu.triton import launch

    x = Inputs.random(1000, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16).to(DEVICE)
    want = run(x, EVERYTHING[name](1000), "triton")
    launch_config_for = launch.launch_config_for
    monkeypatch.setattr(
        launch, "launch_config_for", lambda *case: dataclasses.replace(launch_config_for(*case), described=False)
    )
    got = run(x, EVERYTHING[name](1000), "triton")
    for result in NAMES:
        assert torch.equal(got[result], want[result]), result


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_neighbouring_tiles_of_64_share_a_program(dtype: str) -> None:
    x = Inputs.random(1000, heads=4, dim=128, dtype=DTYPES[dtype])
    table = torch.rand(1, 4, 8, 16, generator=torch.Generator().manual_seed(1)) < 0.4
    pattern = rw.BlockTable(table.repeat_interleave(2, 2), 64)
    agrees(x, pattern)
    agrees(x, pattern & rw.Causal())
