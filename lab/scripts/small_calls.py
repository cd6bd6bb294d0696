"""Time the overhead of small calls: ringweave, its operators, and PyTorch's attention in turn.

    OMP_NUM_THREADS=1 python lab/scripts/small_calls.py lab/results/cpu-calls.jsonl

A line for each case: microseconds of CPU time of a call on one thread, median and least of the rounds, and the
machine's load. Peers take turns within each round, so ratios hold where figures do not.
"operators" is the way that calls take under a mode or trace.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import ringweave as rw
from ringweave.call import Arguments
from ringweave.torch_ops import attend
from ringweave.validate import checked

Peers = dict[str, Callable[[], object]]
ROUNDS, SECONDS = 11, 0.1


def operators(q: Tensor, k: Tensor, v: Tensor, pattern: rw.Pattern, q_offset: int = 0) -> Tensor:
    return attend(*checked(Arguments(q, k, v, pattern, q_offset=q_offset))[:5])[0]


def timed(peers: Peers) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = {name: [] for name in peers}
    times = {}
    for name, call in peers.items():
        call()
        begun = time.process_time()
        call()
        times[name] = max(3, int(SECONDS / max(1e-6, time.process_time() - begun)))
    for _ in range(ROUNDS):
        for name, call in peers.items():
            begun = time.process_time()
            for _ in range(times[name]):
                call()
            found[name].append((time.process_time() - begun) / times[name] * 1e6)
    return {name: {"median": round(statistics.median(us), 1), "least": round(min(us), 1)} for name, us in found.items()}


def one_query(heads: int) -> Peers:
    q, k, v = (torch.randn(1, heads, n, 64) for n in (1, 128, 128))
    return {
        "ringweave": lambda: rw.attention(q, k, v),
        "operators": lambda: operators(q, k, v, rw.Full()),
        "sdpa": lambda: sdpa(q, k, v),
    }


def training(heads: int, tokens: int, width: int) -> Peers:
    q, k, v = (torch.randn(1, heads, tokens, width, requires_grad=True) for _ in range(3))
    grad, causal = torch.randn(1, heads, tokens, width), rw.Causal()
    return {
        "ringweave": lambda: torch.autograd.grad(rw.attention(q, k, v, causal), (q, k, v), grad),
        "operators": lambda: torch.autograd.grad(operators(q, k, v, causal), (q, k, v), grad),
        "sdpa": lambda: torch.autograd.grad(sdpa(q, k, v, is_causal=True), (q, k, v), grad),
    }


def forward(tokens: int, dtype: torch.dtype) -> Peers:
    q, k, v = (torch.randn(1, 8, tokens, 64, dtype=dtype) for _ in range(3))
    causal = rw.Causal()
    return {
        "ringweave": lambda: rw.attention(q, k, v, causal),
        "sdpa": lambda: sdpa(q, k, v, is_causal=True),
    }


class Model(nn.Module):
    """Layers of a small model, identical except for their attention."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int):
        super().__init__()
        self.heads = heads
        self.parts = nn.ModuleList(
            nn.ModuleList(
                (
                    nn.Linear(width, 3 * width),
                    nn.Linear(width, width),
                    nn.Linear(width, 4 * width),
                    nn.Linear(4 * width, width),
                )
            )
            for _ in range(layers)
        )
        self.cache = [torch.randn(2, 1, heads, tokens, width // heads) for _ in range(layers)]

    def forward(self, x: Tensor, at: int, attention: Callable[..., Tensor]) -> Tensor:
        for (qkv, out, up, down), (keys, values) in zip(self.parts, self.cache, strict=True):
            q, k, v = qkv(x).view(1, 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            keys[:, :, at], values[:, :, at] = k[:, :, 0], v[:, :, 0]
            x = x + out(attention(q, keys[:, :, : at + 1], values[:, :, : at + 1], at).transpose(1, 2).flatten(2))
            x = x + down(torch.relu(up(x)))
        return x


def decoding(layers: int = 32) -> Peers:
    """Run steps of a model with 32 layers of 256 channels and 4 heads, at successive ones of 256 positions."""
    model, x, causal = Model(layers, 256, 4, 1024), torch.randn(1, 1, 256), rw.Causal()
    window = (rw.SlidingWindow(256) | rw.Sinks(4)) & causal
    ways: dict[str, Callable[..., Tensor]] = {
        "ringweave": lambda q, k, v, at: rw.attention(q, k, v, causal, q_offset=at),
        "ringweave, window": lambda q, k, v, at: rw.attention(q, k, v, window, q_offset=at),
        "operators": lambda q, k, v, at: operators(q, k, v, causal, at),
        "sdpa": lambda q, k, v, at: sdpa(q, k, v),
    }
    places = dict.fromkeys(ways, 0)

    def step(name: str) -> Tensor:
        # each way runs at new lengths
        places[name] = (places[name] + 1) % 256
        return model(x, 512 + places[name], ways[name])

    calls: Peers = {name: lambda name=name: step(name) for name in ways}
    for call in calls.values():
        # the first 128 steps of a window make a program for each position within a tile; later steps reuse them
        for _ in range(256):
            call()
    return calls


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the CPU time of waiting threads would be counted
    cases: dict[str, Callable[[], Peers]] = {
        "one query, 128 keys, 1 head of 64": lambda: one_query(1),
        "one query, 128 keys, 8 heads of 64": lambda: one_query(8),
        "forward + backward, 64 tokens, 1 head of 32": lambda: training(1, 64, 32),
        "forward + backward, 128 tokens, 4 heads of 64": lambda: training(4, 128, 64),
        "decoding step of 32 layers": decoding,
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cases[f"forward, 512 tokens, 8 heads of 64, {dtype}"] = lambda dtype=dtype: forward(512, dtype)
    lines = []
    for name, make in cases.items():
        with torch.set_grad_enabled("backward" in name):
            us = timed(make())
        threads, load = torch.get_num_threads(), round(os.getloadavg()[0], 1)
        lines.append(json.dumps({"case": name, "us": us, "threads": threads, "load": load, "torch": torch.__version__}))
        print(lines[-1], flush=True)
    if len(sys.argv) > 1:
        with Path(sys.argv[1]).open("a") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
