"""A score function of a call, as backends evaluate it for the pairs of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

#: The feature of a call with a score function: see ``Call.features``.
FUNCTION = "score function"


class Differentiated(Protocol):
    """A score_mod's result on some pairs, which is differentiated once."""

    def backward(self, grad: Tensor) -> Tensor | None:
        """Return the gradient of the scores for that of the result; None if the function does not use them."""

    def finite(self) -> bool:
        """Whether all gradients of captured tensors are finite."""

    def add(self) -> None:
        """Add the gradients of captured tensors to their sums."""


class Pass(Protocol):
    """An evaluation of a score_mod on all pairs, some at a time."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it computes for a pair."""

    def __call__(self, scores: Tensor, at: dict[str, Tensor]) -> Tensor:
        """Return the function of scores, without gradients, in memory that nothing else uses but the scores."""

    def differentiable(self, scores: Tensor, at: dict[str, Tensor]) -> tuple[Tensor, Differentiated]:
        """Return the function of scores, and an object that computes gradients."""

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the captured tensors that learn, in their dtypes."""

    def restart(self) -> None:
        """Discard the sums of gradients so far."""


class ScoreFunction(Protocol):
    """A score_mod, as a formula or as a function that is called for every tile.

    Attributes:
        captured: The tensors that it reads.
        nbytes: Bytes of the tensors that it computes for a pair.
    """

    captured: list[Tensor]
    nbytes: int

    def begin(self, tensors: Sequence[Tensor] | None = None, learns: Sequence[bool] | None = None) -> Pass:
        """Begin to evaluate it, with gradients of the captured tensors that learn."""
