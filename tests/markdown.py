"""Run the code blocks of Markdown pages: Python, ``>>>`` as doctests, and ``$ ringweave`` through the command line."""

from __future__ import annotations

import doctest
import os
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

_FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
_PROMPT = "$ ringweave "


def run_console(example: Example) -> str | None:
    """Run a block's commands; return the first wrong exit code or output as text, or None."""
    for block in ("\n" + example.parsed).split("\n$ ")[1:]:
        command, _, wanted = block.partition("\n")
        if not f"$ {command} ".startswith(_PROMPT):
            continue
        code, got = _invoke(shlex.split(command)[1:])
        if code != 0:
            return f"$ {command}\nended with exit code {code}:\n{got}"
        if wanted.strip() and not doctest.OutputChecker().check_output(wanted, got, _FLAGS):
            return f"$ {command}\nwanted:\n{wanted}\ngot:\n{got}"
    return None


def _invoke(arguments: list[str]) -> tuple[int, str]:
    from typer.testing import CliRunner

    from ringweave.cli.app import app

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # a command may write files
        try:
            result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"})
        finally:
            os.chdir(before)
    return result.exit_code, result.output


def collector(root: Path, patterns: list[str], names: Callable[[], dict[str, object]]) -> Any:
    """Return the ``pytest_collect_file`` hook for the pages under ``root``; a page's namespace starts from ``names``."""

    def setup(namespace: dict[str, object]) -> None:
        namespace.update(names())

    parsers = [PythonCodeBlockParser(doctest_optionflags=_FLAGS), CodeBlockParser("console", run_console)]
    return Sybil(parsers, patterns=patterns, path=str(root), setup=setup).pytest()
