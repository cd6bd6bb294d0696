"""One of the two ranks of the case ``ring``: torchrun starts ``python -m ringweave.bench.rank FOLDER SECONDS`` on both.

Options lie pickled in the folder, and there rank 0 leaves what was measured.
"""

from __future__ import annotations

import faulthandler
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ringweave as rw

from ..parallel import ContextParallel, Transport
from .case import Options, Target
from .compare import Outcome, outcome
from .measure import Call, Timing, by_clock, interleaved, ratio
from .workload import Inputs, Oracle, Workload, sample_rows

WINDOW = 1024
_SPEED = 0.85
_NOTHING = torch.zeros(1, dtype=torch.int64)


def measure(carrier: Transport, options: Options) -> list[Target | Outcome]:
    """Time 2 ranks of 1 thread and 1 rank of 2 threads on the same work, in turn, once the former are found right."""
    tokens = options.tokens or (8192 if options.quick else 32768)
    pattern = rw.SlidingWindow(WINDOW) & rw.Causal()
    dtype = options.dtype or torch.float32
    name = str(dtype).removeprefix("torch.")
    work = Workload(f"window, {name}", pattern, tokens, options.heads or 8, 64, 1, dtype)
    inputs = work.inputs()
    ctx = ContextParallel(carrier, pattern, tokens, heads=(work.heads, work.key_heads))
    wrong = _wrong(ctx, work, inputs)
    if int(carrier.agree(torch.tensor([wrong is not None]).long(), what="speed").max()):
        return records(work, wrong, [], [], options)
    shards = Inputs(*(ctx.shard(x, 2) for x in inputs))

    def alone() -> object:
        # rank 1 waits for the next agreement, without a core
        return _call(inputs, pattern) if ctx.rank == 0 else None

    def together() -> object:
        return _call(shards, pattern, ctx)

    def timer(call: Call, times: int) -> float:
        torch.set_num_threads(1 if call is together else 2)
        carrier.agree(_NOTHING, what="speed")
        return by_clock(call, times)

    carrier.counters.reset()
    together()
    received = sum(carrier.counters.received)
    rounds = options.rounds or (3 if options.quick else 7)
    found = interleaved({"alone": alone, "together": together}, rounds=rounds, timer=timer)
    mine = torch.tensor([received, *(round(1e9 * seconds) for seconds in found["together"].seconds)])
    every = carrier.agree(mine, what="figures").tolist()
    # a round is over when the slower rank is
    both = [max(seconds) / 1e9 for seconds in zip(*(figures[1:] for figures in every), strict=True)]
    share = max(figures[0] for figures in every) / _full_ring(work, ctx.size)
    return records(work, None, list(found["alone"].seconds), both, options, share)


def records(
    work: Workload, wrong: str | None, one: list[float], two: list[float], options: Options, share: float | None = None
) -> list[Target | Outcome]:
    """The two timings, their ratio next to its target, and the bytes that moved.

    Args:
        work: What was computed.
        wrong: What is wrong with the two ranks' result; None where it is right.
        one: Seconds of one rank.
        two: Seconds of two.
        options: Sizes that were asked for.
        share: Bytes that the busier rank received over those of a full ring.
    """
    name = str(work.dtype).removeprefix("torch.")
    size = f"{work.tokens:,} tokens, window {WINDOW:,}, {work.heads} heads, D 64, forward + backward"
    what = f"{name}: speed of 2 ranks x 1 thread over 1 rank x 2 threads"
    if wrong is not None:
        return [Target(what, size, None, None, True, reason=f"wrong: {wrong}; not timed")]
    alone, together = Timing(tuple(one)), Timing(tuple(two))
    found: list[Target | Outcome] = []
    for peer, timing in (("1 rank x 2 threads", alone), ("2 ranks x 1 thread", together)):
        fields = {
            "timing": timing, "over_first": ratio(timing, alone), "how": "interleaved rounds",
            "gflops": work.flops(backward=True) / timing.median / 1e9,
        }  # fmt: skip
        found.append(outcome(work, "forward + backward", peer, fields))
    # at other sizes than the design's, no target
    bound = None if options.quick or options.tokens or options.heads else _SPEED
    found.append(Target(what, size, alone.median / together.median, bound, True))
    return [
        *found,
        Target(f"{name}: bytes that the busier rank receives over a full ring's", size, share, None, False, "%"),
    ]


def _full_ring(work: Workload, ranks: int) -> float:
    """Bytes that a rank receives where all keys and values go around, and their gradients, in float32, back."""
    elements = work.tokens * (ranks - 1) / ranks * work.key_heads * 2 * work.head_dim
    return elements * (work.dtype.itemsize + 4)


def _call(x: Inputs, pattern: rw.Pattern, context: ContextParallel | None = None) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv)."""
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    out = rw.attention(q, k, v, pattern, context=context)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), x.dout))


def _wrong(ctx: ContextParallel, work: Workload, inputs: Inputs) -> str | None:
    """What is wrong with the two ranks' result, by the float64 oracle on some rows; rank 0 looks."""
    torch.set_num_threads(1)
    oracle = Oracle(work.pattern, inputs, sample_rows(work.tokens))
    shards = Inputs(*(ctx.shard(x, 2) for x in oracle.sliced))
    found = [ctx.unshard(x, 2) for x in _call(shards, work.pattern, ctx)]
    return None if ctx.rank else oracle.check_gradients(*found).excess(oracle.limit)


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
