"""``ringweave simulate``: model attention over a pattern on many GPUs, for ringweave and other systems."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from ringweave.cli import terminal
from ringweave.cli.terminal import PatternText, Tokens
from ringweave.errors import UnsupportedError
from ringweave.parallel.planning.cost import Estimate, Machine
from ringweave.patterns import parse
from ringweave.units import nbytes, parse_size

from ..bench.plots import BLUE, GREEN, ORANGE, PURPLE, STYLE
from .simulate import Row, simulate


def simulated(
    pattern: PatternText,
    tokens: Tokens,
    gpus: Annotated[
        str, typer.Option(metavar="RANGE", help="Numbers of GPUs: 8..4096 in powers of two, or 8,12,16.")
    ] = "8..1024",
    heads: Annotated[str, typer.Option(metavar="Q:K", help="Query heads and key heads.")] = "32:8",
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")] = 128,
    itemsize: Annotated[int, typer.Option(min=1, max=8, help="Bytes of a value of q, k and v.")] = 2,
    flops: Annotated[float, typer.Option(min=1, help="Operations per second that a GPU computes.")] = 500e12,
    bandwidth: Annotated[float, typer.Option(min=1, help="Bytes per second that a GPU receives.")] = 50e9,
    latency: Annotated[float, typer.Option(min=0, help="Seconds until a message's first byte arrives.")] = 10e-6,
    out: Annotated[str | None, typer.Option("--plot", help="Picture to write: .svg or .png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Model a forward step of attention over a pattern on many GPUs, without running it."""
    relation = parse(pattern)
    pair = re.fullmatch(r"(\d+):(\d+)", heads)
    if pair is None:
        raise typer.BadParameter(f"{heads!r} is not like 32:8", param_hint="'--heads'")
    sizes: dict[str, Any] = {"heads": (int(pair[1]), int(pair[2])), "head_dim": head_dim, "itemsize": itemsize}
    rows = simulate(relation, tokens, _range(gpus), **sizes, machine=Machine(flops, bandwidth, latency))
    console = terminal.out()
    if as_json:
        console.print(json.dumps([_facts(row) for row in rows], indent=2), markup=False, soft_wrap=True)
    else:
        said = f"{tokens} tokens, {pair[1]} heads over {pair[2]} key heads, D {head_dim}, {itemsize} bytes a value"
        modelled = f"modelled: {flops / 1e12:g} TFLOP/s, {bandwidth / 1e9:g} GB/s, {latency * 1e6:g} us a message"
        console.print(f"{pattern}\n{said}\n{modelled}\n", markup=False, soft_wrap=True)
        console.print(_table(rows))
        console.print(_LEGEND, markup=False, soft_wrap=True)
    if out is not None:
        try:
            plot(rows, out, title=f"{pattern}, {tokens} tokens")
        except OSError as error:
            raise UnsupportedError(
                "--plot", repr(out), "a file that can be written", f"{error.strerror or error}."
            ) from None
        if not as_json:
            console.print(f"wrote {out}", markup=False, soft_wrap=True)


_SUFFIXES = (".svg", ".png")
# colour, marker and line, so that curves are distinct without colours and where they coincide
_LOOKS = {
    "ringweave": (BLUE, "o", "-"),
    "full ring": (ORANGE, "s", "-"),
    "all-gather": (GREEN, "^", (0, (4, 2))),
    "Ulysses": (PURPLE, "D", (0, (1, 1.5))),
}
_STYLE = STYLE | {"font.size": 9}
_LEGEND = """
received    in one forward step, by the GPU that receives most
work        of the busiest GPU over the mean
stages      distances between GPUs over which something moves
efficiency  computing time of the mean GPU over the time of the step
ours is ringweave's placement; ring a full ring, whose bytes an all-gather moves
too; Ulysses is not possible (-) where the GPUs do not divide the key heads"""

_COLUMNS = (
    "\nGPUs", "\nplacement", "received\nours", "\nring", "\nwork", "\nstages", "efficiency\nours", "\nring",
    "\ngather", "\nUlysses",
)  # fmt: skip


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name.endswith("placement") else "right", no_wrap=True)
    for row in rows:
        own = row.ringweave
        ring = row.other_systems["full ring"]
        table.add_row(
            str(row.ranks),
            own.name,
            nbytes(own.bytes_worst),
            nbytes(ring.bytes_worst) if ring else "-",
            _work(own.imbalance),
            str(own.stages),
            *(_share(each) for each in row.systems.values()),
        )
    return table


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    share = 100 * estimate.efficiency
    if share < 0.01:
        return "<0.01 %"
    return f"{share:.1f} %" if share >= 1 else f"{share:.2g} %"


def _work(imbalance: float) -> str:
    return f"{imbalance:.{2 if imbalance < 9.995 else 1 if imbalance < 99.95 else 0}f}"


def _facts(row: Row) -> dict[str, Any]:
    systems = {name: None if each is None else _numbers(each) for name, each in row.systems.items()}
    return {"gpus": row.ranks, **systems}


def _numbers(estimate: Estimate) -> dict[str, Any]:
    facts = dataclasses.asdict(estimate)
    del facts["ranks"]
    return {**facts, "seconds": estimate.seconds, "efficiency": estimate.efficiency}


def _range(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    try:
        if not dots:
            return [parse_size(each) for each in text.split(",")]
        number, stop = parse_size(first), parse_size(last)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="'--gpus'") from None
    if number > stop:
        raise typer.BadParameter(f"{text!r} has nothing in it", param_hint="'--gpus'")
    return [number << power for power in range((stop // number).bit_length())]


# ---- the picture -----------------------------------------------------------------------------------------------------


def plot(rows: Sequence[Row], path: str, *, title: str) -> None:
    """Draw the efficiency and received bytes of four systems over the number of GPUs, into an .svg or .png file."""
    if not path.lower().endswith(_SUFFIXES):
        raise UnsupportedError("--plot", repr(path), "a name that ends in .svg or .png", "Rename it.")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 3.9), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle("\n".join(textwrap.wrap(title, 96, max_lines=2)), fontsize=10, weight="bold", parse_math=False)
        share, received = figure.subplots(1, 2)
        for name, (colour, marker, line) in _LOOKS.items():
            points = [(row.ranks, each) for row in rows if (each := row.systems[name]) is not None]
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
        sizes = [each.bytes_worst for row in rows for each in row.systems.values() if each is not None]
        if min(sizes) > 0:
            received.set_yscale("log", base=2)
        else:
            # a placement that receives nothing has no place on a logarithmic axis
            received.set_yscale("symlog", base=2, linthresh=2**20)
            received.set_ylim(0, 2 * received.get_ylim()[1])
        received.yaxis.set_major_formatter(FuncFormatter(lambda value, _: nbytes(value)))
        received.set_title("Received by the GPU that receives most, a step", fontsize=9)
        handles, labels = received.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.lower().endswith(".svg") else None)
