"""Shrink a failing call greedily, and print it as Python that does not need the fuzzer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from . import trees
from .calls import Call, program
from .check import Find, Refused, check
from .sizes import Sizes
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
    "m['ringweave.plan.from_pattern'].DEFAULT_TILE = 16"
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


def _smaller(call: Call) -> Iterator[Call]:
    if call.first is not None:
        yield replace(call, first=None)
        for first in (call.first._replace(k=(0,) * len(call.first.k)), call.first._replace(how="each")):
            if first != call.first:
                yield replace(call, first=first)
    for less in call.scoring.smaller():
        yield replace(call, scoring=less)
    for tree in _trees(call.tree):
        yield replace(call, tree=tree)
    s = call.sizes
    for kv_heads, heads in {(1, 1), (1, 2), (1, s.heads), (s.heads, s.heads)}:
        if heads <= s.heads and (heads, kv_heads) != (s.heads, call.kv_heads):
            yield from _resized(replace(call, kv_heads=kv_heads), replace(s, heads=heads))
    yield from _resized(call, replace(s, batch=1))
    yield from _resized(call, replace(s, q_offset=0))
    for n in (1, s.nq // 2, s.nq - 1):
        if 1 <= n < s.nq:
            yield from _resized(call, replace(s, nq=n, nk=n if call.how == "context" else s.nk))
            yield from _resized(call, replace(s, nq=n, nk=max(1, s.nk - s.nq + n)))
    for n in (1, s.nk // 2, s.nk - 1):
        if 1 <= n < s.nk and call.how != "context":
            yield from _resized(call, replace(s, nk=n))
    if s.q_offset > 1:
        yield from _resized(call, replace(s, q_offset=s.q_offset // 2))
    for dims in ((8, 8), (call.dim, call.dim), (call.dim // 2, call.value_dim // 2), (call.dim, call.value_dim // 2)):
        if dims != (call.dim, call.value_dim) and min(dims) >= 1 and max(dims) <= max(call.dim, call.value_dim):
            yield replace(call, dim=dims[0], value_dim=dims[1])
    plain = {
        "scale": None, "dtype": "float32", "poisoned": False, "dead": False, "packed": False, "forked": False, "threads": 1, "detach_weights": False, "leaves": "",
        "loss": "out",
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(call, name) != value and not (name == "leaves" and not call.grads):
            yield replace(call, **{name: value})
    if call.how not in ("attention", "attention_with_lse") and call.tree.kind != "LongNet":
        yield replace(call, how="attention_with_lse")
    if call.how == "attention_with_lse":
        yield replace(call, how="attention", loss="out")
    if len(call.leaves) > 1:
        for name in call.leaves:
            yield replace(call, leaves=name)
    for i in range(4):
        for field, value in (("layouts", "contiguous"), ("fills", ".normal_()")):
            values = list(getattr(call, field))
            if values[i] != value:
                values[i] = value
                yield replace(call, **{field: tuple(values)})


def _resized(call: Call, sizes: Sizes) -> Iterator[Call]:
    if sizes != call.sizes or call.kv_heads > sizes.heads:
        tree = call.tree
        if tree.kind == "PerHead":
            tree = replace(tree, parts=tree.parts[: sizes.heads])
        yield replace(call, sizes=sizes, tree=tree)


def _trees(tree: Tree) -> Iterator[Tree]:
    if tree.kind == "LongNet":
        segments, rates, causal, offset, heads = tree.args
        for i in range(len(rates)) if len(rates) > 1 else ():
            yield Tree("LongNet", (segments[:i] + segments[i + 1 :], rates[:i] + rates[i + 1 :], causal, offset, heads))
        for rest in ((False, offset, heads), (causal, 0, heads), (causal, offset, "shared")):
            if rest != tree.args[2:]:
                yield Tree("LongNet", (segments, rates, *rest))
        return
    if tree != Tree("Full"):
        yield Tree("Full")
    yield from tree.parts
    for i, part in enumerate(tree.parts):
        for smaller in _trees(part):
            if len(smaller.walk()) < len(part.walk()) or smaller.kind == part.kind:
                yield replace(tree, parts=(*tree.parts[:i], smaller, *tree.parts[i + 1 :]))
    if len(tree.parts) > 2 and tree.kind != "PerHead":
        for i in range(len(tree.parts)):
            yield replace(tree, parts=tree.parts[:i] + tree.parts[i + 1 :])
    for i, value in enumerate(tree.args):
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            for less in (1, value // 2, value - 1):
                yield replace(tree, args=(*tree.args[:i], less, *tree.args[i + 1 :]))
        elif isinstance(value, tuple) and len(value) > 1:
            yield replace(tree, args=(*tree.args[:i], value[: len(value) // 2], *tree.args[i + 1 :]))
