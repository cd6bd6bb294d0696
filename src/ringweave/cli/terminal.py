"""What commands share: consoles for results and for errors, what the terminal can show, and arguments."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

PatternText = Annotated[
    str,
    typer.Argument(metavar="PATTERN", help="As in Python, such as '(SlidingWindow(1024) | Sinks(64)) & Causal()'."),
]
Tokens = Annotated[int, typer.Option("--tokens", "-n", min=1, help="Sequence length.")]
Heads = Annotated[int | None, typer.Option("--heads", min=1, help="Query heads (default: those of the pattern, or 1).")]


def out() -> Console:
    """Open a console for results; made anew, so that it follows a redirected stdout."""
    return Console(highlight=False)


def fail(reason: str) -> None:
    """Write one red line on stderr."""
    Console(stderr=True, highlight=False).print(
        Text(f"ringweave: {' '.join(reason.split())}", style="red"), soft_wrap=True
    )


def unicode_ok(console: Console) -> bool:
    """Tell whether block characters can be written; else ASCII has to do."""
    return console.encoding.lower().startswith("utf")
