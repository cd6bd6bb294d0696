"""Model a step of attention on many ranks in one process, for ringweave and other systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringweave.checks import whole
from ringweave.errors import ShapeError, shown
from ringweave.parallel.planning.choice import choose_placement
from ringweave.parallel.planning.cost import Estimate, Machine
from ringweave.parallel.planning.placement import Placement, block_for
from ringweave.parallel.planning.workload import Widths, Workload, pair_of_heads, patterns_of
from ringweave.patterns import Pattern
from ringweave.plan import Branch, branches
from ringweave.plan.from_pattern import estimate_tiles

from .other_systems import other_systems

_MANY = 2**20  # tiles of a branch beyond which larger tiles are counted
_TOO_MANY = 2**24  # tiles of a branch beyond which a rank may hold a single larger tile
_MAX_SIDE = 1024  # maximum side of the larger tiles


@dataclass(frozen=True)
class Row:
    """The modelled cost of a step on one number of ranks.

    Attributes:
        ranks: Number of ranks.
        ringweave: Estimate of the chosen placement; its name is the placement's.
        other_systems: Estimates of other systems by name; None for a system that cannot run.
        placement: The chosen placement.
    """

    ranks: int
    ringweave: Estimate
    other_systems: dict[str, Estimate | None]
    placement: Placement

    @property
    def systems(self) -> dict[str, Estimate | None]:
        """Estimates of all systems by name, ringweave first."""
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
    """Model the bytes and the time of a forward step over a pattern on many ranks, without running it.

    Bytes, work and stages are counted from the plans of the step; times are modelled.

    Args:
        patterns: A pattern, or the patterns of interleaved layers, which share a placement.
        tokens: Sequence length.
        ranks: Numbers of ranks.
        heads: Query heads and key heads.
        head_dim: Channels of a head.
        itemsize: Bytes of a value of q, k and v.
        machine: Model of a rank; the default is a GPU.
    Returns:
        One row for each number of ranks.
    Raises:
        ShapeError: The query heads are not a multiple of the key heads, ``ranks`` is empty, a rank would hold fewer
            than 16 tokens, or a value is not a whole number.
        PatternError: A pattern is invalid, or made for another length or other heads.
    Example:
        >>> from ringweave_lab.simulation.simulate import simulate
        >>> (row,) = simulate(rw.SlidingWindow(4096) & rw.Causal(), 2**20, [256])
        >>> row.ringweave.name, row.ringweave.stages
        ('contiguous', 1)
    """
    relations, heads = patterns_of(patterns), pair_of_heads(heads)
    tokens = whole("tokens", tokens, 1, error=ShapeError)
    if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
        raise ShapeError("ranks", shown(ranks), "numbers of ranks", "Pass such as [8, 16].")
    most = max(tokens // 16, 1)
    ranks = [whole("ranks", number, 1, most, error=ShapeError) for number in ranks]
    if machine is not None and not isinstance(machine, Machine):
        raise ShapeError("machine", type(machine).__name__, "a Machine", "Leave it out for the default.")
    calls = [branches(relation, tokens, tokens, heads=heads[0]) for relation in relations]
    workload = Workload(calls, tokens, heads, Widths.of(head_dim, itemsize))
    machine = machine or Machine()
    rows = []
    for number in ranks:
        coarse = [[_coarse(branch, tokens // number) for branch in call] for call in calls]
        seen = replace(workload, calls=coarse)
        block = block_for(tokens, number, max((branch.tile[0] for branch in seen.branches), default=128))
        choice = choose_placement(seen, number, block, machine)
        others = other_systems(seen, number, block, machine)
        rows.append(Row(number, choice.estimate, others, choice.placement))
    return rows


def _coarse(branch: Branch, local: int) -> Branch:
    """Return a branch with many tiles with larger tiles, which keeps planning fast; other branches stay unchanged."""
    side = branch.tile[0]
    tiles = estimate_tiles(branch.pattern, branch.nq, branch.nk)
    # at least two tiles per rank, or one if the smaller tiles would not fit into memory
    while tiles > _MANY and side < _MAX_SIDE and (4 if tiles < _TOO_MANY else 2) * side * branch.rate <= local:
        side, tiles = 2 * side, tiles / 4
    return branch if side == branch.tile[0] else replace(branch, tile_size=(side, side))
