"""The commands ``ringweave bench`` and ``ringweave demo``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from .record import Say

_DTYPES = ("float32", "bfloat16", "float16")


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.command("bench")(bench)
    app.command("demo")(demo)


def bench(
    case: Annotated[str, typer.Argument(help="What to measure; see --list.")] = "attention",
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, seconds instead of minutes.")] = False,
    tokens: Annotated[int | None, typer.Option(min=128, help="Sequence length instead of the case's own.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads instead of the case's own.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. [default: float32; kernels: the first two]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds instead of the case's own.")] = None,
    full: Annotated[bool, typer.Option("--full", help="The whole grid of sizes of kernels; hours.")] = False,
    out: Annotated[Path | None, typer.Option(help="Append the figures to this file as JSON lines.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the cases and peers.")] = False,
) -> None:
    """Measure attention side by side with its peers: time, ratio, memory; every peer is checked before it is timed."""
    import torch
    from rich.console import Console

    from .cases import run_case
    from .console import print_result, where_line
    from .record import Options, Record, environment, plain, write_lines

    console = Console(highlight=False)
    if show_list:
        _print_list(console)
        return
    if dtype is not None and dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(_DTYPES)}", param_hint="--dtype")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("this torch finds no CUDA device", param_hint="--device")
    if threads is not None:
        torch.set_num_threads(threads)
    where = environment(device)
    console.print(where_line(where))
    options = Options(quick, tokens, heads, getattr(torch, dtype) if dtype else None, device, rounds, full)
    head = {"case": case, "environment": plain(where), "options": plain(options)}
    written = 0

    def keep(record: Record) -> None:
        nonlocal written
        if out is not None:
            # at once: a run that is killed keeps what it measured
            written += write_lines(out, [head | plain(record)])

    with _spinner(console) as say:
        result = run_case(case, options, say, keep)
    wrong = print_result(console, result)
    if out is not None:
        console.print(f"{written} lines added to {out}")
    if wrong:
        raise typer.Exit(1)


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, without FlexAttention; for tests.")] = False,
    out: Annotated[Path, typer.Option(help="Where the report goes: one HTML file.")] = Path("report.html"),
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
) -> None:
    """Run ringweave on real text, the running Python's standard library, and write a report with pictures."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    from .console import escaped, print_summary
    from .demo import run_demo
    from .demo_report import write_report

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
            progress.update(bars[part], completed=done, description=escaped(shown))

        result = run_demo(quick=quick, advance=advance)
        advance("Report", 0.0, "")
        path = write_report(result, out)
        advance("Report", 1.0, "")
    print_summary(console, result)
    console.print(f"Report: {path.resolve()}  ({time.perf_counter() - start:.0f} s in all)", soft_wrap=True)
    if not result.correct:
        raise typer.Exit(1)


def _print_list(console: Console) -> None:
    from .cases import CASES
    from .console import new_table
    from .peers import PEERS

    for title, rows in (
        ("Cases", [(case.name, case.summary) for case in CASES.values()]),
        ("Peers", [(peer.name, peer.summary) for peer in PEERS.values()]),
    ):
        table = new_table(title, "", "what")
        for row in rows:
            table.add_row(*row)
        console.print(table)


@contextmanager
def _spinner(console: Console) -> Iterator[Say]:
    from .console import escaped

    with console.status("starting") as status:
        yield lambda text: status.update(escaped(text))
