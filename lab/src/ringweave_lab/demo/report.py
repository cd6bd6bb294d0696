"""A demonstration as one HTML file: no scripts, no links, readable on a phone, in light and dark."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ringweave.units import nbytes

from ..bench.launched import LIMIT
from ..bench.plots import MEAN, bars, inline, loss_curves, shared_sequence
from ..bench.record import Outcome, plain
from ..bench.report import as_json, milliseconds, rendered
from .demo import DemoResult

_FUNCTIONS = {"Causal()": "dense, causal", "Full()": "dense, not causal"}


def write_report(result: DemoResult, path: str | Path) -> Path:
    """Write the report, and give its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(result), encoding="utf-8")
    return path


def render(result: DemoResult) -> str:
    """Write out the report's text."""
    outcomes = list(result.outcomes)
    return rendered(
        "demo/demo.html.j2",
        title="ringweave on real text",
        r=result,
        picture=inline(result.pattern.picture),
        times=bars(outcomes, _milliseconds, _time_label, "milliseconds, median"),
        memory=bars(outcomes, _mebibytes, _memory_label, "MiB at the peak"),
        losses=loss_curves(result.training),
        shared="" if isinstance(result.around, str) else shared_sequence(result.around),
        loss_limit=LIMIT,
        mean=MEAN,
        function=lambda outcome: _FUNCTIONS.get(outcome.computes, "the pattern"),
        ratio=ratio_text,
        groups=_grouped(outcomes),
        data=as_json(_figures(result)),
    )


def ratio_text(outcome: Outcome) -> str:
    """Write the ratio to the first peer, with its range over rounds."""
    if outcome.over_first is None or outcome.timing is None:
        return "-"
    ratio = outcome.over_first
    if outcome.peer == "ringweave":
        return "1"
    if len(outcome.timing.seconds) == 1:
        return f"{ratio.medians:.2f} (1 round)"
    return f"{ratio.medians:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _grouped(outcomes: list[Outcome]) -> list[tuple[str, list[Outcome]]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(f"{outcome.tokens:,} tokens, {outcome.direction}", []).append(outcome)
    return list(groups.items())


def _figures(result: DemoResult) -> object:
    """Collect all figures, for those who want to compute with them; the picture is on the page already."""
    pattern = dataclasses.replace(result.pattern, picture="")
    return plain(dataclasses.replace(result, pattern=pattern))


def _milliseconds(outcome: Outcome) -> float | None:
    return None if outcome.timing is None else outcome.timing.median * 1e3


def _time_label(outcome: Outcome) -> str:
    if outcome.timing is None:
        return "wrong, not timed" if outcome.wrong else "not available"
    text = f"{milliseconds(outcome.timing.median)} ms"
    ratio = outcome.over_first
    return text if ratio is None or outcome.peer == "ringweave" else f"{text} ({ratio.medians:.2f} x)"


def _mebibytes(outcome: Outcome) -> float | None:
    return None if outcome.peak is None else outcome.peak.nbytes / 2**20


def _memory_label(outcome: Outcome) -> str:
    return "not available" if outcome.peak is None else nbytes(outcome.peak.nbytes)
