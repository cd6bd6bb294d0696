"""``ContextParallel``: one sequence on several ranks, planned once and used for every call."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..errors import PatternError, RingError, ShapeError, UnsupportedError, message
from ..ops.dispatch import BACKENDS, names, run_forward
from ..patterns import Pattern, check_extents
from ..plan import branches
from ..plan.cache import table_keys
from . import report, wire
from .call import Call
from .choice import Choice, choose
from .demand import Demand
from .gather import Gather
from .operators import register, ring_attention_op
from .placement import Placement
from .ring import Ring
from .tables import PendingTable, share
from .trace import Trace
from .transport import Transport, group_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_MAX_SCHEDULES = 64
SCHEDULES = ("auto", "gather", "ring")


class ContextParallel:
    """One sequence around a group of ranks: who holds which tokens, and what they give each other for a pattern.

    Every rank makes it with the same arguments, shards its inputs, and passes it as ``context=``. Results are exact, and
    differentiable. A rank receives just the key tiles that its queries attend and it does not hold; gradients go the
    same way back.

    Args:
        mesh: A device mesh of one dimension, or of two (nodes, ranks of a node): then a tile crosses to a node once and is
            relayed inside. Or a process group. None: this process alone.
        pattern: The pattern of all calls, or several (interleaved layers) that share a placement balanced for their sum.
            Others may be used too; the placement is not chosen for them.
        seq_len: Tokens of the whole sequence.
        heads: Query heads and key heads, (Hq, Hkv).
        schedule: ``"gather"``: receive all, compute once; the forward bits are those of one device. ``"ring"``: stage by
            stage, computing while the next stage's keys arrive; least memory, and queries travel where that is cheaper.
            ``"auto"``: gather, unless a rank would hold more than three shards, or ring moves less than half.
        placement: ``"auto"`` (by modelled time of bytes and work), a name, or a Placement.
        wire: What keys and values travel as: ``"native"``, ``"bf16"`` or ``"int8"`` (a scale per token).
        tolerance: Largest relative error of an encoded message, measured on a sample before sending; above it the
            message goes as it is. None: no limit.
        deadline: Seconds that a wait may last.
        retries: How often a timed-out exchange is repeated on fresh connections.
    Raises:
        ShapeError: No tokens, or heads that do not divide.
        PatternError: A pattern that is made for another length or other heads.
        UnsupportedError: An unknown schedule, placement or wire; a ring on a mesh of two dimensions.
        RingError: In calls: a rank is lost or silent, or ranks call with different patterns, shapes or types.
    Example:
        >>> ctx = rw.ContextParallel(None, rw.SlidingWindow(64), seq_len=256, heads=(4, 4))
        >>> local = [ctx.shard(x, dim=2) for x in (q, k, v)]
        >>> out = rw.attention(*local, rw.SlidingWindow(64), context=ctx)
        >>> ctx.unshard(out, dim=2).shape
        torch.Size([1, 4, 256, 32])

    References:
        Liu, Zaharia, Abbeel (2023), Ring attention with blockwise transformers, section 3; here only what the pattern
        needs is moved, and straight from its owner.
    """

    def __init__(
        self,
        mesh: DeviceMesh | ProcessGroup | None,
        pattern: Pattern | Sequence[Pattern],
        seq_len: int,
        *,
        heads: tuple[int, int],
        schedule: str = "auto",
        placement: str | Placement = "auto",
        wire: str = "native",
        tolerance: float | None = None,
        deadline: float = 30.0,
        retries: int = 0,
    ):
        self.patterns = (pattern,) if isinstance(pattern, Pattern) else tuple(pattern)
        self.seq_len, self.heads = seq_len, (heads[0], heads[1])
        self._options = {
            "schedule": schedule, "placement": placement, "wire": wire, "tolerance": tolerance,
            "deadline": deadline, "retries": retries,
        }  # fmt: skip
        self._check_made()
        group, self._per_node = group_of(mesh)
        if self._per_node is not None and schedule == "ring":
            got = "'ring' on a mesh of two dimensions"
            raise UnsupportedError(message("schedule", got, "'gather' or 'auto' there", "Flatten the mesh for a ring."))
        self._open(Transport(group, deadline=deadline, retries=retries))

    def _open(self, transport: Transport) -> None:
        self.transport = transport
        self.call = Call(transport, wire.code(str(self._options["wire"])), self._options["tolerance"])  # type: ignore[arg-type]
        for pattern in self.patterns:
            self._check_pattern(pattern)
        split = [branches(p, self.seq_len, self.seq_len, heads=self.heads[0]) for p in self.patterns]
        self.choice: Choice = choose(
            split, self.seq_len, transport.size, self.heads, self._options["placement"]  # type: ignore[arg-type]
        )
        self.placement = self.choice.placement
        positions = self.placement.positions(transport.rank)
        #: (local,) int64, the global positions of this rank's tokens; padding is at and after ``seq_len``
        self.positions = torch.from_numpy(positions)
        self._held = self.placement.held(transport.rank)
        self._schedules: OrderedDict[Hashable, tuple[Gather | Ring, tuple[Tensor, ...]]] = OrderedDict()
        self._lock = threading.RLock()
        self._number = register(self)

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.transport.size

    @property
    def local(self) -> int:
        """Tokens of every rank's shard, padding included."""
        return self.placement.local

    # ---- shards ------------------------------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole tensor, differentiable; padding is zero.

        Args:
            x: (..., seq_len, ...), the same on all ranks.
            dim: Its dimension of tokens.
        Returns:
            (..., local, ...), in the order of ``positions``.
        Raises:
            ShapeError: Another length.
        """
        if x.shape[dim] != self.seq_len:
            raise ShapeError(
                message(f"x.shape[{dim}]", x.shape[dim], f"{self.seq_len} tokens", "Pass the whole tensor, and its dim.")
            )
        mine = x.index_select(dim, self.positions[: self._held].to(x.device))
        if self._held == self.local:
            return mine
        shape = list(mine.shape)
        shape[dim] = self.local - self._held
        return torch.cat([mine, mine.new_zeros(shape)], dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor of all ranks' shards, on every rank; without gradients, so for looking at and saving.

        Args:
            x: (..., local, ...), each rank's own.
            dim: Its dimension of tokens.
        Returns:
            (..., seq_len, ...), detached.
        Raises:
            ShapeError: Another length.
        """
        self._check_local("x", x, dim)
        mine = x.detach().movedim(dim, 0).contiguous()
        every = self.call.all_gather(mine)
        whole = mine.new_empty(self.seq_len, *mine.shape[1:])
        for rank, part in enumerate(every):
            held = self.placement.held(rank)
            whole[torch.from_numpy(self.placement.positions(rank)[:held]).to(x.device)] = part[:held]
        return whole.movedim(0, dim)

    # ---- attention ---------------------------------------------------------------------------------------------------

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, backend: str
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of the shard: what ``rw.attention(..., context=)`` calls once it has checked its arguments."""
        out, lse, *_ = ring_attention_op(q, k, v, pattern.tables, pattern.spec, scale, backend, self._number)
        return out, lse

    def check(self, q: Tensor, k: Tensor, pattern: Pattern, q_offset: int, backend: str) -> None:
        """Raise a typed error unless a call fits this context."""
        if q_offset != 0:
            raise UnsupportedError(message("q_offset", q_offset, "0 with a context", "Decode on one device."))
        for name, x, heads in (("q", q, self.heads[0]), ("k", k, self.heads[1])):
            self._check_local(name, x, 2)
            if x.shape[1] != heads:
                raise ShapeError(
                    message(f"{name} heads", x.shape[1], f"{heads}, as the context's", "Make a context for them.")
                )
        if backend != "auto":
            known = BACKENDS.get(backend)
            if known is None or not (known.planned and known.branched):
                able = [name for name in names()[1:] if BACKENDS[name].planned and BACKENDS[name].branched]
                wanted = f"'auto' or one that computes a plan: {', '.join(able)}"
                raise UnsupportedError(message("backend", repr(backend), wanted, "Use 'auto'."))
        self._check_pattern(pattern, q.shape[0])

    def replicated(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, fallback: str = "raise", backend: str = "auto"
    ) -> Tensor:
        """Attention of whole tensors that every rank holds: sharded, computed together, put together again.

        Args:
            q: (B, Hq, seq_len, D), the same on all ranks; without gradients.
            k: (B, Hkv, seq_len, D).
            v: (B, Hkv, seq_len, Dv).
            pattern: Which triples may attend.
            fallback: ``"raise"``, or ``"single"``: where a rank is lost, this one computes everything alone, exactly.
                No other call can: a lost rank's shard is gone.
            backend: As of :func:`ringweave.attention`.
        Returns:
            (B, Hq, seq_len, Dv), on every rank.
        Raises:
            UnsupportedError: An input that requires gradients, or an unknown fallback.
            RingError: A rank is lost, and there is no fallback.
        """
        if fallback not in ("raise", "single"):
            raise UnsupportedError(message("fallback", repr(fallback), "'raise' or 'single'", "Name one of them."))
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise UnsupportedError(
                message("q, k, v", "inputs that require gradients", "none", "Use shards, or torch.no_grad().")
            )
        local = [self.shard(x, 2) for x in (q, k, v)]
        self.check(local[0], local[1], pattern, 0, backend)
        scale = q.shape[3] ** -0.5
        try:
            out, _ = self.attend(local[0], local[1], local[2], pattern, scale, backend)
            return self.unshard(out, 2)
        except RingError:
            if fallback == "raise":
                raise
            return run_forward(q, k, v, pattern, scale, 0, backend)[0]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, backend: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the operator runs: (out, lse, received, relayed, formats)."""
        with self._lock:
            planned = self.planned(pattern, q.shape[0])
            out, lse, received, forms = planned.forward(self.call, q, k, v, scale, backend)
        kept = [*received, *(torch.empty(0, dtype=torch.uint8, device=q.device) for _ in range(2 - len(received)))]
        return out, lse, kept[0], kept[1], forms

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: tuple[Tensor, Tensor, Tensor],
        pattern: Pattern,
        scale: float,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the operator's gradient runs: (dq, dk, dv)."""
        with self._lock:
            planned = self.planned(pattern, q.shape[0])
            return planned.backward(self.call, dout, dlse, q, k, v, out, lse, kept[:2], kept[2], scale, backend)

    def planned(self, pattern: Pattern, batch: int = 1) -> Gather | Ring:
        """What this rank does for a pattern, cached by the pattern's value."""
        tables = pattern.tables
        key = (pattern.spec, table_keys(tables), batch)
        found = self._schedules.get(key)
        if found is None:
            demands = self._demands(pattern, batch)
            name = self.schedule_of(pattern)
            digest = _digest(demands, self.placement, name)
            ratio = self.heads[0] // self.heads[1]
            made: Gather | Ring
            if name == "ring":
                made = Ring.of(demands, self.choice.moves(demands), self.rank, ratio, digest)
            else:
                made = Gather.of(demands, self.rank, ratio, digest, self._per_node)
            found = made, tables
            self._schedules[key] = found
            if len(self._schedules) > _MAX_SCHEDULES:
                self._schedules.popitem(last=False)
        return found[0]

    def schedule_of(self, pattern: Pattern) -> str:
        """``"gather"`` or ``"ring"``: how a pattern is computed."""
        asked = str(self._options["schedule"])
        if asked != "auto" or self._per_node is not None:
            return "gather" if self._per_node is not None else asked
        return self.choice.schedule(self._demands(pattern, 1))
