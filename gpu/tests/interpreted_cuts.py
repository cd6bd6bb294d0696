"""Test how work is split for the kernels, in Triton's interpreter: packed heads, pairs of tiles, shares, grids, descriptors.

Run by test_triton.py in a process that has TRITON_INTERPRET=1 set.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import ringweave as rw
from ringweave.patterns import Pattern
from ringweave.plan import branches
from ringweave_gpu.triton import arguments, launch, queues
from ringweave_gpu.triton.launch_config import Packing
from tests.cases import MIXTURES, PATTERNS
from tests.oracle import NAMES, Inputs
from tests.test_conformance import conforms, run
from tests.test_terms import ours

EVERYTHING = PATTERNS | MIXTURES
# discarded results may combine infinities, and numpy, which computes for the interpreter, warns of that
pytestmark = [
    pytest.mark.sampled(2),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # Triton before 3.7 with numpy before 2.4
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


def cut(x: Inputs, pattern: Pattern, kernel: str = "forward") -> launch.Cut:
    """Return how the launch code splits the rows of a pattern of one branch."""
    (branch,) = branches(pattern, x.q.shape[2], x.k.shape[2], heads=x.q.shape[1], batch=x.q.shape[0])
    return launch.cut(kernel, x.q, x.k, x.v, branch.plan())


@pytest.mark.parametrize(("heads", "kv_heads", "packed"), [(8, 2, 4), (3, 1, 4), (5, 1, 4), (4, 4, 1)])
def test_grouped_queries_of_short_tiles_share_a_program(heads: int, kv_heads: int, packed: int, poisoned: None) -> None:
    x = Inputs.random(90, heads=heads, kv_heads=kv_heads, dtype=torch.float16)
    pattern = rw.patterns.random_blocks(90, 0.6, block_size=32)
    for kernel in ("forward", "backward_q"):
        assert cut(x, pattern, kernel).packing == Packing(packed, 32, 1)
    conforms(x, pattern, "triton")


def test_heads_of_their_own_lists_share_no_program(poisoned: None) -> None:
    x = Inputs.random(90, heads=4, kv_heads=2)
    apart = rw.patterns.random_blocks(90, 0.6, block_size=32, heads=4)
    together = rw.PerHead([rw.Causal(), rw.Causal(), rw.SlidingWindow(9), rw.SlidingWindow(9)]) & rw.Segments(30)
    assert cut(x, apart).packing.heads == 1
    assert cut(Inputs.random(20, heads=4, kv_heads=2), together).packing.heads == 2
    assert cut(Inputs.random(20, heads=4, kv_heads=1), together).packing.heads == 1
    conforms(Inputs.random(20, heads=4, kv_heads=2, batch=2), together, "triton")


@pytest.mark.parametrize("masked", [False, True])
def test_neighbouring_tiles_of_64_share_a_program(masked: bool, poisoned: None) -> None:
    """Pairs of tiles of 64 share a program: lists that agree except for a few tiles, an odd last tile, and different rows per head."""
    table = torch.rand(1, 2, 3, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    table = table.repeat_interleave(2, 2)[:, :, :5]
    table[:, 0, 1, 0], table[:, :, 4, 1] = True, True
    pattern: Pattern = rw.BlockTable(table, 64)
    pattern = pattern & ~rw.patterns.Periodic(1000, 70, 90) if masked else pattern
    x = Inputs.random(300, heads=2, dtype=torch.float16)
    for kernel in ("forward", "backward_q"):
        lists, blocks, packing, _ = cut(x, pattern, kernel)
        assert (lists.tiles, blocks.m, packing) == (2, 128, Packing(1, 128, 1))
    conforms(x, pattern, "triton")
    apart = rw.BlockTable(torch.eye(5, dtype=torch.bool), 64)
    assert cut(x, apart).lists.tiles == 1


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split every list longer than an even share, however short."""
    monkeypatch.setattr(queues, "LEAST", 1)


@pytest.mark.parametrize(("nq", "heads", "kv_heads"), [(1, 8, 1), (1, 2, 2), (3, 6, 2), (16, 2, 2)])
def test_few_queries_over_split_keys(nq: int, heads: int, kv_heads: int, eager: None, poisoned: None) -> None:
    x = Inputs.random(nq, 700, heads=heads, kv_heads=kv_heads, batch=1, dtype=torch.float16, value_dim=24)
    pattern = (rw.SlidingWindow(400) | rw.Sinks(3)) & rw.Causal()
    conforms(x, pattern, "triton", q_offset=700 - nq)
    _, _, packing, queue = cut(x, rw.Full())
    assert packing.heads == min(heads // kv_heads, 8) if heads != 6 else packing.heads == 4
    assert queue.splits is not None
    assert queue.slots > queue.splits.shape[0]


def on_small_tiles(name: str, n: int) -> Pattern:
    """Return the pattern on tiles of 32 tokens: short sequences then have many tiles, and long ones would take the interpreter minutes."""
    blocks = -(-n // 32)
    pattern = EVERYTHING[name](n) & rw.BlockTable(torch.ones(blocks, blocks, dtype=torch.bool), 32)
    assert branches(pattern, n, n, heads=4)[0].tile == (32, 32)
    return pattern


@pytest.mark.parametrize("name", ["causal", "global", "per_head", "nothing"])
def test_split_rows_and_columns(name: str, eager: None, poisoned: None) -> None:
    heads = 4 if name == "per_head" else 2
    x = Inputs.random(70, heads=heads, kv_heads=heads // 2, dim=8, dtype=torch.float16)
    conforms(x, on_small_tiles(name, 70), "triton")


@pytest.mark.parametrize(
    ("name", "tokens"), [pytest.param(*case, marks=pytest.mark.long) for case in [("documents", 258), ("longnet", 130)]]
)
def test_split_rows_and_columns_of_large_tiles(name: str, tokens: int, eager: None, poisoned: None) -> None:
    heads = 2 if name == "documents" else 4
    x = Inputs.random(tokens, heads=heads, kv_heads=heads // 2, dim=8, dtype=torch.float16)
    conforms(x, EVERYTHING[name](tokens), "triton")


@pytest.mark.sampled(1)
def test_split_rows_and_columns_of_several_blocks(eager: None, poisoned: None) -> None:
    """Each tile of a split list has several blocks: float32 in tiles of 64 has blocks of 32 queries and of 32 keys."""
    x = Inputs.random(130, heads=1, dim=8)
    pattern = rw.Causal() & rw.BlockTable(torch.ones(3, 3, dtype=torch.bool), 64)
    for kernel in ("forward", "backward_q"):
        _, blocks, _, queue = cut(x, pattern, kernel)
        assert (blocks.m, blocks.n) == (64, 32)
        assert queue.splits is not None
    conforms(x, pattern, "triton")


def test_split_tables(eager: None, poisoned: None) -> None:
    """Split tables are right: without masks, with packed heads, and with rows that end differently per batch element and head."""
    mask = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(1)) < 0.2
    mask[:, :, 2], mask[:, :, :, 1] = True, True
    pattern = rw.BlockTable(mask, 32)
    x = Inputs.random(110, heads=2, kv_heads=1, batch=2, dtype=torch.float16)
    (branch,) = branches(pattern, 110, 110, heads=2, batch=2)
    assert cut(x, pattern).queue.splits is not None
    assert queues.column_queue(branch.plan(), 2, 1, 8).splits is not None
    conforms(x, pattern, "triton")


def test_an_empty_share_changes_nothing(eager: None) -> None:
    """NaN in keys that no query attends, in tiles that one share of the row visits alone, does not reach the joined result."""
    x = Inputs.random(16, 700, heads=1, dtype=torch.float16)
    pattern = ~rw.patterns.Periodic(1000, 300, 400)
    clean = run(x, pattern, "triton")
    x.k[:, :, 300:400], x.v[:, :, 300:400] = torch.nan, torch.inf
    dirty = run(x, pattern, "triton")
    for name in NAMES:
        assert torch.equal(clean[name], dirty[name]), name


@pytest.mark.parametrize("name", ["full", "causal", "prefix", "longnet"])
def test_descriptors(name: str, monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    """Tiles loaded by tensor descriptors give the bits of tiles loaded by addresses, also past the last token and channel."""
    heads = 4 if name == "longnet" else 2
    x = Inputs.random(150, heads=heads, kv_heads=heads // 2, dim=24, value_dim=40, dtype=torch.float16)
    pattern = EVERYTHING[name](150)
    want = run(x, pattern, "triton")
    made = []
    launch_config_for, described = launch.launch_config_for, arguments.described
    monkeypatch.setattr(
        launch, "launch_config_for", lambda *case: dataclasses.replace(launch_config_for(*case), described=True)
    )
    monkeypatch.setattr(arguments, "described", lambda of, tokens: made.append(of) or described(of, tokens))
    got = run(x, pattern, "triton")
    assert made
    for result in NAMES:
        assert torch.equal(got[result], want[result]), result


DEAD = ~rw.patterns.Periodic(1000, 20, 31)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("side", "terms"),
    [
        (64, None),
        (16, "softcap"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(128, None), (16, None), (16, "distance")]),
    ],
)
def test_described_tiles_with_unattended_keys(
    side: int, terms: str | None, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    """NaN in keys and values that no query attends changes no bit; tiles of 64 are in pairs."""
    n = 100 if side > 16 else 40
    x = Inputs.random(n, heads=2, dim=16, dtype=torch.float16)
    pattern = DEAD & rw.BlockTable(torch.ones(-(-n // side), -(-n // side), dtype=torch.bool), side)
    assert cut(x, pattern).lists.tiles == (2 if side == 64 else 1)
    given = {None: [], "softcap": [rw.Softcap(2.0)]}.get(terms, [rw.DistanceBias(torch.randn(2, 9)), rw.Softcap(2.0)])
    want = ours(x, pattern, given, "triton")
    x.k[:, :, 20:31], x.v[:, :, 20:31] = torch.nan, torch.nan
    launch_config_for, described, made, asked = launch.launch_config_for, arguments.described, set(), []

    def chosen(kernel: str, *case: object) -> launch.LaunchConfig:
        asked.append(kernel)
        return dataclasses.replace(launch_config_for(kernel, *case), described=True)

    monkeypatch.setattr(launch, "launch_config_for", chosen)
    monkeypatch.setattr(arguments, "described", lambda of, n: made.add(asked[-1]) or described(of, n))
    got = ours(x, pattern, given, "triton")
    assert made >= {"forward", "backward_q"}
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_what_descriptors_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broadcast tensors and odd strides are read by addresses."""
    launch_config_for = launch.launch_config_for
    monkeypatch.setattr(
        launch, "launch_config_for", lambda *case: dataclasses.replace(launch_config_for(*case), described=True)
    )
    monkeypatch.setattr(arguments, "described", lambda *_: pytest.fail("described"))
    x = Inputs.random(70, heads=2, dtype=torch.float16)
    rw.attention(x.q, x.k[:, :1].expand(-1, 2, -1, -1), x.v, rw.Causal(), backend="triton")
    rw.attention(x.q, torch.randn(1, 2, 70, 17).half()[..., :16], x.v, rw.Causal(), backend="triton")
    facts = queues.masks(branches(rw.Causal(), 70, 70, heads=2)[0].plan())
    assert not facts.dead_keys
    assert not facts.dead_queries
