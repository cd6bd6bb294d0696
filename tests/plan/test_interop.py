from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

import ringweave as rw
from ringweave.errors import PatternError

from ..cases import PATTERNS


@pytest.mark.parametrize(
    "name", ["causal", "sinks", "per_head", "documents", "table_per_head", "function_per_head", "nothing"]
)
@pytest.mark.parametrize("tokens", [128, 300])
def test_to_block_mask(name: str, tokens: int) -> None:
    pattern = PATTERNS[name](tokens)
    plan = pattern.plan(tokens, heads=4)
    block_mask = plan.to_block_mask()
    assert isinstance(block_mask, BlockMask)
    assert torch.equal(create_mask(block_mask.mask_mod, 1, 4, tokens, tokens, device="cpu"), plan.to_dense())
    listed = block_mask.kv_num_blocks.sum() + block_mask.full_kv_num_blocks.sum()
    assert int(listed) == plan.tiles


@pytest.mark.parametrize("tile", [16, 48, 80, 112, (16, 48), (112, 32)])
@pytest.mark.parametrize(("tokens", "q_offset"), [(256, 0), (211, 0), (100, 57)])
def test_masks_of_tiles_that_are_no_multiple_of_a_word(tile: int | tuple[int, int], tokens: int, q_offset: int) -> None:
    """The words of a mask are counted within its tile, not along the sequence."""
    for pattern, heads, batch in (
        (rw.Causal(), 1, 1),
        (rw.PerHead([rw.Causal(), rw.SlidingWindow(9, 7) | rw.Sinks(3)]), 2, 1),
        (rw.from_mask_mod(lambda b, h, q, k: (q + b * k) % (h + 2) == 0), 2, 3),
    ):
        nk = tokens + q_offset
        plan = rw.plan(pattern, tokens, nk, heads=heads, batch=batch, q_offset=q_offset, tile=tile)
        got = create_mask(plan.to_block_mask().mask_mod, batch, heads, tokens, nk, device="cpu")
        assert torch.equal(got, pattern.to_dense(tokens, nk, heads, batch=batch, q_offset=q_offset))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("tile", [16, 48, 80, 112])
def test_flex_attention_with_such_tiles(tile: int) -> None:
    q, k, v = (torch.randn(2, 2, 256, 16) for _ in range(3))
    got = flex_attention(q, k, v, block_mask=rw.plan(rw.Causal(), 256, tile=tile).to_block_mask())
    torch.testing.assert_close(got, rw.attention(q, k, v, rw.Causal()))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same() -> None:
    q, k, v = (torch.randn(1, 4, 300, 16) for _ in range(3))
    pattern = PATTERNS["sinks"](300)
    got = flex_attention(q, k, v, block_mask=pattern.plan(300, heads=4).to_block_mask())
    torch.testing.assert_close(got, rw.attention(q, k, v, pattern))


@pytest.mark.parametrize("block", [64, (128, 64)])
def test_from_block_mask(block: int | tuple[int, int]) -> None:
    def mask_mod(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q >= k) & (q - k < 100 * (h + 1))

    block_mask = create_block_mask(mask_mod, None, 2, 300, 300, device="cpu", BLOCK_SIZE=block)
    pattern = rw.from_block_mask(block_mask)
    assert torch.equal(pattern.to_dense(300, heads=2), create_mask(mask_mod, 1, 2, 300, 300, device="cpu"))
    assert torch.equal(pattern.plan(300, heads=2).to_dense(), pattern.to_dense(300, heads=2))


def test_round_trip() -> None:
    pattern = PATTERNS["sinks"](300)
    again = rw.from_block_mask(pattern.plan(300).to_block_mask())
    assert torch.equal(again.to_dense(300), pattern.to_dense(300))


def test_not_a_block_mask() -> None:
    with pytest.raises(PatternError, match="wanted a FlexAttention BlockMask"):
        rw.from_block_mask(torch.ones(3, 3))
