"""Keys, values and summaries of earlier tokens, for decoding steps of modules that choose their keys."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError


class Owner:
    """The identity of a module: its pickle keeps it, and a copy of the module gets another one."""

    def __init__(self) -> None:
        self.number = uuid.uuid4().hex

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        return Owner()


class _Rows(NamedTuple):
    """The first rows of a buffer (B, heads, rows, channels), which may have room for more."""

    buffer: Tensor
    end: int

    @property
    def tensor(self) -> Tensor:
        return self.buffer[:, :, : self.end]


class _Taken(NamedTuple):
    """The steps that have ended: number of tokens, batch size (None before the first step), rows by name."""

    length: int = 0
    batch: int | None = None
    rows: dict[str, _Rows] = {}  # noqa: RUF012  (never changed)


class KeyCache:
    """Tensors that a module keeps of earlier tokens, by name, (B, heads, rows, channels), without gradients.

    A module's ``empty_cache()`` makes it, and each call of this module with ``cache=`` appends the tokens of the call.
    A call that raises appends nothing. Buffers double when they are full, so the cost of appending does not grow with
    the number of tokens in the cache. A copy of a cache serves the same module, and the copy of a module takes the
    caches that are copied with it.
    """

    def __init__(self, owner: Owner | None = None) -> None:
        self._owner = owner
        self._taken = _Taken()
        # rows of the step that runs; a step replaces all of _taken when nothing in it can fail any more
        self._new: dict[str, _Rows] = {}

    @property
    def length(self) -> int:
        """Number of tokens so far, which is the position of the next one."""
        return self._taken.length

    def check(self, owner: Owner, batch: int) -> None:
        """Raise ShapeError unless a module made the cache, for a batch of this size."""
        if self._owner != owner:
            remedy = "Make a cache for each module, with its empty_cache()."
            raise ShapeError("cache", "a cache of another module", "one that this module made", remedy)
        if self._taken.batch not in (None, batch):
            remedy = "Pass the next tokens of the batch for which the cache was made."
            raise ShapeError("batch", batch, f"{self._taken.batch}, those of the cache", remedy)

    @contextmanager
    def step(self, batch: int, tokens: int) -> Iterator[None]:
        """Take the rows that a block appends, and its tokens, when the block has ended; none of them if it fails."""
        self._new = {}
        yield
        self._taken = _Taken(self.length + tokens, batch, self._taken.rows | self._new)

    def read(self, name: str) -> Tensor | None:
        """Return the tensor of a name, (B, heads, rows, channels); None if nothing was appended."""
        rows = self._taken.rows.get(name)
        return None if rows is None else rows.tensor

    def append(self, name: str, x: Tensor) -> Tensor:
        """Append rows to the tensor of a name in this step, and return all of its rows."""
        rows = self._rows(name)
        start = 0 if rows is None else rows.end
        end = start + x.shape[2]
        if rows is not None:
            _check(x, rows.buffer)
        if rows is None or end > rows.buffer.shape[2]:
            # not an inference tensor, since a later step may write to it outside of inference mode
            with torch.inference_mode(False):
                size = *x.shape[:2], max(end, 2 * start), x.shape[3]
                larger = torch.empty(size, dtype=x.dtype, device=x.device)
            if rows is not None:
                larger[:, :, :start] = rows.tensor
            rows = _Rows(larger, start)
        # a step that fails leaves these rows behind the end, where the next one writes
        rows.buffer[:, :, start:end] = x
        self._new[name] = rows = _Rows(rows.buffer, end)
        return rows.tensor

    def last(self, name: str, x: Tensor, keep: int) -> Tensor:
        """Return the kept rows followed by x, and keep the last ``keep`` rows of both in this step."""
        old = self._rows(name)
        if old is not None:
            _check(x, old.buffer)
            x = torch.cat([old.tensor, x], 2)
        kept = x[:, :, max(0, x.shape[2] - keep) :].clone()
        self._new[name] = _Rows(kept, kept.shape[2])
        return x

    def _rows(self, name: str) -> _Rows | None:
        return self._new.get(name) or self._taken.rows.get(name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_new": {}}

    def __copy__(self) -> KeyCache:
        # two caches that share a buffer would write over each other's tokens
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyCache:
        copied = type(self)(memo.get(id(self._owner), self._owner))
        copied._taken = copy.deepcopy(self._taken, memo)
        return copied

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {rows.end} rows" for name, rows in self._taken.rows.items())
        return f"KeyCache(<{self.length} tokens{sizes and '; ' + sizes}>)"


def _check(x: Tensor, kept: Tensor) -> None:
    got, wanted = ((t.shape[0], t.shape[1], t.shape[3], t.dtype, t.device) for t in (x, kept))
    if got != wanted:
        remedy = "Pass the next tokens of the batch for which the cache was made."
        raise ShapeError("batch, heads, channels, dtype, device", got, f"those of the cache, {wanted}", remedy)
