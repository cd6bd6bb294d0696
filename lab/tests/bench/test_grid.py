"""The grid of blocks: what is in it, what is chosen for a row of the table, the patch, and a compiler that crashes."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ringweave.ops.triton import compiling, launch_config
from ringweave.ops.triton.launch_config import Asked, Device, LaunchConfig, usual
from ringweave.ops.tuning_key import KernelKey
from ringweave.tune.problem import FORWARD
from ringweave_lab.campaign import grid, precompile
from ringweave_lab.campaign.grid import CELLS, Cell, Found, joint, patch, together

HOPPER = Device.of_cuda(9, 227 * 1024)
USUAL = LaunchConfig(128, 128, 8, 2, described=True)
SMALL = LaunchConfig(128, 64, 4, 3, described=True)


def asked(kernel: str, dim: int, masked: bool) -> Asked:
    key = KernelKey(kernel, "a GPU", "bfloat16", (dim, dim), (128, 128), masked)
    return Asked(key, 2, HOPPER, usual(kernel, dim, dim, 2, (128, 128), HOPPER, clear=not masked))


def found(cell: Cell, seconds: dict[LaunchConfig, float], table: LaunchConfig = USUAL) -> Found:
    return Found(cell, table, "hopper", seconds, {})


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_grid_is_all_that_fits(cell: Cell) -> None:
    of = asked(*cell)
    blocks = joint(of)
    assert blocks[0] == of.usual
    assert len(set(blocks)) == len(blocks) >= 24
    assert all(of.misfit(each) is None for each in blocks)
    assert any(each.specialised for each in blocks) == (cell.kernel == "forward" and not cell.masked)
    assert any(each.pingpong for each in blocks) == (cell.kernel == "forward")
    held = {each.n if cell.kernel == "backward_kv" else each.m for each in blocks}
    assert held == {64, 128}


def test_a_row_of_the_table_is_best_for_both_kinds_of_tiles() -> None:
    masked, clear = Cell("forward", 128, True), Cell("forward", 128, False)
    loaders = dataclasses.replace(USUAL, warps=4, specialised=True)
    one = found(masked, {USUAL: 1.0, SMALL: 0.8})
    # better still for one of them alone, or of a kind that a row cannot name: neither counts
    assert together([one, found(clear, {USUAL: 1.0, SMALL: 0.95, loaders: 0.7})]) == SMALL
    assert together([one, found(clear, {USUAL: 1.0, SMALL: 1.3})]) == USUAL
    assert together([one, found(clear, {USUAL: 1.0})]) == USUAL
    assert (one.best, one.gain) == (SMALL, 1.25)
    assert found(masked, {USUAL: 1.0, SMALL: 0.99}).best == USUAL


def test_the_patch_changes_its_row_alone(tmp_path: Path) -> None:
    source = Path(launch_config.__file__).read_text("utf-8")
    columns = LaunchConfig(32, 128, 8, 2, described=True)
    better = LaunchConfig(64, 128, 4, 3, described=True)
    cells = [
        found(Cell("forward", 128, True), {USUAL: 1.0, SMALL: 0.8}),
        found(Cell("forward", 64, True), {USUAL: 1.0, SMALL: 1.1}),
        found(Cell("backward_kv", 64, True), {columns: 1.0, better: 0.5}, columns),
    ]
    lines = tmp_path / "grid.jsonl"
    lines.write_text("".join(json.dumps(each.plain()) + "\n" for each in cells) + '{"cell": ["forw')
    assert grid.read(lines) == cells
    text = patch(grid.read(lines), source)
    assert [line for line in text.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")] == [
        '-    ("forward", "hopper"): ((128, 128, 8, 2), (128, 128, 8, 2), (64, 64, 8, 2)),',
        '+    ("forward", "hopper"): ((128, 128, 8, 2), (128, 64, 4, 3), (64, 64, 8, 2)),',
        '-    ("backward_kv", "hopper"): ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),',
        '+    ("backward_kv", "hopper"): ((128, 64, 4, 3), (128, 32, 8, 2), (64, 32, 8, 1)),',
    ]
    assert text.startswith("--- a/src/ringweave/ops/triton/launch_config.py\n+++ b/src")
    assert patch(cells[1:2], source) == ""
    ast.parse(source)


class Pool:
    """A pool that dies of a variant, and of all that wait behind it."""

    fatal = "b"
    processes: ClassVar[list[int]] = []

    def __init__(self, count: int, *rest: Any):
        self.processes.append(count)
        self.broken = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, work: Callable[..., Any], variant: precompile.Variant) -> Future[Any]:
        assert "pattern" not in vars(variant.problem), "what lies on a device is sent to other processes"
        future: Future[Any] = Future()
        self.broken |= variant.kernel == self.fatal
        if self.broken:
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(("too large" if variant.kernel == "d" else None, {variant.kernel}))
        return future


def test_a_compiler_that_crashes_costs_its_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "ProcessPoolExecutor", Pool)
    problem = CELLS[0].problem("cpu")
    assert problem.pattern is not None
    variants = [precompile.Variant(problem, FORWARD, name) for name in "abcd"]
    failed, count = precompile.precompile(variants, compiling.HOPPER, 3)
    assert {each.kernel: reason for each, reason in failed.items()} == {
        "b": "the compiler took its process down", "d": "too large",
    }  # fmt: skip
    assert count == 3
    assert Pool.processes == [3, 1, 3]
