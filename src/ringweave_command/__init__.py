"""The script ``ringweave``, which prints its version and its commands without loading PyTorch, which takes seconds.

A module of the package ``ringweave`` cannot do that, since importing it imports the package.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata

DESCRIPTION = "Exact block-sparse and dilated attention for PyTorch."
#: The commands and their help; distributions that add commands list them under ``ringweave.summaries``.
COMMANDS = {
    "show": "Draw which keys each query attends.",
    "explain": "Print what attention with a pattern would compute and cost, without running it.",
    "doctor": (
        "Check Python, PyTorch, devices, the native kernel, compilers, packages and backends, and give a verdict."
    ),
}
#: The commands of other distributions, which are there if their distribution is installed.
ELSEWHERE = {
    "audit": "ringweave-audit",
    **dict.fromkeys(("bench", "bits", "demo", "explore", "profile", "simulate", "tune"), "ringweave-lab"),
}


def how_to_install(distribution: str) -> str:
    """Return a sentence that says how to install a distribution."""
    folder = distribution.removeprefix("ringweave-")
    clone, wheels = f"pip install ./{folder}", f"pip install --find-links dist {distribution}"
    return f"In a clone run {clone}; with the wheels in dist, {wheels}."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, or print which packages to install for it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if words == ["--version"]:
        print(f"ringweave {metadata.version('ringweave')}")  # noqa: T201  (typer may be missing)
    elif missing:
        print(  # noqa: T201  (rich may be missing)
            f"ringweave: the command line needs {' and '.join(missing)}. Run: pip install 'ringweave[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(1)
    elif not words or words in (["--help"], ["-h"]):
        _overview(words)
    else:
        from ringweave.cli.app import app

        app(words, prog_name="ringweave")


def _overview(words: list[str]) -> None:
    """Print the list of commands."""
    import typer

    every = dict(COMMANDS)
    for point in metadata.entry_points(group="ringweave.summaries"):
        every |= point.load()
    absent: dict[str, list[str]] = {}
    for name, owner in ELSEWHERE.items():
        if name not in every:
            absent.setdefault(owner, []).append(name)
    said = [f"Not installed: {', '.join(names)}. {how_to_install(owner)}" for owner, names in absent.items()]
    app = typer.Typer(
        name="ringweave", help=DESCRIPTION, no_args_is_help=True, add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]}, epilog="\n\n".join(said),
    )  # fmt: skip

    @app.callback()
    def version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        pass

    for name, text in every.items():
        app.command(name, help=text)(lambda: None)
    app(words, prog_name="ringweave")
