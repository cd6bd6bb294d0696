"""The backend ``gather``: lists of chosen keys in PyTorch operations, against the definition."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw

from ..oracle import Inputs
from ..test_conformance import POWERS, check_powers, conforms, run, with_powers

N, HEADS, KV_HEADS = 70, 8, 2
#: Leading sides of the indices, and the heads that they are for.
LEADS = [((), "query"), ((1,), "query"), ((2,), "kv"), ((8,), "query"), ((2, 1), "query"), ((2, 2), "kv"), ((2, 8), "query")]  # fmt: skip
RELATIONS = {
    "alone": rw.Full(),
    "causal": rw.Causal(),
    "padded": rw.Causal() & rw.KeyPadding(torch.tensor([20, 70])),
    "documents": rw.Documents([30, 40]),
    "strided": rw.Strided(3),
    "function": rw.from_mask_mod(lambda b, h, q, k: (q + 2 * k) % 5 != 0),
    "function of the batch": rw.from_mask_mod(lambda b, h, q, k: (q + 2 * k + b) % 5 != 0) & rw.Causal(),
}


def lists(lead: tuple[int, ...], size: int, heads: str, seed: int = 0) -> rw.Selected:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, -(-N // size), (*lead, N, 6), generator=generator)
    indices[..., 3, :] = -1
    return rw.Selected(indices, size, heads=heads)


def check(x: Inputs, pattern: rw.Pattern) -> None:
    conforms(x, pattern.bound(HEADS, KV_HEADS), "gather")


@pytest.mark.parametrize("relation", list(RELATIONS))
@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize(("lead", "heads"), LEADS)
def test_out_lse_and_gradients(lead: tuple[int, ...], heads: str, size: int, relation: str, poisoned: None) -> None:
    """Every kind of list, filtered by every kind of relation, errs at most twice as much as torch's own attention."""
    x = Inputs.random(N, batch=2, heads=HEADS, kv_heads=KV_HEADS, value_dim=24)
    check(x, lists(lead, size, heads) & RELATIONS[relation])


@pytest.mark.parametrize("lead", [(), (3, 1), (3, HEADS)])
@pytest.mark.parametrize(
    "relation",
    [
        rw.KeyPadding(torch.tensor([20, 70, 20])) & rw.Causal(),
        rw.Documents(ids=(torch.arange(N) >= torch.tensor([[30], [50], [30]])).int()),
    ],
    ids=["padded", "documents"],
)
def test_some_batch_elements_have_equal_relations(relation: rw.Pattern, lead: tuple[int, ...]) -> None:
    x = Inputs.random(N, batch=3, heads=HEADS, kv_heads=KV_HEADS)
    check(x, lists(lead, 5, "query") & relation)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    """Sums of 16-bit inputs are float32, and float64 stays float64."""
    check(Inputs.random(N, batch=2, heads=HEADS, kv_heads=KV_HEADS, dtype=dtype), lists((2,), 1, "kv") & rw.Causal())


@pytest.mark.parametrize("powers", POWERS)
def test_sums_of_gradients_may_overflow_where_gradients_do_not(powers: tuple[int, int, int]) -> None:
    """Powers of two move between queries, keys and scale without a change of bits, also where unscaled sums overflow."""
    of_q, of_k, of_scale = powers
    x, pattern = Inputs.random(N, batch=2, heads=HEADS, kv_heads=KV_HEADS), lists((2,), 1, "kv") & rw.Causal()
    plain = run(with_powers(x, 0, 0), pattern, "gather", scale=0.3)
    got = run(with_powers(x, of_q, of_k), pattern, "gather", scale=0.3 * 2.0**of_scale)
    check_powers(got, plain, of_q, of_k)


def test_a_budget_of_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a single query give the result of one chunk."""
    x = Inputs.random(N, batch=2, heads=HEADS, kv_heads=KV_HEADS)
    pattern = lists((), 16, "query") & rw.Causal()
    whole = rw.attention(x.q, x.k, x.v, pattern, backend="gather")
    monkeypatch.setattr("ringweave.chunks._BUDGET", 1)
    torch.testing.assert_close(rw.attention(x.q, x.k, x.v, pattern, backend="gather"), whole)
    check(x, pattern)


@pytest.mark.parametrize(("lead", "heads"), LEADS)
def test_terms_that_learn(lead: tuple[int, ...], heads: str) -> None:
    """Tables of terms get the gradients of the reference, through dropout too, whichever heads share a list."""
    x = Inputs.random(N, batch=2, heads=HEADS, kv_heads=KV_HEADS)
    tables = [torch.randn(HEADS, 21, requires_grad=True), torch.randn(2, HEADS, N, N, requires_grad=True)]
    found = []
    for backend in ("reference", "gather"):
        torch.manual_seed(3)  # of dropout
        leaves, terms = x.leaves(), [rw.DistanceBias(tables[0]), rw.Softcap(4.0), rw.Bias(tables[1])]
        pattern = lists(lead, 5, heads) & rw.Causal()
        out, lse = rw.attention_with_lse(*leaves, pattern, terms=terms, dropout=0.2, backend=backend)
        loss = (out * x.dout).sum() + (lse.masked_fill(lse.isneginf(), 0.0) * x.dlse).sum()
        found.append([out, lse, *torch.autograd.grad(loss, [*leaves, *tables])])
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_a_step_at_the_end_of_a_cache() -> None:
    """A single row belongs to the only query, at any position."""
    x = Inputs.random(1, N, batch=2, heads=HEADS, kv_heads=KV_HEADS)
    pattern = rw.Selected(torch.tensor([[3, 69, 17, -1, 3]])) & rw.SlidingWindow(60, 0)
    conforms(x, pattern, "gather", q_offset=N - 1)
    at_the_end = rw.attention(x.q, x.k, x.v, pattern, q_offset="end", backend="gather")
    assert torch.equal(at_the_end, rw.attention(x.q, x.k, x.v, pattern, q_offset=N - 1, backend="gather"))


def test_auto_takes_it_where_the_native_kernel_does_not_run() -> None:
    """On another device, or for float64, auto gathers the listed keys instead of whole tiles."""
    facts = rw.explain(lists((), 1, "query") & rw.Causal(), N, dtype=torch.float64, as_dict=True)
    assert facts["backend"]["chosen"] == [{"backend": "gather", "branches": 1}]


def test_queries_of_nan_reach_no_key_that_they_do_not_attend() -> None:
    """A NaN in a query reaches the gradients of the keys of its list only; a key of infinite size no query's gradient."""
    x = Inputs.random(N, heads=HEADS, kv_heads=KV_HEADS)
    indices = torch.arange(N)[:, None].expand(N, 3).clone()
    indices[:, 1:] = -1
    indices[5] = -1
    x.q[:, :, 5] = x.q[:, :, 9] = torch.nan
    x.k[:, :, 12] = torch.nan
    leaves = x.leaves()
    grads = torch.autograd.grad(rw.attention(*leaves, rw.Selected(indices), backend="gather"), leaves, x.dout)
    broken = torch.zeros(N, dtype=torch.bool)
    broken[[9, 12]] = True
    for grad in grads[1:]:
        assert grad[:, :, ~broken].isfinite().all()
        assert grad[:, :, broken].isnan().all()
    # two keys in each list, one with a weight of 0
    x = Inputs.random(N, heads=HEADS, kv_heads=KV_HEADS)
    x.q.abs_()
    x.k[:, :, 0] = -torch.inf
    indices[:, 0], indices[:, 1] = torch.arange(N).clamp(min=1), 0
    leaves = x.leaves()
    found = [
        torch.autograd.grad(rw.attention(*leaves, rw.Selected(indices), backend=name), leaves, x.dout)
        for name in ("reference", "gather")
    ]
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, atol=1e-5, rtol=1e-4)
