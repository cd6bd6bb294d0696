"""``ringweave bench campaign``: all that a borrowed GPU can be asked."""

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
    out: Annotated[Path, typer.Option(help="The folder for figures, and for what each unit said.")],
    device: Annotated[str, typer.Option(help="The GPU: cuda, or cuda:1.")] = "cuda",
    seconds: Annotated[float, typer.Option(min=1, help="In which all ends.")] = 540.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from where the folder stands.")] = False,
    dry: Annotated[bool, typer.Option("--dry", help="Do everything but the GPU's work, without one.")] = False,
) -> None:
    """Measure all that a borrowed GPU can be asked, each unit in a process of its own with a limit of its own."""
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
