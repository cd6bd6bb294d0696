"""Tables of zones, which mask functions are read as; tests/cases.py has them in every test of patterns."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.patterns import Pattern, rebuild
from ringweave.patterns.base import parts_of
from ringweave.patterns.shifted import with_offsets
from ringweave.patterns.traced import of_graph
from ringweave.patterns.view import in_view
from ringweave.patterns.zone_table import ZoneTable
from ringweave.trace.symbols import trace
from ringweave.types import Place

N = 90
VALUE = torch.stack([torch.arange(N) * 5 // 3 % 40, torch.arange(N) // 7, torch.full((N,), 99)])
FIRST = torch.stack([torch.arange(N) - 9, torch.arange(N) // 20 * 20, torch.zeros(N, dtype=torch.int64)])


def rows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A function with zones of all kinds; the last batch element has no pair."""
    return (FIRST[b, q] <= k) & (VALUE[b, k] <= q)


def table(batch: int = 3, function: Any = rows) -> tuple[ZoneTable, Tensor]:
    """Return a table of zones, and its pairs (batch, N, N)."""
    pattern = of_graph(trace(function), Place(batch, 1, N, N))
    assert isinstance(pattern, ZoneTable)
    b, q, k = torch.arange(batch)[:, None, None], torch.arange(N)[:, None], torch.arange(N)
    return pattern, function(b, None, q, k)


def test_pairs_and_plans() -> None:
    pattern, want = table()
    assert not want[2].any()
    causal, strided = rw.Causal().to_dense(N)[0], rw.Strided(4).to_dense(N)[0]
    cases: list[tuple[Pattern, Tensor]] = [
        (pattern, want),
        (~pattern, ~want),
        (pattern & rw.Causal(), want & causal),
        (~pattern & rw.Causal() | rw.Strided(4), ~want & causal | strided),
        (rw.PerHead([pattern, ~pattern]), torch.stack([want, ~want], 1)),
    ]
    for each, pairs in cases:
        pairs = pairs if pairs.ndim == 4 else pairs[:, None]
        heads = pairs.shape[1]
        assert torch.equal(each.to_dense(N, heads=heads, batch=3), pairs)
        for tile in ((16, 32), (48, 16), (128, 128)):
            assert torch.equal(each.plan(N, heads=heads, batch=3, tile=tile).to_dense(), pairs)
        assert each.density(N, heads=heads, batch=3) == pytest.approx(float(pairs.double().mean()))
        for b, h in itertools.product(range(3), range(heads)):
            assert torch.equal(each.select(b, h).to_dense(N)[0, 0], pairs[b, h])


def test_chunks_offsets_and_views() -> None:
    pattern, want = table()
    assert torch.equal(pattern.to_dense(20, N, batch=3, q_offset=33)[:, 0], want[:, 33:53])
    assert torch.equal(pattern.plan(1, N, batch=3, q_offset=N - 1, tile=(16, 16)).to_dense()[:, 0], want[:, -1:])
    shifted, first = with_offsets(pattern, torch.tensor([0, 30, 7]), torch.tensor([0, 0, 0]), 3)
    rows = torch.stack([want[b, at : at + 50] for b, at in enumerate((0, 30, 7))])
    assert torch.equal(shifted.to_dense(50, N, batch=3, q_offset=first)[:, 0], rows)
    # keys from position 40 on
    shifted, first = with_offsets(pattern, 40, 40, 3)
    assert torch.equal(shifted.to_dense(50, 50, batch=3, q_offset=first)[:, 0], want[:, 40:, 40:])
    for rate, offset in ((2, 1), (7, 3)):
        for b in range(3):
            seen = in_view(pattern.select(b, 0), rate, offset, N)
            assert seen is not None
            pairs = want[b, offset::rate, offset::rate]
            assert torch.equal(seen.to_dense(len(pairs))[0, 0], pairs)


def test_queries_that_begin_after_the_keys() -> None:
    place = Place(1, 1, 30, 60, 50, 20)
    pattern = of_graph(trace(lambda b, h, q, k: VALUE[0, k] <= q // 9 * 4), place)
    assert isinstance(pattern, ZoneTable)
    want = VALUE[0, 20:80] <= torch.arange(50, 80)[:, None] // 9 * 4
    assert torch.equal(pattern.to_dense(30, 60, q_offset=30)[0, 0], want)


def test_a_table_is_made_for_a_call() -> None:
    pattern, _ = table()
    for nq, nk, first, batch in ((N, N - 1, 0, 3), (N, N, 1, 3), (N + 1, N, 0, 3), (1, N + 1, N, 3), (N, N, 0, 2)):
        with pytest.raises(rw.errors.PatternError, match=r"wanted (90 keys and queries in 0 to 89|batch = 3)"):
            pattern.plan(nq, nk, q_offset=first, batch=batch)
    with pytest.raises(rw.errors.PatternError, match="wanted 90 keys"):
        pattern.within(rw.Documents([40, 50])).plan(N, batch=3)
    one = pattern.select(0, 0)
    whole = one.within(rw.Documents([N]))
    assert torch.equal(whole.to_dense(N), one.to_dense(N))


def test_identity() -> None:
    """Equal zones are equal patterns, in this process or in another, and a table is planned once."""
    pattern, _ = table()
    other, _ = table()
    assert pattern == other
    assert pattern.value() == other.value()
    different, _ = table(function=lambda b, h, q, k: (FIRST[b, q] <= k) & (VALUE[b, k] <= q + 1))
    assert pattern != different
    assert pattern.key().value != different.key().value
    rebuilt = rebuild(pattern.spec, pattern.tables)
    assert rebuilt.key().same(pattern.key())
    assert rebuilt.plan(N, batch=3) is pattern.plan(N, batch=3)
    for same in (rebuilt, pickle.loads(pickle.dumps(pattern)), copy.copy(pattern), copy.deepcopy(pattern)):
        assert same == pattern
        assert torch.equal(same.to_dense(N, batch=3), pattern.to_dense(N, batch=3))
    assert (pattern & other) is pattern
    assert repr(pattern) == f"ZoneTable(<3 x {pattern.table.shape[1]} zones>)"


@pytest.mark.parametrize("batch", [1, 3])
def test_attention(batch: int) -> None:
    """Each backend, a decoding step, compiled code and threads compute the same rows."""
    pattern, want = table(batch)
    q, k, v = (torch.randn(batch, 2, N, 16, requires_grad=True) for _ in range(3))

    def right(out: Tensor, pairs: Tensor) -> Tensor:
        return torch.where(pairs.any(-1)[:, None, :, None], out, 0.0)

    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=want[:, None])
    exact = right(exact, want)
    grads = torch.autograd.grad(exact.square().sum(), (q, k, v))
    for backend in ("auto", "cpu", "dense_batched", "torch_sparse", "reference"):
        out = rw.attention(q, k, v, pattern, backend=backend)
        torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-4)
        mine = torch.autograd.grad(out.square().sum(), (q, k, v))
        torch.testing.assert_close(mine, grads, atol=1e-4, rtol=1e-4)
    for at in (0, 31, N - 1):
        step = rw.attention(q[:, :, at : at + 1], k, v, pattern, q_offset=at)
        torch.testing.assert_close(step, exact[:, :, at : at + 1], atol=1e-5, rtol=1e-4)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(rw.attention(q, k, v, pattern))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(each, found[0]) for each in found)


def test_compiled_code() -> None:
    pattern, _ = table()
    q, k, v = (torch.randn(3, 2, N, 16) for _ in range(3))
    compiled = torch.compile(lambda q, k, v, p: rw.attention(q, k, v, p & rw.Causal()), fullgraph=True)
    assert torch.equal(compiled(q, k, v, pattern), rw.attention(q, k, v, pattern & rw.Causal()))
    changed, _ = table(function=lambda b, h, q, k: (FIRST[b, q] <= k) & (VALUE[b, k] <= q + 9))
    assert torch.equal(compiled(q, k, v, changed), rw.attention(q, k, v, changed & rw.Causal()))


def test_inside_of_transforms() -> None:
    pattern, _ = table(1)
    q, k, v = (torch.randn(1, 2, N, 16) for _ in range(3))
    want = rw.attention(q, k, v, pattern)
    assert torch.equal(torch.vmap(lambda x: rw.attention(x, k, v, pattern))(q[None])[0], want)
    assert torch.func.grad(lambda x: rw.attention(x, k, v, pattern).sum())(q).shape == q.shape


def test_one_table_for_heads_with_equal_zones() -> None:
    by_head = torch.tensor([3, 3, 8])
    pattern = of_graph(trace(lambda b, h, q, k: VALUE[0, k] <= by_head[h] * q), Place(1, 3, N, N))
    assert pattern is not None
    tables = parts_of(pattern, ZoneTable)
    assert len(tables) == 3
    assert tables[0] == tables[1] != tables[2]
    plan = pattern.plan(N, heads=3)
    assert plan.row_ptr.shape[0] == 2
