"""Jobs of worker processes: attention over a context."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringweave as rw
from ringweave import program
from ringweave.errors import RingError
from ringweave.parallel import ContextParallel, Transport
from ringweave.parallel.execution.local_attention import LocalAttention
from ringweave.parallel.transport.rendezvous import regroup
from ringweave.patterns import Pattern

from ..oracle import Inputs
from . import spread
from .delayed import Delayed
from .processes import rendezvous, ring_error


def call(x: Inputs, pattern: Pattern, options: dict[str, Any]) -> spread.Share:
    """Make one call over the default group."""
    return spread.call(dist.group.WORLD, x, pattern, options)


def call_on_nodes(x: Inputs, pattern: Pattern, nodes: int) -> spread.Share:
    """Make one call over a mesh of nodes."""
    mesh = init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("node", "cp"))
    return spread.call(mesh, x, pattern, {})


def differing(name: str) -> tuple[str, tuple[Any, ...], int]:
    """Make a call that differs on rank 0."""
    from .test_context import differing

    return differing(dist.group.WORLD, name, "allgather")


def overlapped(latency: float) -> tuple[float, float, list[int], list[float]]:
    """Return the seconds of delay and of waiting, the computed stages, and the times of posting and computing in turn."""
    transport = Delayed(Transport(dist.group.WORLD), latency=latency)
    ctx = ContextParallel(transport, rw.Full(), 16384, heads=(2, 2), schedule="ring")
    q, k, v = (torch.randn(1, 2, ctx.local, 64) for _ in range(3))
    with ctx.trace() as trace:
        rw.attention(q, k, v, rw.Full(), context=ctx)
    ctx.close()
    posted = {event.stage: event.start for event in trace.events if (event.kind, event.what) == ("receive", "keys")}
    computed = [event for event in trace.events if event.kind == "compute"]
    order = [time for stage in range(3) for time in (posted[stage + 1], computed[stage].end)]
    return transport.flown, transport.slept, [event.stage for event in computed], order


class Survived(NamedTuple):
    """A survivor's error and its time, whether all earlier results were right, and the results after it regrouped."""

    error: RingError
    at: float
    right: bool
    regrouped: float | None
    after: Any


def killed(x: Inputs, pattern: Pattern, schedule: str, where: str, victim: int, regroups: bool) -> Survived:
    """Train until the victim dies in its second forward, in its second backward, or between two steps."""
    ctx = ContextParallel(dist.group.WORLD, pattern, x.q.shape[2], heads=(2, 2), schedule=schedule)
    leaves = [ctx.shard(t, 2).requires_grad_() for t in (x.q, x.k, x.v)]
    dout = ctx.shard(x.dout, 2)
    before: list[torch.Tensor] = []
    right = True
    try:
        for step in range(4):
            if step == 1 and ctx.rank == victim:
                _die(where)
            out = rw.attention(*leaves, pattern, context=ctx)
            found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
            right = right and all(torch.equal(a, b) for a, b in zip(found, before or found, strict=True))
            before = found
        raise AssertionError("no error")
    except RingError as error:
        seen, at = error, time.time()
    if not regroups:
        ctx.close()
        return Survived(seen, at, right, None, None)
    begin = time.monotonic()
    group = regroup(rendezvous(), ctx.rank, ctx.size, lost=[seen.peer] if seen.peer is not None else [])
    smaller = ctx.rebuild(group.group)
    took = time.monotonic() - begin
    after = spread.call(smaller.transport, x, pattern, {"schedule": schedule})
    smaller.close()
    return Survived(seen, at, right, took, after)


def _die(where: str) -> None:
    def at_once(*_: Any, **__: Any) -> Any:
        rendezvous().set("killed", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "between":
        at_once()
    # in the middle of a call: its messages are posted, but its results never arrive
    setattr(LocalAttention, where, at_once)


def causal(schedule: str, deadline: float) -> tuple[ContextParallel, list[torch.Tensor], Callable[[], None]]:
    """Return a context of all ranks, this rank's leaves, and a step of training over them."""
    ctx = ContextParallel(
        dist.group.WORLD, rw.Causal(), 700, heads=(1, 1), schedule=schedule, placement="zigzag", deadline=deadline
    )
    leaves = [torch.randn(1, 1, ctx.local, 8, requires_grad=True) for _ in range(3)]
    return ctx, leaves, lambda: rw.attention(*leaves, rw.Causal(), context=ctx).sum().backward()


def silent(schedule: str, where: str, victim: int, deadline: float) -> tuple[str, float]:
    """Let the victim sleep in its second kernel call, forward or backward; return each rank's error and the seconds until it.

    It sleeps until all others have their errors, however long that takes.
    """
    ctx, leaves, step = causal(schedule, deadline)
    # counts the ranks that have their error, of this job and those before
    told = "errors of a silent rank"
    all_told = rendezvous().add(told, 0) + ctx.size - 1
    calls = itertools.count(1)
    with mock.patch.dict(program.BACKENDS):
        step()
        # all start together
        ctx.unshard(leaves[0].detach(), 2)
        begin = time.monotonic()
        if ctx.rank == victim:
            for name, backend in [*program.BACKENDS.items()]:
                inner = getattr(backend, where)

                def late(*args: Any, inner: Any = inner, **options: Any) -> Any:
                    if next(calls) == 1:
                        while rendezvous().add(told, 0) < all_told:
                            time.sleep(0.05)
                    return inner(*args, **options)

                if inner is not None:
                    program.BACKENDS[name] = dataclasses.replace(backend, prepare=None, **{where: late})
        try:
            error = ring_error(lambda: [step() for _ in range(2)])
        finally:
            rendezvous().add(told, 1)
        seconds = time.monotonic() - begin
    ctx.close()
    return str(error), seconds


def raising(schedule: str, where: str, victim: int) -> tuple[list[str], float]:
    """Raise in the victim's second kernel call, forward or backward; return each rank's errors of two calls, and the seconds."""
    ctx, _, step = causal(schedule, 60.0)
    step()
    said, begin = [], time.monotonic()
    interrupted = mock.patch.object(LocalAttention, where, side_effect=KeyboardInterrupt("here"))
    with interrupted if ctx.rank == victim else nullcontext():
        for _ in range(2):
            try:
                step()
            except (RingError, KeyboardInterrupt) as error:
                said.append(str(error))
    ctx.close()
    return said, time.monotonic() - begin


def nested(schedule: str) -> list[str]:
    """Call the context from a signal handler that interrupts its call, on rank 0; check the call, and return the handler's errors."""
    pattern = rw.Causal()
    ctx = ContextParallel(dist.group.WORLD, pattern, 300, heads=(1, 1), schedule=schedule)
    shards = [torch.ones(1, 1, ctx.local, 8) for _ in range(3)]
    inner, said = LocalAttention.forward, list[str]()

    def interrupted(*args: Any, **options: Any) -> Any:
        for call in (lambda: rw.attention(*shards, pattern, context=ctx), lambda: ctx.unshard(shards[0], 2)):
            try:
                call()
            except rw.errors.UnsupportedError as error:
                said.append(str(error))
        return inner(*args, **options)

    with mock.patch.object(LocalAttention, "forward", interrupted if ctx.rank == 0 else inner):
        out = rw.attention(*shards, pattern, context=ctx)
    assert (ctx.unshard(out, 2) - 1).abs().max() < 1e-6
    ctx.close()
    return said


class Left(NamedTuple):
    """A survivor's view of one of several failures: whether its error named the lost rank, and the whole output after."""

    named: bool
    out: torch.Tensor


def killed_in_turn(x: Inputs, pattern: Pattern, victims: list[int]) -> list[Left]:
    """Kill ranks one after another, by index among the remaining ones; each time the others regroup and compute."""
    ctx = ContextParallel(dist.group.WORLD, pattern, x.q.shape[2], heads=(2, 2), schedule="allgather")
    size, found = ctx.size, []

    def output() -> torch.Tensor:
        return ctx.unshard(rw.attention(*(ctx.shard(t, 2) for t in (x.q, x.k, x.v)), pattern, context=ctx), 2)

    for victim in victims:
        output()
        if ctx.rank == victim:
            _die("forward")
        peer = ring_error(output).peer
        members, group = regroup(None, ctx.rank, size, lost=[] if peer is None else [peer])
        size = len(members)
        ctx = ctx.rebuild(group)
        found.append(Left(peer == victim, output()))
    ctx.close()
    return found


def replicated(x: Inputs, victim: int) -> bool:
    """After the victim's death, return whether the fallback equals one device's result; a call without it raises."""
    ctx = ContextParallel(dist.group.WORLD, rw.Causal(), x.q.shape[2], heads=(2, 2), schedule="allgather")
    want = rw.attention(x.q, x.k, x.v, rw.Causal())
    assert torch.equal(ctx.replicated(x.q, x.k, x.v, rw.Causal()), want)
    if ctx.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    exact = torch.equal(ctx.replicated(x.q, x.k, x.v, rw.Causal(), fallback="single"), want)
    ring_error(lambda: ctx.replicated(x.q, x.k, x.v, rw.Causal()))
    return exact


def scored(x: Inputs, pattern: rw.Pattern, schedule: str) -> list[Any]:
    """Make two calls with a term and dropout on ranks with generators in different states."""
    from .test_scored import made, share

    torch.manual_seed(100 + dist.get_rank())
    options = {"schedule": schedule, "placement": "zigzag", "dropout": 0.3}
    return [share(dist.group.WORLD, x, pattern, made("distance"), options) for _ in range(2)]
