"""The terms and the dropout of a call, as backends apply them to the scores of a branch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dropout import Dropout
from .function import FUNCTION, Pass
from .term import Pairs, Term


class TermOperands(NamedTuple):
    """The terms of a call in order, or its score function, and its dropout, at the pairs of a view.

    A view's heads, queries and keys are indices into the call's.
    """

    terms: tuple[Term, ...]
    dropout: Dropout | None
    heads: Tensor  # (Hq,) int64
    rows: Tensor  # (Nq,) int64; places among the keys if terms count distances: see Pattern._among_keys
    columns: Tensor  # (Nk,) int64
    offsets: Tensor  # (B, 2) int64, positions of each batch element's first query and first key
    totals: tuple[Tensor | None, ...]  # the sum of each table's gradient, or None if it is not needed
    function: Pass | None = None  # with the sums of its captured tensors' gradients

    def seeded(self, seed: int) -> TermOperands:
        """Return the operands with another seed of the dropout, if there is one."""
        return self if self.dropout is None else self._replace(dropout=self.dropout._replace(seed=seed))

    def with_totals(self) -> list[tuple[Term, tuple[Tensor | None, ...]]]:
        """Return each term with the totals of its tables."""
        rest = iter(self.totals)
        return [(term, tuple(next(rest) for _ in term.axes)) for term in self.terms]

    @property
    def names(self) -> frozenset[str]:
        """Names of the terms, "dropout" and :data:`FUNCTION`: the features that a backend needs."""
        others = (("dropout", self.dropout), (FUNCTION, self.function))
        return frozenset([type(term).__name__ for term in self.terms] + [name for name, x in others if x is not None])

    def restart(self) -> None:
        """Discard the sums of gradients so far."""
        for total in self.totals:
            if total is not None:
                total.zero_()
        if self.function is not None:
            self.function.restart()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the tables, or of the captured tensors, that need one."""
        return [x for x in self.totals if x is not None] if self.function is None else self.function.gradients()

    def pairs(self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Pairs:
        """Return the call's indices and positions of the view's pairs.

        Indices past the end of the view, in a last tile, continue in steps of one.
        """

        def place(index: Tensor, places: Tensor) -> Tensor:
            inside = index.clamp(max=places.numel() - 1)
            return places[inside] + (index - inside)

        row, column = place(row, self.rows), place(column, self.columns)
        # one entry at a time, since a score_mod may compute no vectors
        query, key = row + self.offsets[batch, 0], column + self.offsets[batch, 1]
        return Pairs(batch, self.heads[head], row, column, query, key)

    def apply(self, t: Tensor, at: Pairs, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the scaled scores t before the terms and after each; scores that are not finite end unchanged.

        ``dtype`` is the dtype of the scores if that of t is wider; a score out of its range becomes infinite.
        """
        states = [t]
        for term in self.terms:
            state = term.apply(states[-1], at)
            if dtype is not None:
                narrow = state.to(dtype)
                state = torch.where(narrow.isinf(), narrow.to(t.dtype), state)
            states.append(state)
        if self.terms:
            states[-1] = torch.where(t.isfinite(), states[-1], t)
        return states

    def gradient(self, states: list[Tensor], grad: Tensor, at: Pairs) -> Tensor:
        """Return the gradient of the scaled scores from that of the scores after all terms."""
        # without terms there are no states
        steps = list(zip(self.with_totals(), states, states[1:], strict=False))
        for (term, totals), before, after in reversed(steps):
            grad = term.gradient(before, after, grad, at, totals)
        return grad
