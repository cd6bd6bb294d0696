"""A campaign: each unit in its own process, a line each, and on from where it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringweave.bench import campaign
from ringweave.bench.campaign import LINES, Unit, read, run
from ringweave.cli.app import app
from ringweave.errors import RingweaveError


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


def test_one_that_is_killed_goes_on_from_its_folder(tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    program = f"""
import sys
from pathlib import Path
from ringweave.bench.campaign import Unit, run
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
    # what it ran, which nothing could end for it
    os.kill(int(mark.read_text()), signal.SIGKILL)
    # a line that was cut short is none
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
    found = campaign.units(tmp_path, checkout=Path(__file__).parents[2])
    assert len({each.name for each in found}) == len(found)
    assert {"doctor", "tests", "kernels: causal", "kernels: 64 x 64", "tune"} <= {each.name for each in found}
    # three commands of nine minutes hold what is measured first
    assert all(each.seconds <= 540 for each in found)
    said = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"}).output
    assert all(option in said for option in ("--part", "--device", "--out"))


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
