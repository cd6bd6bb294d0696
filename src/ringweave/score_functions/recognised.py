"""Read a score function as score terms and a pattern, or find why the general path must compute it.

The function is traced at each call, so it is never out of date. What its graph is recognised as is kept for the graph,
the tensors that it captures, and the sizes of the call.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import PATTERNS
from ..errors import ShapeError
from ..patterns import Full, Pattern
from ..patterns.cache_key import CacheKey, changed
from ..patterns.located import located
from ..patterns.traced import of_graph
from ..terms import KINDS, Term
from ..terms.term import Pairs
from ..torch_compat import dispatched, outside_transforms, transforming, wrapped
from ..trace.evaluate import Arguments
from ..trace.graph import MASK_ARGUMENTS, Graph, UntraceableError
from ..trace.terms import as_terms
from ..types import Place

# Bytes of captured tensors, and of the tables made of them, up to which terms are kept: larger ones take longer to
# compare than to tabulate again.
_MOST_BYTES = 2**14
_MOST_TABLE_BYTES = 2**20


class Score(NamedTuple):
    """A score function: ``factor * score`` under the terms at the pairs of a pattern, and -inf at other pairs.

    Attributes:
        factor: Number that first multiplies the score.
        terms: The terms, in order.
        pattern: The pairs.
        place: Indices of the call.
    """

    factor: float
    terms: tuple[Term, ...]
    pattern: Pattern
    place: Place

    def at(self, at: Arguments) -> Tensor:
        """Return the values at some pairs, in one dimension."""
        b, h, q, k = (at[name] for name in MASK_ARGUMENTS)
        found = at["score"] * self.factor
        for term in self.terms:
            found = term.apply(found, Pairs(b, h, q - self.place.q0, k - self.place.k0, q, k))
        if not isinstance(self.pattern, Full):
            allowed = torch.empty_like(found, dtype=torch.bool)
            ends = self.place.q0 + self.place.nq, self.place.k0 + self.place.nk
            for one in set(zip(b.tolist(), h.tolist(), strict=True)):
                these = (b == one[0]) & (h == one[1])
                allowed[these] = located(self.pattern.select(*one), ends).allows(q[these], k[these])
            found = found.masked_fill(~allowed, -torch.inf)
        return found

    @property
    def said(self) -> str:
        """The factor, the kinds of terms and a mask by name."""
        said = [] if self.factor == 1 else [f"factor {self.factor:g}"]
        said += [type(term).__name__ for term in self.terms]
        said += [] if isinstance(self.pattern, Full) else ["mask"]
        return ", ".join(said) or "none"


def score_of(graph: Graph, place: Place) -> Score | str:
    """Return the graph of a score function as terms and a pattern, or why it is not made of these.

    Raises:
        UntraceableError: An operation of the graph fails for one pair.
        PatternError: A tensor was changed meanwhile.
    """
    key = _key(graph, place)
    known: Score | str | None = None if key is None else PATTERNS.get(key)
    if known is None:
        known = _score_of(graph, place)
        if key is not None:
            tables = () if isinstance(known, str) else [table for term in known.terms for table in term.tables]
            nbytes = sum([table.nbytes for table in tables])
            if key != _key(graph, place):
                raise changed("a function that reads values that another thread changed", "terms")
            if nbytes <= _MOST_TABLE_BYTES:
                PATTERNS.put(key, known, nbytes + _MOST_BYTES)
    return known


def _key(graph: Graph, place: Place) -> Hashable | None:
    """Return everything that the terms of a graph depend on; None if they cannot be kept, or not cheaply."""
    tensors = graph.tensors
    if dispatched() or transforming():
        return None
    # gradients reach a table through the operations that made it, once
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if learns or sum(x.nbytes for x in tensors) > _MOST_BYTES:
        return None
    # a tensor that inference mode made cannot be used outside of it
    inference = torch.is_inference_mode_enabled(), *[x.is_inference() for x in tensors]
    found = CacheKey.following("score terms", tuple(tensors))
    # the memory itself too, since a term may be a view of it
    return found.value, found.versions, graph.key, place, inference


def _score_of(graph: Graph, place: Place) -> Score | str:
    graph.typed()
    try:
        found = as_terms(graph, place)
        pattern: Pattern = Full()
        if found.masks and any(map(wrapped, graph.tensors)):
            return "its mask may depend on a tensor of a transform of torch.func"
        for mask, no in found.masks:
            with outside_transforms():
                part = of_graph(mask, place)
            if part is None:
                return "no pattern has the pairs at which it is not -inf"
            pattern = pattern & (~part if no else part)
        terms = tuple(KINDS[kind](value) for kind, value in found.terms)  # type: ignore[call-arg]
        return Score(found.factor, terms, pattern, place)
    except UntraceableError as error:
        return str(error)
    except ShapeError as error:
        return f"a term does not take its values: {error}"
