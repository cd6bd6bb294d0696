"""What a case of ``ringweave bench`` is asked, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .compare import Outcome, Say
from .measure import Timing


@dataclass(frozen=True)
class Options:
    """What a user may change of a case; None keeps the case's own size.

    Attributes:
        quick: A small form, seconds long.
        tokens: Sequence length.
        heads: Heads.
        dtype: Of the inputs; float32, or every one that a case is about.
        device: Of the inputs.
        rounds: Timed rounds.
        full: Every size of a case that has a grid of them; hours.
    """

    quick: bool = False
    tokens: int | None = None
    heads: int | None = None
    dtype: torch.dtype | None = None
    device: str = "cpu"
    rounds: int | None = None
    full: bool = False


@dataclass(frozen=True)
class PlanCost:
    """What planning one pattern at one length costs.

    Attributes:
        workload: Its name.
        pattern: As text.
        tokens: Its length.
        tiles: Non-empty tiles.
        timing: Seconds of a cold plan.
        nbytes: Of the plan.
    """

    workload: str
    pattern: str
    tokens: int
    tiles: int
    timing: Timing
    nbytes: int

    @property
    def nanoseconds_per_tile(self) -> float:
        """Median time over tiles."""
        return self.timing.median / self.tiles * 1e9

    @property
    def bytes_per_tile(self) -> float:
        """Size over tiles."""
        return self.nbytes / self.tiles


@dataclass(frozen=True)
class Target:
    """A figure, and what it is to be.

    Attributes:
        what: In words.
        size: At which size it was taken.
        figure: Measured; None where it could not be, and ``reason`` says why.
        bound: What it is to be; None where the size is too small to say.
        at_least: Whether ``bound`` is the least or the most.
        unit: ``"x"``, a ratio, ``"%"``, a share shown in hundredths, ``""``, a number shown with its power of ten, or a
            unit as it is written.
        reason: Why there is no figure.
    """

    what: str
    size: str
    figure: float | None
    bound: float | None
    at_least: bool
    unit: str = "x"
    reason: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the figure is as it should be; None where nothing can be said."""
        if self.figure is None or self.bound is None:
            return None
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound

    def spelled(self, value: float | None) -> str:
        """A figure in the target's unit."""
        if value is None:
            return "-"
        if self.unit == "":
            return f"{value:.1e}"
        return f"{value:.1%}" if self.unit == "%" else f"{value:.2f} {self.unit}"


@dataclass(frozen=True)
class CaseResult:
    """A case's figures, and what they say in a sentence.

    Attributes:
        case: Its name.
        records: Figures.
        conclusion: In words.
        grid: Whether outcomes are many sizes of one thing: shown a line each, with peers as columns.
    """

    case: str
    records: tuple[Outcome | PlanCost | Target, ...]
    conclusion: str
    grid: bool = False


@dataclass(frozen=True)
class BenchCase:
    """A named measurement."""

    name: str
    summary: str
    run: Callable[[Options, Say], CaseResult]
