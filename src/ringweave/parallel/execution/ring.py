"""The ring schedule: stage s computes with what rank - s holds, while the message of stage s + 1 is under way.

Memory: the shard, and the messages of two stages. Empty messages are left out on both sides. Where moving a query and
its result is cheaper than moving keys and values (see cover.py), the holder of the keys computes for the query's rank,
as its host, and returns (out, lse), or dq. Partial results are merged in the order of stages, in float32; backward
receives keys and values anew, and returns their gradients stage by stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ops.backend import Inputs, Upstream
from ...ops.head_views import Heads
from ...types import acc_dtype
from ..planning.demand import Demand
from ..planning.exchange import Message, Section, direct_hop, guest_sections
from ..planning.movement import Moves
from ..planning.placement import Placement
from .agreement import Value
from .call import Call, Source, upstream_of
from .local_attention import Part, merge_at
from .messages import Channels
from .passage import Passage, Returned


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of one rank.

    Attributes:
        number: Which; 0 is the rank's own keys.
        source: The rank whose keys are computed with, and whose queries are guests here.
        target: The rank that does so with this one's.
        parts: Per branch this rank's queries against the source's keys.
        guests: Per branch the source's queries against this rank's keys.
        sends: Keys and values for the target.
        receives: Those of the source.
        queries_out: Queries for the target, whose results come back.
        queries_in: Those of the source.
    """

    number: int
    source: int
    target: int
    parts: tuple[Part | None, ...]
    guests: tuple[Part | None, ...]
    sends: Message = ()
    receives: Message = ()
    queries_out: Message = ()
    queries_in: Message = ()


@dataclass(frozen=True, eq=False)
class Ring:
    """What one rank does in the ring schedule."""

    stages: tuple[Stage, ...]
    heads: tuple[Heads, ...]
    said: Mapping[str, Value]

    @staticmethod
    def of(
        demands: list[Demand],
        moves: list[tuple[Moves, ...]],
        placement: Placement,
        rank: int,
        ratio: int,
        said: Mapping[str, Value],
    ) -> Ring:
        """For a rank, with what moves per branch and kind of key heads."""
        needs = [tuple(move.keys for move in branch) for branch in moves]
        own = [_own_edges(demand, branch) for demand, branch in zip(demands, moves, strict=True)]
        stages = []
        for number in range(placement.ranks):
            source, target = (rank - number) % placement.ranks, (rank + number) % placement.ranks
            parts = [
                Part.of(
                    demand, rank, ratio,
                    needs=need, available=demand.owner == source, own_keys=number == 0, wanted=edges,
                )
                for demand, need, edges in zip(demands, needs, own, strict=True)
            ]  # fmt: skip
            if number == 0:
                stages.append(Stage(0, rank, rank, tuple(parts), (None,) * len(demands)))
                continue
            hop = direct_hop(demands, parts, rank, placement.ranks, needs)
            guests = tuple(
                Part.guest(demand, rank, ratio, _guest_edges(demand, branch, source, rank))
                for demand, branch in zip(demands, moves, strict=True)
            )
            stages.append(
                Stage(
                    number,
                    source,
                    target,
                    tuple(parts),
                    guests,
                    hop.sends[target],
                    hop.receives[source],
                    guest_sections(demands, moves, rank, target),
                    guest_sections(demands, moves, source, rank),
                )
            )
        return Ring(tuple(stages), tuple(Heads(demand.branch, ratio) for demand in demands), said)

    def forward(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float, backend: str
    ) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        """(out, lse) of the shard; nothing is kept for backward but what it is given."""
        wide = acc_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        results = Channels(q.shape[0], (v.shape[3], 1), wide)
        passage = Passage(self, call, "forward", k, v, [(Channels(q.shape[0], (q.shape[3],), q.dtype), (q,))])

        def merge(section: Section, tensors: Sequence[Tensor]) -> None:
            heads = self.heads[section.branch].queries
            assert section.tokens is not None
            merge_at(section.tokens, out[:, heads], lse[:, heads], tensors[0], tensors[1][..., 0])

        for stage, keys_of, visitors in passage.stages():
            for number, part in enumerate(stage.parts):
                if part is not None:
                    with call.computing(f"branch {number}", stage.number):
                        part.merge(out, lse, *part.forward(Inputs(q, *keys_of(number), scale), wide, backend))
            found: dict[int, list[Tensor]] = {}
            for number, guest in enumerate(stage.guests):
                if guest is not None:
                    keys, values = (guest.buffer(x, call.space, name) for x, name in ((k, "keys"), (v, "values")))
                    with call.computing(f"branch {number}, guests", stage.number):
                        inputs = Inputs(visitors[0][number][0], keys, values, scale)
                        guest_out, guest_lse = guest.forward(inputs, wide, backend)
                    found[number] = [guest_out, guest_lse[..., None]]
            passage.give_back(stage, [Returned(results, stage.queries_in, _from(found), stage.queries_out, merge)])
        return out.to(q.dtype), lse, [], torch.empty(0, dtype=torch.int64, device="cpu")

    def backward(
        self,
        call: Call,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        received: Sequence[Tensor],
        forms: Tensor,
        scale: float,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of the shard, in the inputs' dtype."""
        batch, dims, wide = q.shape[0], (k.shape[3], v.shape[3]), lse.dtype
        dout = dout.to(q.dtype)
        upstream = upstream_of(dout, out, dlse, lse, self.stages[0].parts, backend, Inputs(q, k, v, scale))
        dq, dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
        slopes, rows = Channels(batch, dims, wide), Channels(batch, dims[:1], wide)
        travels = [
            (Channels(batch, dims, q.dtype), (q, dout)),
            (Channels(batch, (1, 1), wide), (lse[..., None], upstream.delta[..., None])),
        ]
        passage = Passage(self, call, "backward", k, v, travels)

        def add_keys(section: Section, tensors: Sequence[Tensor]) -> None:
            for total, gradient in zip((dk, dv), tensors, strict=True):
                self.heads[section.branch].update(total, section.add, gradient)

        def add_queries(section: Section, tensors: Sequence[Tensor]) -> None:
            section.add(dq[:, self.heads[section.branch].queries], tensors[0])

        for stage, keys_of, visitors in passage.stages():
            slopes_of: dict[int, list[Tensor]] = {}
            for number, part in enumerate(stage.parts):
                if part is None:
                    continue
                with call.computing(f"branch {number}", stage.number):
                    dq_part, *slopes_of[number] = part.backward(upstream, Inputs(q, *keys_of(number), scale), backend)
                part.queries.add(dq[:, part.heads.queries], dq_part)
                if stage.number == 0:
                    for total, gradient in zip((dk, dv), slopes_of[number], strict=True):
                        part.add_own(total, gradient)
            dq_of: dict[int, list[Tensor]] = {}
            for number, guest in enumerate(stage.guests):
                if guest is None:
                    continue
                keys, values = (guest.buffer(x, call.space, name) for x, name in ((k, "keys"), (v, "values")))
                guest_q, guest_dout = visitors[0][number]
                guest_lse, guest_delta = (x[..., 0] for x in visitors[1][number])
                with call.computing(f"branch {number}, guests", stage.number):
                    arrived = Upstream(guest_dout, guest_lse, guest_delta)
                    dq_part, *found = guest.backward(arrived, Inputs(guest_q, keys, values, scale), backend)
                dq_of[number] = [dq_part]
                for total, gradient in zip((dk, dv), found, strict=True):
                    guest.add_own(total, gradient)

            def gradients(section: Section, found: dict[int, list[Tensor]] = slopes_of) -> list[Tensor]:
                both = found.get(section.branch) or (None, None)
                return [section.gradients(x, lse, batch, dim) for x, dim in zip(both, dims, strict=True)]

            passage.give_back(
                stage,
                [
                    Returned(slopes, stage.receives, gradients, stage.sends, add_keys),
                    Returned(rows, stage.queries_in, _from(dq_of), stage.queries_out, add_queries),
                ],
            )
        dq, dk, dv = (x.to(q.dtype) for x in (dq, dk, dv))
        return dq, dk, dv


def _from(found: dict[int, list[Tensor]]) -> Source:
    return lambda section: found[section.branch]


def _own_edges(demand: Demand, moves: tuple[Moves, ...]) -> list[NDArray[np.bool_]] | None:
    """Per row set which entries are computed where their query is; None: all."""
    if len(moves) != 1 or not moves[0].queries.any():
        return None
    owner = demand.owner
    return [(owner[row] == owner[col]) | ~moves[0].queries[owner[col], row] for row, col in demand.entries]


def _guest_edges(demand: Demand, moves: tuple[Moves, ...], guest: int, host: int) -> list[NDArray[np.bool_]] | None:
    """Per row set which entries the host computes for the guest; None: none."""
    if len(moves) != 1 or not moves[0].queries[host].any():
        return None
    owner = demand.owner
    taken = moves[0].queries[host]
    return [(owner[row] == guest) & (owner[col] == host) & taken[row] for row, col in demand.entries]
