"""The list of layers in DESIGN.md is the one of pyproject.toml: ``python -m tests.test_layers`` writes it."""

from __future__ import annotations

import tomllib
from pathlib import Path

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


if __name__ == "__main__":
    before, _, after = parts()
    (ROOT / "DESIGN.md").write_text(before + BEGIN + layers() + END + after, "utf-8")
