"""The lightning indexer against its dense definition in float64: choices, ties, patterns, gradients and memory."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.adaptive import lightning_indexer, lightning_scores
from ringweave.backends import BACKENDS, cpu
from ringweave.environment import CPU_VARIANT

from ..parallel.processes import forked

VARIANTS = [] if cpu.module() is None else cpu.module().variants()  # type: ignore[union-attr]


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose keys by the native kernel, where it takes the inputs, or by operations of torch."""
    if request.param == "torch":
        monkeypatch.setitem(BACKENDS, "cpu", dataclasses.replace(cpu.BACKEND, choose=None))


class Index(NamedTuple):
    q: Tensor
    k: Tensor
    weights: Tensor

    def to(self, dtype: torch.dtype) -> Index:
        return Index(*(x.to(dtype) for x in self))


def inputs(
    nq: int, nk: int | None = None, *, batch: int = 2, heads: int = 3, dim: int = 16, whole: bool = False, seed: int = 0
) -> Index:
    """Random inputs; with ``whole``, small integers, so that many scores are equal and all sums are exact."""
    nk = nq if nk is None else nk
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if whole:
            return torch.randint(-2, 3, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    return Index(draw(batch, nq, heads, dim), draw(batch, nk, dim), draw(batch, nq, heads))


def dense_scores(x: Index, scale: float | None = None) -> Tensor:
    """Return the scores of all pairs by the definition, (B, Nq, Nk) float64."""
    q, k, weights = x.to(torch.float64)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    products = torch.einsum("bqhd,bkd->bqhk", q, k) * scale
    return (products.relu() * weights[..., None]).sum(2)


def allowed_pairs(x: Index, pattern: rw.Pattern, q_offset: int | Tensor = 0) -> Tensor:
    batch, nq, nk = len(x.q), x.q.shape[1], x.k.shape[1]
    if isinstance(q_offset, int):
        return pattern.to_dense(nq, nk, batch=batch, q_offset=q_offset).expand(batch, 1, nq, nk)[:, 0]
    offsets = q_offset.expand(batch).tolist()
    return torch.stack([allowed_pairs(x, pattern, first)[b] for b, first in enumerate(offsets)])


def best(scores: Tensor, allowed: Tensor, top_k: int) -> Tensor:
    """Return the keys of the largest scores by a stable sort of each row: ascending, then -1."""
    index = torch.full((*scores.shape[:2], top_k), -1, dtype=torch.int32)
    for b in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            keys = (allowed[b, i] & ~scores[b, i].isnan()).nonzero()[:, 0]
            chosen = keys[scores[b, i, keys].sort(descending=True, stable=True).indices[:top_k]].sort().values
            index[b, i, : len(chosen)] = chosen
    return index


PATTERNS = {
    "causal": (rw.Causal(), 200, 200, 0),
    "full": (rw.Full(), 70, 333, 0),
    "window": ((rw.SlidingWindow(40) | rw.Sinks(3)) & rw.Causal(), 300, 300, 0),
    "chunk": (rw.Causal(), 77, 261, 184),
    "step": (rw.SlidingWindow(50) & rw.Causal(), 1, 300, 299),
    "later": (rw.Causal(), 20, 90, 31),
    "dilated": (rw.Dilated(8, 4) & rw.Causal(), 150, 150, 0),
    "strided": (rw.Strided(7) & rw.Causal(), 260, 260, 0),
    "empty rows": (rw.Segments(64) & ~rw.SlidingWindow(20, 20), 96, 96, 0),
    "documents": (rw.Documents([100, 1, 60, 99]) & rw.Causal(), 260, 260, 0),
    "within": ((rw.Sinks(4) | rw.SlidingWindow(9)).within(rw.Documents([100, 60, 100])) & rw.Causal(), 260, 260, 0),
    "right padding": (rw.Causal() & rw.KeyPadding(torch.tensor([150, 7])), 150, 150, 0),
    "left padding": (rw.Causal() & rw.KeyPadding(torch.tensor([150, 150]), torch.tensor([140, 0])), 150, 150, 0),
    "padding of one": (rw.KeyPadding(torch.tensor([130, 0])), 140, 140, 0),
    "table": (rw.BlockTable(torch.rand(5, 5, generator=torch.Generator().manual_seed(3)) < 0.4, 32), 160, 160, 0),
    "one token": (rw.Causal(), 1, 1, 0),
}


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("top_k", [1, 8, 400])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.usefixtures("way")
def test_chooses_as_the_definition(name: str, top_k: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pattern, with exact scores that often tie, and chunks of any size; 400 is more than any row has."""
    pattern, nq, nk, q_offset = PATTERNS[name]
    if chunk is not None:
        monkeypatch.setattr("ringweave.chunks._BUDGET", chunk)
    x = inputs(nq, nk, whole=True)
    got = lightning_indexer(*x, top_k, pattern, scale=0.5, q_offset=q_offset)
    want = best(dense_scores(x, 0.5), allowed_pairs(x, pattern, q_offset), top_k)
    assert got.dtype == torch.int32
    assert torch.equal(got, want)


def check_scores(x: Index, got: Tensor, scores: Tensor, allowed: Tensor) -> None:
    """Check a choice by its scores: no key that was left out may be better than a chosen one, but for rounding."""
    size = (x.q.double().abs() @ x.k.double().abs().mT[:, None]) * x.q.shape[3] ** -0.5
    error = 4e-6 * (x.weights.double().abs()[..., None] * size).sum(2)
    places = torch.where(got < 0, allowed.shape[-1], got).long()
    chosen = torch.nn.functional.pad(torch.zeros_like(allowed), (0, 1)).scatter(-1, places, True)[..., :-1]
    assert not (chosen & ~allowed).any()
    assert torch.equal(chosen.sum(-1), allowed.sum(-1).clamp(max=got.shape[-1]))
    least = (scores + error).masked_fill(~chosen, torch.inf).amin(-1, keepdim=True)
    assert not (allowed & ~chosen & (scores - error > least)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (1, 128), (5, 7), (2, 33)])
@pytest.mark.usefixtures("way")
def test_dtypes_and_sizes(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Scores of 16-bit inputs are those of their rounded values, computed in float32."""
    x = inputs(150, heads=heads, dim=dim).to(dtype)
    for scale in (None, -0.3):
        got = lightning_indexer(*x, 20, scale=scale)
        check_scores(x, got, dense_scores(x, scale), allowed_pairs(x, rw.Causal()))
    if dtype.itemsize == 2:
        assert torch.equal(got, lightning_indexer(*x.to(torch.float32), 20, scale=-0.3))


@pytest.mark.parametrize("queries", [1, 7, 150])
@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_instruction_set(variant: str, dim: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries and many have the same scores, and keys at the end of a tile those of other keys."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    pattern = (rw.SlidingWindow(90) | rw.Sinks(9)) & rw.Causal()
    for nk in (150, 257):
        x = inputs(queries, nk, whole=True, dim=dim, heads=5)
        got = lightning_indexer(*x, 13, pattern, scale=0.5, q_offset="end")
        assert torch.equal(got, best(dense_scores(x, 0.5), allowed_pairs(x, pattern, nk - queries), 13))
        same = inputs(queries, nk, dim=dim, heads=5)
        same.k[:] = same.k[:, :1]
        got = lightning_indexer(*same, 13, rw.Full())
        assert torch.equal(got, torch.arange(13, dtype=torch.int32).expand(got.shape))


@pytest.mark.parametrize("q_offset", ["end", 100, torch.tensor(100), torch.tensor([100, 57])], ids=str)
@pytest.mark.usefixtures("way")
def test_offsets(q_offset: int | str | Tensor) -> None:
    x = inputs(50, 150, whole=True)
    got = lightning_indexer(*x, 9, q_offset=q_offset)
    first = 100 if isinstance(q_offset, str) else q_offset
    assert torch.equal(got, best(dense_scores(x), allowed_pairs(x, rw.Causal(), first), 9))


@pytest.mark.usefixtures("way")
def test_the_end_of_padded_keys() -> None:
    """With padding, ``"end"`` counts from the last key of each batch element."""
    x = inputs(3, 40, whole=True)
    stop = torch.tensor([40, 21])
    pattern = rw.Causal() & rw.KeyPadding(stop)
    got = lightning_indexer(*x, 6, pattern, q_offset="end")
    assert torch.equal(got, best(dense_scores(x), allowed_pairs(x, pattern, stop - 3), 6))


@pytest.mark.usefixtures("way")
def test_equal_keys_and_rows_without_products() -> None:
    """All scores of a row are equal: the first keys are chosen."""
    x = inputs(140, heads=2)
    same = x._replace(k=x.k[:, :1].expand_as(x.k))
    none = x._replace(weights=torch.zeros_like(x.weights))
    for each in (same, none):
        got = lightning_indexer(*each, 5)
        want = torch.arange(5).where(torch.arange(5) <= torch.arange(140)[:, None], -1)
        assert torch.equal(got, want.expand(2, 140, 5).int())


@pytest.mark.usefixtures("way")
def test_zeros_of_either_sign_are_equal() -> None:
    """A weight of -1 makes -0.0 of a product that the relu cuts, and a weight of 1 makes 0.0."""
    q, k = torch.ones(1, 1, 1, 4), -torch.ones(1, 6, 4)
    k[:, 3] = 0
    for weight in (-1.0, 1.0):
        got = lightning_indexer(q, k, torch.full((1, 1, 1), weight), 2, rw.Full())
        assert got.tolist() == [[[0, 1]]]


@pytest.mark.usefixtures("way")
def test_nan_and_infinite_scores() -> None:
    """NaN is never chosen and reaches no other row; inf is first, -inf last but before no key."""
    x = inputs(150, whole=True)
    x.k[0, 5], x.k[1, 7, 3] = torch.nan, torch.inf
    x.q[0, 40, 1, 0], x.q[1, 20] = torch.nan, -torch.inf
    x.weights[0, 60, 0], x.weights[1, 70, 1], x.weights[1, 80, 2] = torch.nan, torch.inf, -torch.inf
    scores = dense_scores(x)
    assert scores.isnan().any()
    assert (scores == torch.inf).any()
    assert (scores == -torch.inf).any()
    for top_k in (4, 100, 400):
        got = lightning_indexer(*x, top_k)
        assert torch.equal(got, best(scores, allowed_pairs(x, rw.Causal()), top_k))
    assert not (got[0] == 5).any()
    assert (got[0, 60] == -1).all()


@pytest.mark.usefixtures("way")
def test_keys_that_are_not_allowed_are_not_read() -> None:
    x = inputs(300)
    want = lightning_indexer(*x, 7, rw.SlidingWindow(30) & rw.Causal())
    x.k[:, 290:] = torch.nan
    got = lightning_indexer(*x, 7, rw.SlidingWindow(30) & rw.Causal())
    assert torch.equal(got[:, :290], want[:, :290])


@pytest.mark.usefixtures("way")
def test_strides_do_not_matter() -> None:
    x = inputs(140, 200, heads=4)
    want = lightning_indexer(*x, 9, rw.Full())
    apart = Index(
        x.q.transpose(1, 2).contiguous().transpose(1, 2), x.k.mT.contiguous().mT, x.weights.mT.contiguous().mT
    )
    wide = Index(*(torch.stack([each, each], -1)[..., 0] for each in x))
    for each in (apart, wide):
        assert not each.k.is_contiguous()
        assert torch.equal(lightning_indexer(*each, 9, rw.Full()), want)


@pytest.mark.usefixtures("way")
def test_the_number_of_threads_changes_nothing() -> None:
    x = inputs(500, heads=4, dim=32)
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(lightning_indexer(*x, 40))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.usefixtures("way")
def test_a_batch_is_its_elements_and_chunks() -> None:
    """A row's choice depends on nothing else in the call."""
    x = inputs(260, batch=3, heads=2)
    whole = lightning_indexer(*x, 11)
    for b in range(3):
        for begin, end in ((0, 100), (100, 101), (101, 260)):
            part = Index(x.q[b : b + 1, begin:end], x.k[b : b + 1, :end], x.weights[b : b + 1, begin:end])
            assert torch.equal(lightning_indexer(*part, 11, q_offset=begin), whole[b : b + 1, begin:end])


def test_no_gradient_reaches_the_choice() -> None:
    x = Index(*(each.requires_grad_() for each in inputs(40)))
    got = lightning_indexer(*x, 4)
    assert not got.requires_grad
    assert torch.equal(got, lightning_indexer(*(each.detach() for each in x), 4))


@pytest.mark.usefixtures("way")
def test_autocast_does_not_round() -> None:
    x = inputs(140, heads=4, dim=64)
    with torch.autocast("cpu", torch.bfloat16):
        got = lightning_indexer(*x, 9)
    assert torch.equal(got, lightning_indexer(*x, 9))


@pytest.mark.parametrize("pattern", [rw.Causal(), rw.Causal() & rw.KeyPadding(torch.tensor([130, 7]))], ids=str)
def test_compiles(pattern: rw.Pattern) -> None:
    x = inputs(140)
    step = torch.compile(lambda *each: lightning_indexer(*each, 9, pattern) + 1, fullgraph=True, backend="eager")
    assert torch.equal(step(*x), lightning_indexer(*x, 9, pattern) + 1)


def grown(n: int) -> int:
    """Return the bytes by which a call on n tokens raises the peak of the process."""
    from ringweave.memory import peak

    x = inputs(n, batch=1, heads=16, dim=64)
    cpu = torch.device("cpu")
    lightning_indexer(x.q[:, :256], x.k[:, :256], x.weights[:, :256], 64)
    peak.begin(cpu)
    before = peak.in_use(cpu)
    lightning_indexer(*x, 256)
    return peak.highest(cpu) - before


@pytest.mark.measures
def test_memory_does_not_hold_all_pairs() -> None:
    # a float for each pair would take 268 MB, and one for each head and pair 4.3 GB
    assert forked(grown, 8192) < 100e6


# ---- scores of chosen pairs ------------------------------------------------------------------------------------------


def chosen_scores(x: Index, indices: Tensor, scale: float | None = None) -> Tensor:
    """Return the scores of chosen pairs by the dense definition, with autograd."""
    scores = dense_scores(x, scale).gather(-1, indices.clamp(min=0).long())
    return scores.masked_fill(indices < 0, -torch.inf)


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scores_and_gradients(dtype: torch.dtype, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and gradients are those of the definition, with repeated keys, pads anywhere and chunks of any size."""
    if chunk is not None:
        monkeypatch.setattr("ringweave.chunks._BUDGET", chunk)
    x = Index(*(each.requires_grad_() for each in inputs(30, 45).to(dtype)))
    indices = torch.randint(-1, 45, (2, 30, 20), generator=torch.Generator().manual_seed(1))
    indices[0, 3] = -1
    got = lightning_scores(*x, indices, scale=0.3)
    want = chosen_scores(x, indices, 0.3)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=4e-6)
    up = torch.randn(got.shape, generator=torch.Generator().manual_seed(2), dtype=got.dtype)
    grads = torch.autograd.grad(got, list(x), up)
    wanted = torch.autograd.grad(want, list(x), up.double())
    for a, b in zip(grads, wanted, strict=True):
        assert a.dtype == dtype
        rounding = 8e-3 if dtype == torch.bfloat16 else 4e-6
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding * float(b.abs().max()))


def test_gradcheck() -> None:
    x = Index(*(each.requires_grad_() for each in inputs(5, 7, heads=2, dim=3).to(torch.float64)))
    indices = torch.randint(0, 7, (2, 5, 4), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda *each: lightning_scores(*each, indices), list(x))


def test_keys_that_are_not_chosen_reach_nothing() -> None:
    """NaN in a key that pads replace, and in a query without keys, reaches no score and no gradient."""
    x = inputs(20)
    indices = lightning_indexer(*x, 6)
    indices[indices == 0] = -1
    x.k[:, 0], x.q[:, 0] = torch.nan, torch.nan
    for each in x:
        each.requires_grad_()
    scores = lightning_scores(*x, indices)
    assert not scores.isnan().any()
    scores.backward(torch.full_like(scores, torch.nan).where(indices < 0, 1.0))
    assert all(each.grad is not None for each in x)
    dq, dk, dweights = (each.grad for each in x)
    assert not dq[:, 1:].isnan().any()
    assert not dk.isnan().any()
    assert not dweights[:, 1:].isnan().any()
    assert (dk[:, 0] == 0).all()


def test_the_scores_rank_as_the_indexer_chooses() -> None:
    x = inputs(100, whole=True)
    few, many = lightning_indexer(*x, 5), lightning_indexer(*x, 100)
    least = lightning_scores(*x, few).masked_fill(few < 0, torch.inf).amin(-1, keepdim=True)
    assert ((lightning_scores(*x, many) > least).sum(-1) < 5).all()


def scored(n: int) -> int:
    """Return the bytes by which scores and gradients of n tokens with 512 keys raise the peak of the process."""
    from ringweave.memory import peak

    x = Index(*(each.requires_grad_() for each in inputs(n, batch=1, heads=16, dim=64)))
    indices = torch.randint(0, n, (1, n, 512), dtype=torch.int32)
    cpu = torch.device("cpu")
    lightning_scores(*(each[:, :256] for each in x), indices[:, :256] % 256).sum().backward()
    peak.begin(cpu)
    before = peak.in_use(cpu)
    lightning_scores(*x, indices).sum().backward()
    return peak.highest(cpu) - before


@pytest.mark.measures
def test_memory_of_scores() -> None:
    # scores, their gradient and the gradients of the inputs take 60 MB; chosen keys or products of all queries 540 MB and 134 MB
    assert forked(scored, 4096) < 120e6


def test_scores_in_a_compiled_step() -> None:
    x = Index(*(each.requires_grad_() for each in inputs(40)))
    indices = lightning_indexer(*x, 4)

    def loss(*each: Tensor) -> Tensor:
        return lightning_scores(*each, indices).masked_fill(indices < 0, 0).square().sum()

    grads = torch.autograd.grad(loss(*x), list(x))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="eager")(*x), list(x))
    assert all(torch.equal(a, b) for a, b in zip(got, grads, strict=True))
