"""The command ``ringweave demo``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..bench.command import new_table, where_line
from .demo import DemoResult, run_demo
from .report import write_report


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes, without FlexAttention; for tests.")] = False,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    threads: Annotated[int | None, typer.Option(min=1, help="Number of torch threads.")] = None,
) -> None:
    """Run ringweave on real text, the source of Python's standard library, and write a report with pictures."""
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(highlight=False)
    start = time.perf_counter()
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {}

        def advance(part: str, done: float, text: str) -> None:
            if part not in bars:
                bars[part] = progress.add_task(part, total=1.0)
            shown = part if done >= 1 or not text else f"{part}: {text}"
            progress.update(bars[part], completed=done, description=escape(shown))

        result = run_demo(quick=quick, advance=advance)
        advance("Report", 0.0, "")
        path = write_report(result, out)
        advance("Report", 1.0, "")
    print_summary(console, result)
    console.print("Next: ringweave explore, a page to compose patterns; docs/quickstart.md for the first calls.")
    console.print(f"Report: {path.resolve()}  ({time.perf_counter() - start:.0f} s in all)", soft_wrap=True)
    if not result.correct:
        raise typer.Exit(1)


def print_summary(console: Console, result: DemoResult) -> None:
    """Print the results of a demonstration."""
    figures = Table.grid(padding=(0, 2))
    for name, value in result.summary():
        figures.add_row(f"[bold]{name}[/bold]", escape(value))
    console.print(figures)
    rows = result.speeds()
    names = list(rows[0][1])
    # short names, so that five columns fit into eighty characters
    heads = [name.removeprefix("ringweave:") for name in names]
    table = new_table("Median milliseconds, in brackets over ringweave's; both: forward and backward", "tokens", *heads)
    for title, cells in rows:
        table.add_row(title, *(cells.get(name, "") for name in names))
    console.print(table)
    for remark in result.remarks():
        console.print(f"[dim]{escape(remark)}[/dim]")
    console.print(where_line(result.environment))
