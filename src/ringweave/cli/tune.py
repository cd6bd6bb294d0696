"""``ringweave tune``: measure backends, tiles and blocks for the user's shapes, and keep the answer for auto."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

import torch
import typer
from rich.table import Table
from rich.text import Text

from ..ops.dispatch import BACKENDS
from ..patterns import parse
from . import terminal
from .show import Heads, PatternText, Tokens

if TYPE_CHECKING:
    from ..bench.descent import Tuned
    from ..bench.tune import Finding


def tune(
    pattern: PatternText,
    tokens: Tokens,
    heads: Heads = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key heads. [default: as many as query heads]")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Dimension of a head.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Batch elements.")] = 1,
    dtype: Annotated[Literal["float32", "float16", "bfloat16"], typer.Option(help="Type of q, k and v.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 7,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="For each branch and direction. [default: 20; on a GPU, which compiles, 120]"),
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave gradients out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and store nothing.")] = False,
) -> None:
    """Time what is right on these sizes, and store the fastest backend and tiles: backend="auto" takes them then."""
    from ..bench.problem import DIRECTIONS, Problem
    from ..bench.tune import store
    from ..bench.tune import tune as measure

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("this torch finds no CUDA device", param_hint="--device")
    relation = parse(pattern)
    console = terminal.out()
    problem = Problem(
        "tune", relation, tokens, heads or relation.extents()[1] or 1, head_dim, relation.extents()[0] or batch,
        getattr(torch, dtype), device, kv_heads,
    )  # fmt: skip
    with console.status("starting") as status:
        choices = measure(
            problem,
            directions=DIRECTIONS[: 1 if forward_only else 2],
            rounds=rounds,
            budget=(120.0 if device.startswith("cuda") else 20.0) if seconds is None else seconds,
            say=lambda text: status.update(Text(text)),
        )
    for choice in choices:
        console.print(_candidates(choice))
        for tuned in choice.kernels:
            console.print(_blocks(tuned))
    if dry_run:
        console.print("nothing stored")
        return
    path = store(choices)
    said = "nothing to store: no backend could be timed" if path is None else f"stored in {path}"
    console.print(said, markup=False, soft_wrap=True)


def _candidates(choice: Finding) -> Table:
    """A line for each candidate; fastest first, then what was not timed."""
    title = f"{choice.problem.pattern!r}, {choice.problem.tokens} tokens, {choice.direction}"
    table = _table(title, "backend", "tiles", "", "milliseconds")
    chosen = choice.chosen
    for each, timing in sorted(choice.timings.items(), key=lambda item: item[1].median):
        tiles = _sides(each.step(choice.branch)[1].tile if BACKENDS[each.backend].tiled else None)
        blocks = ", measured blocks" if each.blocks else ""
        table.add_row(each.backend + blocks, tiles, "chosen" if each == chosen else "", f"{timing.median * 1e3:.3g}")
    for each, reason in choice.reasons.items():
        table.add_row(each.backend, _sides(each.tile), "", Text(f"not timed: {reason}"))
    return table


def _blocks(tuned: Tuned) -> Table:
    """A line for each choice of blocks of one kernel; fastest first."""
    key, descent = tuned.key, tuned.descent
    title = f"triton, {key.kernel}, {key.tile[0]} x {key.tile[1]}, {'partial' if key.masked else 'full'} tiles"
    names = [field.name for field in dataclasses.fields(descent.start)]
    table = _table(title, *names, "", "milliseconds")
    for each, seconds in sorted(descent.seconds.items(), key=lambda item: item[1]):
        mark = "chosen" if each == tuned.chosen else "usual" if each == descent.start else ""
        table.add_row(*_cells(dataclasses.astuple(each)), mark, f"{seconds * 1e3:.3g}")
    for each, reason in descent.reasons.items():
        table.add_row(*_cells(dataclasses.astuple(each)), "", Text(f"not timed: {reason}"))
    return table


def _sides(tile: tuple[int, int] | None) -> str:
    return "" if tile is None else f"{tile[0]} x {tile[1]}"


def _cells(values: tuple[int, ...]) -> list[str]:
    return [("yes" if value else "") if isinstance(value, bool) else str(value) for value in values]


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False, title_justify="left")
    table.title = Text(title)
    return table
