"""Messages under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .connection import Work
    from .transport import Transport


class Pending:
    """Messages under way; keeps their tensors alive. The received ones are the caller's to read after wait()."""

    def __init__(
        self,
        transport: Transport,
        sends: list[tuple[int, Tensor]],
        receives: list[tuple[int, Tensor]],
        *,
        what: str,
        stage: int | None = None,
        metadata: bool = False,
    ) -> None:
        self.sends, self.receives = sends, receives
        self.what, self.stage, self.metadata = what, stage, metadata
        self.number = 0
        self.works: list[Work] = []
        self.posted = 0.0
        self.done = not sends and not receives
        self._transport = transport

    def wait(self) -> None:
        """Return when everything has arrived and everything sent is out of its tensors.

        Raises:
            RingError: A rank is lost or silent.
        """
        if not self.done:
            self._transport._finish(self)
