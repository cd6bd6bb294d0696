"""The examples as a user starts them: the trainer alone, on several processes, and after its processes were killed."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringweave.bench.launched import command, example, run, started

STEPS = 40
SAVED = 35
SMALL = ["--tokens", 701, "--width", 32, "--window", 64, "--sinks", 8]


def train(folder: Path, processes: int, *options: object) -> list[dict[str, Any]]:
    """A run to its end; its metrics."""
    script, out = example(), folder / "metrics.jsonl"
    assert script is not None
    run(command(script, processes, *SMALL, "--out", out, *options), threads=1, until=time.monotonic() + 120)
    return metrics(out)


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two processes on one sequence, undisturbed."""
    return train(tmp_path_factory.mktemp("shared"), 2, "--steps", STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process left that had the same sequence alone: metrics, and a checkpoint of before its last steps."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder, 1, "--steps", STEPS, "--checkpoint", folder / "lm.pt", "--every", SAVED)
    return folder


def test_one_process_and_two_learn_the_same(shared: list[dict[str, Any]], folder: Path) -> None:
    alone = metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in alone] == [line["step"] for line in shared] == list(range(STEPS))
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-4)
    assert losses(alone)[-1] < 0.8 * losses(alone)[0]
    assert {(line["received"], line["full_ring"]) for line in alone} == {(0, 0)}
    for line in shared:
        # (ranks - 1) * local tokens * key heads * (D + Dv) * itemsize, of four layers
        assert line["full_ring"] == 1 * 384 * 2 * (8 + 8) * 4 * 4
        assert 0 < line["received"] < 0.5 * line["full_ring"]


def test_two_processes_go_on_where_one_ended(shared: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    more = STEPS + 2
    lines = train(tmp_path, 2, "--steps", more, "--checkpoint", tmp_path / "lm.pt", "--every", SAVED)
    assert [line["step"] for line in lines] == list(range(more))
    # the steps after the checkpoint are done again
    assert [line["received"] > 0 for line in lines] == [False] * SAVED + [True] * (more - SAVED)
    assert losses(lines)[:STEPS] == pytest.approx(losses(shared), abs=1e-4)


def test_sequences_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "four").mkdir()
    one_each = train(tmp_path / "two", 2, "--steps", 3, "--cp", 1)
    two_each = train(tmp_path / "four", 4, "--steps", 3, "--cp", 2)
    assert losses(two_each) == pytest.approx(losses(one_each), abs=1e-4)
    assert all(line["received"] == 0 for line in one_each)
    assert all(line["received"] > 0 for line in two_each)


def workers(torchrun: int) -> dict[int, psutil.Process]:
    """The worker processes of a torchrun, by rank."""
    found = {}
    for process in psutil.Process(torchrun).children(recursive=True):
        try:
            rank = process.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None:
            found[int(rank)] = process
    return found


@pytest.fixture
def log() -> Iterator[Any]:
    with tempfile.TemporaryFile() as file:
        yield file


def test_killed_workers_go_on_from_the_checkpoint(shared: list[dict[str, Any]], tmp_path: Path, log: Any) -> None:
    script, out, every = example(), tmp_path / "metrics.jsonl", 6
    assert script is not None
    options = [*SMALL, "--steps", STEPS, "--checkpoint", tmp_path / "lm.pt", "--every", every, "--out", out]
    until = time.monotonic() + 150
    seen: dict[int, psutil.Process] = {}
    # the rank to kill, once this many steps are done
    kills = [(1, 8), (0, 22)]
    with started(command(script, 2, *options, restarts=3), threads=1, log=log.fileno()) as process:
        while process.poll() is None:
            assert time.monotonic() < until
            if kills and len(metrics(out)) >= kills[0][1]:
                members = workers(process.pid)
                seen |= {member.pid: member for member in members.values()}
                members[kills[0][0]].kill()
                kills.pop(0)
            time.sleep(0.01)
    log.seek(0)
    printed = log.read().decode(errors="replace")
    assert process.returncode == 0, printed
    assert not kills
    assert printed.count("goes on with step") == 2, printed
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert losses(lines) == pytest.approx(losses(shared), rel=1e-6)
    assert not psutil.wait_procs(seen.values(), timeout=5)[1]
