"""Random blocks, drawn in time and memory that grow with the blocks that are set."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .block_sets import BlockSet, ListedBlocks, MaskBlocks

# from this share on a number is drawn for every block: at most eight for each that is set
_DENSE = 1 / 8
_AT_ONCE = 2**20


def draw(lead: tuple[int, ...], side: int, total: int, *, seed: int, diagonal: bool) -> BlockSet:
    """Draw ``total`` random blocks of ``side`` x ``side``, evenly over the rows to one block.

    Any choice of as many blocks of a row is as likely as any other; lists where they are few, else a mask.

    Args:
        lead: Leading sides: (), (heads,) or (batch, heads), each drawn anew; rows have as many blocks in all of them.
        side: Blocks in a row and in a column.
        total: Blocks that are set; with ``diagonal`` at least ``side``.
        seed: Of the generator.
        diagonal: Whether the diagonal is set.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if total >= _DENSE * side * side:
        return MaskBlocks(_masked(lead, side, total, generator, diagonal), side)
    return ListedBlocks(_listed(lead, side, total, generator, diagonal), side)


def _longer(side: int, total: int, generator: torch.Generator) -> Tensor:
    """Draw the rows that have one block more than others."""
    return torch.randperm(side, generator=generator, device="cpu")[: total % side]


def _masked(lead: tuple[int, ...], side: int, total: int, generator: torch.Generator, diagonal: bool) -> Tensor:
    # the blocks of a row with the highest numbers
    mask = torch.zeros(*lead, side, side, dtype=torch.bool, device="cpu")
    flat, least = mask.view(-1, side), total // side
    following = torch.empty(len(flat), dtype=torch.int64, device="cpu")
    step = max(1, _AT_ONCE // side)
    for begin in range(0, len(flat), step):
        part = flat[begin : begin + step]
        score = torch.rand(part.shape, generator=generator, device="cpu")
        if diagonal:
            score.scatter_(1, torch.arange(begin, begin + len(part), device="cpu")[:, None] % side, 2.0)
        order = score.argsort(-1, descending=True)
        part.scatter_(1, order[:, :least], True)
        following[begin : begin + step] = order[:, least % side]
    longer = _longer(side, total, generator) + torch.arange(math.prod(lead), device="cpu")[:, None] * side
    flat[longer, following[longer]] = True
    return mask


def _listed(lead: tuple[int, ...], side: int, total: int, generator: torch.Generator, diagonal: bool) -> Tensor:
    # numbers drawn twice in a row are drawn again until none is
    counts = np.full(side, total // side - diagonal)
    counts[_longer(side, total, generator).numpy()] += 1
    row = np.arange(math.prod(lead) * side) % side
    shape = len(row), max(int(counts.max()), 1 - diagonal)
    others = side - diagonal
    listed = torch.randint(others, shape, generator=generator, dtype=torch.int32, device="cpu").numpy()
    listed[np.arange(shape[1]) >= counts[row, None]] = side
    left = np.arange(len(row))
    while len(left):
        part = np.sort(listed[left], axis=1)
        twice = (part[:, 1:] == part[:, :-1]) & (part[:, 1:] < side)
        part[:, 1:][twice] = torch.randint(
            others, (int(twice.sum()),), generator=generator, dtype=torch.int32, device="cpu"
        ).numpy()
        listed[left] = part
        left = left[twice.any(1)]
    if diagonal:
        # drawn among the blocks beside the diagonal
        listed += (listed >= row[:, None]) & (listed < side)
        listed = np.sort(np.concatenate([listed, row[:, None].astype(np.int32)], 1), axis=1)
    return torch.from_numpy(listed).view(*lead, side, -1)
