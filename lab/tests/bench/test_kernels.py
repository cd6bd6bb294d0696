from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import ringweave as rw
from ringweave import program
from ringweave.backends import cpu
from ringweave.program_cache import Found
from ringweave_lab.bench import CaseResult, Options, Outcome, Target, run_case
from ringweave_lab.bench.cases.kernels import TARGETS, USUAL, asked, overheads, whole_grid
from ringweave_lab.bench.fma import fma_peak, library, why_no_peak
from ringweave_lab.bench.record import targets
from ringweave_lab.commands import register
from ringweave_lab.tune.measure import Ratio, Timing

app = typer.Typer()
register(app)
native = pytest.mark.skipif(cpu.module() is None, reason="built without a compiler")


@pytest.fixture(scope="module")
def result() -> CaseResult:
    return run_case("kernels", Options(quick=True, rounds=1))


def test_both_types_both_directions_and_peers_are_measured(result: CaseResult) -> None:
    outcomes = [record for record in result.records if isinstance(record, Outcome)]
    assert {o.dtype for o in outcomes} == {"float32", "bfloat16"}
    assert {o.direction for o in outcomes} == {"forward", "forward + backward"}
    assert {o.peer for o in outcomes} >= {"ringweave", "sdpa"}
    for outcome in outcomes:
        assert not outcome.wrong, outcome
        assert outcome.timing is not None, outcome.reason
        assert outcome.over_first is not None
    # dense attention is timed once, not for each density
    dense = {(o.dtype, o.direction, o.timing) for o in outcomes if o.peer == "sdpa"}
    assert len(dense) == 4


@native
def test_the_share_is_of_the_peak_and_on_the_tiles_computed(result: CaseResult) -> None:
    for record in result.records:
        if isinstance(record, Outcome) and record.peer == "ringweave":
            assert record.gflops is not None
            assert record.timing is not None
            tiles = (
                rw.patterns.random_blocks(record.tokens, record.density).plan(record.tokens, heads=record.heads).tiles
            )
            each = 128 * 128 * record.head_dim * (4 if record.direction == "forward" else 14)
            assert record.gflops == pytest.approx(tiles * each / record.timing.median / 1e9)
            assert record.peak_share is not None
            assert record.peak_share > 0
    assert cpu.variant() in result.conclusion
    assert fma_peak(torch.float32, 0.01, 2) > 1e9


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("objdump"), reason="needs x86-64 and binutils")
@pytest.mark.skipif(why_no_peak() is not None, reason="no C compiler")
@pytest.mark.parametrize(("variant", "chains"), [("avx2", 12), ("avx512", 24)])
def test_the_peak_is_of_multiply_adds(variant: str, chains: int, tmp_path: Path) -> None:
    """The peak counts real multiply-adds: a compiler may hoist a constant product and share equal sums."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(library(variant, tmp_path))]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    register = "zmm" if variant == "avx512" else "ymm"
    line = rf"\S+:\s+vfmadd\d+ps %{register}\d+,%{register}\d+,%{register}\d+ *\n\s*"
    assert re.search(rf"(?:{line}){{{chains}}}", code)


def test_without_a_compiler_the_peak_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(rw.UnsupportedError, match="no C compiler. Install gcc or clang, or set CC"):
        library("generic", tmp_path)


@native
def test_overheads_are_measured_and_small_sizes_have_no_target(result: CaseResult) -> None:
    targets = [record for record in result.records if isinstance(record, Target)]
    assert len(targets) == 11
    for target in targets:
        assert target.figure is not None
        assert target.figure >= 0
        assert target.met is None


def test_without_the_kernel_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "module", lambda: None)
    found = run_case("kernels", Options(quick=True, rounds=1, dtype=torch.float32))
    assert found.conclusion.startswith("No native kernel ran here (ringweave was installed without a C++ compiler, ")
    assert {r.how for r in found.records if isinstance(r, Outcome) and r.peer == "ringweave"} == {"dense_batched"}
    assert not any(isinstance(record, Target) for record in found.records)


def test_the_grid_has_every_size_asked_for() -> None:
    grid = list(whole_grid())
    problems = [problem for size in grid for problem, _ in size.entries]
    assert {each.tokens for each in problems} == {4096, 8192, 16384, 32768, 65536}
    assert {(each.head_dim, each.key_heads) for each in problems} == {(64, 8), (64, 2), (128, 8), (128, 2)}
    assert {each.relation.density for each in problems} == {0.01, 0.05, 0.1, 0.25, 0.5, 1.0}  # type: ignore[union-attr]
    for sizes in (grid, USUAL):
        assert sum("flex" in size.entries[0][1] for size in sizes) == 1
    # 1% of 32 rows of blocks is less than the diagonal
    kept = asked(grid[0], Options(), torch.bfloat16).entries
    assert [problem.relation.density for problem, _ in kept] == [0.05, 0.1, 0.25, 0.5, 1.0]  # type: ignore[union-attr]
    assert {problem.dtype for problem, _ in kept} == {torch.bfloat16}
    ((only, _),) = asked(USUAL[-1], Options(tokens=128, heads=3), torch.float32).entries
    assert (only.tokens, only.heads, only.key_heads, only.density) == (128, 3, 3, 1.0)


def test_the_headline_is_next_to_its_targets() -> None:
    ((problem, _),) = USUAL[0].entries

    def outcome(peer: str, direction: str, **known: object) -> Outcome:
        sizes: dict[str, object] = {
            "tokens": problem.tokens,
            "heads": 8,
            "kv_heads": 8,
            "head_dim": 64,
            "density": 0.1001,
        }
        fields = {"workload": problem.name, "dtype": "float32", "peer": peer, "direction": direction, "computes": ""}
        return Outcome(**(sizes | fields | known))  # type: ignore[arg-type]

    slower = {"timing": Timing((1.0,)), "over_first": Ratio(2.0, 2.0, 2.0, 2.0)}
    found = targets(
        TARGETS[""],
        [
            outcome("ringweave", "forward", peak_share=0.4),
            outcome("flex", "forward", **slower),
            outcome("sdpa", "forward", **slower),
            outcome("sdpa", "forward + backward", reason="no room"),
            outcome("sdpa", "forward", workload="random 100%", tokens=4096, density=1.0, **slower),
        ],
        ".0%",
    )
    size = "8,192 tokens, 8 heads, D 64, density 10%"
    assert found == [
        Target("float32 forward: share of the FMA peak", size, 0.4, 0.5, True, "%"),
        Target("float32 forward: FlexAttention's time over ringweave's", size, 2.0, 1.7, True),
        Target("float32 forward + backward: dense SDPA's time", size, None, 10.0, True, reason="no room"),
        Target("float32 forward: dense SDPA's time", "4,096 tokens, 8 heads, D 64, density 100%", 2.0, 1.0, True),
    ]


@pytest.mark.parametrize(
    ("figure", "bound", "at_least", "met"),
    [(2.0, 1.7, True, True), (1.0, 1.7, True, False), (1.0, 1.1, False, True), (1.2, 1.1, False, False),
     (None, 1.0, True, None), (1.0, None, True, None)],
)  # fmt: skip
def test_a_target_is_met_or_not(figure: float | None, bound: float | None, at_least: bool, met: bool | None) -> None:
    target = Target("speed", "small", figure, bound, at_least)
    assert target.met is met
    assert Target("share", "", 0.5, 0.5, True, "%").spelled(0.5) == "50.0%"


def test_a_wrong_result_has_no_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    right = program.Program.forward

    def wrong(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*arguments)
        return out * 1.1, lse

    monkeypatch.setattr(program.Program, "forward", wrong)
    monkeypatch.setattr("ringweave.api.find", lambda *call: Found(None, None))
    found = list(overheads(Options(quick=True, rounds=1, heads=1), [torch.bfloat16], lambda text: None))
    assert len(found) == 6
    for target in found:
        assert target.figure is None
        assert "wrong: root mean square error of out" in str(target.reason)


@native
def test_the_command_prints_a_line_for_each_size_and_the_targets(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    command = ["bench", "kernels", "--quick", "--rounds", "1", "--dtype", "bfloat16", "--out", str(out)]
    found = CliRunner().invoke(app, command, env={"COLUMNS": "140"})
    assert found.exit_code == 0, found.output
    for word in ("bfloat16, forward + backward", "of peak", "512", "4/2", "Targets", "view x[:, :, ::4]", "FMA peak"):
        assert word in found.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line.get("dtype", "bfloat16") for line in lines} == {"bfloat16"}
    assert any("bound" in line for line in lines)
