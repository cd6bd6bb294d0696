"""``ContextParallel``: one sequence on several ranks, planned once and used for every call."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from ..backends import BACKENDS
from ..call import Arguments, Call, Operands
from ..errors import RingError, ShapeError, UnsupportedError, message
from ..patterns import Pattern, check_extents
from ..patterns.parse import of_call
from ..patterns.validate import one_of, refuse, whole
from ..precision import Precision, as_precision
from ..program import Program, names
from ..torch_compat import transforming
from ..torch_ops import refuse_forward_mode
from ..validate import check_tensors
from .execution import wire as wires
from .execution.agreement import TAG_WORDS, Agreement, Opaque, Progress, Value, text_words
from .execution.pending_table import PendingTable, rows_of
from .execution.wire import WireStatistics
from .operators import asked_for, register, ring_attention_op, written_argument
from .options import ContextOptions
from .planning.choice import place
from .planning.placement import Placement
from .planning.workload import Widths, pair_of_heads, patterns_of
from .schedules import Schedules
from .trace import Trace
from .transport.mesh import group_of
from .transport.protocol import Communicator
from .transport.transport import Transport

if TYPE_CHECKING:
    from .transport.mesh import DeviceMesh, ProcessGroup


class ContextParallel:
    """One sequence around a group of ranks: who holds which tokens, and what they give each other for a pattern.

    Every rank makes it with the same arguments, shards its inputs, and passes it as ``context=``. Results are exact,
    and differentiable. A rank receives just the key tiles that its queries attend and it does not hold; gradients go
    the same way back.

    Args:
        mesh: A device mesh of one dimension, or of two (nodes, ranks of a node): then a tile crosses to a node once and
            is relayed inside. Or a process group, or a Transport. Or a context of another length, which then shares
            its connections with this one: the ranks may make such contexts in any order. None: this process alone.
        pattern: The pattern of all calls, or several (interleaved layers) that share a placement balanced for their
            sum. Others may be used too; the placement is not chosen for them.
        seq_len: Tokens of the whole sequence.
        heads: Query heads and key heads, (Hq, Hkv).
        schedule: ``"allgather"``: receive all, compute once; the forward bits are those of one device. ``"ring"``:
            stage by stage, computing while the next stage's keys arrive; least memory, and queries travel where that
            is cheaper. ``"auto"``: allgather, unless a rank would hold more than three shards, or ring moves less
            than half.
        placement: ``"auto"`` (by modelled time of bytes and work), a name, or a Placement.
        wire: What keys and values travel as: ``"native"``, ``"bf16"`` or ``"int8"`` (a scale per token); None: as
            ``precision`` says.
        tolerance: Largest relative error of an encoded message, measured on a sample before sending; above it the
            message goes as it is. None: no limit.
        deadline: Seconds that a wait may last.
        retries: How often a timed-out exchange is repeated on fresh connections.
        precision: A policy, of which the wire is taken; calls are given the rest.
    Raises:
        ShapeError: No tokens, heads that do not divide, or a number that is none or out of bounds.
        PatternError: A pattern that is made for another length or other heads.
        UnsupportedError: An unknown schedule, placement or wire; a ring on a mesh of two dimensions; a group that is
            destroyed, or that this process is no member of.
        RingError: In calls: a rank is lost or silent, ranks call differently or in another order, as far as that can
            be seen (:meth:`tagged` lets more be seen), or two threads call at once.
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
        mesh: DeviceMesh | ProcessGroup | Communicator | ContextParallel | None,
        pattern: Pattern | Sequence[Pattern],
        seq_len: int,
        *,
        heads: tuple[int, int],
        schedule: str = "auto",
        placement: str | Placement = "auto",
        wire: str | None = None,
        tolerance: float | None = None,
        deadline: float = 30.0,
        retries: int = 0,
        precision: Precision | None = None,
    ):
        self.seq_len, self.heads = whole("seq_len", seq_len, 1, error=ShapeError), pair_of_heads(heads)
        self.patterns = tuple(each.bound(*self.heads) for each in patterns_of(pattern))
        wire = as_precision(precision).wire if wire is None else wire
        self.options = options = ContextOptions(schedule, placement, wire, tolerance, deadline, retries)
        for each in self.patterns:
            self._check_pattern(each)
        #: the context of which this is a handle with a tag
        self._whole: ContextParallel | None = None
        per_node, other = None, mesh if isinstance(mesh, ContextParallel) else None
        if isinstance(mesh, ContextParallel):
            per_node, mesh = mesh.schedules.per_node, mesh.transport
        elif not isinstance(mesh, Communicator):
            group, per_node = group_of(mesh)
            if per_node is not None and schedule == "ring":
                got, wanted = "'ring' on a mesh of two dimensions", "'allgather' or 'auto' there"
                raise UnsupportedError(message("schedule", got, wanted, "Flatten the mesh for a ring."))
            mesh = Transport(group, deadline=options.deadline, retries=options.retries)
        self.transport: Communicator = mesh
        transport = mesh
        self.placement = place(options.placement, self.patterns, self.seq_len, self.heads, transport.size)
        #: (local,) int64, the global positions of this rank's tokens; padding is at and after ``seq_len``
        self.positions = torch.from_numpy(self.placement.positions(transport.rank))
        self._held = self.placement.held(transport.rank)
        self.schedules: Schedules = Schedules(self.placement, self.heads, transport.rank, options.schedule, per_node)
        said: dict[str, Value] = {
            "context": transport.open() if other is None else other.call.said["context"],
            "seq_len": self.seq_len, "heads": str(self.heads), "nodes": per_node,
            "placement": Opaque(self.placement.digest, self.placement.name), "wire": wire,
            "tolerance": options.tolerance, "deadline": transport.deadline, "retries": transport.retries,
        }  # fmt: skip
        progress = Progress() if other is None else other.call.progress
        encoding = wires.Wire(wires.code(wire), options.tolerance)
        self.call: Agreement = Agreement(transport, encoding, said=said, progress=progress)
        self._number = register(self)
        # a tensor and not text: what is compiled for one layer serves all, whatever their tags
        self._tag = torch.zeros(TAG_WORDS, dtype=torch.int64, device="cpu")

    def tagged(self, tag: str) -> ContextParallel:
        """Name calls of this context: ranks whose calls meet under different names raise.

        No counter can see that two calls alike, of the same pattern, shapes and types, come in another order on
        another rank. A name tells them apart: a layer's, say. Backward carries the name of its forward.

        Args:
            tag: The name; the same for a call on all ranks.
        Returns:
            A handle of this context, which shares everything with it. Make it once, outside of what is compiled.
        Raises:
            UnsupportedError: No text.
        Example:
            >>> ctx = rw.ContextParallel(None, rw.Causal(), seq_len=256, heads=(4, 4))
            >>> first, second = ctx.tagged("layer 1"), ctx.tagged("layer 2")
            >>> x = rw.attention(q, k, v, rw.Causal(), context=first)
            >>> rw.attention(x, k, v, rw.Causal(), context=second).shape
            torch.Size([1, 4, 256, 32])
        """
        if not isinstance(tag, str):
            raise UnsupportedError(message("tag", repr(tag), "text", "Name the call, such as 'layer 3'."))
        named = copy.copy(self)
        named._tag = torch.tensor(text_words(tag, TAG_WORDS), dtype=torch.int64, device="cpu")
        return named

    def __copy__(self) -> ContextParallel:
        """Make another handle of this context."""
        handle = object.__new__(type(self))
        vars(handle).update(vars(self))
        # what the operator finds by its number must live
        handle._whole = self._whole or self
        return handle

    def __deepcopy__(self, memo: object) -> ContextParallel:
        """Give itself: copies of a module share its connections, as its ranks do."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse: connections are one process's."""
        remedy = "Make it in the other process; of a module save state_dict()."
        raise UnsupportedError(message("context", "a pickle of it", "the process that made it", remedy))

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Which rank of the group this process is."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self.transport.size

    @property
    def local(self) -> int:
        """How many tokens every rank's shard has, padding included."""
        return self.placement.local

    # ---- shards ------------------------------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Take this rank's tokens of a whole tensor, differentiably; padding is zero.

        Args:
            x: (..., seq_len, ...), the same on all ranks.
            dim: Its dimension of tokens.
        Returns:
            (..., local, ...), in the order of ``positions``.
        Raises:
            ShapeError: Another length.
        """
        dim = _dim(x, dim)
        if x.shape[dim] != self.seq_len:
            wanted = f"{self.seq_len} tokens"
            raise ShapeError(message(f"x.shape[{dim}]", x.shape[dim], wanted, "Pass the whole tensor, and its dim."))
        mine = x.index_select(dim, self.positions[: self._held].to(x.device))
        if self._held == self.local:
            return mine
        shape = list(mine.shape)
        shape[dim] = self.local - self._held
        return torch.cat([mine, mine.new_zeros(shape)], dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Put all ranks' shards together, on every rank; without gradients, so for looking at and saving.

        Args:
            x: (..., local, ...), each rank's own.
            dim: Its dimension of tokens.
        Returns:
            (..., seq_len, ...), detached.
        Raises:
            ShapeError: Another length.
        """
        dim = _dim(x, dim)
        self._check_local("x", x, dim)
        mine = x.detach().movedim(dim, 0).contiguous()
        shape, dtype = f"{tuple(x.shape)}, dim {dim}", str(x.dtype).removeprefix("torch.")
        with self.call.calling(self._tag, shape=shape, dtype=dtype) as call:
            every, pending = call.all_gather(mine, "shards")
            pending.wait()
        whole = mine.new_empty(self.seq_len, *mine.shape[1:])
        for rank, part in enumerate(every):
            held = self.placement.held(rank)
            whole[torch.from_numpy(self.placement.positions(rank)[:held]).to(x.device)] = part[:held]
        return whole.movedim(0, dim)

    # ---- attention ---------------------------------------------------------------------------------------------------

    def attend(
        self, call: Call, inputs: tuple[Tensor, Tensor, Tensor], tensors: Sequence[Tensor], given: Arguments
    ) -> tuple[Tensor, Tensor]:
        """Compute (out, lse) of the shard, once ``rw.attention(..., context=)`` has checked its arguments.

        Args:
            call: The call.
            inputs: q, k and v of the shard.
            tensors: The others, in the order of ``call.pack``.
            given: The arguments; the ranks compare all that are not defaults.
        """
        refuse_forward_mode()
        if not torch.compiler.is_compiling() and transforming(*inputs):
            remedy = "Differentiate with torch.autograd, and fold a mapped dimension into the batch."
            raise UnsupportedError(message("context", "a torch.func transform", "a call without one", remedy))
        grads = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *tensors))
        compared: list[Tensor] = []
        asked = ", ".join([f"{name}={written_argument(value, compared)}" for name, value in asked_for(given)])
        fixed = "".join(["0" if x.requires_grad else "1" for x in compared])
        shared = "\n".join([self._number, str(int(grads)), fixed, asked])
        others = [self._tag, *[x.detach() for x in compared]]
        out, lse, *_ = ring_attention_op(*inputs, tensors, call.text, call.scale, call.dropout, others, shared)
        return out, lse

    def check(
        self,
        q: Tensor,
        k: Tensor,
        pattern: Pattern,
        q_offset: int,
        backend: str,
        features: frozenset[str] = frozenset(),
    ) -> None:
        """Raise a typed error unless a call, with ``features`` by name, fits this context."""
        if q_offset != 0:
            raise UnsupportedError(message("q_offset", q_offset, "0 with a context", "Decode on one device."))
        for name, x, heads in (("q", q, self.heads[0]), ("k", k, self.heads[1])):
            self._check_local(name, x, 2)
            if x.shape[1] != heads:
                wanted = f"{heads}, as the context's"
                raise ShapeError(message(f"{name} heads", x.shape[1], wanted, "Make a context for them."))
        if backend != "auto":
            known = BACKENDS.get(backend) if isinstance(backend, str) else None
            if known is None or not (known.planned and known.branched):
                able = [name for name in names()[1:] if BACKENDS[name].planned and BACKENDS[name].branched]
                wanted = f"'auto' or one that computes a plan: {', '.join(able)}"
                raise UnsupportedError(message("backend", repr(backend), wanted, "Use 'auto'."))
            if known.lacks(features, q.device.type):
                wanted = f"one that computes {', '.join(sorted(features))}"
                raise UnsupportedError(message("backend", repr(backend), wanted, "Use 'auto'."))
        self._check_pattern(pattern, q.shape[0])

    def replicated(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, fallback: str = "raise", backend: str = "auto"
    ) -> Tensor:
        """Compute attention of whole tensors that every rank holds: sharded, computed together, put together again.

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
            ShapeError: Operands of other shapes, or types that are not one.
            UnsupportedError: An input that requires gradients, or an unknown fallback.
            RingError: A rank is lost, and there is no fallback; or ranks differ.
        """
        one_of("fallback", fallback, ("raise", "single"))
        if not isinstance(pattern, Pattern):
            refuse(pattern)
        check_tensors(q, k, v)
        pattern = of_call(pattern.bound(q.shape[1], k.shape[1]))
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.shape[2] != self.seq_len:
                raise ShapeError(message(f"{name} tokens", x.shape[2], f"{self.seq_len}", "Pass whole tensors."))
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            got = "inputs that require gradients"
            raise UnsupportedError(message("q, k, v", got, "none", "Use shards, or torch.no_grad()."))
        shards = self.shard(q, 2), self.shard(k, 2), self.shard(v, 2)
        self.check(shards[0], shards[1], pattern, 0, backend)
        scale = 1.0 / math.sqrt(q.shape[3])
        try:
            given = Arguments(*shards, pattern, scale, 0, backend, context=self)
            call = Call.of(*shards, pattern, scale=scale, backend=backend)
            out, _ = self.attend(call, shards, pattern.tables, given)
            return self.unshard(out, 2)
        except RingError as error:
            if fallback == "raise" or not error.lost:
                raise
            alone = Call.of(q, k, v, pattern, scale=scale, backend=backend)
            return Program(alone).forward(Operands(q, k, v, scale))[0]

    # ---- other ranks, other tables -----------------------------------------------------------------------------------

    def rebuild(self, mesh: DeviceMesh | ProcessGroup | None) -> ContextParallel:
        """Make the same context on other ranks, such as the survivors of a failure; the caller shards its inputs again.

        Args:
            mesh: As of the constructor.
        Returns:
            A new context; this one is closed.
        """
        options = vars(self.options)
        # a placement of its own is made for these ranks
        options = options | {"placement": "auto"} if isinstance(self.options.placement, Placement) else options
        again = ContextParallel(mesh, self.patterns, self.seq_len, heads=self.heads, **options)
        again._tag = self._tag
        self.close()
        return again

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
        rows = rows_of(rows, self.placement, self.rank, block_size)
        version = whole("version", version, -(2**62), 2**62, error=ShapeError)
        with self.call.calling(self._tag, version=version, shape=f"{tuple(rows.shape)}, {block_size}") as call:
            return PendingTable(call, self.placement, rows, block_size, version)

    # ---- looking at it -----------------------------------------------------------------------------------------------

    def explain(self, *, head_dim: int = 128, itemsize: int = 2) -> str:
        """Say where tokens lie, what moves and what it costs by the model, as text.

        Args:
            head_dim: Channels of q, k and v.
            itemsize: Bytes of an element.
        Example:
            >>> print(rw.ContextParallel(None, rw.Causal(), 4096, heads=(8, 8)).explain().splitlines()[0])
            4,096 tokens on 1 rank: contiguous placement, 4,096 tokens each
        """
        return self.schedules.explain(self.patterns, Widths.of(head_dim, itemsize))

    @property
    def statistics(self) -> WireStatistics:
        """What encoding on the wire did."""
        return self.call.wire.statistics

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record when this rank computes, sends and receives, in the yielded :class:`Trace`: the innermost one."""
        trace, outer = Trace(self.rank), self.transport.trace
        self.transport.trace = trace.events
        try:
            yield trace
        finally:
            self.transport.trace = outer

    def close(self) -> None:
        """Close the connections. A closed context computes nothing more."""
        self.transport.close()
        self.call.space.trim()

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


def _dim(x: Tensor, dim: int) -> int:
    """Count a dimension of a tensor from the front."""
    if not isinstance(x, Tensor):
        raise ShapeError(message("x", type(x).__name__, "a tensor", "Pass a torch tensor."))
    dim = whole("dim", dim, -(2**31), error=ShapeError)
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(message("dim", dim, f"a dimension of x, which has {x.ndim}", "Name that of its tokens."))
    return dim % x.ndim
