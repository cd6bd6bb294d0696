"""What every exchange of a context goes through: agreement first, then messages in the format that was agreed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...errors import RingError
from ...ops.backend import Inputs, Upstream, delta_in_chunks
from ..planning.exchange import Message, Section
from ..transport.transport import Event, Transport
from . import wire
from .agreement import TAG_WORDS, WORDS, Value, compare, header, words
from .local_attention import Part
from .messages import Channels
from .wire import WireStatistics
from .workspace import Workspace

Source = Callable[[Section], Sequence[Tensor]]
#: Words of a call's name.
NAME_WORDS = 1 + TAG_WORDS


@dataclass
class Call:
    """The means of a context's exchanges, and what the ranks compare before each.

    Attributes:
        transport: Moves bytes.
        form: Wire format that is asked for.
        tolerance: Largest relative error of an encoded message; None: encoded whatever the error.
        statistics: What encoding did.
        space: Buffers.
        said: What the ranks compare, by field of the header.
        calls: How many were made: forward calls, tables and shards.
        ended: The error that ended them.
    """

    transport: Transport
    form: int = wire.NATIVE
    tolerance: float | None = None
    statistics: WireStatistics = field(default_factory=WireStatistics)
    space: Workspace = field(default_factory=Workspace)
    said: Mapping[str, Value] = field(default_factory=dict)
    calls: int = 0
    ended: RingError | None = None

    def saying(self, **said: Value) -> Call:
        """The same means, for an exchange of which the ranks compare this as well."""
        return replace(self, said={**self.said, **said})

    @property
    def name(self) -> tuple[int, ...]:
        """Which call it is, for its backward: number and tag, as words."""
        return *words("call", self.said), *words("tag", self.said)

    def agree(
        self, operation: str, channels: Channels | None = None, forms: list[int] | None = None
    ) -> list[list[int]]:
        """Compare what the ranks are about to do, before anything is moved.

        Args:
            operation: Which one.
            channels: What travels.
            forms: The format of this rank's message to each peer.
        Returns:
            (ranks, ranks): every rank's formats.
        Raises:
            RingError: On all ranks, where one differs.
        """
        ranks, rank = self.transport.size, self.transport.rank
        if ranks == 1:
            return [[wire.NATIVE]]
        said: dict[str, Value] = {**self.said, "operation": operation}
        if channels is not None:
            dtype = str(channels.dtype).removeprefix("torch.")
            said |= {"batch": channels.batch, "D": channels.dims[0], "Dv": channels.dims[-1], "dtype": dtype}
        mine = torch.tensor([*header(said), *(forms or [wire.NATIVE] * ranks)], dtype=torch.int64, device="cpu")
        every = self.transport.agree(mine, what="agree")
        compare(said, every[:, :WORDS], rank, self.transport.step)
        return [row[WORDS:] for row in every.tolist()]

    def forms(self, messages: Sequence[Message], source: Source) -> list[int]:
        """The format of each message: what is asked for, where it errs within the tolerance."""
        return [self._form(sections, source) if sections else wire.NATIVE for sections in messages]

    def _form(self, sections: Message, source: Source) -> int:
        if self.form == wire.NATIVE:
            return wire.NATIVE
        worst = max(wire.error(x, self.form) for section in sections for x in source(section))
        # written so that NaN goes as it is
        if self.tolerance is not None and not worst <= self.tolerance:
            self.statistics.refused += 1
            return wire.NATIVE
        self.statistics.worst_error = max(self.statistics.worst_error, worst)
        return self.form

    def all_to_all(
        self,
        channels: Channels,
        sends: tuple[Sequence[Message], Sequence[int]],
        receives: tuple[Sequence[Message], Sequence[int]],
        source: Source,
        out: Tensor,
        what: str,
    ) -> None:
        """Send messages in their formats, and receive others into a flat uint8 tensor, in the order of ranks."""
        sizes, sizes_in = self._sizes(channels, *sends), self._sizes(channels, *receives)
        sent = self.space.take("sent", (sum(sizes),), torch.uint8, out.device)
        at = 0
        for message_out, form, size in zip(*sends, sizes, strict=True):
            self.pack(channels, message_out, sent[at : at + size], form, source)
            at += size
        if self.transport.size > 1:
            self.transport.all_to_all(out[: sum(sizes_in)], sizes_in, sent, sizes, what=what).wait()

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, of one shape and type."""
        self.agree("shards")
        every = [x if rank == self.transport.rank else torch.empty_like(x) for rank in range(self.transport.size)]
        others = [(rank, part) for rank, part in enumerate(every) if rank != self.transport.rank]
        self.transport.exchange([(rank, x) for rank, _ in others], others, stage=0, what="shards").wait()
        return every

    def pack(self, channels: Channels, sections: Message, out: Tensor, form: int, source: Source) -> None:
        """One message into its bytes, counted."""
        if not sections:
            return
        channels.pack(sections, out, form, source)
        self.count(channels, sections, form)

    def count(self, channels: Channels, sections: Message, form: int) -> None:
        """One message that is sent, in the statistics."""
        self.statistics.messages[wire.FORMATS[form]] += 1
        self.statistics.sent_bytes += channels.nbytes(sections, form)
        self.statistics.native_bytes += channels.nbytes(sections, wire.NATIVE)

    @staticmethod
    def _sizes(channels: Channels, messages: Sequence[Message], forms: Sequence[int]) -> list[int]:
        return [channels.nbytes(m, form) for m, form in zip(messages, forms, strict=True)]

    @contextmanager
    def computing(self, what: str, stage: int) -> Iterator[None]:
        """A kernel call, for the trace."""
        start = time.perf_counter()
        yield
        if self.transport.trace is not None:
            self.transport.trace.append(Event("compute", what, stage, start, time.perf_counter(), 0))


def upstream_of(
    dout: Tensor,
    out: Tensor,
    dlse: Tensor | None,
    lse: Tensor,
    parts: Sequence[Part | None],
    backend: str,
    inputs: Inputs,
) -> Upstream:
    """A shard's, with delta by who computes its parts."""
    some = next((part for part in parts if part is not None), None)
    delta = delta_in_chunks if some is None else some.backend(backend, inputs, needs_grad=True).delta
    return Upstream(dout, lse, delta(dout, out, lse, dlse))
