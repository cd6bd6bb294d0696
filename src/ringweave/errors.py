"""Exceptions: each message names the argument, its value, the wanted values and a remedy."""

from __future__ import annotations

import logging

import numpy as np
import torch


class RingweaveError(Exception):
    """Base of every error that ringweave raises on purpose.

    Args:
        name: The argument or thing that is wrong; alone, the whole text.
        got: Its value, as the text shows it.
        wanted: The values that would do.
        remedy: What the reader can do.

    Example:
        >>> ShapeError("k heads", 3, "a divisor of 8", "Repeat k.")
        ShapeError('k heads: got 3; wanted a divisor of 8. Repeat k.')
    """

    def __init__(self, name: str, got: object = None, wanted: str = "", remedy: str = "") -> None:
        super().__init__(message(name, got, wanted, remedy) if wanted else name)


class ShapeError(RingweaveError, ValueError):
    """A tensor's rank, size, dtype or device does not fit the others."""


class PatternError(RingweaveError, ValueError):
    """A pattern's parameters are invalid, or do not fit the sequence lengths or heads."""


class UnsupportedError(RingweaveError, RuntimeError):
    """The named backend, or this version, cannot run the case; the message says why."""


class PageError(RingweaveError, RuntimeError):
    """Too few pages are free for the appended tokens; nothing was written."""


class RingError(RingweaveError, RuntimeError):
    """The ranks cannot compute a correct result: one is lost or silent, with its shard, or their calls differ.

    Attributes:
        rank: Rank that raises, in its group.
        peer: Rank that is lost, silent or makes a different call, if known.
        stage: Stage of the ring in which this rank was, None outside of one.
        step: Number of steps (agreements of all ranks) that this rank had begun.
        cause: The observation, and the rank that made it.
        lost: Whether a rank is lost or silent; otherwise all ranks respond, but their calls differ.
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
        super().__init__(place, cause, wanted, remedy)

    def again(self) -> RingError:
        """Return a copy of the error, for a later call to raise."""
        kind, said = self.__reduce__()
        return kind(*said)

    def __reduce__(self) -> tuple[type[RingError], tuple[int, int | None, int | None, int, str, str, str]]:
        return RingError, (self.rank, self.peer, self.stage, self.step, self.cause, *self._said)


def first_line(error: BaseException) -> str:
    """Return the beginning of an error's first line, in ASCII.

    PyTorch appends a stack of C++ frames, and Gloo puts a file name in front and symbols into the text.
    """
    said = (str(error).strip().splitlines() or [""])[0].split("] ", 1)[-1]
    return " ".join(said.encode("ascii", "ignore").decode().split())[:200]


def in_a_line(error: BaseException) -> str:
    """Return an error's type and the beginning of its first line."""
    return f"{type(error).__name__}: {first_line(error)}"


# texts of allocators that raise no exception type of their own
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had no memory left: Python's, numpy's, torch's on any device, or C++'s."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, RingweaveError) and says_no_memory(str(error))


def says_no_memory(text: str) -> bool:
    """Whether an error's text is that of an allocator without memory."""
    return any(each in text.lower() for each in _NO_MEMORY)


def message(name: str, got: object, wanted: str, remedy: str) -> str:
    """Compose an error text in the form that all errors share: name, got, wanted, remedy."""
    return f"{name}: got {got}; wanted {wanted}. {remedy}"


#: Keys of the warnings that were logged.
WARNED: set[str] = set()
_log = logging.getLogger("ringweave")


def warned(key: str) -> bool:
    """Return whether the warning with a key was logged."""
    return key in WARNED


def warn_once(key: str, name: str, got: object = None, wanted: str = "", remedy: str = "") -> None:
    """Log a warning with the text of an error, unless one with the same key was logged in this process."""
    if key not in WARNED:
        WARNED.add(key)
        # the text is no format
        _log.warning("%s", message(name, got, wanted, remedy) if wanted else name)


_SHOWN = 8  # members of a list
_TEXT = 120  # characters of a text


def shown(value: object) -> str:
    """Format a value for a message: numbers, strings and the beginning of lists by value, other objects by type."""
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
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return type(value).__name__
