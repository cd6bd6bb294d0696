"""Attention over tensors stored in 8 bits is exact for the stored values, on every backend and variant."""

from __future__ import annotations

import pickle

import pytest
import torch

import ringweave as rw
from ringweave.backends import cpu
from ringweave.patterns import Pattern
from ringweave.precision import STORED, dequantize_rows, quantize_rows

from .oracle import Expected, Inputs, exact

KV = dict(zip(("int8", "fp8"), STORED, strict=True))
VARIANTS = [] if cpu.module() is None else cpu.module().variants()  # type: ignore[union-attr]
BACKENDS = ["reference", "dense_batched", *(f"cpu {variant}" for variant in VARIANTS)]
WINDOW = (rw.SlidingWindow(100) | rw.Sinks(3)) & rw.Causal()


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a backend, with the native kernel in one of its variants."""
    given: str = request.param
    name, _, variant = given.partition(" ")
    if variant:
        monkeypatch.setenv("RINGWEAVE_CPU_VARIANT", variant)
    return name


@pytest.mark.skipif(not VARIANTS, reason="native kernel only")
@pytest.mark.parametrize(
    "pattern", [rw.Dilated(64, 16) & rw.Causal(), rw.SlidingWindow(40) | rw.Dilated(64, 16)], ids=repr
)
def test_the_fast_order_is_exact_too(pattern: Pattern) -> None:
    x = Inputs.random(4096, heads=2, dim=16)
    want = exact(x, pattern.to_dense(4096, heads=2))["out"]
    fixed, fast = (
        rw.attention(x.q, x.k, x.v, pattern, backend="cpu", precision=rw.Precision(summation_order=order))
        for order in ("fixed", "fast")
    )
    assert not torch.equal(fixed, fast)
    for out in (fixed, fast):
        assert float((out.double() - want).abs().max()) < 2e-6
    compiled = torch.compile(
        lambda q: rw.attention(q, x.k, x.v, pattern, backend="cpu", precision=rw.Precision(summation_order="fast")),
        backend="eager",
    )
    assert torch.equal(compiled(x.q), fast)


def kept(x: Inputs, dtype: torch.dtype) -> Inputs:
    """Return the stored numbers in float32."""
    k, v = (dequantize_rows(*quantize_rows(side, dtype)) for side in (x.k, x.v))
    return Inputs(x.q.float(), k, v, x.dout.float(), x.dlse)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("kv", list(KV))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_over_stored_keys_follow_the_oracle(dtype: torch.dtype, kv: str, backend: str) -> None:
    """Results over 8-bit keys follow the oracle, for few and many queries, shared heads, odd dims, and strided LongNet views."""
    shapes = [(1, 4, 1, 32, 32), (2, 3, 3, 24, 40), (3, 4, 2, 16, 8), (70, 4, 2, 32, 16)]
    for nq, heads, kv_heads, dim, value_dim in shapes:
        x = Inputs.random(
            nq, 300, batch=2, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, dtype=dtype, seed=nq
        )
        stored, counts = kept(x, KV[kv]), WINDOW.to_dense(nq, 300, heads, q_offset=300 - nq)
        got = rw.attention_with_lse(
            x.q, x.k, x.v, WINDOW, q_offset=300 - nq, precision=rw.Precision(kv=KV[kv]), backend=backend
        )
        assert got.out.dtype == dtype
        expected = Expected.of(stored, counts)
        # float32 arithmetic, and rounding of the output
        floor = expected.floor | {"out": max(expected.floor["out"], torch.finfo(dtype).eps)}
        expected._replace(floor=floor).check(got._asdict())
    x = Inputs.random(256, heads=4, dim=16, dtype=dtype)
    mixture = rw.LongNet([64, 256], [1, 4], causal=True)
    got = rw.attention(x.q, x.k, x.v, mixture, precision=rw.Precision(kv=KV[kv]), backend=backend)
    stored = kept(x, KV[kv])
    want_out = rw.attention(*(side.double() for side in (stored.q, stored.k, stored.v)), mixture, backend="reference")
    assert (got - want_out).norm() <= (2e-6 + torch.finfo(dtype).eps) * want_out.norm()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [16, 8])
def test_every_code_is_what_torch_says(variant: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one key the output is its value: every 8-bit code is decoded as by torch, for few and for many queries."""
    monkeypatch.setenv("RINGWEAVE_CPU_VARIANT", variant)
    rows = 256 // dim
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(rows, 1, 1, dim)
    for dtype in STORED:
        values = codes.view(dtype).expand(rows, 1, 16, dim).contiguous()
        keys = torch.zeros(rows, 1, 16, dim, dtype=torch.uint8).view(dtype)
        scales = (torch.ones(rows, 1, 16), torch.full((rows, 1, 16), 0.75))
        table, lengths = torch.arange(rows, dtype=torch.int32)[:, None], torch.ones(rows, dtype=torch.int32)
        want = values.float()[:, :, :1] * 0.75
        cache = rw.PagedCache(keys, values, table, lengths, scales=scales)
        got = rw.paged_attention(torch.ones(rows, 1, 1, dim), cache, backend="cpu")
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        cache = rw.PagedCache(keys, values, table, lengths * 16, scales=scales)
        got = rw.paged_attention(torch.ones(rows, 1, 16, dim), cache, rw.Segments(1), backend="cpu")
        torch.testing.assert_close(got, want.expand_as(got), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv", list(KV))
@pytest.mark.parametrize("backend", ["reference", "dense_batched", *(["cpu"] if VARIANTS else [])], indirect=True)
def test_a_cache_has_the_bits_that_a_call_stores(kv: str, backend: str) -> None:
    """A cache stores the bits that a call stores, for any appends and pages, also after a shared page was copied."""
    x = Inputs.random(5, 300, batch=2, heads=4, kv_heads=2, dim=32, dtype=torch.bfloat16)
    policy = rw.Precision(kv=KV[kv])
    want = rw.attention(x.q, x.k, x.v, WINDOW, q_offset=295, precision=policy, backend=backend)
    for page, step in ((16, 300), (64, 7), (256, 1)):
        cache = rw.PagedCache.empty(3, 300, 2, 32, page=page, precision=policy)
        for first in range(0, 300, step):
            part = slice(first, first + step)
            cache.append(x.k[:, :, part].float(), x.v[:, :, part].float(), rows=[0, 1])
            if first == 7:
                cache.fork(0, 2)
                cache.append(x.v[:1, :, :3], x.k[:1, :, :3], rows=[2])
                cache.free([2])
        view = rw.PagedCache(cache.k, cache.v, cache.table[:2], cache.lengths[:2], scales=cache.scales)
        assert torch.equal(rw.paged_attention(x.q, view, WINDOW, backend=backend), want), page


@pytest.mark.parametrize("kv", list(KV))
def test_the_error_of_stored_values(kv: str) -> None:
    """Stored values are within 0.5/127 (int8) or 16/448 (fp8) of their row's largest element, zeros and extreme values included."""
    rows = torch.randn(64, 128) * torch.logspace(-30, 30, 64)[:, None]
    codes, scale = quantize_rows(rows, KV[kv])
    lost = (dequantize_rows(codes, scale) - rows).abs() / rows.abs().amax(-1, keepdim=True)
    assert lost.max() <= (0.5 / 127 if kv == "int8" else 16 / 448) * (1 + 1e-5)
    assert codes.float().abs().amax(-1).eq(STORED[KV[kv]]).all()
    edges = torch.zeros(5, 8)
    edges[1, 3], edges[2, 3], edges[3, 3], edges[4, 3] = 3e38, 1e-44, torch.inf, torch.nan
    back = dequantize_rows(*quantize_rows(edges, KV[kv]))
    assert back[0].eq(0).all()
    torch.testing.assert_close(back[1], edges[1])
    assert back[2].abs().max() <= 1e-38
    assert back[3:].isnan().all()
    stored = sum(side.nbytes for side in quantize_rows(torch.randn(1, 8, 100, 64), KV[kv]))
    assert stored <= 0.55 * 8 * 100 * 64 * 2


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_value_that_is_not_finite_reaches_only_its_rows(backend: str) -> None:
    x = Inputs.random(40, heads=2, dim=16)
    x.k[0, 1, 7], x.v[0, 0, 9, 3] = torch.nan, torch.inf
    out = rw.attention(x.q, x.k, x.v, rw.Segments(5), precision=rw.Precision(kv=torch.int8), backend=backend)
    assert out[0, 1, 5:10].isnan().all()
    assert out[0, 0, 9].isnan().all()
    assert out[0, 1, :5].isfinite().all()
    assert out[0, 1, 10:].isfinite().all()
    step = rw.attention(
        x.q[:, :, -1:], x.k, x.v, rw.Segments(5), q_offset=39, precision=rw.Precision(kv=torch.int8), backend=backend
    )
    assert step.isfinite().all()


def test_scores_out_of_range_are_seen() -> None:
    """A score beyond float32's range over 8-bit keys makes its row NaN, with and without terms."""
    q = torch.full((1, 1, 1, 16), 1e30)
    k, v = torch.ones(1, 1, 20, 16) * -1e30, torch.randn(1, 1, 20, 16)
    for terms in ((), rw.ALiBi([0.5])):
        for backend in ("dense_batched", *(["cpu"] if VARIANTS else [])):
            out = rw.attention(q, k, v, terms=terms, precision=rw.Precision(kv=torch.int8), backend=backend)
            assert out.isnan().all(), backend


def test_compute_and_table() -> None:
    """Converting by `compute` and `table` equals the caller's conversion; gradients pass through it and the output keeps its dtype."""
    x = Inputs.random(64, heads=2, dim=16)
    table = torch.randn(1, 2, 64, 64, requires_grad=True)
    policy = rw.Precision(compute=torch.bfloat16, table=torch.bfloat16)
    leaves = x.leaves()
    out = rw.attention(*leaves, rw.Causal(), terms=[rw.Softcap(20.0), rw.Bias(table)], precision=policy)
    grads = torch.autograd.grad(out, [*leaves, table], x.dout)
    again = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    rounded = table.detach().bfloat16().requires_grad_()
    want = rw.attention(*again, rw.Causal(), terms=[rw.Softcap(20.0), rw.Bias(rounded)]).float()
    assert out.dtype == torch.float32
    assert torch.equal(out, want)
    for got, expected in zip(grads, torch.autograd.grad(want, [*again, rounded], x.dout), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, expected.float())
    wide = rw.attention(*(leaf.bfloat16() for leaf in leaves), precision=rw.Precision(compute=torch.float32))
    assert wide.dtype == torch.bfloat16


def test_modules_contexts_and_graphs_take_it() -> None:
    policy = pickle.loads(pickle.dumps(rw.Precision(kv=torch.int8, wire="int8")))
    assert policy == rw.Precision(kv=torch.int8, wire="int8")
    x = torch.randn(1, 40, 32)
    layer = rw.nn.MultiheadAttention(32, 2, batch_first=True, pattern=rw.Causal(), precision=policy)
    plain = rw.nn.MultiheadAttention(32, 2, batch_first=True, pattern=rw.Causal())
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        stored, native = layer(x, x, x)[0], plain(x, x, x)[0]
        assert 0 < (stored - native).norm() < 0.02 * native.norm()
        step = torch.compile(lambda y: layer(y, y, y)[0], fullgraph=True, backend="aot_eager")
        assert torch.equal(step(x), stored)
    for bad in (
        lambda: layer(x, x, x),
        lambda: rw.nn.LongNetAttention(32, 2, segments=[8], rates=[1], detach_weights=True, precision=policy),
        lambda: rw.nn.HierarchicalAttention(32, 2, pool=8, top_k=2, window=1, precision=policy),
    ):
        with pytest.raises(rw.UnsupportedError, match="precision"):
            bad()
    context = rw.ContextParallel(None, rw.Causal(), 64, heads=(2, 2), precision=policy)
    assert context.options.wire == "int8"
    assert rw.ContextParallel(None, rw.Causal(), 64, heads=(2, 2), wire="bf16", precision=policy).options.wire == "bf16"
    q = torch.randn(1, 2, 64, 16)
    out = rw.attention(q, q, q, rw.Causal(), context=context, precision=rw.Precision(wire="int8"))
    torch.testing.assert_close(out, rw.attention(q, q, q, rw.Causal()))
    with pytest.raises(rw.UnsupportedError, match=r"precision\.wire: got 'bf16'"):
        rw.attention(q, q, q, rw.Causal(), context=context, precision=rw.Precision(wire="bf16"))
    with pytest.raises(rw.UnsupportedError, match="with context"):
        rw.attention(q, q, q, rw.Causal(), context=context, precision=policy)


def test_the_kernel_refuses_8_bits_without_scales() -> None:
    native = cpu.module()
    if native is None:
        pytest.skip("no compiler")
    q, k = torch.zeros(1, 1, 16, 8), torch.zeros(1, 1, 16, 8, dtype=torch.int8)
    plan = rw.plan(rw.Full(), 16, 16)
    rest = cpu._plan(plan) | {"scale": 1.0, "threads": 1, "out": torch.empty_like(q), "lse": torch.empty(1, 1, 16)}
    ones = torch.ones(1, 1, 16)
    for keys, scales, said in (
        (k, {}, "k: wanted float32"), (q, {"k_scale": ones, "v_scale": ones}, "k: wanted 8 bits"),
        (k, {"k_scale": ones[..., :8], "v_scale": ones}, "k_scale"), (k, {"k_scale": ones.half(), "v_scale": ones}, "k_scale"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            native.forward(q=q, k=keys, v=keys, **rest, **scales)
