"""What the ranks of a placement need of each other for one branch: whole key tiles, as the plan lists them.

A branch is a strided view, so a tile of its plan may lie on several ranks. Views are cut into runs: tokens that a rank
holds side by side, none longer than a tile, none across a tile's end. Where blocks and tiles agree a run is a tile.
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
    """A kind of key heads: those whose query heads attend the same tiles, and which are exchanged alike.

    Attributes:
        members: (n, 2) pairs of batch element and key head among the branch's.
        groups: The plan's row sets that their query heads use.
        uses: How many query heads of each member use each of them.
    """

    members: Int64
    groups: tuple[int, ...]
    uses: tuple[int, ...]

    @property
    def queries(self) -> int:
        """How many query heads each member has."""
        return sum(self.uses)


@dataclass(frozen=True, eq=False)
class Demand:
    """What the ranks of a placement need of each other for one branch.

    Attributes:
        branch: The branch, over the whole sequence.
        plan: Its plan.
        placement: Which rank holds which tokens.
        kinds: Its key heads by what they need.
        run: Tokens of a run.
        owner: (runs,) the rank of each run.
        slot: (runs,) where its first token lies in the rank's shard.
        stride: Distance of its tokens there.
    """

    branch: Branch
    plan: BlockPlan
    placement: Placement
    kinds: tuple[HeadKind, ...]
    run: int
    owner: Int64
    slot: Int64
    stride: int

    @staticmethod
    def of(branch: Branch, placement: Placement, ratio: int) -> Demand:
        """Find the demand of a branch whose query heads share each key head by ``ratio``."""
        plan = branch.plan("cpu")
        together, stride = placement.runs(branch.rate)
        run = math.gcd(together, plan.kv_tile)
        first = branch.k_first + np.arange(0, branch.nk, run, dtype=np.int64) * branch.rate
        owner, slot = placement.owners(first), placement.slots(first)
        return Demand(branch, plan, placement, _kinds(branch, plan, ratio), run, owner, slot, stride)

    @property
    def tile(self) -> int:
        """How many tokens a side of the plan's tiles has."""
        return self.plan.kv_tile

    @property
    def runs_per_tile(self) -> int:
        """How many runs a tile is cut into."""
        return self.tile // self.run

    @cached_property
    def lengths(self) -> Int64:
        """(runs,) how many tokens each run has: the last one may be short."""
        starts = np.arange(len(self.owner), dtype=np.int64) * self.run
        return np.minimum(self.branch.nk - starts, self.run)

    def shard_places(self, runs: Bools | Int64) -> Int64:
        """Find where the tokens of some runs lie in their ranks' shards."""
        return run_places(self.slot[runs], self.lengths[runs], self.stride)

    def buffer_places(self, runs: Bools | Int64, tile_at: Int64) -> Int64:
        """Find where they lie in a buffer of tiles, whose places ``tile_at`` gives."""
        number = np.arange(len(self.owner))[runs]
        first = tile_at[number // self.runs_per_tile] * self.tile + number % self.runs_per_tile * self.run
        return run_places(first, self.lengths[runs], 1)

    @cached_property
    def holds(self) -> tuple[Int64, Int64, Int64]:
        """(tile, rank, tokens) of every rank that holds tokens of a tile, by tile and rank."""
        ranks = self.placement.ranks
        tile = np.arange(len(self.owner), dtype=np.int64) // self.runs_per_tile
        if self.runs_per_tile == 1:
            return tile, self.owner, self.lengths
        pair, inverse = np.unique(tile * ranks + self.owner, return_inverse=True)
        tokens = np.bincount(inverse, weights=self.lengths).astype(np.int64)
        return pair // ranks, pair % ranks, tokens

    @cached_property
    def entries(self) -> list[tuple[Int64, Int64]]:
        """(row, column) of the tiles that each row set of the plan lists."""
        listed = []
        pointers, columns = self.plan.row_ptr.numpy(), self.plan.col.numpy()
        for pointer in pointers:
            row = np.repeat(np.arange(self.plan.q_tiles, dtype=np.int64), np.diff(pointer))
            listed.append((row, columns[pointer[0] : pointer[-1]].astype(np.int64)))
        return listed

    def _parts(self, tiles: Int64) -> tuple[Int64 | slice, Int64]:
        """Find the entries of ``holds`` of each of some tiles: (index into ``tiles``, index into ``holds``)."""
        if self.runs_per_tile == 1:
            # each has one, in its order
            return slice(None), tiles
        first = np.searchsorted(self.holds[0], np.arange(self.plan.q_tiles + 1))
        count = np.diff(first)[tiles]
        which = np.repeat(np.arange(len(tiles)), count)
        return which, np.repeat(first[:-1][tiles] - np.cumsum(count) + count, count) + np.arange(len(which))

    @cached_property
    def needs(self) -> tuple[Bools, ...]:
        """Per kind (ranks, key tiles): whether some query of the rank attends some key of the tile."""
        by_group: dict[int, Bools] = {}
        for group in {group for kind in self.kinds for group in kind.groups}:
            row, col = self.entries[group]
            which, part = self._parts(row)
            by_group[group] = np.zeros((self.placement.ranks, self.plan.kv_tiles), bool)
            by_group[group][self.holds[1][part], col[which]] = True
        return tuple(np.logical_or.reduce([by_group[group] for group in kind.groups]) for kind in self.kinds)

    def receipts(self, keys: tuple[Bools, ...]) -> tuple[Int64, Int64, Int64]:
        """(receiver, sender, tokens) of all that crosses where each rank gets the tiles that ``keys`` names, per kind.

        Tokens count for each key head and batch element; a pair of ranks may be named many times.
        """
        receivers, senders, amounts = [], [], []
        _, by_rank, held = self.holds
        for kind, need in zip(self.kinds, keys, strict=True):
            receiver, tile = np.nonzero(need)
            which, part = self._parts(tile)
            receiver, sender = receiver[which], by_rank[part]
            crosses = np.flatnonzero(receiver != sender)
            receivers.append(receiver[crosses])
            senders.append(sender[crosses])
            amounts.append(held[part[crosses]] * len(kind.members))
        return np.concatenate(receivers), np.concatenate(senders), np.concatenate(amounts)

    def work(self) -> NDArray[np.float64]:
        """(ranks,) how many tiles each computes, over batch and heads; a query tile held in part counts in part."""
        lengths = np.zeros(self.plan.q_tiles)
        for count, pointer in zip(self._uses, self.plan.row_ptr.numpy(), strict=True):
            lengths += count * np.diff(pointer)
        rows, rank, _ = self.holds
        total = np.bincount(rank, weights=lengths[rows] * self._shares, minlength=self.placement.ranks)
        return total.astype(np.float64)

    def local_work(self) -> NDArray[np.float64]:
        """(ranks,) how much of the work is on key tiles that the rank holds whole."""
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
        """(row sets,) how many heads of how many batch elements use each."""
        return np.bincount(self.plan.row_set.numpy().reshape(-1), minlength=len(self.plan.row_ptr))

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        """Which part of its tile each of ``holds`` is."""
        rows, _, tokens = self.holds
        return tokens / np.minimum(self.branch.nq - rows * self.tile, self.tile)


def run_places(first: Int64, lengths: Int64, stride: int) -> Int64:
    """List the places of runs, one after the other."""
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
