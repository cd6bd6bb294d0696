"""The command-line application: the commands show and explain, and the handling of errors."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import torch
import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import RingweaveError
from ..patterns import parse
from ..plugins import registrations, require_command
from ..reports.cells import Panel, picture
from ..reports.explanation import explain as explained
from ..reports.picture import ASCII_SHADES, SHADES, art_rows
from . import doctor, terminal
from .terminal import HeadDim, Heads, KvHeads, PatternText, Tokens

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


for register in registrations():
    register(app)
