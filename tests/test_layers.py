"""The list of layers in DESIGN.md is the one of pyproject.toml: ``python -m tests.test_layers`` writes it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- layers -->\n", "<!-- /layers -->\n"


def layers() -> str:
    """The first contract of import-linter as a block of text, uppermost first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    lines = [row.replace("ringweave.", "").replace(" | ", "   ") for row in contracts[0]["layers"]]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def parts() -> tuple[str, str, str]:
    """DESIGN.md before the list, the list, and the rest."""
    before, _, rest = (ROOT / "DESIGN.md").read_text("utf-8").partition(BEGIN)
    middle, _, after = rest.partition(END)
    return before, middle, after


def test_the_list_of_layers_is_the_linters() -> None:
    assert parts()[1] == layers()


@pytest.mark.parametrize("page", sorted(ROOT.glob("src/**/README.md")), ids=lambda page: page.parent.name)
def test_a_folders_page_names_its_files(page: Path) -> None:
    said = page.read_text("utf-8")
    names = [file.name for file in page.parent.rglob("*.py") if file.name != "__init__.py"]
    kernels = [file.name for file in page.parent.rglob("kernels/*.py")]
    assert [name for name in names if name not in said and name not in kernels] == []
    assert [each for each in re.findall(r"`(?:\w+/)*(\w+\.py)`", said) if each not in names] == []


if __name__ == "__main__":
    before, _, after = parts()
    (ROOT / "DESIGN.md").write_text(before + BEGIN + layers() + END + after, "utf-8")
