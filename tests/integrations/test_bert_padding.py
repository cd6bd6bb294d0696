"""bert_padding: five values, gradients, and inverses of each other."""

from __future__ import annotations

import inspect

import pytest
import torch

from ringweave.integrations.flash_attn import bert_padding

MASK = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("more", [(), (2,), (3, 5)], ids=str)
def test_unpadding_and_padding(more: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, *more, requires_grad=True)
    packed, places, bounds, longest, used = bert_padding.unpad_input(x, MASK.to(dtype))
    assert torch.equal(packed, x[MASK.bool()])
    assert bounds.tolist() == [0, 2, 5, 7]
    assert longest == 3
    assert type(longest) is int
    assert used.tolist() == [2, 3, 2]
    assert bounds.dtype == used.dtype == torch.int32
    assert places.dtype == torch.int64
    back = bert_padding.pad_input(packed, places, 3, 4)
    shaped = MASK.reshape(3, 4, *[1] * len(more))
    assert torch.equal(back, x * shaped)
    (grad,) = torch.autograd.grad(back.square().sum(), x)
    assert torch.equal(grad, 2 * x * shaped)


def test_unused_tokens_are_packed_and_not_counted_as_used() -> None:
    x, unused = torch.randn(3, 4, 2), torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    packed, places, bounds, longest, used = bert_padding.unpad_input(x, MASK, unused)
    assert torch.equal(packed, x[(MASK + unused).bool()])
    assert bounds.tolist() == [0, 3, 6, 10]
    assert longest == 4
    assert used.tolist() == [2, 3, 2]
    assert torch.equal(places, (MASK + unused).flatten().nonzero()[:, 0])


def test_rows_of_several_sequences() -> None:
    x = torch.randn(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, places, bounds, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(packed, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert bounds.tolist() == [0, 2, 5, 8, 10, 16]
    assert bounds.dtype == torch.int32
    assert longest == 6
    assert torch.equal(bert_padding.pad_input(packed, places, 3, 6)[2], x[2])


def test_signatures() -> None:
    names = {name: [*inspect.signature(getattr(bert_padding, name)).parameters] for name in bert_padding.__all__}
    assert names == {
        "index_first_axis": ["input", "indices"],
        "index_put_first_axis": ["values", "indices", "first_axis_dim"],
        "pad_input": ["hidden_states", "indices", "batch", "seqlen"],
        "unpad_input": ["hidden_states", "attention_mask", "unused_mask"],
        "unpad_input_for_concatenated_sequences": ["hidden_states", "attention_mask_in_length"],
    }
