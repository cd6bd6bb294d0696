"""Scores of a function of (score, b, h, q, k), for ``tile_attention.py``.

Masked pairs get the score 0 before the function. Their results and gradients are selected afterwards, so a NaN there
reaches nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call, Operands
from ..terms.function import FUNCTION, Differentiated, Pass
from ..terms.operands import TermOperands
from ..types import acc_dtype
from .chunk_threads import threads
from .tile_attention import Scorer, Scores
from .tile_batches import AnyBatch, Tiles


def scorer_of(operands: Operands) -> Scorer:
    """Return the scores of a call: by its score function, or by its terms."""
    terms = operands.terms
    if terms is None or terms.function is None:
        return Scorer(terms)
    return FunctionScorer(terms, terms.function, acc_dtype(operands.q.dtype))


def bytes_of_pair(nbytes: int, acc: torch.dtype) -> int:
    """Return the bytes of a pair's product, score and weight, and of the values that a function computes for it."""
    return nbytes + 3 * acc.itemsize


def bytes_of_function(call: Call) -> int:
    """Return the bytes of a pair in a call with a score function; 0 in others."""
    return bytes_of_pair(call.pair_bytes, acc_dtype(call.dtype)) if FUNCTION in call.features else 0


def threads_of(call: Call) -> int:
    """Return how many threads compute batches of a call together."""
    return threads(torch.device(call.device)) if FUNCTION in call.features else 1


class FunctionScorer(Scorer):
    """Scores of a function, at the positions of a call.

    Args:
        terms: Positions and dropout of the call.
        function: The evaluation.
        acc: Dtype of the scores.
    """

    chooses = threads = sums_rows = True

    def __init__(self, terms: TermOperands, function: Pass, acc: torch.dtype):
        super().__init__()
        self.places, self.function = terms, function
        self.pair = bytes_of_pair(function.nbytes, acc)

    def scores(self, tiles: Tiles[AnyBatch], batch: AnyBatch, products: Tensor, backward: bool) -> Scores:
        """Return the function of the scaled products, 0 where masked."""
        b, h, q, k = tiles.indices(batch)
        # tiles reach beyond the last tokens, where a captured tensor has no entries
        pairs = self.places.pairs(b, h, q.clamp(max=tiles.nq - 1), k.clamp(max=tiles.nk - 1))
        dropout, kept = self.places.dropout, None
        if dropout is not None:
            kept = dropout.kept(pairs).to(tiles.acc).mul_(dropout.factor)
        at = {"b": pairs.batch, "h": pairs.head, "q": pairs.query, "k": pairs.key}
        products = tiles.masked(products, batch, 0.0)
        if not backward:
            return Scores(self.function(products, at), kept)
        values, differentiated = self.function.differentiable(products, at)
        return Scores(values, kept, _Slopes(self.function, differentiated, (products, at)))

    def attended(self, tiles: Tiles[AnyBatch], batch: AnyBatch, x: Tensor, nothing: float) -> Tensor:
        """Return whether each pair is attended: a function masks pairs too."""
        return x != nothing


class _Slopes:
    """The derivative of a function at the pairs of a batch.

    Args:
        function: The evaluation.
        of: The function's result, which is differentiated once.
        given: Products and indices of the pairs.
    """

    def __init__(self, function: Pass, of: Differentiated, given: tuple[Tensor, dict[str, Tensor]]):
        self.function, self.of = function, of
        self._given: tuple[Tensor, dict[str, Tensor]] | None = given

    def __call__(self, grad: Tensor, attended: Tensor | None) -> Tensor | None:
        """Return the gradient of the products; None if the function does not use them."""
        assert self._given is not None
        assert attended is not None
        # the products are not kept while the gradients wait for those of other tiles
        (products, at), self._given = self._given, None
        found = self.of.backward(grad)
        if not self.of.finite():
            # a function may be infinite or NaN at masked pairs, and so may be 0 times its derivative
            at = {name: x.expand(attended.shape)[attended] for name, x in at.items()}
            self.of = self.function.differentiable(products[attended], at)[1]
            found = self.of.backward(grad[attended])
            if found is not None:
                found = torch.zeros_like(grad).masked_scatter_(attended, found)
        # the gradient may be expanded
        return None if found is None else found.contiguous().masked_fill_(~attended, 0.0)

    def add(self) -> None:
        """Add the gradients of captured tensors to their sums; the order of batches is that of the sums."""
        self.of.add()
