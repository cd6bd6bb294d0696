"""The options of a context, checked at construction."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import number, one_of, seconds, whole
from ..errors import ShapeError
from .execution.wire import FORMATS
from .planning.placement import NAMED, Placement

SCHEDULES = ("auto", "allgather", "ring")


@dataclass(frozen=True)
class ContextOptions:
    """The options of a context for placement and exchange; see the arguments of :class:`ContextParallel`.

    Raises:
        ShapeError: A number is invalid or out of bounds.
        UnsupportedError: The schedule, placement or wire is unknown.
    """

    schedule: str = "auto"
    placement: str | Placement = "auto"
    wire: str = "native"
    tolerance: float | None = None
    deadline: float = 30.0
    retries: int = 0

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        if not isinstance(self.placement, Placement):
            one_of("placement", self.placement, ("auto", *NAMED), "'auto', a Placement or ")
        one_of("wire", self.wire, FORMATS)
        tolerance = None if self.tolerance is None else number("tolerance", self.tolerance, 0, error=ShapeError)
        object.__setattr__(self, "tolerance", tolerance)
        object.__setattr__(self, "deadline", seconds("deadline", self.deadline))
        object.__setattr__(self, "retries", whole("retries", self.retries, 0, error=ShapeError))
