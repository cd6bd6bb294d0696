"""A query row's bits depend on the row alone: not on chunks, steps, padding, pages, batches or threads.

Ranks are held to one device's bits in ``parallel/test_schedules``.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.backends.decoding import Steps
from ringweave.environment import CPU_VARIANT
from ringweave.patterns import rebuild
from ringweave.patterns.shifted import places

from .. import cases
from .plans import DTYPES, VARIANTS

TILE = 128
#: Patterns and lengths: rows of several blocks, windows that begin at different places of a block, and rows of one block.
PATTERNS = {
    "causal": (rw.Causal(), 2500),
    "window": (rw.SlidingWindow(2300) & rw.Causal(), 2900),
    "sinks": ((rw.Sinks(5) | rw.SlidingWindow(333)) & rw.Causal(), 1100),
    "around": (rw.SlidingWindow(200, 150), 700),
    # computed in strided views, or in token order if that is faster
    "dilated": (rw.Dilated(64, 4) & rw.Causal(), 1100),
    "strided": (rw.Strided(5) & rw.Causal(), 2700),
    "far": (rw.Dilated(9, 100) & rw.Causal(), 1300),
    "union": ((rw.SlidingWindow(70) | rw.Dilated(64, 16)) & rw.Causal(), 1500),
}
Ways = Iterator[tuple[str, rw.AttentionOutput, slice]]


#: Tokens of padding on the left, where the entries of a bias begin.
PADDED = 2 * TILE


@dataclass
class Call:
    """Options of a call besides tensors and pattern; a bias is cut to the call's rows and columns."""

    terms: tuple[rw.terms.Term, ...] = ()
    bias: Tensor | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def added(self, row: int, nq: int, column: int, nk: int) -> tuple[rw.terms.Term, ...]:
        if self.bias is None:
            return self.terms
        row, column = row + PADDED, column + PADDED
        return (*self.terms, rw.Bias(self.bias[:, :, row : row + nq, column : column + nk]))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: rw.Pattern, first: int = 0, *, at: int = 0
    ) -> rw.AttentionOutput:
        """Compute queries from ``first`` on; all positions are shifted by ``at``."""
        terms = self.added(first + at, q.shape[2], at, k.shape[2])
        with torch.random.fork_rng([]):
            torch.manual_seed(0)  # the seed of dropout
            return rw.attention_with_lse(q, k, v, pattern, q_offset=first, terms=terms, backend="cpu", **self.more)


def of_distance(heads: int) -> tuple[rw.terms.Term, ...]:
    return rw.DistanceBias(torch.randn(heads, 2 * 90 + 1)), rw.Softcap(3.0), rw.ALiBi.of_heads(heads)


#: Calls by name, each for a number of heads and tokens.
CALLS: dict[str, Callable[[int, int], Call]] = {
    "terms": lambda heads, n: Call(of_distance(heads), torch.randn(1, heads, n + 512, n + 512)),
    "dropout": lambda heads, n: Call(of_distance(heads)[1:], more={"dropout": 0.25}),
    "sinks": lambda heads, n: Call(of_distance(heads)[:2], more={"sink_logits": torch.randn(heads)}),
    "int8": lambda heads, n: Call(of_distance(heads), more={"precision": rw.Precision(kv=torch.int8)}),
    "e4m3": lambda heads, n: Call(more={"precision": rw.Precision(kv=torch.float8_e4m3fn)}),
}


def in_pages(x: Tensor, page: int) -> Tensor:
    count = -(-x.shape[2] // page)
    whole = torch.nn.functional.pad(x, (0, 0, 0, count * page - x.shape[2]), value=torch.nan)
    return whole.unflatten(2, (count, page)).transpose(1, 2).flatten(0, 1).contiguous()


def paged(q: Tensor, k: Tensor, v: Tensor, pattern: rw.Pattern, call: Call, page: int) -> Tensor:
    """Compute the last queries over keys and values in pages."""
    (count, heads, n, dim), more = k.shape, dict(call.more)
    precision = more.pop("precision", None)
    if precision is not None:
        cache = rw.PagedCache.empty(count, n, heads, dim, value_dim=v.shape[3], page=page, precision=precision)
        cache.append(k, v)
    else:
        table = torch.arange(-(-n // page) * count, dtype=torch.int32).view(count, -1)
        cache = rw.PagedCache(in_pages(k, page), in_pages(v, page), table, torch.full((count,), n, dtype=torch.int32))
    terms = call.added(n - q.shape[2], q.shape[2], 0, cache.table.shape[1] * page)
    return rw.paged_attention(q, cache, pattern, terms=terms, backend="cpu", **more)


def ways(q: Tensor, k: Tensor, v: Tensor, name: str, call: Call, draw: random.Random) -> Ways:
    """Yield (description, (out, lse), rows) for some rows computed in other ways."""
    pattern, n = PATTERNS[name][0], q.shape[2]
    causal, dropout = name != "around", "dropout" in call.more

    def part(first: int, last: int) -> rw.AttentionOutput:
        keys = last if causal else n
        return call.attend(q[:, :, first:last], k[:, :, :keys], v[:, :, :keys], pattern, first)

    for length in (1, 1, 2, draw.randrange(3, 40), draw.randrange(40, 300)):
        for first in (draw.randrange(n), draw.choice([0, n - length])):
            last = min(first + length, n)
            torch.set_num_threads(draw.randint(1, 4))
            yield f"queries {first} to {last}", part(first, last), slice(first, last)
    torch.set_num_threads(draw.randint(2, 4))
    yield "threads", call.attend(q, k, v, pattern), slice(0, n)
    filled = [torch.cat([x, torch.full_like(x[:, :, :77], 3.0)], 2) for x in (k, v)]
    yield "padding on the right", call.attend(q, *filled, pattern & rw.KeyPadding([n] * len(k))), slice(0, n)
    if dropout:  # calls over pages take no dropout, and shifted positions change which weights are dropped
        return
    filled = [torch.cat([torch.full_like(x[:, :, :PADDED], 3.0), x], 2) for x in (q, k, v)]
    keys = rw.KeyPadding([n + PADDED] * len(k), start=[PADDED] * len(k))
    left = pattern.within(keys) if name == "sinks" else pattern & keys
    found = call.attend(*filled, left, at=-PADDED)
    yield "padding on the left", rw.AttentionOutput(*(x[:, :, PADDED:] for x in found)), slice(0, n)
    page, count = draw.choice([16, 32, 128, 256]), draw.choice([1, 3, 200])
    out = paged(q[:, :, n - count :], k, v, pattern, call, page)
    yield f"pages of {page}", rw.AttentionOutput(out, None), slice(n - count, n)  # type: ignore[arg-type]


@contextlib.contextmanager
def as_many_threads() -> Iterator[None]:
    """Restore the number of threads at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@as_many_threads()
def assert_same_bits(
    name: str, dtype: torch.dtype, heads: tuple[int, int], dim: int, value_dim: int, added: str = ""
) -> None:
    pattern, n = PATTERNS[name]
    draw = random.Random(f"{name}{dtype}{heads}{dim}{added}")
    sizes = (heads[0], dim), (heads[1], dim), (heads[1], value_dim)
    q, k, v = (torch.randn(2, h, n, d).to(dtype) for h, d in sizes)
    call = CALLS[added](heads[0], n) if added else Call()
    torch.set_num_threads(1)
    whole = call.attend(q, k, v, pattern)
    for b in range(1 if added == "dropout" else 2):  # dropout depends on the batch element
        alone = [x[b : b + 1] for x in (q, k, v)]
        for way, got, rows in ways(*alone, name, call, draw):
            for of_row, result, want in zip(("out", "lse"), got, whole, strict=True):
                same = result is None or torch.equal(result, want[b : b + 1, :, rows])
                assert same, f"{of_row}: {way}, of batch element {b}"


SIZES = [(2, 2, 64, 64), (4, 1, 64, 24), (6, 2, 40, 16)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", list(PATTERNS))
def test_same_bits(name: str, dtype: str, sizes: tuple[int, int, int, int]) -> None:
    heads, kv_heads, *dims = sizes
    assert_same_bits(name, DTYPES[dtype], (heads, kv_heads), *dims)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", ["window", "strided", "union"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_on_every_variant(variant: str, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_VARIANT, variant)
    assert_same_bits(name, DTYPES[dtype], (3, 1), 24, 24)


@pytest.mark.parametrize("rate", [3, 5, 6, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_views_count_each_key_once(variant: str, rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, a view with blocks of sums that begin at odd keys has the lse of the definition."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    q, k, v = (torch.randn(1, 1, 2700, 16).bfloat16() for _ in range(3))
    _, lse = rw.attention_with_lse(q, k, v, rw.Strided(rate) & rw.Causal(), backend="cpu")
    # a query attends those of its own residue
    for first in range(rate):
        mine, theirs = (x[0, 0, first::rate].double() for x in (q, k))
        later = torch.ones(len(mine), len(mine), dtype=torch.bool).triu(1)
        want = (mine @ theirs.mT / 4).masked_fill(later, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(lse[0, 0, first::rate].double(), want, atol=1e-5, rtol=1e-5)


def otherwise(q: Tensor, k: Tensor, v: Tensor, pattern: rw.Pattern) -> Ways:
    """Yield some rows of a pattern of the gallery, computed in each other way that its kind allows."""
    n, attend = q.shape[2], Call().attend
    # keys after the last query are attended too, so all keys are passed
    at = draw_rows(n) if draws_rows(pattern) else []
    for first, last in at:
        some = of_rows(pattern, first, last)
        yield f"queries {first} to {last}", attend(q[:, :, first:last], k, v, some, first), slice(first, last)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        yield f"{threads} threads", attend(q, k, v, pattern), slice(0, n)
    if not pattern.combinable:
        return
    # in token order, since an offset for each batch element hides the residues
    if at:
        offsets = torch.full((len(q),), 3)
        moved = rw.attention_with_lse(q[:, :, 3:], k, v, of_rows(pattern, 3, n), q_offset=offsets, backend="cpu")
        yield "offsets of a batch", moved, slice(3, n)
    if is_for_any_length(pattern, n):
        filled = [torch.cat([x, torch.full_like(x[:, :, :77], 3.0)], 2) for x in (k, v)]
        yield "padding on the right", attend(q, *filled, pattern & rw.KeyPadding([n] * len(k))), slice(0, n)
    for count in (1, 4, n):
        if at or count == n:
            out = paged(q[:, :, n - count :], k, v, of_rows(pattern, n - count, n), Call(), 16)
            yield f"pages, {count} queries", rw.AttentionOutput(out, None), slice(n - count, n)  # type: ignore[arg-type]


def of_rows(pattern: rw.Pattern, first: int, last: int) -> rw.Pattern:
    """Return the pattern of some of the queries, which has their rows of lists."""
    if not places(pattern):
        return pattern
    return rebuild(pattern.spec, [lists[..., first:last, :].contiguous() for lists in pattern.tables])


def draws_rows(pattern: rw.Pattern) -> bool:
    """Return whether a call may compute some of the rows; a table needs all of its n queries."""
    return "BlockTable" not in pattern.spec


def is_for_any_length(pattern: rw.Pattern, n: int) -> bool:
    """Return whether a pattern takes more than n keys; documents, grids and tables are made for n."""
    try:
        pattern.check(n, n + 77, 0)
    except rw.PatternError:
        return False
    return True


def draw_rows(n: int) -> list[tuple[int, int]]:
    """Draw ranges of rows: single steps, four queries together, and chunks of any size."""
    draw = random.Random(n)
    lengths = [1, 1, 4, draw.randrange(5, 60), 128, draw.randrange(130, 400)]
    return [(first, first + length) for length in lengths for first in [draw.randrange(n - length)]]


@as_many_threads()
@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "n"), list(itertools.product(DTYPES, [704, 2896])))
@pytest.mark.parametrize("name", list(cases.PATTERNS | cases.MIXTURES))
def test_same_bits_of_the_gallery(name: str, dtype: str, n: int) -> None:
    pattern = (cases.PATTERNS | cases.MIXTURES)[name](n)
    q, k, v = (torch.randn(2, heads, n, 32).to(DTYPES[dtype]) for heads in (4, 2, 2))
    torch.set_num_threads(1)
    whole = Call().attend(q, k, v, pattern)
    checked = 0
    if pattern.extents()[0] is None:
        alone = Call().attend(q[1:], k[1:], v[1:], pattern)
        assert torch.equal(alone.out, whole.out[1:]), "a batch element alone"
        checked += 1
    for way, got, rows in otherwise(q, k, v, pattern):
        for of_row, result, want in zip(("out", "lse"), got, whole, strict=True):
            assert result is None or torch.equal(result, want[:, :, rows]), f"{of_row}: {way}"
        checked += 1
    assert checked >= (8 if draws_rows(pattern) else 3)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", ["sinks", "around"])
@pytest.mark.parametrize("added", list(CALLS))
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_with_more(
    variant: str, added: str, name: str, dtype: str, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terms, dropout, learned sinks, and 8-bit keys and values keep the bits of rows too."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    heads, kv_heads, *dims = sizes
    assert_same_bits(name, DTYPES[dtype], (heads, kv_heads), *dims, added)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_steps_of_a_union_run_prepared_and_have_the_same_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a union runs one prepared call for each part, merged in float32, with equal bits, also over pages."""
    pattern = (rw.SlidingWindow(70) | rw.Dilated(40, 16)) & rw.Causal()
    q, k, v = (torch.randn(2, heads, 1100, 32).to(DTYPES[dtype]) for heads in (4, 2, 2))
    whole = rw.attention_with_lse(q, k, v, pattern, backend="cpu")
    steps: list[int] = []
    forward = Steps.forward

    def noted(self: Steps, *tensors: Any) -> Any:
        found = forward(self, *tensors)
        steps.extend([] if found is None else [tensors[1].shape[2]])
        return found

    monkeypatch.setattr(Steps, "forward", noted)
    cache = rw.PagedCache.empty(2, 1100, 2, 32, page=16, dtype=k.dtype)
    cache.append(k[:, :, :900], v[:, :, :900])
    for at in (*range(20), *range(900, 1100, 1)):
        one, keys, values = q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1]
        got = rw.attention_with_lse(one, keys, values, pattern, q_offset=at, backend="cpu")
        for result, want in zip(got, whole, strict=True):
            assert torch.equal(result, want[:, :, at : at + 1]), at
        if at >= 900:
            cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
            paged_out = rw.paged_attention(one, cache, pattern, backend="cpu")
            assert torch.equal(paged_out, whole.out[:, :, at : at + 1]), at
    assert len(steps) > 300
