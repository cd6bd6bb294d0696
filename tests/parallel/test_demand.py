"""A rank's needs, received tiles and work agree with the dense relation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import ringweave as rw
from ringweave.parallel.planning.demand import Demand
from ringweave.parallel.planning.placement import Placement, contiguous, residues, striped, zigzag
from ringweave.patterns import Pattern
from ringweave.plan import branches

N = 1500
PATTERNS: dict[str, Pattern] = {
    "window": rw.SlidingWindow(200, 50),
    "documents": rw.Documents([300, 700, 200, 300]) & rw.Causal(),
    "longformer": rw.patterns.longformer(60, [0, 700]),
    "dilated": rw.Dilated(20, 8),
    "longnet": rw.LongNet([256, 512], [1, 4], causal=True),
    "per head": rw.PerHead([rw.Causal(), rw.SlidingWindow(64), rw.Causal(), rw.Causal()]),
}
PLACEMENTS: dict[str, Callable[[], Placement]] = {
    "contiguous": lambda: contiguous(N, 4, 128),
    "zigzag": lambda: zigzag(N, 3, 128),
    "striped": lambda: striped(N, 4, 32),
    "residue": lambda: residues(N, 4, 128),
    "half residue": lambda: residues(N, 8, 32, 4),
}


def demands(pattern: Pattern, placement: Placement, ratio: int = 2) -> list[Demand]:
    return [Demand.of(branch, placement, ratio) for branch in branches(pattern, N, N, heads=4)]


def tokens_moved(demand: Demand) -> np.ndarray:
    """Return (ranks, ranks) key tokens, times key heads and batch elements, that a row's rank receives from a column's."""
    ranks = demand.placement.ranks
    receiver, sender, tokens = demand.receipts(demand.needs)
    moved = np.zeros((ranks, ranks), np.int64)
    np.add.at(moved, (receiver, sender), tokens)
    return moved


@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_needs_receipts_and_work_against_the_tokens(pattern: str, placement: str) -> None:
    placed = PLACEMENTS[placement]()
    ranks = placed.ranks
    for demand in demands(PATTERNS[pattern], placed):
        branch, plan, tile = demand.branch, demand.plan, demand.tile
        position = branch.k_first + np.arange(branch.nk) * branch.rate
        rank, slot = placed.owners(position), placed.slots(position)
        # runs are whole, in order, and on their ranks
        for number, length in enumerate(demand.lengths):
            part = slice(number * demand.run, number * demand.run + length)
            assert (rank[part] == demand.owner[number]).all()
            assert np.array_equal(slot[part], demand.slot[number] + np.arange(length) * demand.stride)
        held = np.zeros((plan.kv_tiles, ranks), np.int64)
        np.add.at(held, (np.arange(branch.nk) // tile, rank), 1)
        tiles = np.minimum(branch.nk - np.arange(plan.kv_tiles) * tile, tile)
        dense = plan.to_dense().numpy()
        moved = np.zeros((ranks, ranks), np.int64)
        work, local = np.zeros(ranks), np.zeros(ranks)
        kv_heads = sorted({head // 2 for head in range(*branch.heads)})
        seen = []
        for kind, need in zip(demand.kinds, demand.needs, strict=True):
            for b, h in kind.members:
                seen.append((b, kv_heads[h]))
                heads = [i for i, head in enumerate(range(*branch.heads)) if head // 2 == kv_heads[h]]
                assert len(heads) == kind.queries
                wanted = np.zeros_like(need)
                for i in heads:
                    blocks = _blocks(dense[b, i], tile)
                    for q, k in zip(*np.nonzero(blocks), strict=True):
                        share = held[q] / tiles[q]
                        work += share
                        whole = held[k] == tiles[k]
                        local += share * whole
                        wanted[held[q] > 0, k] = True
                np.testing.assert_array_equal(need, wanted)
                for receiver, k in zip(*np.nonzero(wanted), strict=True):
                    moved[receiver] += held[k] * (np.arange(ranks) != receiver)
        assert sorted(seen) == [(0, head) for head in kv_heads]
        np.testing.assert_array_equal(tokens_moved(demand), moved)
        np.testing.assert_allclose(demand.work(), work)
        np.testing.assert_allclose(demand.local_work(), local)
        assert work.sum() == pytest.approx(plan.tiles)


def _blocks(dense: np.ndarray, tile: int) -> np.ndarray:
    side = -(-dense.shape[0] // tile) * tile
    padded = np.zeros((side, side), bool)
    padded[: dense.shape[0], : dense.shape[1]] = dense
    return padded.reshape(side // tile, tile, side // tile, tile).any((1, 3))


def test_kinds_tell_apart_what_their_heads_attend() -> None:
    (demand,) = demands(PATTERNS["per head"], PLACEMENTS["contiguous"]())
    assert [(kind.members.tolist(), kind.groups, kind.uses) for kind in demand.kinds] == [
        ([[0, 0]], (0, 1), (1, 1)),
        ([[0, 1]], (0,), (2,)),
    ]


def test_dilation_within_its_ranks_moves_nothing() -> None:
    tokens = 128 * 128
    for branch in branches(rw.Dilated(200, 8), tokens, tokens):
        assert branch.rate == 8
        demand = Demand.of(branch, residues(tokens, 8, 128), 1)
        assert not tokens_moved(demand).any()
        assert np.array_equal(demand.local_work(), demand.work())
        # below the number of ranks: a view's neighbours only
        demand = Demand.of(branch, residues(tokens, 16, 128, 8), 1)
        assert demand.runs_per_tile == 1
        receiver, sender = np.nonzero(tokens_moved(demand))
        assert sorted(zip(receiver.tolist(), sender.tolist(), strict=True)) == [
            (2 * branch.k_first, 2 * branch.k_first + 1),
            (2 * branch.k_first + 1, 2 * branch.k_first),
        ]
