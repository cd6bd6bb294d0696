"""Charts and their palette. SVG charts take the colour of the page's text, in light and dark themes."""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringweave.units import nbytes

if TYPE_CHECKING:
    from .launched import SharedTraining
    from .record import Outcome, Score
    from .text import Training

# placeholder that is replaced by the page's text colour after drawing
_INK = "#010203"
BLUE, PALE_BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f81f7", "#8db9f0", "#e08a1e", "#3fa45b", "#a371f7", "#888888"
#: Number of steps in a mean of losses; single losses vary, since each step reads another text.
MEAN = 5
#: Style of all charts.
STYLE: dict[Any, Any] = {"svg.hashsalt": "ringweave", "axes.spines.top": False, "axes.spines.right": False}
_COLOURS = {
    "ringweave": BLUE,
    "ringweave:dense_batched": PALE_BLUE,
    "sdpa": ORANGE,
    "dense causal": ORANGE,
    "flex": GREEN,
    "sdpa+mask": PURPLE,
}
_OTHERS = (GREY, "#c24d6b", "#2aa198", "#8a6d3b")
_PAGE = STYLE | {
    "font.size": 10,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
}


def bars(
    outcomes: Sequence[Outcome],
    value: Callable[[Outcome], float | None],
    label: Callable[[Outcome], str],
    axis: str,
    title: str,
) -> str:
    """Draw horizontal bars in groups of one length and direction; a peer without a value shows only its label."""
    pyplot = _pyplot()
    groups = [list(group) for _, group in itertools.groupby(outcomes, lambda o: (o.tokens, o.direction))]
    height = sum(len(group) + 1.35 for group in groups)
    longest = max([length for outcome in outcomes if (length := value(outcome))] or [1.0])
    with pyplot.rc_context(_PAGE):
        figure, axes = pyplot.subplots(figsize=(4.2, 0.8 + 0.27 * height))
        axes.set_title(title, loc="left", size=11, weight="bold")
        at = 0.0
        ticks: list[tuple[float, str]] = []
        for group in groups:
            heading = f"{group[0].tokens:,} tokens, {group[0].direction}"
            axes.text(0, at, heading, va="center", weight="bold", size=9)
            at += 0.95
            for outcome in group:
                end = value(outcome) or 0.0
                axes.barh(at, end, height=0.7, color=_COLOURS.get(outcome.peer, GREY))
                axes.annotate(label(outcome), (end, at), (3, 0), textcoords="offset points", va="center", size=8.5)
                ticks.append((at, outcome.peer.removeprefix("ringweave:")))
                at += 1
            at += 0.4
        axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, longest * 1.6)
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:,.4g}" if number < 1e3 else f"{number:,.0f}")
        axes.spines["left"].set_visible(False)
        axes.set_ylim(at - 0.8, -0.6)
        axes.set_xlabel(axis)
        return _svg(figure, pyplot)


def scores(found: Sequence[Score]) -> str:
    """Draw a bar for each method of each part and length, with a line over the range of its seeds."""
    pyplot = _pyplot()
    groups: dict[tuple[str, int], dict[str, list[float]]] = {}
    for each in found:
        groups.setdefault((each.part, each.tokens), {}).setdefault(each.method, []).append(each.value)
    with pyplot.rc_context(_PAGE):
        heights = [len(methods) for methods in groups.values()]
        figure, rows = pyplot.subplots(
            len(groups), 1, figsize=(5.2, 0.24 * sum(heights) + 0.8 * len(groups)), height_ratios=heights, squeeze=False
        )
        for axes, ((part, tokens), methods) in zip(rows[:, 0], groups.items(), strict=True):
            for place, (method, values) in enumerate(methods.items()):
                mean = statistics.mean(values)
                axes.barh(place, mean, height=0.7, color=ORANGE if method == "dense" else BLUE)
                axes.plot([min(values), max(values)], [place, place], color=_INK, linewidth=1.2)
            axes.set_yticks(range(len(methods)), list(methods))
            axes.tick_params(axis="y", length=0)
            axes.invert_yaxis()
            axes.set_title(f"{part}, {tokens:,} tokens", size=9, loc="left", weight="bold")
        figure.tight_layout()
        return _svg(figure, pyplot)


def curves(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], x: str, y: str) -> str:
    """Draw a curve for each peer in a panel for each title, on logarithmic axes.

    Args:
        panels: Points of each peer, by the panel's title.
        x: Name of the horizontal axis.
        y: Unit of the vertical axis.
    """
    pyplot, rows = _pyplot(), -(-len(panels) // 2)
    with pyplot.rc_context(_PAGE):
        figure, grid = pyplot.subplots(rows, 2, figsize=(7.0, 2.5 * rows), squeeze=False)
        for axes, (title, peers) in zip(grid.flat, panels.items(), strict=False):
            for peer, points in peers.items():
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=_colour(peer), label=peer)
            axes.set_xscale("log", base=2 if x == "tokens" else 10)
            axes.set_yscale("log")
            axes.set_title(title, size=7.5, loc="left", weight="bold")
            if x == "tokens":
                axes.xaxis.set_major_formatter(
                    lambda number, _: f"{number / 1024:g}K" if number >= 1024 else f"{number:g}"
                )
            else:
                axes.xaxis.set_major_formatter(lambda number, _: f"{number:.3g}")
                axes.xaxis.set_minor_formatter(lambda number, _: "")
            axes.legend(fontsize=7)
            axes.set_xlabel(x, size=8)
            axes.set_ylabel(y, size=8)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        figure.tight_layout()
        return _svg(figure, pyplot)


def roofline(outcomes: Sequence[Outcome]) -> str:
    """Draw a roofline with the outcomes that have a share of the computing peak and of the memory speed."""
    pyplot = _pyplot()
    with pyplot.rc_context(_PAGE):
        figure, axes = pyplot.subplots(figsize=(5.2, 3.2))
        marks = {"forward": "o", "backward": "s", "forward + backward": "^"}
        named: set[str] = set()
        places = []
        for each in outcomes:
            assert each.peak_share is not None
            assert each.memory_share is not None
            places.append(each.peak_share / each.memory_share)
            name = f"{each.peer}, {each.dtype}, {each.direction}"
            axes.plot(
                places[-1], each.peak_share, marker=marks[each.direction], markersize=4, linestyle="",
                color=_colour(each.peer), markerfacecolor=_colour(each.peer) if each.dtype == "float32" else "none",
                label=None if name in named else name,
            )  # fmt: skip
            named.add(name)
        least, most = min(0.5, *places), max(2.0, *places)
        axes.plot([least, 1.0, most], [least, 1.0, 1.0], color=_INK, linewidth=1.2)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("operations a byte, over those at which both peaks meet")
        axes.set_ylabel("share of the peak")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda number, _: f"{number:g}")
        figure.legend(fontsize=7, ncol=2, loc="upper center", bbox_to_anchor=(0.5, 0.0))
        return _svg(figure, pyplot)


def _colour(peer: str) -> str:
    """Return a peer's colour: a fixed one, or one chosen from the others by the peer's name."""
    return _COLOURS.get(peer) or _OTHERS[zlib.crc32(peer.encode()) % len(_OTHERS)]


def loss_curves(training: dict[str, Training]) -> str:
    """Draw losses over steps and over the seconds of each model: single losses pale, means of a few steps dark."""
    pyplot = _pyplot()
    with pyplot.rc_context(_PAGE):
        figure, (steps, seconds) = pyplot.subplots(1, 2, figsize=(5.2, 2.7), sharey=True)
        for number, (name, run) in enumerate(training.items()):
            colour = _COLOURS.get(name, GREY)
            # a dashed second curve keeps both visible if they coincide
            dark: dict[str, Any] = {"label": name, "linewidth": 1.8, "linestyle": "-" if number == 0 else (0, (4, 2))}
            losses = [loss / math.log(2) for loss in run.losses]
            means = [statistics.mean(losses[max(0, end - MEAN) : end]) for end in range(1, len(losses) + 1)]
            for axes, places in (
                (steps, range(1, len(losses) + 1)),
                (seconds, list(itertools.accumulate(run.seconds))),
            ):
                axes.plot(places, losses, color=colour, linewidth=0.8, alpha=0.4)
                axes.plot(places, means, color=colour, **dark)
        steps.set_xlabel("step")
        seconds.set_xlabel("seconds of its own steps")
        steps.set_ylabel("loss, bits per byte")
        steps.legend(loc="upper right", fontsize=9)
        return _svg(figure, pyplot)


def shared_sequence(around: SharedTraining) -> str:
    """Draw bytes received next to a full ring's, and the losses of one process and of several over steps."""
    pyplot = _pyplot()
    mine, dense = _COLOURS["ringweave"], _COLOURS["sdpa"]
    with pyplot.rc_context(_PAGE):
        figure, (moved, losses) = pyplot.subplots(1, 2, figsize=(5.2, 2.4), width_ratios=(1, 1.4))
        sizes = [around.shared.full_ring, around.shared.received]
        moved.bar(["full ring", "ringweave"], [size / 2**20 for size in sizes], width=0.6, color=[dense, mine])
        for place, size in enumerate(sizes):
            moved.text(place, size / 2**20, nbytes(size), ha="center", va="bottom", size=8.5)
        moved.set_ylabel("MiB received in a step")
        moved.set_ylim(0, 1.15 * max(sizes) / 2**20)
        steps = range(1, len(around.alone.losses) + 1)
        # a thick pale line below a thin one keeps both visible if they coincide
        alone, shared = ([loss / math.log(2) for loss in run.losses] for run in (around.alone, around.shared))
        losses.plot(steps, alone, color=dense, linewidth=3.5, alpha=0.6, label="one process")
        losses.plot(
            steps, shared, color=mine, linewidth=1.6, linestyle=(0, (4, 2)),
            label=f"{around.shared.processes} processes",
        )  # fmt: skip
        losses.set_xlabel("step")
        losses.set_ylabel("loss, bits per byte")
        losses.xaxis.get_major_locator().set_params(integer=True)
        losses.legend(fontsize=9)
        figure.tight_layout()
        return _svg(figure, pyplot)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _svg(figure: Any, pyplot: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return inline(file.getvalue()).replace(_INK, "currentColor")


def inline(svg: str) -> str:
    """Return SVG for the body of an HTML page, without prologue, metadata, fixed size and XML namespaces."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\sxmlns(:\w+)?=\"[^\"]*\"", "", svg)
    head, end, rest = svg.partition(">")
    if "viewBox" in head:
        head = re.sub(r"\s(width|height)=\"[^\"]*\"", "", head)
    return head + end + rest


def standing_alone(svg: str) -> str:
    """Return inlined SVG with the XML namespaces that a separate file needs."""
    return svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"', 1)
