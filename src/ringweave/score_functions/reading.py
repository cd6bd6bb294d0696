"""Read the score functions among the terms of a call: as score terms and a pattern, or as one function for tiles."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError, UnsupportedError, shown
from ..patterns import Full, Pattern
from ..patterns.shifted import first_positions
from ..terms import Term
from ..terms.term import Pairs, ScoreMod
from ..torch_compat import before_compiling, outside_transforms
from ..trace.graph import Graph, UntraceableError
from ..trace.symbols import trace
from ..types import Place
from ..validate import checked_scale
from .agreement import disagreement
from .recognised import Score, score_of


class Positions(NamedTuple):
    """The positions of a call.

    Attributes:
        place: Its indices, with the positions of all batch elements.
        first: Positions of the first query and the first key of each batch element, (B, 2) int64; None if those of
            ``place`` are those of all elements.
    """

    place: Place
    first: Tensor | None = None

    @staticmethod
    def of(batch: int, heads: int, nq: int, nk: int, pattern: Pattern, q_offset: int) -> Positions:
        """Return the positions of a call with a result of ``shifted.with_offsets``."""
        if not pattern.tables:
            return Positions(Place(batch, heads, nq, nk, q_offset))
        with outside_transforms():
            first = first_positions(pattern, q_offset, batch, torch.device("cpu"))
            (q0, k0), (q1, k1) = first.amin(0).tolist(), first.amax(0).tolist()
        place = Place(batch, heads, nq + q1 - q0, nk + k1 - k0, q0, k0)
        return Positions(place, None if (q0, k0) == (q1, k1) else first)


class Read(NamedTuple):
    """How the terms of a call are computed.

    Attributes:
        scale: Factor of the scores; with ``score`` it includes the factor of the functions.
        function: All terms as one function.
        score: The functions as terms; None if they take the general path.
        graph: The graph of ``function``; None if it has none that agrees with it.
        why: The reason for the general path.
    """

    scale: float
    function: ScoreMod
    score: Score | None = None
    graph: Graph | None = None
    why: str = ""

    def check_option(self, name: str, value: object, default: object) -> None:
        """Raise UnsupportedError for a value that the general path does not take."""
        if self.score is None and value is not default and value != default:
            wanted = f"{shown(default)}, the default, with a function that takes the general path: {self.why}"
            raise UnsupportedError(name, shown(value), wanted, "Leave it out, or pass score terms.")

    @property
    def said(self) -> str:
        """The way, in words."""
        if self.score is None:
            return f"general path, slower than terms: {self.why}"
        return self.score.said


def check_device(device: torch.device) -> None:
    """Raise UnsupportedError unless score functions run on a device."""
    if device.type != "cpu":
        remedy = "Pass terms such as Softcap, or call torch's flex_attention there."
        raise UnsupportedError("terms", f"a function with tensors on {device}", "tensors on the CPU", remedy)


def read(terms: Sequence[Term | ScoreMod], at: Positions, dtype: torch.dtype, scale: float) -> Read:
    """Read the terms of a call.

    Args:
        terms: Terms and functions, in order.
        at: Positions of the call.
        dtype: Dtype of the scores.
        scale: Factor of the scores.
    """
    terms = tuple([term if isinstance(term, Term) else before_compiling(term) for term in terms])
    # the caller's autocast does not last until backward, so functions compute without it
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
        if len(terms) == 1 and not isinstance(terms[0], Term):
            function, graph, score = terms[0], *_score(terms[0], at, dtype)
        else:
            function, graph, score = _joined(terms, at), None, _sequence(terms, at, dtype)
            if isinstance(score, str):
                graph = _score(function, at, dtype)[0]
    if isinstance(score, str):
        return Read(scale, function, None, graph, score)
    if score.factor != 1:
        try:
            scale = checked_scale(scale * score.factor, 1)
        except ShapeError:
            why = f"it multiplies the score by {score.factor:g}, out of range of a scale"
            return Read(scale, function, None, graph, why)
    return Read(scale, function, score, graph)


def _score(function: ScoreMod, at: Positions, dtype: torch.dtype) -> tuple[Graph | None, Score | str]:
    """Return the graph of a function, if it has one that agrees with it, and its terms, or why it has no terms."""
    try:
        graph = trace(function, dtype, transforms=True)
        score = _placed(score_of(graph, at.place), at)
    except UntraceableError as error:
        return None, str(error)
    how = disagreement(function, graph, at.place, dtype, *([] if isinstance(score, str) else [score.at]))
    return (None, how) if how else (graph, score)


def _placed(score: Score | str, at: Positions) -> Score | str:
    """Return terms that are those of the positions of all batch elements, or why they are not."""
    if isinstance(score, Score) and at.first is not None and any(term.places for term in score.terms):
        return "its table is by position, and batch elements begin at different ones"
    if isinstance(score, Score) and not isinstance(score.pattern, Full) and (at.place.k0 or at.first is not None):
        return "its mask counts positions, and keys do not begin at 0, or batch elements at different positions"
    return score


def _sequence(terms: Sequence[Term | ScoreMod], at: Positions, dtype: torch.dtype) -> Score | str:
    """Return the terms of a sequence, or why a function among them is not made of terms there."""
    whole: Score | None = None
    for term in terms:
        score = Score(1.0, (term,), Full(), at.place) if isinstance(term, Term) else _score(term, at, dtype)[1]
        if isinstance(score, str):
            return score
        if whole is None:
            whole = score
            continue
        if score.factor != 1 and whole.terms:
            return "it multiplies the score after another term"
        if not isinstance(whole.pattern, Full) and (score.factor != 1 or score.terms):
            return "terms follow its mask, and apply to scores of -inf"
        factor = whole.factor * score.factor
        pattern = score.pattern if isinstance(whole.pattern, Full) else whole.pattern & score.pattern
        whole = Score(factor, (*whole.terms, *score.terms), pattern, at.place)
    assert whole is not None
    return whole


def _joined(terms: tuple[Term | ScoreMod, ...], at: Positions) -> ScoreMod:
    """Return terms as one function of positions."""
    q0, k0, first = at.place.q0, at.place.k0, at.first

    def joined(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for term in terms:
            if isinstance(term, Term):
                i, j = (q - q0, k - k0) if first is None else (q - first[b, 0], k - first[b, 1])
                score = term.apply(score, Pairs(b, h, i, j, q, k))
            else:
                score = term(score, b, h, q, k)
        return score

    return joined
