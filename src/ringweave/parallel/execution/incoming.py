"""The arriving messages of a pass, and the kernel calls that compute with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...backends.backend import Upstream
from ...call import Operands
from ..transport.protocol import Pending
from . import wire
from .collective import CollectiveCall
from .exchange import SHARD, Exchange, TokenBlock
from .local_attention import LocalAttention
from .messages import Channels, Messages, Source, listed, post
from .schedule import Schedule, Stage


class KernelCall(NamedTuple):
    """One kernel call of a stage."""

    number: int  # number of the branch
    attention: LocalAttention
    inputs: Operands  # queries, and complete buffers of keys and values
    upstream: Upstream | None  # dout, lse and delta of the queries in a backward pass; else None
    remote: bool = False  # whether the queries belong to another rank


class Received(NamedTuple):
    """The bytes of a stage's messages."""

    stage: Stage
    keys: list[Tensor]  # bytes of keys and values, by exchange
    queries: list[tuple[Messages, Tensor]]  # messages of remote queries, each with its bytes


class Incoming:
    """Keys and values that arrive in a pass, and queries that this rank computes for other ranks.

        incoming.agree("forward")
        incoming.start(stages[0])
        for each stage:
            incoming.wait()                 # the messages of the stage
            incoming.start(following)       # they travel while the stage is computed
            for call in incoming.calls():
                ...

    Args:
        schedule: The stages.
        collective: The agreed call, with its transport, wire format and workspace.
        inputs: The operands of the shard.
        upstream: In a backward pass, dout, lse and delta of the shard.
        saved: In a backward pass, the bytes of each exchange that forward has saved, and the formats of their messages.
    """

    def __init__(
        self,
        schedule: Schedule,
        collective: CollectiveCall,
        inputs: Operands,
        upstream: Upstream | None = None,
        saved: tuple[Sequence[Tensor], Tensor] | None = None,
    ):
        self._schedule, self._collective, self._inputs, self._upstream = schedule, collective, inputs, upstream
        self._channels = Channels.of(inputs.k, inputs.v)
        # tensors that are sent with queries that another rank computes
        self._with_queries: list[tuple[Tensor, ...]] = [(inputs.q,)]
        if upstream is not None:
            self._with_queries = [(inputs.q, upstream.dout), (upstream.lse[..., None], upstream.delta[..., None])]
        self._saved = saved if schedule.keeps else None
        # formats of the sent messages of keys, by exchange and peer
        self._forms: list[list[int]] = []
        #: formats of the received messages of keys, by exchange and peer
        self.forms_in: list[list[int]] = [] if self._saved is None else self._saved[1].tolist()
        # tensors that the first exchange brought for relaying, by peer, branch and kind of key heads
        self._relayed: dict[tuple[int, int, int], list[Tensor]] = {}
        # messages under way, and the messages of the current stage
        self._pending: Pending | None = None
        self._coming = Received(schedule.stages[0], [], [])
        self.received = self._coming

    def agree(self, operation: str) -> None:
        """Agree with the other ranks on the call, and on the formats of the messages of keys."""
        stages = [] if self._saved is not None else self._schedule.stages
        self._agree(operation, [stage.exchanges[0] for stage in stages if stage.exchanges])

    def start(self, stage: Stage | None) -> None:
        """Start a stage's messages; None for no further stage."""
        if stage is not None:
            self._coming = Received(stage, [], [])
            if stage.exchanges and self._saved is None:
                self._post(self._coming, 0)

    def wait(self) -> None:
        """Wait for the stage's messages, including those that this rank relays; they replace the previous stage's."""
        coming, exchanges = self._coming, self._coming.stage.exchanges
        if self._saved is not None:
            coming.keys.extend(self._saved[0][: len(exchanges)])
        for level in range(len(exchanges) if self._saved is None else 0):
            if level:
                self._relay(coming)
                self._post(coming, level)
            assert self._pending is not None
            self._pending.wait()
        self.received, self._pending = coming, None

    def calls(self) -> Iterator[KernelCall]:
        """Yield the kernel calls of the stage that has arrived.

        If the caller drops each call before it takes the next, only one call's buffers are in use at a time.
        """
        stage, inputs, space = self.received.stage, self._inputs, self._collective.space
        for number, attention in stage.own.items():
            yield KernelCall(number, attention, self._inputs_of(number, attention), self._upstream)
        for number, attention in stage.remote.items():
            arrived = [x for messages, data in self.received.queries for _, _, x in messages.decode(data, number)]
            upstream = None
            if self._upstream is not None:
                (_, dout), (lse, delta) = arrived
                upstream = Upstream(dout, lse[..., 0], delta[..., 0])
            # not bound to a name here, so that its buffers are returned before the next call takes its own
            yield KernelCall(
                number, attention, attention.buffers(inputs, space)._replace(q=arrived[0][0]), upstream, remote=True
            )

    def _inputs_of(self, number: int, attention: LocalAttention) -> Operands:
        """Return the inputs with a branch's keys and values, without a copy if one message has them in kernel order."""
        arrived = [
            (block, tensors)
            for level, data in enumerate(self.received.keys)
            for _, block, tensors in self._messages(self.received.stage, level).decode(data, number)
        ]
        if len(arrived) == 1 and arrived[0][0].fills(attention.branch.nk):
            keys, values = arrived[0][1]
            return self._inputs._replace(k=keys, v=values)
        inputs = attention.buffers(self._inputs, self._collective.space)
        for block, (keys, values) in arrived:
            block.put(inputs.k, keys)
            block.put(inputs.v, values)
        return inputs

    def _post(self, coming: Received, level: int) -> None:
        """Start the messages of one exchange of a stage, with its remote queries."""
        stage = coming.stage
        keys = self._messages(stage, level)
        if self._schedule.keeps:
            # always the size of the native format, since the size of a saved tensor must not depend on data
            nbytes = sum(map(self._channels.nbytes, keys.exchange.receives))
            coming.keys.append(self._inputs.k.new_empty(nbytes, dtype=torch.uint8))
        else:
            coming.keys.append(self._collective.buffer(keys.nbytes_in, self._inputs.k.device))
        parts: list[tuple[Messages, Source, Tensor]] = [(keys, self._of_keys, coming.keys[-1])]
        if stage.queries is not None:
            for tensors in self._with_queries:
                messages = Messages(stage.queries, Channels.of(*tensors))
                data = self._collective.buffer(messages.nbytes_in, self._inputs.k.device)
                coming.queries.append((messages, data))
                parts.append((messages, partial(self._of_queries, tensors), data))
        what, number = (f"keys {level}", None) if self._schedule.keeps else ("keys", stage.number)
        self._pending = post(self._collective, what, parts, number)

    def _agree(self, operation: str, exchanges: Sequence[Exchange]) -> None:
        """Agree on the call and on the formats of the messages of keys.

        Each peer receives at most one message of keys over all ``exchanges``, so one format per peer is enough.
        """
        forms = [wire.NATIVE] * self._collective.transport.size
        for exchange in exchanges:
            for peer, message, _ in listed(exchange.sends):
                tensors = (x for block in message for x in self._of_keys(peer, block))
                forms[peer] = self._collective.wire.choose(tensors)
        (d, dv), dtype = self._channels.dims, str(self._channels.dtype).removeprefix("torch.")
        forms_in = self._collective.agree(operation, forms, batch=self._channels.batch, D=d, Dv=dv, dtype=dtype)
        if self._inputs.terms is not None:
            self._inputs = self._inputs._replace(terms=self._inputs.terms.seeded(self._collective.seed))
        if exchanges:
            self._forms.append(forms)
            self.forms_in.append(forms_in)

    def _relay(self, coming: Received) -> None:
        """Decode the first exchange's tensors for the second one, and agree on the formats of its messages."""
        for peer, block, tensors in self._messages(coming.stage, 0).decode(coming.keys[0]):
            self._relayed[peer, block.branch, block.kind] = tensors
        if self._collective.wire.form == wire.NATIVE:
            self._forms.append([])
            self.forms_in.append([wire.NATIVE] * self._collective.transport.size)
        else:
            self._agree("relay", coming.stage.exchanges[1:])

    def _messages(self, stage: Stage, level: int) -> Messages:
        forms = () if self._saved is not None else self._forms[level]
        return Messages(stage.exchanges[level], self._channels, forms, self.forms_in[level], self._schedule.keeps)

    def _of_keys(self, _peer: int, block: TokenBlock) -> Sequence[Tensor]:
        """Return a block's keys and values, from the shard or from the tensors that the first exchange brought."""
        assert block.tokens is not None
        if block.source != SHARD:
            return [block.tokens.of(x) for x in self._relayed[block.source, block.branch, block.kind]]
        heads = self._schedule.heads[block.branch]
        return [block.of(block.tokens.of(heads.of_keys(x))) for x in (self._inputs.k, self._inputs.v)]

    def _of_queries(self, tensors: Sequence[Tensor], _peer: int, block: TokenBlock) -> Sequence[Tensor]:
        assert block.tokens is not None
        return [block.tokens.of(x[:, self._schedule.heads[block.branch].queries]) for x in tensors]
