"""The key tiles that the ranks of a placement need from each other for one branch, as the plan lists them.

A branch is a strided view, so one tile of its plan may be spread over several ranks. Views are cut into runs: tokens
that are adjacent on one rank, at most a tile long, and within one tile. If blocks and tiles agree, a run is a tile.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...plan import BlockPlan, Branch
from .placement import Int64, Placement

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class HeadKind:
    """A kind of key heads: heads that need the same tiles and are exchanged together."""

    members: Int64  # (n, 2) pairs of batch element and key head within the branch
    groups: tuple[int, ...]  # row sets of the plan that the query heads of each member use
    uses: tuple[int, ...]  # number of query heads of each member that use each of these row sets

    @property
    def queries(self) -> int:
        """Number of query heads of each member."""
        return sum(self.uses)


@dataclass(frozen=True, eq=False)
class Demand:
    """The demand of one branch: the tiles that the ranks of a placement need, and the ranks that hold them."""

    branch: Branch  # the branch, over the whole sequence
    plan: BlockPlan
    placement: Placement
    kinds: tuple[HeadKind, ...]  # the branch's key heads, grouped by the tiles that they need
    run: int  # number of tokens of a run
    owner: Int64  # (runs,) rank of each run
    slot: Int64  # (runs,) place of each run's first token in its rank's shard
    stride: int  # distance between a run's tokens in the shard

    @staticmethod
    def of(branch: Branch, placement: Placement, ratio: int) -> Demand:
        """Return the demand of a branch with ``ratio`` query heads per key head."""
        plan = branch.plan("cpu")
        together, stride = placement.runs(branch.rate)
        run = math.gcd(together, plan.kv_tile)
        first = branch.k_first + np.arange(0, branch.nk, run, dtype=np.int64) * branch.rate
        owner, slot = placement.owners(first), placement.slots(first)
        return Demand(branch, plan, placement, _kinds(branch, plan, ratio), run, owner, slot, stride)

    @property
    def tile(self) -> int:
        """Side of the plan's tiles in tokens."""
        return self.plan.kv_tile

    @property
    def runs_per_tile(self) -> int:
        """Number of runs per tile."""
        return self.tile // self.run

    @cached_property
    def lengths(self) -> Int64:
        """Number of tokens of each run, (runs,); the last run may be shorter."""
        starts = np.arange(len(self.owner), dtype=np.int64) * self.run
        return np.minimum(self.branch.nk - starts, self.run)

    def shard_places(self, runs: Bools | Int64) -> Int64:
        """Return the places of some runs' tokens in their ranks' shards."""
        return run_places(self.slot[runs], self.lengths[runs], self.stride)

    def buffer_places(self, runs: Bools | Int64, tile_at: Int64) -> Int64:
        """Return the places of some runs' tokens in a buffer of tiles; ``tile_at`` is each tile's index there."""
        number = np.arange(len(self.owner))[runs]
        first = tile_at[number // self.runs_per_tile] * self.tile + number % self.runs_per_tile * self.run
        return run_places(first, self.lengths[runs], 1)

    @cached_property
    def holds(self) -> tuple[Int64, Int64, Int64]:
        """(tile, rank, tokens) for each rank that holds tokens of a tile, sorted by tile and rank."""
        ranks = self.placement.ranks
        tile = np.arange(len(self.owner), dtype=np.int64) // self.runs_per_tile
        if self.runs_per_tile == 1:
            return tile, self.owner, self.lengths
        pair, inverse = np.unique(tile * ranks + self.owner, return_inverse=True)
        tokens = np.bincount(inverse, weights=self.lengths).astype(np.int64)
        return pair // ranks, pair % ranks, tokens

    @cached_property
    def entries(self) -> list[tuple[Int64, Int64]]:
        """(row, column) of the listed tiles, for each row set of the plan."""
        listed = []
        pointers, columns = self.plan.row_ptr.numpy(), self.plan.col.numpy()
        for pointer in pointers:
            row = np.repeat(np.arange(self.plan.q_tiles, dtype=np.int64), np.diff(pointer))
            listed.append((row, columns[pointer[0] : pointer[-1]].astype(np.int64)))
        return listed

    def _parts(self, tiles: Int64) -> tuple[Int64 | slice, Int64]:
        """Find the entries of ``holds`` for some tiles: (index into ``tiles``, index into ``holds``)."""
        if self.runs_per_tile == 1:
            # each tile has one entry, at the tile's index
            return slice(None), tiles
        first = np.searchsorted(self.holds[0], np.arange(self.plan.q_tiles + 1))
        count = np.diff(first)[tiles]
        which = np.repeat(np.arange(len(tiles)), count)
        return which, np.repeat(first[:-1][tiles] - np.cumsum(count) + count, count) + np.arange(len(which))

    @cached_property
    def needs(self) -> tuple[Bools, ...]:
        """Whether some query of a rank attends some key of a tile, (ranks, key tiles) for each kind."""
        by_group: dict[int, Bools] = {}
        for group in {group for kind in self.kinds for group in kind.groups}:
            row, col = self.entries[group]
            which, part = self._parts(row)
            by_group[group] = np.zeros((self.placement.ranks, self.plan.kv_tiles), bool)
            by_group[group][self.holds[1][part], col[which]] = True
        return tuple(np.logical_or.reduce([by_group[group] for group in kind.groups]) for kind in self.kinds)

    def receipts(self, keys: tuple[Bools, ...]) -> tuple[Int64, Int64, Int64]:
        """List (receiver, sender, tokens) of the exchange in which each rank gets the tiles in ``keys`` of each kind.

        Tokens are counted for each key head and batch element. A pair of ranks may occur many times.
        """
        receivers, senders, amounts = [], [], []
        _, by_rank, tokens = self.holds
        for kind, need in zip(self.kinds, keys, strict=True):
            receiver, tile = np.nonzero(need)
            which, part = self._parts(tile)
            receiver, sender = receiver[which], by_rank[part]
            crosses = np.flatnonzero(receiver != sender)
            receivers.append(receiver[crosses])
            senders.append(sender[crosses])
            amounts.append(tokens[part[crosses]] * len(kind.members))
        return np.concatenate(receivers), np.concatenate(senders), np.concatenate(amounts)

    def work(self) -> NDArray[np.float64]:
        """Return the number of tiles that each rank computes over batch and heads, (ranks,).

        A query tile that is spread over ranks counts for each rank in proportion to its tokens.
        """
        lengths = np.zeros(self.plan.q_tiles)
        for count, pointer in zip(self._uses, self.plan.row_ptr.numpy(), strict=True):
            lengths += count * np.diff(pointer)
        rows, rank, _ = self.holds
        total = np.bincount(rank, weights=lengths[rows] * self._shares, minlength=self.placement.ranks)
        return total.astype(np.float64)

    def local_work(self) -> NDArray[np.float64]:
        """Return the part of each rank's work on key tiles that the rank holds completely, (ranks,)."""
        ranks = self.placement.ranks
        total = np.zeros(ranks)
        if self.runs_per_tile == 1:
            for count, (row, col) in zip(self._uses, self.entries, strict=True):
                rank = self.owner[row]
                total += count * np.bincount(rank[rank == self.owner[col]], minlength=ranks)
            return total
        rows, ranks_of, _ = self.holds
        pieces = np.bincount(rows, minlength=self.plan.q_tiles)
        whole = np.where(pieces == 1, ranks_of[np.cumsum(pieces) - 1], -1)
        for count, (row, col) in zip(self._uses, self.entries, strict=True):
            which, part = self._parts(row)
            here = part[whole[col[which]] == ranks_of[part]]
            total += count * np.bincount(ranks_of[here], weights=self._shares[here], minlength=ranks)
        return total

    @cached_property
    def _uses(self) -> Int64:
        """Number of (batch element, head) pairs that use each row set, (row sets,)."""
        return np.bincount(self.plan.row_set.numpy().reshape(-1), minlength=len(self.plan.row_ptr))

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        """Fraction of its tile that each entry of ``holds`` has."""
        rows, _, tokens = self.holds
        return tokens / np.minimum(self.branch.nq - rows * self.tile, self.tile)


def run_places(first: Int64, lengths: Int64, stride: int) -> Int64:
    """Return the places of the tokens of runs, concatenated."""
    which = np.repeat(np.arange(len(first)), lengths)
    inside = np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return first[which] + inside * stride


def _kinds(branch: Branch, plan: BlockPlan, ratio: int) -> tuple[HeadKind, ...]:
    group = plan.row_set.numpy()
    kv_heads = sorted({head // ratio for head in range(*branch.heads)})
    of_query = np.array([kv_heads.index(head // ratio) for head in range(*branch.heads)])
    by_use: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
    for b in range(branch.batch):
        for h in range(len(kv_heads)):
            used = Counter(group[b, of_query == h].tolist())
            by_use.setdefault(tuple(sorted(used.items())), []).append((b, h))
    return tuple(
        HeadKind(np.array(members, np.int64), tuple(group for group, _ in used), tuple(count for _, count in used))
        for used, members in by_use.items()
    )
