"""The case ``kernels`` on a CPU: how much of the processor's peak a kernel reaches, over densities, sizes and types.

All densities of one size are timed in turn with each other and with their peers, so that every ratio is of one run.
The peak is a loop of fused multiply-adds in registers on the same number of threads, taken between the sizes of the
same run; the best of them counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

import ringweave as rw

from ..ops import cpu
from . import gpu
from .case import CaseResult, Options, Target
from .compare import Outcome, Say, Session, outcome
from .measure import interleaved, ratio
from .overheads import overheads
from .peers import chosen_backend, peers
from .workload import Workload

_DIRECTIONS = ("forward", "forward + backward")
_TILE = 128
_DENSE_TOKENS = 16384
_HEADLINE = (8192, 64, 8, 8, 0.1)


@dataclass(frozen=True)
class Size:
    """One size, at some densities, and who runs it.

    Attributes:
        tokens: Queries and keys.
        densities: Shares of tiles: random ones and the diagonal.
        head_dim: Channels of a head.
        heads: Query heads.
        kv_heads: Key heads.
        peers: Beside ringweave, without ``sdpa``, at every density.
        dense: Whether ``sdpa`` runs too; it computes every pair, and is timed once for all densities.
        rounds: Timed rounds.
    """

    tokens: int
    densities: tuple[float, ...]
    head_dim: int = 64
    heads: int = 8
    kv_heads: int = 8
    peers: tuple[str, ...] = ()
    dense: bool = False
    rounds: int = 3


_GATHER = ("ringweave:gather",)
_ALL = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
USUAL = (
    Size(8192, (0.1,), peers=("ringweave:gather", "flex"), dense=True),
    Size(4096, (0.05, 0.1, 0.25, 0.5, 1.0), peers=_GATHER, dense=True, rounds=2),
    Size(4096, (0.1,), head_dim=128, peers=_GATHER, dense=True, rounds=2),
    Size(4096, (0.1,), kv_heads=2, peers=_GATHER, dense=True, rounds=2),
    Size(16384, (0.01, 0.05), rounds=2),
    Size(65536, (0.01,), rounds=2),
)
QUICK = (Size(1024, (0.25, 1.0), heads=4, kv_heads=2, peers=_GATHER, dense=True, rounds=2),)


def whole_grid() -> Iterable[Size]:
    """Every length, density, head dimension and grouping."""
    for tokens in (4096, 8192, 16384, 32768, 65536):
        for head_dim in (64, 128):
            for kv_heads in (8, 2):
                headline = (tokens, head_dim, kv_heads) == (8192, 64, 8)
                others = ("ringweave:gather", "flex") if headline else _GATHER
                yield Size(tokens, _ALL, head_dim, 8, kv_heads, others, tokens <= _DENSE_TOKENS)


def run(options: Options, say: Say) -> CaseResult:
    """Measure, and set the figures beside their targets."""
    if torch.device(options.device).type == "cuda":
        return gpu.run(options, say)
    native = cpu.module() is not None
    dtypes = (options.dtype,) if options.dtype else (torch.float32, torch.bfloat16)
    sizes = [_asked(size, options) for size in (QUICK if options.quick else whole_grid() if options.full else USUAL)]
    outcomes: list[Outcome] = []
    best = dict.fromkeys(dtypes, 0.0)
    for size in sizes:
        for dtype in dtypes:
            if native:
                best[dtype] = max(best[dtype], fma_peak(dtype))
            sessions = {density: _session(size, density, dtype, options.device, say) for density in size.densities}
            for direction in _DIRECTIONS:
                outcomes += _measure(size, sessions, direction, say)
    if not native:
        why = "ringweave was installed without a C++ compiler"
        said = f"No native kernel ran here ({why}): the figures are of other backends, without a share of the peak."
        return CaseResult("kernels", tuple(outcomes), said, grid=True)
    peaks = {str(dtype).removeprefix("torch."): max(peak, fma_peak(dtype)) for dtype, peak in best.items()}
    outcomes = [_with_share(each, peaks) for each in outcomes]
    targets = [*_targets(outcomes), *overheads(options, dtypes, say)]
    said = ", ".join(f"{peak / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, peak in peaks.items())
    threads = torch.get_num_threads()
    said = f"Instruction set {cpu.variant()}; FMA peak of {threads} threads: {said}."
    return CaseResult("kernels", (*outcomes, *targets), said, grid=True)


def fma_peak(dtype: torch.dtype, seconds: float = 0.02, samples: int = 10) -> float:
    """Operations a second of a loop of fused multiply-adds, on torch's number of threads: the best of short samples.

    A peak is what the machine can do: what others take of it at a moment does not count.
    """
    native = cpu.module()
    assert native is not None
    name = "bfloat16" if dtype == torch.bfloat16 else "float32"
    threads, variant = torch.get_num_threads(), cpu.variant()
    return max(float(native.fma_peak(name, threads, seconds, variant)) for _ in range(samples))


def _asked(size: Size, options: Options) -> Size:
    """A size with what the user asked for, and without densities that leave no room for the diagonal."""
    heads = options.heads or size.heads
    kv_heads = size.kv_heads if heads % size.kv_heads == 0 and heads >= size.kv_heads else heads
    size = dataclasses.replace(
        size,
        tokens=options.tokens or size.tokens,
        heads=heads,
        kv_heads=heads if size.heads == size.kv_heads else kv_heads,
        rounds=options.rounds or size.rounds,
    )
    least = _TILE / size.tokens
    return dataclasses.replace(size, densities=tuple(d for d in size.densities if d >= least) or (1.0,))


def _session(size: Size, density: float, dtype: torch.dtype, device: str, say: Say) -> Session:
    pattern = rw.random_blocks(size.tokens, density, block_size=_TILE)
    workload = Workload(
        f"random {density:.0%}", pattern, size.tokens, size.heads, size.head_dim, 1, dtype, device, size.kv_heads
    )
    return Session(workload, workload.inputs(), say)


def _measure(size: Size, sessions: dict[float, Session], direction: str, say: Say) -> list[Outcome]:
    """All densities of a size and their peers, checked first and then timed in turn."""
    backward = direction != "forward"
    checked: dict[tuple[float, str], tuple[dict[str, object], Callable[[], object] | None]] = {}
    for density, session in sessions.items():
        auto = chosen_backend(session.workload, backward=backward)
        for peer in peers("ringweave", *(name for name in size.peers if name != f"ringweave:{auto}")):
            checked[density, peer.name] = session.check(peer, backward)
        if size.dense and density == size.densities[-1]:
            checked[0.0, "sdpa"] = session.check(peers("sdpa")[0], backward)
    workload = sessions[size.densities[0]].workload
    device = workload.device
    say(f"{size.tokens:,} tokens, D {size.head_dim}, {workload.dtype}, {direction}: timing {len(checked)} in turn")
    calls = {f"{density} {name}": call for (density, name), (_, call) in checked.items() if call is not None}
    timings = interleaved(calls, rounds=size.rounds, warmup=0, device=device, budget=60.0)
    made = []
    for density, session in sessions.items():
        workload = session.workload
        first = timings.get(f"{density} ringweave")
        for (of, name), (fields, _) in checked.items():
            timing = timings.get(f"{of} {name}")
            if of not in (density, 0.0):
                continue
            if timing is not None:
                fields = fields | {
                    "timing": timing,
                    "over_first": None if first is None else ratio(timing, first),
                    "gflops": workload.flops(backward=backward) / timing.median / 1e9,
                }
            made.append(outcome(workload, direction, name, fields))
    return made


def _with_share(each: Outcome, peaks: dict[str, float]) -> Outcome:
    if each.gflops is None or not each.peer.startswith("ringweave"):
        return each
    return dataclasses.replace(each, peak_share=each.gflops * 1e9 / peaks[each.dtype])


def _targets(outcomes: list[Outcome]) -> list[Target]:
    """What the design asks of the kernel, at the size it asks it for."""
    tokens, head_dim, heads, _, density = _HEADLINE
    found = {
        (o.dtype, o.direction, o.peer): o
        for o in outcomes
        if (o.tokens, o.head_dim, o.heads, o.kv_heads, round(o.density, 2)) == _HEADLINE
    }
    size = f"{tokens:,} tokens, {heads} heads, D {head_dim}, density {density:.0%}"
    made = []
    for dtype, flex, share, dense in (("float32", 1.7, 0.5, 10.0), ("bfloat16", 4.0, 0.38, 14.0)):
        forward, both = ((dtype, direction) for direction in _DIRECTIONS)
        if (*forward, "ringweave") not in found:
            continue
        made += [
            _over(found.get((*forward, "flex")), f"{dtype} forward: FlexAttention's time over ringweave's", size, flex),
            Target(
                f"{dtype} forward: share of the FMA peak",
                size, found[*forward, "ringweave"].peak_share, share, True, "%",
            ),
            _over(found.get((*both, "sdpa")), f"{dtype} forward + backward: dense SDPA's time", size, dense),
        ]  # fmt: skip
    for each in outcomes:
        if each.peer == "sdpa" and each.density == 1.0 and each.tokens >= 4096:
            where = f"{each.tokens:,} tokens, {each.heads} heads, D {each.head_dim}, density 100%"
            made.append(_over(each, f"{each.dtype} {each.direction}: dense SDPA's time", where, 1.0))
    return made


def _over(each: Outcome | None, what: str, size: str, bound: float) -> Target:
    if each is None or each.over_first is None:
        return Target(what, size, None, bound, True, reason=None if each is None else each.reason)
    return Target(what, size, each.over_first.medians, bound, True)
