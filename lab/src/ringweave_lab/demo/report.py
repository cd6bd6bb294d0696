"""Write a demonstration to one HTML file without scripts or links, for phones and for light and dark themes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ringweave.units import nbytes

from ..bench.launched import LIMIT
from ..bench.plots import MEAN, bars, inline, loss_curves, shared_sequence
from ..bench.record import Outcome, plain
from ..bench.report import as_json, milliseconds, rendered
from .demo import DemoResult, bits, faster

_FUNCTIONS = {"Causal()": "dense, causal", "Full()": "dense, not causal"}


def write_report(result: DemoResult, path: str | Path) -> Path:
    """Write the report to a file, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(result), encoding="utf-8")
    return path


def render(result: DemoResult) -> str:
    """Return the report as HTML."""
    outcomes = list(result.outcomes)
    return rendered(
        "demo/demo.html.j2",
        title="ringweave on real text",
        r=result,
        picture=inline(result.pattern.picture),
        times=bars(outcomes, _milliseconds, _time_label, "milliseconds, median", "Time: shorter is better"),
        memory=bars(outcomes, _mebibytes, _memory_label, "MiB at the peak", "Memory: shorter is better"),
        losses=loss_curves(result.training),
        shared="" if isinstance(result.around, str) else shared_sequence(result.around),
        loss_limit=LIMIT,
        mean=MEAN,
        function=lambda outcome: _FUNCTIONS.get(outcome.computes, "the pattern"),
        ratio=ratio_text,
        faster=faster,
        bits=bits,
        groups=_grouped(outcomes),
        data=as_json(_figures(result)),
    )


def ratio_text(outcome: Outcome) -> tuple[str, str]:
    """Write the ratio to the first peer, and its range over rounds."""
    if outcome.over_first is None or outcome.timing is None:
        return "-", ""
    ratio = outcome.over_first
    if outcome.peer == "ringweave":
        return "1", ""
    single = len(outcome.timing.seconds) == 1
    return f"{ratio.medians:.2f}", "(1 round)" if single else f"({ratio.low:.2f} to {ratio.high:.2f})"


def _grouped(outcomes: list[Outcome]) -> list[tuple[str, list[Outcome]]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(f"{outcome.tokens:,} tokens, {outcome.direction}", []).append(outcome)
    return list(groups.items())


def _figures(result: DemoResult) -> object:
    """Return all figures for the page's JSON, without the picture, which the page already contains."""
    pattern = dataclasses.replace(result.pattern, picture="")
    return plain(dataclasses.replace(result, pattern=pattern))


def _milliseconds(outcome: Outcome) -> float | None:
    return None if outcome.timing is None else outcome.timing.median * 1e3


def _time_label(outcome: Outcome) -> str:
    if outcome.timing is None:
        return "wrong, not timed" if outcome.wrong else "not available"
    text = f"{milliseconds(outcome.timing.median)} ms"
    ratio = outcome.over_first
    if ratio is None or outcome.peer == "ringweave":
        return text
    return f"{text}, {ratio.medians:.1f} x"


def _mebibytes(outcome: Outcome) -> float | None:
    return None if outcome.peak is None else outcome.peak.nbytes / 2**20


def _memory_label(outcome: Outcome) -> str:
    return "not available" if outcome.peak is None else nbytes(outcome.peak.nbytes)
