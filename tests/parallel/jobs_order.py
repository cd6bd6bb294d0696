"""Jobs of test_order: ranks that make the same calls, in the same or in different orders."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringweave as rw
from ringweave.errors import RingError, UnsupportedError
from ringweave.parallel import ContextParallel, Transport

from .processes import ring_mesh

TOKENS, HEADS = 256, (2, 1)
WINDOW, CAUSAL = rw.SlidingWindow(40), rw.Causal()
# calls that differ in their data, or in their tags, only
COUNT = 3


def data(number: int) -> list[Tensor]:
    """Return the whole q, k and v of a call, equal on all ranks."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(1, heads, TOKENS, 8, generator=generator) for heads in (2, 1, 1)]


class Program:
    """The steps of a rank: forward and backward of some calls, a table, and whole tensors.

    Args:
        mesh: Of the context.
        schedule: Of the context.
        named: Whether calls have tags; else they have patterns, scales or lengths of their own.
    """

    def __init__(self, mesh: Any, schedule: str, named: bool) -> None:
        self.ctx = ContextParallel(mesh, [CAUSAL, WINDOW], TOKENS, heads=HEADS, schedule=schedule)
        self.named = named
        self.shards = [[self.ctx.shard(x, 2).requires_grad_() for x in data(number)] for number in range(COUNT)]
        self.outs: dict[int, Tensor] = {}

    def context(self, name: str) -> ContextParallel:
        return self.ctx.tagged(name) if self.named else self.ctx

    def arguments(self, number: int) -> tuple[rw.Pattern, float]:
        return (WINDOW, 0.3) if self.named else (CAUSAL if number == 1 else WINDOW, 0.3 + number)

    def do(self, step: tuple[str, int]) -> bool:
        """Run one step, and return whether its result is one device's."""
        kind, number = step
        whole = [x.requires_grad_() for x in data(number)]
        pattern, scale = self.arguments(number)
        if kind == "forward":
            ctx = self.context(f"call {number}")
            self.outs[number] = rw.attention(*self.shards[number], pattern, scale=scale, context=ctx)
            return self.same(self.outs[number], rw.attention(*whole, pattern, scale=scale))
        if kind == "backward":
            out = rw.attention(*whole, pattern, scale=scale)
            want = torch.autograd.grad(out.square().sum(), whole)
            found = torch.autograd.grad(self.outs[number].square().sum(), self.shards[number])
            return all(self.same(a, b) for a, b in zip(found, want, strict=True))
        if kind == "shards":
            x = data(number)[0][:, :, :, : 8 if self.named else 8 - number]
            return torch.equal(self.context(f"shards {number}").unshard(self.ctx.shard(x, 2), 2), x)
        side = self.ctx.placement.block
        table = data(10 + number)[0][0, 0, : TOKENS // side, :1] > 0
        table = table.repeat(1, TOKENS // side)
        rows = table[(self.ctx.positions[::side] // side).clamp(max=len(table) - 1)]
        pending = self.context(f"table {number}").share_table(rows, side, version=0 if self.named else number)
        return torch.equal(pending.result().mask, table)

    def same(self, found: Tensor, whole: Tensor) -> bool:
        return torch.allclose(found, self.ctx.shard(whole.detach(), 2), atol=1e-4)


def steps(seed: int) -> list[tuple[str, int]]:
    """Draw a program: some steps in random order, each backward after its forward."""
    source = random.Random(seed)
    calls = [("forward", number) for number in range(COUNT)] + [("backward", number) for number in range(COUNT)]
    others = [(kind, number) for kind in ("shards", "table") for number in range(2)]
    return shuffled(calls + source.sample(others, 3), source)


def shuffled(program: list[tuple[str, int]], source: random.Random) -> list[tuple[str, int]]:
    """Return another order of a program, in which each backward still comes after its forward."""
    again = source.sample(program, len(program))
    for number in range(COUNT):
        first, second = sorted((again.index(("forward", number)), again.index(("backward", number))))
        again[first], again[second] = ("forward", number), ("backward", number)
    return again


def follow(mesh: Any, seed: int, other: int | None, schedule: str, named: bool) -> tuple[list[bool], str | None]:
    """Run a program's steps, on rank ``other`` in another order; return whether each was right, and the error that ended it."""
    program = Program(mesh, schedule, named)
    order = steps(seed)
    if program.ctx.rank == other:
        order = shuffled(order, random.Random(seed + 1000))
    right: list[bool] = []
    try:
        for step in order:
            right.append(program.do(step))
    except RingError as error:
        return right, str(error)
    finally:
        if mesh is dist.group.WORLD:
            program.ctx.close()
    return right, None


def follow_all(seeds: list[int]) -> list[tuple[list[bool], str | None]]:
    return [
        follow(dist.group.WORLD, seed, seed % 3, "allgather" if seed % 2 else "ring", seed % 4 > 1) for seed in seeds
    ]


def told(call: Callable[[], Any]) -> RingError | None:
    try:
        call()
    except RingError as error:
        return error
    return None


def backward_in_another_order(how: str) -> tuple[str | None, bool]:
    """Compute gradients of two equal calls, in an order that differs between ranks; with "alike" in `how`, in one order."""
    torch.compiler.reset()
    ctx = ContextParallel(dist.group.WORLD, WINDOW, TOKENS, heads=HEADS)
    inputs = [[ctx.shard(x, 2).requires_grad_() for x in data(number)] for number in (0, 1)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rw.attention(2 * q, k, v, WINDOW, context=ctx)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager") if "compiled" in how else attend
    if "again" in how:
        outs = [checkpoint(compiled, *leaves, use_reentrant=False) for leaves in inputs]
    else:
        outs = [compiled(*leaves) for leaves in inputs]
    order = [0, 1] if "alike" in how or ctx.rank else [1, 0]
    found: dict[int, Any] = {}

    def run() -> None:
        for number in order:
            found[number] = torch.autograd.grad(outs[number].square().sum(), inputs[number])

    error = told(run)
    right = []
    for number, gradients in found.items():
        whole = [x.requires_grad_() for x in data(number)]
        want = torch.autograd.grad(rw.attention(2 * whole[0], *whole[1:], WINDOW).square().sum(), whole)
        right += [torch.allclose(a, ctx.shard(b, 2), atol=1e-4) for a, b in zip(gradients, want, strict=True)]
    ctx.close()
    return None if error is None else error.cause, all(right)


def contexts_in_another_order(made: bool) -> list[str | None]:
    """Use two equal contexts in another order on rank 1; if `made`, they were also made in another order."""
    turned = dist.get_rank() == 1
    contexts = [ContextParallel(dist.group.WORLD, WINDOW, TOKENS, heads=HEADS) for _ in range(2 + (made and turned))]
    order = contexts[-1:-3:-1] if turned and not made else contexts[-2:]
    causes = []
    for ctx, x in zip(order, (0, 1), strict=True):
        shards = [ctx.shard(t, 2) for t in data(x)]
        error = told(lambda: rw.attention(*shards, WINDOW, context=ctx))  # noqa: B023
        causes.append(None if error is None else error.cause)
    for ctx in contexts:
        ctx.close()
    return causes


def two_threads(calls: int, late: bool, deadline: float) -> dict[str, Any]:
    """Two threads call one context without synchronisation; on rank 1 the second one starts first."""
    ctx = ContextParallel(dist.group.WORLD, WINDOW, TOKENS, heads=HEADS, deadline=deadline)
    if not late:
        # connect first, so that calls are short
        rw.attention(*(ctx.shard(x, 2) for x in data(0)), WINDOW, context=ctx)
    right: list[bool] = []
    errors: list[RingError] = []
    wanted = [rw.attention(*data(number), WINDOW) for number in (0, 1)]

    def work(number: int) -> None:
        time.sleep(0.1 * (number ^ dist.get_rank()) * late)
        shards = [ctx.shard(x, 2) for x in data(number)]
        for _ in range(calls):
            try:
                out = rw.attention(*shards, WINDOW, context=ctx)
            except RingError as error:
                errors.append(error)
                return
            right.append(torch.allclose(out, ctx.shard(wanted[number], 2), atol=1e-5))

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begin
    ctx.close()
    return {"right": right, "causes": [error.cause for error in errors], "texts": list(map(str, errors)), "s": seconds}


def one_thread_after_the_other() -> list[bool]:
    """Run forward and backward in different threads, also of a pool of one; rank 1 has more threads and pools than rank 0."""
    ctx = ContextParallel(dist.group.WORLD, WINDOW, TOKENS, heads=HEADS, deadline=5.0)
    done = threading.Event()
    loggers = [threading.Thread(target=done.wait) for _ in range(2 * dist.get_rank())]
    pools = [ThreadPoolExecutor(1) for _ in range(1 + dist.get_rank())]
    for logger in loggers:
        logger.start()
    leaves = [ctx.shard(x, 2).requires_grad_() for x in data(0)]
    whole = [x.requires_grad_() for x in data(0)]
    out = rw.attention(*whole, WINDOW)
    want = [ctx.shard(x, 2) for x in (out.detach(), *torch.autograd.grad(out.sum(), whole))]
    right: list[bool] = []

    def forward() -> None:
        outs.append(rw.attention(*leaves, WINDOW, context=ctx))

    def backward() -> None:
        found = [outs[-1].detach(), *torch.autograd.grad(outs[-1].sum(), leaves)]
        right.extend(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, want, strict=True))

    outs: list[Tensor] = []
    for step in (forward, backward) * 3:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    for step in (forward, backward):
        pools[-1].submit(step).result()
    forward()
    backward()
    done.set()
    for pool in pools:
        pool.shutdown()
    for logger in loggers:
        logger.join()
    ctx.close()
    return right


def groups_that_are_gone() -> dict[str, str]:
    """Return the errors of contexts for destroyed groups, their mesh, None, and a group without this rank."""
    mesh = ring_mesh()
    default, sub, others = dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0])
    said = {}

    def make(name: str, group: Any) -> None:
        try:
            ctx = ContextParallel(group, WINDOW, TOKENS, heads=HEADS)
            said[name] = "made"
            ctx.close()
        except UnsupportedError as error:
            said[name] = str(error)

    make("others", others)
    dist.destroy_process_group(sub)
    make("sub", sub)
    dist.destroy_process_group()
    make("default", default)
    make("mesh", mesh)
    make("none", dist.group.WORLD)
    # a caller may confirm that it is meant
    ContextParallel(Transport(None), WINDOW, TOKENS, heads=HEADS)
    return said
