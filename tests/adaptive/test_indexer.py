"""The learned selector: its loss, that it learns, and that no gradient reaches the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.adaptive import BlockIndexer, select, tile_mass
from tests.parallel.threads import Threaded, run

from ..oracle import Inputs

SIDE = 32


def inputs(n: int = 256) -> Inputs:
    """Queries and keys with topics, so that blocks differ in mass."""
    x = Inputs.random(n, batch=2, heads=4, kv_heads=2, dim=16)
    generator = torch.Generator().manual_seed(1)
    topics = 1.5 * torch.randn(6, 16, generator=generator)
    for part in (x.q, x.k):
        topic = torch.randint(0, 6, (n // 16,), generator=generator).repeat_interleave(16)
        part += topics[topic]
    return x


def indexer() -> BlockIndexer:
    torch.manual_seed(0)
    return BlockIndexer(16, heads=4, kv_heads=2, block_size=SIDE, pool=16)


def mass_of(x: Inputs, pattern: rw.Pattern) -> rw.adaptive.TileMass:
    lse = rw.attention_with_lse(x.q, x.k, x.v, rw.Causal()).lse
    return tile_mass(x.q, x.k, lse, pattern, tile=SIDE)


def test_the_divergence_is_that_of_dense_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss covers the listed tiles only, and it and its gradients do not depend on the chunks."""
    x, one = inputs(), indexer()
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    table = select(x.q, x.k, top_k=3, block_size=SIDE) & rw.Causal()
    for pattern in (rw.Causal(), table):
        mass = mass_of(x, pattern)
        grid = one._grid(x.q, x.k, 0, True, 0, 0)
        scores = one._scorer(x.q, x.k, grid)(range(grid.rows), grid.columns)
        held = mass.to_dense()
        listed = torch.zeros_like(held, dtype=torch.bool).flatten(0, 1)
        listed[mass.tiles()] = True
        share = held / held.sum(-1, keepdim=True)
        foreseen = scores.masked_fill(~listed.view_as(held), -torch.inf).log_softmax(-1)
        want = torch.where(share > 0, share * (share.log() - foreseen), 0.0).sum(-1).mean()
        grads = torch.autograd.grad(want, list(one.parameters()))
        for chunk in (None, 1):
            with monkeypatch.context() as patch:
                if chunk is not None:
                    patch.setattr("ringweave.chunks._BUDGET", chunk)
                got = one.loss(x.q, x.k, mass)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
                for a, b in zip(torch.autograd.grad(got, list(one.parameters())), grads, strict=True):
                    # relative to the largest entry of a gradient: a small entry is a sum of large terms with both signs
                    torch.testing.assert_close(a, b, rtol=0, atol=4e-6 * float(b.abs().max()))


def test_it_learns_and_the_model_does_not() -> None:
    x, one = inputs(), indexer()
    x.q.requires_grad_()
    x.k.requires_grad_()
    dense = mass_of(x, rw.Causal())
    total = dense.values.sum()

    def recall() -> float:
        return float(mass_of(x, one(x.q, x.k, top_k=3) & rw.Causal()).values.sum() / total)

    optimiser = torch.optim.Adam(one.parameters(), 3e-3)
    losses, before = [], recall()
    for step in range(40):
        # train with dense attention's mass, then with the mass of the chosen blocks
        mass = dense if step < 30 else mass_of(x, one(x.q, x.k, top_k=3) & rw.Causal())
        loss = one.loss(x.q, x.k, mass)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[29] < 0.5 * losses[0]
    assert losses[-1] <= losses[30]
    assert recall() > before
    assert x.q.grad is None
    assert x.k.grad is None


def test_at_first_it_scores_by_means() -> None:
    """With one pool per block, the untrained indexer equals the selector by means."""
    x = inputs()
    torch.manual_seed(0)
    one = BlockIndexer(16, heads=4, kv_heads=2, block_size=SIDE, pool=SIDE)
    for heads in ("query", "kv", "shared"):
        got = one(x.q, x.k, density=0.5, heads=heads)
        assert torch.equal(got.mask, select(x.q, x.k, density=0.5, heads=heads, block_size=SIDE).mask)


def test_state_and_compilation() -> None:
    x, one = inputs(), indexer()
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(torch.randn_like(parameter))
    other = BlockIndexer(16, heads=4, kv_heads=2, block_size=SIDE, pool=16)
    other.load_state_dict(one.state_dict())
    want = one(x.q, x.k, top_k=3)
    assert torch.equal(other(x.q, x.k, top_k=3).mask, want.mask)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rw.attention(q, k, v, one(q, k, top_k=3) & rw.Causal())

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x.q, x.k, x.v), step(x.q, x.k, x.v))


def test_autocast_changes_no_choice_and_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward computes the scores of a chunk of rows again, outside of autocast."""
    x, one = inputs(512), indexer()
    monkeypatch.setattr("ringweave.chunks._BUDGET", 1)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(torch.randn_like(parameter))
    mass = mass_of(x, rw.Causal())
    chosen, loss = one(x.q, x.k, density=0.3).mask, one.loss(x.q, x.k, mass)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(one(x.q, x.k, density=0.3).mask, chosen)
        again = one.loss(x.q, x.k, mass)
    assert torch.equal(again, loss)
    for got, want in zip(*(torch.autograd.grad(each, list(one.parameters())) for each in (again, loss)), strict=True):
        assert torch.equal(got, want)


def test_a_decoding_step_and_chunks() -> None:
    x, one = inputs(), indexer()
    whole = one(x.q, x.k, top_k=3)
    chunk = one(x.q[:, :, 128:], x.k, top_k=3, q_offset=128)
    assert torch.equal(chunk.mask[:, :, 4:], whole.mask[:, :, 4:])
    step = one(x.q[:, :, -1:], x.k, top_k=3, q_offset=255)
    assert step.blocks.shape == (2, 4, 1, 8)
    out = rw.attention(x.q[:, :, -1:], x.k, x.v, step & rw.Causal(), q_offset=255)
    assert out.isfinite().all()


@pytest.mark.parametrize("heads", ["query", "kv", "shared"])
def test_ranks_score_their_own_rows_and_have_one_table(heads: str) -> None:
    """The shared table equals that of one process, for every placement that splits at blocks, also with padding."""
    one = indexer()

    def job(transport: Threaded, placement: str, n: int) -> None:
        x = inputs(768)
        q, k = x.q[:, :, :n], x.k[:, :, :n]
        ctx = rw.ContextParallel(transport, rw.Causal(), n, heads=(4, 2), placement=placement)
        pending = one.share(ctx, ctx.shard(q, 2), ctx.shard(k, 2), version=1, density=0.3, heads=heads)
        assert transport.started[-1].startswith("table")
        want = one(q, k, density=0.3, heads=heads).mask
        assert torch.equal(pending.result().mask, want.repeat_interleave(4 // want.shape[1], 1))

    for placement, n in (("contiguous", 768), ("zigzag", 768), ("contiguous", 730)):
        run(2, job, placement, n)
