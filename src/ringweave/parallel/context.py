"""``ContextParallel``: one sequence on several ranks, planned once and used for every call."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..call import Arguments, Call
from ..checks import one_of, whole
from ..errors import RingError, ShapeError, UnsupportedError
from ..patterns import Pattern
from ..patterns.fitting import refuse
from ..precision import Precision, as_precision
from ..torch_ops import attend as attend_alone
from ..types import Place
from ..validate import autocast, check_tensors
from .context_checks import (
    ContextOptions,
    check_backend,
    check_pattern,
    check_pattern_of_call,
    check_replicated,
    check_shards,
)
from .execution import wire as wires
from .execution.collective import CallCounter, CollectiveCall
from .execution.header import TAG_WORDS, Digest, Value, text_words
from .execution.pending_table import PendingTable, rows_of
from .execution.wire import WireStatistics
from .operators import Session, attend
from .planning.choice import place
from .planning.placement import Placement
from .planning.workload import Widths, pair_of_heads, patterns_of
from .schedules import Schedules
from .shards import Rows, Shards, dimension
from .trace import Trace, recorded
from .transport.mesh import group_of
from .transport.protocol import Communicator
from .transport.transport import Transport

if TYPE_CHECKING:
    from ..terms.function import ScoreFunction
    from .transport.mesh import DeviceMesh, ProcessGroup


class ContextParallel:
    """A sequence that is split over a group of ranks: the placement of its tokens and the exchange for each pattern.

    Every rank creates the context with the same arguments, shards its inputs, and passes it as ``context=``. Results
    are exact and differentiable. A rank receives only the key tiles that its queries attend and that it does not hold;
    gradients return along the same path.

    Args:
        mesh: A device mesh, a process group, a Transport, another context, or None for this process alone. On a mesh
            of two dimensions (nodes, ranks of a node) each tile crosses to a node once and is relayed inside it. A
            context of another length shares its connections with this one; the ranks may create such contexts in any
            order.
        pattern: The pattern of all calls, or several patterns (interleaved layers) that share one placement, balanced
            for their sum. Calls may use other patterns too, but the placement is not chosen for them.
        seq_len: Number of tokens of the whole sequence.
        heads: Query heads and key heads, (Hq, Hkv).
        schedule: ``"allgather"``: receive everything, then compute once; the forward result is bitwise equal to one
            device's. ``"ring"``: compute stage by stage while the next stage's keys arrive; this needs the least
            memory, and queries travel where that is cheaper. ``"auto"``: allgather, unless a rank would hold more than
            three shards or the ring moves less than half of the bytes.
        placement: ``"auto"`` (the least modelled time of communication and compute), a name, or a Placement.
        wire: Number format of keys and values in messages: ``"native"``, ``"bf16"`` or ``"int8"`` (one scale per
            token); None takes the format of ``precision``.
        tolerance: Largest relative error of an encoded message, measured on a sample before sending. A message with a
            larger error is sent in the native format. None: no limit.
        deadline: Longest wait for a message, in seconds. Over a transport or another context, that of its connections.
        retries: Number of times that a timed-out exchange may be repeated on new connections; as for ``deadline``.
        precision: A precision policy. The context uses only its wire format; pass the policy to each call for the rest.
    Raises:
        ShapeError: The sequence has no tokens, the heads do not divide, or a number is invalid or out of bounds.
        PatternError: A pattern is made for another length or other heads. A call raises it for a block table that
            ``adaptive.select`` made on one shard; :meth:`share_table` makes the table of the whole sequence.
        UnsupportedError: The schedule, placement or wire is unknown, a ring is requested on a mesh of two dimensions,
            a deadline or retries differ from those of given connections, or the group is destroyed or does not contain
            this process.
        RingError: Raised by calls. A rank is lost or silent, the ranks' calls differ or come in a different order
            (:meth:`tagged` detects more of these cases), or two threads call concurrently.
    Example:
        >>> ctx = rw.ContextParallel(None, rw.SlidingWindow(64), seq_len=256, heads=(4, 4))
        >>> local = [ctx.shard(x, dim=2) for x in (q, k, v)]
        >>> out = rw.attention(*local, rw.SlidingWindow(64), context=ctx)
        >>> ctx.unshard(out, dim=2).shape
        torch.Size([1, 4, 256, 32])

    References:
        Liu, Zaharia, Abbeel (2023), Ring attention with blockwise transformers, section 3. Their ring passes on all
        keys; here only the tiles that the pattern needs move, each directly from the rank that holds it.
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
            check_pattern(each, self.seq_len, self.heads[0])
        other = mesh if isinstance(mesh, ContextParallel) else None
        transport, per_node = _transport_of(mesh, options)
        #: carries the messages of all contexts over the same connections
        self.transport: Communicator = transport
        self.placement = place(options.placement, self.patterns, self.seq_len, self.heads, transport.size)
        self._shards = Shards(self.placement, transport.rank)
        #: (local,) int64, global positions of this rank's tokens; positions from ``seq_len`` on are padding
        self.positions = self._shards.positions
        self.schedules: Schedules = Schedules(self.placement, self.heads, transport.rank, options.schedule, per_node)
        header: dict[str, Value] = {
            "context": transport.open() if other is None else other.call.fields["context"],
            "seq_len": self.seq_len, "heads": str(self.heads), "nodes": per_node,
            "placement": Digest(self.placement.digest, self.placement.name), "wire": wire,
            "tolerance": options.tolerance, "deadline": transport.deadline, "retries": transport.retries,
        }  # fmt: skip
        counter = CallCounter() if other is None else other.call.counter
        encoding = wires.Wire(wires.code(wire), options.tolerance)
        self.call: CollectiveCall = CollectiveCall(transport, encoding, fields=header, counter=counter)
        # handles share the session; the operators find it by its number
        self._session = Session(self.schedules, self.call)
        # The tag is a tensor, not text, so that one compiled graph serves layers with different tags.
        self._tag = torch.zeros(TAG_WORDS, dtype=torch.int64, device="cpu")

    def tagged(self, tag: str) -> ContextParallel:
        """Return a handle that tags its calls; the ranks raise if calls with different tags meet.

        Counters cannot detect that two calls with equal patterns, shapes and dtypes come in a different order on
        another rank. A tag, such as the layer's name, distinguishes them. Backward carries the tag of its forward.

        Args:
            tag: The name of the calls, equal on all ranks.
        Returns:
            A handle of this context that shares all of its state. Create it once, outside of compiled code.
        Raises:
            UnsupportedError: The tag is not text.
        Example:
            >>> ctx = rw.ContextParallel(None, rw.Causal(), seq_len=256, heads=(4, 4))
            >>> first, second = ctx.tagged("layer 1"), ctx.tagged("layer 2")
            >>> x = rw.attention(q, k, v, rw.Causal(), context=first)
            >>> rw.attention(x, k, v, rw.Causal(), context=second).shape
            torch.Size([1, 4, 256, 32])
        """
        if not isinstance(tag, str):
            raise UnsupportedError("tag", repr(tag), "text", "Name the call, such as 'layer 3'.")
        named = copy.copy(self)
        named._tag = torch.tensor(text_words(tag, TAG_WORDS), dtype=torch.int64, device="cpu")
        return named

    def __copy__(self) -> ContextParallel:
        """Create another handle of this context."""
        handle = object.__new__(type(self))
        vars(handle).update(vars(self))
        return handle

    def __deepcopy__(self, memo: object) -> ContextParallel:
        """Return self: copies of a module share the context and its connections."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, since connections belong to one process."""
        remedy = "Create a context in the other process; to save a module, save its state_dict()."
        raise UnsupportedError("context", "a pickle of it", "the process that made it", remedy)

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.transport.size

    @property
    def local(self) -> int:
        """Number of tokens of each rank's shard, including padding."""
        return self.placement.local

    # ---- shards ------------------------------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a whole tensor, differentiably; padding is zero.

        Args:
            x: (..., seq_len, ...), the same tensor on all ranks.
            dim: Token dimension of x.
        Returns:
            (..., local, ...), in the order of ``positions``.
        Raises:
            ShapeError: x does not have ``seq_len`` tokens along ``dim``.
        """
        return self._shards.take(x, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather all ranks' shards into the whole tensor on every rank, without gradients: for inspecting and saving.

        Args:
            x: (..., local, ...), this rank's shard.
            dim: Token dimension of x.
        Returns:
            (..., seq_len, ...), detached.
        Raises:
            ShapeError: x does not have ``local`` tokens along ``dim``.
        """
        dim = dimension(x, dim)
        self._shards.check("x", x, dim)
        return self._gathered(x, dim, self._shards)[0]

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather all ranks' shards into the whole tensor on every rank, differentiably.

        The gradient of a shard is the sum of the ranks' gradients of its tokens. A call moves the whole tensor to every
        rank, so use it for small tensors; attention with ``context=`` moves only what a pattern needs.

        Args:
            x: (..., local, ...), this rank's shard.
            dim: Token dimension of x.
        Returns:
            (..., seq_len, ...).
        Raises:
            ShapeError: x does not have ``local`` tokens along ``dim``.
        """
        dim = dimension(x, dim)
        self._shards.check("x", x, dim)
        return self._rows(x, dim, self._shards)

    def gather_blocks(
        self, x: Tensor, reduce: Callable[[Tensor], Tensor], size: int, stride: int | None = None
    ) -> Tensor:
        """Reduce each block of the whole sequence to one row, and gather the rows on every rank, differentiably.

        The result is ``reduce(ctx.gather(x, -2))``. A rank receives one row of each block that lies on another rank, in
        place of its tokens. The tokens of blocks that lie on several ranks move, and every rank reduces them. If
        a placement spreads neighbouring tokens, they are all blocks.

        Args:
            x: (..., local, D), this rank's shard.
            reduce: Function of consecutive tokens, (..., n, D), that returns a row for each of their full blocks,
                (..., blocks, E); of no tokens too.
            size: Tokens of a block.
            stride: Tokens from the beginning of a block to that of the next, at most ``size``, which is the default.
        Returns:
            (..., (seq_len - size) // stride + 1, E): the full blocks of the sequence.
        Raises:
            ShapeError: x does not have ``local`` tokens, the sizes do not fit, or ``reduce`` returns another number of
                rows.
        """
        size = whole("size", size, 1, error=ShapeError)
        stride = size if stride is None else whole("stride", stride, 1, size, error=ShapeError)
        dim = dimension(x, -2)
        self._shards.check("x", x, dim)

        def reduced(tokens: Tensor, bounds: list[tuple[int, int]]) -> Tensor:
            parts = []
            for begin, end in bounds or [(0, 0)]:
                rows, count = reduce(tokens.narrow(dim, begin, end - begin)), max(0, (end - begin - size) // stride + 1)
                # padding would take the place of missing rows
                if rows.ndim != x.ndim or rows.shape[dim] != count:
                    got, wanted = f"{tuple(rows.shape)} for {end - begin} tokens", f"{count} rows, (..., {count}, E)"
                    raise ShapeError("reduce(x)", got, wanted, "Return a row for each full block.")
                parts.append(rows)
            return torch.cat(parts, dim)

        if self.seq_len < size:
            return reduced(x, [])
        blocks = self._shards.blocks(size, stride)
        found = None
        if blocks.inner.local:
            found = self._rows(reduced(x, blocks.inner_tokens), dim, blocks.inner)
        if not len(blocks.crossing):
            assert found is not None
            return found
        tokens = self._rows(x.index_select(dim, blocks.shared.to(x.device)), dim, blocks.tokens)
        crossing = reduced(tokens, blocks.crossing_tokens)
        return crossing if found is None else found.index_copy(dim, blocks.crossing.to(x.device), crossing)

    def _rows(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """Gather all ranks' rows, differentiably; x holds this rank's rows, with or without padding."""
        whole: Tensor = Gather.apply(rows.padded(x, dim), self, dim, rows)  # type: ignore[no-untyped-call]
        return whole

    def _gathered(self, x: Tensor, dim: int, rows: Rows) -> tuple[Tensor, tuple[int, ...]]:
        """Return the whole tensor, detached, and the name of the call."""
        mine = x.detach().movedim(dim, 0).contiguous()
        with self.call.call_scope(self._tag, **_form(x, dim)) as call:
            every, pending = call.all_gather(mine, "shards")
            pending.wait()
            return rows.join(every, dim), call.name

    def _summed(self, gradient: Tensor, dim: int, rows: Rows, name: tuple[int, ...]) -> Tensor:
        """Return the sum over ranks of the gradients of this rank's rows; ``name`` is that of the forward call."""
        with self.call.call_scope(tag=None, **_form(gradient, dim)) as call:
            named = call.with_fields(call=name[0], tag=name[1:])
            total = named.reduce_scatter(rows.parts(gradient, dim), "gradients of shards")
        return rows.padded(total, 0).movedim(0, dim)

    # ---- attention ---------------------------------------------------------------------------------------------------

    def attend(
        self,
        call: Call,
        inputs: tuple[Tensor, Tensor, Tensor],
        tensors: Sequence[Tensor],
        given: Arguments,
        function: ScoreFunction | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute (out, lse) of the shard; ``rw.attention(..., context=)`` has checked the arguments.

        Args:
            call: The call.
            inputs: q, k and v of the shard.
            tensors: The other tensors of the call, in the order of ``call.pack``.
            given: The arguments of the call; the ranks compare all that differ from their defaults.
            function: The score function of a call that has one; ``given.terms`` is then a record of it.
        """
        return attend(self._session, self._tag, call, inputs, tensors, given, function)

    def check(self, call: Call, q: Tensor, k: Tensor) -> None:
        """Raise a typed error unless a call on these shards fits this context."""
        if call.q_offset != 0:
            raise UnsupportedError("q_offset", call.q_offset, "0 with a context", "Decode on one device.")
        check_shards(self._shards, self.heads, q, k)
        check_backend(call.backend, call.features, q.device.type)
        check_pattern_of_call(call.pattern, self._shards, self.heads[0], q.shape[0])

    def replicated(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, fallback: str = "raise", backend: str = "auto"
    ) -> Tensor:
        """Compute attention of whole tensors that every rank holds: shard them, compute, and gather the output.

        Args:
            q: (B, Hq, seq_len, D), the same on all ranks, without gradients.
            k: (B, Hkv, seq_len, D).
            v: (B, Hkv, seq_len, Dv).
            pattern: The pattern.
            fallback: Action after the loss of a rank. ``"raise"``: raise the RingError. ``"single"``: compute the whole
                result exactly on this rank alone. Only this method can fall back, since in all other calls the lost
                rank's shard is gone.
            backend: Backend, as in :func:`ringweave.attention`.
        Returns:
            (B, Hq, seq_len, Dv), on every rank, in the dtype of q; under autocast in that of autocast, as one device
            returns it.
        Raises:
            ShapeError: The tensors' shapes do not fit, or their dtypes differ.
            UnsupportedError: An input requires gradients, or the fallback is unknown.
            RingError: A rank is lost and ``fallback`` is ``"raise"``, or the ranks' calls differ.
        """
        one_of("fallback", fallback, ("raise", "single"))
        if not isinstance(pattern, Pattern):
            refuse(pattern)
        q, k, v = autocast(q, k, v)
        check_tensors(q, k, v)
        pattern = pattern.bound(q.shape[1], k.shape[1])._for_call()
        check_replicated(q, k, v, self.seq_len)
        if pattern.has_function:
            pattern = pattern._recognised(Place(q.shape[0], q.shape[1], self.seq_len, self.seq_len))
        shards = self.shard(q, 2), self.shard(k, 2), self.shard(v, 2)
        scale = 1.0 / math.sqrt(q.shape[3])
        call = Call.of(*shards, pattern, scale=scale, backend=backend)
        self.check(call, *shards[:2])
        try:
            given = Arguments(*shards, pattern, scale, 0, backend, context=self)
            out, _ = self.attend(call, shards, pattern.tables, given)
            return self.unshard(out, 2)
        except RingError as error:
            if fallback == "raise" or not error.lost:
                raise
            alone = Call.of(q, k, v, pattern, scale=scale, backend=backend)
            return attend_alone(alone, q, k, v, pattern.tables)[0]

    # ---- other ranks, other tables -----------------------------------------------------------------------------------

    def rebuild(self, mesh: DeviceMesh | ProcessGroup | None) -> ContextParallel:
        """Create the same context on other ranks, such as the survivors of a failure, and close this one.

        The caller has to shard its inputs again.

        Args:
            mesh: Mesh or group of the new ranks, as in the constructor.
        Returns:
            The new context.
        """
        options = vars(self.options)
        # A Placement that the caller passed is made for the old ranks and does not fit the new ones.
        options = options | {"placement": "auto"} if isinstance(self.options.placement, Placement) else options
        again = ContextParallel(mesh, self.patterns, self.seq_len, heads=self.heads, **options)
        again._tag = self._tag
        self.close()
        return again

    def share_table(self, rows: Tensor, block_size: int, version: int) -> PendingTable:
        """Start to gather a block table from the rows that each rank chose for the queries of its shard.

        The rows travel while the current step computes. All ranks call this method with the same version; if versions
        differ, every rank raises, so no rank computes with a partly old table.

        Args:
            rows: Bool (local blocks, key blocks), (Hq, ., .) or (B, Hq, ., .): this rank's rows, in the order of its
                shard. Rows of padding are ignored.
            block_size: Side of a block in tokens; must divide the placement's block.
            version: Version number of the table, larger for each new table.
        Returns:
            A :class:`PendingTable`; its ``result()`` waits for the whole table.
        Raises:
            ShapeError: The rows have another shape, or the placement cuts through blocks.
            RingError: The ranks' versions or shapes differ.
        """
        rows = rows_of(rows, self.placement, self.rank, block_size)
        version = whole("version", version, -(2**62), 2**62, error=ShapeError)
        with self.call.call_scope(self._tag, version=version, shape=f"{tuple(rows.shape)}, {block_size}") as call:
            return PendingTable(call, self.placement, rows, block_size, version)

    # ---- inspection --------------------------------------------------------------------------------------------------

    def explain(self, *, head_dim: int = 128, itemsize: int = 2) -> str:
        """Describe the placement, the exchanged bytes and the modelled time as text.

        Args:
            head_dim: Channels of q, k and v.
            itemsize: Bytes per element.
        Example:
            >>> print(rw.ContextParallel(None, rw.Causal(), 4096, heads=(8, 8)).explain().splitlines()[0])
            4,096 tokens on 1 rank: contiguous placement, 4,096 tokens each
        """
        return self.schedules.explain(self.patterns, Widths.of(head_dim, itemsize))

    @property
    def statistics(self) -> WireStatistics:
        """Counts of encoded messages and bytes, and the largest measured error."""
        return self.call.wire.statistics

    def trace(self) -> AbstractContextManager[Trace]:
        """Record when this rank computes, sends and receives, into the yielded :class:`Trace`.

        Of nested traces only the innermost one records.
        """
        return recorded(self.transport)

    def close(self) -> None:
        """Close the connections; later calls of this context raise."""
        self.transport.close()
        self.call.space.trim()

    def __repr__(self) -> str:
        patterns = ", ".join(map(repr, self.patterns))
        where = f"rank {self.rank} of {self.size}, {self.placement.name}"
        return f"ContextParallel({patterns}, {self.seq_len} tokens, {where})"


class Gather(torch.autograd.Function):
    """The shards of all ranks as one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel, dim: int, rows: Rows) -> Tensor:
        """Gather the rows along ``dim``."""
        ctx.context, ctx.dim, ctx.rows = context, dim, rows
        whole, ctx.name = context._gathered(x, dim, rows)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of this rank's rows."""
        return ctx.context._summed(gradient, ctx.dim, ctx.rows, ctx.name), None, None, None


def _form(x: Tensor, dim: int) -> dict[str, Value]:
    return {"shape": f"{tuple(x.shape)}, dim {dim}", "dtype": str(x.dtype).removeprefix("torch.")}


def _transport_of(
    mesh: DeviceMesh | ProcessGroup | Communicator | ContextParallel | None, options: ContextOptions
) -> tuple[Communicator, int | None]:
    """Return a transport over a mesh or group, or the given one, and the ranks per node of a mesh of nodes."""
    transport: Communicator | None = None
    if isinstance(mesh, ContextParallel):
        transport, per_node = mesh.transport, mesh.schedules.per_node
    elif isinstance(mesh, Communicator):
        transport, per_node = mesh, None
    else:
        group, per_node = group_of(mesh)
    if per_node is not None and options.schedule == "ring":
        got, wanted = "'ring' on a mesh of two dimensions", "'allgather' or 'auto' on such a mesh"
        raise UnsupportedError("schedule", got, wanted, "Flatten the mesh for a ring.")
    if transport is None:
        return Transport(group, deadline=options.deadline, retries=options.retries), per_node
    for name in ("deadline", "retries"):
        value, held = getattr(options, name), getattr(transport, name)
        if value not in (held, getattr(ContextOptions, name)):
            wanted, remedy = f"{held}, that of the connections", f"Pass {name} to the transport or the first context."
            raise UnsupportedError(name, value, wanted, remedy)
    return transport, per_node
