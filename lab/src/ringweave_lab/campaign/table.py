"""The table of a campaign in plain text, short enough for the end of a terminal's output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Largest number of characters of the table.
MOST = 12_000
_WIDTH = 150


def table(figures: Iterable[Mapping[str, Any]], units: Mapping[str, str]) -> str:
    """Return the figures and the results of the units as text.

    Args:
        figures: Lines of the file of figures.
        units: Results of all units by name.
    """
    found = list(figures)
    lines = [*_machine(found), *_units(units), *_outcomes(found), *_targets(found)]
    lines = [line[:_WIDTH].rstrip() for line in lines]
    left, kept = MOST - _WIDTH, list[str]()
    for line in lines:
        left -= len(line) + 1
        if left < 0:
            kept.append(f"{len(lines) - len(kept)} more lines: see figures.jsonl")
            break
        kept.append(line)
    return "\n".join(kept)


def _machine(figures: list[Mapping[str, Any]]) -> list[str]:
    if not figures:
        return ["No figures."]
    of = figures[-1]["environment"]
    versions = " ".join(f"{name} {of[name]}" for name in ("driver", "cuda", "torch", "triton", "ringweave", "commit"))
    return [f"{of['accelerator'] or of['cpu']}, {versions}"]


def _units(units: Mapping[str, str]) -> list[str]:
    counts = {result: [name for name in units if units[name] == result] for result in dict.fromkeys(units.values())}
    return [
        f"{len(names)} units {result}" + ("" if result == "done" else f": {', '.join(names)}")
        for result, names in counts.items()
    ]


def _outcomes(figures: list[Mapping[str, Any]]) -> list[str]:
    """Return a line for each engine, problem and direction, the last figure of each; problems in their first order."""
    last = {
        (of["workload"], of["direction"], of["peer"]): of for of in figures if "peer" in of
    }  # fmt: skip
    if not last:
        return []
    first = "first engine's time over its own"
    lines = [
        "",
        f"{'problem':<14}{'tokens':>8}  {'direction':<9} {'engine':<24}{'ms':>10}{'TFLOP/s':>9}{'x':>7}  {first} (x)",
    ]
    for workload, direction in dict.fromkeys(key[:2] for key in sorted(last, key=lambda key: _order(last, key))):
        base: float | None = None
        for (name, way, peer), of in last.items():
            if (name, way) != (workload, direction):
                continue
            seconds = _median(of)
            base = base or seconds
            start = f"{workload:<14}{of['tokens']:>8}  {direction:<9} {peer:<24}"
            if seconds is None or base is None:
                lines.append(f"{start} {of['reason']}")
            else:
                rate = f"{seconds * 1e3:>10.3f}{of['gflops'] / 1e3:>9.2f}{base / seconds:>7.2f}"
                lines.append(f"{start}{rate}  {of['how']}")
    return lines


def _order(last: Mapping[tuple[str, str, str], Any], key: tuple[str, str, str]) -> int:
    return [other[0] for other in last].index(key[0])


def _median(of: Mapping[str, Any]) -> float | None:
    if of["timing"] is None:
        return None
    seconds = sorted(of["timing"]["seconds"])
    return float(seconds[len(seconds) // 2])


def _targets(figures: list[Mapping[str, Any]]) -> list[str]:
    """Return a line for each other figure; those with a reason or outside of their bound first."""
    last = {(of["what"], of["size"]): of for of in figures if "bound" in of}
    if not last:
        return []
    lines = []
    for (what, size), of in last.items():
        bound = "" if of["bound"] is None else f" ({'at least' if of['at_least'] else 'at most'} {of['bound']:g})"
        figure = "" if of["figure"] is None else f"{of['figure']:.4g} {of['unit']}".rstrip() + bound
        met = of["figure"] is not None and (
            of["bound"] is None or (of["figure"] >= of["bound"]) == of["at_least"] or of["figure"] == of["bound"]
        )
        lines.append(
            (
                met,
                f"{what}; {size}: {figure or of['reason']}" + (f"; {of['reason']}" if figure and of["reason"] else ""),
            )
        )
    return ["", *(line for _, line in sorted(lines, key=lambda each: each[0]))]
