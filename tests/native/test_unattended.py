"""NaN and infinities reach only the rows and keys of their pairs, on every variant of the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ..test_unattended import check as every
from .plans import DTYPES, VARIANTS, Case, _cpu, case, poison, random_masks
from .test_dead_keys import KEYS, chosen_masks
from .test_pages import LENGTHS, ragged_case, stored

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))
BAD = torch.tensor([torch.nan, torch.inf, -torch.inf])


def strewn(x: Tensor, share: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return x with some elements that are not finite, and which tokens have them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.rand(x.shape[:3], generator=generator) < share
    some = tokens[..., None] & (torch.rand(x.shape, generator=generator) < 0.2)
    kind = torch.randint(0, 3, x.shape, generator=generator)
    return torch.where(some, BAD[kind].to(x.dtype), x), some


def sums(pairs: Tensor, broken: Tensor) -> Tensor:
    """Return which sums (B, H, M, C) of rows (B, H, N, C) over pairs (B, H, M, N) have an element that is not finite."""
    return (pairs.double() @ broken.double().repeat_interleave(pairs.shape[1] // broken.shape[1], 1)) > 0


def check(each: Case, variant: str) -> None:
    """Check the numbers of each tensor by the relation of the masks; some queries and keys have no pair."""
    every(lambda x: replace(each, x=x).run(variant), each.x, each.mask)


@every_variant
@every_dtype
@pytest.mark.parametrize(
    ("nq", "nk", "tiles"),
    [
        (1, 300, (16, 32)),
        (3, 1000, (32, 32)),
        (4, 90, (16, 48)),
        (70, 90, (32, 32)),
        (130, 301, (64, 128)),
        (301, 70, (256, 16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
def test_numbers_in_each_tensor(
    heads: tuple[int, int], nq: int, nk: int, tiles: tuple[int, int], dtype: str, variant: str
) -> None:
    masks = random_masks(1, nq, nk, *tiles, density=0.8)
    masks[:, 3::7] = masks[:, :, 5::9] = False
    check(case(nq, nk, tiles, dtype=dtype, heads=heads[0], kv_heads=heads[1], dims=(24, 40), masks=masks), variant)


@every_variant
@every_dtype
@pytest.mark.parametrize("kv_tile", [48, 128, 256])
def test_few_keys_of_each_tile(kv_tile: int, dtype: str, variant: str) -> None:
    """Keys that are packed by themselves are spared too."""
    masks = chosen_masks(1, 330, 64, 0.03)
    check(case(330, KEYS, (64, kv_tile), dtype=dtype, heads=4, kv_heads=1, dims=(72, 24), masks=masks), variant)


@every_variant
@every_dtype
@pytest.mark.parametrize("nq", [1, 40])
def test_nan_in_pages(nq: int, dtype: str, variant: str) -> None:
    each = ragged_case(nq, 64, dtype)
    v, of_values = strewn(each.x.v, 0.1)
    for b, n in enumerate(LENGTHS):
        v[b, :, n:] = torch.nan
    k, table = stored(each.x.k, 32)
    pool, _ = stored(v, 32)
    out, lse = poison(*each.x.dout.shape, dtype=each.x.q.dtype), poison(*each.x.q.shape[:3])
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    inputs = each.inputs() | {"k": k, "v": pool}
    _cpu.forward(
        **inputs, **each.rows(), out=out, lse=lse, threads=2, variant=variant, table=table, lengths=lengths
    )  # fmt: skip
    clean, may = each.forward(variant)[0], sums(each.mask, of_values)
    assert torch.equal(~out.isfinite(), may)
    assert torch.equal(out[~may], clean[~may])


@every_dtype
def test_nan_in_values_with_any_number_of_threads(dtype: str) -> None:
    """Rows that several threads share are summed again by one."""
    masks = torch.rand(1, 3, 20000, generator=torch.Generator().manual_seed(1)) < 0.9
    each = case(3, 20000, (32, 32), dtype=dtype, dims=(16, 8), masks=masks)
    v, of_values = strewn(each.x.v, 2e-4)
    clean, may = each.forward()[0], sums(each.mask, of_values)
    for threads in (1, 2, 5):
        out, _ = replace(each, x=replace(each.x, v=v)).forward(threads=threads)
        assert torch.equal(~out.isfinite(), may)
        assert torch.equal(out[~may], clean[~may])
    assert 0 < may.double().mean() < 1


@every_variant
@every_dtype
def test_the_largest_numbers_are_kept_beside_nan(dtype: str, variant: str) -> None:
    """A product that skips numbers that are not finite keeps those with the greatest exponent, in values and gradients."""
    masks = torch.eye(40, dtype=torch.bool)[None]
    each = case(40, 40, (16, 16), dtype=dtype, heads=1, kv_heads=1, dims=(8, 8), masks=masks)
    largest = torch.full_like(each.x.v, torch.finfo(each.x.v.dtype).max)
    largest[:, :, 3] = torch.nan
    each.x.v = largest
    out, _ = each.forward(variant)
    assert torch.equal(out.isnan(), largest.isnan())
    assert torch.equal(out.nan_to_num(), largest.nan_to_num())
    each.x.v, each.x.dout = torch.zeros_like(largest), largest
    dv = each.backward(*each.forward(variant), variant)[2]
    assert torch.equal(dv.isnan(), largest.isnan())
    assert torch.equal(dv.nan_to_num(), largest.nan_to_num())
