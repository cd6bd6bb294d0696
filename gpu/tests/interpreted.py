"""Test the Triton kernels in Triton's interpreter; test_triton.py runs this in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

import ringweave as rw
from ringweave.patterns import Pattern
from ringweave.plan import branches
from ringweave_gpu import triton
from tests.cases import MIXTURES, PATTERNS
from tests.oracle import NAMES, Inputs
from tests.test_conformance import conforms, run

EVERYTHING = PATTERNS | MIXTURES
# discarded results may combine infinities, and numpy, which computes for the interpreter, warns of that
pytestmark = [
    pytest.mark.sampled(2),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # Triton before 3.7 with numpy before 2.4
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def test_the_interpreter_is_on() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert triton.interpreted()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in EVERYTHING if name != "table"])
def test_every_pattern(name: str, poisoned: None) -> None:
    conforms(Inputs.random(61, heads=4, kv_heads=2), EVERYTHING[name](61), "triton")


@pytest.mark.parametrize(
    ("name", "kv_heads", "dtype"),
    [("sinks", 2, "fp32"), ("per_head", 1, "fp16"), ("dilated", 1, "fp16"), ("table_per_head", 2, "fp32")],
)
def test_heads_and_dims(name: str, kv_heads: int, dtype: str, poisoned: None) -> None:
    x = Inputs.random(130, heads=4, kv_heads=kv_heads, dim=24, value_dim=40, dtype=DTYPES[dtype])
    conforms(x, EVERYTHING[name](130), "triton")


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("tokens", [1, 63, 129])
def test_lengths(tokens: int, dtype: str, poisoned: None) -> None:
    heads = 1 if tokens > 100 else 2
    x = Inputs.random(tokens, heads=heads, batch=2 if tokens < 100 else 1, dtype=DTYPES[dtype])
    for name in ("causal", "sinks", "longnet_causal")[tokens > 100 :]:
        conforms(x, EVERYTHING[name](tokens), "triton")


@pytest.mark.parametrize("sizes", [(1, 300, 299), (1, 256, 255), (100, 130, 7), (16, 257, 241)])
def test_offset(sizes: tuple[int, int, int]) -> None:
    nq, nk, q_offset = sizes
    x = Inputs.random(nq, nk, heads=2, kv_heads=1)
    for name in ("causal", "sinks"):
        conforms(x, EVERYTHING[name](nk), "triton", q_offset=q_offset, scale=0.3)


@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_scale_of_any_sign(scale: float) -> None:
    conforms(Inputs.random(70), rw.Causal(), "triton", scale=scale)


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 16), (64, 64), (96, 256), (256, 160)])
def test_dims(dim: int, value_dim: int, poisoned: None) -> None:
    x = Inputs.random(200, heads=1, dim=dim, value_dim=value_dim, dtype=torch.float16)
    conforms(x, EVERYTHING["sinks"](200), "triton")


@pytest.mark.parametrize(("dim", "value_dim", "dtype"), [(512, 512, "fp16"), (264, 512, "fp32")])
def test_wide_dims(dim: int, value_dim: int, dtype: str, poisoned: None) -> None:
    x = Inputs.random(20, heads=1, dim=dim, value_dim=value_dim, dtype=DTYPES[dtype])
    table = rw.BlockTable(torch.ones(2, 2, dtype=torch.bool), 16)
    conforms(x, rw.Causal() & table, "triton")


@pytest.mark.parametrize("block", [16, 32, 64])
def test_tiles(block: int, poisoned: None) -> None:
    """Tables on their own grids, and rows of different lengths for each batch element and head, are right."""
    mask = torch.rand(2, 2, -(-150 // block), -(-150 // block), generator=torch.Generator().manual_seed(1)) < 0.4
    pattern = rw.BlockTable(mask, block)
    assert branches(pattern, 150, 150, heads=2, batch=2)[0].tile == ((block, block) if block > 16 else (128, 128))
    conforms(Inputs.random(150, heads=2, kv_heads=1, batch=2, dtype=torch.float16), pattern, "triton")


def test_blocks_of_half_a_word(poisoned: None) -> None:
    """256 channels of float32 leave room for blocks of 16 tokens, which is half of a mask word."""
    conforms(Inputs.random(70, heads=1, dim=256), EVERYTHING["sinks"](70), "triton")


def test_strides() -> None:
    """Views with heads last, every other token, or a broadcast batch give the results of contiguous copies."""
    base = torch.randn(2, 70, 4, 16)
    q, k = base.transpose(1, 2), base.transpose(1, 2)[:, ::2]
    v = torch.randn(1, 2, 140, 16).expand(2, -1, -1, -1)[:, :, ::2]
    got = rw.attention_with_lse(q, k, v, rw.Causal(), backend="triton")
    want = rw.attention_with_lse(*(x.contiguous() for x in (q, k, v)), rw.Causal(), backend="triton")
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    channels_first = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(rw.attention(channels_first, k, v, rw.Causal(), backend="triton"), want.out)


def test_addresses_of_more_than_32_bits() -> None:
    """Keys 2**25 elements apart, at addresses beyond 32 bits, give the bits of contiguous keys; the memory between them is never touched."""
    step = 2**25
    far = torch.empty(63 * step + 16, dtype=torch.float16).as_strided((1, 1, 64, 16), (1, 1, step, 1))
    x = Inputs.random(64, heads=1, dtype=torch.float16)
    far.copy_(x.k)
    near = [x.q, x.k.clone(), x.v]
    for leaf in (*near, far):
        leaf.requires_grad_()
    want = rw.attention(*near, rw.Causal(), backend="triton")
    got = rw.attention(x.q, far, x.v, rw.Causal(), backend="triton")
    assert torch.equal(got, want)
    assert torch.equal(
        rw.attention(far, near[1], x.v, rw.Causal(), backend="triton"),
        rw.attention(near[1], near[1], x.v, rw.Causal(), backend="triton"),
    )
    wanted = torch.autograd.grad(want, near, x.dout)
    for of, to in zip(torch.autograd.grad(got, (x.q, far, x.v), x.dout), wanted, strict=True):
        assert torch.equal(of, to)


def test_gradient_strides() -> None:
    q, k, v = (torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 70, 2, 16).transpose(1, 2)
    got = torch.autograd.grad(rw.attention(q, k, v, rw.Causal(), backend="triton"), (q, k, v), dout)
    want = torch.autograd.grad(rw.attention(q, k, v, rw.Causal(), backend="reference"), (q, k, v), dout.contiguous())
    torch.testing.assert_close(got, want)
    # the gradient of a sum is expanded: all strides are 0
    (got_sum,) = torch.autograd.grad(rw.attention(q, k, v, rw.Causal(), backend="triton").sum(), q)
    (want_sum,) = torch.autograd.grad(rw.attention(q, k, v, rw.Causal(), backend="reference").sum(), q)
    torch.testing.assert_close(got_sum, want_sum)


def test_the_same_bits_each_time() -> None:
    x = Inputs.random(140, heads=2, kv_heads=1, dtype=torch.float16)
    first, second = (run(x, EVERYTHING["sinks"](140), "triton") for _ in range(2))
    for name in NAMES:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unattended_nan(bad: float) -> None:
    """NaN in unattended keys and values, and in queries that attend nothing, changes no result of forward or backward."""
    table = torch.ones(2, 2, dtype=torch.bool)
    table[1] = False
    pattern = rw.patterns.Periodic(1000, 0, 80) & rw.BlockTable(table, 128)
    x = Inputs.random(200, heads=2)
    clean = run(x, pattern, "triton")
    for tensor, first in ((x.k, 80), (x.v, 80), (x.q, 128), (x.dout, 128)):
        tensor[:, :, first:] = bad
    dirty = run(x, pattern, "triton")
    for name in NAMES:
        assert torch.equal(clean[name], dirty[name]), name


def test_dead_rows_and_columns_of_one_tile() -> None:
    """The same holds if unattended keys and empty rows share a tile with others."""
    pattern: Pattern = rw.TokenMask(lambda b, h, q, k: (q % 3 != 0) & (k % 5 != 0))
    x = Inputs.random(90, heads=2, kv_heads=1)
    clean = run(x, pattern, "triton")
    x.q[:, :, ::3], x.dout[:, :, ::3] = torch.nan, torch.nan
    x.k[:, :, ::5], x.v[:, :, ::5] = torch.nan, torch.inf
    dirty = run(x, pattern, "triton")
    for name in NAMES:
        assert torch.equal(clean[name], dirty[name]), name


def test_masked_nan_key_does_not_reach_a_row_that_may_not_attend_it() -> None:
    x = Inputs.random(64, heads=2)
    clean = rw.attention(x.q, x.k, x.v, rw.Causal(), backend="triton")
    x.k[:, :, 40] = torch.nan
    dirty = rw.attention(x.q, x.k, x.v, rw.Causal(), backend="triton")
    assert torch.equal(clean[:, :, :40], dirty[:, :, :40])
    assert dirty[:, :, 40:].isnan().all()


def test_empty_rows() -> None:
    got = run(Inputs.random(70), ~rw.Causal() & rw.SlidingWindow(0, 5), "triton")
    assert torch.isneginf(got["lse"][:, :, -1]).all()
    assert (got["out"][:, :, -1] == 0).all()
    assert (got["dq"][:, :, -1] == 0).all()
    assert (got["dk"][:, :, 0] == 0).all()
    assert not any(result.isnan().any() for result in got.values())


@pytest.mark.parametrize(("page", "nq", "dtype"), [(16, 1, "fp32"), (64, 5, "fp16"), (256, 17, "fp32")])
def test_pages(page: int, nq: int, dtype: str) -> None:
    """Each row has the result of its sequence alone; poisoned other pages, and invalid page numbers past the end, change nothing."""
    lengths = (300, 130) if page > 64 else (150, 70)
    rows = [Inputs.random(nq, n, heads=4, kv_heads=2, dim=24, dtype=DTYPES[dtype]) for n in lengths]
    cache = rw.PagedCache.empty(3, 512, 2, 24, value_dim=24, page=page, dtype=DTYPES[dtype])
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    for b, x in enumerate(rows):
        cache.append(x.k, x.v, rows=[2 * b])
    for b, n in enumerate(cache.lengths.tolist()):
        cache.table[b, -(-n // page) :] = 2**31 - 1
    pattern = EVERYTHING["sinks"](300)
    q = torch.cat([rows[0].q, rows[0].q, rows[1].q])
    for terms in (None, rw.ALiBi.of_heads(4)):
        got = rw.paged_attention(q, cache, pattern, terms=terms, backend="triton")
        assert not got[1].any()
        for out, x in zip(got[::2], rows, strict=True):
            offset = x.k.shape[2] - nq
            call = {"q_offset": offset, "terms": terms}
            side_by_side = rw.attention(x.q, x.k, x.v, pattern, backend="triton", **call)[0]
            exact = rw.attention(x.q.double(), x.k.double(), x.v.double(), pattern, backend="reference", **call)[0]
            assert (out - exact).abs().max() <= 2 * (side_by_side - exact).abs().max() + 1e-6


def test_auto_leaves_cpu_tensors_to_others() -> None:
    facts = rw.explain(rw.Causal(), 64, as_dict=True)["backend"]
    assert facts["chosen"][0]["backend"] != "triton"
    assert facts["others"]["triton"] == ["on a CPU it is used only when named"]


def test_unsupported_calls_are_refused() -> None:
    q = torch.randn(1, 2, 100, 16)
    with pytest.raises(rw.UnsupportedError, match="interpreter multiplies bfloat16 wrongly"):
        rw.attention(q.bfloat16(), q.bfloat16(), q.bfloat16(), backend="triton")
    with pytest.raises(rw.UnsupportedError, match=r"it computes float32, bfloat16 and float16, and got torch\.float64"):
        rw.attention(q.double(), q.double(), q.double(), backend="triton")
    wide = torch.randn(1, 2, 16, 520)
    with pytest.raises(rw.UnsupportedError, match="head dimensions of at most 512, and got D = 520"):
        rw.attention(wide, wide, wide, backend="triton")
    with pytest.raises(rw.UnsupportedError, match="powers of two, and got 48 x 48"):
        rw.attention(q, q, q, EVERYTHING["table"](100), backend="triton")
