"""What must cross between ranks, read off the plan's tiles: the yardstick of the bytes that were counted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...parallel import Placement
from ...patterns import Pattern
from ...plan import Branch, branches

Int64 = NDArray[np.int64]


def _parts(branch: Branch, placement: Placement, ratio: int) -> Iterator[tuple[NDArray[np.bool_], Int64]]:
    """For each key head: (ranks, tiles) whether a rank's queries attend a tile, and its tokens that the rank holds."""
    plan = branch.plan("cpu")
    pointers, columns, group = (x.numpy() for x in (plan.row_ptr, plan.col, plan.group))
    positions = branch.k_first + np.arange(branch.nk) * branch.rate
    tile = np.arange(branch.nk) // plan.kv_tile
    held = np.zeros((placement.ranks, plan.kv_tiles), np.int64)
    np.add.at(held, (placement.owners(positions), tile), 1)
    heads = range(*branch.heads)
    for b in range(branch.batch):
        for key_head in sorted({head // ratio for head in heads}):
            needed = np.zeros(held.shape, bool)
            for number in {int(group[b, i]) for i, head in enumerate(heads) if head // ratio == key_head}:
                pointer = pointers[number]
                rows = np.repeat(np.arange(plan.q_tiles), np.diff(pointer))
                cols = columns[pointer[0] : pointer[-1]]
                for rank in range(placement.ranks):
                    # who holds a part of a query tile computes that tile's row
                    needed[rank, cols[held[rank, rows] > 0]] = True
            yield needed, held


def between_ranks(pattern: Pattern, placement: Placement, heads: tuple[int, int]) -> Int64:
    """(ranks, ranks) key tokens, summed over key heads, that a row's rank needs of a column's."""
    total = np.zeros((placement.ranks, placement.ranks), np.int64)
    for branch in branches(pattern, placement.tokens, placement.tokens, heads=heads[0]):
        for needed, held in _parts(branch, placement, heads[0] // heads[1]):
            total += needed.astype(np.int64) @ held.T
    np.fill_diagonal(total, 0)
    return total


def between_nodes(pattern: Pattern, placement: Placement, heads: tuple[int, int], per_node: int) -> int:
    """Key tokens that must cross between nodes, each once for every node that needs it."""
    total = 0
    node = np.arange(placement.ranks) // per_node
    for branch in branches(pattern, placement.tokens, placement.tokens, heads=heads[0]):
        for needed, held in _parts(branch, placement, heads[0] // heads[1]):
            for here in np.unique(node):
                total += int(held[node != here][:, needed[node == here].any(0)].sum())
    return total
