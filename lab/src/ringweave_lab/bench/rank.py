"""Run one rank of the case ``ring``: torchrun starts ``python -m ringweave_lab.bench.rank FOLDER SECONDS`` twice.

The folder contains the pickled options, and rank 0 writes the pickled records there.
"""

from __future__ import annotations

import faulthandler
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave.parallel import ContextParallel, Transport

from ..tune.measure import Runnable, Timing, by_clock
from ..tune.problem import BOTH, Problem, Sample
from ..tune.session import Built, Entry, Peer, Session, in_turn
from .compare import weighed
from .record import Options, Record, Target

WINDOW = 1024
PATTERN = rw.SlidingWindow(WINDOW) & rw.Causal()
_SPEED = 0.85
_HOW = "interleaved rounds"


@dataclass(frozen=True)
class Spread(Built):
    """Attention on this rank's shard; checks gather the shards of all ranks, timed calls do not."""

    shard: Callable[[Tensor], Tensor] = torch.clone
    unshard: Callable[[Tensor], Tensor] = torch.clone

    def forward_backward(self, inputs: Sample) -> Callable[[], tuple[Tensor, ...]]:
        """Return a callable that returns the gathered (out, dq, dk, dv)."""
        shards = self.call(inputs, BOTH)
        return lambda: tuple(map(self.unshard, shards()))

    def call(self, inputs: Sample, direction: str) -> Callable[[], tuple[Tensor, ...]]:
        """Return a callable that returns (out, dq, dk, dv) of this rank's shard."""
        return super().forward_backward(Sample(*map(self.shard, inputs)))


def alone() -> Peer:
    """Return the peer in which one rank computes everything."""

    def build(problem: Problem, inputs: Sample) -> Built:
        return Built(lambda q, k, v: rw.attention(q, k, v, PATTERN), PATTERN, _HOW)

    return Peer("1 rank x 2 threads", "one process", lambda problem, backward: None, build)


def together(ctx: ContextParallel) -> Peer:
    """Return the peer in which two ranks share the sequence."""

    def build(problem: Problem, inputs: Sample) -> Built:
        return Spread(
            lambda q, k, v: rw.attention(q, k, v, PATTERN, context=ctx), PATTERN, _HOW, None,
            lambda x: ctx.shard(x, 2), lambda x: ctx.unshard(x, 2),
        )  # fmt: skip

    return Peer("2 ranks x 1 thread", "two processes", lambda problem, backward: None, build)


def measure(carrier: Transport, options: Options) -> list[Record]:
    """Check 2 ranks of 1 thread and 1 rank of 2 threads on the same problem, and time them in turn.

    Rank 0 returns the records; other ranks return an empty list.
    """
    dtype = options.dtype or torch.float32
    name = str(dtype).removeprefix("torch.")
    problem = options.of(Problem(f"window, {name}", PATTERN, 8192 if options.quick else 32768, dtype=dtype))
    ctx = ContextParallel(carrier, PATTERN, problem.tokens, heads=(problem.heads, problem.key_heads))
    session = Session(problem.inputs())
    torch.set_num_threads(1)
    one, two = entries = [session.check(problem, peer, BOTH) for peer in (alone(), together(ctx))]
    wrong = [entry.call is None for entry in entries]
    if carrier.agree(torch.tensor(wrong).long(), what="speed").any():
        return records(one, two, options)

    def timer(call: Runnable, times: int) -> float:
        torch.set_num_threads(2 if call is one.call else 1)
        # both start together; while rank 0 computes alone, rank 1 waits for the next agreement without using a core
        carrier.agree(torch.zeros(1, dtype=torch.int64), what="speed")
        return by_clock(call, times) if call is two.call or ctx.rank == 0 else 0.0

    carrier.counters.reset()
    assert two.call is not None
    two.call()
    received = sum(carrier.counters.received)
    in_turn(entries, rounds=1 + (options.rounds or (3 if options.quick else 7)), timer=timer)
    assert one.timing is not None
    assert two.timing is not None
    mine = torch.tensor([received, *(round(1e9 * seconds) for seconds in two.timing.seconds)])
    every = carrier.agree(mine, what="figures").tolist()
    if ctx.rank:
        return []
    # the first round warms up; a round ends when the slower rank ends
    one.learn(timing=Timing(one.timing.seconds[1:]))
    slower = (max(seconds) / 1e9 for seconds in zip(*(rank[2:] for rank in every), strict=True))
    two.learn(timing=Timing(tuple(slower)))
    full = _full_ring(problem.tokens, ctx.size, problem.key_heads, dtype, problem.head_dim)
    return records(one, two, options, max(rank[0] for rank in every) / full)


def modules(carrier: Transport, options: Options) -> list[Record]:
    """Check modules that choose their keys on 2 ranks against 1, time them in turn, and count the received bytes.

    Rank 0 returns the records; other ranks return an empty list.
    """
    tokens, width = 1024 if options.quick else 8192, 1024
    kinds: tuple[tuple[str, Callable[..., torch.nn.Module], dict[str, Any]], ...] = (
        ("MoBA, 3 of 16 blocks", rw.nn.MixtureOfBlockAttention,
         {"num_kv_heads": 4, "block_size": tokens // 16, "top_k": 3}),
        ("NSA", rw.nn.NativeSparseAttention, {"num_kv_heads": 1}),
    )  # fmt: skip
    found: list[Record] = []
    for name, make, given in kinds:
        ctx = ContextParallel(carrier, rw.Causal(), tokens, heads=(16, given["num_kv_heads"]))
        torch.manual_seed(0)
        one, x = make(width, 16, rotary_base=1e4, **given), torch.randn(1, tokens, width)
        two = make(width, 16, rotary_base=1e4, context=ctx, **given)
        two.load_state_dict(one.state_dict())
        calls = {1: _trained(one, x), 2: _trained(two, ctx.shard(x))}
        apart = [bool(torch.allclose(ctx.unshard(calls[2]()), calls[1](), rtol=1e-4, atol=1e-4))]
        if not carrier.agree(torch.tensor(apart).long(), what="modules").all():
            raise UnsupportedError(name, "another result on 2 ranks", "the same", "Report it.")
        carrier.counters.reset()
        calls[2]()
        received = torch.tensor([sum(carrier.counters.received)])
        share = int(carrier.agree(received, what="bytes").max()) / _full_ring(tokens, ctx.size, ctx.heads[1], x.dtype)
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(options.rounds or (2 if options.quick else 5)):
            for ranks, call in calls.items():
                torch.set_num_threads(2 if ranks == 1 else 1)
                carrier.agree(torch.zeros(1, dtype=torch.int64), what="speed")
                mine = by_clock(call) if ranks == 2 or ctx.rank == 0 else 0.0
                every = carrier.agree(torch.tensor([round(1e9 * mine)]), what="figures")
                seconds[ranks].append(int(every.max()) / 1e9)
        size = f"{tokens:,} tokens, 16 heads over {given['num_kv_heads']} of 64, forward + backward"
        speed = Timing(tuple(seconds[1])).median / Timing(tuple(seconds[2])).median
        found += [
            Target(f"{name}: speed of 2 ranks x 1 thread over 1 rank x 2 threads", size, speed, None, True),
            Target(f"{name}: bytes that the busier rank receives over a full ring's", size, share, None, False, "%"),
        ]
    return found if carrier.rank == 0 else []


def _trained(layer: torch.nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Return a callable that differentiates a module's output and returns it."""
    x = x.clone().requires_grad_()

    def step() -> Tensor:
        out: Tensor = layer(x)
        out.square().sum().backward()
        return out.detach()

    return step


def records(one: Entry, two: Entry, options: Options, share: float | None = None) -> list[Record]:
    """Return the records of the two timings, of their ratio and its target, and of the received bytes.

    Args:
        one: Entry of one rank.
        two: Entry of two ranks.
        options: Requested sizes.
        share: Bytes that the busier rank received over those of a full ring.
    """
    problem = two.problem
    name = str(problem.dtype).removeprefix("torch.")
    size = f"{problem.tokens:,} tokens, window {WINDOW:,}, {problem.heads} heads, D 64, forward + backward"
    what = f"{name}: speed of 2 ranks x 1 thread over 1 rank x 2 threads"
    if one.timing is None or two.timing is None:
        reason = two.reason or one.reason or "wrong: another rank found it so; not timed"
        return [Target(what, size, None, None, True, reason=reason)]
    bound = None if options.sized else _SPEED
    moved = f"{name}: bytes that the busier rank receives over a full ring's"
    return [
        weighed(one, one.timing),
        weighed(two, one.timing),
        Target(what, size, one.timing.median / two.timing.median, bound, True),
        Target(moved, size, share, None, False, "%"),
    ]


def _full_ring(tokens: int, ranks: int, key_heads: int, dtype: torch.dtype, head_dim: int = 64) -> float:
    """Return the bytes that a rank receives if all keys and values, and their float32 gradients, go around the ring."""
    return tokens * (ranks - 1) / ranks * key_heads * 2 * head_dim * (dtype.itemsize + 4)


def main() -> None:
    """Measure with the options of the folder, and write the records."""
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    # ends this rank after its time even if the launcher is gone
    faulthandler.dump_traceback_later(seconds, exit=True)
    options: Options = pickle.loads((folder / "options").read_bytes())
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    carrier = Transport(dist.group.WORLD, deadline=seconds, opening=seconds)
    found = measure(carrier, options)
    if options.dtype is None or options.dtype is torch.float32:
        found += modules(carrier, options)
    if carrier.rank == 0:
        (folder / "records").write_bytes(pickle.dumps(found))
    carrier.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
