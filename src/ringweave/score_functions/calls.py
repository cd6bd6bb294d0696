"""Compute a call with score functions: by the score terms that they are, or in tiles."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import PATTERNS
from ..call import Arguments
from ..errors import UnsupportedError
from ..patterns import Full, Pattern
from ..precision import as_precision
from ..terms import Term
from ..terms.term import as_listed
from ..trace.graph import Graph, K, Q, deps_of
from ..trace.text import text_of
from ..types import FIRST_POSITION, acc_dtype
from ..validate import check_distances, check_tensors, checked, checked_scale, lengths, positions
from .reading import Positions, Read, check_device, read
from .scored_program import ScoredProgram, scored_call

# estimated size of a pattern without its tables
_BYTES = 2**10


class Scored(NamedTuple):
    """A call with score functions.

    Attributes:
        given: The arguments of the call.
        at: Positions of the call.
        found: How its terms are computed.
    """

    given: Arguments
    at: Positions
    found: Read


def scored(given: Arguments) -> Scored:
    """Read the terms of a call; ``validate.converted`` has converted its tensors.

    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
        UnsupportedError: The tensors are not on the CPU.
    """
    q, k, v = given[:3]
    terms = as_listed(given.terms)
    check_tensors(q, k, v, hosted=given.on_oom == "stream")
    check_device(q.device)
    pattern, q_offset = positions(given)[1:]
    at = Positions.of(q.shape[0], q.shape[1], *lengths(given), pattern, q_offset)
    found = read(terms, at, acc_dtype(q.dtype), checked_scale(given.scale, q.shape[3]))
    return Scored(given, at, found)


def by_terms(call: Scored) -> Arguments:
    """Return the arguments of the same call with score terms, and the pairs at which its functions are not -inf."""
    given, score = call.given, call.found.score
    assert score is not None
    if given.pattern.tables and any(term.distances for term in score.terms):
        check_distances("a function of q and k", given.pattern, by_index=True)
    changed = given._replace(terms=score.terms, scale=call.found.scale)
    if isinstance(score.pattern, Full):
        return changed
    # a number, since "end" counts the keys that a pattern leaves
    first = given.q_offset if given.q_offset is FIRST_POSITION else call.at.place.q0
    pattern = _both(given.pattern, score.pattern)
    return changed._replace(pattern=pattern, q_offset=first, k_offset=call.at.place.k0)


def _both(pattern: Pattern, mask: Pattern) -> Pattern:
    """Return the pairs of two patterns, as one object for the same two, since programs are found by the object."""
    key = "both", id(pattern), id(mask)
    known: tuple[Pattern, Pattern, Pattern] | None = PATTERNS.get(key)
    if known is None or known[0] is not pattern or known[1] is not mask:
        known = pattern, mask, pattern & mask
        PATTERNS.put(key, known, _BYTES + sum(table.nbytes for table in (*pattern.tables, *mask.tables)))
    return known[2]


def attend(call: Scored) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of the call with its function, without learned sinks.

    Raises:
        UnsupportedError: An option needs a kernel, the function cannot be differentiated as the call asks, or ranks
            share the call and cannot compare the function.
        PatternError: The pattern does not fit the call.
    """
    given, (scale, function, _, graph, _) = call.given, call.found
    context, precision = given.context, as_precision(given.precision)
    taken = ("compute",) if context is None else ("compute", "wire")
    for field in fields(precision):
        # the other fields are about kernels and storage
        if field.name not in taken:
            call.found.check_option(f"precision.{field.name}", getattr(precision, field.name), field.default)
    terms = [term for term in as_listed(given.terms) if isinstance(term, Term)]
    known, q, k, v, tensors, _ = checked(given._replace(terms=terms))
    if known.pattern.tables and (graph is None or deps_of(graph.result) & (Q | K)):
        check_distances("a function of q and k", known.pattern, by_index=True)
    others = known.by_field(tensors)
    known, formula = scored_call(replace(known, scale=scale), function, graph, q, k)
    if context is None:
        return ScoredProgram(known, formula, others.dropout).attend(q, k, v)
    context.check(known, q, k)
    if graph is None:
        # a function that fails at the last pair, as one with a table of a shard's length, says so itself
        last = {name: values[-1:].view(1, 1, 1) for name, values in call.at.place.lengths().items()}
        formula.begin()(torch.zeros(1, 1, 1, dtype=acc_dtype(q.dtype), device=q.device), last)
    # ranks compare a record of the function in its place
    shared = given._replace(terms=_compared(graph, call.found.why))  # type: ignore[arg-type]
    return context.attend(known, (q, k, v), [*others.pattern, *others.dropout], shared, formula)


@dataclass(frozen=True, eq=False)
class ComparedFunction:
    """A score function as ranks compare it: everything that its graph is made of.

    Attributes:
        formula: Text of the graph.
        dtype: torch's default dtype, which operations on numbers depend on.
        captured: The tensors that the graph reads.
    """

    formula: str
    dtype: torch.dtype
    captured: tuple[Tensor, ...]


def _compared(graph: Graph | None, why: str) -> ComparedFunction:
    """Return a function as ranks compare it.

    Raises:
        UnsupportedError: It has no graph, or one that has no text.
    """
    text = None if graph is None else text_of(graph)
    if graph is None or text is None:
        got = "a function that ranks cannot compare, with a context: "
        got += why if graph is None else "it has an operation or a constant that no text names"
        remedy = "Compute it with operations of torch on the arguments and on captured tensors, or pass score terms."
        raise UnsupportedError("terms", got, "one with a graph of named operations", remedy)
    return ComparedFunction(text, torch.get_default_dtype(), tuple(graph.tensors))
