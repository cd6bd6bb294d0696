"""Test the Triton kernels without a GPU: compiled for real devices, and launched on simulated ones.

All run in separate processes: compiling needs the interpreter off, and the simulated driver cannot be unloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from gpu.tests.test_triton import ROOT, in_a_process, needs_triton, release

from tests.sampled import is_long

# two minutes of one core; shared machines take several times that
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def compiled(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of compiled kernels; it keeps those of unchanged sources from the last run."""
    cache = getattr(request.config, "cache", None)
    if cache is None:
        return tmp_path
    sources = sorted((ROOT / "gpu" / "src" / "ringweave_gpu" / "triton" / "kernels").rglob("*.py"))
    assert sources
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = Path(cache.mkdir("triton"))
    for other in folder.iterdir():
        if other.name != digest:
            shutil.rmtree(other)
    return folder / digest


# line numbers in the binary cost a tenth of the compiler's time, and are not needed here
COMPILING = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}

# several scripts, with arguments, in one process: starting one takes seconds
RUN = """
import json, sys
sys.path.insert(0, "gpu/scripts")
import kernel_resources, machine_code
failed = 0
for name, *arguments in json.loads(sys.argv[1]):
    sys.argv = [name, *arguments]
    failed |= globals()[name].main()
    print("done", flush=True)
sys.exit(failed)
"""


@needs_triton
def test_compiled_for_real_devices(compiled: Path) -> None:
    """Kernels spill only known bytes, use matrix instructions on every device, and need the resources of the committed table.

    Every loop for sm_90 has the instructions, spills and serialised products of the other table, and every specialisation
    compiles. A short run compiles every third loop and specialisation, so that each is compiled for some kernel.
    """
    some = [] if is_long() else ["--device", "sm_90", "--dim", "64"]
    every = 1 if is_long() else 3
    runs = [
        ["kernel_resources", "--check", "--tile", "128", *some],
        ["machine_code", "--check", "--dim", "128", "--every", str(every)],
        ["kernel_resources", "--variants", "--every", str(every)],
    ]
    said = in_a_process(["-c", RUN, json.dumps(runs)], compiled, **COMPILING)
    resources, loops, variants, _ = (part.strip().splitlines() for part in said.split("done\n"))
    assert len(resources) == 12 if some else len(resources) > 28
    assert len(loops) == -(-25 // every)
    assert len(variants) == 31 // every


@needs_triton
def test_a_call_without_terms_is_compiled_as_if_there_were_none(compiled: Path) -> None:
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--show-capture=all",
        "gpu/tests/compiled/without_terms.py",
    ]
    in_a_process(command, compiled, **COMPILING)


@needs_triton
@pytest.mark.parametrize("what", ["launched", "emulated"])
def test_launches_without_a_gpu(what: str, compiled: Path) -> None:
    """Calls reach the driver through the launcher that Triton builds; "emulated" also checks the results."""
    if what == "emulated" and release("triton") != (3, 7):
        pytest.skip("the emulator knows the instructions that Triton 3.7 makes")
    if not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))):
        pytest.skip("needs a C compiler")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=all", f"gpu/tests/compiled/{what}.py"]
    in_a_process(command, compiled, **COMPILING)
