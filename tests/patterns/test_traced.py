"""Patterns of mask functions, compared with the functions at every pair."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.errors import PatternError
from ringweave.integrations.flex_attention import flex_attention
from ringweave.integrations.flex_attention.attention import pattern_of
from ringweave.patterns import Pattern, TokenMask
from ringweave.patterns.base import parts_of
from ringweave.patterns.recorded import unrecorded
from ringweave.patterns.traced import of_graph
from ringweave.patterns.zone_table import ZoneTable
from ringweave.plan import BlockPlan
from ringweave.trace.graph import UntraceableError
from ringweave.trace.symbols import trace
from ringweave.types import Place

from ..fuzz.strategies import outcomes
from ..sampled import is_long
from ..trace import test_relation_fuzz as fuzz
from ..trace.definitions import by_pair
from ..trace.masks import masks

PLACES = (
    Place(2, 4, 61, 64),
    Place(1, 1, 190, 222, 30, 6, 3),
    Place(1, 1, 1100, 1301),
    Place(2, 4, 5, 1400, 1395, 0),
    Place(2, 1, 70, 40, 3),
)


def read(function: Any, place: Place) -> Pattern | None:
    return of_graph(trace(function), place)


def evaluated(function: Any, place: Place) -> Pattern:
    """Return the pattern that calls a function in tiles."""

    def moved(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.as_tensor(function(b, h + place.h0, q + place.k0, k + place.k0))

    return unrecorded(moved, "it is to be evaluated", pairs=True)


def planned(pattern: Pattern, place: Place, tile: tuple[int, int] = (128, 128)) -> BlockPlan:
    sizes = {"heads": place.heads, "batch": place.batch, "q_offset": place.q0 - place.k0}
    return pattern.plan(place.nq, place.nk, tile=tile, **sizes)


def same(one: BlockPlan, other: BlockPlan) -> bool:
    """Return whether plans have the same tiles: the same full ones, and the others with the same masks."""

    def table(plan: BlockPlan) -> Tensor:
        row, col, mask = plan.listed()
        found = torch.full((plan.row_ptr.shape[0], plan.q_tiles, plan.kv_tiles), -2)
        found[row // plan.q_tiles, row % plan.q_tiles, col] = mask
        return found[plan.row_set.long()]

    mine, theirs = table(one), table(other)
    masked = mine >= 0
    if not torch.equal(torch.where(masked, 0, mine), theirs.clamp(max=0)):
        return False
    return torch.equal(one.mask_words[mine[masked]], other.mask_words[theirs[masked]])


# ---- the corpus ------------------------------------------------------------------------------------------------------


# trace/test_relation.py reads every function of the corpus in each run
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name, mask in masks().items() if mask.state != "refused"])
def test_the_corpus(name: str) -> None:
    """Each pattern has the pairs of its function, and the plan of the function as it is evaluated in tiles."""
    function = masks()[name].function
    # a chain of 300 operations takes seconds in tiles
    for place in PLACES[:1] if "chain" in name else PLACES:
        pattern = read(function, place)
        if pattern is not None:
            want = by_pair(function, place)
            got = pattern.to_dense(place.nq, place.nk, place.heads, batch=place.batch, q_offset=place.q0 - place.k0)
            assert torch.equal(got, want), (pattern, place)
            plan = planned(pattern, place)
            assert torch.equal(plan.to_dense(), want), (pattern, place)
            # an evaluated function must not change a value that it reads; it is slow over many pairs
            if name != "hostile: counter" and place.nq < 1000:
                assert same(plan, planned(evaluated(function, place), place)), (pattern, place)


def test_how_many_have_a_pattern() -> None:
    place = Place(2, 4, 1024, 1024)
    known = [name for name, mask in masks().items() if mask.state == "recognised"]
    missing = {name for name in known if read(masks()[name].function, place) is None}
    # Their zones are so many that evaluating the function takes less time.
    assert missing == {
        "gym: tree", "gym: neighborhood on a curve", "gym: places in frames", "tests: pairs",
        "hostile: array as a tensor", "hostile: int64 at its end", "hostile: int16", "hostile: chain of or",
    }  # fmt: skip
    assert len(known) == 118


def test_random_masks() -> None:
    found = outcomes(compared, fuzz.MASKS, 500 if is_long() else 150)
    assert found.count("zones") >= 0.3 * len(found), found


def compared(mask: tuple[str, Place]) -> str:
    """Compare a random mask with its pattern; return whether it has one, and whether this has zones of comparisons."""
    (function, want), place = fuzz.defined(mask), mask[1]
    if want is None:
        return "wrong function"
    first = place.q0 - place.k0
    try:
        pattern = read(function, place)
    except (UntraceableError, PatternError):
        return "refused"
    if pattern is None or first < 0:
        return "none"
    got = pattern.to_dense(place.nq, place.nk, place.heads, batch=place.batch, q_offset=first)
    assert torch.equal(got, want)
    plan = planned(pattern, place, (16, 32))
    assert torch.equal(plan.to_dense(), want)
    return "zones" if parts_of(pattern, ZoneTable) else "pattern"


# ---- masks that trainers write ---------------------------------------------------------------------------------------


def rollouts(tokens: int, nodes: int, seed: int = 0) -> tuple[rw.Tree, Tensor, Tensor]:
    """Draw a tree of rollouts whose nodes are numbered depth first.

    Returns:
        The tree; the number of each token's node, and one past the last node below that one.
    """
    r = random.Random(seed)
    parents, path = [-1], [0]
    for node in range(1, nodes):
        # the next node continues at any place of the path so far
        del path[r.randint(1, len(path)) :]
        parents.append(path[-1])
        path.append(node)
    last = list(range(1, nodes + 1))
    for node in reversed(range(1, nodes)):
        last[parents[node]] = max(last[parents[node]], last[node])
    cuts = [0, *sorted(r.sample(range(1, tokens), nodes - 1)), tokens]
    lengths = [b - a for a, b in itertools.pairwise(cuts)]
    first = torch.repeat_interleave(torch.arange(nodes), torch.tensor(lengths))
    return rw.Tree(parents, lengths), first, torch.tensor(last)[first]


def test_trees_of_rollouts() -> None:
    """A mask by numbers of nodes has the plan of the tree, and the function is called few times."""
    tokens, calls = 8192, [0]
    for seed in range(3):
        tree, first, last = rollouts(tokens, 33, seed)

        def mask(b, h, q, k, first=first, last=last):  # type: ignore[no-untyped-def]
            calls[0] += 1
            return (first[k] <= first[q]) & (first[q] < last[k]) & (q >= k)

        place = Place(1, 1, tokens, tokens)
        pattern = read(mask, place)
        assert pattern is not None
        assert same(planned(pattern, place), planned(tree, place))
        assert sum(table.table.shape[1] for table in parts_of(pattern, ZoneTable)) < 33 * 33 / 2
        calls[0] = 0
        block_mask = one_block(mask, tokens)
        q, k, v = (torch.randn(1, 1, tokens, 8) for _ in range(3))
        assert torch.equal(flex_attention(q, k, v, None, block_mask), rw.attention(q, k, v, tree))
        assert calls[0] <= 4
        assert not parts_of(pattern_of(block_mask, place), TokenMask)


def one_block(function: Any, tokens: int) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    one = torch.ones(1, 1, 1, dtype=torch.int32)
    blocks = one, one[..., None] - 1
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=2**30, mask_mod=function, seq_lengths=(tokens, tokens))


def test_zones_are_bounded() -> None:
    """A comparison with a zone for every few pairs is evaluated, and its zones are never listed."""
    alternating = torch.arange(4096) % 2
    place = Place(1, 1, 4096, 4096)
    assert read(lambda b, h, q, k: alternating[q] <= alternating[k], place) is None
    assert read(lambda b, h, q, k: (alternating[q] == 1 - alternating[k]) | (alternating[k] > q), place) is None
    drawn = torch.rand(2, 512, generator=torch.Generator().manual_seed(0))
    for kinds, known in ((8, False), (64, True)):
        # more zones than are kept, though not than are listed on the way; and fewer
        mine, theirs = (drawn * kinds).long()
        found = read(lambda b, h, q, k, u=mine, v=theirs: u[q] == v[k], Place(1, 1, 512, 512))
        assert isinstance(found, ZoneTable) == known
    # under &, only the pairs that another comparison leaves are cut
    block = torch.arange(4096) // 2
    few = read(lambda b, h, q, k: (alternating[q] <= alternating[k]) & (block[k] - block[q] + 1 == 0), place)
    assert isinstance(few, ZoneTable)
    assert few.table.shape[1] <= 4096
