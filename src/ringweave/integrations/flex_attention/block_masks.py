"""Find the pattern of a BlockMask, the same object while nothing of the mask changes, so that its plan is found again.

The mask function is traced at each call, and its pattern is found by the graph and the tensors that it reads. So it
does not matter which object the function is, or where its values come from. Where patterns have the pairs of the
function, the blocks of the mask usually repeat them, and the pattern takes its place. Other functions are evaluated in
tiles.
"""

from __future__ import annotations

from typing import Any

from ...cache import PATTERNS
from ...patterns import Full, Pattern
from ...patterns.cache_key import TableId
from ...patterns.recorded import Recorded, recorded
from ...plan.interop import blocks_of, fits_blocks, in_blocks
from ...torch_compat import outside_transforms
from ...types import Place

_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
# estimated size of a pattern without its tables
_BYTES = 4 * 2**10


def pattern_of(block_mask: Any, place: Place) -> Pattern:
    """Return the pattern of a mask, or None, for a call; the same object while the mask is the same.

    A write to the mask's tables, another value of an attribute, and other values that the mask function reads are seen.
    A pattern has the values of its call, so that a gradient is that of its call. Where the function is evaluated in
    tiles, a gradient after a write to a tensor that it reads raises an error.
    """
    if block_mask is None:
        return Full()
    tables = {name: table for name in _TABLES if (table := getattr(block_mask, name)) is not None}
    with outside_transforms(*tables.values()):
        function = recorded(block_mask.mask_mod, pairs=True)
        if not function.function.single:
            place = function.at_place(place)
            function = function.compared(place)
        read = function.key()
        # the tables are the mask's own, and nothing writes to them unseen
        listed = tuple(tables), *map(TableId, tables.values()), tuple(block_mask.BLOCK_SIZE)
        # a pattern that evaluates the function reads these very tensors, which may be written to after the call
        key = "block mask", read.value, tuple(map(id, function.tables)), listed, place
        found: Pattern | None = PATTERNS.get(key)
        if found is None:
            found = _made(block_mask, function, place)
            read.check(function)
            if not function.function.single:
                nbytes = sum(table.nbytes for table in (*tables.values(), *found.tables))
                PATTERNS.put(key, found, _BYTES + read.nbytes + nbytes, [block_mask])
        return found


def _made(block_mask: Any, function: Recorded, place: Place) -> Pattern:
    lengths = place.nq, place.nk
    blocks, pairs = blocks_of(block_mask, lengths), function.relation(place)
    if pairs is None:
        return in_blocks(blocks, function)
    return pairs if fits_blocks(blocks, pairs, lengths) else in_blocks(blocks, pairs)
