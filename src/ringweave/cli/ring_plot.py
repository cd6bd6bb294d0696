"""The picture of a simulation: efficiency and received bytes over the number of GPUs, four systems."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from ..bench.plots import BLUE, GREEN, ORANGE, PURPLE, STYLE
from ..errors import UnsupportedError, message
from ..parallel.planning.cost import Estimate
from ..parallel.planning.simulate import Row
from ..units import nbytes

_SUFFIXES = (".svg", ".png")
# colour, marker, line: to be told apart without colours too, and where curves lie on each other
_LOOKS = {
    "ringweave": (BLUE, "o", "-"),
    "full ring": (ORANGE, "s", "-"),
    "all-gather": (GREEN, "^", (0, (4, 2))),
    "Ulysses": (PURPLE, "D", (0, (1, 1.5))),
}
_STYLE = STYLE | {"font.size": 9}


def plot(rows: Sequence[Row], path: str, *, title: str) -> None:
    """Draw rows of a simulation.

    Args:
        rows: One for each number of GPUs.
        path: A file to write, .svg or .png.
        title: Above the picture.
    Raises:
        UnsupportedError: Another suffix, or no matplotlib.
    """
    if not path.lower().endswith(_SUFFIXES):
        raise UnsupportedError(message("--plot", repr(path), "a name that ends in .svg or .png", "Rename it."))
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ModuleNotFoundError:
        raise UnsupportedError(
            message("--plot", repr(path), "matplotlib", "Install it: pip install 'ringweave[plot]'.")
        ) from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 3.9), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle("\n".join(textwrap.wrap(title, 96, max_lines=2)), fontsize=10, weight="bold", parse_math=False)
        share, received = figure.subplots(1, 2)
        for name, (colour, marker, line) in _LOOKS.items():
            points = [(row.ranks, each) for row in rows if (each := _of(row, name)) is not None]
            if not points:
                continue
            gpus = [number for number, _ in points]
            label = name if len(points) == len(rows) else f"{name} (to {max(gpus)} GPUs)"
            look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line, "label": label}
            look |= {"linewidth": 1.6, "markersize": 4.5, "clip_on": False, "zorder": 4 if name == "ringweave" else 3}
            share.plot(gpus, [100 * each.efficiency for _, each in points], **look)
            received.plot(gpus, [each.bytes_worst for _, each in points], **look)
        for axes in (share, received):
            axes.set_xscale("log", base=2)
            axes.set_xticks([row.ranks for row in rows], [str(row.ranks) for row in rows], rotation=45)
            axes.minorticks_off()
            axes.set_xlabel("GPUs")
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
        share.set_ylim(0, 104)
        share.set_title("Modelled efficiency: computing over step time, %", fontsize=9)
        # zero bytes, which a placement may need, lie on the axis
        received.set_yscale("symlog", base=2, linthresh=2**20)
        received.set_ylim(0, 2 * received.get_ylim()[1])
        received.yaxis.set_major_formatter(FuncFormatter(lambda value, _: nbytes(value)))
        received.set_title("Received by the GPU that receives most, a step", fontsize=9)
        handles, labels = received.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.lower().endswith(".svg") else None)


def _of(row: Row, name: str) -> Estimate | None:
    return row.ringweave if name == "ringweave" else row.other_systems[name]
