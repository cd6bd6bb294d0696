"""The case ``ring``: speed and received bytes of context parallelism, and the planner's model of many ranks.

Two processes that torchrun starts on this machine, over Gloo, are timed next to one; figures of more ranks come from
the planning code. ``tests/parallel`` checks exactness, failures, and that no byte is sent needlessly.
"""

from __future__ import annotations

import dataclasses
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave.parallel.planning.choice import Choice, choose_placement
from ringweave.parallel.planning.cost import Machine
from ringweave.parallel.planning.placement import block_for
from ringweave.parallel.planning.workload import Widths, Workload
from ringweave.patterns import Pattern
from ringweave.plan import branches

from ...tune.measure import by_processor, interleaved
from ...tune.session import Say
from ..launched import LaunchError, run, torchrun
from ..record import Measuring, Options, Record, Target

# time limit of a launch in seconds, several times its duration on two idle cores
_LIMIT = 400.0
_TILE = 128
_LONG, _MILLION = 2048 * _TILE, 2**20
_HEADS = 32, 8
_BALANCE, _EFFICIENCY, _PLANNING = 1.05, 0.8, 50.0


def documents(tokens: int, seed: int, *, median: int = 2048, sigma: float = 1.2, longest: int = 32768) -> list[int]:
    """Return random document lengths that fill a sequence: log-normal as in corpora, cut at ``longest``."""
    generator = np.random.default_rng(seed)
    found: list[int] = []
    while sum(found) < tokens:
        length = int(np.exp(generator.normal(np.log(median), sigma)))
        found.append(min(max(length, 16), longest, tokens - sum(found)))
    return found


def _corpora(quick: bool) -> list[Pattern]:
    return [rw.Documents(documents(_LONG, seed)) & rw.Causal() for seed in range(1 if quick else 6)]


# name, patterns, tokens, heads, and the bound on the busiest of 8 ranks' bytes over a full ring's
_PLACED: tuple[tuple[str, Callable[[bool], list[Pattern]], int, tuple[int, int], float | None], ...] = (
    ("32-tile window", lambda quick: [rw.SlidingWindow(32 * _TILE) & rw.Causal()], _LONG, _HEADS, 0.02),
    ("documents", _corpora, _LONG, _HEADS, 0.30),
    ("dilated, rate 16", lambda quick: [rw.Dilated(512, 16)], _LONG, _HEADS, 0.0),
    ("longformer, two-sided", lambda quick: [rw.patterns.longformer(256, 1)], 512 * _TILE, (8, 8), 0.05),
    ("causal", lambda quick: [rw.Causal()], _LONG, _HEADS, None),
)
# name, pattern of a million tokens
_MODELLED: tuple[tuple[str, Callable[[], Pattern]], ...] = (
    ("4K window", lambda: rw.SlidingWindow(4096) & rw.Causal()),
    ("dilated, rate 16", lambda: rw.Dilated(512, 16)),
    ("documents of 8K", lambda: rw.Documents([8192] * (_MILLION // 8192)) & rw.Causal()),
)


def measure(options: Options, say: Say) -> Measuring:
    """Measure the figures, and compare them with their targets.

    ``tokens``, ``heads``, ``dtype`` and ``rounds`` apply to the comparison of speeds.

    Raises:
        UnsupportedError: The device is not the CPU.
    """
    if options.device != "cpu":
        raise UnsupportedError("device", repr(options.device), "'cpu'", "The ring is measured over Gloo.")
    targets: list[Target] = []
    for record in _records(options, say):
        targets += [record] if isinstance(record, Target) else []
        yield record
    missed = [each.what for each in targets if each.met is False or each.reason is not None]
    judged = sum(each.met is not None or each.reason is not None for each in targets)
    return f"{judged - len(missed)} of {judged} targets are met" + (f"; not: {'; '.join(missed)}." if missed else ".")


def _records(options: Options, say: Say) -> Iterator[Record]:
    yield from placements(options, say)
    yield planning(say)
    yield from modelled(options, say)
    for dtype in (options.dtype,) if options.dtype else (torch.float32, torch.bfloat16):
        say(f"two processes, {dtype}")
        yield from launch(dataclasses.replace(options, dtype=dtype))


def launch(options: Options) -> list[Record]:
    """Return the records of two processes; if they fail, the reason is a record."""
    with tempfile.TemporaryDirectory(prefix="ringweave-") as name:
        folder = Path(name)
        (folder / "options").write_bytes(pickle.dumps(options))
        try:
            run(
                torchrun(2, "-m", "ringweave_lab.bench.rank", folder, _LIMIT),
                threads=1,
                until=time.monotonic() + _LIMIT,
            )
        except LaunchError as error:
            return [Target("speed of 2 ranks", f"{options.dtype}", None, None, True, reason=f"wrong: {error}")]
        found: list[Record] = pickle.loads((folder / "records").read_bytes())
        return found


def chosen(pattern: Pattern, tokens: int, ranks: int, heads: tuple[int, int] = _HEADS) -> Choice:
    """Return the placement that a context would choose."""
    program = branches(pattern, tokens, tokens, heads=heads[0])
    return choose_placement(Workload([program], tokens, heads), ranks, block_for(tokens, ranks, _TILE))


def full_ring(tokens: int, ranks: int, key_heads: int) -> float:
    """Return the bytes that a rank receives if all keys and values go around the ring."""
    return tokens * (ranks - 1) / ranks * key_heads * Widths().bytes_of_key


def placements(options: Options, say: Say) -> Iterator[Target]:
    """Return the busiest rank's received bytes and the balance of work under the chosen placements."""
    for name, patterns, tokens, heads, bound in _PLACED:
        say(f"placing {name}")
        found = [chosen(pattern, tokens, 8, heads).estimate for pattern in patterns(options.quick)]
        size = f"{tokens // _TILE:,} tiles, 8 ranks, {heads[0]}:{heads[1]} heads, "
        # corpora with different lengths may have different placements
        size += f"{found[0].name} placement" if len(found) == 1 else f"worst of {len(found)} corpora"
        share = max(each.bytes_worst for each in found) / full_ring(tokens, 8, heads[1])
        if bound is not None:
            yield Target(f"G2 {name}: busiest rank's bytes over a full ring's", size, share, bound, False, "%")
        balance = max(each.imbalance for each in found)
        yield Target(f"G3 {name}: most work over mean", size, balance, _BALANCE, False)


def planning(say: Say) -> Target:
    """Time planning of windows with different widths, so that no plan is cached."""
    say("planning 8,192 tiles on 64 ranks")
    widths = iter(range(32 * _TILE, 0, -1))

    def plan() -> object:
        return chosen(rw.SlidingWindow(next(widths)) & rw.Causal(), 8192 * _TILE, 64)

    taken = interleaved({"plan": plan}, rounds=5, warmup=0, timer=by_processor)["plan"]
    size = "8,192 tiles, 64 ranks, plan and placement, best of 5, processor time"
    return Target("G11 planning of a window", size, taken.min * 1e3, _PLANNING, False, "ms")


def modelled(options: Options, say: Say) -> Iterator[Target]:
    """Return the efficiency on many GPUs, modelled from bytes and operations."""
    counts = (8, 256) if options.quick else (8, 32, 64, 128, 256)
    size = f"1M tokens, 32:8 heads, D 128, bfloat16, {counts[0]} to {counts[-1]} GPUs, modelled"
    for name, make in _MODELLED:
        say(f"modelling {name}")
        worst = min(chosen(make(), _MILLION, ranks).estimate.efficiency for ranks in counts)
        yield Target(f"model, {name}: efficiency", size, worst, _EFFICIENCY, True, "%")
    ideal = chosen(_MODELLED[0][1](), _MILLION, 256).estimate.ideal
    share = ideal * Machine().bandwidth / full_ring(_MILLION, 256, _HEADS[1])
    what = "model, 4K window: a full ring's efficiency"
    yield Target(what, "1M tokens, 256 GPUs, modelled", share, None, True, "%")
