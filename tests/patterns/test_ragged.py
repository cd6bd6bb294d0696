"""Keys, documents and patterns that differ between batch elements have the pairs of their definitions."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.errors import PatternError
from ringweave.patterns import Pattern, parse, rebuild
from ringweave.plan.from_pattern import build

from ..cases import PATTERNS
from ..sampled import is_long

HEADS = 4
#: patterns made for one length: each document or key count is fixed by it
OF_ONE_LENGTH = {
    "documents", "causal_documents", "documents_by_ids", "documents_in_pieces", "within_documents", "keys", "within_keys",
    "natten", "image", "token_tree", "within_token_tree", "compared", "compared_and_causal",
}  # fmt: skip
TABLES = {"table", "table_per_head", "bigbird", "variable", "selected", "selected_per_head", "selected_blocks"}


def pairs(pattern: Pattern, nq: int, nk: int, b: int = 0, first: int = 0) -> Tensor:
    """Return the pairs (heads, nq, nk) of a pattern for queries from a position on."""
    q, k = torch.arange(first, first + nq)[:, None], torch.arange(nk)[None, :]
    return torch.stack([pattern.select(b, h).allows(q, k).expand(nq, nk) for h in range(HEADS)])


def side_by_side(pattern: Pattern, queries: list[int], keys: list[int], b: int = 0) -> Tensor:
    """Return the pairs (heads, all queries, all keys) of documents one after the other, without pairs between them."""
    dense = torch.zeros(HEADS, sum(queries), sum(keys), dtype=torch.bool)
    for i, j, nq, nk in zip(accumulate([0, *queries]), accumulate([0, *keys]), queries, keys, strict=False):
        if nq and nk:
            dense[:, i : i + nq, j : j + nk] = pairs(pattern, nq, nk, b, nk - nq)
    return dense


def spells_out(pattern: Pattern, dense: Tensor, q_offset: int = 0, tile: tuple[int, int] = (16, 32)) -> None:
    """The pattern and its plan allow exactly these pairs, and every listed tile allows some."""
    batch, heads, nq, nk = dense.shape
    assert torch.equal(pattern.to_dense(nq, nk, heads, batch=batch, q_offset=q_offset), dense)
    plan = build(pattern, nq, nk, heads=heads, batch=batch, q_offset=q_offset, tile=tile)
    assert torch.equal(plan.to_dense(), dense)
    padded = torch.nn.functional.pad(dense, (0, -nk % tile[1], 0, -nq % tile[0]))
    assert plan.tiles == int(padded.unflatten(3, (-1, tile[1])).unflatten(2, (-1, tile[0])).any(5).any(3).sum())
    assert rebuild(pattern.spec, pattern.tables) == pattern
    if "TokenMask" not in pattern.spec:
        assert pickle.loads(pickle.dumps(pattern)) == pattern


# ---- the definitions -------------------------------------------------------------------------------------------------


def keys_by_hand(stop: list[int], start: list[int], nq: int, nk: int) -> Tensor:
    return torch.tensor([[[a <= k < b for k in range(nk)]] * nq for a, b in zip(start, stop, strict=True)])[:, None]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16])
def test_key_padding_allows_the_keys_between_its_bounds(dtype: torch.dtype) -> None:
    stop, start = [0, 40, 100, 33, 40], [0, 7, 0, 33, 7]
    dense = keys_by_hand(stop, start, 100, 100)
    keys = rw.KeyPadding(torch.tensor(stop, dtype=dtype), torch.tensor(start))
    causal = rw.Causal().to_dense(100)
    for pattern, want in (
        (keys, dense), (~keys, ~dense), (keys & rw.Causal(), dense & causal), (keys | rw.Causal(), dense | causal),
        (~keys & rw.Causal(), ~dense & causal), (~(keys | rw.SlidingWindow(9)), ~(dense | rw.SlidingWindow(9).to_dense(100))),
    ):  # fmt: skip
        spells_out(pattern, want)
        assert pattern.density(100, batch=5) == pytest.approx(float(want.double().mean()), abs=1e-12)
    assert torch.equal(rw.KeyPadding(stop, start).to_dense(100, batch=5), dense)
    assert torch.equal(
        rw.KeyPadding(torch.tensor(stop, dtype=dtype)).to_dense(3, 100, batch=5), keys_by_hand(stop, [0] * 5, 3, 100)
    )
    strided = torch.tensor(stop).repeat_interleave(3)[::3]
    assert torch.equal(rw.KeyPadding(strided, start).to_dense(100, batch=5), dense)


def test_equal_bounds_of_all_elements() -> None:
    for keys in (rw.KeyPadding(40, 7), rw.KeyPadding(torch.tensor([40]), 7), rw.KeyPadding([40], [7])):
        assert keys.extents() == (None, None)
        assert keys.select(3, 1) is keys
        spells_out(keys & rw.Causal(), keys_by_hand([40] * 3, [7] * 3, 64, 64) & rw.Causal().to_dense(64))
        assert keys.plan(64, batch=3, heads=2).row_ptr.shape[0] == 1
    assert rw.KeyPadding(5) == parse("KeyPadding(5)")
    assert repr(rw.KeyPadding(5, 2)) == "KeyPadding(5, 2)"
    assert repr(rw.KeyPadding([5, 6], 2)) == "KeyPadding(<2 bounds>, 2)"


@pytest.mark.parametrize("seed", range(6))
def test_tokens_with_equal_ids_attend_each_other(seed: int) -> None:
    """Tokens with equal non-negative ids attend each other, in any order, with ids of one row or of each batch element."""
    chance = random.Random(seed)
    n, batch = chance.randint(1, 90), 3
    rows = []
    for _ in range(batch):
        row: list[int] = []
        while len(row) < n:
            row += [chance.choice([-1, -7, 0, 5, 2**40, len(row)])] * chance.randint(1, 30)
        rows.append(row[:n])
    dense = torch.tensor([[[a == b >= 0 for b in row] for a in row] for row in rows])[:, None]
    ids = torch.tensor(rows)
    spells_out(rw.Documents(ids=ids), dense)
    spells_out(rw.Documents(ids=ids) & ~rw.SlidingWindow(5), dense & ~rw.SlidingWindow(5).to_dense(n))
    spells_out(rw.Documents(ids=ids[0]), dense[:1])
    spells_out(~rw.Documents(ids=ids.T.contiguous().T), ~dense)


def test_queries_and_keys_packed_apart() -> None:
    queries, keys = [3, 0, 40, 1], [9, 5, 40, 30]
    bounds = {
        f"cu_seqlens_{name}": torch.tensor([0, *accumulate(x)], dtype=torch.int32)
        for name, x in (("q", queries), ("k", keys))
    }
    documents = rw.Documents(**bounds)
    spells_out(documents, side_by_side(rw.Full(), queries, keys)[None])
    spells_out(rw.Causal().within(documents), side_by_side(rw.Causal(), queries, keys)[None])
    listed = rw.Documents(**{name: x.tolist() for name, x in bounds.items()})
    assert torch.equal(listed.to_dense(44, 84), documents.to_dense(44, 84))


@pytest.mark.parametrize("chance", [0.0, 0.01, 0.3, 1.0])
def test_a_mask_of_global_tokens(chance: float) -> None:
    mask = torch.rand(3, 300, generator=torch.Generator().manual_seed(0)) < chance
    dense = (mask[:, :, None] | mask[:, None, :])[:, None]
    spells_out(rw.Global(mask), dense)
    spells_out(~rw.Global(mask) & rw.Causal(), ~dense & rw.Causal().to_dense(300))
    spells_out(
        rw.Global(mask[1]) | rw.KeyPadding([0, 300]), dense[1] | torch.tensor([False, True])[:, None, None, None]
    )
    spells_out((rw.Global(mask) | rw.SlidingWindow(9)) & rw.KeyPadding([300, 5, 0]),
               (dense | rw.SlidingWindow(9).to_dense(300)) & keys_by_hand([300, 5, 0], [0] * 3, 300, 300))  # fmt: skip
    assert rw.Global(mask[0]).density(300) == pytest.approx(float(dense[0].double().mean()), abs=1e-12)
    q, k, v = ones(3, 300)
    want = (rw.Dilated(3, 64).to_dense(300) | dense) & rw.Causal().to_dense(300)
    assert torch.equal(rw.attention(q, k, v, (rw.Dilated(3, 64) | rw.Global(mask)) & rw.Causal()) > 0, want)
    before = rw.Global(mask)
    mask ^= True
    assert torch.equal(before.to_dense(300, batch=3), dense)


@pytest.mark.parametrize("chance", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("queries", [40, 300, 700])
def test_a_mask_of_keys_that_exist(queries: int, chance: float) -> None:
    """A mask of existing keys applies to any number of queries, smaller or larger than the number of keys."""
    mask = torch.rand(3, 300, generator=torch.Generator().manual_seed(0)) < chance
    dense = mask[:, None, None].repeat(1, 1, queries, 1)
    spells_out(rw.Sinks(mask), dense)
    spells_out(~rw.Sinks(mask) & rw.Causal(), ~dense & rw.Causal().to_dense(queries, 300))
    spells_out(rw.Sinks(mask[:1]) & rw.KeyPadding([300, 5, 0]),
               dense[:1] & keys_by_hand([300, 5, 0], [0] * 3, queries, 300))  # fmt: skip
    assert rw.patterns.parse("Sinks(4)") == rw.Sinks(4)
    before = rw.Sinks(mask)
    assert before.select(1, 0) == rw.Sinks(mask[1])
    assert (before | rw.Sinks(2)).spec == "Sinks(_) | Sinks(2)"
    mask ^= True
    assert torch.equal(before.to_dense(queries, 300, batch=3), dense)


# ---- within: equal rows wherever a document is -----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(PATTERNS) - TABLES))
def test_a_row_is_the_same_alone_packed_and_padded(name: str) -> None:
    """A row has the same pairs and results alone, packed and padded, at any place of a sequence and of a batch."""
    n, room = 70, 111
    others = [n, n] if name in OF_ONE_LENGTH else [33, 129]
    pattern = PATTERNS[name](n)
    alone = pairs(pattern, n, n)
    lengths = [others[0], n, others[1]]
    packed = pattern.within(rw.Documents(lengths))
    ids = torch.tensor([7] * others[0] + [-1] * 5 + [3] * n + [4] * others[1])
    marked = pattern.within(rw.Documents(ids=torch.stack([ids, ids.roll(others[1])])))
    padded = pattern.within(rw.KeyPadding(torch.tensor([n, room, n + 20]), torch.tensor([0, room - n, 20])))
    places = {
        "packed": (packed, 0, others[0], sum(lengths)), "ids": (marked, 0, others[0] + 5, len(ids)),
        "right": (padded, 0, 0, room), "left": (padded, 1, room - n, room), "middle": (padded, 2, 20, room),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, 16, generator=generator) for _ in range(3))
    want = rw.attention(q, k, v, pattern)
    for where, (whole, b, first, total) in places.items():
        batch = whole.extents()[0] or 1
        dense = whole.to_dense(total, heads=HEADS, batch=batch)[b]
        inside = dense[:, first : first + n]
        assert torch.equal(inside[:, :, first : first + n], alone), where
        assert int(inside.sum()) == int(alone.sum()), where
        # padding is not read, and no value of another document matters
        rows = [
            torch.full((batch, HEADS, total, 16), 100.0 if where in ("packed", "ids") else torch.nan) for _ in range(3)
        ]
        for row, x in zip(rows, (q, k, v), strict=True):
            row[b, :, first : first + n] = x[0]
        got = rw.attention(rows[0], rows[1], rows[2], whole)[b, :, first : first + n]
        torch.testing.assert_close(got, want[0], atol=2e-6, rtol=1e-5, msg=where)
    spells_out(packed, side_by_side(pattern, lengths, lengths)[None], tile=(32, 16))


def _of_batch(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q + b >= k


@pytest.mark.parametrize(
    "pattern",
    [
        rw.Sinks(4), rw.Sinks(4) & rw.Causal(), rw.Dilated(3, 4), ~rw.Causal(), rw.from_mask_mod(_of_batch),
        rw.PerHead([rw.Causal(), rw.Strided(3), rw.Causal(), rw.from_mask_mod(_of_batch)]),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_within_is_the_pattern_of_each_document(pattern: Pattern, seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(1, chance.choice([3, 150])) for _ in range(chance.randint(1, 9))]
    dense = torch.stack([side_by_side(pattern, lengths, lengths, b) for b in range(2)])
    within = pattern.within(rw.Documents(torch.tensor(lengths)))
    spells_out(within, dense)
    spells_out(~within, ~dense)
    plain = torch.stack([pairs(pattern, len(dense[0, 0]), len(dense[0, 0]), b) for b in range(2)])
    spells_out(within | pattern, dense | plain)
    start = [chance.randint(0, 50), 0]
    stop = [chance.randint(start[0], 90), 90]
    rows = torch.zeros(2, HEADS, 90, 90, dtype=torch.bool)
    for b, (a, e) in enumerate(zip(start, stop, strict=True)):
        rows[b, :, a:e, a:e] = pairs(pattern, e - a, e - a, b)
    spells_out(pattern.within(rw.KeyPadding(stop, start)), rows)
    spells_out(pattern.within(rw.KeyPadding(stop, start)), rows[:, :, 60:61], q_offset=60)


# ---- changes between calls, and the cost of planning -----------------------------------------------------------------


def ones(batch: int, n: int) -> tuple[Tensor, ...]:
    return (
        torch.zeros(batch, 1, n, 8),
        torch.zeros(batch, 1, n, 8),
        torch.eye(n)[None, None].expand(batch, 1, n, n).contiguous(),
    )


def test_a_write_to_the_bounds_is_seen() -> None:
    q, k, v = ones(2, 48)
    stop = torch.tensor([5, 48])
    pattern = rw.Causal() & rw.KeyPadding(stop)
    for write in (lambda: stop.add_(-1), lambda: stop.data.sub_(1), lambda: stop.numpy().__isub__(1)):
        assert torch.equal(rw.attention(q, k, v, pattern) > 0, pattern.to_dense(48, batch=2))
        before = pattern.plan(48, batch=2).to_dense()
        write()
        after = pattern.plan(48, batch=2).to_dense()
        assert torch.equal(after, pattern.to_dense(48, batch=2))
        assert not torch.equal(after, before)
    copied = torch.tensor([20, 28])
    documents = rw.Documents(copied)
    copied[0] = 30
    assert documents == rw.Documents([20, 28])


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.data.add_(1)])
def test_gradients_of_bounds_that_were_changed_are_refused(write: Callable[[Tensor], Tensor]) -> None:
    q, k, v = (x.requires_grad_() for x in ones(2, 48))
    stop = torch.tensor([5, 40])
    out = rw.attention(q, k, v, rw.Causal() & rw.KeyPadding(stop))
    write(stop)
    with pytest.raises(
        PatternError, match="KeyPadding: got bounds that were changed; wanted the same values as when the call"
    ):
        out.sum().backward()


def test_tensors_without_values_are_not_read() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    makes: list[Callable[[Tensor], Pattern]] = [
        lambda t: rw.Causal() & rw.KeyPadding(t), lambda t: rw.Causal().within(rw.KeyPadding(t)), lambda t: rw.Documents(t),
        lambda t: rw.Causal().within(rw.Documents(ids=t.repeat_interleave(24))), lambda t: rw.Global(t.repeat_interleave(24) > 3),
    ]  # fmt: skip
    q = torch.randn(3, 2, 1, 48, 8)
    for make in makes:
        with FakeTensorMode():
            x = torch.empty(2, 1, 48, 8)
            assert rw.attention(x, x, x, make(torch.tensor([20, 28]))).shape == (2, 1, 48, 8)
        tables = torch.tensor([[20, 28], [28, 20], [1, 47]])
        each = torch.vmap(lambda q, t, make=make: rw.attention(q, q, q, make(t)))(q, tables)
        for one, x, t in zip(each, q, tables, strict=True):
            torch.testing.assert_close(one, rw.attention(x, x, x, make(t)))
    with pytest.raises(PatternError, match="got a table on the meta device"):
        rw.attention(q[0], q[0], q[0], rw.KeyPadding(torch.empty(2, dtype=torch.int64, device="meta")))


def test_patterns_of_numbers_that_change_between_compiled_calls() -> None:
    """Patterns may be built inside a compiled graph from numbers that change between calls."""
    q = torch.randn(2, 2, 48, 8)
    makes: list[Callable[[int], Pattern]] = [
        rw.SlidingWindow, rw.Sinks, rw.KeyPadding, rw.PrefixLM, lambda n: rw.Documents([n, 48 - n]),
        lambda n: rw.Documents(cu_seqlens=[0, n, 48]), lambda n: rw.LongNet([2 * n, 4 * n], [1, 2]),
    ]  # fmt: skip
    # each takes seconds
    for make in makes if is_long() else makes[::2]:
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda q, n, make=make: rw.attention(q, q, q, make(n)), fullgraph=True, backend="eager", dynamic=True
        )
        for n in (4, 8):
            torch.testing.assert_close(compiled(q, n), rw.attention(q, q, q, make(n)))
    torch._dynamo.reset()
    step = torch.compile(
        lambda q, first: rw.attention(q[:, :, :3], q, q, rw.Causal(), q_offset=first), fullgraph=True, backend="eager",
        dynamic=True,
    )  # fmt: skip
    for first in (torch.tensor([3, 9]), torch.tensor(5)):
        torch.testing.assert_close(step(q, first), rw.attention(q[:, :, :3], q, q, rw.Causal(), q_offset=first))
    torch._dynamo.reset()
    wrong = torch.compile(lambda q: rw.attention(q, q, q, rw.Documents([50, -2])), fullgraph=True, backend="eager")
    with pytest.raises(PatternError, match="bounds that increase from 0"):
        wrong(q)


def test_equal_bounds_share_their_plan() -> None:
    calls = (rw.Causal() & rw.KeyPadding(torch.tensor([40, 7])) for _ in range(2))
    first, second = (pattern.plan(64, batch=2) for pattern in calls)
    assert first is second
    stop = torch.arange(256) % 4 + 100
    plan = (rw.Causal() & rw.KeyPadding(stop)).plan(1, 128, heads=32, batch=256, q_offset=127)
    assert plan.row_ptr.shape[0] == 4
    assert torch.equal(plan.row_set, (torch.arange(256) % 4)[:, None].expand(256, 32).int())


@pytest.mark.parametrize("dynamic", [False, True])
def test_patterns_are_made_of_tensors_inside_compiled_functions(dynamic: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    makes: list[Callable[[Tensor], Pattern]] = [
        lambda t: rw.Causal() & rw.KeyPadding(t[:2], t[2:4]),
        lambda t: (rw.Causal() & rw.Sinks(4)).within(rw.KeyPadding(t[:2], start=t[2:4])),
        lambda t: rw.Causal().within(rw.Documents(ids=t[4:].view(2, 64))),
        lambda t: rw.SlidingWindow(5).within(rw.Documents(lengths=t[:4])),
        lambda t: rw.Documents(cu_seqlens=torch.nn.functional.pad(t[:4].cumsum(0), (1, 0))) & rw.Causal(),
        lambda t: rw.Causal().within(rw.Documents(cu_seqlens_q=torch.stack([t[3] * 0, t[0] + t[1] + t[2] + t[3]]),
                                                  cu_seqlens_k=torch.stack([t[3] * 0, t[0] + t[1] + t[2] + t[3]]))),
    ]  # fmt: skip
    # with sizes that vary from the start, each takes a second
    for number, make in enumerate(makes[:: 3 if dynamic and not is_long() else 1]):
        torch._dynamo.reset()
        # the operator's gradients are traced for the first; no pattern reaches that trace
        counter = CompileCounterWithBackend("eager" if number and not is_long() else "aot_eager")
        step = torch.compile(
            lambda q, k, v, t, make=make: rw.attention(q * 1.0, k, v, make(t)),
            fullgraph=True,
            backend=counter,
            dynamic=dynamic or None,
        )
        first = 0
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            stop = torch.randint(20, 40, (2,), generator=generator)
            left = 64 - int(stop.sum())
            bounds = torch.cat([stop if left > 3 else stop * 0 + 30, torch.tensor([1, (left if left > 3 else 4) - 1])])
            values = torch.cat([bounds, torch.randint(-1, 3, (2, 64), generator=generator).sort(1).values.reshape(-1)])
            q, k, v = (torch.randn(2, 2, 64, 8, generator=generator).requires_grad_() for _ in range(3))
            got = step(q, k, v, values)
            want = rw.attention(q, k, v, make(values), backend="reference")
            torch.testing.assert_close(got, want)
            grads = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want))
            torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)
            first = counter.frame_count if seed == 0 else first
        assert counter.frame_count == first


def test_documents_of_another_number_recompile_once() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(
        lambda q, cu: rw.attention(q, q, q, rw.Causal().within(rw.Documents(cu_seqlens=cu))),
        fullgraph=True,
        backend=counter,
    )
    q = torch.randn(1, 2, 64, 8)
    for count in (2, 3, 5, 8, 13):
        cu = torch.tensor([0, *sorted(random.Random(count).sample(range(1, 64), count - 1)), 64])
        want = rw.attention(q, q, q, rw.Causal().within(rw.Documents(cu_seqlens=cu)), backend="reference")
        torch.testing.assert_close(step(q, cu), want)
    assert counter.frame_count <= 2


def _seconds(make: Callable[[], object]) -> float:
    """Return the least CPU time of this thread in several runs, so that other processes do not count."""
    found = []
    for _ in range(5):
        start = time.thread_time()
        make()
        found.append(time.thread_time() - start)
    return min(found)


@pytest.mark.measures
def test_the_time_to_plan_grows_with_tiles_that_bounds_cross() -> None:
    """The time to plan follows the tiles that bounds cross, not batch times heads or the length squared; limits are five times the measured times."""
    generator = torch.Generator().manual_seed(0)
    stop = torch.randint(1, 4097, (256,), generator=generator)
    decode = rw.Causal() & rw.KeyPadding(stop)
    assert _seconds(lambda: build(decode, 1, 4096, heads=32, batch=256, q_offset=4095, tile=(16, 128))) < 0.010
    stop, start = (
        torch.randint(1024, 2049, (32,), generator=generator),
        torch.randint(0, 1024, (32,), generator=generator),
    )
    padding = rw.Causal() & rw.KeyPadding(stop, start)
    assert _seconds(lambda: build(padding, 2048, 2048, heads=16, batch=32, tile=(128, 128))) < 0.050
    n = 10**6
    alike = ((rw.SlidingWindow(512) | rw.Sinks(4)) & rw.Causal()).within(rw.Documents([1000] * 1000))
    assert _seconds(lambda: build(alike, n, n, tile=(128, 128))) < 0.250
    short = torch.randint(10, 60, (30_000,), generator=generator)
    n = int(short.sum())
    assert _seconds(lambda: build(rw.Causal().within(rw.Documents(short)), n, n, tile=(128, 128))) < 5.0


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda t: rw.Causal() & rw.KeyPadding(t),
        lambda t: rw.Causal().within(rw.Documents(t)),
        lambda t: rw.Dilated(64, 16) & rw.Documents(t),
    ],
)
def test_arguments_of_a_compiled_function_are_checked(make: Callable[[Tensor], Pattern]) -> None:
    torch._dynamo.reset()
    q = torch.randn(2, 1, 64, 8)
    step = torch.compile(lambda q, t: rw.attention(q, q, q, make(t)), fullgraph=True, backend="aot_eager")
    with pytest.raises(PatternError, match="wanted 0 <= start <= stop <= 64|lengths that sum to the number of keys"):
        step(q, torch.tensor([3, 65]))
