"""MiniMax M3, read from transformers 5.24.0: its indexer scores blocks of tokens, here for chunks of queries.

:func:`ringweave.adaptive.lightning_indexer` has no such form: a block's score is the maximum over its tokens.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ....chunks import chunks


class _KeysReady(Exception):  # noqa: N818  (no error: it ends a forward that has done enough)
    """An indexer has written its keys."""


class _Cache:
    """In place of a cache: takes an indexer's keys once, and returns them to each chunk of queries."""

    def __init__(self, cache: Any, layer: int):
        self.cache, self.layer = cache, layer
        self.keys: Tensor | None = None

    @property
    def layers(self) -> _Cache:
        return self

    def __getitem__(self, layer: int) -> _Cache:
        return self

    def update_index(self, keys: Tensor) -> Tensor:
        """Write the keys of all queries and stop the forward; afterwards return them."""
        if self.keys is not None:
            return self.keys
        self.keys = keys if self.cache is None else self.cache.layers[self.layer].update_index(keys)
        raise _KeysReady


@torch.no_grad()
def choose_blocks(
    indexer: Any, forward: Any, hidden: Tensor, embeddings: tuple[Tensor, Tensor], cache: Any, positions: Tensor
) -> Tensor:
    """Run MiniMax's indexer, which scores all pairs for each head, for chunks of queries.

    Its own forward runs for each chunk, with a cache that holds the keys of all tokens.

    Args:
        indexer: The indexer.
        forward: Its own forward.
        hidden: (B, queries, hidden size).
        embeddings: Cosines and sines, (B, queries, D).
        cache: The model's cache, or None.
        positions: (B, queries).
    Returns:
        The chosen blocks, (B, heads, queries, n); -1 is no block.
    """
    held = _Cache(cache, indexer.layer_idx)
    with suppress(_KeysReady):
        forward(hidden, embeddings, held, positions)
    assert held.keys is not None
    one = len(hidden) * indexer.num_heads * held.keys.shape[2] * 4
    found = []
    for part in chunks(hidden.shape[1], one, hidden.device):
        rotations = tuple(x[:, part] for x in embeddings)
        found.append(forward(hidden[:, part], rotations, held, positions[:, part]))
    return torch.cat(found, 2)


#: Functions that run in place of a module's forward, by the name of its class.
HOOKS = {"MiniMaxM3VLIndexer": choose_blocks}
