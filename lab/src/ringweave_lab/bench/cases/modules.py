"""The case ``module``: the time of ``nn.MultiheadAttention`` over its projections and the functional call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

import ringweave as rw
from ringweave.errors import UnsupportedError

from ...tune.measure import interleaved, ratio
from ...tune.problem import DIRECTIONS, FORWARD
from ...tune.session import Say
from ..record import Measuring, Options, Target

_BOUND = 1.05
_HEADS, _HEAD_DIM = 4, 64
_PATTERN = rw.SlidingWindow(128) & rw.Causal()


def measure(options: Options, say: Say) -> Measuring:
    """Check that both give the same results, and time them in turn."""
    tokens, heads = options.tokens or (512 if options.quick else 4096), options.heads or _HEADS
    dtype, device = options.dtype or torch.float32, options.device
    torch.manual_seed(0)
    layer = rw.nn.MultiheadAttention(
        heads * _HEAD_DIM, heads, batch_first=True, pattern=_PATTERN, device=device, dtype=dtype
    )
    x = torch.randn(1, tokens, heads * _HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
    said = []
    for direction in DIRECTIONS:
        say(f"module, {tokens:,} tokens, {direction}")
        calls = {name: _call(attend, layer, x, direction) for name, attend in (("parts", _parts), ("module", _module))}
        if not all(map(torch.equal, *(call() for call in calls.values()))):
            raise UnsupportedError("module", "another result", "that of its parts", "Report it.")
        timings = interleaved(calls, rounds=options.rounds or (3 if options.quick else 9), device=device)
        cost = ratio(timings["module"], timings["parts"]).medians
        size = f"{tokens} tokens, {heads} heads"
        yield Target(f"nn.MultiheadAttention, {direction}", size, cost, None if options.sized else _BOUND, False)
        said.append(f"{cost:.3f} {direction}")
    return f"nn.MultiheadAttention over its projections and the functional call: {', '.join(said)}."


def _module(layer: rw.nn.MultiheadAttention, x: Tensor) -> Tensor:
    return layer(x, x, x)[0]  # type: ignore[no-any-return]


def _parts(layer: rw.nn.MultiheadAttention, x: Tensor) -> Tensor:
    assert layer.in_proj_weight is not None
    parts = linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for part in parts)
    return layer.out_proj(rw.attention(q, k, v, layer.pattern).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _call(
    attend: Callable[[rw.nn.MultiheadAttention, Tensor], Tensor],
    layer: rw.nn.MultiheadAttention,
    x: Tensor,
    direction: str,
) -> Callable[[], tuple[Tensor, ...]]:
    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(layer, x),)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(layer, x).sum(), [x, *layer.parameters()])

    return forward if direction == FORWARD else both
