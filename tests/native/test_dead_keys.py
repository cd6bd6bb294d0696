"""Keys that no query of a tile attends are skipped wherever they are in the tile, forward and backward.

In forward they change no bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from .plans import DTYPES, VARIANTS, Case, case, plan_of

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))
KEYS = 701  # odd, so that the last key has no pair


def chosen_masks(groups: int, nq: int, q_tile: int, density: float, seed: int = 0) -> Tensor:
    """Return masks (G, nq, KEYS) in which each query tile chooses keys, and each query attends most of them."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(groups, -(-nq // q_tile), KEYS, generator=generator) < density
    return keys.repeat_interleave(q_tile, 1)[:, :nq] & (torch.rand(groups, nq, KEYS, generator=generator) < 0.9)


@every_variant
@every_dtype
@pytest.mark.parametrize("density", [0.02, 0.3, 0.9])
@pytest.mark.parametrize(
    ("nq", "tiles"), [(3, (16, 128)), (100, (64, 128)), (70, (32, 48)), (130, (128, 256))], ids=str
)
def test_chosen_keys(nq: int, tiles: tuple[int, int], density: float, dtype: str, variant: str) -> None:
    masks = chosen_masks(2, nq, tiles[0], density)
    case(nq, KEYS, tiles, dtype=dtype, heads=4, dims=(24, 40), groups=2, masks=masks).check(variant)


def with_a_reader(each: Case) -> Case:
    """Return the case with one more query, which attends all keys, so that no key of the last query tile is dead."""
    masks = torch.cat([each.mask[0, :1] > 0, torch.ones(1, 1, KEYS, dtype=torch.bool)], 1)
    plan = plan_of(masks, torch.zeros(1, each.x.q.shape[1]), int(each.plan["q_tile"]), int(each.plan["kv_tile"]))
    q, dout = (torch.cat([x, x[:, :, :1]], 2) for x in (each.x.q, each.x.dout))
    return replace(each, x=replace(each.x, q=q, dout=dout), plan=plan)


@every_variant
@every_dtype
@pytest.mark.parametrize("density", [0.01, 0.1, 0.6])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1)], ids=str)
@pytest.mark.parametrize("kv_tile", [48, 128, 256])
@pytest.mark.parametrize("nq", [1, 3, 50])
def test_the_bits_of_a_tile_without_dead_keys(
    nq: int, kv_tile: int, heads: tuple[int, int], density: float, dtype: str, variant: str
) -> None:
    """A query has equal bits beside a query that attends all keys, where the kernel skips no key."""
    masks = chosen_masks(1, nq, 64, density, seed=nq)
    each = case(nq, KEYS, (64, kv_tile), dtype=dtype, heads=heads[0], kv_heads=heads[1], dims=(72, 24), masks=masks)
    out, lse = each.forward(variant)
    whole_out, whole_lse = with_a_reader(each).forward(variant)
    assert torch.equal(out, whole_out[:, :, :nq])
    assert torch.equal(lse, whole_lse[:, :, :nq])


@every_dtype
def test_any_number_of_threads(dtype: str) -> None:
    """Gradients over few keys of each tile have equal bits on any number of threads."""
    masks = chosen_masks(2, 700, 64, 0.05)
    each = case(700, KEYS, (64, 128), dtype=dtype, heads=4, kv_heads=2, dims=(40, 24), groups=2, masks=masks)
    one = each.run(threads=1)
    for threads in (2, 5):
        for name, value in each.run(threads=threads).items():
            assert torch.equal(value, one[name]), (name, threads)
