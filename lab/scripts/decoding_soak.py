"""Decode thousands of tokens with models of transformers, and fail if memory or time a step grows.

    python lab/scripts/decoding_soak.py --steps 5000

The models are a tiny Llama with a window and sinks over keys in pages, allocated in advance, and a tiny Mistral with
the library's own sliding cache. Time is CPU time, the median of a part; memory is the process's own, between parts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import transformers

import ringweave as rw
from ringweave.integrations.transformers import ModelCache, patch
from ringweave.integrations.transformers.model_cache import CACHE

#: Parts of a run, and the first part to compare with: before it, pages are touched and caches fill.
PARTS, SETTLED = 10, 2
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def of_pages(steps: int) -> tuple[Any, Any]:
    """Return a model with its own pattern, and a cache of pages."""
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=steps)
    cache = ModelCache(steps)
    return patch(transformers.LlamaForCausalLM(config).eval(), rw.SlidingWindow(128) | rw.Sinks(4)), cache


def of_the_library(steps: int) -> tuple[Any, Any]:
    """Return a model with a window, and the library's cache that drops keys behind it."""
    config = transformers.MistralConfig(**SIZES, sliding_window=128, max_position_embeddings=steps)
    return patch(transformers.MistralForCausalLM(config).eval()), transformers.DynamicCache(config=config)


KINDS: dict[str, Callable[[int], tuple[Any, Any]]] = {"pages": of_pages, "sliding": of_the_library}


def soak(kind: str, steps: int) -> list[tuple[float, int]]:
    """Return (seconds of a step, bytes of the process) for each part of a run."""
    torch.manual_seed(0)
    model, cache = KINDS[kind](steps)
    process, token, parts = psutil.Process(), torch.tensor([[5], [9]]), []
    with torch.no_grad():
        for _ in range(PARTS):
            times = []
            for _ in range(steps // PARTS):
                began = time.process_time()
                token = model(token, use_cache=True, **{CACHE: cache}).logits.argmax(-1)
                times.append(time.process_time() - began)
            parts.append((statistics.median(times), process.memory_info().rss))
    return parts


def growth(parts: list[tuple[float, int]]) -> tuple[float, int]:
    """Return (time of the last part over that of the first compared one, bytes between them)."""
    return parts[-1][0] / parts[SETTLED][0], parts[-1][1] - parts[SETTLED][1]


def main() -> None:
    """Decode with both models and check their growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--mib", type=float, default=8.0, help="by how much memory may grow")
    parser.add_argument("--ratio", type=float, default=1.5, help="by how much a step's time may")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    failed = False
    for kind in KINDS:
        parts = soak(kind, arguments.steps)
        for number, (seconds, held) in enumerate(parts, 1):
            done = number * arguments.steps // PARTS
            print(f"{kind}: {done:6,} steps  {seconds * 1e3:6.2f} ms  {held / 2**20:7.1f} MiB", flush=True)
        ratio, grown = growth(parts)
        print(f"{kind}: a step takes {ratio:.2f} times as long at the end, memory grew by {grown / 2**20:.1f} MiB")
        failed |= ratio > arguments.ratio or grown / 2**20 > arguments.mib
    sys.exit(failed)


if __name__ == "__main__":
    main()
