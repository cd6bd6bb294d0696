"""The executor of all schedules: start the next stage's messages, compute this stage, merge, wait.

Messages overlap with computing in both directions: a stage's keys arrive while the previous stage is computed, and its
results return while the next stage is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...backends import merge_into
from ...backends.backend import Heads, Upstream, delta_in_chunks
from ...call import Operands
from ...types import acc_dtype
from .collective import CollectiveCall
from .exchange import TokenBlock
from .incoming import Incoming
from .local_attention import LocalAttention
from .messages import Channels
from .outgoing import Outgoing, ReturnRoute
from .schedule import Schedule
from .tokens import Tokens


class Computed(NamedTuple):
    """The results of forward for a shard."""

    out: Tensor  # outputs, (B, Hq, tokens, Dv)
    lse: Tensor  # log-sum-exp of the rows, (B, Hq, tokens)
    received: Sequence[Tensor]  # received bytes of each exchange, if the schedule keeps them for backward; else empty
    forms: Tensor  # int64 (exchanges, ranks), the formats of these messages


def forward(schedule: Schedule, collective: CollectiveCall, inputs: Operands, backend: str) -> Computed:
    """Compute a shard's attention, including the exchange with other ranks."""
    q, v = inputs.q, inputs.v
    acc = acc_dtype(q.dtype)
    # a single kernel call needs no merge, so it can write q's dtype directly
    dtype = q.dtype if schedule.single else acc
    results = Channels(q.shape[0], (v.shape[3], 1), acc)
    incoming = Incoming(schedule, collective, inputs)
    total = _Output(inputs, acc, schedule.tokens)

    def merge(block: TokenBlock, tensors: Sequence[Tensor]) -> None:
        assert block.tokens is not None
        total.merge(schedule.heads[block.branch], block.tokens, tensors[0], tensors[1][..., 0])

    outgoing = Outgoing(schedule, collective, q.device, ReturnRoute(results, merge))
    incoming.agree("forward")
    incoming.start(schedule.stages[0])
    for stage, following in schedule.steps():
        incoming.wait()
        incoming.start(following)
        remote: dict[int, list[Tensor]] = {}
        for call in incoming.calls():
            with collective.computing(f"branch {call.number}{', remote queries' * call.remote}", stage.number):
                out, lse = call.attention.forward(call.inputs, dtype, backend)
            if call.remote:
                remote[call.number] = [out, lse[..., None]]
            else:
                total.add(call.attention, out, lse)
            # release its buffers before the next call takes them
            del call
        outgoing.wait()
        outgoing.start(stage, partial(_of_branch, remote))
    outgoing.wait()
    received, forms = (incoming.received.keys, incoming.forms_in) if schedule.keeps else ([], [])
    return Computed(*total.result(q.dtype), received, torch.tensor(forms, dtype=torch.int64, device="cpu"))


def backward(
    schedule: Schedule,
    collective: CollectiveCall,
    inputs: Operands,
    computed: Computed,
    grads: tuple[Tensor, Tensor | None],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) of a shard, in the inputs' dtype, from the gradients of out and lse."""
    q, k, v = inputs[:3]
    dout, dlse = grads
    # forward gives NaN for a row with an infinite score, so its weights must be NaN too
    lse = computed.lse.masked_fill(torch.isposinf(computed.lse), torch.nan)
    batch, dims, acc = q.shape[0], (k.shape[3], v.shape[3]), lse.dtype
    first = next(iter(schedule.stages[0].own.values()), None)
    delta_of = delta_in_chunks if first is None else first.chosen(inputs, backend, needs_grad=True).delta
    upstream = Upstream(dout, lse, delta_of(dout, computed.out, lse, dlse))
    of_keys, of_queries = Channels(batch, dims, acc), Channels(batch, dims[:1], acc)
    incoming = Incoming(schedule, collective, inputs, upstream, (computed.received, computed.forms))
    dq, dk, dv = (_Sum(x, acc, schedule.tokens) for x in (q, k, v))

    def add_keys(block: TokenBlock, rows: Sequence[Tensor]) -> None:
        for total, grad in zip((dk, dv), rows, strict=True):
            schedule.heads[block.branch].update(total.whole, block.add, grad)

    def add_queries(block: TokenBlock, rows: Sequence[Tensor]) -> None:
        block.add(dq.whole[:, schedule.heads[block.branch].queries], rows[0])

    routes = ReturnRoute(of_queries, add_queries), ReturnRoute(of_keys, add_keys)
    outgoing = Outgoing(schedule, collective, q.device, *routes)
    incoming.agree("backward")
    incoming.start(schedule.stages[0])
    for stage, following in schedule.steps():
        incoming.wait()
        incoming.start(following)
        received: dict[int, list[Tensor]] = {}
        remote: dict[int, list[Tensor]] = {}
        for call in incoming.calls():
            assert call.upstream is not None
            with collective.computing(f"branch {call.number}{', remote queries' * call.remote}", stage.number):
                of_query, *of_key = call.attention.backward(call.inputs, call.upstream, backend)
            if call.remote:
                remote[call.number] = [of_query]
            else:
                received[call.number] = of_key
                dq.add_queries(call.attention, of_query)
            for total, grad in zip((dk, dv), of_key, strict=True):
                total.add_keys(call.attention, grad)
            del call
        outgoing.wait()
        outgoing.start(stage, partial(_of_branch, remote), partial(_grads_of_keys, received, of_keys, lse))
    outgoing.wait()
    return dq.result(), dk.result(), dv.result()


class _Output:
    """The running (out, lse) of a shard.

    If the first kernel result covers all heads and tokens of the shard, it becomes the running result without a copy.
    """

    def __init__(self, inputs: Operands, dtype: torch.dtype, tokens: int):
        self._inputs, self._dtype, self._tokens = inputs, dtype, tokens
        self._running: tuple[Tensor, Tensor] | None = None

    def add(self, attention: LocalAttention, out: Tensor, lse: Tensor) -> None:
        """Merge the result of a kernel call of this rank's queries."""
        all_heads = lse.shape[1] == self._inputs.q.shape[1]
        if self._running is None and all_heads and attention.queries.shard_tokens.span == (0, self._tokens, 1):
            self._running = out, lse
        else:
            self.merge(attention.heads, attention.queries.shard_tokens, out, lse)

    def merge(self, heads: Heads, queries: Tokens, out: Tensor, lse: Tensor) -> None:
        """Merge the result of some heads and queries."""
        all_out, all_lse = (x[:, heads.queries] for x in self._whole())
        column = all_lse[..., None]
        some_out, some_lse = queries.of(all_out), queries.of(column)[..., 0]
        merge_into(some_out, some_lse, out, lse)
        if queries.span is None:
            # queries without an even spacing were copied, so write the merged copies back
            queries.put(all_out, some_out)
            queries.put(column, some_lse[..., None])

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (out, lse), with out converted to ``dtype``."""
        out, lse = self._whole()
        tokens = self._inputs.q.shape[2]
        return _padded(out.to(dtype), tokens), _padded(lse, tokens, -torch.inf)

    def _whole(self) -> tuple[Tensor, Tensor]:
        if self._running is None:
            q, v = self._inputs.q, self._inputs.v
            out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=self._dtype)
            self._running = out, q.new_full(q.shape[:3], -torch.inf, dtype=self._dtype)
        return self._running


class _Sum:
    """The running sum of gradients of a shard.

    If the first addend covers all heads and tokens of the shard, it becomes the sum without a copy.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, tokens: int):
        self._like, self._dtype, self._tokens = like, dtype, tokens
        self._total: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """The sum over the whole shard, created as zeros if it is empty."""
        if self._total is None:
            self._total = torch.zeros(self._like.shape, dtype=self._dtype, device=self._like.device)
        return self._total

    def add_queries(self, attention: LocalAttention, grad: Tensor) -> None:
        """Add the gradients of a kernel's queries."""
        tokens = attention.queries.shard_tokens
        if not self._begins(tokens, grad):
            tokens.add(self.whole[:, attention.heads.queries], grad)

    def add_keys(self, attention: LocalAttention, grad: Tensor) -> None:
        """Add the gradients of the kernel's keys that belong to the shard."""
        tokens, rows = attention.keys.shard_tokens, attention.keys.of_kernel(grad)
        if not self._begins(tokens, rows):
            attention.heads.update(self.whole, tokens.add, rows)

    def result(self) -> Tensor:
        """Return the sum in the shard's dtype and length; the gradient of padding is zero."""
        total = self.whole.to(self._like.dtype)
        return _padded(total, self._like.shape[2]).contiguous()

    def _begins(self, places: Tokens, rows: Tensor) -> bool:
        whole = places.span == (0, self._tokens, 1) and rows.shape[1] == self._like.shape[1]
        if whole and self._total is None:
            self._total = rows
            return True
        return False


def _padded(x: Tensor, tokens: int, fill: float = 0.0) -> Tensor:
    """Pad (B, H, shorter, ...) to ``tokens`` tokens with ``fill``."""
    if x.shape[2] == tokens:
        return x
    whole = x.new_full((*x.shape[:2], tokens, *x.shape[3:]), fill)
    whole[:, :, : x.shape[2]] = x
    return whole


def _of_branch(results: Mapping[int, list[Tensor]], _peer: int, block: TokenBlock) -> list[Tensor]:
    return results[block.branch]


def _grads_of_keys(
    grads: Mapping[int, list[Tensor]], channels: Channels, like: Tensor, _peer: int, block: TokenBlock
) -> list[Tensor]:
    """Take a block's rows from the gradients of a branch's keys; zeros if the branch was not computed."""
    both = grads.get(block.branch) or (None, None)
    return [block.gradients(x, like, channels.batch, dim) for x, dim in zip(both, channels.dims, strict=True)]
