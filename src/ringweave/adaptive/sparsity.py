"""How dense attention is while training: dense first, sparser step by step, then as sparse as it stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..errors import PatternError, message, shown
from ..patterns import Pattern
from ..patterns.validate import number, one_of, whole

#: How much of the way is gone at a share of the ramp.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x,
    "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
    "cubic": lambda x: 1 - (1 - x) ** 3,
}


class SparsitySchedule:
    """A density that is held for a warm-up, goes from ``start`` to ``end``, and is held there; and the pattern of it.

    Step t has density ``start + (end - start) * shape((t - warmup) / ramp)``, which moves every ``every`` steps:
    between two moves the pattern is the same object, planned once.

    Args:
        pattern: Makes the pattern of a density; None where ``density`` alone is wanted, for a selector.
        start: Density of the first steps, above 0 and at most 1.
        end: Density of the last steps.
        warmup: Steps at ``start``.
        ramp: Steps from ``start`` to ``end``.
        shape: ``"linear"``, ``"cosine"`` (slow at both ends) or ``"cubic"`` (fast first, slow towards the end).
        every: Steps between two moves of the density.
    Attributes:
        steps: How many steps were taken.
    Raises:
        PatternError: Densities or steps that are none, or at a move something that is no pattern.
        UnsupportedError: An unknown shape.
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
        Zhu and Gupta (2017), To prune, or not to prune, section 3 (the cubic ramp, of weights).
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
            raise PatternError(message("pattern", shown(pattern), "a function of a density", "Pass a lambda."))
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
        """Give the density of the present step."""
        steps = self.steps - self.warmup
        # the end is reached whether or not moves divide the ramp
        steps = steps if steps >= self.ramp else steps // self.every * self.every
        way = _SHAPES[self.shape](min(max(steps / self.ramp, 0.0), 1.0))
        return self.end if way == 1 else self.start + (self.end - self.start) * way

    @property
    def pattern(self) -> Pattern:
        """Give the pattern of the present step, made anew where the density has moved."""
        density = self.density
        if self.make is None:
            raise PatternError(message("pattern", None, "a function of a density", "Give the schedule one."))
        if self._made is None or self._made[0] != density:
            made = self.make(density)
            if not isinstance(made, Pattern):
                raise PatternError(message(f"pattern({density:g})", shown(made), "a pattern", "Return a pattern."))
            self._made = density, made
        return self._made[1]

    def step(self) -> None:
        """Go on to the next step."""
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Give what it takes to go on in another process: the steps taken."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`; everything else is as this one was made.

        Raises:
            PatternError: A state of something else.
        """
        if set(state) != {"steps"}:
            raise PatternError(message("state", sorted(state), "['steps']", "Pass what state_dict gave."))
        self.steps = whole("steps", state["steps"], 0)


def _density(name: str, value: object) -> float:
    density = number(name, value, 0.0, 1.0)
    if density == 0:
        raise PatternError(message(name, value, "above 0", "A density is the share of pairs that attend."))
    return density
