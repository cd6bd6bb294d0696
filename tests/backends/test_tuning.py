"""Test the tuning file: auto's use of it, and that damaged files do no harm."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringweave as rw
from ringweave import program
from ringweave.backends import cpu, tuning, tuning_keys
from ringweave.call import Call
from ringweave.plan import Branch, branches
from ringweave_lab.tune.answers import write_entries

WINDOW = rw.SlidingWindow(64)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))
    return tmp_path


def case(n: int = 1024, dtype: torch.dtype = torch.float64, needs_grad: bool = False, device: str = "cpu") -> Call:
    return Call(1, 2, 2, n, n, 32, 32, dtype, device, needs_grad)


def branch(pattern: rw.Pattern = WINDOW, n: int = 1024) -> Branch:
    return branches(pattern, n, n, heads=2)[0]


def entry(name: str, about: Call, of: Branch, tile: tuple[int, int] | None = None) -> dict[str, object]:
    sides = None if tile is None else list(tile)
    return {"kind": tuning_keys.call_key(about, of), "density": tuning_keys.density(of), "backend": name, "tile": sides}


def chosen(about: Call, of: Branch) -> str:
    return program.choose_backend("auto", about, of).name


def test_without_a_store_nothing_is_known_and_nothing_is_written(cache: Path) -> None:
    assert tuning.lookup(case(), branch()) is None
    assert chosen(case(), branch(rw.Causal())) == "sdpa"
    assert list(cache.iterdir()) == []


def test_auto_takes_what_was_measured_for_the_same_kind_alone() -> None:
    dense = branch(rw.Causal())
    assert write_entries([entry("dense_batched", case(), dense)]) == tuning.tuning_file()
    assert chosen(case(), dense) == "dense_batched"
    # lengths between two powers of two are of one kind
    assert chosen(case(1500), branch(rw.Causal(), 1500)) == "dense_batched"
    for about, of in (
        (case(4096), branch(rw.Causal(), 4096)),
        (case(needs_grad=True), dense),
        (case(), branch(rw.Full())),
        (Call(1, 2, 2, 1024, 1024, 64, 64, torch.float64, "cpu"), dense),
    ):
        assert tuning.lookup(about, of) is None
        assert chosen(about, of) == "sdpa"
    assert program.choose_backend("sdpa", case(), dense).name == "sdpa"


def test_densities_are_apart() -> None:
    n = 4096
    narrow, wide = (branch(rw.SlidingWindow(width, width), n) for width in (64, 1024))
    assert tuning_keys.density(narrow) > tuning_keys.density(wide) > 0
    write_entries([entry("dense_batched", case(n), narrow)])
    assert tuning.lookup(case(n), narrow) == ("dense_batched", None)
    assert tuning.lookup(case(n), wide) is None


def test_explain_says_where_the_choice_comes_from() -> None:
    of = branch(rw.Causal())
    call = {"heads": 2, "head_dim": 32, "dtype": torch.float64, "needs_grad": False}
    assert "ringweave tune" not in rw.explain(rw.Causal(), 1024, **call)  # type: ignore[call-overload]
    write_entries([entry("dense_batched", case(), of)])
    said = rw.explain(rw.Causal(), 1024, **call)  # type: ignore[call-overload]
    assert "dense_batched x 1 (asked for auto)" in said
    assert "chosen by what ringweave tune measured on this machine" in said
    assert "not sdpa: could run it; dense_batched was measured to be faster here" in said
    named = rw.explain(rw.Causal(), 1024, backend="sdpa", **call)  # type: ignore[call-overload]
    assert "ringweave tune" not in named


def test_the_answer_is_the_same_and_runs() -> None:
    x = [torch.randn(1, 2, 300, 32, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    want = rw.attention(*x, rw.Causal())
    write_entries([entry("dense_batched", case(300, needs_grad=g), branch(rw.Causal(), 300)) for g in (False, True)])
    got = rw.attention(*x, rw.Causal())
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))


def sides_of(name: str, about: Call, pattern: rw.Pattern = WINDOW) -> tuple[int, int]:
    ((found, _),) = program.compiled(dataclasses.replace(about, pattern=pattern, backend=name))
    return found.tile


def test_auto_takes_the_tiles_that_were_measured_and_a_named_backend_its_own() -> None:
    write_entries([entry("dense_batched", case(), branch(), (32, 64))])
    assert sides_of("auto", case()) == (32, 64)
    assert sides_of("dense_batched", case()) == (128, 128)
    assert sides_of("auto", case(needs_grad=True)) == (128, 128)
    said = rw.explain(WINDOW, 1024, heads=2, head_dim=32, dtype=torch.float64, needs_grad=False)
    assert "measured here: tiles of 32 x 64" in said
    assert "tiles of 32 x 64: " in said
    named = rw.explain(
        WINDOW, 1024, heads=2, head_dim=32, dtype=torch.float64, needs_grad=False, backend="dense_batched"
    )
    assert "measured here" not in named


@pytest.mark.parametrize("name", ["sdpa", "flash"])
def test_tiles_of_a_backend_that_is_not_taken_are_not_either(name: str) -> None:
    """Measured tiles of a backend that cannot run the case are not used: auto takes another backend with its own tiles."""
    write_entries([entry(name, case(), branch(), (32, 64))])
    assert sides_of("auto", case()) == (128, 128)


def test_tiles_that_were_measured_change_no_result() -> None:
    pattern = WINDOW & rw.Causal() | rw.Sinks(3)
    of = branch(pattern, 300)
    x = [torch.randn(1, 2, 300, 32, requires_grad=True) for _ in range(3)]
    call = Call(1, 2, 2, 300, 300, 32, 32, torch.float32, "cpu")
    name = "dense_batched" if cpu.module() is None else "cpu"
    want = rw.attention(*x, pattern)
    backward = dataclasses.replace(call, needs_grad=True)
    write_entries([entry(name, call, of, (32, 16)), entry(name, backward, of, (64, 256))])
    assert sides_of("auto", call, pattern) == (32, 16)
    assert sides_of("auto", backward, pattern) == (64, 256)
    got = rw.attention(*x, pattern)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))


@pytest.mark.parametrize("name", ["flash", "reference", "warp", "sdpa"])
def test_a_stored_backend_that_cannot_run_is_left_alone(name: str) -> None:
    write_entries([entry(name, case(), branch())])
    assert tuning.lookup(case(), branch()) == (name, None)
    assert chosen(case(), branch()) == "dense_batched"


ENTRY = {"kind": "x", "density": 0, "backend": "cpu", "tile": None}


def spelled(**changes: object) -> str:
    """Return a file with one answer, with some fields changed."""
    found = {name: changes.get(name, value) for name, value in ENTRY.items() if changes.get(name, value) is not ...}
    if "sides" in changes:
        found["tile"] = changes["sides"]
    return json.dumps({"format": tuning.FORMAT, "entries": {"a": found}})


CORRUPT = {
    "empty": "",
    "truncated": spelled()[:40],
    "not a store": "[1, 2]",
    "nested deep": "[" * 100_000,
    "of the format before": '{"format": 2, "entries": {}, "blocks": {}}',
    "without entries": '{"format": 3}',
    "with entries of another kind": '{"format": 3, "entries": {"a": 3}}',
    "with wrong types": spelled(density="0"),
    "with a list for a name": spelled(kind=["x"]),
    "without tiles": spelled(tile=...),
    "with a number for sides": spelled(sides=64),
    "with three sides": spelled(sides=[64, 64, 64]),
    "with sides that no kernel takes": spelled(sides=[64, 40]),
    "with sides that are too long": spelled(sides=[64, 512]),
    "with a negative side": spelled(sides=[-64, 64]),
}


def test_the_file_is_valid_before_it_is_damaged(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "tuning.json").write_text(spelled(sides=[64, 32]))
    assert tuning.answers() == {"x": {0: ("cpu", (64, 32))}}
    assert not caplog.records


@pytest.mark.parametrize("content", list(CORRUPT))
def test_a_corrupt_file_is_ignored_with_one_warning(
    content: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache / "tuning.json"
    path.write_text(CORRUPT[content])
    with caplog.at_level(logging.WARNING, "ringweave"):
        for _ in range(3):
            tuning.refresh()
            assert chosen(case(), branch()) == "dense_batched"
    assert [each.message.startswith(f"the tuning store {path} is ignored: ") for each in caplog.records] == [True]
    # the next answer replaces the damaged file
    write_entries([entry("dense_batched", case(), branch(rw.Causal()))])
    assert chosen(case(), branch(rw.Causal())) == "dense_batched"


def test_bytes_that_are_no_text_are_ignored(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "tuning.json").write_bytes(b"\xff\xfe\x00")
    assert tuning.lookup(case(), branch()) is None
    assert len(caplog.records) == 1


def test_a_file_that_another_process_wrote_is_read_again(cache: Path) -> None:
    of = branch(rw.Causal())
    assert chosen(case(), of) == "sdpa"
    found = {"format": tuning.FORMAT, "entries": {"a": entry("dense_batched", case(), of)}}
    (cache / "tuning.json").write_text(json.dumps(found))
    tuning.refresh()
    assert chosen(case(), of) == "dense_batched"
    (cache / "tuning.json").unlink()
    tuning.refresh()
    assert chosen(case(), of) == "sdpa"


def test_a_choice_looks_at_the_file_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    write_entries([entry("dense_batched", case(), branch(rw.Causal()))])
    looked = []
    state = tuning._state
    monkeypatch.setattr(tuning, "_state", lambda path: looked.append(path) or state(path))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: 1e9)
    for _ in range(100):
        assert tuning.lookup(case(), branch(rw.Causal())) == ("dense_batched", None)
    assert len(looked) == 1
    monkeypatch.setattr(tuning.time, "monotonic", lambda: 1e9 + 2)
    tuning.answers()
    assert len(looked) == 2


def test_no_table_on_a_gpu_is_read() -> None:
    """The density of a table on a GPU is an upper bound from its shape; meta tensors fail if the table is read."""
    indices = torch.zeros(2, 8, 2, dtype=torch.int64, device="meta")
    counts = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    table = rw.BlockTable(indices=indices, counts=counts, key_blocks=8, block_size=128)
    assert tuning_keys.density(branch(table)) == 2


@pytest.mark.parametrize("named", ["", "XDG_CACHE_HOME"])
def test_the_usual_place_is_the_users_cache_folder(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is the one of XDG_CACHE_HOME, or ~/.cache."""
    for name in (tuning.VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(named or "HOME", str(tmp_path))
    tuning._file.cache_clear()
    try:
        assert tuning.tuning_file() == tmp_path / ("" if named else ".cache") / "ringweave" / "tuning.json"
    finally:
        tuning._file.cache_clear()


def test_importing_reads_nothing(cache: Path) -> None:
    (cache / "tuning.json").write_text("broken")
    script = "import ringweave as rw; rw.attention; from ringweave.backends import tuning; print(tuning._read.path)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "None"
    assert "ignored" not in done.stderr
