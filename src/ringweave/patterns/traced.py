"""The pattern of a mask function that was traced, where patterns have its pairs.

Sets of distances, keys and documents have patterns of their own. The pairs of any other comparison are zones, unless
they are so many that evaluating the function takes less time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..trace.graph import Graph, H, deps_of
from ..trace.relation import (
    And,
    Distances,
    Equal,
    Not,
    Or,
    Order,
    Place,
    Relation,
    Runs,
    Side,
    as_relation,
    joined,
    negated,
)  # fmt: skip
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
        return None if part is None else ~part
    if isinstance(x, Distances):
        return _of_distances(x.runs, place)
    if isinstance(x, Side) and x.table.shape[1:3] == (1, 1):
        return _of_keys(x.table[:, 0, 0].expand(-1, place.nk))
    numbers = _numbers(x, place)
    if numbers is not None:
        return _documents(numbers)
    return zones_of([x], place) if is_compared(x) else None


def _joined(x: And | Or, place: Place, within: Tensor | None) -> Pattern | None:
    rest: list[Relation] = []
    numbers: Tensor | None = None
    for part in x.parts:
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


def _numbers(x: Relation, place: Place) -> Tensor | None:
    """Return numbers (B or 1, Nk) of documents with the pairs of a leaf; None for another leaf, and for each head's."""
    first = place.q0 - place.k0
    if not isinstance(x, Equal) or not x.same or x.v.shape[1] > 1 or first < 0 or first + place.nq > place.nk:
        return None
    # numbers of documents are not negative, and these may be any
    return _numbered(x.v[:, 0, 0])


def _documents(numbers: Tensor) -> Documents:
    # read now: nothing writes to these numbers, and each call would read them again
    return Documents(ids=numbers).read()


def _both(one: Tensor, other: Tensor) -> Tensor:
    """Return the numbers of tokens that are equal where both numbers are."""
    return _numbered(one * (other.amax() + 1) + other)


def _numbered(values: Tensor) -> Tensor:
    """Return numbers from 0 that are equal where values are."""
    numbers: Tensor = values.unique(return_inverse=True)[1]
    return numbers


def _by_distance(x: Relation, place: Place, within: Tensor | None) -> Relation:
    """Return a leaf as a set of distances if it counts the tokens of each document, as positions of packed rows do."""
    if isinstance(x, Not) and isinstance(x.part, Order):
        return negated(_by_distance(x.part, place, within))
    runs = _within(x, place, within) if isinstance(x, Order) and within is not None else None
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


def _of_distances(runs: Runs, place: Place) -> Pattern | None:
    """Return the pairs with distances in some intervals, without bounds that no pair of the call reaches."""
    nearest, farthest = place.q0 - place.k0 - place.nk + 1, place.q0 - place.k0 + place.nq - 1
    reached = [(max(least, nearest), min(most, farthest)) for least, most in runs]
    whole = [(int(least), int(most)) for least, most in reached if least <= most]
    stride = _stride(whole)
    if stride > 1:
        first, last = whole[0][0], whole[-1][0]
        # the window ends between the multiples next to it
        return Strided(stride) & _interval(first, last, nearest + stride - 1, farthest - stride + 1)
    if len(whole) > _MOST_WINDOWS:
        return None
    found: Pattern = ~Full()
    for least, most in whole:
        found = found | _interval(least, most, nearest, farthest)
    return found


def _stride(runs: list[tuple[int, int]]) -> int:
    """Return the stride of single distances that are consecutive multiples of it; 1 for others."""
    if len(runs) < 3:
        return 1
    stride = runs[1][0] - runs[0][0]
    multiples = all(least == most == runs[0][0] + i * stride for i, (least, most) in enumerate(runs))
    return stride if multiples and runs[0][0] % stride == 0 else 1


def _interval(least: int, most: int, nearest: int, farthest: int) -> Pattern:
    """Return the pairs of a call with ``least <= q - k <= most``, where its distances are from nearest to farthest."""
    low, high = least <= nearest, most >= farthest
    if not low and not high and least <= 0 <= most:
        return SlidingWindow(most, -least)
    found = Full() if low else _from(least)
    return found if high else found & ~_from(most + 1)


def _from(least: int) -> Pattern:
    """Return the pairs with a distance of at least a number."""
    if least == 0:
        return Causal()
    return Causal() | SlidingWindow(0, -least) if least < 0 else Causal() & ~SlidingWindow(least - 1)


def _of_keys(keys: Tensor) -> Pattern:
    """Return the keys that a table (B or 1, Nk) allows."""
    begin = keys.int().argmax(-1)
    end = torch.where(keys.any(-1), keys.shape[1] - keys.flip(-1).int().argmax(-1), 0)
    if bool((keys.sum(-1) != end - begin).any()):
        return Sinks(keys)
    return KeyPadding(int(end), int(begin)) if len(keys) == 1 else KeyPadding(end, begin)
