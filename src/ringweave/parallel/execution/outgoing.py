"""The returning messages of a pass: results of remote queries, and gradients of received keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..transport.protocol import Pending
from .collective import CollectiveCall
from .exchange import SHARD, Exchange, TokenBlock
from .messages import Channels, Messages, Source, listed, post
from .schedule import Schedule, Stage


class ReturnRoute(NamedTuple):
    """One kind of returning result."""

    channels: Channels  # layout of each block
    apply: Callable[[TokenBlock, Sequence[Tensor]], None]  # accumulates received tensors


class Outgoing:
    """Results that return to the ranks of their tokens: along the exchanges of a stage, the last one first.

        outgoing.wait()                        # the previous stage's results
        outgoing.start(stage, queries, keys)   # they travel while the next stage is computed

    Args:
        schedule: The stages.
        collective: The agreed call, with its transport and workspace.
        device: Device of the results.
        queries: The results of queries: out and lse, or dq.
        keys: The gradients of keys and values in a backward pass; else None.
    """

    def __init__(
        self,
        schedule: Schedule,
        collective: CollectiveCall,
        device: torch.device,
        queries: ReturnRoute,
        keys: ReturnRoute | None = None,
    ):
        self._schedule, self._collective, self._device = schedule, collective, device
        self._queries, self._keys = queries, keys
        # sums of the gradients of relayed keys, by peer, branch and kind of key heads
        self._sums: dict[tuple[int, int, int], list[Tensor]] = {}
        # exchanges along which results have still to return, with their route and source; the last ones come first
        self._remaining: list[list[tuple[Exchange, ReturnRoute, Source]]] = []
        self._stage = schedule.stages[0]
        self._pending: Pending | None = None
        self._arriving: list[tuple[ReturnRoute, Messages, Tensor]] = []

    def start(self, stage: Stage, queries: Source, keys: Source | None = None) -> None:
        """Start to return a stage's results, given the sources of its results of queries and gradients of keys."""
        self._stage = stage
        if self._keys is not None and keys is not None:
            self._remaining = [[(exchange, self._keys, self._of_sums)] for exchange in stage.exchanges]
            if len(stage.exchanges) > 1:
                # sums for relayed keys: this rank's gradients first, then the returning ones in the order of ranks
                for peer, message, _ in listed(stage.exchanges[0].receives):
                    for block in message:
                        self._sums[peer, block.branch, block.kind] = [x.clone() for x in keys(peer, block)]
            if stage.exchanges:
                self._remaining[-1] = [(stage.exchanges[-1], self._keys, keys)]
        if stage.queries is not None:
            self._remaining = self._remaining or [[]]
            self._remaining[0].append((stage.queries, self._queries, queries))
        self._post()

    def wait(self) -> None:
        """Wait for all results that return to this rank, and accumulate them; relay those of other ranks."""
        while self._pending is not None:
            self._pending.wait()
            for route, messages, data in self._arriving:
                for _, block, tensors in messages.decode(data):
                    if block.source == SHARD:
                        route.apply(block, tensors)
                        continue
                    for total, rows in zip(self._of_sums(block.source, block), tensors, strict=True):
                        block.add(total, rows)
            self._post()

    def _post(self) -> None:
        """Start the messages of the next exchange, if any remains."""
        self._pending, self._arriving = None, []
        if not self._remaining:
            return
        parts = []
        for exchange, route, source in self._remaining.pop():
            messages = Messages(Exchange(exchange.receives, exchange.sends), route.channels)
            data = self._collective.buffer(messages.nbytes_in, self._device)
            self._arriving.append((route, messages, data))
            parts.append((messages, source, data))
        keeps, level = self._schedule.keeps, len(self._remaining)
        what, number = (f"gradients {level}", None) if keeps else ("returns", self._stage.number)
        self._pending = post(self._collective, what, parts, number)

    def _of_sums(self, peer: int, block: TokenBlock) -> Sequence[Tensor]:
        return self._sums[peer, block.branch, block.kind]
