"""``ContextParallel``: one sequence on several ranks, planned once and used for every call."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import PatternError, RingError, ShapeError, UnsupportedError, message
from ..ops.backend import Inputs, readable
from ..ops.dispatch import BACKENDS, names, run_forward
from ..ops.registered import refuse_forward_mode
from ..patterns import Pattern, check_extents
from .arguments import integer, number, one_of, pair_of_heads, patterns_of
from .execution import wire as wires
from .execution.agreement import TAG_WORDS, Opaque, Value, caller, text_words
from .execution.call import NAME_WORDS, Call
from .execution.pending_table import PendingTable, rows_of
from .execution.wire import WireStatistics
from .operators import register, ring_attention_op
from .planning.cost import Widths
from .planning.placement import NAMED, Placement
from .planning.report import explanation
from .plans import SCHEDULES, Plans, place
from .trace import Trace
from .transport.mesh import group_of
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
        self.patterns = patterns_of(pattern)
        self.seq_len, self.heads = integer("seq_len", seq_len, 1), pair_of_heads(heads)
        self._options: dict[str, Any] = {
            "schedule": schedule, "placement": placement, "wire": wire, "tolerance": tolerance,
            "deadline": deadline, "retries": retries,
        }  # fmt: skip
        self._check_made()
        #: the context of which this is a handle with a tag
        self._whole: ContextParallel | None = None
        #: ranks of a node, where the mesh has two levels
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
        one_of("schedule", self._options["schedule"], SCHEDULES)
        if not isinstance(self._options["placement"], Placement):
            one_of("placement", self._options["placement"], ("auto", *NAMED), "'auto', a Placement or ")
        wires.code(self._options["wire"])
        if self._options["tolerance"] is not None:
            self._options["tolerance"] = number("tolerance", self._options["tolerance"], 0)
        for pattern in self.patterns:
            self._check_pattern(pattern)

    def _open(self, transport: Transport) -> None:
        self.transport = transport
        form = wires.code(self._options["wire"])
        asked = self._options["placement"]
        self.placement = place(asked, self.patterns, self.seq_len, self.heads, transport.size)
        #: (local,) int64, the global positions of this rank's tokens; padding is at and after ``seq_len``
        self.positions = torch.from_numpy(self.placement.positions(transport.rank))
        self._held = self.placement.held(transport.rank)
        self.plans = Plans(self.placement, self.heads, transport.rank, self._options["schedule"], self._per_node)
        transport.contexts += 1
        number = str(transport.number) if transport.contexts == 1 else f"{transport.number}.{transport.contexts}"
        said: dict[str, Value] = {
            "context": number, "seq_len": self.seq_len, "heads": str(self.heads), "nodes": self._per_node,
            "placement": Opaque(self.placement.digest, self.placement.name), "wire": self._options["wire"],
            "tolerance": self._options["tolerance"], "deadline": transport.deadline, "retries": transport.retries,
        }  # fmt: skip
        self.call = Call(transport, form, self._options["tolerance"], said=said)
        self._number = register(self)
        # a tensor and not text: what is compiled for one layer serves all, whatever their tags
        self._tag = torch.zeros(TAG_WORDS, dtype=torch.int64, device="cpu")

    def tagged(self, tag: str) -> ContextParallel:
        """This context, for calls that have a name: ranks whose calls meet under different names raise.

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
        # what the operator finds by its number must live
        named._whole = self._whole or self
        return named

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A call: of one thread at a time, and none after one in which the ranks differed: who knows what met next."""
        with self.transport.using():
            if self.call.ended is not None:
                raise self.call.ended.again()
            try:
                yield
            except RingError as error:
                # without the frames that it came through, which hold tensors
                self.call.ended = error.again()
                raise

    def _saying(self, tag: Tensor, **said: Value) -> Call:
        """The means of the next call, under its tag, or else the calling thread's."""
        name = tuple(tag.tolist())
        return self.call.saying(
            tag=name if any(name) else text_words(caller(), TAG_WORDS), call=self.call.calls, **said
        )

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
        """The whole tensor of all ranks' shards, on every rank; without gradients, so for looking at and saving.

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
        with self._calling():
            call = self._saying(self._tag, shape=shape, dtype=dtype)
            every = call.all_gather(mine)
            self.call.calls += 1
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
        refuse_forward_mode()
        grads = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        out, lse, *_ = ring_attention_op(
            q, k, v, pattern.tables, pattern.spec, scale, backend, self._number, self._tag, grads
        )
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
            known = BACKENDS.get(backend) if isinstance(backend, str) else None
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
            ShapeError: Inputs of other shapes, or types that are not one.
            UnsupportedError: An input that requires gradients, or an unknown fallback.
            RingError: A rank is lost, and there is no fallback; or ranks differ.
        """
        one_of("fallback", fallback, ("raise", "single"))
        if not isinstance(pattern, Pattern):
            raise PatternError(message("pattern", type(pattern).__name__, "a pattern", "Pass a ringweave pattern."))
        self._check_whole(q, k, v)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise UnsupportedError(
                message("q, k, v", "inputs that require gradients", "none", "Use shards, or torch.no_grad().")
            )
        local = [self.shard(x, 2) for x in (q, k, v)]
        self.check(local[0], local[1], pattern, 0, backend)
        scale = 1.0 / math.sqrt(q.shape[3])
        try:
            out, _ = self.attend(local[0], local[1], local[2], pattern, scale, backend)
            return self.unshard(out, 2)
        except RingError as error:
            if fallback == "raise" or not error.lost:
                raise
            return run_forward(Inputs(q, k, v, scale), pattern, 0, backend)[0]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        scale: float,
        backend: str,
        tag: Tensor,
        grads: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the operator runs: (out, lse, received, relayed, formats by hop and rank, flat, and number and tag)."""
        q, k, v = map(readable, (q, k, v))
        with self._calling():
            planned = self.plans.of(pattern, q.shape[0])
            call = self._saying(tag, scale=scale, backend=backend, requires_grad=grads, **planned.said)
            out, lse, received, forms = planned.forward(call, q, k, v, scale, backend)
            # not before it is done: a rank that fails and tries again is one behind, and told so
            self.call.calls += 1
        kept = [*received, *(torch.empty(0, dtype=torch.uint8, device=q.device) for _ in range(2 - len(received)))]
        name = torch.tensor(call.name, dtype=torch.int64, device="cpu")
        forms = torch.cat([forms.flatten(), name])
        # a compiled graph relies on the shapes and strides that the fake operator tells
        return out.contiguous(), lse.contiguous(), kept[0], kept[1], forms

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
        dout, q, k, v = map(readable, (dout, q, k, v))
        forms, (number, *tag) = kept[2][:-NAME_WORDS], kept[2][-NAME_WORDS:].tolist()
        with self._calling():
            planned = self.plans.of(pattern, q.shape[0])
            call = self.call.saying(tag=tuple(tag), call=number, scale=scale, backend=backend, **planned.said)
            forms = forms.view(-1, self.size)
            return planned.backward(call, dout, dlse, q, k, v, out, lse, kept[:2], forms, scale, backend)

    # ---- other ranks, other tables -----------------------------------------------------------------------------------

    def rebuild(self, mesh: DeviceMesh | ProcessGroup | None) -> ContextParallel:
        """The same context on other ranks, such as the survivors of a failure; the caller shards its inputs again.

        Args:
            mesh: As of the constructor.
        Returns:
            A new context; this one is closed.
        """
        options = dict(self._options)
        if isinstance(options["placement"], Placement):
            options["placement"] = "auto"
        again = ContextParallel(mesh, self.patterns, self.seq_len, heads=self.heads, **options)
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
        version = integer("version", version, -(2**62), 2**62)
        with self._calling():
            shape = f"{tuple(rows.shape)}, {block_size}"
            call = self._saying(self._tag, version=version, shape=shape)
            pending = PendingTable(call, self.placement, rows, block_size, version)
            self.call.calls += 1
        return pending

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
        head_dim, itemsize = integer("head_dim", head_dim, 1), integer("itemsize", itemsize, 1)
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

    def _check_whole(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.ndim != 4:
                got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise ShapeError(message(name, got, "(batch, heads, tokens, dim)", "Pass whole tensors."))
        of_queries, of_keys = self.heads
        for name, x, heads, dim in (
            ("q", q, of_queries, q.shape[3]),
            ("k", k, of_keys, q.shape[3]),
            ("v", v, of_keys, v.shape[3]),
        ):
            shape = (q.shape[0], heads, self.seq_len, dim)
            if (tuple(x.shape), x.dtype, x.device) != (shape, q.dtype, q.device):
                got, wanted = (f"{y.dtype} {size} on {y.device}" for y, size in ((x, tuple(x.shape)), (q, shape)))
                raise ShapeError(message(name, got, wanted, "Pass whole tensors that fit each other."))

    def _check_local(self, name: str, x: Tensor, dim: int) -> None:
        if x.shape[dim] != self.local:
            wanted = f"{self.local}, this rank's share of {self.seq_len}"
            raise ShapeError(message(f"{name}.shape[{dim}]", x.shape[dim], wanted, "Take it with ctx.shard(x, dim)."))


def _dim(x: Tensor, dim: int) -> int:
    """A dimension of a tensor, counted from the front."""
    if not isinstance(x, Tensor):
        raise ShapeError(message("x", type(x).__name__, "a tensor", "Pass a torch tensor."))
    dim = integer("dim", dim, -(2**31))
    if not -x.ndim <= dim < x.ndim:
        wanted = f"a dimension of x, which has {x.ndim}"
        raise ShapeError(message("dim", dim, wanted, "Name its dimension of tokens."))
    return dim % x.ndim
