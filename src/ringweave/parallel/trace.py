"""When a step computed, sent and received: a timeline, written as torch.profiler writes its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError, message
from .transport.protocol import Event

_KINDS = ("compute", "wait", "receive", "send")
# rows of one kind
_LANES = 1000


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
        """Sum up the length of a kind's events."""
        return sum(event.end - event.start for event in self.events if event.kind == kind)

    @property
    def waited(self) -> float:
        """Seconds in which the rank did nothing but wait for messages."""
        return self.seconds("wait")

    def export_chrome_trace(self, path: str | Path) -> Path:
        """Write the timeline for Perfetto (ui.perfetto.dev) or chrome://tracing; see :func:`export_chrome_trace`."""
        return export_chrome_trace([self], path)


def export_chrome_trace(traces: Iterable[Trace], path: str | Path) -> Path:
    """Write the timelines of some ranks of one machine, whose clock they share, as Chrome's trace events.

    A process is a rank, a thread what it did: messages that are under way together have a row each.

    Args:
        traces: What ``ContextParallel.trace()`` has yielded.
        path: A file, such as ``step.json``.
    Returns:
        The path.
    Raises:
        UnsupportedError: No traces, or no events in them.
    """
    traces, path = list(traces), Path(path)
    if not all(isinstance(trace, Trace) for trace in traces):
        got = sorted({type(trace).__name__ for trace in traces})
        raise UnsupportedError(message("traces", got, "traces", "Pass what ContextParallel.trace() yields."))
    lines = [line for trace in traces for line in _lines(trace)]
    if not lines:
        raise UnsupportedError(message("trace", "no events", "a call inside the trace", "Call attention inside it."))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": lines, "displayTimeUnit": "ms"}, indent=0), "utf-8")
    return path


def _lines(trace: Trace) -> Iterator[dict[str, Any]]:
    ends: dict[int, float] = {}
    for event in sorted(trace.events, key=lambda event: event.start):
        row = _KINDS.index(event.kind) * _LANES
        # slices of one row must not cross: the first row of the kind that is free
        while ends.get(row, event.start) > event.start:
            row += 1
        where = {"pid": trace.rank, "tid": row}
        if row not in ends:
            yield {"ph": "M", "name": "process_name", **where, "args": {"name": f"rank {trace.rank}"}}
            yield {"ph": "M", "name": "thread_name", **where, "args": {"name": event.kind}}
            yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": row}}
        ends[row] = event.end
        name = event.what if event.stage is None else f"{event.what}, stage {event.stage}"
        times = {"ts": 1e6 * event.start, "dur": 1e6 * (event.end - event.start)}
        said = {"stage": event.stage, "bytes": event.nbytes}
        yield {"ph": "X", "cat": event.kind, "name": name, **where, **times, "args": said}
