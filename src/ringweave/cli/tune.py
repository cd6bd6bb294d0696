"""``ringweave tune``: measure the backends for the user's shapes, and keep the answer for auto."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import typer
from rich.table import Table
from rich.text import Text

from ..patterns import parse
from . import terminal
from .show import Heads, PatternText, Tokens


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
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave gradients out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and store nothing.")] = False,
) -> None:
    """Time every backend that is right on these sizes, and store the fastest: backend="auto" takes it from then on."""
    from ..bench.tune import DIRECTIONS, store
    from ..bench.tune import tune as measure
    from ..bench.workload import Workload

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("this torch finds no CUDA device", param_hint="--device")
    relation = parse(pattern)
    console = terminal.out()
    workload = Workload(
        "tune", relation, tokens, heads or relation.extents()[1] or 1, head_dim, relation.extents()[0] or batch,
        getattr(torch, dtype), device, kv_heads,
    )  # fmt: skip
    with console.status("starting") as status:
        choices = measure(
            workload,
            directions=DIRECTIONS[: 1 if forward_only else 2],
            rounds=rounds,
            say=lambda text: status.update(Text(text)),
        )
    for choice in choices:
        table = Table("backend", "", "milliseconds", box=None, pad_edge=False, title_justify="left")
        table.title = Text(f"{choice.workload.pattern!r}, {choice.workload.tokens} tokens, {choice.direction}")
        for name, timing in sorted(choice.timings.items(), key=lambda item: item[1].median):
            table.add_row(name, "chosen" if name == choice.backend else "", f"{timing.median * 1e3:.3g}")
        for name, reason in choice.reasons.items():
            table.add_row(name, "", Text(f"not timed: {reason}"))
        console.print(table)
    if dry_run:
        console.print("nothing stored")
        return
    path = store(choices)
    said = "nothing to store: no backend could be timed" if path is None else f"stored in {path}"
    console.print(said, markup=False, soft_wrap=True)
