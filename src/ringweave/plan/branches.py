"""Pattern to branches: strided views with a relation each, whose results merge into the whole.

A relation that is sparse by residue (``Dilated``, ``Strided``) leaves every tile partial in token order, but is a dense
window among the positions congruent to one offset. So ``A | B`` with such a B becomes A in token order and, for every
offset, ``B & ~A`` in the strided view: disjoint, joined by their log-sum-exp. A split is made where it computes fewer
tiles. ``LongNet`` is a list of such branches by definition, and there the branches may overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..cache import PROGRAMS
from ..errors import PatternError
from ..patterns import Causal, Full, LongNet, Or, Pattern, StridedView
from ..patterns.function import store_of
from ..patterns.grids import OnGrid
from .block_plan import BlockPlan
from .cache import plan_cache
from .from_pattern import check_tile, default_tile, estimate_tiles

# Sides of blocks that are worth their own tiles: smaller ones drown in overhead.
_BLOCK_SIDES = (32, 128)
# Tiles of 128 x 128 whose computation costs as much as starting another branch and merging a row tile of it.
_BRANCH_COST = 16
_MERGE_COST = 0.25


@dataclass(frozen=True)
class Branch:
    """One relation over a strided view of some heads.

    Attributes:
        pattern: The relation, in the view's own positions.
        heads: (start, stop, step) over query heads.
        rate: Tokens between neighbours of the view.
        q_first: The first query of the view, as an index into q.
        k_first: The first key of the view, as an index into k.
        nq: Queries in the view.
        nk: Keys in the view.
        q_offset: Position of the view's first query, in the view's own positions.
        batch: Batch elements.
        sides: Of the tiles of its plan, (q_tile, kv_tile), where others are asked for than length and pattern suggest.
        known: Its plan on the CPU, where a program holds it.
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
    sides: tuple[int, int] | None = field(default=None, kw_only=True)
    known: BlockPlan | None = field(default=None, compare=False, repr=False, kw_only=True)

    @staticmethod
    def whole(pattern: Pattern, nq: int, nk: int, *, heads: int, batch: int = 1, q_offset: int = 0) -> Branch:
        """Make the branch that is the whole call: all heads, in token order."""
        return Branch(pattern, (0, heads, 1), 1, 0, 0, nq, nk, q_offset, batch)

    @property
    def head_count(self) -> int:
        """Count the query heads of the branch."""
        return len(range(*self.heads))

    @property
    def structure(self) -> str:
        """Say ``"full"`` or ``"causal"`` (top-left) where a dense kernel computes this relation, else ``"sparse"``."""
        if self.pattern == Full():
            return "full"
        return "causal" if self.pattern == Causal() and self.q_offset == 0 else "sparse"

    @property
    def tile(self) -> tuple[int, int]:
        """Give the sides (q_tile, kv_tile) of its plan."""
        return tile_sides(self.sides, self.pattern, self.nq, self.nk)

    def pairs(self) -> int:
        """Allowed pairs, over batch and heads; without a plan where a formula has them."""
        if self.structure == "sparse":
            counted = self.pattern.allowed_pairs(self.nq, self.nk) if isinstance(self.pattern, OnGrid) else None
            return self.plan().pairs() if counted is None else counted * self.batch * self.head_count
        square = min(self.nq, self.nk)
        causal = square * (square + 1) // 2 + (self.nq - square) * self.nk
        return (causal if self.structure == "causal" else self.nq * self.nk) * self.batch * self.head_count

    def plan(self, device: str | torch.device = "cpu", tile: int | tuple[int, int] | None = None) -> BlockPlan:
        """Plan the branch, cached."""
        if self.known is not None and tile is None and str(device) == "cpu":
            return self.known
        return plan_cache.get(
            self.pattern,
            self.nq,
            self.nk,
            heads=self.head_count,
            batch=self.batch,
            q_offset=self.q_offset,
            tile=self.tile if tile is None else tile_sides(tile, self.pattern, self.nq, self.nk),
            device=device,
        )


def tile_sides(tile: int | tuple[int, int] | None, pattern: Pattern, nq: int, nk: int) -> tuple[int, int]:
    """(q_tile, kv_tile) from a side, both sides or None; then the side of the pattern's own blocks, where it suits."""
    if tile is None:
        side = pattern.block_side
        if side is not None and _BLOCK_SIDES[0] <= side <= _BLOCK_SIDES[1] and side % 16 == 0:
            return side, side
        return default_tile(nq), default_tile(nk)
    return check_tile(tile)


# about, of one branch
_BRANCH_BYTES = 2048


def branches(
    pattern: Pattern, nq: int, nk: int, *, heads: int = 1, batch: int = 1, q_offset: int = 0
) -> tuple[Branch, ...]:
    """Split a pattern into the branches that compute it, cached by value.

    Args:
        pattern: A relation or a LongNet.
        nq: Queries.
        nk: Keys.
        heads: Query heads.
        batch: Batch elements.
        q_offset: Position of the first query.
    Returns:
        At least one branch, unless no view of a LongNet holds a token.
    """
    parts = pattern.parts if isinstance(pattern, Or) else (pattern,)
    whole = Branch.whole(pattern, nq, nk, heads=heads, batch=batch, q_offset=q_offset)
    if pattern.combinable and all(part.residue_rate == 1 for part in parts):
        return (whole,)
    look = pattern.lookback()
    if look is not None and not look.far and nk > q_offset:
        # split as the first queries are that stand alike to the offsets and have as much behind them
        period = math.lcm(*(part.residue_rate for part in parts))
        later = (q_offset - look.first - look.back) // period * period
        if later > 0:
            earlier = branches(pattern, nq, nk - later, heads=heads, batch=batch, q_offset=q_offset - later)
            return tuple(replace(b, nk=b.nk + later // b.rate, q_offset=b.q_offset + later // b.rate) for b in earlier)
    value, tables, _ = pattern.key()
    key, programs = ("branches", value, nq, nk, heads, batch, q_offset), store_of(pattern.spec, PROGRAMS)
    program: tuple[Branch, ...] | None = programs.get(key)
    if program is None:
        size = Sizes(nq, nk, heads, batch, q_offset)
        program = tuple(mixture(pattern, size)) if isinstance(pattern, LongNet) else _split(pattern, size, whole)
        programs.put(key, program, _BRANCH_BYTES * len(program), tables)
    return program


@dataclass(frozen=True, eq=False)
class Sizes:
    """The sizes of a call that branches depend on."""

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
    """List the branches of a LongNet: plain arithmetic, which ``torch.compile`` can trace."""
    program = []
    for view, inside in pattern.views(size.heads):
        branch = _branch(view, inside, size)
        if branch is not None:
            program.append(branch)
    return program


def _split(pattern: Pattern, size: Sizes, whole: Branch) -> tuple[Branch, ...]:
    parts = pattern.parts if isinstance(pattern, Or) else (pattern,)
    # as many views as this cost more to start than they can save
    cost = _cost([whole])
    views = sum(len(_offsets(part.residue_rate, size)) for part in parts)
    if (views - len(parts)) * _BRANCH_COST >= cost:
        return (whole,)
    rest = [part for part in parts if part.residue_rate == 1]
    program: list[Branch] = []
    seen: Pattern | None = None
    for part in rest:
        seen = part if seen is None else seen | part
    if seen is not None:
        program.append(replace(whole, pattern=seen))
    for part in parts:
        rate = part.residue_rate
        if rate == 1:
            continue
        new = part if seen is None else part & ~seen
        for offset in _offsets(rate, size):
            inside = new.restride(rate, offset)
            if inside is None:
                return (whole,)
            branch = _branch(StridedView(whole.heads, rate, offset), inside, size)
            if branch is None:
                continue
            if not _fits(branch):
                return (whole,)
            program.append(branch)
        seen = part if seen is None else seen | part
    return tuple(program) if _cost(program) < cost else (whole,)


def _offsets(rate: int, size: Sizes) -> Sequence[int]:
    """List the offsets of a rate at which there are queries and keys; few for a decode step, whatever the rate."""
    first, end = size.q_offset % rate, min(rate, size.nk)
    if size.nq >= rate:
        return range(end)
    wrapped = range(min(max(first + size.nq - rate, 0), end))
    straight = range(min(first, end), min(first + size.nq, end))
    return straight if not wrapped else [*wrapped, *straight]


def _fits(branch: Branch) -> bool:
    """Tell whether a strided pattern is made for its view's lengths: a table's last block may hold no token of it."""
    try:
        branch.pattern.check(branch.nq, branch.nk, branch.q_offset)
    except PatternError:
        return False
    return True


def _cost(program: list[Branch]) -> float:
    """Model cost in tiles of 128 x 128: computed, plus what further branches cost to start and merge."""
    total = 0.0
    seen: dict[tuple[object, ...], float] = {}
    for branch in program:
        # residues of one rate differ by a token at most: one plan stands for all of them
        alike = (branch.pattern.spec, branch.rate, branch.nq // 64, branch.nk // 64)
        if alike not in seen:
            tiles = estimate_tiles(
                branch.pattern, branch.nq, branch.nk, heads=branch.head_count, q_offset=branch.q_offset
            )
            area = default_tile(branch.nq) * default_tile(branch.nk) / 128**2
            seen[alike] = tiles * area * branch.batch
        total += seen[alike]
    rows = sum(branch.nq * branch.head_count * branch.batch for branch in program) / 128
    return total + (len(program) - 1) * _BRANCH_COST + (_MERGE_COST * rows if len(program) > 1 else 0.0)
