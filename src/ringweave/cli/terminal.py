"""Helpers that the commands share: consoles for results and errors, and common arguments."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from .. import units


def size(text: str) -> int:
    """Parse a length such as 65536, 64K or 1M for an option.

    Raises:
        typer.BadParameter: The text is not such a length.
    """
    try:
        return units.parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None


PatternText = Annotated[
    str,
    typer.Argument(
        metavar="PATTERN", help="Pattern, written as in Python: '(SlidingWindow(1024) | Sinks(64)) & Causal()'."
    ),
]
Tokens = Annotated[
    int,
    typer.Option("--tokens", "-n", parser=size, metavar="N", help="Sequence length, such as 65536, 64K or 1M."),
]
Heads = Annotated[
    int | None,
    typer.Option(
        "--heads", min=1, metavar="N", help="Number of query heads (default: the heads of the pattern, or 1)."
    ),
]
KvHeads = Annotated[
    int | None,
    typer.Option("--kv-heads", min=1, metavar="N", help="Number of key heads (default: the number of query heads)."),
]
HeadDim = Annotated[int, typer.Option("--head-dim", min=1, metavar="N", help="Dimension of a head.")]


def check_device(name: str) -> None:
    """Check that PyTorch knows a device name.

    Raises:
        typer.BadParameter: It does not.
    """
    try:
        torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(f"{name!r} is not a device of PyTorch.", param_hint="'--device'") from None


def out() -> Console:
    """Open a console for results; a new one for each use, so that it follows a redirected stdout."""
    return Console(highlight=False)


def fail(reason: str) -> None:
    """Write one red line to stderr."""
    Console(stderr=True, highlight=False).print(
        Text(f"ringweave: {' '.join(reason.split())}", style="red"), soft_wrap=True
    )


def unicode_ok(console: Console) -> bool:
    """Whether the console can write block characters; otherwise pictures use ASCII."""
    return console.encoding.lower().startswith("utf")
