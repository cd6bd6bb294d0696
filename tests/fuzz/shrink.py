"""Shrink a failing call greedily, and print it as Python that does not need the fuzzer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from . import trees
from .calls import Call, program
from .check import Find, Refused, check
from .score_terms import ScoreTerms
from .trees import Tree


def shrink(call: Call, find: Find, seconds: float = 20.0) -> tuple[Call, Find]:
    """Return the smallest call found within the time that has the same kind of failure."""
    end = time.monotonic() + seconds
    while True:
        for smaller in _smaller(call):
            if time.monotonic() > end:
                return call, find
            found = fails(smaller)
            if found is not None and alike(found, find):
                call, find = smaller, found
                break
        else:
            return call, find


def fails(call: Call) -> Find | None:
    """Return the bug that a call shows, if any."""
    if not (trees.fits(call.tree, call.sizes) and call.sizes.heads % call.kv_heads == 0):
        return None
    first, size = call.first, call.sizes
    if first and (len(first.q) != size.batch or max(first.q) != size.q_offset or max(first.k) >= size.nk):
        return None
    try:
        check(call)
    except Find as find:
        return find
    except Refused:
        pass
    return None


def alike(one: Find, other: Find) -> bool:
    """Return whether two bugs are of one kind, in any of the results."""
    return one.kind.split(" of ")[0] == other.kind.split(" of ")[0]


#: otherwise small calls would have one tile and one branch
FINE = (
    "import sys, ringweave; m = sys.modules; m['ringweave.plan.branches']._BRANCH_COST = -1e9; "
    "m['ringweave.plan.tile_size'].DEFAULT_TILE_SIZE = 16"
)


def text(call: Call, find: Find, variant: str | None, fine: bool) -> str:
    """Return the call as Python that ends in a line that shows the bug."""
    inputs, lines = program(call)
    if variant is not None:
        inputs[0] = f"import os; os.environ[{'RINGWEAVE_CPU_VARIANT'!r}] = {variant!r}; {inputs[0]}"
    if fine:
        inputs.insert(1, FINE)
    shown = [f"print({find.line.replace('  #', ')  #')}"] if find.line else []
    return "\n".join([f"# {find.kind}: {find.what}", *inputs, *lines, *shown])


#: The plain value of each field
PLAIN = {
    "first": None, "broken": None, "score_terms": ScoreTerms(), "scale": None, "dtype": "float32", "poisoned": False,
    "dead": False, "packed": False, "forked": False, "threads": 1, "detach_weights": False, "leaves": "",
    "loss": "out", "layouts": ("contiguous",) * 4, "fills": (".normal_()",) * 4,
}  # fmt: skip


def _smaller(call: Call) -> Iterator[Call]:
    """Yield the call with one field plain, with a part of its pattern or terms, or with a size halved."""
    for name, value in PLAIN.items():
        if getattr(call, name) != value:
            yield replace(call, **{name: value})  # type: ignore[arg-type]
    for i in range(4):
        for name in ("layouts", "fills"):
            values = list(getattr(call, name))
            values[i] = PLAIN[name][i]  # type: ignore[index]
            if tuple(values) != getattr(call, name):
                yield replace(call, **{name: tuple(values)})
    if len(call.score_terms.terms) > 1 or call.score_terms.sinks or call.score_terms.dropped:
        for term in call.score_terms.terms:
            yield replace(call, score_terms=ScoreTerms((term,)))
    if call.tree.kind != "LongNet":
        if call.how != "attention":
            yield replace(call, how="attention", loss="out")
        for tree in (Tree("Full"), *call.tree.parts, *(replace(call.tree, parts=(part,)) for part in call.tree.parts)):
            if len(tree.walk()) < len(call.tree.walk()) or (tree == Tree("Full") != call.tree):
                yield replace(call, tree=tree)
    s = call.sizes
    for heads, kv_heads in ((1, 1), (s.heads // 2, call.kv_heads)):
        parts = call.tree.parts[:heads] if call.tree.kind == "PerHead" else call.tree.parts
        if 1 <= heads < s.heads:
            yield replace(call, kv_heads=kv_heads, sizes=replace(s, heads=heads), tree=replace(call.tree, parts=parts))
    together = {"nq": s.nq // 2, "nk": s.nq // 2} if call.how == "context" else {"nq": s.nq // 2}
    for sizes in ({"batch": 1}, {"q_offset": 0}, {"q_offset": s.q_offset // 2}, together, {"nk": s.nk // 2}):
        less = replace(s, **sizes)
        if less != s and min(less.nq, less.nk) >= 1:
            yield replace(call, sizes=less)
    for name in ("dim", "value_dim"):
        if getattr(call, name) > 1:
            yield replace(call, **{name: getattr(call, name) // 2})
