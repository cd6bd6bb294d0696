"""The command line: commands and options, their output, and their errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import ringweave as rw

pytest.importorskip("typer")

import typer
from typer.testing import CliRunner, Result

from ringweave.backends import cpu
from ringweave.cli.app import app
from ringweave.cli.doctor import diagnose, verdict
from ringweave.environment import CPU_VARIANT
from ringweave_command import main
from ringweave_lab.simulation.simulate import simulate
from ringweave_lab.tune.answers import write_entries

PATTERN = "(SlidingWindow(1024) | Sinks(64)) & Causal()"


def run(*arguments: str, columns: int = 100) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns), "NO_COLOR": "1"})


def test_commands_and_options_are_frozen() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in commands.items()
        if name in ("show", "explain", "explore", "profile", "simulate", "doctor", "tune", "bits")
    }
    assert found == {
        "show": ["--heads", "--out", "--tokens", "-n", "-o", "pattern"],
        "explain": [
            "--backend", "--device", "--dtype", "--head-dim", "--heads", "--json", "--kv-heads", "--tokens", "-n",
            "pattern",
        ],
        "explore": ["--browser", "--port"],
        "profile": [
            "--device", "--dtype", "--heads", "--out", "--quick", "--threads", "--tokens", "-o", "case",
        ],
        "simulate": [
            "--bandwidth", "--flops", "--gpus", "--head-dim", "--heads", "--itemsize", "--json", "--latency", "--plot",
            "--tokens", "-n", "pattern",
        ],
        "doctor": ["--json"],
        "bits": ["--json"],
        "tune": [
            "--batch", "--dry-run", "--dtype", "--forward-only", "--gpu", "--head-dim", "--heads", "--kv-heads",
            "--rounds", "--seconds", "--tokens", "-n", "pattern",
        ],
    }  # fmt: skip


def test_help_says_all_that_is_written() -> None:
    """Help texts are printed in full (rich would drop brackets as markup) and fit a narrow terminal."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        words = name.split()
        said = run(*words, "--help", columns=300).output
        for parameter in command.params:
            assert (parameter.help or "") in said, (name, parameter.opts)
        lines = run(*words, "--help", columns=80).output.splitlines()
        assert max(map(len, lines)) <= 80
        assert any(line.strip().startswith(f"Usage: ringweave {name} ") for line in lines), lines[:3]


def test_show_draws_the_pattern() -> None:
    result = run("show", "Causal()", "--tokens", "4096")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "Causal()"
    assert "4,096 tokens, density 50" in lines[1]
    rows = [line.split("│")[1] for line in lines if "│" in line]
    assert len(rows) == 32
    for i, row in enumerate(rows):
        assert row == "██" * i + "▒▒" + "  " * (31 - i)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_show_puts_heads_side_by_side_where_they_fit(columns: int) -> None:
    result = run("show", "PerHead([Causal(), Full(), Segments(10)])", "-n", "100", columns=columns)
    assert result.exit_code == 0, result.output
    art = [line for line in result.output.splitlines() if "│" in line]
    assert {line.count("│") for line in art} == ({2} if columns == 30 else {6} if columns == 200 else {4, 2})
    assert max(map(len, art)) <= columns


def test_show_writes_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    result = run("show", PATTERN, "--tokens", "16384", "--out", str(path))
    assert result.exit_code == 0, result.output
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    for bad in (str(tmp_path / "a.gif"), str(tmp_path / "none" / "a.svg")):
        result = run("show", PATTERN, "--tokens", "64", "--out", bad)
        assert result.exit_code == 2
        assert result.stderr.startswith("ringweave: ")
        assert result.stderr.count("\n") == 1


def test_explain_prints_the_numbers_of_the_library() -> None:
    arguments = ("explain", PATTERN, "--tokens", "4096", "--heads", "8", "--kv-heads", "2", "--dtype", "bfloat16")
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["tiles"]["computed"] == rw.patterns.parse(PATTERN).plan(4096, heads=8).tiles
    assert (facts["sizes"]["kv_heads"], facts["sizes"]["dtype"]) == (2, "bfloat16")
    text = run(*arguments, columns=40).stdout
    assert f"pattern   {PATTERN}\n" in text
    assert f"{facts['pairs']['computed']:,}" in text


def test_doctor_finds_this_python() -> None:
    findings = json.loads(run("doctor", "--json").stdout)
    assert findings["system"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert findings["backends"]["dense_batched"]["cpu"] == "usable"
    assert findings["backends"]["sdpa"]["cpu"].startswith("usable, except for sparse patterns: ")
    text = run("doctor").stdout
    for word in ("torch", "backends", "compilers", "AVX" if findings["system"]["cpu"].startswith("AVX") else "cpu"):
        assert word in text


def test_doctor_names_the_kernels_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_VARIANT, raising=False)
    found = diagnose()
    assert found["variables"][CPU_VARIANT] == "not set: the best instruction set is used"
    native = cpu.module()
    if native is not None:
        assert found["native kernel"] == {"in use": native.variants()[0], "can run": ", ".join(native.variants())}
        last = native.variants()[-1]
        monkeypatch.setenv(CPU_VARIANT, last)
        assert diagnose()["native kernel"]["in use"] == last
        assert diagnose()["variables"][CPU_VARIANT] == last
        monkeypatch.setenv(CPU_VARIANT, "abacus")
        assert "got 'abacus'; wanted one of" in diagnose()["native kernel"]["in use"]
        assert run("doctor").exit_code == 0


def test_doctor_says_why_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "module", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = diagnose()
    assert "without a working C++ compiler" in found["native kernel"]["in use"]
    assert "dense_batched" in found["native kernel"]["in use"]
    assert found["backends"]["cpu"]["cpu"].startswith("not usable: the native kernel is missing")


def test_doctor_ends_with_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_VARIANT, raising=False)
    *_, empty, last = run("doctor", columns=80).stdout.splitlines()
    assert (empty, last) == ("", verdict(diagnose()))
    native = cpu.module()
    if native is not None:
        assert last.startswith(f"Ready: the native kernel ({native.variants()[0]}) computes on this processor; ")
        monkeypatch.setenv(CPU_VARIANT, "abacus")
        assert verdict(diagnose()).startswith("Not ready: RINGWEAVE_CPU_VARIANT: got 'abacus'")
        monkeypatch.delenv(CPU_VARIANT)
    monkeypatch.setattr(cpu, "module", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = verdict(diagnose())
    assert said.startswith("Works, but slowly on this processor: ringweave was built without its native kernel; ")
    assert said.endswith(". Reinstall ringweave with a C++ compiler (g++ or clang++), and not with wheel.cmake=false.")


def _findings(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "native kernel": {"in use": "avx2", "can run": "avx2, generic"}, "packages": {"transformers": "5.23.0"},
        "devices": {"cpu": "2 processors"}, "backends": {},
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Ready: the native kernel (avx2) computes on this processor; transformers found; no GPU."),
        (
            {
                "native kernel": {"in use": "none: ringweave._cpu does not load (ImportError); dense_batched"},
                "packages": {"transformers": None},
            },
            "Works, but slowly on this processor: ringweave cannot load its native kernel; transformers not installed; "
            "no GPU. Reinstall ringweave for this Python.",
        ),
        (
            {
                "devices": {"cpu": "2 processors", "cuda": "a card (80 GiB)"},
                "backends": {
                    "dense_batched": {"cuda": "usable"}, "flex": {"cuda": "not usable: no package"},
                    "flash": {"cuda": "usable, except for sparse patterns: masks"}, "cpu": {"cuda": "not usable: no"},
                    "triton": "ringweave-gpu is not installed",
                },
            },
            "Ready: the native kernel (avx2) computes on this processor; transformers found; "
            "cuda runs flash, dense_batched.",
        ),
        ({"devices": {"mps": "available"}}, "Ready: the native kernel (avx2) computes on this processor; "
                                            "transformers found; mps found, but no backend for it."),
    ],
)  # fmt: skip
def test_verdicts(changes: dict[str, dict[str, Any]], said: str) -> None:
    assert verdict(_findings(**changes)) == said


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "__import__('os')",
        "Causal().__class__",
        "[Causal() for _ in range(9)]",
        "lambda: 0",
        "Causal() + Causal()",
        "Causal(",
        "Sinks(open('x'))",
        "SlidingWindow(-1)",
        "_",
        "",
    ],
)
def test_other_text_than_patterns_is_refused_in_one_line(text: str) -> None:
    result = run("show", text, "--tokens", "64")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("ringweave: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_errors_of_a_call_are_one_line() -> None:
    result = run("explain", PATTERN, "--tokens", "64", "--backend", "sdpa")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "neither full nor causal" in result.stderr
    assert run("explain", "Full()", "--tokens", "64", "--heads", "8", "--kv-heads", "3").exit_code == 2
    assert run("explain", "Full()", "--tokens", "64", "--device", "toaster").exit_code == 2
    assert run("show", "Full()", "--tokens", "0").exit_code == 2
    assert run("show", "Full()").exit_code == 2


@pytest.mark.parametrize(("text", "tokens"), [("65536", 65536), ("64K", 65536), ("64k", 65536), ("1M", 2**20)])
def test_lengths_may_have_a_suffix(text: str, tokens: int) -> None:
    facts = json.loads(run("explain", WINDOW, "-n", text, "--json").stdout)
    assert facts["sizes"]["nq"] == facts["sizes"]["nk"] == tokens
    assert f"\n{tokens:,} tokens, density " in run("show", WINDOW, "-n", text).stdout


def test_tune_takes_a_length_with_a_suffix() -> None:
    result = run("tune", "Causal()", "-n", "1K", "--rounds", "1", "--seconds", "0", "--forward-only", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "Causal(), 1024 tokens, forward" in result.output


@pytest.mark.parametrize("command", ["show", "explain", "tune", "simulate"])
@pytest.mark.parametrize("text", ["0", "-1", "1Q", "64 K", "1.5K", "", "K", "\u0661"])
def test_other_lengths_are_refused(command: str, text: str) -> None:
    result = run(command, "Causal()", f"--tokens={text}", columns=200)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for '--tokens' / '-n': " in result.stderr
    assert f"{text!r} is not a number such as 65536, 64K or 1M." in result.stderr


def test_unknown_devices_are_refused() -> None:
    result = run("explain", "Full()", "--tokens", "64", "--device", "toaster", columns=200)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for '--device': 'toaster' is not a device of PyTorch." in result.stderr


@pytest.mark.parametrize("command", ["show", "explain", "tune", "simulate"])
@pytest.mark.parametrize("text", ["Nothing()", "Causal(", "SlidingWindow(-1)", "Segments([3, 4])", "1"])
def test_a_wrong_pattern_is_one_message_of_every_command(command: str, text: str) -> None:
    result = run(command, text, "--tokens", "64")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("ringweave: ")
    assert result.stderr.count("\n") == 1


def test_version() -> None:
    assert run("--version").stdout == f"ringweave {rw.__version__}\n"


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["-h"], []])
def test_the_overview_loads_no_torch(words: list[str]) -> None:
    """The version and the list of commands are those of the whole application, and are printed without PyTorch."""
    program = (
        "import sys, ringweave_command\n"
        "try: ringweave_command.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'ringweave' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    whole = run(*words).stdout.replace("root ", "ringweave ")
    assert done.stdout.split() == whole.split()


def test_without_typer_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["show"])
    assert ended.value.code == 1
    assert "pip install 'ringweave[cli]'" in capsys.readouterr().err


def test_module_runs_in_a_terminal_without_unicode_and_imports_no_matplotlib() -> None:
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['ringweave', 'show', {PATTERN!r}, '--tokens', '4096']\n"
        "try:\n    runpy.run_module('ringweave', run_name='__main__')\n"
        "finally:\n    assert 'matplotlib' not in sys.modules\n"
    )
    source = str(Path(rw.__file__).parents[1])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80", "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"\n    0 |::  " in done.stdout
    assert done.stdout.isascii()


WINDOW = "SlidingWindow(4096) & Causal()"


def test_simulate_prints_the_numbers_of_the_library() -> None:
    arguments = ("simulate", WINDOW, "--tokens", "256K", "--gpus", "4,12", "--heads", "16:4", "--head-dim", "64")
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    rows = simulate(rw.patterns.parse(WINDOW), 2**18, [4, 12], heads=(16, 4), head_dim=64)
    assert [each["gpus"] for each in facts] == [4, 12]
    for each, row in zip(facts, rows, strict=True):
        assert each["ringweave"]["name"] == "contiguous"
        assert each["ringweave"]["bytes_worst"] == row.ringweave.bytes_worst == 4096 * 4 * 2 * 64 * 2
        assert each["ringweave"]["efficiency"] == row.ringweave.efficiency
    assert facts[0]["Ulysses"]["stages"] == 2
    assert facts[1]["Ulysses"] is None
    slow = json.loads(run(*arguments, "--json", "--bandwidth", "1e9").stdout)
    assert slow[1]["ringweave"]["efficiency"] < facts[1]["ringweave"]["efficiency"]


@pytest.mark.parametrize("pattern", [WINDOW, "longformer(256, 64)", "Dilated(64, 8)"])
def test_simulate_fits_eighty_columns(pattern: str) -> None:
    result = run("simulate", pattern, "--tokens", "1M", "--gpus", "8..4096", columns=80)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.output
    assert [line.split()[0] for line in lines[6:16]] == [str(2**power) for power in range(3, 13)]


def test_simulate_draws_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.svg"
    result = run("simulate", WINDOW, "--tokens", "64K", "--gpus", "2..16", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"wrote {path}\n")
    drawn = path.read_text("utf-8")
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    again = tmp_path / "b.svg"
    run("simulate", WINDOW, "--tokens", "64K", "--gpus", "2..16", "--plot", str(again), "--json")
    assert again.read_text("utf-8") == drawn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", "1Q"), "'1Q' is not a number such as 65536, 64K or 1M"),
        (("--tokens", "64K", "--gpus", "8..4"), "'8..4' has nothing in it"),
        (("--tokens", "64K", "--gpus", "8;9"), "'8;9' is not a number"),
        (("--tokens", "64K", "--heads", "32"), "'32' is not like 32:8"),
        (("--tokens", "64K", "--heads", "32:5"), "heads: got (32, 5); wanted query heads"),
        (("--tokens", "1K", "--gpus", "128"), "ranks: got 128; wanted at most 64"),
        (("--tokens", "64K", "--gpus", "2", "--plot", "a.gif"), "a name that ends in .svg or .png"),
        (("--tokens", "64K", "--gpus", "2", "--plot", "none/a.svg"), "a file that can be written"),
    ],
)
def test_simulate_names_wrong_arguments(arguments: tuple[str, ...], said: str) -> None:
    result = run("simulate", WINDOW, *arguments, columns=200)
    assert result.exit_code == 2
    assert said in result.stderr


def test_doctor_prints_the_contents_of_the_tuning_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGWEAVE_CACHE", str(tmp_path))
    answers = [
        {"kind": name, "density": 3, "backend": "cpu", "tile": tile}
        for name, tile in (("a", [32, 32]), ("b", [32, 32]), ("c", [64, 128]), ("d", None))
    ]
    write_entries(answers)
    found = diagnose()["tuning store"]
    assert (found["answers"], found["tiles"]) == (4, "32 x 32 (2), 64 x 128 (1)")
