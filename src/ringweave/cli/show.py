"""``ringweave show``: a pattern as block art in the terminal, or as a picture in a file."""

from __future__ import annotations

from typing import Annotated

import typer

from ..cells import Panel, picture
from ..patterns import parse
from ..picture import ASCII_SHADES, SHADES, art_rows
from . import terminal

PatternText = Annotated[
    str,
    typer.Argument(metavar="PATTERN", help="As in Python, such as '(SlidingWindow(1024) | Sinks(64)) & Causal()'."),
]
Tokens = Annotated[int, typer.Option("--tokens", "-n", min=1, help="Sequence length.")]
Heads = Annotated[int | None, typer.Option("--heads", min=1, help="Query heads. [default: those of the pattern, or 1]")]

_GAP = 3
_LEAST = 24  # characters below which panels go under each other rather than side by side
_MOST = 64


def show(
    pattern: PatternText,
    tokens: Tokens,
    heads: Heads = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Write a picture here: .svg, or .png.")] = None,
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
    lines.append(f"queries downwards, keys to the right; pairs of a cell: {_legend(shades)}")
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _row(panels: tuple[Panel, ...], tokens: int, margin: int, shades: str, *, headings: bool) -> list[str]:
    """Panels side by side, framed, with token numbers on the axes."""
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
