"""``ringweave bench campaign``: run every measurement of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ringweave.cli import terminal

from ..bench.command import new_table
from ..bench.report import case_pages, read_lines, write_figures
from . import campaign
from . import units as campaign_units


def campaigned(
    out: Annotated[Path, typer.Option(help="Folder for the figures and the output of each unit.")],
    device: Annotated[str, typer.Option(help="GPU to measure: cuda or cuda:1.")] = "cuda",
    seconds: Annotated[float, typer.Option(min=1, help="Time limit of the whole run, in seconds.")] = 540.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run of this folder.")] = False,
    dry: Annotated[bool, typer.Option("--dry", help="Do everything except the GPU's work; needs no GPU.")] = False,
) -> None:
    """Run all measurements of a GPU, each in a separate process with a time limit."""
    if not device.startswith("cuda"):
        raise typer.BadParameter(f"{device!r} is no GPU", param_hint="--device")
    console = terminal.out()
    todo = campaign.units(out.resolve(), device, Path.cwd(), dry)
    ended = campaign.run(todo, out.resolve(), seconds=seconds, resume=resume, say=console.print)
    table = new_table("Campaign", "unit", "result", "s")
    for each in ended:
        table.add_row(escape(each.unit), each.result, f"{each.seconds:.0f}")
    console.print(table)
    figures = read_lines([file for file in [out / campaign_units.FIGURES] if file.is_file()])
    if figures:
        console.print(f"Page: {write_figures(case_pages(figures), out / 'figures.html')}", soft_wrap=True, markup=False)
    left = len(todo) - len(ended)
    console.print(f"{left} units left: the same command with --resume runs them." if left else "All units ended.")
