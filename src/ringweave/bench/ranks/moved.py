"""G1, G4, G7, G8, G10: bytes against what must cross, memory, overlap, formats on the wire."""

from __future__ import annotations

import math

import numpy as np
import torch

import ringweave as rw

from ...parallel import ContextParallel, Placement, Trace, Transport
from ...patterns import Pattern
from ..case import Options, Target
from ..delayed import Delayed
from .exact import Inputs, patterns, spread
from .group import Ranks
from .least import Int64, between_nodes, between_ranks

_HEADS = 4, 2


def measure(ranks: Ranks, options: Options) -> list[Target]:
    """All of it, on every rank; rank 0's figures count."""
    torch.manual_seed(ranks.rank)
    return [
        *_payload(ranks, options),
        _metadata(ranks, options),
        _nodes(ranks, options),
        _memory(ranks, options),
        *_hidden(ranks, options),
        *_wire(ranks, options),
    ]


def over(received: Int64, least: Int64) -> float:
    """The worst message over what it must be; infinite where nothing had to come."""
    if (received[least == 0] != 0).any():
        return math.inf
    there = least > 0
    return float((received[there] / least[there]).max()) if there.any() else 1.0


def _payload(ranks: Ranks, options: Options) -> list[Target]:
    tokens = 1100 if options.quick else 4000
    x = Inputs.random(tokens, _HEADS, 32, torch.bfloat16)
    worst = {"gather": 0.0, "ring": 0.0}
    for name, pattern in patterns(tokens).items():
        for place in ("contiguous", "striped"):
            for schedule in worst:
                # where queries move instead, less crosses than keys would
                if schedule == "ring" and name == "bigbird":
                    continue

                def job(
                    carrier: Transport, pattern: Pattern = pattern, place: str = place, how: str = schedule
                ) -> tuple[list[int], Placement]:
                    ctx = ContextParallel(carrier, pattern, tokens, heads=_HEADS, schedule=how, placement=place)
                    carrier.counters.reset()
                    spread(ctx, x, pattern)
                    return list(carrier.counters.received), ctx.placement

                found = ranks.on(ranks.size, job)
                needed = between_ranks(pattern, found[0][1], _HEADS) * (32 + 32)
                # keys and values in bfloat16, their gradients in float32; the ring keeps no keys for backward
                least = needed * (2 if schedule == "gather" else 4) + needed.T * 4
                worst[schedule] = max(worst[schedule], over(np.array([each for each, _ in found]), least))
    size = f"{ranks.size} ranks, {tokens:,} tokens, {{}} patterns, 2 placements, forward and backward"
    return [
        Target("G1 gather: bytes of a message over the plan's least", size.format(6), worst["gather"], 1.0, False),
        Target(
            "G1 ring: the same, keys anew for backward (no queries move)", size.format(5), worst["ring"], 1.0, False
        ),
    ]


def _metadata(ranks: Ranks, options: Options) -> Target:
    tokens, pattern = 8192, rw.SlidingWindow(1024)
    x = Inputs.random(tokens, (4, 4), 32)

    def job(carrier: Transport) -> tuple[int, int]:
        ctx = ContextParallel(carrier, pattern, tokens, heads=(4, 4), schedule="gather")
        carrier.counters.reset()
        spread(ctx, x, pattern)
        return carrier.counters.metadata, sum(carrier.counters.received)

    shares = [metadata / payload for metadata, payload in ranks.on(4, job)]
    return Target("G1 agreements, of the payload", "4 ranks, 8,192 tokens, window 1,024", max(shares), 0.01, False, "%")


def _nodes(ranks: Ranks, options: Options) -> Target:
    tokens, nodes = 1100 if options.quick else 4000, 2
    per_node = ranks.size // nodes
    mesh = ranks.nodes(nodes)
    x = Inputs.random(tokens, _HEADS, 32)
    worst = 0.0
    for pattern in patterns(tokens).values():
        ctx = ContextParallel(mesh, pattern, tokens, heads=_HEADS, placement="zigzag", deadline=ranks.seconds)
        spread(ctx, x, pattern)
        received = np.array(ranks.gathered(list(ctx.transport.counters.received)))
        node = np.arange(ranks.size) // per_node
        across = received[node[:, None] != node].sum()
        # forward, and the gradients back: float32 both
        least = between_nodes(pattern, ctx.placement, _HEADS, per_node) * 2 * (32 + 32) * 4
        worst = max(worst, over(np.array([across]), np.array([least])))
        ctx.close()
    size = f"{nodes} nodes x {per_node} ranks, {tokens:,} tokens, 6 patterns, zigzag, forward and backward"
    return Target("G4 bytes between nodes over the nodes' unions", size, worst, 1.0, False)


def _memory(ranks: Ranks, options: Options) -> Target:
    tokens = 4096 if options.quick else 16384
    cases = {
        "full": (rw.Full(), "contiguous"),
        "causal": (rw.Causal(), "zigzag"),
        "window": (rw.SlidingWindow(3 * tokens // 16), "contiguous"),
    }
    worst = 0.0
    for pattern, place in cases.values():

        def job(carrier: Transport, pattern: Pattern = pattern, place: str = place) -> float:
            ctx = ContextParallel(carrier, pattern, tokens, heads=(1, 1), schedule="ring", placement=place)
            q, k, v = (torch.randn(1, 1, ctx.local, 64) for _ in range(3))
            carrier.counters.reset()
            rw.attention(q, k, v, pattern, context=ctx)
            shard = k.nbytes + v.nbytes
            return (shard + ctx.call.space.nbytes) / (shard + sum(sorted(carrier.counters.received)[-2:]))

        worst = max(worst, *ranks.on(4, job))
    size = f"4 ranks, {tokens:,} tokens; {', '.join(cases)}"
    return Target("G7 ring: live key/value bytes over shard + two stages", size, worst, 1.1, False)


def _hidden(ranks: Ranks, options: Options) -> list[Target]:
    """Messages that take half as long as the quickest stage computes."""
    tokens, pattern = 8192 if options.quick else 16384, rw.Full()

    def job(carrier: Transport) -> tuple[float, float, float, bool]:
        slow = Delayed(ranks.group(4), latency=0.0, deadline=ranks.seconds)
        ctx = ContextParallel(slow, pattern, tokens, heads=(2, 2), schedule="ring")
        q, k, v = (torch.randn(1, 2, ctx.local, 64) for _ in range(3))
        rw.attention(q, k, v, pattern, context=ctx)
        with ctx.trace() as trace:
            rw.attention(q, k, v, pattern, context=ctx)
        quickest = min(event.end - event.start for event in trace.events if event.kind == "compute")
        # the same on all four, told through the transport itself
        every = slow.agree(torch.tensor([int(quickest * 1e6)]), what="latency")
        slow.latency = 0.5 * int(every.min()) / 1e6
        slow.flown = slow.slept = 0.0
        with ctx.trace() as trace:
            rw.attention(q, k, v, pattern, context=ctx)
        found = slow.latency, slow.flown, slow.slept, _ahead(trace)
        ctx.close()
        return found

    found = ranks.on(4, job)
    size = f"4 ranks, {tokens:,} tokens, full, messages of {found[0][0] * 1e3:.0f} ms, half a stage's computation"
    hidden = min(1 - slept / flown for _, flown, slept, _ in found)
    ahead = sum(each[3] for each in found) / len(found)
    return [
        Target("G8 ring, forward: share of the messages' delay that is hidden", size, hidden, 0.9, True, "%"),
        Target("G8 ranks that post each receive before the stage before it", size, ahead, 1.0, True, "%"),
    ]


def _ahead(trace: Trace) -> bool:
    """Whether the message of every stage was posted before the stage before it was computed."""
    posted = {event.stage: event.start for event in trace.events if (event.kind, event.what) == ("receive", "keys")}
    computed = {event.stage: event.end for event in trace.events if event.kind == "compute"}
    return all(start < computed[stage - 1] for stage, start in posted.items() if stage)


def _wire(ranks: Ranks, options: Options) -> list[Target]:
    tokens, pattern, loose, tight = 1024, rw.SlidingWindow(200, 200), 0.02, 1e-6
    x = Inputs.random(tokens, (2, 2), 128, torch.bfloat16)

    def job(carrier: Transport) -> tuple[int, int, float, int, int, bool]:
        results, received = [], []
        for wire, tolerance in (("native", None), ("int8", loose), ("int8", tight)):
            ctx = ContextParallel(carrier, pattern, tokens, heads=(2, 2), wire=wire, tolerance=tolerance)
            carrier.counters.reset()
            with torch.no_grad():
                q, k, v = (ctx.shard(t, 2) for t in x[:3])
                results.append(rw.attention(q, k, v, pattern, context=ctx))
            received.append(sum(carrier.counters.received))
            if wire == "int8" and tolerance == loose:
                encoded = ctx.statistics
        refused = ctx.statistics.refused
        same = torch.equal(results[0], results[2]) and received[0] == received[2]
        return received[0], received[1], encoded.worst_error, encoded.messages["int8"], refused, same

    found = ranks.on(2, job)
    size = "2 ranks, 1,024 tokens, window, bfloat16, D 128, forward"
    assert all(coded and refused for *_, coded, refused, _ in found)
    share = max(coded / native for native, coded, *_ in found)
    error = max(each[2] for each in found)
    back = sum(each[5] for each in found) / len(found)
    return [
        Target("G10 int8: bytes over bfloat16's", size, share, 0.53, False),
        Target(
            "G10 int8: measured error of what was sent, over the tolerance",
            f"{size}, {loose}",
            error / loose,
            1.0,
            False,
        ),
        Target(
            "G10 above the tolerance: ranks with the bits and bytes of no encoding",
            f"{size}, {tight}",
            back,
            1.0,
            True,
            "%",
        ),
    ]
