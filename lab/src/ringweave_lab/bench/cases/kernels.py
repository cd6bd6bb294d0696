"""The case ``kernels`` on a CPU: the share of the processor's peak that a kernel reaches, by density, size and type.

All densities of one size are timed in turn with each other and with their peers, so that every ratio is of one run.
The peak is a loop of fused multiply-adds in registers on the same number of threads, taken before each size of the same
run; the best until then counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch

import ringweave as rw
from ringweave.backends import cpu

from ...tune.measure import Runnable, interleaved
from ...tune.problem import BOTH, FORWARD, Problem, RandomBlocks, Sample
from ...tune.session import Entry, Say, Session, in_turn
from ..compare import Comparison, outcomes
from ..fma import fma_peak, why_no_peak
from ..peers import peers
from ..record import Measuring, Options, Outcome, Rule, Target, over_first, targets

_TILE = 128
_DENSE_TOKENS = 16384
_ALL = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
_BUDGET = 60.0


def _size(
    tokens: int,
    densities: tuple[float, ...],
    *others: str,
    head_dim: int = 64,
    heads: int = 8,
    kv_heads: int | None = None,
    rounds: int = 2,
) -> Comparison:
    """Return the comparison of ringweave and its peers on one size at some densities."""
    problems = (
        Problem(f"random {density:.0%}", RandomBlocks(density), tokens, heads, head_dim, kv_heads=kv_heads)
        for density in densities
    )
    return Comparison(
        [(each, ("ringweave", *others)) for each in problems], rounds=rounds, budget=_BUDGET, memory=False
    )


_OTHERS = ("ringweave:dense_batched", "sdpa")
USUAL = (
    _size(8192, (0.1,), "ringweave:dense_batched", "flex", "sdpa", rounds=3),
    _size(4096, (0.05, 0.1, 0.25, 0.5, 1.0), *_OTHERS),
    _size(4096, (0.1,), *_OTHERS, head_dim=128),
    _size(4096, (0.1,), *_OTHERS, kv_heads=2),
    _size(16384, (0.01, 0.05)),
    _size(65536, (0.01,)),
)
QUICK = (_size(512, (0.25, 1.0), *_OTHERS, heads=4, kv_heads=2),)


def whole_grid() -> Iterable[Comparison]:
    """Return comparisons of every length, density, head dimension and grouping."""
    for tokens in (4096, 8192, 16384, 32768, 65536):
        for head_dim in (64, 128):
            for kv_heads in (8, 2):
                flex = ("flex",) if (tokens, head_dim, kv_heads) == (8192, 64, 8) else ()
                dense = ("sdpa",) if tokens <= _DENSE_TOKENS else ()
                others = ("ringweave:dense_batched", *flex, *dense)
                yield _size(tokens, _ALL, *others, head_dim=head_dim, kv_heads=kv_heads, rounds=3)


def _headline(dtype: str, flex: float, share: float, dense: float) -> tuple[Rule, ...]:
    """Return the kernel's targets in a type, at the size for which they hold."""
    size = {"dtype": dtype, "tokens": 8192, "head_dim": 64, "heads": 8, "kv_heads": 8, "workload": "random 10%"}
    forward, both = size | {"direction": FORWARD}, size | {"direction": BOTH}
    return (
        Rule("{dtype} forward: FlexAttention's time over ringweave's", forward | {"peer": "flex"}, over_first, flex),
        Rule(
            "{dtype} forward: share of the FMA peak", forward | {"peer": "ringweave"}, lambda each: each.peak_share,
            share, unit="%",
        ),
        Rule("{dtype} forward + backward: dense SDPA's time", both | {"peer": "sdpa"}, over_first, dense),
    )  # fmt: skip


_DENSE = Rule(
    "{dtype} {direction}: dense SDPA's time",
    {"peer": "sdpa", "workload": "random 100%", "tokens": lambda tokens: tokens >= 4096}, over_first, 1.0,
)  # fmt: skip
#: Targets by instruction set of the kernel; "" is any other.
TARGETS = {
    "avx2": (
        *_headline("float32", flex=2.2, share=0.5, dense=10.0),
        *_headline("bfloat16", flex=4.0, share=0.5, dense=10.0),
        _DENSE,
    ),
    "": (
        *_headline("float32", flex=1.7, share=0.5, dense=10.0),
        *_headline("bfloat16", flex=4.0, share=0.38, dense=14.0),
        _DENSE,
    ),
}  # fmt: skip


def measure(options: Options, say: Say) -> Measuring:
    """Measure the figures, and compare them with their targets."""
    native, missing = cpu.module() is not None, why_no_peak()
    dtypes = (options.dtype,) if options.dtype else (torch.float32, torch.bfloat16)
    peaks: dict[torch.dtype, float] = {}
    memory = None
    records: list[Outcome] = []
    for size in QUICK if options.quick else whole_grid() if options.full else USUAL:
        for dtype in dtypes:
            if native:
                if missing is None:
                    peaks[dtype] = max(peaks.get(dtype, 0.0), fma_peak(dtype))
                memory = max(memory or 0.0, memory_speed(options.quick))
            for each in outcomes(asked(size, options, dtype), say, peak=peaks.get(dtype), memory=memory):
                # the target is only for ringweave's kernels
                own = each.peer.startswith("ringweave")
                records.append(each if own else dataclasses.replace(each, peak_share=None, memory_share=None))
                yield records[-1]
    if not native:
        why = "ringweave was installed without a C++ compiler, or with wheel.cmake=false"
        return f"No native kernel ran here ({why}): the figures are of other backends, without a share of the peak."
    variant = cpu.variant()
    yield from targets(TARGETS.get(variant, TARGETS[""]), records, ".0%")
    if torch.float32 in dtypes:
        yield _over_matmul(options, say)
    yield from overheads(options, dtypes, say)
    if missing is not None:
        return f"Instruction set {variant}; no share of the FMA peak: {missing}"
    said = ", ".join(f"{peak / 1e9:,.0f} GFLOP/s in {_name(dtype)}" for dtype, peak in peaks.items())
    read = "" if memory is None else f"; memory is read at {memory / 1e9:.0f} GB/s"
    return f"Instruction set {variant}; FMA peak of {torch.get_num_threads()} threads: {said}{read}."


def asked(size: Comparison, options: Options, dtype: torch.dtype) -> Comparison:
    """Return a size with the user's options, without densities that leave no room for the diagonal."""
    entries = []
    for problem, names in size.entries:
        problem = dataclasses.replace(options.of(problem), dtype=dtype)
        if isinstance(problem.relation, RandomBlocks) and problem.relation.density >= _TILE / problem.tokens:
            entries.append((problem, names))
    if not entries:
        problem, names = size.entries[-1]
        full = dataclasses.replace(options.of(problem), name="random 100%", relation=RandomBlocks(1.0), dtype=dtype)
        entries.append((full, names))
    return dataclasses.replace(size, entries=entries, rounds=options.rounds or size.rounds)


def reading(quick: bool) -> tuple[Runnable, int]:
    """Return a loop that adds up an array larger than any cache on torch's threads, and the bytes that it reads."""
    words = torch.zeros((2**22 if quick else 2**28) // 8, dtype=torch.int64)
    return words.sum, words.nbytes


def memory_speed(quick: bool, samples: int = 5) -> float:
    """Return the bytes of memory that are read per second, the best of short samples."""
    call, nbytes = reading(quick)
    return nbytes / interleaved({"memory": call}, rounds=samples)["memory"].min


def overheads(options: Options, dtypes: Iterable[torch.dtype], say: Say) -> Iterator[Target]:
    """Measure a kernel's overheads: sparse rows, uneven rows, strides, memory.

    Each is a ratio of two runs of the same kernel, checked and timed in turn; small sizes have no target.
    """
    for dtype in dtypes:
        yield _sparse(options, dtype, say)
        yield _uneven(options, dtype, say)
        for direction in (FORWARD, BOTH):
            yield _strided(options, dtype, direction, say)
    if torch.bfloat16 in dtypes:
        for direction in (FORWARD, BOTH):
            yield _memory(options, direction, say)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tokens(options: Options, whole: int) -> int:
    return options.tokens or (2048 if options.quick else whole)


def _target(
    options: Options, what: str, size: str, entries: list[Entry] | list[Outcome], figure: Callable[[], float],
    bound: float, *, at_least: bool = False, unit: str = "x",
) -> Target:  # fmt: skip
    """File a figure of entries that were all timed, or why one was not."""
    held = None if options.sized else bound
    reason = next((each.reason for each in entries if each.timing is None), None)
    return Target(what, size, None if reason else figure(), held, at_least, unit, reason)


def _over_matmul(options: Options, say: Say) -> Target:
    """Compare the speed of attention over all tiles with that of torch's matrix product, in turn."""
    tokens, heads, dim = _tokens(options, 4096), options.heads or 8, 64
    q, k, v = (torch.randn(1, heads, tokens, dim, device=options.device) for _ in range(3))
    tiles = -(-tokens // _TILE)
    every = rw.BlockTable(torch.ones(tiles, tiles, dtype=torch.bool), _TILE)
    side = 256 if options.quick else 2048
    a, b = (torch.randn(side, side, device=options.device) for _ in range(2))
    say("attention over all tiles, and torch's matrix product")
    calls = {"attention": lambda: rw.attention(q, k, v, every, backend="cpu"), "product": lambda: a @ b}
    found = interleaved(calls, rounds=options.rounds or (3 if options.quick else 9), device="cpu")
    of_attention = 4 * dim * heads * tokens**2 / found["attention"].median
    share = of_attention / (2 * side**3 / found["product"].median)
    what = "float32 forward: speed at 100% of the tiles over torch's matrix product"
    size = f"{tokens:,} tokens, {heads} heads, D {dim}, and {side} x {side}"
    return Target(what, size, share, None if options.sized or options.quick else 0.85, True, "%")


def _per_tile(options: Options, problems: list[Problem], say: Say) -> tuple[list[Outcome], Callable[[], float]]:
    """Time forward, and compare the first one's time per tile with the last one's."""
    comparison = Comparison([(each, ("ringweave",)) for each in problems], (FORWARD,), options.rounds or 3, 20.0, False)
    found = list(outcomes(comparison, say))
    # operations per second are tiles per second: their size is the same
    return found, lambda: (found[-1].gflops or 0.0) / (found[0].gflops or 1.0)


def _sparse(options: Options, dtype: torch.dtype, say: Say) -> Target:
    tokens, heads = _tokens(options, 32768), options.heads or (8 if options.full else 2)
    low = min(1.0, max(0.01, 1.25 * _TILE / tokens))
    problems = [
        Problem(f"{density:.0%} of tiles", RandomBlocks(density), tokens, heads, dtype=dtype, device=options.device)
        for density in (low, 0.5)
    ]
    found, figure = _per_tile(options, problems, say)
    what = f"{_name(dtype)} forward: time per tile at density {low:.0%} over that at 50%"
    return _target(options, what, f"{tokens:,} tokens, {heads} heads, D 64", found, figure, 1.15)


def _uneven(options: Options, dtype: torch.dtype, say: Say) -> Target:
    tokens, heads = _tokens(options, 32768), options.heads or 2
    density = min(1.0, max(0.05, 1.25 * _TILE / tokens))
    even = rw.patterns.random_blocks(tokens, density)
    table = even.mask.clone()
    table[..., ::64, :] = True
    problems = [
        Problem(name, pattern, tokens, heads, dtype=dtype, device=options.device)
        for name, pattern in (("one full row per 64", rw.BlockTable(table, _TILE)), ("even rows", even))
    ]
    found, figure = _per_tile(options, problems, say)
    what = f"{_name(dtype)} forward: time per tile with one full row per 64 over that without"
    return _target(options, what, f"{tokens:,} tokens, {heads} heads, D 64, density {density:.0%}", found, figure, 1.1)


def _strided(options: Options, dtype: torch.dtype, direction: str, say: Say) -> Target:
    tokens, heads, rate = _tokens(options, 32768), options.heads or 8, 4
    inside = tokens // rate
    density = min(1.0, max(0.1, 1.25 * _TILE / inside))
    problem = Problem(f"every {rate}th", RandomBlocks(density), inside, heads, dtype=dtype, device=options.device)
    whole = dataclasses.replace(problem, tokens=tokens).inputs()
    views = Sample(*(x[:, :, ::rate] for x in whole))
    entries = [
        Session(inputs, say, ends=True).check(problem, peers("ringweave")[0], direction)
        for inputs in (views, Sample(*(x.contiguous() for x in views)))
    ]
    say(f"{tokens:,} tokens, {dtype}: every {rate}th in place, and contiguous")
    in_turn(entries, rounds=max(options.rounds or 3, 5), budget=20.0)

    def speed() -> float:
        strided, contiguous = (each.timing for each in entries)
        assert strided is not None
        assert contiguous is not None
        return contiguous.median / strided.median

    what = f"{_name(dtype)} {direction}: speed of the view x[:, :, ::{rate}] over contiguous tensors"
    size = f"{inside:,} of {tokens:,} tokens, {heads} heads, D 64, density {density:.0%}"
    return _target(options, what, size, entries, speed, 0.95, at_least=True)


def _memory(options: Options, direction: str, say: Say) -> Target:
    """Return a call's peak memory beyond its inputs and results, as a share of these."""
    tokens, heads = _tokens(options, 262144), options.heads or 8
    window = min(256 if options.quick else 1024, tokens // 4)
    problem = Problem("window", rw.SlidingWindow(window), tokens, heads, dtype=torch.bfloat16, device=options.device)
    found = list(outcomes(Comparison([(problem, ("ringweave",))], (direction,), 1, ends=True), say))
    # results in tensors of the queries' size, tensors in the denominator, and the bound
    made, share, bound = (1, 4, 0.05) if direction == FORWARD else (4, 3, 0.10)
    what = "bfloat16 forward: memory beyond q, k, v and out, of these"
    if direction == BOTH:
        what = "bfloat16 forward + backward: memory beyond q, k, v, out and gradients, of the gradients"

    def rest() -> float:
        assert found[0].peak is not None
        one = tokens * heads * problem.head_dim * problem.dtype.itemsize
        return max(found[0].peak.nbytes - made * one, 0) / (share * one)

    return _target(
        options, what, f"{tokens:,} tokens, {heads} heads, D 64, window {window:,}", found, rest, bound, unit="%"
    )
