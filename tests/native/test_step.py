"""A native decoding step: rows painted in the call have the bits of planned rows, and arguments are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringweave as rw
from ringweave.errors import ShapeError
from ringweave.patterns.located import located
from ringweave.relation.rows import tree_of

from .plans import VARIANTS, _cpu, plan_of

PATTERNS = {
    "causal": rw.Causal(),
    "window": (rw.SlidingWindow(40) | rw.Sinks(3)) & rw.Causal(),
    "holes": rw.SlidingWindow(90) & ~rw.SlidingWindow(20),
    "residues": rw.Strided(7) & rw.Causal() | rw.Segments(64) & rw.Causal(),
    "none": rw.Full() & ~rw.Full(),
}


def tree(pattern: rw.Pattern, n: int) -> tuple[list[Any], str]:
    found = tree_of(located(pattern, (n, n)).node)
    assert found is not None
    return found.compiled, found.text


def stepped(
    q: Tensor, k: Tensor, v: Tensor, keys: int, patterns: list[rw.Pattern], **given: Any
) -> tuple[Tensor, Tensor]:
    """Run a native step into poisoned results; ``given`` replaces arguments of the constructor and of the call."""
    made: dict[str, Any] = {"trees": [tree(each, 1000) for each in patterns], "of_head": [0] * q.shape[1]}
    made |= {"q": q, "k": k, "v": v, "scale": 0.3, "scaled": False, "variant": "", "wide": False}
    called: dict[str, Any] = {"keys": keys, "first": 0, "rate": 1, "tile": 32, "side": 0, "threads": 1}
    made |= {name: x for name, x in given.items() if name in made or name == "table"}
    called |= {name: x for name, x in given.items() if name in called or name == "lengths"}
    step = _cpu.Step(**made)
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:3], torch.nan)
    stored = {name: given[name].data_ptr() for name in ("table", "lengths") if name in given}
    called = {name: x for name, x in called.items() if name not in stored} | stored
    tensors = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        tensors |= {name: x.data_ptr(), f"{name}_strides": x.stride()}
    step.forward(**tensors, out=out.data_ptr(), lse=lse.data_ptr(), **called)
    return out, lse


def planned(q: Tensor, k: Tensor, v: Tensor, keys: list[int], masks: Tensor, tile: int, variant: str) -> Any:
    """Run the kernel over the plan of a row for each head; masks (heads, keys) are those of the first element."""
    results = []
    for b, n in enumerate(keys):
        row_set = torch.arange(q.shape[1], dtype=torch.int32)[None]
        plan = plan_of(masks[b][:, None, :n], row_set, 16, tile)
        out = torch.full((1, *q.shape[1:3], v.shape[3]), torch.nan, dtype=q.dtype)
        lse = torch.full((1, *q.shape[1:3]), torch.nan)
        rows = {
            name: plan[name] for name in ("row_ptr", "col", "mask_id", "mask_words", "row_set", "q_tile", "kv_tile")
        }
        _cpu.forward(
            q=q[b : b + 1], k=k[b : b + 1, :, :n], v=v[b : b + 1, :, :n], scale=0.3, out=out, lse=lse, threads=1,
            variant=variant, **rows,
        )  # fmt: skip
        results.append((out, lse))
    return [torch.cat(each) for each in zip(*results, strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [16, 48, 128])
def test_painted_rows_have_the_bits_of_planned_rows(tile: int, dtype: torch.dtype, variant: str) -> None:
    """Heads with relations of their own, any numbers of keys, tiles that are no whole words."""
    patterns = list(PATTERNS.values())
    q, k, v = (torch.randn(2, heads, n, 16).to(dtype) for heads, n in ((10, 1), (5, 300), (5, 300)))
    of_head = [h // 2 for h in range(10)]
    for n in (1, 15, 16, 17, 47, 64, 129, 300):
        got = stepped(q, k[:, :, :n], v[:, :, :n], n, patterns, of_head=of_head, tile=tile, variant=variant)
        masks = torch.stack([patterns[i].to_dense(1, n, q_offset=n - 1)[0, 0, 0] for i in of_head])
        want = planned(q, k, v, [n, n], torch.stack([masks, masks]), tile, variant)
        assert all(map(torch.equal, got, want)), n


@given(data=st.data())
def test_pages_of_sequences_of_any_length(data: st.DataObject) -> None:
    """Sequences over pages differ in length, and may be empty; their tables hold any pages."""
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=4)), dtype=torch.int32)
    pattern = PATTERNS[data.draw(st.sampled_from(list(PATTERNS)))]
    batch, columns = len(lengths), 6
    table = torch.randperm(batch * columns).view(batch, columns).int()
    q, k, v = (torch.randn(batch, heads, n, 16) for heads, n in ((4, 1), (2, 96), (2, 96)))
    pool = [torch.full((batch * columns, 2, 16, 16), torch.nan) for _ in range(2)]
    for b, n in enumerate(lengths.tolist()):
        for to, x in zip(pool, (k, v), strict=True):
            for at in range(n):
                to[table[b, at // 16], :, at % 16] = x[b, :, at]
    most = max(1, int(lengths.max()))
    # sums over relations by residue are cut at tiles of the whole
    got = stepped(q, *pool, most, [pattern], table=table, lengths=lengths, side=32)
    for b, n in enumerate(lengths.tolist()):
        one = slice(b, b + 1)
        if n == 0:
            assert not got[0][one].any()
            assert (got[1][one] == -torch.inf).all()
            continue
        want = stepped(q[one], k[one, :, :n], v[one, :, :n], n, [pattern], side=32)
        assert torch.equal(got[0][one], want[0])
        assert torch.equal(got[1][one], want[1])


@pytest.mark.parametrize("rate", [2, 5, 16])
def test_a_view_has_the_bits_of_token_order(rate: int) -> None:
    """The view of the last key's residue, cut at the tiles of the whole, sums as the relation in token order does."""
    pattern = rw.Strided(rate) & rw.Causal()
    # the last one is so long that its sums are divided
    q, k, v = (torch.randn(1, heads, n, 32) for heads, n in ((4, 1), (2, 20000), (2, 20000)))
    for n in (rate, 33, 128, 255, 700, 20000):
        now = q, k[:, :, :n], v[:, :, :n], n, [pattern]
        whole = stepped(*now, tile=128, side=128)
        view = stepped(*now, first=(n - 1) % rate, rate=rate, tile=128, side=128)
        assert all(map(torch.equal, whole, view)), n


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("trees", {"trees": [([], "")]}),
    ("trees", {"trees": [([None], ".")]}),
    ("trees", {"trees": [([3], ".")]}),
    ("of_head", {"of_head": [0]}),
    ("of_head", {"of_head": [0, 1]}),
    ("of_head", {"of_head": [0, -1]}),
    ("variant", {"variant": "abacus"}),
    ("keys", {"keys": 0}),
    ("keys", {"keys": 2**31}),
    ("first, rate", {"first": 2, "rate": 2}),
    ("first, rate", {"first": -1, "rate": 2}),
    ("first, rate", {"rate": 0}),
    ("tile", {"tile": 0}),
    ("tile", {"tile": 40}),
    ("tile", {"tile": 512}),
    ("tile", {"side": 8}),
    ("threads", {"threads": 0}),
    ("k", {"scaled": True}),
    ("table", {"table": torch.zeros(1, 2, dtype=torch.int32), "lengths": torch.tensor([40], dtype=torch.int32), "keys": 70}),
    ("lengths", {"table": torch.zeros(1, 2, dtype=torch.int32), "lengths": torch.tensor([41], dtype=torch.int32)}),
    ("lengths", {"table": torch.zeros(1, 2, dtype=torch.int32), "lengths": torch.tensor([-1], dtype=torch.int32)}),
    ("table", {"table": torch.tensor([[0, 1]], dtype=torch.int32), "lengths": torch.tensor([40], dtype=torch.int32)}),
    ("rate", {"table": torch.zeros(1, 2, dtype=torch.int32), "lengths": torch.tensor([9], dtype=torch.int32), "rate": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_wrong_arguments_are_refused(name: str, change: dict[str, Any]) -> None:
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 1, 32, 8)
    stepped(q, k, k, 32, [rw.Causal()])
    with pytest.raises((ShapeError, rw.UnsupportedError), match=f"^{name}: "):
        stepped(q, k, k, **({"keys": 40 if "table" in change else 32} | change), patterns=[rw.Causal()])


def test_several_queries_are_refused() -> None:
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 1, 32, 8)
    with pytest.raises(ShapeError, match=r"^q: wanted one query"):
        stepped(q, k, k, 32, [rw.Causal()])


def test_zones_live_as_long_as_the_step() -> None:
    """A step keeps the zones that it reads in each call."""
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 64, 8)
    want = stepped(q, k, k, 64, [rw.Segments(7)])
    for _ in range(50):
        got = stepped(q, k, k, 64, [rw.Segments(7)])
        assert all(map(torch.equal, got, want))
        np.random.default_rng(0).integers(0, 9, 10_000)


# ---- lists of keys ---------------------------------------------------------------------------------------------------


def listed(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, keys: int, size: int, variant: str = "", **given: Any
) -> tuple[Tensor, Tensor]:
    """Run a native step over lists (batch, heads, most); blocks of a multiple of 16 keys are tiles, and others packed."""
    group = q.shape[1] // k.shape[1]
    made: dict[str, Any] = {"trees": [tree(given.pop("pattern", rw.Causal()), 1000)], "of_head": [0] * k.shape[1]}
    made |= {"q": q, "k": k, "v": v, "scale": 0.3, "scaled": False, "variant": variant, "wide": False, "group": group}
    made |= {"lists": table, "block_size": size, "packs": size % 16 > 0}
    called: dict[str, Any] = {"keys": keys, "first": 0, "rate": 1, "tile": 16, "side": 0, "threads": 1}
    called["lists"] = table.data_ptr()
    made |= {name[5:]: x for name, x in given.items() if name.startswith("made_")}
    called |= {name: x for name, x in given.items() if not name.startswith("made_")}
    step = _cpu.Step(**{name: x for name, x in made.items() if x is not None})
    out, lse = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype), torch.full(q.shape[:3], torch.nan)
    tensors = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        tensors |= {name: x.data_ptr(), f"{name}_strides": x.stride()}
    step.forward(**tensors, out=out.data_ptr(), lse=lse.data_ptr(), **called)
    return out, lse


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [1, 5, 16, 48])
def test_listed_keys_have_the_bits_of_planned_rows(size: int, variant: str) -> None:
    """Of blocks that are tiles, and to rounding of packed keys; any numbers of keys, and lists of any heads."""
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((10, 1), (2, 300), (2, 300)))
    pattern = rw.SlidingWindow(200) & ~rw.SlidingWindow(30)
    for n in (1, 15, 16, 17, 47, 64, 129, 300):
        for shape in ((1, 1), (2, 1), (1, 2), (2, 2)):
            lists = torch.randint(-1, -(-n // size), (*shape, 7), dtype=torch.int32)
            got = listed(q, k[:, :, :n], v[:, :, :n], lists, n, size, variant, pattern=pattern)
            mask = torch.zeros(*shape, n + size, dtype=torch.bool)
            for place in np.ndindex(shape):
                for block in lists[place].tolist():
                    mask[place][max(block, 0) * size : (block + 1) * size] = True
            allowed = pattern.to_dense(1, n, q_offset=n - 1)[0, 0, 0].bool()
            mask = (mask[..., :n] & allowed).expand(2, 2, n).repeat_interleave(5, 1)
            want = planned(q, k, v, [n, n], mask, 16, variant)
            for one, other in zip(got, want, strict=True):
                if size % 16 == 0:
                    assert torch.equal(one, other), (n, shape)
                else:
                    torch.testing.assert_close(one, other)


LISTS: dict[str, dict[str, Any]] = {
    "lists: wanted 3 dimensions": {"made_lists": torch.zeros(1, 5, dtype=torch.int32)},
    "lists: wanted int32": {"made_lists": torch.zeros(1, 1, 5, dtype=torch.int64)},
    "lists: wanted keys for every batch element": {"made_lists": torch.zeros(3, 1, 5, dtype=torch.int32)},
    "lists: wanted keys for every batch element and": {"made_lists": torch.zeros(1, 3, 5, dtype=torch.int32)},
    "lists: wanted keys": {"made_lists": torch.zeros(1, 1, 0, dtype=torch.int32)},
    "lists: wanted without pages": {"made_trees": [tree(rw.Causal(), 9)] * 2},
    "lists: wanted memory, and": {"lists": 0},
    "lists: wanted memory, and no relation by residue": {"side": 16},
    "block_size: wanted 1": {"made_block_size": 0},
    "block_size: is missing": {"made_block_size": None},
    "packs: is missing": {"made_packs": None},
    "group: wanted with lists": {"made_lists": None, "made_block_size": None, "made_packs": None},
    "of_head: wanted a tree": {"made_group": None},
    "k: its number of heads": {"made_group": 8},
    "tile: wanted a divisor of the blocks": {"made_packs": False},
    "tile: wanted 16": {"tile": 8},
}


@pytest.mark.parametrize("wanted", LISTS)
def test_arguments_of_lists_are_checked(wanted: str) -> None:
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 40, 16)
    lists = torch.tensor([[[3, -1, 39, 3, 0]]], dtype=torch.int32)
    assert listed(q, k, k, lists, 40, 1)[0].isfinite().all()
    with pytest.raises(ShapeError, match=wanted):
        listed(q, k, k, lists, 40, 1, **LISTS[wanted])


def test_lists_of_more_keys_than_a_plan_counts_are_refused() -> None:
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 1, 40, 16)
    with pytest.raises(ShapeError, match="lists: they are for too many keys"):
        listed(q, k, k, torch.zeros(1, 1, 3, dtype=torch.int32), 2**31 - 1, 1)


@pytest.mark.parametrize("wrong", [-2, 40, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("size", [1, 16])
def test_listed_keys_are_in_range(size: int, wrong: int) -> None:
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 1, 40 * size, 16)
    lists = torch.tensor([[[0, 1, wrong]]], dtype=torch.int32)
    with pytest.raises(ShapeError, match="lists: has values in"):
        listed(q, k, k, lists, 40 * size, size)
