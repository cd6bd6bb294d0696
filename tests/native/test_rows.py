"""A query row's bits depend on its own list of key tiles, not on the other rows of a call."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ..oracle import Inputs
from .plans import DTYPES, VARIANTS, Case, case, plan_of, random_masks

TOKENS = 4225  # 33 tiles of 128 queries, and a last tile of one query
Results = tuple[Tensor, Tensor]


def alone(whole: Case, tile: int, *, gathered: bool, apart: bool) -> Case:
    """Return one query tile with all of K and V, or with its own tiles gathered and renumbered; if ``apart``, heads share no list."""
    x, plan = whole.x, whole.plan
    names = ("row_ptr", "col", "mask_id", "row_set")
    row_ptr, col, mask_id, row_set = (torch.as_tensor(plan[name]) for name in names)
    q_tile, kv_tile = int(plan["q_tile"]), int(plan["kv_tile"])
    sets = row_set.flatten() if apart else torch.arange(len(row_ptr))
    entries = [torch.arange(int(row_ptr[g, tile]), int(row_ptr[g, tile + 1])) for g in sets]
    ends = torch.tensor([0, *(len(each) for each in entries)]).cumsum(0)
    col, mask_id = col[torch.cat(entries)], mask_id[torch.cat(entries)]
    k, v = x.k, x.v
    if gathered:
        used, col = col.unique(return_inverse=True)
        kept = torch.isin(torch.arange(k.shape[2]) // kv_tile, used)
        k, v = k[:, :, kept], v[:, :, kept]
    rows = slice(tile * q_tile, (tile + 1) * q_tile)
    plan = plan | {
        "row_ptr": torch.stack([ends[:-1], ends[1:]], 1).int(),
        "col": col.int(),
        "mask_id": mask_id,
        "row_set": torch.arange(row_set.numel(), dtype=torch.int32).view_as(row_set) if apart else row_set,
    }
    return replace(whole, x=replace(x, q=x.q[:, :, rows], k=k, v=v, dout=x.dout[:, :, rows]), plan=plan)


def tiles_alone(whole: Case, variant: str = "") -> Iterator[tuple[slice, Results]]:
    """Yield each query tile that attends any key, with its results computed alone, on one and on two threads by turns."""
    row_ptr, q_tile = torch.as_tensor(whole.plan["row_ptr"]), int(whole.plan["q_tile"])
    for tile in range(row_ptr.shape[1] - 1):
        if (row_ptr[:, tile + 1] > row_ptr[:, tile]).any():
            each = alone(whole, tile, gathered=tile % 2 == 1, apart=tile % 3 != 1)
            yield slice(tile * q_tile, (tile + 1) * q_tile), each.forward(variant, threads=1 + tile % 2)


def assert_rows_alone(whole: Case, variant: str = "") -> None:
    first = whole.forward(variant, threads=1)
    for threads in (2, 5):
        assert all(map(torch.equal, first, whole.forward(variant, threads)))
    tiles = 0
    for rows, results in tiles_alone(whole, variant):
        tiles += 1
        for name, each, of_whole in zip(("out", "lse"), results, first, strict=True):
            assert torch.equal(each, of_whole[:, :, rows]), f"{name} of queries {rows.start} on"
    assert tiles > 1


@functools.cache
def masks_of(pattern: str) -> Tensor:
    """Return masks with short lists of key tiles, long lists, and long lists beside short ones."""
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    if pattern == "causal":
        return (j <= i)[None]
    if pattern == "random":
        return random_masks(2, TOKENS, TOKENS, 128, 128, density=0.5)
    window = (i - j).abs() < 200
    return (window if pattern == "window" else window | (i < 3))[None]


@pytest.mark.parametrize("dim", [64, 24])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("pattern", ["window", "causal", "global", "random"])
def test_a_tile_alone(pattern: str, heads: tuple[int, int], dtype: str, dim: int) -> None:
    masks = masks_of(pattern)
    row_set = torch.arange(heads[0])[None] // 2 % len(masks)
    plan = plan_of(masks, row_set, 128, 16 if pattern == "global" else 128)
    x = Inputs.random(TOKENS, heads=heads[0], kv_heads=heads[1], dim=dim, dtype=DTYPES[dtype])
    assert_rows_alone(Case(x, plan, dim**-0.5, torch.empty(0)))


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tile_alone_on_every_variant(variant: str, dtype: str, heads: tuple[int, int]) -> None:
    """Query tiles computed alone keep their bits on every variant, for lists of up to 33 tiles of 256, some split in the whole call."""
    masks = random_masks(1, 66, 8300, 16, 256, density=0.2)
    masks[:, :16] = masks[:, 64:] = True
    whole = case(66, 8300, (16, 256), dtype=dtype, heads=heads[0], kv_heads=heads[1], dims=(16, 24), masks=masks)
    assert_rows_alone(whole, variant)


def test_many_long_lists() -> None:
    """Lists of twenty batch elements are not split, since partial sums would take 26 MB; those of one are, with equal bits."""
    masks = torch.ones(1, 256, 10000, dtype=torch.bool)
    many = case(256, 10000, (256, 256), batch=20, heads=1, kv_heads=1, dims=(8, 256), masks=masks)
    x, results = many.x, many.forward()
    for b in range(0, 20, 6):
        q, k, v, dout = (t[b : b + 1] for t in (x.q, x.k, x.v, x.dout))
        plan = many.plan | {"row_set": torch.zeros(1, 1, dtype=torch.int32)}
        one = replace(many, x=replace(x, q=q, k=k, v=v, dout=dout), plan=plan)
        assert all(torch.equal(each, whole[b : b + 1]) for each, whole in zip(one.forward(), results, strict=True))
