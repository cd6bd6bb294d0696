"""Conversion of plans and patterns to and from FlexAttention's BlockMask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PatternError
from ..patterns import BlockTable, Full, Pattern, TokenMask
from ..torch_compat import outside_transforms
from .cached_plans import plan_cache
from .tile_size import MOST_SIDE

if TYPE_CHECKING:
    from .block_plan import BlockPlan


def to_block_mask(plan: BlockPlan, lengths: tuple[int, int] | None = None) -> Any:
    """Convert a plan to a BlockMask; see :meth:`BlockPlan.to_block_mask`.

    ``lengths`` are the queries and keys of the mask, if more than the plan's; no query attends the further keys.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = lengths or (plan.nq, plan.nk)
    groups, rows, columns = plan.row_ptr.shape[0], -(-queries // plan.q_tile), -(-keys // plan.kv_tile)
    line, col, bits = plan.listed()
    # -2 for an empty tile, -1 for a full one, else the number of its mask
    table = torch.full((groups, rows, columns), -2, dtype=torch.int32, device=plan.device)
    table[line // plan.q_tiles, line % plan.q_tiles, col] = bits.int()
    group = plan.row_set.long()
    several = plan.row_set.shape[0] > 1, plan.row_set.shape[1] > 1
    # Entries of fewer than 32 bits: FlexAttention's kernels keep wider ones of all pairs, for several stages, in shared
    # memory, which has no room for them.
    if plan.mask_words.shape[0] <= torch.iinfo(torch.int16).max:
        table = table.short()
    # Padded to a power of two: compiled code is specialised to the number of masks, which varies between plans.
    missing = max(16, 1 << (plan.mask_words.shape[0] - 1).bit_length()) - plan.mask_words.shape[0]
    masks = torch.nn.functional.pad(plan.mask_words, (0, 0, 0, 0, 0, missing)).view(torch.uint8)
    q_tile, kv_tile = plan.q_tile, plan.kv_tile
    # a tensor, since compiled code is specialised to a number
    length = None if lengths is None else torch.tensor(plan.nk, device=plan.device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # as in flex_attention, one batch element or head broadcasts
        rows = group[b if several[0] else 0, h if several[1] else 0]
        code = table[rows, q // q_tile, k // kv_tile].int()
        # bytes of a mask are indexed by the key's place in its tile
        place = k % kv_tile
        byte = masks[code.clamp(min=0), q % q_tile, place // 8].int()
        allowed = (code == -1) | ((code >= 0) & (((byte >> (place % 8)) & 1) == 1))
        return allowed if length is None else allowed & (k < length)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        chosen = chosen[group]
        order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
        return chosen.sum(-1).int(), order.int()

    full = table == -1
    if length is not None:
        # the tile of the last key may have keys that the plan does not have
        full[:, :, plan.nk // kv_tile :] = False
    return BlockMask.from_kv_blocks(
        *listed((table >= -1) & ~full),
        *listed(full),
        BLOCK_SIZE=(q_tile, kv_tile),
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )


def from_block_mask(block_mask: Any) -> Pattern:
    """Make a pattern of a FlexAttention ``BlockMask``: its full blocks, and its partial blocks with ``mask_mod``.

    Args:
        block_mask: Mask from ``create_block_mask`` or ``BlockMask.from_kv_blocks``. Of each row of indices the first
            ``kv_num_blocks`` count, in any order. ``mask_mod`` is called with 0-dim tensors, under ``torch.vmap``.
    Returns:
        A pattern for the mask's batch, heads and lengths (batch or heads of 1 broadcast).
    Raises:
        PatternError: The value is not a BlockMask, its blocks do not cover its queries, or its function fails.
    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
        >>> rw.from_block_mask(causal).to_dense(256)[0, 0].equal(rw.Causal().to_dense(256)[0, 0])
        True
    """
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    if not isinstance(block_mask, BlockMask):
        raise PatternError(
            "block_mask", type(block_mask).__name__, "a FlexAttention BlockMask", "Build it with create_block_mask."
        )
    with outside_transforms(block_mask.kv_num_blocks, block_mask.kv_indices):
        function = block_mask.mask_mod
        return in_blocks(blocks_of(block_mask), Full() if function is noop_mask else TokenMask._of_pairs(function))


class Blocks(NamedTuple):
    """The blocks of a BlockMask.

    Attributes:
        partial: Blocks in which the mask function allows some pairs, bool (..., rows, columns).
        full: Blocks with all pairs, in the same form; None without a list of such blocks.
        size: Queries and keys of a block.
    """

    partial: Tensor
    full: Tensor | None
    size: tuple[int, int]


def blocks_of(block_mask: Any, lengths: tuple[int, int] | None = None) -> Blocks:
    """Return the blocks of a BlockMask, for other lengths than its own if given."""
    nq, nk = lengths or block_mask.seq_lengths
    # a side of 2 ** 30 stands for one block of any length
    size = min(block_mask.BLOCK_SIZE[0], nq), min(block_mask.BLOCK_SIZE[1], nk)
    blocks = -(-nq // size[0]), -(-nk // size[1])
    partial = _set_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, blocks)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return Blocks(partial, None, size)
    return Blocks(partial, _set_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks), size)


def in_blocks(blocks: Blocks, pairs: Pattern) -> Pattern:
    """Return the pairs of full blocks, and those of partial blocks that a pattern allows."""
    partial, full, size = blocks
    if isinstance(pairs, Full):
        return _table(partial if full is None else full | partial, size)
    # a table without set blocks is left out where that needs no copy from a GPU: calls then take less time
    on_cpu = partial.device.type == "cpu"
    if full is not None and on_cpu and not bool(partial.any()):
        return _table(full, size)
    some = _table(partial, size) & pairs
    if full is None or (on_cpu and not bool(full.any())):
        return some
    return _table(full, size) | some


def fits_blocks(blocks: Blocks, pairs: Pattern, lengths: tuple[int, int]) -> bool:
    """Return whether the blocks leave a pattern as it is: all pairs are in a block, and full blocks have every pair.

    Blocks with sides that are no sides of tiles are not compared, unless one block is as long as the call.
    """
    partial, full, size = blocks
    if bool(partial.all()) and (full is None or not bool(full.any())):
        return True
    high, wide = (-(-side // 16) * 16 if side == n else side for side, n in zip(size, lengths, strict=True))
    if high % 16 or wide % 16 or max(high, wide) > MOST_SIDE:
        return False
    batch, heads = (1 if made is None else made for made in pairs.extents())
    plan = plan_cache.get(pairs, *lengths, heads=heads, batch=batch, tile=(high, wide))
    line, col, bits = plan.listed()
    filled, used = torch.zeros(2, plan.row_ptr.shape[0], plan.q_tiles, plan.kv_tiles, dtype=torch.bool, device="cpu")
    used[line // plan.q_tiles, line % plan.q_tiles, col] = True
    filled[line // plan.q_tiles, line % plan.q_tiles, col] = bits < 0
    used, filled = (of[plan.row_set.long()] for of in (used, filled))
    if full is None:
        return not bool((used & ~partial).any())
    return not bool((used & ~partial & ~full | full & ~filled).any())


def _set_blocks(counts: Tensor, indices: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Return the table of blocks that lists set; a block that begins after the last key is left out."""
    rows, columns = blocks
    if indices.shape[-2] < rows:
        raise PatternError(
            "block_mask",
            f"{indices.shape[-2]} rows of blocks",
            f"{rows} for its queries",
            "Set seq_lengths to the lengths that its blocks cover.",
        )
    counts, indices = counts[..., :rows], indices[..., :rows, :]
    counted = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = torch.where(counted & (indices >= 0) & (indices < columns), indices, columns).long()
    table = torch.zeros(*places.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return table.scatter_(-1, places, True)[..., :columns]


def _table(blocks: Tensor, size: tuple[int, int]) -> BlockTable:
    batch, heads, rows, columns = (1, 1, *blocks.shape)[-4:]
    # axes of length 1 are dropped, since they broadcast
    shape = ((batch, heads) if batch > 1 else (heads,) if heads > 1 else ()) + (rows, columns)
    return BlockTable(blocks.reshape(shape), block_size=size)
