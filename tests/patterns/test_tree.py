"""Trees, and patterns along their paths, have the pairs, results and gradients of a definition by loops."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import ringweave as rw
from ringweave.patterns import Pattern
from ringweave.patterns.tree import Tree
from ringweave.plan.from_pattern import build
from ringweave.relation.shapes import MOST_ZONES

from ..fuzz import ragged
from ..fuzz.sizes import Sizes
from ..fuzz.strategies import outcomes
from ..oracle import Expected, Inputs, results
from ..sampled import is_long
from .test_ragged import spells_out

Nodes = tuple[list[int], list[int]]


def path(parents: list[int], node: int) -> list[int]:
    """Return the nodes from a root to a node."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def defined(parents: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return the pairs (N, N) of a tree, and the position of each token on its path."""
    owner = [node for node, length in enumerate(lengths) for _ in range(length)]
    before = [sum(lengths[above] for above in path(parents, node)[:-1]) for node in range(len(parents))]
    place = [before[node] + i for node, length in enumerate(lengths) for i in range(length)]
    pairs = [[owner[k] in path(parents, owner[q]) and k <= q for k in range(len(owner))] for q in range(len(owner))]
    return torch.tensor(pairs), torch.tensor(place)


def along(pattern: Pattern, nodes: Nodes) -> Tensor:
    """Return the pairs of a pattern of positions along the paths of a tree."""
    pairs, place = defined(*nodes)
    q, k = torch.broadcast_tensors(place[:, None], place[None])
    return pairs & pattern.allows(q, k)


def of_elements(nodes: list[Nodes]) -> rw.Tree:
    """Return the tree of several batch elements, filled with roots of length 0."""
    most = max(len(parents) for parents, _ in nodes)
    parents = torch.tensor([parents + [-1] * (most - len(parents)) for parents, _ in nodes])
    lengths = torch.tensor([lengths + [0] * (most - len(lengths)) for _, lengths in nodes], dtype=torch.int32)
    return rw.Tree(parents, lengths)


COUNTED: list[Callable[[], Pattern]] = [
    lambda: rw.SlidingWindow(9),
    lambda: rw.SlidingWindow(3, 4),
    lambda: rw.Sinks(3),
    lambda: rw.Strided(7),
    lambda: rw.Dilated(4, 3),
    lambda: rw.Segments(10),
    lambda: rw.Causal(),
    lambda: rw.Full(),
    lambda: rw.Global([2, 11]),
    lambda: rw.PrefixLM(6),
    lambda: rw.patterns.Periodic(9, 2, 5),
    lambda: rw.from_mask_mod(lambda b, h, q, k: (q * 3 + k) % 5 < 3),
]


EXPRESSIONS = st.recursive(
    st.sampled_from(COUNTED).map(lambda make: make()),
    lambda part: part.map(operator.invert) | st.builds(operator.and_, part, part) | st.builds(operator.or_, part, part),
    max_leaves=4,
)
SEEDS = st.integers(0, 999)


def nodes_of(tokens: int, batch: int, seed: int) -> list[Nodes]:
    return ragged.nodes(Sizes(batch, 1, tokens, tokens, 0), True, seed)


def test_random_trees_have_the_pairs_of_their_definition() -> None:
    sizes = st.sampled_from([1, 5, 40, 90, 150]), st.sampled_from([1, 1, 3])
    drawn = st.tuples(*sizes, SEEDS, EXPRESSIONS, st.floats(0, 1, exclude_max=True))
    outcomes(has_the_pairs_of_its_definition, drawn, 200 if is_long() else 20)


def has_the_pairs_of_its_definition(drawn: tuple[int, int, int, Pattern, float]) -> None:
    tokens, batch, seed, inner, at = drawn
    nodes = nodes_of(tokens, batch, seed)
    tree = of_elements(nodes) if batch > 1 else rw.Tree(*nodes[0])
    bare = torch.stack([defined(*each)[0] for each in nodes])[:, None]
    counted = torch.stack([along(inner, each) for each in nodes])[:, None]
    causal, near = rw.Causal().to_dense(tokens), rw.SlidingWindow(3).to_dense(tokens)
    for pattern, dense in (
        (tree, bare), (~tree & rw.Causal(), ~bare & causal), (tree & rw.Segments(7) | rw.SlidingWindow(3),
         bare & rw.Segments(7).to_dense(tokens) | near), (inner.within(tree), counted),
        ((~inner).within(tree), bare & ~counted), (~inner.within(tree) & rw.Causal(), ~counted & causal),
        (inner.within(tree) | rw.SlidingWindow(3), counted | near),
    ):  # fmt: skip
        if "TokenMask" in pattern.spec:
            plan = build(pattern, tokens, tokens, batch=batch, tile=(16, 32))
            assert torch.equal(plan.to_dense(), dense)
        else:
            spells_out(pattern, dense)
    first = int(at * tokens)
    steps = inner.within(tree).to_dense(tokens - first, tokens, batch=batch, q_offset=first)
    assert torch.equal(steps, counted[:, :, first:])


def test_positions_and_paths() -> None:
    outcomes(has_its_positions_and_paths, SEEDS, 20)


def has_its_positions_and_paths(seed: int) -> None:
    nodes = nodes_of(60, 3, seed)
    tree = of_elements(nodes)
    places = tree.positions()
    assert places.shape == (3, 60)
    assert places.dtype == torch.int64
    for b, (parents, lengths) in enumerate(nodes):
        one, starts = rw.Tree(parents, lengths), [sum(lengths[:node]) for node in range(len(lengths))]
        assert torch.equal(places[b], defined(parents, lengths)[1])
        assert torch.equal(one.positions(), places[b])
        wanted = []
        for leaf in sorted(set(range(len(parents))) - set(parents)):
            runs = [range(starts[node], starts[node] + lengths[node]) for node in path(parents, leaf)]
            if any(runs):
                wanted.append([token for run in runs for token in run])
        assert [each.tolist() for each in one.paths()] == wanted
        of_element = tree.paths()[b]
        assert isinstance(of_element, list)
        assert [each.tolist() for each in of_element] == wanted


def test_a_chain_is_one_branch() -> None:
    """A child that follows its parent's tokens costs nothing, so neither do a thousand."""
    chain = rw.Tree(range(-1, 999), [2] * 1000)
    assert torch.equal(chain.to_dense(2000), rw.Causal().to_dense(2000))
    assert len(list(chain._branches().levels())) == 1
    assert chain.positions().tolist() == [*range(2000)]
    forest = rw.Tree([-1] * 30, [0, 3, 4] * 10)
    assert torch.equal(forest.to_dense(70), (rw.Documents([3, 4] * 10) & rw.Causal()).to_dense(70))


def test_too_many_pairs_of_branches_are_refused() -> None:
    """Nodes of one token in turns have a branch each; depth first they are two branches."""
    steps = 2 * int(MOST_ZONES**0.5) + 10
    turns = rw.Tree([-1, -1, *range(steps - 2)], [1] * steps)
    with pytest.raises(
        rw.PatternError, match=r"pairs of a branch and a branch above it; wanted at most .* depth first"
    ):
        turns.plan(steps)
    half = steps // 2
    apart = rw.Tree([-1, *range(half - 1), -1, *range(half, steps - 1)], [1] * steps)
    assert apart.density(steps) == pytest.approx((half + 1) / steps / 2)


def test_equal_trees_of_batch_elements_share_their_plan() -> None:
    nodes = [([-1, 0, 0], [40, 30, 30]), ([-1, -1], [50, 50]), ([-1, 0, 0], [40, 30, 30])]
    plan = rw.plan(of_elements(nodes), 100, batch=3, heads=2)
    assert plan.row_ptr.shape[0] == 2


def test_a_pattern_of_one_length_fits_paths_of_that_length() -> None:
    inner, nodes = rw.patterns.Neighborhood(3, 2, tokens=9), ([-1, 0, 0], [4, 5, 5])
    spells_out(inner.within(rw.Tree(*nodes)), along(inner, nodes)[None, None])
    grid = rw.GridWindows(rw.Grid((3, 3)), (2, 2))
    spells_out(grid.within(rw.Tree(*nodes)), along(grid, nodes)[None, None])


def test_a_tree_in_documents_and_documents_along_a_tree() -> None:
    nodes = [-1, 0, 0], [4, 5, 6]
    pairs = along(rw.Full(), nodes)
    spells_out(rw.Tree(*nodes).within(rw.Documents([15, 15])), torch.block_diag(pairs, pairs).bool()[None, None])
    packed = rw.Documents(ids=[0] * 3 + [1] * 6)
    spells_out(packed.within(rw.Tree([-1, 0, 0], [4, 5, 5])), along(packed, ([-1, 0, 0], [4, 5, 5]))[None, None])


def test_patterns_of_batch_elements_along_one_tree() -> None:
    """Bounds that differ between batch elements are counted along the paths of a tree that all elements share."""
    nodes, ids = ([-1, 0, 0], [4, 5, 5]), torch.tensor([[0] * 3 + [1] * 6, [0] * 7 + [1] * 2])
    dense = torch.stack([along(rw.Documents(ids=row), nodes) for row in ids])[:, None]
    spells_out(rw.Documents(ids=ids).within(rw.Tree(*nodes)), dense)
    pairs = [along(rw.KeyPadding(stop), nodes) for stop in (9, 6)]
    spells_out(rw.KeyPadding([9, 6]).within(rw.Tree(*nodes)), torch.stack(pairs)[:, None])


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference", "dense_batched"])
def test_results_and_gradients(backend: str) -> None:
    """Output, lse and gradients against float64, for random trees, bare and with a pattern along the paths."""

    def check(drawn: tuple[int, int, int]) -> None:
        tokens, window, seed = drawn
        nodes = nodes_of(tokens, 2, seed)
        tree, inner = of_elements(nodes), (rw.SlidingWindow(window) | rw.Sinks(3)) & ~rw.Strided(5)
        for pattern, pairs in (
            (tree, [defined(*each)[0] for each in nodes]),
            (inner.within(tree), [along(inner, each) for each in nodes]),
        ):
            x = Inputs.random(tokens, batch=2, heads=4, kv_heads=2, seed=seed)
            leaves = x.leaves()
            out, lse = rw.attention_with_lse(*leaves, pattern, backend=backend)
            counts = torch.stack(pairs)[:, None].expand(2, 4, tokens, tokens)
            Expected.of(x, counts).check(results(out, lse, x, leaves))

    outcomes(check, st.tuples(st.sampled_from([70, 200]), st.sampled_from([9, 40]), SEEDS), 4)


def test_steps_of_a_tree() -> None:
    """Rows at an offset, as a number or a tensor, are those of the whole call."""
    nodes = [-1, 0, 0, 2], [20, 20, 14, 10]
    q, k, v = (torch.randn(2, 4, 64, 8) for _ in range(3))
    for pattern in (rw.Tree(*nodes), (rw.SlidingWindow(5) | rw.Sinks(2)).within(rw.Tree(*nodes))):
        whole = rw.attention(q, k, v, pattern)
        for first in (30, torch.tensor(30)):
            torch.testing.assert_close(rw.attention(q[:, :, 30:39], k, v, pattern, q_offset=first), whole[:, :, 30:39])
        torch.testing.assert_close(rw.attention(q[:, :, -1:], k, v, pattern, q_offset="end"), whole[:, :, -1:])
        cache = rw.PagedCache.empty(batch=2, length=64, heads=4, dim=8)
        cache.append(k, v)
        torch.testing.assert_close(rw.paged_attention(q[:, :, -3:], cache, pattern), whole[:, :, -3:])


def test_compiled_calls_with_other_trees_compile_once() -> None:
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))

    def call(parents: Tensor, lengths: Tensor) -> Tensor:
        tree = rw.Tree(parents, lengths)
        return rw.attention(q, k, v, tree) + rw.attention(q, k, v, rw.SlidingWindow(9).within(tree))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for parents, lengths in (([-1, 0, 0], [20, 20, 24]), ([-1, 0, 1], [4, 50, 10]), ([-1, -1, 0], [63, 0, 1])):
        tables = torch.tensor(parents), torch.tensor(lengths)
        with torch._dynamo.config.patch(error_on_recompile=parents != [-1, 0, 0]):
            torch.testing.assert_close(compiled(*tables), call(*tables))
    listed = torch.compile(
        lambda: rw.attention(q, k, v, rw.Tree([-1, 0], [30, 34])), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(listed(), rw.attention(q, k, v, rw.Tree([-1, 0], [30, 34])))


def test_the_arguments_are_copied() -> None:
    parents, lengths = torch.tensor([-1, 0, 0]), torch.tensor([4, 3, 3])
    tree = rw.Tree(parents, lengths)
    before = tree.to_dense(10)
    parents[2] = 1
    lengths += 1
    assert torch.equal(tree.to_dense(10), before)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        lambda tree: tree,
        lambda tree: rw.Causal().within(tree),
        lambda tree: ~(rw.Causal() & tree) | rw.Sinks(1),
        lambda tree: rw.PerHead([tree, rw.Causal()]),
        lambda tree: tree.within(rw.Documents([15, 15])),
    ],
)
@pytest.mark.parametrize(
    "term",
    [
        rw.ALiBi(torch.ones(2)),
        rw.DistanceBias(torch.ones(2, 9)),
    ],
)
def test_terms_that_count_distances_are_refused(pattern: Callable[[Pattern], Pattern], term: rw.terms.Term) -> None:
    q, made = torch.randn(1, 2, 30, 8), pattern(rw.Tree([-1, 0, 0], [10, 3, 2] if "15" in str(pattern) else [20, 5, 5]))
    with pytest.raises(rw.UnsupportedError, match=r"terms: got \w+ with Tree\("):
        rw.attention(q, q, q, made, terms=term)
    kept = rw.Softcap(5.0), rw.Bias(torch.ones(1, 1, 30, 30))
    tree = rw.Tree([-1, 0, 0], [20, 5, 5])
    assert rw.attention(q, q, q, tree, terms=kept).shape == q.shape


def test_modules_and_choices() -> None:
    """A module rotates by given positions only, and choices of keys inside of documents take no tree."""
    tree, x = rw.Tree([-1, 0, 0], [20, 20, 24]), torch.randn(1, 64, 32)
    layer = rw.nn.MultiheadAttention(32, 4, pattern=rw.Causal(), rotary_base=1e4, batch_first=True)
    with pytest.raises(rw.ShapeError, match=r"positions: got None; .* Pass positions=tree.positions\(\)"):
        layer(x, x, x, attn_mask=tree)
    out = layer(x, x, x, attn_mask=tree, positions=tree.positions())[0]
    for tokens in tree.paths():
        assert isinstance(tokens, Tensor)
        alone = layer(*[x[:, tokens]] * 3)[0]
        torch.testing.assert_close(out[:, tokens], alone)
    q = torch.randn(1, 4, 64, 8)
    with pytest.raises(rw.PatternError, match=r"documents: got Tree; wanted rw.Documents"):
        rw.adaptive.select(q, q, top_k=2, block_size=16, documents=tree)  # type: ignore[arg-type]
    for module in (rw.nn.MixtureOfBlockAttention(32, 4, block_size=16, top_k=2), rw.nn.NativeSparseAttention(32, 4)):
        with pytest.raises(rw.PatternError, match=r"documents: got Tree; wanted rw.Documents"):
            module(x, documents=tree)


def test_lists_of_keys_and_tables_are_filtered_by_a_tree() -> None:
    tree, q = rw.Tree([-1, 0, 0], [20, 20, 24]), torch.randn(1, 4, 64, 8)
    lists = rw.Selected(torch.randint(0, 64, (64, 5)))
    table = rw.patterns.random_blocks(64, 0.5, block_size=16)
    for pattern in (lists & tree, lists | tree, lists & rw.SlidingWindow(9).within(tree), table & tree, tree | table):
        want = rw.attention(q, q, q, rw.BlockTable(pattern.to_dense(64)[0, 0], 1))
        torch.testing.assert_close(rw.attention(q, q, q, pattern), want)


def test_a_tree_is_a_class_of_its_own() -> None:
    tree = rw.Tree([-1, 0, 0], [20, 20, 24])
    assert isinstance(tree, Tree)
    assert repr(tree) == "Tree([-1, 0, 0], [20, 20, 24])"
    assert repr(rw.Tree([-1] * 9, [1] * 9)) == "Tree(<9 nodes>)"
    assert repr(rw.Tree(torch.tensor([[-1, 0]]), torch.tensor([[1, 2]]))) == "Tree(<1 x 2 nodes>)"
    assert tree == rw.Tree(torch.tensor([-1, 0, 0]), torch.tensor([20, 20, 24]))
    assert tree != rw.Tree([-1, 0, 1], [20, 20, 24])
