"""Random patterns as trees of plain data: the Python that makes one, and its definition in numpy.

The library is never asked for a pattern's meaning; only random presets are asked for the blocks that they drew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch.nn.attention.flex_attention
from numpy.typing import NDArray

import ringweave as rw
from ringweave.patterns import Pattern

from .kinds import KINDS
from .ragged import ANYWHERE, on_paths, places
from .sizes import At, Bools, First, Sizes


@dataclass(frozen=True)
class Tree:
    kind: str
    args: tuple[Any, ...] = ()
    parts: tuple[Tree, ...] = field(default=())

    @property
    def counts_paths(self) -> bool:
        """Return whether tokens that follow each other on a path may be apart: such calls have no terms of distance."""
        return any("Tree" in (below.kind, *below.args[:1]) for below in self.walk())

    def walk(self) -> list[Tree]:
        return [self, *(below for part in self.parts for below in part.walk())]


def fits(tree: Tree, s: Sizes) -> bool:
    """Return whether a tree makes a valid pattern for these sizes."""
    if tree.kind == "PerHead" and len(tree.parts) != s.heads:
        return False
    if tree.kind == "LongNet" and tree.args[4] == "partitioned" and len(tree.args[0]) > s.heads:
        return False
    if tree.kind == "within" and (
        (tree.args[0] != "KeyPadding" and not s.square)
        or any(below.kind in KINDS and below.kind not in ANYWHERE for below in tree.walk())
    ):
        return False
    kind = KINDS.get(tree.kind)
    return (kind is None or kind.fits(s, *tree.args)) and all(fits(part, s) for part in tree.parts)


def source(tree: Tree, s: Sizes) -> str:
    """Return the Python that makes the pattern."""
    parts = [source(part, s) for part in tree.parts]
    if tree.kind in ("&", "|"):
        return "(" + f" {tree.kind} ".join(parts) + ")"
    if tree.kind == "~":
        return f"~{parts[0]}"
    if tree.kind == "PerHead":
        return f"rw.PerHead([{', '.join(parts)}])"
    if tree.kind == "LongNet":
        return f"rw.LongNet({longnet_arguments(tree)})"
    if tree.kind == "within":
        bounds, *args = tree.args
        return f"({parts[0]}).within({KINDS[bounds].source(s, *args)})"
    return KINDS[tree.kind].source(s, *tree.args)


def made(tree: Tree, s: Sizes) -> Pattern:
    """Return the pattern."""
    pattern: Pattern = eval(source(tree, s), {"torch": torch, "rw": rw})
    return pattern


def longnet_arguments(tree: Tree) -> str:
    segments, rates, causal, offset, heads = tree.args
    return f"segments={list(segments)}, rates={list(rates)}, causal={causal}, offset={offset!r}, heads={heads!r}"


def counts(tree: Tree, s: Sizes, first: First | None = None) -> NDArray[np.int64]:
    """Return how often each query attends each key, (branches, B, Hq, nq, nk), with several branches for a LongNet only.

    Where batch elements have first positions of their own, of the keys from there on.
    """
    if first is not None:
        n = s.nk - max(first.k)
        rows = [
            [_allowed(tree, At(s, b, h, np.arange(i, i + s.nq)[:, None], np.arange(j, j + n)[None])) for h in range(s.heads)]
            for b, (i, j) in enumerate(zip(first.q, first.k, strict=True))
        ]  # fmt: skip
        return np.array(rows, np.int64)[None]
    q, k = np.arange(s.q_offset, s.stop)[:, None], np.arange(s.nk)[None]
    if tree.kind == "LongNet":
        return _mixture(tree, s, q, k)
    found = np.zeros((1, s.batch, s.heads, s.nq, s.nk), np.int64)
    per_batch, per_head = _depends(tree)
    for b in range(s.batch if per_batch else 1):
        for h in range(s.heads if per_head else 1):
            where = slice(b, b + 1) if per_batch else slice(None), slice(h, h + 1) if per_head else slice(None)
            found[(0, *where)] = _allowed(tree, At(s, b, h, q, k))
    return found


def _depends(tree: Tree) -> tuple[bool, bool]:
    varied = any(
        below.kind
        in (
            "KeyPadding",
            "ids",
            "Tree",
            "known",
            "marks",
            "within",
            "PerHead",
            "function",
            "BlockTable",
            "BlockTable of indices",
            "Selected",
            "random_blocks",
            "from_block_mask",
        )
        for below in tree.walk()
    )
    return varied, varied


def _allowed(tree: Tree, at: At) -> Bools:
    if tree.kind == "~":
        return ~_allowed(tree.parts[0], at)
    if tree.kind == "PerHead":
        return _allowed(tree.parts[at.h], at)
    if tree.kind in ("&", "|"):
        join = np.logical_and if tree.kind == "&" else np.logical_or
        result = _allowed(tree.parts[0], at)
        for part in tree.parts[1:]:
            result = join(result, _allowed(part, at))
        return result
    if tree.kind == "within" and tree.args[0] == "Tree":
        inside, place = on_paths(at, *tree.args[1:])
        return inside & _allowed(tree.parts[0], At(at.s, at.b, at.h, place[at.q], place[at.k]))
    if tree.kind == "within":
        found = np.zeros((at.q.size, at.k.size), np.bool_)
        for begin, end in places(at, *tree.args):
            inside = (at.q >= begin) & (at.q < end) & (at.k >= begin) & (at.k < end)
            found |= inside & _allowed(tree.parts[0], At(at.s, at.b, at.h, at.q - begin, at.k - begin))
        return found
    allowed = KINDS[tree.kind].allows(at, *tree.args)
    return np.broadcast_to(np.asarray(allowed, np.bool_), (at.q.size, at.k.size))


def _mixture(tree: Tree, s: Sizes, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.int64]:
    segments, rates, causal, offset, heads = tree.args
    found = np.zeros((len(rates), s.batch, s.heads, s.nq, s.nk), np.int64)
    # the branch of each head, if heads have separate ones: consecutive groups, the first ones one head larger if needed
    sizes = [s.heads // len(rates) + (i < s.heads % len(rates)) for i in range(len(rates))]
    owner = [branch for branch, size in enumerate(sizes) for _ in range(size)]
    for branch, (segment, rate) in enumerate(zip(segments, rates, strict=True)):
        for h in range(s.heads):
            if heads == "partitioned" and owner[h] != branch:
                continue
            residue = {"interleaved": h, "grouped": h * rate // s.heads}.get(offset, offset) % rate
            kept = (q % rate == residue) & (k % rate == residue) & (q // segment == k // segment)
            found[branch, :, h] = kept & ((k <= q) | (not causal))
    return found


#: kinds that may be computed in strided views
RESIDUES = ["Strided", "Dilated", "dilated_blocks", "Neighborhood", "natten_1d"]


def draw(r: Random, s: Sizes, depth: int = 3) -> Tree:
    """Draw a relation."""
    choice = r.random()
    if choice < 0.1:
        return _draw_within(r, s, depth)
    if depth and choice < 0.55:
        kind = r.choice(["&", "|", "|", "~"])
        parts = 1 if kind == "~" else r.choice([2, 2, 3])
        return Tree(kind, (), tuple(draw(r, s, depth - 1) for _ in range(parts)))
    if depth and choice < 0.6:
        different = [draw(r, s, depth - 2 if depth > 1 else 0) for _ in range(min(s.heads, r.randint(1, 3)))]
        return Tree("PerHead", (), tuple(r.choice(different) for _ in range(s.heads)))
    while True:
        kind = r.choice(RESIDUES if r.random() < 0.15 else list(KINDS))
        tree = Tree(kind, KINDS[kind].draw(r, s))
        if fits(tree, s):
            return tree


def _draw_within(r: Random, s: Sizes, depth: int) -> Tree:
    """Draw a relation that is counted within bounds."""

    def inner(depth: int) -> Tree:
        if depth and r.random() < 0.5:
            kind = r.choice(["&", "|", "~"])
            return Tree(kind, (), tuple(inner(depth - 1) for _ in range(1 if kind == "~" else 2)))
        kind = r.choice(ANYWHERE)
        return Tree(kind, KINDS[kind].draw(r, s))

    bounds = r.choice(["KeyPadding", "ids", "Tree"] if s.square else ["KeyPadding"])
    args = KINDS[bounds].draw(r, s)
    args = (args[0], False, args[2]) if bounds == "ids" else args
    return Tree("within", (bounds, *args), (inner(min(depth, 2)),))


def draw_mixture(r: Random, s: Sizes) -> Tree:
    """Draw a LongNet."""
    count = r.randint(1, 3)
    rates = tuple(r.choice([1, 2, 3, 4, 8]) for _ in range(count))
    segments = tuple(rate * r.choice([1, 2, 5, 16, 50]) for rate in rates)
    heads = r.choice(["shared", "shared", "partitioned"]) if count <= s.heads else "shared"
    return Tree("LongNet", (segments, rates, r.random() < 0.5, r.choice(["interleaved", "grouped", 0, 1, 5]), heads))
