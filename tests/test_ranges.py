"""Over the whole range of each dtype, every backend follows the rule of docs/concepts.md, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringweave as rw
from ringweave.backends import cpu
from ringweave.environment import CPU_VARIANT

from .oracle import Expected, Inputs
from .test_conformance import DTYPES, RUNNABLE, run

MOST = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny
#: the native kernel, once for each instruction set
PLACES = [(name, None) for name in RUNNABLE if name != "cpu"]
PLACES += [("cpu", variant) for variant in (cpu.module().variants() if "cpu" in RUNNABLE else [])]  # type: ignore[union-attr]
everywhere = pytest.mark.parametrize(("backend", "variant"), PLACES)


@pytest.fixture(autouse=True)
def _instructions(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    variant = getattr(request.node, "callspec", None) and request.node.callspec.params.get("variant")
    if variant:
        monkeypatch.setenv(CPU_VARIANT, variant)


@st.composite
def calls(draw: st.DrawFn, backend: str) -> dict[str, object]:
    """Draw powers of ten of q, k, v, scale and one term; sizes; a pattern."""
    dtype = draw(st.sampled_from(["fp32", "fp32", "bf16", "fp16"]))
    low, high = (-6, 4) if dtype == "fp16" else (-37, 37)
    power = st.integers(low, high)
    q, k = draw(power), draw(power)
    # most products of the three are of ordinary size
    scale = draw(
        st.sampled_from([0, -q - k, 1 - q - k, 25 - q - k, 37 - q - k, 39 - q - k, draw(st.integers(-37, 37))])
    )
    term = None
    if backend not in ("sdpa", "torch_sparse"):
        term = draw(st.sampled_from([None, None, "softcap", "alibi", "bias"]))
    names = ["full", "causal"] if backend == "sdpa" else ["full", "causal", "window"]
    return {
        "dtype": dtype, "powers": (q, k, draw(st.integers(low, high - 1))), "scale": max(-37, min(37, scale)),
        "sign": draw(st.sampled_from([1, 1, -1])), "term": term, "size": draw(st.integers(-37, 37)),
        "pattern": draw(st.sampled_from(names)), "tokens": draw(st.sampled_from([1, 4, 40, 70])),
        "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


@everywhere
@given(data=st.data())
def test_the_whole_range(backend: str, variant: str | None, data: st.DataObject) -> None:
    """Results are right if sums of absolute products are in range, NaN if scores are not, and otherwise right or NaN."""
    hold(backend, **data.draw(calls(backend)))  # type: ignore[arg-type]


def hold(
    backend: str, dtype: str, powers: tuple[int, int, int], scale: int, sign: int, term: str | None, size: int,
    pattern: str, tokens: int, seed: int,
) -> None:  # fmt: skip
    """Run one call and compare it with float64."""
    n, dim, generator = tokens, 16, torch.Generator().manual_seed(seed)
    kind = {"full": rw.Full(), "causal": rw.Causal(), "window": rw.SlidingWindow(9)}[pattern]
    leaves = [
        (torch.randn(1, heads, n, dim, generator=generator).clamp(-3, 3) * 10.0**p).to(DTYPES[dtype]).requires_grad_()
        for heads, p in zip((2, 1, 1), powers, strict=True)
    ]
    factor, number = sign * 10.0**scale, 10.0**size
    q, k, v = (x.detach().double().expand(1, 2, n, dim) for x in leaves)
    scores, sizes = q @ k.mT * factor, q.abs() @ k.abs().mT * abs(factor)
    before, after = min(abs(factor), 1.0), max(abs(factor), 1.0)
    # the size below which float32 has no number, or the processor's 16-bit products are 0; a large scale widens these
    least = TINY if after <= 1024 else 2.0**-149
    lost = dim * least * after * (1 + 2 * k.abs().max() + 2 * before * q.abs().max())
    off = sizes * 2**-19 + float(lost)
    allowed = kind.to_dense(n, heads=2)
    bad, doubtful = (scores.abs() > MOST) & allowed, (sizes > MOST / 4) & allowed
    terms: list[rw.terms.Term] = []
    steep = torch.zeros(())
    if term == "softcap":
        terms = [rw.Softcap(number)]
        # the slope of a cap changes by up to this for a score that is off
        steep = (off / number).clamp(max=1.0)
        scores, off = number * torch.tanh(scores / number), off.clamp(max=2 * number) + number * 2**-19
    elif term == "alibi":
        terms = [rw.ALiBi([number, -number])]
        distance = (torch.arange(n)[:, None] - torch.arange(n)).abs() * number
        scores, off = scores - torch.stack([distance, -distance]), off + distance * 2**-20
    elif term == "bias":
        table = (torch.randn(1, 2, n, n, generator=generator).clamp(-3, 3) * number).float()
        terms = [rw.Bias(table)]
        scores, off = scores + table.double(), off + table.abs().double() * 2**-20
    # a sum below the range has no weight; one above it makes its row NaN
    bad = (bad | (scores > MOST * (1 + 1e-6))) & allowed
    doubtful = (doubtful | (scores.abs() > MOST / 4)) & allowed
    scores = scores.masked_fill(~allowed | (scores < -MOST), -torch.inf)

    out, lse = rw.attention_with_lse(*leaves, kind, scale=factor, terms=terms, backend=backend)
    gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))

    broken, unsure = bad.any(-1), doubtful.any(-1) & ~bad.any(-1)
    assert out[broken].isnan().all()
    assert (lse.isnan() | lse.isposinf())[broken].all()
    sure = ~broken & ~unsure
    assert out[sure].isfinite().all()
    # a known difference of exponents, or one so large that one key has all the weight
    off = off.masked_fill(~allowed, 0.0).amax(-1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    two = torch.cat([scores, torch.full_like(scores[..., :1], -torch.inf)], -1).topk(2, -1).values
    known = (off < 1e-3) | (two[..., 0] - two[..., 1] > 4 * off + 100)
    unit = float(torch.finfo(DTYPES[dtype]).eps)
    largest = float(v.abs().max())
    slack = largest * (4 * unit + 4 * off.clamp(max=1e-3)) + float(torch.finfo(DTYPES[dtype]).smallest_normal)
    near = ((out.double() - weights @ v).abs() <= slack[..., None]).all(-1)
    # where NaN is allowed, a finite value must still be right
    assert (near | ~known | (unsure & out.isnan().any(-1)) | broken).all()
    want = torch.logsumexp(scores, -1)
    # PyTorch's kernel sums weights in 16 bits
    summed = 4 * unit if backend == "sdpa" and unit > 1e-5 else 1e-5
    near = ((lse.double() - want).abs() <= 2 * off + summed + 1e-6 * want.abs()) | (lse == want)
    assert (near | ~sure).all()

    # the sums in gradients before they are scaled
    slopes = largest * dim * n * 4
    most = slopes * max(1.0, abs(factor)) * max(1.0, float(q.abs().max()), float(k.abs().max())) * n
    # PyTorch's kernel rounds scores differently in backward than in forward: weights there are off by a factor, also
    # where one key has all the weight, and those of large scores overflow
    if sure.all() and most < torch.finfo(DTYPES[dtype]).max / 4 and (backend != "sdpa" or off.max() < 10):
        for gradient in gradients:
            assert gradient.isfinite().all()
        if known.all():
            dv = weights.sum((1, 2))[:, None, :, None].expand_as(leaves[2])
            dp = v.sum(-1)[..., None, :].expand_as(weights)
            ds = weights * (dp - (weights * dp).sum(-1, keepdim=True))
            if term == "softcap":
                raw = q @ k.mT * factor
                ds = ds * (1 - torch.tanh(raw / number) ** 2)
            wanted = (factor * ds @ k, (factor * ds.mT @ q).sum(1, keepdim=True), dv)
            parts = (
                weights
                * (v.abs().sum(-1)[..., None, :] + (weights * v.abs().sum(-1)[..., None, :]).sum(-1, keepdim=True))
                * abs(factor)
            )
            sums = (parts @ k.abs(), (parts.mT @ q.abs()).sum(1, keepdim=True), dv)
            bent = parts * steep
            slopes_off = (bent @ k.abs(), (bent.mT @ q.abs()).sum(1, keepdim=True), torch.zeros(()))
            others = (float(k.abs().max()), float(q.abs().max()), 0.0)
            for got, want, most_of, bent_of, other in zip(gradients, wanted, sums, slopes_off, others, strict=True):
                # PyTorch's own kernel had gradients up to 18 units off
                units = 32 if backend == "sdpa" else 16
                again = float(torch.expm1(off.max())) if backend == "sdpa" else 0.0
                slack = most_of * (units * unit + 8 * float(off.clamp(max=1e-3).max()) + again) + bent_of
                # values too small for float32: slopes of scores, and sums of them before scaling
                slack = slack + 64 * n * TINY * max(1.0, abs(factor)) * max(1.0, min(1.0, abs(factor)) * other)
                slack = slack + float(torch.finfo(got.dtype).smallest_normal)
                if backend == "sdpa":
                    # PyTorch's kernel multiplies keys by the scale before slopes: the product may be subnormal
                    slack = slack + n * slopes * 2.0**-149
                assert ((got.double() - want).abs() <= slack).all()


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("powers", [(-66, -57), (-33, -90), (-115, 0), (0, -115)])
@everywhere
def test_products_too_small_for_a_processor(
    backend: str, variant: str | None, powers: tuple[int, int], tokens: int
) -> None:
    """A large scale of small queries and keys costs no precision, though processors take small products of bfloat16 as 0."""
    of_q, of_k = powers
    x, scale = Inputs.random(tokens, 70, heads=4, kv_heads=2, dtype=torch.bfloat16), -0.3
    small = Inputs(x.q * 2.0**of_q, x.k * 2.0**of_k, x.v, x.dout, x.dlse)
    got = run(small, rw.Full(), backend, scale=scale * 2.0 ** -(of_q + of_k))
    plain = {**got, "dq": got["dq"].double() * 2.0**of_q, "dk": got["dk"].double() * 2.0**of_k}
    Expected.of(x, torch.ones(tokens, 70), scale).check(plain)
