"""Keys that are packed from lists: the heads of one query are the rows of a tile (View::chosen)."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw
from ringweave.environment import CPU_VARIANT

from ..oracle import Expected, Inputs
from .plans import DTYPES, VARIANTS


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("most", [1, 37, 300, 1300])
@pytest.mark.parametrize(("nq", "heads"), [(1, 16), (5, 4)])
def test_packed_keys(nq: int, heads: int, most: int, dtype: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of single keys give the definition's results, and equal bits on any number of threads; NaN elsewhere is not read."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    keys, generator = 1500, torch.Generator().manual_seed(most)
    lists = torch.stack([torch.randperm(keys, generator=generator)[:most] for _ in range(nq)])
    if most > 1:
        lists[torch.rand(lists.shape, generator=generator) < 0.1] = -1
    x = Inputs.random(nq, keys, heads=heads, kv_heads=1, dim=40, value_dim=24, dtype=DTYPES[dtype])
    mask = torch.zeros(nq, keys + 1).scatter_(1, lists.clamp(min=-1) % (keys + 1), 1.0)[:, :keys]
    expected = Expected.of(x, mask.expand(1, heads, nq, keys), 40**-0.5)
    unread = mask.sum(0) == 0
    k, v = x.k.clone(), x.v.clone()
    k[:, :, unread], v[:, :, unread] = torch.nan, torch.nan
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(rw.attention_with_lse(x.q, k, v, rw.Selected(lists), backend="cpu"))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    expected.check({"out": results[0].out, "lse": results[0].lse})
