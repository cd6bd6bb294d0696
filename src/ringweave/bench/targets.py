"""Which outcomes have targets: rules, as data beside the cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .record import Outcome, Target


@dataclass(frozen=True)
class Rule:
    """Which outcomes have a target.

    Attributes:
        what: Words for the figure; ``{dtype}``, ``{direction}`` and ``{workload}`` are the outcome's.
        of: Attributes that an outcome has, such as its peer, or what they are to be.
        figure: What is looked at.
        bound: What it is to be.
        at_least: Whether that is the least or the most.
        unit: The figure's unit, as in :class:`Target`.
        tokens: The length at which the bound holds; None for any.
    """

    what: str
    of: Mapping[str, object]
    figure: Callable[[Outcome], float | None]
    bound: float
    at_least: bool = True
    unit: str = "x"
    tokens: int | None = None


def targets(rules: Sequence[Rule], outcomes: Sequence[Outcome], density: str = ".1%") -> list[Target]:
    """Set outcomes next to their targets, in their order.

    Args:
        rules: Which outcomes have one.
        outcomes: What was measured.
        density: How a density is written.
    """
    return [
        Target(
            rule.what.format(dtype=each.dtype, direction=each.direction, workload=each.workload),
            f"{each.tokens:,} tokens, {each.heads} heads, D {each.head_dim}, density {each.density:{density}}",
            rule.figure(each),
            rule.bound if rule.tokens in (None, each.tokens) else None,
            rule.at_least,
            rule.unit,
            each.reason,
        )
        for each in outcomes
        for rule in rules
        if all(_is(getattr(each, name), wanted) for name, wanted in rule.of.items())
    ]


def _is(value: object, wanted: object) -> bool:
    return bool(wanted(value)) if callable(wanted) else value == wanted


def over_first(outcome: Outcome) -> float | None:
    """Tell how many times longer than the first peer it took."""
    return None if outcome.over_first is None else outcome.over_first.medians
