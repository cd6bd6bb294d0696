"""Offsets of queries and keys for each batch element give patterns, terms and dropout by position, pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.patterns import Pattern, rebuild
from ringweave.patterns.shifted import with_offsets
from ringweave.plan.from_pattern import build

from .cases import PATTERNS
from .dropped import kept, next_seed
from .oracle import Inputs, attention
from .test_terms import ABLE, HEADS, check, dense, make, ours

BATCH = 3
FIRST_Q, FIRST_K = torch.tensor([65, 12, 33]), torch.tensor([0, 4, 20])
STREAMING = (rw.SlidingWindow(9) | rw.Sinks(22)) & rw.Causal()
PATTERNS_OF_ROWS = {
    "causal": rw.Causal(),
    "streaming": STREAMING,
    "padded": STREAMING & rw.KeyPadding(torch.tensor([70, 17, 88])),
    "within": STREAMING.within(rw.KeyPadding(torch.tensor([70, 60, 60]), torch.tensor([3, 0, 25]))),
    "documents": STREAMING.within(rw.Documents([40, 50])),
    "ids": rw.Causal() & rw.Documents(ids=torch.arange(3 * 90).view(3, 90) // 37),
    "per_head": rw.PerHead([rw.Causal(), rw.Strided(3), STREAMING, rw.Full()]),
    "dilated": rw.SlidingWindow(3) | rw.Dilated(6, 8),
    "table": rw.BlockTable(torch.rand(3, 4, 5, 6, generator=torch.Generator().manual_seed(0)) < 0.5, 16),
    "function": rw.from_mask_mod(lambda b, h, q, k: (q + h + b) % 3 == k % 3) & rw.Causal(),
    "global": rw.Global(torch.arange(3 * 90).view(3, 90) % 23 == 0),
}


def allowed(pattern: Pattern, nq: int, nk: int, first_q: Tensor, first_k: Tensor) -> Tensor:
    """Return the allowed pairs (B, heads, nq, nk) by the definition."""
    q, k = torch.arange(nq)[:, None], torch.arange(nk)[None, :]
    return torch.stack([
        torch.stack([pattern.select(b, h).allows(q + i, k + j).expand(nq, nk) for h in range(HEADS)])
        for b, (i, j) in enumerate(zip(first_q.tolist(), first_k.tolist(), strict=True))
    ])  # fmt: skip


def follows(
    x: Inputs, pattern: Pattern, names: Sequence[str], terms: Sequence[rw.terms.Term], backend: str,
    keep: Tensor | None = None, **options: float,
) -> None:  # fmt: skip
    """Check a call at the offsets against the formula."""
    pairs = allowed(pattern, x.q.shape[2], x.k.shape[2], FIRST_Q, FIRST_K)
    got = ours(x, pattern, terms, backend, q_offset=FIRST_Q, k_offset=FIRST_K, **options)

    def formula(kind: torch.dtype, order: int) -> dict[str, Tensor]:
        return dense(x, pairs, names, terms, kind, keep=keep, q_offset=FIRST_Q - FIRST_K, order=order)

    check(got, formula, torch.float32)


@pytest.mark.parametrize("name", PATTERNS_OF_ROWS)
@pytest.mark.parametrize("nq", [1, 5])
def test_positions_are_those_of_the_offsets(name: str, nq: int) -> None:
    pattern, nk = PATTERNS_OF_ROWS[name], 70
    pairs = allowed(pattern, nq, nk, FIRST_Q, FIRST_K)
    moved, left = with_offsets(pattern, FIRST_Q, FIRST_K, BATCH)
    assert left == 0
    assert torch.equal(moved.to_dense(nq, nk, HEADS, batch=BATCH), pairs)
    plan = build(moved, nq, nk, heads=HEADS, batch=BATCH, tile=(16, 32))
    assert torch.equal(plan.to_dense(), pairs)
    assert rebuild(moved.spec, moved.tables) == moved
    x = Inputs.random(nq, nk, batch=BATCH, heads=HEADS, kv_heads=2)
    facts = rw.explain(pattern, nq, nk, heads=HEADS, batch=BATCH, q_offset=FIRST_Q, k_offset=FIRST_K, as_dict=True)
    assert facts["pairs"]["allowed"] == int(pairs.sum())
    later = (torch.arange(nk) + FIRST_K[:, None, None]) > (torch.arange(nq)[:, None] + FIRST_Q[:, None, None])
    assert facts["causality"]["future_pairs"] == int((pairs & later[:, None]).sum())
    weights = rw.attention_weights(x.q, x.k, pattern, q_offset=FIRST_Q, k_offset=FIRST_K).to_dense()
    assert torch.equal(weights > 0, pairs)
    for backend in ABLE:
        follows(x, pattern, [], [], backend)


# lists of chosen keys have a row for each query of the call: their offsets are in patterns/test_selected.py
@pytest.mark.parametrize("name", sorted(name for name in PATTERNS if not name.startswith("selected")))
def test_one_offset_is_that_of_every_row(name: str) -> None:
    """An int, a tensor () and a tensor (B,) of one offset are equal, and so is a cache without its first keys."""
    n, cut = 97, 32
    pattern = PATTERNS[name](n)
    x = Inputs.random(9, n, batch=2, heads=HEADS)
    offset = n - 9
    want = rw.attention(x.q, x.k, x.v, pattern, q_offset=offset)
    for other in (torch.tensor(offset), torch.tensor([offset] * 2, dtype=torch.int32)):
        torch.testing.assert_close(rw.attention(x.q, x.k, x.v, pattern, q_offset=other), want)
    # without the first keys, which no query attends
    kept_keys = pattern & rw.KeyPadding(n, cut)
    want = rw.attention(x.q, x.k, x.v, kept_keys, q_offset=offset)
    tail = x.k[:, :, cut:], x.v[:, :, cut:]
    for first in (cut, torch.tensor(cut), torch.tensor([cut, cut])):
        torch.testing.assert_close(rw.attention(x.q, *tail, kept_keys, q_offset=offset, k_offset=first), want)


def test_a_ragged_batch_decodes_as_its_rows_alone() -> None:
    """Decoding steps over caches of different lengths, some with dropped keys, give each row of the batch its result in a prefill."""
    n, room, lengths, dropped = 40, 48, [7, 25, 16], [0, 9, 3]
    x = Inputs.random(n, batch=BATCH, heads=HEADS, kv_heads=2)
    pattern = rw.SlidingWindow(12) & rw.Causal()
    whole = rw.attention(x.q, x.k, x.v, pattern)
    cache_k, cache_v = (torch.full((BATCH, 2, room, 16), torch.nan) for _ in range(2))
    for b, drop in enumerate(dropped):
        cache_k[b, :, : n - drop], cache_v[b, :, : n - drop] = x.k[b, :, drop:], x.v[b, :, drop:]
    first = torch.tensor(dropped)
    for step in range(4):
        at = torch.tensor(lengths) + step
        new = torch.stack([x.q[b, :, i : i + 1] for b, i in enumerate(at.tolist())])
        bounds = rw.KeyPadding(at + 1)
        # rows with windows that reach dropped keys are not compared
        got = rw.attention(new, cache_k, cache_v, pattern & bounds, q_offset=at, k_offset=first)
        for b, i in enumerate(at.tolist()):
            if i - 12 >= dropped[b]:
                torch.testing.assert_close(got[b, :, 0], whole[b, :, i])


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("names", [("alibi",), ("softcap", "distance")], ids="-".join)
@pytest.mark.parametrize("nq", [1, 24])
def test_terms_count_positions(backend: str, names: tuple[str, ...], nq: int) -> None:
    pattern, nk = PATTERNS_OF_ROWS["padded"], 70
    x = Inputs.random(nq, nk, batch=BATCH, heads=HEADS, kv_heads=2, value_dim=24)
    terms = make(names, nk, torch.float32)
    follows(x, pattern, names, terms, backend)


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("nq", [1, 24])
def test_dropout_counts_positions(backend: str, nq: int) -> None:
    pattern, nk = rw.Causal() & rw.KeyPadding(torch.tensor([70, 17, 88])), 70
    x = Inputs.random(nq, nk, batch=BATCH, heads=HEADS, kv_heads=2)
    torch.manual_seed(3)
    seed = next_seed()
    keep = torch.cat([
        kept(seed, 0.3, 1, HEADS, range(i, i + nq), range(j, j + nk), b)
        for b, (i, j) in enumerate(zip(FIRST_Q.tolist(), FIRST_K.tolist(), strict=True))
    ])  # fmt: skip
    follows(x, pattern, [], [], backend, keep=keep, dropout=0.3)


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_terms_at_far_positions_run_on_a_backend_that_has_them(kind: Callable[[int], int | Tensor]) -> None:
    """Offsets that leave the native kernel's range of positions are part of the pattern, and auto looks for them there."""
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    terms, far = rw.ALiBi(torch.tensor([0.5, 0.25])), {"q_offset": kind(2**30), "k_offset": kind(2**30)}
    want = rw.attention(q, k, v, rw.Causal(), terms=terms)
    torch.testing.assert_close(rw.attention(q, k, v, rw.Causal(), terms=terms, **far), want)


def test_a_bias_counts_places() -> None:
    x = Inputs.random(5, 70, batch=BATCH, heads=HEADS)
    bias = torch.randn(BATCH, HEADS, 5, 70)
    pattern = PATTERNS_OF_ROWS["padded"]
    pairs = allowed(pattern, 5, 70, FIRST_Q, FIRST_K)
    for backend in ABLE:
        got = rw.attention(
            x.q, x.k, x.v, pattern, terms=rw.Bias(bias), q_offset=FIRST_Q, k_offset=FIRST_K, backend=backend
        )
        torch.testing.assert_close(got, attention(x.q, x.k, x.v, pairs, scored=lambda t: t + bias)[0])


@pytest.mark.parametrize("kind", ["tensors", "ints"])
def test_changing_offsets_recompile_nothing(kind: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    terms = [rw.DistanceBias(torch.randn(HEADS, 9))]
    x = Inputs.random(1, 70, batch=BATCH, heads=HEADS)

    def call(q: Tensor, first_q: int | Tensor, first_k: int | Tensor) -> Tensor:
        return rw.attention(q * 1.0, x.k, x.v, STREAMING, q_offset=first_q, k_offset=first_k, terms=terms)

    step = torch.compile(call, fullgraph=True, backend=counter)
    for i in range(5):
        first_q, first_k = (FIRST_Q + i, FIRST_K + 2 * i) if kind == "tensors" else (60 + i, 3 + 2 * i)
        torch.testing.assert_close(step(x.q, first_q, first_k), call(x.q, first_q, first_k))
    assert counter.frame_count <= (1 if kind == "tensors" else 2)


def test_a_write_between_calls_is_seen_and_one_before_a_gradient_is_not() -> None:
    x = Inputs.random(1, 70, heads=HEADS)
    q = x.q.requires_grad_()
    first = torch.tensor(40)
    before = rw.attention(q, x.k, x.v, rw.Causal(), q_offset=first)
    first.add_(20)
    for out, offset in ((before, 40), (rw.attention(q, x.k, x.v, rw.Causal(), q_offset=first), 60)):
        want = rw.attention(q, x.k, x.v, rw.Causal(), q_offset=offset)
        torch.testing.assert_close(out, want)
        grads = (torch.autograd.grad(each.square().sum(), q, retain_graph=True)[0] for each in (out, want))
        torch.testing.assert_close(*grads)


def test_equal_steps_share_their_plan() -> None:
    def plan(first: Tensor) -> rw.BlockPlan:
        return with_offsets(rw.Causal(), first, 0, 4)[0].plan(1, 300, batch=4, heads=2)

    first = plan(torch.tensor([256, 100, 256, 100]))
    assert plan(torch.tensor([256, 100, 256, 100])) is first
    assert first.row_ptr.shape[0] == 2
