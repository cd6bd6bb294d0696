"""Break one line of the library, many times, and check that tests notice: lab/scripts/mutations.py [WORD ...].

Each breakage is applied to a copy of the working tree, never to the tree itself, and only the tests that should see it
run there, once without and once with it. With words, only breakages with names that contain one of them are applied.
The exit code is 1 if a breakage is not caught, if tests fail without one, or if a line to break is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PASSED, FAILED = 0, 1  # exit codes of pytest; any other code means that it could not test
LIMIT = 600.0


class Breakage(NamedTuple):
    """A change to one line that makes it wrong.

    Attributes:
        name: The property that it breaks.
        file: Path under src/ringweave, or from the root if it begins with gpu/.
        old: Text that the file contains once.
        new: Text to replace it with.
        tests: Arguments of pytest: the tests that should see it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """The file's path from the root."""
        return self.file if self.file.startswith("gpu/") else f"src/ringweave/{self.file}"


PARALLEL = "tests/parallel"
DENSE = ("tests/plan/test_build.py", "-k", "dense_mask and not long")
GATHER = ("tests/test_conformance.py", "-k", "dense_batched and (test_every_pattern or test_offset)")
BREAKAGES = (
    Breakage(
        "a mask's last bit", "plan/block_plan.py", "torch.where(words >= 2**31, words - 2**32, words)",
        "words.clamp(max=2**31 - 1)", ("tests/plan/test_build.py", "-k", "packed_and_unpacked"),
    ),
    Breakage(
        "which tiles are full under the diagonal", "relation/zones.py", "q_lo[rect] + self.d1[group])",
        "q_lo[rect] + self.d1[group] + 1)", DENSE,
    ),
    Breakage(
        "how far a window reaches to the right", "patterns/local.py", "d=(-self.left, self.right + 1)",
        "d=(-self.left, self.right)", ("tests/patterns/test_definitions.py",),
    ),
    Breakage(
        "the offset of queries in a plan's key", "plan/cached_plans.py", "key = (made_of.value, *sizes)",
        "key = (made_of.value, *sizes[:4], *sizes[5:])", ("tests/plan/test_cache.py",),
    ),
    Breakage(
        "a version in a table's key", "torch_compat.py", "else x._version", "else 0", ("tests/plan/test_cache.py",),
    ),
    Breakage(
        "the sign of a merged log-sum-exp", "merge.py", "lse = torch.where(alive, top + torch.log(safe), -torch.inf)",
        "lse = torch.where(alive, top - torch.log(safe), -torch.inf)", ("tests/test_merge.py",),
    ),
    Breakage(
        "which part of a merge weighs what", "merge.py", "out.mul_((old / safe)[..., None])",
        "out.mul_((new / safe)[..., None])", ("tests/test_merge.py",),
    ),
    Breakage(
        "the scale of a gradient", "backends/tile_attention.py",
        "dq = tiles.product(of_products, keys).mul_(tiles.scale)",
        "dq = tiles.product(of_products, keys)", GATHER,
    ),
    Breakage(
        "the key head of a query head", "backends/plan_tiles.py",
        "pair % self.heads // (self.heads // self.kv_heads)",
        "pair % self.kv_heads", GATHER,
    ),
    Breakage(
        "a term of the scores' gradient", "backends/tile_attention.py",
        "grad.sub_(delta).mul_(weights)",
        "grad.mul_(weights)", GATHER,
    ),
    Breakage(
        "what an empty row takes part in", "backends/tile_attention.py",
        "top.masked_fill(torch.isneginf(top), 0.0)", "top.clone()",
        GATHER,
    ),
    Breakage(
        "the bytes of a query on its way back", "parallel/planning/workload.py", "return 4 * (self.value + 1)",
        "return 4 * self.value", (f"{PARALLEL}/test_cost.py", f"{PARALLEL}/test_exchange.py"),
    ),
    Breakage(
        "who waits for whom in a step", "parallel/planning/cost.py", "(np.maximum(local, receive) + remote).max()",
        "(np.maximum(local, receive) + remote).mean()", (f"{PARALLEL}/test_cost.py",),
    ),
    Breakage(
        "what a node relays inside", "parallel/execution/exchange.py",
        "origins = [node, *(other for other in range(ranks // per_node) if other != node)]", "origins = [node]",
        (f"{PARALLEL}/test_exchange.py",),
    ),
    Breakage(
        "the mirror of a zigzag", "parallel/planning/placement.py", "np.minimum(part, 2 * ranks - 1 - part)",
        "part % ranks", (f"{PARALLEL}/test_placement.py",),
    ),
    Breakage(
        "the deadline of a wait", "parallel/transport/connection.py", "until = time.monotonic() + self.deadline",
        "until = time.monotonic() + 60 * self.deadline", (f"{PARALLEL}/test_failure.py", "-k", "deadline"),
    ),
    Breakage(
        "which ranks read another rank's failure", "parallel/transport/failure.py", "text = store.get(_FLAG)",
        "return None", (f"{PARALLEL}/test_failure.py", "-k", "by_the_flag"),
    ),
    Breakage(
        "the density in a kind of call", "backends/tuning_keys.py", "max(0, round(-math.log2(share)))", "0",
        ("tests/backends/test_tuning.py", "-k", "densities"),
    ),
    Breakage(
        "a slot that is filled while it is read", "gpu/src/ringweave_gpu/host_offload.py",
        "self.copies.copy_after(self.read)", "pass",
        ("gpu/tests/test_host_offload.py", "-k", "before_it_is_there or every_wait"),
    ),
    Breakage(
        "gradients that are read before they arrive", "gpu/src/ringweave_gpu/host_offload.py",
        "self.copies.wait(event)", "pass",
        ("gpu/tests/test_host_offload.py", "-k", "before_it_is_there"),
    ),
)  # fmt: skip


def copy(folder: Path) -> None:
    """Copy the working tree with its built extension, and make Python import the copy."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    native = importlib.util.find_spec("ringweave._cpu")
    if native is not None and native.origin is not None:
        shutil.copy(native.origin, folder / "src" / "ringweave")
    # an editable installation would find its own tree before any path
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in type(each).__module__]\n"
    )
    found = python(folder, "-c", "import ringweave; print(ringweave.__file__)").stdout.strip()
    if not Path(found).is_relative_to(folder):
        raise SystemExit(f"Python imports {found} and not the copy in {folder}")


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy."""
    paths = os.pathsep.join(str(folder / part) for part in ("", "src", "audit/src", "gpu/src", "lab/src"))
    # a cached file of bytecode would be used for the next breakage: its source has equal time and size
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
    )


def tested(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run tests in the copy, and return pytest's exit code and the last line of its output."""
    try:
        done = python(folder, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=line", *tests)
    except subprocess.TimeoutExpired:
        return FAILED, f"not done in {LIMIT:.0f} s"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode, lines[-1] if lines else "nothing printed"


def problem(folder: Path, each: Breakage, sound: set[tuple[str, ...]]) -> str | None:
    """Return how the tests fail to catch a breakage, or None; ``sound`` collects tests that pass without one."""
    path = folder / each.path
    text = path.read_text() if path.exists() else ""
    if text.count(each.old) != 1:
        return f"{each.file} has the line to break {text.count(each.old)} times: {each.old}"
    if each.tests not in sound:
        code, said = tested(folder, each.tests)
        if code != PASSED:
            return f"its tests do not pass as they are (exit code {code}): {said}"
        sound.add(each.tests)
    path.write_text(text.replace(each.old, each.new))
    try:
        code, said = tested(folder, each.tests)
    finally:
        path.write_text(text)
    if code == FAILED:
        return None
    return "NOT CAUGHT" if code == PASSED else f"it could not be tested (exit code {code}): {said}"


def main(words: list[str]) -> int:
    """Apply each breakage and report it."""
    chosen = [each for each in BREAKAGES if not words or any(word in each.name for word in words)]
    problems, sound = 0, set[tuple[str, ...]]()
    with tempfile.TemporaryDirectory(prefix="ringweave-") as name:
        folder = Path(name).resolve()
        copy(folder)
        for each in chosen:
            found = problem(folder, each, sound)
            problems += found is not None
            print(f"{each.name}: {found or 'caught'}", flush=True)
    print(f"{len(chosen) - problems} of {len(chosen)} breakages are caught")
    return 1 if problems or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
