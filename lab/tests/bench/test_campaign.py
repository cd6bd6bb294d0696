"""A campaign runs each unit in its own process, packs its figures after each, and resumes after it was killed."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import ringweave as rw
from ringweave.cli.app import app
from ringweave.errors import RingweaveError
from ringweave_gpu import triton
from ringweave_lab.bench.cases.gpu import OWN
from ringweave_lab.bench.peers import PEERS
from ringweave_lab.bench.record import Outcome, Target
from ringweave_lab.bench.report import case_pages, read_lines, write_figures
from ringweave_lab.campaign import archive, campaign, headlines, needs
from ringweave_lab.campaign import units as campaign_units
from ringweave_lab.campaign.__main__ import main
from ringweave_lab.campaign.campaign import LIMITS, LINES, Unit, read, run
from ringweave_lab.campaign.headlines import HEADLINES
from ringweave_lab.campaign.table import MOST, table
from ringweave_lab.tune.problem import Problem
from ringweave_lab.tune.session import Built, Peer


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


def test_units_are_ordered_and_fit_in_25_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headlines are first, our kernels come after all others, and the limits of all units add up to 1,500 seconds."""
    monkeypatch.setattr(needs, "missing", lambda names: [])
    monkeypatch.setattr(campaign.shutil, "which", lambda name: "/bin/true")
    found = campaign.units(tmp_path, checkout=Path(__file__).parents[3])
    names = [each.name for each in found]
    assert len({*names}) == len(names)
    assert {each.split()[0] for each in names} == {*LIMITS}
    assert sum(each.seconds for each in found) <= 1500
    others = [f"headline {name}" for name in HEADLINES]
    assert names[: 2 + len(others)] == ["doctor", "peaks", *others]
    assert min(names.index(f"own {name}") for name in HEADLINES) > max(names.index(each) for each in others)
    assert OWN not in {engine for each in HEADLINES.values() for engine in each.engines}


def test_missing_packages_are_named_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without typer and pytest leaves out their units; one without torch stops at once."""
    present = importlib.util.find_spec
    gone = {"typer", "pytest"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else present(name))
    names = {each.name for each in campaign.units(tmp_path, checkout=Path(__file__).parents[3])}
    assert not names & {"doctor", "tests"}
    assert {"headline causal", "own causal"} <= names
    gone |= {"torch"}
    assert main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    assert "torch is missing, and nothing runs without it" in said
    assert "pytest is missing: left out are tests" in said
    assert not (tmp_path / "out").exists()


def test_units_need_no_decoration(tmp_path: Path) -> None:
    """The campaign and its units load where typer, rich, matplotlib, psutil, platformdirs and scipy are missing."""
    code = """
import sys
for name in ("typer", "rich", "matplotlib", "psutil", "platformdirs", "scipy"):
    sys.modules[name] = None
from ringweave_lab.campaign import campaign, units
sys.exit(units.main(["peaks", "--dry", "--folder", sys.argv[1]]))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=240)
    assert len(read_lines([tmp_path / campaign_units.FIGURES])) == 2


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(campaign, "units", lambda *of: [WORKS, unit("wrong", "raise SystemExit(2)")])
    command = ["bench", "campaign", "--out", str(tmp_path / "found"), "--seconds", "50"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "1 units failed: wrong" in result.output
    assert "All units ended" in result.output
    again = CliRunner().invoke(app, [*command, "--resume"])
    assert again.exit_code == 0
    assert "works: up to" not in again.output
    assert (tmp_path / "found" / LINES).stat().st_size > 0
    assert main(["--out", str(tmp_path / "found")]) == 2


def test_a_campaign_needs_a_gpu_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert main(["--out", str(tmp_path / "out")]) == 2
        assert "Pass --dry to try the campaign without one" in capsys.readouterr().out
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


SLOW = """
import sys, time
from ringweave_lab.campaign import units as campaign_units
campaign_units.main(sys.argv[1:])
time.sleep(600)
"""


@pytest.mark.skipif(not triton.installed(), reason="triton is not installed")
@pytest.mark.long
def test_a_dry_run_ends_in_a_table_a_tarball_and_exit_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One unit hangs, one crashes at a launch on the stand-in, one is too slow; all figures arrive, the table is last."""
    folder, made = tmp_path / "out", tmp_path / "out.tar.gz"
    planned = dry(folder)
    peaks = planned["peaks"].command[3:]
    seen: list[set[str]] = []

    def checking(*arguments: Any) -> list[Unit]:
        crash = (sys.executable, "-c", CRASH, *planned["ahead"].command[3:])
        slow = (sys.executable, "-c", SLOW, *peaks)
        return [
            planned["headline selected"],
            unit("hung", "import time; time.sleep(600)", 1.0),
            Unit("crashed", crash, 90.0),
            Unit("slow", slow, 25.0),
            Unit("own causal", planned["own causal"].command, 120.0),
        ]

    packed = campaign.pack

    def noting(*arguments: Any) -> None:
        packed(*arguments)
        with tarfile.open(made) as opened:
            seen.append({*opened.getnames()})

    monkeypatch.setattr(campaign, "units", checking)
    monkeypatch.setattr(campaign, "pack", noting)
    words = ["--out", str(folder), "--seconds", "500", "--dry", "--caches", str(tmp_path / "caches")]
    assert main(words) == 0
    results = {each.unit: each.result for each in read(folder)}
    assert results == {
        "headline selected": "done", "hung": "timed out", "crashed": "failed", "slow": "timed out", "own causal": "done",
    }  # fmt: skip
    # the tarball is there after the first unit, and grows with each
    assert "out/headline-selected.log" in seen[0]
    assert {f"out/{name}" for name in (LINES, campaign_units.FIGURES, campaign.TABLE, "slow.log")} <= seen[-1]
    assert made.stat().st_size <= 16 * 2**20
    text = (folder / campaign.TABLE).read_text()
    said = capsys.readouterr().out
    assert said.endswith(text)
    assert len(text) <= 12_000
    for part in ("2 units timed out: hung, slow", "1 units failed: crashed", "sdpa:flash", OWN, "product of bfloat16"):
        assert part in text
    figures = {
        (of["peer"], of["direction"]): of for of in read_lines([folder / campaign_units.FIGURES]) if "peer" in of
    }
    for peer in ("sdpa:flash", "ringweave", OWN):
        for direction in ("forward", "backward"):
            assert figures[peer, direction]["timing"]["seconds"], figures[peer, direction]["reason"]
    assert "attn_gym" in figures["ringweave:attn_gym", "forward"]["reason"]


@pytest.mark.skipif(not triton.installed(), reason="triton is not installed")
def test_kernels_are_compiled_into_the_folder_of_caches(tmp_path: Path) -> None:
    """A campaign that was killed after a crash continues, and compiles for an H100 without one."""
    works = dry(tmp_path / "out")["ahead"]
    crash = Unit("crash", (sys.executable, "-c", CRASH, *works.command[3:]), 90.0)
    begun: list[str] = []

    def killed(said: str) -> None:
        begun.append(said)
        if len(begun) == 3:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"seconds": 500, "caches": tmp_path / "caches"}
    with pytest.raises(KeyboardInterrupt):
        run([crash, works], tmp_path / "out", say=killed, **options)
    assert [(each.unit, each.code) for each in read(tmp_path / "out")] == [("crash", -signal.SIGSEGV)]
    ended = run([crash, works], tmp_path / "out", resume=True, **options)
    assert [(each.unit, each.result) for each in ended] == [("crash", "failed"), (works.name, "done")], ended[-1].said
    ((page,),) = [case_pages(read_lines([tmp_path / "out" / campaign_units.FIGURES]))]
    assert "kernels compiled ahead" in write_figures([page], tmp_path / "figures.html").read_text("utf-8")
    assert list((tmp_path / "caches" / "triton").rglob("*.cubin"))
    assert not list((tmp_path / "out").rglob("*.cubin"))


def test_every_unit_runs_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every unit runs dry, except those that the tests above run in processes of their own."""
    refuses = dataclasses.replace(PEERS["flex"], supports=lambda problem, backward: "its compiler takes seconds")
    monkeypatch.setitem(PEERS, "flex", refuses)
    planned = dry(tmp_path)
    for name in campaign_units.UNITS:
        if name.partition(" ")[0] in ("ahead", "own"):
            continue
        command = list(planned[name].command)
        assert campaign_units.main(command[command.index(name) :]) == 0
    lines = read_lines([tmp_path / campaign_units.FIGURES])
    records = [each for page in case_pages(lines) for each in page.records]
    said = {(each.workload, each.peer, each.direction): each for each in records if isinstance(each, Outcome)}
    assert {workload for workload, _, _ in said} == {*HEADLINES}
    for name, each in HEADLINES.items():
        for engine in each.engines:
            for direction in ("forward", "backward"):
                of = said[name, engine, direction]
                right = engine in ("sdpa:flash", "ringweave", "ringweave:dense_batched")
                assert (of.timing is not None) == right, of.reason
                assert not of.wrong
    targets = [each for each in records if isinstance(each, Target)]
    assert len([each for each in targets if each.size == "500 tokens"]) == 8
    assert all(each.figure is None for each in targets if each.reason == campaign_units.DRY)


def test_an_engine_that_fails_costs_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of any type, in preparation or in timing, is a reason; the next engine is measured."""

    class CompilerError(Exception): ...

    def broken(problem: Problem, inputs: object) -> Built:
        raise CompilerError("out of registers")

    timed = headlines.in_turn

    def timing(entries: list[Any], **options: Any) -> None:
        if entries[0].peer == "ringweave:dense_batched":
            raise CompilerError("an illegal address")
        timed(entries, **options)

    monkeypatch.setitem(PEERS, "flex", Peer("flex", "", lambda problem, backward: None, broken))
    monkeypatch.setattr(headlines, "in_turn", timing)
    problem = HEADLINES["causal"].problem("causal", "cuda", True)
    names = ("flex", "ringweave:dense_batched", "sdpa:flash")
    found = [(each.peer, each.reason) for each in headlines.measure(problem, names, lambda text: None)]
    assert found[::2] == found[1::2] == [
        ("flex", "CompilerError: out of registers"),
        ("ringweave:dense_batched", "CompilerError: an illegal address"),
        ("sdpa:flash", None),
    ]  # fmt: skip


def test_the_table_and_the_tarball_are_bounded(tmp_path: Path) -> None:
    """The table has at most 12,000 characters, headlines first; the tarball at most 16 MiB, figures first."""
    machine = dict.fromkeys(("cpu", "accelerator", "driver", "cuda", "torch", "triton", "ringweave", "commit"), "x")
    many = [
        {"environment": machine, "what": f"figure {i}", "size": "s" * 80, "figure": 1.0, "bound": None,
         "at_least": True, "unit": "x", "reason": None}
        for i in range(400)
    ]  # fmt: skip
    wrong = many[0] | {"what": "wrong", "bound": 2.0}
    timed = {
        "environment": machine, "workload": "causal", "direction": "forward", "peer": "flex", "tokens": 16384,
        "timing": {"seconds": [0.002, 0.001, 0.003]}, "gflops": 2e5, "how": "compiled", "reason": None,
    }  # fmt: skip
    own = timed | {"peer": OWN, "timing": {"seconds": [0.001]}}
    text = table([*many, wrong, timed, own], {"peaks": "done", "bits": "left"})
    assert len(text) <= MOST
    assert "more lines" in text.splitlines()[-1]
    lines = text.splitlines()
    assert [line.split()[4:7] for line in lines if line.startswith("causal")] == [
        ["2.000", "200.00", "1.00"], ["1.000", "200.00", "2.00"],
    ]  # fmt: skip
    assert next(line for line in lines if "; s" in line).startswith("wrong")
    (tmp_path / LINES).write_text("one line\n")
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_bytes(os.urandom(2**19))
    (tmp_path / "large").write_bytes(os.urandom(archive.MOST))
    archive.pack(tmp_path, tmp_path.with_name("packed.tar.gz"), (LINES, "large", "absent"))
    assert tmp_path.with_name("packed.tar.gz").stat().st_size <= archive.MOST
    with tarfile.open(tmp_path.with_name("packed.tar.gz")) as packed:
        assert [Path(name).name for name in packed.getnames()][:2] == [LINES, "large"]


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
    checked = "sanitized small"
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
    assert "not done in the 140 s" in str(hangs.reason)
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
