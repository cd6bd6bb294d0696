"""``ContextParallel``: one sequence on several ranks, planned once and used for every call."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import PatternError, ShapeError, UnsupportedError, message
from ..patterns import Pattern, check_extents
from ..plan import Branch, branches
from ..plan.cache import table_keys
from . import wire as wires
from .call import Call
from .demand import Demand
from .gather import Gather
from .cover import Moves, cover
from .ring import Ring
import numpy as np
from .operators import register, ring_attention_op
from .placement import Placement, block_for, contiguous
from .transport import Transport

_MAX_SCHEDULES = 64


class ContextParallel:
    def __init__(
        self,
        group: Any,
        pattern: Pattern | Sequence[Pattern],
        seq_len: int,
        *,
        heads: tuple[int, int],
        schedule: str = "auto",
        wire: str = "native",
        tolerance: float | None = None,
        placement: Placement | None = None,
        transport: Transport | None = None,
        per_node: int | None = None,
    ):
        self.patterns = (pattern,) if isinstance(pattern, Pattern) else tuple(pattern)
        self.seq_len, self.heads = seq_len, heads
        self.schedule = schedule
        self.queries = True
        self.transport = transport or Transport(group)
        self.call = Call(self.transport, wires.code(wire), tolerance)
        self._per_node = per_node
        tile = branches(self.patterns[0], seq_len, seq_len, heads=heads[0])[0].tile[0]
        block = block_for(seq_len, self.transport.size, tile)
        self.placement = placement or contiguous(seq_len, self.transport.size, block)
        self.positions = torch.from_numpy(self.placement.positions(self.transport.rank))
        self._schedules: OrderedDict[Hashable, tuple[Gather, tuple[Tensor, ...]]] = OrderedDict()
        self._lock = threading.RLock()
        self._number = register(self)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, backend: str
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of the shard."""
        out, lse, *_ = ring_attention_op(q, k, v, pattern.tables, pattern.spec, scale, backend, self._number)
        return out, lse

    def planned(self, pattern: Pattern, batch: int) -> Gather:
        """What this rank does for a pattern, cached by value."""
        tables = pattern.tables
        key = (pattern.spec, table_keys(tables), batch)
        found = self._schedules.get(key)
        if found is None:
            ratio = self.heads[0] // self.heads[1]
            split = branches(pattern, self.seq_len, self.seq_len, heads=self.heads[0], batch=batch)
            demands = [Demand.of(branch, self.placement, ratio) for branch in split]
            digest = _digest(demands, self.placement)
            if self.schedule == "ring":
                moves = [cover(d, 128 * 128 * 4, 128 * 196 * 4) if self.queries else tuple(Moves(n, np.zeros_like(n)) for n in d.needs) for d in demands]
                for i, m in enumerate(moves):
                    if len(m) > 1: moves[i] = tuple(Moves(n, np.zeros_like(n)) for n in demands[i].needs)
                found = Ring.of(demands, moves, self.transport.rank, ratio, digest), tables
            else:
                found = Gather.of(demands, self.transport.rank, ratio, digest, self._per_node), tables
            self._schedules[key] = found
            if len(self._schedules) > _MAX_SCHEDULES:
                self._schedules.popitem(last=False)
        return found[0]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, backend: str
    ) -> tuple[Tensor, ...]:
        with self._lock:
            out, lse, received, forms = self.planned(pattern, q.shape[0]).forward(self.call, q, k, v, scale, backend)
        none = torch.empty(0, dtype=torch.uint8, device=q.device)
        return out, lse, received[0] if received else none.clone(), received[1] if len(received) > 1 else none, forms

    def backward(self, dout, dlse, q, k, v, out, lse, kept, pattern, scale, backend):
        with self._lock:
            return self.planned(pattern, q.shape[0]).backward(
                self.call, dout, dlse, q, k, v, out, lse, kept[:2], kept[2], scale, backend
            )

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        real = self.positions[self.positions < self.seq_len].to(x.device)
        local = x.index_select(dim, real)
        shape = list(local.shape)
        shape[dim] = len(self.positions)
        if shape[dim] == local.shape[dim]:
            return local
        out = x.new_zeros(shape)
        out.narrow(dim, 0, len(real)).copy_(local)
        return out


def _digest(demands: Sequence[Demand], placement: Placement) -> int:
    found = hashlib.blake2b(placement.digest_text().encode(), digest_size=8)
    for demand in demands:
        plan = demand.plan
        for tensor in (plan.row_ptr, plan.col, plan.bits, plan.masks, plan.group):
            found.update(tensor.contiguous().numpy().data)
    return int.from_bytes(found.digest(), "little") >> 1
