"""Lists of chosen keys have one meaning: that of a definition in plain Python, alone and combined with other patterns."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import ringweave as rw
from ringweave.errors import PatternError
from ringweave.patterns import Pattern, rebuild
from ringweave.patterns.documents import keys_of

from ..oracle import Inputs
from ..parallel.threads import Threaded, run

HEADS, KV_HEADS, BATCH = 4, 2, 2
BLOCK_SIZES = (1, 3, 16, 48, 64, 128, 512)
#: Leading sides of the lists, and the heads that they are for.
LEADS: list[tuple[tuple[int, ...], str]] = [
    ((), "query"), ((1,), "query"), ((HEADS,), "query"), ((KV_HEADS,), "kv"), ((BATCH, 1), "query"),
    ((BATCH, HEADS), "query"), ((BATCH, KV_HEADS), "kv"), ((1, KV_HEADS), "kv"),
]  # fmt: skip


def of_lists(indices: Tensor, block_size: int, nk: int) -> Tensor:
    """Return the pairs that lists allow, (B, Hq, Nq, nk), one list after the other."""
    table = indices.reshape(*(1,) * (4 - indices.ndim), *indices.shape)
    table = table.repeat(BATCH // table.shape[0], 1, 1, 1).repeat_interleave(HEADS // table.shape[1], 1)
    dense = torch.zeros(*table.shape[:3], nk, dtype=torch.bool)
    for row, listed in zip(dense.flatten(0, 2), table.flatten(0, 2).tolist(), strict=True):
        for block in listed:
            if block >= 0:
                row[block * block_size : (block + 1) * block_size] = True
    return dense


def drawn(lead: tuple[int, ...], nq: int, nk: int, block_size: int, most: int = 7, seed: int = 0) -> Tensor:
    """Return lists with pads anywhere, repeats, and rows of pads alone."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, -(-nk // block_size), (*lead, nq, most), generator=generator)
    indices[..., ::5, :] = -1
    return indices


def pairs(pattern: Pattern, nq: int, nk: int, q_offset: int = 0) -> Tensor:
    """Return the pairs of a pattern for the call's heads."""
    return pattern.bound(HEADS, KV_HEADS).to_dense(nq, nk, HEADS, batch=BATCH, q_offset=q_offset)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("tile", [16, 64, (32, 48)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("lead", "heads"), LEADS)
@pytest.mark.parametrize("sizes", [(70, 70), (1, 200), (33, 517), (90, 40)], ids=str)
def test_lists_mean_their_keys(
    sizes: tuple[int, int], lead: tuple[int, ...], heads: str, dtype: torch.dtype, tile: Any, block_size: int
) -> None:
    """A list allows the keys of its blocks, for all heads, each head or each key head, and for each batch element."""
    nq, nk = sizes
    indices = drawn(lead, nq, nk, block_size, seed=len(lead))
    want = of_lists(indices, block_size, nk)
    pattern = rw.Selected(indices.to(dtype), block_size, heads=heads)
    assert torch.equal(pairs(pattern, nq, nk), want)
    number = rw.Selected(indices, block_size, key_blocks=-(-nk // block_size), heads=heads)
    assert torch.equal(pairs(number, nq, nk), want)
    bound = pattern.bound(HEADS, KV_HEADS)
    plan = bound.plan(nq, nk, heads=HEADS, batch=BATCH, tile=tile)
    assert torch.equal(plan.to_dense(), want)
    assert plan.pairs() == int(want.sum())
    assert bound.density(nq, nk, heads=HEADS, batch=BATCH) == pytest.approx(float(want.double().mean()), abs=1e-12)


def test_order_pads_and_repeats_mean_nothing() -> None:
    some = torch.tensor([[0, 2, 5], [1, -1, -1], [-1, -1, -1]])
    same = torch.tensor([[5, -1, 0, 2, 2, 5], [-1, -1, 1, -1, 1, 1], [-1] * 6])
    assert torch.equal(rw.Selected(some).to_dense(3, 6), rw.Selected(same).to_dense(3, 6))
    assert rw.Selected(some) != rw.Selected(same)


@pytest.mark.parametrize("lead", [(), (KV_HEADS,)])
def test_lists_without_places_allow_nothing(lead: tuple[int, ...]) -> None:
    empty = rw.Selected(torch.empty(*lead, 5, 0, dtype=torch.int32), heads="kv")
    assert not pairs(empty, 5, 9).any()
    assert pairs(~empty, 5, 9).all()
    q, k = torch.randn(BATCH, HEADS, 5, 8), torch.randn(BATCH, KV_HEADS, 9, 8)
    out, lse = rw.attention_with_lse(q, k, k, empty)
    assert not out.any()
    assert torch.isneginf(lse).all()


def test_more_places_than_keys() -> None:
    indices = torch.randint(-1, 3, (40, 199), generator=torch.Generator().manual_seed(0))
    assert torch.equal(pairs(rw.Selected(indices), 40, 3), of_lists(indices, 1, 3))
    assert torch.equal(pairs(rw.Selected(indices * 0), 40, 1), of_lists(indices * 0, 1, 1))


#: Patterns beside the lists, for queries that begin at a position.
OTHERS: dict[str, Callable[[int, int], Pattern]] = {
    "causal": lambda nq, nk: rw.Causal(),
    "window": lambda nq, nk: rw.SlidingWindow(20, 3),
    "strided": lambda nq, nk: rw.Strided(3),
    "keys": lambda nq, nk: rw.KeyPadding([nk, nk // 2], [nk // 3, 0]),
    "documents": lambda nq, nk: rw.Documents([nk // 2, nk - nk // 2]),
    "function": lambda nq, nk: rw.from_mask_mod(lambda b, h, q, k: (q + 2 * k + h + b) % 3 != 0),
    "per head": lambda nq, nk: rw.PerHead([rw.Causal(), rw.Full(), ~rw.Causal(), rw.Strided(2)]),
    "lists": lambda nq, nk: rw.Selected(drawn((HEADS,), nq, nk, 16, 3, seed=9), 16),
    "tree": lambda nq, nk: (rw.SlidingWindow(9) | rw.Sinks(3)) & rw.Causal(),
}
WAYS: dict[str, Callable[[Pattern, Pattern], Pattern]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "without": lambda a, b: a & ~b,
    "rest": lambda a, b: ~a & b,
    "neither": lambda a, b: ~(a | b),
    "window and lists": lambda a, b: (a & rw.Causal() | rw.SlidingWindow(5)) & b,
}


@pytest.mark.parametrize("q_offset", [0, 38])
@pytest.mark.parametrize("block_size", [1, 16, 20])
@pytest.mark.parametrize(("lead", "heads"), LEADS[::2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_combinations(name: str, way: str, lead: tuple[int, ...], heads: str, block_size: int, q_offset: int) -> None:
    """Combinations have the pairs of their parts; of those, lists count by place and the others by position."""
    nq, nk = 37, 75
    other = OTHERS[name](nq, nk)
    lists = rw.Selected(drawn(lead, nq, nk, block_size, 5, len(lead)), block_size, heads=heads)
    pattern = WAYS[way](lists, other)
    bound = pattern.bound(HEADS, KV_HEADS)
    want = _combined(way, of_lists(lists.tables[0], block_size, nk), other, q_offset)
    assert torch.equal(pairs(pattern, nq, nk, q_offset), want)
    plan = bound.plan(nq, nk, heads=HEADS, batch=BATCH, q_offset=q_offset, tile=(16, 32))
    assert torch.equal(plan.to_dense(), want)


def _combined(way: str, lists: Tensor, other: Pattern, q_offset: int) -> Tensor:
    nq, nk = lists.shape[2:]
    causal, window = (each.to_dense(nq, nk, q_offset=q_offset) for each in (rw.Causal(), rw.SlidingWindow(5)))
    beside = pairs(other, nq, nk, q_offset)
    return {
        "and": lists & beside,
        "or": lists | beside,
        "without": lists & ~beside,
        "rest": ~lists & beside,
        "neither": ~(lists | beside),
        "window and lists": (lists & causal | window) & beside,
    }[way]


@settings(max_examples=60)
@given(st.data())
def test_any_lists(data: st.DataObject) -> None:
    nq, nk = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 90))
    block_size, most = data.draw(st.integers(1, 100)), data.draw(st.integers(0, 12))
    lead, heads = data.draw(st.sampled_from(LEADS))
    indices = drawn(lead, nq, nk, block_size, most, data.draw(st.integers(0, 9)))
    pattern = rw.Selected(indices, block_size, heads=heads)
    want = of_lists(indices, block_size, nk)
    assert torch.equal(pairs(pattern, nq, nk), want)
    cut = rw.SlidingWindow(data.draw(st.integers(0, 40)), data.draw(st.integers(0, 9)))
    tile = data.draw(st.sampled_from([16, 32, (16, 64), (64, 16), (48, 48)]))
    q_offset = data.draw(st.integers(0, 50))
    wanted = want & cut.to_dense(nq, nk, q_offset=q_offset)
    plan = (pattern & cut).bound(HEADS, KV_HEADS).plan(nq, nk, heads=HEADS, batch=BATCH, q_offset=q_offset, tile=tile)
    assert torch.equal(plan.to_dense(), wanted)


@pytest.mark.parametrize("offset", [7, torch.tensor(7), torch.tensor([7, 40]), "end"], ids=str)
@pytest.mark.parametrize("k_offset", [0, 5, torch.tensor([0, 11])], ids=str)
def test_rows_belong_to_the_queries_of_the_call(offset: int | Tensor | str, k_offset: int | Tensor) -> None:
    """Row i is for query i and names keys of the call, whatever the offsets are; the patterns beside it use positions."""
    nq, nk = 30, 64
    q, k = torch.randn(BATCH, HEADS, nq, 8), torch.randn(BATCH, KV_HEADS, nk, 8)
    indices = drawn((BATCH, 1), nq, nk, 1)
    relation = rw.Causal() & ~rw.Strided(4)
    of_k = torch.as_tensor(k_offset).expand(BATCH)
    first = of_k + nk - nq if isinstance(offset, str) else torch.as_tensor(offset).expand(BATCH)
    q_at, k_at = first[:, None, None] + torch.arange(nq)[:, None], of_k[:, None, None] + torch.arange(nk)
    allowed = of_lists(indices, 1, nk) & relation.allows(q_at, k_at)[:, None]
    weights = rw.attention_weights(q, k, rw.Selected(indices) & relation, q_offset=offset, k_offset=k_offset).to_dense()
    assert torch.equal(weights > 0, allowed)


# ---- the pattern as a value ------------------------------------------------------------------------------------------


def test_gather_does_not_compute_a_part_of_a_call() -> None:
    inputs = Inputs.random(701)
    pattern = rw.Selected(torch.arange(701)[:, None])

    def job(transport: Threaded) -> None:
        context = rw.ContextParallel(transport, pattern, 701, heads=(2, 2), placement="contiguous")
        shards = [context.shard(x, 2) for x in (inputs.q, inputs.k, inputs.v)]
        with pytest.raises(rw.UnsupportedError, match="a rank computes a part of it"):
            rw.attention(*shards, pattern, context=context, backend="gather")

    run(2, job)


def test_a_value() -> None:
    indices = drawn((KV_HEADS,), 20, 30, 1)
    pattern = rw.Selected(indices, heads="kv")
    for again in (
        pickle.loads(pickle.dumps(pattern)), copy.copy(pattern), copy.deepcopy(pattern), rw.Selected(indices, heads="kv"),
        rebuild(pattern.spec, pattern.tables),
    ):  # fmt: skip
        assert type(again) is rw.Selected
        assert again == pattern
        assert hash(again) == hash(pattern)
        assert again.value() == pattern.value()
        assert torch.equal(pairs(again, 20, 30), pairs(pattern, 20, 30))
    moved = indices.clone()
    moved[0, 1, 0] += 1
    others = [
        rw.Selected(moved, heads="kv"), rw.Selected(indices), rw.Selected(indices, 2, heads="kv"),
        rw.Selected(indices, key_blocks=30, heads="kv"), rw.BlockTable(torch.ones(20, 30).bool(), 1),
    ]  # fmt: skip
    assert all(other != pattern for other in others)
    combined = pattern & rw.Causal() | rw.SlidingWindow(3)
    assert pickle.loads(pickle.dumps(combined)) == combined


def test_texts() -> None:
    indices = torch.zeros(2, 4, 20, 6, dtype=torch.int64)
    assert repr(rw.Selected(indices)) == "Selected(<2x4x20 queries, at most 6 keys each>)"
    assert repr(rw.Selected(indices[0, 0], 64)) == "Selected(<20 queries, at most 6 blocks of 64 keys each>)"
    assert rw.Selected(indices[0, 0]).spec == "Selected(_, 1)"
    assert rw.Selected(indices, 64, key_blocks=9, heads="kv").spec == "Selected(_, 64, key_blocks=9, group=0)"
    with pytest.raises(PatternError, match="a tensor"):
        rw.patterns.parse("Selected(3)")


def test_writing_to_the_indices_changes_nothing() -> None:
    for dtype in (torch.int32, torch.int64):
        indices = drawn((), 20, 30, 1).to(dtype)
        pattern, want = rw.Selected(indices), of_lists(indices, 1, 30)
        indices.fill_(0)
        assert torch.equal(pairs(pattern, 20, 30), want)
        indices.fill_(10**6)
        assert torch.equal(pairs(pattern, 20, 30), want)


@pytest.mark.parametrize("strides", ["transposed", "expanded", "every second"])
def test_strides(strides: str) -> None:
    whole = drawn((HEADS, 20), 18, 30, 1)
    indices = {
        "transposed": whole[:, 0, :, :7].transpose(1, 2).contiguous().transpose(1, 2),
        "expanded": whole[0, 0, :1].expand(HEADS, 18, 7),
        "every second": whole[:, 1, :, ::2],
    }[strides]
    assert not indices.is_contiguous()
    assert torch.equal(pairs(rw.Selected(indices), 18, 30), of_lists(indices, 1, 30))


# ---- errors ----------------------------------------------------------------------------------------------------------

LISTS = torch.zeros(8, 3, dtype=torch.int64)


@pytest.mark.parametrize("backend", ["auto", "reference", "dense_batched", "torch_sparse"])
def test_calls_refuse_lists_that_do_not_fit(backend: str) -> None:
    """Calls raise before anything is computed, with one list per query head or shared lists."""
    q, k = torch.randn(1, HEADS, 8, 16), torch.randn(1, KV_HEADS, 12, 16)
    for lists, text in (
        (rw.Selected(LISTS + 12), "indices: got 12 to 12; wanted -1 or 0 to 11"),
        (rw.Selected(LISTS - 2), "indices: got -2 to -2; wanted -1 or 0 to 11"),
        (rw.Selected(torch.cat([LISTS, LISTS])), "lists for 16 queries; wanted 8"),
        (rw.Selected(LISTS[:7]), "lists for 7 queries; wanted 8"),
        (rw.Selected(LISTS[:1]), "lists for 1 queries; wanted 8"),
        (rw.Selected((LISTS + 12).expand(HEADS, 8, 3)), "indices: got 12 to 12; wanted -1 or 0 to 11"),
    ):
        for options in ({}, {"q_offset": 4}, {"q_offset": "end"}, {"q_offset": torch.tensor([2])}):
            with pytest.raises(PatternError, match=text):
                rw.attention(q, k, k, lists & rw.Causal(), backend=backend, **options)


WITHIN = {
    "lengths": (40, rw.Documents([7, 1, 20, 12])),
    "whole blocks": (40, rw.Documents([12, 16, 12])),
    "ids": (40, rw.Documents(ids=torch.tensor([4] * 9 + [2] * 31))),
    "ids by element": (40, rw.Documents(ids=torch.stack([torch.arange(40) // 17, torch.arange(40) // 32]))),
    "fewer queries": (25, rw.Documents(cu_seqlens_q=[0, 15, 15, 25], cu_seqlens_k=[0, 20, 25, 40])),
}


@pytest.mark.parametrize("documents", list(WITHIN))
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize(
    "build",
    [
        lambda lists: lists,
        lambda lists: lists & rw.Causal(),
        lambda lists: (lists & rw.Causal()) | rw.SlidingWindow(2, 1),
        lambda lists: rw.Sinks(1) | (rw.Causal() & ~lists),
    ],
)
def test_lists_within_documents(build: Callable[[Pattern], Pattern], size: int, documents: str) -> None:
    """Each document attends as it would alone, by lists that count from its first key."""
    nq, bounds = WITHIN[documents]
    first, stop = (side.view(-1, 1, nq, 1) for side in keys_of(bounds, nq))
    batch, generator = len(first), torch.Generator().manual_seed(size)
    table = (torch.rand(batch, 1, nq, 3, generator=generator) * ((stop - first + size - 1) // size)).long()
    table[torch.rand(table.shape, generator=generator) < 0.2] = -1
    got = build(rw.Selected(table, size)).within(bounds).to_dense(nq, 40, batch=batch)
    expected = torch.zeros_like(got)
    for b in range(batch):
        for begin in first[b].unique().tolist():
            queries = (first[b, 0, :, 0] == begin).nonzero()[:, 0]
            n, keys = len(queries), slice(begin, int(stop[b, 0, queries[0]]))
            alone, length = build(rw.Selected(table[b : b + 1, :, queries], size)), keys.stop - keys.start
            expected[b, :, queries[0] : queries[-1] + 1, keys] = alone.to_dense(n, length, q_offset=length - n)[0]
    assert torch.equal(got, expected)


def test_lists_of_packed_sequences() -> None:
    """varlen_attention takes lists for the packed queries, and each sequence attends as it would alone."""
    lengths, generator = [9, 1, 30], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, heads, 16, generator=generator) for heads in (4, 2, 2))
    table = torch.cat([torch.randint(-1, n, (n, 3), generator=generator) for n in lengths])
    got = rw.varlen_attention(q, k, v, [0, 9, 10, 40], pattern=rw.Selected(table) & rw.Causal())
    each = zip(*(x.split(lengths) for x in (q, k, v, table)), strict=True)
    for part, (a, b, c, rows) in zip(got.split(lengths), each, strict=True):
        alone = rw.attention(*(x.transpose(0, 1)[None] for x in (a, b, c)), rw.Selected(rows) & rw.Causal())
        torch.testing.assert_close(part, alone[0].transpose(0, 1))


def test_lists_within_documents_in_compiled_code() -> None:
    """Documents and lists may be made inside a compiled function, where no value is known."""
    table, bounds = torch.tensor([[0, -1], [1, 0], [0, -1], [0, 1]]), torch.tensor([0, 2, 4])
    q = torch.randn(1, 1, 4, 16)

    def call(table: Tensor, bounds: Tensor) -> Tensor:
        return rw.attention(q, q, q, rw.Selected(table).within(rw.Documents(cu_seqlens=bounds)))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(table, bounds), call(table, bounds))
    other = torch.tensor([0, 1, 4])
    table[1] = 0
    torch.testing.assert_close(compiled(table, other), call(table, other))
    with pytest.raises(PatternError, match="indices: got"):
        compiled(table + 2, other)


def test_documents_in_pieces_in_compiled_code() -> None:
    q, table = torch.randn(1, 1, 4, 16), torch.zeros(4, 1, dtype=torch.long)

    def call(ids: Tensor) -> Tensor:
        return rw.attention(q, q, q, rw.Selected(table).within(rw.Documents(ids=ids)))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.tensor([5, 5, 2, 2])), call(torch.tensor([5, 5, 2, 2])))
    with pytest.raises(RuntimeError, match="documents: got one in several pieces"):
        compiled(torch.tensor([5, 2, 5, 5]))


def test_empty_lists_need_no_function() -> None:
    """A function of one pair, which torch.vmap maps, is not called for lists without keys."""

    def near(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (i - j).abs() <= 1 + h

    mask = create_block_mask(near, 1, 1, 5, 5, device="cpu", BLOCK_SIZE=16)
    q = torch.randn(1, 1, 5, 8)
    nothing = rw.Selected(torch.zeros(1, 1, 5, 0, dtype=torch.int32), 2)
    for backend in ("dense_batched", "auto"):
        out = rw.attention(q, q, q, rw.from_block_mask(mask) & nothing, backend=backend)
        assert torch.equal(out, torch.zeros_like(q))
