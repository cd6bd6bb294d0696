"""The choice of a placement by the modelled time of what it moves and computes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from ...patterns.function import holders
from ...plan import Branch
from ...recent import Recent
from .affinity import affinity
from .cost import Estimate, Load, Machine, Widths, estimate
from .demand import Demand
from .placement import Placement, portfolio

_PIECES = (4, 8, 16, 32, 2)
# estimates within this much of the least time count as equal: bytes decide
_EQUAL = 1.02
# time to receive, over time to compute, that is not worth saving
_LITTLE = 0.25
# with the bytes of the tables that their keys name, and about so many of their own
_MAX_CHOICES, _MAX_BYTES, _CHOICE_BYTES = 256, 256 * 2**20, 2**14
_MACHINE, _WIDTHS = Machine(), Widths()


class Choice(NamedTuple):
    """A placement, what it costs, and what all that were looked at cost."""

    placement: Placement
    estimate: Estimate
    candidates: tuple[Estimate, ...]


_choices: Recent[Choice] = Recent(_MAX_BYTES, _MAX_CHOICES)


def choose(
    calls: Sequence[Sequence[Branch]],
    tokens: int,
    ranks: int,
    block: int,
    ratio: int = 1,
    machine: Machine = _MACHINE,
    widths: Widths = _WIDTHS,
) -> Choice:
    """The placement with the least modelled time; among times within 2 % the one whose worst rank receives least.

    Cached by value. The same on every rank: nothing in it depends on measurements.

    Args:
        calls: The branches of each call that shares the placement, such as interleaved layers'.
        tokens: Length of the sequence.
        ranks: Ranks.
        block: Tokens that stay together; see :func:`~ringweave.parallel.planning.placement.block_for`.
        ratio: Query heads of a key head.
        machine: What the model assumes of a rank.
        widths: Channels and bytes.
    Returns:
        The choice. Candidates end where one is near a bound that none can beat.
    """
    patterns = [branch.pattern for call in calls for branch in call]
    key = (tuple(tuple(map(_value, call)) for call in calls), tokens, ranks, block, ratio, machine, widths)
    choice = _choices.get(key)
    if choice is None:
        choice = _choose(calls, tokens, ranks, block, ratio, machine, widths)
        tables = [table for pattern in patterns for table in pattern.key().tables]
        ties = [holder for pattern in patterns for holder in holders(pattern.spec)]
        _choices.put(key, choice, _CHOICE_BYTES, tables, ties)
    return choice


def cost_of(
    calls: Sequence[Sequence[Branch]], placement: Placement, ratio: int, machine: Machine, widths: Widths
) -> Estimate:
    """The estimate of calls under one placement; arguments as of :func:`choose`."""
    loads = [Load.of([Demand.of(branch, placement, ratio) for branch in call], widths) for call in calls]
    return estimate(placement.name, loads, machine)


def _choose(
    calls: Sequence[Sequence[Branch]],
    tokens: int,
    ranks: int,
    block: int,
    ratio: int,
    machine: Machine,
    widths: Widths,
) -> Choice:
    # no placement can beat what the longest row asks for, beyond what a rank can hold of it; and hardly the bytes of
    # one that keeps neighbours together
    heads = [len({head // ratio for head in range(*branch.heads)}) for call in calls for branch in call]
    least = [_longest(branch) - tokens / ranks for call in calls for branch in call]
    least_bytes = max(0.0, *(tokens * head for tokens, head in zip(least, heads, strict=True))) * widths.bytes_of_key
    placements: list[Placement] = []
    found: list[Estimate] = []
    for placement in _candidates(calls, tokens, ranks, block):
        each = cost_of(calls, placement, ratio, machine, widths)
        placements.append(placement)
        found.append(each)
        bound = max(each.ideal, least_bytes / machine.bandwidth)
        enough = max(least_bytes, _LITTLE * each.ideal * machine.bandwidth)
        near = not any(branch.rate % placement.views for call in calls for branch in call)
        keeps = near and placement.name in ("contiguous", "residue")
        if each.seconds <= _EQUAL * bound and (keeps or each.bytes_worst <= _EQUAL * enough):
            break
    fastest = min(each.seconds for each in found)
    best = min(
        (each.bytes_worst, each.seconds, number)
        for number, each in enumerate(found)
        if each.seconds <= _EQUAL * fastest
    )[2]
    return Choice(placements[best], found[best], tuple(found))


def _candidates(calls: Sequence[Sequence[Branch]], tokens: int, ranks: int, block: int) -> Iterator[Placement]:
    branches = [branch for call in calls for branch in call]
    yield from portfolio(tokens, ranks, block, tuple(branch.rate for branch in branches))
    for pieces in _PIECES if ranks > 1 else ():
        for deal in (True, False):
            placement = affinity(branches, tokens, ranks, block, pieces, deal=deal)
            if placement is not None:
                yield placement


def _longest(branch: Branch) -> int:
    """Tokens that the longest row of tiles attends, in token order."""
    if branch.rate > 1:
        return 0
    plan = branch.plan("cpu")
    return int(plan.row_ptr.diff(dim=1).max()) * plan.kv_tile


def _value(branch: Branch) -> Hashable:
    pattern = branch.pattern
    view = (branch.rate, branch.q_first, branch.k_first, branch.nq, branch.nk, branch.q_offset, branch.batch)
    return (pattern.key().value, branch.heads, branch.tile, view)
