"""When a step computed, sent and received: a timeline of one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError, message
from .transport.protocol import Event

_COLOURS = {"compute": "#2f81f7", "send": "#3fa45b", "receive": "#e08a1e", "wait": "#c0392b"}


@dataclass
class Trace:
    """Events of one rank, in the order of their ends.

    Attributes:
        rank: Whose.
        events: Kind (compute, send, receive, wait), what, stage, start and end in seconds, bytes.
    """

    rank: int
    events: list[Event] = field(default_factory=list)

    def seconds(self, kind: str) -> float:
        """The summed length of a kind's events."""
        return sum(event.end - event.start for event in self.events if event.kind == kind)

    @property
    def waited(self) -> float:
        """Seconds in which the rank did nothing but wait for messages."""
        return self.seconds("wait")

    def plot(self, path: str | Path) -> Path:
        """Draw the timeline: a row per stage and kind, time from left to right.

        Args:
            path: An .svg or .png file.
        Returns:
            The path.
        Raises:
            UnsupportedError: No events, or matplotlib is not installed.
        """
        return plot([self], path)


def plot(traces: Iterable[Trace], path: str | Path) -> Path:
    """Draw the timelines of some ranks below each other, on one clock; see :meth:`Trace.plot`."""
    traces = list(traces)
    if not all(isinstance(trace, Trace) for trace in traces):
        got = sorted({type(trace).__name__ for trace in traces})
        raise UnsupportedError(message("traces", got, "traces", "Pass what ContextParallel.trace() yields."))
    if Path(path).suffix not in (".svg", ".png"):
        raise UnsupportedError(message("path", repr(str(path)), "an .svg or .png file", "Name it so."))
    traces = [trace for trace in traces if trace.events]
    if not traces:
        raise UnsupportedError(message("trace", "no events", "a call inside the trace", "Call attention inside it."))
    pyplot = _pyplot()
    begin = min(event.start for trace in traces for event in trace.events)
    rows = [(trace, kind) for trace in traces for kind in _COLOURS if trace.seconds(kind) > 0]
    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.42 * len(rows)))
    for at, (trace, kind) in enumerate(rows):
        for event in trace.events:
            if event.kind != kind:
                continue
            start, length = (event.start - begin) * 1e3, (event.end - event.start) * 1e3
            # results on their way back fly beside the next stage's keys: a bar below
            back = event.what == "returns"
            axes.barh(
                at + 0.22 * back, length, left=start, height=0.3 if back else 0.7, color=_COLOURS[kind],
                edgecolor="white", linewidth=0.8, zorder=2 + back,
            )  # fmt: skip
            if event.stage is not None and kind != "wait" and not back:
                axes.text(
                    start + length / 2,
                    at - 0.1 * (event.kind != "compute"),
                    str(event.stage),
                    ha="center",
                    va="center",
                    size=7,
                    color="white",
                )
    axes.set_yticks(range(len(rows)), [f"rank {trace.rank}  {kind}" for trace, kind in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds; the numbers are stages, small bars results on their way back")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=150)
    pyplot.close(figure)
    return path


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            message(
                "matplotlib", "not installed", "matplotlib for the plot", "Install it: pip install 'ringweave[plot]'."
            )
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
