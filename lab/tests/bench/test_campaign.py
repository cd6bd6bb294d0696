"""A campaign runs each unit in its own process, records a line for each, and resumes after it was killed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

import ringweave as rw
from ringweave.backends import triton
from ringweave.cli.app import app
from ringweave.errors import RingweaveError
from ringweave_lab.bench.record import Outcome, Target
from ringweave_lab.bench.report import case_pages, read_lines, write_figures
from ringweave_lab.campaign import campaign
from ringweave_lab.campaign import units as campaign_units
from ringweave_lab.campaign.campaign import LINES, Unit, read, run


def unit(name: str, code: str, seconds: float = 60.0) -> Unit:
    return Unit(name, (sys.executable, "-c", code), seconds)


WORKS = unit("works", "print('4 TFLOP/s')")


def test_what_takes_a_process_down_costs_one_line(tmp_path: Path) -> None:
    crash = unit("crash", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    raises = unit("raises", "raise ValueError('an illegal address')")
    slow = unit("slow", "import time; time.sleep(60)", 0.5)
    ended = run([WORKS, crash, raises, slow, unit("last", "pass")], tmp_path, seconds=100)
    assert [(each.unit, each.result) for each in ended] == [
        ("works", "done"), ("crash", "failed"), ("raises", "failed"), ("slow", "timed out"), ("last", "done"),
    ]  # fmt: skip
    assert ended[1].code == -signal.SIGSEGV
    assert "an illegal address" in ended[2].said
    assert read(tmp_path) == ended
    assert "4 TFLOP/s" in (tmp_path / "works.log").read_text()


def test_nothing_that_a_unit_began_outlives_it(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    run([unit("parent", code, 3.0)], tmp_path, seconds=100)
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    raise AssertionError("its child still runs")


def test_a_killed_campaign_continues_from_its_folder(tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    program = f"""
import sys
from pathlib import Path
from ringweave_lab.campaign.campaign import Unit, run
units = [
    Unit("first", (sys.executable, "-c", "pass"), 60.0),
    Unit("second", (sys.executable, "-c", "import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"), 60.0),
]
run(units, Path({str(tmp_path)!r}), seconds=100)
"""
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    for _ in range(1200):
        if mark.exists() and mark.read_text():
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    # the killed process could not end its child
    os.kill(int(mark.read_text()), signal.SIGKILL)
    # a truncated line is ignored
    with (tmp_path / LINES).open("a") as file:
        file.write('{"unit": "second", "resu')
    second = unit("second", f"open({str(mark)!r}, 'a').write('y')")
    with pytest.raises(RingweaveError, match="wanted an empty folder"):
        run([WORKS], tmp_path, seconds=100)
    ended = run([unit("first", "raise SystemExit(3)"), second], tmp_path, seconds=100, resume=True)
    assert [(each.unit, each.result) for each in ended] == [("first", "done"), ("second", "done")]
    assert mark.read_text().endswith("y")


def test_no_unit_begins_that_has_no_time(tmp_path: Path) -> None:
    times = iter((0.0, 1.0, 90.0, 90.0))
    long = unit("long", "pass", 100.0)
    ended = run([WORKS, long, unit("short", "pass", 20.0)], tmp_path, seconds=100, clock=lambda: next(times))
    assert [each.unit for each in ended] == ["works", "short"]
    assert [each.unit for each in run([long], tmp_path, seconds=100, resume=True)] == ["works", "short", "long"]


def test_what_had_less_than_its_time_begins_anew(tmp_path: Path) -> None:
    slow = unit("slow", "import time; time.sleep(60)", 4.0)
    assert run([slow], tmp_path, seconds=1.5) == []
    assert read(tmp_path) == []


def test_the_units_are_commands_that_there_are(tmp_path: Path) -> None:
    found = campaign.units(tmp_path, checkout=Path(__file__).parents[3])
    assert len({each.name for each in found}) == len(found)
    assert {"doctor", "tests", "part causal", "part 64 x 64", "trial causal"} <= {each.name for each in found}
    # one run of 30 minutes has room for three units
    assert all(each.seconds <= 540 for each in found)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "units", lambda *of: [WORKS, unit("wrong", "raise SystemExit(2)")])
    command = ["bench", "campaign", "--out", str(tmp_path / "found"), "--seconds", "50"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "wrong" in result.output
    assert "All units ended" in result.output
    again = CliRunner().invoke(app, [*command, "--resume"])
    assert again.output.count("done") == 1
    assert (tmp_path / "found" / LINES).stat().st_size > 0


def test_a_campaign_needs_a_gpu_and_a_folder(tmp_path: Path) -> None:
    for words, said in ((["--out", str(tmp_path), "--device", "cpu"], "'cpu' is no GPU"), ([], "'--out'")):
        found = CliRunner().invoke(app, ["bench", "campaign", *words], env={"COLUMNS": "160", "NO_COLOR": "1"})
        assert found.exit_code == 2
        assert said in found.output
    assert list(tmp_path.iterdir()) == []


def dry(folder: Path) -> dict[str, Unit]:
    return {each.name: each for each in campaign.units(folder, checkout=Path(__file__).parents[3], dry=True)}


# a kernel that crashes its process at launch
CRASH = """
import ctypes, sys
from ringweave_lab.campaign import units as campaign_units
from ringweave_lab.campaign.compiling import Driver
Driver.launcher_cls = lambda self, source, metadata: lambda *arguments: ctypes.string_at(0)
sys.exit(campaign_units.main(sys.argv[1:]))
"""


@pytest.mark.skipif(not triton.installed(), reason="triton is not installed")
def test_a_dry_campaign_survives_a_crash_and_a_kill_and_ends_with_a_page(tmp_path: Path) -> None:
    works = dry(tmp_path)["ahead"]
    crash = Unit("crash", (sys.executable, "-c", CRASH, *works.command[3:]), 60.0)
    begun: list[str] = []

    def killed(said: str) -> None:
        begun.append(said)
        if len(begun) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([crash, works], tmp_path, seconds=500, say=killed)
    assert [(each.unit, each.result, each.code) for each in read(tmp_path)] == [("crash", "failed", -signal.SIGSEGV)]
    ended = run([crash, works], tmp_path, seconds=500, resume=True)
    assert [(each.unit, each.result) for each in ended] == [("crash", "failed"), (works.name, "done")], ended[-1].said
    ((page,),) = [case_pages(read_lines([tmp_path / campaign_units.FIGURES]))]
    (target,) = page.records
    assert isinstance(target, Target)
    assert target.figure
    assert "kernels compiled ahead" in write_figures([page], tmp_path / "figures.html").read_text("utf-8")
    # the folder keeps the compiled kernels for the next machine
    assert list((tmp_path / "triton").rglob("*.cubin"))


def test_every_unit_runs_dry(tmp_path: Path) -> None:
    """Every unit runs dry, except those that compile, which the test above runs."""
    planned = dry(tmp_path)
    assert {each.partition(",")[0].partition(" ")[0] for each in planned} == {
        "doctor", "peaks", "ahead", "small", "bits", "tests", "part", "decode", "streamed", "trial",
    }  # fmt: skip
    for name in campaign_units.UNITS:
        called = next(each for each in planned if each.startswith(name))
        assert name in planned[called].command
        if name.partition(" ")[0] != "ahead":
            assert campaign_units.main(list(planned[called].command[planned[called].command.index(name) :])) == 0
    records = [each for page in case_pages(read_lines([tmp_path / campaign_units.FIGURES])) for each in page.records]
    said = {each.workload for each in records if isinstance(each, Outcome)}
    assert {"stage A", "causal", "documents", "densities", "64 x 64, top 64", "a million tokens"} <= said
    peers = {each.peer for each in records if isinstance(each, Outcome)}
    assert peers == {
        "ringweave:triton", "ringweave:flash", "flex", "flex:tma",
        "sdpa:cudnn", "sdpa:flash",
    }  # fmt: skip
    targets = [each for each in records if isinstance(each, Target)]
    assert len([each for each in targets if each.size == "500 tokens"]) == 8
    assert all(each.figure is None for each in targets if each.reason == campaign_units.DRY)


def test_a_figure_that_cannot_be_had_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bits(job: campaign_units.Job) -> Iterator[Target]:
        def broken() -> float:
            raise RuntimeError("no kernel image\nand more")

        yield job.figure("one", "", broken, "", 0.0)
        yield job.figure("two", "", lambda: 0.0, "", 0.0)

    monkeypatch.setitem(campaign_units.UNITS, "bits", bits)
    assert campaign_units.main(["bits", "--folder", str(tmp_path), "--device", "cpu"]) == 1
    (page,) = case_pages(read_lines([tmp_path / campaign_units.FIGURES]))
    assert [(each.reason, each.met) for each in page.records if isinstance(each, Target)] == [
        ("RuntimeError: no kernel image", None), (None, True),
    ]  # fmt: skip


def test_memory_checks_are_beside_the_small_cases_where_their_tool_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = "small, under compute-sanitizer"
    monkeypatch.setattr(campaign.shutil, "which", lambda name: None)
    assert checked not in dry(tmp_path)
    monkeypatch.setattr(campaign.shutil, "which", lambda name: "/bin/true")
    found = dry(tmp_path)
    assert found[checked].command[3:] == found["small"].command


def test_a_file_of_tests_that_hangs_is_a_line_and_the_others_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(words: tuple[str, ...], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        name = Path(words[-1]).stem
        assert (
            0 < timeout <= campaign_units._TESTS < next(x for x in dry(tmp_path).values() if x.name == "tests").seconds
        )
        if name == "test_hangs":
            raise subprocess.TimeoutExpired(words, timeout, b"a kernel began")
        return subprocess.CompletedProcess(words, int(name == "test_fails"), "its last line", "")

    monkeypatch.setattr(campaign_units.subprocess, "run", run)
    (tmp_path / "tests").mkdir()
    for name in ("fails", "hangs", "works"):
        (tmp_path / "tests" / f"test_{name}.py").write_text("@pytest.mark.gpu")
    found = {each.what: each for each in campaign_units.tests(campaign_units.Job(tmp_path, "cpu", checkout=tmp_path))}
    hangs, fails, works = (found[f"test_{name}.py: exit status"] for name in ("hangs", "fails", "works"))
    assert (hangs.figure, hangs.met) == (None, None)
    assert "not done in the 220 s" in str(hangs.reason)
    assert (fails.figure, fails.met, fails.reason) == (1.0, False, "its last line")
    assert (works.figure, works.met, works.reason) == (0.0, True, None)


def test_keys_on_the_host_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(campaign_units, "_STREAMED", 256)
    found = list(campaign_units.streamed(campaign_units.Job(tmp_path, "cpu")))
    assert [each.unit for each in found] == ["GB/s", "x", "GB/s", "x"]
    assert all(each.reason is None and each.figure for each in found), [each.reason for each in found]
    attention, factors = rw.attention, itertools.cycle((1.0, 1.1))

    def other(*tensors: Any, **options: Any) -> Tensor:
        return attention(*tensors, **options) * next(factors)

    monkeypatch.setattr(rw, "attention", other)
    wrong = list(campaign_units.streamed(campaign_units.Job(tmp_path, "cpu")))
    assert all(each.figure is None and "wrong by" in str(each.reason) for each in wrong)
