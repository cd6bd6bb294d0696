"""The tuning store: what auto makes of it, and that it survives everything that may happen to a file."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave.ops import dispatch, tuning
from ringweave.ops.backend import Case
from ringweave.plan import Branch, branches

WINDOW = rw.SlidingWindow(64)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))
    return tmp_path


def case(n: int = 1024, dtype: torch.dtype = torch.float64, needs_grad: bool = False, device: str = "cpu") -> Case:
    return Case(1, 2, 2, n, n, 32, 32, dtype, device, needs_grad)


def branch(pattern: rw.Pattern = WINDOW, n: int = 1024) -> Branch:
    return branches(pattern, n, n, heads=2)[0]


def entry(name: str, about: Case, of: Branch) -> dict[str, object]:
    return {"kind": tuning.kind(about, of), "density": tuning.density(of), "backend": name}


def chosen(about: Case, of: Branch) -> str:
    return dispatch.choose("auto", about, of).name


def test_without_a_store_nothing_is_known_and_nothing_is_written(cache: Path) -> None:
    assert tuning.lookup(case(), branch()) is None
    assert chosen(case(), branch(rw.Causal())) == "sdpa"
    assert list(cache.iterdir()) == []


def test_auto_takes_what_was_measured_for_the_same_kind_alone() -> None:
    dense = branch(rw.Causal())
    assert tuning.record([entry("gather", case(), dense)]) == tuning.store()
    assert chosen(case(), dense) == "gather"
    # lengths within a power of two are of one kind
    assert chosen(case(1500), branch(rw.Causal(), 1500)) == "gather"
    for about, of in (
        (case(4096), branch(rw.Causal(), 4096)),
        (case(needs_grad=True), dense),
        (case(), branch(rw.Full())),
        (Case(1, 2, 2, 1024, 1024, 64, 64, torch.float64, "cpu"), dense),
    ):
        assert tuning.lookup(about, of) is None
        assert chosen(about, of) == "sdpa"
    assert dispatch.choose("sdpa", case(), dense).name == "sdpa"


def test_densities_are_apart() -> None:
    n = 4096
    narrow, wide = (branch(rw.SlidingWindow(width, width), n) for width in (64, 1024))
    assert tuning.density(narrow) > tuning.density(wide) > 0
    tuning.record([entry("gather", case(n), narrow)])
    assert tuning.lookup(case(n), narrow) == "gather"
    assert tuning.lookup(case(n), wide) is None


def test_explain_says_where_the_choice_comes_from() -> None:
    of = branch(rw.Causal())
    call = {"heads": 2, "head_dim": 32, "dtype": torch.float64, "needs_grad": False}
    assert "ringweave tune" not in rw.explain(rw.Causal(), 1024, **call)  # type: ignore[call-overload]
    tuning.record([entry("gather", case(), of)])
    said = rw.explain(rw.Causal(), 1024, **call)  # type: ignore[call-overload]
    assert "gather x 1 (asked for auto)" in said
    assert "chosen by what ringweave tune measured on this machine" in said
    assert "not sdpa: could run it; gather was measured to be faster here" in said
    named = rw.explain(rw.Causal(), 1024, backend="sdpa", **call)  # type: ignore[call-overload]
    assert "ringweave tune" not in named


def test_the_answer_is_the_same_and_runs() -> None:
    x = [torch.randn(1, 2, 300, 32, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    want = rw.attention(*x, rw.Causal())
    tuning.record([entry("gather", case(300, needs_grad=g), branch(rw.Causal(), 300)) for g in (False, True)])
    got = rw.attention(*x, rw.Causal())
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))


@pytest.mark.parametrize("name", ["triton", "reference", "warp", "sdpa"])
def test_a_stored_backend_that_cannot_run_is_left_alone(name: str) -> None:
    tuning.record([entry(name, case(), branch())])
    assert tuning.lookup(case(), branch()) == name
    assert chosen(case(), branch()) == "gather"


CORRUPT = {
    "empty": "",
    "truncated": '{"format": 1, "entries": {"a": {"kind": "x", "dens',
    "not a store": "[1, 2]",
    "of another format": '{"format": 2, "entries": {}}',
    "without entries": '{"format": 1}',
    "with entries of another kind": '{"format": 1, "entries": {"a": 3}}',
    "with wrong types": '{"format": 1, "entries": {"a": {"kind": "x", "density": "0", "backend": "cpu"}}}',
    "with a list for a name": '{"format": 1, "entries": {"a": {"kind": ["x"], "density": 0, "backend": "cpu"}}}',
}


@pytest.mark.parametrize("content", list(CORRUPT))
def test_a_corrupt_file_is_ignored_with_one_warning(
    content: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache / "tuning.json"
    path.write_text(CORRUPT[content])
    with caplog.at_level(logging.WARNING, "ringweave"):
        for _ in range(3):
            tuning.refresh()
            assert chosen(case(), branch()) == "gather"
    assert [each.message.startswith(f"the tuning store {path} is ignored: ") for each in caplog.records] == [True]
    # the next answer replaces it
    tuning.record([entry("gather", case(), branch(rw.Causal()))])
    assert chosen(case(), branch(rw.Causal())) == "gather"


def test_bytes_that_are_no_text_are_ignored(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "tuning.json").write_bytes(b"\xff\xfe\x00")
    assert tuning.lookup(case(), branch()) is None
    assert len(caplog.records) == 1


def test_a_file_that_another_process_wrote_is_read_again(cache: Path) -> None:
    of = branch(rw.Causal())
    assert chosen(case(), of) == "sdpa"
    found = {"format": 1, "entries": {"a": entry("gather", case(), of)}}
    (cache / "tuning.json").write_text(json.dumps(found))
    tuning.refresh()
    assert chosen(case(), of) == "gather"
    (cache / "tuning.json").unlink()
    tuning.refresh()
    assert chosen(case(), of) == "sdpa"


def test_a_choice_looks_at_the_file_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.record([entry("gather", case(), branch(rw.Causal()))])
    looked = []
    state = tuning._state
    monkeypatch.setattr(tuning, "_state", lambda path: looked.append(path) or state(path))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: 1e9)
    for _ in range(100):
        assert tuning.lookup(case(), branch(rw.Causal())) == "gather"
    assert len(looked) == 1
    monkeypatch.setattr(tuning.time, "monotonic", lambda: 1e9 + 2)
    tuning.answers()
    assert len(looked) == 2


def test_no_table_on_a_gpu_is_read() -> None:
    """Its share of tiles is what it may have at most; tensors without data would not let themselves be read."""
    indices = torch.zeros(2, 8, 2, dtype=torch.int64, device="meta")
    counts = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    table = rw.BlockTable(indices=indices, counts=counts, key_blocks=8, block_size=128)
    assert tuning.density(branch(table)) == 2


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'ringweave\[tune\]'"):
        tuning.record([])
    monkeypatch.delenv(tuning.VARIABLE)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    tuning._file.cache_clear()
    try:
        assert tuning.store() is None
        assert tuning.lookup(case(), branch()) is None
    finally:
        tuning._file.cache_clear()
    assert list(cache.iterdir()) == []


def test_the_usual_place_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.delenv(tuning.VARIABLE)
    path = tuning.store()
    assert path is not None
    assert path.parent == Path(platformdirs.user_cache_dir("ringweave", appauthor=False))


def test_importing_reads_nothing(cache: Path) -> None:
    (cache / "tuning.json").write_text("broken")
    script = "import ringweave as rw; rw.attention; from ringweave.ops import tuning; print(tuning._read.path)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "None"
    assert "ignored" not in done.stderr


WRITER = """
import sys
from ringweave.ops import tuning
number = int(sys.argv[1])
for step in range(10):
    tuning.record([{"kind": f"{number}", "density": step, "backend": "gather"}])
    assert tuning.load(tuning.store()), "a reader saw half a file"
"""


@pytest.mark.timeout(600)
def test_eight_processes_at_once(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No answer is lost, and no reader ever sees anything but a whole file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(number)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for number in range(8)
    ]
    failed = [said for writer in writers if (said := writer.communicate(timeout=500)[1]) or writer.returncode]
    assert failed == []
    tuning.refresh()
    found = tuning.answers()
    assert {kind: sorted(each) for kind, each in found.items()} == {str(n): list(range(10)) for n in range(8)}
    assert not caplog.records
    assert sorted(path.name for path in cache.iterdir()) in (["tuning.json"], ["tuning.json", "tuning.lock"])
