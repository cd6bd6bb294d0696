"""Spread one attention call over ranks, and join its five results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import ringweave as rw
from ringweave.parallel import ContextParallel, Transport
from ringweave.patterns import Pattern

from ..oracle import NAMES, Inputs, results
from .threads import run


class Share(NamedTuple):
    """One rank's part of a call: the positions of its tokens, its results, and the bytes received and sent by peer."""

    positions: Tensor
    results: dict[str, Tensor]
    received: list[int]
    sent: list[int]
    metadata: int
    wire: Any


def call(
    mesh: Any,
    x: Inputs,
    pattern: Pattern,
    options: dict[str, Any],
    per_node: int | None = None,
    backend: str = "auto",
) -> Share:
    """Run forward and backward of this rank's shard."""
    heads = x.q.shape[1], x.k.shape[1]
    ctx = ContextParallel(mesh, pattern, x.q.shape[2], heads=heads, **options)
    if per_node is not None:
        ctx.schedules.per_node = per_node
    leaves = [ctx.shard(t, dim=2).requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = rw.attention_with_lse(*leaves, pattern, context=ctx, backend=backend)
    slopes = Inputs(*leaves, ctx.shard(x.dout, 2), ctx.shard(x.dlse, 2))
    counters = ctx.transport.counters
    share = Share(
        ctx.positions,
        results(out, lse, slopes, leaves),
        list(counters.received),
        list(counters.sent),
        counters.metadata,
        ctx.statistics,
    )
    if not isinstance(mesh, Transport):
        ctx.close()
    return share


def joined(shares: list[Share], tokens: int) -> dict[str, Tensor]:
    """Join the results of all ranks, and check that padding is empty and that every token is on a rank."""
    whole: dict[str, Tensor] = {}
    for name in NAMES:
        parts = [share.results[name] for share in shares]
        shape = list(parts[0].shape)
        shape[2] = tokens
        total = torch.full(shape, torch.nan, dtype=parts[0].dtype)
        for share, part in zip(shares, parts, strict=True):
            real = share.positions < tokens
            total[:, :, share.positions[real]] = part[:, :, real]
            rest = part[:, :, ~real]
            assert (torch.isneginf(rest) if name == "lse" else rest == 0).all(), f"padding of {name}"
        whole[name] = total
    return whole


def spread(ranks: int, x: Inputs, pattern: Pattern, per_node: int | None = None, **options: Any) -> list[Share]:
    """Make a call over ranks that are threads."""
    return run(ranks, call, x, pattern, options, per_node)


def alone(x: Inputs, pattern: Pattern, backend: str = "auto") -> dict[str, Tensor]:
    """Make the same call on one device."""
    leaves = x.leaves()
    out, lse = rw.attention_with_lse(*leaves, pattern, backend=backend)
    return results(out, lse, x, leaves)
