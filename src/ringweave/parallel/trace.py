"""Timelines of computing, sending and receiving, exported in the trace format of torch.profiler."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from .transport.protocol import Communicator, Event

_KINDS = ("compute", "wait", "receive", "send")
# number of timeline rows reserved for each kind of event
_LANES = 1000


@dataclass
class Trace:
    """The events of one rank, in the order in which they ended.

    Attributes:
        rank: The rank.
        events: Events: kind (compute, send, receive or wait), description, stage, start and end in seconds, bytes.
    """

    rank: int
    events: list[Event] = field(default_factory=list)

    def seconds(self, kind: str) -> float:
        """Return the total duration of the events of one kind."""
        return sum(event.end - event.start for event in self.events if event.kind == kind)

    @property
    def waited(self) -> float:
        """Seconds during which the rank only waited for messages."""
        return self.seconds("wait")

    def export_chrome_trace(self, path: str | Path) -> Path:
        """Write the timeline for Perfetto (ui.perfetto.dev) or chrome://tracing; see :func:`export_chrome_trace`."""
        return export_chrome_trace([self], path)


@contextmanager
def recorded(transport: Communicator) -> Iterator[Trace]:
    """Record a transport's events, of nested traces into the innermost one."""
    trace, outer = Trace(transport.rank), transport.trace
    transport.trace = trace.events
    try:
        yield trace
    finally:
        transport.trace = outer


def export_chrome_trace(traces: Iterable[Trace], path: str | Path) -> Path:
    """Write the timelines of ranks on one machine, which share a clock, as Chrome trace events.

    Each rank is shown as a process and each kind of event as a thread; concurrent messages get a row each.

    Args:
        traces: Traces yielded by ``ContextParallel.trace()``.
        path: Path of the file to write, such as ``step.json``.
    Returns:
        The path.
    Raises:
        UnsupportedError: There are no traces, or they contain no events.
    """
    traces, path = list(traces), Path(path)
    if not all(isinstance(trace, Trace) for trace in traces):
        got = sorted({type(trace).__name__ for trace in traces})
        raise UnsupportedError("traces", got, "traces", "Pass traces of ContextParallel.trace().")
    lines = [line for trace in traces for line in _lines(trace)]
    if not lines:
        raise UnsupportedError("trace", "no events", "a call inside the trace", "Call attention inside it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": lines, "displayTimeUnit": "ms"}, indent=0), "utf-8")
    return path


def _lines(trace: Trace) -> Iterator[dict[str, Any]]:
    ends: dict[int, float] = {}
    for event in sorted(trace.events, key=lambda event: event.start):
        row = _KINDS.index(event.kind) * _LANES
        # Events on one row must not overlap, so take the first free row of the kind.
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
        arguments = {"stage": event.stage, "bytes": event.nbytes}
        yield {"ph": "X", "cat": event.kind, "name": name, **where, **times, "args": arguments}
