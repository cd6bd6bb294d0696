"""The largest batch that fits, found by trying."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from ..errors import ShapeError, UnsupportedError, is_out_of_memory, message, shown
from ..patterns.validate import named_device, whole
from . import peak
from .pressure import pressure, to_system, trim


def fit_batch(
    step: Callable[[int], object],
    low: int,
    high: int,
    *,
    device: torch.device | str = "cpu",
    headroom: float = 0.1,
) -> int:
    """Find the largest batch for which a step fits, with room to spare, by measured probes.

    What a step takes is measured, and the next batch is tried only if a line through the last two says that it fits,
    so a limit that kills is not run into; one that raises ends the search from above. About ``2 * log2(high / low)``
    steps are made, each on its own: no graph or gradient of one may be kept for the next.

    Args:
        step: Does what one step does, with a batch of that size, as ``step(8)``.
        low: The smallest batch, which has to fit.
        high: The largest one.
        device: Whose memory: a CPU's (the process's resident memory is measured) or a GPU's.
        headroom: Share of the free memory that stays free.
    Returns:
        A batch from low to high.
    Raises:
        UnsupportedError: The smallest batch does not fit.
        ShapeError: Bounds that are none, or a head-room that is no share.
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
        raise ShapeError(message("headroom", shown(headroom), "a number of at least 0 and below 1", "Leave it out."))
    device = named_device(device)
    gc.collect()
    trim()
    free, held = pressure(device).free * (1 - headroom), peak.held(device)
    # the first step also makes what is kept
    taken, raised = _Taken(device), False
    probe = _probe(step, low, device, held)
    probe = None if probe is None else _probe(step, low, device, held)
    if probe is None or probe > free:
        got = f"{low}, which takes " + ("more than there is" if probe is None else f"{probe} of {free:.0f} bytes")
        raise UnsupportedError(message("low", got, "a batch that fits", "Take a smaller one, or a smaller model."))
    taken.note(low, probe)
    good, bad = low, high + 1
    while bad - good > 1:
        batch = min(2 * good, high) if bad > high else (good + bad) // 2
        if taken.expected(batch) > free:
            bad = batch
            continue
        probe = _probe(step, batch, device, held)
        if probe is None or probe > free:
            raised, bad = raised or probe is None, batch
        else:
            taken.note(batch, probe)
            good = batch
    return max(low, int(good * (1 - headroom))) if raised else good


class _Taken:
    """Bytes that batches took, and what others would."""

    def __init__(self, device: torch.device):
        self._found: list[tuple[int, int]] = []
        self._known = peak.is_known(device)

    def note(self, batch: int, nbytes: int) -> None:
        self._found = [*self._found[-1:], (batch, nbytes)]

    def expected(self, batch: int) -> float:
        """By a line through the last two; by proportion of one."""
        if not self._known:
            return 0.0
        (first, less), (last, more) = self._found[0], self._found[-1]
        if first == last:
            return more * batch / last
        return more + max(0.0, (more - less) / (last - first)) * (batch - last)


def _probe(step: Callable[[int], object], batch: int, device: torch.device, held: int) -> int | None:
    """Bytes above those held that a step takes at its peak; None where memory ran out."""
    to_system()
    peak.begin(device)
    try:
        step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # its frames hold what was allocated
        error.__traceback__ = None
    else:
        return max(0, peak.highest(device) - held)
    gc.collect()
    return None
