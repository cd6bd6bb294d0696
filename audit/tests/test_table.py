"""The table of audit/functions.md names every function of the audit's tests: ``python -m audit.tests.test_table``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .functions import FAULTS, KERNELS, LEAKLESS, LEAKS, RIGHT_KERNELS, SOUND

PAGE = Path(__file__).parents[1] / "functions.md"
BEGIN, END = "<!-- functions -->\n", "<!-- /functions -->\n"


def table() -> str:
    """Return the faulty functions by the check that finds them, and the correct functions."""
    kernels: dict[str, list[str]] = {}
    for name, (_, rule) in KERNELS.items():
        kernels.setdefault(rule, []).append(name)
    rows = [("`attended` and `compare`", FAULTS)]
    rows += [(f"the kit, `{rule}`", names) for rule, names in kernels.items()]
    rows += [("`leaks`", LEAKS)]
    wrong = len(FAULTS) + len(KERNELS) + len(LEAKS)
    lines = [f"| {wrong} wrong functions, caught by | |", "|---|---|"]
    lines += [f"| {what} ({len([*names])}) | {_joined(names)} |" for what, names in rows]
    right = {**SOUND, **RIGHT_KERNELS, **LEAKLESS}
    lines += [f"| **{len(right)} right functions, passed** | {_joined(right)} |"]
    return "\n".join(lines) + "\n"


def _joined(names: Iterable[str]) -> str:
    return "; ".join(names)


def parts() -> tuple[str, str, str]:
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    middle, _, after = rest.partition(END)
    return before, middle, after


def test_the_table_is_the_sets() -> None:
    assert parts()[1] == table()
    assert len(FAULTS) + len(KERNELS) + len(LEAKS) >= 40
    assert len(SOUND) >= 15


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + BEGIN + table() + END + after, "utf-8")
