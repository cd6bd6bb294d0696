"""Well-known sparse patterns, as functions that return patterns.

They cover the layouts that block-sparse kernels used to ship as configuration classes (fixed, variable, longformer,
bigbird), and neighbourhood attention in one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from ..checks import flag, integers, number, whole
from ..errors import PatternError, shown
from .algebra import Or, join
from .base import Pattern
from .block_sets import draw
from .declared import declare
from .dilated import Dilated
from .documents import Documents
from .global_tokens import Global, Periodic
from .local import Causal, Neighborhood, Segments, SlidingWindow
from .table import BlockTable

# the most blocks that a preset draws; the most windows and chosen tokens that it lists
_DRAWN, _LISTED = 2**28, 2**24


P = TypeVar("P", bound=Pattern)


def _noted(pattern: P, name: str, tokens: int) -> P:
    """Note on a pattern which preset made it, and for how many tokens: its errors name both."""
    object.__setattr__(pattern, "_made_by", (name, tokens))
    return pattern


@declare("longformer(96, 48)", "Presets", hostile="longformer(96, [0, n - 1])")
def longformer(window: int, global_tokens: int | Sequence[int] = 1, *, causal: bool = False) -> Pattern:
    """Return a window of ``window`` tokens on either side, joined with global tokens.

    Args:
        window: Tokens on either side (on the left when causal).
        global_tokens: Positions, or an int n for the first n.
        causal: Whether keys after the query are left out.
    Returns:
        A pattern.
    Example:
        >>> rw.patterns.longformer(256, 1)
        SlidingWindow(256, 256) | Global(1)

    References:
        Beltagy, Peters, Cohan (2020), Longformer, section 3.1.
    """
    pattern = SlidingWindow(window, window) | Global(global_tokens)
    return pattern & Causal() if flag("causal", causal) else pattern


@declare("random_blocks(1024, 0.25, block_size=64)", "Presets", hostile="random_blocks(n, 0.05, block_size=64)")
def random_blocks(
    tokens: int,
    density: float,
    *,
    block_size: int = 128,
    heads: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    diagonal: bool = True,
) -> BlockTable:
    """Draw random blocks of a given density; the numbers of blocks in the rows of blocks differ by at most one.

    Time and memory grow with the blocks that are set.

    Args:
        tokens: Sequence length.
        density: Share of pairs to allow, in (0, 1], in whole blocks.
        block_size: Tokens in a block's side.
        heads: Number of query heads, each with blocks of its own; None draws one table for all heads.
        batch: Number of batch elements, each with blocks of its own; requires heads.
        seed: Seed of the generator.
        diagonal: Whether each query block attends the key block at its position.
    Returns:
        A block table; ``round(density * blocks ** 2)`` blocks are set in each head.
    Raises:
        PatternError: The density is outside (0, 1] or too small for the diagonal, or there are more than 2**28 blocks
            to draw.
    Example:
        >>> table = rw.patterns.random_blocks(1024, 0.25, block_size=64)
        >>> int(table.mask.sum()), table.density(1024)
        (64, 0.25)
    """
    tokens, block_size = whole("tokens", tokens, 1), whole("block_size", block_size, 1)
    density, seed = number("density", density), whole("seed", seed, 0, 2**63 - 1)
    diagonal = flag("diagonal", diagonal)
    if batch is not None and heads is None:
        raise PatternError("batch", shown(batch), "heads beside it", "Pass heads= too, 1 for one table per element.")
    lead = tuple(whole(name, n, 1) for name, n in (("batch", batch), ("heads", heads)) if n is not None)
    side = -(-tokens // block_size)
    total = round(density * side * side)
    if not 0 < density <= 1 or (diagonal and total < side):
        least = 1 / side if diagonal else 0.0
        raise PatternError("density", density, f"at most 1 and at least {least:g} for {side} rows", "Raise it.")
    # a mask is drawn if the share is large, else a list of the rounded share for each row
    places = math.prod(lead) * side * (side if total >= side * side / 8 else total // side + 1)
    if places > _DRAWN:
        raise PatternError("tokens, density", f"{places} blocks to draw", f"at most {_DRAWN}", "Raise block_size.")
    table = BlockTable.of(draw(lead, side, total, seed=seed, diagonal=diagonal), (block_size, block_size))
    return _noted(table, "random_blocks", tokens)


@declare("bigbird(1024, window=96, random=2)", "Presets", hostile="bigbird(n, window=96, random=2)")
def bigbird(
    tokens: int,
    *,
    window: int = 192,
    global_tokens: int | Sequence[int] = 64,
    random: int = 3,
    block_size: int = 64,
    seed: int = 0,
) -> Pattern:
    """Return a window joined with global tokens and ``random`` random blocks for every query block.

    Args:
        tokens: Sequence length.
        window: Tokens on either side.
        global_tokens: Positions that attend every key and that every query attends, or an int n for the first n.
        random: Number of random blocks per query block.
        block_size: Tokens in a random block's side.
        seed: Seed of the random blocks.
    Returns:
        A pattern for that length.
    Example:
        >>> rw.patterns.bigbird(1024)
        SlidingWindow(192, 192) | Global(64) | BlockTable(<16x16 blocks>, 64)

    References:
        Zaheer et al. (2020), BigBird, section 2 (the internal transformer construction).
    """
    table = _noted(_random(tokens, random, block_size, seed), "bigbird", tokens)
    return SlidingWindow(window, window) | Global(global_tokens) | table


def _random(tokens: int, random: int, block_size: int, seed: int) -> BlockTable:
    """Draw ``random`` random blocks in each row of blocks."""
    side = -(-whole("tokens", tokens, 1) // whole("block_size", block_size, 1))
    share = min(1.0, whole("random", random, 1) / side)
    return random_blocks(tokens, share, block_size=block_size, seed=seed, diagonal=False)


@declare("sparse_transformer_fixed(128, 32)", "Presets", hostile="sparse_transformer_fixed(2**20, 32)")
def sparse_transformer_fixed(block: int = 128, summary: int = 32, *, causal: bool = True) -> Pattern:
    """Return local blocks joined with the last ``summary`` tokens of every block ("fixed" attention).

    Args:
        block: Tokens in a local block.
        summary: Tokens at the end of each block that every query attends (every later query when causal).
        causal: Whether keys after the query are left out.
    Returns:
        A pattern.
    Raises:
        PatternError: The summary is longer than its block.
    Example:
        >>> rw.patterns.sparse_transformer_fixed(4, 1).to_dense(6)[0, 0].int()[5]
        tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)

    References:
        Child et al. (2019), Generating long sequences with sparse transformers, section 4.3.
    """
    summary, block, causal = whole("summary", summary, 1), whole("block", block, 1), flag("causal", causal)
    if summary > block:
        raise PatternError("summary", summary, f"at most block = {block}", "Lower it.")
    pattern = Segments(block) | Periodic(block, block - summary, block)
    return pattern & Causal() if causal else pattern


@declare(
    "variable(1024, local_blocks=(2, 4), global_blocks=(0, 9))",
    "Presets",
    hostile="variable(n, local_blocks=(2, 4), global_blocks=(0, 9))",
)
def variable(
    tokens: int,
    *,
    local_blocks: Sequence[int] = (4,),
    global_blocks: Sequence[int] = (0,),
    random: int = 0,
    block_size: int = 64,
    seed: int = 0,
) -> Pattern:
    """Return consecutive local windows of chosen sizes, joined with global blocks and random blocks.

    Args:
        tokens: Sequence length.
        local_blocks: Sizes, in blocks, of consecutive local windows; the last size repeats to the end.
        global_blocks: Blocks with tokens that attend every key and that every query attends.
        random: Number of random blocks per query block.
        block_size: Tokens in a block's side.
        seed: Seed of the random blocks.
    Returns:
        A pattern for that length.
    Raises:
        PatternError: A window is smaller than one block.
    Example:
        >>> rw.patterns.variable(256, local_blocks=(1, 2), block_size=32)
        Documents([32, 64, 64, 64, 32]) | Global(32)
    """
    tokens, block_size = whole("tokens", tokens, 1), whole("block_size", block_size, 1)
    random, seed = whole("random", random, 0), whole("seed", seed, 0, 2**63 - 1)
    listed = np.array(integers("local_blocks", local_blocks, 1), np.int64)
    sizes = np.minimum(listed, -(-tokens // block_size)) * block_size
    blocks = np.array(integers("global_blocks", global_blocks, 0), np.int64)
    if not len(sizes):
        raise PatternError("local_blocks", "[]", "at least one size", "Pass sizes such as (4,).")
    # the last size repeats to the end
    repeats = max(0, -(-(tokens - int(sizes.sum())) // int(sizes[-1])))
    if repeats + len(sizes) + len(blocks) * block_size > _LISTED:
        raise PatternError(
            "tokens", f"{tokens} in windows of {sizes[-1]}", f"at most {_LISTED} windows", "Raise block_size."
        )
    bounds = np.minimum(np.concatenate([sizes, np.repeat(sizes[-1:], repeats)]).cumsum(), tokens)
    documents = Documents(cu_seqlens=torch.from_numpy(np.unique(np.append(bounds, 0))))
    pattern: Pattern = _noted(documents, "variable", tokens)
    inside = blocks[blocks * block_size < tokens][:, None] * block_size + np.arange(block_size)
    chosen = np.unique(inside[inside < tokens])
    if len(chosen):
        pattern = pattern | Global(chosen.tolist())
    return pattern | _noted(_random(tokens, random, block_size, seed), "variable", tokens) if random else pattern


@declare("local_global(64, 128)", "Presets", hostile="local_global(64, 2**20)")
def local_global(window: int, stride: int, *, causal: bool = False) -> Pattern:
    """Return a window joined with every ``stride``-th key.

    Args:
        window: Tokens on either side.
        stride: Distance in tokens between the keys that every query attends.
        causal: Whether keys after the query are left out.
    Returns:
        A pattern.
    Example:
        >>> rw.patterns.local_global(1, 3).to_dense(5)[0, 0].int()[4]
        tensor([1, 0, 0, 1, 1], dtype=torch.int32)
    """
    pattern = SlidingWindow(window, window) | Periodic(whole("stride", stride, 1), 0, 1)
    return pattern & Causal() if flag("causal", causal) else pattern


@declare("dilated_blocks(2, [1, 4, 12])", "Presets", tokens=64, hostile="dilated_blocks(2, [1, 2**20])")
def dilated_blocks(window: int, rates: Sequence[int]) -> Pattern:
    """Return the union of windows at several dilation rates; a key in two windows counts once.

    Args:
        window: Number of attended keys on either side, at each rate.
        rates: Dilation rates.
    Returns:
        A pattern.
    Raises:
        PatternError: There are no rates, or a rate is below 1.
    Example:
        >>> rw.patterns.dilated_blocks(1, [1, 4]).to_dense(6)[0, 0].int()[0]
        tensor([1, 1, 0, 0, 1, 0], dtype=torch.int32)
    """
    listed = integers("rates", rates, 1)
    if not listed:
        raise PatternError("rates", "[]", "at least one rate", "Pass rates such as [1, 4, 16].")
    return join(Or, *(SlidingWindow(window, window) if rate == 1 else Dilated(window, rate) for rate in listed))


@declare("natten_1d(192, tokens=1024)", "Presets", hostile="natten_1d(7, n // 8, tokens=n)")
def natten_1d(window: int, dilation: int = 1, *, tokens: int) -> Pattern:
    """Return neighbourhood attention in one dimension: every query attends exactly ``window`` keys, if that many exist.

    Unlike a sliding window, the neighbourhood of a query near a border is shifted inwards.

    Args:
        window: Number of attended keys, including the query's position.
        dilation: Distance in tokens between attended keys.
        tokens: Sequence length; the borders depend on it.
    Returns:
        A pattern for that length.
    Raises:
        PatternError: The window or dilation is below 1.
    Example:
        >>> rw.patterns.natten_1d(3, tokens=5).to_dense(5)[0, 0].int()[[0, 2]]
        tensor([[1, 1, 1, 0, 0],
                [0, 1, 1, 1, 0]], dtype=torch.int32)

    References:
        Hassani et al. (2023), Neighborhood attention transformer, section 3.
    """
    return Neighborhood(window, dilation, tokens=tokens)
