"""The bytes between ranks equal the bytes that a dense mask of the pattern requires."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import ringweave as rw
from ringweave.parallel import ContextParallel, Transport
from ringweave.parallel.planning.cost import Load
from ringweave.parallel.planning.workload import Widths
from ringweave.plan import branches
from ringweave_lab.simulation.simulate import simulate

from ..cases import MIXTURES, PATTERNS
from ..oracle import Inputs
from .processes import Pool
from .spread import Share, spread
from .threads import run

PATTERNS_AND_MIXTURES = PATTERNS | MIXTURES


def least(pattern: rw.Pattern, x: Inputs, placement: rw.parallel.Placement) -> np.ndarray:
    """Return the (ranks, ranks) key tokens, times heads and batch elements, that a row's rank must receive from a column's.

    By token, from the dense relation of each branch: the tiles in which a query of the rank attends something.
    """
    n, heads, ratio = x.q.shape[2], x.q.shape[1], x.q.shape[1] // x.k.shape[1]
    ranks = placement.ranks
    total = np.zeros((ranks, ranks), np.int64)
    for branch in branches(pattern, n, n, heads=heads, batch=len(x.q)):
        tile = branch.tile[0]
        positions = branch.k_first + np.arange(branch.nk) * branch.rate
        owner = placement.owners(positions)
        count = math.ceil(branch.nk / tile)
        dense = branch.pattern.to_dense(branch.nq, branch.nk, branch.head_count, batch=branch.batch).numpy()
        by_query_tile = np.add.reduceat(dense, np.arange(0, branch.nq, tile), axis=2) > 0
        tiles = np.add.reduceat(by_query_tile, np.arange(0, branch.nk, tile), axis=3) > 0
        kv_of = np.array([head // ratio for head in range(*branch.heads)])
        for rank in range(ranks):
            held = np.unique(np.flatnonzero(owner == rank) // tile)
            # a rank with a part of a query tile computes that tile's row
            needed = tiles[:, :, held].any(2) if len(held) else np.zeros((*tiles.shape[:2], count), bool)
            for head in np.unique(kv_of):
                wanted = np.repeat(needed[:, kv_of == head].any(1), tile, axis=1)[:, : branch.nk]
                for peer in range(ranks):
                    if peer != rank:
                        total[rank, peer] += (wanted & (owner == peer)).sum()
    return total


def moved(shares: list[Share]) -> np.ndarray:
    return np.array([share.received for share in shares])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", ["contiguous", "striped"])
@pytest.mark.parametrize("name", list(PATTERNS_AND_MIXTURES))
def test_received_bytes_are_the_least(name: str, placement: str) -> None:
    """G1: forward moves keys and values once, backward their gradients once, in float32, and nothing else except agreements."""
    x = Inputs.random(500, heads=4, kv_heads=2, batch=2, dim=8, value_dim=16, dtype=torch.bfloat16)
    pattern = PATTERNS_AND_MIXTURES[name](500)
    shares = spread(4, x, pattern, schedule="allgather", placement=placement)
    ctx = run(4, lambda t: ContextParallel(t, pattern, 500, heads=(4, 2), placement=placement))[0]
    tokens = least(pattern, x, ctx.placement)
    forward, backward = tokens * (8 + 16) * 2, tokens.T * (8 + 16) * 4
    assert (moved(shares) == forward + backward).all()


@pytest.mark.parametrize("placement", ["contiguous", "striped"])
@pytest.mark.parametrize("name", ["window", "causal", "documents", "per_head", "longnet"])
def test_ring_moves_as_little(name: str, placement: str) -> None:
    """G1: if no query moves, the ring moves the least forward, and keys and values again in backward, which stores none."""
    x = Inputs.random(700, heads=4, kv_heads=2, dim=8)
    pattern = PATTERNS_AND_MIXTURES[name](700)
    shares = spread(4, x, pattern, schedule="ring", placement=placement)
    ctx = run(4, lambda t: ContextParallel(t, pattern, 700, heads=(4, 2), placement=placement))[0]
    tokens = least(pattern, x, ctx.placement)
    assert (moved(shares) == (2 * tokens + tokens.T) * (8 + 8) * 4).all()


def test_agreements_are_little() -> None:
    """G1: metadata is at most 1 % of the payload, already at a length that is short for a ring."""
    x = Inputs.random(8192, heads=4, kv_heads=4, dim=32)
    for share in spread(4, x, rw.SlidingWindow(1024), schedule="allgather"):
        assert 0 < share.metadata <= 0.01 * max(sum(share.received), 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(PATTERNS_AND_MIXTURES))
def test_a_node_receives_each_tile_once(name: str) -> None:
    """G4: of the tiles of another node, each of 2 nodes of 4 ranks receives the union of its ranks' needs, once.

    Within a node, a rank receives its remaining tiles from the rank that received them, by the owner's index in its node.
    """
    x = Inputs.random(1000, heads=4, kv_heads=2, dim=8)
    pattern = PATTERNS_AND_MIXTURES[name](1000)
    shares = spread(8, x, pattern, 4, schedule="allgather", placement="zigzag")
    ctx = run(8, lambda t: ContextParallel(t, pattern, 1000, heads=(4, 2), placement="zigzag"))[0]
    union = inside = 0
    for demand in ctx.schedules.demands(pattern):
        run_tile = np.arange(len(demand.owner)) // demand.runs_per_tile
        for kind, need in zip(demand.kinds, demand.needs, strict=True):
            for node in (0, 1):
                by_node = need[4 * node : 4 * node + 4].any(0)[run_tile] & (demand.owner // 4 != node)
                union += int(demand.lengths[by_node].sum()) * len(kind.members)
            for rank in range(8):
                relayed = need[rank, run_tile] & (demand.owner % 4 != rank % 4)
                inside += int(demand.lengths[relayed].sum()) * len(kind.members)
    received = moved(shares)
    across = received[:4, 4:].sum() + received[4:, :4].sum()
    # forward, and gradients back: both in float32
    assert across == union * 2 * (8 + 8) * 4
    assert received.sum() - across == inside * 2 * (8 + 8) * 4


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["window", "causal", "bigbird", "documents", "longnet", "global rows"])
def test_simulated_bytes_are_the_real_ones(name: str, ranks: int) -> None:
    """The forward bytes of ``simulate`` and ``explain`` equal the counters, in both schedules."""
    tokens = 4096 if name == "global rows" else 1500
    made = {"global rows": lambda n: rw.SlidingWindow(256) | rw.Global(128)} | PATTERNS_AND_MIXTURES
    pattern = made[name](tokens)
    widths = Widths()
    q, k, v = (torch.zeros(1, heads, tokens, widths.key, dtype=torch.bfloat16) for heads in (4, 4, 4))
    for schedule in ("allgather", "ring"):

        def job(transport: Transport) -> tuple[int, ContextParallel]:
            ctx = ContextParallel(transport, pattern, tokens, heads=(4, 4), schedule=schedule)  # noqa: B023
            with torch.no_grad():
                rw.attention(*(ctx.shard(x, 2) for x in (q, k, v)), pattern, context=ctx)
            return sum(transport.counters.received), ctx

        found = run(ranks, job)
        demands = found[0][1].schedules.demands(pattern)
        load = Load.of(demands, widths, queries=schedule == "ring")
        assert load.received.tolist() == [received for received, _ in found]
        if schedule == "ring":
            (row,) = simulate(pattern, tokens, [ranks], heads=(4, 4))
            assert row.ringweave.bytes_worst == load.received.max()
            assert row.ringweave.bytes_total == load.received.sum()


def test_dilation_on_residues_moves_nothing() -> None:
    """G2: dilation by a multiple of the number of ranks moves nothing."""
    x = Inputs.random(4096, heads=2, dim=8)
    pattern = rw.Dilated(64, 8)
    assert len(branches(pattern, 4096, 4096, heads=2)) == 8
    for ranks in (2, 4, 8):
        assert sum(sum(share.received) for share in spread(ranks, x, pattern)) == 0


def test_processes_count_the_same(pool4: Pool) -> None:
    """The real transport's counters, over Gloo, equal those of threads."""
    x = Inputs.random(700, heads=4, kv_heads=2, dim=8)
    pattern = rw.SlidingWindow(100) | rw.Sinks(3)
    for options in ({"schedule": "allgather"}, {"schedule": "ring"}):
        real = pool4.run("tests.parallel.jobs_ring:call", x, pattern, options)
        for share, other in zip(real, spread(4, x, pattern, **options), strict=True):
            assert share.received == other.received
            assert share.sent == other.sent
            for name, result in share.results.items():
                assert torch.equal(result, other.results[name]), name
