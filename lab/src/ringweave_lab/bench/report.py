"""Write figures to one HTML file with charts and tables, without scripts, for light and dark themes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import PackageLoader, StrictUndefined

from ringweave import files
from ringweave.errors import ShapeError
from ringweave.units import nbytes, percent

from ..tune.measure import Ratio, Timing
from . import plots
from .peak import Peak
from .record import Environment, Outcome, PlanCost, Published, Record, Score, StepCost, Target, plain

#: The key that identifies each kind of record in a JSON line.
_KINDS: tuple[tuple[str, type[Any]], ...] = (
    ("peer", Outcome), ("published", Published), ("bound", Target), ("method", Score), ("tiles", PlanCost),
    ("documents", StepCost),
)  # fmt: skip


def _timing(of: Mapping[str, Any]) -> Timing:
    return Timing(tuple(of["seconds"]))


_PARTS: dict[str, Callable[[Any], Any]] = {
    "timing": _timing,
    "same": _timing,
    "new": _timing,
    "plan": _timing,
    "over_first": lambda of: Ratio(**of),
    "peak": lambda of: Peak(**of),
    "curve": tuple,
}


def rendered(template: str, **values: object) -> str:
    """Return the text of a template, named by its path in this package."""
    environment = Templates(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=PackageLoader("ringweave_lab", ""),
    )  # fmt: skip
    environment.filters |= {
        "milliseconds": milliseconds,
        "error": error_text,
        "bytes": nbytes,
        "percent": percent,
        "count": lambda number: f"{number:,.0f}",
    }
    return environment.get_template(template).render(**values)


def as_json(value: object) -> str:
    """Return JSON for a script element, without ``</``, which could end the element."""
    return json.dumps(value).replace("</", "<\\/")


def milliseconds(seconds: float) -> str:
    """Return seconds as text in milliseconds: ``12.3``, ``1,234``."""
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def error_text(error: float) -> str:
    """Return an error as text with two digits: ``3.6e-07``."""
    return f"{error:.1e}"


@dataclasses.dataclass(frozen=True)
class CasePage:
    """The part of a page about one case.

    Attributes:
        case: Name of the case.
        machines: Descriptions of the machines, one for each run.
        records: Measured records; a later record replaces an earlier one of the same quantity.
        charts: Caption and SVG of each chart.
    """

    case: str
    machines: tuple[str, ...]
    records: tuple[Record, ...]
    charts: tuple[tuple[str, str], ...]

    @property
    def problems(self) -> dict[str, list[Outcome]]:
        """Outcomes of all peers, by problem and direction."""
        found: dict[str, list[Outcome]] = {}
        for each in self.records:
            if isinstance(each, Outcome):
                name = (
                    f"{each.workload}, {each.direction}: {each.tokens:,} tokens, {_heads(each)}, D {each.head_dim}, "
                    f"{each.dtype}, density {each.density:.1%}"
                )
                found.setdefault(name, []).append(each)
        return found

    @property
    def goals(self) -> list[Target]:
        """Targets with a bound."""
        return [each for each in self.records if isinstance(each, Target) and each.bound is not None]

    @property
    def met(self) -> int:
        """Number of goals that are met."""
        return sum(bool(each.met) for each in self.goals)

    @property
    def others(self) -> list[Target]:
        """Targets without a bound."""
        return [each for each in self.records if isinstance(each, Target) and each.bound is None]

    def of(self, kind: str) -> list[Record]:
        """Return the records of a class, given by name."""
        return [each for each in self.records if type(each).__name__ == kind]


def read_lines(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Return the JSON lines of files, without lines that a killed run left incomplete.

    Raises:
        ShapeError: A file does not exist.
    """
    found: list[dict[str, Any]] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise ShapeError("lines", str(path), "files of JSON lines", "ringweave bench CASE --out FILE.")
        found += files.json_lines(path)
    return found


def record_of(line: Mapping[str, Any]) -> Record | None:
    """Return the record of a line, without accuracy and limit; None for lines of other programs."""
    for name, kind in _KINDS:
        if name in line:
            known = {field.name for field in dataclasses.fields(kind)} - {"accuracy", "limit"}
            given = {key: value for key, value in line.items() if key in known}
            with contextlib.suppress(KeyError, TypeError):
                made: Record = kind(
                    **{key: _PARTS[key](value) if key in _PARTS and value is not None else value
                       for key, value in given.items()}
                )  # fmt: skip
                return made
    return None


def case_pages(lines: Iterable[Mapping[str, Any]]) -> list[CasePage]:
    """Group lines by case.

    Args:
        lines: Lines from :func:`read_lines`.
    Raises:
        ShapeError: No line is a record of a case.
    """
    cases: dict[str, dict[object, Record]] = {}
    machines: dict[str, dict[str, None]] = {}
    for line in lines:
        record = record_of(line)
        if record is not None and "environment" in line:
            cases.setdefault(line["case"], {})[_same(record)] = record
            machines.setdefault(line["case"], {})[_machine(line["environment"])] = None
    if not cases:
        raise ShapeError("lines", "none of a case", "lines of ringweave bench", "bench CASE --out FILE.jsonl.")
    return [
        CasePage(case, tuple(machines[case]), tuple(found.values()), tuple(_charts(list(found.values()))))
        for case, found in cases.items()
    ]


def rendered_figures(pages: Iterable[CasePage]) -> str:
    """Return the page of cases as HTML."""
    pages = list(pages)
    data = [{"case": page.case, "machines": page.machines, "records": plain(page.records)} for page in pages]
    return rendered("bench/figures.html.j2", title="Figures of ringweave", cases=pages, data=as_json(data))


def write_figures(pages: Iterable[CasePage], path: str | Path) -> Path:
    """Write the page of cases to a file, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rendered_figures(pages), "utf-8")
    return path


def _same(record: Record) -> object:
    """Return a key that is equal for two records of the same quantity."""
    results = {
        "timing", "over_first", "gflops", "peak", "accuracy", "limit", "setup_seconds", "peak_share", "memory_share",
        "reason", "figure", "value", "curve", "nbytes", "how", "density", "same", "new", "plan",
    }  # fmt: skip
    fields = ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record))
    density = round(record.density, 2) if isinstance(record, (Outcome, Score)) else 0
    return type(record), density, tuple(each for each in fields if each[0] not in results)


def _machine(given: Mapping[str, Any]) -> str:
    # lines of older versions lack some fields
    known: dict[str, Any] = {field.name: given.get(field.name) for field in dataclasses.fields(Environment)}
    where = Environment(**known)
    load = "" if where.load is None else f", load {where.load}"
    commit = f" ({where.commit})" if where.commit else ""
    return f"{where.machine}{load}; ringweave {where.ringweave}{commit}; {where.date[:10]}"


def _charts(records: list[Record]) -> Iterable[tuple[str, str]]:
    outcomes = [each for each in records if isinstance(each, Outcome) and each.timing is not None]
    time = {id(each): each.timing.median * 1e3 for each in outcomes if each.timing is not None}
    peaks = {id(each): each.peak.nbytes / 2**20 for each in outcomes if each.peak is not None and each.peak.nbytes > 0}
    of_length = ("workload", "direction", "dtype", "heads", "head_dim")
    of_density = ("tokens", "direction", "dtype", "heads", "head_dim")
    for caption, x, value, names, axis, least in (
        ("Time against length", "tokens", time, of_length, "ms", 2),
        # three points at least, since two patterns of one length already have two densities
        ("Time against density", "density", time, of_density, "ms", 3),
        ("Memory at the peak against length", "tokens", peaks, of_length, "MiB", 2),
    ):
        panels = _panels(outcomes, x, value, names, least)
        if panels:
            yield caption, plots.curves(panels, x, axis)
    placed = [each for each in outcomes if each.peak_share and each.memory_share]
    if placed:
        yield (
            "Roofline: operations for each byte that has to be moved, 1 where computing takes as long as reading, and "
            "the share of the processor's peak that is reached; both peaks are of the same run",
            plots.roofline(placed),
        )
    scores = [each for each in records if isinstance(each, Score)]
    if scores:
        yield "Means, and lines from the least to the most over seeds", plots.scores(scores)


def _panels(
    outcomes: list[Outcome], x: str, value: Mapping[int, float], names: tuple[str, ...], least: int
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the curves of each peer by panel title, without curves of fewer than ``least`` points."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in outcomes:
        if id(each) in value:
            title = ", ".join(_word(name, each) for name in names)
            found.setdefault(title, {}).setdefault(each.peer, []).append((getattr(each, x), value[id(each)]))
    panels = {}
    for title, peers in found.items():
        curves = {peer: sorted(points) for peer, points in peers.items() if len({at for at, _ in points}) >= least}
        # several problems with equal x do not form a curve
        if curves and all(len({at for at, _ in points}) == len(points) for points in curves.values()):
            panels[title] = curves
    return panels


def _word(name: str, of: Outcome) -> str:
    words = {"tokens": f"{of.tokens:,} tokens", "heads": _heads(of), "head_dim": f"D {of.head_dim}"}
    return words.get(name) or str(getattr(of, name))


def _heads(of: Outcome) -> str:
    return f"{of.heads} heads" if of.heads == of.kv_heads else f"{of.heads} over {of.kv_heads} heads"
