"""FlexAttention's function is its definition: outputs, log-sum-exps, and the gradients of all tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention as torch_flex

from ringweave.errors import RingweaveError, UnsupportedError
from ringweave.integrations.flex_attention import explain, flex_attention

from ..oracle import Inputs, attention
from ..trace import scores as corpus
from .flex_cases import MASKS, compare, scored

# torch warns of its own function without a compiler, and of return_lse
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")

N = 150
INF = float("inf")
Made = Callable[..., Callable[..., Tensor]]


#: Score functions, with the shapes of the tables that they are made from.
SCORES: dict[str, tuple[Made, dict[str, tuple[int, ...]]]] = {
    "softcap": (lambda: lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0), {}),
    "alibi": (lambda slopes: lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), {"slopes": (4,)}),
    "by_distance": (lambda table: lambda s, b, h, q, k: s + table[h, q - k + N], {"table": (4, 2 * N)}),
    "clipped": (
        lambda table: lambda s, b, h, q, k: s + table[h, torch.clamp(k - q, -8, 8) + 8], {"table": (4, 17)},
    ),
    "by_pair": (lambda table: lambda s, b, h, q, k: s + table[b, h, q, k], {"table": (2, 4, N, N)}),
    "of_head_and_cap": (
        lambda table, biases: lambda s, b, h, q, k: 9 * (0.7 * s / 9).tanh() + table[q, k] - biases[h],
        {"table": (N, N), "biases": (4,)},
    ),
    "scaled_by_head": (
        lambda factors: lambda s, b, h, q, k: s * factors[h] + (q - k).abs() * 0.01, {"factors": (4,)},
    ),
    "squared": (lambda table: lambda s, b, h, q, k: s + 0.1 * s * s - table[k] * q / 50, {"table": (N,)}),
    "masking": (lambda: lambda s, b, h, q, k: torch.where((q - k) % 4 > 0, s, -INF), {}),
}  # fmt: skip


def tables(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {each: torch.randn(shape, generator=generator).to(dtype) for each, shape in SCORES[name][1].items()}


def test_the_signature_is_torchs() -> None:
    ours, theirs = inspect.signature(flex_attention).parameters, inspect.signature(torch_flex).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize(("nq", "nk"), [(N, N), (37, 129)])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, nq: int, nk: int) -> None:
    """Each kind of mask, with lengths that are no multiple of a block, and grouped heads."""
    x = Inputs.random(nq, nk, batch=2, heads=4, kv_heads=2)
    compare(x, MASKS[mask](2, 4, nq, nk), None, {})


@pytest.mark.parametrize("mask", ["none", "causal", "sparse", "listed"])
@pytest.mark.parametrize("score", SCORES)
def test_scores(score: str, mask: str) -> None:
    x = Inputs.random(N, batch=2, heads=4)
    compare(x, MASKS[mask](2, 4, N, N), SCORES[score][0], tables(score))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_dtypes(score: str, dtype: torch.dtype) -> None:
    """Tables have gradients in their own dtype."""
    x = Inputs.random(N, batch=2, heads=4, kv_heads=1, dim=24, value_dim=8, dtype=dtype)
    compare(x, MASKS["causal"](2, 4, N, N), SCORES[score][0], tables(score, dtype), scale=0.3)


MINUS_INF: dict[str, tuple[Made, dict[str, tuple[int, ...]]]] = {
    "by distance": (lambda: lambda s, b, h, q, k: s + torch.where(q >= k + 5, 0.0, -INF), {}),
    "everywhere": (lambda: lambda s, b, h, q, k: s + torch.where(q - k > 1000, 0.0, -INF), {}),
    "by head": (lambda: lambda s, b, h, q, k: s + torch.where(h > 1, 0.0, -INF), {}),
    "by key": (lambda: lambda s, b, h, q, k: s + torch.where((k < 90) & (b > 0), 0.0, -INF), {}),
    "after a cap": (lambda: lambda s, b, h, q, k: 9 * torch.tanh(s / 9) + torch.where(q >= k + 5, 0.0, -INF), {}),
    "selected": (lambda: lambda s, b, h, q, k: torch.where(q >= k + 5, s, -INF), {}),
    "with a table": (lambda table: lambda s, b, h, q, k: torch.where(q >= k + 5, s + table[h], -INF), {"table": (4,)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("name", MINUS_INF)
def test_scores_of_minus_infinity_are_masked(name: str, mask: str, dtype: torch.dtype) -> None:
    """A row in which all scores are -inf is an empty row."""
    made, shapes = MINUS_INF[name]
    x = Inputs.random(N, batch=2, heads=4, dtype=dtype)
    drawn = {each: torch.randn(shape).to(dtype) for each, shape in shapes.items()}
    compare(x, MASKS[mask](2, 4, N, N), made, drawn)


@pytest.mark.parametrize("name", corpus.SCORES)
def test_functions_that_people_write(name: str) -> None:
    """Each function has the results of its definition, or fails as that does, and explain says how it is read.

    Explain refuses a function that fails at the first pair.
    """
    score = corpus.SCORES[name]
    x = Inputs.random(corpus.Q, corpus.K, batch=corpus.B, heads=corpus.H)
    score_mod = score.make(*score.tables())
    pairs = torch.ones(*corpus.SIZES)
    try:
        want = attention(x.q, x.k, x.v, pairs, scored=functools.partial(scored, score_mod))
    except (RuntimeError, LookupError) as error:
        refusal = RingweaveError, type(error)
        with pytest.raises(refusal):
            flex_attention(x.q, x.k, x.v, score_mod)
        try:
            explain(x.q, x.k, x.v, score_mod)
        except refusal:
            return
    else:
        got = flex_attention(x.q, x.k, x.v, score_mod, return_lse=True)
        torch.testing.assert_close(got, want, equal_nan=True)
    said = explain(x.q, x.k, x.v, score_mod, as_dict=True)["score_mod"]
    assert explain(x.q, x.k, x.v, score_mod).splitlines()[-1] == f"score_mod {said}"
    _, _, words = score.reads.partition(": ")
    if name in corpus.TYPES:
        words = "another value than its formula"
    if words:
        assert said.startswith("general path, slower than terms: ")
        assert words in said
    else:
        assert said.startswith("factor -") if score.reads == "factor" else said == (score.reads or "none")


def test_calls_of_torchs_function_are_not_explained() -> None:
    q = torch.empty(1, 1, 8, 16, device="meta")
    with pytest.raises(UnsupportedError, match="query.device: got meta; wanted cpu: torch's function"):
        explain(q, q, q)


def test_a_factor_that_is_out_of_range_of_a_scale() -> None:
    x = Inputs.random(40)
    assert "out of range of a scale" in explain(x.q, x.k, x.v, lambda s, b, h, q, k: s * 1e-37)
    assert "out of range of a scale" in explain(x.q, x.k, x.v, lambda s, b, h, q, k: s * 1e-20, scale=1e-30)
    assert explain(x.q, x.k, x.v, lambda s, b, h, q, k: s * 1e-20).endswith("factor 1e-20")
