"""Exceptions: each names the argument, what came, what is wanted and what to do."""

from __future__ import annotations


class RingweaveError(Exception):
    """Base of every error that ringweave raises on purpose."""


class ShapeError(RingweaveError, ValueError):
    """A tensor's rank, size, dtype or device does not fit the others."""


class PatternError(RingweaveError, ValueError):
    """A pattern's parameters are invalid, or do not fit the sequence lengths or heads."""


class UnsupportedError(RingweaveError, RuntimeError):
    """The named backend, or this version, cannot run the case; the message says why."""


def message(name: str, got: object, wanted: str, remedy: str) -> str:
    """Compose the one shape of error text used everywhere: name, got, wanted, remedy."""
    return f"{name}: got {got}; wanted {wanted}. {remedy}"


class RingError(RingweaveError, RuntimeError):
    def __init__(self, rank, peer, stage, step, cause):
        super().__init__(f"{rank} {peer} {stage} {step} {cause}")
