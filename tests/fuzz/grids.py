"""Define grids by loops: the order of their tokens by sorting, and the neighbours along each axis by counting."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np

from .sizes import At, Bools, Sizes

Numbers = tuple[int, ...]


def draw_shape(r: Random, s: Sizes) -> tuple[Numbers, Numbers]:
    """Draw a shape with as many tokens as keys, on one to three axes, and any box."""
    shape: list[int] = []
    left = s.nk
    for _ in range(r.choice([0, 1, 1, 2])):
        shape.append(r.choice([n for n in range(1, left + 1) if left % n == 0]))
        left //= shape[-1]
    return (*shape, left), tuple(r.choice([1, 2, 3, 4, 8, 16, 50]) for _ in (*shape, left))


def draw_neighborhood(r: Random, s: Sizes) -> tuple[Any, ...]:
    shape, tile = draw_shape(r, s)
    window = tuple(r.choice([1, min(3, n), r.randint(1, n), n]) for n in shape)
    dilation = tuple(r.choice([1, 1, r.randint(1, n // w)]) for n, w in zip(shape, window, strict=True))
    return shape, tile, window, dilation, tuple(r.random() < 0.3 for _ in shape)


def draw_windows(r: Random, s: Sizes) -> tuple[Any, ...]:
    shape, tile = draw_shape(r, s)
    size = tuple(r.choice([1, 2, 7, 8, r.randint(1, n + 1)]) for n in shape)
    return shape, tile, size, tuple(r.choice([0, n // 2, r.randrange(n)]) for n in size)


def neighborhood_source(
    s: Sizes, shape: Numbers, tile: Numbers, window: Numbers, dilation: Numbers, causal: Any
) -> str:
    return f"rw.GridNeighborhood(rw.Grid({shape}, {tile}), {window}, {dilation}, {causal})"


def windows_source(s: Sizes, shape: Numbers, tile: Numbers, size: Numbers, shift: Numbers) -> str:
    return f"rw.GridWindows(rw.Grid({shape}, {tile}), {size}, {shift})"


def tokens_in_order(shape: Numbers, tile: Numbers) -> list[Numbers]:
    def place(token: Numbers) -> Any:
        axes = list(zip(token, shape, map(min, tile, shape), strict=True))
        # sort tokens outside of whole boxes last, then by box, then by the place in it
        return [c >= n // b * b for c, n, b in axes], [c // b for c, _, b in axes], [c % b for c, _, b in axes]

    return sorted(itertools.product(*map(range, shape)), key=place)


def asked(at: At, shape: Numbers, tile: Numbers, along: list[Bools]) -> Bools:
    """Return the pairs allowed along every axis, for the queries and keys at the given positions."""
    order = np.array(tokens_in_order(shape, tile))
    q, k = order[at.q[:, 0]], order[at.k[0]]
    allowed = np.ones((len(q), len(k)), np.bool_)
    for axis, table in enumerate(along):
        allowed &= table[q[:, axis]][:, k[:, axis]]
    return allowed


def neighborhood_allows(
    at: At, shape: Numbers, tile: Numbers, window: Numbers, dilation: Numbers, causal: tuple[bool, ...]
) -> Bools:
    tables = []
    for n, w, d, past in zip(shape, window, dilation, causal, strict=True):
        table = np.zeros((n, n), np.bool_)
        for q in range(n):
            members = list(range(q % d, n, d))
            # the window of members with its middle nearest to the query; on a causal axis, the last members up to it
            first = members.index(q) - (w - 1 if past else w // 2)
            last = first + w
            if not past:
                first = max(min(first, len(members) - w), 0)
                last = first + w
            table[q, members[max(first, 0) : last]] = True
        tables.append(table)
    return asked(at, shape, tile, tables)


def windows_allow(at: At, shape: Numbers, tile: Numbers, size: Numbers, shift: Numbers) -> Bools:
    windows = (np.array([(c - cut) // side for c in range(n)]) for n, side, cut in zip(shape, size, shift, strict=True))
    return asked(at, shape, tile, [of[:, None] == of for of in windows])


def fits(s: Sizes, shape: Numbers, *_: Any) -> bool:
    return s.square and int(np.prod(shape)) == s.nk
