"""Run an unchanged program after an ``install()``: ``python -m ringweave.integrations.flash_attn train.py``."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path


def launch(module: str, install: Callable[[], object]) -> None:
    """Run the program that the command line names, as Python does, once ``install`` has been called.

    Args:
        module: Name of the module that was run, for the help text.
        install: The function that installs the integration.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage="%(prog)s [-h] (program.py | -m module) [arguments ...]",
        description=f"Run a Python program unchanged, after {module}.install().",
        # an option belongs to the program unless it comes first
        allow_abbrev=False,
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module, as python -m does")
    parser.add_argument("program", help="path of the program, or name of the module")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    # the error for an absent program would name both
    rest.required = False
    given = parser.parse_args()
    if not given.is_module and not Path(given.program).exists():
        parser.error(f"no such file: {given.program}")
    sys.argv = [given.program, *given.arguments]
    install()
    if given.is_module:
        runpy.run_module(given.program, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        # python -m put the current folder there, and a program has its own
        sys.path[0] = str(Path(given.program).resolve().parent)
    runpy.run_path(given.program, run_name="__main__")
