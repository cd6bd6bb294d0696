"""Calls in which all query heads of a key head share the lists of keys that they attend.

For each query, such heads attend the same keys. So they are rows that are computed together, against the listed keys
only: query i of head h is row ``i * group + h`` of its key head. The kernel reads and writes these rows in place.
Blocks of a multiple of 16 keys are the key tiles of the plan, forward and backward. Other lists, such as those of
single keys, are packed: the kernel reads key n of the plan at ``chosen[n]``. Backward of packed lists runs in tiles of
many queries if the heads of a group leave more than three eighths of the vector lanes empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..call import Call, Operands
from ..patterns import Full, Pattern
from ..patterns.lists import MANY
from ..patterns.within import by_head
from ..plan import BlockPlan, Branch, branches
from ..plan.branches import PACKED
from ..plan.from_lists import PackedPlan
from ..plan.subplan import CutBranch
from ..terms import KINDS
from ..terms.operands import TermOperands

# most rows of a tile in the kernel
_MOST = 256
# the rows of a tile are padded to a multiple of this number of lanes
_LANES = 16


class SharedLists(NamedTuple):
    """A call in which query heads share lists.

    Attributes:
        plan: Its plan, with a row for each head of a group.
        group: Number of query heads that share keys.
        terms: Its score terms, for these rows.
    """

    plan: BlockPlan
    group: int
    terms: TermOperands | None


def shared_lists(operands: Operands, branch: Branch, backward: bool = False) -> SharedLists | None:
    """Return the plan of a call in which query heads share lists, or None if it is computed in other tiles.

    The pattern, the heads and the terms decide, and no length does, so that a row has the same bits in every chunk and
    step.
    """
    group, terms = operands.q.shape[1] // operands.k.shape[1], operands.terms
    # the lists of a cut branch are those of the whole call's queries and keys
    if isinstance(branch, CutBranch) or not shares(branch, group, frozenset() if terms is None else terms.names):
        return None
    packed = branch.lists is not None and branch.lists.side is None
    # measured: with fewer rows, tiles of many queries are faster for neighbours that choose the same keys
    if backward and packed and 8 * group < 5 * -(-group // _LANES) * _LANES:
        return None
    plan = branch.plan_by_query(group)
    if terms is not None:
        columns = terms.columns[plan.chosen.long()] if isinstance(plan, PackedPlan) else terms.columns
        queries = terms.rows.repeat_interleave(group)
        terms = terms._replace(heads=terms.heads[::group], rows=queries, columns=columns)
    return SharedLists(plan, group, terms)


def shares(branch: Branch, group: int, features: frozenset[str]) -> bool:
    """Return whether groups of query heads attend the same keys, with the same terms and without dropout."""
    lists = branch.lists if 1 < group <= _MOST and branch.rate == 1 else None
    if lists is None or not lists.serve(group):
        return False
    if not isinstance(lists.relation, Full) and by_head(lists.relation):
        return False
    return all(name in KINDS and not KINDS[name].axes and not KINDS[name].distances for name in features)


class StepLists(NamedTuple):
    """The lists of decoding steps of one kind, which differ in their contents.

    Attributes:
        relation: The pattern that filters them.
        tile: Keys in a tile of the plan.
        arguments: Keyword arguments of the kernel's ``Step``.
    """

    relation: Pattern
    tile: int
    arguments: dict[str, Any]


def lists_of_step(call: Call) -> StepLists | None:
    """Return the lists of a decoding step's kind; None if its query heads do not share them."""
    split = branches(call.pattern, 1, call.nk, heads=call.heads, batch=call.batch, q_offset=call.q_offset)
    group, lists = call.heads // call.kv_heads, split[0].lists
    if lists is None or len(split) > 1 or not shares(split[0], group, call.features):
        return None
    if lists.blocks.key_blocks != MANY:
        # the number of blocks that the caller states belongs to one length
        return None
    table = lists.blocks.table
    arguments = {
        "lists": table.view(*(1, 1, *table.shape[:-2])[-2:], table.shape[-1]), "block_size": lists.block,
        "packs": lists.side is None, "group": group,
    }  # fmt: skip
    return StepLists(lists.relation, lists.side or PACKED, arguments)
