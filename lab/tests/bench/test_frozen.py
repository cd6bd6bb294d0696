"""Interfaces for other programs stay fixed: fields of JSON lines, heads of tables, exit codes, options and names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from ringweave.cli import app as module
from ringweave.program_cache import Found
from ringweave_lab import bench, demo
from ringweave_lab.bench import CASES, Options, run_case

HEAD = ["case", "environment", "options"]
ENVIRONMENT = [
    "date", "cpu", "cores", "threads", "load", "memory", "accelerator", "driver", "cuda", "triton", "platform",
    "python", "torch", "ringweave", "kernel", "commit",
]  # fmt: skip
OPTIONS = ["quick", "tokens", "heads", "dtype", "device", "rounds", "full", "folder", "part"]
OUTCOME = [
    "workload", "tokens", "heads", "kv_heads", "head_dim", "dtype", "density", "direction", "peer", "computes", "how",
    "timing", "over_first", "gflops", "peak", "accuracy", "limit", "setup_seconds", "peak_share", "memory_share", "reason",
]  # fmt: skip
PLAN = ["workload", "pattern", "tokens", "tiles", "timing", "nbytes"]
STEP = ["tokens", "documents", "window", "heads", "head_dim", "dtype", "same", "new", "plan"]
TARGET = ["what", "size", "figure", "bound", "at_least", "unit", "reason"]
SCORE = ["part", "method", "tokens", "seed", "steps", "unit", "density", "value", "curve"]
RESULTS = Path(__file__).parents[2] / "results"


def run(*words: str, columns: int = 160) -> Result:
    return CliRunner().invoke(module.app, list(words), env={"COLUMNS": str(columns), "NO_COLOR": "1"})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """Compare peers once; return the output and the lines."""
    out = tmp_path_factory.mktemp("comparison") / "figures.jsonl"
    found = run("bench", "memory", "--quick", "--tokens", "256", "--out", str(out))
    assert found.exit_code == 0, found.output
    return " ".join(found.output.split()), lines(out)


def test_a_line_of_a_comparison(comparison: tuple[str, list[dict[str, Any]]]) -> None:
    for line in comparison[1]:
        assert list(line) == HEAD + OUTCOME
        assert list(line["environment"]) == ENVIRONMENT
        assert list(line["options"]) == OPTIONS
        if line["timing"] is None:
            assert line["reason"]
            continue
        assert list(line["timing"]) == ["seconds"]
        assert list(line["over_first"]) == ["medians", "paired", "low", "high"]
        assert list(line["peak"]) == ["nbytes", "method"]
        for name in ("accuracy", "limit"):
            assert list(line[name]) == ["out", "dq", "dk", "dv"]
        # root mean square and maximum
        assert [type(each) for each in line["accuracy"]["out"]] == [float, float]
        assert isinstance(line["limit"]["out"], float)
    assert {line["direction"] for line in comparison[1]} == {"forward", "forward + backward"}


def test_a_line_of_a_plan_and_its_table(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    found = run("bench", "planning", "--quick", "--rounds", "1", "--tokens", "512", "--out", str(out))
    assert found.exit_code == 0, found.output
    assert all(list(line) == HEAD + PLAN for line in lines(out))
    assert "Cold plans" in found.output
    assert "pattern tokens tiles ms min max ns/tile B/tile" in " ".join(found.output.split())
    assert f"{len(lines(out))} lines added to" in found.output


def test_a_line_of_a_packed_step_and_its_table(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    found = run("bench", "packed", "--quick", "--rounds", "1", "--tokens", "256", "--out", str(out), columns=80)
    assert found.exit_code == 0, found.output
    assert all(list(line) == HEAD + STEP for line in lines(out))
    assert all(list(line[name]) == ["seconds"] for line in lines(out) for name in ("same", "new", "plan"))
    assert "tokens documents window same ms new ms ratio plan ms of step" in " ".join(found.output.split())


def test_a_narrow_table_of_plans_has_whole_names() -> None:
    found = run("bench", "planning", "--quick", "--rounds", "1", "--tokens", "512", columns=80)
    assert found.exit_code == 0, found.output
    assert "pattern tokens tiles ms ns/tile B/tile" in " ".join(found.output.split())
    assert "…" not in found.output


def test_the_heads_of_tables(tmp_path: Path, comparison: tuple[str, list[dict[str, Any]]]) -> None:
    out = tmp_path / "figures.jsonl"
    found = run(
        "bench", "kernels", "--quick", "--rounds", "1", "--tokens", "256", "--dtype", "float32", "--out", str(out)
    )
    assert found.exit_code == 0, found.output
    said = " ".join(found.output.split())
    assert "float32, forward + backward" in said
    assert "tokens D heads density ms GFLOP/s of peak" in said
    targets = [line for line in lines(out) if "bound" in line]
    assert all(list(line) == HEAD + TARGET for line in targets)
    if targets:
        assert "what size measured target met" in said
    said, _ = comparison
    assert "peer ms min max ratio GFLOP/s MiB note" in said
    assert "window + sinks, forward: 256 tokens, 1 heads, D = 64, float32, density 1.0000" not in said
    assert "window + sinks, forward: 256 tokens, 1 heads, D = 64, float32, density 0.5" in said


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.jsonl")), ids=lambda path: str(path.relative_to(RESULTS)))
def test_committed_lines_have_the_fields_of_records(path: Path) -> None:
    """Every committed line has the fields of a record; older lines may lack fields that were added later."""
    for line in lines(path):
        if path.stem == "cpu-calls":
            # a line of scripts/small_calls.py
            assert list(line) == ["case", "us", "threads", "load", "torch"]
            continue
        fields = [name for name in line if name not in HEAD]
        older = [name for name in OUTCOME if name != "memory_share"]
        assert fields in (OUTCOME, older, PLAN, STEP, TARGET, SCORE)
        assert set(line["environment"]) <= set(ENVIRONMENT)
        assert list(line["options"]) == OPTIONS[: len(line["options"])]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "speed"], "case: got 'speed'; wanted one of attention, kernels, planning"),
        (["bench", "ring", "--device", "cuda"], "this torch finds no CUDA device"),
        (["bench", "attention", "--dtype", "int8"], "int8"),
        (["bench", "attention", "--device", "tpu"], "'tpu' is neither cpu nor cuda"),
    ],
)
def test_what_cannot_run_ends_with_two(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = run(*words)
    assert found.exit_code == 2
    assert said in " ".join(found.output.replace("│", " ").split())


def test_wrong_results_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringweave import program

    right = program.Program.forward

    def wrong(*arguments: Any) -> Any:
        out, lse = right(*arguments)
        return out * 1.01, lse

    monkeypatch.setattr(program.Program, "forward", wrong)
    monkeypatch.setattr("ringweave.api.find", lambda *call: Found(None, None))
    found = run("bench", "memory", "--quick", "--tokens", "256")
    assert found.exit_code == 1
    assert "ringweave is wrong on window + sinks, forward: wrong: root mean square error of out" in " ".join(
        found.output.split()
    )
    assert "not timed" in found.output


def test_options_are_frozen() -> None:
    commands = typer.main.get_command(module.app).commands  # type: ignore[attr-defined]
    found = {
        name: sorted(option for parameter in commands[name].params for option in parameter.opts)
        for name in ("bench", "bench campaign", "bench --gate", "demo")
    }
    assert found == {
        "bench": [
            "--device", "--dtype", "--folder", "--full", "--heads", "--list", "--out", "--part", "--quick", "--rounds",
            "--threads", "--tokens", "case",
        ],
        "bench campaign": ["--caches", "--device", "--dry", "--out", "--resume", "--seconds", "--tarball"],
        "bench --gate": ["--slow", "--update", "file"],
        "demo": ["--out", "--quick", "--threads"],
    }  # fmt: skip


def test_names_are_frozen() -> None:
    assert list(CASES) == [
        "attention",
        "kernels",
        "planning",
        "packed",
        "backends",
        "memory",
        "decode",
        "dilated",
        "crossover",
        "tune",
        "tiles",
        "ordering",
        "selected",
        "integrations",
        "terms",
        "module",
        "models",
        "quality",
        "seeds",
        "pages",
        "ring",
    ]
    assert {"CASES", "CaseResult", "Options", "Outcome", "Peer", "Target", "compare", "peers"} <= {*bench.__all__}
    assert "run_case" in bench.__all__
    assert demo.__all__ == ["DemoResult", "run_demo"]
    assert all(getattr(bench, name) is not None for name in bench.__all__)
    assert run_case("planning", Options(quick=True, tokens=1024, rounds=1)).case == "planning"


def test_a_run_that_ends_early_keeps_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is on the disk before the next measurement begins."""
    out, seen = tmp_path / "figures.jsonl", []
    case = CASES["memory"]

    def measure(options: Options, say: Any) -> Any:
        for record in (measuring := case.measure(options, say)):
            seen.append(len(lines(out)) if out.exists() else 0)
            yield record
            if len(seen) == 3:
                measuring.close()
                raise KeyboardInterrupt

    monkeypatch.setitem(CASES, "memory", dataclasses.replace(case, measure=measure))
    found = run("bench", "memory", "--quick", "--tokens", "256", "--out", str(out))
    assert found.exit_code != 0
    assert seen == [0, 1, 2]
    assert [line["direction"] for line in lines(out)] == ["forward"] * 3
    assert all(line["timing"] or line["reason"] for line in lines(out))
