"""Without a compiler the build gives a pure Python wheel; with one, the library shares libgomp by SONAME."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .plans import _cpu

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
    # CMake and ninja are there (an isolated build brings its own), nothing else is
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")
def test_openmp_by_soname() -> None:
    """No path leads to another libgomp than the one that torch has loaded."""
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
