"""``ringweave tune``: measure the fastest backend and tiles for a call, and store them."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import typer
from rich.table import Table
from rich.text import Text

from ringweave import units
from ringweave.backends import BACKENDS
from ringweave.cli import terminal
from ringweave.cli.terminal import HeadDim, Heads, KvHeads, PatternText, Tokens
from ringweave.patterns import parse
from ringweave_gpu.trial import Verdict

from . import Finding, save_answers, trials, tune
from .answers import writable_file
from .problem import DIRECTIONS, Problem


def command(
    pattern: PatternText,
    tokens: Tokens,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = 64,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Number of batch elements.")] = 1,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"],
        typer.Option(metavar="TYPE", help="Type of q, k and v: float32, float16 or bfloat16."),
    ] = "float32",
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Hold a trial of the backends on this machine's GPU, in processes of their own."),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Number of timed rounds.")] = 7,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="S",
            help="Time limit for each branch and direction on a CPU (default: 20).",
        ),
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Measure without gradients.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but store nothing.")] = False,
) -> None:
    """Measure the fastest backend and tiles for a call, and store them for backend="auto"."""
    if gpu and not torch.cuda.is_available():
        raise typer.BadParameter("this torch finds no CUDA device.", param_hint="'--gpu'")
    relation = parse(pattern)
    console = terminal.out()
    if not dry_run:
        writable_file()
    problem = Problem(
        "tune", relation, tokens, heads or relation.extents()[1] or 1, head_dim, relation.extents()[0] or batch,
        getattr(torch, dtype), "cuda" if gpu else "cpu", kv_heads,
    )  # fmt: skip
    if gpu:
        with console.status("starting") as status:
            verdicts = trials(
                problem, directions=DIRECTIONS[: 1 if forward_only else 2], store=not dry_run,
                say=lambda text: status.update(Text(text)),
            )  # fmt: skip
        for verdict in verdicts:
            console.print(_outcomes(verdict))
        return
    with console.status("starting") as status:
        choices = tune(
            problem,
            directions=DIRECTIONS[: 1 if forward_only else 2],
            rounds=rounds,
            budget=20.0 if seconds is None else seconds,
            say=lambda text: status.update(Text(text)),
        )
    for choice in choices:
        console.print(_candidates(choice))
    if dry_run:
        console.print("nothing stored")
        return
    path = save_answers(choices)
    said = "nothing to store: no backend could be timed" if path is None else f"stored in {path}"
    console.print(said, markup=False, soft_wrap=True)


def _candidates(choice: Finding) -> Table:
    """Return a table of the candidates: timed ones, fastest first, then the others with reasons."""
    title = f"{choice.problem.pattern!r}, {choice.problem.tokens} tokens, {choice.direction}"
    table = _table(title, "backend", "tiles", "", "time")
    chosen = choice.chosen
    for each, timing in sorted(choice.timings.items(), key=lambda item: item[1].median):
        tiles = _sides(each.step(choice.branch)[1].tile if BACKENDS[each.backend].tiled else None)
        table.add_row(each.backend, tiles, "chosen" if each == chosen else "", units.seconds(timing.median))
    for each, reason in choice.reasons.items():
        table.add_row(each.backend, _sides(each.tile), "", Text(f"not timed: {reason}"))
    return table


def _outcomes(verdict: Verdict) -> Table:
    """Return a table of a trial's outcomes, in auto's order."""
    table = _table(verdict.of, "backend", "", "time")
    for name, each in verdict.outcomes.items():
        time = Text(f"left out: {each.reason}") if each.seconds is None else Text(units.seconds(each.seconds))
        table.add_row(name, "chosen" if name == verdict.best else "", time)
    return table


def _sides(tile: tuple[int, int] | None) -> str:
    return "" if tile is None else f"{tile[0]} x {tile[1]}"


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False, title_justify="left")
    table.title = Text(title)
    return table
