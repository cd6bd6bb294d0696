"""The case ``integrations``: code that was written for FlexAttention and flash-attn, on a CPU.

Peers compute the same function: PyTorch's own FlexAttention, compiled, in its forward; its dense formula with autograd,
since it has no backward on a CPU; and ``scaled_dot_product_attention``, dense or with a mask, to which code without
flash-attn falls back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs_flex_attention

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from ringweave.integrations.flex_attention import flex_attention

from ...tune.measure import interleaved, ratio
from ...tune.session import Say
from ..record import Measuring, Options, Target

_HEADS, _DIM = 8, 64
_MASKED = 16384  # tokens above which a mask of bytes for every pair is left out
_CAP = 20.0

Attend = Callable[[Tensor, Tensor, Tensor], Any]
sdpa = torch.nn.functional.scaled_dot_product_attention


def measure(options: Options, say: Say) -> Measuring:
    """Check and time flex_attention with masks and score functions, and flash_attn with windows and documents."""
    usual = not options.sized and not options.quick
    lengths = (options.tokens,) if options.tokens else (256,) if options.quick else (2048, 8192, 16384)
    heads = options.heads or _HEADS
    for tokens in lengths:
        inputs = _drawn(tokens, heads)
        say(f"integrations: flex_attention, {tokens} tokens")
        yield from _window(inputs, options)
        say(f"integrations: flash_attn, {tokens} tokens")
        yield from _flash(inputs, options, usual)
    tokens = options.tokens or (256 if options.quick else 4096)
    say(f"integrations: score functions, {tokens} tokens")
    yield from _scores(_drawn(tokens, heads), options, usual)
    return "A ratio is ringweave's time over the other's. FlexAttention's compilation is not timed."


def _window(inputs: tuple[Tensor, ...], options: Options) -> Iterator[Target]:
    """Time a window of 512 tokens as a BlockMask, next to torch's compiled forward and to a dense mask."""
    tokens = inputs[0].shape[2]
    mask = create_block_mask(_near, None, None, tokens, tokens, device="cpu")
    calls: dict[str, Attend] = {"ours": partial(flex_attention, block_mask=mask)}
    if not options.quick:
        torch.compiler.reset()
        calls["FlexAttention, compiled"] = partial(torch.compile(torchs_flex_attention, dynamic=False), block_mask=mask)
    if tokens <= _MASKED:
        position = torch.arange(tokens)
        calls["SDPA with a mask"] = partial(sdpa, attn_mask=_near(None, None, position[:, None], position))
    yield from _targets("flex_attention, a window of 512", calls, inputs, options, {})


def _flash(inputs: tuple[Tensor, ...], options: Options, usual: bool) -> Iterator[Target]:
    """Time dense causal calls, a window of 128, and documents, next to SDPA."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs[:3])
    tokens = q.shape[1]
    turned = q, k, v, inputs[3].transpose(1, 2).contiguous()

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options).transpose(1, 2)

    calls: dict[str, Attend] = {
        "ours": partial(flash_attn_func, causal=True),
        "SDPA": partial(dense, is_causal=True),
    }
    bounds = {"SDPA": 1.0} if usual else {}
    yield from _targets("flash_attn_func, causal", calls, turned, options, bounds)
    if tokens <= _MASKED:
        position = torch.arange(tokens)
        behind = position[:, None] - position
        calls = {
            "ours": partial(flash_attn_func, causal=True, window_size=(128, 0)),
            "SDPA with a mask": partial(dense, attn_mask=(behind >= 0) & (behind <= 128)),
        }
        bounds = {"SDPA with a mask": 0.2} if usual and tokens == 8192 else {}
        yield from _targets("flash_attn_func, a window of 128", calls, turned, options, bounds)
    yield from _targets("flash_attn_varlen_func, 8 documents", _of_documents(tokens), turned, options, {})


def _of_documents(tokens: int) -> dict[str, Attend]:
    """Return packed attention over 8 documents of one row, and SDPA on one document at a time."""
    lengths = [tokens // 8 + (i - 4) * (tokens // 64) for i in range(8)]
    lengths[-1] += tokens - sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_varlen_func(q[0], k[0], v[0], bounds, bounds, max(lengths), max(lengths), causal=True)
        assert isinstance(out, Tensor)
        return out[None]

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.transpose(1, 2).split(lengths, 2) for x in (q, k, v)), strict=True)
        return torch.cat([sdpa(a, b, c, is_causal=True) for a, b, c in parts], 2).transpose(1, 2)

    return {"ours": packed, "SDPA, a document at a time": apart}


def _scores(inputs: tuple[Tensor, ...], options: Options, usual: bool) -> Iterator[Target]:
    """Time a score function that is a term, and another one, in a window of 512."""
    tokens, heads = inputs[0].shape[2], inputs[0].shape[1]
    mask = create_block_mask(_near, None, None, tokens, tokens, device="cpu")
    pattern = rw.from_block_mask(mask)
    factors, kinds = torch.rand(heads), torch.arange(tokens) // 7 % 5

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _CAP * torch.tanh(score / _CAP)

    def by_kind(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * torch.where(kinds[q] == kinds[k], 1.0, factors[h])

    calls: dict[str, Attend] = {
        "ours": partial(flex_attention, score_mod=capped, block_mask=mask),
        "the same call with a term": partial(rw.attention, pattern=pattern, terms=rw.Softcap(_CAP)),
    }
    bounds = {"the same call with a term": 1.1} if usual else {}
    yield from _targets("flex_attention, a soft cap", calls, inputs, options, bounds)
    calls = {
        "ours": partial(flex_attention, score_mod=by_kind, block_mask=mask),
        "the dense formula": partial(_dense, by_kind),
        "no score function": partial(rw.attention, pattern=pattern),
    }
    bounds = {"the dense formula": 1 / 3, "no score function": 30.0} if usual else {}
    yield from _targets(
        "flex_attention, another score function", calls, inputs, options, bounds, checked=("the dense formula",)
    )


def _dense(score_mod: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention over all pairs in PyTorch, as FlexAttention's eager form does."""
    heads, queries, keys = (torch.arange(n) for n in (q.shape[1], q.shape[2], k.shape[2]))
    at = heads[:, None, None], queries[:, None], keys
    scores = score_mod(q @ k.mT / math.sqrt(q.shape[3]), torch.zeros((), dtype=torch.long), *at)
    return scores.masked_fill(~_near(None, None, *at[1:]), -torch.inf).softmax(-1) @ v


def _near(b: object, h: object, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k <= 512)


def _drawn(tokens: int, heads: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, tokens, _DIM, generator=generator) for _ in range(4))


def _targets(
    name: str, calls: Mapping[str, Attend], inputs: tuple[Tensor, ...], options: Options, bounds: dict[str, float],
    checked: tuple[str, ...] | None = None,
) -> Iterator[Target]:  # fmt: skip
    """Check that the peers give the same results, and time them in turn, forward and with gradients."""
    q, k, v, dout = inputs
    size = f"{max(q.shape[1:3]):,} tokens, {min(q.shape[1:3])} heads of {_DIM}"
    with torch.no_grad():
        results = {each: call(q, k, v) for each, call in calls.items()}
    for each in calls if checked is None else checked:
        error = float((results[each] - results["ours"]).norm() / results["ours"].norm())
        if not error <= 1e-5:
            raise UnsupportedError(name, f"a difference of {error:.1e} to {each}", "the same result", "Report it.")
    rounds = options.rounds or (3 if options.quick else 5)

    def forward(call: Attend) -> object:
        with torch.no_grad():
            return call(q, k, v)

    def both(call: Attend) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(call(*leaves), leaves, dout)

    for direction, run in (("forward", forward), ("with gradients", both)):
        some = {
            each: partial(run, call) for each, call in calls.items() if direction == "forward" or "compiled" not in each
        }
        times = interleaved(some, rounds=rounds, device="cpu", budget=60)
        for each in some:
            if each != "ours":
                over = ratio(times["ours"], times[each]).medians
                yield Target(f"{name}, {direction}: over {each}", size, over, bounds.get(each), False)
