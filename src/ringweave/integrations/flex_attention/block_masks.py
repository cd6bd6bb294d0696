"""Keep the pattern of each BlockMask while nothing of the mask changes, so that its plan is found again.

The mask function is traced at each call, and its pattern is found by the graph and the tensors that it reads. So it
does not matter which object the function is, or where its values come from. Where patterns have the pairs of the
function, the blocks of the mask usually repeat them, and the pattern takes its place. Other functions are evaluated in
tiles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ...cache import PATTERNS
from ...errors import PatternError
from ...patterns import Full, Pattern, traced
from ...patterns.cache_key import CacheKey, TableId
from ...patterns.function import Reads
from ...plan.interop import blocks_of, fits_blocks, in_blocks
from ...torch_compat import outside_transforms
from ...trace.comparison import agrees, codes
from ...trace.frozen import frozen
from ...trace.graph import B, Graph, H, UntraceableError, deps_of
from ...trace.relation import Place
from ...trace.symbols import trace

_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
# estimated size of a graph and of a pattern without its tables
_BYTES = 4 * 2**10


def pattern_of(block_mask: Any, place: Place) -> Pattern:
    """Return the pattern of a mask, or None, for a call; the same object while the mask is the same.

    A write to the mask's tables, another value of an attribute, and other values that the mask function reads are seen.
    A pattern has the values of its call, so that a gradient is that of its call. Where the function is evaluated in
    tiles, the pattern follows writes to tensors itself, and a gradient after one raises an error.
    """
    if block_mask is None:
        return Full()
    tables = {name: table for name in _TABLES if (table := getattr(block_mask, name)) is not None}
    with outside_transforms(*tables.values()):
        found = _recognised(block_mask, tables, place)
        return _followed(block_mask, tables, place) if found is None else found


# ---- functions that are recognised -----------------------------------------------------------------------------------


def _recognised(block_mask: Any, tables: dict[str, Tensor], place: Place) -> Pattern | None:
    """Return the pattern with the pairs of a mask's function; None if no pattern has them."""
    function = block_mask.mask_mod
    try:
        graph = trace(function)
    except UntraceableError:
        return None
    deps = deps_of(graph.result)
    place = place._replace(batch=place.batch if deps & B else 1, heads=place.heads if deps & H else 1)
    read = CacheKey.following("", tuple(graph.tensors))
    # the tables are the mask's own, and nothing writes to them unseen
    listed = tuple(tables), *map(TableId, tables.values()), tuple(block_mask.BLOCK_SIZE)
    key = "block mask", codes(function), graph.key, read.value, listed, place
    known: tuple[Pattern | None] | None = PATTERNS.get(key)
    if known is None:
        known = (_made(block_mask, function, graph, place),)
        nbytes = _BYTES + read.nbytes + sum(table.nbytes for table in tables.values())
        if known[0] is not None:
            nbytes += sum(table.nbytes for table in known[0].tables)
        PATTERNS.put(key, known, nbytes, [block_mask])
    return known[0]


def _made(block_mask: Any, function: Callable[..., Any], graph: Graph, place: Place) -> Pattern | None:
    if not agrees(function, graph, place.lengths()):
        return None
    try:
        pairs = traced.of_graph(graph, place)
    except (UntraceableError, PatternError):
        # also of more operators than a pattern may have
        return None
    if pairs is None:
        return None
    lengths = place.nq, place.nk
    blocks = blocks_of(block_mask, lengths)
    return pairs if fits_blocks(blocks, pairs, lengths) else in_blocks(blocks, pairs)


# ---- functions that are evaluated ------------------------------------------------------------------------------------


class _Read:
    """The pattern of a mask, and what the mask contained when it was read."""

    def __init__(self, block_mask: Any, state: Hashable, reads: Reads, place: Place):
        self.owner = weakref.ref(block_mask)
        # the state has ids of objects and tensors, which ``reads`` keeps alive
        self.state, self.reads = state, reads
        # a function that reads what cannot be followed is evaluated at each call
        function = block_mask.mask_mod if reads.unseen else frozen(block_mask.mask_mod)
        self.pattern = in_blocks(blocks_of(block_mask, (place.nq, place.nk)), function)


def _followed(block_mask: Any, tables: dict[str, Tensor], place: Place) -> Pattern:
    """Return the pattern that evaluates the function of a mask in tiles."""
    size = tuple(block_mask.BLOCK_SIZE), place.nq, place.nk
    reads = Reads(block_mask.mask_mod)
    listed = CacheKey.following("", tuple(tables.values())).value
    state = listed, tuple(tables), size, reads.state, tuple(map(id, reads.tables))
    key = "block mask", id(block_mask)
    known: _Read | None = PATTERNS.get(key)
    if known is None or known.owner() is not block_mask or known.state != state:
        known = _Read(block_mask, state, reads, place)
        PATTERNS.put(key, known, sum(table.nbytes for table in tables.values()), [block_mask])
    return known.pattern
