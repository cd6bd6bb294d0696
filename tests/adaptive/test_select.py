"""Tables chosen from queries and keys, against a second, dense implementation of the definitions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.adaptive import KeyBounds, block_means, select

from ..oracle import Inputs, attention


def blocks_of(n: int, side: int, first: int = 0) -> list[range]:
    """Return the tokens of each block; the first token has position ``first``."""
    ends = sorted({0, n, *(p - first for p in range(0, first + n + side, side) if 0 < p - first < n)})
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def scores(x: Inputs, method: str, rows: list[range], columns: list[range], causal: bool, q_offset: int) -> Tensor:
    """Return the score of every block, (B, Hq, rows, columns), by loops over blocks; for antidiagonal, the mass."""
    q, k = x.q.double() * x.q.shape[3] ** -0.5, x.k.double().repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    result = q.new_zeros(*q.shape[:2], len(rows), len(columns))
    for r, mine in enumerate(rows):
        for c, others in enumerate(columns):
            a, b = q[:, :, mine.start : mine.stop], k[:, :, others.start : others.stop]
            if method == "mean":
                result[:, :, r, c] = (a.mean(2) * b.mean(2)).sum(-1)
            else:
                result[:, :, r, c] = (
                    torch.maximum(
                        a[:, :, :, None] * b.amin(2)[:, :, None, None], a[:, :, :, None] * b.amax(2)[:, :, None, None]
                    )
                    .sum(-1)
                    .amax((2, 3))
                )
    return result


def may_and_must(
    rows: list[range], columns: list[range], sides: tuple[int, int], causal: bool, local: int, sinks: int, q_offset: int
) -> tuple[Tensor, Tensor]:
    may, must = torch.zeros(2, len(rows), len(columns), dtype=torch.bool)
    for r, mine in enumerate(rows):
        first, last = (q_offset + mine.start) // sides[1], (q_offset + mine.stop - 1) // sides[1]
        for c in range(len(columns)):
            may[r, c] = not causal or c <= last
            must[r, c] = c < sinks or (local > 0 and first - local < c < last + local)
    return may, must & may


CASES = {
    "square": (256, 256, 32, True, 0),
    "odd": (200, 200, 32, True, 0),
    "not causal": (130, 170, 32, False, 0),
    "sides": (200, 200, (64, 32), True, 0),
    "tall": (200, 200, (16, 64), True, 0),
    "chunk": (80, 208, 32, True, 128),
    "cut chunk": (100, 200, 32, True, 100),
    "token": (48, 48, (1, 16), True, 0),
    "step": (1, 300, 32, True, 299),
}


@pytest.mark.parametrize("heads", ["query", "kv", "shared"])
@pytest.mark.parametrize("method", ["mean", "bounds"])
@pytest.mark.parametrize("name", CASES)
def test_the_best_blocks(name: str, method: str, heads: str) -> None:
    nq, nk, block, causal, q_offset = CASES[name]
    sides = block if isinstance(block, tuple) else (block, block)
    x = Inputs.random(nq, nk, batch=2, heads=4, kv_heads=2, dim=16)
    one = nq <= sides[0]
    rows, columns = [range(nq)] if one else blocks_of(nq, sides[0], q_offset), blocks_of(nk, sides[1])
    local, sinks = 2, 1
    may, must = may_and_must(rows, columns, sides, causal, local, sinks, q_offset)
    top_k = int(must.sum(-1).max()) + 2
    table = select(
        x.q, x.k, method=method, top_k=top_k, block_size=block, causal=causal, local=local, sinks=sinks, heads=heads,
        q_offset=q_offset,
    )  # fmt: skip
    want = scores(x, method, rows, columns, causal, q_offset)
    if causal:
        # blocks with keys after the row's last query are not scored
        ends = torch.tensor([q_offset + row.stop for row in rows])[:, None]
        want = want.masked_fill(torch.arange(1, len(columns) + 1) * sides[1] > ends, -torch.inf)
    if heads != "query":
        share = want.softmax(-1).nan_to_num(0)
        want = share.unflatten(1, (1 if heads == "shared" else 2, -1)).mean(2)
    front = 0 if one else q_offset // sides[0]
    mask = table.mask
    assert not mask[..., :front, :].any()
    mask = mask[..., front:, :]
    assert mask.shape == want.shape
    assert not (mask & ~may).any()
    assert (mask | ~must).all()
    assert torch.equal(mask.sum(-1), may.sum(-1).clamp(max=top_k).expand(mask.shape[:-1]))
    # every freely chosen block scores at least as high as every block not chosen
    free = mask & ~must
    worst = want.masked_fill(~free, torch.inf).amin(-1)
    best = want.masked_fill(mask | ~may, -torch.inf).amax(-1)
    assert (worst >= best - 1e-6).all()


def test_antidiagonals() -> None:
    """Scores are shares of a softmax over explicit sums along antidiagonals."""
    x = Inputs.random(256, heads=2, dim=8)
    stride, side = 8, 32
    s = (x.q.double() @ x.k.double().mT) * 8**-0.5
    n = 256 // stride
    sums = torch.zeros(1, 2, n, n, dtype=torch.float64)
    for t in range(stride):
        sums += s[:, :, stride - 1 - t :: stride, t::stride]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    weights = (sums / stride).masked_fill(future, -torch.inf).softmax(-1)
    want = weights.unflatten(2, (8, -1)).unflatten(4, (8, -1)).mean(3).sum(-1)
    table = select(x.q, x.k, method="antidiagonal", top_k=3, block_size=side, stride=stride, local=0, sinks=0)
    may = torch.ones(8, 8, dtype=torch.bool).tril()
    top = want.masked_fill(~may, -1).topk(3, -1).indices
    mask = torch.zeros_like(want, dtype=torch.bool).scatter(-1, top, True) & may
    assert torch.equal(table.mask, mask)
    # nothing changes where queries come in chunks
    rest = select(
        x.q[:, :, 96:], x.k, method="antidiagonal", top_k=3, block_size=side, stride=stride, local=0, sinks=0,
        q_offset=96,
    )  # fmt: skip
    assert torch.equal(rest.mask[:, :, 3:], table.mask[:, :, 3:])


def parts(tokens: range, first: int, size: int) -> list[range]:
    """Split a block's tokens where their positions, which start at `first`, are multiples of `size`."""
    places = range(first + tokens.start, first + tokens.stop)
    return [range(a - first, b - first) for a, b in itertools.pairwise(sorted({
        places.start, places.stop, *(p for p in places if p % size == 0)}))]  # fmt: skip


def shares(x: Inputs, method: str, size: int, rows: list[range], columns: list[range], causal: bool, q_offset: int,
           aligned: bool) -> Tensor:  # fmt: skip
    """Return each block's share of a softmax over parts of key blocks, averaged over parts of a row's queries."""
    q, k = x.q.double() * x.q.shape[3] ** -0.5, x.k.double().repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    result = q.new_zeros(*q.shape[:2], len(rows), len(columns))
    for r, mine in enumerate(rows):
        of_row = parts(mine, q_offset if aligned else 0, size)
        for part in of_row:
            found, block = [], []
            for c, others in enumerate(columns):
                for keys in parts(others, 0, size):
                    if causal and keys.start > q_offset + part.stop - 1:
                        continue
                    if method == "mean":
                        product = q[:, :, part.start : part.stop].mean(2) * k[:, :, keys.start : keys.stop].mean(2)
                    else:
                        # places within the part: query p is multiplied with key size - 1 - p
                        begin = (q_offset + part.start) % size if aligned else 0
                        pairs = [(i, size - 1 - begin - i + part.start + keys.start) for i in part]
                        pairs = [(i, j) for i, j in pairs if j in keys]
                        product = sum((q[:, :, i] * k[:, :, j] for i, j in pairs), torch.zeros_like(q[:, :, 0])) / size
                    found.append(product.sum(-1))
                    block.append(c)
            weights = torch.stack(found, -1).softmax(-1) / len(of_row)
            result[:, :, r].index_add_(-1, torch.tensor(block), weights)
    return result


@pytest.mark.parametrize("method", ["mean", "antidiagonal"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "token"])
def test_parts_of_blocks(name: str, method: str) -> None:
    """Pools and antidiagonals choose by their shares, also with incomplete blocks and parts."""
    nq, nk, block, causal, q_offset = CASES[name]
    sides = block if isinstance(block, tuple) else (block, block)
    x = Inputs.random(nq, nk, batch=2, heads=4, kv_heads=2, dim=8, dtype=torch.float64)
    one = nq <= sides[0]
    rows, columns = [range(nq)] if one else blocks_of(nq, sides[0], q_offset), blocks_of(nk, sides[1])
    want = shares(x, method, 8, rows, columns, causal, q_offset, not one)
    option = {"pool": 8} if method == "mean" else {"stride": 8}
    front = 0 if one else q_offset // sides[0]
    for heads, groups in (("query", 4), ("shared", 1)):
        table = select(
            x.q, x.k, method=method, top_k=3, block_size=block, causal=causal, local=0, sinks=0, heads=heads,
            q_offset=q_offset, **option,
        )  # fmt: skip
        score = want.unflatten(1, (groups, -1)).mean(2)
        may, _ = may_and_must(rows, columns, sides, causal, 0, 0, q_offset)
        top = score.masked_fill(~may, -1).topk(3, -1).indices
        mask = torch.zeros_like(score, dtype=torch.bool).scatter(-1, top, True) & may
        assert torch.equal(table.mask[:, :, front:], mask)


def test_as_many_as_hold_a_mass() -> None:
    x = Inputs.random(256, batch=2, heads=2, dim=16)
    x.q.mul_(8)
    share = scores(x, "mean", blocks_of(256, 32), blocks_of(256, 32), True, 0)
    may = torch.ones(8, 8, dtype=torch.bool).tril()
    share = share.masked_fill(~may, -torch.inf).softmax(-1)
    ordered = share.sort(-1, descending=True)
    counts = []
    for mass in (0.5, 0.9):
        table = select(x.q, x.k, method="top_p", mass=mass, block_size=32, local=0, sinks=0)
        count = ((ordered.values.cumsum(-1) - ordered.values) < mass).sum(-1)
        assert torch.equal(table.mask.sum(-1), count)
        chosen = torch.arange(8) < count[..., None]
        assert torch.equal(table.mask, torch.zeros_like(chosen).scatter(-1, ordered.indices, chosen))
        counts.append(count)
        bounded = select(x.q, x.k, method="top_p", mass=mass, top_k=2, block_size=32, local=0, sinks=0)
        assert torch.equal(bounded.mask.sum(-1), count.clamp(max=2))
        assert bounded.blocks.most == 2
    assert (counts[1] >= counts[0]).all()
    assert (counts[1] > counts[0]).any()
    assert select(x.q, x.k, method="top_p", block_size=32, local=0, sinks=0).mask.sum() == counts[1].sum()


def test_no_block_is_local() -> None:
    """With ``local=0``, a row of queries that spans several key blocks takes the best blocks anywhere."""
    x = Inputs.random(128, heads=1, dim=8)
    x.q[...], x.k[:, :, :8], x.k[:, :, 8:] = 1.0, 1.0, -1.0
    table = select(x.q, x.k, top_k=1, block_size=(32, 8), local=0, sinks=0)
    assert torch.equal(table.mask.nonzero()[:, 2:], torch.tensor([[0, 0], [1, 0], [2, 0], [3, 0]]))


def test_a_density_of_the_softmax() -> None:
    x = Inputs.random(256, heads=2, dim=8)
    table = select(x.q, x.k, method="top_p", density=0.25, block_size=32)
    assert torch.equal(table.mask, select(x.q, x.k, method="mean", density=0.25, block_size=32).mask)


AMOUNTS = {
    "top_k": {"top_k": 5},
    "mass": {"method": "top_p", "mass": 0.7},
    "density": {"density": 0.3},
    "bounds": {"method": "bounds", "top_k": 5},
    "antidiagonals": {"method": "antidiagonal", "top_k": 5, "stride": 1},
    "pools": {"method": "top_p", "mass": 0.7, "pool": 1},
}


@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize("heads", ["query", "kv", "shared"])
@pytest.mark.parametrize("amount", AMOUNTS)
def test_a_row_of_blocks_depends_on_no_later_token(amount: str, heads: str, local: int) -> None:
    """With blocks of one query, training and decoding choose the same blocks."""
    how: dict[str, Any] = {**AMOUNTS[amount], "heads": heads, "local": local, "sinks": local}
    x = Inputs.random(96, batch=1, heads=4, kv_heads=2, dim=8)
    for sides in ((32, 32), (16, 32), (32, 8), (1, 16)):
        want = select(x.q, x.k, block_size=sides, **how).mask
        for row in range(1, want.shape[2], 1 + want.shape[2] // 7):
            q, k = x.q.clone(), x.k.clone()
            for each in (q, k):
                each[:, :, row * sides[0] :] *= -50
            assert torch.equal(select(q, k, block_size=sides, **how).mask[:, :, :row], want[:, :, :row]), (sides, row)
    for n in range(96):
        step = select(x.q[:, :, n : n + 1], x.k[:, :, : n + 1], block_size=(1, 16), q_offset=n, **how).mask[:, :, 0]
        assert torch.equal(step, want[:, :, n, : step.shape[-1]]), n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("heads", ["query", "kv", "shared"])
@pytest.mark.parametrize("amount", [{"top_k": 4}, {"density": 0.3}], ids=str)
def test_of_equal_scores_the_earlier_block_is_chosen(amount: dict[str, float], heads: str, dtype: torch.dtype) -> None:
    """Every block scores 0, so a row has its own block, the first, and those after it."""
    q, k = torch.randn(1, 4, 200, 8, dtype=dtype), torch.zeros(1, 2, 200, 8, dtype=dtype)
    how: dict[str, Any] = {"block_size": (1, 8), "heads": heads, **amount}
    for method in ("mean", "bounds"):
        mask = select(q, k, method=method, **how).mask
        for n in range(200):
            own, count = n // 8, int(mask[0, 0, n].sum())
            want = sorted({own, *range(count - (own >= count))})
            assert all(row.nonzero().flatten().tolist() == want for row in mask[0, :, n])


@pytest.mark.parametrize("method", ["mean", "bounds"])
def test_steps_choose_as_the_whole_sequence_where_scores_are_equal(method: str) -> None:
    """The number of keys does not decide between blocks of equal scores, which few distinct numbers have."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 4, 400, 8, generator=generator).round().clamp(-1, 1) for _ in range(2))
    # without a scale every product is exact
    how: dict[str, Any] = {"method": method, "top_k": 5, "block_size": (1, 8), "scale": 1.0}
    whole = select(q, k, **how).mask
    for n in range(0, 400, 7):
        step = select(q[:, :, n : n + 1], k[:, :, : n + 1], q_offset=n, **how).mask
        assert torch.equal(step[:, :, 0], whole[:, :, n, : step.shape[-1]]), n


def test_attention_that_does_not_look_ahead() -> None:
    """With blocks of one query the choice is bit-identical; with larger ones it depends on later queries."""
    x = Inputs.random(192, heads=2, dim=16)
    later = x.q.clone()
    later[:, :, 100:] = 50 * torch.randn(16)
    moved = {}
    for side in (1, 32):
        outs = [
            rw.attention(q, x.k, x.v, select(q, x.k, top_k=4, block_size=(side, 16)) & rw.Causal())
            for q in (x.q, later)
        ]
        moved[side] = [n for n in range(100) if not torch.equal(outs[0][:, :, n], outs[1][:, :, n])]
    assert not moved[1]
    assert moved[32]
    assert min(moved[32]) >= 96


def test_a_share_of_what_may_be() -> None:
    x = Inputs.random(500, heads=2)
    for density in (0.05, 0.3, 1.0):
        table = select(x.q, x.k, density=density, block_size=16)
        want = [max(math.ceil(density * n - 1e-9), min(n, 2)) for n in range(1, 33)]
        assert torch.equal(table.mask.sum(-1), torch.tensor(want).expand(1, 2, 32))


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Inputs.random(512, heads=4, kv_heads=2, dim=16)
    for method, pool in (("mean", None), ("mean", 8), ("top_p", 16), ("antidiagonal", None), ("bounds", None)):
        how = {"density": 0.3, "pool": pool} if method != "top_p" else {"mass": 0.7, "pool": pool}
        whole = select(x.q, x.k, method=method, block_size=32, heads="kv", **how)
        with monkeypatch.context() as small:
            small.setattr("ringweave.chunks._BUDGET", 1)
            rows = select(x.q, x.k, method=method, block_size=32, heads="kv", **how)
        assert torch.equal(whole.mask, rows.mask)


def test_bounds_are_kept_as_a_cache_grows() -> None:
    x = Inputs.random(1, 300, batch=2, heads=4, kv_heads=2, dim=16)
    bounds = KeyBounds(x.k[:, :, :0], 32, capacity=320)
    begin = 0
    for n in (70, 1, 25, 1, 96, 107):
        bounds.append(x.k[:, :, begin : begin + n])
        begin += n
        seen = x.k[:, :, :begin]
        for kept, reduce in ((bounds.low, torch.amin), (bounds.high, torch.amax)):
            want = torch.stack([reduce(part, 2) for part in seen.split(32, 2)], 2)
            assert torch.equal(kept[:, :, : want.shape[2]], want)
        given = select(x.q, seen, method="bounds", bounds=bounds, top_k=3, block_size=32, q_offset=begin - 1)
        anew = select(x.q, seen, method="bounds", top_k=3, block_size=32, q_offset=begin - 1)
        assert torch.equal(given.mask, anew.mask)
    with pytest.raises(rw.ShapeError, match="k: got 321 tokens; wanted at most 320"):
        bounds.append(torch.zeros(2, 2, 21, 16))
    other_batch, wider = x.k.repeat(2, 1, 1, 1), x.k.repeat(1, 1, 1, 2)
    for keys in (x.k[:, :, :299], x.k[:1], other_batch, wider):
        n, dim = keys.shape[2:]
        q = x.q.new_zeros(len(keys), 4, 1, dim)
        with pytest.raises(rw.ShapeError, match="Append every key once"):
            select(q, keys, method="bounds", bounds=bounds, top_k=3, block_size=32, q_offset=n - 1)


def test_not_a_number_moves_no_forced_block() -> None:
    x = Inputs.random(256, heads=1)
    x.k[:, :, 64:96] = torch.nan
    for method in ("mean", "top_p", "bounds", "antidiagonal"):
        how = {} if method == "top_p" else {"top_k": 3}
        mask = select(x.q, x.k, method=method, block_size=32, **how).mask[0, 0]
        assert mask[:, 0].all()
        assert mask.diagonal().all()
        assert not mask.triu(1).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_and_strides(dtype: torch.dtype) -> None:
    x = Inputs.random(200, batch=2, heads=2, dim=16, dtype=dtype)
    for method in ("mean", "antidiagonal", "bounds"):
        table = select(x.q, x.k, method=method, density=0.4, block_size=32)
        moved = select(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.q, x.k)), method=method,
                       density=0.4, block_size=32)  # fmt: skip
        assert torch.equal(table.mask, moved.mask)


def test_compiled_in_one_graph() -> None:
    """Selection and attention compile to one graph with the same table, and new values do not recompile it."""
    x = Inputs.random(256, heads=4, kv_heads=2, dim=16)
    compilations = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        compilations.append(graph)
        return graph

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = [
            rw.attention(q, k, v, select(q, k, method=method, block_size=32, **how) & rw.Causal())
            for method, how in (
                ("mean", {"top_k": 3, "pool": 8}),
                ("antidiagonal", {"density": 0.4}),
                ("top_p", {"mass": 0.8}),
            )
        ]
        return torch.stack(outs)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x.q, x.k, x.v), step(x.q, x.k, x.v))
    torch.testing.assert_close(compiled(-x.q, x.k, x.v), step(-x.q, x.k, x.v))
    assert len(compilations) == 1


def test_duplicate_empty_and_padded_rows_give_exact_gradients() -> None:
    """Attention with a table of indices in any form has the gradients of the mask."""
    x = Inputs.random(128, heads=2, kv_heads=1, dim=16, dtype=torch.float64)
    indices = torch.tensor([[0, 0, 3], [1, 1, 1], [3, 7, 7], [2, 0, 9]]).expand(1, 2, 4, 3).clone()
    counts = torch.tensor([[2, 3, 1, 2], [0, 1, 0, 2]])[None]
    indices[:, :, 2, 1:] = 3
    indices[:, :, 3, 2] = 0
    table = rw.BlockTable(indices=indices, counts=counts, key_blocks=4, block_size=32)
    mask = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    for h in range(2):
        for r in range(4):
            mask[0, h, r, indices[0, h, r, : counts[0, h, r]]] = True
    grads = []
    for pattern, backend in ((table, "dense_batched"), (rw.BlockTable(mask, 32), "reference")):
        q, k, v = x.leaves()
        out, lse = rw.attention_with_lse(q, k, v, pattern, backend=backend)
        held = lse.masked_fill(lse.isneginf(), 0)
        ((out * x.dout).sum() + (held * x.dlse).sum()).backward()
        grads.append([out, held, q.grad, k.grad, v.grad])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"heads": "kv"},
        {"pool": 8},
        {"method": "antidiagonal"},
        {"method": "top_p", "pool": 8},
        {"method": "bounds"},
    ],
    ids=lambda how: " ".join(map(str, how.values())) or "mean",
)
def test_autocast_changes_no_choice(how: dict[str, Any]) -> None:
    x = Inputs.random(512, batch=2, heads=4, kv_heads=2, dim=32)
    amount: dict[str, Any] = {"density": 0.3, "block_size": 32}
    with torch.autocast("cpu", torch.bfloat16):
        got = select(x.q, x.k, **amount, **how)
    assert torch.equal(got.blocks.listed(), select(x.q, x.k, **amount, **how).blocks.listed())


def test_a_mass_of_pools() -> None:
    """With pools, a row's blocks hold the mass of the softmax, and no left-out block holds more than a chosen one."""
    x = Inputs.random(256, heads=2, dim=16)
    x.q.mul_(8)
    share = shares(x, "mean", 8, blocks_of(256, 32), blocks_of(256, 32), True, 0, True)
    table = select(x.q, x.k, method="top_p", mass=0.8, pool=8, block_size=32, local=0, sinks=0)
    held = (share * table.mask).sum(-1)
    least = share.masked_fill(~table.mask, torch.inf).amin(-1)
    assert (held >= 0.8 - 1e-5).all()
    assert (held - least < 0.8 + 1e-5).all()
    assert (least >= share.masked_fill(table.mask, 0).amax(-1) - 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_of_16_bits_are_widened_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means are computed in float32, for any chunk size and memory layout."""
    x = torch.randn(2, 200, 3, 16).to(dtype).transpose(1, 2)
    want = torch.stack([x[:, :, a:b].double().mean(2) for a, b in ((0, 8), (8, 40), (40, 72), (72, 104), (104, 136),
                                                                   (136, 168), (168, 200))], 2)  # fmt: skip
    for nbytes in (1, 40000, 2**23):
        monkeypatch.setattr("ringweave.chunks._BUDGET", nbytes)
        got = block_means(x, 32, first=8)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert block_means(x[:0], 32).shape == (0, 3, 7, 16)


def test_block_means() -> None:
    x = torch.randn(2, 100, 3, requires_grad=True)
    got = block_means(x, 32, first=10)
    want = torch.stack([x[:, a:b].mean(1) for a, b in ((0, 10), (10, 42), (42, 74), (74, 100))], 1)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("heads", ["query", "kv"])
def test_decoding_reads_the_chosen_blocks(heads: str) -> None:
    """A decoding step with a table of one row equals attention with the dense mask of its blocks."""
    x = Inputs.random(1, 300, batch=2, heads=4, kv_heads=2, dim=16)
    table = select(x.q, x.k, method="bounds", top_k=4, block_size=32, heads=heads, q_offset=299)
    mask = table.mask.repeat_interleave(4 // table.mask.shape[1], 1)
    assert torch.equal(mask.sum(-1), torch.full((2, 4, 1), 4))
    allowed = mask.repeat_interleave(32, -1)[..., :300]
    got = rw.attention(x.q, x.k, x.v, table & rw.Causal(), q_offset=299)
    want, _ = attention(*x.leaves(torch.float64), allowed)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


DOCUMENTS = {
    "lengths": rw.Documents([40, 1, 100, 59]),
    "whole blocks": rw.Documents([64, 32, 104]),
    "ids": rw.Documents(ids=torch.tensor([3] * 70 + [-1] * 10 + [5] * 120)),
    "ids by element": rw.Documents(ids=torch.stack([torch.arange(200) // 90, torch.arange(200) // 128])),
}


@pytest.mark.parametrize("documents", list(DOCUMENTS))
@pytest.mark.parametrize("heads", ["query", "kv", "shared"])
@pytest.mark.parametrize("block_size", [16, (1, 32), (32, 8)], ids=str)
@pytest.mark.parametrize("options", [{"top_k": 6}, {"mass": 0.7}, {"top_k": 5, "method": "bounds"}], ids=str)
def test_a_document_chooses_as_it_would_alone(
    options: dict[str, Any], block_size: Any, heads: str, documents: str
) -> None:
    bounds = DOCUMENTS[documents]
    x = Inputs.random(200, 200, batch=2, heads=4, kv_heads=2, dim=16)
    pattern = select(x.q, x.k, block_size=block_size, heads=heads, documents=bounds, **options) & rw.Causal()
    got = pattern.to_dense(200, heads=4, batch=2)
    expected = torch.zeros_like(got)
    for b in range(2):
        of = bounds.to_dense(200, batch=2)[b, 0]
        for first in range(200):
            inside = of[first].nonzero()[:, 0]
            if not len(inside) or inside[0] != first:
                continue
            place = slice(first, int(inside[-1]) + 1)
            alone = select(
                x.q[b : b + 1, :, place], x.k[b : b + 1, :, place], block_size=block_size, heads=heads, **options
            )
            expected[b, :, place, place] = (alone & rw.Causal()).to_dense(len(inside), heads=4)[0]
    assert torch.equal(got, expected)


def test_documents_of_queries_and_keys_choose_as_steps_would() -> None:
    """Documents with fewer queries than keys choose as their last queries alone; one without queries is left out."""
    x = Inputs.random(30, 150, heads=4, kv_heads=2, dim=16)
    bounds = rw.Documents(cu_seqlens_q=[0, 10, 10, 30], cu_seqlens_k=[0, 60, 100, 150])
    pattern = select(x.q, x.k, block_size=(1, 16), top_k=3, documents=bounds)
    got = pattern.to_dense(30, 150, heads=4)
    expected = torch.zeros_like(got)
    for queries, keys in ((slice(0, 10), slice(0, 60)), (slice(10, 30), slice(100, 150))):
        offset = keys.stop - keys.start - (queries.stop - queries.start)
        alone = select(x.q[:, :, queries], x.k[:, :, keys], block_size=(1, 16), top_k=3, q_offset=offset)
        shape = queries.stop - queries.start, keys.stop - keys.start
        expected[0, :, queries, keys] = alone.to_dense(*shape, q_offset=offset, heads=4)[0]
    assert torch.equal(got, expected)
