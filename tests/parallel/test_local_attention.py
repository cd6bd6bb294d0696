"""The kernel calls of all ranks compute each pair of a query and a key once, at the positions of their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ringweave as rw
from ringweave.parallel.execution.local_attention import LocalAttention
from ringweave.parallel.execution.tokens import Tokens
from ringweave.parallel.planning.placement import NAMED, Placement
from ringweave.parallel.schedules import Schedules

from ..cases import MIXTURES, PATTERNS

NAMES = ["window", "causal", "documents", "per_head", "longnet", "dilated"]


def places(tokens: Tokens | None, count: int) -> np.ndarray:
    """Return places as an array; None stands for all ``count`` places."""
    if tokens is None:
        return np.arange(count)
    return np.arange(*tokens.span) if tokens.index is None else tokens.index.numpy()


def check_shard(attention: LocalAttention, positions: np.ndarray, remote: bool) -> np.ndarray:
    """Check that views and tiles agree on the positions of tokens; return the kernel's rows that the call computes."""
    queries, keys, cut = attention.queries, attention.keys, attention.cut
    assert (len(cut.query_positions), len(cut.key_positions)) == (attention.branch.nq, attention.branch.nk)
    rows = places(queries.kernel_tokens, attention.branch.nq)
    assert len(rows) == queries.shard_tokens.count
    if not remote:
        # a remote query has its place in the received tensor, not in the shard
        assert (cut.query_positions[rows] == positions[places(queries.shard_tokens, 0)]).all()
    columns = places(keys.buffer_tokens, attention.branch.nk)
    assert (cut.key_positions[columns] == positions[places(keys.shard_tokens, 0)]).all()
    assert (keys.tile_at[keys.tiles] == np.arange(len(keys.tiles))).all()
    return rows


def check(placement: Placement, heads: tuple[int, int], schedule: str, pattern: rw.Pattern) -> int:
    """Check how often the kernel calls of all ranks compute each pair; return the number of calls of remote queries."""
    remote_calls = 0
    got = torch.zeros(1, heads[0], placement.tokens, placement.tokens, dtype=torch.int8)
    want = torch.zeros_like(got)
    for rank in range(placement.ranks):
        schedules = Schedules(placement, heads, rank, schedule)
        for stage in schedules.of(pattern).stages:
            calls = [(each, False) for each in stage.own.values()] + [(each, True) for each in stage.remote.values()]
            remote_calls += len(stage.remote)
            for attention, remote in calls:
                rows = check_shard(attention, placement.positions(rank), remote)
                dense = attention.branch.plan().to_dense()
                q, k = (torch.from_numpy(x) for x in (attention.cut.query_positions, attention.cut.key_positions))
                head = torch.arange(*attention.branch.heads)
                got[:, head[:, None, None], q[rows][:, None], k] += dense[:, :, rows]
    for demand in schedules.demands(pattern):
        view = demand.branch
        q, k = (
            first + torch.arange(count) * view.rate
            for first, count in ((view.q_first, view.nq), (view.k_first, view.nk))
        )
        want[:, torch.arange(*view.heads)[:, None, None], q[:, None], k] += view.plan().to_dense()
    assert torch.equal(got, want)
    assert want.any()
    return remote_calls


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("name", NAMES)
def test_each_pair_is_computed_once(name: str, placement: str, schedule: str) -> None:
    for ranks, block in ((2, 128), (3, 16)):
        check(NAMED[placement](500, ranks, block), (4, 2), schedule, (PATTERNS | MIXTURES)[name](500))


def test_each_pair_is_computed_once_where_queries_move() -> None:
    pattern = rw.SlidingWindow(256) | rw.Global(128)
    assert check(NAMED["contiguous"](4096, 3, 128), (1, 1), "ring", pattern) > 0
