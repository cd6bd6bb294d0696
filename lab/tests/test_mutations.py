"""Test the list and the steps of the mutation check; ``make mutations`` runs the breakages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("mutations", ROOT / "lab" / "scripts" / "mutations.py")
assert spec is not None
assert spec.loader is not None
mutations: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutations)


@pytest.mark.parametrize("each", mutations.BREAKAGES, ids=lambda each: each.name)
def test_the_line_to_break_is_there(each: Any) -> None:
    """The line that each breakage replaces exists; a change to that line must update the list."""
    assert (ROOT / each.path).read_text().count(each.old) == 1
    assert each.old != each.new
    assert all((ROOT / word).exists() for word in each.tests if word.startswith(("tests/", "gpu/tests/")))


def test_names_are_of_one_breakage() -> None:
    assert len({each.name for each in mutations.BREAKAGES}) == len(mutations.BREAKAGES) >= 10


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ([0, 1], None),
        ([0, 0], "NOT CAUGHT"),
        ([1], "do not pass as they are"),
        ([5], "do not pass as they are (exit code 5)"),
        ([0, 4], "could not be tested (exit code 4)"),
    ],
)
def test_problems_are_reported(
    codes: list[int], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "src" / "ringweave" / "merge.py"
    path.parent.mkdir(parents=True)
    path.write_text("out = old + new\n")
    seen = []

    def tested(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
        seen.append(path.read_text())
        return codes[len(seen) - 1], "the end"

    monkeypatch.setattr(mutations, "tested", tested)
    each = mutations.Breakage("a sign", "merge.py", "old + new", "old - new", ("tests/test_merge.py",))
    found = mutations.problem(tmp_path, each, set())
    assert found is None if said is None else said in found
    assert seen == ["out = old + new\n", "out = old - new\n"][: len(codes)]
    assert path.read_text() == "out = old + new\n"


@pytest.mark.parametrize("old", ["gone", "o"])
def test_a_line_that_is_gone_or_not_one_is_a_problem(old: str, tmp_path: Path) -> None:
    path = tmp_path / "src" / "ringweave" / "merge.py"
    path.parent.mkdir(parents=True)
    path.write_text("out = old + new\n")
    found = mutations.problem(tmp_path, mutations.Breakage("a sign", "merge.py", old, "x", ()), set())
    assert "has the line to break" in found
