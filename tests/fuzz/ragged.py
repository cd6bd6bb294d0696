"""Define bounds that differ between batch elements: existing keys, documents by ids, and patterns within them."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sizes import At, Sizes


def draw_bounds(r: Random, s: Sizes) -> tuple[Any, ...]:
    return r.choice(["each", "each", "stop", "all"]), r.randint(0, 999)


def bounds(s: Sizes, how: str, seed: int) -> tuple[list[int], list[int]]:
    """Return (start, stop) of each batch element."""
    r = Random(seed)
    if how == "all":
        start = r.randint(0, s.nk)
        return [start] * s.batch, [r.randint(start, s.nk)] * s.batch
    start = [0 if how == "stop" or r.random() < 0.3 else r.randint(0, s.nk) for _ in range(s.batch)]
    return start, [s.nk if r.random() < 0.3 else r.randint(first, s.nk) for first in start]


def bounds_source(s: Sizes, how: str, seed: int) -> str:
    start, stop = bounds(s, how, seed)
    if how == "all":
        return f"rw.KeyPadding({stop[0]}, {start[0]})"
    return f"rw.KeyPadding(torch.tensor({stop})" + (
        ")" if how == "stop" else f", torch.tensor({start}, dtype=torch.int32))"
    )


def exists(at: At, how: str, seed: int) -> Any:
    start, stop = bounds(at.s, how, seed)
    return (at.k >= start[at.b]) & (at.k < stop[at.b])


def draw_ids(r: Random, s: Sizes) -> tuple[Any, ...]:
    return r.random() < 0.7, r.random() < 0.3, r.randint(0, 999)


def ids(s: Sizes, per_batch: bool, pieces: bool, seed: int) -> NDArray[np.int64]:
    """Draw ids (B or 1, keys): runs of ids, some negative; a document may be in several pieces."""
    r = Random(seed)
    rows = []
    for _ in range(s.batch if per_batch else 1):
        row: list[int] = []
        while len(row) < s.nk:
            number = r.choice([-1, -2, 5, 2**40]) if pieces else r.choice([-1, len(row)])
            row += [number] * r.choice([1, 2, r.randint(1, s.nk), 16, 17])
        rows.append(row[: s.nk])
    return np.array(rows)


def ids_source(s: Sizes, per_batch: bool, pieces: bool, seed: int) -> str:
    rows = ids(s, per_batch, pieces, seed).tolist()
    return f"rw.Documents(ids=torch.tensor({rows if per_batch else rows[0]}))"


def same_id(at: At, per_batch: bool, pieces: bool, seed: int) -> Any:
    row = ids(at.s, per_batch, pieces, seed)[at.b if per_batch else 0]
    return (row[at.q] == row[at.k]) & (row[at.q] >= 0)


def draw_marks(r: Random, s: Sizes) -> tuple[Any, ...]:
    return r.random() < 0.7, r.choice([0.0, 0.05, 0.5]), r.randint(0, 999)


def draw_known(r: Random, s: Sizes) -> tuple[Any, ...]:
    return r.random() < 0.7, r.choice([0.5, 0.95, 1.0]), r.randint(0, 999)


def marks(s: Sizes, per_batch: bool, share: float, seed: int) -> NDArray[np.bool_]:
    r = Random(seed)
    return np.array([[r.random() < share for _ in range(s.nk)] for _ in range(s.batch if per_batch else 1)])


def marks_source(s: Sizes, per_batch: bool, share: float, seed: int) -> str:
    rows = marks(s, per_batch, share, seed).astype(int).tolist()
    return f"rw.Global(torch.tensor({rows if per_batch else rows[0]}).bool())"


def known_source(s: Sizes, per_batch: bool, share: float, seed: int) -> str:
    return marks_source(s, per_batch, share, seed).replace("rw.Global", "rw.Sinks")


def is_known(at: At, per_batch: bool, share: float, seed: int) -> Any:
    return marks(at.s, per_batch, share, seed)[at.b if per_batch else 0][at.k] & (at.q >= 0)


def is_marked(at: At, per_batch: bool, share: float, seed: int) -> Any:
    row = marks(at.s, per_batch, share, seed)[at.b if per_batch else 0]
    return row[at.q] | row[at.k]


def draw_nodes(r: Random, s: Sizes) -> tuple[Any, ...]:
    return r.random() < 0.5, r.randint(0, 999)


def nodes(s: Sizes, per_batch: bool, seed: int) -> list[tuple[list[int], list[int]]]:
    """Draw the parents and lengths of nodes, for one or each batch element: chains, branches, roots, empty nodes."""
    r = Random(seed)
    drawn = []
    for _ in range(s.batch if per_batch else 1):
        parents, lengths = list[int](), list[int]()
        while sum(lengths) < s.nk:
            parents.append(r.choice([-1, len(parents) - 1, len(parents) - 1, r.randint(-1, max(len(parents) - 1, -1))]))
            lengths.append(min(r.choice([0, 1, 2, 16, 17, r.randint(0, s.nk)]), s.nk - sum(lengths)))
        drawn.append((parents, lengths))
    most = max(len(parents) for parents, _ in drawn)
    return [
        (parents + [-1] * (most - len(parents)), lengths + [0] * (most - len(lengths))) for parents, lengths in drawn
    ]


def nodes_source(s: Sizes, per_batch: bool, seed: int) -> str:
    drawn = nodes(s, per_batch, seed)
    if not per_batch:
        return f"rw.Tree({drawn[0][0]}, {drawn[0][1]})"
    parents, lengths = zip(*drawn, strict=True)
    return f"rw.Tree(torch.tensor({list(parents)}), torch.tensor({list(lengths)}, dtype=torch.int32))"


def on_paths(at: At, per_batch: bool, seed: int) -> tuple[Any, NDArray[np.int64]]:
    """Return whether each key is on the path of each query, and the places of all tokens on their paths."""
    parents, lengths = nodes(at.s, per_batch, seed)[at.b if per_batch else 0]
    above: list[list[int]] = []
    for node, parent in enumerate(parents):
        above.append([node] if parent < 0 else [*above[parent], node])
    member = np.zeros((len(parents), len(parents)), np.bool_)
    for node, path in enumerate(above):
        member[node, path] = True
    owner = np.repeat(np.arange(len(parents)), lengths)
    first = [sum(lengths[each] for each in path[:-1]) for path in above]
    place = np.array([first[node] + i for node, length in enumerate(lengths) for i in range(length)])
    return member[owner[at.q], owner[at.k]] & (at.k <= at.q), place


def is_on_path(at: At, per_batch: bool, seed: int) -> Any:
    return on_paths(at, per_batch, seed)[0]


#: patterns that depend on no length, and so can restart at any position
ANYWHERE = ["Full", "Causal", "SlidingWindow", "Sinks", "Segments", "Strided", "Dilated", "PrefixLM", "Periodic"]


def places(at: At, kind: str, *args: Any) -> list[tuple[int, int]]:
    """Return the ranges of positions that a pattern is counted within, for a batch element."""
    if kind == "KeyPadding":
        start, stop = bounds(at.s, *args)
        return [(start[at.b], stop[at.b])]
    per_batch, _, seed = args
    row = ids(at.s, per_batch, False, seed)[at.b if per_batch else 0]
    ends = [0, *(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), at.s.nk]
    return [(a, b) for a, b in pairwise(ends) if row[a] >= 0]
