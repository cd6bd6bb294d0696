"""Padding and packing, with the names, parameters and returns of ``flash_attn.bert_padding``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...names import only


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return some rows of a tensor's first axis, (n, ...); gradients return to them.

    Example:
        >>> from ringweave.integrations.flash_attn.bert_padding import index_first_axis
        >>> index_first_axis(torch.arange(6).view(3, 2), torch.tensor([2, 0]))
        tensor([[4, 5],
                [0, 1]])
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return zeros, (first_axis_dim, ...), in which the rows of ``indices`` are those of ``values``.

    Example:
        >>> from ringweave.integrations.flash_attn.bert_padding import index_put_first_axis
        >>> index_put_first_axis(torch.tensor([[4, 5]]), torch.tensor([1]), 2)
        tensor([[0, 0],
                [4, 5]])
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch end to end.

    Args:
        hidden_states: (B, N, ...).
        attention_mask: (B, N), bool or int: 1 for tokens, 0 for padding.
        unused_mask: (B, N), bool or int: 1 for tokens that are packed and not used.
    Returns:
        The packed tokens, (tokens, ...); their places in the flattened batch; the cumulative lengths, (B + 1,) int32;
        the longest length; and the number of used tokens of each sequence, (B,) int32.
    Example:
        >>> from ringweave.integrations.flash_attn.bert_padding import unpad_input
        >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> packed, places, bounds, longest, used = unpad_input(torch.randn(2, 3, 8), mask)
        >>> packed.shape, places.tolist(), bounds.tolist(), longest, used.tolist()
        (torch.Size([5, 8]), [0, 1, 3, 4, 5], [0, 2, 5], 3, [2, 3])
    """
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = every.sum(-1, dtype=torch.int32)
    indices = every.flatten().nonzero().flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _bounds(lengths), int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack the tokens of a padded batch in which each row holds several sequences.

    Args:
        hidden_states: (B, N, ...).
        attention_mask_in_length: (B, N) int: in each row the lengths of its sequences, then zeros.
    Returns:
        The packed tokens, their places in the flattened batch, the cumulative lengths and the longest length.
    Example:
        >>> from ringweave.integrations.flash_attn.bert_padding import unpad_input_for_concatenated_sequences as unpad
        >>> packed, places, bounds, longest = unpad(torch.randn(2, 3, 8), torch.tensor([[1, 1, 0], [3, 0, 0]]))
        >>> packed.shape, places.tolist(), bounds.tolist(), longest
        (torch.Size([5, 8]), [0, 1, 3, 4, 5], [0, 1, 2, 5], 3)
    """
    tokens = attention_mask_in_length.sum(-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[1], device=tokens.device)
    indices = (places < tokens).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _bounds(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return packed tokens to their places in a padded batch, (batch, seqlen, ...), with zeros between them.

    Example:
        >>> from ringweave.integrations.flash_attn.bert_padding import pad_input
        >>> pad_input(torch.tensor([[5], [6], [7]]), torch.tensor([0, 2, 3]), 2, 2).tolist()
        [[[5], [0]], [[6], [7]]]
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def _bounds(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]
__dir__ = only(__all__)
