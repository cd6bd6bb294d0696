"""G9: ranks kill themselves with SIGKILL in the midst of steps; the others tell when they knew, regroup, and go on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch

import ringweave as rw

from ...errors import RingError
from ...ops import cpu
from ...parallel import ContextParallel, Transport, regroup
from ..case import Options, Target
from ..compare import Outcome
from .exact import Inputs, attend, spread, whole
from .group import Ranks

_TOKENS, _HEADS = 2048, (4, 2)
_PATTERN = rw.SlidingWindow(600) & rw.Causal() | rw.Sinks(64) & rw.Causal()
# seconds into the steps, one for each kill: what is interrupted is left to chance, and told by the error
_MOMENTS = (0.31, 0.52, 0.43, 0.64, 0.35, 0.57)


def measure(ranks: Ranks, options: Options, folder: Path) -> list[Target | Outcome]:
    """Kill all but two ranks, one after the other. Survivors write; nothing is returned."""
    torch.set_num_threads(1)
    ranks.hang_up()
    # the launcher ends everybody as soon as one is lost: who survives is what is looked at
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    x = Inputs.random(_TOKENS, _HEADS, 32)
    want = attend(x, _PATTERN)
    rank, size, group = ranks.rank, ranks.size, ranks.group(ranks.size)
    carrier = Transport(group, deadline=20.0, opening=ranks.seconds)
    ctx = ContextParallel(carrier, _PATTERN, _TOKENS, heads=_HEADS, schedule="gather")
    told = folder / f"survivor-{os.getpid()}.jsonl"
    for number, moment in enumerate(_MOMENTS[: ranks.size - 2]):
        victim = (number * 3 + 1) % size
        killed = folder / f"killed-{number}"
        _step(ctx, x)
        if rank == victim:
            threading.Timer(moment, _die, (killed,)).start()
        right = True
        try:
            while True:
                right = right and _same(_step(ctx, x), want[0])
        except RingError as error:
            at, found = time.time(), error
        seconds = at - float(killed.read_text())
        begun = time.monotonic()
        members, group = regroup(None, rank, size, lost=[victim if found.peer is None else found.peer])
        again = time.monotonic() - begun
        rank, size = members.index(rank), len(members)
        ctx = ctx.rebuild(group)
        line = {
            "kill": number, "step": found.step, "stage": found.stage, "cause": found.cause,
            "named": found.peer == victim, "seconds": seconds, "regroup": again, "before": right,
            "exact": _same(_step(ctx, x), want[0]),
        }  # fmt: skip
        with told.open("a") as file:
            file.write(json.dumps(line) + "\n")
    ctx.close()
    # torch's own farewell waits for ranks that are gone
    os._exit(0)


def _step(ctx: ContextParallel, x: Inputs) -> torch.Tensor:
    """Forward and backward; the whole output."""
    return whole(ctx, spread(ctx, x, _PATTERN)[:1])[0]


def _same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """By bits, which the native kernel promises; else as exact as float32 is."""
    return torch.equal(found, want) if cpu.module() is not None else torch.allclose(found, want, 1e-5, 1e-5)


def _die(killed: Path) -> None:
    killed.write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def read(folder: Path, size: int, kills: int) -> list[Target]:
    """The figures of what survivors have written.

    Args:
        folder: Where they did.
        size: Ranks at first.
        kills: How many were to be killed.
    """
    lines = [json.loads(line) for path in folder.glob("survivor-*.jsonl") for line in path.read_text().splitlines()]
    wanted = sum(size - 1 - number for number in range(kills))
    if len(lines) != wanted:
        # a survivor that hangs is what must not be
        reason = f"wrong: {len(lines)} of {wanted} survivors came to an end"
        return [Target("G9 kill -9: survivors that raise and go on", f"{size} ranks", None, None, True, reason=reason)]
    slowest = max(line["seconds"] for line in lines)
    where = f"{kills} kills on {size} to {size - kills + 1} ranks, {wanted} survivors' lines"
    right = sum(line["before"] and line["exact"] for line in lines) / wanted
    named = sum(line["named"] for line in lines) / wanted
    return [
        Target("G9 kill -9 within a step: slowest survivor's RingError", where, slowest, 2.0, False, "s"),
        Target("G9 slowest regroup", where, max(line["regroup"] for line in lines), 3.0, False, "s"),
        Target("G9 errors that name the lost rank", where, named, 1.0, True, "%"),
        Target("G9 outputs before and after that are one device's", where, right, 1.0, True, "%"),
    ]
