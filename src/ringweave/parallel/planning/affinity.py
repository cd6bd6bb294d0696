"""Placements found by what attends what: chunks that need the same keys together, work and counts equal.

Chunks are dealt heaviest first, each to the rank that already needs most of its keys and has room for its work; or they
lie in order. Then they are swapped where that lowers the heaviest load, those first that add the least to receive.
Whole numbers and stable orders only: all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...plan import Branch
from .placement import Int64, Placement, blocks_for

# a rank takes work up to this many 256ths of the mean while chunks are dealt, and swaps while it has more than those
_ROOM = 262
_ENOUGH = 259
_SWAPS = 16
_MAX_SWAPS = 1024
# bounds on the time that this takes: nearly dense patterns have nothing to gain
_MAX_CHUNKS = 2048
_MAX_TILES = 2**22
_MAX_LOOKS = 2**27


@dataclass(eq=False)
class _Graph:
    """Chunks, and the units of keys that each needs: ``unit[first[c] : first[c + 1]]``, ascending."""

    work: Int64
    first: Int64
    unit: Int64

    @property
    def chunk(self) -> Int64:
        """The chunk of each entry of ``unit``."""
        return np.repeat(np.arange(len(self.work)), np.diff(self.first))


def affinity(
    branches: Sequence[Branch], tokens: int, ranks: int, block: int, pieces: int, *, deal: bool
) -> Placement | None:
    """The placement of chunks, ``pieces`` of them for each rank, by what they attend.

    Args:
        branches: Of all calls, in token order.
        tokens: Length of the sequence.
        ranks: Ranks.
        block: Tokens in a block.
        pieces: Chunks of each rank.
        deal: Whether chunks are dealt before they are swapped; else the swaps start from stretches of the sequence.
    Returns:
        The placement; None where ranks cannot be cut so, or where it would take long.
    """
    blocks = blocks_for(tokens, ranks, block)
    if (blocks // ranks) % pieces or ranks * pieces > _MAX_CHUNKS:
        return None
    length = blocks // ranks // pieces * block
    if any(branch.rate > 1 or length % branch.tile[0] for branch in branches):
        return None
    if sum(branch.plan("cpu").nnz for branch in branches) > _MAX_TILES:
        return None
    graph = _graph(branches, length, ranks * pieces)
    if len(graph.unit) * ranks > _MAX_LOOKS:
        return None
    owner = _deal(graph, ranks, pieces) if deal else np.arange(ranks * pieces) // pieces
    _swap(graph, owner, ranks)
    # ranks in the order of their first chunk: neighbours in the sequence are neighbours in a ring
    _, at = np.unique(owner, return_index=True)
    name = np.empty(ranks, np.int32)
    name[np.argsort(at)] = np.arange(ranks, dtype=np.int32)
    chosen = np.repeat(name[owner], length // block).astype(np.int32)
    return Placement(f"{'dealt' if deal else 'swapped'}/{pieces}", tokens, ranks, block, chosen)


def _graph(branches: Sequence[Branch], length: int, chunks: int) -> _Graph:
    work = np.zeros(chunks, np.int64)
    needs = [np.arange(chunks, dtype=np.int64) * (chunks + 1)]
    for branch in branches:
        plan = branch.plan("cpu")
        together = length // branch.tile[0]
        uses = np.bincount(plan.group.numpy().reshape(-1), minlength=len(plan.row_ptr))
        rows = np.arange(plan.q_tiles) // together
        for use, pointer in zip(uses, plan.row_ptr.numpy().astype(np.int64), strict=True):
            counts = np.diff(pointer)
            np.add.at(work, rows, use * counts * branch.tile[0] ** 2)
            column = plan.col.numpy()[pointer[0] : pointer[-1]].astype(np.int64) // together
            pair = np.repeat(rows, counts) * chunks + column
            # runs of one pair are long: most of them go before they are sorted
            needs.append(np.unique(pair[np.flatnonzero(np.diff(pair, prepend=-1))]))
    found = np.unique(np.concatenate(needs))
    return _Graph(work, np.searchsorted(found, np.arange(chunks + 1) * chunks), found % chunks)


def _deal(graph: _Graph, ranks: int, pieces: int) -> NDArray[np.int64]:
    """(chunks,) ranks, ``pieces`` chunks for each."""
    owner = np.empty(len(graph.work), np.int64)
    load = np.zeros(ranks, np.int64)
    free = np.full(ranks, pieces)
    wanted = np.zeros((len(graph.work), ranks), np.int32)
    limit = int(graph.work.sum()) * _ROOM // (256 * ranks)
    far = 2**40
    for c in np.argsort(-graph.work, kind="stable").tolist():
        units = graph.unit[graph.first[c] : graph.first[c + 1]]
        missing = len(units) - wanted[units].sum(0)
        fits = load + graph.work[c] <= limit
        # least missing, of these the least loaded; where nothing fits the least loaded
        key = np.where(fits, missing, far)
        key[free == 0] = 2 * far
        best = np.flatnonzero(key == key.min())
        r = int(best[np.argmin(load[best])])
        owner[c] = r
        load[r] += graph.work[c]
        free[r] -= 1
        wanted[units, r] = 1
    return owner


def _swap(graph: _Graph, owner: NDArray[np.int64], ranks: int) -> None:
    """Exchange chunks of the heaviest rank for lighter ones, those that add the least to receive first."""
    chunk = graph.chunk
    load = np.bincount(owner, weights=graph.work, minlength=ranks).astype(np.int64)
    limit = int(graph.work.sum()) * _ENOUGH // (256 * ranks)
    uses = np.zeros((len(graph.work), ranks), np.int32)
    np.add.at(uses, (graph.unit, owner[chunk]), 1)
    for _ in range(min(_SWAPS * ranks, _MAX_SWAPS)):
        r = int(np.argmax(load))
        if load[r] <= limit:
            return
        mine = np.flatnonzero(owner == r)
        less = graph.work[mine][:, None] - graph.work[None, :]
        after = np.maximum(load[r] - less, load[owner][None, :] + less)
        after[:, mine] = load[r]
        useful = after < load[r]
        if not useful.any():
            return
        # what both sides would have to receive in addition
        here = np.bincount(chunk, weights=uses[graph.unit, r] == 0)
        there = np.stack([(uses[graph.unit[graph.first[c] : graph.first[c + 1]]] == 0).sum(0) for c in mine])
        extra = here[None, :] + there[:, owner]
        enough = np.where(useful & (after <= limit), extra, np.inf)
        if np.isfinite(enough).any():
            i, j = np.unravel_index(int(np.argmin(enough)), enough.shape)
        else:
            i, j = np.unravel_index(int(np.argmin(after)), after.shape)
        a, b, other = int(mine[i]), int(j), int(owner[j])
        for c, source, to in ((a, r, other), (b, other, r)):
            units = graph.unit[graph.first[c] : graph.first[c + 1]]
            uses[units, source] -= 1
            uses[units, to] += 1
            load[source] -= graph.work[c]
            load[to] += graph.work[c]
            owner[c] = to
