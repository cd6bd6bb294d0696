"""Qwen 4, read from transformers 5.24.0: its indexer chooses blocks of tokens, here without its loops over queries.

:func:`ringweave.adaptive.lightning_indexer` has no such form: the score of a block is that of the mean of its keys.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from ....adaptive.ranking import Scored, choose
from ....patterns import Causal, Full, KeyPadding, Selected
from ....patterns.algebra import And
from ..masks import PatternMask


def choose_tokens(
    indexer: Any, forward: Any, hidden: Tensor, embeddings: tuple[Tensor, Tensor], mask: Any, cache: Any
) -> Any:
    """Run Qwen's indexer for chunks of queries, where its own forward loops over all queries.

    A block is ``compress_ratio`` successive visible tokens. Where a mask consists of causality and padding, all queries
    of a sequence see its first tokens, so that they share the blocks.

    Args:
        indexer: The indexer.
        forward: Its own forward, which runs with other masks.
        hidden: (B, queries, hidden size).
        embeddings: Cosines and sines of all tokens, (B, keys, D).
        mask: The mask of the layer.
        cache: The model's cache, or None.
    Returns:
        The pattern of the chosen tokens and of the tokens after the last whole block; or what ``forward`` returns.
    """
    bounds = _bounds(mask)
    if bounds is None:
        return forward(hidden, embeddings, mask, cache)
    first, seen = (bound.to(hidden.device) for bound in bounds)
    with torch.no_grad():
        batch, nq = hidden.shape[:2]
        both = indexer.index_qk_proj(hidden)
        queries = indexer.index_n_heads * indexer.index_head_dim
        q = indexer.q_layernorm(both[..., :queries].reshape(batch, nq, -1, indexer.index_head_dim))
        q = _rotated(indexer, q, *(x[:, -nq:] for x in embeddings)).float()
        keys = both[..., queries:]
        keys = keys if cache is None else cache.update_indexer(keys, indexer.layer_idx)
        blocks = max(1, int(seen.max()) // indexer.compress_ratio)
        pooled = _pooled(indexer, keys, embeddings, first, blocks)
        whole, number = seen // indexer.compress_ratio, torch.arange(blocks, device=hidden.device)

        def scored(rows: range) -> Scored:
            part = slice(rows.start, rows.stop)
            scores = torch.matmul(q[:, part], pooled.mT[:, None]).relu().sum(2) / math.sqrt(q.shape[3])
            return Scored(scores, number < whole[:, part, None])

        sizes = {"rows": nq, "scores": batch * q.shape[2] * blocks, "device": hidden.device}
        chosen = choose(scored, min(indexer.block_topk, blocks), **sizes)
        tokens = _tokens(indexer, chosen, first[:, None, None], seen[..., None])
    return Selected(tokens[:, None])


def _rotated(indexer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, tokens, heads, D) by the model's own function."""
    rotated: Tensor = sys.modules[type(indexer).__module__].apply_rotary_pos_emb(x, cos=cos, sin=sin, unsqueeze_dim=2)
    return rotated


def _pooled(indexer: Any, keys: Tensor, embeddings: tuple[Tensor, Tensor], first: Tensor, blocks: int) -> Tensor:
    """Return the keys of blocks, (B, blocks, D): the means of their tokens, rotated to their first tokens."""
    places = torch.arange(blocks * indexer.compress_ratio, device=keys.device).view(blocks, -1)
    # a sequence that has fewer blocks reads its last tokens, and no query may choose such a block; a static cache has
    # keys, but no rotations, of tokens to come
    tokens = (first[:, None, None] + places).clamp(max=min(keys.shape[1], embeddings[0].shape[1]) - 1)
    members = torch.arange(len(keys), device=keys.device)[:, None]
    means = keys[members[..., None], tokens].float().mean(2).to(keys.dtype)
    rotations = (x.expand(len(keys), -1, -1)[members, tokens[..., 0]] for x in embeddings)
    return _rotated(indexer, indexer.k_layernorm(means)[:, :, None], *rotations).squeeze(2).float()


def _tokens(indexer: Any, chosen: Tensor, first: Tensor, seen: Tensor) -> Tensor:
    """Return the tokens of the chosen blocks, and those after the last whole block.

    Args:
        indexer: The indexer.
        chosen: (B, queries, n), -1 is no block.
        first: (B, 1, 1), the first visible token of each sequence.
        seen: (B, queries, 1), the number of visible tokens.
    """
    ratio, whole = indexer.compress_ratio, seen // indexer.compress_ratio
    inside, chosen = torch.arange(ratio, device=chosen.device), chosen[..., None]
    tokens = torch.where(chosen >= 0, chosen * ratio + inside, seen[..., None]).flatten(2)
    tokens = torch.cat([tokens, whole * ratio + inside[: ratio - 1]], -1)
    return torch.where(tokens < seen, first + tokens, -1)


def _bounds(mask: Any) -> tuple[Tensor, Tensor] | None:
    """Return the first visible token of each sequence (B,), and the number that each query sees (B, queries)."""
    if not isinstance(mask, PatternMask) or mask.facts.context is not None:
        return None
    batch, _, nq, nk = mask.sizes
    parts = mask.pattern.parts if isinstance(mask.pattern, And) else (mask.pattern,)
    if not all(isinstance(part, Causal | Full | KeyPadding) for part in parts):
        return None
    start, stop = torch.zeros(batch, dtype=torch.long, device="cpu"), torch.full((batch, nq), nk, device="cpu")
    for part in parts:
        if isinstance(part, Causal):
            stop = stop.minimum(torch.arange(nq, device="cpu") + mask.q_offset + 1)
        elif isinstance(part, KeyPadding):
            ends = torch.as_tensor(part.stop, device="cpu").expand(batch)
            stop = stop.minimum(ends[:, None])
            start = start.maximum(torch.as_tensor(part.start, device="cpu").expand(batch))
    return start, (stop - start[:, None]).clamp(min=0)


#: Functions that run in place of a module's forward, by the name of its class.
HOOKS = {"Qwen4ExpTextQSAIndexer": choose_tokens}
