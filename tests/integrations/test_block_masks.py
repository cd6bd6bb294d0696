"""Masks of FlexAttention as patterns: their pairs, the functions that are recognised, and changes between calls."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import ringweave as rw
from ringweave.integrations.flex_attention import flex_attention
from ringweave.integrations.flex_attention.attention import pattern_of
from ringweave.patterns.base import parts_of
from ringweave.patterns.recorded import Recorded
from ringweave.types import Place

from ..trace.masks import both, causal, masks
from .flex_cases import allowed

N = 100
PLACE = Place(1, 1, N, N)


def created(function: Callable[..., Any], place: Place = PLACE, side: Any = 32) -> BlockMask:
    def called(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return function(b, h, q, k)  # type: ignore[no-any-return]

    # torch makes masks of functions only, and the call takes any callable
    mask = create_block_mask(called, *place[:4], device="cpu", BLOCK_SIZE=side)
    mask.mask_mod = function
    return mask


def recognised(mask: BlockMask, place: Place = PLACE) -> bool:
    return not parts_of(pattern_of(mask, place), Recorded)


def dense(mask: BlockMask, place: Place = PLACE) -> Tensor:
    return pattern_of(mask, place).to_dense(place.nq, place.nk, place.heads, batch=place.batch)


def maskable() -> list[str]:
    """Return the functions of the corpus that torch makes masks of."""
    own = ("hostile: number", "hostile: kept symbol", "hostile: torch's random numbers")
    return [name for name, mask in masks().items() if name not in own and (mask.state != "refused")]


# trace/test_relation.py reads every function of the corpus in each run
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", maskable())
def test_the_corpus(name: str) -> None:
    """A mask has the pairs of its blocks and its function, and is the pattern that it was as an evaluated function."""
    function = masks()[name].function
    places = ((Place(2, 4, 130, 100), 32), (Place(2, 1, 90, 64), (48, 20)), (Place(1, 2, 1100, 1300), 128))
    # a chain of 300 operations takes seconds over many pairs
    for place, side in places[1:2] if "chain" in name else places:
        mask = created(function, place, side)
        got = dense(mask, place)
        assert torch.equal(got, allowed(mask, *place[:4])), (name, place)
        # each reading of a counter has another value
        if place.nq < 1000 and name != "hostile: counter":
            assert torch.equal(got, rw.from_block_mask(mask).to_dense(*place[2:4], place.heads, batch=place.batch))


def test_how_many_are_recognised() -> None:
    place = Place(2, 4, 256, 256)
    count = {
        group: sum(
            recognised(created(masks()[name].function, place, 64), place)
            for name in maskable()
            if name.startswith(group)
        )
        for group in ("gym", "transformers", "trainers", "tests", "hostile")
    }
    assert count == {"gym": 26, "transformers": 14, "trainers": 9, "tests": 12, "hostile": 53}


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_blocks_of_created_masks_only_repeat_the_function() -> None:
    assert pattern_of(created(causal), PLACE) == rw.Causal()
    window = both(causal, lambda b, h, q, k: q - k < 40)
    for side in (32, 128, (16, 48)):
        assert pattern_of(created(window, side=side), PLACE) == rw.SlidingWindow(39)
    # the sides of these blocks are no sides of tiles
    assert "BlockTable" in str(pattern_of(created(window, side=20), PLACE))


def listed(partial: list[list[int]], full: list[list[int]] | None = None) -> BlockMask:
    """Return a causal mask with blocks of 32 in 4 rows and columns."""

    def table(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        indices = torch.tensor([row + [0] * (4 - len(row)) for row in rows], dtype=torch.int32)
        return counts[None, None], indices[None, None]

    given = () if full is None else table(full)
    return BlockMask.from_kv_blocks(*table(partial), *given, BLOCK_SIZE=32, mask_mod=causal, seq_lengths=(N, N))


@pytest.mark.parametrize(
    ("partial", "full"),
    [
        # a block less, a block that is not full, and a block that the function has and the list has not
        ([[0], [0, 1], [0, 2], [0, 1, 2, 3]], None),
        ([[0], [0], [0, 1, 2], [0, 1, 2, 3]], [[], [1], [], []]),
        ([[], [1], [2], [3]], [[], [0], [0, 1], [0, 1]]),
        ([[], [], [], []], [[0], [1], [2], [3]]),
        ([[0], [1], [2], [3]], [[], [0], [0, 1], [0, 1, 2]]),
        ([[0, 1, 2, 3]] * 4, None),
        ([[0], [1], [2], [3]], [[0], [0], [0, 1], [0, 1, 2]]),
    ],
)  # fmt: skip
def test_blocks_of_ones_own_count(partial: Any, full: Any) -> None:
    mask = listed(partial, full)
    assert torch.equal(dense(mask), allowed(mask, 1, 1, N, N))
    assert recognised(mask)


def test_a_mask_of_one_element_and_head_is_for_all() -> None:
    """The function reads the element and the head of the call, and blocks are those of the mask."""

    def function(b, h, q, k):  # type: ignore[no-untyped-def]
        return q >= k + 5 * b - 3 * h

    mask = create_block_mask(function, None, None, N, N, device="cpu", BLOCK_SIZE=32)
    place = Place(2, 4, N, N)
    assert torch.equal(dense(mask, place), allowed(mask, *place[:4]))
    one = Place(1, 4, N, N)
    assert torch.equal(dense(mask, one), allowed(mask, *one[:4]))
    assert recognised(mask, one)


# ---- changes ---------------------------------------------------------------------------------------------------------


def test_equal_functions_share_their_pattern() -> None:
    mask = created(causal)
    ids = torch.arange(N) // 9
    pattern = None
    for _ in range(3):
        mask.mask_mod = lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])
        found = pattern_of(mask, PLACE)
        assert pattern is None or found is pattern
        pattern = found


def one_block(function: Callable[..., Any]) -> BlockMask:
    """Return a mask of a single block, in which the function alone decides."""
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(one, one[..., None] - 1, BLOCK_SIZE=128, mask_mod=function, seq_lengths=(N, N))


def test_tables_of_blocks_are_followed() -> None:
    mask = listed([[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]])
    assert pattern_of(mask, PLACE) == rw.Causal()
    mask.kv_num_blocks[0, 0, 3] = 2
    assert torch.equal(dense(mask), allowed(mask, 1, 1, N, N))
    mask.kv_num_blocks = mask.kv_num_blocks - 1
    assert torch.equal(dense(mask), allowed(mask, 1, 1, N, N))
    mask.kv_indices = mask.kv_indices.flip(-1)
    assert torch.equal(dense(mask), allowed(mask, 1, 1, N, N))
    mask.BLOCK_SIZE = 32, 48
    assert torch.equal(dense(mask), allowed(mask, 1, 1, N, N))


def test_a_pattern_goes_with_its_mask() -> None:
    """Neither a mask nor a table that its function reads is kept alive."""
    table = torch.zeros(2**19, dtype=torch.int64)
    mask = one_block(functools.partial(lambda table, b, h, q, k: table[q] == table[k], table))
    pattern_of(mask, PLACE)
    gone = [weakref.ref(mask), weakref.ref(table.untyped_storage())]
    del mask, table
    gc.collect()
    assert [each() for each in gone] == [None, None]


# ---- functions that are evaluated ------------------------------------------------------------------------------------


def test_functions_that_ask_for_a_type() -> None:
    """A trace does not see it, so each code is compared with its graph, also one with the graph of another function."""

    def honest(b, h, q, k):  # type: ignore[no-untyped-def]
        return q <= k

    def asking(b, h, q, k):  # type: ignore[no-untyped-def]
        return q >= k if type(q) is Tensor else q <= k

    mask = one_block(honest)
    for function in (honest, asking, both(asking), both(honest), both(honest), both(asking)):
        mask.mask_mod = function
        assert torch.equal(dense(mask), allowed(mask, 1, 1, N, N))


@pytest.mark.parametrize("sides", [1, 2])
def test_a_table_that_is_too_short_outside_of_the_blocks(sides: int) -> None:
    """The function is called in partial blocks only, and recognised only where it has values for all positions."""
    short, by_block = torch.arange(40), torch.tensor([[True], [True]])

    def function(b, h, q, k):  # type: ignore[no-untyped-def]
        return short[k] <= q if sides == 1 else by_block[q // 32, k // 32] & (k <= q)

    mask = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 1, 0, 0]]], dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32), BLOCK_SIZE=32,
        mask_mod=function, seq_lengths=(N, N),
    )  # fmt: skip
    want = torch.zeros(N, N, dtype=torch.bool)
    want[:64, :32] = torch.arange(32) <= torch.arange(64)[:, None]
    # a plan evaluates only the blocks
    assert torch.equal(pattern_of(mask, PLACE).plan(N, tile=32).to_dense()[0, 0], want)


# ---- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["documents, causal", "window", "selected", "prefix", "documents, prefix"])
def test_gradients(name: str) -> None:
    """A recognised mask has the outputs and the gradients of the same mask as an evaluated function."""
    function = masks()[f"gym: {name}"].function
    place = Place(2, 4, N, N)
    mask = created(function, place)
    assert recognised(mask, place)
    q, k, v = (torch.randn(2, 4, N, 8, requires_grad=True) for _ in range(3))
    results = []
    for out in (flex_attention(q, k, v, None, mask), rw.attention(q, k, v, rw.from_block_mask(mask))):
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(*results)


def test_inside_of_transforms() -> None:
    """The values that a function reads have no part in a transform, and a mapped one is refused or followed."""
    ids = torch.arange(N) // 9
    mask = created(both(causal, lambda b, h, q, k: ids[q] == ids[k]))
    q, k, v = (torch.randn(1, 1, N, 8) for _ in range(3))
    want = flex_attention(q, k, v, None, mask)
    rw.memory.trim()
    grad = torch.func.grad(lambda v: flex_attention(q, k, v, None, mask).sum())(v)
    assert grad.shape == v.shape
    rw.memory.trim()
    mapped = torch.vmap(lambda q: flex_attention(q, k, v, None, mask))(q[None])
    torch.testing.assert_close(mapped[0], want)
    rw.memory.trim()
    with torch.inference_mode():
        torch.testing.assert_close(flex_attention(q, k, v, None, mask), want)
    torch.testing.assert_close(flex_attention(q, k, v, None, mask), want)


def test_a_failure_leaves_nothing() -> None:
    """A function that fails once is read at the next call."""
    fails = [True]

    def function(b, h, q, k):  # type: ignore[no-untyped-def]
        if fails[0]:
            raise ValueError("not yet")
        return q >= k

    mask = one_block(function)
    with pytest.raises(rw.errors.PatternError, match="not yet"):
        dense(mask)
    fails[0] = False
    assert pattern_of(mask, PLACE) == rw.Causal()
