"""The schedule (allgather or ring) of one rank for each pattern under one placement, cached by the pattern's value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from ..cache import PLACEMENTS
from ..patterns import Pattern
from ..plan import branches
from ..units import count, nbytes, percent
from .execution.header import Digest, Value
from .execution.schedule import Schedule, allgather, ring
from .planning.cost import Load, Machine, estimate
from .planning.demand import Demand
from .planning.movement import Moves, movement
from .planning.placement import Placement
from .planning.workload import Widths

# "auto" chooses the ring if allgather would deliver more than this many shards of keys to a rank,
_MOST_SHARDS = 2
# or if the busiest rank receives less than this fraction of allgather's bytes in the ring, where queries may move.
_WORTH_IT = 0.5
# approximate size of a cached schedule, without the tables that its key refers to
_SCHEDULE_BYTES = 2**16


class Schedules:
    """The schedules of one rank under one placement; ``per_node`` is the node size of a mesh of two dimensions."""

    def __init__(
        self, placement: Placement, heads: tuple[int, int], rank: int, schedule: str, per_node: int | None = None
    ):
        self.placement, self.heads, self.rank = placement, heads, rank
        self.schedule, self.per_node = schedule, per_node
        # Cache keys identify this object by a token, because a key that held it would keep it alive.
        self._name = object()

    def of(self, pattern: Pattern, batch: int = 1) -> Schedule:
        """Return the rank's schedule for a pattern, planned on first use."""
        key_of_pattern = pattern.key()
        # a schedule has patterns that read these very tensors, which may be written to after the call
        read = tuple([table.data_ptr() for table in pattern.tables]) if pattern.has_function else ()
        key = "schedule", self._name, key_of_pattern.value, read, batch
        made: Schedule | None = PLACEMENTS.get(key)
        if made is not None:
            return made
        demands = self.demands(pattern, batch)
        shown = repr(pattern)
        if pattern.has_function:
            # imported with the first function
            from ..patterns.recorded import formulas

            shown = f"{shown} with {'; '.join(formulas(pattern))}"
        header: dict[str, Value] = {"pattern": Digest(_digest(map(_words_of, demands)), shown)}
        if self.schedule_of(pattern) == "ring":
            moves = [_moves(demand) for demand in demands]
            bits = ((np.packbits(kind.keys), np.packbits(kind.queries)) for branch in moves for kind in branch)
            header |= {"schedule": "ring", "moves": Digest(_digest(bits), "one plan")}
            made = ring(demands, moves, self.placement, self.rank, self.heads, header)
        else:
            header["schedule"] = "allgather"
            made = allgather(demands, self.placement, self.rank, self.heads, header, self.per_node)
        key_of_pattern.check(pattern)
        nbytes = sum([table.nbytes for table in pattern.tables])
        PLACEMENTS.put(key, made, _SCHEDULE_BYTES + nbytes, (self, *pattern._owners()))
        return made

    def demands(self, pattern: Pattern, batch: int = 1) -> list[Demand]:
        """Return, for each branch of a pattern, the key tiles that the ranks need from each other."""
        tokens = self.placement.tokens
        split = branches(pattern, tokens, tokens, heads=self.heads[0], batch=batch)
        return [Demand.of(branch, self.placement, self.heads[0] // self.heads[1]) for branch in split]

    def schedule_of(self, pattern: Pattern) -> str:
        """Return the kind of schedule for a pattern: ``"allgather"`` or ``"ring"``."""
        if self.schedule != "auto":
            return self.schedule
        demands = self.demands(pattern, pattern.extents()[0] or 1)
        if self.placement.ranks == 1 or self.per_node is not None or not demands:
            return "allgather"
        widths = Widths()
        received = Load.of(demands, widths, queries=False).received.max()
        shard = self.placement.local * self.heads[1] * demands[0].branch.batch * widths.bytes_of_key
        if received > _MOST_SHARDS * shard:
            return "ring"
        return "ring" if Load.of(demands, widths).received.max() < _WORTH_IT * received else "allgather"

    def explain(self, patterns: Iterable[Pattern], widths: Widths) -> str:
        """Describe the placement, and each pattern's exchanged bytes and modelled time, as text."""
        place, machine = self.placement, Machine()
        lines = [
            f"{place.tokens:,} tokens on {count(place.ranks, 'rank')}: {place.name} placement, "
            f"{place.local:,} tokens each"
        ]
        whole = self.heads[1] * (place.ranks - 1) * place.local * widths.bytes_of_key
        loads = []
        for pattern in patterns:
            schedule = self.schedule_of(pattern)
            load = Load.of(self.demands(pattern, pattern.extents()[0] or 1), widths, queries=schedule == "ring")
            loads.append(load)
            cost = estimate(place.name, [load], machine)
            lines += [
                f"{pattern!r}: {schedule}",
                f"  bytes      {nbytes(int(load.received.max()))} to the busiest rank, forward"
                + (f"; a full ring moves {nbytes(whole)}" if whole else ""),
                f"  balance    {cost.imbalance:.3f} (most work over mean)",
                f"  stages     {cost.stages}",
                f"  model      {percent(cost.efficiency)} of the time computing, "
                f"at {machine.flops / 1e12:.0f} TFLOP/s and {machine.bandwidth / 1e9:.0f} GB/s a rank",
            ]
        if len(loads) > 1:
            lines.append(f"together: balance {estimate(place.name, loads, machine).imbalance:.3f}")
        return "\n".join(lines)


def _moves(demand: Demand) -> tuple[Moves, ...]:
    # Default widths, not the call's, so that forward, backward and calls of any width move the same tiles.
    widths = Widths()
    return movement(demand, widths.bytes_of_key * demand.tile, widths.bytes_of_query * demand.tile)


def _words_of(demand: Demand) -> list[np.ndarray]:
    """List the arrays that define the computation of a branch: its sizes and the contents of its plan, not its name."""
    plan, view = demand.plan, demand.branch
    sizes = (view.heads, view.rate, view.q_first, view.k_first, view.nq, view.nk)
    text = f"{sizes}{(view.q_offset, view.batch, plan.q_tile, plan.kv_tile)}"
    tensors = (plan.row_ptr, plan.col, plan.mask_id, plan.mask_words, plan.row_set)
    return [np.frombuffer(text.encode(), np.uint8), *(x.contiguous().numpy() for x in tensors)]


def _digest(content: Iterable[Sequence[np.ndarray]]) -> int:
    """Return a 63-bit digest of the arrays' contents."""
    digest = hashlib.blake2b(digest_size=8)
    for array in (array for arrays in content for array in arrays):
        digest.update(array.data)
    return int.from_bytes(digest.digest(), "little") >> 1
