"""Plans many ranks in one process: what a step would move and cost, next to other ways to spread attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringweave.errors import ShapeError, message, shown
from ringweave.parallel.planning.choice import choose
from ringweave.parallel.planning.cost import Estimate, Machine
from ringweave.parallel.planning.placement import Placement, block_for
from ringweave.parallel.planning.workload import Widths, Workload, pair_of_heads, patterns_of
from ringweave.patterns import Pattern
from ringweave.patterns.validate import whole
from ringweave.plan import Branch, branches
from ringweave.plan.from_pattern import estimate_tiles

from .other_systems import other_systems

# tiles of one row set beyond which larger ones are counted, where ranks hold whole ones
_MANY = 2**20
_TOO_MANY = 2**24
_MAX_SIDE = 1024


@dataclass(frozen=True)
class Row:
    """What a step costs on one number of ranks.

    Attributes:
        ranks: How many.
        ringweave: The estimate of the placement that was chosen; its name is the placement's.
        other_systems: Those of other systems by name; None where one cannot run.
        placement: The placement that was chosen.
    """

    ranks: int
    ringweave: Estimate
    other_systems: dict[str, Estimate | None]
    placement: Placement

    @property
    def systems(self) -> dict[str, Estimate | None]:
        """Give all of them by name, ringweave first."""
        return {"ringweave": self.ringweave, **self.other_systems}


def simulate(
    patterns: Pattern | Sequence[Pattern],
    tokens: int,
    ranks: Sequence[int],
    *,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    itemsize: int = 2,
    machine: Machine | None = None,
) -> list[Row]:
    """Model what a forward step over a pattern would move and cost on many ranks; nothing is run.

    Bytes, work and stages are counts of the plans that such a step would use; times are modelled.

    Args:
        patterns: One, or those of interleaved layers, which share a placement.
        tokens: Length of the sequence.
        ranks: Numbers of ranks.
        heads: Query heads and key heads.
        head_dim: Channels of a head.
        itemsize: Bytes of a value of q, k and v.
        machine: What a rank is taken to be.
    Returns:
        One row for each number of ranks.
    Raises:
        ShapeError: Query heads that are no multiple of key heads; no ranks, or more than 16 tokens each allow; a number
            that is none.
        PatternError: No pattern, or one that is made for another length or other heads.
    Example:
        >>> from ringweave_lab.simulation.simulate import simulate
        >>> (row,) = simulate(rw.SlidingWindow(4096) & rw.Causal(), 2**20, [256])
        >>> row.ringweave.name, row.ringweave.stages
        ('contiguous', 1)
    """
    relations, heads = patterns_of(patterns), pair_of_heads(heads)
    tokens = whole("tokens", tokens, 1, error=ShapeError)
    if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
        raise ShapeError(message("ranks", shown(ranks), "numbers of ranks", "Pass such as [8, 16]."))
    most = max(tokens // 16, 1)
    ranks = [whole("ranks", number, 1, most, error=ShapeError) for number in ranks]
    if machine is not None and not isinstance(machine, Machine):
        raise ShapeError(message("machine", type(machine).__name__, "a Machine", "Leave it out for the default."))
    calls = [branches(relation, tokens, tokens, heads=heads[0]) for relation in relations]
    workload = Workload(calls, tokens, heads, Widths.of(head_dim, itemsize))
    machine = machine or Machine()
    rows = []
    for number in ranks:
        coarse = [[_coarse(branch, tokens // number) for branch in call] for call in calls]
        seen = replace(workload, calls=coarse)
        block = block_for(tokens, number, max((branch.tile[0] for branch in seen.branches), default=128))
        choice = choose(seen, number, block, machine)
        others = other_systems(seen, number, block, machine)
        rows.append(Row(number, choice.estimate, others, choice.placement))
    return rows


def _coarse(branch: Branch, local: int) -> Branch:
    """Give a nearly dense branch larger tiles: nothing else would differ."""
    side = branch.tile[0]
    tiles = estimate_tiles(branch.pattern, branch.nq, branch.nk)
    # two tiles for each rank, or one where memory would not hold the others
    while tiles > _MANY and side < _MAX_SIDE and (4 if tiles < _TOO_MANY else 2) * side * branch.rate <= local:
        side, tiles = 2 * side, tiles / 4
    return branch if side == branch.tile[0] else replace(branch, sides=(side, side))
