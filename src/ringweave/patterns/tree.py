"""Sequences that share their beginnings, packed as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checks import INTEGERS, LONGEST, integers
from ..errors import PatternError, shown
from ..relation.arrays import Bool, Int64, number_rows
from ..relation.node import ELEMENT, Node, Or
from ..relation.placed import Documents
from ..relation.shapes import MOST_ZONES
from ..relation.transforms import placed
from ..relation.zones import Zones
from .base import Pattern
from .batch_axis import Packing, rows_of
from .declared import declare

# most nodes that a repr lists
_LISTED = 8


class _Nodes(NamedTuple):
    """The nodes of all batch elements, one element after the other; the last entry stands for the parent of roots.

    Attributes:
        parent: Number of each node's parent.
        length: Tokens of each node.
        start: Place of its first token in its batch element.
        before: Tokens before it on its path.
    """

    parent: Int64
    length: Int64
    start: Int64
    before: Int64


class _Branches(NamedTuple):
    """Runs of tokens that follow each other on a path too, with positions on the axis of all batch elements.

    A node that begins where its parent ends continues its parent's branch, so a chain of nodes is one branch.

    Attributes:
        start: First token of each branch.
        stop: End of its tokens.
        origin: Position of the token that would be the first one of its path.
        parent: Branch that it leaves; -1 for roots.
        cut: End of the tokens of its parent that are on its path.
    """

    start: Int64
    stop: Int64
    origin: Int64
    parent: Int64
    cut: Int64

    def levels(self) -> Iterator[tuple[Int64, Int64, Int64]]:
        """Iterate over branches, the branch that many levels above each on its path, and the end of its keys."""
        branch = above = np.arange(len(self.start))
        stop = self.stop
        while True:
            yield branch, above, stop
            some = self.parent[above] >= 0
            if not some.any():
                return
            branch, above = branch[some], above[some]
            above, stop = self.parent[above], self.cut[above]


class _Read(NamedTuple):
    """The contents of the tensors: the two of them, (B, nodes), and the nodes."""

    parents: Int64
    lengths: Int64
    nodes: _Nodes


@declare(
    "Tree([-1, 0, 0, 2, 2], [320, 224, 160, 192, 128])",
    "By position",
    hostile="Tree([-1, *(i // 2 for i in range(n - 1))], [1] * n)",
)
class Tree(Packing):
    """Sequences that share their beginnings: a query attends the tokens before it on its path, and itself.

    The tokens of node 0 come first, then those of node 1, and so on. A token attends every token of the ancestors of
    its node, and in its node the tokens up to its own. So rollouts share a prompt, beams share their past, and a
    speculative tree is verified in one call. A node may have no tokens.

    ``pattern.within(tree)`` counts a pattern along the paths: the window of a rollout's first token is the end of the
    prompt. A rotary embedding takes ``positions()``. Score terms that count distances are refused with a tree.
    :func:`ringweave.trees.pack` packs a prompt and its completions.

    The arguments are copied. Tensors are read only when a plan is made, so the pattern can be built inside
    ``torch.compile``. Planning time grows with the pairs of a branch of the tree and a branch above it; a child that
    follows its parent's last token continues the parent's branch, so lay long chains out depth first.

    Args:
        parents: The parent of each node, a node before it, or -1 for a root: (nodes,), or a tensor (B, nodes) if batch
            elements have trees of their own.
        lengths: Number of tokens of each node, of the same shape; their sum is the sequence length. A batch element
            with fewer nodes is filled with roots of length 0.
    Raises:
        PatternError: A parent does not come before its child, a length is below 0, or the shapes differ; at use, the
            sum is not the number of keys; checked at use for tensors.
    Example:
        >>> rw.Tree([-1, 0, 0], [2, 1, 2]).to_dense(5)[0, 0].int()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [1, 1, 0, 1, 0],
                [1, 1, 0, 1, 1]], dtype=torch.int32)
        >>> rw.SlidingWindow(1, 0).within(rw.Tree([-1, 0, 0], [2, 1, 2])).to_dense(5)[0, 0].int()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [0, 1, 1, 0, 0],
                [0, 1, 0, 1, 0],
                [0, 0, 0, 1, 1]], dtype=torch.int32)
    """

    private: ClassVar[bool] = True

    def __init__(self, parents: Sequence[int] | Tensor, lengths: Sequence[int] | Tensor):
        self.parents, self.lengths = _numbers("parents", parents), _numbers("lengths", lengths)
        if self.parents.shape != self.lengths.shape:
            got = f"{_shape(self.parents)} parents and {_shape(self.lengths)} lengths"
            raise PatternError("parents, lengths", got, "one of each for every node", "Pass both for all nodes.")
        if not isinstance(parents, Tensor) and not isinstance(lengths, Tensor) and not torch.compiler.is_compiling():
            _check(rows_of(self.parents, 2), rows_of(self.lengths, 2))
        self.__post_init__()

    def _text(self) -> str:
        return "Tree(_, _)"

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return self.parents, self.lengths

    def __repr__(self) -> str:
        if self.parents.ndim == 2 or self.parents.shape[0] > _LISTED or not self.readable():
            return f"Tree(<{_shape(self.parents)} nodes>)"
        return f"Tree({self.parents.tolist()}, {self.lengths.tolist()})"

    def positions(self) -> Tensor:
        """Return the position of each token on its path, as rotary embeddings take it: (N,), or (B, N); it is read.

        Example:
            >>> rw.Tree([-1, 0, 0], [2, 1, 2]).positions()
            tensor([0, 1, 2, 2, 3])
        """
        read: _Read = self._now
        length, start, before = read.nodes.length[:-1], read.nodes.start[:-1], read.nodes.before[:-1]
        place = np.tile(np.arange(read.lengths[0].sum()), len(read.lengths))
        positions = torch.from_numpy(place + np.repeat(before - start, length)).to(self.lengths.device)
        return positions.view(len(read.lengths), -1) if self.lengths.ndim == 2 else positions

    def paths(self) -> list[Tensor] | list[list[Tensor]]:
        """Return the tokens of each path from a root to a leaf, in order of the leaves; a list for each batch element.

        A leaf without tokens has the path of its parent, unless that is empty too.

        Example:
            >>> rw.Tree([-1, 0, 0], [2, 1, 2]).paths()
            [tensor([0, 1, 2]), tensor([0, 1, 3, 4])]
        """
        read: _Read = self._now
        rows = [self._paths_of(read, b) for b in range(len(read.lengths))]
        return rows if self.lengths.ndim == 2 else rows[0]

    def _paths_of(self, read: _Read, b: int) -> list[Tensor]:
        parents, lengths = read.parents[b].tolist(), read.lengths[b].tolist()
        start = np.append(0, np.cumsum(lengths)).tolist()
        found = []
        for leaf in np.flatnonzero(_leaves(read.nodes)[b * len(parents) : (b + 1) * len(parents)]).tolist():
            runs, node = [], leaf
            while node >= 0:
                runs.append(torch.arange(start[node], start[node + 1], device=self.lengths.device))
                node = parents[node]
            found.append(torch.cat(runs[::-1]))
        return found

    # ---- the pattern -------------------------------------------------------------------------------------------------

    def extents(self) -> tuple[int | None, int | None]:
        return (len(self.parents) if self.parents.ndim == 2 and len(self.parents) > 1 else None), None

    def select(self, b: int, h: int) -> Pattern:
        if self.extents()[0] is None:
            return self
        return self._with(parents=self.parents[b], lengths=self.lengths[b], _made=None)

    def _make(self) -> _Read:
        parents, lengths = rows_of(self.parents, 2), rows_of(self.lengths, 2)
        _check(parents, lengths)
        return _Read(parents, lengths, _nodes(parents, lengths))

    def bound_ids(self) -> tuple[Int64, ...]:
        read: _Read = self._now
        return (number_rows(np.concatenate([read.parents, read.lengths], 1)),)

    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        read: _Read = self._now
        tokens = int(read.lengths[0].sum())
        if tokens == nk and q_offset + nq <= tokens:
            return
        raise PatternError(
            "Tree",
            f"nodes of {tokens} tokens in all for {nk} keys and queries up to position {q_offset + nq}",
            "lengths that sum to the number of keys, and every query inside",
            "Add the padding as a last root, or correct the lengths.",
        )

    def zones(self, n: int | None) -> Node:
        branches = self._branches()
        levels = list(branches.levels())
        branch, above, stop = (np.concatenate(side) for side in zip(*levels, strict=True))
        order = np.lexsort((branches.start[above], branch))
        # ancestors come before a node, so one band of distances serves them and the node itself
        return Zones(
            (branches.start, branches.stop),
            (branches.start[above][order], stop[order]),
            (-ELEMENT, 1),
            ptr=None if len(levels) == 1 else np.append(0, np.cumsum(np.bincount(branch))),
            each=len(self._now.lengths) > 1,
        )

    def inside(self, node: Node) -> Node:
        branches = self._branches()
        parts: list[Node] = []
        for branch, above, stop in branches.levels():
            zones = Zones(
                (branches.start[branch], branches.stop[branch]),
                (branches.start[above], stop),
                (-ELEMENT, ELEMENT if parts else 1),
                each=len(self._now.lengths) > 1,
            )
            parts.append(placed(node, Documents(zones, branches.origin[branch], branches.origin[above])))
        return parts[0] if len(parts) == 1 else Or(parts)

    def sizes(self) -> tuple[Int64, Int64]:
        nodes: _Nodes = self._now.nodes
        tokens = (nodes.before + nodes.length)[:-1][_leaves(nodes)]
        return tokens, tokens

    def _branches(self) -> _Branches:
        read: _Read = self._now
        branches = _branches(read.nodes, len(read.lengths))
        pairs = int(_summed(branches.parent, np.ones(len(branches.parent), np.int64)).sum()) + len(branches.parent)
        if pairs > MOST_ZONES:
            got = f"{pairs} pairs of a branch and a branch above it"
            remedy = "Lay the nodes out depth first: a child that follows its parent's tokens continues its branch."
            raise PatternError("Tree", got, f"at most {MOST_ZONES}", remedy)
        return branches


def _numbers(name: str, value: object) -> Tensor:
    """Copy whole numbers (nodes,), or of a tensor (B, nodes), which is not read."""
    if not isinstance(value, Tensor):
        value = torch.tensor(integers(name, value), dtype=torch.int64, device="cpu")
    fits = value.ndim in (1, 2) and value.dtype in INTEGERS and value.layout == torch.strided
    if not fits or not value.numel():
        wanted = "integers (nodes,) or (B, nodes), of one node or more"
        raise PatternError(name, shown(value), wanted, "Pass one number for each node.")
    return value.detach().to(torch.int64, copy=True)


def _shape(numbers: Tensor) -> str:
    return " x ".join(map(str, numbers.shape))


def _check(parents: Int64, lengths: Int64) -> None:
    """Raise PatternError if parents (B, nodes) are not before their children, or lengths are no numbers of tokens."""

    def at(wrong: Bool) -> tuple[tuple[int, int], str]:
        b, node = divmod(int(wrong.argmax()), wrong.shape[1])
        return (b, node), f"of node {node}" + (f" in batch element {b}" if len(wrong) > 1 else "")

    wrong = (parents < -1) | (parents >= np.arange(parents.shape[1]))
    if wrong.any():
        place, where = at(wrong)
        wanted = "a node before its child, or -1 for a root"
        raise PatternError("parents", f"{parents[place]}, the parent {where}", wanted, "List parents before children.")
    wrong = (lengths < 0) | (lengths > LONGEST)
    if wrong.any():
        place, where = at(wrong)
        raise PatternError("lengths", f"{lengths[place]}, the length {where}", f"0 to {LONGEST}", "Correct the length.")
    tokens = lengths.sum(1)
    if (tokens != tokens[0]).any():
        b = int((tokens != tokens[0]).argmax())
        got = f"{tokens[0]} tokens in batch element 0 and {tokens[b]} in batch element {b}"
        raise PatternError("lengths", got, "one number of tokens", "Add the padding of a row as a last root.")
    if tokens[0] > LONGEST:
        raise PatternError("lengths", f"{tokens[0]} tokens", f"at most {LONGEST}", "Use several calls.")


def _summed(parent: Int64, value: Int64) -> Int64:
    """Return the sum of a value over all ancestors of each node; roots have the parent -1."""
    up = np.append(parent, -1)
    total: Int64 = np.append(value, 0)[up]
    # each pass doubles the number of ancestors that are added up
    while (up >= 0).any():
        total, up = total + total[up], up[up]
    found: Int64 = total[:-1]
    return found


def _nodes(parents: Int64, lengths: Int64) -> _Nodes:
    rows, count = parents.shape
    parent = np.where(parents < 0, -1, parents + np.arange(rows)[:, None] * count).reshape(-1)
    start, length = (np.cumsum(lengths, 1) - lengths).reshape(-1), lengths.reshape(-1)
    each = parent, length, start, _summed(parent, length)
    return _Nodes(*(np.append(side, -1 if side is parent else 0) for side in each))


def _leaves(nodes: _Nodes) -> Bool:
    """Return which nodes are the ends of a path with tokens."""
    leaf = nodes.length + nodes.before > 0
    leaf[nodes.parent] = False
    found: Bool = leaf[:-1]
    return found


def _branches(nodes: _Nodes, rows: int) -> _Branches:
    """Join nodes with tokens to branches."""
    # the nearest node with tokens, from each node upwards
    near = np.where(nodes.length > 0, np.arange(len(nodes.length)), nodes.parent)
    near[-1] = -1
    while (nodes.length[near] == 0).any():
        before, near = near, near[near]
        if (before == near).all():
            break
    used = np.flatnonzero(nodes.length)
    number = np.full(len(nodes.length), -1)
    number[used] = np.arange(len(used))
    parent = number[near[nodes.parent[used]]]
    base = used // max((len(nodes.length) - 1) // rows, 1) * ELEMENT
    start = nodes.start[used] + base
    stop = start + nodes.length[used]
    # a parent that is the node before it ends where it begins
    new = (parent < 0) | (parent != np.arange(len(used)) - 1)
    first = np.flatnonzero(new)
    branch = np.cumsum(new) - 1
    left = parent[first]
    return _Branches(
        start[first],
        stop[np.append(first[1:], len(used)) - 1] if len(used) else stop,
        start[first] - nodes.before[used][first],
        np.where(left < 0, -1, branch[left]) if len(used) else left,
        np.where(left < 0, 0, stop[left]) if len(used) else left,
    )
