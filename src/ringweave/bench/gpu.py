"""The case ``kernels`` on a GPU: the Triton kernels next to the vendors' kernels, at the sizes of the design's targets.

Every kernel is checked first, on sampled rows of two heads, against the float64 oracle; what is wrong is not timed.
Then kernels are timed in turn by CUDA events, several calls between two events, so that the queue never runs dry;
inputs are random, since kernels are faster on zeros. Backward is timed by itself, on a graph that is kept. The peak is
a square matrix product of the same type in the same run. No part starts once the time is used up: the result says so.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringweave as rw

from ..errors import RingweaveError, UnsupportedError, in_a_line, message
from ..patterns import Pattern
from .case import CaseResult, Options, Target
from .compare import Outcome, Say, outcome
from .goals import goals
from .measure import Call, Timing, peak_memory, ratio
from .peers import PEERS, Built, Peer
from .workload import Accuracy, Error, Inputs, Oracle, Workload, sample_rows

DIRECTIONS = ("forward", "backward")
Timer = Callable[[Mapping[str, Call], int], dict[str, Timing]]
_OWN = "ringweave:triton"
_SPARSE = (_OWN, "flex", "ringweave:flash")
_DENSE = ("sdpa:cudnn", "sdpa:flash")
#: Seconds after which no further part starts; a lent machine runs a command for ten minutes.
BUDGET = 440.0


@dataclass(frozen=True)
class Part:
    """One size, and who runs it.

    Attributes:
        name: For people.
        tokens: Queries and keys.
        heads: Query and key heads.
        head_dim: Channels.
        density: Share of tiles: random ones and the diagonal.
        tile: Side of a block of the pattern.
        chosen: Key blocks of each query block, in place of ``density``.
        peers: Sparse kernels; ratios are over the first.
        dense: Whether dense attention is timed beside it.
        whole: Forward and backward in one go, with peak memory, instead of each by itself.
    """

    name: str
    tokens: int
    heads: int
    head_dim: int
    density: float = 0.1
    tile: int = 128
    chosen: int | None = None
    peers: tuple[str, ...] = _SPARSE
    dense: bool = False
    whole: bool = False

    def pattern(self, device: str = "cpu") -> Pattern:
        """A block table that all heads share, on a device; the same one each time."""
        if self.chosen is None:
            mask = rw.random_blocks(self.tokens, self.density, block_size=self.tile).mask
            return rw.BlockTable(mask.to(device), self.tile)
        blocks = -(-self.tokens // self.tile)
        generator = torch.Generator().manual_seed(0)
        indices = torch.rand(blocks, blocks, generator=generator).topk(min(self.chosen, blocks)).indices.to(device)
        counts = torch.full((blocks,), indices.shape[1], device=device)
        return rw.BlockTable(indices=indices, counts=counts, key_blocks=blocks, block_size=self.tile)


PARTS = (
    Part("stage A", 16384, 16, 128, dense=True),
    Part("stage A", 32768, 16, 128, dense=True),
    Part("stage A", 65536, 16, 128),
    *(Part("densities", 32768, 16, 128, density, peers=(_OWN,)) for density in (0.5, 0.25, 0.1, 0.05, 0.02, 0.01)),
    Part("90% sparse", 65536, 8, 64, dense=True),
    Part("64 x 64, top 64", 109632, 7, 128, tile=64, chosen=64),
    Part("a million tokens", 2**20, 16, 128, 0.01, peers=(_OWN,), whole=True),
)
QUICK = (
    Part("stage A", 16384, 16, 128, peers=(_OWN, "ringweave:flash"), dense=True),
    *(Part("densities", 16384, 16, 128, density, peers=(_OWN,)) for density in (0.5, 0.05)),
    Part("64 x 64, top 64", 16384, 7, 128, tile=64, chosen=64, peers=(_OWN,)),
)


def _sdpa(name: str, kernel: SDPBackend) -> Peer:
    def build(workload: Workload, inputs: Inputs) -> Built:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return Built(attend, rw.Full(), f"torch SDPA, {kernel.name}")

    return Peer(name, f"torch's dense attention, {kernel.name}", lambda workload, backward: None, build)


DENSE_PEERS = {
    "sdpa:cudnn": _sdpa("sdpa:cudnn", SDPBackend.CUDNN_ATTENTION),
    "sdpa:flash": _sdpa("sdpa:flash", SDPBackend.FLASH_ATTENTION),
}


def by_events(calls: Mapping[str, Call], rounds: int) -> dict[str, Timing]:
    """Seconds of callables timed in turn by CUDA events, short ones several times between two events."""

    def once(call: Call, times: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    times = {name: max(1, min(50, round(0.02 / max(once(call, 2), 1e-6)))) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(once(call, times[name]))
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def matmul_peak(dtype: torch.dtype, device: str, timer: Timer = by_events, side: int = 8192) -> float:
    """Operations a second of a square matrix product: the best of ten samples."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / timer({"product": lambda: a @ b}, 10)["product"].min


def drawn(workload: Workload) -> Inputs:
    """Random normal inputs, drawn on the device: a processor would take minutes for a million tokens."""
    generator = torch.Generator(workload.device).manual_seed(0)
    shape = (workload.batch, workload.heads, workload.tokens, workload.head_dim)
    made = (torch.randn(shape, generator=generator, device=workload.device, dtype=workload.dtype) for _ in range(4))
    return Inputs(*made)


class Gate:
    """The oracle on some rows of the first and the last head: any length can be checked."""

    def __init__(self, function: Pattern, inputs: Inputs):
        self.inputs = inputs
        self.heads = sorted({0, inputs.q.shape[1] - 1})
        some = Inputs(*(x[:, self.heads] for x in inputs))
        self.oracle = Oracle(function, some, sample_rows(inputs.q.shape[2]))
        dout = torch.zeros_like(inputs.dout)
        dout[:, :, self.oracle.rows] = inputs.dout[:, :, self.oracle.rows]
        self.sliced = inputs._replace(dout=dout)

    def check(self, built: Built, backward: bool) -> Accuracy:
        """Errors of a kernel's results."""
        if backward:
            results = built.forward_backward(self.sliced)()
            return self.oracle.check_gradients(*(x[:, self.heads] for x in results))
        out = built.forward(self.inputs)()
        nan = float("nan")
        return Accuracy(Error(nan, nan)) if torch.isnan(out).any() else self.oracle.check_out(out[:, self.heads])


def measure(
    part: Part, dtype: torch.dtype, device: str, rounds: int, timer: Timer, peak: float | None, say: Say
) -> list[Outcome]:
    """Check and time the kernels of a part."""
    pattern = part.pattern(device)
    sparse = Workload(part.name, pattern, part.tokens, part.heads, part.head_dim, 1, dtype, device)
    runs = [(sparse, [PEERS[name] for name in part.peers])]
    if part.dense:
        dense = dataclasses.replace(sparse, name=f"{part.name}, dense", pattern=rw.Full())
        runs.append((dense, [DENSE_PEERS[name] for name in _DENSE]))
    inputs = drawn(sparse)
    directions = ("forward + backward",) if part.whole else DIRECTIONS
    known: dict[tuple[str, str], tuple[Workload, dict[str, object]]] = {}
    calls: dict[str, dict[str, Call]] = {direction: {} for direction in directions}
    ready: dict[str, Built] = {}
    for workload, those in runs:
        gate = Gate(workload.pattern, inputs)
        for peer in those:
            say(f"{workload.name}, {workload.tokens:,} tokens: preparing and checking {peer.name}")
            for direction in directions:
                fields, call = _checked(peer, workload, inputs, gate, direction, ready)
                known[direction, peer.name] = workload, fields
                if call is not None:
                    calls[direction][peer.name] = call
    made = []
    for direction in directions:
        say(f"{part.name}, {part.tokens:,} tokens, {direction}: timing {len(calls[direction])} in turn")
        timings = timer(calls[direction], rounds) if calls[direction] else {}
        first = timings.get(part.peers[0])
        for (of, name), (workload, fields) in known.items():
            if of != direction:
                continue
            timing = timings.get(name)
            if timing is not None:
                rate = operations(workload, direction) / timing.median
                fields = fields | {
                    "timing": timing,
                    "over_first": None if first is None else ratio(timing, first),
                    "gflops": rate / 1e9,
                    "peak_share": None if peak is None else rate / peak,
                }
                if part.whole:
                    fields["peak"] = peak_memory(calls[direction][name], device=device, warm=False)
            made.append(outcome(workload, direction, name, fields))
    return made


def operations(workload: Workload, direction: str) -> float:
    """Floating-point operations on the pairs of the tiles: two products forward, five backward."""
    both = workload.flops(backward=True)
    forward = workload.flops(backward=False)
    return {"forward": forward, "backward": both - forward, "forward + backward": both}[direction]


def _checked(
    peer: Peer, workload: Workload, inputs: Inputs, gate: Gate, direction: str, ready: dict[str, Built]
) -> tuple[dict[str, object], Call | None]:
    backward = direction != "forward"
    reason = peer.supports(workload, backward)
    if reason is not None:
        return {"reason": reason}, None
    try:
        if peer.name not in ready:
            ready[peer.name] = peer.build(workload, inputs)
        built = ready[peer.name]
        accuracy, limit = gate.check(built, backward), gate.oracle.limit
        fields: dict[str, object] = {"how": built.how, "computes": repr(built.function), "accuracy": accuracy}
        fields |= {"limit": limit, "setup_seconds": built.setup_seconds}
        excess = accuracy.excess(limit)
        if excess is not None:
            return fields | {"reason": f"wrong: {excess}; not timed"}, None
        if direction == "backward":
            q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
            out = built.attend(q, k, v)
            return fields, lambda: torch.autograd.grad(out, (q, k, v), inputs.dout, retain_graph=True)
        return fields, built.forward_backward(inputs) if backward else built.forward(inputs)
    except (RingweaveError, RuntimeError) as error:
        # a kernel that is not there, a compiler that fails, memory: the others are measured all the same
        return {"reason": in_a_line(error)}, None


def run(
    options: Options, say: Say, timer: Timer = by_events, clock: Callable[[], float] = time.perf_counter
) -> CaseResult:
    """Measure part after part, and set the figures beside their targets.

    Raises:
        UnsupportedError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            message("device", repr(options.device), "a CUDA device", "Run it where torch.cuda.is_available().")
        )
    dtype = options.dtype or torch.bfloat16
    rounds = options.rounds or (5 if options.quick else 10)
    start = clock()
    peak = matmul_peak(dtype, options.device, timer)
    records: list[Outcome] = []
    left: list[str] = []
    for part in asked(options):
        if clock() - start > BUDGET:
            left.append(f"{part.name} at {part.tokens:,} tokens")
            continue
        records += measure(part, dtype, options.device, rounds, timer, peak, say)
        torch.cuda.empty_cache()
    peak = max(peak, matmul_peak(dtype, options.device, timer))
    records = [dataclasses.replace(each, peak_share=_share(each, peak)) for each in records]
    targets: list[Target] = goals(records, _OWN)
    said = f"Matrix product of {str(dtype).removeprefix('torch.')}: {peak / 1e12:,.0f} TFLOP/s."
    if left:
        said += f" No time was left for {', '.join(left)}."
    return CaseResult("kernels", (*records, *targets), said)


def _share(each: Outcome, peak: float) -> float | None:
    return None if each.gflops is None else each.gflops * 1e9 / peak


def asked(options: Options) -> list[Part]:
    """The parts of a run: all, the quick ones, or stage A at a length of the user's."""
    parts = QUICK if options.quick else PARTS
    if options.tokens is not None:
        parts = (dataclasses.replace(parts[0], tokens=options.tokens),)
    heads = options.heads
    return [part if heads is None else dataclasses.replace(part, heads=heads) for part in parts]
