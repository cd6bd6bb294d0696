"""Count the pairs of a pattern that see the future: pairs with a key after the query's position."""

from __future__ import annotations

import dataclasses

import torch

from ..patterns import Causal, Pattern
from ..patterns.fitting import fitting
from ..patterns.shifted import Shifted, first_positions
from ..types import Causality, Offender
from .block_plan import BlockPlan, unpack_masks
from .branches import Branch, branches
from .from_pattern import build


def causality(
    pattern: Pattern, nq: int, nk: int | None = None, *, heads: int = 1, batch: int = 1, q_offset: int = 0
) -> Causality:
    """Count the pairs of a pattern that see the future, in time that grows with their tiles; see ``Pattern.causality``.

    For a relation, only ``pattern & ~Causal()`` is planned; if it is causal, only tiles on the diagonal are evaluated.
    """
    pattern, nq, nk, heads, batch, q_offset = fitting(pattern, nq, nk, heads, batch, q_offset)
    counts = [_of(branch) for branch in branches(pattern, nq, nk, heads=heads, batch=batch, q_offset=q_offset)]
    pairs, first = sum(number for number, _ in counts), min((each for _, each in counts if each), default=None)
    return Causality(pairs, first, (batch > 1, heads > 1))


def _of(branch: Branch) -> tuple[int, Offender | None]:
    moved = branch.pattern if isinstance(branch.pattern, Shifted) else None
    if branch.dense_kind == "causal" or (moved is None and branch.q_offset + 1 >= branch.nk):
        return 0, None
    heads = range(*branch.heads)
    first = first_positions(branch.pattern, branch.q_offset, branch.batch, torch.device("cpu")).tolist()

    def at(query: int, key: int, b: int, h: int) -> Offender:
        # a place in the view as a position: the view's queries are congruent to its keys
        query, key = query + first[b][0], key + first[b][1]
        return Offender(branch.k_first + query * branch.rate, branch.k_first + key * branch.rate, b, heads[h])

    if branch.dense_kind == "full":
        # query p sees the keys after p: a sum over an arithmetic progression
        last = min(branch.nq, branch.nk - 1 - branch.q_offset)
        each = last * (branch.nk - 1 - branch.q_offset) - last * (last - 1) // 2
        return each * branch.batch * branch.head_count, at(0, branch.q_offset + 1, 0, 0)
    inside = (branch.pattern if moved is None else moved.pattern) & ~Causal()
    future = dataclasses.replace(branch, pattern=inside if moved is None else Shifted(inside, moved.offsets))
    # not cached: it is needed rarely, and would evict plans of calls
    plan = build(
        future.pattern,
        future.nq,
        future.nk,
        heads=future.head_count,
        batch=future.batch,
        q_offset=future.q_offset,
        tile=future.tile,
    )
    pairs = plan.pairs()
    if not pairs:
        return 0, None
    of_set = [_first(plan, number) for number in range(plan.row_ptr.shape[0])]
    offenders = [
        at(pair[0], pair[1], b, h)
        for b, row in enumerate(plan.row_set.tolist())
        for h, number in enumerate(row)
        if (pair := of_set[number]) is not None
    ]
    return pairs, min(offenders)


def _first(plan: BlockPlan, number: int) -> tuple[int, int] | None:
    """Return the first query of a row set that attends a key, and the first of its keys, as indices."""
    filled = plan.row_ptr[number].diff().nonzero()
    if not len(filled):
        return None
    row = int(filled[0])
    entries = slice(int(plan.row_ptr[number, row]), int(plan.row_ptr[number, row + 1]))
    col, bits = plan.col[entries].long(), plan.mask_id[entries].long()
    codes, place = bits.unique(return_inverse=True)
    whole = torch.ones(1, plan.q_tile, plan.kv_tile, dtype=torch.bool, device=plan.device)
    masks = torch.cat([unpack_masks(plan.mask_words[codes[codes >= 0]], plan.kv_tile), whole])
    # code -1, the first of the sorted codes, refers to the full mask, which is last
    masks = masks[
        torch.where(codes < 0, len(masks) - 1, torch.arange(len(codes), device=plan.device) - int((codes < 0).sum()))
    ]
    query = int(masks.any(2).int().argmax(1).min())
    keys = masks[:, query]
    held = keys.any(1)[place]
    key = col * plan.kv_tile + keys.int().argmax(1)[place]
    return row * plan.q_tile + query, int(key[held].min())
