"""The choice of a placement by the modelled time of its communication and compute.

Candidates are the plain placements and affinity placements. An affinity placement puts chunks that need the same keys
on the same rank, with equal numbers of chunks and about equal work. Chunks are dealt heaviest first, each to the rank
that already needs most of its keys and has room for its work; or they start in sequence order. Then chunks are swapped
to lower the heaviest load, preferring swaps that add the fewest keys to receive. Affinity placements use only integers
and stable orders, and no estimate uses a measurement, so all ranks choose the same placement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...cache import PLACEMENTS
from ...errors import ShapeError
from ...patterns import Pattern
from ...plan import Branch, branches
from .cost import Estimate, Machine, cost_of
from .placement import NAMED, Int64, Placement, block_for, blocks_for, contiguous, residues, striped, zigzag
from .workload import Workload

_PIECES = (4, 8, 16, 32, 2)
# Estimates within this factor of the least time count as equal, and the received bytes decide.
_EQUAL = 1.02
# A placement is good enough if receiving takes at most this fraction of the time to compute.
_LITTLE = 0.25
# approximate size of a cached choice, without the tables that its key refers to
_CHOICE_BYTES = 2**14
_MACHINE = Machine()
# in 256ths of the mean work: the most that a rank gets while chunks are dealt, and the load at which swapping stops
_ROOM = 262
_ENOUGH = 259
_SWAPS = 16
_MAX_SWAPS = 1024
# These bound the time of planning. Patterns beyond them are nearly dense and gain nothing from affinity.
_MAX_CHUNKS = 2048
_MAX_TILES = 2**22
_MAX_LOOKS = 2**27


class Choice(NamedTuple):
    """A placement, its estimate, and the estimates of all candidates that were tried."""

    placement: Placement
    estimate: Estimate
    candidates: tuple[Estimate, ...]


def place(
    placement: str | Placement, patterns: Sequence[Pattern], tokens: int, heads: tuple[int, int], ranks: int
) -> Placement:
    """Return the requested placement, or choose the best one for the patterns if ``placement`` is ``"auto"``.

    Raises:
        ShapeError: A given Placement has another length or another number of ranks.
    """
    if isinstance(placement, Placement):
        if (placement.tokens, placement.ranks) != (tokens, ranks):
            got, wanted = f"{placement.tokens} tokens on {placement.ranks} ranks", f"{tokens} on {ranks}"
            raise ShapeError("placement", got, wanted, "Create one for this context.")
        return placement
    calls = [branches(p, tokens, tokens, heads=heads[0], batch=p.extents()[0] or 1) for p in patterns]
    # a strided view of a mixture may contain no token, and then has no branches
    workload = Workload([call for call in calls if call], tokens, heads)
    block = block_for(tokens, ranks, min((b.tile[0] for b in workload.branches if b.rate == 1), default=128))
    if placement == "auto" and workload.calls:
        return choose_placement(workload, ranks, block).placement
    return NAMED["contiguous" if placement == "auto" else placement](tokens, ranks, block)


def choose_placement(workload: Workload, ranks: int, block: int, machine: Machine = _MACHINE) -> Choice:
    """Choose the placement with the least modelled time; among times within 2 %, the one with the fewest bytes.

    These are the bytes that the busiest rank receives. The choice is cached by value and the same on every rank.
    ``block`` is the number of tokens that stay together, from
    :func:`~ringweave.parallel.planning.placement.block_for`. The search stops early at a candidate near a lower bound.
    """
    patterns = [branch.pattern for branch in workload.branches]
    calls = tuple(tuple(map(_value, call)) for call in workload.calls)
    key = ("placement", calls, workload.tokens, workload.ratio, workload.widths, ranks, block, machine)
    choice: Choice | None = PLACEMENTS.get(key)
    if choice is None:
        choice = _choose(workload, ranks, block, machine)
        nbytes = sum(pattern.key().nbytes for pattern in patterns)
        owners = [owner for pattern in patterns for owner in pattern._owners()]
        PLACEMENTS.put(key, choice, _CHOICE_BYTES + nbytes, owners)
    return choice


def _choose(workload: Workload, ranks: int, block: int, machine: Machine) -> Choice:
    # Lower bound on received bytes: the keys of the longest row that do not fit into one shard. A placement that keeps
    # neighbours together is hardly ever beaten in bytes.
    least = 0.0
    for branch in workload.branches:
        heads = len({head // workload.ratio for head in range(*branch.heads)})
        least = max(least, (_longest(branch) - workload.tokens / ranks) * heads * workload.widths.bytes_of_key)
    looked: list[tuple[Placement, Estimate]] = []
    for placement in _candidates(workload, ranks, block):
        each = cost_of(workload, placement, machine)
        looked.append((placement, each))
        bound = max(each.ideal, least / machine.bandwidth)
        enough = max(least, _LITTLE * each.ideal * machine.bandwidth)
        near = not any(branch.rate % placement.views for branch in workload.branches)
        keeps = near and placement.name in ("contiguous", "residue")
        if each.seconds <= _EQUAL * bound and (keeps or each.bytes_worst <= _EQUAL * enough):
            break
    limit = _EQUAL * min(each.seconds for _, each in looked)
    fast = [pair for pair in looked if pair[1].seconds <= limit]
    placement, best = min(fast, key=lambda pair: (pair[1].bytes_worst, pair[1].seconds))
    return Choice(placement, best, tuple(each for _, each in looked))


def _longest(branch: Branch) -> int:
    """Return the number of tokens that the longest row of tiles attends; 0 for a dilated branch."""
    if branch.rate > 1:
        return 0
    plan = branch.plan("cpu")
    return int(plan.row_ptr.diff(dim=1).max()) * plan.kv_tile


def _value(branch: Branch) -> Hashable:
    view = (branch.rate, branch.q_first, branch.k_first, branch.nq, branch.nk, branch.q_offset, branch.batch)
    return (branch.pattern.key().value, branch.heads, branch.tile, view)


# ---- candidates ------------------------------------------------------------------------------------------------------


def portfolio(tokens: int, ranks: int, block: int, rates: Sequence[int]) -> list[Placement]:
    """List the plain placements, which are always tried; residue placements for the dilation rates come first."""
    if ranks == 1:
        return [contiguous(tokens, 1, block)]
    plain = [contiguous(tokens, ranks, block), zigzag(tokens, ranks, block)]
    if all(rate == 1 for rate in rates):
        return [*plain, striped(tokens, ranks, block)]
    views = {math.gcd(rate, ranks) for rate in rates}
    return [*(residues(tokens, ranks, block, each) for each in sorted(views, reverse=True) if each > 1), *plain]


def _candidates(workload: Workload, ranks: int, block: int) -> Iterator[Placement]:
    yield from portfolio(workload.tokens, ranks, block, [branch.rate for branch in workload.branches])
    for pieces in _PIECES if ranks > 1 else ():
        for deal in (True, False):
            placement = affinity(workload, ranks, block, pieces, deal=deal)
            if placement is not None:
                yield placement


def affinity(workload: Workload, ranks: int, block: int, pieces: int, *, deal: bool) -> Placement | None:
    """Place chunks, ``pieces`` per rank, by the keys that they attend; None if that is impossible or takes too long.

    Before swapping, the chunks are dealt to ranks if ``deal``, else each rank has a contiguous part of the sequence.
    """
    blocks = blocks_for(workload.tokens, ranks, block)
    if (blocks // ranks) % pieces or ranks * pieces > _MAX_CHUNKS:
        return None
    length = blocks // ranks // pieces * block
    if any(branch.rate > 1 or length % branch.tile[0] for branch in workload.branches):
        return None
    if sum(branch.plan("cpu").nnz for branch in workload.branches) > _MAX_TILES:
        return None
    chunks = _Chunks.of(workload.branches, length, ranks * pieces)
    if len(chunks.unit) * ranks > _MAX_LOOKS:
        return None
    owner = _deal(chunks, ranks, pieces) if deal else np.arange(ranks * pieces) // pieces
    _swap(chunks, owner, ranks)
    # Number the ranks in the order of their first chunks: neighbours in the sequence become neighbours in the ring.
    _, first = np.unique(owner, return_index=True)
    name = np.empty(ranks, np.int32)
    name[np.argsort(first)] = np.arange(ranks, dtype=np.int32)
    chosen = np.repeat(name[owner], length // block)
    return Placement(f"{'dealt' if deal else 'swapped'}/{pieces}", workload.tokens, ranks, block, chosen)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Chunks of the sequence, their work, and the chunks of keys (units) that each needs.

    The units of chunk c are ``unit[first[c] : first[c + 1]]``, ascending.
    """

    work: Int64
    first: Int64
    unit: Int64

    @staticmethod
    def of(calls: Sequence[Branch], length: int, count: int) -> _Chunks:
        """Collect the needs of ``count`` chunks of ``length`` tokens over all branches."""
        work = np.zeros(count, np.int64)
        needs = [np.arange(count, dtype=np.int64) * (count + 1)]
        for branch in calls:
            plan = branch.plan("cpu")
            together = length // branch.tile[0]
            uses = np.bincount(plan.row_set.numpy().reshape(-1), minlength=len(plan.row_ptr))
            rows = np.arange(plan.q_tiles) // together
            for use, pointer in zip(uses, plan.row_ptr.numpy().astype(np.int64), strict=True):
                tiles = np.diff(pointer)
                np.add.at(work, rows, use * tiles * branch.tile[0] ** 2)
                column = plan.col.numpy()[pointer[0] : pointer[-1]].astype(np.int64) // together
                pair = np.repeat(rows, tiles) * count + column
                # equal pairs come in long runs, and removing the repetitions first makes the sort cheap
                needs.append(np.unique(pair[np.flatnonzero(np.diff(pair, prepend=-1))]))
        pairs = np.unique(np.concatenate(needs))
        return _Chunks(work, np.searchsorted(pairs, np.arange(count + 1) * count), pairs % count)

    def units(self, chunk: int | np.integer[Any]) -> Int64:
        """Return the units that a chunk needs."""
        return self.unit[self.first[chunk] : self.first[chunk + 1]]

    @functools.cached_property
    def chunk(self) -> Int64:
        """Chunk of each entry of ``unit``."""
        return np.repeat(np.arange(len(self.work)), np.diff(self.first))

    @functools.cached_property
    def _by_unit(self) -> tuple[Int64, list[int]]:
        order = np.argsort(self.unit, kind="stable")
        return self.chunk[order], np.searchsorted(self.unit[order], np.arange(len(self.work) + 1)).tolist()

    def users(self, units: Int64) -> Int64:
        """Return the chunks that need the given units, repeated for each needed unit."""
        chunk, first = self._by_unit
        return np.concatenate([chunk[first[u] : first[u + 1]] for u in units.tolist()]) if len(units) else units


def _deal(chunks: _Chunks, ranks: int, pieces: int) -> Int64:
    """Deal ``pieces`` chunks to each rank and return the rank of each chunk."""
    owner = np.empty(len(chunks.work), np.int64)
    load = np.zeros(ranks, np.int64)
    free = np.full(ranks, pieces)
    wanted = np.zeros((len(chunks.work), ranks), bool)
    # number of units of each chunk that each rank would have to receive, (chunks, ranks)
    missing = np.repeat(np.diff(chunks.first)[:, None], ranks, axis=1)
    limit = int(chunks.work.sum()) * _ROOM // (256 * ranks)
    far = 2**40
    for c in np.argsort(-chunks.work, kind="stable").tolist():
        # Fewest missing units, then least load. If the chunk fits no rank, only the load decides.
        key = np.where(load + chunks.work[c] <= limit, missing[c], far)
        key[free == 0] = 2 * far
        best = np.flatnonzero(key == key.min())
        r = int(best[np.argmin(load[best])])
        owner[c] = r
        load[r] += chunks.work[c]
        free[r] -= 1
        units = chunks.units(c)
        new = units[~wanted[units, r]]
        wanted[new, r] = True
        np.subtract.at(missing[:, r], chunks.users(new), 1)
    return owner


def _swap(chunks: _Chunks, owner: Int64, ranks: int) -> None:
    """Swap chunks of the heaviest rank for lighter ones, in place, preferring swaps that add the fewest units."""
    chunk, work = chunks.chunk, chunks.work
    load = np.bincount(owner, weights=work, minlength=ranks).astype(np.int64)
    limit = int(work.sum()) * _ENOUGH // (256 * ranks)
    uses = np.zeros((len(work), ranks), np.int32)
    np.add.at(uses, (chunks.unit, owner[chunk]), 1)
    # number of units of each chunk that each rank would have to receive, (chunks, ranks)
    missing = np.add.reduceat(uses[chunks.unit] == 0, chunks.first[:-1], dtype=np.int64)
    for _ in range(min(_SWAPS * ranks, _MAX_SWAPS)):
        r = int(np.argmax(load))
        if load[r] <= limit:
            return
        mine = np.flatnonzero(owner == r)
        less = work[mine][:, None] - work[None, :]
        after = np.maximum(load[r] - less, load[owner][None, :] + less)
        after[:, mine] = load[r]
        useful = after < load[r]
        if not useful.any():
            return
        # units that both ranks would have to receive in addition
        extra = np.where(useful & (after <= limit), missing[:, r] + missing[mine][:, owner], np.inf)
        least = extra if np.isfinite(extra).any() else after
        i, j = divmod(int(np.argmin(least)), len(work))
        a, other = int(mine[i]), int(owner[j])
        for c, source, to in ((a, r, other), (j, other, r)):
            units = chunks.units(c)
            uses[units, source] -= 1
            uses[units, to] += 1
            np.add.at(missing[:, source], chunks.users(units[uses[units, source] == 0]), 1)
            np.subtract.at(missing[:, to], chunks.users(units[uses[units, to] == 1]), 1)
            load[source] -= work[c]
            load[to] += work[c]
            owner[c] = to
