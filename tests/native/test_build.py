"""Without a compiler the build gives a pure Python wheel; with one, the library shares libgomp by SONAME."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import ringweave
from ringweave import errors, native
from ringweave.cli.doctor import diagnose, verdict
from ringweave.environment import CPU_VARIANT

from .emulated import NATIVE, missing
from .plans import VARIANTS, _cpu

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("csrc", "src", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")
BUILDER = ("scikit_build_core", "nanobind", "cmake", "ninja")


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in BUILDER), reason=f"needs {', '.join(BUILDER)} (ringweave[dev])"
)
@pytest.mark.parametrize("hidden", ["compiler", "compiler_named_by_variable"])
def test_no_compiler(hidden: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    # only CMake and ninja are installed, as in an isolated build
    env["PATH"] = str(Path(sys.executable).parent)
    if hidden == "compiler_named_by_variable":
        env |= {"PATH": os.environ["PATH"], "CC": "/nonexistent", "CXX": "/nonexistent"}
    pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-build-isolation", "--no-deps"]
    subprocess.run(
        [*pip, "--wheel-dir", tmp_path / "out", source], check=True, env=env, capture_output=True, timeout=240
    )
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert wheel.name.endswith("-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "ringweave/__init__.py" in names
    assert not any(name.endswith((".so", ".pyd")) for name in names)


def configured(folder: Path, *options: str) -> tuple[list[str], dict[str, list[str]]]:
    """Configure a build; return the instruction sets in its message, and the compiler's flags of each."""
    command = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DRINGWEAVE_PROGRAM=ON", *options]
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
    (said,) = re.findall(r"-- ringweave compiles its kernel for (.*?): ", done.stdout)
    commands = json.loads((folder / "compile_commands.json").read_text())
    flags = {
        match[1]: entry["command"].split()
        for entry in commands
        if (match := re.search(r"kernel_(\w+)\.dir/csrc/kernel\.cpp", entry["command"]))
    }
    return said.split(", "), flags


needs_cmake = pytest.mark.skipif(missing(NATIVE) is not None, reason=f"{missing(NATIVE)}")
EXPORT = "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"


@needs_cmake
@pytest.mark.parametrize("optimize", ["-O3", "-O0"])
def test_no_compiler_fuses_sums(optimize: str, tmp_path: Path) -> None:
    """Every instruction set is compiled without contraction, so that bits do not depend on the optimizer."""
    names, flags = configured(tmp_path, EXPORT, f"-DRINGWEAVE_OPTIMIZE={optimize}")
    assert set(flags) == set(names) >= {"generic"}
    for name, given in flags.items():
        assert [flag for flag in given if flag.startswith("-ffp-contract")] == ["-ffp-contract=off"], name
        assert not {"-ffast-math", "-Ofast", "-march=native"} & {*given}, name


@needs_cmake
@pytest.mark.skipif(CPU_VARIANT in os.environ, reason="another instruction set is named")
def test_a_build_for_this_machine_has_its_best_instruction_set(tmp_path: Path) -> None:
    """A build for this machine has its best instruction set and the sets that this one calls; configuring again changes nothing."""
    for _ in range(2):
        names, flags = configured(tmp_path, EXPORT, "-DRINGWEAVE_NATIVE=ON")
        assert set(flags) == set(names)
        assert names[0] == VARIANTS[0]
        assert {*names} <= {*VARIANTS}
        assert names[1:] == {"avx512bf16": ["avx512"], "neonbf16": ["neon"]}.get(names[0], [])


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")
def test_openmp_by_soname() -> None:
    """The library loads libgomp by SONAME, so that it shares the one that torch has loaded."""
    binary = Path(_cpu.__file__).read_bytes()
    assert b"libgomp.so.1\0" in binary
    if shutil.which("readelf"):
        text = subprocess.run(["readelf", "-d", _cpu.__file__], capture_output=True, text=True, check=True).stdout
        assert "[libgomp.so.1]" in text
        assert "RUNPATH" not in text
        assert "RPATH" not in text


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_runtime() -> None:
    code = (
        "import torch; from ringweave import _cpu\n"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "1"


# ---- a build of other sources ----------------------------------------------------------------------------------------


def test_the_loaded_kernel_is_the_build_of_these_sources() -> None:
    assert _cpu.version == ringweave.__version__
    assert native.other_build(_cpu) is None
    assert _cpu.sources == native.digest(ROOT / "csrc")


def test_a_kernel_of_another_build_says_so_when_it_loads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A version differs in an installation, sources in a clone; an installation without sources has a version alone."""
    others = {
        "a build of an earlier version; wanted one of": ModuleType("without names"),
        "a build of 0.9; wanted one of": SimpleNamespace(version="0.9", sources=_cpu.sources),
        "a build of other sources; wanted one of those in csrc": SimpleNamespace(version=ringweave.__version__, sources="0"),
    }  # fmt: skip
    load = native.module.__wrapped__
    for text, other in others.items():
        monkeypatch.setattr(native.importlib, "import_module", lambda name, other=other: other)
        monkeypatch.setattr(errors, "WARNED", set())
        caplog.clear()
        assert load() is other
        assert text in caplog.text
        assert native.REINSTALL in caplog.text
    monkeypatch.setattr(native, "_SOURCES", tmp_path / "absent")
    assert native.other_build(other) is None


def test_doctor_names_a_kernel_of_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_SOURCES", ROOT / "src")
    findings = diagnose()
    assert findings["native kernel"]["build"] == "a build of other sources, and not one of those in csrc"
    assert verdict(findings).endswith(native.REINSTALL)
    monkeypatch.undo()
    assert "build" not in diagnose()["native kernel"]
