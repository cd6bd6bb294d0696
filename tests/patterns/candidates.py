"""Count the tiles that the planner looks at for a pattern, against the tiles that its plans contain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ringweave import patterns
from ringweave.patterns.base import Pattern
from ringweave.patterns.declared import Declared
from ringweave.plan import from_pattern
from ringweave.plan.branches import Branch, branches
from ringweave.relation.lines import union
from ringweave.relation.node import Frame, Node
from ringweave.relation.tiles import Masks, Tiling

LENGTHS = (2**11, 2**13, 2**15)
#: Most candidate tiles for each tile of a plan, and for each row of tiles.
MOST = 4


@contextmanager
def counted() -> Iterator[list[int]]:
    """Collect the number of candidate tiles of each plan that is made inside."""
    found: list[int] = []
    tiling, context = from_pattern.tiling, from_pattern._new_context

    def spy(node: Node, frame: Frame, masks: Masks) -> Tiling:
        line = union(node.touched(frame), node.filled(frame))
        found.append(int((line.stop - line.start).sum()))
        return tiling(node, frame, masks)

    def around_a_table(*args: Any) -> Any:
        # all tiles around a table are planned once, if they are few, and serve every other table
        before = len(found)
        planned = context(*args)
        del found[before:]
        return planned

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(from_pattern, "tiling", spy)
        patched.setattr(from_pattern, "_new_context", around_a_table)
        yield found


def built(expression: str, tokens: int) -> Pattern:
    """Evaluate the expression of a declaration for a number of tokens."""
    pattern = eval(
        expression, {"torch": torch, "n": tokens, **{name: getattr(patterns, name) for name in patterns.__all__}}
    )
    assert isinstance(pattern, Pattern)
    return pattern


def check(pattern: Pattern, tokens: int) -> None:
    """Fail if the planner looks at many more tiles than it finds, in token order or in strided views."""
    heads = pattern.extents()[1] or 1
    parts = list(branches(pattern, tokens, tokens, heads=heads))
    if pattern.combinable:
        parts.append(Branch.whole(pattern, tokens, tokens, heads=heads))
    for part in parts:
        with counted() as candidates:
            plan = from_pattern.build(
                part.pattern,
                part.nq,
                part.nk,
                heads=part.head_count,
                batch=part.batch,
                q_offset=part.q_offset,
                tile=part.tile,
            )
        rows = -(-part.nq // part.tile[0]) * part.head_count
        looked_at, bound = sum(candidates), MOST * (plan.nnz + rows)
        assert looked_at <= bound, f"{part.pattern} of {part.nq} tokens: {looked_at} candidates, {plan.nnz} tiles"


def check_declared(known: Declared) -> None:
    """Check the example of a declaration at its own length, and its hostile expression at three lengths."""
    if "lambda" in known.example:
        # nothing is known about a function before it is evaluated
        return
    check(built(known.example, known.tokens), known.tokens)
    for tokens in LENGTHS if known.hostile is not None else ():
        check(built(known.hostile, tokens), tokens)
