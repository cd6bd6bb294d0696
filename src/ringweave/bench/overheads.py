"""What a kernel spends besides multiplying tiles: on sparse rows, on uneven ones, on strides, in memory.

Each is a ratio of two runs of the same kernel, timed in turn, after both were checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import ringweave as rw

from ..errors import RingweaveError
from .case import Options, Target
from .compare import Say, Session
from .measure import Timing, interleaved, peak_memory
from .peers import peers
from .workload import Inputs, Workload

_TILE = 128


def overheads(options: Options, dtypes: Sequence[torch.dtype], say: Say) -> list[Target]:
    """All of them, next to their targets; small sizes have none."""
    rounds = options.rounds or 3
    made: list[Target] = []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for measure in (_sparse, _uneven, _strided, _strided_backward):
            made.append(_or_reason(f"{name}, {measure.__name__[1:]}", measure, options, dtype, name, rounds, say))
    if torch.bfloat16 in dtypes:
        for backward in (False, True):
            made.append(_or_reason(f"bfloat16, memory, backward {backward}", _memory, options, backward, say))
    return made


def _or_reason(what: str, measure: Callable[..., Target], *given: object) -> Target:
    """A figure, or that the result was wrong: the other figures are then still of interest."""
    try:
        return measure(*given)
    except RingweaveError as error:
        return Target(what, "-", None, None, False, reason=str(error))


def _tokens(options: Options, whole: int) -> int:
    return options.tokens or (2048 if options.quick else whole)


def _bound(options: Options, bound: float) -> float | None:
    """At other sizes than the design's, no target."""
    return None if options.quick or options.tokens or options.heads else bound


def _per_tile(
    options: Options,
    dtype: torch.dtype,
    patterns: Mapping[str, rw.Pattern],
    tokens: int,
    heads: int,
    rounds: int,
    say: Say,
) -> list[float]:
    """Median forward time over tiles computed, in the patterns' order."""
    calls: dict[str, Callable[[], object]] = {}
    tiles = []
    for name, pattern in patterns.items():
        workload = Workload(name, pattern, tokens, heads, 64, 1, dtype, options.device)
        fields, call = Session(workload, workload.inputs(), say).check(peers("ringweave")[0], False)
        if call is None:
            raise RingweaveError(f"{name}: {fields['reason']}")
        calls[name] = call
        tiles.append(pattern.plan(tokens, heads=heads).tiles)
    say(f"{tokens:,} tokens, {dtype}: {', '.join(patterns)}")
    timings: list[Timing] = list(interleaved(calls, rounds=rounds, device=options.device, budget=20.0).values())
    return [timing.median / number for timing, number in zip(timings, tiles, strict=True)]


def _sparse(options: Options, dtype: torch.dtype, name: str, rounds: int, say: Say) -> Target:
    tokens, heads = _tokens(options, 32768), options.heads or (8 if options.full else 2)
    low = max(0.01, 1.25 * _TILE / tokens)
    patterns = {f"{density:.0%} of tiles": rw.random_blocks(tokens, density) for density in (0.5, low)}
    dense, sparse = _per_tile(options, dtype, patterns, tokens, heads, rounds, say)
    size = f"{tokens:,} tokens, {heads} heads, D 64"
    what = f"{name} forward: time per tile at density {low:.0%} over that at 50%"
    return Target(what, size, sparse / dense, _bound(options, 1.15), False)


def _uneven(options: Options, dtype: torch.dtype, name: str, rounds: int, say: Say) -> Target:
    tokens, heads = _tokens(options, 32768), options.heads or 2
    density = max(0.05, 1.25 * _TILE / tokens)
    even = rw.random_blocks(tokens, density)
    table = even.mask.clone()
    table[..., ::64, :] = True
    patterns = {"even rows": even, "one full row per 64": rw.BlockTable(table, _TILE)}
    without, with_full = _per_tile(options, dtype, patterns, tokens, heads, rounds, say)
    size = f"{tokens:,} tokens, {heads} heads, D 64, density {density:.0%}"
    what = f"{name} forward: time per tile with one full row per 64 over that without"
    return Target(what, size, with_full / without, _bound(options, 1.1), False)


def _strided_backward(options: Options, dtype: torch.dtype, name: str, rounds: int, say: Say) -> Target:
    return _strided(options, dtype, name, rounds, say, backward=True)


def _strided(
    options: Options, dtype: torch.dtype, name: str, rounds: int, say: Say, *, backward: bool = False
) -> Target:
    tokens, heads, rate = _tokens(options, 32768), options.heads or 8, 4
    inside = tokens // rate
    density = max(0.1, 1.25 * _TILE / inside)
    pattern = rw.random_blocks(inside, density)
    whole = Workload("view", pattern, tokens, heads, 64, 1, dtype, options.device).inputs()
    views = [x[:, :, ::rate] for x in whole]
    calls = {
        "strided": _call(Inputs(*views), pattern, backward),
        "contiguous": _call(Inputs(*(x.contiguous() for x in views)), pattern, backward),
    }
    for one, other in zip(*(call() for call in calls.values()), strict=True):
        _same(one, other, "a strided view")
    say(f"{tokens:,} tokens, {dtype}: every {rate}th in place, and contiguous")
    timings = interleaved(calls, rounds=max(rounds, 5), warmup=0, device=options.device, budget=20.0)
    speed = timings["contiguous"].median / timings["strided"].median
    direction = "forward + backward" if backward else "forward"
    size = f"{inside:,} of {tokens:,} tokens, {heads} heads, D 64, density {density:.0%}"
    what = f"{name} {direction}: speed of the view x[:, :, ::{rate}] over contiguous tensors"
    return Target(what, size, speed, _bound(options, 0.9), True)


def _call(inputs: Inputs, pattern: rw.Pattern, backward: bool) -> Callable[[], tuple[Tensor, ...]]:
    """Attention on tensors as they lie in memory."""
    q, k, v = (x.detach().requires_grad_(backward) for x in inputs[:3])

    def call() -> tuple[Tensor, ...]:
        out = rw.attention(q, k, v, pattern)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout)) if backward else (out,)

    return call


def _memory(options: Options, backward: bool, say: Say) -> Target:
    """What a call holds beyond what it was given and gives, as a share of those."""
    tokens, heads, window = _tokens(options, 262144), options.heads or 8, 256 if options.quick else 1024
    window = min(window, tokens // 4)
    pattern = rw.SlidingWindow(window)
    inputs = Workload("window", pattern, tokens, heads, 64, 1, torch.bfloat16, options.device).inputs()
    size = f"{tokens:,} tokens, {heads} heads, D 64, window {window:,}"
    if backward:
        what = "bfloat16 forward + backward: memory beyond q, k, v, out and gradients, of the gradients"
        given, share, bound = 4, 3, 0.10
    else:
        what, given, share, bound = "bfloat16 forward: memory beyond q, k, v and out, of these", 1, 4, 0.05
    say(f"{size}: {what}")
    call = _call(inputs, pattern, backward)
    _check_end(call()[0], inputs, pattern, window)
    peak = peak_memory(call, device=options.device, warm=False)
    figure = max(peak.nbytes - given * inputs.q.nbytes, 0) / (share * inputs.q.nbytes)
    return Target(what, size, figure, _bound(options, bound), False, "%")


def _check_end(out: Tensor, inputs: Inputs, pattern: rw.Pattern, window: int) -> None:
    """The last queries see the last keys only: the reference can compute them alone."""
    rows, keys = min(window, 512), min(window, 512) + window
    q, k, v = (x[:, :1, -number:] for x, number in zip(inputs, (rows, keys, keys), strict=False))
    exact = rw.attention(q, k, v, pattern, q_offset=keys - rows, backend="reference")
    _same(out[:, :1, -rows:], exact, "the window's last rows")


def _same(one: Tensor, other: Tensor, what: str) -> None:
    error = float((one.double() - other.double()).square().mean().sqrt())
    scale = float(other.double().square().mean().sqrt())
    if not error <= 4 * torch.finfo(one.dtype).eps * scale:
        raise RingweaveError(f"{what}: wrong, root mean square error {error:.1e} of {scale:.1e}; not timed")
