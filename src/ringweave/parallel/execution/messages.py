"""Sections as bytes: what a message is on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..planning.exchange import Message, Section
from . import wire


@dataclass(frozen=True)
class Channels:
    """What travels per token and head: keys and values side by side, or their gradients.

    Attributes:
        batch: Batch elements.
        dims: Channels of each tensor.
        dtype: Of the tensors here; on the wire it may be another.
    """

    batch: int
    dims: tuple[int, ...]
    dtype: torch.dtype

    def nbytes(self, message: Message, form: int) -> int:
        """Of a message in a format."""
        return sum(wire.nbytes(form, section.rows, dim, self.dtype) for section in message for dim in self.dims)

    def _places(self, message: Message, form: int) -> Iterator[tuple[Section, list[slice]]]:
        at = 0
        for section in message:
            places = []
            for dim in self.dims:
                size = wire.nbytes(form, section.rows, dim, self.dtype)
                places.append(slice(at, at + size))
                at += size
            yield section, places

    def pack(self, message: Message, out: Tensor, form: int, source: Callable[[Section], Sequence[Tensor]]) -> None:
        """Write a message into a flat uint8 tensor; ``source`` gives a section's tensors."""
        for section, places in self._places(message, form):
            for place, x in zip(places, source(section), strict=True):
                wire.write(out[place], x, form)

    def unpack(self, message: Message, data: Tensor, form: int) -> Iterator[tuple[Section, list[Tensor]]]:
        """Sections and their tensors: (B, heads, tokens, C), or (members, tokens, C)."""
        for section, places in self._places(message, form):
            yield (
                section,
                [
                    wire.read(data[place], section.shape(self.batch, dim), form, self.dtype)
                    for place, dim in zip(places, self.dims, strict=True)
                ],
            )

    def by_peer(
        self, messages: Sequence[Message], data: Tensor, forms: Sequence[int]
    ) -> Iterator[tuple[int, Section, list[Tensor]]]:
        """``unpack`` of all peers' messages, which lie one after the other."""
        at = 0
        for peer, (message, form) in enumerate(zip(messages, forms, strict=True)):
            size = self.nbytes(message, form)
            for section, tensors in self.unpack(message, data[at : at + size], form):
                yield peer, section, tensors
            at += size
