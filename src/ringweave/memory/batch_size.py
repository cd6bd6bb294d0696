"""Find the largest batch that fits in memory by trial steps."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from ..checks import named_device, whole
from ..errors import ShapeError, UnsupportedError, is_out_of_memory, shown
from . import peak
from .pressure import pressure, to_system, trim


def fit_batch(
    step: Callable[[int], object],
    low: int,
    high: int,
    *,
    device: torch.device | str | int = "cpu",
    headroom: float = 0.1,
) -> int:
    """Find the largest batch for which a step fits in memory, with some headroom, by running and measuring steps.

    The function measures the peak memory of each step, and tries a larger batch only if a line through the last two
    measurements predicts that it fits. So the search does not run into a limit that kills the process; a limit that
    raises an out-of-memory error bounds the search from above. About ``2 * log2(high / low)`` steps are run. They must
    be independent: ``step`` must not keep a graph or gradients for the next one.

    Args:
        step: Function that runs one step with a batch of the given size, as in ``step(8)``.
        low: Smallest batch, which must fit.
        high: Largest batch to try.
        device: Device of the step; on a CPU, the process's resident memory is measured.
        headroom: Share of the free memory that must stay free.
    Returns:
        A batch size from low to high.
    Raises:
        UnsupportedError: The smallest batch does not fit.
        ShapeError: headroom is not a number from 0 to below 1.
        PatternError: low or high is not a whole number, or high is less than low.
    Example:
        >>> def step(batch):
        ...     x = torch.randn(batch, 4, 128, 32, requires_grad=True)
        ...     rw.attention(x, x, x, rw.Causal()).sum().backward()
        >>> rw.memory.fit_batch(step, 1, 8)
        8
    """
    low = whole("low", low, 1)
    high = whole("high", high, low)
    number = isinstance(headroom, (int, float)) and not isinstance(headroom, bool)
    if not number or not 0 <= headroom < 1:
        raise ShapeError("headroom", shown(headroom), "a number of at least 0 and below 1", "Leave it out.")
    device = named_device(device)
    gc.collect()
    trim()
    free, before = pressure(device).free * (1 - headroom), peak.in_use(device)
    # run the smallest batch twice: the first step also allocates caches, which later steps reuse
    taken, raised = _Taken(device), False
    probe = _probe(step, low, device, before)
    probe = None if probe is None else _probe(step, low, device, before)
    if probe is None or probe > free:
        got = f"{low}, which takes " + ("all free memory" if probe is None else f"{probe} of {free:.0f} bytes")
        raise UnsupportedError("low", got, "a batch that fits", "Use a smaller batch or a smaller model.")
    taken.note(low, probe)
    good, bad = low, high + 1
    while bad - good > 1:
        batch = min(2 * good, high) if bad > high else (good + bad) // 2
        if taken.expected(batch) > free:
            bad = batch
            continue
        probe = _probe(step, batch, device, before)
        if probe is None or probe > free:
            raised, bad = raised or probe is None, batch
        else:
            taken.note(batch, probe)
            good = batch
    return max(low, int(good * (1 - headroom))) if raised else good


class _Taken:
    """Measured bytes of the last two batches, and an estimate for other batches."""

    def __init__(self, device: torch.device):
        self._found: list[tuple[int, int]] = []
        self._known = peak.is_known(device)

    def note(self, batch: int, nbytes: int) -> None:
        self._found = [*self._found[-1:], (batch, nbytes)]

    def expected(self, batch: int) -> float:
        """Estimate the bytes of a batch by a line through the last two measurements; by proportion if there is one."""
        if not self._known:
            return 0.0
        (first, less), (last, more) = self._found[0], self._found[-1]
        if first == last:
            return more * batch / last
        return more + max(0.0, (more - less) / (last - first)) * (batch - last)


def _probe(step: Callable[[int], object], batch: int, device: torch.device, before: int) -> int | None:
    """Run a step and return its peak use in bytes above ``before``, or None if memory ran out."""
    to_system()
    peak.begin(device)
    try:
        step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # the frames of the traceback would keep the step's tensors alive
        error.__traceback__ = None
    else:
        return max(0, peak.highest(device) - before)
    gc.collect()
    return None
