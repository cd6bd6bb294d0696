"""Plans on disk: identified by value, written whole or not at all, and never trusted."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import pytest
import torch

import ringweave as rw
from ringweave.plan.store import PlanStore


def cache(folder: Path) -> rw.PlanCache:
    """Return an empty plan cache with a folder, as in a new process."""
    made = rw.PlanCache()
    made.store = PlanStore(folder, seconds=0)
    return made


def planned(folder: Path, pattern: rw.Pattern, n: int = 512) -> tuple[rw.BlockPlan, int]:
    """Return a plan, and the number of plans read from disk for it."""
    fresh = cache(folder)
    plan = fresh.get(pattern, n, n, heads=2, tile=(64, 64))
    return plan, fresh.statistics().loaded


PATTERNS = {
    "text": lambda: (rw.SlidingWindow(100) | rw.Sinks(3)) & rw.Causal(),
    "table": lambda: rw.patterns.random_blocks(512, 0.5, block_size=64, heads=2) & rw.Causal(),
    "numbers": lambda: rw.KeyPadding(torch.tensor([300])) & rw.Causal(),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_plan_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    first, loaded = planned(tmp_path, PATTERNS[name]())
    assert loaded == 0
    second, loaded = planned(tmp_path, PATTERNS[name]())
    assert loaded == 1
    for each in ("row_ptr", "col", "mask_id", "col_ptr", "row", "mask_id_t", "mask_words", "row_set", "order"):
        assert torch.equal(getattr(first, each), getattr(second, each))
        assert getattr(first, each).dtype == getattr(second, each).dtype
    assert repr(first) == repr(second)


def test_other_values_are_other_plans(tmp_path: Path) -> None:
    table = torch.zeros(8, 8, dtype=torch.bool)
    for changed in (None, (0, 0), (7, 7)):
        if changed is not None:
            table[changed] = True
        plan, loaded = planned(tmp_path, rw.BlockTable(table, 64))
        assert loaded == 0
        assert plan.nnz == int(table.sum())
    assert (
        planned(tmp_path, rw.KeyPadding(torch.tensor([300])))[1]
        == planned(tmp_path, rw.KeyPadding(torch.tensor([301])))[1]
        == 0
    )
    assert planned(tmp_path, rw.Causal(), 512)[1] == planned(tmp_path, rw.Causal(), 448)[1] == 0


@pytest.mark.parametrize("harm", ["cut", "bit", "empty", "other"])
def test_a_broken_file_is_ignored_and_replaced(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = planned(tmp_path, rw.Causal())
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"cut": bytes(data[: len(data) // 2]), "bit": bytes(data), "empty": b"", "other": b"x" * 99}[harm])
    with caplog.at_level(logging.WARNING, "ringweave"):
        again, loaded = planned(tmp_path, rw.Causal())
    assert loaded == 0
    assert "broken and ignored" in caplog.text
    assert torch.equal(again.col, first.col)
    assert planned(tmp_path, rw.Causal())[1] == 1


def test_what_has_no_value_on_disk_and_what_is_quick_stay_away(tmp_path: Path) -> None:
    planned(tmp_path, rw.from_mask_mod(lambda b, h, q, k: q >= k))
    slow = rw.PlanCache()
    slow.store = PlanStore(tmp_path, seconds=60)
    slow.get(rw.Causal(), 512, 512, tile=(64, 64))
    # the plan of a decoding step
    cache(tmp_path).get(rw.Causal(), 1, 512, q_offset=511, tile=(64, 64))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "ringweave"):
        plan, _ = planned(tmp_path / "file", rw.Causal())
    assert plan.nnz > 0
    assert "could not be stored" in caplog.text


def _write(folder: Path) -> None:
    for n in range(128, 1024, 64):
        planned(folder, rw.Causal(), n)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write, args=(tmp_path,)) for _ in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(60)
    assert [each.exitcode for each in workers] == [0, 0, 0]
    assert len([*tmp_path.iterdir()]) == 14
    assert planned(tmp_path, rw.Causal(), 640)[1] == 1
