"""Search the blocks of one GPU kernel by coordinate descent: one field at a time, starting from the default table.

The caller measures; :func:`descend` only sees blocks and seconds, and needs no GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringweave.backends.triton.launch_config import LaunchConfig, Request
from ringweave.backends.tuning import KernelKey

from .overrides import misfit

#: The search moves to other blocks if they take at most this fraction of the time of the best so far.
STEP = 0.98
_HELD, _STREAMED, _WARPS, _STAGES, _RESIDENT = (64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4), (0, 1, 2)

#: Function that times blocks, the best so far first: seconds of each, or the reason why it was not timed.
Measure = Callable[[Sequence[LaunchConfig]], Mapping[LaunchConfig, float | str]]


@dataclass
class Descent:
    """The result of a search.

    Attributes:
        start: Blocks that the search started from.
        best: The fastest blocks.
        seconds: Last measurement of each choice of blocks.
        reasons: Reasons why other choices were not measured.
    """

    start: LaunchConfig
    best: LaunchConfig
    seconds: dict[LaunchConfig, float] = field(default_factory=dict)
    reasons: dict[LaunchConfig, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuned:
    """The result for one kernel, and the chosen blocks.

    Attributes:
        key: The kernel and its tiles.
        descent: Result of the search.
        gain: Time of the default blocks divided by the time of the best, measured in turn.
        chosen: The best blocks, or the default ones if they are about as fast.
    """

    key: KernelKey
    descent: Descent
    gain: float
    chosen: LaunchConfig

    def entry(self, of: str, date: str) -> dict[str, Any]:
        """Return the entry for the file of answers."""
        return {
            **self.key._asdict(), "blocks": dataclasses.asdict(self.chosen), "gain": self.gain, "of": of, "date": date,
        }  # fmt: skip


def candidates(best: LaunchConfig, request: Request) -> Iterator[tuple[str, list[LaunchConfig]]]:
    """Yield for each field the supported blocks that differ from the best in this field, nearest values first."""
    held, streamed = ("n", "m") if request.key.kernel == "backward_kv" else ("m", "n")
    for name, values in (
        (held, _HELD), (streamed, _STREAMED), ("warps", _WARPS), ("stages", _STAGES), ("resident", _RESIDENT),
        ("described", (False, True)),
    ):  # fmt: skip
        now = getattr(best, name)
        changes: list[dict[str, Any]] = [{name: value} for value in values if value != now]
        changes.sort(key=lambda change: abs(change[name] - now))
        found = [dataclasses.replace(best, **change) for change in changes]
        yield name, [blocks for blocks in found if misfit(request, blocks) is None]


def descend(start: LaunchConfig, request: Request, measure: Measure, left: Callable[[], bool]) -> Descent:
    """Search by coordinate descent: vary one field of the best blocks at a time, until no field improves them.

    Args:
        start: Blocks to start from.
        request: The kernel's request.
        measure: Function that times blocks in turn, and returns a reason for wrong or uncompilable ones.
        left: Function that returns whether there is time for another field.
    Returns:
        The result. Its best blocks are the start, unless others took at most ``STEP`` of the time of the best so far.
    """
    descent = Descent(start, start)
    moved = True
    while moved:
        moved = False
        for name in [name for name, _ in candidates(start, request)]:
            if not left():
                return descent
            known = descent.seconds.keys() | descent.reasons.keys()
            fresh = [blocks for blocks in dict(candidates(descent.best, request))[name] if blocks not in known]
            if not fresh:
                continue
            found = measure([descent.best, *fresh])
            seconds = {blocks: value for blocks, value in found.items() if not isinstance(value, str)}
            descent.seconds |= seconds
            descent.reasons |= {blocks: value for blocks, value in found.items() if isinstance(value, str)}
            if descent.best not in seconds:
                # the best blocks failed this time, so later measurements would have no reference
                return descent
            fastest = min(seconds, key=seconds.__getitem__)
            if seconds[fastest] <= STEP * seconds[descent.best]:
                descent.best, moved = fastest, True
    return descent
