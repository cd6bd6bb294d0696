"""A table of blocks has one relation, stored as a mask or as lists."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringweave as rw
from ringweave.patterns import rebuild
from ringweave.patterns.block_sets import ListedBlocks, MaskBlocks
from ringweave.patterns.view import in_view
from ringweave.relation.tiles import strips

LEADS = [(), (1,), (3,), (2, 1), (2, 3)]


@st.composite
def listed(draw: st.DrawFn, side: int | tuple[int, int] = 4) -> tuple[rw.BlockTable, Tensor]:
    """Return a table of indices with repeats, empty rows and arbitrary entries past `counts`, and its mask."""
    lead = draw(st.sampled_from(LEADS))
    rows, columns, places = draw(st.integers(1, 7)), draw(st.integers(1, 9)), draw(st.integers(0, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    indices = torch.randint(0, columns, (*lead, rows, places), generator=generator)
    counts = torch.randint(0, places + 1, (*lead, rows), generator=generator)
    past = torch.arange(places) >= counts[..., None]
    indices[past] = torch.randint(-9, 99, indices.shape, generator=generator)[past]
    mask = torch.zeros(*lead, rows, columns, dtype=torch.bool)
    for row, count, line in zip(
        indices.flatten(0, -2).tolist(), counts.flatten().tolist(), mask.flatten(0, -2), strict=True
    ):
        line[row[:count]] = True
    kind = draw(st.sampled_from([torch.int64, torch.int32, torch.int16]))
    return rw.BlockTable(indices=indices.to(kind), counts=counts, key_blocks=columns, block_size=side), mask


@given(listed())
def test_lists_are_ascending_and_say_each_block_once(drawn: tuple[rw.BlockTable, Tensor]) -> None:
    table, mask = drawn
    assert torch.equal(table.mask, mask)
    kept = table.tables[0]
    assert kept.dtype == torch.int32
    assert kept.shape[-1] == table.blocks.most <= mask.shape[-1]
    for line, wanted in zip(kept.flatten(0, -2).tolist(), mask.flatten(0, -2).tolist(), strict=True):
        own = [number for number, used in enumerate(wanted) if used]
        assert line == own + [mask.shape[-1]] * (len(line) - len(own))
    of_mask = rw.BlockTable(mask, 4)
    assert all(map(torch.equal, table.blocks.lines(), of_mask.blocks.lines()))
    assert torch.equal(of_mask.blocks.lines()[1].long(), mask.flatten(0, -2).nonzero()[:, 1])
    assert table.extents() == of_mask.extents()
    assert table.blocks.shape == mask.shape


@given(listed())
def test_a_table_of_lists_is_a_value(drawn: tuple[rw.BlockTable, Tensor]) -> None:
    table, mask = drawn
    rows, columns = mask.shape[-2:]
    nq, nk = rows * 4 - 1, columns * 4 - 2
    batch, heads = (side or 1 for side in table.extents())
    dense = table.to_dense(nq, nk, heads, batch=batch)
    for again in (rebuild(table.spec, table.tables), pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert again == table
        assert hash(again) == hash(table)
        assert again.value() == table.value()
        assert torch.equal(again.to_dense(nq, nk, heads, batch=batch), dense)
    of_mask = rw.BlockTable(mask, 4)
    assert torch.equal(dense, of_mask.to_dense(nq, nk, heads, batch=batch))
    # the specs differ: torch.library passes tensors apart, so the spec must say which of both a tensor is
    assert table != of_mask
    assert str(columns) in table.spec
    assert torch.equal((~table).to_dense(nq, nk, heads, batch=batch), ~dense)
    assert table.density(nq, nk, heads=heads, batch=batch) == pytest.approx(dense.double().mean().item())
    wanted = (dense & rw.Causal().to_dense(nq, nk)) | rw.Sinks(1).to_dense(nq, nk)
    assert torch.equal((table & rw.Causal() | rw.Sinks(1)).to_dense(nq, nk, heads, batch=batch), wanted)
    strided = in_view(table, 2, 1, 64)
    assert strided is not None
    assert torch.equal(strided.to_dense(nq // 2, nk // 2, heads, batch=batch), dense[..., 1::2, 1::2])


@given(listed((3, 5)), st.data())
def test_tiles_of_lists_and_masks_agree(drawn: tuple[rw.BlockTable, Tensor], data: st.DataObject) -> None:
    """Lists and masks reach equal tiles, for tile sizes below and above the block's, and no tile without a pair."""
    table, mask = drawn
    one = table.select(0, 0)
    other = rw.BlockTable(mask, (3, 5)).select(0, 0)
    nq, nk = mask.shape[-2] * 3, mask.shape[-1] * 5 - data.draw(st.integers(0, 4))
    side = data.draw(st.integers(1, 20))
    frame = strips(nq, nk, (side, side))
    lines = [each.zones(max(nq, nk)).touched(frame) for each in (one, other)]
    for a, b in zip(*lines, strict=True):
        assert np.array_equal(a, b)
    row, col = np.divmod(lines[0].places(), frame.width)
    reached = {*zip(row.tolist(), col.tolist(), strict=True)}
    dense = one.to_dense(nq, nk)[0, 0]
    filled = {
        (i, j)
        for i, j in np.ndindex(-(-nq // side), frame.width)
        if dense[i * side : (i + 1) * side, j * side : (j + 1) * side].any()
    }
    assert reached == filled


@pytest.mark.parametrize("form", ["mask", "lists"])
def test_blocks_are_found_for_indices_of_any_shape(form: str) -> None:
    mask = torch.rand(7, 11, generator=torch.Generator().manual_seed(0)) < 0.4
    listed = torch.where(mask, torch.arange(11), 11).int().sort(-1).values[:, : int(mask.sum(1).max())]
    blocks = MaskBlocks(mask, 11) if form == "mask" else ListedBlocks(listed, 11)
    generator = torch.Generator().manual_seed(1)

    def among(side: int, *shape: int) -> Tensor:
        return torch.randint(0, side, shape, generator=generator)

    for row, col in (
        (among(7), among(11)),
        (among(7, 500), among(11, 500)),
        (among(7, 50).sort().values, among(11)),
        (among(7, 40, 1).sort(0).values, among(11, 1, 60).sort(1).values),
        (among(7, 5, 40, 1).sort(1).values, among(11, 5, 1, 30)),
        (torch.full((3, 4, 1), 2), torch.full((1, 1, 6), 5)),
        (torch.zeros(1, 1, dtype=torch.int64), torch.arange(11)),
        (among(7, 0), among(11, 0)),
    ):
        assert torch.equal(blocks.held(row, col), mask[row, col])


def test_a_list_written_in_place_is_looked_up_anew() -> None:
    table = rw.BlockTable(indices=torch.tensor([[0, 1]]), counts=torch.tensor([1]), key_blocks=3, block_size=1)
    assert table.to_dense(1, 3)[0, 0].tolist() == [[True, False, False]]
    # not allowed, but not stale either
    table.tables[0][0, 0] = 2
    assert table.to_dense(1, 3)[0, 0].tolist() == [[False, False, True]]


def test_repr() -> None:
    table = rw.BlockTable(
        indices=torch.zeros(2, 5, 3, dtype=torch.int64),
        counts=torch.ones(2, 5, dtype=torch.int64),
        key_blocks=9,
        block_size=(16, 32),
    )
    assert repr(table) == "BlockTable(<2x5x9 blocks, at most 3 a row>, (16, 32))"
    assert table.spec == "BlockTable(_, (16, 32), key_blocks=9)"
    assert repr(rw.BlockTable(table.mask, 64)) == "BlockTable(<2x5x9 blocks>, 64)"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_indices_of_few_bits_are_as_good(dtype: torch.dtype) -> None:
    """Indices of a narrow dtype work with more blocks than the dtype can number."""
    table = rw.BlockTable(
        indices=torch.tensor([[1, 100], [5, 2]]).to(dtype),
        counts=torch.tensor([2, 1]).to(dtype),
        key_blocks=300,
        block_size=16,
    )
    assert table.mask.nonzero().tolist() == [[0, 1], [0, 100], [1, 5]]
    assert table.plan(32, 4800, tile=16).nnz == 3


@pytest.mark.parametrize(
    ("blocks", "density", "diagonal", "lead"),
    [
        (64, 0.1, True, ()),
        (64, 0.1, False, (3,)),
        (1024, 3 / 1024, False, (2, 2)),
        (1024, 1 / 1024, True, ()),
        (500, 0.0004, False, (4,)),
        (333, 0.06, True, (2, 3)),
        (100, 0.13, True, (2,)),
        (100, 1.0, False, ()),
    ],
)
def test_random_blocks(blocks: int, density: float, diagonal: bool, lead: tuple[int, ...]) -> None:
    batch, heads = (None, None, *lead)[-2:]

    def drawn(seed: int) -> rw.BlockTable:
        return rw.patterns.random_blocks(
            blocks * 16 - 3, density, block_size=16, heads=heads, batch=batch, seed=seed, diagonal=diagonal
        )

    table = drawn(0)
    total = round(density * blocks**2)
    mask = table.mask
    assert mask.shape == (*lead, blocks, blocks)
    assert (mask.sum((-1, -2)) == total).all()
    per_row = mask.sum(-1)
    assert int(per_row.max() - per_row.min()) == (total % blocks > 0)
    assert mask.diagonal(dim1=-2, dim2=-1).all() or not diagonal
    assert table == drawn(0)
    assert (table != drawn(1)) == (blocks * diagonal < total < blocks**2)
    # a table with few blocks stores them as lists, padded to the longest
    few = total < blocks**2 / 8
    assert table.tables[0].dtype == (torch.int32 if few else torch.bool)
    if few:
        assert torch.equal(table.tables[0], drawn(0).tables[0].sort(-1).values)
        assert table.blocks.most == max(1, -(-total // blocks))


@pytest.mark.parametrize("diagonal", [False, True])
def test_random_blocks_are_drawn_evenly(diagonal: bool) -> None:
    """Every block off the diagonal is drawn with equal probability, also beside it, at the ends and in short rows."""
    seeds, blocks, each = 400, 32, 3
    drawn = torch.stack(
        [
            rw.patterns.random_blocks(
                blocks * 16, each / blocks, block_size=16, heads=8, seed=seed, diagonal=diagonal
            ).mask
            for seed in range(seeds)
        ]
    )
    share = drawn.double().mean((0, 1))
    off = ~torch.eye(blocks, dtype=torch.bool)
    expected = (each - diagonal) / (blocks - diagonal)
    deviation = (expected * (1 - expected) / (seeds * 8)) ** 0.5
    assert float((share[off] - expected).abs().max()) < 5 * deviation
    if not diagonal:
        assert float((share.diagonal() - expected).abs().max()) < 5 * deviation
        # also neighbours: blocks are drawn without replacement, not as runs
        pairs = float((drawn[..., 1:] & drawn[..., :-1]).double().mean())
        assert pairs == pytest.approx(each * (each - 1) / (blocks * (blocks - 1)), rel=0.05)


def test_a_table_of_the_whole_sequence_says_how_to_cut_it_for_a_chunk() -> None:
    """The remedy of the error computes the rows of the whole call."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 8, generator=generator) > 0.4
    q = torch.randn(1, 2, 256, 16, generator=generator)
    whole = rw.attention(q, q, q, rw.BlockTable(mask, 32))
    for first, stop, keys in ((64, 128, 256), (70, 130, 160), (0, 32, 256)):
        part = q[:, :, first:stop], q[:, :, :keys], q[:, :, :keys]
        rows, columns = -(-stop // 32), -(-keys // 32)
        said = rf"Pass the blocks that the call reaches, counted from position 0: mask\[\.\.\., :{rows}, :{columns}\]"
        with pytest.raises(rw.PatternError, match=said):
            rw.attention(*part, rw.BlockTable(mask, 32), q_offset=first)
        out = rw.attention(*part, rw.BlockTable(mask[..., :rows, :columns], 32), q_offset=first)
        if keys == 256:
            torch.testing.assert_close(out, whole[:, :, first:stop])
