"""The messages of a pass over a schedule's stages: sections of tensors as bytes, in both directions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...backends.backend import Upstream
from ...call import Operands
from ..transport.protocol import Pending
from . import wire
from .agreement import Agreement
from .exchange import SHARD, Hop, Message, Section
from .local_attention import LocalAttention
from .schedule import Schedule, Stage

#: Function of (peer, section) that returns the section's tensors at its sender.
Source = Callable[[int, Section], Sequence[Tensor]]
# tensors that the first hop brought for relaying, or their gradients, by peer, branch and kind of key heads
_Relayed = dict[tuple[int, int, int], list[Tensor]]
# smallest size in bytes of one head's keys for which a message may be sent without packing
_LARGE = 2**16


@dataclass(frozen=True)
class Channels:
    """The layout of a message per token and head, such as keys and values, or their gradients.

    Attributes:
        batch: Number of batch elements.
        dims: Number of channels of each tensor.
        dtype: Dtype of the tensors on this rank; their format in the message may differ.
    """

    batch: int
    dims: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(*tensors: Tensor) -> Channels:
        """Return the layout of tensors (B, ..., C) of one dtype."""
        return Channels(len(tensors[0]), tuple(x.shape[-1] for x in tensors), tensors[0].dtype)

    def nbytes(self, message: Message, form: int = wire.NATIVE) -> int:
        """Return the size of a message in bytes in a format."""
        return sum(wire.nbytes(form, section.rows, dim, self.dtype) for section in message for dim in self.dims)

    def places(self, message: Message, form: int) -> Iterator[tuple[Section, list[slice]]]:
        """Yield each section of a message with the slices of the message's bytes that hold its tensors."""
        at = 0
        for section in message:
            sizes = (wire.nbytes(form, section.rows, dim, self.dtype) for dim in self.dims)
            ends = list(itertools.accumulate(sizes, initial=at))
            yield section, [slice(*pair) for pair in itertools.pairwise(ends)]
            at = ends[-1]


class Way(NamedTuple):
    """One kind of returning result: its layout, its source on the sender, and its use on the receiver.

    Attributes:
        channels: Layout of each section.
        source: Returns the tensors to send.
        apply: Accumulates received tensors.
    """

    channels: Channels
    source: Source
    apply: Callable[[Section, Sequence[Tensor]], None]


@dataclass(frozen=True, eq=False)
class Payload:
    """The content of the messages of a hop.

    Attributes:
        hop: The messages, by peer.
        channels: Layout of each section.
        source: Returns the tensors to send.
        forms: Formats of the sent messages, by peer; empty for native.
        forms_in: Formats of the received messages, by peer; empty for native.
        packed: Whether all messages are packed. Otherwise large messages are sent directly from the tensors.
    """

    hop: Hop
    channels: Channels
    source: Source
    forms: Sequence[int] = ()
    forms_in: Sequence[int] = ()
    packed: bool = True

    @property
    def nbytes_in(self) -> int:
        """Size in bytes of all received messages."""
        return sum(self.channels.nbytes(*each[1:]) for each in _messages(self.hop.receives, self.forms_in))

    def sections(self, data: Tensor, branch: int | None = None) -> Iterator[tuple[int, Section, list[Tensor]]]:
        """Decode the received messages and yield (peer, section, tensors), for one branch or for all.

        Tensors are (B, heads, tokens, C), or (members, tokens, C) if the section has members.
        """
        channels = self.channels
        for peer, message, form, part in self._parts(data):
            for section, places in channels.places(message, form):
                if branch is None or section.branch == branch:
                    shapes = [section.shape(channels.batch, dim) for dim in channels.dims]
                    pairs = zip(places, shapes, strict=True)
                    yield peer, section, [wire.read(part[place], shape, form, channels.dtype) for place, shape in pairs]

    def receive(self, data: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (peer, slice) of a flat uint8 tensor for each message to receive."""
        for peer, message, form, part in self._parts(data):
            if self._is_packed(message, form):
                yield peer, part
                continue
            (section,) = message
            sizes = [section.count * dim * self.channels.dtype.itemsize for dim in self.channels.dims]
            tensors = part.split([section.heads * size for size in sizes])
            yield from ((peer, head) for x, size in zip(tensors, sizes, strict=True) for head in x.split(size))

    def send(self, take: Callable[[int], Tensor], count: Callable[[int, int, int], None]) -> list[tuple[int, Tensor]]:
        """Return the messages to send as (peer, tensor).

        Args:
            take: Returns a buffer of a given size in bytes for packed messages.
            count: Receives for each message its format, its size in bytes, and its size in the native format.
        """
        channels, sends = self.channels, list[tuple[int, Tensor]]()
        messages = _messages(self.hop.sends, self.forms)
        sizes = [channels.nbytes(message, form) * self._is_packed(message, form) for _, message, form in messages]
        for (peer, message, form), out in zip(messages, take(sum(sizes)).split(sizes), strict=True):
            count(form, channels.nbytes(message, form), channels.nbytes(message))
            if not self._is_packed(message, form):
                tensors = self.source(peer, message[0])
                sends += [(peer, head.contiguous()) for x in tensors for element in x for head in element]
                continue
            for section, places in channels.places(message, form):
                for place, x in zip(places, self.source(peer, section), strict=True):
                    wire.write(out[place], x, form)
            sends.append((peer, out))
        return sends

    def _parts(self, data: Tensor) -> Iterator[tuple[int, Message, int, Tensor]]:
        """Yield each received message with its slice of ``data``; the messages follow each other in order of peers."""
        at = 0
        for peer, message, form in _messages(self.hop.receives, self.forms_in):
            size = self.channels.nbytes(message, form)
            yield peer, message, form, data[at : at + size]
            at += size

    def _is_packed(self, message: Message, form: int) -> bool:
        """Return whether a message is packed; otherwise each head is sent directly from its tensor.

        Sender and receiver come to the same decision. Sending without packing saves a copy as large as a stage, and is
        used if the message consists of few large contiguous pieces.
        """
        if self.packed or form != wire.NATIVE or len(message) != 1:
            return True
        (section,) = message
        large = section.count * self.channels.dims[0] * self.channels.dtype.itemsize >= _LARGE
        return section.members is not None or not section.adjacent or not large


def _messages(messages: Sequence[Message], forms: Sequence[int]) -> list[tuple[int, Message, int]]:
    """List (peer, message, format) of the messages that are not empty."""
    return [(peer, message, forms[peer] if forms else wire.NATIVE) for peer, message in enumerate(messages) if message]


class KernelCall(NamedTuple):
    """One kernel call of a stage.

    Attributes:
        number: Number of the branch.
        attention: The queries and keys of the call.
        inputs: Queries, and complete buffers of keys and values.
        upstream: dout, lse and delta of the queries in a backward pass; else None.
        remote: Whether the queries belong to another rank.
    """

    number: int
    attention: LocalAttention
    inputs: Operands
    upstream: Upstream | None
    remote: bool = False


class Traffic:
    """The messages of one pass: arriving keys and remote queries, and returning results.

    Args:
        schedule: The stages.
        agreement: The agreed call, with its transport, wire format and workspace.
        inputs: The operands of the shard.
        upstream: In a backward pass, dout, lse and delta of the shard.
        kept: In a backward pass, the bytes of each hop that forward has saved, and the formats of their messages.
    """

    def __init__(
        self,
        schedule: Schedule,
        agreement: Agreement,
        inputs: Operands,
        upstream: Upstream | None = None,
        kept: tuple[Sequence[Tensor], Tensor] | None = None,
    ):
        self._schedule, self._agreement, self._inputs, self._upstream = schedule, agreement, inputs, upstream
        self._channels = Channels.of(inputs.k, inputs.v)
        # tensors that are sent with queries that another rank computes
        self._along: list[tuple[Tensor, ...]] = [(inputs.q,)]
        if upstream is not None:
            self._along = [(inputs.q, upstream.dout), (upstream.lse[..., None], upstream.delta[..., None])]
        # formats of the sent messages of keys, by hop and peer
        self._forms: list[list[int]] = []
        #: formats of the received messages of keys, by hop and peer
        self.forms_in: list[list[int]] = []
        #: received bytes of the current stage's keys, by hop
        self.keys_in: list[Tensor] = []
        self._queries_in: list[tuple[Payload, Tensor]] = []
        self._stage = schedule.stages[0]
        self._relayed: _Relayed = {}
        self._going: Iterator[None] = iter(())
        self._kept = kept is not None and schedule.keeps
        if kept is not None and schedule.keeps:
            self.keys_in, self.forms_in = list(kept[0][: len(self._stage.hops)]), kept[1].tolist()

    def stages(self, operation: str) -> Iterator[Stage]:
        """Agree with the other ranks, then yield each stage after its messages arrive and the next stage's start."""
        stages = self._schedule.stages
        self._agree(operation, [stage.hops[0] for stage in stages if stage.hops and not self._kept])
        coming = _started(self._come(stages[0]))
        for stage, following in zip(stages, (*stages[1:], None), strict=True):
            _finish(coming)
            if following is not None:
                coming = _started(self._come(following))
            yield stage
        _finish(self._going)
        # Payloads refer to this object. Without breaking that cycle, the garbage collector would have to free their
        # buffers.
        self._queries_in = []

    def calls(self) -> Iterator[KernelCall]:
        """Yield the current stage's kernel calls.

        If the caller drops each call before it takes the next, only one call's buffers are in use at a time.
        """
        stage, inputs, space = self._stage, self._inputs, self._agreement.space
        for number, attention in stage.own.items():
            yield KernelCall(number, attention, self._with_keys(number, attention), self._upstream)
        for number, attention in stage.remote.items():
            along = [x for payload, data in self._queries_in for _, _, x in payload.sections(data, number)]
            upstream = None
            if self._upstream is not None:
                (_, dout), (lse, delta) = along
                upstream = Upstream(dout, lse[..., 0], delta[..., 0])
            # not bound to a name here, so that its buffers are returned before the next call takes its own
            yield KernelCall(
                number, attention, attention.buffers(inputs, space)._replace(q=along[0][0]), upstream, remote=True
            )

    def send_back(self, queries: Way, keys: Way | None = None) -> None:
        """Wait for the previous stage's returning results, then start to return this stage's."""
        _finish(self._going)
        self._going = _started(self._go_back(self._stage, queries, keys))

    def _with_keys(self, number: int, attention: LocalAttention) -> Operands:
        """Return the inputs with a branch's keys and values, without a copy if one message has them in kernel order."""
        arrived = [
            (section, tensors)
            for level, data in enumerate(self.keys_in)
            for _, section, tensors in self._keys(self._stage, level).sections(data, number)
        ]
        if len(arrived) == 1 and arrived[0][0].fills(attention.branch.nk):
            keys, values = arrived[0][1]
            return self._inputs._replace(k=keys, v=values)
        inputs = attention.buffers(self._inputs, self._agreement.space)
        for section, (keys, values) in arrived:
            section.put(inputs.k, keys)
            section.put(inputs.v, values)
        return inputs

    def _come(self, stage: Stage) -> Iterator[None]:
        """Receive a stage's keys, hop after hop, and its remote queries; yields while messages travel."""
        keys_in, queries_in = list(self.keys_in) if self._kept else [], list[tuple[Payload, Tensor]]()
        for level in range(0 if self._kept else len(stage.hops)):
            if level:
                self._relay(stage, keys_in[0])
            keys = self._keys(stage, level)
            if self._schedule.keeps:
                # always the size of the native format, since the size of a saved tensor must not depend on data
                nbytes = sum(map(self._channels.nbytes, keys.hop.receives))
                keys_in.append(self._inputs.k.new_empty(nbytes, dtype=torch.uint8))
            else:
                keys_in.append(self._room(keys.nbytes_in))
            for tensors in self._along:
                if stage.queries is None:
                    break
                payload = Payload(stage.queries, Channels.of(*tensors), partial(self._of_queries, tensors))
                queries_in.append((payload, self._room(payload.nbytes_in)))
            pending = self._post("keys", [(keys, keys_in[-1]), *queries_in], stage, level)
            yield
            pending.wait()
        self._stage, self.keys_in, self._queries_in = stage, keys_in, queries_in

    def _go_back(self, stage: Stage, queries: Way, keys: Way | None) -> Iterator[None]:
        """Return a stage's results, the last hop first; yields while messages travel."""
        what = "gradients" if self._schedule.keeps else "returns"
        if keys is not None and len(stage.hops) > 1:
            # sums for relayed keys: this rank's gradients first, then the returning ones in the order of ranks
            for peer, message, _ in _messages(stage.hops[0].receives, ()):
                for section in message:
                    tensors = [x.clone() for x in keys.source(peer, section)]
                    self._relayed[peer, section.branch, section.kind] = tensors
        for level in reversed(range(len(stage.hops) if keys or stage.queries else 0)):
            ways = [] if keys is None else [(stage.hops[level], keys)]
            if stage.queries:
                ways.append((stage.queries, queries))
            payloads = []
            for hop, way in ways:
                source = self._of_relayed if level < len(stage.hops) - 1 else way.source
                payload = Payload(Hop(hop.receives, hop.sends), way.channels, source)
                payloads.append((payload, self._room(payload.nbytes_in)))
            pending = self._post(what, payloads, stage, level)
            yield
            pending.wait()
            for (_, way), (payload, data) in zip(ways, payloads, strict=True):
                for _, section, tensors in payload.sections(data):
                    if section.source == SHARD:
                        way.apply(section, tensors)
                        continue
                    for total, rows in zip(self._of_relayed(section.source, section), tensors, strict=True):
                        section.add(total, rows)

    def _post(self, what: str, payloads: Sequence[tuple[Payload, Tensor]], stage: Stage, level: int) -> Pending:
        """Start the messages of several payloads together; each is received into its tensor."""
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for payload, data in payloads:
            receives += payload.receive(data)
            sends += payload.send(self._room, self._agreement.wire.statistics.count)
        exchange = self._agreement.transport.exchange
        if self._schedule.keeps:
            return exchange(sends, receives, what=f"{what} {level}")
        return exchange(sends, receives, what=what, stage=stage.number)

    def _agree(self, operation: str, hops: Sequence[Hop]) -> None:
        """Agree with the other ranks on the call and on the formats of the keys' messages.

        Each peer receives at most one message of keys over all ``hops``, so one format per peer is enough.
        """
        forms = [wire.NATIVE] * self._agreement.transport.size
        for hop in hops:
            for peer, message, _ in _messages(hop.sends, ()):
                tensors = (x for section in message for x in self._of_keys(peer, section))
                forms[peer] = self._agreement.wire.choose(tensors)
        (d, dv), dtype = self._channels.dims, str(self._channels.dtype).removeprefix("torch.")
        forms_in = self._agreement.agree(operation, forms, batch=self._channels.batch, D=d, Dv=dv, dtype=dtype)
        if self._inputs.terms is not None:
            self._inputs = self._inputs._replace(terms=self._inputs.terms.seeded(self._agreement.seed))
        if hops:
            self._forms.append(forms)
            self.forms_in.append(forms_in)

    def _relay(self, stage: Stage, data: Tensor) -> None:
        """Decode the first hop's tensors for the second hop, and agree on the formats of the second hop's messages."""
        for peer, section, tensors in self._keys(stage, 0).sections(data):
            self._relayed[peer, section.branch, section.kind] = tensors
        if self._agreement.wire.form == wire.NATIVE:
            self._forms.append([])
            self.forms_in.append([wire.NATIVE] * self._agreement.transport.size)
        else:
            self._agree("relay", stage.hops[1:])

    def _keys(self, stage: Stage, level: int) -> Payload:
        forms = () if self._kept else self._forms[level]
        hop, packed = stage.hops[level], self._schedule.keeps
        return Payload(hop, self._channels, self._of_keys, forms, self.forms_in[level], packed)

    def _of_keys(self, peer: int, section: Section) -> Sequence[Tensor]:
        """Return a section's keys and values, from the shard or from the tensors that the first hop brought."""
        assert section.tokens is not None
        if section.source != SHARD:
            return [section.tokens.of(x) for x in self._of_relayed(section.source, section)]
        heads = self._schedule.heads[section.branch]
        return [section.of(section.tokens.of(heads.of_keys(x))) for x in (self._inputs.k, self._inputs.v)]

    def _of_queries(self, tensors: Sequence[Tensor], peer: int, section: Section) -> Sequence[Tensor]:
        assert section.tokens is not None
        return [section.tokens.of(x[:, self._schedule.heads[section.branch].queries]) for x in tensors]

    def _of_relayed(self, peer: int, section: Section) -> Sequence[Tensor]:
        return self._relayed[peer, section.branch, section.kind]

    def _room(self, nbytes: int) -> Tensor:
        return self._agreement.space.take((nbytes,), torch.uint8, self._inputs.k.device)


def _started(steps: Iterator[None]) -> Iterator[None]:
    next(steps, None)
    return steps


def _finish(steps: Iterator[None]) -> None:
    for _ in steps:
        pass
