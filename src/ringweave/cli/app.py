"""The command-line application: the commands show, explain and tune, and the handling of errors."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from .. import __version__, units
from ..backends import BACKENDS
from ..cells import Panel, picture
from ..errors import RingweaveError
from ..explanation import explain as explained
from ..patterns import parse
from ..picture import ASCII_SHADES, SHADES, art_rows
from ..plugins import registrations, require_command
from . import doctor, terminal
from .terminal import HeadDim, Heads, KvHeads, PatternText, Tokens

if TYPE_CHECKING:
    from ..tune import Finding
    from ..tune.descent import Tuned

_GAP = 3
_LEAST = 24  # narrowest panel in characters; if panels would be narrower, they are placed below each other
_MOST = 64


class Commands(TyperGroup):
    """The commands. A RingweaveError ends a command with one line on stderr and exit code 2, without a traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; names of two words, such as ``bench --gate``, take precedence over the first word."""
        if args[0] not in self.commands:
            require_command(args[0])
        second, *value = args[1].split("=", 1) if len(args) > 1 else [""]
        name = f"{args[0]} {second}"
        return super().resolve_command(ctx, [name, *value, *args[2:]] if name in self.commands else args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command, and report a RingweaveError."""
        try:
            return super().invoke(ctx)
        except RingweaveError as error:
            terminal.fail(str(error))
            raise typer.Exit(2) from None


app = typer.Typer(
    name="ringweave",
    cls=Commands,
    help="Exact block-sparse and dilated attention for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ringweave {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def show(
    pattern: PatternText,
    tokens: Tokens,
    heads: Heads = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the picture to a file (.svg or .png) instead."),
    ] = None,
) -> None:
    """Draw which keys each query attends."""
    relation = parse(pattern)
    console = terminal.out()
    if out is not None:
        relation.plot(tokens, heads=heads or 1, path=out)
        console.print(f"wrote {out}", markup=False, soft_wrap=True)
        return
    shades = SHADES if terminal.unicode_ok(console) else ASCII_SHADES
    margin = len(str(tokens)) + 2
    number = len(picture(relation, tokens, heads=heads or 1, cells=1).panels)
    columns = max(1, min(number, (console.width - margin) // (_LEAST + _GAP)))
    width = min(_MOST, (console.width - margin) // columns - _GAP)
    drawn = picture(relation, tokens, heads=heads or 1, cells=max(2, width // 2))
    lines = [drawn.title, drawn.caption, ""]
    for begin in range(0, len(drawn.panels), columns):
        row = drawn.panels[begin : begin + columns]
        lines += _row(row, tokens, margin, shades, headings=len(drawn.panels) > 1)
        lines.append("")
    lines += ["queries downwards, keys to the right", f"allowed pairs in a cell: {_legend(shades)}"]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _row(panels: tuple[Panel, ...], tokens: int, margin: int, shades: str, *, headings: bool) -> list[str]:
    """Draw panels side by side with frames, and with token numbers on the axes."""
    arts = [art_rows(panel, shades) for panel in panels]
    unicode = shades == SHADES
    side, corners, flat = ("│", "┌┐└┘", "─") if unicode else ("|", "++++", "-")
    width = len(arts[0][0])
    gap = " " * (_GAP - 2)
    lines = []
    if headings:
        lines.append(" " * margin + gap.join(panel.caption[:width].center(width + 2) for panel in panels))
    scale = "0" + (str(tokens).rjust(width + 1) if width > len(str(tokens)) else "")
    lines.append(" " * margin + gap.join(scale.ljust(width + 2) for _ in panels))
    lines.append(" " * margin + gap.join(corners[0] + flat * width + corners[1] for _ in panels))
    for i, rows in enumerate(zip(*arts, strict=True)):
        label = "0" if i == 0 else str(tokens) if i == len(arts[0]) - 1 else ""
        lines.append(label.rjust(margin - 1) + " " + gap.join(side + art + side for art in rows))
    lines.append(" " * margin + gap.join(corners[2] + flat * width + corners[3] for _ in panels))
    return [line.rstrip() for line in lines]


def _legend(shades: str) -> str:
    texts = ("none", "< 25 %", "< 75 %", "< 100 %", "all")
    return "  ".join(f"{2 * shade} {text}" for shade, text in zip(shades[1:], texts[1:], strict=True))


@app.command()
def explain(
    pattern: PatternText,
    tokens: Tokens,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = 64,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "float64"],
        typer.Option(metavar="TYPE", help="Type of q, k and v: float32, float16, bfloat16 or float64."),
    ] = "float32",
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help="Device of q, k and v: cpu, cuda or mps. This machine need not have it."),
    ] = "cpu",
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="Backend, or auto to choose one (ringweave doctor lists them).")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Print what attention with a pattern would compute and cost, without running it."""
    terminal.check_device(device)
    relation = parse(pattern)
    facts = explained(
        relation,
        tokens,
        heads=heads or relation.extents()[1] or 1,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batch=relation.extents()[0] or 1,
        dtype=getattr(torch, dtype),
        device=device,
        backend=backend,
        as_dict=as_json,
    )
    text = json.dumps(facts, indent=2) if as_json else facts
    terminal.out().print(text, markup=False, soft_wrap=True)


app.command("doctor")(doctor.doctor)


@app.command()
def tune(
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
    device: Annotated[str, typer.Option(metavar="NAME", help="Device to measure: cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Number of timed rounds.")] = 7,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="S",
            help="Time limit for each branch and direction (default: 20; 120 on a GPU, where kernels are compiled).",
        ),
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Measure without gradients.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but store nothing.")] = False,
) -> None:
    """Measure the fastest backend and tiles for a call, and store them for backend="auto"."""
    from ..backends.tuning import writable
    from ..tune import store
    from ..tune import tune as measure
    from ..tune.problem import DIRECTIONS, Problem

    terminal.check_device(device)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("this torch finds no CUDA device.", param_hint="'--device'")
    relation = parse(pattern)
    console = terminal.out()
    if not dry_run:
        writable()
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
    """Return a table of the candidates: timed ones, fastest first, then the others with reasons."""
    title = f"{choice.problem.pattern!r}, {choice.problem.tokens} tokens, {choice.direction}"
    table = _table(title, "backend", "tiles", "", "time")
    chosen = choice.chosen
    for each, timing in sorted(choice.timings.items(), key=lambda item: item[1].median):
        tiles = _sides(each.step(choice.branch)[1].tile if BACKENDS[each.backend].tiled else None)
        blocks = ", measured blocks" if each.blocks else ""
        table.add_row(each.backend + blocks, tiles, "chosen" if each == chosen else "", units.seconds(timing.median))
    for each, reason in choice.reasons.items():
        table.add_row(each.backend, _sides(each.tile), "", Text(f"not timed: {reason}"))
    return table


def _blocks(tuned: Tuned) -> Table:
    """Return a table of the blocks that were tried for one kernel: timed ones, fastest first, then the others."""
    key, descent = tuned.key, tuned.descent
    title = f"triton, {key.kernel}, {key.tile[0]} x {key.tile[1]}, {'partial' if key.masked else 'full'} tiles"
    names = [field.name for field in dataclasses.fields(descent.start)]
    table = _table(title, *names, "", "time")
    for each, seconds in sorted(descent.seconds.items(), key=lambda item: item[1]):
        mark = "chosen" if each == tuned.chosen else "usual" if each == descent.start else ""
        table.add_row(*_cells(dataclasses.astuple(each)), mark, units.seconds(seconds))
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


for register in registrations():
    register(app)
