"""The case ``tiles``: the native kernel's time by tile size, for windows, documents and other patterns.

The kernel computes only the parts of a 128 x 128 tile that its mask allows, so the size should hardly matter; the case
checks this against smaller tiles. It measures processor time, so that other processes hardly matter.
"""

from __future__ import annotations

import random

import torch

import ringweave as rw
from ringweave.backends import cpu

from ...tune.measure import by_processor
from ...tune.problem import BOTH, FORWARD, Problem
from ...tune.search import Candidate
from ...tune.session import Say, Session, in_turn
from ..compare import weighed
from ..record import Measuring, Options, Target

_TILE_SIZES = ((128, 128), (64, 64), (32, 32))
# bound on the time with the usual tiles over the time with the best ones
_BOUND = 1.25


def documents(length: int, tokens: int) -> rw.Documents:
    """Return documents with random lengths from 0.5 to 1.5 times a length."""
    draw, lengths, left = random.Random(length), [], tokens
    while left:
        lengths.append(min(left, draw.randint(length // 2, length * 3 // 2)))
        left -= lengths[-1]
    return rw.Documents(lengths)


def patterns(tokens: int) -> dict[str, rw.Pattern]:
    """Return the measured patterns by name, from narrow to dense."""
    windows = {f"window {width}": rw.SlidingWindow(width) & rw.Causal() for width in (16, 32, 64, 128, 256, 512, 1024)}
    packed = {f"documents {n}": documents(n, tokens) & rw.Causal() for n in (16, 32, 64, 128, 256, 512)}
    return windows | packed | {
        "sinks + window 64": (rw.Sinks(4) | rw.SlidingWindow(64)) & rw.Causal(),
        "window 32 + 32": rw.SlidingWindow(32, 32),
        "causal": rw.Causal(),
        "full": rw.Full(),
    }  # fmt: skip


def measure(options: Options, say: Say) -> Measuring:
    """Check and time each pattern on tiles of several sizes in turn."""
    if cpu.module() is None:
        return "No native kernel ran here: ringweave was installed without a C++ compiler, or with wheel.cmake=false."
    worst = 0.0
    tokens, heads = (512, 1) if options.quick else (4096, 2)
    for head_dim in (64,) if options.quick else (64, 128):
        for dtype in (options.dtype,) if options.dtype else (torch.float32, torch.bfloat16):
            for name, pattern in [*patterns(options.tokens or tokens).items()][:: 6 if options.quick else 1]:
                problem = options.of(Problem(name, pattern, tokens, heads, head_dim, dtype=dtype))
                session = Session(problem.inputs(), say)
                for direction in (FORWARD, BOTH):
                    entries = [
                        session.check(problem, Candidate("cpu", size).peer(None, f"tiles of {size[0]}"), direction)
                        for size in _TILE_SIZES
                    ]
                    in_turn(entries, rounds=options.rounds or (1 if options.quick else 7), timer=by_processor)
                    for entry in entries:
                        yield weighed(entry, entries[0].timing)
                    least = [entry.timing.min for entry in entries if entry.timing is not None]
                    wrong = next((entry.reason for entry in entries if entry.timing is None), None)
                    cost = least[0] / min(least) if wrong is None else None
                    worst = max(worst, cost or 0.0)
                    what = f"{name}, {direction}, {str(dtype).removeprefix('torch.')}: tiles of 128 over the best"
                    bound = None if options.sized else _BOUND
                    yield Target(what, f"{problem.tokens:,} tokens, D {head_dim}", cost, bound, False, reason=wrong)
    return f"Tiles of 128 x 128 take at most {worst:.2f} times what the best of {len(_TILE_SIZES)} sizes take."
