"""A rank of the case ``ring``: torchrun starts ``python -m ringweave_lab.bench.rank FOLDER SECONDS`` on both.

Options lie pickled in the folder, and there rank 0 leaves what was measured.
"""

from __future__ import annotations

import faulthandler
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ringweave as rw
from ringweave.parallel import ContextParallel, Transport
from ringweave.tune.measure import Call, Timing, by_clock
from ringweave.tune.problem import BOTH, Problem, Sample
from ringweave.tune.session import Built, Entry, Peer, Session, in_turn

from .compare import weighed
from .record import Options, Record, Target

WINDOW = 1024
PATTERN = rw.SlidingWindow(WINDOW) & rw.Causal()
_SPEED = 0.85
_HOW = "interleaved rounds"


@dataclass(frozen=True)
class Spread(Built):
    """Attention of this rank's shard; what is checked is put together, what is timed is not."""

    shard: Callable[[Tensor], Tensor] = torch.clone
    unshard: Callable[[Tensor], Tensor] = torch.clone

    def forward_backward(self, inputs: Sample) -> Callable[[], tuple[Tensor, ...]]:
        """Make a callable that gives the whole (out, dq, dk, dv)."""
        shards = self.call(inputs, BOTH)
        return lambda: tuple(map(self.unshard, shards()))

    def call(self, inputs: Sample, direction: str) -> Callable[[], tuple[Tensor, ...]]:
        """Make a callable that gives the shards' (out, dq, dk, dv)."""
        return super().forward_backward(Sample(*map(self.shard, inputs)))


def alone() -> Peer:
    """Make the peer of one rank that computes everything."""

    def build(problem: Problem, inputs: Sample) -> Built:
        return Built(lambda q, k, v: rw.attention(q, k, v, PATTERN), PATTERN, _HOW)

    return Peer("1 rank x 2 threads", "one process", lambda problem, backward: None, build)


def together(ctx: ContextParallel) -> Peer:
    """Make the peer of two ranks that share the sequence."""

    def build(problem: Problem, inputs: Sample) -> Built:
        return Spread(
            lambda q, k, v: rw.attention(q, k, v, PATTERN, context=ctx), PATTERN, _HOW, None,
            lambda x: ctx.shard(x, 2), lambda x: ctx.unshard(x, 2),
        )  # fmt: skip

    return Peer("2 ranks x 1 thread", "two processes", lambda problem, backward: None, build)


def measure(carrier: Transport, options: Options) -> list[Record]:
    """Time 2 ranks of 1 thread and 1 rank of 2 threads on the same work, in turn, once both are found right.

    What rank 0 returns counts.
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

    def timer(call: Call, times: int) -> float:
        torch.set_num_threads(2 if call is one.call else 1)
        # both begin at once; rank 1 waits for the next agreement, without a core, while rank 0 computes alone
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
    # the first round is for warming up; a round is over when the slower rank is
    one.learn(timing=Timing(one.timing.seconds[1:]))
    slower = (max(seconds) / 1e9 for seconds in zip(*(rank[2:] for rank in every), strict=True))
    two.learn(timing=Timing(tuple(slower)))
    return records(one, two, options, max(rank[0] for rank in every) / _full_ring(problem, ctx.size))


def records(one: Entry, two: Entry, options: Options, share: float | None = None) -> list[Record]:
    """File the two timings, their ratio next to its target, and the bytes that moved.

    Args:
        one: One rank.
        two: Two of them.
        options: Sizes that were asked for.
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


def _full_ring(problem: Problem, ranks: int) -> float:
    """Count a rank's bytes where all keys and values go around, and their gradients, in float32, back."""
    elements = problem.tokens * (ranks - 1) / ranks * problem.key_heads * 2 * problem.head_dim
    return elements * (problem.dtype.itemsize + 4)


def main() -> None:
    """Measure the type that the options name."""
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    # whatever happens to the launcher, no rank outlives its time
    faulthandler.dump_traceback_later(seconds, exit=True)
    options: Options = pickle.loads((folder / "options").read_bytes())
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    carrier = Transport(dist.group.WORLD, deadline=seconds, opening=seconds)
    found = measure(carrier, options)
    if carrier.rank == 0:
        (folder / "records").write_bytes(pickle.dumps(found))
    carrier.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
