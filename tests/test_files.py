"""A file of any contents that the library reads executes nothing, and calls still compute."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ringweave as rw
from ringweave import files
from ringweave.backends import tuning
from ringweave.memory import numa, pressure


class Executed:
    """Create a folder when a pickle of this object is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


def harms(right: bytes, mark: Path, large: bool = False, flips: int = 100) -> Iterator[bytes]:
    """Return accidental or malicious contents of a file, made from valid ones."""
    draw = random.Random(0)
    yield from (b"", b"\n", b"\0" * 64, b"\xff\xfe\x00", b"null", b"3", b"[]", b"{}", b'"\\ud800"', b"1" * 5000)
    yield from (b"[" * 100_000, b'{"format":' * 100_000, b"[" * 100_000 + b"\n" + right, b"1e999999999", b"NaN")
    yield pickle.dumps(Executed(mark))
    saved = io.BytesIO()
    torch.save(Executed(mark), saved)
    yield saved.getvalue()
    yield from (right[: draw.randrange(len(right))] for _ in range(20))
    for _ in range(flips):
        some = bytearray(right)
        for _ in range(draw.choice((1, 1, 5))):
            some[draw.randrange(len(some))] ^= 1 << draw.randrange(8)
        yield bytes(some)
    yield right * 2
    yield right.replace(b'"', b"'")
    for old in (b"1", b"2", b"64", b"128", b'"cpu"', b"null", b"true"):
        for new in (b"-1", b"1e400", b"99999999999999999999", b"[]", b"{}", b'"x"', b"null"):
            yield right.replace(old, new)
    if large:
        yield right + b" " * files.MOST


Reader = tuple[bytes, Path, Callable[[], object]]


def tuned(folder: Path) -> Reader:
    entry = {"kind": "x", "density": 2, "backend": "cpu", "tile": [64, 32]}
    right = json.dumps({"format": tuning.FORMAT, "entries": {"a": entry}}).encode()

    def use() -> object:
        tuning.refresh()
        return tuning.answers() or None

    return right, folder / "tuning.json", use


def tried(folder: Path) -> Reader:
    if importlib.util.find_spec("ringweave_gpu") is None:
        pytest.skip("ringweave-gpu is not installed")
    path = folder / "verdict.json"
    right = {"of": "a case", "date": "2026-01-01T00:00:00+00:00", "outcomes": {"flex": [None, 0.5]}}
    return json.dumps(right).encode(), path, lambda: importlib.import_module("ringweave_gpu.trial")._read(path)


def recorded(module: str, right: dict[str, Any], read: str) -> Callable[[Path], Reader]:
    def of(folder: Path) -> Reader:
        if importlib.util.find_spec("ringweave_lab") is None:
            pytest.skip("the laboratory is not installed")
        return json.dumps(right).encode() + b"\n", folder / "lines.jsonl", lambda: _lab(module, read, folder)

    return of


def _lab(module: str, read: str, folder: Path) -> object:
    found = getattr(importlib.import_module(f"ringweave_lab.{module}"), read)
    if module == "bench.report":
        return [record for line in found([folder / "lines.jsonl"]) if (record := _record(line)) is not None] or None
    if module == "campaign.campaign":
        (folder / "lines.jsonl").replace(folder / importlib.import_module("ringweave_lab.campaign.campaign").LINES)
        return found(folder) or None
    return found(folder / "lines.jsonl") or None


def _record(line: dict[str, Any]) -> object:
    return importlib.import_module("ringweave_lab.bench.report").record_of(line)


READERS: dict[str, Callable[[Path], Reader]] = {
    "tuning": tuned,
    "trial": tried,
    "records": recorded("bench.report", {"workload": "x", "pattern": "Full()", "tokens": 64, "tiles": 1, "nbytes": 4,
                                         "timing": {"seconds": [0.1, 0.2]}}, "read_lines"),
    "campaign": recorded("campaign.campaign", {"unit": "x", "result": "done", "code": 0, "seconds": 1.0, "said": ""}, "read"),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_whatever_a_file_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))
    monkeypatch.setattr(files, "MOST", 2**21)
    logging.getLogger("ringweave").setLevel(logging.CRITICAL)
    right, path, use = READERS[name](tmp_path)
    mark = tmp_path / "executed"
    try:
        for content in harms(right, mark, large=name in ("tuning", "trial", "records")):
            path.write_bytes(content)
            use()
            assert not mark.exists(), content[:40]
        path.unlink(missing_ok=True)
        path.write_bytes(right)
        assert use() is not None
    finally:
        logging.getLogger("ringweave").setLevel(logging.NOTSET)
        monkeypatch.undo()
        tuning.refresh()


def test_a_baseline_of_any_content(tmp_path: Path) -> None:
    gate = pytest.importorskip("ringweave_lab.bench.gate", exc_type=ImportError)
    path = tmp_path / "gate.json"
    for content in harms(json.dumps({gate.kind(): {"x": {"ratio": 1.0, "tolerance": 0.1}}}).encode(), path, flips=20):
        path.write_bytes(content)
        with contextlib.suppress(rw.UnsupportedError):
            gate.baseline(path)


def test_numbers_of_the_system_from_files_of_any_content(tmp_path: Path) -> None:
    """Memory and its nodes are reported as numbers, whatever the system's files contain."""
    node = tmp_path / "sys/devices/system/node/node0"
    texts = {
        tmp_path / "proc/meminfo": b"MemTotal: 1000 kB\nMemAvailable: 500 kB\n",
        tmp_path / "proc/self/cgroup": b"0::/a\n",
        tmp_path / "sys/fs/cgroup/a/memory.max": b"4096\n",
        tmp_path / "sys/fs/cgroup/a/memory.current": b"1024\n",
        tmp_path / "sys/fs/cgroup/a/memory.stat": b"inactive_file 12\n",
        node / "meminfo": b"Node 0 MemTotal: 2048 kB\n",
        node / "cpulist": b"0-3,8\n",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    assert numa.nodes(tmp_path) == (numa.Node(0, (0, 1, 2, 3, 8), 2048 * 1024),)
    assert pressure("cpu", root=tmp_path).total == 4096
    for path, text in texts.items():
        for content in [*harms(text, tmp_path / "executed", flips=20), "²".encode(), b"0-" + b"9" * 12]:
            path.write_bytes(content)
            assert pressure("cpu", root=tmp_path).free >= 0
            numa.nodes(tmp_path)
        path.write_bytes(text)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure at any step of writing leaves the old content, and no other file."""
    path = tmp_path / "a.json"
    files.replace(path, "old")

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    for module, name in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fails)
            with pytest.raises(KeyboardInterrupt):
                files.replace(path, "new")
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]
    files.replace(path, "new")
    assert path.read_text() == "new"
