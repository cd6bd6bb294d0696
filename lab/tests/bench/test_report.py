"""The page of figures shows the numbers of the records, and contains no script."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringweave.cli.app import app
from ringweave.errors import ShapeError
from ringweave_lab.bench.peak import Peak
from ringweave_lab.bench.record import Outcome, PlanCost, Published, Record, Score, StepCost, Target, plain
from ringweave_lab.bench.report import case_pages, read_lines, record_of, write_figures
from ringweave_lab.tune.measure import Ratio, Timing
from ringweave_lab.tune.problem import FORWARD
from tests.sampled import is_long

RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*.jsonl"))
WHERE = {"date": "2026-01-02T00:00:00", "cpu": "one", "threads": 2, "load": 0.1, "torch": "2", "ringweave": "0",
         "commit": "abc"}  # fmt: skip


def outcome(tokens: int, peer: str, seconds: float, density: float = 0.1, share: float | None = None) -> Outcome:
    return Outcome(
        "window", tokens, 4, 2, 64, "float32", density, FORWARD, peer, "Full()", timing=Timing((seconds,)),
        over_first=Ratio(1.5, 1.5, 1.0, 2.0), gflops=12.0, peak=Peak(2**21, "x"), peak_share=share, memory_share=share,
    )  # fmt: skip


def line(record: Record, case: str = "kernels") -> dict[str, Any]:
    written: dict[str, Any] = json.loads(json.dumps({"case": case, "environment": WHERE} | plain(record)))
    return written


RECORDS = (
    outcome(1024, "ringweave", 0.5),
    Target("a <b> figure", "8 tokens", 0.5, 0.7, True, "%"),
    Score("recall", "dense", 4096, 0, 10, "share", 0.1, 0.5, (1.0, 2.0)),
    Published("speed", "4 x", "8 tokens", 3.0, "x", "note"),
    PlanCost("causal", "Causal()", 1024, 36, Timing((0.001, 0.002, 0.003)), 2048),
    StepCost(1024, 8, None, 4, 64, "float32", Timing((0.2, 0.4)), Timing((0.3, 0.6)), Timing((0.03, 0.06))),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_line_is_read_as_the_record_that_it_was(record: Record) -> None:
    assert record_of(line(record)) == record


def test_every_committed_line_is_read() -> None:
    for each in read_lines(path for path in RESULTS if path.stem != "cpu-calls"):
        record = record_of(each)
        assert record is not None
        known = {field.name for field in dataclasses.fields(record)} - {"accuracy", "limit"}
        got = plain(record)
        assert {name: got[name] for name in known if name in each} == {name: each[name] for name in known & each.keys()}


def test_goals_are_counted_and_other_figures_stand_behind(tmp_path: Path) -> None:
    targets = (
        Target("one", "n", 0.5, 0.7, True, "%"), Target("two", "n", 0.8, 0.7, True, "%"),
        Target("three", "n", None, 0.7, True, "%", "no such memory"), Target("four", "n", 0.1, None, True, "%"),
    )  # fmt: skip
    (page,) = case_pages(line(each) for each in targets)
    assert ([each.what for each in page.goals], page.met) == (["one", "two", "three"], 1)
    text = write_figures([page], tmp_path / "page.html").read_text("utf-8")
    assert "kernels</a>: 1 of 3 goals met" in text
    assert "no such memory" in text
    assert "four" in text.split("1 figures without a goal")[1].split("</details>")[0]


def test_groups_of_heads_have_charts_of_their_own() -> None:
    """A grouped problem with one density has its own chart; on a shared chart it hid all curves over densities."""
    lines = [line(outcome(8192, "ringweave", 1.0, density)) for density in (0.2, 0.4, 0.6)]
    lines.append(line(dataclasses.replace(outcome(8192, "ringweave", 0.9, 0.4), kv_heads=4)))
    (page,) = case_pages(lines)
    assert [caption for caption, _ in page.charts] == ["Time against density"]
    assert "4 over 2 heads" in " ".join(page.problems)


def test_a_page(tmp_path: Path) -> None:
    lines = [line(each) for each in RECORDS]
    lines += [line(outcome(n, peer, n * 1e-4, share=0.5)) for n in (2048, 4096) for peer in ("ringweave", "sdpa")]
    lines += [line(outcome(8192, "flex", 1.0, density)) for density in (0.2, 0.4, 0.6)]
    # of two equal records the later one counts; a random density differs a little each time
    lines.append(line(outcome(4096, "sdpa", 0.125, 0.1001)))
    text = write_figures(case_pages(lines), tmp_path / "new" / "page.html").read_text("utf-8")
    assert "a &lt;b&gt; figure" in text
    assert "<script>" not in text
    assert "&ge; 70.0%" in text
    assert "<td>none</td><td>300</td><td>450</td><td>1.50</td><td>45.0</td><td>10" in text
    for caption in ("Time against length", "Time against density", "Memory at the peak", "Roofline", "over seeds"):
        assert caption in text
    assert text.count("<svg") == 5
    data = json.loads(re.search(r'id="results">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    (case,) = data
    (again,) = [each for each in case["records"] if each.get("tokens") == 4096 and each.get("peer") == "sdpa"]
    assert again["timing"]["seconds"] == [0.125]
    assert case["machines"] == ["one, 2 threads, torch 2, load 0.1; ringweave 0 (abc); 2026-01-02"]


def test_invalid_lines(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(line(RECORDS[0])) + '\n{"case": "kern')
    assert len(read_lines([file])) == 1
    with pytest.raises(ShapeError, match=r"lines: got none of a case; wanted lines of ringweave bench"):
        case_pages([{"case": "x", "us": 3}])
    with pytest.raises(ShapeError, match=r"lines: got .*missing.jsonl; wanted files of JSON lines"):
        read_lines([tmp_path / "missing.jsonl"])


def test_the_commands(tmp_path: Path) -> None:
    run = CliRunner()
    out = tmp_path / "planning.html"
    found = run.invoke(app, ["bench", "planning", "--quick", "--rounds", "1", "--tokens", "1024", "--out", str(out)])
    assert found.exit_code == 0, found.output
    assert "ns a tile" in out.read_text("utf-8")
    # kernels have as many curves
    left_out = () if is_long() else ("cpu-quality", "cpu-tiles", "cpu-tune")
    files = [str(path) for path in RESULTS if path.stem not in left_out]
    words = ["bench", "page", *files, "--out", str(tmp_path / "all.html")]
    found = run.invoke(app, words, env={"COLUMNS": "160"})
    assert found.exit_code == 0, found.output
    assert "bfloat16: SDPA's time over ringweave's" in " ".join(found.output.split())
    text = (tmp_path / "all.html").read_text("utf-8")
    assert all(f'<h2 id="{case}">' in text for case in ("attention", "decode", "kernels", "planning", "ring"))
    found = run.invoke(app, ["bench", "page", str(tmp_path / "none.jsonl")])
    assert found.exit_code == 2
