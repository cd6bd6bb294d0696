"""Split a pattern into branches: strided views, each with a relation, with results that are merged.

A relation that is sparse by residue (``Dilated``, ``Strided``) makes every tile partial in token order, but is a dense
window among the positions congruent to one offset. So it is computed in strided views, one for each offset, where that
takes fewer tiles. A union ``A | B`` with such a B is split into A and ``B & ~A``, disjoint and merged by their
log-sum-exp. ``LongNet`` is a list of such branches by definition, which may overlap.

A row's bits do not depend on the sizes of a call. The pattern alone decides whether a union is split, and its parts are
merged in their order. A relation has the same bits in views and in token order (see ``Spacing``), so sizes may decide
between them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ..cache import PROGRAMS
from ..errors import PatternError
from ..patterns import And, Causal, Full, Or, Pattern
from ..patterns.dilated import LongNet, StridedView
from ..patterns.lists import Lists, lists_of
from ..patterns.shifted import Shifted
from ..patterns.view import in_view
from ..patterns.within import Within
from .block_plan import BlockPlan, Extent
from .cached_plans import plan_cache
from .tile_size import default_tile_size, tile_size_of

# Cost of starting another branch, and of merging one of its row tiles, in computed tiles of 128 x 128.
_BRANCH_COST = 16
_MERGE_COST = 0.25


# Length at which a union is judged. It depends on the pattern alone, so that the length of a call changes no bits.
_JUDGED = 2**14


class Spacing(NamedTuple):
    """Places of a view's keys in the whole, for a relation by residue: key n is token ``first + step * n``.

    The kernel cuts sums over the keys of a view at the same tokens as sums over the whole, so both have the same bits.

    Attributes:
        first: The first token, modulo ``side``.
        step: Distance between keys in tokens; 1 for the relation in token order.
        side: Tokens of a key tile of the whole.
    """

    first: int
    step: int
    side: int


@dataclass(frozen=True)
class Branch:
    """One relation over a strided view of some heads.

    Attributes:
        pattern: The relation, on positions of the view.
        heads: (start, stop, step) over query heads.
        rate: Distance in tokens between neighbours of the view.
        q_first: The first query of the view, as an index into q.
        k_first: The first key of the view, as an index into k.
        nq: Number of queries in the view.
        nk: Number of keys in the view.
        q_offset: Position of the view's first query, in positions of the view.
        batch: Number of batch elements.
        tile_size: (q_tile, kv_tile) that its plan is given; None for the default of length and pattern.
        spacing: Places of its keys, for a relation by residue; None for others, and for the branches of a LongNet.
        cached_plan: Its plan on the CPU, if a program holds it.
    """

    pattern: Pattern
    heads: tuple[int, int, int]
    rate: int
    q_first: int
    k_first: int
    nq: int
    nk: int
    q_offset: int
    batch: int
    tile_size: tuple[int, int] | None = field(default=None, kw_only=True)
    spacing: Spacing | None = field(default=None, kw_only=True)
    cached_plan: BlockPlan | None = field(default=None, compare=False, repr=False, kw_only=True)

    @staticmethod
    def whole(pattern: Pattern, nq: int, nk: int, *, heads: int, batch: int = 1, q_offset: int = 0) -> Branch:
        """Return the branch of the whole call: all heads, in token order."""
        spacing = Spacing(0, 1, tile_size_of(None, pattern, nq, nk)[1]) if pattern.residue_rate > 1 else None
        return Branch(pattern, (0, heads, 1), 1, 0, 0, nq, nk, q_offset, batch, spacing=spacing)

    @functools.cached_property
    def lists(self) -> Lists | None:
        """The lists of keys in the relation, and the pattern that filters them; None if it is another relation."""
        return lists_of(self.pattern)

    @property
    def head_count(self) -> int:
        """Number of query heads of the branch."""
        return len(range(*self.heads))

    @property
    def dense_kind(self) -> str:
        """``"full"`` or ``"causal"`` (top-left) if a dense kernel can compute this relation, else ``"sparse"``."""
        if isinstance(self.pattern, Full):
            return "full"
        return "causal" if isinstance(self.pattern, Causal) and self.q_offset == 0 else "sparse"

    @property
    def tile(self) -> tuple[int, int]:
        """The tile size of its plan, (q_tile, kv_tile)."""
        return tile_size_of(self.tile_size, self.pattern, self.nq, self.nk)

    def pairs(self) -> int:
        """Count the allowed pairs over batch and heads, by a formula if there is one, else from the plan."""
        if self.dense_kind == "sparse":
            counted = self.pattern._allowed_pairs(self.nq, self.nk)
            return self.plan().pairs() if counted is None else counted * self.batch * self.head_count
        square = min(self.nq, self.nk)
        causal = square * (square + 1) // 2 + (self.nq - square) * self.nk
        return (causal if self.dense_kind == "causal" else self.nq * self.nk) * self.batch * self.head_count

    def plan_by_query(self, group: int) -> BlockPlan:
        """Return the plan of lists that groups of query heads share, in tiles of one query; on a CPU, cached."""
        assert self.lists is not None
        tile = 1, self.lists.tile
        extent = Extent(self.nq, self.nk, self.head_count, self.batch, tile, self.q_offset, "cpu")
        return plan_cache._by_query(self.pattern, self.lists, extent, group)

    def plan(self, device: str | torch.device = "cpu", tile: int | tuple[int, int] | None = None) -> BlockPlan:
        """Return the plan of the branch, cached."""
        if self.cached_plan is not None and tile is None and str(device) == "cpu":
            return self.cached_plan
        return plan_cache.get(
            self.pattern,
            self.nq,
            self.nk,
            heads=self.head_count,
            batch=self.batch,
            q_offset=self.q_offset,
            tile=self.tile if tile is None else tile_size_of(tile, self.pattern, self.nq, self.nk),
            device=device,
        )


# approximate bytes of one branch
_BRANCH_BYTES = 2048


def branches(
    pattern: Pattern, nq: int, nk: int, *, heads: int = 1, batch: int = 1, q_offset: int = 0
) -> tuple[Branch, ...]:
    """Split a pattern into the branches that compute it, cached by value.

    Args:
        pattern: A relation or a LongNet.
        nq: Number of queries.
        nk: Number of keys.
        heads: Number of query heads.
        batch: Number of batch elements.
        q_offset: Position of the first query.
    Returns:
        At least one branch, unless no view of a LongNet contains a token.
    """
    size = Sizes(nq, nk, heads, batch, q_offset)
    return tuple(branch for part in summands(pattern) for branch in _views(part, size))


def summands(pattern: Pattern) -> tuple[Pattern, ...]:
    """Split a pattern into disjoint relations that are computed separately and merged in this order.

    The pattern alone decides, so a row's bits do not depend on the sizes of a call.
    """
    if isinstance(pattern, Or):
        return _of_union(pattern)
    if isinstance(pattern, (And, Shifted, Within)):
        parts = pattern.parts_within()
        for at, part in enumerate(parts):
            found = summands(part)
            if len(found) > 1:
                return tuple(pattern.remade((*parts[:at], each, *parts[at + 1 :])) for each in found)
    return (pattern,)


def _of_union(union: Or) -> tuple[Pattern, ...]:
    if union.tables and (split := _of_lists(union)):
        return split
    by_residue = [part for part in union.parts if part.residue_rate > 1]
    # a table or a function may be made for one length, and its tiles cannot be counted at another
    if not by_residue or not union.fixed:
        return (union,)
    key = ("summands", union.spec)
    parts: tuple[Pattern, ...] | None = PROGRAMS.get(key)
    if parts is None:
        rest = [part for part in union.parts if part.residue_rate == 1]
        found = [functools.reduce(operator.or_, rest)] if rest else []
        for at, part in enumerate(by_residue):
            seen = rest + by_residue[:at]
            found.append(part & ~functools.reduce(operator.or_, seen) if seen else part)
        parts = tuple(found) if _pays(union, found) else (union,)
        PROGRAMS.put(key, parts, _BRANCH_BYTES * len(parts))
    return parts


def _of_lists(union: Or) -> tuple[Pattern, ...]:
    """Split a union into its relations and its lists, without the keys of the parts before; empty without lists."""
    seen: list[Pattern] = []
    lists: list[Pattern] = []
    for part in union.parts:
        (seen if lists_of(part) is None else lists).append(part)
    if not lists:
        return ()
    found = [functools.reduce(operator.or_, seen)] if seen else []
    for part in lists:
        found.append(part & ~functools.reduce(operator.or_, seen) if seen else part)
        seen.append(part)
    return tuple(each for part in found for each in summands(part))


def _pays(union: Or, parts: Sequence[Pattern]) -> bool:
    """Return whether a union takes fewer tiles if its parts are computed separately, at a length of ``_JUDGED``."""
    batch, heads = union.extents()
    size = Sizes(_JUDGED, _JUDGED, heads or 1, batch or 1, 0)
    try:
        union.check(size.nq, size.nk, 0)
    except PatternError:
        # it is made for another length
        return False
    return _cost([_views(part, size) for part in parts]) < _cost([[_whole(union, size)]])


def _whole(pattern: Pattern, size: Sizes) -> Branch:
    return Branch.whole(pattern, size.nq, size.nk, heads=size.heads, batch=size.batch, q_offset=size.q_offset)


def _views(pattern: Pattern, size: Sizes) -> tuple[Branch, ...]:
    """Return the branches of a relation, in token order or in views, or those of a LongNet; cached by value."""
    whole, rate = _whole(pattern, size), pattern.residue_rate
    if pattern.combinable and rate == 1:
        return (whole,)
    bounded = _settled(pattern) if pattern.combinable and size.nk > size.q_offset else None
    if bounded is not None:
        # Split as for the earliest queries with the same residues and as many keys in reach. The split is the same for
        # all later queries, so decoding steps share it.
        later = (size.q_offset - bounded) // rate * rate
        if later > 0:
            earlier = _views(pattern, replace(size, nk=size.nk - later, q_offset=size.q_offset - later))
            moved = (replace(b, nk=b.nk + later // b.rate, q_offset=b.q_offset + later // b.rate) for b in earlier)
            return _exact(tuple(moved), whole)
    made_of = pattern.key()
    key = "branches", made_of.value, size
    found: tuple[Branch, ...] | None = PROGRAMS.get(key)
    if found is None:
        if isinstance(pattern, LongNet):
            found = tuple(mixture(pattern, size))
        else:
            found = _exact(_split(pattern, size, whole), whole)
        if not pattern.has_function:
            # they would keep the tensors that it reads
            PROGRAMS.put(key, found, _BRANCH_BYTES * len(found) + made_of.nbytes)
    # the pattern of a cached whole is that of an earlier call: its bounds were equal then, and may have been written
    return (whole,) if pattern.combinable and found[0].rate == 1 else found


def _settled(pattern: Pattern) -> int | None:
    """Return the position from which on a relation depends on distance; None if it reaches back without end."""
    if not pattern.fixed:
        return None
    # imported with the first relation by residue
    from ..relation.rows import settled

    heads = range(pattern.extents()[1] or 1)
    found = [place for h in heads if (place := settled(pattern.select(0, h).zones(None))) is not None]
    return max(found) if len(found) == len(heads) else None


def _exact(views: tuple[Branch, ...], whole: Branch) -> tuple[Branch, ...]:
    """Return the views, or the whole if tiles of a view do not begin at tiles of the whole and would change bits."""
    side = whole.tile[1]
    placed = [
        replace(view, spacing=Spacing(view.k_first % side, view.rate, side)) if view.rate > 1 else whole
        for view in views
    ]
    return tuple(placed) if all(_even(view.nk, view.tile[1], view.rate, side) for view in placed) else (whole,)


def _even(keys: int, tile: int, rate: int, side: int) -> bool:
    """Return whether tiles of a view begin at tiles of the whole, of ``side`` tokens, so that bits are the same."""
    return keys <= tile or tile * rate % side == 0


class LastView(NamedTuple):
    """The strided view of the last key: its first key, its rate, its number of keys, and the keys in a tile."""

    first: int
    rate: int
    keys: int
    tile: int


def view_of_step(keys: int, rate: int, side: int) -> LastView:
    """Return the view in which a decoding step computes a relation by residue; that of rate 1 is the whole.

    Args:
        keys: Number of keys.
        rate: Rate of the relation.
        side: Keys in a tile of the whole.
    """
    first = (keys - 1) % rate
    count = -(-(keys - first) // rate)
    tile = default_tile_size(count)
    return LastView(first, rate, count, tile) if _even(count, tile, rate, side) else LastView(0, 1, keys, side)


def branches_of_step(pattern: Pattern, keys: int, *, heads: int, batch: int) -> tuple[Branch, ...]:
    """Return the branches of a decoding step, one for each summand: a step needs no estimate of what views cost."""
    found = []
    for part in summands(pattern):
        whole = Branch.whole(part, 1, keys, heads=heads, batch=batch, q_offset=keys - 1)
        side = whole.tile[1]
        first, rate, count, _ = view_of_step(keys, part.residue_rate, side)
        inside = in_view(part, rate, first, keys) if rate > 1 and not part.tile_size and _fits(whole) else None
        if inside is None:
            found.append(whole)
            continue
        view = Branch(inside, whole.heads, rate, 0, first, 1, count, count - 1, batch)
        found.append(replace(view, spacing=Spacing(first % side, rate, side)) if _fits(view) else whole)
    return tuple(found)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call, on which branches depend."""

    nq: int
    nk: int
    heads: int
    batch: int
    q_offset: int


def _branch(view: StridedView, pattern: Pattern, size: Sizes) -> Branch | None:
    q_first = (view.offset - size.q_offset) % view.rate
    nq = -(-(size.nq - q_first) // view.rate)
    nk = -(-(size.nk - view.offset) // view.rate)
    if nq < 1 or nk < 1:
        return None
    return Branch(
        pattern=pattern,
        heads=view.heads,
        rate=view.rate,
        q_first=q_first,
        k_first=view.offset,
        nq=nq,
        nk=nk,
        q_offset=(q_first + size.q_offset - view.offset) // view.rate,
        batch=size.batch,
    )


def mixture(pattern: LongNet, size: Sizes) -> list[Branch]:
    """Return the branches of a LongNet, by plain arithmetic that ``torch.compile`` can trace."""
    program = []
    for view, inside in pattern.views(size.heads):
        branch = _branch(view, inside, size)
        if branch is not None:
            program.append(branch)
    return program


def _split(pattern: Pattern, size: Sizes, whole: Branch) -> tuple[Branch, ...]:
    """Return the views of a relation by residue, or the whole if it takes no more time."""
    if not _fits(whole):
        return (whole,)
    rate, cost = pattern.residue_rate, _cost([[whole]])
    offsets = _offsets(rate, size)
    # starting this many views costs more than they can save
    if (len(offsets) - 1) * _BRANCH_COST >= cost:
        return (whole,)
    views: list[Branch] = []
    for offset in offsets:
        inside = in_view(pattern, rate, offset, max(size.nk, size.q_offset + size.nq))
        if inside is None:
            return (whole,)
        branch = _branch(StridedView(whole.heads, rate, offset), inside, size)
        if branch is None:
            continue
        if not _fits(branch):
            return (whole,)
        views.append(branch)
    # no view has both queries and keys if few keys are all before the queries' residues
    return tuple(views) if views and _cost([views]) < cost else (whole,)


def _offsets(rate: int, size: Sizes) -> Sequence[int]:
    """Return the offsets of a rate at which there are both queries and keys; few for a decode step at any rate."""
    first, end = size.q_offset % rate, min(rate, size.nk)
    if size.nq >= rate:
        return range(end)
    wrapped = range(min(max(first + size.nq - rate, 0), end))
    straight = range(min(first, end), min(first + size.nq, end))
    return straight if not wrapped else [*wrapped, *straight]


def _fits(branch: Branch) -> bool:
    """Return whether a pattern fits its branch's lengths; a table's last block may have no token in a view."""
    try:
        branch.pattern.check(branch.nq, branch.nk, branch.q_offset)
    except PatternError:
        return False
    return True


def _cost(parts: Sequence[Sequence[Branch]]) -> float:
    """Model the cost of the branches of some relations in tiles of 128 x 128: computed tiles, and further branches."""
    from .from_pattern import estimate_tiles

    total, rows, count = 0.0, 0.0, 0
    for part in parts:
        # views of one rate differ in length by at most a token, so one estimate serves all of them
        seen: dict[tuple[int, ...], float] = {}
        for branch in part:
            size = branch.rate, branch.nq // 64, branch.nk // 64
            if size not in seen:
                tiles = estimate_tiles(
                    branch.pattern, branch.nq, branch.nk, heads=branch.head_count, q_offset=branch.q_offset
                )
                area = default_tile_size(branch.nq) * default_tile_size(branch.nk) / 128**2
                seen[size] = tiles * area * branch.batch
            total += seen[size]
            rows += branch.nq * branch.head_count * branch.batch / 128
        count += len(part)
    # starting each branch after the first, and merging its rows
    return total + (count - 1) * _BRANCH_COST + (_MERGE_COST * rows if count > 1 else 0.0)
