"""From a pattern to what a rank does for it: the placement of a context, and its schedules, cached by value."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ..errors import ShapeError, message
from ..patterns import Pattern
from ..patterns.function import changed, store_of
from ..plan import branches
from ..recent import Recent
from .execution.agreement import Opaque, Value
from .execution.schedule import Schedule, gather, ring
from .planning.choice import choose
from .planning.cost import Load, Widths
from .planning.demand import Demand
from .planning.movement import Moves, cover
from .planning.placement import NAMED, Placement, block_for

SCHEDULES = ("auto", "gather", "ring")
# auto goes around the ring where a rank would receive more than this many shards of keys ...
_MOST_SHARDS = 2
# ... or where the ring, in which queries may move instead, receives less than this part
_WORTH_IT = 0.5
# with the bytes of the tables that their keys name, and about so many of their own
_MAX_SCHEDULES, _MAX_BYTES, _SCHEDULE_BYTES = 64, 256 * 2**20, 2**16


def place(
    asked: str | Placement, patterns: Sequence[Pattern], tokens: int, heads: tuple[int, int], ranks: int
) -> Placement:
    """The placement that was asked for, or the one that suits the patterns best.

    Raises:
        ShapeError: One that is made for another length or other ranks.
    """
    if isinstance(asked, Placement):
        if (asked.tokens, asked.ranks) != (tokens, ranks):
            got, wanted = f"{asked.tokens} tokens on {asked.ranks} ranks", f"{tokens} on {ranks}"
            raise ShapeError(message("placement", got, wanted, "Make it for this context."))
        return asked
    of_batch = ((p, p.extents()[0] or 1) for p in patterns)
    calls = [call for p, batch in of_batch if (call := branches(p, tokens, tokens, heads=heads[0], batch=batch))]
    sides = [branch.tile[0] for call in calls for branch in call if branch.rate == 1]
    block = block_for(tokens, ranks, min(sides, default=128))
    if asked == "auto" and calls:
        return choose(calls, tokens, ranks, block, heads[0] // heads[1]).placement
    return NAMED["contiguous" if asked == "auto" else asked](tokens, ranks, block)


class Plans:
    """What one rank does for patterns under one placement.

    Args:
        placement: Which rank holds which tokens.
        heads: Query heads and key heads.
        rank: The rank.
        schedule: One of ``SCHEDULES``.
        per_node: Ranks of a node, where there are two levels.
    """

    def __init__(
        self, placement: Placement, heads: tuple[int, int], rank: int, schedule: str, per_node: int | None = None
    ):
        self.placement, self.heads, self.rank = placement, heads, rank
        self.schedule, self.per_node = schedule, per_node
        self._made: Recent[Schedule] = Recent(_MAX_BYTES, _MAX_SCHEDULES)

    def of(self, pattern: Pattern, batch: int = 1) -> Schedule:
        """What the rank does for a pattern."""
        made_of = pattern.key()
        key, kept = (made_of.value, batch), store_of(pattern.spec, self._made)
        found = kept.get(key)
        if found is not None:
            return found
        demands = self.demands(pattern, batch)
        said: dict[str, Value] = {"pattern": Opaque(_digest_of(demands), repr(pattern))}
        if self.schedule_of(pattern) == "ring":
            moves = [_moves(demand) for demand in demands]
            said |= {"schedule": "ring", "moves": Opaque(_digest_of_moves(moves), "its own")}
            made = ring(demands, moves, self.placement, self.rank, self.heads, said)
        else:
            said["schedule"] = "gather"
            made = gather(demands, self.placement, self.rank, self.heads, said, self.per_node)
        if kept is not self._made and not pattern.key().same(made_of):
            raise changed("what was changed while it was planned")
        kept.put(key, made, _SCHEDULE_BYTES, made_of.tables)
        return made

    def demands(self, pattern: Pattern, batch: int = 1) -> list[Demand]:
        """What the ranks need of each other for a pattern, per branch."""
        tokens = self.placement.tokens
        split = branches(pattern, tokens, tokens, heads=self.heads[0], batch=batch)
        return [Demand.of(branch, self.placement, self.heads[0] // self.heads[1]) for branch in split]

    def schedule_of(self, pattern: Pattern) -> str:
        """``"gather"`` or ``"ring"``: how a pattern is computed."""
        if self.schedule != "auto":
            return self.schedule
        demands = self.demands(pattern, pattern.extents()[0] or 1)
        if self.placement.ranks == 1 or self.per_node is not None or not demands:
            return "gather"
        # tokens that are received, times key heads and batch elements
        received = sum(demand.tokens_moved().sum(1) for demand in demands).max()
        if received > _MOST_SHARDS * self.placement.local * self.heads[1] * demands[0].branch.batch:
            return "ring"
        widths = Widths()
        around = Load.of(demands, widths).received.max()
        return "ring" if around < _WORTH_IT * received * widths.bytes_of_key else "gather"


def _moves(demand: Demand) -> tuple[Moves, ...]:
    # the same whatever the channels of a call: forward, backward and all calls move alike
    widths = Widths()
    return cover(demand, widths.bytes_of_key * demand.tile, widths.bytes_of_query * demand.tile)


def _digest_of(demands: Sequence[Demand]) -> int:
    """63 bits that differ where anything differs of what is computed: contents, not names."""
    found = hashlib.blake2b(digest_size=8)
    for demand in demands:
        plan, view = demand.plan, demand.branch
        found.update(repr((view.heads, view.rate, view.q_first, view.k_first, view.nq, view.nk)).encode())
        found.update(repr((view.q_offset, view.batch, plan.q_tile, plan.kv_tile)).encode())
        for tensor in (plan.row_ptr, plan.col, plan.bits, plan.masks, plan.group):
            found.update(tensor.contiguous().numpy().data)
    return int.from_bytes(found.digest(), "little") >> 1


def _digest_of_moves(moves: Sequence[tuple[Moves, ...]]) -> int:
    found = hashlib.blake2b(digest_size=8)
    for move in (kind for branch in moves for kind in branch):
        found.update(np.packbits(move.keys).data)
        found.update(np.packbits(move.queries).data)
    return int.from_bytes(found.digest(), "little") >> 1
