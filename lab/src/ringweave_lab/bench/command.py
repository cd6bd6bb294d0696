"""The commands ``ringweave bench`` and ``ringweave bench page``, and the tables that they print."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .cases import CASES, run_case
from .cases.quality import spread
from .peers import PEERS
from .record import (
    CaseResult,
    Environment,
    Options,
    Outcome,
    PlanCost,
    Published,
    Record,
    Score,
    StepCost,
    Target,
    environment,
    plain,
    write_lines,
)
from .report import case_pages, read_lines, write_figures


def bench(
    case: Annotated[str, typer.Argument(help="Name of the case; --list shows all.")] = "attention",
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes: seconds instead of minutes.")] = False,
    tokens: Annotated[int | None, typer.Option(min=128, help="Sequence length; default: the case's.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Number of heads; default: the case's.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of q, k and v. Default: float32; kernels: float32 and bfloat16."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Number of torch threads.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of timed rounds; default: the case's.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Measure all sizes; kernels takes hours.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for the results of quality; a later run continues from it.")
    ] = None,
    part: Annotated[str | None, typer.Option(help="Part of the kernels case on a GPU; a kind of model.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to append the figures to as JSON lines; a .html file becomes a page.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the cases and peers.")] = False,
) -> None:
    """Compare the time and memory of attention with other implementations, checking each result before timing it.

    See also: ringweave bench campaign --help (measure a GPU), ringweave bench --gate --help (find slowdowns) and
    ringweave bench page --help (draw stored figures).
    """
    console = Console(highlight=False)
    if show_list:
        _print_list(console)
        return
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="--device")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("this torch finds no CUDA device", param_hint="--device")
    if threads is not None:
        torch.set_num_threads(threads)
    where = environment(device)
    console.print(where_line(where))
    kind = getattr(torch, dtype) if dtype else None
    options = Options(quick, tokens, heads, kind, device, rounds, full, None if folder is None else str(folder), part)
    # the path of a folder may be private, so it is not stored
    shown = dataclasses.replace(options, folder=None)
    head = {"case": case, "environment": plain(where), "options": plain(shown)}
    paged = out is not None and out.suffix.lower() in (".html", ".htm")
    lines: list[dict[str, Any]] = []

    def keep(record: Record) -> None:
        lines.append(head | plain(record))
        if out is not None and not paged:
            # written immediately, so that a run that is killed keeps its figures
            write_lines(out, lines[-1:])

    with console.status("starting") as status:
        result = run_case(case, options, lambda text: status.update(escape(text)), keep)
    wrong = print_result(console, result)
    if out is not None:
        console.print(
            f"Page: {write_figures(case_pages(lines), out)}" if paged else f"{len(lines)} lines added to {out}"
        )
    if wrong:
        raise typer.Exit(1)


def page(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="JSON lines of ringweave bench --out.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("figures.html"),
) -> None:
    """Print the goals of stored figures, and write them to a page with charts, a roofline and tables."""
    console, pages = Console(highlight=False), case_pages(read_lines(files))
    for each in pages:
        _print_targets(console, each.goals, escape("\n".join((each.case, *each.machines))))
    console.print(f"{sum(each.met for each in pages)} of {sum(len(each.goals) for each in pages)} goals are met.")
    console.print(f"Page: {write_figures(pages, out).resolve()}", soft_wrap=True, markup=False)


def _print_list(console: Console) -> None:
    for title, rows in (
        ("Cases", [(case.name, case.summary) for case in CASES.values()]),
        ("Peers", [(peer.name, peer.summary) for peer in PEERS.values()]),
    ):
        table = new_table(title, "", "what")
        for row in rows:
            table.add_row(*row)
        console.print(table)


_LEFT = ("method", "peer", "pattern", "note", "what", "size", "tokens, direction", "")
_WRAPPED = ("note", "what", "size", "pattern")


def print_result(console: Console, result: CaseResult) -> bool:
    """Print a case's tables and conclusion, and return whether any peer was wrong."""
    outcomes = [record for record in result.records if isinstance(record, Outcome)]
    _print_plans(console, [record for record in result.records if isinstance(record, PlanCost)])
    _print_steps(console, [record for record in result.records if isinstance(record, StepCost)])
    (_print_grid if result.grid else _print_outcomes)(console, outcomes)
    _print_scores(console, [record for record in result.records if isinstance(record, Score)])
    _print_targets(console, [record for record in result.records if isinstance(record, Target)])
    _print_published(console, [record for record in result.records if isinstance(record, Published)])
    for sentence in re.split(r"(?<=[.;]) (?=[A-Z])", result.conclusion):
        console.print(f"- {escape(sentence)}")
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    for outcome in wrong:
        console.print(
            f"[red]{outcome.peer} is wrong on {outcome.workload}, {outcome.direction}: {outcome.reason}[/red]"
        )
    return bool(wrong) or any(isinstance(r, Target) and r.reason and "wrong" in r.reason for r in result.records)


def _print_plans(console: Console, plans: list[PlanCost]) -> None:
    if not plans:
        return
    # a narrow terminal has room for names of patterns or for the spread
    spread_out = console.width >= 100
    columns = ("min", "max") if spread_out else ()
    table = new_table("Cold plans", "pattern", "tokens", "tiles", "ms", *columns, "ns/tile", "B/tile")
    for plan in plans:
        seconds = (plan.timing.median, *((plan.timing.min, plan.timing.max) if spread_out else ()))
        times = (f"{each * 1e3:.2f}" for each in seconds)
        each = (f"{plan.nanoseconds_per_tile:.0f}", f"{plan.bytes_per_tile:.1f}")
        table.add_row(plan.workload, f"{plan.tokens:,}", f"{plan.tiles:,}", *times, *each)
    console.print(table)


def _print_steps(console: Console, steps: list[StepCost]) -> None:
    if not steps:
        return
    heads = f"{steps[0].heads} heads, D = {steps[0].head_dim}, {steps[0].dtype}"
    title = f"Training steps on packed documents: {heads}"
    table = new_table(title, "tokens", "documents", "window", "same ms", "new ms", "ratio", "plan ms", "of step")
    for step in steps:
        window = "none" if step.window is None else f"{step.window:,}"
        same, new, plan = (f"{timing.median * 1e3:.1f}" for timing in (step.same, step.new, step.plan))
        figures = (same, new, f"{step.over_same:.2f}", plan, f"{step.plan_share:.1%}")
        table.add_row(f"{step.tokens:,}", f"{step.documents:,}", window, *figures)
    console.print(table)
    console.print(
        "[dim]ms: medians of forward + backward, with the documents of the step before and with new ones, and of a "
        "plan of new ones. ratio: new over same; of step: plan over new; medians of the ratios within rounds.[/dim]"
    )


def _print_outcomes(console: Console, outcomes: list[Outcome]) -> None:
    """Print a table for each problem and direction, with a row for each peer."""
    groups: dict[tuple[str, int, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.workload, outcome.tokens, outcome.direction), []).append(outcome)
    for (workload, tokens, direction), members in groups.items():
        first = members[0]
        title = (
            f"{workload}, {direction}: {tokens:,} tokens, {first.heads} heads, D = {first.head_dim}, {first.dtype}, "
            f"density {first.density:.4f}"
        )
        table = new_table(title, "peer", "ms", "min", "max", "ratio", "GFLOP/s", "MiB", "note")
        for outcome in members:
            table.add_row(*_cells(outcome))
        console.print(table)
    if outcomes:
        console.print(
            "[dim]ms: median. ratio: the peer's median over the first peer's, same run. "
            "GFLOP/s: on the pattern's allowed pairs. MiB: peak memory above what was there before, with results.[/dim]"
        )


def _cells(outcome: Outcome) -> list[str]:
    if outcome.timing is None:
        return [outcome.peer, "-", "", "", "", "", "", escape(outcome.reason or "")]
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


def _print_grid(console: Console, outcomes: list[Outcome]) -> None:
    """Print a table for each type and direction, with a row per size and density and a column per peer."""
    groups: dict[tuple[str, str], dict[tuple[int, ...], dict[str, Outcome]]] = {}
    for each in outcomes:
        key = (each.tokens, each.head_dim, each.heads, each.kv_heads, round(each.density * 10000))
        groups.setdefault((each.dtype, each.direction), {}).setdefault(key, {})[each.peer] = each
    for (dtype, direction), lines in groups.items():
        names = list(dict.fromkeys(name for line in lines.values() for name in line if name != "ringweave"))
        shown = [name.removeprefix("ringweave:") for name in names]
        title = f"{dtype}, {direction}"
        table = new_table(title, "tokens", "D", "heads", "density", "ms", "GFLOP/s", "of peak", *shown)
        for (tokens, head_dim, heads, kv_heads, density), line in lines.items():
            mine = line.get("ringweave")
            timing, rate = (None, None) if mine is None else (mine.timing, mine.gflops)
            grouped = f"{heads}" if heads == kv_heads else f"{heads}/{kv_heads}"
            table.add_row(
                f"{tokens:,}", f"{head_dim}", grouped, f"{density / 100:.0f}%",
                "-" if timing is None else f"{timing.median * 1e3:.1f}",
                "-" if rate is None else f"{rate:.0f}",
                "-" if mine is None or mine.peak_share is None else f"{mine.peak_share:.0%}",
                *(_ratio(line.get(name)) for name in names),
            )  # fmt: skip
        console.print(table)
    console.print(
        "[dim]ms, GFLOP/s (of computed tiles) and share of the FMA peak: ringweave's. Columns named after a peer: its "
        "time over ringweave's, medians of one run. sdpa computes all pairs, the others those of the density.[/dim]"
    )
    for reason in sorted({f"{each.peer}, {each.direction}: {each.reason}" for each in outcomes if each.reason}):
        console.print(f"[dim]{escape(reason)}[/dim]")


def _ratio(outcome: Outcome | None) -> str:
    return "-" if outcome is None or outcome.over_first is None else f"{outcome.over_first.medians:.2f} x"


def _print_scores(console: Console, scores: list[Score]) -> None:
    """Print a table for each part and length: a row for each method, with the spread over its seeds."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in spread(scores):
        groups.setdefault((line["part"], line["tokens"]), []).append(line)
    for (part, tokens), lines in groups.items():
        table = new_table(f"{part}, {tokens:,} tokens", "method", "density", lines[0]["unit"], "least", "most", "seeds")
        for line in lines:
            figures = (f"{line[name]:.3f}" for name in ("mean", "least", "most"))
            table.add_row(line["method"], f"{line['density']:.3f}", *figures, f"{line['seeds']}")
        console.print(table)


def _print_targets(console: Console, targets: list[Target], title: str = "Targets") -> None:
    if not targets:
        return
    table = new_table(title, "what", "size", "measured", "target", "met")
    for each in targets:
        bound = "-" if each.bound is None else f"{'>=' if each.at_least else '<='} {each.spelled(each.bound)}"
        met = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[each.met]
        if each.reason is not None and each.figure is None:
            table.add_row(escape(each.what), each.size, "-", "", escape(each.reason))
            continue
        table.add_row(escape(each.what), each.size, escape(each.spelled(each.figure)), bound, met)
    console.print(table)


def _print_published(console: Console, rows: list[Published]) -> None:
    if not rows:
        return
    table = new_table("Published, and here", "what", "published", "here", "size", "note")
    for each in rows:
        ours = "-" if each.figure is None else f"{each.figure:.3g} {each.unit}"
        table.add_row(escape(each.what), each.published, ours, escape(each.size), escape(each.note))
    console.print(table)


def new_table(title: str, *columns: str) -> Table:
    """Return an empty table with a bold title, if any; columns of numbers are aligned right, others left."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=column not in _WRAPPED)
    return table


def where_line(where: Environment) -> str:
    """Return a line that describes the machine and warns if it is busy."""
    busy = ""
    if where.load is not None and where.load > 0.5 * where.cores:
        load = f"load {where.load:.1f} on {where.cores} cores"
        busy = f" [yellow]Others use this machine ({load}): figures are noisy.[/yellow]"
    return f"{where.machine}.{busy}"
