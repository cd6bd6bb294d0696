"""Compute a call with score functions: by the score terms that they are, or in tiles."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

from torch import Tensor

from ..cache import PATTERNS
from ..call import Arguments
from ..errors import UnsupportedError
from ..patterns import Full, Pattern
from ..precision import as_precision
from ..terms import Term
from ..terms.dropout import Dropout
from ..terms.term import as_listed
from ..trace.graph import K, Q, deps_of
from ..types import FIRST_POSITION, acc_dtype
from ..validate import check_distances, check_tensors, checked, checked_scale, lengths, positions
from .reading import Positions, Read, check_device, read
from .scored_program import ScoredProgram

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
    """Return the arguments of the same call with score terms, and with the pairs at which its functions are not -inf.

    Raises:
        UnsupportedError: A function masks pairs, and ranks share the call.
    """
    given, score = call.given, call.found.score
    assert score is not None
    if given.pattern.tables and any(term.distances for term in score.terms):
        check_distances("a function of q and k", given.pattern, by_index=True)
    changed = given._replace(terms=score.terms, scale=call.found.scale)
    if isinstance(score.pattern, Full):
        return changed
    if given.context is not None:
        remedy = "Add the mask to the pattern of the context and of the call."
        raise UnsupportedError("terms", "a function that masks pairs, with a context", "one that masks none", remedy)
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
    """Compute (out, lse) of the call by a program with its function, without learned sinks.

    Raises:
        UnsupportedError: An option needs a kernel, or the function cannot be differentiated as the call asks.
        PatternError: The pattern does not fit the call.
    """
    given, (scale, function, _, graph, _) = call.given, call.found
    call.found.check_option("context", given.context, None)
    precision = as_precision(given.precision)
    for field in fields(precision):
        # the other fields are about kernels, storage and messages
        if field.name != "compute":
            call.found.check_option(f"precision.{field.name}", getattr(precision, field.name), field.default)
    terms = [term for term in as_listed(given.terms) if isinstance(term, Term)]
    known, q, k, v, tensors, _ = checked(given._replace(terms=terms))
    if known.pattern.tables and (graph is None or deps_of(graph.result) & (Q | K)):
        check_distances("a function of q and k", known.pattern, by_index=True)
    dropout = Dropout(known.dropout, int(known.by_field(tensors).dropout[0])) if known.dropout else None
    return ScoredProgram.of(replace(known, scale=scale), function, graph, q, k, dropout).attend(q, k, v)
