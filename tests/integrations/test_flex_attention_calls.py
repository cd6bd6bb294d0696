"""FlexAttention's function as its callers use it: returns, errors, changes between calls, installation, compilers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as peer
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask

from ringweave.cache import PATTERNS
from ringweave.errors import PatternError, RingweaveError, UnsupportedError
from ringweave.integrations.flex_attention import explain, flex_attention, install
from ringweave.plan import plan_cache

from ..oracle import Inputs, attention
from ..sampled import is_long
from .flex_cases import MASKS, allowed, causal, compare, scored

# torch warns of its own function without a compiler, and of return_lse
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")
# the compiler asks tensors between its graphs for .grad, and transformers asks torch to compile masks
compiling = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:_compile flag")

N = 70
torch_flex = peer.flex_attention


@pytest.fixture
def x() -> Inputs:
    return Inputs.random(N, batch=2, heads=4)


def defined(x: Inputs, mask: BlockMask | None = None, score: Callable[..., Tensor] | None = None) -> Tensor:
    """Return the output in float64, rounded."""
    pairs = allowed(mask, 2, 4, N, N).double()
    given = {} if score is None else {"scored": functools.partial(scored, score)}
    return attention(x.q.double(), x.k.double(), x.v.double(), pairs, **given)[0].float()


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


# ---- returns ---------------------------------------------------------------------------------------------------------


def general(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + s * s * 0.1


@pytest.mark.parametrize("score", [None, general], ids=["none", "general"])
def test_auxiliary_results(x: Inputs, score: Any) -> None:
    """Values that were not asked for are None; max_scores are after score function and mask, without gradient."""
    mask = MASKS["sparse"](2, 4, N, N)
    q, k, v = x.leaves()
    out = flex_attention(q, k, v, score, mask)
    assert isinstance(out, Tensor)
    plain, lse = flex_attention(q, k, v, score, mask, return_lse=True)
    again, aux = flex_attention(q, k, v, score, mask, return_aux=AuxRequest(lse=True, max_scores=True))
    assert type(aux) is AuxOutput
    assert torch.equal(out, plain)
    assert torch.equal(out, again)
    assert torch.equal(lse, aux.lse)
    scores = q.double() @ k.double().mT / 4
    scores = scores if score is None else scored(score, scores)
    want = scores.masked_fill(~allowed(mask, 2, 4, N, N), -torch.inf)
    same(aux.max_scores, want.amax(-1).float())
    assert torch.isneginf(aux.max_scores[:, :, 0]).all()
    assert aux.lse.requires_grad
    assert not aux.max_scores.requires_grad
    assert flex_attention(q, k, v, score, mask, return_aux=AuxRequest())[1] == (None, None)
    assert flex_attention(q, k, v, score, mask, return_aux=AuxRequest(max_scores=True))[1].lse is None


@pytest.mark.parametrize("score", [None, general], ids=["none", "general"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (3, 2, 1, 0)])
def test_strides_follow_the_query(x: Inputs, order: tuple[int, ...], score: Any) -> None:
    q = x.q.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
    got, want = flex_attention(q, x.k, x.v, score), torch_flex(q, x.k, x.v, score)
    assert got.stride() == want.stride()
    same(got, want)


@pytest.mark.parametrize("sizes", [(2, 4, 1, 16), (1, 4, 64, 16), (2, 1, 64, 16), (1, 1, 64, 700)], ids=str)
def test_strides_along_sides_of_one(sizes: tuple[int, ...]) -> None:
    batch, heads, tokens, dim = sizes
    q = torch.randn(batch, tokens, heads, dim).transpose(1, 2)
    k = torch.randn(batch, heads, 50, dim)
    assert flex_attention(q, k, k).stride() == torch_flex(q, k, k).stride()


@pytest.mark.parametrize("score", [None, general], ids=["none", "general"])
def test_any_strides_and_offsets(x: Inputs, score: Any) -> None:
    """Views with steps, with a storage offset, and expanded ones."""
    wide = torch.randn(2, 9, 3 * N, 40)
    q, k, v = wide[:, 1:5, ::3, 3:35:2], wide[:, 2:6, 5 : 5 + N, :16], wide[:1, 4:5, N:, 7:23].expand(2, 4, -1, -1)
    same(flex_attention(q, k, v[:, :, :N], score), torch_flex(q, k, v[:, :, :N], score))


def test_autocast(x: Inputs) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = flex_attention(x.q, x.k, x.v, general, return_lse=True)
        same(flex_attention(x.q.double(), x.k.double(), x.v.double()).float(), defined(x))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), defined(x, None, general), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["sparse", "listed"])
def test_gradcheck(name: str) -> None:
    q, k, v = (t[:1, :2, :40, :3] for t in Inputs.random(40, batch=1, heads=2, dtype=torch.float64).leaves())
    table, mask = torch.randn(81, dtype=torch.float64, requires_grad=True), MASKS[name](1, 2, 40, 40)

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor, score: Any) -> tuple[Tensor, Tensor]:
        out, lse = flex_attention(q, k, v, functools.partial(score, table), mask, return_lse=True)
        return out, lse.masked_fill(torch.isneginf(lse), 0.0)

    for score in (
        lambda t, s, b, h, i, j: 3 * torch.tanh(s / 3) + t[i - j + 40],
        lambda t, s, b, h, i, j: torch.sin(s) * t[i + j],
    ):
        assert torch.autograd.gradcheck(functools.partial(run, score=score), (q, k, v, table), fast_mode=True)


def test_a_mask_of_inference_mode(x: Inputs) -> None:
    """The tensors of the mask have no version."""
    with torch.inference_mode():
        mask = create_block_mask(causal, None, None, N, N, device="cpu")
        same(flex_attention(x.q, x.k, x.v, None, mask), defined(x, mask))


class Biased(nn.Module):
    """A score function with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * N))
        self.factor = nn.Parameter(torch.randn(4))

    def forward(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.squared(s, b, h, q, k) + self.table[q - k + N]

    def squared(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.factor[h] * s * s


@pytest.mark.parametrize("kind", ["module", "method", "partial"])
def test_captured_tensors(x: Inputs, kind: str) -> None:
    """Tensors get gradients through modules, bound methods and partials, also where nothing else needs any."""
    module, mask = Biased(), create_block_mask(causal, None, None, N, N, device="cpu")
    score: Any = {"module": module, "method": module.squared, "partial": functools.partial(module.forward)}[kind]
    flex_attention(x.q, x.k, x.v, score, mask).backward(x.dout)
    got = [p.grad for p in module.parameters() if p.grad is not None]
    assert len(got) == (1 if kind == "method" else 2)
    module.zero_grad()
    attention(x.q, x.k, x.v, allowed(mask, 2, 4, N, N), scored=functools.partial(scored, score))[0].backward(x.dout)
    for mine, want in zip(got, [p.grad for p in module.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)


def test_functions_of_scalars(x: Inputs) -> None:
    """Both functions get 0-dim tensors, as under vmap, where a reduction is one of each pair."""
    left, right = torch.randn(2, N, 8), torch.randn(N, 8, requires_grad=True)

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (left[b, q] * left[b, k]).sum() > 0

    def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert s.ndim == q.ndim == 0
        return s + (right[q] * right[k]).sum()

    mask = create_block_mask(near, 2, None, N, N, device="cpu", BLOCK_SIZE=32)
    out = flex_attention(x.q, x.k, x.v, biased, mask)
    pairs = (left @ left.mT > 0)[:, None].expand(2, 4, N, N)
    exact = right.detach().double().requires_grad_()
    q, k, v = x.leaves(torch.float64)
    want = attention(q, k, v, pairs, scored=lambda t: t + exact @ exact.mT)[0]
    same(out.detach(), want.detach().float())
    got = torch.autograd.grad(out, right, x.dout)[0]
    torch.testing.assert_close(got, torch.autograd.grad(want, exact, x.dout.double())[0].float(), rtol=2e-5, atol=1e-5)


def test_no_pairs() -> None:
    """Without queries, keys or batch elements, the result is empty or 0, with gradients."""
    q, k = torch.randn(2, 4, 5, 8, requires_grad=True), torch.randn(2, 4, 0, 8, requires_grad=True)
    out, lse = flex_attention(q, k, k, return_lse=True)
    assert out.eq(0).all()
    assert torch.isneginf(lse).all()
    out.sum().backward()
    assert q.grad is not None
    assert not q.grad.any()
    assert flex_attention(q[:, :, :0], q, q).shape == (2, 4, 0, 8)
    assert flex_attention(q[:0], q[:0], q[:0]).shape == (0, 4, 5, 8)


# ---- errors ----------------------------------------------------------------------------------------------------------


def masked(q_len: int = N, kv_len: int = N, batch: int | None = None, heads: int | None = None) -> BlockMask:
    return create_block_mask(causal, batch, heads, q_len, kv_len, device="cpu")


ERRORS: dict[str, tuple[type[Exception], Callable[[Inputs, Any], Any]]] = {
    "heads": (ValueError, lambda x, f: f(x.q, x.k[:, :2], x.v[:, :2])),
    "groups": (ValueError, lambda x, f: f(x.q, x.k[:, :3], x.v[:, :3], enable_gqa=True)),
    "head sizes": (ValueError, lambda x, f: f(x.q, x.k[..., :8], x.v)),
    "longer": (ValueError, lambda x, f: f(x.q, x.k, x.v, None, masked(N + 1))),
    "shorter": (ValueError, lambda x, f: f(x.q, x.k, x.v, None, masked(N, N - 1))),
    "both returns": (ValueError, lambda x, f: f(x.q, x.k, x.v, return_lse=True, return_aux=AuxRequest())),
    "batches": (ValueError, lambda x, f: f(x.q, x.k[:1], x.v[:1])),
    "batches and mask": (ValueError, lambda x, f: f(x.q, x.k[:1], x.v[:1], None, masked())),
    "three dimensions": (NotImplementedError, lambda x, f: f(x.q[0], x.k[0], x.v[0])),
    "one dimension": (ValueError, lambda x, f: f(x.q[0, 0, 0], x.k[0, 0, 0], x.v[0, 0, 0])),
    "slice": (RuntimeError, lambda x, f: f(x.q, x.k, x.v, None, masked(batch=2, heads=4)[:, :1])),
    "queries of one": (RuntimeError, lambda x, f: f(x.q[:1], x.k, x.v, None, masked(batch=1))),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(x: Inputs, name: str) -> None:
    """Errors are of the kinds that torch raises, and ringweave's."""
    kind, call = ERRORS[name]
    with pytest.raises(kind) as ours:
        call(x, flex_attention)
    assert isinstance(ours.value, RingweaveError)
    with pytest.raises(kind):
        call(x, torch_flex)


@pytest.mark.parametrize("name", ["heads", "batch", "rows"])
def test_errors_that_torch_does_not_raise(x: Inputs, name: str) -> None:
    given: dict[str, Any] = {
        "heads": (x.q, x.k, x.v, None, masked(heads=2)),
        "batch": (x.q, x.k, x.v, None, masked(batch=3)),
        "rows": (x.q, x.k, x.v, None, masked(256, N)[:, :, 0]),
    }
    if name == "rows":
        # a slice of rows, with its function put back and lengths that its blocks do not cover
        given[name][4].mask_mod, given[name][4].seq_lengths = causal, (N + 100, N)
        given[name] = (torch.randn(2, 4, N + 100, 16), *given[name][1:])
    with pytest.raises(RingweaveError):
        flex_attention(*given[name])


def wide(x: Tensor) -> Tensor:
    return torch.cat([x, x[:1]])


WRONG: dict[str, Callable[[Inputs], tuple[Any, Any, Any, dict[str, Any]]]] = {
    "another dtype": lambda x: (x.q, x.k.double(), x.v, {}),
    "fewer values": lambda x: (x.q, x.k, x.v[:, :, :50], {}),
    "more values": lambda x: (x.q, x.k, torch.cat([x.v, x.v], 2), {}),
    "heads of values": lambda x: (x.q, x.k, x.v[:, :2], {}),
    "more heads of values": lambda x: (x.q, x.k, torch.cat([x.v, x.v], 1), {}),
    "heads of grouped values": lambda x: (x.q, x.k[:, :2], x.v, {"enable_gqa": True}),
    "batch of values": lambda x: (x.q, x.k, x.v[:1], {}),
    "larger batch of values": lambda x: (x.q, x.k, wide(x.v), {}),
    "batch of values for shared keys": lambda x: (x.q, x.k[:1], wide(x.v), {"block_mask": masked(batch=2)}),
    "batch of queries": lambda x: (wide(x.q), x.k, x.v, {}),
    "keys of float64": lambda x: (x.q, x.k.double(), x.v, {}),
    "values of float16": lambda x: (x.q, x.k, x.v.half(), {}),
    "values of int64": lambda x: (x.q, x.k, x.v.long(), {}),
    "whole numbers": lambda x: (x.q.long(), x.k.long(), x.v.long(), {}),
    "truth": lambda x: (x.q > 0, x.k > 0, x.v > 0, {}),
    "complex": lambda x: (x.q.cfloat(), x.k.cfloat(), x.v.cfloat(), {}),
    "complex values": lambda x: (x.q, x.k, x.v.cfloat(), {}),
    "8 bits": lambda x: (x.q.to(torch.float8_e4m3fn), x.k.to(torch.float8_e4m3fn), x.v.to(torch.float8_e4m3fn), {}),
    "sparse keys": lambda x: (x.q, x.k.to_sparse(), x.v, {}),
    "sparse values": lambda x: (x.q, x.k, x.v.to_sparse(), {}),
    "no channels": lambda x: (x.q[..., :0], x.k[..., :0], x.v, {}),
    "no channels of values": lambda x: (x.q, x.k, x.v[..., :0], {}),
    "no channels and no keys": lambda x: (x.q[..., :0], x.k[:, :, :0, :0], x.v[:, :, :0], {}),
    "no values for keys": lambda x: (x.q, x.k, x.v[:, :, :0], {}),
    "a list": lambda x: (x.q, x.k, x.v.tolist(), {}),
    "another device": lambda x: (x.q, x.k, x.v.to("meta"), {}),
    **{
        f"scale {value!r}": lambda x, value=value: (x.q, x.k, x.v, {"scale": value})  # type: ignore[misc]
        for value in (
            *(torch.inf, torch.nan, -torch.inf, 1e300, 1e-300, True, "0.5", 1j, [0.5], torch.tensor(0.3)),
            *(torch.ones(4), torch.tensor(0.3, requires_grad=True)),
        )
    },
    "scale of no pairs": lambda x: (x.q, x.k[:, :, :0], x.v[:, :, :0], {"scale": torch.tensor(0.3)}),
}

FORMULAS: dict[str, Any] = {
    "none": None,
    "a factor": lambda s, b, h, q, k: s * 0.5,
    "a term": lambda s, b, h, q, k: 3 * torch.tanh(s / 3),
    "a bias": lambda s, b, h, q, k: s - 0.1 * (q - k).abs(),
    "general": general,
    "of one pair": lambda s, b, h, q, k: torch.stack([s, s]).sum(),
}


@pytest.mark.parametrize("name", WRONG)
def test_whether_a_call_is_refused_does_not_depend_on_its_formula(x: Inputs, name: str) -> None:
    """Each path raises the same error for wrong arguments, and so does explain."""
    q, k, v, options = WRONG[name](x)
    said = []
    for score in FORMULAS.values():
        for call in (
            flex_attention,
            functools.partial(flex_attention, return_aux=AuxRequest(max_scores=True)),
            explain,
        ):
            with pytest.raises(RingweaveError) as error:
                call(q, k, v, score, **options)
            said.append((type(error.value), str(error.value)))
    if 0 in (*q.shape[:3], *k.shape[:3]):
        # no pattern can be explained for no keys
        said = [each for each in said if "without an empty axis" not in each[1] or ", 0);" in each[1]]
    assert len(set(said)) == 1, set(said)


@pytest.mark.parametrize("scale", [0, 0.0, -0.25, 1e-30, np.float32(0.25)])
def test_scales_that_every_path_takes(x: Inputs, scale: float) -> None:
    for score in (None, FORMULAS["a term"], general, lambda s, b, h, q, k: s * 1e-30, lambda s, b, h, q, k: s * 1e35):
        got = flex_attention(x.q, x.k, x.v, score, scale=scale)
        same(got, torch_flex(x.q, x.k, x.v, score, scale=scale))


def test_autocast_makes_one_dtype(x: Inputs) -> None:
    """Inputs of several floating dtypes are refused without autocast, and whole numbers and float64 with it, too."""
    for score in (None, general):
        with torch.autocast("cpu", torch.bfloat16):
            assert flex_attention(x.q, x.k.half(), x.v.bfloat16(), score).dtype == torch.bfloat16
            for v in (x.v.long(), x.v.double()):
                with pytest.raises(RingweaveError, match=r"v\.dtype"):
                    flex_attention(x.q, x.k, v, score)


def test_the_mask_of_a_slice(x: Inputs) -> None:
    """A slice of rows works with a function that is moved by the rows that it left out, as in a decoding step."""
    whole = create_block_mask(causal, None, None, 128, N, device="cpu", BLOCK_SIZE=32)
    part = whole[:, :, 1]
    part.mask_mod, part.seq_lengths = lambda b, h, q, k: q + 32 >= k, (5, N)
    got = flex_attention(x.q[:, :, 32:37], x.k, x.v, None, part)
    same(got, flex_attention(x.q, x.k, x.v, None, masked())[:, :, 32:37])


def test_batches_of_the_mask(x: Inputs) -> None:
    """Keys of one batch element are for all queries where the mask has the batch of the queries."""
    q, k, v = x.leaves()
    k, v = k[:1], v[:1]
    got = flex_attention(q, k, v, None, masked(batch=2))
    want = flex_attention(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), None, masked(batch=2))
    assert torch.equal(got, want)
    for mine, theirs in zip(*(torch.autograd.grad(each, (q, k, v), x.dout) for each in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_mask_of_any_length(x: Inputs) -> None:
    """One block of 2 ** 30 stands for any length; torch makes such masks for calls without one."""
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    side = 1 << 30
    mask = BlockMask.from_kv_blocks(one, one[..., None] - 1, BLOCK_SIZE=side, mask_mod=causal, seq_lengths=(1, 1))
    same(flex_attention(x.q, x.k, x.v, None, mask), defined(x, masked()))
    same(flex_attention(x.q[:, :, :9], x.k, x.v, None, mask), defined(x, masked())[:, :, :9])


def test_growth_within_the_last_block(x: Inputs) -> None:
    mask = masked(N - 3, N - 3)._adjust(N, N)
    same(flex_attention(x.q, x.k, x.v, None, mask), defined(x, masked()))


def test_transforms(x: Inputs) -> None:
    """torch.func gets the answer where attention has a rule, else an error with a remedy."""
    same(torch.func.grad(lambda v: flex_attention(x.q, x.k, v).sum())(x.v), torch.autograd.functional.vjp(
        lambda v: flex_attention(x.q, x.k, v).sum(), x.v)[1])  # fmt: skip
    mapped = torch.vmap(lambda q: flex_attention(q, x.k, x.v))(torch.stack([x.q, x.k]))
    same(mapped[1], flex_attention(x.k, x.k, x.v))
    for score in (None, general):
        with pytest.raises(UnsupportedError, match="reverse-mode" if score else "forward-mode"):
            torch.func.jvp(lambda q, s=score: flex_attention(q, x.k, x.v, s), (x.q,), (x.q,))
        q = x.leaves()[0]
        (first,) = torch.autograd.grad(flex_attention(q, x.k, x.v, score).pow(2).sum(), q, create_graph=True)
        with pytest.raises(UnsupportedError, match="second derivative"):
            first.sum().backward()


# ---- changes between calls -------------------------------------------------------------------------------------------

reach = 9
power = 2.0


def by_global(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() < reach


def capped_by_global(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return power * torch.tanh(s / power)


class Holder:
    """An object with a mask function, a score function, and the values that they read."""

    def __init__(self) -> None:
        self.width, self.slope, self.table = 5, 0.1, torch.randn(2 * N)

    def near(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < self.width

    def lean(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - self.slope * (q - k).abs() + self.table[q - k + N]


def check(x: Inputs, mask: BlockMask | None, score: Any) -> None:
    """Compare with the definition in the present state, and compute gradients."""
    q, k, v = x.leaves()
    out = flex_attention(q, k, v, score, mask)
    same(out.detach(), defined(x, mask, score))
    assert torch.isfinite(torch.autograd.grad(out.sum(), q)[0]).all()


@pytest.mark.parametrize("times", [1, 3])
def test_nothing_is_stale(x: Inputs, times: int) -> None:
    """After each change to the values that a function reads, the result is that of the new values."""
    global reach, power
    holder, documents, offset = Holder(), torch.arange(N) // 20, torch.tensor(0)
    bias = torch.randn(4, N, N)

    def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[q] == documents[k]) & (q + offset >= k)

    def all_blocks(mask_mod: Any) -> BlockMask:
        full = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3).contiguous()
        counts = torch.full((1, 1, 3), 3, dtype=torch.int32)
        return BlockMask.from_kv_blocks(counts, full, BLOCK_SIZE=32, mask_mod=mask_mod, seq_lengths=(N, N))

    masks = [all_blocks(packed), all_blocks(by_global), all_blocks(holder.near)]
    scores = [capped_by_global, holder.lean, lambda s, b, h, q, k: s + bias[h, q, k]]

    def every() -> None:
        for _ in range(times):
            for mask in masks:
                check(x, mask, None)
            for score in scores:
                check(x, masks[0], score)

    every()
    documents.copy_(torch.arange(N) // 7)
    offset.fill_(3)
    reach, power, holder.width, holder.slope = 4, 1.0, 9, 0.7
    every()
    documents = torch.arange(N) // 30
    holder.table = torch.randn(2 * N)
    bias.mul_(-1)
    every()
    masks[0].kv_num_blocks.fill_(2)
    masks[1].kv_indices.copy_(masks[1].kv_indices.flip(-1))
    masks[1].kv_num_blocks[0, 0, 1] = 1
    every()
    masks[0].mask_mod, masks[1].kv_num_blocks = causal, torch.full((1, 1, 3), 1, dtype=torch.int32)
    every()
    reach, power = 9, 2.0


def test_a_plan_is_made_once(x: Inputs) -> None:
    """Calls that share a mask share its plan, whatever their score functions; a changed mask has another."""
    mask = masked()
    check(x, mask, None)
    misses = plan_cache.statistics().misses
    for _ in range(3):
        check(x, mask, None)
        check(x, mask, lambda s, b, h, q, k: s * 2 - (q - k).abs())
    assert plan_cache.statistics().misses == misses
    mask.kv_num_blocks.zero_()
    check(x, mask, None)
    assert plan_cache.statistics().misses > misses


def test_inputs_do_not_change(x: Inputs) -> None:
    mask = MASKS["listed"](2, 4, N, N)
    assert mask is not None
    before, tensors = dict(vars(mask)), [t.clone() for t in (x.q, x.k, x.v)]
    flex_attention(*x.leaves(), general, mask, kernel_options={"BLOCK_M": 64, "no such option": 1}).sum().backward()
    assert vars(mask).keys() == before.keys()
    assert all(vars(mask)[name] is value for name, value in before.items())
    assert all(map(torch.equal, tensors, (x.q, x.k, x.v)))


def test_threads(x: Inputs) -> None:
    """Threads share masks and functions, and each has its own results."""
    mask = masked()
    slopes = [torch.full((4,), value) for value in (0.1, 0.9)]
    scores: list[Any] = [lambda s, b, h, q, k, t=slope: s - t[h] * (q - k).abs() for slope in slopes]
    scores += [lambda s, b, h, q, k, t=slope: s + t[h] * s * s for slope in slopes]

    def run(score: Any) -> None:
        want = defined(x, mask, score)
        for _ in range(20):
            out = flex_attention(*x.leaves(), score, mask)
            out.sum().backward()
            same(out.detach(), want)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, scores)) == [None] * 4


@pytest.mark.parametrize("score", ["term", "general"])
def test_names_that_a_loop_binds_again(score: str) -> None:
    """The gradient of each layer is that of its call, where the functions of all layers read the variables of a loop."""
    x = torch.randn(1, 2, N, 16, requires_grad=True)

    def layers() -> Iterator[Tensor]:
        for width, slope in ((3, 0.5), (20, 0.1), (60, 1.0)):

            def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q - k).abs() < width  # noqa: B023

            def lean(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                distance = (q - k).abs() * slope  # noqa: B023
                return s - (distance if score == "term" else torch.sin(distance * s))

            mask = create_block_mask(causal_and(near), None, None, N, N, device="cpu", BLOCK_SIZE=32)
            yield flex_attention(x, x, x, lean, mask).pow(2).sum()

    want = sum(torch.autograd.grad(each, x)[0] for each in layers())
    # the loop has ended before the first gradient
    got = torch.autograd.grad(sum(list(layers())), x)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def causal_and(mask_mod: Any) -> Any:
    return peer.and_masks(causal, mask_mod)


def test_variables_that_a_function_writes(x: Inputs) -> None:
    """A function that counts its calls changes the variable, and not a copy, and has the same result each time."""
    count = 0

    def counting(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return s - (q - k).abs() * 0.1

    for _ in range(2):
        same(flex_attention(x.q, x.k, x.v, counting), defined(x, None, counting))
    assert count > 1


# ---- masks and functions of any make -------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [1, 7, 20, 48, 100, 256, (16, 128), (64, 48), (1, 128), (200, 7)], ids=str)
@pytest.mark.parametrize(("nq", "nk"), [(130, 130), (1, 200), (200, 33)])
def test_sides_of_blocks(side: Any, nq: int, nk: int) -> None:
    def spotted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k - 20) & ((q * 3 + k) % 5 > 0)

    mask = create_block_mask(spotted, None, None, nq, nk, device="cpu", BLOCK_SIZE=side)
    compare(Inputs.random(nq, nk, heads=2), mask, None, {})


def rows(counts: Any, indices: Any) -> BlockMask:
    counts, indices = torch.tensor(counts, dtype=torch.int32), torch.tensor(indices, dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=35, seq_lengths=(N, N), compute_q_blocks=False)


@pytest.mark.parametrize(
    ("counts", "indices", "blocks"),
    [
        ([[[1, 2]]], [[[1, 0], [1, 0]]], [[0, 1], [1, 1]]),
        ([[[2, 2]]], [[[1, 1], [0, 0]]], [[0, 1], [1, 0]]),
        ([[[1, 0]]], [[[0, -5], [9, 9]]], [[1, 0], [0, 0]]),
        # a block after the last key has no keys
        ([[[2, 1]]], [[[0, 2], [7, 0]]], [[1, 0], [0, 0]]),
        ([1, 1], [[0, 1], [1, 0]], [[1, 0], [0, 1]]),
    ],
    ids=["order", "repeated", "undefined entries", "after the last key", "without batch and heads"],
)
def test_tables_of_blocks(x: Inputs, counts: Any, indices: Any, blocks: Any) -> None:
    pairs = torch.tensor(blocks).repeat_interleave(35, 0).repeat_interleave(35, 1).expand(2, 4, N, N)
    want = attention(x.q.double(), x.k.double(), x.v.double(), pairs.double())[0]
    same(flex_attention(x.q, x.k, x.v, None, rows(counts, indices)), want.float())


FAULTY: dict[str, Any] = {
    "raises": lambda b, h, q, k: torch.ones(3)[q] > 0,
    "integer": lambda b, h, q, k: q - k,
    "nothing": lambda b, h, q, k: None,
    "two arguments": lambda b, h: b > h,
    "branch": lambda b, h, q, k: q > k if q > 3 else q < k,
    "random": lambda b, h, q, k: torch.rand(()) > 0.5,
}


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_mask_functions(x: Inputs, name: str) -> None:
    mask = rows([[[2, 2]]], [[[1, 0], [1, 0]]])
    mask.mask_mod = FAULTY[name]
    with pytest.raises(PatternError, match="mask_mod"):
        flex_attention(x.q, x.k, x.v, None, mask)


def test_long_formulas(x: Inputs) -> None:
    """A value that is used many times is looked at once, and a formula of any depth is computed."""

    def shared(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        for _ in range(40):
            distance = distance * 0.5 + distance * 0.5
        return s + distance * 0.01

    def deep(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for _ in range(2000):
            s = s + 0.0
        return s

    same(flex_attention(x.q, x.k, x.v, shared), defined(x, None, lambda s, b, h, q, k: s + (q - k) * 0.01))
    same(flex_attention(x.q, x.k, x.v, deep), defined(x))
    assert "nested too deeply" in explain(x.q, x.k, x.v, deep)


def test_transforms_over_tables(x: Inputs) -> None:
    tables = torch.randn(3, 2 * N)

    def attend(table: Tensor) -> Tensor:
        return flex_attention(x.q, x.k, x.v, lambda s, b, h, q, k: s + table[q - k + N])

    same(torch.vmap(attend)(tables), torch.stack([attend(table) for table in tables]))
    with pytest.raises(RingweaveError, match="torch.func"):
        torch.vmap(lambda t: flex_attention(x.q, x.k, x.v, lambda s, b, h, q, k: s * t[q]))(tables)


# ---- installation ----------------------------------------------------------------------------------------------------


def test_install_restores(x: Inputs) -> None:
    """The function that stood there is restored, when nested and after errors."""
    assert peer.flex_attention is torch_flex
    with install() as outer:
        first = peer.flex_attention
        assert first is not torch_flex
        assert outer.active
        inner = install()
        assert peer.flex_attention is not first
        with pytest.raises(ZeroDivisionError), inner:
            raise ZeroDivisionError
        assert peer.flex_attention is first
        q, k, v = x.leaves()
        same(peer.flex_attention(q, k, v, general).detach(), defined(x, None, general))
        peer.flex_attention(query=q, key=k, value=v).sum().backward()
    assert peer.flex_attention is torch_flex
    assert not outer.active
    # the function of an installation that has ended is torch's
    with pytest.raises(NotImplementedError):
        first(q, k, v)


def test_install_acts_at_once_and_again() -> None:
    installed = install()
    try:
        assert peer.flex_attention is not torch_flex
    finally:
        installed.__exit__(None, None, None)
    assert peer.flex_attention is torch_flex
    with installed:
        assert peer.flex_attention is not torch_flex
    assert peer.flex_attention is torch_flex


def test_installations_that_end_in_another_order() -> None:
    """The function that stood there first is restored, in transformers' module too."""
    from transformers.integrations import flex_attention as theirs

    first, second = install(), install()
    first.__exit__(None, None, None)
    q = torch.randn(1, 1, 8, 8, requires_grad=True)
    peer.flex_attention(q, q, q).sum().backward()
    second.__exit__(None, None, None)
    assert peer.flex_attention is torch_flex
    assert theirs.flex_attention is torch_flex


def test_other_calls_go_to_the_function_that_stood_there(x: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on another device, and calls without gradients that are refused here, reach it with unchanged arguments."""
    seen: list[tuple[Any, ...]] = []

    def stood(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "theirs"

    monkeypatch.setattr(peer, "flex_attention", stood)
    with install():
        seen_before = torch.zeros(())

        def writes(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen_before.add_(1)
            return s.relu()

        assert peer.flex_attention(x.q, x.k, x.v, writes, scale=2.0) == "theirs"
        with pytest.raises(UnsupportedError):
            peer.flex_attention(*x.leaves(), writes)
        meta = x.q.to("meta").requires_grad_()
        assert peer.flex_attention(meta, key=meta, value=meta) == "theirs"
        assert isinstance(peer.flex_attention(*x.leaves()), Tensor)
        assert isinstance(peer.flex_attention(x.q, x.k, x.v, None, scale=2.0), Tensor)
    assert len(seen) == 2
    assert seen[0][1] == {"scale": 2.0}
    assert seen[0][0][0] is x.q


def test_calls_without_gradients_of_the_queries_are_computed_here(x: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluation, and where only a tensor learns that the score function captures."""
    monkeypatch.setattr(peer, "flex_attention", None)
    slope = torch.nn.Parameter(torch.tensor(0.7))
    with install():
        for score in (None, general):
            with torch.no_grad():
                same(peer.flex_attention(x.q, x.k, x.v, score), defined(x, None, score))
            with torch.inference_mode():
                same(peer.flex_attention(x.q, x.k, x.v, score).clone(), defined(x, None, score))
        peer.flex_attention(x.q, x.k, x.v, lambda s, b, h, i, j: s * slope).square().sum().backward()
    learned = slope.detach().double().requires_grad_()
    q, k, v = x.leaves(torch.float64)
    attention(q, k, v, torch.ones(N, N), scored=lambda t: t * learned)[0].square().sum().backward()
    assert slope.grad is not None
    torch.testing.assert_close(slope.grad.double(), learned.grad, rtol=1e-4, atol=1e-4)


@compiling
@pytest.mark.parametrize(
    "backend", ["aot_eager", *(pytest.param(x, marks=pytest.mark.long) for x in ("eager", "inductor"))]
)
def test_compiled_callers(backend: str) -> None:
    """Compiled code that makes mask and score function, and calls torch's name, has eager's results."""
    x = Inputs.random(N, batch=2, heads=4)
    slopes = torch.rand(4, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, documents: Tensor, cap: float) -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, N, N, device="cpu")

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return cap * torch.tanh(s / cap) - slopes[h] * (i - j).abs()

        return peer.flex_attention(q * 2, k, v, score, mask) + 1

    torch._dynamo.reset()
    with install():
        compiled = torch.compile(attend, backend=backend)
        for cap in (5.0, 2.0):
            leaves, documents = x.leaves(), torch.randint(4, (N,)).sort().values
            results = [f(*leaves, slopes, documents, cap) for f in (attend, compiled)]
            grads = [torch.autograd.grad(each.square().sum(), (*leaves, slopes)) for each in results]
            torch.testing.assert_close(results[1], results[0])
            torch.testing.assert_close(grads[1], grads[0])
    torch._dynamo.reset()


def test_compiled_inference_is_torchs(x: Inputs) -> None:
    """A compiled call without gradients is torch's, in one graph; one with gradients says why it cannot be in one."""

    def attend(q: Tensor) -> Tensor:
        return peer.flex_attention(q, q, q, lambda s, b, h, i, j: s * 2) + 1

    torch._dynamo.reset()
    with install():
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x.q), attend(x.q))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="fullgraph=True"):
            compiled(x.leaves()[0])
    torch._dynamo.reset()


def test_compiled_inference_has_torchs_names(x: Inputs) -> None:
    """A compiled call without gradients has torch's graph, names of sizes and all: torch's CPU kernel fails with some."""

    def shifted(offset: int) -> Callable[..., Tensor]:
        return lambda b, h, q, k: q + offset >= k

    def sizes() -> list[list[str]]:
        graphs = []

        def recorded(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            values = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
            graphs.append([str(value) for value in values if isinstance(value, torch.SymInt)])
            return graph.forward

        torch.compiler.reset()
        compiled = torch.compile(peer.flex_attention, backend=recorded)
        for length in (N, N - 1, N - 2):
            mask = create_block_mask(shifted(length - 1), None, None, 1, length, device="cpu")
            compiled(x.q[:, :, :1], x.k[:, :, :length], x.v[:, :, :length], None, block_mask=mask)
        return graphs

    alone = sizes()
    with install():
        assert sizes() == alone
    assert any(alone)


@compiling
def test_transformers_trains() -> None:
    """A model with ``attn_implementation="flex_attention"`` has eager attention's gradients on a CPU."""
    import transformers
    from transformers.integrations import flex_attention as theirs

    from .tiny import config_of

    ids, padding = torch.randint(3, 60, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    padding[1, 18:] = 0
    # what queries of padding attend differs
    labels = ids.masked_fill(padding == 0, -100)
    # a layer with a window, which caps scores; compiling takes seconds for each
    layer = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    for name, fewer in (("llama", {}), ("gemma2", {})) if is_long() else (("gemma2", layer),):
        models = []
        for implementation in ("eager", "flex_attention"):
            config = config_of(name, **fewer)
            torch.manual_seed(0)
            models.append(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation))
        eager, flex = models
        flex.load_state_dict(eager.state_dict())
        with install():
            losses = [model.train()(ids, attention_mask=padding, labels=labels).loss for model in models]
            losses[0].backward()
            losses[1].backward()
        torch.testing.assert_close(losses[1], losses[0])
        for mine, want in zip(flex.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, want.grad, rtol=1e-3, atol=1e-5)
    assert theirs.flex_attention is torch_flex
    torch._dynamo.reset()


def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score * 1.5 - (q - k).abs() / (h + 1)


def squared(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q >= k, score + 0.1 * score * score, -torch.inf)


@pytest.mark.parametrize("score", [None, biased, squared])
@pytest.mark.parametrize("name", list(MASKS))
def test_a_default_device_changes_nothing(name: str, score: Callable[..., Tensor] | None) -> None:
    """Functions are read, compared and evaluated on the device of the call."""
    # lengths that no other test has, so that nothing is cached
    n = 71 + list(MASKS).index(name)
    x = Inputs.random(n, batch=2, heads=4)
    mask = MASKS[name](2, 4, n, n)

    def results() -> tuple[str, list[Tensor]]:
        inputs = [each.clone().requires_grad_() for each in (x.q, x.k, x.v)]
        said = str(explain(*inputs, score, mask))
        out, lse = flex_attention(*inputs, score, mask, return_lse=True)
        return said, [out, lse, *torch.autograd.grad(out, inputs, x.dout)]

    with torch.device("meta"):
        said, got = results()
    # as in a new process
    PATTERNS.clear()
    expected, want = results()
    assert said == expected
    assert all(map(torch.equal, got, want))
