"""The pattern of a mask function that was traced, where patterns have its pairs.

Sets of distances, keys and documents have patterns of their own. The pairs of any other comparison are zones, unless
they are so many that evaluating the function takes less time.

torch.compile traces this file for masks of models. Values are then unknown, and one graph serves all lengths, so other
comparisons have no pattern.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..cache import PATTERNS
from ..torch_compat import require
from ..trace.graph import Graph, H, deps_of
from ..trace.relation import (
    And,
    Distances,
    Equal,
    Not,
    Or,
    Order,
    Relation,
    Runs,
    Side,
    as_relation,
    joined,
    negated,
)  # fmt: skip
from ..types import Place
from . import algebra
from .algebra import PerHead, join
from .base import Full, Pattern, parts_of
from .compared import Compared, is_compared, most_zones, zones_of
from .dilated import Strided
from .documents import Documents
from .global_tokens import Sinks
from .key_padding import KeyPadding
from .local import Causal, SlidingWindow
from .zone_table import ZoneTable

# most windows in a union of distances: planning more takes longer than evaluating the function
_MOST_WINDOWS = 32
# bound on the numbers of documents, so that those of two tables can be joined
_MOST_NUMBERS = 2**31
_FAR_APART = f"numbers of documents: got two that are {_MOST_NUMBERS} or more apart; wanted smaller differences"
# estimated size of a pattern per character of its text: it and each of its parts are an object with a text
_BYTES_OF_TEXT = 64
# most heads that are read one by one
_MOST_HEADS = 256


def of_graph(graph: Graph, place: Place) -> Pattern | None:
    """Return the pattern of a mask function over the queries and keys of a call; None where patterns lack its pairs.

    Args:
        graph: The traced function.
        place: Indices of the call. Queries of the pattern begin at position ``q0 - k0``.
    Raises:
        UntraceableError: The function is no mask, or a value of one side cannot be computed.
    """
    found = of_relation(as_relation(graph, place), place)
    if found is not None or not deps_of(graph.result) & H or not 1 < place.heads <= _MOST_HEADS:
        return found
    heads: list[Pattern] = []
    for head in range(place.h0, place.h0 + place.heads):
        one = place._replace(heads=1, h0=head)
        each = of_relation(as_relation(graph, one), one)
        if each is None:
            return None
        heads.append(each)
    return PerHead(heads)


def of_relation(x: Relation, place: Place, within: Tensor | None = None) -> Pattern | None:
    """Return the pattern of a relation; None where patterns lack its pairs.

    Args:
        x: The relation.
        place: Indices of the call.
        within: Numbers (B or 1, Nk) of the documents to which the pattern is restricted elsewhere.
    """
    if isinstance(x, (And, Or)):
        return _joined(x, place, within)
    if isinstance(x, Not) and not isinstance(x.part, Order):
        part = of_relation(x.part, place, within)
        return None if part is None else _not(part)
    if isinstance(x, Distances):
        first = place.q0 - place.k0
        return of_distances(x.runs, first - place.nk + 1, first + place.nq - 1)
    if isinstance(x, Side) and x.table.shape[1:3] == (1, 1):
        # each decoding step has other bounds, and one program for those in tensors
        return of_keys(x.table[:, 0, 0].expand(-1, place.nk), numbers=place.nq > 1)
    numbers = _numbers(x, place)
    if numbers is not None:
        return _documents(numbers)
    return zones_of([x], place) if is_compared(x) else None


def _not(pattern: Pattern) -> Pattern:
    # torch.compile does not trace the operator ~
    return pattern.__invert__()


def _joined(x: And | Or, place: Place, within: Tensor | None) -> Pattern | None:
    rest: list[Relation] = []
    numbers: Tensor | None = None
    for part in _with_one_mask_of_keys(x):
        mine = _numbers(part, place) if isinstance(x, And) else None
        if mine is None:
            rest.append(part)
        else:
            # documents inside of documents are documents
            numbers = mine if numbers is None else _both(numbers, mine)
    found: list[Pattern] = []
    if numbers is not None:
        found.append(_documents(numbers))
        within = numbers if within is None else _both(numbers, within)
    # sets of distances merge, those inside of documents too
    merged = joined(type(x), [_by_distance(part, place, within) for part in rest])
    compared: list[Compared] = []
    zones = 0
    for part in merged.parts if isinstance(merged, (And, Or)) and type(merged) is type(x) else (merged,):
        if isinstance(x, And) and is_compared(part):
            compared.append(part)
            continue
        pattern = of_relation(part, place, within)
        if pattern is None:
            return None
        zones += sum(part.table.shape[:2].numel() for part in parts_of(pattern, ZoneTable))
        if zones > most_zones(place, place.batch):
            return None
        found.append(pattern)
    if compared:
        table = zones_of(compared, place)
        if table is None:
            return None
        found.append(table)
    return join(algebra.And if isinstance(x, And) else algebra.Or, *found)


def _with_one_mask_of_keys(x: And | Or) -> list[Relation]:
    """Return the parts, with one for all masks of keys: torch.compile cannot compare two of them."""
    rest: list[Relation] = []
    keys: Tensor | None = None
    for part in x.parts:
        if not isinstance(part, Side) or part.table.shape[1:3] != (1, 1):
            rest.append(part)
        elif keys is None:
            keys = part.table
        else:
            keys = keys & part.table if isinstance(x, And) else keys | part.table
    return rest if keys is None else [*rest, Side(keys)]


def _numbers(x: Relation, place: Place) -> Tensor | None:
    """Return numbers (B or 1, Nk) of documents with the pairs of a leaf; None for another leaf, and for each head's."""
    first = place.q0 - place.k0
    if not isinstance(x, Equal) or not x.same or x.v.shape[1] > 1 or first < 0 or first + place.nq > place.nk:
        return None
    # numbers of documents are not negative, and these may be any
    return _numbered(x.v[:, 0, 0])


def of_documents(values: Tensor) -> Documents:
    """Return the pairs of tokens with equal values (B or 1, tokens)."""
    return _documents(_numbered(values))


def _documents(numbers: Tensor) -> Documents:
    documents = Documents(ids=numbers)
    # read now: nothing writes to these numbers, and each call would read them again
    return documents if torch.compiler.is_compiling() else documents.read()


def _both(one: Tensor, other: Tensor) -> Tensor:
    """Return the numbers of tokens that are equal where both numbers are."""
    return _numbered(one * (other.amax() + 1) + other)


def _numbered(values: Tensor) -> Tensor:
    """Return numbers from 0 that are equal where values are."""
    numbers: Tensor
    if torch.compiler.is_compiling():
        numbers = values.long() - values.amin()
        require(((numbers >= 0) & (numbers < _MOST_NUMBERS)).all(), _FAR_APART)
        return numbers
    numbers = values.unique(return_inverse=True)[1]
    return numbers


def _by_distance(x: Relation, place: Place, within: Tensor | None) -> Relation:
    """Return a leaf as a set of distances if it counts the tokens of each document, as positions of packed rows do."""
    if isinstance(x, Not) and isinstance(x.part, Order):
        return negated(_by_distance(x.part, place, within))
    if within is None or not isinstance(x, Order) or torch.compiler.is_compiling():
        return x
    runs = _within(x, place, within)
    return x if runs is None else Distances(runs)


def _within(x: Order, place: Place, numbers: Tensor) -> Runs | None:
    """Return the distances of the pairs in documents, if u and v change by one with each token of one; else None."""
    if x.u.dtype != torch.int64 or x.v.dtype != torch.int64 or x.u.shape[1] > 1 or x.v.shape[1] > 1:
        return None
    batch = max(len(x.u), len(x.v), len(numbers))
    u, v = x.u[:, 0, :, 0].expand(batch, place.nq), x.v[:, 0, 0].expand(batch, place.nk)
    count = int(numbers.amax()) + 1
    # documents of all batch elements
    document = (numbers + count * torch.arange(batch, device="cpu")[:, None]).flatten()
    first = place.q0 - place.k0
    key = torch.arange(place.nk, device="cpu")
    for step in (1, -1):
        # u = step * q + a and v = step * k + b, so u <= v where step * (q - k) <= b - a
        a, b = u - step * key[first : first + place.nq], v - step * key
        apart = b[:, first : first + place.nq] - a
        of_document = torch.zeros(count * batch, dtype=torch.int64, device="cpu").scatter_(0, document, b.flatten())
        if bool((apart == apart[0, 0]).all()) and bool((of_document[document] == b.flatten()).all()):
            reach = int(apart[0, 0])
            return ((-math.inf, reach),) if step > 0 else ((-reach, math.inf),)
    return None


def of_distances(runs: Runs, nearest: int, farthest: int) -> Pattern | None:
    """Return the pairs with distances in some intervals; None if these are too many.

    Bounds that no pair of the call reaches are left out, so dense calls get Full. One object is returned for equal
    intervals, since attention looks up a pattern's prepared call by identity: all steps of a model share it.

    Args:
        runs: The intervals.
        nearest: Least distance in the call.
        farthest: Largest distance in the call.
    """
    if torch.compiler.is_compiling():
        return _intervals(runs)
    met = [run for run in runs if run[0] <= farthest and run[1] >= nearest]
    stride, apart = _stride(met), 0
    if stride > 1:
        # the window ends between the multiples next to it
        met, apart = [(met[0][0], met[-1][0])], stride - 1
    if len(met) > _MOST_WINDOWS:
        return None
    # an interval with two bounds is one window, which is planned faster than the complement of another
    reached = tuple([
        (-math.inf if least <= nearest + apart else least, math.inf) if most >= farthest - apart else (least, most)
        for least, most in met
    ])  # fmt: skip
    key = "distances", stride, reached
    found: Pattern | None = PATTERNS.get(key)
    if found is None:
        found = _intervals(reached) if stride == 1 else Strided(stride) & _intervals(reached)
        PATTERNS.put(key, found, len(found.spec) * _BYTES_OF_TEXT)
    return found


def _stride(runs: list[tuple[float, float]]) -> int:
    """Return the stride of single distances that are consecutive multiples of it; 1 for others."""
    if len(runs) < 3 or any(least != most for least, most in runs):
        return 1
    stride = int(runs[1][0] - runs[0][0])
    multiples = all(least == runs[0][0] + i * stride for i, (least, _) in enumerate(runs))
    return stride if multiples and runs[0][0] % stride == 0 else 1


def _intervals(runs: Runs) -> Pattern:
    """Return the pairs with ``q - k`` in one of several intervals."""
    found: Pattern | None = None
    for least, most in runs:
        part = _interval(least, most)
        found = part if found is None else found | part
    return _not(Full()) if found is None else found


def _interval(least: float, most: float) -> Pattern:
    """Return the pairs with ``least <= q - k <= most``."""
    if -math.inf < least <= 0 <= most < math.inf:
        return SlidingWindow(int(most), -int(least))
    found: Pattern = Full() if least == -math.inf else _from(int(least))
    return found if most == math.inf else found & _not(_from(int(most) + 1))


def _from(least: int) -> Pattern:
    """Return the pairs with a distance of at least a number."""
    if least == 0:
        return Causal()
    return Causal() | SlidingWindow(0, -least) if least < 0 else Causal() & _not(SlidingWindow(least - 1))


def of_keys(keys: Tensor, numbers: bool = False) -> Pattern:
    """Return the keys that a table (B or 1, Nk) allows: bounds, and if needed a mask inside of them.

    Args:
        keys: The table.
        numbers: Whether bounds of all batch elements may be numbers in place of tensors, so that they are constant.
    """
    bounds, mask = bounds_of_keys(keys, numbers)
    return bounds if mask is None else bounds & mask


def bounds_of_keys(keys: Tensor, numbers: bool = False) -> tuple[KeyPadding, Sinks | None]:
    """Return the bounds of the keys that a table allows, and a mask, or None if they are all keys inside the bounds.

    Args:
        keys: As in :func:`of_keys`.
        numbers: As in :func:`of_keys`.
    """
    begin = keys.int().argmax(-1)
    end = torch.where(keys.any(-1), keys.shape[1] - keys.flip(-1).int().argmax(-1), 0)
    known = not torch.compiler.is_compiling()
    constant = numbers and known and len(keys) == 1
    bounds = KeyPadding(int(end), int(begin)) if constant else KeyPadding(end, begin)
    if known and bool((keys.sum(-1) == end - begin).all()):
        return bounds, None
    # the bounds skip tiles without reading the mask, so they are kept beside it
    return bounds, Sinks(keys)
