"""Run the tests that depend on versions with each supported pair of Python, PyTorch and transformers: ``make matrix``.

    python scripts/matrix.py [--torch 2.11.0 ...] [--transformers 5.0.0 ...] [--folder .venv-matrix]

Each environment is made in a folder of its own, kept for the next run, and gets ringweave as a wheel, built for its
Python. The last lines are a table for docs/versions.md: passed, failed, or why a pair cannot be had on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# the oldest, that of the whole test suite, and the newest; make oldest runs the oldest transformers
TORCHES = ("2.11.0", "2.13.0", "2.14.1")
TRANSFORMERS = "5.24.0"
# These depend on private names of torch, on transforms, compiled code and the modules of transformers. The list leaves
# test_torch_compat out: it forks, and torch for CUDA then refuses gradients.
TESTS = (
    "tests/test_api.py", "tests/test_transforms.py", "tests/test_batched_gradients.py",
    "tests/trace/test_symbols.py", "tests/integrations/test_every_version.py",
    "tests/integrations/test_flex_attention.py", "tests/integrations/test_flash_attn_install.py",
    "tests/integrations/test_rotary.py", "tests/integrations/test_compiled.py",
)  # fmt: skip
TOOLS = ("pytest", "pytest-timeout", "pytest-rerunfailures", "hypothesis", "sybil", "psutil", "scipy", "rich", "typer")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output."""
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def last(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a command's output that is not empty."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines[-1].strip()[:150] if lines else f"exit status {done.returncode}"


def environment(python: str, torch: str, transformers: str, folder: Path) -> Path | str:
    """Return the interpreter of an environment with these versions, or the reason why pip cannot make it."""
    path = folder / f"{Path(python).name}-torch{torch}-transformers{transformers}"
    inside, ready = path / "bin" / "python", path / "ready"
    if not ready.exists():
        shutil.rmtree(path, ignore_errors=True)
        made = run(python, "-m", "venv", path)
        if made.returncode:
            return last(made)
        pip = (inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--prefer-binary")
        steps = (
            (*pip, f"torch=={torch}", "numpy>=1.26", *TOOLS),
            (*pip, f"transformers=={transformers}"),
        )
        for step in steps:
            done = run(*step)
            if done.returncode:
                return f"not installed: {last(done)}"
        ready.touch()
    return inside


def install(inside: Path, wheels: Path) -> str | None:
    """Install ringweave into an environment, built once for each Python; return why it failed."""
    pip = (inside, "-m", "pip", "--quiet", "--disable-pip-version-check")
    if not list(wheels.glob("*.whl")):
        built = run(*pip, "wheel", "--no-deps", "--wheel-dir", wheels, "-C", "cmake.define.RINGWEAVE_NATIVE=ON", ".")
        if built.returncode:
            return f"FAILED to build: {last(built)}"
    (wheel,) = wheels.glob("*.whl")
    done = run(*pip, "install", "--force-reinstall", "--no-deps", wheel)
    return f"FAILED to install: {last(done)}" if done.returncode else None


def tried(inside: Path) -> str:
    """Run the tests with an interpreter, and return their last line."""
    # the installed package and not the sources that lie here
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = run(inside, "-P", "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS)
        if not report.exists():
            return f"FAILED: {last(done)}"
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    tests, skipped, *wrong = (int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors"))
    for test in (case for case in suite if case.find("failure") is not None or case.find("error") is not None):
        print(f"failed: {test.get('classname')}::{test.get('name')}", file=sys.stderr)
    said = f"{tests - skipped - sum(wrong)} passed, {skipped} skipped, {time.monotonic() - started:.0f} s"
    return f"FAILED: {sum(wrong)} failed, {said}" if done.returncode else said


def main() -> int:
    """Run every pair in turn, and return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=PYTHONS)
    parser.add_argument("--torch", nargs="*", default=TORCHES)
    parser.add_argument("--transformers", default=TRANSFORMERS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-matrix")
    given = parser.parse_args()
    rows, failed = [], 0
    # the sources may have changed since the last run
    shutil.rmtree(given.folder / "wheels", ignore_errors=True)
    for version, torch in itertools.product(given.python, given.torch):
        python = shutil.which(f"python{version}")
        # pyenv has a command for each version that is installed, which fails unless one of them is chosen
        if python is None or run(python, "--version").returncode:
            found: Path | str = "not run: this machine does not have this Python"
        else:
            print(f"Python {version}, torch {torch} ...", file=sys.stderr, flush=True)
            found = environment(python, torch, given.transformers, given.folder)
            if isinstance(found, Path):
                found = install(found, given.folder / "wheels" / version) or tried(found)
        said = str(found)
        failed += said.startswith("FAILED")
        rows.append(f"| {version} | {torch} | {given.transformers} | {said} |")
        print(rows[-1], flush=True)
    print("\n| Python | torch | transformers | |", "|---|---|---|---|", *rows, sep="\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
