"""Conversion of plans and patterns to and from FlexAttention's BlockMask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import PatternError
from ..patterns import BlockTable, Pattern, from_mask_mod

if TYPE_CHECKING:
    from .block_plan import BlockPlan


def to_block_mask(plan: BlockPlan, keys: int | None = None) -> Any:
    """Convert a plan to a BlockMask; see :meth:`BlockPlan.to_block_mask`.

    ``keys`` is the number of keys of the mask, if more than the plan's; no query attends those.
    """
    from torch.nn.attention.flex_attention import BlockMask

    keys = plan.nk if keys is None else keys
    groups, rows, columns = plan.row_ptr.shape[0], plan.q_tiles, -(-keys // plan.kv_tile)
    line, col, bits = plan.listed()
    # -2 for an empty tile, -1 for a full one, else the number of its mask
    table = torch.full((groups, rows, columns), -2, dtype=torch.int32, device=plan.device)
    table[line // rows, line % rows, col] = bits.int()
    group = plan.row_set.long()
    several = plan.row_set.shape[0] > 1, plan.row_set.shape[1] > 1
    # Padded to a power of two: compiled code is specialised to the number of masks, which varies between similar plans.
    missing = (1 << max(plan.mask_words.shape[0] - 1, 0).bit_length()) - plan.mask_words.shape[0]
    masks = torch.nn.functional.pad(plan.mask_words, (0, 0, 0, 0, 0, missing))
    q_tile, kv_tile = plan.q_tile, plan.kv_tile
    # a tensor, since compiled code is specialised to a number, and only if keys follow that the plan does not have
    length = torch.tensor(plan.nk, device=plan.device) if keys > plan.nk else None

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # as in flex_attention, one batch element or head broadcasts
        rows = group[b if several[0] else 0, h if several[1] else 0]
        code = table[rows, q // q_tile, k // kv_tile]
        # words of a mask are indexed by the key's place in its tile
        place = k % kv_tile
        word = masks[code.clamp(min=0), q % q_tile, place // 32]
        allowed = (code == -1) | ((code >= 0) & (((word >> (place % 32)) & 1) == 1))
        return allowed if length is None else allowed & (k < length)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        chosen = chosen[group]
        order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
        return chosen.sum(-1).int(), order.int()

    full = table == -1
    if length is not None:
        # the tile of the last key has keys that the plan does not have
        full[:, :, plan.nk // kv_tile :] = False
    return BlockMask.from_kv_blocks(
        *listed((table >= -1) & ~full),
        *listed(full),
        BLOCK_SIZE=(q_tile, kv_tile),
        mask_mod=mask_mod,
        seq_lengths=(plan.nq, keys),
    )


def from_block_mask(block_mask: Any) -> Pattern:
    """Make a pattern of a FlexAttention ``BlockMask``: its full blocks, and its partial blocks with ``mask_mod``.

    Args:
        block_mask: Mask from ``create_block_mask`` or ``BlockMask.from_kv_blocks``.
    Returns:
        A pattern for the mask's batch, heads and lengths (batch or heads of 1 broadcast).
    Raises:
        PatternError: The value is not a BlockMask.
    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
        >>> rw.from_block_mask(causal).to_dense(256)[0, 0].equal(rw.Causal().to_dense(256)[0, 0])
        True
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise PatternError(
            "block_mask", type(block_mask).__name__, "a FlexAttention BlockMask", "Build it with create_block_mask."
        )
    size = block_mask.BLOCK_SIZE
    nk = block_mask.seq_lengths[1]
    blocks = -(-nk // size[1])

    def table(counts: Tensor, indices: Tensor) -> BlockTable:
        batch, heads, rows = counts.shape
        # drop axes of length 1, which broadcast
        shape = ((batch, heads) if batch > 1 else (heads,) if heads > 1 else ()) + (rows,)
        return BlockTable(
            indices=indices.reshape(*shape, -1),
            counts=counts.reshape(shape),
            key_blocks=max(blocks, indices.shape[-1]),
            block_size=(size[0], size[1]),
        )

    partial = table(block_mask.kv_num_blocks, block_mask.kv_indices) & from_mask_mod(block_mask.mask_mod)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return partial
    return table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices) | partial
