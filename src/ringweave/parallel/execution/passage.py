"""The messages of a ring's stages: the next one's fly while the present one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..planning.exchange import Message, Section
from . import wire
from .call import Call, Source
from .messages import Channels

if TYPE_CHECKING:
    from ..transport.transport import Pending
    from .ring import Ring, Stage

Pair = tuple[Tensor, Tensor]
# bytes of a head's keys from which on a message is not packed
_LOOSE = 2**16


class Returned(NamedTuple):
    """What a stage gives back to its source, and gets back from its target.

    Attributes:
        channels: What travels.
        out: Sections for the source.
        source: Their tensors.
        back: Sections from the target.
        apply: What is done with each.
    """

    channels: Channels
    out: Message
    source: Source
    back: Message
    apply: Callable[[Section, Sequence[Tensor]], None]


class Passage:
    """One call's way around the ring.

    Args:
        ring: The stages.
        call: The means.
        operation: What all ranks must agree on.
        k: Keys of the shard.
        v: Values of the shard.
        travels: What queries take along when they are computed elsewhere: tensors of (B, Hq, shard, channels).
    """

    def __init__(
        self,
        ring: Ring,
        call: Call,
        operation: str,
        k: Tensor,
        v: Tensor,
        travels: Sequence[tuple[Channels, tuple[Tensor, ...]]],
    ):
        self.ring, self.call, self.k, self.v, self.travels = ring, call, k, v, travels
        self.channels = Channels(k.shape[0], (k.shape[3], v.shape[3]), k.dtype)
        messages: list[Message] = [()] * len(ring.stages)
        for stage in ring.stages:
            messages[stage.target] = stage.sends
        self.forms = call.forms(messages, self._keys)
        every = call.agree(operation, self.channels, self.forms)
        self.forms_in = [row[call.transport.rank] for row in every]
        self._under_way: tuple[Pending, list[tuple[Returned, Tensor]]] | None = None

    def stages(self) -> Iterator[tuple[Stage, Callable[[int], Pair], list[list[list[Tensor]]]]]:
        """Each stage, with a function from a branch to its keys and values, and per travelling group the guests."""
        stages = self.ring.stages
        pending, arriving = self._post(stages[1]) if len(stages) > 1 else (None, [])
        yield stages[0], self._own, []
        for number in range(1, len(stages)):
            assert pending is not None
            pending.wait()
            here = arriving
            if number + 1 < len(stages):
                pending, arriving = self._post(stages[number + 1])
            yield stages[number], self._arrived(stages[number], here[0]), self._visitors(stages[number], here[1:])
        self._take_back()

    def give_back(self, stage: Stage, returned: list[Returned]) -> None:
        """Start a stage's returns; those of the stage before have arrived by then, and are applied."""
        self._take_back()
        sends, receives, waiting = [], [], []
        for number, group in enumerate(returned):
            name = f"{number} of stage {stage.number % 2}"
            size = group.channels.nbytes(group.out, wire.NATIVE)
            out = self.call.space.take(f"return {name}", (size,), torch.uint8, self.k.device)
            self.call.pack(group.channels, group.out, out, wire.NATIVE, group.source)
            size = group.channels.nbytes(group.back, wire.NATIVE)
            back = self.call.space.take(f"returned {name}", (size,), torch.uint8, self.k.device)
            sends.append((stage.source, out))
            receives.append((stage.target, back))
            waiting.append((group, back))
        if stage.number:
            pending = self.call.transport.exchange(sends, receives, stage=stage.number, what="returns")
            self._under_way = pending, waiting

    def _take_back(self) -> None:
        if self._under_way is None:
            return
        pending, waiting = self._under_way
        self._under_way = None
        pending.wait()
        for group, data in waiting:
            for section, tensors in group.channels.unpack(group.back, data, wire.NATIVE):
                group.apply(section, tensors)

    def _keys(self, section: Section) -> Sequence[Tensor]:
        assert section.tokens is not None
        heads = self.ring.heads[section.branch]
        return [section.of(section.tokens.of(heads.of_keys(x))) for x in (self.k, self.v)]

    def _loose(self, message: Message, form: int) -> bool:
        """Whether it travels from where it lies, head by head, instead of packed: when that takes few large messages.

        Both sides see it alike. It saves the sender a copy that would be as large as a stage.
        """
        if form != wire.NATIVE or len(message) != 1 or message[0].members is not None:
            return False
        per_head = message[0].count * self.channels.dims[0] * self.channels.dtype.itemsize
        return message[0].adjacent and per_head >= _LOOSE

    def _pieces(self, message: Message, data: Tensor) -> list[Tensor]:
        """A loose message's places in its buffer, one per tensor, batch element and head."""
        section, size = message[0], self.channels.dtype.itemsize
        keys, values = (section.count * dim * size for dim in self.channels.dims)
        at = section.heads * keys
        return [*data[:at].split(keys), *data[at:].split(values)]

    def _post(self, stage: Stage) -> tuple[Pending, list[Tensor]]:
        """Start a stage's messages; the buffers into which they come."""
        space, device = self.call.space, self.k.device
        form, form_in = self.forms[stage.target], self.forms_in[stage.source]
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        size_in = self.channels.nbytes(stage.receives, form_in)
        arriving = [space.take(f"stage {stage.number % 2}", (size_in,), torch.uint8, device)]
        if self._loose(stage.receives, form_in):
            receives += [(stage.source, piece) for piece in self._pieces(stage.receives, arriving[0])]
        else:
            receives.append((stage.source, arriving[0]))
        if self._loose(stage.sends, form):
            self.call.count(self.channels, stage.sends, form)
            for x in self._keys(stage.sends[0]):
                sends += [(stage.target, head.contiguous()) for element in x for head in element]
        else:
            out = space.take("sent", (self.channels.nbytes(stage.sends, form),), torch.uint8, device)
            self.call.pack(self.channels, stage.sends, out, form, self._keys)
            sends.append((stage.target, out))
        for number, (channels, tensors) in enumerate(self.travels):
            out = space.take(f"sent {number}", (channels.nbytes(stage.queries_out, 0),), torch.uint8, device)
            self.call.pack(channels, stage.queries_out, out, wire.NATIVE, self._queries(tensors))
            sends.append((stage.target, out))
            size_in = channels.nbytes(stage.queries_in, wire.NATIVE)
            arriving.append(space.take(f"guests {number} of {stage.number % 2}", (size_in,), torch.uint8, device))
            receives.append((stage.source, arriving[-1]))
        return self.call.transport.exchange(sends, receives, stage=stage.number, what="keys"), arriving

    def _queries(self, tensors: Sequence[Tensor]) -> Source:
        def source(section: Section) -> Sequence[Tensor]:
            assert section.tokens is not None
            return [section.tokens.of(x[:, self.ring.heads[section.branch].queries]) for x in tensors]

        return source

    def _own(self, number: int) -> Pair:
        """A branch's keys and values of the shard."""
        part = self.ring.stages[0].parts[number]
        assert part is not None
        return part.buffer(self.k, self.call.space, "keys"), part.buffer(self.v, self.call.space, "values")

    def _arrived(self, stage: Stage, data: Tensor) -> Callable[[int], Pair]:
        """A branch's keys and values of a stage: the message itself where it is in the kernel's order."""
        sections = list(self.channels.unpack(stage.receives, data, self.forms_in[stage.source]))

        def of(number: int) -> Pair:
            part = stage.parts[number]
            assert part is not None
            mine = [(section, tensors) for section, tensors in sections if section.branch == number]
            if len(mine) == 1 and _is_buffer(mine[0][0], part.branch.nk):
                keys, values = mine[0][1]
                return keys, values
            keys, values = (part.buffer(x, self.call.space, name) for x, name in ((self.k, "keys"), (self.v, "values")))
            for section, tensors in mine:
                section.put(keys, tensors[0])
                section.put(values, tensors[1])
            return keys, values

        return of

    def _visitors(self, stage: Stage, data: Sequence[Tensor]) -> list[list[list[Tensor]]]:
        found = []
        for (channels, _), arrived in zip(self.travels, data, strict=True):
            by_branch: list[list[Tensor]] = [[] for _ in stage.parts]
            for section, tensors in channels.unpack(stage.queries_in, arrived, wire.NATIVE):
                by_branch[section.branch] = tensors
            found.append(by_branch)
        return found


def _is_buffer(section: Section, keys: int) -> bool:
    whole = section.members is None and section.used is None
    return whole and section.target is not None and section.target.span == (0, keys, 1)
