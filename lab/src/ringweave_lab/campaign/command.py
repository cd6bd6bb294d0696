"""``ringweave bench campaign``: measure a GPU in limited time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringweave.cli import terminal

from . import campaign, needs


def campaigned(
    out: Annotated[Path, typer.Option(help="Folder for the figures and the output of each unit.")],
    device: Annotated[str, typer.Option(help="GPU to measure: cuda or cuda:1.")] = "cuda",
    seconds: Annotated[float, typer.Option(min=1, help="Time limit of the whole run, in seconds.")] = 540.0,
    tarball: Annotated[
        Path | None, typer.Option(help="File that holds the figures after each unit; by default OUT.tar.gz.")
    ] = None,
    caches: Annotated[
        Path | None, typer.Option(help="Folder for compiled kernels; by default in the temporary folder.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run of this folder.")] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="Compute small sizes on the CPU instead of the GPU's work; needs no GPU.")
    ] = False,
) -> None:
    """Run all measurements of a GPU, each in a separate process with a time limit."""
    if not device.startswith("cuda"):
        raise typer.BadParameter(f"{device!r} is no GPU", param_hint="--device")
    console = terminal.out()

    def say(text: str) -> None:
        # the table has columns of its own
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for line in needs.said():
        say(line)
    campaign.conduct(
        out, device=device, seconds=seconds, tarball=tarball, caches=caches, resume=resume, dry=dry, say=say
    )
