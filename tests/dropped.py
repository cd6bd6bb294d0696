"""Compute which pairs dropout keeps in numpy, independently of the library.

Written apart from the library's, so that the two can disagree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]
_WORD = 0xFFFFFFFF


def philox(counter: Sequence[Words | NDArray[np.int64]], seed: int) -> list[Words]:
    """Philox 4x32 with 10 rounds, from the paper: four words for each counter."""
    c = [np.asarray(x).astype(np.uint64) & np.uint64(_WORD) for x in counter]
    k = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        low, high = np.uint64(_WORD), np.uint64(32)
        c = [(b >> high) ^ c[1] ^ np.uint64(k[0]), b & low, (a >> high) ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) & _WORD, (k[1] + 0xBB67AE85) & _WORD]
    return c


def kept(seed: int, p: float, batch: int, heads: int, q: Sequence[int], k: Sequence[int], b: int = 0) -> Tensor:
    """Return dropout's factors of weights, (batch, heads, q, k), for positions of q and k and batch elements from b on."""
    threshold, columns = round(p * 65536), np.array(k)
    places = np.arange(b, b + batch)[:, None, None, None], np.arange(heads)[:, None, None], np.array(q)[:, None]
    words = philox(np.broadcast_arrays(columns >> 3, *places[::-1]), seed)
    word = np.choose((columns & 7) >> 1, words)
    stays = word >> (16 * (columns & 1)).astype(np.uint64) & np.uint64(0xFFFF) >= threshold
    return torch.from_numpy(stays.astype(np.float64)) * 65536 / (65536 - threshold)


def next_seed() -> int:
    """Return the seed that the next call draws."""
    state = torch.get_rng_state()
    seed = int(torch.randint(-(2**63), 2**63 - 1, ()))
    torch.set_rng_state(state)
    return seed
