"""Every backend agrees with the float64 oracle for all patterns, dtypes, grouped heads and odd lengths, in all five results.

The bound is twice the error of torch's own attention for equal inputs, and at least the error of rounding, since torch
may happen to be exact (with one key, say).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringweave as rw
from ringweave.backends import BACKENDS, cpu
from ringweave.errors import UnsupportedError
from ringweave.patterns import Pattern

from .cases import LAYOUTS, MIXTURES, PATTERNS
from .memory.test_oom_retry import short_of
from .operators import Watching, is_direct
from .options import learned
from .oracle import NAMES, Expected, Inputs, attention, errors, results

EVERYTHING = PATTERNS | MIXTURES
#: backends that take any relation on CPU tensors; the native kernel is missing if there was no compiler
SPARSE = ["dense_batched"] + ["cpu"] * (cpu.module() is not None)
# Some of these backends need a GPU, and tests/backends and gpu/tests test the parts of them that run without one; gather
# takes lists of chosen keys only, in tests/backends/test_gather.py.
ELSEWHERE = ("triton", "flex", "flash", "flash_attn_4", "attn_gym", "gather")
RUNNABLE = [name for name in BACKENDS if name not in ("cpu", *ELSEWHERE) or name in SPARSE]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def run(x: Inputs, pattern: Pattern, backend: str, **options: object) -> dict[str, torch.Tensor]:
    leaves = x.leaves()
    out, lse = rw.attention_with_lse(*leaves, pattern, backend=backend, **options)  # type: ignore[arg-type]
    assert out.dtype == x.q.dtype
    assert lse.dtype == (torch.float64 if x.q.dtype == torch.float64 else torch.float32)
    return results(out, lse, x, leaves)


@dataclass(frozen=True, eq=False)
class Wanted:
    """The expected results of a call, and the bounds on its errors."""

    x: Inputs
    pattern: Pattern
    options: dict[str, object]
    expected: Expected

    @staticmethod
    def of(x: Inputs, pattern: Pattern, q_offset: int = 0, scale: float | None = None, floored: bool = True) -> Wanted:
        nq, nk, heads = x.q.shape[2], x.k.shape[2], x.q.shape[1]
        counts = pattern.to_dense(nq, nk, heads, batch=x.q.shape[0], q_offset=q_offset).to(x.q.device)
        expected = Expected.of(x, counts, scale)
        expected = expected if floored else expected._replace(floor=dict.fromkeys(NAMES, 0.0))
        return Wanted(x, pattern, {"q_offset": q_offset, "scale": scale}, expected)

    def check(self, backend: str) -> None:
        self.expected.check(run(self.x, self.pattern, backend, **self.options))


def conforms(
    x: Inputs, pattern: Pattern, backend: str, q_offset: int = 0, scale: float | None = None, floored: bool = True
) -> None:
    Wanted.of(x, pattern, q_offset, scale, floored).check(backend)


@lru_cache(maxsize=1)
def wanted(name: str, *sizes: int, q_offset: int = 0, scale: float | None = None, **of: object) -> Wanted:
    """Return the expected results for inputs that all backends receive in turn: the oracle takes ten times a backend's time."""
    pattern = EVERYTHING[name](sizes[-1])
    return Wanted.of(Inputs.random(*sizes, **of), pattern, q_offset, scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("name", list(EVERYTHING))
def test_every_pattern(name: str, backend: str, poisoned: None) -> None:
    want = wanted(name, 257, heads=4, kv_heads=2, batch=2)
    if backend == "sdpa" and name not in ("full", "causal"):
        with pytest.raises(UnsupportedError, match="neither full nor causal"):
            run(want.x, want.pattern, backend)
        return
    want.check(backend)


@pytest.mark.parametrize("backend", SPARSE)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("name", ["sinks", "per_head", "dilated", "longnet_causal", "table_per_head", "causal"])
@pytest.mark.parametrize("tokens", [1, 63, 130, 520])
def test_sparse_backends(
    tokens: int, name: str, heads: tuple[int, int], dtype: str, backend: str, poisoned: None
) -> None:
    want = wanted(name, tokens, heads=heads[0], kv_heads=heads[1], dim=24, value_dim=40, dtype=DTYPES[dtype])
    if backend == "cpu" and dtype == "fp64":
        with pytest.raises(UnsupportedError, match="it computes float32, bfloat16 and float16, and got torch.float64"):
            run(want.x, want.pattern, backend)
        return
    want.check(backend)


@lru_cache(maxsize=1)
def long_sums(name: str) -> Wanted:
    x = Inputs.random(2048, heads=1, dim=16)
    for tensor in (x.k, x.v, x.dout):
        tensor += 2.0
    return Wanted.of(x, EVERYTHING[name](2048), floored=False)


@pytest.mark.parametrize("backend", SPARSE)
@pytest.mark.parametrize(
    "name", ["full", *(pytest.param(name, marks=pytest.mark.long) for name in ("causal", "global"))]
)
def test_long_sums_with_a_common_mean(name: str, backend: str) -> None:
    """Sums of thousands of terms of one sign stay exact: adding each term to one running sum would lose a bit each time."""
    long_sums(name).check(backend)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.parametrize("tokens", [1, 63, 130])
def test_sdpa(tokens: int, name: str, heads: tuple[int, int], dtype: str, poisoned: None) -> None:
    x = Inputs.random(tokens, heads=heads[0], kv_heads=heads[1], dtype=DTYPES[dtype])
    conforms(x, EVERYTHING[name](tokens), "sdpa")


@pytest.mark.parametrize("dims", [(320, 512), (512, 8), (264, 264)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", SPARSE)
def test_large_head_dims(backend: str, dtype: str, dims: tuple[int, int], poisoned: None) -> None:
    sizes = {"heads": 4, "kv_heads": 2, "dim": dims[0], "value_dim": dims[1]}
    conforms(Inputs.random(70, dtype=DTYPES[dtype], **sizes), EVERYTHING["sinks"](70), backend)
    conforms(Inputs.random(1, 70, dtype=DTYPES[dtype], **sizes), rw.Causal(), backend, q_offset=69)


@pytest.mark.parametrize("backend", ["reference", *SPARSE, "torch_sparse"])
@pytest.mark.parametrize("sizes", [(1, 300, 299), (16, 257, 241), (100, 130, 7), (200, 60, 0)])
@pytest.mark.parametrize(
    "name", ["causal", "sinks", "window_and_dilated", "longnet_causal", "strided", "global", "prefix"]
)
def test_offset(name: str, sizes: tuple[int, int, int], backend: str) -> None:
    nq, nk, q_offset = sizes
    wanted(name, nq, nk, q_offset=q_offset, scale=0.3, heads=4, kv_heads=2).check(backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [None, -0.3, 0.0])
@pytest.mark.parametrize("dim", [20, 32])
@pytest.mark.parametrize("name", ["full", "causal", "window_and_dilated"])
@pytest.mark.parametrize("backend", [*RUNNABLE, "auto"])
def test_layouts_and_scales(
    backend: str, name: str, dim: int, scale: float | None, layout: str, poisoned: None
) -> None:
    """Any stride of channels, also 0, in q, k, v and their gradients, and any sign of the scale are right or refused."""
    n = 40
    dtype = torch.float32 if backend == "cpu" else torch.float64
    # gradients have another layout: where inputs are as they lie, their tokens are before heads, as in most models
    layouts = [layout] * 3 + [list(LAYOUTS)[list(LAYOUTS).index(layout) - 1]]
    q, k, v, dout = (LAYOUTS[each](torch.randn(2, 2, n, dim, dtype=dtype)).detach() for each in layouts)
    want = [x.contiguous().requires_grad_() for x in (q, k, v)]
    got = [x.requires_grad_() for x in (q, k, v)]
    exact = rw.attention(*want, PATTERNS[name](n), scale=scale, backend="reference")
    try:
        out = rw.attention(*got, PATTERNS[name](n), scale=scale, backend=backend)
    except UnsupportedError:
        return
    close = {"atol": 1e-4, "rtol": 1e-4} if backend == "cpu" else {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(out, exact, **close)
    slopes = torch.autograd.grad(out, got, dout)
    torch.testing.assert_close(slopes, torch.autograd.grad(exact, want, dout.contiguous()), **close)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("sdpa", "causal"),
        *itertools.product(
            ["reference", "dense_batched", "torch_sparse"], ["sinks", "causal", "table", "dilated", "longnet"]
        ),
    ],
)
def test_gradcheck(name: str, backend: str) -> None:
    pattern = EVERYTHING[name](37)
    x = Inputs.random(37, heads=4, kv_heads=2, dim=4, dtype=torch.float64)
    alive = (pattern.to_dense(37, heads=4) > 0).any(-1)

    def call(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = rw.attention_with_lse(*leaves, pattern, backend=backend)
        return out, torch.where(alive, lse, 0.0)

    assert torch.autograd.gradcheck(call, tuple(x.leaves()), fast_mode=True)


# ---- scores out of range: the rule of backends/overflow.py


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["full", "causal", "sinks", "table_per_head"])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_large_scores_stay_exact(backend: str, name: str, dtype: str) -> None:
    """For scores up to float32's largest, a row with one score far above the others has the value of that key."""
    if backend == "sdpa" and name not in ("full", "causal"):
        return
    n, pattern = 150, EVERYTHING[name](150)
    x = Inputs.random(n, heads=4, kv_heads=2, dtype=DTYPES[dtype])
    for size in (1e3, 1e6, 1e18):
        leaves = [(x.q * size).requires_grad_(), (x.k * size).requires_grad_(), x.v.clone().requires_grad_()]
        out, lse = rw.attention_with_lse(*leaves, pattern, backend=backend)
        allowed = pattern.to_dense(n, heads=4)
        scores = leaves[0].double() @ leaves[1].double().repeat_interleave(2, 1).mT / 4
        scores = torch.where(allowed, scores, -torch.inf)
        top, key = scores.max(-1)
        second = scores.scatter(-1, key[..., None], -torch.inf).amax(-1)
        alone = (top - second > 1e-5 * top.abs() + 200) & allowed.any(-1)
        assert alone.double().mean() > 0.7
        chosen = x.v.repeat_interleave(2, 1).gather(2, key[..., None].expand(-1, -1, -1, 16))
        torch.testing.assert_close(out[alone], chosen[alone])
        torch.testing.assert_close(lse[alone].double(), top[alone], rtol=2e-6, atol=0)
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_products_may_overflow_where_scores_do_not(backend: str, name: str) -> None:
    """Products may overflow where the scale brings scores back into range: the right result or NaN, since backends cannot tell."""
    if (backend, name) == ("sdpa", "window"):
        return
    for tokens, scale in ((2, -1e-10), (60, 1e-10), (60, 1e-37), (300, 1e-37)):
        x = Inputs.random(tokens)
        x.q.mul_(1e20)
        x.k.mul_(1e19 if scale == 1e-10 else 3e17)
        pattern = rw.Causal() if name == "causal" else rw.SlidingWindow(9)
        got, want = (run(x, pattern, each, scale=scale) for each in (backend, "reference"))
        for each, result in got.items():
            if backend == "sdpa" and scale != 1e-37 and each not in ("out", "lse"):
                # PyTorch's backward rounds scores differently from its forward, by more than an exponent
                continue
            assert result.isfinite().all()
            torch.testing.assert_close(result, want[each], rtol=1e-3, atol=1e-3 * float(want[each].abs().max()))


#: Powers of two of queries, keys and scale that together leave the scores as they are. Queries times the scale are not
#: so small that they lose bits.
POWERS = [(0, 100, -100), (100, 0, -100), (50, 60, -110), (120, -20, -100), (0, 12, -12), (-10, 100, -90)]


def with_powers(x: Inputs, of_q: int, of_k: int) -> Inputs:
    """Return inputs with queries and keys times powers of two, and gradients that bring their sums out of range."""
    return Inputs(x.q * 2.0**of_q, x.k * 2.0**of_k, x.v, x.dout * 2.0**35, x.dlse * 2.0**35)


def check_powers(got: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], of_q: int, of_k: int) -> None:
    """Check that powers of two of queries and keys change no other bit of the results."""
    for name, power in (("out", 0), ("lse", 0), ("dq", of_q), ("dk", of_k), ("dv", 0)):
        assert torch.equal(got[name].double() * 2.0**power, plain[name].double()), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("name", ["causal", "window", "longnet_causal"])
@pytest.mark.parametrize("powers", POWERS)
@pytest.mark.parametrize("backend", [*RUNNABLE, "auto"])
def test_sums_of_gradients_may_overflow_where_gradients_do_not(
    backend: str, powers: tuple[int, int, int], name: str, dtype: str
) -> None:
    """Powers of two move between queries, keys and scale without a change of bits, also where unscaled sums overflow."""
    if backend == "sdpa" and name != "causal":
        return
    if backend == "cpu" and dtype == "fp64":
        return
    of_q, of_k, of_scale = powers
    x, pattern = Inputs.random(70, heads=4, kv_heads=2, dtype=DTYPES[dtype]), EVERYTHING[name](70)
    plain = run(with_powers(x, 0, 0), pattern, backend, scale=-0.3)
    got = run(with_powers(x, of_q, of_k), pattern, backend, scale=-0.3 * 2.0**of_scale)
    check_powers(got, plain, of_q, of_k)


@pytest.mark.parametrize("backend", [*RUNNABLE, "auto"])
def test_powers_of_two_move_in_overlapping_views(backend: str) -> None:
    """PyTorch gives a product of an overlapping view other strides than the view has."""
    views = [torch.randn(1, 2, 24).unfold(-1, 16, 1).requires_grad_() for _ in range(3)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    dout, results = torch.randn(1, 2, 9, 16), []
    for inputs in (views, copies):
        out = rw.attention(*inputs, rw.Causal(), scale=1e-6, backend=backend)
        results.append((out, *torch.autograd.grad(out, inputs, dout)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("powers", POWERS)
def test_sums_of_gradients_of_weights_may_overflow_where_gradients_do_not(powers: tuple[int, int, int]) -> None:
    """Powers of two move between queries, keys and scale without a change of bits of weights and their gradients."""
    of_q, of_k, of_scale = powers
    x = Inputs.random(70, heads=4, kv_heads=2)
    results = []
    for a, b, c in ((0, 0, 0), (of_q, of_k, of_scale)):
        q, k, v = with_powers(x, a, b).leaves()
        weights = rw.attention_weights(q, k, rw.Causal(), scale=-0.3 * 2.0**c).to_dense()
        out = weights @ v.repeat_interleave(2, 1)
        dq, dk = torch.autograd.grad(out, (q, k), x.dout * 2.0**35)
        results.append((weights, dq * 2.0**a, dk * 2.0**b))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("q", "k", "scale"), [(1, 1e36, 1e-36), (1e36, 1, 1e-36), (1e30, 1e7, 1e-37), (1e-3, 1e37, 1e-34), (1, 8, 1e-30)]
)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_gradients_at_the_ends_of_the_range(backend: str, q: float, k: float, scale: float) -> None:
    """Gradients are right where a sum is out of range before it is scaled."""
    x = Inputs.random(70, heads=4, kv_heads=2)
    x = Inputs(x.q * q, x.k.clamp(-3, 3) * k, x.v, x.dout * 300, x.dlse)
    got, want = (run(x, rw.Causal(), each, scale=scale) for each in (backend, "reference"))
    for name, result in got.items():
        torch.testing.assert_close(result, want[name], rtol=2e-5, atol=1e-6 * float(want[name].abs().max()))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_broken_elements_beside_sums_out_of_range(backend: str) -> None:
    """A NaN or an infinity in a key does not hide that other keys are large."""
    x = with_powers(Inputs.random(70), 0, 100)
    clean = run(x, rw.Causal(), backend, scale=0.3 * 2.0**-100)
    x.k[:, :, 60, 3], x.k[:, :, 65, 3] = torch.nan, torch.inf
    x.dout[:, :, 60:] = x.dlse[:, :, 60:] = 0.0
    got = run(x, rw.Causal(), backend, scale=0.3 * 2.0**-100)
    assert clean["dq"].isfinite().all()
    assert torch.equal(got["dq"][:, :, :60], clean["dq"][:, :, :60])
    assert got["dq"][:, :, 60:].isnan().any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["key", "query"])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_broken_key_or_query_reaches_the_gradients_of_those_that_attend_it(
    backend: str, side: str, bad: float, dtype: str
) -> None:
    """NaN or infinities in a key or query reach exactly the gradients of pairs in rows that attend it; -inf scores have no weight."""
    x = Inputs.random(300, dtype=DTYPES[dtype])
    clean = run(x, rw.Causal(), backend)
    rows, keys = torch.arange(300) >= 290, torch.arange(300) >= 0
    if side == "key":
        x.k[:, :, 290, 3] = bad
        x.dout[:, :, 290:] = x.dlse[:, :, 290:] = 0.0
    else:
        rows, keys = torch.arange(300) == 150, torch.arange(300) <= 150
        x.q[:, :, 150, 3] = bad
    got = run(x, rw.Causal(), backend)
    for name in ("out", "lse", "dq"):
        assert torch.equal(got[name][:, :, ~rows], clean[name][:, :, ~rows])
    if bad != bad:
        assert got["dq"][:, :, rows].isnan().all()
        assert got["dk"][:, :, keys].isnan().all()
    else:
        # a score of -inf has no weight; other infinities make their rows NaN
        empty = got["lse"][:, :, rows].isfinite() | got["lse"][:, :, rows].isneginf()
        assert got["dq"][:, :, rows][empty].isfinite().all()
        assert got["dq"][:, :, rows][~empty].isnan().all()
    assert torch.equal(got["dk"][:, :, ~keys].isfinite(), torch.ones_like(got["dk"][:, :, ~keys]).bool())


@pytest.mark.parametrize("name", ["full", "causal", "sinks", "table_per_head", "window_and_dilated"])
@pytest.mark.parametrize("tokens", [1, 4, 40, 130])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_scores_that_overflow_make_their_rows_nan(backend: str, tokens: int, name: str) -> None:
    """Rows with scores beyond float32's range become NaN, for scores of either sign, and no other row changes."""
    if backend == "sdpa" and name not in ("full", "causal"):
        return
    pattern = EVERYTHING[name](tokens)
    x = Inputs.random(tokens, heads=4, kv_heads=2, dim=8)
    x.q[:, :, tokens // 2] *= 1e30
    x.k[:, 1, tokens // 3] *= 1e30
    scores = x.q.double() @ x.k.double().repeat_interleave(2, 1).mT / 8**0.5
    allowed = pattern.to_dense(tokens, heads=4)
    broken = ((scores.abs() > 1e40) & allowed).any(-1)
    got = run(x, pattern, backend)
    assert torch.equal(got["out"].isnan().all(-1), broken)
    assert torch.equal(got["out"].isnan().any(-1), broken)
    assert torch.equal(got["lse"].isnan() | got["lse"].isposinf(), broken)
    assert got["dq"][broken].isnan().all()
    reached = (allowed & broken[..., None]).any(2)
    for kv_head in range(2):
        mine = reached[:, 2 * kv_head : 2 * kv_head + 2].any(1)
        assert got["dv"][:, kv_head][mine].isnan().all()
        assert torch.equal(got["dv"][:, kv_head].isnan().any(-1), mine)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tokens", [4, 40, 130])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_infinite_keys(backend: str, tokens: int, sign: int, dtype: str) -> None:
    """A score of -inf has no weight and one of +inf makes its row NaN, as in a dense softmax."""
    if backend == "cpu" and dtype == "fp64":
        return
    x = Inputs.random(tokens, heads=2, dim=8, dtype=DTYPES[dtype])
    x.k[:, :, tokens // 3, 2] = sign * torch.inf
    want, _ = attention(x.q.double(), x.k.double(), x.v.double(), rw.Causal().to_dense(tokens))
    out, lse = rw.attention_with_lse(x.q, x.k, x.v, rw.Causal(), backend=backend)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(lse.isposinf(), want.isnan().any(-1))
    alive = ~want.isnan()
    halves = dtype in ("bf16", "fp16")
    torch.testing.assert_close(out[alive].double(), want[alive], atol=0.03 if halves else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pattern", [rw.Causal(), rw.Causal() & rw.Strided(16)], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_pair_with_a_score_of_minus_infinity_counts_as_left_out(backend: str, pattern: Pattern, dtype: str) -> None:
    """A row of such pairs alone attends nothing, whatever its query and its gradients hold; the key is infinite."""
    if backend == "sdpa" and pattern.residue_rate > 1:
        return
    x = Inputs.random(40, heads=2, dim=8, dtype=DTYPES[dtype])
    x.q[..., 1].abs_()
    want = run(x, pattern & rw.KeyPadding(40, 1), "reference")
    x.k[:, :, 0, 1] = -torch.inf
    # PyTorch's fused kernels give NaN for the row and its key
    first = 1 if backend == "sdpa" else 0
    if not first:
        x.q[:, :, 0, 1], x.dout[:, :, 0] = torch.inf, torch.nan
    got = run(x, pattern, backend)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == "fp32" else {"rtol": 0.02, "atol": 0.03}
    for name, result in got.items():
        rows = slice(0 if name in ("out", "lse") else first, None)
        torch.testing.assert_close(result[:, :, rows], want[name][:, :, rows], **close, msg=name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", [name for name in RUNNABLE if name != "sdpa"])
@pytest.mark.parametrize("nk", [7, 256])
def test_rows_of_which_every_score_is_minus_infinity(nk: int, backend: str, dtype: str) -> None:
    """They attend nothing, also in tiles without a mask, whatever their queries, values and gradients hold."""
    x = Inputs.random(200, nk, heads=4, kv_heads=2, dim=8, dtype=DTYPES[dtype])
    x.k[..., 1], x.q[..., 1] = -torch.inf, torch.rand(200, dtype=x.q.dtype) + 0.1
    x.q[:, :, 5, 1], x.dout[:, :, 7], x.v[:, :, 3] = torch.inf, torch.nan, torch.inf
    got = run(x, rw.Full(), backend)
    assert got.pop("lse").isneginf().all()
    assert not any(result.count_nonzero() for result in got.values())


@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("scale", [1e5, 1e20, -1e30])
def test_equal_keys_share_their_weight_for_scores_of_any_size(backend: str, scale: float) -> None:
    """Equal keys share their weight equally, even for a score so large that lse loses the logarithm of the sum."""
    x = Inputs.random(30, heads=4, kv_heads=2)
    # integers: their products add up exactly in any order
    x.q.round_()
    x.k.copy_(x.k[:, :, :1].round().expand_as(x.k))
    out, lse = rw.attention_with_lse(x.q, x.k, x.v, rw.Full(), scale=scale, backend=backend)
    torch.testing.assert_close(out, x.v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out))
    top = scale * (x.q @ x.k.repeat_interleave(2, 1).mT)[..., 0]
    torch.testing.assert_close(lse, top, rtol=1e-4, atol=10.0 + 1e-5 * abs(scale))


# ---- one call in every way


Results = dict[str, Tensor]
HEADS, TOKENS, QUERIES = 4, 304, 264


def repeated(call: Callable[..., Results]) -> Results:
    """Make a call by the program of an earlier one, and without operators where none is needed."""

    def direct(q: Tensor, *args: Any, **options: Any) -> rw.AttentionOutput:
        found = rw.attention_with_lse(q, *args, **options)
        assert is_direct(found.out) != (q.is_neg() or "sink_logits" in options)
        return found

    call()
    return call(direct)


def watched(call: Callable[..., Results]) -> Results:
    with Watching():
        return call()


def retried(most: int, call: Callable[..., Results]) -> Results:
    """Make a call in pieces, after attempts with more pairs of a head and a query ran out of memory."""
    with short_of(most) as tried:
        found = call()
    assert max(heads * rows for heads, rows in tried) > most
    return found


#: Ways to make a call, and whether their sums have the order of an eager call.
WAYS: dict[str, tuple[Callable[[Callable[..., Results]], Results], bool]] = {
    "repeated": (repeated, True),
    "watched": (watched, True),
    "compiled": (lambda call: call(torch.compile(rw.attention_with_lse, fullgraph=True, backend="aot_eager")), True),
    "checkpointed": (lambda call: call(partial(checkpoint, rw.attention_with_lse, use_reentrant=False)), True),
    "retried by heads": (partial(retried, HEADS // 2 * QUERIES), False),
    "retried by queries": (partial(retried, 2 * 128), False),
}


@pytest.mark.skipif(cpu.module() is None, reason="there was no compiler")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sinks", "per_head", "documents"])
@pytest.mark.parametrize("dropout", [None, 0.0, 0.25], ids=["plain", "terms", "terms, dropout"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_eager_results(way: str, dropout: float | None, name: str, dtype: str, layout: str) -> None:
    """Out, lse and all gradients have the bits of an eager call, or differ by rounding where sums have another order."""
    x = Inputs.random(QUERIES, TOKENS, batch=2, heads=HEADS, kv_heads=2, value_dim=24, dtype=DTYPES[dtype])
    pattern = EVERYTHING[name](TOKENS)

    def call(attend: Callable[..., Any] = rw.attention_with_lse) -> Results:
        torch.manual_seed(1)
        leaves = [LAYOUTS[layout](each).requires_grad_() for each in (x.q, x.k, x.v)]
        tables = [learned(HEADS, 41), learned(1, HEADS, QUERIES, TOKENS), learned(HEADS)] * (dropout is not None)
        options: dict[str, Any] = {"q_offset": TOKENS - QUERIES}
        if dropout is not None:
            options["terms"] = rw.Softcap(20.0), rw.DistanceBias(tables[0]), rw.Bias(tables[1])
            options |= {"sink_logits": tables[2], "dropout": dropout}
        pair = attend(*leaves, pattern, **options)
        found = {"out": pair[0].detach(), "lse": pair[1].detach()}
        for loss in (slice(1), slice(1, 2), slice(2)):
            grads = torch.autograd.grad(pair[loss], leaves + tables, [x.dout, x.dlse][loss], retain_graph=True)
            found |= {f"gradient {i} of {loss}": grad for i, grad in enumerate(grads)}
        return found

    want, (made, same_order) = call(), WAYS[way]
    torch._dynamo.reset()
    rw.memory.trim()
    got = made(call)
    if same_order:
        assert [each for each in want if not torch.equal(got[each], want[each])] == []
    else:
        assert max(errors(got, want).values()) < (1e-6 if dtype == "fp32" else 1e-4)
