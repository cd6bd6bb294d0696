"""What every exchange of a context goes through: agreement first, then messages in the format that was agreed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import RingError, message
from ..ops.backend import Upstream, delta_in_chunks
from . import wire
from .exchange import Message, Section
from .messages import Channels
from .part import Part
from .transport import Event, Transport
from .wire import WireStatistics
from .workspace import Workspace

FORWARD, BACKWARD, RELAY, TABLE, SHARDS = 1, 2, 3, 4, 5
Source = Callable[[Section], Sequence[Tensor]]
_HEAD = ("operation", "batch", "D", "Dv", "dtype", "wire", "plan")


@dataclass
class Call:
    """The means of a context's exchanges.

    Attributes:
        transport: Moves bytes.
        form: Wire format that is asked for.
        tolerance: Largest relative error of an encoded message; None: encoded whatever the error.
        statistics: What encoding did.
        space: Buffers.
    """

    transport: Transport
    form: int = wire.NATIVE
    tolerance: float | None = None
    statistics: WireStatistics = field(default_factory=WireStatistics)
    space: Workspace = field(default_factory=Workspace)

    def agree(self, operation: int, digest: int, channels: Channels, forms: list[int] | None = None) -> list[list[int]]:
        """Compare what the ranks are about to do, before anything is moved.

        Args:
            operation: Which one.
            digest: Of plan and placement.
            channels: What travels.
            forms: The format of this rank's message to each peer.
        Returns:
            (ranks, ranks): every rank's formats.
        Raises:
            RingError: On all ranks, where one differs.
        """
        ranks = self.transport.size
        if ranks == 1:
            return [[wire.NATIVE]]
        head = [
            operation,
            channels.batch,
            channels.dims[0],
            channels.dims[-1],
            _code(channels.dtype),
            self.form,
            digest,
        ]
        mine = torch.tensor([*head, *(forms or [wire.NATIVE] * ranks)], dtype=torch.int64, device="cpu")
        every = self.transport.agree(mine, what="agree")
        same = (every[:, : len(_HEAD)] == every[:1, : len(_HEAD)]).all(0).tolist()
        for name, agreed, column in zip(_HEAD, same, every.T.tolist(), strict=False):
            if not agreed:
                peer = next(rank for rank, value in enumerate(column) if value != column[self.transport.rank])
                raise RingError(
                    self.transport.rank,
                    peer,
                    None,
                    self.transport.step,
                    message(
                        f"{name} of the call",
                        f"{column} on ranks 0 to {ranks - 1}",
                        "the same on all ranks",
                        "Call with one pattern, length, dtype and shape everywhere; nothing was moved.",
                    ),
                )
        return [row[len(_HEAD) :] for row in every.tolist()]

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
        self.agree(SHARDS, x.numel(), Channels(x.shape[-1], x.shape[:1], x.dtype))
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


def _code(dtype: torch.dtype) -> int:
    """A number for a type that is the same in every process."""
    return int.from_bytes(str(dtype).encode()[-7:], "little")


def upstream_of(
    dout: Tensor,
    out: Tensor,
    dlse: Tensor | None,
    lse: Tensor,
    parts: Sequence[Part | None],
    backend: str,
    inputs: tuple[Tensor, Tensor, Tensor],
) -> Upstream:
    """A shard's, with delta by who computes its parts."""
    some = next((part for part in parts if part is not None), None)
    delta = delta_in_chunks if some is None else some.backend(backend, *inputs, needs_grad=True).delta
    return Upstream(dout, lse, delta(dout, out, lse, dlse))
