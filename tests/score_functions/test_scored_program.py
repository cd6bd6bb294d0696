"""Attention with any score_mod over tiles: results and gradients against the dense definition in float64, and refusals."""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode

import ringweave as rw
from ringweave.backends import plan_tiles, tile_attention
from ringweave.errors import ShapeError, UnsupportedError
from ringweave.integrations.flex_attention import explain, flex_attention
from ringweave.patterns import Pattern

from .. import oracle
from ..integrations.flex_cases import attend
from ..integrations.test_memory import Largest
from ..oracle import Inputs
from ..test_conformance import POWERS, check_powers, with_powers

# torch warns of its own function without a compiler, and of return_lse
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")

CPU = torch.device("cpu")
Learned = dict[str, Tensor]
Dense = Callable[[Learned, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A score_mod and its dense definition.

    Attributes:
        shapes: Shapes of the tensors that it captures, for (batch, heads, queries, keys).
        score_mod: Makes the function of one pair from the captured tensors.
        dense: Computes all scores from captured tensors, scores (B, H, Nq, Nk), and index tensors that broadcast.
        mapped: Whether torch can map the function of one pair, with gradients, and so shows another order of the sums.
    """

    shapes: Callable[[int, int, int, int], dict[str, tuple[int, ...]]]
    score_mod: Callable[[Learned], ScoreMod]
    dense: Dense
    mapped: bool = True

    def by_pair(self, c: Learned, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Compute all scores by mapping the function of one pair, as FlexAttention does."""
        function: Callable[..., Tensor] = self.score_mod(c)
        for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
            function = torch.vmap(function, (0, *dims))
        with _Indexed():
            return function(s, *(x.flatten() for x in (b, h, q, k)))


class _Indexed(TorchFunctionMode):
    """Reads tensors at indices of a pair, which ``Tensor.__getitem__`` would convert to numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and any(isinstance(x, Tensor) for x in _as_tuple(args[1])):
            parts = [None if isinstance(x, slice) else torch.as_tensor(x, device=CPU) for x in _as_tuple(args[1])]
            return torch.ops.aten.index(args[0], parts)
        return func(*args, **(kwargs or {}))


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


class Biased(torch.nn.Module):
    """A module with a method that is a score_mod."""

    def __init__(self, weight: Tensor, table: Tensor):
        super().__init__()
        self.weight, self.table = weight, table

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * self.weight.exp() + torch.tanh(self.table[b, h])

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        features = torch.stack([score, (q - k) / 100.0])
        rows = self.table[b].to(score.dtype)
        return torch.nn.functional.linear(features, rows[None], self.weight.to(score.dtype)[None]).sum()


def _slope(slopes: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - slopes[h] * (q - k).abs()


def _branches(c: Learned, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where((q + k) % 3 == 0, s * c["w"][b], torch.where(k % 5 == 4, -torch.inf, s - 0.1 * h))


def _table(c: Learned, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + c["table"][b, h, q, k]


IDS = torch.arange(500, device=CPU) % 7 % 3

CASES = {
    "softcap": Case(
        lambda b, h, n, m: {},
        lambda c: lambda s, b, h, q, k: 3 * torch.tanh(s / 3),
        lambda c, s, b, h, q, k: 3 * torch.tanh(s / 3),
    ),
    "slopes": Case(
        lambda b, h, n, m: {"slopes": (h,)},
        lambda c: functools.partial(_slope, c["slopes"]),
        lambda c, s, b, h, q, k: _slope(c["slopes"], s, b, h, q, k),
    ),
    "table": Case(lambda b, h, n, m: {"table": (b, h, n, m)}, lambda c: functools.partial(_table, c), _table),
    "rows": Case(
        lambda b, h, n, m: {"table": (b, h, n, m)},
        lambda c: lambda s, b, h, q, k: s + c["table"][b][h][q, k],
        _table,
    ),
    "columns": Case(
        lambda b, h, n, m: {"table": (n, 3, m)},
        lambda c: lambda s, b, h, q, k: s + c["table"][:, 1, k][q] - c["table"][..., k][q, -1],
        lambda c, s, b, h, q, k: s + c["table"][q, 1, k] - c["table"][q, 2, k],
        mapped=False,
    ),
    "distances": Case(
        lambda b, h, n, m: {"table": (2 * max(n, m), h)},
        lambda c: lambda s, b, h, q, k: s + c["table"][k - q, h],
        lambda c, s, b, h, q, k: s + c["table"][(k - q) % len(c["table"]), h],
    ),
    "products": Case(
        lambda b, h, n, m: {"left": (n, 5), "right": (m, 5)},
        lambda c: lambda s, b, h, q, k: s + (c["left"][q] * c["right"][k]).sum(),
        lambda c, s, b, h, q, k: s + c["left"] @ c["right"].mT,
    ),
    "branches": Case(
        lambda b, h, n, m: {"w": (b,)},
        lambda c: functools.partial(_branches, c),
        _branches,
    ),
    "integers": Case(
        lambda b, h, n, m: {"w": (h,)},
        lambda c: lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], s * torch.exp(c["w"])[h], s - IDS[k]),
        lambda c, s, b, h, q, k: torch.where(IDS[q] == IDS[k], s * torch.exp(c["w"])[h], s - IDS[k]),
    ),
    "computed_table": Case(
        lambda b, h, n, m: {"table": (n, m), "w": ()},
        lambda c: lambda s, b, h, q, k: s + torch.sigmoid(c["table"] * c["w"]).t()[k, q] * c["table"][q][k],
        lambda c, s, b, h, q, k: s + torch.sigmoid(c["table"] * c["w"]) * c["table"],
        mapped=False,
    ),
    "method": Case(
        lambda b, h, n, m: {"weight": (), "table": (b, h)},
        lambda c: Biased(c["weight"], c["table"]).score_mod,
        lambda c, s, b, h, q, k: s * c["weight"].exp() + torch.tanh(c["table"])[:, :, None, None],
    ),
    "module": Case(
        lambda b, h, n, m: {"weight": (), "table": (b, 2)},
        lambda c: Biased(c["weight"], c["table"]),
        lambda c, s, b, h, q, k: s * c["table"][b, 0] + (q - k) / 100.0 * c["table"][b, 1] + c["weight"],
    ),
    "in_place": Case(
        lambda b, h, n, m: {"added": (m,)},
        lambda c: lambda s, b, h, q, k: s.mul_(2).add_(c["added"][k]),
        lambda c, s, b, h, q, k: 2 * s + c["added"][k],
    ),
    "no_score": Case(
        lambda b, h, n, m: {"added": (m,)},
        lambda c: lambda s, b, h, q, k: c["added"][k] + 0.5,
        lambda c, s, b, h, q, k: s * 0 + (c["added"][k] + 0.5),
    ),
}


def drawn(case: Case, x: Inputs, dtype: torch.dtype) -> Learned:
    """Return the captured tensors of a case, quantised to a dtype."""
    generator = torch.Generator(CPU).manual_seed(7)
    shapes = case.shapes(*x.q.shape[:3], x.k.shape[2])
    return {name: torch.randn(shape, generator=generator, device=CPU).to(dtype) for name, shape in shapes.items()}


def definition(
    dense: Dense, x: Inputs, allowed: Tensor, learned: Learned, dtype: torch.dtype, scale: float
) -> dict[str, Tensor]:
    """Return out, lse and gradients by the dense formula; tensors are in a dtype, and scores in float32 or wider."""
    leaves = x.leaves(dtype)
    captured = {name: each.detach().to(dtype).requires_grad_() for name, each in learned.items()}
    sizes = *x.q.shape[:3], x.k.shape[2]
    grid = [torch.arange(n, device=CPU).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate(sizes)]

    def scored(scores: Tensor) -> Tensor:
        return dense(captured, scores, *grid)

    # the pairs that a function masks depend on no value of the cases
    masked = dense(learned, torch.zeros(sizes, device=CPU), *grid).isneginf()
    counts = (allowed & ~masked).expand(sizes)
    wide = [leaf.to(torch.promote_types(dtype, torch.float32)) for leaf in leaves]
    out, lse = oracle.attention(*wide, counts, scale, scored=lambda scores: scored(scores).masked_fill(~counts, 0.0))
    return oracle.results(out.to(dtype), lse, x, leaves, **captured)


def results(case: Case, x: Inputs, pattern: Pattern, learned: Learned, scale: float = 0.25) -> dict[str, Tensor]:
    """Return out, lse and gradients of the tiled computation."""
    leaves = x.leaves()
    captured = {name: each.clone().requires_grad_() for name, each in learned.items()}
    out, lse, _ = attend(*leaves, pattern, case.score_mod(captured), scale=scale)
    return oracle.results(out, lse, x, leaves, **captured)


def check(case: Case, x: Inputs, pattern: Pattern, learned: Learned) -> dict[str, Tensor]:
    """Check all results against float64: the error is at most twice that of the dense formula in the call's dtype."""
    allowed = rw.plan(pattern, x.q.shape[2], x.k.shape[2], heads=x.q.shape[1], batch=x.q.shape[0]).to_dense()
    got = results(case, x, pattern, learned)
    want = definition(case.dense, x, allowed, learned, torch.float64, 0.25)
    floor = {name: torch.finfo(torch.float64 if x.q.dtype == torch.float64 else torch.float32).eps * 8 for name in got}
    if x.q.dtype in (torch.bfloat16, torch.float16):
        for name in ("out", "dq", "dk", "dv", *learned):
            floor[name] = torch.finfo(x.q.dtype).eps
    assert all(got[name].dtype == x.q.dtype for name in ("out", "dq", "dk", "dv"))
    assert all(got[name].dtype == each.dtype for name, each in learned.items())
    orders = [case.dense, *[case.by_pair] * case.mapped]
    theirs = (oracle.errors(definition(dense, x, allowed, learned, x.q.dtype, 0.25), want) for dense in orders)
    oracle.check_errors(got, want, theirs, floor)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_functions_match_the_definition(name: str, dtype: torch.dtype) -> None:
    """Each kind of function, in grouped heads, with a value dimension of its own and odd lengths."""
    x = Inputs.random(77, 93, batch=2, heads=4, kv_heads=2, dim=16, value_dim=24, dtype=dtype)
    check(CASES[name], x, rw.SlidingWindow(30, 20), drawn(CASES[name], x, dtype))


SPELLINGS: dict[str, Callable[[Tensor, Tensor], ScoreMod]] = {
    "entries": lambda x, y: lambda s, b, h, q, k: s + x[h, q, k] * y[k],
    "entries_of_rows": lambda x, y: lambda s, b, h, q, k: s + x[h][q][k] - x[h - 2][q, k] * y[q],
    "rows_used_twice": lambda x, y: lambda s, b, h, q, k: s + x[h, q][k] * x[h, q].sum(),
    "numbers_and_tensors": lambda x, y: lambda s, b, h, q, k: s + x[-1][q, k] + x[h, -1][k] + x[h, 3, k] * y[0],
    "columns": lambda x, y: lambda s, b, h, q, k: s + (x[h, q] * x[h, :, k]).sum() / 99,
    "sums_of_products": lambda x, y: lambda s, b, h, q, k: s + torch.sum(x[h, q] * x[0, k], -1) * 0.1,
    "a_product_used_twice": lambda x, y: (
        lambda s, b, h, q, k: s + 0.1 * torch.stack([(p := x[h, q] * x[0, k]).sum(), p.abs().sum()]).sum()
    ),
    "a_product_with_itself": lambda x, y: lambda s, b, h, q, k: s + 0.1 * (x[h, q] * x[h, q]).sum() * y[k],
    "matrix_product": lambda x, y: lambda s, b, h, q, k: s + x[h, q] @ x[1, k] * 0.1,
    "slices": lambda x, y: lambda s, b, h, q, k: s + y[1:][q - 1] * y.view(2, -1)[h, k // 2],
    "computed": lambda x, y: lambda s, b, h, q, k: s + x.softmax(2)[h, q, k] * y.cumsum(0)[k] + (y * 2).sum(),
    "select": lambda x, y: lambda s, b, h, q, k: s + y.index_select(0, k[None])[0] * y[q],
    "embedding": lambda x, y: lambda s, b, h, q, k: s + torch.nn.functional.embedding(k, y[:, None])[0],
    "stack": lambda x, y: lambda s, b, h, q, k: torch.stack([s, y[k], y[q]]).logsumexp(0),
    "clamp": lambda x, y: lambda s, b, h, q, k: torch.clamp(s, min=y[k], max=y[q] + 0.2).maximum(y[0]),
    "largest": lambda x, y: lambda s, b, h, q, k: s.max(y[k]) + torch.max(y) * (q > k),
    "masked_fill": lambda x, y: lambda s, b, h, q, k: s.masked_fill(q == k, 1.5) + s.masked_fill(q > k, 2.0),
    "where": lambda x, y: lambda s, b, h, q, k: torch.where(q > k + 3, s, y[q] * (q - k)),
    "activation_in_place": lambda x, y: lambda s, b, h, q, k: torch.nn.functional.relu(s + y[k], True) * 1.0,
    "buckets": lambda x, y: lambda s, b, h, q, k: s + y[torch.log1p((q - k).abs().double()).mul(5).long()],
    "detached": lambda x, y: lambda s, b, h, q, k: s.detach() * y[k] + s * y.detach()[q] + x[0, 0, 0],
    "of_one_head": lambda x, y: lambda s, b, h, q, k: torch.where(h == 1, s * y[k], s) / (1 + b),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_equal_the_mapped_function(name: str) -> None:
    """Each way to read tensors in a function, against torch.vmap over all pairs in float64."""
    n = 40
    x = Inputs.random(n, batch=2, heads=2, dim=8, dtype=torch.float64)
    case = Case(
        lambda b, h, n, m: {"table": (h, n, m), "vector": (m,)},
        # both tensors are used, so that both have gradients
        lambda c: lambda *pair: SPELLINGS[name](c["table"], c["vector"])(*pair) + c["table"].sum() * c["vector"].sum(),
        lambda c, *pair: case.by_pair(c, *pair),
        mapped=False,
    )
    learned = drawn(case, x, torch.float64)
    got = results(case, x, rw.SlidingWindow(9, 3), learned)
    allowed = rw.plan(rw.SlidingWindow(9, 3), n).to_dense()
    want = definition(case.dense, x, allowed, learned, torch.float64, 0.25)
    for key, each in want.items():
        torch.testing.assert_close(got[key], each, rtol=1e-10, atol=1e-10)


def test_batch_elements_differ() -> None:
    """Bounds, documents and lists of each batch element."""
    x = Inputs.random(150, batch=2, heads=4, kv_heads=2, dim=8)
    learned = drawn(CASES["table"], x, torch.float32)
    ids = torch.arange(150, device=CPU) // torch.tensor([[40], [17]], device=CPU)
    by_batch = rw.from_mask_mod(lambda b, h, q, k: (q - k).abs() <= 9 * (b + 1))
    tables = torch.rand(2, 2, 5, 5, device=CPU) < 0.5
    for pattern in (
        rw.KeyPadding(torch.tensor([150, 31], device=CPU)) & rw.Causal(),
        rw.Documents(ids=ids) & rw.Causal(),
        by_batch,
        rw.BlockTable(tables, block_size=32, heads="kv"),
    ):
        check_bound(CASES["table"], x, pattern, learned)


def check_bound(case: Case, x: Inputs, pattern: Pattern, learned: Learned) -> None:
    check(case, x, pattern.bound(x.q.shape[1], x.k.shape[1]), learned)
    got, bound = (results(case, x, each, learned) for each in (pattern, pattern.bound(x.q.shape[1], x.k.shape[1])))
    assert all(torch.equal(got[name], bound[name]) for name in got)


@pytest.mark.parametrize("name", ["table", "products", "branches"])
def test_several_pieces_of_a_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with more key tiles than a chunk holds is computed in pieces."""

    x = Inputs.random(300, heads=2, dim=8)
    monkeypatch.setattr("ringweave.chunks._BUDGET", 2**16)
    monkeypatch.setattr(plan_tiles, "_LONG", 1)
    check(CASES[name], x, rw.Causal(), drawn(CASES[name], x, torch.float32))


def test_captured_tensors_of_every_kind() -> None:
    """Non-leaf, expanded and transposed tensors, one leaf twice, and a tensor beside one that was computed from it."""
    x = Inputs.random(40, heads=2, dim=8, dtype=torch.float64)
    leaf = torch.rand(2, 1, dtype=torch.float64).requires_grad_()
    doubled, wide, turned = leaf * 2, leaf.expand(2, 40), leaf.exp().t()

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * leaf[h, 0] + doubled[h, 0] - wide[h, k] * turned[0, h] + leaf[h].sum() * (q - k)

    out, _, _ = attend(x.q, x.k, x.v, rw.Causal(), score_mod, scale=0.5)
    (got,) = torch.autograd.grad((out * x.dout).sum(), leaf)
    w = leaf.detach().requires_grad_()
    a = w[:, :, None]
    far = torch.arange(40, device=CPU)[:, None] - torch.arange(40, device=CPU)
    want, _ = oracle.attention(
        x.q,
        x.k,
        x.v,
        torch.ones(40, 40, device=CPU).tril(),
        0.5,
        scored=lambda s: s * a + 2 * a - a * a.exp() + a * far,
    )
    (expected,) = torch.autograd.grad((want * x.dout).sum(), w)
    torch.testing.assert_close(got, expected)


def test_empty_rows_and_empty_calls() -> None:
    """Rows without keys give 0, -inf and no gradients, and so do calls without tokens, batch elements or heads."""
    x = Inputs.random(40, heads=2, dim=8)
    leaves, slopes = x.leaves(), torch.ones(2, requires_grad=True, device=CPU)
    for pattern, score_mod in (
        (~rw.Full(), lambda s, b, h, q, k: s * slopes[h]),
        (rw.Full(), lambda s, b, h, q, k: torch.where(s * slopes[h] > 99, s, -torch.inf)),
    ):
        out, lse, largest = attend(*leaves, pattern, score_mod, scale=1.0)
        grads = torch.autograd.grad(
            (out.sum(), lse.masked_fill(lse.isneginf(), 0).sum()), [*leaves], [torch.ones(()), torch.ones(())]
        )
        assert not out.any()
        assert lse.isneginf().all()
        assert largest.isneginf().all()
        assert all(not grad.any() for grad in grads)
    for batch, heads, nq, nk in ((0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)):
        q = torch.randn(batch, heads, nq, 8, requires_grad=True, device=CPU)
        k = torch.randn(batch, heads, nk, 8, requires_grad=True, device=CPU)
        out, lse, largest = attend(q, k, k, rw.Full(), lambda s, b, h, q, k: s * slopes[0], scale=1.0)
        assert out.shape == q.shape
        assert lse.shape == largest.shape == q.shape[:3]
        assert not out.any()
        assert lse.isneginf().all()
        assert all(
            not grad.any() for grad in torch.autograd.grad(out.sum() + lse.nan_to_num(0, 0, 0).sum(), [q, k, slopes])
        )


def test_nan_at_masked_pairs_reaches_nothing() -> None:
    """NaN in keys and values that are never attended, and from functions at masked pairs."""
    x = Inputs.random(100, heads=2, dim=8)
    slopes, rows = torch.rand(2, device=CPU), torch.rand(100, device=CPU)

    def call(hole: bool, bad: float) -> list[Tensor]:
        leaves = x.leaves()
        a, r = slopes.clone().requires_grad_(), rows.clone().requires_grad_()
        k, v = (each.clone() for each in leaves[1:])
        k[:, :, 60:], v[:, :, 60:] = bad, bad

        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            far = (q - k).to(s.dtype)
            far = torch.sqrt(far) if hole else torch.sqrt(far.clamp(min=0) + 0.0)
            return torch.tanh(s) - a[h] * far * r[k] * (1 + s * 0)

        allowed = rw.Causal() & rw.KeyPadding(60)
        out, lse, _ = attend(leaves[0], k, v, allowed, score_mod, scale=1.0)
        return [out, lse, *torch.autograd.grad((out * x.dout).sum() + lse.sum(), [*leaves, a, r])]

    # the distance of a token to itself is 0, where the derivative of the root is infinite
    for got, want in zip(call(True, torch.nan), call(False, 0.0), strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_function_may_be_infinite_beyond_the_last_query(mapped: bool) -> None:
    """Tiles have queries of zeros there, with scores of 0; keys and captured tensors have no gradient of them."""
    x = Inputs.random(70, 77, dim=8, dtype=torch.float64)
    weight = torch.rand(x.q.shape[1], dtype=torch.float64, device=CPU) + 0.5

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if mapped:
            with torch.no_grad():
                q.clone()
        return learned[h] / (s * 9)

    runs = []
    for dense in (False, True):
        leaves, learned = x.leaves(), weight.clone().requires_grad_()
        if dense:
            scores = learned[:, None, None] / (leaves[0] @ leaves[1].mT / 4 * 9)
            out = scores.softmax(-1) @ leaves[2]
        else:
            out = attend(*leaves, rw.Full(), score_mod, scale=0.25)[0]
        runs.append([out, *torch.autograd.grad(out, [*leaves, learned], x.dout)])
    for got, want in zip(*runs, strict=True):
        torch.testing.assert_close(got, want)


def test_minus_infinity_is_a_masked_pair() -> None:
    """A function that masks gives the results of a pattern, with NaN in the keys and values that it masks."""
    x = Inputs.random(150, heads=2, dim=8)
    x.k[:, :, 120:], x.v[:, :, 120:] = torch.nan, torch.nan
    leaves = x.leaves()

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where((k < 120) & (q >= k), torch.tanh(s), -torch.inf)

    out, lse, _ = attend(*leaves, rw.Full(), score_mod, scale=1.0)
    want, want_lse, _ = attend(
        *leaves, rw.Causal() & rw.KeyPadding(120), lambda s, b, h, q, k: torch.tanh(s), scale=1.0
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    for got, expected in zip(
        torch.autograd.grad((out * x.dout).sum(), leaves),
        torch.autograd.grad((want * x.dout).sum(), leaves),
        strict=True,
    ):
        assert expected.isfinite().all()
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("powers", POWERS)
@pytest.mark.parametrize("name", ["table", "products"])
def test_sums_of_gradients_may_overflow_where_gradients_do_not(name: str, powers: tuple[int, int, int]) -> None:
    """Powers of two move between queries, keys and scale without a change of bits, also where unscaled sums overflow."""
    of_q, of_k, of_scale = powers
    x = Inputs.random(70, batch=2, heads=4, kv_heads=2)
    learned = drawn(CASES[name], x, torch.float32)
    plain = results(CASES[name], with_powers(x, 0, 0), rw.Causal(), learned, scale=0.3)
    got = results(CASES[name], with_powers(x, of_q, of_k), rw.Causal(), learned, scale=0.3 * 2.0**of_scale)
    check_powers(got, plain, of_q, of_k)
    for each in got.keys() - {"out", "lse", "dq", "dk", "dv"}:
        assert torch.equal(got[each], plain[each])


def test_memory_is_bounded_by_tiles() -> None:
    """At 4,096 tokens no operator gives a tensor of a quarter of a byte for each pair, for functions of both kinds.

    A thread has a chunk, which is about ten such tensors. Resident memory is no measure of it: the C library keeps what
    each thread has freed.
    """
    n = 4096
    leaves = [torch.randn(1, 1, n, 16, requires_grad=True, device=CPU) for _ in range(3)]
    rows = torch.randn(n, 16, requires_grad=True, device=CPU)

    def products(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + (rows[q] * rows[k]).sum()

    def sine(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s.sin() * rows[k, 0]

    # many rows of tiles have the same length, and would be in one chunk without a budget
    for pattern, score_mod in ((rw.Full(), sine), (rw.SlidingWindow(100), products)):
        with Largest() as seen:
            out, _, _ = attend(*leaves, pattern, score_mod, scale=0.1)
            torch.autograd.grad(out.sum(), [*leaves, rows], allow_unused=True)
        # scores of a row of tiles are seen
        assert 4 * 16 * n <= seen.numel < n * n / 4


def tensors_in(x: Any, seen: set[int]) -> list[Tensor]:
    """Return the tensors that an object keeps alive by its elements and attributes, graphs of autograd included."""
    if id(x) in seen or isinstance(x, type):
        return []
    seen.add(id(x))
    if isinstance(x, Tensor):
        return [x, *tensors_in(x.grad_fn, seen)]
    if isinstance(x, (tuple, list)):
        inside = list(x)
    elif isinstance(x, torch.autograd.graph.Node):
        saved = [name for name in dir(x) if name.startswith("_saved_")]
        inside = [node for node, _ in x.next_functions]
        with contextlib.suppress(RuntimeError):
            # it raises where the saved tensors are freed
            inside += [getattr(x, name) for name in saved]
    else:
        inside = list(getattr(x, "__dict__", {}).values())
    return [tensor for each in inside for tensor in tensors_in(each, seen)]


@pytest.mark.parametrize("pattern", [rw.Full(), rw.Causal()], ids=repr)
def test_waiting_gradients_hold_no_scores(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the gradients of a chunk wait for their turn, nothing of the size of its scores waits with them."""

    x, rows, counted = Inputs.random(300, heads=2, dim=8), torch.randn(300, requires_grad=True, device=CPU), []
    each = tile_attention._each

    def looked_at(compute: Any, cut: Any, scorer: Any) -> Iterator[Any]:
        for batch, shares in each(compute, cut, scorer):
            pairs = len(batch.line) * cut.plan.q_tile * batch.key.shape[1] * cut.plan.kv_tile
            counted.append(pairs)
            # the results of forward are a tuple without a name
            assert not isinstance(shares, tile_attention.Shares) or all(
                x.numel() < pairs for x in tensors_in(shares, set())
            )
            yield batch, shares
            del shares

    monkeypatch.setattr(tile_attention, "_each", looked_at)
    out, _, _ = attend(*x.leaves(), pattern, lambda s, b, h, q, k: s.sin() * rows[k], scale=1.0)
    torch.autograd.grad(out.sum(), rows)
    assert counted


@pytest.mark.parametrize("name", ["table", "products", "distances"])
def test_results_repeat(name: str) -> None:
    """Two runs have equal bits, and so have two backward passes of one run."""
    x = Inputs.random(300, batch=2, heads=4, kv_heads=2, dim=8)
    learned = drawn(CASES[name], x, torch.float32)
    one, two = (results(CASES[name], x, rw.Causal(), learned) for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)
    leaves = x.leaves()
    out, _, _ = attend(*leaves, rw.Causal(), CASES[name].score_mod(learned), scale=1.0)
    twice = [torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2)]
    assert all(map(torch.equal, *twice))


def test_a_changed_tensor_raises() -> None:
    """A tensor that is written between forward and backward, with a gradient or without, raises as in torch."""
    x = Inputs.random(40, heads=2, dim=8)
    for table in (torch.rand(40, device=CPU), torch.rand(40, device=CPU).requires_grad_()):
        q, k, v = x.leaves()
        out, _, _ = attend(q, k, v, rw.Causal(), lambda s, b, h, q, k, t=table: s + t[k], scale=1.0)
        with torch.no_grad():
            table.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("opaque", [False, True])
def test_values_that_change_before_backward(opaque: bool) -> None:
    """A number or a tensor of an object is bound again: a graph has the values of the call; other functions raise."""
    x = Inputs.random(40, heads=2, dim=8)

    class Holder:
        factor, table = 2.0, torch.rand(40, device=CPU)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, of: Holder) -> Tensor:
        with torch.no_grad() if opaque else contextlib.nullcontext():
            kept = s * of.factor
        return s * of.factor + of.table[k] + 0 * kept

    for name, value in (("factor", 3.0), ("table", torch.rand(40, device=CPU))):
        holder, leaves = Holder(), x.leaves()
        out, _, _ = attend(*leaves, rw.Causal(), functools.partial(score_mod, of=holder), scale=1.0)
        want = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        setattr(holder, name, value)
        if opaque:
            with pytest.raises(UnsupportedError, match="other values in backward"):
                torch.autograd.grad(out.sum(), leaves)
        else:
            assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), want))


def test_impure_functions_raise() -> None:
    """Counters, writes to captured tensors, and results that are no score."""
    x, count, buffer = Inputs.random(40, heads=2, dim=8), [0], torch.zeros(40, device=CPU)

    def counting(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        count[0] += 1
        return s * count[0]

    def writing(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        buffer.add_(1)
        return s + buffer[k]

    for score_mod, error, match in (
        (counting, UnsupportedError, "another result"),
        (writing, UnsupportedError, "writes to a captured tensor with add_"),
        (lambda s, b, h, q, k: 1.0, ShapeError, "0-dim"),
        (lambda s, b, h, q, k: s[None], ShapeError, "0-dim"),
        (lambda s, b, h, q, k: q > k, ShapeError, "0-dim"),
        (lambda s, b, h, q, k: s + buffer[q, k], IndexError, "too many indices"),
    ):
        with pytest.raises(error, match=match):
            attend(x.q, x.k, x.v, rw.Causal(), score_mod, scale=1.0)
    assert not buffer.any()


@pytest.mark.parametrize(
    ("said", "score_mod"),
    [
        ("draws random numbers", lambda s, b, h, q, k: s + torch.rand((), device=CPU)),
        ("draws random numbers", lambda s, b, h, q, k: s + torch.rand((), generator=torch.Generator(CPU))),
        ("draws random numbers", lambda s, b, h, q, k: torch.nn.functional.dropout(s)),
        ("draws random numbers", lambda s, b, h, q, k: s * torch.bernoulli(torch.sigmoid(s))),
        ("as a number", lambda s, b, h, q, k: s if s > 0 else -s),
        ("as a number", lambda s, b, h, q, k: s * 2 if q > 3 else s),
        ("as a number", lambda s, b, h, q, k: s * int(q)),
        ("as a number", lambda s, b, h, q, k: s * [1.0, 2.0][h]),
        ("as a number", lambda s, b, h, q, k: s * k.item()),
        ("cannot map", lambda s, b, h, q, k: torch.abs(s, out=torch.empty_like(s))),
    ],
)
def test_functions_that_torch_cannot_map_raise(said: str, score_mod: ScoreMod) -> None:
    """The error is ours, with a remedy, and torch's is its cause."""
    x = Inputs.random(40, heads=2, dim=8)
    with pytest.raises(UnsupportedError, match=f"^score_mod: got .*{said}.*; wanted .*[.]$") as error:
        attend(x.q, x.k, x.v, rw.Causal(), score_mod, scale=1.0)
    assert type(error.value.__cause__) is RuntimeError
    assert "report" not in str(error.value)


class Captured:
    """Tensors of every kind that a function may write to by mistake, and an array."""

    def __init__(self) -> None:
        self.plain, self.parameter = torch.ones(3, device=CPU), torch.nn.Parameter(torch.ones(3, device=CPU))
        self.parameter.grad = torch.ones(3, device=CPU)
        self.array = np.ones(3, np.float32)

    def sum(self) -> float:
        assert self.parameter.grad is not None
        return float(self.plain.sum() + self.parameter.data.sum() + self.parameter.grad.sum() + self.array.sum())


WRITES: dict[str, Callable[[Captured], object]] = {
    "method": lambda of: of.plain.add_(1),
    "function": lambda of: torch.square_(of.plain.mul_(2)),
    "operator": lambda of: operator.iadd(of.plain, 1),
    "item": lambda of: operator.setitem(of.plain, 0, 5.0),
    "view": lambda of: of.plain[1:].add_(1),
    "row": lambda of: of.plain.unbind()[0].add_(1),
    "data": lambda of: of.parameter.data.add_(1),
    "detached": lambda of: of.parameter.detach().view(3, 1).add_(1),
    "gradient": lambda of: of.parameter.grad.add_(1),  # type: ignore[union-attr]
    "gradient set": lambda of: setattr(of.parameter, "grad", torch.zeros(3)),
    "gradient's view": lambda of: of.parameter.grad[:2].zero_(),  # type: ignore[index]
    "array": lambda of: torch.from_numpy(of.array).add_(1),
    "out=": lambda of: torch.add(of.plain, 1, out=of.plain),
    "inplace=": lambda of: torch.nn.functional.relu(of.plain, inplace=True),
    "overload": lambda of: torch.ops.aten.add_.Scalar(of.plain, 1),
    "list": lambda of: torch._foreach_add_([of.plain], 1),
}


def suppressed(write: Callable[[Captured], object], of: Captured) -> None:
    with contextlib.suppress(Exception):
        write(of)


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("formula", ["term", "general"])
@pytest.mark.parametrize("name", WRITES)
def test_a_captured_tensor_is_never_written_to(name: str, formula: str, caught: bool) -> None:
    """A write is refused before it happens, also by explain, and where the function catches the refusal."""
    x, of = Inputs.random(40, heads=2, dim=8), Captured()
    before = of.sum()

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        suppressed(WRITES[name], of) if caught else WRITES[name](of)
        return s + 0.1 * (q - k) if formula == "term" else s.relu()

    for refuse in (explain, flex_attention):
        with pytest.raises(UnsupportedError, match="writes to a captured tensor"):
            refuse(x.q, x.k, x.v, score_mod)
        assert of.sum() == before


def test_a_local_tensor_is_written_at_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that the function makes has the value of the place in the function, in each batch of tiles."""

    monkeypatch.setattr("ringweave.chunks._BUDGET", 2**14)
    x, weight = Inputs.random(300, heads=2, dim=8), torch.rand(2, requires_grad=True, device=CPU)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        local = torch.zeros(2, device=CPU)
        s = s.sin() + local[h]
        local.add_(weight.detach())
        s = s * local[h] * weight[h]
        local[1] = 5
        return s + local[h]

    def plain(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s.sin() * weight.detach()[h] * weight[h] + torch.stack([weight[0].detach(), weight[0] * 0 + 5])[h]

    results = []
    for each in (score_mod, plain):
        leaves = x.leaves()
        out, _, _ = attend(*leaves, rw.Causal(), each, scale=1.0)
        results.append([out, *torch.autograd.grad((out * x.dout).sum(), [*leaves, weight])])
    torch.testing.assert_close(*results)


def test_an_error_that_the_function_catches() -> None:
    """An operation that fails, with an error that the function catches, is not confused with the next one."""
    x, table = Inputs.random(40, heads=2, dim=8), torch.rand(2, 40, device=CPU)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with contextlib.suppress(IndexError):
            table[h, q, k]
        doubled = table * 2
        return s.sin() + doubled[h, k]

    got = attend(x.q, x.k, x.v, rw.Causal(), score_mod, scale=1.0)
    want = attend(x.q, x.k, x.v, rw.Causal(), lambda s, b, h, q, k: s.sin() + 2 * table[h, k], scale=1.0)
    assert all(map(torch.equal, got, want))


ROWS: dict[str, Callable[[Tensor], ScoreMod]] = {
    "ellipsis before": lambda t: lambda s, b, h, q, k: s + t[h][..., q, k],
    "ellipsis of one": lambda t: lambda s, b, h, q, k: s + t[h, q][..., k],
    "ellipsis after": lambda t: lambda s, b, h, q, k: s + t[h][q][k, ...],
    "ellipsis between": lambda t: lambda s, b, h, q, k: s + t[h][q, ..., k],
    "ellipsis first": lambda t: lambda s, b, h, q, k: s + t[..., q, k][h],
    "empty slice": lambda t: lambda s, b, h, q, k: s + t[h][:, k][q],
    "new dimension": lambda t: lambda s, b, h, q, k: s + t[h][None][0, q, k],
    "bool": lambda t: lambda s, b, h, q, k: s + t[h][True, q, k].sum(),
    "numbers": lambda t: lambda s, b, h, q, k: s + t[h][q][k] + 0 * t[h][np.int64(1)][k],
    "twice": lambda t: lambda s, b, h, q, k: s + (r := t[h])[q, k] + 0 * r[..., 0, k],
    "method": lambda t: lambda s, b, h, q, k: s + t[h].select(0, 0)[k] * 0 + t[h][q][k],
    "of a sum": lambda t: lambda s, b, h, q, k: s + t[h][q].add(0)[..., k],
}


@pytest.mark.parametrize("of_pairs", [False, True])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_tensors_in_any_spelling(name: str, learns: bool, of_pairs: bool) -> None:
    """A row that is only indexed further is never made, whatever the index; each has the result of the whole index."""
    x, table = Inputs.random(40, heads=2, dim=8), torch.randn(2, 50, 50, device=CPU).requires_grad_(learns)
    more = (lambda s: torch.stack([s, s]).mean()) if of_pairs else (lambda s: s.sin())
    results = []
    for read in (ROWS[name], lambda t: lambda s, b, h, q, k: s + t[h, q, k]):
        leaves = x.leaves()
        out, lse, _ = attend(*leaves, rw.Causal(), lambda s, *at, f=read(table): f(more(s), *at), scale=1.0)
        found = torch.autograd.grad((out * x.dout).sum(), [*leaves, *[table] * learns])
        results.append([out, lse, *found])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", ["no_grad", "enable_grad", "set_grad_enabled", "decorated", "detach"])
def test_gradients_that_the_function_disables(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the part without gradients has none, in each batch of tiles; a call without gradients is the same."""
    monkeypatch.setattr("ringweave.chunks._BUDGET", 2**14)
    x = Inputs.random(300, heads=2, dim=8)
    gate, slope = (torch.rand(2, requires_grad=True, device=CPU) for _ in range(2))

    def kept(s: Tensor) -> Tensor:
        if kind == "no_grad":
            with torch.no_grad():
                return s * gate.sigmoid().sum()
        if kind == "enable_grad":
            with torch.no_grad():
                inside = s * gate.sigmoid().sum()
                with torch.enable_grad():
                    return inside * (slope * 0 + 1).prod()
        if kind == "set_grad_enabled":
            before = torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            inside = s * gate.sigmoid().sum()
            torch.set_grad_enabled(before)
            return inside
        if kind == "decorated":
            return torch.no_grad()(lambda x: x * gate.sigmoid().sum())(s)  # type: ignore[no-any-return]
        return (s * gate.sigmoid().sum()).detach()

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return kept(s) * slope[h] + s * 0.5

    def plain(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s.detach() * gate.detach().sigmoid().sum() * slope[h] + s * 0.5

    results = []
    for each in (score_mod, plain):
        leaves = x.leaves()
        out, lse, _ = attend(*leaves, rw.Causal(), each, scale=1.0)
        with torch.no_grad():
            without = attend(*leaves, rw.Causal(), each, scale=1.0)
        assert not any(result.requires_grad for result in without)
        results.append([out, lse, *without, *torch.autograd.grad((out * x.dout).sum(), [*leaves, slope])])
    torch.testing.assert_close(*results)


NUMBERS: dict[str, ScoreMod] = {
    "half": lambda s, b, h, q, k: (s.half() * torch.tensor(1e5)).float() * 1e-4,
    "half, by a function": lambda s, b, h, q, k: torch.add(s.half() * 0, torch.tensor(1e5)).float() * 1e-5 + s,
    "bfloat16": lambda s, b, h, q, k: s + (k.bfloat16() + torch.tensor(0.123)).float(),
    "uint8": lambda s, b, h, q, k: s + 0.01 * ((k % 256).to(torch.uint8) + torch.tensor(300)),
    "int8": lambda s, b, h, q, k: s + 0.01 * (torch.tensor(1000) - (q % 100).to(torch.int8)),
    "float64": lambda s, b, h, q, k: s + (q * 0.1 + torch.tensor(1e-9, dtype=torch.float64) - q * 0.1).float() * 1e9,
    "clamp": lambda s, b, h, q, k: s + torch.clamp((k % 100).to(torch.int8), max=torch.tensor(300)) * 0.01,
    "maximum": lambda s, b, h, q, k: s + torch.maximum((k % 100).to(torch.int8), torch.tensor(300)) * 0.01,
    "power": lambda s, b, h, q, k: s + 1e-4 * (k % 20).to(torch.int8) ** torch.tensor(2),
    "division": lambda s, b, h, q, k: s + (torch.tensor(1e5) // (k + 1).half()).float() * 1e-4,
    "comparison": lambda s, b, h, q, k: s + ((k % 100).to(torch.int8) < torch.tensor(200)) * 0.5,
    "named": lambda s, b, h, q, k: s + torch.sub(other=torch.tensor(300), input=(k % 9).to(torch.uint8)) * 0.01,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_in_tensors_are_promoted_as_for_one_pair(name: str) -> None:
    """A captured 0-dim tensor promotes a narrower value of a pair, which has no dimensions either."""
    x, score_mod = Inputs.random(300, heads=2, dim=8), NUMBERS[name]
    got = attend(x.q, x.k, x.v, rw.Full(), lambda s, *at: score_mod(s, *at) + s.sin() * 0, scale=1.0)
    with torch.no_grad():
        want = torch_flex(x.q, x.k, x.v, score_mod, scale=1.0, return_lse=True)
    torch.testing.assert_close(got.out, want[0])
    torch.testing.assert_close(got.lse, want[1])


def test_a_captured_tensor_may_be_the_result_or_an_input() -> None:
    """A function that returns a captured number, and one that captures the queries."""
    x = Inputs.random(40, heads=2, dim=8, dtype=torch.float64)
    number = torch.ones((), requires_grad=True, device=CPU)
    q, k, v = x.leaves()
    out, lse, _ = attend(q, k, v, rw.Causal(), lambda s, b, h, q, k: number, scale=1.0)
    torch.testing.assert_close(torch.autograd.grad(lse.sum(), number)[0], torch.tensor(80.0, device=CPU))
    torch.testing.assert_close(out[:, :, -1], v.mean(2))
    of = q
    out, _, _ = attend(q, k, v, rw.Causal(), lambda s, b, h, i, j: s + (of[b, h, i] * of[b, h, j]).sum(), scale=1.0)
    (got,) = torch.autograd.grad((out * x.dout).sum(), q)
    want, _ = oracle.attention(q, k, v, torch.ones(40, 40, device=CPU).tril(), 1.0, scored=lambda s: s + q @ q.mT)
    torch.testing.assert_close(got, torch.autograd.grad((want * x.dout).sum(), q)[0])


def test_code_that_no_mode_sees() -> None:
    """TorchScript is mapped, and a tensor with a gradient inside it gets its gradient."""
    x = Inputs.random(40, heads=2, dim=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(
            lambda s, b, h, q, k: s.reshape(1).softmax(0)[0] * 0 + torch.tanh(s),
            tuple(torch.zeros((), dtype=d, device=CPU) for d in (torch.float32, *(torch.int64,) * 4)),
        )
        layer = torch.jit.trace(torch.nn.Linear(1, 1, device=CPU), torch.zeros(1, device=CPU))
    got = attend(x.q, x.k, x.v, rw.Causal(), scripted, scale=1.0)
    want = attend(x.q, x.k, x.v, rw.Causal(), lambda s, b, h, q, k: torch.tanh(s), scale=1.0)
    assert all(map(torch.equal, got, want))
    q, k, v = x.leaves()
    out, _, _ = attend(q, k, v, rw.Causal(), lambda s, b, h, q, k: layer(s[None])[0], scale=1.0)
    weight, bias = layer.parameters()
    scripted_grads = torch.autograd.grad((out * x.dout).sum(), [q, k, v, weight, bias])
    out, _, _ = attend(q, k, v, rw.Causal(), lambda s, b, h, q, k: s * weight[0, 0] + bias[0], scale=1.0)
    torch.testing.assert_close(scripted_grads, torch.autograd.grad((out * x.dout).sum(), [q, k, v, weight, bias]))


def test_a_table_that_the_first_call_makes() -> None:
    """A function that makes a table from a parameter when it is first called, and keeps it."""
    x, kept = Inputs.random(40, heads=2, dim=8), []
    weight = torch.rand(40, requires_grad=True, device=CPU)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if not kept:
            kept.append(weight.exp())
        return s + kept[0][k]

    grads = []
    for each in (score_mod, lambda s, b, h, q, k: s + weight.exp()[k]):
        out, _, _ = attend(x.q, x.k, x.v, rw.Causal(), each, scale=1.0)
        grads += torch.autograd.grad((out * x.dout).sum(), weight)
    torch.testing.assert_close(*grads)


def test_compiled_functions_run_as_they_are() -> None:
    """A compiled function and a compiled module, as FlexAttention takes them."""
    x, table = Inputs.random(40, heads=2, dim=8), torch.rand(2, 2, device=CPU)
    function, module = lambda s, b, h, q, k: s.tanh() * (h + 1), Biased(table[0, 0], table)
    for each in (function, module):
        got, want = (
            attend(x.q, x.k, x.v, rw.Causal(), fn, scale=1.0) for fn in (torch.compile(each, backend="eager"), each)
        )
        assert all(map(torch.equal, got, want))


def test_fill_with_values_of_tensors() -> None:
    """masked_fill with a captured value, which torch maps slowly, and with values of a pair, which it refuses."""
    x, values = Inputs.random(40, heads=2, dim=8), torch.rand(40, requires_grad=True, device=CPU)
    results = []
    for score_mod in (
        lambda s, b, h, q, k: s.masked_fill(q > k, values[0]).masked_fill(q == k, values[q]),
        lambda s, b, h, q, k: torch.where(q == k, values[q], torch.where(q > k, values[0], s)),
    ):
        leaves = x.leaves()
        out, _, _ = attend(*leaves, rw.Causal(), score_mod, scale=1.0)
        results.append([out, *torch.autograd.grad(out.sum(), [*leaves, values])])
    assert all(map(torch.equal, *results))


def test_custom_functions_are_mapped() -> None:
    """An autograd.Function that is not elementwise."""
    x, number = Inputs.random(40, heads=2, dim=8), torch.ones((), requires_grad=True, device=CPU)
    out, lse, _ = attend(*x.leaves(), rw.Causal(), lambda s, b, h, q, k: Twice.apply(s * number), scale=1.0)
    want, want_lse, _ = attend(*x.leaves(), rw.Causal(), lambda s, b, h, q, k: 2 * (s * number), scale=1.0)
    assert torch.equal(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), number) for each in (lse, want_lse)))


class Twice(torch.autograd.Function):
    """Twice its argument, which must be one number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        assert x.ndim == 0
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_objects_that_are_new_in_each_evaluation() -> None:
    """Numbers of numpy, arrays, local tensors that are written, and sizes."""
    x, array = Inputs.random(40, heads=2, dim=8), np.arange(40, dtype=np.float32)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        local = torch.zeros(2, device=CPU)
        local[1] = 1.5
        local = local * np.float64(1)
        return s + local.expand(torch.Size([2]))[1] * torch.from_numpy(array)[k]

    q, k, v = x.leaves()
    out, _, _ = attend(q, k, v, rw.Causal(), score_mod, scale=1.0)
    want, _, _ = attend(q, k, v, rw.Causal(), lambda s, b, h, q, k: s + 1.5 * k, scale=1.0)
    torch.testing.assert_close(out, want)
    out.sum().backward()


def test_hooks_on_saved_tensors() -> None:
    x, table = Inputs.random(60, heads=2, dim=8), torch.rand(60, requires_grad=True, device=CPU)
    leaves, grads = x.leaves(), []
    for hook in (lambda x: x, lambda x: x.clone()):
        with torch.autograd.graph.saved_tensors_hooks(hook, hook):
            out = attend(*leaves, rw.Causal(), lambda s, b, h, q, k: s + table[k], scale=1.0).out
        grads.append(torch.autograd.grad((out * x.dout).sum(), [*leaves, table]))
    assert all(map(torch.equal, *grads))


def test_indices_are_whole_numbers_and_functions_see_one_pair() -> None:
    """Values have no dimensions and indices are int64, so that a function may look at them."""
    x, seen = Inputs.random(40, heads=2, dim=8, dtype=torch.bfloat16), []

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen.append((s.dtype, *(x.dtype for x in (b, h, q, k)), *(x.shape for x in (s, b, h, q, k))))
        return s

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(x.q, x.k, x.v, rw.Causal(), score_mod, scale=1.0)
    assert set(seen) == {(torch.float32, *(torch.int64,) * 4, *(torch.Size(),) * 5)}
