"""Check the arguments of a call as torch's FlexAttention does, with its kinds of errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ...errors import RingweaveError, ShapeError, UnsupportedError, shown
from ...validate import autocast, checked_scale

#: Side of a block in a mask that is for any length.
ANY_LENGTH = 1 << 30


class UnsupportedRankError(RingweaveError, NotImplementedError):
    """A tensor of FlexAttention does not have four dimensions."""


class Call(NamedTuple):
    """The tensors and the scale of a call.

    Attributes:
        query: (B, Hq, L, E), in autocast's dtype where it is enabled.
        key: (B, Hkv, S, E), expanded to the query's batch.
        value: (B, Hkv, S, Ev), expanded to the query's batch.
        scale: Factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


def checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool = False,
    return_aux: Any = None,
) -> Call:
    """Return the call, or raise an error of torch's kinds for the first argument that does not fit.

    ``validate.check_tensors`` checks dtypes and the sizes of values, on every path: inside ``attention_with_lse`` for a
    function of terms, and before the tiles of any other function.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ShapeError(name, shown(x), "a tensor (batch, heads, tokens, dim)", "Pass a tensor.")
        if x.is_nested:
            raise UnsupportedRankError(name, "a nested tensor", "a dense tensor", "Pad it, or pack it and mask it.")
    for name, x in tensors.items():
        if x.device != query.device:
            raise ShapeError(f"{name}.device", x.device, f"{query.device}, as query", "Move it.")
        if x.ndim < 2:
            raise ShapeError(name, f"{x.ndim} dimensions", "4: (batch, heads, tokens, dim)", "Reshape it.")
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError("key.shape[-1]", key.shape[-1], f"{query.shape[-1]}, as query", "Project both to one size.")
    for name, x in tensors.items():
        if x.ndim != 4:
            raise UnsupportedRankError(name, f"{x.ndim} dimensions", "4: (batch, heads, tokens, dim)", "Reshape it.")
    _check_heads(query, key, enable_gqa)
    if block_mask is not None:
        _check_mask(query, key, block_mask)
    elif query.shape[0] != key.shape[0]:
        wanted = f"{query.shape[0]}, as query, or a block_mask with the query's batch"
        raise ShapeError("key.shape[0]", key.shape[0], wanted, "Expand the keys and values.")
    if return_lse and return_aux is not None:
        raise ShapeError("return_lse, return_aux", "both", "one of them", "Pass return_aux=AuxRequest(lse=True).")
    if torch.is_autocast_enabled("cpu"):
        query, key, value = autocast(query, key, value)
    if key.shape[0] == 1 != query.shape[0]:
        key = key.expand(query.shape[0], -1, -1, -1)
        value = value.expand(query.shape[0], -1, -1, -1) if value.shape[0] == 1 else value
    # without channels there is no default, and ``check_tensors`` says so
    return Call(query, key, value, checked_scale(scale, query.shape[3] or 1))


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    heads, kv_heads = query.shape[1], key.shape[1]
    if not enable_gqa and heads != kv_heads:
        raise ShapeError("key heads", kv_heads, f"{heads}, as query", "Pass enable_gqa=True for grouped queries.")
    if enable_gqa and (not kv_heads or heads % kv_heads):
        raise ShapeError("key heads", kv_heads, f"a divisor of the {heads} query heads", "Repeat the keys.")


def _check_mask(query: Tensor, key: Tensor, block_mask: Any) -> None:
    if not isinstance(block_mask, BlockMask):
        raise ShapeError("block_mask", shown(block_mask), "a BlockMask or None", "Build it with create_block_mask.")
    blocks = block_mask.kv_num_blocks
    batch, heads = (1, 1, *blocks.shape)[-3:-1]
    if query.shape[0] != key.shape[0] and batch != query.shape[0]:
        wanted = f"{query.shape[0]}, as query, or as many batch elements in block_mask"
        raise ShapeError("key.shape[0]", key.shape[0], wanted, "Expand the keys and values.")
    if key.shape[0] not in (1, query.shape[0]):
        wanted = f"1 or {query.shape[0]}, as query"
        raise UnsupportedError("key.shape[0]", key.shape[0], wanted, "Expand the queries.")
    for name, got, size in (("batch", batch, query.shape[0]), ("heads", heads, query.shape[1])):
        if got not in (1, size):
            raise ShapeError(f"block_mask {name}", got, f"1 or {size}, as query", "Build the mask for the call.")
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise UnsupportedError(
            "block_mask",
            "a slice of a BlockMask, whose mask_mod torch removes",
            "a mask with a mask_mod",
            "Set its mask_mod from the whole mask, moved by the rows that the slice left out.",
        )
    nq, nk = block_mask.seq_lengths
    if min(block_mask.BLOCK_SIZE) < ANY_LENGTH and (nq, nk) != (query.shape[2], key.shape[2]):
        wanted = f"{(query.shape[2], key.shape[2])}, the lengths of query and key"
        remedy = "Build a mask for these lengths, or crop it with block_mask._adjust(q_len, kv_len)."
        raise ShapeError("block_mask lengths", (nq, nk), wanted, remedy)
    if blocks.device != query.device:
        remedy = f"Move it with block_mask.to({str(query.device)!r})."
        raise UnsupportedError("block_mask.device", blocks.device, f"{query.device}, as query", remedy)
