"""Strips of a few queries, such as those of decoding steps: compiled code paints them key by key."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..native import module
from .arrays import Bool, Int64, Words
from .node import ELEMENT, FAR, And, Frame, Node, Not, Or, Places
from .zones import D, Zones

# Most queries of a strip that is painted, and most pairs of all strips. Classes of tiles plan more queries sooner, and
# more keys in less memory.
_MOST_QUERIES, _MOST_PAIRS = 16, 2**23


class Leaf(NamedTuple):
    """Zones in a tree, and whether they count queries and keys by places of the call."""

    zones: Zones
    by_place: bool


class Tree(NamedTuple):
    """A relation as compiled code takes it: its leaves, and in postfix order ``.``, ``&``, ``|`` and ``~``."""

    leaves: tuple[Leaf, ...]
    text: str

    @property
    def compiled(self) -> list[Any]:
        """The zones of the leaves, checked and copied."""
        return [leaf.zones.compiled for leaf in self.leaves]


def tree_of(node: Node, by_place: bool = False) -> Tree | None:
    """Return a relation as a tree of zones; None if it has other leaves, or if there is no compiled code."""
    if isinstance(node, Zones):
        return None if module() is None else Tree((Leaf(node, by_place),), ".")
    if isinstance(node, Places):
        return tree_of(node.part, True)
    if isinstance(node, Not):
        part = tree_of(node.part, by_place)
        return None if part is None else Tree(part.leaves, part.text + "~")
    if not isinstance(node, (And, Or)):
        return None
    parts = [part for part in (tree_of(each, by_place) for each in node.parts) if part is not None]
    if len(parts) < len(node.parts):
        return None
    sign = "&" if isinstance(node, And) else "|"
    text = parts[0].text + "".join(part.text + sign for part in parts[1:])
    return Tree(tuple(leaf for part in parts for leaf in part.leaves), text)


class Painted(NamedTuple):
    """The painted keys of some strips.

    Attributes:
        place: Key tiles with an allowed pair, ascending: strip ``place // width``, column ``place % width``.
        full: Whether each of them is full.
        masks: Words of the tiles that are not full, (tiles, queries, words).
    """

    place: Int64
    full: Bool
    masks: Words


def painted(node: Node, frame: Frame) -> Painted | None:
    """Paint the strips of a frame; None if they have many pairs, or the relation is no tree of zones."""
    q, k, (_, side) = frame.q, frame.whole, frame.tile
    sizes, strips = q.hi - q.lo, len(q.lo)
    if not frame.width or not strips or (sizes != sizes[0]).any() or sizes[0] > _MOST_QUERIES or side % 16:
        return None
    keys = int(k.hi[0] - k.lo[0])
    tree = tree_of(node) if strips * int(sizes[0]) * keys <= _MOST_PAIRS else None
    native = module()
    if tree is None or native is None:
        return None
    of_q, of_k = (np.empty((strips, len(tree.leaves)), np.int64) for _ in range(2))
    for i, leaf in enumerate(tree.leaves):
        base = q.element * ELEMENT if leaf.zones.each else 0
        of_q[:, i] = q.lo + base - (q.first if leaf.by_place else 0)
        of_k[:, i] = k.lo + base - (k.first if leaf.by_place else 0)
    rows = np.empty((strips, int(sizes[0]), -(-keys // 32)), np.uint32)
    states = np.empty((strips, frame.width), np.uint8)
    native.Zones.rows(tree.compiled, tree.text, of_q, of_k, keys, side, rows, states)
    place = np.flatnonzero(states)
    full = states.reshape(-1)[place] == 1
    return Painted(place, full, _cut(rows, side, frame.width, place[~full]))


def _cut(rows: Words, side: int, width: int, place: Int64) -> Words:
    """Return the words of some tiles, (tiles, queries, words), of rows of bits; a tile has a multiple of 16 keys."""
    strips, queries, words = rows.shape
    halves = np.zeros((strips, queries, width * side // 16), "<u2")
    present = min(2 * words, halves.shape[2])
    halves[:, :, :present] = rows.astype("<u4", copy=False).view("<u2")[:, :, :present]
    strip, col = place // width, place % width
    cut = np.zeros((len(place), queries, -(-side // 32) * 2), "<u2")
    cut[:, :, : side // 16] = halves.reshape(strips, queries, width, -1)[strip, :, col]
    return cut.view("<u4")


class _Reach(NamedTuple):
    """How far back queries attend.

    Attributes:
        first: From this position on, a query attends a key or not by their distance.
        back: Keys further back than this, from ``first`` on, are all attended, or none of them is.
        far: Whether they are attended.
    """

    first: int
    back: int
    far: bool


def settled(node: Node) -> int | None:
    """Return the position from which on queries attend keys at equal distances, all of them within a bounded distance.

    None if they attend keys at any distance back, or if it is unknown.
    """
    found = _reach(node)
    return None if found is None or found.far else found.first + found.back


def _reach(node: Node) -> _Reach | None:
    if isinstance(node, Zones):
        return _of_zones(node)
    if isinstance(node, Not):
        part = _reach(node.part)
        return None if part is None else part._replace(far=not part.far)
    if not isinstance(node, (And, Or)):
        return None
    parts = [part for part in map(_reach, node.parts) if part is not None]
    if len(parts) < len(node.parts):
        return None
    first, back, far = zip(*parts, strict=True)
    return _Reach(max(first), max(back), all(far) if isinstance(node, And) else any(far))


def _of_zones(zones: Zones) -> _Reach | None:
    if zones.each or (zones.residue is not None and zones.residue.axis != D):
        return None
    if zones.groups == 0:
        return _Reach(0, 0, False)
    sides = np.concatenate([zones.q0, zones.q1, zones.k0, zones.k1])
    first = int(sides[np.abs(sides) < FAR].max(initial=0))
    # the last group and its last run have all later queries and keys, or none
    runs = len(zones.k1) if zones.ptr is None else int(zones.ptr[-1] - zones.ptr[-2])
    endless = runs > 0 and bool(zones.q1[-1] >= FAR) and bool(zones.k1[-1] >= FAR)
    back = int(-zones.d0[-1]) if endless else 0
    return _Reach(first, 0, True) if back >= ELEMENT else _Reach(first, max(back, 0), False)
