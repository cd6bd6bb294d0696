"""DTensors sharded by heads or batch give results and gradients with the same sharding, or an error."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw

from ..cases import PATTERNS
from ..options import VALUES
from .processes import Pool

JOBS = "tests.parallel.jobs_sharded"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
def test_as_on_one_device(pool2: Pool, compiled: bool) -> None:
    """Out, lse and all gradients, with those of tables and sinks, are right for every sharding."""
    for found in pool2.run(f"{JOBS}:compared", compiled, timeout=240):
        assert found
        assert max(found.values()) < 2e-6, found


def test_refusals(pool2: Pool) -> None:
    for texts in pool2.run(f"{JOBS}:refused", timeout=240):
        assert "placements: got (Shard(dim=2),); wanted Replicate(), Shard(0) (batch) or Shard(1) (heads)" in texts[0]
        assert "k placements: got (Replicate(),)" in texts[1]
        assert "k heads: got 1; wanted a multiple of the 2 ranks" in texts[2]
        assert "dropout: got 0.1; wanted 0 with DTensors on several ranks" in texts[3]
        assert "wanted one pattern for all batch elements if ranks share the batch" in texts[4]
        assert "wanted one pattern for all batch elements if ranks share the batch" in texts[5]
        assert "LongNet([64], [8]): got" not in texts[6]
        assert "wanted heads that attend the same keys on 2 ranks as on one" in texts[6]
        assert "dropout: got 0.1; wanted 0 with DTensors on several ranks" in texts[7]
        assert "wanted (Hq,) with Hq = 6, the number of query heads" in texts[8]
        assert "slopes" in texts[9]
        assert "with Hkv = 4, the number of key heads of k" in texts[10]
        assert "wanted one pattern for all batch elements if ranks share the batch" in texts[11]


def test_functions(pool2: Pool) -> None:
    """A function gets the batch elements and the heads of the whole call, by terms and in tiles."""
    for found in pool2.run(f"{JOBS}:functions", timeout=240):
        assert found
        assert max(found.values()) < 2e-6, found


@pytest.mark.parametrize("option", [name for name in VALUES if name != "context"])
def test_ranks_use_or_refuse_an_option(pool2: Pool, option: str) -> None:
    """DTensors that are sharded by heads give what one device gives with the option, or raise a typed error."""
    found = pool2.run(f"{JOBS}:with_option", option, timeout=240)
    assert found == [found[0]] * 2
    assert found[0] == ("refused" if option == "dropout" else "as on one device")


def test_dropout_on_one_rank(pool2: Pool) -> None:
    assert pool2.run(f"{JOBS}:dropped", timeout=240) == [(True, True)] * 2


@pytest.mark.parametrize("name", list(PATTERNS))
def test_shards_of_patterns(name: str) -> None:
    pattern = PATTERNS[name](100)
    whole = pattern.to_dense(100, heads=4)
    parts = [pattern.shard(rank, 2, 4).to_dense(100, heads=2) for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert pattern.shard(0, 1) is pattern


def test_shards_by_head() -> None:
    def by_head(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q + k) % (h + 2) == 0

    table = rw.BlockTable(torch.rand(4, 4, 4) < 0.5, 32)
    batched = rw.BlockTable(torch.rand(2, 4, 4, 4) < 0.5, 32)
    each = rw.PerHead([rw.Causal(), rw.Full(), rw.SlidingWindow(3), rw.Sinks(2)])
    function = rw.from_mask_mod(by_head)
    grouped = rw.BlockTable(torch.rand(2, 4, 4) < 0.5, 32, heads="kv") & rw.Causal()
    wide = rw.BlockTable(torch.rand(1, 4, 4, 4) < 0.5, 32, heads="kv")
    for heads, pattern in ((4, grouped), (8, wide)):
        parts = [pattern.shard(rank, 2, heads=heads).to_dense(128, heads=heads // 2) for rank in range(2)]
        assert torch.equal(torch.cat(parts, 1), pattern.to_dense(128, heads=heads)), pattern
    with pytest.raises(rw.PatternError, match="tables of 2 heads; wanted a multiple of 4"):
        grouped.shard(0, 4, heads=4)
    nested = rw.PerHead([each, ~each, table, function]), rw.PerHead([batched] * 4)
    inside = each.within(rw.Documents([28, 100]))
    for pattern in (table, batched, each, ~table & rw.Causal() | each, function, inside, *nested):
        batch = pattern.extents()[0] or 1
        whole = pattern.to_dense(128, heads=4, batch=batch)
        parts = [pattern.shard(rank, 2, heads=4).to_dense(128, heads=2, batch=batch) for rank in range(2)]
        assert torch.equal(torch.cat(parts, 1), whole), pattern
    mixture = rw.LongNet([32, 64], [1, 2])
    parts = [mixture.shard(rank, 2, heads=4).to_dense(128, heads=2) for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), mixture.to_dense(128, heads=4))


def test_a_mixture_of_one_offset_is_its_own_shard() -> None:
    assert rw.LongNet([32], [4], offset=1).shard(1, 2) == rw.LongNet([32], [4], offset=1)
