"""``ringweave profile``: write a trace of a call, and print the time of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.markup import escape

from ringweave.cli import terminal
from ringweave.units import percent

from ..bench.command import new_table
from ..bench.record import Options
from .profile import PARTS, PROBLEMS, profiled


def profile(
    case: Annotated[str, typer.Argument(metavar="CASE", help=f"Case to profile: {', '.join(PROBLEMS)}.")] = "window",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Trace file to write, for ui.perfetto.dev or chrome://tracing.")
    ] = Path("ringweave-trace.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Use an eighth of the tokens.")] = False,
    tokens: Annotated[int | None, typer.Option(min=128, help="Sequence length; default: the case's.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Number of heads; default: the case's.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Type of q, k and v.")] = "float32",
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Number of torch threads.")] = None,
) -> None:
    """Profile forward and backward calls, and print the time of planning, kernels, merging, messages and Python."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("this torch finds no CUDA device", param_hint="--device")
    if threads is not None:
        torch.set_num_threads(threads)
    console = terminal.out()
    options = Options(quick, tokens, heads, getattr(torch, dtype), device)
    with console.status("starting") as status:
        found = profiled(case, options, out, lambda text: status.update(escape(text)))
    problem = found.problem
    title = f"{problem.name}: {problem.tokens:,} tokens, {problem.heads} heads, {dtype}, forward and backward"
    console.print(title, markup=False, soft_wrap=True)
    table = new_table("", "", "first call, ms", "", "later, ms", " ")
    totals = [sum(each.values()) for each in (found.first, found.later)]
    for part in PARTS:
        first, later = found.first[part], found.later[part]
        shares = [percent(each / total) for each, total in zip((first, later), totals, strict=True)]
        table.add_row(part, f"{first * 1e3:.2f}", shares[0], f"{later * 1e3:.2f}", shares[1])
    table.add_row("all", f"{totals[0] * 1e3:.2f}", "", f"{totals[1] * 1e3:.2f}", "")
    console.print(table)
    console.print("[dim]Python: checks, dispatch, autograd, and all else. Times are of a profiled call.[/dim]")
    console.print(f"wrote {out}", markup=False, soft_wrap=True)
