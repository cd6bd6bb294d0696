"""Temporary."""
from __future__ import annotations
from typing import Any, NamedTuple
from collections.abc import Sequence
from torch import Tensor

class Event(NamedTuple):
    kind: str
    what: str
    stage: int | None
    start: float
    end: float
    nbytes: int

class Pending:
    def wait(self) -> None: ...

class Transport:
    def __init__(self, group: Any = None) -> None:
        self.rank, self.size, self.step = 0, 1, 0
        self.trace: list[Event] | None = None
    def agree(self, header: Tensor, *, what: str) -> Tensor: return header[None]
    def all_to_all(self, received: Tensor, received_splits: Sequence[int], sent: Tensor, sent_splits: Sequence[int], *, what: str) -> Pending: return Pending()
    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], *, stage: int, what: str) -> Pending: return Pending()
