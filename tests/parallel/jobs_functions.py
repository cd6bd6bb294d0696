"""Jobs of worker processes: score functions over a context."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ringweave as rw
from ringweave.errors import RingError
from ringweave.parallel import ContextParallel
from ringweave.trace.evaluate import Pass

from ..oracle import Inputs
from .processes import ring_error

WINDOW = rw.SlidingWindow(100)


def case(x: Inputs, name: str, schedule: str) -> Any:
    """Return this rank's part of a call with a case's functions."""
    from .test_score_functions import given
    from .test_scored import share

    return share(dist.group.WORLD, x, WINDOW, given(name), {"schedule": schedule, "placement": "zigzag"})


def different() -> str:
    """Return the error of a call in which each rank's function has another number."""
    ctx = ContextParallel(dist.group.WORLD, WINDOW, 500, heads=(2, 2))
    x, number = torch.randn(1, 2, ctx.local, 8), (1 + dist.get_rank()) / 8
    return str(
        ring_error(lambda: rw.attention(x, x, x, WINDOW, terms=lambda s, b, h, q, k: s + number * s * s, context=ctx))
    )


def failing(where: str, victim: int, deadline: float) -> str:
    """Return the first error of two steps in which the victim's function fails."""
    ctx = ContextParallel(dist.group.WORLD, WINDOW, 500, heads=(2, 2), deadline=deadline)
    leaves, divisor = [torch.randn(1, 2, ctx.local, 8, requires_grad=True) for _ in range(3)], [1]

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + s * s * (1 / divisor[0])

    def step() -> None:
        rw.attention(*leaves, WINDOW, terms=score_mod, context=ctx).sum().backward()

    step()
    mine, name = dist.get_rank() == victim, {"forward": "__call__", "backward": "differentiable"}.get(where)
    divisor[0] = 0 if mine and name is None else 1
    fails = mock.patch.object(Pass, name, side_effect=ZeroDivisionError("here")) if mine and name else nullcontext()
    with fails:
        try:
            for _ in range(2):
                step()
        except (RingError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"
