"""``ContextParallel``: one sequence on several ranks, planned once and used for every call."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PatternError, RingError, ShapeError, UnsupportedError, message
from ..ops.dispatch import BACKENDS, names, run_forward
from ..patterns import Pattern, check_extents
from ..plan import branches
from ..plan.cache import table_keys
from . import wire as wires
from .call import Call
from .choice import choose
from .cost import Load, Widths
from .cover import Moves, cover
from .demand import Demand
from .gather import Gather
from .mesh import group_of
from .operators import register, ring_attention_op
from .placement import NAMED, Placement, block_for
from .report import explanation
from .ring import Ring
from .tables import PendingTable, share
from .trace import Trace
from .transport import Transport
from .wire import WireStatistics

if TYPE_CHECKING:
    from .mesh import DeviceMesh, ProcessGroup

_MAX_SCHEDULES = 64
SCHEDULES = ("auto", "gather", "ring")
# auto goes around the ring where a rank would receive more than this many shards of keys ...
_MOST_SHARDS = 2
# ... or where the ring, in which queries may move instead, receives less than this part
_WORTH_IT = 0.5


class ContextParallel:
    """One sequence around a group of ranks: who holds which tokens, and what they give each other for a pattern.

    Every rank makes it with the same arguments, shards its inputs, and passes it as ``context=``. Results are exact,
    and differentiable. A rank receives just the key tiles that its queries attend and it does not hold; gradients go
    the same way back.

    Args:
        mesh: A device mesh of one dimension, or of two (nodes, ranks of a node): then a tile crosses to a node once and
            is relayed inside. Or a process group, or a Transport. None: this process alone.
        pattern: The pattern of all calls, or several (interleaved layers) that share a placement balanced for their
            sum. Others may be used too; the placement is not chosen for them.
        seq_len: Tokens of the whole sequence.
        heads: Query heads and key heads, (Hq, Hkv).
        schedule: ``"gather"``: receive all, compute once; the forward bits are those of one device. ``"ring"``: stage
            by stage, computing while the next stage's keys arrive; least memory, and queries travel where that is
            cheaper. ``"auto"``: gather, unless a rank would hold more than three shards, or ring moves less than half.
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
        mesh: DeviceMesh | ProcessGroup | Transport | None,
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
        self._options: dict[str, Any] = {
            "schedule": schedule, "placement": placement, "wire": wire, "tolerance": tolerance,
            "deadline": deadline, "retries": retries,
        }  # fmt: skip
        self._check_made()
        self._per_node: int | None = None
        if isinstance(mesh, Transport):
            self._open(mesh)
            return
        group, self._per_node = group_of(mesh)
        if self._per_node is not None and schedule == "ring":
            got = "'ring' on a mesh of two dimensions"
            raise UnsupportedError(message("schedule", got, "'gather' or 'auto' there", "Flatten the mesh for a ring."))
        self._open(Transport(group, deadline=deadline, retries=retries))

    def _check_made(self) -> None:
        schedule, place = self._options["schedule"], self._options["placement"]
        if schedule not in SCHEDULES:
            wanted = f"one of {', '.join(SCHEDULES)}"
            raise UnsupportedError(message("schedule", repr(schedule), wanted, "Use 'auto'."))
        if not isinstance(place, Placement) and place != "auto" and place not in NAMED:
            wanted = f"'auto', a Placement or one of {', '.join(NAMED)}"
            raise UnsupportedError(message("placement", repr(place), wanted, "Use 'auto'."))
        wires.code(str(self._options["wire"]))
        if self.seq_len < 1:
            raise ShapeError(message("seq_len", self.seq_len, "at least 1", "Pass the whole sequence's length."))
        if min(self.heads) < 1 or self.heads[0] % self.heads[1]:
            wanted = "(query heads, key heads), the second dividing the first"
            raise ShapeError(message("heads", self.heads, wanted, "Pass (Hq, Hkv)."))
        if not self.patterns or not all(isinstance(pattern, Pattern) for pattern in self.patterns):
            got = [type(pattern).__name__ for pattern in self.patterns]
            raise PatternError(message("pattern", got, "a pattern or several", "Pass ringweave patterns."))
        for pattern in self.patterns:
            self._check_pattern(pattern)

    def _open(self, transport: Transport) -> None:
        self.transport = transport
        form = wires.code(str(self._options["wire"]))
        self.call = Call(transport, form, self._options["tolerance"])
        self.placement = self._place()
        #: (local,) int64, the global positions of this rank's tokens; padding is at and after ``seq_len``
        self.positions = torch.from_numpy(self.placement.positions(transport.rank))
        self._held = self.placement.held(transport.rank)
        self._schedules: OrderedDict[Hashable, tuple[Gather | Ring, tuple[Tensor, ...]]] = OrderedDict()
        self._lock = threading.RLock()
        self._number = register(self)

    def _place(self) -> Placement:
        asked, ranks = self._options["placement"], self.transport.size
        if isinstance(asked, Placement):
            if (asked.tokens, asked.ranks) != (self.seq_len, ranks):
                got, wanted = f"{asked.tokens} tokens on {asked.ranks} ranks", f"{self.seq_len} on {ranks}"
                raise ShapeError(message("placement", got, wanted, "Make it for this context."))
            return asked
        calls = [branches(p, self.seq_len, self.seq_len, heads=self.heads[0]) for p in self.patterns]
        sides = [branch.tile[0] for call in calls for branch in call if branch.rate == 1]
        block = block_for(self.seq_len, ranks, min(sides, default=128))
        calls = [call for call in calls if call]
        if asked == "auto" and calls:
            return choose(calls, self.seq_len, ranks, block, self.heads[0] // self.heads[1]).placement
        return NAMED["contiguous" if asked == "auto" else str(asked)](self.seq_len, ranks, block)

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
                message(
                    f"x.shape[{dim}]", x.shape[dim], f"{self.seq_len} tokens", "Pass the whole tensor, and its dim."
                )
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
        """What the operator runs: (out, lse, received, relayed, formats by hop and rank, flat)."""
        with self._lock:
            planned = self.planned(pattern, q.shape[0])
            out, lse, received, forms = planned.forward(self.call, q, k, v, scale, backend)
        kept = [*received, *(torch.empty(0, dtype=torch.uint8, device=q.device) for _ in range(2 - len(received)))]
        # a compiled graph relies on the shapes and strides that the fake operator tells
        return out.contiguous(), lse.contiguous(), kept[0], kept[1], forms.flatten()

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
            forms = kept[2].view(-1, self.size)
            return planned.backward(self.call, dout, dlse, q, k, v, out, lse, kept[:2], forms, scale, backend)

    # ---- plans -------------------------------------------------------------------------------------------------------

    def planned(self, pattern: Pattern, batch: int = 1) -> Gather | Ring:
        """What this rank does for a pattern, cached by the pattern's value."""
        tables = pattern.tables
        key = (pattern.spec, table_keys(tables), batch)
        found = self._schedules.get(key)
        if found is None:
            demands = self.demands(pattern, batch)
            ratio = self.heads[0] // self.heads[1]
            made: Gather | Ring
            if self.schedule_of(pattern) == "ring":
                moves = [_moves(demand) for demand in demands]
                digest = _digest(self.placement, demands, [x for move in moves for x in move])
                made = Ring.of(demands, moves, self.placement, self.rank, ratio, digest)
            else:
                made = Gather.of(
                    demands, self.placement, self.rank, ratio, _digest(self.placement, demands, []), self._per_node
                )
            # with the tables, so that an address in the key cannot be given to another
            found = made, tables
            self._schedules[key] = found
            if len(self._schedules) > _MAX_SCHEDULES:
                self._schedules.popitem(last=False)
        return found[0]

    def demands(self, pattern: Pattern, batch: int = 1) -> list[Demand]:
        """What the ranks need of each other for a pattern, per branch."""
        split = branches(pattern, self.seq_len, self.seq_len, heads=self.heads[0], batch=batch)
        return [Demand.of(branch, self.placement, self.heads[0] // self.heads[1]) for branch in split]

    def schedule_of(self, pattern: Pattern) -> str:
        """``"gather"`` or ``"ring"``: how a pattern is computed."""
        asked = str(self._options["schedule"])
        if asked != "auto":
            return asked
        demands = self.demands(pattern, pattern.extents()[0] or 1)
        if self.size == 1 or self._per_node is not None or not demands:
            return "gather"
        # keys that are received, per key head and batch element
        received = sum(demand.tokens_moved().sum(1) for demand in demands)
        shard = self.local * self.heads[1] * demands[0].branch.batch
        if received.max() > _MOST_SHARDS * shard:
            return "ring"
        widths = Widths()
        around = Load.of(demands, widths).received.max()
        return "ring" if around < _WORTH_IT * received.max() * widths.bytes_of_key else "gather"

    def rebuild(self, mesh: DeviceMesh | ProcessGroup | None) -> ContextParallel:
        """The same context on other ranks, such as the survivors of a failure; the caller shards its inputs again.

        Args:
            mesh: As of the constructor.
        Returns:
            A new context; this one is closed.
        """
        self.close()
        options = dict(self._options)
        if isinstance(options["placement"], Placement):
            options["placement"] = "auto"
        return ContextParallel(mesh, self.patterns, self.seq_len, heads=self.heads, **options)

    def share_table(self, rows: Tensor, block_size: int, version: int) -> PendingTable:
        """Begin to put a block table together of the rows that each rank has found for its own tokens.

        It travels while the present step is computed. All ranks call it alike, with one version; a rank that is at
        another version is told, and nothing is computed with half of a table.

        Args:
            rows: Bool (local blocks, key blocks), (Hq, ., .) or (B, Hq, ., .): this rank's rows, in the order of its
                shard; rows of padding are ignored.
            block_size: Tokens in a block's side; divides the placement's block.
            version: Of the table; a number that grows with each.
        Returns:
            A :class:`PendingTable`, whose ``result()`` is the whole table.
        Raises:
            ShapeError: Rows of another shape, or blocks that the placement cuts.
            RingError: Ranks share different versions or shapes.
        """
        with self._lock:
            return share(self.call, self.placement, rows, block_size, version)

    # ---- looking at it -----------------------------------------------------------------------------------------------

    def explain(self, *, head_dim: int = 128, itemsize: int = 2) -> str:
        """Where tokens lie, what moves and what it costs by the model, as text.

        Args:
            head_dim: Channels of q, k and v.
            itemsize: Bytes of an element.
        Example:
            >>> print(rw.ContextParallel(None, rw.Causal(), 4096, heads=(8, 8)).explain().splitlines()[0])
            4,096 tokens on 1 rank: contiguous placement, 4,096 tokens each
        """
        return explanation(self, Widths(head_dim, head_dim, itemsize))

    @property
    def statistics(self) -> WireStatistics:
        """What encoding on the wire did."""
        return self.call.statistics

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record when this rank computes, sends and receives; the yielded :class:`Trace` can be plotted."""
        found = Trace(self.rank)
        self.transport.trace = found.events
        try:
            yield found
        finally:
            self.transport.trace = None

    def close(self) -> None:
        """Close the connections. A closed context computes nothing more."""
        self.transport.close()
        self.call.space.clear()

    def __repr__(self) -> str:
        patterns = ", ".join(map(repr, self.patterns))
        where = f"rank {self.rank} of {self.size}, {self.placement.name}"
        return f"ContextParallel({patterns}, {self.seq_len} tokens, {where})"

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _check_pattern(self, pattern: Pattern, batch: int | None = None) -> None:
        made = pattern.extents()[0]
        check_extents(pattern, (made or 1) if batch is None else batch, self.heads[0])
        pattern.check(self.seq_len, self.seq_len, 0)

    def _check_local(self, name: str, x: Tensor, dim: int) -> None:
        if x.shape[dim] != self.local:
            wanted = f"{self.local}, this rank's share of {self.seq_len}"
            raise ShapeError(message(f"{name}.shape[{dim}]", x.shape[dim], wanted, "Take it with ctx.shard(x, dim)."))


def _moves(demand: Demand) -> tuple[Moves, ...]:
    widths = Widths()
    return cover(demand, widths.bytes_of_key * demand.tile, widths.bytes_of_query * demand.tile)


def _digest(placement: Placement, demands: Sequence[Demand], moves: Sequence[Moves]) -> int:
    found = hashlib.blake2b(placement.digest_text().encode(), digest_size=8)
    for demand in demands:
        plan = demand.plan
        found.update(repr((demand.branch.heads, demand.branch.rate, demand.branch.k_first)).encode())
        for tensor in (plan.row_ptr, plan.col, plan.bits, plan.masks, plan.group):
            found.update(tensor.contiguous().numpy().data)
    for move in moves:
        found.update(np.packbits(move.keys).data)
        found.update(np.packbits(move.queries).data)
    return int.from_bytes(found.digest(), "little") >> 1
