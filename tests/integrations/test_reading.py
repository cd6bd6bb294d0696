"""Masks are read as what they allow: against the library's own mask, evaluated densely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as masks

from ringweave.integrations.transformers import pattern_mask
from ringweave.integrations.transformers.mask_reading import Unread, read

B, N = 2, 19
NUMBERS = torch.tensor([[0] * 8 + [1] * 11, [0] * 12 + [1] * 4 + [2] * 3])
POSITIONS = torch.cat([torch.cat([torch.arange(int(c)) for c in row.bincount()])[None] for row in NUMBERS])
BLOCKS = torch.full((B, N), -1)
BLOCKS[0, 3:7], BLOCKS[1, 5:9], BLOCKS[1, 14:] = 0, 0, 1
PADS = torch.tensor([0, 4])


def two_sided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    dist = q - k
    return (dist >= 0) & (dist < 4) | (dist < 0) & (-dist < 3)


def apart(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return ~(abs(q - k) <= 2) & (k < q + 6)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": masks.causal_mask_function,
    "bidirectional": masks.bidirectional_mask_function,
    "window": masks.sliding_window_causal_mask_function(5),
    "window, both sides": masks.sliding_window_bidirectional_mask_function(4),
    "window with two widths": two_sided,
    "all but a window": apart,
    "chunks": masks.chunked_causal_mask_function(6, torch.zeros(B, dtype=torch.long)),
    "chunks after padding": masks.chunked_causal_mask_function(6, PADS),
    "packed": masks.packed_sequence_compatibility_function(masks.causal_mask_function, POSITIONS, NUMBERS),
    "packed, window": masks.packed_sequence_compatibility_function(
        masks.sliding_window_causal_mask_function(3), POSITIONS, NUMBERS
    ),
    "packed, chunks": masks.packed_sequence_compatibility_function(
        masks.chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.long)), POSITIONS, NUMBERS
    ),
    "blocks": masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(BLOCKS)),
    "window and blocks": masks.and_masks(
        masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(BLOCKS)), masks.sliding_window_overlay(5)
    ),
    "padding": masks.and_masks(masks.causal_mask_function, masks.padding_mask_function(NUMBERS == 0)),
}
# queries, keys, positions of the first of both
PLACES = {"prefill": (N, N, 0, 0), "step": (1, N, N - 1, 0), "tokens": (3, 13, 16, 6), "one, of fewer": (1, 7, 16, 10)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_is_read_as_what_it_allows(name: str, place: str, padded: bool) -> None:
    nq, nk, q_offset, kv_offset = PLACES[place]
    function = FUNCTIONS[name]
    read(function)  # by symbols, not as a mask_mod
    mask = torch.ones(B, N, dtype=torch.bool)
    if padded:
        mask[1, :4] = mask[0, 17:] = False
    wanted = masks.sdpa_mask(B, nq, nk, q_offset, kv_offset, function, mask, allow_is_causal_skip=False)
    assert wanted is not None
    wanted = wanted[:, 0]
    forms: list[int | Tensor] = [q_offset]
    if nq == 1 and not any(word in name for word in ("packed", "blocks")):
        forms.append(torch.tensor(q_offset))
    for form in forms:
        got = pattern_mask(B, nq, nk, form, kv_offset, function, mask)
        dense = got.pattern.to_dense(nq, nk, batch=B, q_offset=got.q_offset)[:, 0]
        assert torch.equal(dense, wanted), form


def test_a_position_that_is_a_tensor_is_not_waited_for() -> None:
    with torch.device("meta"):
        position = torch.zeros((), dtype=torch.int64)
    mask = pattern_mask(1, 1, 64, position, 0, FUNCTIONS["window"])
    assert [table.device.type for table in mask.pattern.tables] == ["meta", "meta"]


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: q % 2 == 0,
        lambda b, h, q, k: (k <= q) & (h == 0),
        lambda b, h, q, k: NUMBERS[b, q] == BLOCKS[b, k],
        lambda b, h, q, k: BLOCKS[b, q] > 3,
        lambda b, h, q, k: k <= q if q else q <= k,
    ],
)
def test_what_has_no_symbol_is_not_guessed(function: Callable[..., Any]) -> None:
    with pytest.raises((Unread, TypeError)):
        read(function)
