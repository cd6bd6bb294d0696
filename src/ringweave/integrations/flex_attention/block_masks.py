"""Keep the pattern of each BlockMask while nothing of the mask changes, so that its plan is found again."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from ...cache import PATTERNS
from ...patterns import Full, Pattern
from ...patterns.cache_key import CacheKey
from ...plan.interop import from_block_mask
from .arguments import ANY_LENGTH

_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class _Read:
    """The pattern of a mask, and what the mask contained when it was read."""

    def __init__(self, block_mask: Any, state: Hashable, lengths: tuple[int, int]):
        self.owner = weakref.ref(block_mask)
        self.state, self.mask_mod = state, block_mask.mask_mod
        self.pattern = _of_lengths(block_mask, lengths)


def pattern_of(block_mask: Any, nq: int, nk: int) -> Pattern:
    """Return the pattern of a mask, or None, for a call; the same object while the mask is the same.

    A write to the mask's tables and another value of an attribute are seen. The pattern itself follows what the mask
    function reads.
    """
    if block_mask is None:
        return Full()
    tables = tuple(table for name in _TABLES if (table := getattr(block_mask, name)) is not None)
    given = tuple(getattr(block_mask, name) is None for name in _TABLES)
    size = tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths), nq, nk
    state = CacheKey.following("", tables).value, given, size
    key = "block mask", id(block_mask)
    known = PATTERNS.get(key)
    if known is None or known.owner() is not block_mask or known.mask_mod is not block_mask.mask_mod:
        known = None
    if known is None or known.state != state:
        known = _Read(block_mask, state, (nq, nk))
        PATTERNS.put(key, known, sum(table.nbytes for table in tables), [block_mask])
    pattern: Pattern = known.pattern
    return pattern


def _of_lengths(block_mask: Any, lengths: tuple[int, int]) -> Pattern:
    if min(block_mask.BLOCK_SIZE) < ANY_LENGTH:
        return from_block_mask(block_mask)
    # one block of any length
    from torch.nn.attention.flex_attention import BlockMask

    mask = BlockMask.from_kv_blocks(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=block_mask.mask_mod,
        seq_lengths=lengths,
        compute_q_blocks=False,
    )
    return from_block_mask(mask)
