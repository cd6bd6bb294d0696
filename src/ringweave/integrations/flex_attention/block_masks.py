"""Keep the pattern of each BlockMask while nothing of the mask changes, so that its plan is found again."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from ...cache import PATTERNS
from ...patterns import Full, Pattern
from ...patterns.cache_key import CacheKey
from ...patterns.function import Reads
from ...plan.interop import from_block_mask
from .argument_checks import ANY_LENGTH
from .frozen import frozen

_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class _Read:
    """The pattern of a mask, and what the mask contained when it was read."""

    def __init__(self, block_mask: Any, state: Hashable, reads: Reads, lengths: tuple[int, int]):
        self.owner = weakref.ref(block_mask)
        # the state has ids of objects and tensors, which ``reads`` keeps alive
        self.state, self.reads = state, reads
        self.pattern = _pattern(block_mask, reads, lengths)


def pattern_of(block_mask: Any, nq: int, nk: int) -> Pattern:
    """Return the pattern of a mask, or None, for a call; the same object while the mask is the same.

    A write to the mask's tables, another value of an attribute, and other values of names that the mask function reads
    are seen. A pattern keeps these values, so that a gradient is that of its call. It follows writes to tensors itself.
    """
    if block_mask is None:
        return Full()
    tables = tuple(table for name in _TABLES if (table := getattr(block_mask, name)) is not None)
    given = tuple(getattr(block_mask, name) is None for name in _TABLES)
    size = tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths), nq, nk
    reads = Reads(block_mask.mask_mod)
    state = CacheKey.following("", tables).value, given, size, reads.state, tuple(map(id, reads.tables))
    key = "block mask", id(block_mask)
    known = PATTERNS.get(key)
    if known is None or known.owner() is not block_mask or known.state != state:
        known = _Read(block_mask, state, reads, (nq, nk))
        PATTERNS.put(key, known, sum(table.nbytes for table in tables), [block_mask])
    pattern: Pattern = known.pattern
    return pattern


def _pattern(block_mask: Any, reads: Reads, lengths: tuple[int, int]) -> Pattern:
    from torch.nn.attention.flex_attention import BlockMask

    of_any_length = min(block_mask.BLOCK_SIZE) >= ANY_LENGTH
    mask = BlockMask.from_kv_blocks(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        # a function that reads what cannot be followed is evaluated at each call
        mask_mod=block_mask.mask_mod if reads.unseen else frozen(block_mask.mask_mod),
        seq_lengths=lengths if of_any_length else block_mask.seq_lengths,
        compute_q_blocks=False,
    )
    return from_block_mask(mask)
