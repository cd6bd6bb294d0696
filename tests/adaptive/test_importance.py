"""The tracker: masses equal dense attention's, exchanges are bounded, recall rises, and all ranks have one table."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.adaptive import BlockIndexer, ImportanceTracker, tile_mass
from ringweave.parallel import ContextParallel
from ringweave_lab.bench.cases.quality import look
from ringweave_lab.bench.text import ByteModel, standard_library, train
from tests.parallel.threads import Threaded, run

N, SIDE, HEADS = 768, 32, 4


def topics(seed: int = 0, noise: float = 1.0, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in segments with different topics; queries look for topics anywhere, with other topics in each head."""
    generator = torch.Generator().manual_seed(7)
    stretches = -(-n // 48)
    centres = 2 * torch.randn(1, HEADS // 2, stretches, 16, generator=generator)
    wanted = torch.randint(0, stretches, (HEADS, stretches), generator=generator)
    k = centres.repeat_interleave(48, 2)[:, :, :n]
    q = centres.repeat_interleave(2, 1)[:, torch.arange(HEADS)[:, None], wanted].repeat_interleave(48, 2)[:, :, :n]
    generator.manual_seed(seed)
    q, k = (x + noise * torch.randn(x.shape, generator=generator) for x in (q, k))
    return q, k, torch.randn(1, HEADS // 2, n, 16, generator=generator)


def recall(tracker: ImportanceTracker, q: Tensor, k: Tensor, v: Tensor) -> float:
    _, lse = rw.attention_with_lse(q, k, v, rw.Causal())
    return float(tile_mass(q, k, lse, tracker.pattern).values.sum()) / lse.numel()


def blocks(pattern: rw.Pattern) -> Tensor:
    (table,) = [part for part in getattr(pattern, "parts", [pattern]) if isinstance(part, rw.BlockTable)]
    return table.mask


def step(tracker: ImportanceTracker, q: Tensor, k: Tensor, v: Tensor) -> None:
    _, lse = rw.attention_with_lse(q, k, v, tracker.pattern)
    tracker.update(q, k, lse)


def test_masses_are_those_of_attention() -> None:
    q, k, v = topics(n=700)
    tracker = ImportanceTracker(700, heads=HEADS, density=0.3, block_size=SIDE, turnover=0.0)
    before = blocks(tracker.pattern)
    weights = rw.attention_weights(q, k, tracker.pattern).to_dense()
    dense = torch.nn.functional.pad(weights, (0, 4, 0, 4)).unflatten(3, (-1, SIDE)).unflatten(2, (-1, SIDE)).sum((3, 5))
    queries = torch.full((22,), 32.0)
    queries[-1] = 700 - 21 * 32
    step(tracker, q, k, v)
    state = tracker.state_dict()
    rows = torch.arange(22)[:, None].expand(22, state["indices"].shape[-1])
    for head in range(HEADS):
        listed = state["indices"][head].long()
        real = listed < 22
        want = (dense[0, head] / queries[:, None])[rows[real], listed[real]]
        torch.testing.assert_close(state["mass"][head][real], want, rtol=1e-4, atol=1e-6)
    # with decay 0.5, half of the average comes from the new step
    assert torch.equal(blocks(tracker.pattern), before)
    tracker.decay = 0.5
    step(tracker, *(x.roll(1, 1) for x in (q, k, v)))
    assert not torch.allclose(tracker.state_dict()["mass"], state["mass"])


def test_exchanges_are_bounded_and_density_stays() -> None:
    tracker = ImportanceTracker(N, heads=HEADS, density=0.3, block_size=SIDE, turnover=0.25, local=2)
    rows = N // SIDE
    may = torch.arange(1, rows + 1)
    counts = torch.maximum((0.3 * may - 1e-9).ceil().long(), torch.minimum(may, torch.tensor(3)))
    assert torch.equal(blocks(tracker.pattern).sum(-1), counts.expand(HEADS, -1))
    forced = torch.eye(rows, dtype=torch.bool)
    forced |= forced.roll(-1, 1) & torch.ones(rows, rows, dtype=torch.bool).tril()
    forced[:, 0] = True
    changed = 0
    # a block must be on trial for an update before it is exchanged
    for seed in range(10):
        before = blocks(tracker.pattern)
        step(tracker, *topics(seed))
        after = blocks(tracker.pattern)
        assert torch.equal(after.sum(-1), counts.expand(HEADS, -1))
        assert not after.triu(1).any()
        assert after[:, forced].all()
        new = (after & ~before).sum(-1)
        assert torch.equal(new, (before & ~after).sum(-1))
        assert (new <= (0.25 * counts).ceil()).all()
        changed += int(new.sum())
    assert changed > 100


def test_recall_rises_over_fifty_steps() -> None:
    n, rows = 512, 512 // SIDE
    q, k, v = topics(100, n=n)
    tracker = ImportanceTracker(n, heads=HEADS, density=0.3, block_size=SIDE, sinks=0)
    first, found = recall(tracker, q, k, v), []
    for seed in range(50):
        step(tracker, *topics(seed, n=n))
        if seed % 10 == 9:
            found.append(recall(tracker, q, k, v))
    assert tracker.version == 50
    # the largest mass that a table of this density can hold, with the local blocks
    dense = rw.attention_weights(q, k, rw.Causal()).to_dense()[0].unflatten(2, (-1, SIDE)).unflatten(1, (-1, SIDE))
    held, own = dense.sum((2, 4)), torch.eye(rows, dtype=torch.bool)
    order = torch.where(own, torch.inf, held).argsort(-1, descending=True)
    counts = blocks(tracker.pattern).sum(-1, keepdim=True)
    best = torch.where(torch.arange(rows) < counts, held.gather(-1, order), 0.0)
    most = float(best.sum()) / (HEADS * n)
    assert found[-1] > 1.3 * first, (first, found, most)
    assert found[-1] > 0.9 * most, (first, found, most)


def test_recall_of_a_trained_model_rises_and_stays() -> None:
    """With new data at each update, blocks with good means but little mass are tried and not taken."""
    n, curve = 512, []
    known, held_out = standard_library(2**20).split(n)
    models: dict[str, ByteModel] = {}
    dense = {"dense": lambda q, k, v: rw.attention(q, k, v, rw.Causal())}
    train(dense, known, context=n, steps=60, budget=1e9, finish=models.__setitem__)
    seen = look(models["dense"], held_out)
    trackers = [ImportanceTracker(n, heads=HEADS, density=0.2, block_size=SIDE) for _ in seen]
    generator = torch.Generator().manual_seed(0)
    for update in range(51):
        if update % 10 == 0:
            held = [layer.recall(tracker.pattern) for layer, tracker in zip(seen, trackers, strict=True)]
            curve.append(sum(held) / len(held))
        layers = look(models["dense"], known.batch(n, generator)[:, :n])
        for layer, tracker in zip(layers, trackers, strict=True):
            step(tracker, layer.q, layer.k, layer.k)
    assert curve[-1] > 1.05 * curve[0], curve
    assert curve[-1] > 0.99 * max(curve), curve


def test_a_block_on_trial_has_the_mass_of_an_active_one() -> None:
    q, k, v = topics()
    tracker = ImportanceTracker(N, heads=HEADS, density=0.2, block_size=SIDE, turnover=0.4, decay=0.5)
    step(tracker, q, k, v)
    trials, table = tracker.state_dict()["trials"], blocks(tracker.pattern)
    on_trial = (trials < N // SIDE).nonzero().tolist()
    assert len(on_trial) > 50
    tracker._exchange = lambda rows: None  # type: ignore[method-assign]
    step(tracker, q, k, v)
    state = tracker.state_dict()
    for head, row, place in on_trial[::10]:
        block = int(trials[head, row, place])
        assert not table[head, row, block]
        both = table.clone()
        both[head, row, block] = True
        weights = rw.attention_weights(q, k, rw.BlockTable(both, SIDE) & rw.Causal()).to_dense()[0, head]
        want = float(weights[row * SIDE : (row + 1) * SIDE, block * SIDE : (block + 1) * SIDE].sum()) / SIDE
        where = state["trials"][head, row].tolist().index(block)
        got = float(state["tried"][head, row, where] / state["weight"][head, row, where])
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_a_table_in_use_does_not_change() -> None:
    """After an update between forward and backward, the gradient still belongs to the table of forward."""
    q, k, v = (x.requires_grad_() for x in topics())
    tracker = ImportanceTracker(N, heads=HEADS, density=0.3, block_size=SIDE)
    step(tracker, *(x.detach() for x in (q, k, v)))
    pattern, before = tracker.pattern, blocks(tracker.pattern)
    out, lse = rw.attention_with_lse(q, k, v, pattern)
    tracker.update(q, k, lse.detach())
    assert not torch.equal(blocks(tracker.pattern), before)
    assert torch.equal(blocks(pattern), before)
    kept = rw.BlockTable(before, SIDE) & rw.Causal()
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    for got, want in zip(
        grads, torch.autograd.grad(rw.attention(q, k, v, kept).square().sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_a_step_without_numbers_is_forgotten() -> None:
    tracker = ImportanceTracker(N, heads=HEADS, density=0.3, block_size=SIDE)
    for seed in range(3):
        step(tracker, *topics(seed))
    before = tracker.state_dict()
    q, k, v = topics(3)
    step(tracker, q * torch.nan, k, v)
    step(tracker, q, k, v)
    after = tracker.state_dict()
    assert before["weight"].any()
    assert not after["mass"][before["mass"].isfinite()].isnan().any()
    assert not after["tried"].isnan().any()


def test_what_looks_no_better_stays_out() -> None:
    q, k, v = topics()
    tracker = ImportanceTracker(N, heads=HEADS, density=0.2, block_size=SIDE, hysteresis=1e9)
    before = blocks(tracker.pattern)
    # some blocks look better, but by less than the hysteresis
    step(tracker, 0.1 * q, k, v)
    assert torch.equal(blocks(tracker.pattern), before)
    assert tracker.version == 1
    # with equal keys, blocks are not exchanged back and forth
    tracker = ImportanceTracker(N, heads=HEADS, density=0.2, block_size=SIDE)
    for _ in range(3):
        step(tracker, q, torch.ones_like(k), v)
    assert torch.equal(blocks(tracker.pattern), before)


@pytest.mark.parametrize("hysteresis", [0.0, 0.5])
def test_the_best_blocks_on_trial_replace_the_weakest_active_ones(hysteresis: float) -> None:
    """As long as the margin is exceeded, one by one; of blocks with equal masses the earlier stays, or enters."""
    tracker = ImportanceTracker(N, heads=HEADS, density=0.4, block_size=SIDE, turnover=1.0, hysteresis=hysteresis)
    rows, generator = N // SIDE, torch.Generator().manual_seed(0)
    free = torch.rand(tracker._trials.shape, generator=generator).argsort(-1).int().sort(-1).values
    held = (free[..., None] == tracker._indices[..., None, :]).any(-1) | (
        torch.rand(free.shape, generator=generator) < 0.3
    )
    tracker._trials = free.masked_fill(held, rows).sort(-1).values
    # few values, so that many are equal
    tracker._mass, tried = (torch.randint(6, x.shape, generator=generator).float() for x in (tracker._mass, free))
    tracker._mass[tracker._indices % 5 == 4] = torch.nan
    tracker._tried = tried.masked_fill(tracker._trials == rows, 0.0)
    tracker._weight = torch.full_like(tried, 0.5).masked_fill_(tracker._trials == rows, 0.0)
    before = tracker.state_dict()
    tracker._exchange(torch.arange(rows))
    after, exchanged = tracker.state_dict(), 0
    for head, row in itertools.product(range(HEADS), range(rows)):
        lists = [before[name][head, row].tolist() for name in ("indices", "mass", "trials", "tried")]
        active, trials = (dict(zip(*each, strict=True)) for each in (lists[:2], lists[2:]))
        want = {block: mass for block, mass in active.items() if block < rows}
        may_go = [block for block, mass in want.items() if block not in (0, row) and mass == mass]
        weakest = sorted(may_go, key=lambda block: (want[block], -block))
        for new, old in zip(sorted(trials, key=lambda block: (-trials[block], block)), weakest, strict=False):
            if new < rows and trials[new] > (1 + hysteresis) * want[old]:
                del want[old]
                want[new], exchanged = 2 * trials[new], exchanged + 1
        found = dict(zip(after["indices"][head, row].tolist(), after["mass"][head, row].tolist(), strict=True))
        found.pop(rows, None)
        assert list(found) == sorted(want)
        assert all(found[block] == mass or mass != mass for block, mass in want.items())
    assert exchanged > 100


def test_a_loaded_tracker_continues() -> None:
    first, second = (ImportanceTracker(N, heads=HEADS, density=0.2, block_size=SIDE) for _ in range(2))
    for seed in range(3):
        step(first, *topics(seed))
    second.load_state_dict(first.state_dict())
    for seed in range(3, 6):
        step(first, *topics(seed))
        step(second, *topics(seed))
    assert torch.equal(blocks(first.pattern), blocks(second.pattern))
    assert (first.version, second.version) == (6, 6)
    assert (
        torch.equal(first.state_dict()["mass"], second.state_dict()["mass"]) or first.state_dict()["mass"].isnan().any()
    )


def test_not_causal() -> None:
    q, k, v = topics(n=200)
    tracker = ImportanceTracker(200, heads=HEADS, density=0.5, block_size=SIDE, causal=False, local=2)
    for _ in range(3):
        step(tracker, q, k, v)
    table = tracker.pattern
    assert isinstance(table, rw.BlockTable)
    assert (table.mask.sum(-1) >= 4).all()
    near = torch.eye(7, dtype=torch.bool)
    assert table.mask[:, near | near.roll(1, 0).tril() | near.roll(1, 1).triu()].all()
    assert table.mask.triu(2).any()


def test_ranks_have_one_table_which_travels_while_they_compute() -> None:
    steps = 3
    alone = ImportanceTracker(N, heads=HEADS, density=0.2, block_size=SIDE)
    tables = []
    for seed in range(steps):
        step(alone, *topics(seed))
        tables.append(blocks(alone.pattern))

    def job(transport: Threaded, placement: str) -> None:
        ctx = ContextParallel(transport, rw.Causal(), N, heads=(HEADS, HEADS // 2), placement=placement)
        tracker = ImportanceTracker(N, heads=HEADS, density=0.2, block_size=SIDE, context=ctx)
        for seed, want in enumerate(tables):
            q, k, v = (ctx.shard(x, 2) for x in topics(seed))
            _, lse = rw.attention_with_lse(q, k, v, tracker.pattern, context=ctx)
            tracker.update(q, k, lse)
            # the exchange is pending: its messages were posted, and none was waited for
            assert transport.started[-1].startswith("table")
            got = sum(transport.counters.received)
            rw.attention(q, k, v, rw.SlidingWindow(8, 0), context=ctx)
            tracker_bytes = sum(transport.counters.received) - got
            begun = len(transport.started)
            found = blocks(tracker.pattern)
            assert len(transport.started) == begun
            assert sum(transport.counters.received) > got + tracker_bytes
            assert torch.equal(found[0] if found.ndim == 4 else found, want)
            assert tracker.version == seed + 1

    for placement in ("contiguous", "zigzag"):
        run(2, job, placement)


def test_ranks_at_different_versions_raise() -> None:
    def job(transport: Threaded) -> None:
        ctx = ContextParallel(transport, rw.Causal(), 256, heads=(HEADS, HEADS // 2), placement="contiguous")
        tracker = ImportanceTracker(256, heads=HEADS, density=0.5, block_size=SIDE, context=ctx)
        q, k, v = (ctx.shard(x, 2) for x in topics(n=256))
        _, lse = rw.attention_with_lse(q, k, v, tracker.pattern, context=ctx)
        tracker.version = transport.rank
        with pytest.raises(rw.RingError, match="version"):
            tracker.update(q, k, lse)

    run(2, job)


def test_a_placement_that_cuts_through_blocks() -> None:
    """Neither the tracker nor an indexer has changed or sent anything when it refuses one."""
    indexer = BlockIndexer(16, heads=HEADS, kv_heads=HEADS // 2, block_size=SIDE, pool=SIDE)

    def job(transport: Threaded, placement: str) -> None:
        ctx = ContextParallel(transport, rw.Causal(), 80, heads=(HEADS, HEADS // 2), placement=placement)
        with pytest.raises(rw.ShapeError, match=f"block_size: got {SIDE} with a {placement} placement of 16 tokens"):
            ImportanceTracker(80, heads=HEADS, density=0.5, block_size=SIDE, context=ctx)
        q, k = torch.randn(1, HEADS, ctx.local, 16), torch.randn(1, HEADS // 2, ctx.local, 16)
        with pytest.raises(rw.ShapeError, match=f"block_size: got {SIDE} with a {placement} placement of 16 tokens"):
            indexer.share(ctx, q, k, version=1, density=0.5)
        assert not transport.started

    for placement in ("contiguous", "zigzag"):
        run(2, job, placement)
