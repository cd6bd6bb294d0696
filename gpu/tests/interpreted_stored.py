"""Test 8-bit keys and values in the Triton kernels, in Triton's interpreter.

Run by test_triton.py in a process that has TRITON_INTERPRET=1 set.
"""

from __future__ import annotations

import pytest
import torch

import ringweave as rw
from ringweave.precision import STORED, dequantize_rows, quantize_rows
from ringweave_gpu.triton import launch, queues
from ringweave_gpu.triton.launch_config import Device
from tests.cases import MIXTURES, PATTERNS
from tests.oracle import Inputs
from tests.test_precision import KV

from .stored import stored_conforms

EVERYTHING = PATTERNS | MIXTURES
HALF, SINGLE = torch.float16, torch.float32
pytestmark = [
    pytest.mark.sampled(2),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # Triton before 3.7 with numpy before 2.4
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture(params=["bytes", "floats"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Simulate a device with a compiler that lacks 8-bit floats ("bytes"), or that converts them ("floats")."""
    if request.param == "floats":
        monkeypatch.setattr(launch, "_device", lambda device: Device("hopper", 227 * 1024, units=8))
    return str(request.param)


@pytest.mark.parametrize("kv", list(KV))
@pytest.mark.parametrize("name", [name for name in EVERYTHING if name != "table"])
def test_every_pattern(name: str, kv: str, poisoned: None) -> None:
    dtype = HALF if kv == "int8" else SINGLE
    x = Inputs.random(61, heads=4, kv_heads=2, dim=24, value_dim=40, dtype=dtype)
    stored_conforms(x, EVERYTHING[name](61), KV[kv])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kv", "dtype"), [("int8", SINGLE), ("fp8", HALF), ("fp8", SINGLE)])
def test_lengths_and_types(kv: str, dtype: torch.dtype, device: str, poisoned: None) -> None:
    for tokens in (1, 63, 129):
        x = Inputs.random(tokens, heads=2, kv_heads=1, batch=2 if tokens < 100 else 1, dim=16, dtype=dtype)
        stored_conforms(x, EVERYTHING["sinks"](tokens), KV[kv], scale=None if tokens == 129 else -0.3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("nq", "heads", "kv_heads", "kv"), [(1, 8, 1, "int8"), (3, 4, 2, "fp8"), (16, 2, 2, "int8")])
def test_few_queries_over_split_keys(
    nq: int, heads: int, kv_heads: int, kv: str, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "LEAST", 1)
    x = Inputs.random(nq, 500, heads=heads, kv_heads=kv_heads, dtype=HALF, value_dim=24)
    stored_conforms(x, (rw.SlidingWindow(400) | rw.Sinks(3)) & rw.Causal(), KV[kv], q_offset=500 - nq)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv", list(KV))
def test_pairs_of_tiles_and_packed_heads(kv: str, poisoned: None) -> None:
    table = torch.rand(1, 2, 2, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    pairs = rw.BlockTable(table.repeat_interleave(2, 2), 64) & ~rw.patterns.Periodic(1000, 70, 90)
    stored_conforms(Inputs.random(250, heads=2, dtype=HALF), pairs, KV[kv])
    stored_conforms(
        Inputs.random(90, heads=8, kv_heads=2, dtype=HALF), rw.patterns.random_blocks(90, 0.6, block_size=32), KV[kv]
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2.0**-12, 2.0**12])
def test_sizes_that_weights_times_scales_have_no_bits_for(size: float) -> None:
    """Values of float16 are right although weights times scales leave its range."""
    for kv in STORED:
        x = Inputs.random(40, heads=2, dtype=HALF)
        x.v *= size
        stored_conforms(x, rw.Causal(), kv)


@pytest.mark.sampled(1)
def test_every_code_is_what_torch_says(device: str) -> None:
    """With one key the output is its value, for every code."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 1, 1, 64)
    for dtype in STORED:
        values = codes.view(dtype).expand(4, 1, 16, 64).contiguous()
        keys = torch.zeros(4, 1, 16, 16, dtype=torch.uint8).view(dtype)
        scales = (torch.ones(4, 1, 16), torch.full((4, 1, 16), 0.75))
        table, lengths = torch.arange(4, dtype=torch.int32)[:, None], torch.ones(4, dtype=torch.int32)
        cache = rw.PagedCache(keys, values, table, lengths, scales=scales)
        want = values.float()[:, :, :1] * 0.75
        for q in (torch.ones(4, 1, 1, 16), torch.ones(4, 1, 1, 16, dtype=HALF)):
            got = rw.paged_attention(q, cache, backend="triton")
            numbers = want.isfinite()
            assert torch.equal(got[numbers], want[numbers].to(q.dtype))
            # the interpreter's own conversion lacks this type's NaN
            assert device == "floats" or got[~numbers].isnan().all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("page", "nq", "dtype", "kv"), [(16, 1, SINGLE, "int8"), (64, 5, HALF, "fp8")])
def test_pages(page: int, nq: int, dtype: torch.dtype, kv: str) -> None:
    """Pages give the results of contiguous keys; poisoned unused pages, and NaN scales of absent tokens, change nothing."""
    rows = [Inputs.random(nq, n, heads=4, kv_heads=2, dim=24, dtype=dtype) for n in (150, 70)]
    policy = rw.Precision(kv=KV[kv])
    cache = rw.PagedCache.empty(3, 512, 2, 24, page=page, precision=policy)
    assert cache.scales is not None
    cache.scales.k.fill_(torch.nan)
    cache.scales.v.fill_(torch.nan)
    for b, x in enumerate(rows):
        cache.append(x.k, x.v, rows=[2 * b])
    for b, n in enumerate(cache.lengths.tolist()):
        cache.table[b, -(-n // page) :] = 2**31 - 1
    pattern, q = EVERYTHING["sinks"](300), torch.cat([rows[0].q, rows[0].q, rows[1].q])
    got = rw.paged_attention(q, cache, pattern, terms=rw.ALiBi.of_heads(4), backend="triton")
    assert not got[1].any()
    for out, x in zip(got[::2], rows, strict=True):
        call = {"q_offset": x.k.shape[2] - nq, "terms": rw.ALiBi.of_heads(4)}
        side_by_side = rw.attention(x.q, x.k, x.v, pattern, precision=policy, backend="triton", **call)[0]
        k, v = (dequantize_rows(*quantize_rows(side, KV[kv])).double() for side in (x.k, x.v))
        want = rw.attention(x.q.double(), k, v, pattern, backend="reference", **call)[0]
        assert (out - want).abs().max() <= 2 * (side_by_side - want).abs().max() + 1e-6
        assert (side_by_side - want).norm() <= torch.finfo(dtype).eps * want.norm() + 1e-5


@pytest.mark.sampled(1)
def test_a_value_that_is_not_finite_reaches_only_its_rows() -> None:
    x = Inputs.random(40, heads=2, dim=16)
    x.k[0, 1, 7], x.v[0, 0, 9, 3] = torch.nan, torch.inf
    out = rw.attention(x.q, x.k, x.v, rw.Segments(5), precision=rw.Precision(kv=torch.int8), backend="triton")
    assert out[0, 1, 5:10].isnan().all()
    assert out[0, 0, 9].isnan().all()
    assert out[0, 1, :5].isfinite().all()
    assert out[0, 1, 10:].isfinite().all()
    # nor by a value that no query attends
    dead = rw.attention(
        x.q, x.k, x.v, ~rw.patterns.Periodic(40, 9, 10), precision=rw.Precision(kv=torch.int8), backend="triton"
    )
    assert dead[0, 0].isfinite().all()


@pytest.mark.sampled(1)
def test_gradients_are_refused() -> None:
    q = torch.randn(1, 1, 16, 16, requires_grad=True)
    with pytest.raises(rw.UnsupportedError, match="forward-only"):
        rw.attention(q, q, q, precision=rw.Precision(kv=torch.int8), backend="triton")
