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
    from rich.table import Table

    from .cases import CaseResult
    from .compare import Outcome, Say
    from .demo import DemoResult

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
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds instead of the case's own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Append the figures to this file as JSON lines.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the cases and peers.")] = False,
) -> None:
    """Measure attention side by side with its peers: time, ratio, memory; every peer is checked before it is timed."""
    import torch
    from rich.console import Console

    from .cases import Options, run_case
    from .record import environment, plain, write_lines

    console = Console(highlight=False)
    if show_list:
        _print_list(console)
        return
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(_DTYPES)}", param_hint="--dtype")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("this torch finds no CUDA device", param_hint="--device")
    if threads is not None:
        torch.set_num_threads(threads)
    where = environment(device)
    console.print(_where_line(where.cpu, where.accelerator, where.threads, where.torch, where.load, where.cores))
    options = Options(quick, tokens, heads, getattr(torch, dtype), device, rounds)
    with _spinner(console) as say:
        result = run_case(case, options, say)
    wrong = print_result(console, result)
    if out is not None:
        head = {"case": result.case, "environment": plain(where), "options": plain(options)}
        count = write_lines(out, [head | plain(record) for record in result.records])
        console.print(f"{count} lines added to {out}")
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

    from .demo import run_demo
    from .report import write_report

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
            progress.update(bars[part], completed=done, description=_escaped(shown))

        result = run_demo(quick=quick, advance=advance)
        advance("Report", 0.0, "")
        path = write_report(result, out)
        advance("Report", 1.0, "")
    _print_summary(console, result)
    console.print(f"Report: {path.resolve()}  ({time.perf_counter() - start:.0f} s in all)", soft_wrap=True)
    if not result.correct:
        raise typer.Exit(1)


def print_result(console: Console, result: CaseResult) -> bool:
    """Print a case's tables and conclusion; whether any peer was wrong."""
    from .cases import PlanCost
    from .compare import Outcome

    outcomes = [record for record in result.records if isinstance(record, Outcome)]
    plans = [record for record in result.records if isinstance(record, PlanCost)]
    if plans:
        table = _table("Cold plans", "pattern", "tokens", "tiles", "ms", "min", "max", "ns/tile", "B/tile")
        for plan in plans:
            times = (f"{s * 1e3:.2f}" for s in (plan.timing.median, plan.timing.min, plan.timing.max))
            each = (f"{plan.nanoseconds_per_tile:.0f}", f"{plan.bytes_per_tile:.1f}")
            table.add_row(plan.workload, f"{plan.tokens:,}", f"{plan.tiles:,}", *times, *each)
        console.print(table)
    groups: dict[tuple[str, int, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.workload, outcome.tokens, outcome.direction), []).append(outcome)
    for (workload, tokens, direction), members in groups.items():
        first = members[0]
        title = (
            f"{workload}, {direction}: {tokens:,} tokens, {first.heads} heads, D = {first.head_dim}, {first.dtype}, "
            f"density {first.density:.4f}"
        )
        table = _table(title, "peer", "ms", "min", "max", "ratio", "GFLOP/s", "MiB", "note")
        for outcome in members:
            table.add_row(*_cells(outcome))
        console.print(table)
    if outcomes:
        console.print(
            "[dim]ms: median. ratio: the peer's median over the first peer's, same run. "
            "GFLOP/s: on the pattern's allowed pairs. MiB: peak memory above what was there before, with results.[/dim]"
        )
    console.print(result.conclusion)
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    for outcome in wrong:
        console.print(
            f"[red]{outcome.peer} is wrong on {outcome.workload}, {outcome.direction}: {outcome.reason}[/red]"
        )
    return bool(wrong)


def _cells(outcome: Outcome) -> list[str]:
    if outcome.timing is None:
        return [outcome.peer, "-", "", "", "", "", "", _escaped(outcome.reason or "")]
    timing = outcome.timing
    setup = outcome.setup_seconds or 0.0
    note = outcome.how + (f"; {setup:.1f} s to prepare" if setup >= 0.5 else "")
    return [
        outcome.peer,
        *(f"{seconds * 1e3:.1f}" for seconds in (timing.median, timing.min, timing.max)),
        "-" if outcome.over_first is None else f"{outcome.over_first.medians:.2f}",
        f"{outcome.gflops:.1f}",
        "-" if outcome.peak is None else f"{outcome.peak.nbytes / 2**20:.0f}",
        note,
    ]


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        left = column in ("peer", "pattern", "note", "what", "tokens, direction", "")
        table.add_column(column, justify="left" if left else "right", no_wrap=column not in ("note", "what"))
    return table


def _print_list(console: Console) -> None:
    from .cases import CASES
    from .peers import PEERS

    for title, rows in (
        ("Cases", [(case.name, case.summary) for case in CASES.values()]),
        ("Peers", [(peer.name, peer.summary) for peer in PEERS.values()]),
    ):
        table = _table(title, "", "what")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _print_summary(console: Console, result: DemoResult) -> None:
    from rich.table import Table

    figures = Table.grid(padding=(0, 2))
    for name, value in result.summary():
        figures.add_row(f"[bold]{name}[/bold]", _escaped(value))
    console.print(figures)
    rows = result.speeds()
    names = list(rows[0][1])
    table = _table("Median times, and in brackets over ringweave's", "tokens, direction", *names)
    for title, cells in rows:
        table.add_row(title, *(cells.get(name, "") for name in names))
    console.print(table)
    for remark in result.remarks():
        console.print(f"[dim]{_escaped(remark)}[/dim]")
    where = result.environment
    console.print(_where_line(where.cpu, where.accelerator, where.threads, where.torch, where.load, where.cores))


def _where_line(cpu: str, accelerator: str | None, threads: int, torch: str, load: float | None, cores: int) -> str:
    busy = ""
    if load is not None and load > 0.5 * cores:
        busy = f" [yellow]Others use this machine (load {load:.1f} on {cores} cores): figures are noisy.[/yellow]"
    return f"{accelerator or cpu}, {threads} threads, torch {torch}.{busy}"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@contextmanager
def _spinner(console: Console) -> Iterator[Say]:
    with console.status("starting") as status:
        yield lambda text: status.update(_escaped(text))
