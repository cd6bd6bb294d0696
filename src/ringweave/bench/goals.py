"""What the design asks of the GPU kernels, set beside what was measured: shared/design's stages as targets."""

from __future__ import annotations

from collections.abc import Sequence

from .case import Target
from .compare import Outcome

# (stage, forward, backward) in TFLOP/s of active tiles at 128 x 128 tiles, D = 128, density 10%
_RATES = (("stage A", 480.0, 320.0), ("stage C", 600.0, 500.0))
_OVER_FLEX = 1.3
_LINEAR = 1.15
_EXTRA_MEMORY = 0.05


def goals(records: Sequence[Outcome], own: str) -> list[Target]:
    """The targets for which something was measured."""
    return [*_rates(records, own), *_linear(records, own), *_times(records, own), *_memory(records, own)]


def _size(each: Outcome) -> str:
    return f"{each.tokens:,} tokens, {each.heads} heads, D {each.head_dim}, density {each.density:.1%}"


def _of(records: Sequence[Outcome], name: str, peer: str) -> list[Outcome]:
    return [each for each in records if each.workload == name and each.peer == peer]


def _rates(records: Sequence[Outcome], own: str) -> list[Target]:
    made = []
    for each in _of(records, "stage A", own):
        for stage, forward, backward in _RATES:
            bound = {"forward": forward, "backward": backward}.get(each.direction)
            figure = None if each.gflops is None else each.gflops / 1e3
            made.append(Target(f"{stage}: {each.direction}", _size(each), figure, bound, True, "TFLOP/s", each.reason))
        for other in _of(records, "stage A", "flex"):
            if (other.tokens, other.direction) == (each.tokens, each.direction):
                what = f"{each.direction}: FlexAttention's time over ringweave's"
                figure = None if other.over_first is None else other.over_first.medians
                made.append(Target(what, _size(each), figure, _OVER_FLEX, True, reason=other.reason or each.reason))
    return made


def _linear(records: Sequence[Outcome], own: str) -> list[Target]:
    """Time per active tile over densities: the slowest over the fastest."""
    made = []
    for direction in ("forward", "backward"):
        series = [each for each in _of(records, "densities", own) if each.direction == direction]
        timed = [each for each in series if each.timing is not None]
        if not series:
            continue
        # operations per second are tiles per second: their size is the same at every density
        rates = [each.gflops for each in timed if each.gflops]
        low, high = min(each.density for each in series), max(each.density for each in series)
        size = f"{series[0].tokens:,} tokens, density {low:.1%} to {high:.1%}"
        figure = max(rates) / min(rates) if len(rates) == len(series) else None
        reason = next((each.reason for each in series if each.reason), None)
        made.append(
            Target(f"{direction}: time per tile, slowest over fastest", size, figure, _LINEAR, False, reason=reason)
        )
    return made


def _times(records: Sequence[Outcome], own: str) -> list[Target]:
    made = []
    for name, tokens, most in (("90% sparse", 65536, 3.0), ("64 x 64, top 64", 109632, 4.0)):
        for each in _of(records, name, own):
            if each.direction == "forward":
                figure = None if each.timing is None else each.timing.median * 1e3
                # another length has no target
                bound = most if each.tokens == tokens else None
                made.append(Target(f"{name}: forward", _size(each), figure, bound, False, "ms", each.reason))
    return made


def _memory(records: Sequence[Outcome], own: str) -> list[Target]:
    """What forward and backward in one go hold beyond inputs, output, lse and gradients, over those tensors."""
    made = []
    for each in _of(records, "a million tokens", own):
        item = 4 if each.dtype == "float32" else 2
        rows, keys = each.heads * each.tokens, each.kv_heads * each.tokens
        held = rows * (each.head_dim * item + 4)  # out and lse
        gradients = (rows + 2 * keys) * each.head_dim * item
        tensors = held + 2 * gradients + rows * each.head_dim * item  # q, k, v and dout as well
        figure = None if each.peak is None else max(0.0, each.peak.nbytes - held - gradients) / tensors
        what = "forward + backward in one go: memory beyond its tensors"
        made.append(Target(what, _size(each), figure, _EXTRA_MEMORY, False, "%", each.reason))
    return made
