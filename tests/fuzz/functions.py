"""Define functions as patterns, plain and over captured tensors, and FlexAttention's masks of them."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from .sizes import At, Sizes, near
from .tables import random_source, uniform

FUNCTIONS = {
    "residue": "lambda b, h, q, k: (q + {c} * k) % {m} < {c}",
    "by_head": "lambda b, h, q, k: (q - k).abs() <= {c} * (h + 1)",
    "by_batch": "lambda b, h, q, k: k <= q + {c} * b",
    "ids": "lambda b, h, q, k: t[q] == t[k]",
    "pairs": "lambda b, h, q, k: t[q, k] == 1",
    "lengths": "lambda b, h, q, k: k < t[b]",
    "reach": "lambda b, h, q, k: (q - k).abs() <= t[h]",
    "by_both": "lambda b, h, q, k: (q + k) % 3 == t[b, h]",
}


def draw_function(r: Random, s: Sizes) -> tuple[Any, ...]:
    return (
        r.choice(list(FUNCTIONS)),
        r.choice(["rw.TokenMask", "rw.from_mask_mod"]),
        r.choice([1, 2, 3, 5, 40]),
        r.randint(0, 99),
    )


def captured(s: Sizes, name: str, c: int, seed: int) -> tuple[tuple[int, ...], float]:
    """Return the shape of the tensor that a function reads, and the factor of its uniform numbers; or ()."""
    longest = max(s.stop, s.nk)
    return {
        "ids": ((longest,), float(c + 1)),
        "pairs": ((s.stop, s.nk), 2.0),
        "lengths": ((s.batch,), s.nk + 1.0),
        "reach": ((s.heads,), float(c + 1)),
        "by_both": ((s.batch, s.heads), 3.0),
    }.get(name, ((), 0.0))


def function_source(s: Sizes, name: str, maker: str, c: int, seed: int) -> str:
    body = FUNCTIONS[name].format(c=c, m=c + 2)
    shape, times = captured(s, name, c, seed)
    if not shape:
        return f"{maker}({body})"
    return f"{maker}((lambda t: {body})(({random_source(shape, seed)} * {times}).long()))"


def function_allows(at: At, name: str, maker: str, c: int, seed: int) -> Any:
    _, b, h, q, k = at
    shape, times = captured(at.s, name, c, seed)
    t = (uniform(shape, seed) * np.float32(times)).astype(np.int64) if shape else np.zeros(0)
    return {
        "residue": lambda: np.mod(q + c * k, c + 2) < c,
        "by_head": lambda: near(at, c * (h + 1)),
        "by_batch": lambda: k - q <= c * b,
        "ids": lambda: np.equal.outer(t[q[:, 0]], t[k[0]]),
        "pairs": lambda: t[q[:, 0]][:, k[0]] == 1,
        "lengths": lambda: (k < t[b]) & (q == q),
        "reach": lambda: near(at, int(t[h])),
        "by_both": lambda: (q + k) % 3 == t[b, h],
    }[name]()


def draw_block_mask(r: Random, s: Sizes) -> tuple[Any, ...]:
    return r.choice(["residue", "by_head", "by_batch"]), "", r.choice([1, 3, 40]), r.choice([16, 32, 48, 128])


def block_mask_source(s: Sizes, name: str, maker: str, c: int, side: int) -> str:
    made = f"torch.nn.attention.flex_attention.create_block_mask({FUNCTIONS[name].format(c=c, m=c + 2)}"
    return f"rw.from_block_mask({made}, {s.batch}, {s.heads}, {s.stop}, {s.nk}, device='cpu', BLOCK_SIZE={side}))"
