"""Lengths of documents as corpora have them: most short, a few long."""

from __future__ import annotations

import numpy as np


def documents(tokens: int, seed: int, *, median: int = 2048, sigma: float = 1.2, longest: int = 32768) -> list[int]:
    """Log-normal lengths, cut at ``longest``, that fill a sequence."""
    generator = np.random.default_rng(seed)
    found: list[int] = []
    while sum(found) < tokens:
        length = int(np.exp(generator.normal(np.log(median), sigma)))
        found.append(min(max(length, 16), longest, tokens - sum(found)))
    return found
