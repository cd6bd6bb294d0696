"""A schedule for the density of attention during training: a dense warm-up, a ramp, then a constant density."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..checks import number, one_of, whole
from ..errors import PatternError, shown
from ..patterns import Pattern

#: Progress from start to end (0 to 1), by the elapsed share of the ramp.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x,
    "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
    "cubic": lambda x: 1 - (1 - x) ** 3,
}


class SparsitySchedule:
    """A schedule that holds a density for a warm-up, moves it from ``start`` to ``end``, and holds it there.

    Step t has density ``start + (end - start) * shape((t - warmup) / ramp)``, updated every ``every`` steps. Between
    two updates ``pattern`` returns the same object, so it is planned once.

    Args:
        pattern: Function from a density to a pattern; None if only ``density`` is used, for example with ``select``.
        start: Density of the first steps, above 0 and at most 1.
        end: Density of the last steps, above 0 and at most 1.
        warmup: Number of steps at ``start``.
        ramp: Number of steps from ``start`` to ``end``.
        shape: ``"linear"``, ``"cosine"`` (slow at both ends) or ``"cubic"`` (fast at first, slow towards the end).
        every: Number of steps between two updates of the density.
    Attributes:
        steps: Number of steps taken.
    Raises:
        PatternError: A density or a number of steps is out of range, or ``pattern`` does not return a pattern.
        UnsupportedError: The shape is unknown.
    Example:
        >>> schedule = rw.adaptive.SparsitySchedule(
        ...     lambda density: rw.patterns.random_blocks(256, density, block_size=16),
        ...     start=0.5, end=0.1, warmup=2, ramp=4, shape="linear",
        ... )
        >>> densities = []
        >>> for _ in range(8):
        ...     densities.append(round(schedule.density, 2))
        ...     out = rw.attention(q, k, v, schedule.pattern & rw.Causal())
        ...     schedule.step()
        >>> densities
        [0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]

    References:
        Zhu and Gupta (2017), To prune, or not to prune, section 3 (the cubic ramp, for pruning weights).
    """

    def __init__(
        self,
        pattern: Callable[[float], Pattern] | None = None,
        *,
        start: float,
        end: float,
        warmup: int = 0,
        ramp: int,
        shape: str = "cubic",
        every: int = 1,
    ):
        if pattern is not None and not callable(pattern):
            raise PatternError("pattern", shown(pattern), "a function of a density", "Pass a lambda.")
        self.make = pattern
        self.start, self.end = (_density(name, value) for name, value in (("start", start), ("end", end)))
        self.warmup, self.ramp, self.every = (
            whole("warmup", warmup, 0),
            whole("ramp", ramp, 1),
            whole("every", every, 1),
        )
        self.shape = one_of("shape", shape, list(_SHAPES))
        self.steps = 0
        self._made: tuple[float, Pattern] | None = None

    @property
    def density(self) -> float:
        """Density of the current step."""
        steps = self.steps - self.warmup
        # reach the end even if `every` does not divide the ramp
        steps = steps if steps >= self.ramp else steps // self.every * self.every
        way = _SHAPES[self.shape](min(max(steps / self.ramp, 0.0), 1.0))
        return self.end if way == 1 else self.start + (self.end - self.start) * way

    @property
    def pattern(self) -> Pattern:
        """Pattern of the current step; rebuilt when the density changes."""
        density = self.density
        if self.make is None:
            raise PatternError("pattern", None, "a function of a density", "Pass pattern= to the schedule.")
        if self._made is None or self._made[0] != density:
            made = self.make(density)
            if not isinstance(made, Pattern):
                raise PatternError(f"pattern({density:g})", shown(made), "a pattern", "Return a pattern.")
            self._made = density, made
        return self._made[1]

    def step(self) -> None:
        """Advance to the next step."""
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: the number of steps taken."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a :meth:`state_dict`; all other settings remain those of this schedule.

        Raises:
            PatternError: The state is not from a SparsitySchedule.
        """
        if set(state) != {"steps"}:
            raise PatternError("state", sorted(state), "['steps']", "Pass what state_dict gave.")
        self.steps = whole("steps", state["steps"], 0)


def _density(name: str, value: object) -> float:
    density = number(name, value, 0.0, 1.0)
    if density == 0:
        raise PatternError(name, value, "above 0", "A density is the share of pairs that attend.")
    return density
