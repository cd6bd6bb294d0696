"""Coordinate descent to the blocks of one GPU kernel: one field at a time, from the table's choice, among near values.

What is measured is the caller's: :func:`descend` sees blocks and seconds, and needs no GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends.triton.launch_config import Asked, LaunchConfig
from ..backends.tuning import KernelKey

#: The best so far moves to blocks that take at most this part of its time.
STEP = 0.98
_HELD, _STREAMED, _WARPS, _STAGES, _RESIDENT = (64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4), (0, 1, 2)

#: Blocks to their seconds, or to why there are none; the first is the best so far.
Measure = Callable[[Sequence[LaunchConfig]], Mapping[LaunchConfig, float | str]]


@dataclass
class Descent:
    """What a search found.

    Attributes:
        start: Where it began.
        best: What was fastest.
        seconds: The last measurement of each.
        reasons: Why others were not measured.
    """

    start: LaunchConfig
    best: LaunchConfig
    seconds: dict[LaunchConfig, float] = field(default_factory=dict)
    reasons: dict[LaunchConfig, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuned:
    """What the search for one kernel found, and which blocks are taken.

    Attributes:
        key: The kernel and its tiles.
        descent: What was found.
        gain: The seconds of the table's blocks over those of the best, of calls in turn.
        chosen: The best, or the table's where that is about as fast.
    """

    key: KernelKey
    descent: Descent
    gain: float
    chosen: LaunchConfig

    def entry(self, of: str, date: str) -> dict[str, Any]:
        """Write it as it is stored."""
        return {
            **self.key._asdict(), "blocks": dataclasses.asdict(self.chosen), "gain": self.gain, "of": of, "date": date,
        }  # fmt: skip


def candidates(best: LaunchConfig, asked: Asked) -> Iterator[tuple[str, list[LaunchConfig]]]:
    """List, field by field, the blocks that differ from the best in it and that the kernel can take, near values first.

    Groups of warps that take turns come with their blocks.
    """
    held, streamed = ("n", "m") if asked.key.kernel == "backward_kv" else ("m", "n")
    for name, values in (
        (held, _HELD), (streamed, _STREAMED), ("warps", _WARPS), ("stages", _STAGES), ("resident", _RESIDENT),
        ("described", (False, True)), ("pingpong", (False, True)),
    ):  # fmt: skip
        now = getattr(best, name)
        changes: list[dict[str, Any]] = [{name: value} for value in values if value != now]
        if name == "pingpong" and not now:
            changes = [{"m": 128, "n": 128, "warps": 8, "resident": 1, "described": True}]
            changes = [change | {"pingpong": True, "stages": max(2, best.stages)} for change in changes]
        elif name not in ("stages", "pingpong") and best.pingpong:
            changes = [change | {"pingpong": False} for change in changes]
        changes.sort(key=lambda change: abs(change[name] - now))
        found = [dataclasses.replace(best, **change) for change in changes]
        yield name, [blocks for blocks in found if asked.misfit(blocks) is None]


def descend(start: LaunchConfig, asked: Asked, measure: Measure, left: Callable[[], bool]) -> Descent:
    """Descend by coordinates: try each field's values with the best so far, until no field moves it.

    Args:
        start: Where to begin.
        asked: What the kernel can take.
        measure: Times blocks in turn; for those that are wrong or do not compile, says why.
        left: Whether there is time for another field.
    Returns:
        The best: the start, unless something took at most ``STEP`` of the time of what was best then.
    """
    descent = Descent(start, start)
    moved = True
    while moved:
        moved = False
        for name in [name for name, _ in candidates(start, asked)]:
            if not left():
                return descent
            known = descent.seconds.keys() | descent.reasons.keys()
            fresh = [blocks for blocks in dict(candidates(descent.best, asked))[name] if blocks not in known]
            if not fresh:
                continue
            found = measure([descent.best, *fresh])
            seconds = {blocks: value for blocks, value in found.items() if not isinstance(value, str)}
            descent.seconds |= seconds
            descent.reasons |= {blocks: value for blocks, value in found.items() if isinstance(value, str)}
            if descent.best not in seconds:
                # what was right a moment ago is not any more: nothing that follows could be compared with it
                return descent
            fastest = min(seconds, key=seconds.__getitem__)
            if seconds[fastest] <= STEP * seconds[descent.best]:
                descent.best, moved = fastest, True
    return descent
