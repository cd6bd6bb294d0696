"""Exceptions: each names the argument, what came, what is wanted and what to do."""

from __future__ import annotations

import numpy as np
import torch


class RingweaveError(Exception):
    """Base of every error that ringweave raises on purpose."""


class ShapeError(RingweaveError, ValueError):
    """A tensor's rank, size, dtype or device does not fit the others."""


class PatternError(RingweaveError, ValueError):
    """A pattern's parameters are invalid, or do not fit the sequence lengths or heads."""


class UnsupportedError(RingweaveError, RuntimeError):
    """The named backend, or this version, cannot run the case; the message says why."""


class PageError(RingweaveError, RuntimeError):
    """No page is free for what was to be appended; nothing was written."""


class RingError(RingweaveError, RuntimeError):
    """No answer is right: a rank is lost or silent, and its shard with it, or the ranks do not do the same.

    Attributes:
        rank: Rank that raises, in its group.
        peer: Rank that is lost or silent, or does something else, where known.
        stage: Stage of the ring in which this rank was, None outside of one.
        step: Steps (agreements of all ranks) that this rank had begun.
        cause: What was seen, and by whom.
        lost: Whether a rank is lost or silent; else all are there, and do not do the same.
    """

    def __init__(
        self,
        rank: int,
        peer: int | None,
        stage: int | None,
        step: int,
        cause: str,
        wanted: str = "",
        remedy: str = "",
    ) -> None:
        self.rank, self.peer, self.stage, self.step, self.cause = rank, peer, stage, step, cause
        self.lost = not wanted
        self._said = wanted, remedy
        if self.lost:
            who = "a peer" if peer is None else f"rank {peer}"
            wanted = "an answer of every rank"
            remedy = f"The shard of {who} cannot be reached: regroup the survivors and shard again, or restart."
        place = f"rank {rank}, step {step}" + ("" if stage is None else f", stage {stage}")
        super().__init__(message(place, cause, wanted, remedy))

    def again(self) -> RingError:
        """Make the same error once more, for a later call."""
        kind, said = self.__reduce__()
        return kind(*said)

    def __reduce__(self) -> tuple[type[RingError], tuple[int, int | None, int | None, int, str, str, str]]:
        return RingError, (self.rank, self.peer, self.stage, self.step, self.cause, *self._said)


def in_a_line(error: BaseException) -> str:
    """An error by its type and the beginning of what it says first."""
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {said[:200]}"


# how allocators say it that have no type for it
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocator had no memory left: Python's, numpy's, torch's on any device, or C++'s."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, RingweaveError) and says_no_memory(str(error))


def says_no_memory(text: str) -> bool:
    """Tell whether an error's text is an allocator's."""
    return any(each in text.lower() for each in _NO_MEMORY)


def message(name: str, got: object, wanted: str, remedy: str) -> str:
    """Compose the one shape of error text used everywhere: name, got, wanted, remedy."""
    return f"{name}: got {got}; wanted {wanted}. {remedy}"


_SHOWN = 8  # members of a list
_TEXT = 120  # characters of a text


def shown(value: object) -> str:
    """A value as a message shows it: numbers, texts and the beginning of lists as they are, others by their type."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, (int, float, complex, np.generic, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= _TEXT else f"{value[:_TEXT]}...")
    if isinstance(value, (list, tuple)):
        members = [type(x).__name__ if isinstance(x, (list, tuple)) else shown(x) for x in value[:_SHOWN]]
        inside = ", ".join(members + ["..."] * (len(value) > _SHOWN))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{type(value).__name__} of {value.dtype} {tuple(value.shape)}"
    return type(value).__name__
