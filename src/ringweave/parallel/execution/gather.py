"""The gather schedule: receive all that is needed, then compute once, in the order of the whole's key tiles.

So the forward result has the bits of one device. Memory: the shard's keys and values, and those received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.backend import Inputs
from ...ops.head_views import Heads
from ...types import acc_dtype
from ..planning.demand import Demand
from ..planning.exchange import SHARD, Hop, Section, direct_hop, node_hops
from ..planning.placement import Placement
from . import wire
from .agreement import Value
from .call import Call, Source, upstream_of
from .local_attention import Part
from .messages import Channels
from .places import Tokens


@dataclass(frozen=True, eq=False)
class Gather:
    """What one rank does in the gather schedule.

    Attributes:
        parts: Per branch what it computes; None: nothing.
        heads: Per branch which heads.
        hops: One, or two for two levels of ranks.
        said: What the ranks compare: the pattern's contents, and the schedule.
        held: Tokens of the shard that are no padding.
    """

    parts: tuple[Part | None, ...]
    heads: tuple[Heads, ...]
    hops: tuple[Hop, ...]
    said: Mapping[str, Value]
    held: int

    @staticmethod
    def of(
        demands: list[Demand],
        placement: Placement,
        rank: int,
        ratio: int,
        said: Mapping[str, Value],
        per_node: int | None = None,
    ) -> Gather:
        """For a rank; ``per_node`` ranks make a node where there are two levels."""
        parts = [Part.of(demand, rank, ratio) for demand in demands]
        heads = tuple(Heads(demand.branch, ratio) for demand in demands)
        hops: tuple[Hop, ...] = (direct_hop(demands, parts, rank, placement.ranks),)
        if per_node is not None:
            hops = node_hops(demands, parts, rank, placement.ranks, per_node)
        return Gather(tuple(parts), heads, hops, said, placement.held(rank))

    def kept_bytes(self, channels: Channels) -> list[int]:
        """Bytes of what forward keeps for backward, per hop."""
        return [sum(channels.nbytes(m, wire.NATIVE) for m in hop.receives) for hop in self.hops]

    def forward(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float, backend: str
    ) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        """(out, lse, received bytes per hop, (hops, ranks) their formats)."""
        channels = Channels(q.shape[0], (k.shape[3], v.shape[3]), k.dtype)
        received, forms = self._receive(call, k, v, channels)
        wide = acc_dtype(q.dtype)
        whole = self._whole(q)
        out: Tensor | None = None
        for number, part in enumerate(self.parts):
            if part is None:
                continue
            keys, values = self._buffers(call, number, part, (k, v), channels, received, forms)
            with call.computing(f"branch {number}", 0):
                part_out, part_lse = part.forward(Inputs(q, keys, values, scale), q.dtype if whole else wide, backend)
                if whole and part.queries.count == q.shape[2]:
                    out, lse = part_out, part_lse
                    continue
                if out is None:
                    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=part_out.dtype)
                    lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
                if whole:
                    out[:, :, : self.held], lse[:, :, : self.held] = part_out, part_lse
                else:
                    part.merge(out, lse, part_out, part_lse)
        if out is None:
            out = q.new_zeros(*q.shape[:3], v.shape[3])
            lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        return out.to(q.dtype), lse, received, torch.tensor(forms, dtype=torch.int64, device="cpu")

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
        channels = Channels(q.shape[0], (k.shape[3], v.shape[3]), k.dtype)
        slopes = Channels(channels.batch, channels.dims, lse.dtype)
        call.agree("backward", slopes)
        upstream = upstream_of(dout, out, dlse, lse, self.parts, backend, Inputs(q, k, v, scale))
        shard = self._own(k) if self._whole(q) else None
        # where one kernel call computes the shard, its results are what it has written
        totals = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v) if shard is None]
        buffers: dict[int, list[Tensor]] = {}
        for number, part in enumerate(self.parts):
            if part is None:
                continue
            keys, values = self._buffers(call, number, part, (k, v), channels, received, forms.tolist())
            with call.computing(f"branch {number}", 0):
                dq_part, *buffers[number] = part.backward(upstream, Inputs(q, keys, values, scale), backend)
            if shard is not None:
                totals = [dq_part, *(shard.of(gradient) for gradient in buffers[number])]
                continue
            part.queries.add(totals[0][:, part.heads.queries], dq_part)
            for total, gradient in zip(totals[1:], buffers[number], strict=True):
                part.add_own(total, gradient)
        self._return(call, slopes, buffers, (totals[1], totals[2]))
        dq, dk, dv = (_as_shard(total, x) for total, x in zip(totals, (q, k, v), strict=True))
        return dq, dk, dv

    def _whole(self, q: Tensor) -> bool:
        """Whether one kernel call computes all of the shard."""
        part = self.parts[0] if len(self.parts) == 1 else None
        return (
            part is not None
            and part.queries.span == (0, self.held, 1)
            and len(range(*part.heads.queries.indices(q.shape[1]))) == q.shape[1]
        )

    def _own(self, k: Tensor) -> Tokens | None:
        """Where the shard's keys lie side by side in the only part's buffer; None where they do not."""
        part = self.parts[0]
        assert part is not None
        heads = part.heads.keys
        if not isinstance(heads, slice) or len(range(*heads.indices(k.shape[1]))) != k.shape[1]:
            return None
        whole = (0, self.held, 1)
        if part.direct is not None:
            return part.direct if part.direct.span == whole else None
        return part.kept[1] if part.kept[0].span == whole and part.kept[1].adjacent else None

    def _receive(self, call: Call, k: Tensor, v: Tensor, channels: Channels) -> tuple[list[Tensor], list[list[int]]]:
        received: list[Tensor] = []
        came: list[list[int]] = []
        for number, (hop, size) in enumerate(zip(self.hops, self.kept_bytes(channels), strict=True)):
            source = self._source((k, v), channels, received, came)
            forms = call.forms(hop.sends, source)
            forms_in = [wire.NATIVE] * len(hop.sends)
            if number == 0 or call.form != wire.NATIVE:
                every = call.agree("relay" if number else "forward", channels, forms)
                forms_in = [row[call.transport.rank] for row in every]
            # as long as in the native format, whatever came: its size must not depend on data
            buffer = k.new_empty(size, dtype=torch.uint8)
            call.all_to_all(channels, (hop.sends, forms), (hop.receives, forms_in), source, buffer, f"keys {number}")
            received.append(buffer)
            came.append(forms_in)
        return received, came

    def _source(
        self, shard: tuple[Tensor, Tensor], channels: Channels, received: list[Tensor], forms: list[list[int]]
    ) -> Source:
        """A section's keys and values: of the shard, or of what the hop before brought."""
        imports: dict[tuple[int, int, int], list[Tensor]] = {}
        if received:
            for peer, section, tensors in channels.by_peer(self.hops[0].receives, received[0], forms[0]):
                imports[peer, section.branch, section.kind] = tensors

        def source(section: Section) -> Sequence[Tensor]:
            assert section.tokens is not None
            if section.source == SHARD:
                heads = self.heads[section.branch]
                return [section.of(section.tokens.of(heads.of_keys(x))) for x in shard]
            return [section.tokens.of(x) for x in imports[section.source, section.branch, section.kind]]

        return source

    def _buffers(
        self,
        call: Call,
        number: int,
        part: Part,
        shard: tuple[Tensor, Tensor],
        channels: Channels,
        received: Sequence[Tensor],
        forms: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a part: the shard's own and those received."""
        keys, values = (part.buffer(x, call.space, name) for x, name in zip(shard, ("keys", "values"), strict=True))
        if part.direct is None:
            for hop, data in enumerate(received[: len(self.hops)]):
                for _, section, tensors in channels.by_peer(self.hops[hop].receives, data, forms[hop]):
                    if section.branch == number:
                        for buffer, rows in zip((keys, values), tensors, strict=True):
                            section.put(buffer, rows)
        return keys, values

    def _return(
        self, call: Call, slopes: Channels, buffers: dict[int, list[Tensor]], totals: tuple[Tensor, Tensor]
    ) -> None:
        """Gradients of received keys back to where they came from, each sum in the order of ranks."""

        def source(section: Section) -> Sequence[Tensor]:
            found = buffers.get(section.branch)
            return [
                section.gradients(None if found is None else found[i], totals[i], slopes.batch, slopes.dims[i])
                for i in (0, 1)
            ]

        # what this rank relayed: its own gradients first, then those that come back
        relayed: dict[Section, list[Tensor]] = {}
        imported: dict[tuple[int, int, int], Section] = {}
        if len(self.hops) == 2:
            for peer, message in enumerate(self.hops[0].receives):
                for section in message:
                    relayed[section] = [x.clone() for x in source(section)]
                    imported[peer, section.branch, section.kind] = section
        for number in reversed(range(len(self.hops))):
            hop = self.hops[number]
            native = [wire.NATIVE] * len(hop.sends)
            size = sum(slopes.nbytes(message, wire.NATIVE) for message in hop.sends)
            data = call.space.take("gradients", (size,), torch.uint8, totals[0].device)
            back = relayed.__getitem__ if number == 0 and relayed else source
            call.all_to_all(slopes, (hop.receives, native), (hop.sends, native), back, data, f"gradients {number}")
            for _, section, tensors in slopes.by_peer(hop.sends, data, native):
                for i, rows in enumerate(tensors):
                    if section.source == SHARD:
                        self.heads[section.branch].update(totals[i], section.add, rows)
                    else:
                        section.add(relayed[imported[section.source, section.branch, section.kind]][i], rows)


def _as_shard(x: Tensor, like: Tensor) -> Tensor:
    """In the input's type and length: padding has no gradient."""
    if x.shape[2] == like.shape[2]:
        return x.to(like.dtype).contiguous()
    padded = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    padded[:, :, : x.shape[2]] = x
    return padded
