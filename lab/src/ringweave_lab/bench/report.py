"""Figures as one HTML file, from records or from JSON lines: charts and tables, no scripts, in light and dark."""

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
from ringweave.errors import ShapeError, message
from ringweave.tune.measure import Ratio, Timing
from ringweave.units import nbytes, percent

from . import plots
from .peak import Peak
from .record import Environment, Outcome, PlanCost, Published, Record, Score, Target, plain

#: In lines, what tells each kind of record from the others.
_KINDS: tuple[tuple[str, type[Any]], ...] = (
    ("peer", Outcome), ("published", Published), ("bound", Target), ("method", Score), ("tiles", PlanCost),
)  # fmt: skip
_PARTS: dict[str, Callable[[Any], Any]] = {
    "timing": lambda of: Timing(tuple(of["seconds"])),
    "over_first": lambda of: Ratio(**of),
    "peak": lambda of: Peak(**of),
    "curve": tuple,
}


def rendered(template: str, **values: object) -> str:
    """Write out a template, named by its path in the laboratory's package."""
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
    """Write JSON for a script element, which ends at the first ``</``."""
    return json.dumps(value).replace("</", "<\\/")


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds: ``12.3``, ``1,234``."""
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def error_text(error: float) -> str:
    """Write an error with two digits: ``3.6e-07``."""
    return f"{error:.1e}"


@dataclasses.dataclass(frozen=True)
class CasePage:
    """A case of a page.

    Attributes:
        case: Its name.
        machines: Where its figures were taken, a line for each run.
        records: What was measured; of two of the same thing the later.
        charts: (caption, SVG) of each.
    """

    case: str
    machines: tuple[str, ...]
    records: tuple[Record, ...]
    charts: tuple[tuple[str, str], ...]

    @property
    def problems(self) -> dict[str, list[Outcome]]:
        """What came of every peer, by problem and direction."""
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
        """The figures that something is asked of."""
        return [each for each in self.records if isinstance(each, Target) and each.bound is not None]

    @property
    def met(self) -> int:
        """How many goals are met."""
        return sum(bool(each.met) for each in self.goals)

    @property
    def others(self) -> list[Target]:
        """The figures that nothing is asked of."""
        return [each for each in self.records if isinstance(each, Target) and each.bound is None]

    def of(self, kind: str) -> list[Record]:
        """List the records of a kind, by the name of its class."""
        return [each for each in self.records if type(each).__name__ == kind]


def read_lines(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Read the lines of files; one that was cut short, by a run that was killed, is none.

    Raises:
        ShapeError: A file that is not there.
    """
    found: list[dict[str, Any]] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise ShapeError(message("lines", str(path), "files of JSON lines", "ringweave bench CASE --out FILE."))
        found += files.json_lines(path)
    return found


def record_of(line: Mapping[str, Any]) -> Record | None:
    """Read a line as the record that it was, without its errors; None for lines of other programs."""
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
    """Sort lines by case.

    Args:
        lines: As :func:`read_lines` gives them.
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
        raise ShapeError(message("lines", "none of a case", "lines of ringweave bench", "bench CASE --out FILE.jsonl."))
    return [
        CasePage(case, tuple(machines[case]), tuple(found.values()), tuple(_charts(list(found.values()))))
        for case, found in cases.items()
    ]


def rendered_figures(pages: Iterable[CasePage]) -> str:
    """Write out the page of cases."""
    pages = list(pages)
    data = [{"case": page.case, "machines": page.machines, "records": plain(page.records)} for page in pages]
    return rendered("bench/figures.html.j2", title="Figures of ringweave", cases=pages, data=as_json(data))


def write_figures(pages: Iterable[CasePage], path: str | Path) -> Path:
    """Write the page of cases, and give its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rendered_figures(pages), "utf-8")
    return path


def _same(record: Record) -> object:
    """What two records of one thing have in common."""
    results = {
        "timing", "over_first", "gflops", "peak", "accuracy", "limit", "setup_seconds", "peak_share", "memory_share",
        "reason", "figure", "value", "curve", "nbytes", "how", "density",
    }  # fmt: skip
    fields = ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record))
    density = round(record.density, 2) if isinstance(record, (Outcome, Score)) else 0
    return type(record), density, tuple(each for each in fields if each[0] not in results)


def _machine(given: Mapping[str, Any]) -> str:
    # older lines lack what was added since
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
        # two patterns of one length have two densities as well
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
    """Curves of each peer, by what they have in common; of fewer points than the least, none."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in outcomes:
        if id(each) in value:
            title = ", ".join(_word(name, each) for name in names)
            found.setdefault(title, {}).setdefault(each.peer, []).append((getattr(each, x), value[id(each)]))
    panels = {}
    for title, peers in found.items():
        curves = {peer: sorted(points) for peer, points in peers.items() if len({at for at, _ in points}) >= least}
        # several problems at the same place say nothing about it
        if curves and all(len({at for at, _ in points}) == len(points) for points in curves.values()):
            panels[title] = curves
    return panels


def _word(name: str, of: Outcome) -> str:
    words = {"tokens": f"{of.tokens:,} tokens", "heads": _heads(of), "head_dim": f"D {of.head_dim}"}
    return words.get(name) or str(getattr(of, name))


def _heads(of: Outcome) -> str:
    return f"{of.heads} heads" if of.heads == of.kv_heads else f"{of.heads} over {of.kv_heads} heads"
