"""Keys in pages give the bits of contiguous keys at the binding, and no page table leads to invalid memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.errors import ShapeError

from .plans import VARIANTS, Case, _cpu, case, poison

LENGTHS = (200, 77, 0)


def stored(x: Tensor, page: int, spare: int = 2, gap: int = 0) -> tuple[Tensor, Tensor]:
    """Return keys (B, H, N, D) in shuffled pages among poisoned ones, rows ``gap`` elements apart, and their table."""
    batch, heads, nk, dim = x.shape
    columns = -(-nk // page)
    count = batch * columns + spare
    table = torch.randperm(count, generator=torch.Generator().manual_seed(page))[: batch * columns].view(batch, -1)
    room = poison(count, heads, page, dim + gap, dtype=x.dtype)[..., :dim]
    whole = torch.nn.functional.pad(x, (0, 0, 0, columns * page - nk), value=torch.nan)
    room[table] = whole.unflatten(2, (columns, page)).transpose(1, 2)
    return room, table.int()


def paged(each: Case, page: int, variant: str = "", gap: int = 0) -> tuple[Tensor, Tensor]:
    """Run forward over pages that contain NaN except for the tokens within each length."""
    x, lengths = each.x, torch.tensor(LENGTHS, dtype=torch.int32)
    keys, values = x.k.clone(), x.v.clone()
    for b, n in enumerate(LENGTHS):
        keys[b, :, n:] = values[b, :, n:] = torch.nan
    k, table = stored(keys, page, gap=gap)
    v, _ = stored(values, page)
    for b, n in enumerate(LENGTHS):
        table[b, -(-n // page) :] = -7  # an invalid page number, which is not read
    out, lse = poison(*x.dout.shape, dtype=x.q.dtype), poison(*x.q.shape[:3])
    inputs = each.inputs() | {"k": k, "v": v}
    _cpu.forward(
        **inputs, **each.rows(), out=out, lse=lse, threads=2, variant=variant, table=table, lengths=lengths
    )  # fmt: skip
    return out, lse


def ragged_case(nq: int, tile: int, dtype: str, dims: tuple[int, int] = (24, 40), nk: int = 256) -> Case:
    """Return a case of three batch elements that end at LENGTHS; their masks allow nothing after that."""
    generator = torch.Generator().manual_seed(2)
    masks = torch.rand(3, nq, nk, generator=generator) < 0.7
    masks[:, :, 32:64] = False
    masks[:, :, 64:128] = True
    for b, n in enumerate(LENGTHS):
        masks[b, :, n:] = False
    each = case(nq, nk, (16 if nq <= 16 else 32, tile), dtype=dtype, batch=3, heads=4, dims=dims, masks=masks)
    each.plan["row_set"] = torch.arange(3, dtype=torch.int32)[:, None].expand(3, 4).contiguous()
    each.mask = masks[:, None].expand(3, 4, nq, nk).float()
    return each


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("nq", [1, 40])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_bits_of_keys_side_by_side(dtype: str, nq: int, variant: str) -> None:
    """Pages smaller than a tile, equal to it and larger give the bits of contiguous keys, whatever other pages contain."""
    for tile, page, gap in [
        (128, 16, 0),
        (64, 64, 0),
        (16, 32, 8),
        (32, 256, 0),
        (128, 32, 8),
        (48, 16, 0),
        (48, 64, 8),
    ]:
        each = ragged_case(nq, tile, dtype)
        want = each.forward(variant)
        got = paged(each, page, variant, gap)
        for name, one, other in zip(("out", "lse"), got, want, strict=True):
            assert torch.equal(one, other), (name, tile, page)
        assert (got[0][2] == 0).all()


def test_what_leads_out_of_memory_is_refused() -> None:
    each = ragged_case(1, 32, "fp32")
    x = each.x
    k, table = stored(x.k, 32)
    v, _ = stored(x.v, 32)
    out, lse = poison(*x.dout.shape), poison(*x.q.shape[:3])
    good = {"k": k, "v": v, "table": table, "lengths": torch.tensor(LENGTHS, dtype=torch.int32)}

    def call(**changed: Tensor | None) -> None:
        _cpu.forward(**each.inputs() | good | changed, **each.rows(), out=out, lse=lse, threads=1)

    call()
    # the second batch element has 77 keys
    call(chosen=torch.arange(256, dtype=torch.int32).clamp(max=76))
    with pytest.raises(ShapeError, match="chosen: a key is past the last page"):
        call(chosen=torch.arange(256, dtype=torch.int32).clamp(max=77))
    for column, number in ((0, -1), (6, len(k)), (2, 2**31 - 1)):
        wrong = table.clone()
        wrong[0, column] = number
        with pytest.raises(ShapeError, match="table: has values"):
            call(table=wrong)
    for changed, said in [
        ({"lengths": torch.tensor([257, 0, 0], dtype=torch.int32)}, "lengths: has values"),
        ({"lengths": torch.tensor([-1, 0, 0], dtype=torch.int32)}, "lengths: has values"),
        ({"lengths": torch.tensor(LENGTHS)}, "lengths: wanted int32"),
        ({"lengths": good["lengths"][:2]}, "lengths: size of dimension 0"),
        ({"lengths": None}, "lengths: wanted with a table"),
        ({"table": table[:2]}, "table: size of dimension 0"),
        ({"table": table.long()}, "table: wanted int32"),
        ({"table": table[0]}, "table: wanted 2 dimensions"),
        ({"table": table.mT.contiguous().mT}, "table: wanted a contiguous array"),
        ({"k": k[:, :, :24], "v": v[:, :, :24], "table": table.repeat(1, 2)}, "k: wanted pages of 16"),
        ({"v": v[1:]}, "v: got shape"),
    ]:
        with pytest.raises(ShapeError, match=said):
            call(**changed)


@pytest.mark.parametrize("pattern", [rw.Causal(), (rw.SlidingWindow(9) | rw.Dilated(9, 4)) & rw.Causal()], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["floats", "8 bits"])
def test_a_wrong_page_of_a_known_step_is_refused_as_at_the_first_call(scaled: bool, pattern: rw.Pattern) -> None:
    """A wrong page in a known step raises the error of a first call, and the step works again with a right table."""
    precision = rw.Precision(kv=torch.int8) if scaled else rw.Precision()
    cache = rw.PagedCache.empty(batch=2, length=64, heads=1, dim=8, page=16, precision=precision)
    cache.append(torch.randn(2, 1, 40, 8), torch.randn(2, 1, 40, 8))
    q, right, said = torch.randn(2, 1, 1, 8), cache.table.clone(), []
    for known in (False, True):
        if known:
            want = [rw.paged_attention(q, cache, pattern) for _ in range(3)][-1]
        for number in (99, -1, 2**31 - 1):
            cache.table[1, 2] = number
            with pytest.raises(
                ShapeError, match=f"table: got page {number} in row 1, column 2; wanted 0 to 7"
            ) as error:
                rw.paged_attention(q, cache, pattern)
            said.append(str(error.value))
            cache.table.copy_(right)
    assert said[:3] == said[3:]
    assert torch.equal(rw.paged_attention(q, cache, pattern), want)
