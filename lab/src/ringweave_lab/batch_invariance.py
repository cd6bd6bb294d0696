"""``ringweave bits``: check that different ways to compute a row give the same bits on this machine.

Outputs, and gradients of queries that choose their keys, are compared for equality, without a tolerance. A case is a
dtype, a grouping of heads and a length.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor

from ringweave.api import attention, paged_attention
from ringweave.cli import terminal
from ringweave.kv_cache import PagedCache
from ringweave.patterns import Causal, Dilated, KeyPadding, LongNet, Pattern, Selected, SlidingWindow
from ringweave.precision import Precision
from ringweave.terms import ALiBi, DistanceBias, Softcap

_TILE = 128
_DIM = 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEADS = ((4, 4), (4, 1), (8, 2))
_LENGTHS = (300, 1500, 3000)
_CHOSEN, _KEYS = "chosen keys", 48
# so many heads share chosen keys that backward computes the listed pairs alone
_SHARING = ((12, 1), (16, 1), (32, 2))


class Bits(NamedTuple):
    """The result of one way of computing.

    Attributes:
        way: How the calls differ from one call over everything.
        added: Pattern of the calls if it is not plain causal attention, or a feature such as dropout.
        equal: Number of cases with the same bits.
        cases: Number of all cases.
    """

    way: str
    added: str
    equal: int
    cases: int


def _terms(heads: int) -> dict[str, Any]:
    distances = torch.linspace(-1, 1, heads * 201, device="cpu").view(heads, 201).cos()
    terms = (ALiBi.of_heads(heads), Softcap(20.0), DistanceBias(distances))
    return {"terms": terms, "sink_logits": torch.linspace(-1, 1, heads, device="cpu")}


#: Patterns and features of the calls, as functions from the number of query heads to arguments.
ADDED: dict[str, Callable[[int], dict[str, Any]]] = {
    "causal": lambda heads: {},
    "dilated": lambda heads: {"pattern": (SlidingWindow(64) | Dilated(64, 4)) & Causal()},
    "LongNet": lambda heads: {"pattern": LongNet([256, 2048], [1, 4], causal=True)},
    "terms, sinks": _terms,
    "dropout": lambda heads: {"dropout": 0.25},
    "8 bits": lambda heads: {"precision": Precision(kv=torch.int8)},
    _CHOSEN: lambda heads: {},
}


class _Whole(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    added: dict[str, Any]
    lists: Tensor | None = None  # the keys that each query chose, also later ones, (N, n)

    @property
    def pattern(self) -> Pattern:
        """The pattern of the calls."""
        return self.rows(0, self.q.shape[2])

    def rows(self, first: int, last: int) -> Pattern:
        """Return the pattern of the queries from ``first`` on, with the keys before ``last``."""
        pattern: Pattern = self.added.get("pattern", Causal())
        if self.lists is None:
            return pattern
        lists = self.lists[first:last]
        return Selected(lists.where(lists < last, -1)) & pattern

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | None = None, q_offset: int = 0) -> Tensor:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)  # dropout draws the same numbers in every call
            asked = self.pattern if pattern is None else pattern
            return attention(q, k, v, **{**self.added, "pattern": asked, "q_offset": q_offset})


def _one_thread(x: _Whole) -> bool:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return torch.equal(x.attend(x.q, x.k, x.v), x.out)
    finally:
        torch.set_num_threads(threads)


def _alone(x: _Whole) -> bool:
    return torch.equal(x.attend(x.q[:1], x.k[:1], x.v[:1]), x.out[:1])


def _chunks(side: int) -> Callable[[_Whole], bool]:
    def run(x: _Whole) -> bool:
        n = x.q.shape[2]
        # check the first two chunks, one in the middle, and the last two
        starts = {*range(0, n, side)[:2], *range(0, n, side)[-2:], n // side // 2 * side}
        return all(_part(x, at, min(at + side, n)) for at in sorted(starts))

    return run


def _steps(x: _Whole) -> bool:
    last = x.q.shape[2] - 1
    return all(_part(x, at, at + 1) for at in (min(5, last), min(130, last), last))


def _part(x: _Whole, first: int, last: int) -> bool:
    got = x.attend(x.q[:, :, first:last], x.k[:, :, :last], x.v[:, :, :last], x.rows(first, last), first)
    return torch.equal(got, x.out[:, :, first:last])


def _gradient(x: _Whole) -> bool:
    n = x.q.shape[2]

    def grad(first: int, last: int) -> Tensor:
        leaf = x.q[:, :, first:last].detach().requires_grad_()
        # keys that learn too take part in backward
        k, v = (y[:, :, :last].detach().requires_grad_() for y in (x.k, x.v))
        out = x.attend(leaf, k, v, x.rows(first, last), first)
        return torch.autograd.grad(out, (leaf, k, v), x.out[:, :, first:last])[0]

    return torch.equal(grad(n // 2, n), grad(0, n)[:, :, n // 2 :])


def _pages(x: _Whole) -> bool:
    batch, heads, n, _ = x.k.shape
    added = dict(x.added)
    precision = added.pop("precision", None)
    added["pattern"] = x.rows(n // 2, n)
    dtype = x.k.dtype if precision is None else None
    cache = PagedCache.empty(batch, n, heads, _DIM, page=16, dtype=dtype, precision=precision)
    cache.append(x.k, x.v)
    return torch.equal(paged_attention(x.q[:, :, n // 2 :], cache, **added), x.out[:, :, n // 2 :])


def _padded_right(x: _Whole) -> bool:
    n = x.k.shape[2]
    k, v = (torch.cat([t, torch.full_like(t[:, :, :77], 3.0)], 2) for t in (x.k, x.v))
    return torch.equal(x.attend(x.q, k, v, x.pattern & KeyPadding([n] * len(k))), x.out)


def _padded_left(x: _Whole) -> bool:
    q, k, v = (torch.cat([torch.full_like(t[:, :, :_TILE], 3.0), t], 2) for t in (x.q, x.k, x.v))
    padded = x.pattern & KeyPadding(k.shape[2], start=_TILE)
    return torch.equal(x.attend(q, k, v, padded)[:, :, _TILE:], x.out)


#: Ways to compute a row, by name; each returns whether the bits are the same.
WAYS: dict[str, Callable[[_Whole], bool]] = {
    "one thread": _one_thread,
    "a batch element alone": _alone,
    f"chunks of {_TILE} queries, a tile": _chunks(_TILE),
    "chunks of 100 queries": _chunks(100),
    "steps of one query": _steps,
    "pages of 16 tokens": _pages,
    "padding on the right": _padded_right,
    "padding on the left, of a tile": _padded_left,
}
#: The same for gradients of queries that choose their keys. In other calls they are sums in an order of the whole call.
OF_CHOSEN = {"gradients of half of the queries": _gradient}


#: Ways that do not exist: paged calls support no dropout, and padding on the left moves the positions that it drops and
#: the chosen keys. A mixture has no pages and no padding.
_WITHOUT = {
    "dropout": {"pages of 16 tokens", "padding on the left, of a tile"},
    "LongNet": {"pages of 16 tokens", "padding on the right", "padding on the left, of a tile"},
    _CHOSEN: {"padding on the left, of a tile"},
}


def compared(lengths: tuple[int, ...] = _LENGTHS) -> list[Bits]:
    """Compare each way with one call over everything, by ``torch.equal``, with this machine's threads.

    Each pattern but the first, and each feature, is tested in a third of the cases, chosen so that every pair of dtype,
    heads and length occurs.
    """
    draw = torch.Generator("cpu").manual_seed(0)
    equal: dict[tuple[str, str], list[bool]] = {}
    for kind, (added, make) in enumerate(ADDED.items()):
        places = itertools.product(range(len(_DTYPES)), range(len(_HEADS)), range(len(lengths)))
        for i, j, at in places:
            dtype, (heads, kv_heads), n = _DTYPES[i], (_SHARING if added == _CHOSEN else _HEADS)[j], lengths[at]
            if kind and (i + j + at + kind) % 3:
                continue
            q, k, v = (
                torch.randn(2, h, n, _DIM, generator=draw, device="cpu").to(dtype) for h in (heads, kv_heads, kv_heads)
            )
            whole, ways = _Whole(q, k, v, q, make(heads)), WAYS
            if added == _CHOSEN:
                lists = torch.randint(n, (n, _KEYS), generator=draw, dtype=torch.int32, device="cpu")
                whole, ways = whole._replace(lists=lists), WAYS | OF_CHOSEN
            whole = whole._replace(out=whole.attend(q, k, v))
            for way, same in ways.items():
                if way not in _WITHOUT.get(added, ()):
                    equal.setdefault((way, added), []).append(same(whole))
    return [Bits(*key, sum(found), len(found)) for key, found in equal.items()]


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Check that different ways to compute a row give the same bits on this machine."""
    found, console = compared(), terminal.out()
    if as_json:
        console.print(json.dumps([each._asdict() for each in found], indent=2), markup=False, soft_wrap=True)
    else:
        console.print("Bits on this CPU, compared with one call over everything (torch.equal):")
        kinds = list(dict.fromkeys(each.added for each in found))
        table = Table("cases with the same bits", *kinds, box=None, pad_edge=False)
        cells: dict[str, dict[str, str]] = {}
        for each in found:
            cells.setdefault(each.way, {})[each.added] = f"{each.equal} of {each.cases}"
        for way, row in cells.items():
            table.add_row(way, *(row.get(kind, "") for kind in kinds))
        console.print(table)
    if any(each.equal < each.cases for each in found):
        terminal.fail("bits differ that must be equal. Please report this machine.")
        raise typer.Exit(1)
