"""The case ring: in processes, through the command; and that it notices what is wrong."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import typer
from typer.testing import CliRunner

import ringweave as rw
from ringweave.bench import ring
from ringweave.bench.case import CaseResult, Options, Target
from ringweave.bench.commands import register
from ringweave.bench.compare import Outcome
from ringweave.bench.launched import LaunchError, run, torchrun
from ringweave.bench.ranks import __main__ as ranks
from ringweave.bench.ranks import lost
from ringweave.bench.ranks.least import between_nodes, between_ranks
from ringweave.bench.ranks.moved import over
from ringweave.bench.ring_plans import documents
from ringweave.errors import UnsupportedError
from ringweave.parallel.placement import contiguous

app = typer.Typer()
register(app)


def started() -> list[int]:
    """Processes of the benchmark's ranks on this machine that this process has started."""
    return [p.pid for p in psutil.Process().children(recursive=True) if "ringweave.bench.ranks" in p.cmdline()]


def test_the_command_measures_every_target_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    command = ["bench", "ring", "--quick", "--rounds", "1", "--out", str(out)]
    found = CliRunner().invoke(app, command, env={"COLUMNS": "100"})
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    targets = {line["what"]: line for line in lines if "bound" in line}
    for number in range(1, 13):
        assert any(what.startswith(f"G{number} ") for what in targets), number
    assert sum(what.startswith("model") for what in targets) == 4
    for what, line in targets.items():
        assert line["reason"] is None, line
        met = Target(**{key: line[key] for key in ("what", "size", "figure", "bound", "at_least", "unit")}).met
        # of the others this one alone is a time, beyond the seconds of G9
        assert met is not False or what.startswith("G11"), line
        assert (met is None) == ("speed" in what or "a full ring's efficiency" in what), line
    timed = [line for line in lines if "timing" in line]
    assert {(line["peer"], line["dtype"]) for line in timed} == {
        (peer, dtype) for peer in ("1 rank x 2 threads", "2 ranks x 1 thread") for dtype in ("float32", "bfloat16")
    }
    assert all(line["timing"]["seconds"][0] > 0 for line in timed)
    assert not started()


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails, and a figure that misses its bound, are in the conclusion; the first is wrong."""
    monkeypatch.setattr("ringweave.bench.ring_plans.measure", lambda *_: [Target("G3 work", "", 1.2, 1.05, False)])
    monkeypatch.setattr(ring, "launch", lambda parts, *_: [Target(parts[0], "", None, None, True, reason="wrong: x")])
    result = ring.run(Options(quick=True), lambda text: None)
    assert isinstance(result, CaseResult)
    assert result.conclusion == "0 of 2 targets are met; not: G3 work; exact."


def test_it_is_not_measured_on_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="device: got 'cuda'; wanted 'cpu'"):
        ring.run(Options(device="cuda"), lambda text: None)


@pytest.mark.parametrize("error", [1e-12, 1e-3])
def test_bytes_are_counted_only_of_what_is_exact(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        def gathered(self, value: bool) -> list[bool]:
            return [value]

    exactness = Target("G5 float64", "", error, 1e-10, False, "")
    count = Target("G1 bytes", "", 1.0, 1.0, False)
    monkeypatch.setattr(ranks.exact, "measure", lambda *_: [exactness])
    monkeypatch.setattr(ranks.moved, "measure", lambda *_: [count])
    first, second = ranks.exactness(Alone(), Options(), Path())  # type: ignore[arg-type]
    assert first == exactness
    assert second == count if error < 1e-10 else "wrong: not exact" in (second.reason or "")  # type: ignore[union-attr]


def test_processes_that_fail_are_a_reason() -> None:
    (record,) = ring.launch(["nothing"], 2, Options())
    assert isinstance(record, Target)
    assert record.figure is None
    assert record.reason == "wrong: exit status 1 (KeyError: 'nothing')"
    assert not started()


def test_processes_that_take_too_long_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(60)")
    until = time.monotonic() + 8
    with pytest.raises(LaunchError, match="not done in time"):
        run(torchrun(2, script), threads=1, until=until)
    assert not [p for p in psutil.Process().children(recursive=True) if str(script) in p.cmdline()]


def test_survivors_that_do_not_answer_are_wrong(tmp_path: Path) -> None:
    line = {"named": True, "seconds": 0.1, "regroup": 0.2, "before": True, "exact": True}
    for pid, count in ((1, 2), (2, 2), (3, 1)):
        (tmp_path / f"survivor-{pid}.jsonl").write_text("".join(json.dumps(line) + "\n" for _ in range(count)))
    # four ranks, two of them killed: three survivors of the first, two of the second
    assert [target.met for target in lost.read(tmp_path, 4, 2)] == [True] * 4
    (tmp_path / "survivor-3.jsonl").write_text(json.dumps(line | {"seconds": 2.5, "exact": False}) + "\n")
    assert [target.met for target in lost.read(tmp_path, 4, 2)] == [False, True, True, False]
    (tmp_path / "survivor-3.jsonl").unlink()
    (only,) = lost.read(tmp_path, 4, 2)
    assert only.reason == "wrong: 4 of 5 survivors came to an end"


def test_what_must_cross_by_hand() -> None:
    tile = 128
    place = contiguous(8 * tile, 4, tile)
    # two tiles a rank; a query tile attends its own and the one before
    assert between_ranks(rw.SlidingWindow(tile), place, (4, 2)).tolist() == [
        [0, 0, 0, 0],
        [2 * tile, 0, 0, 0],
        [0, 2 * tile, 0, 0],
        [0, 0, 2 * tile, 0],
    ]
    assert between_nodes(rw.SlidingWindow(tile), place, (4, 2), 2) == 2 * tile
    # causal: both ranks of the second node need all of the first, which crosses once
    assert between_nodes(rw.Causal(), place, (1, 1), 2) == 4 * tile
    assert between_ranks(rw.Causal(), place, (1, 1))[2:, :2].sum() == 8 * tile
    # a short strided view: everybody needs the others' part of its only tile
    assert between_ranks(rw.LongNet([1024], [8]), contiguous(512, 4, tile), (1, 1)).tolist() == [
        [0 if i == j else 16 for j in range(4)] for i in range(4)
    ]


def test_bytes_that_nobody_needs_are_no_ratio() -> None:
    least = np.array([[0, 10], [20, 0]])
    assert over(least, least) == 1.0
    assert over(least * 2, least) == 2.0
    assert over(least + 1, least) == math.inf


def test_documents_fill_a_sequence() -> None:
    lengths = documents(100_000, 3)
    assert sum(lengths) == 100_000
    assert lengths == documents(100_000, 3)
    assert max(lengths) <= 32768


def test_a_wrong_result_is_not_timed() -> None:
    from ringweave.bench.ranks import speed
    from ringweave.bench.workload import Workload

    work = Workload("window", rw.SlidingWindow(8), 128, 1, 8)
    (target,) = speed.records(work, [([[], []], "root mean square error of dk 1"), ([[], []], None)], Options())
    assert isinstance(target, Target)
    assert target.reason == "wrong: root mean square error of dk 1; not timed"
    every = [([[1.0, 3.0], [2.0, 2.0]], None), ([[0.0, 0.0], [4.0, 1.0]], None)]
    *outcomes, target = speed.records(work, every, Options())
    assert [o.timing.seconds for o in outcomes if isinstance(o, Outcome) and o.timing] == [(1.0, 3.0), (4.0, 2.0)]
    assert isinstance(target, Target)
    assert (target.figure, target.bound, target.met) == (2.0 / 3.0, 0.85, False)
