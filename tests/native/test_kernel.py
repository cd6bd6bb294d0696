"""Test the kernel against the oracle in cases that plans of patterns, and so the conformance tests, do not reach."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.environment import CPU_VARIANT

from ..oracle import NAMES
from .plans import DTYPES, VARIANTS, Case, _cpu, case, plan_of, poison, random_masks, shared_case

pytestmark = pytest.mark.filterwarnings("error")
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))


@every_variant
@every_dtype
@pytest.mark.parametrize(
    "dims", [(8, 8), (64, 64), (72, 24), (128, 128), (40, 256), (256, 16), (320, 512), (512, 8)], ids=str
)
def test_head_dims(dims: tuple[int, int], dtype: str, variant: str) -> None:
    shared_case(130, 200, (64, 32), dtype=dtype, dims=dims).check(variant)


@every_variant
@every_dtype
@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 1000), (63, 130), (130, 63), (1000, 1), (500, 500), (3, 129), (16, 700)], ids=str
)
def test_lengths(lengths: tuple[int, int], dtype: str, variant: str) -> None:
    shared_case(*lengths, (64, 128), dtype=dtype, dims=(64, 64), density=0.7).check(variant)


@every_variant
@every_dtype
@pytest.mark.parametrize("tiles", [(16, 16), (16, 256), (256, 16), (48, 80), (128, 128), (256, 256)], ids=str)
def test_tiles(tiles: tuple[int, int], dtype: str, variant: str) -> None:
    shared_case(333, 301, tiles, dtype=dtype, batch=2, dims=(32, 32), groups=2).check(variant)


@every_variant
@every_dtype
@pytest.mark.parametrize("nq", [1, 5, 100])
@pytest.mark.parametrize(("heads", "groups"), [((8, 2), 1), ((6, 3), 2), ((4, 2), 4), ((16, 1), 1)], ids=str)
def test_grouped_heads(heads: tuple[int, int], groups: int, nq: int, dtype: str, variant: str) -> None:
    shared_case(
        nq, 150, (32, 48), dtype=dtype, batch=2, heads=heads[0], kv_heads=heads[1], dims=(16, 24), groups=groups
    ).check(variant)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dilated": lambda x: x.repeat_interleave(4, 2)[:, :, 1::4],
    "heads_inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "slice_of_channels": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
    "repeated": lambda x: x[:1, :1].expand_as(x),
}


@every_variant
@every_dtype
@pytest.mark.parametrize("view", list(VIEWS))
def test_strides(view: str, dtype: str, variant: str) -> None:
    out = poison(2, 131, 2, 40, dtype=DTYPES[dtype]).transpose(1, 2)
    shared_case(131, 140, (64, 32), dtype=dtype, batch=2, dims=(32, 40), change=VIEWS[view]).check(variant, out=out)


#: Keys and values in one tensor: values in the same rows as the keys, and in rows of other tokens or heads.
VALUES_IN_KEYS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "first_channels": lambda x: (x[:, ::2, ::2], x[:, ::2, ::2, :24]),
    "later_channels": lambda x: (x[:, ::2, ::2], x[:, ::2, ::2, 8:32]),
    "other_tokens": lambda x: (x[:, ::2, ::2], x[:, ::2, : x.shape[2] // 2, :24]),
    "other_heads": lambda x: (x[:, ::2, ::2], x[:, :2, ::2, :24]),
    "more_channels": lambda x: (x[:, ::2, ::2, :24], x[:, ::2, ::2]),
    "one_element": lambda x: (x[:, ::2, ::2], x[:1, ::2, ::2, :24].expand(2, -1, -1, -1)),
}


@every_variant
@every_dtype
@pytest.mark.parametrize("where", list(VALUES_IN_KEYS))
def test_values_in_keys(where: str, dtype: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that share memory with the keys, as those of latent attention do, give the bits of a copy."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    k, v = VALUES_IN_KEYS[where](torch.randn(2, 4, 300, 40).to(DTYPES[dtype]))
    q = torch.randn(2, 4, 150, k.shape[-1]).to(DTYPES[dtype])
    k[:, :, 130:] = torch.nan  # no query attends these
    pattern = (rw.SlidingWindow(40) | rw.Sinks(3)) & rw.KeyPadding(130)
    found = rw.attention_with_lse(q, k, v, pattern, backend="cpu")
    copied = rw.attention_with_lse(q, k, v.clone(), pattern, backend="cpu")
    assert all(x.isfinite().all() and torch.equal(x, y) for x, y in zip(found, copied, strict=True))


@every_variant
@every_dtype
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
def test_scales(scale: float, dtype: str, variant: str) -> None:
    shared_case(70, 90, (32, 32), dtype=dtype, scale=scale).check(variant)


@every_variant
def test_scores_of_several_hundred(variant: str) -> None:
    shared_case(70, 90, (32, 32), scale=40.0).check(variant)


@every_variant
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("nq", [1, 40])
def test_a_scale_above_one(nq: int, dtype: str, variant: str) -> None:
    """It multiplies products and not queries, which may be large, and it may bring a score out of range, of either sign."""
    masks = torch.ones(1, nq, 64, dtype=torch.bool)
    masks[:, :, 51] = False
    whole = case(nq, 64, (32, 32), dtype=dtype, scale=64.0, masks=masks)
    x, want = whole.x, [torch.empty(0)] * 2
    x.k.round_()
    for power in (0, 124):
        x.q.mul_(2.0**power), x.k.mul_(2.0**-power)
        got = whole.forward(variant)
        assert not power or all(map(torch.equal, got, want))
        want = list(got)
    x.q.fill_(1), x.k.fill_(-1)
    x.q[:, :, 0] = x.k[:, :, 50] = 2.0**61
    x.k[:, :, 51] = -(2.0**61)  # does not count, since no query attends it
    out, lse = whole.forward(variant)
    assert not whole.below
    assert lse[:, :, 0].isposinf().all()
    assert out[:, :, 0].isnan().all()
    assert out[:, :, 1:].isfinite().all()
    x.k[:, :, 50] = -(2.0**61)
    whole.forward(variant)
    assert whole.below


@every_variant
@every_dtype
@pytest.mark.parametrize(
    ("nq", "heads", "dims"),
    [
        (1, 2, (64, 64)),
        (1, 4, (64, 32)),
        (2, 4, (24, 40)),
        (3, 2, (128, 64)),
        (4, 2, (32, 32)),
        (5, 2, (32, 32)),
        (1, 2, (512, 320)),
        (2, 4, (328, 512)),
    ],
    ids=str,
)
def test_few_rows(nq: int, heads: int, dims: tuple[int, int], dtype: str, variant: str) -> None:
    """Decoding gives exact values, NaN only where due, and equal bits for any thread count over split lists."""
    mask = random_masks(1, nq, 1000, 32, 32, density=0.9)
    mask[:, :, 160:192] = mask[:, :, 7] = False
    mask[:, 0, 9], mask[:, 1:, 9] = False, True
    decode = case(nq, 1000, (32, 32), dtype=dtype, heads=heads, dims=dims, masks=mask)
    out = decode.check(variant)["out"]
    assert torch.equal(out, decode.forward(variant, threads=1)[0])
    x = decode.x
    x.k[:, :, 7] = x.v[:, :, 7] = x.v[:, :, 160:192] = torch.nan
    x.k[:, :, 160:192] = torch.inf
    assert torch.equal(out, decode.forward(variant)[0])
    x.k[:, :, 9] = torch.nan
    dirty, _ = decode.forward(variant)
    assert torch.equal(out[:, :, 0], dirty[:, :, 0])
    assert dirty[:, :, 1:].isnan().all()


@every_variant
def test_listed_tiles_without_a_pair(variant: str) -> None:
    mask = random_masks(1, 100, 90, 32, 32)
    plain = shared_case(100, 90, (32, 32), masks=mask)
    listed = torch.ones(1, 4, 3, dtype=torch.bool)
    padded = Case(plain.x, plan_of(mask, torch.zeros(1, 2), 32, 32, listed), plain.scale, plain.mask)
    for name, result in padded.check(variant).items():
        torch.testing.assert_close(result, plain.run(variant)[name])


@every_variant
def test_no_tiles_at_all(variant: str) -> None:
    got = case(70, 50, (32, 32), heads=4, masks=torch.zeros(1, 70, 50, dtype=torch.bool)).run(variant)
    assert got.pop("lse").isneginf().all()
    assert all((result == 0).all() for result in got.values())


@every_variant
@every_dtype
@pytest.mark.parametrize("nq", [1, 40])
def test_an_infinite_score(nq: int, dtype: str, variant: str) -> None:
    """An infinite score makes lse infinite and its row NaN, as in dense arithmetic, and changes no other row."""
    whole = case(nq, 64, (32, 32), dtype=dtype, masks=torch.ones(1, nq, 64, dtype=torch.bool))
    whole.x.q[:, :, 0] = whole.x.k[:, :, 50] = 0
    whole.x.q[:, :, 0, 3], whole.x.k[:, :, 50, 3] = torch.inf, 1
    whole.x.k[:, :, :50, 3] = whole.x.k[:, :, 51:, 3] = -1
    out, lse = whole.forward(variant)
    assert lse[:, :, 0].isposinf().all()
    assert out[:, :, 0].isnan().all()
    assert lse[:, :, 1:].isfinite().all()
    assert out[:, :, 1:].isfinite().all()
    dq, _, dv = whole.backward(out, lse, variant)
    assert dq[:, :, 0].isnan().all()
    assert dv.isnan().all()


@every_variant
@every_dtype
@pytest.mark.parametrize(
    ("lengths", "heads"),
    [((1, 3000), (2, 2)), ((500, 400), (4, 2)), ((700, 700), (1, 1)), ((9, 2000), (4, 1))],
    ids=str,
)
def test_threads_change_nothing(lengths: tuple[int, int], heads: tuple[int, int], dtype: str, variant: str) -> None:
    masks = random_masks(1, *lengths, 32, 32, density=0.6)
    # one row and one column far longer than the others, both split
    masks[:, :32] = masks[:, :, :32] = True
    whole = case(*lengths, (32, 32), dtype=dtype, heads=heads[0], kv_heads=heads[1], dims=(32, 32), masks=masks)
    first = whole.check(variant, threads=1)
    for threads in (2, 5):
        again = whole.run(variant, threads)
        assert all(torch.equal(first[name], again[name]) for name in NAMES)


@every_variant
@every_dtype
@pytest.mark.parametrize("density", [0.15, 1.0])
def test_windows_of_query_tiles(density: float, dtype: str, variant: str) -> None:
    """If the sums of dQ of a key head exceed the scratch, dK and dV are kept between windows of query tiles."""
    # two columns of tiles, which are in all three windows
    wide = shared_case(1300, 50, (64, 32), dtype=dtype, heads=16, kv_heads=1, dims=(256, 24), groups=2, density=density)
    first = wide.check(variant, threads=1)
    assert all(torch.equal(first[name], result) for name, result in wide.run(variant, threads=3).items())


def test_windows_round_once() -> None:
    """Sums between windows are finer than the result: under 1 % of the elements differ from float32 results rounded once."""
    wide = shared_case(1300, 90, (64, 32), dtype="bf16", heads=16, kv_heads=1, dims=(256, 24))
    out, lse = wide.forward()
    for narrow, exact in zip(wide.backward(out, lse), wide.backward(out, lse, dtype=torch.float32), strict=True):
        assert (narrow != exact.bfloat16()).double().mean() < 0.01
        assert (narrow - exact).norm() < 2**-8 * exact.norm()


def test_several_python_threads() -> None:
    cases = [case(300, 300, (64, 64), dtype=dtype, heads=4, dims=(64, 64)) for dtype in list(DTYPES) * 2]
    wanted = [each.run() for each in cases]
    wrong = []

    def work(i: int) -> None:
        for _ in range(10):
            got = cases[i].run()
            if not all(torch.equal(got[name], wanted[i][name]) for name in NAMES):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_the_gil_is_released() -> None:
    """The kernel releases the GIL: Python runs many steps during a long call."""
    n = 2048
    long = case(n, n, (128, 128), heads=8, kv_heads=8, dims=(64, 64), masks=torch.ones(1, n, n, dtype=torch.bool))
    worker = threading.Thread(target=long.forward, kwargs={"threads": 1})
    steps = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        steps += 1
    assert steps > 20


def test_variants() -> None:
    # a build for one machine may have no generic variant
    assert "generic" not in VARIANTS[:-1]
    assert VARIANTS


@pytest.mark.measures
def test_the_first_variant_is_as_fast_as_any() -> None:
    """The first variant is at least as fast as any: some processors multiply pairs of bfloat16 slower than floats."""
    n = 512
    masks = torch.ones(1, n, n, dtype=torch.bool)
    full = case(n, n, (128, 128), dtype="bf16", heads=4, kv_heads=4, dims=(128, 128), masks=masks)

    def seconds(variant: str) -> float:
        begun = time.thread_time()
        full.forward(variant, threads=1)
        return time.thread_time() - begun

    least = {name: min(seconds(name) for _ in range(5)) for name in VARIANTS}
    assert least[VARIANTS[0]] < 1.25 * min(least.values()), least


def test_gradients_in_float32() -> None:
    """Gradients requested in float32, as by a program of several branches, are the 16-bit gradients before rounding."""
    narrow = case(100, 90, (32, 32), dtype="bf16", dims=(32, 32))
    out, lse = narrow.forward()
    for short, wide in zip(narrow.backward(out, lse), narrow.backward(out, lse, dtype=torch.float32), strict=True):
        assert wide.dtype == torch.float32
        assert torch.equal(short, wide.bfloat16())


@every_variant
@every_dtype
@pytest.mark.parametrize("dim", [8, 72, 256, 512])
def test_delta(dim: int, dtype: str, variant: str) -> None:
    out, dout = (torch.randn(2, 3, 1100, dim).to(DTYPES[dtype])[:, :, ::2] for _ in range(2))
    for dlse in (None, torch.randn(2, 3, 550)):
        got = poison(2, 3, 550)
        _cpu.delta(dout, out, dlse, got, 2, variant)
        wanted = (dout.double() * out.double()).sum(-1) - (0 if dlse is None else dlse)
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=0)


def one_key_each(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.bool)[None]


@every_variant
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("term", [False, True])
def test_weights_are_at_most_one(term: bool, dtype: str, variant: str) -> None:
    """An lse that was merged may be rounded to less than a large score, by far more than an exponent."""
    same = case(64, 64, (16, 16), dtype=dtype, heads=1, kv_heads=1, dims=(8, 8), masks=one_key_each(64))
    same.x.q.fill_(2.0**30), same.x.k.fill_(2.0**30)
    positions = torch.arange(64, dtype=torch.int32)
    placed = {"terms": [("distance", [], torch.zeros(1, 1))], "rows": positions, "columns": positions}
    out, lse = same.forward(variant)
    less = torch.nextafter(lse, torch.full_like(lse, -torch.inf))
    assert torch.equal(same.backward(out, less, variant, **placed if term else {})[2], same.x.dout)


@every_variant
def test_every_float16_passes_unchanged(variant: str) -> None:
    """A row of one key returns its value, for every finite float16, through the portable conversions."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()].view(1, 1, -1, 64)
    n = every.shape[2]
    same = case(n, n, (16, 16), dtype="fp16", heads=1, kv_heads=1, dims=(8, 64), masks=one_key_each(n))
    same.x.v = every
    assert torch.equal(same.forward(variant)[0], every)


@every_variant
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrowing_is_torchs(dtype: str, variant: str) -> None:
    """Rounding to 16 bits equals torch's, with subnormals and overflow, tested by dV = P dO with one key a row."""
    values = torch.randn(4000) * 10.0 ** torch.randint(-9, 6, (4000,))
    values = values.to(DTYPES[dtype]).view(1, 1, -1, 8)
    n = values.shape[2]
    same = case(n, n, (16, 16), dtype=dtype, heads=1, kv_heads=1, dims=(8, 8), masks=one_key_each(n))
    same.x.dout = values
    lse = torch.full((1, 1, n), 0.7)
    narrow, wide = (same.backward(values, lse, variant, dtype=t)[2] for t in (None, torch.float32))
    assert torch.equal(wide.to(DTYPES[dtype]).nan_to_num(), narrow.nan_to_num())
