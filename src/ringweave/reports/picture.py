"""Draw a pattern as SVG, PNG or block art for a terminal, from the share of allowed pairs in each cell."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np

from ..errors import UnsupportedError, shown
from ..patterns import Pattern
from .cells import Panel, Picture, Shares, picture

SHADES = " ░▒▓█"
ASCII_SHADES = " .:+#"

_LEVELS = 24  # number of shades; an SVG has one path for each
# The picture has an opaque background, so that it looks the same on light and dark pages.
_CARD, _EDGE, _INK, _FAINT = "#ffffff", "#d0d7de", "#1f2328", "#59636e"
_LIGHT, _DARK = (0xDC, 0xE9, 0xF7), (0x0B, 0x3A, 0x75)
_FONT = "ui-sans-serif, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', Consolas, monospace"


class Drawing(str):
    """SVG text that notebooks show as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)


def plot(pattern: Pattern, tokens: int, *, heads: int = 1, path: str | Path | None = None) -> Drawing:
    """Draw a pattern as SVG text, with queries downwards and keys to the right; cells with more pairs are darker.

    Args:
        pattern: A relation or a LongNet.
        tokens: Number of queries and of keys.
        heads: Query heads; heads that differ get a panel each, up to 8.
        path: File to write, ``.svg``, or ``.png`` with matplotlib; None writes none.
    Returns:
        The self-contained SVG; a notebook shows it.
    Raises:
        UnsupportedError: The path has another ending, it cannot be written, or matplotlib is missing for a PNG.
    Example:
        >>> plot(rw.Causal(), 256).startswith("<svg")
        True
    """
    ending = Path(path).suffix.lower() if isinstance(path, (str, Path)) else ""
    if path is not None and ending not in (".svg", ".png"):
        raise UnsupportedError("path", shown(path), "a name that ends in .svg or .png", "Rename it.")
    drawn = picture(pattern, tokens, heads=heads)
    svg = Drawing(_svg(drawn))
    try:
        if path is not None and ending == ".svg":
            Path(path).write_text(svg, encoding="utf-8")
        elif path is not None:
            _write_png(drawn, path)
    except (OSError, ValueError) as error:
        raise UnsupportedError("path", shown(path), "a file that can be written", f"{error}.") from None
    return svg


def art_rows(panel: Panel, shades: str = SHADES) -> list[str]:
    """Draw a panel as rows of text, with two characters per cell so that cells look square in a terminal.

    ``shades`` are five characters for shares of 0, below 25 %, below 75 %, below 100 %, and 100 %.
    """
    levels = np.where(panel.shares > 0, np.searchsorted([0.0, 0.25, 0.75, 1.0], panel.shares, side="right"), 0)
    return ["".join(2 * shades[level] for level in row) for row in levels]


_LEGEND = ((0.0, "none"), (0.01, "1 %"), (0.1, "10 %"), (0.5, "50 %"), (1.0, "all"))


def fill(share: float) -> str:
    """Return the colour of a cell: white for 0, otherwise by the root of the share, so that thin bands are visible."""
    level = round(_LEVELS * math.sqrt(min(share, 1.0)))
    if share <= 0:
        return _CARD
    part = max(level, 1) / _LEVELS
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(_LIGHT, _DARK, strict=True))


def _paths(shares: Shares, length: float) -> Iterator[tuple[str, str]]:
    """Return (colour, path data) in cell units up to ``length``; a run of one colour in a row is one rectangle."""
    paths: dict[str, list[str]] = {}
    for y, row in enumerate(shares):
        colours = [fill(float(share)) for share in row]
        x = 0
        while x < len(colours):
            end = x
            while end < len(colours) and colours[end] == colours[x]:
                end += 1
            if colours[x] != _CARD:
                high, wide = min(y + 1, length) - y, min(end, length) - x
                paths.setdefault(colours[x], []).append(f"M{x} {y}h{wide:.5g}v{high:.5g}h{-wide:.5g}z")
            x = end
    return ((colour, "".join(parts)) for colour, parts in paths.items())


def _svg(drawn: Picture) -> str:
    one = len(drawn.panels) == 1
    columns = min(4, len(drawn.panels))
    size, left, right, gap, above = (384, 62, 34, 0, 50) if one else (150, 62, 34, 40, 58)
    width = max(480, left + columns * size + (columns - 1) * gap + right)
    title = textwrap.wrap(drawn.title, (width - 48) // 9, max_lines=3, placeholder=" ...")
    caption = textwrap.wrap(drawn.caption, (width - 48) // 7)
    top = 14 + 20 * len(title) + 17 * len(caption)
    height = top + -(-len(drawn.panels) // columns) * (size + above) + 66
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="{_FONT}" font-size="12" fill="{_INK}">',
        f"<title>{escape(drawn.title)}: {escape(drawn.caption)}</title>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{_CARD}" stroke="{_EDGE}"/>',
    ]
    for i, line in enumerate(title):
        parts.append(_text(24, 34 + 20 * i, line, f'font-family="{_MONO}" font-size="14" font-weight="600"'))
    for i, line in enumerate(caption):
        parts.append(_text(24, 34 + 20 * len(title) + 17 * i, line, f'fill="{_FAINT}"'))
    for i, panel in enumerate(drawn.panels):
        x, y = left + i % columns * (size + gap), top + i // columns * (size + above) + above
        parts += _svg_panel(drawn, panel, x, y, size, heading=not one, first=i % columns == 0)
    return "\n".join([*parts, *_svg_legend(left, height - 38), "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, rest: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {rest}>{escape(text)}</text>'


def _frame(x: int, y: int, size: int, colour: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{colour}" stroke="{_FAINT}" stroke-width="0.8"/>'
    )


def _svg_panel(drawn: Picture, panel: Panel, x: int, y: int, size: int, *, heading: bool, first: bool) -> list[str]:
    cells = len(panel.shares)
    # the last cell may be smaller than the others, so the frame ends at the number of tokens
    scale = size * drawn.side / drawn.tokens
    parts = [f'<g class="cells" transform="translate({x} {y}) scale({scale:.6g})" shape-rendering="crispEdges">']
    parts += [f'<path fill="{colour}" d="{data}"/>' for colour, data in _paths(panel.shares, drawn.tokens / drawn.side)]
    parts.append("</g>")
    if cells <= 32:
        lines = "".join(f"M{i} 0V{cells}M0 {i}H{cells}" for i in range(1, cells))
        parts.append(
            f'<path transform="translate({x} {y}) scale({scale:.6g})" d="{lines}" fill="none" stroke="{_CARD}" '
            f'stroke-width="{1 / scale:.3g}"/>'
        )
    parts.append(_frame(x, y, size, "none"))
    faint = f'fill="{_FAINT}" font-size="11"'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0) if size > 200 and drawn.tokens % 4 == 0 else (0.0, 1.0):
        place, number = share * size, str(round(share * drawn.tokens))
        parts.append(_text(x + place, y - 6, number, f'{faint} text-anchor="middle"'))
        if first:
            parts.append(_text(x - 6, y + place + 4, number, f'{faint} text-anchor="end"'))
    parts.append(_text(x + size / 2, y - (22 if size > 200 else 6), "keys", 'text-anchor="middle"'))
    if first:
        middle = f'text-anchor="middle" transform="rotate(-90 {x - 44} {y + size / 2:g})"'
        parts.append(_text(x - 44, y + size / 2, "queries", middle))
    if heading:
        parts.append(_text(x + size / 2, y - 24, panel.caption, 'text-anchor="middle" font-weight="600"'))
    return parts


def _svg_legend(x: int, y: int) -> list[str]:
    parts = [_text(x, y + 11, "allowed pairs in a cell", f'fill="{_FAINT}" font-size="11"')]
    for i, (share, label) in enumerate(_LEGEND):
        left = x + 136 + 54 * i
        parts.append(_frame(left, y, 14, fill(share)))
        parts.append(_text(left + 19, y + 11, label, f'fill="{_FAINT}" font-size="11"'))
    return parts


def _write_png(drawn: Picture, path: str | Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError:
        raise UnsupportedError(
            "path", repr(path), "matplotlib for a PNG", "pip install 'ringweave[plot]', or write an .svg."
        ) from None
    columns = min(4, len(drawn.panels))
    rows = -(-len(drawn.panels) // columns)
    one = len(drawn.panels) == 1
    size = 4.6 if one else 2.3
    inches = (max(4.9, columns * size), rows * (size + 0.3) + 1.4)
    figure = Figure(figsize=inches, dpi=160, facecolor=_CARD, layout="constrained")
    FigureCanvasAgg(figure)
    title = "\n".join(textwrap.wrap(drawn.title, 14 * columns + 40, max_lines=3, placeholder=" ..."))
    figure.suptitle(title, family="monospace", fontsize=10, fontweight="bold", color=_INK, parse_math=False)
    ticks = sorted({0, drawn.tokens // 2, drawn.tokens})
    for i, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        if i >= len(drawn.panels):
            axes.set_axis_off()
            continue
        panel = drawn.panels[i]
        colours = [[[int(fill(float(s))[c : c + 2], 16) for c in (1, 3, 5)] for s in row] for row in panel.shares]
        end = len(panel.shares) * drawn.side
        # not "nearest": it draws cells with unequal numbers of pixels, which look like unequal shares
        axes.imshow(np.array(colours, np.uint8), extent=(0, end, end, 0), interpolation="auto")
        axes.set(xlim=(0, drawn.tokens), ylim=(drawn.tokens, 0), xticks=ticks, yticks=[] if i % columns else ticks)
        axes.xaxis.set_ticks_position("top")
        axes.xaxis.set_label_position("top")
        axes.tick_params(labelsize=7, colors=_FAINT)
        axes.set_xlabel("keys" if one else f"{panel.caption}\nkeys", fontsize=8)
        if i % columns == 0:
            axes.set_ylabel("queries", fontsize=8)
    patches = [Patch(facecolor=fill(share), edgecolor=_FAINT, label=label) for share, label in _LEGEND]
    caption = "\n".join(textwrap.wrap(drawn.caption, 22 * columns + 40))
    legend = figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=7, labelcolor=_FAINT,
        title=f"{caption}\n\nallowed pairs in a cell", title_fontsize=8,
    )  # fmt: skip
    legend.get_title().set(color=_FAINT, multialignment="center")
    figure.savefig(path)
