"""G5, G6, G12: errors against float64, bits on 1 to 8 ranks, masks that do not change, and what must raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ringweave as rw

from ...errors import RingError, RingweaveError
from ...ops import cpu
from ...parallel import ContextParallel, Transport
from ...patterns import Pattern
from ..case import Options, Target
from .group import Ranks

NAMES = ("out", "lse", "dq", "dk", "dv")
_HEADS = 4, 2
_PLACES = ("contiguous", "zigzag", "striped")


class Inputs(NamedTuple):
    """q, k, v, and the slopes of out and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor

    @staticmethod
    def random(tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype = torch.float32) -> Inputs:
        """The same on every rank."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, heads[n], tokens, dim) for n in (0, 1, 1, 0)]
        q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        return Inputs(q, k, v, dout, torch.randn(1, heads[0], tokens, generator=generator))

    def double(self) -> Inputs:
        """The same numbers in float64."""
        return Inputs(*(x.double() for x in self))


def patterns(tokens: int) -> dict[str, Pattern]:
    """One of every kind."""
    third = tokens // 3
    return {
        "window": rw.SlidingWindow(tokens // 8),
        "documents": rw.Documents([third, third // 2, tokens - third - third // 2]) & rw.Causal(),
        "bigbird": rw.bigbird(tokens, window=tokens // 12, global_tokens=64, random=2),
        "LongNet": rw.LongNet([256, 1024], [1, 4]),
        "random table": rw.random_blocks(tokens, 0.3, block_size=64),
        "causal": rw.Causal(),
    }


def attend(x: Inputs, pattern: Pattern, **options: Any) -> list[Tensor]:
    """(out, lse, dq, dk, dv); whole tensors or shards."""
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    q, k, v = leaves
    out, lse = rw.attention_with_lse(q, k, v, pattern, **options)
    # a row that attends nothing, as padding does, has an lse of -inf and no slope
    alive = torch.where(torch.isneginf(lse), 0.0, lse)
    loss = (out * x.dout).sum(dtype=lse.dtype) + (alive * x.dlse.to(lse.dtype)).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def spread(ctx: ContextParallel, x: Inputs, pattern: Pattern) -> list[Tensor]:
    """The same five of this rank's shard."""
    return attend(Inputs(*(ctx.shard(t, 2) for t in x)), pattern, context=ctx)


def whole(ctx: ContextParallel, found: list[Tensor]) -> list[Tensor]:
    """Put together on every rank."""
    return [ctx.unshard(t, 2) for t in found]


def measure(ranks: Ranks, options: Options) -> list[Target]:
    """All of it, on every rank; rank 0's figures count."""
    return [*_errors(ranks, options), *_bits(ranks, options), _masks(ranks), *_raises(ranks)]


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _errors(ranks: Ranks, options: Options) -> list[Target]:
    tokens, count = 500 if options.quick else 1500, 4
    single = Inputs.random(tokens, _HEADS, 16)
    largest, ratio = 0.0, 0.0
    for pattern in patterns(tokens).values():
        # looked at on rank 0 alone
        exact = attend(single.double(), pattern, backend="reference") if ranks.rank == 0 else []
        alone = [_error(*pair) for pair in zip(attend(single, pattern), exact, strict=False)]
        for schedule in ("gather", "ring"):

            def job(
                carrier: Transport, how: str = schedule, pattern: Pattern = pattern, exact: list[Tensor] = exact
            ) -> list[list[float]]:
                ctx = ContextParallel(carrier, pattern, tokens, heads=_HEADS, schedule=how)
                both = [whole(ctx, spread(ctx, x, pattern)) for x in (single, single.double())]
                return [[_error(*pair) for pair in zip(found, exact, strict=False)] for found in both]

            in_single, in_double = ranks.on(count, job)[0]
            ratio = max(ratio, *(many / one for many, one in zip(in_single, alone, strict=False)), 0.0)
            largest = max(largest, *in_double)
    size = f"{count} ranks, {tokens:,} tokens, 6 patterns, both schedules"
    return [
        Target("G5 float64: largest relative error of out, lse, dQ, dK, dV", size, largest, 1e-10, False, ""),
        Target("G5 float32: their errors over one device's", size, ratio, 2.0, False),
    ]


def _bits(ranks: Ranks, options: Options) -> list[Target]:
    tokens = 1100 if options.quick else 2500
    equal = total = again = 0
    counts = [n for n in (1, 2, 4, 8) if n <= ranks.size]
    for dtype in (torch.float32, torch.bfloat16):
        x = Inputs.random(tokens, _HEADS, 16, dtype)
        for pattern in patterns(tokens).values():
            one = attend(x, pattern)[:2] if ranks.rank == 0 else []
            for count in counts:

                def job(
                    carrier: Transport, x: Inputs = x, pattern: Pattern = pattern, one: list[Tensor] = one
                ) -> tuple[int, bool]:
                    ctx = ContextParallel(carrier, pattern, tokens, heads=_HEADS, schedule="gather")
                    first, second = (spread(ctx, x, pattern) for _ in range(2))
                    got = whole(ctx, first[:2])
                    same = all(torch.equal(*pair) for pair in zip(first, second, strict=True))
                    return sum(int((a == b).sum()) for a, b in zip(got, one, strict=False)), same

                found = ranks.on(count, job)
                again += all(same for _, same in found)
                equal += found[0][0]
                total += sum(want.numel() for want in one)
    size = f"{', '.join(map(str, counts))} ranks, {tokens:,} tokens, 6 patterns, float32 and bfloat16"
    # products of other shapes round differently where the native kernel is absent
    bound = 1.0 if cpu.module() is not None else None
    runs = 2 * len(patterns(tokens)) * len(counts)
    return [
        Target(
            "G6 gather: elements of out and lse with one device's bits", size, equal / max(total, 1), bound, True, "%"
        ),
        Target("G6 gather: forward and backward again, all bits the same", size, again / runs, 1.0, True, "%"),
    ]


def _masks(ranks: Ranks) -> Target:
    """V as one-hot rows shows which keys each query attends."""
    tokens, count = 200, 3
    right = rows = 0
    values = torch.eye(tokens).expand(1, 4, -1, -1)
    zeros = torch.zeros(1, 4, tokens, 8)
    for pattern in patterns(tokens).values():
        allowed = pattern.to_dense(tokens, heads=4)[0] > 0
        for place in _PLACES:
            for schedule in ("gather", "ring"):

                def job(
                    carrier: Transport,
                    what: Pattern = pattern,
                    allowed: Tensor = allowed,
                    place: str = place,
                    how: str = schedule,
                ) -> int:
                    ctx = ContextParallel(carrier, what, tokens, heads=(4, 4), placement=place, schedule=how)
                    q, k, v = (ctx.shard(t, 2) for t in (zeros, zeros, values))
                    out = ctx.unshard(rw.attention(q, k, v, what, context=ctx), 2)
                    return int(((out[0] > 0) == allowed).all(-1).sum())

                right += ranks.on(count, job)[0]
                rows += allowed.shape[0] * tokens
    size = f"{count} ranks, {tokens} tokens, 6 patterns, 3 placements, both schedules"
    return Target("G12 rows that attend the pattern's own keys and no others", size, right / rows, 1.0, True, "%")


def _calls(rank: int) -> dict[str, dict[str, Any]]:
    """Calls in which rank 0 differs from the others."""
    first = rank == 0
    return {
        "pattern": {"pattern": rw.Causal() if first else rw.SlidingWindow(100)},
        "length": {"tokens": 700 if first else 800},
        "batch": {"batch": 2 if first else 1},
        "dimension": {"dim": 16 if first else 8},
        "dtype": {"dtype": torch.bfloat16 if first else torch.float32},
        "wire": {"wire": "int8" if first else "native"},
    }


def _raises(ranks: Ranks) -> list[Target]:
    count = min(ranks.size, 4)
    raised = asked = still = 0
    for name in _calls(0):
        for schedule in ("gather", "ring"):

            def job(carrier: Transport, name: str = name, schedule: str = schedule) -> tuple[bool, int]:
                carrier.counters.reset()
                case: dict[str, Any] = {"pattern": rw.SlidingWindow(100), "tokens": 700, "batch": 1, "dim": 8}
                case |= {"dtype": torch.float32, "wire": "native"} | _calls(carrier.rank)[name]
                ctx = ContextParallel(
                    carrier, case["pattern"], case["tokens"], heads=(2, 2), wire=case["wire"], schedule=schedule
                )
                q = torch.randn(case["batch"], 2, ctx.local, case["dim"], dtype=case["dtype"])
                told = _told(lambda: rw.attention(q, q, q, case["pattern"], context=ctx), RingError)
                return told, sum(carrier.counters.received) + sum(carrier.counters.sent)

            found = ranks.on(count, job)
            asked += count
            raised += sum(told for told, _ in found)
            still += sum(not nbytes for _, nbytes in found)
    size = f"{count} ranks; pattern, length, batch, D, dtype, wire; both schedules"
    return [
        Target("G12 ranks that call differently: those that raise", size, raised / asked, 1.0, True, "%"),
        Target("G12 of these, ranks that had moved nothing by then", size, still / asked, 1.0, True, "%"),
        _refused(),
    ]


def _refused() -> Target:
    """What a context does not do, on one rank."""
    window = rw.SlidingWindow(100)
    ctx = ContextParallel(None, window, 256, heads=(2, 2))
    x = torch.randn(1, 2, 256, 8)
    slopes = x.clone().requires_grad_()

    def make(**options: Any) -> Callable[[], object]:
        return lambda: ContextParallel(**({"mesh": None, "pattern": window, "seq_len": 256, "heads": (2, 2)} | options))

    cases: list[Callable[[], object]] = [
        make(schedule="star"), make(placement="random"), make(wire="fp4"), make(heads=(3, 2)), make(seq_len=0),
        make(pattern=rw.random_blocks(512, 0.5)), make(pattern=rw.PerHead([window] * 3)),
        lambda: rw.attention(x[:, :, :100], x, x, window, context=ctx),
        lambda: rw.attention(x[:, :1], x, x, window, context=ctx),
        lambda: rw.attention(x, x, x, window, context=ctx, q_offset=3),
        lambda: rw.attention(x, x, x, window, context=ctx, backend="reference"),
        lambda: rw.attention(x, x, x, rw.random_blocks(512, 0.5), context=ctx),
        lambda: ctx.replicated(slopes, x, x, window),
        lambda: ctx.share_table(torch.ones(3, 3, dtype=torch.bool), 96, version=0),
    ]  # fmt: skip
    told = sum(_told(case, RingweaveError) for case in cases)
    return Target("G12 unsupported calls that raise", f"{len(cases)} calls", told / len(cases), 1.0, True, "%")


def _told(call: Callable[[], object], kind: type[RingweaveError]) -> bool:
    try:
        call()
    except kind:
        return True
    return False
