"""Where commands write: one console for results, one for errors, and what the terminal can show."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def out() -> Console:
    """Results; made anew, so that it follows a redirected stdout."""
    return Console(highlight=False)


def fail(reason: str) -> None:
    """One red line on stderr."""
    Console(stderr=True, highlight=False).print(
        Text(f"ringweave: {' '.join(reason.split())}", style="red"), soft_wrap=True
    )


def unicode_ok(console: Console) -> bool:
    """Whether block characters can be written; else ASCII has to do."""
    return console.encoding.lower().startswith("utf")
