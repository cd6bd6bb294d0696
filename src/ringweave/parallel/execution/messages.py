"""The messages of an exchange: blocks of tokens of several tensors as bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transport.protocol import Pending
from . import wire
from .collective import CollectiveCall
from .exchange import Exchange, Message, TokenBlock

#: Function of (peer, block) that returns the block's tensors at its sender.
Source = Callable[[int, TokenBlock], Sequence[Tensor]]
# smallest size in bytes of one head's keys for which a message may be sent without packing
_LARGE = 2**16


@dataclass(frozen=True)
class Channels:
    """The layout of a message per token and head, such as keys and values, or their gradients."""

    batch: int  # number of batch elements
    dims: tuple[int, ...]  # number of channels of each tensor
    dtype: torch.dtype  # dtype of the tensors on this rank; their format in the message may differ

    @staticmethod
    def of(*tensors: Tensor) -> Channels:
        """Return the layout of tensors (B, ..., C) of one dtype."""
        return Channels(len(tensors[0]), tuple(x.shape[-1] for x in tensors), tensors[0].dtype)

    def nbytes(self, message: Message, form: int = wire.NATIVE) -> int:
        """Return the size of a message in bytes in a format."""
        return sum(wire.nbytes(form, block.rows, dim, self.dtype) for block in message for dim in self.dims)

    def places(self, message: Message, form: int) -> Iterator[tuple[TokenBlock, list[slice]]]:
        """Yield each block of a message with the slices of the message's bytes that hold its tensors."""
        at = 0
        for block in message:
            sizes = (wire.nbytes(form, block.rows, dim, self.dtype) for dim in self.dims)
            ends = list(itertools.accumulate(sizes, initial=at))
            yield block, [slice(*pair) for pair in itertools.pairwise(ends)]
            at = ends[-1]


@dataclass(frozen=True, eq=False)
class Messages:
    """The encoding of the messages of an exchange."""

    exchange: Exchange  # the messages, by peer
    channels: Channels  # layout of each block
    forms: Sequence[int] = ()  # formats of the sent messages, by peer; empty for native
    forms_in: Sequence[int] = ()  # formats of the received messages, by peer; empty for native
    packed: bool = True  # whether all messages are packed. Otherwise large messages are sent directly from the tensors.

    @property
    def nbytes_in(self) -> int:
        """Size in bytes of all received messages."""
        return sum(self.channels.nbytes(*each[1:]) for each in listed(self.exchange.receives, self.forms_in))

    def encode(
        self, source: Source, take: Callable[[int], Tensor], count: Callable[[int, int, int], None]
    ) -> list[tuple[int, Tensor]]:
        """Return the messages to send as (peer, tensor).

        Args:
            source: Returns the tensors of a block.
            take: Returns a buffer of a given size in bytes for packed messages.
            count: Receives for each message its format, its size in bytes, and its size in the native format.
        """
        channels, sends = self.channels, list[tuple[int, Tensor]]()
        messages = listed(self.exchange.sends, self.forms)
        sizes = [channels.nbytes(message, form) * self._is_packed(message, form) for _, message, form in messages]
        for (peer, message, form), out in zip(messages, take(sum(sizes)).split(sizes), strict=True):
            count(form, channels.nbytes(message, form), channels.nbytes(message))
            if not self._is_packed(message, form):
                tensors = source(peer, message[0])
                sends += [(peer, head.contiguous()) for x in tensors for element in x for head in element]
                continue
            for block, places in channels.places(message, form):
                for place, x in zip(places, source(peer, block), strict=True):
                    wire.write(out[place], x, form)
            sends.append((peer, out))
        return sends

    def slices(self, data: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (peer, slice) of a flat uint8 tensor of ``nbytes_in`` for each message to receive."""
        for peer, message, form, part in self._parts(data):
            if self._is_packed(message, form):
                yield peer, part
                continue
            (block,) = message
            sizes = [block.count * dim * self.channels.dtype.itemsize for dim in self.channels.dims]
            tensors = part.split([block.heads * size for size in sizes])
            yield from ((peer, head) for x, size in zip(tensors, sizes, strict=True) for head in x.split(size))

    def decode(self, data: Tensor, branch: int | None = None) -> Iterator[tuple[int, TokenBlock, list[Tensor]]]:
        """Yield (peer, block, tensors) of the received messages, for one branch or for all.

        Tensors are (B, heads, tokens, C), or (members, tokens, C) if the block has members.
        """
        channels = self.channels
        for peer, message, form, part in self._parts(data):
            for block, places in channels.places(message, form):
                if branch is None or block.branch == branch:
                    shapes = [block.shape(channels.batch, dim) for dim in channels.dims]
                    pairs = zip(places, shapes, strict=True)
                    yield peer, block, [wire.read(part[place], shape, form, channels.dtype) for place, shape in pairs]

    def _parts(self, data: Tensor) -> Iterator[tuple[int, Message, int, Tensor]]:
        """Yield each received message with its slice of ``data``; the messages follow each other in order of peers."""
        at = 0
        for peer, message, form in listed(self.exchange.receives, self.forms_in):
            size = self.channels.nbytes(message, form)
            yield peer, message, form, data[at : at + size]
            at += size

    def _is_packed(self, message: Message, form: int) -> bool:
        """Return whether a message is packed; otherwise each head is sent directly from its tensor.

        Sender and receiver come to the same decision. Sending without packing saves a copy as large as a stage, and is
        used if the message consists of few large contiguous pieces.
        """
        if self.packed or form != wire.NATIVE or len(message) != 1:
            return True
        (block,) = message
        large = block.count * self.channels.dims[0] * self.channels.dtype.itemsize >= _LARGE
        return block.members is not None or not block.adjacent or not large


def listed(messages: Sequence[Message], forms: Sequence[int] = ()) -> list[tuple[int, Message, int]]:
    """List (peer, message, format) of the messages that are not empty."""
    return [(peer, message, forms[peer] if forms else wire.NATIVE) for peer, message in enumerate(messages) if message]


def post(
    collective: CollectiveCall, what: str, parts: Sequence[tuple[Messages, Source, Tensor]], stage: int | None = None
) -> Pending:
    """Start the messages of several exchanges together; each is received into the tensor beside it."""
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    for messages, source, data in parts:
        receives += messages.slices(data)
        take = functools.partial(collective.buffer, device=data.device)
        sends += messages.encode(source, take, collective.wire.statistics.count)
    return collective.transport.exchange(sends, receives, what=what, stage=stage)
