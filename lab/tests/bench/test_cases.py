from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringweave.errors import UnsupportedError
from ringweave_lab.bench.cases import CASES, CaseResult, run_case
from ringweave_lab.bench.record import Options, Outcome, PlanCost
from ringweave_lab.commands import register

app = typer.Typer()
register(app)


@functools.cache
def quick(name: str) -> CaseResult:
    return run_case(name, Options(quick=True, rounds=1))


# cases with their own tests
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("ring", "quality", "kernels", "seeds")])
def test_every_case_has_a_quick_form_in_which_ringweave_is_right(name: str) -> None:
    result = quick(name)
    assert result.records
    assert result.conclusion.endswith(".")
    for record in result.records:
        if isinstance(record, Outcome):
            assert not record.wrong, record
            if record.peer == "ringweave":
                assert record.timing is not None, record.reason
        elif isinstance(record, PlanCost):
            assert record.tiles > 0


def test_plans_grow_with_their_tiles() -> None:
    plans = [r for r in quick("planning").records if isinstance(r, PlanCost)]
    window = [plan for plan in plans if plan.workload == "window + sinks"]
    assert len(window) >= 3
    assert max(plan.bytes_per_tile for plan in window) <= 64
    # the shortest is no longer than the window, so its tiles are those of a triangle
    assert window[-1].nbytes / window[0].nbytes < 1.5 * window[-1].tiles / window[0].tiles
    assert window[-1].tiles < 0.75 * (window[-1].tokens / window[0].tokens) ** 2 * window[0].tiles


def test_sizes_and_types_can_be_chosen() -> None:
    options = Options(quick=True, tokens=512, heads=1, dtype=torch.bfloat16, rounds=1)
    for record in run_case("memory", options).records:
        assert isinstance(record, Outcome)
        assert (record.tokens, record.heads, record.dtype) == (512, 1, "bfloat16")
        assert not record.wrong


def test_an_unknown_case_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"case: got 'speed'; wanted one of attention, kernels, planning"):
        run_case("speed")


def test_the_command_prints_a_table_and_writes_lines(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    command = ["bench", "dilated", "--quick", "--tokens", "512", "--rounds", "2", "--out", str(out)]
    found = CliRunner().invoke(app, command, env={"COLUMNS": "140"})
    assert found.exit_code == 0, found.output
    for word in ("LongNet", "ringweave", "sdpa", "ratio", "GFLOP/s", "MiB"):
        assert word in found.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"{len(lines)} lines added" in found.output
    assert {line["case"] for line in lines} == {"dilated"}
    assert all(line["environment"]["torch"] == torch.__version__ for line in lines)
    timed = [line for line in lines if line["timing"]]
    assert timed
    assert all(len(line["timing"]["seconds"]) == 2 for line in timed)


def test_the_list_names_cases_and_peers() -> None:
    found = CliRunner().invoke(app, ["bench", "--list"], env={"COLUMNS": "140"})
    assert found.exit_code == 0
    for name in (*CASES, "sdpa+mask", "flex", "gather_scatter"):
        assert name in found.output


def test_an_unknown_dtype_is_refused() -> None:
    found = CliRunner().invoke(app, ["bench", "planning", "--dtype", "int8"])
    assert found.exit_code == 2
    assert "int8" in found.output
