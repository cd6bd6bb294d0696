"""Ratios between two calls of ringweave that should cost about the same, each with a bound for every processor.

A cliff is a call that was checked once and takes much longer than a similar one: an argument in another spelling, a
decoding step that is compiled anew, a plan that lists keys that no query attends. The gate measures these ratios beside
those of speed, and compares each with its own bound instead of a stored ratio.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringweave as rw
from ringweave.plan.from_pattern import build

from ..tune.measure import Runnable
from ..tune.problem import Problem
from ..tune.session import Say
from .cases import packed
from .gate import Headline

_SMALL = 16


def _drawn(tokens: int, heads: int = 1, dim: int = 16) -> Tensor:
    return torch.randn(1, heads, tokens, dim)


def _calls(ours: Sequence[tuple[rw.patterns.Pattern, dict[str, Any]]]) -> Callable[[Say], tuple[Runnable, Runnable]]:
    """Return a function that makes small calls, and as many plain ones."""

    def pair(say: Say) -> tuple[Runnable, Runnable]:
        q = _drawn(_SMALL)

        def run(calls: Sequence[tuple[rw.patterns.Pattern, dict[str, Any]]]) -> object:
            with torch.no_grad():
                return [rw.attention(q, q, q, pattern, **options) for pattern, options in calls]

        plain = [(rw.Causal(), dict[str, Any]())] * len(ours)
        return lambda: run(ours), lambda: run(plain)

    return pair


def _parameters(say: Say) -> tuple[Runnable, Runnable]:
    q = _drawn(_SMALL).requires_grad_()
    learned = torch.nn.Parameter(q.detach())
    return lambda: rw.attention(learned, q, q, rw.Causal()), lambda: rw.attention(q, q, q, rw.Causal())


def _steps(pattern: rw.patterns.Pattern, **options: Any) -> Callable[[Say], tuple[Runnable, Runnable]]:
    """Return a function that makes decoding steps over a growing cache, and causal ones over the same lengths."""

    def pair(say: Say) -> tuple[Runnable, Runnable]:
        k, q = _drawn(4096, 4, 32), _drawn(1, 4, 32)

        def steps(of: rw.patterns.Pattern, **more: Any) -> Runnable:
            lengths = itertools.cycle(range(2048, 4096))

            def step() -> object:
                keys = k[:, :, : next(lengths)]
                with torch.no_grad():
                    return rw.attention(q, keys, keys, of, q_offset=keys.shape[2] - 1, **more)

            return step

        return steps(pattern, **options), steps(rw.Causal())

    return pair


def _plans(*patterns: Callable[[], rw.patterns.Pattern]) -> Callable[[Say], tuple[Runnable, Runnable]]:
    """Return a function that makes two plans of 16,384 tokens, which no cache has."""

    def pair(say: Say) -> tuple[Runnable, Runnable]:
        ours, other = ((lambda new=new: build(new(), 2**14, 2**14, tile=(128, 128))) for new in patterns)
        return ours, other

    return pair


def _packed(say: Say) -> tuple[Runnable, Runnable]:
    tokens = 2**14
    return packed.steps(Problem("packed", rw.Causal(), tokens, 4), packed.packings(tokens, 400))


def _ragged(say: Say) -> tuple[Runnable, Runnable]:
    def step(lengths: Sequence[int]) -> Runnable:
        cache = rw.PagedCache.empty(len(lengths), max(lengths), 2, 32, page=16)
        for row, length in enumerate(lengths):
            keys = _drawn(length, 2, 32)
            cache.append(keys, keys, [row])
        q = torch.randn(len(lengths), 4, 1, 32)
        return lambda: rw.paged_attention(q, cache, rw.SlidingWindow(128) & rw.Causal())

    return step([400, 512, 300, 451]), step([512] * 4)


def _channels(say: Say) -> tuple[Runnable, Runnable]:
    def step(dim: int) -> Runnable:
        q, k = _drawn(1, 4, dim), _drawn(1024, 1, dim)
        return lambda: rw.attention(q, k, k, rw.Causal(), q_offset=1023)

    return step(576), step(512)


_UNION = rw.SlidingWindow(50) | rw.Strided(16) & rw.Causal()
_LENGTHS = [1024] * 16
CLIFFS = (
    Headline("spelling", "calls with ints, numpy's numbers and an equal policy, over plain calls",
             _calls([(rw.Causal(), {"dropout": 0}), (rw.Causal(), {"scale": np.float32(0.25)}),
                     (rw.Causal(), {"precision": rw.Precision()})]), 2.0),
    Headline("bounds", "a call with constant bounds of keys, over a plain call",
             _calls([(rw.KeyPadding(12), {})]), 1.5),
    Headline("parameter", "a call on a parameter, over one on a tensor that requires gradients", _parameters, 1.5),
    Headline("terms", "a call with a soft cap, over a plain call",
             _calls([(rw.Causal(), {"terms": rw.Softcap(30.0)})]), 20.0),
    Headline("residues", "a decoding step of a union by residue at each length, over a causal step",
             _steps(_UNION), 4.0),
    Headline("heads", "a decoding step of heads with unequal patterns, over a causal step",
             _steps(rw.PerHead([rw.Causal(), rw.SlidingWindow(64), rw.SlidingWindow(100), rw.Causal()])), 4.0),
    Headline("ragged", "a step over pages of sequences of unequal lengths, over one of equal lengths", _ragged, 2.0),
    Headline("period", "a plan of a stride that no pair reaches, over one of a stride that some reach",
             _plans(lambda: rw.Strided(2**30), lambda: rw.Strided(2**13)), 2.0),
    Headline("documents", "a plan of 16 documents in one row, over one of a causal window",
             _plans(lambda: rw.Causal().within(rw.Documents(_LENGTHS)), lambda: rw.SlidingWindow(512) & rw.Causal()),
             6.0),
    Headline("packed", "a training step with new packed documents, over one with the same", _packed, 1.25),
    Headline("channels", "a decoding step with heads of 576 channels, over one with 512", _channels, 2.0),
)  # fmt: skip
