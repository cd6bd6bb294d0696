"""Exact choices of the best-scored keys or blocks, of which equal scores prefer the earlier one."""

from __future__ import annotations

import torch
from torch import Tensor


def ordered(scores: Tensor) -> Tensor:
    """Return integers in the order of the scores, equal for equal scores; NaN is the least integer.

    -0.0 equals 0.0. The scores are changed.
    """
    whole_type = torch.int64 if scores.dtype == torch.float64 else torch.int32
    least, most = torch.iinfo(whole_type).min, torch.iinfo(whole_type).max
    lacking = scores.isnan()
    bits = scores.add_(0.0).view(whole_type)  # adding 0.0 turns -0.0 into 0.0
    bits = torch.where(bits < 0, bits ^ most, bits)
    return bits.masked_fill_(lacking, least)


def best(key: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """Return the tokens of the largest keys of each row, ascending, then -1; the least integer is never chosen."""
    count = min(top_k, key.shape[-1])
    last = key.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
    more = key > last
    same = (key == last) & (last > torch.iinfo(key.dtype).min)
    # among the keys that equal the last one, the earliest fill the row
    room = count - more.sum(-1, keepdim=True, dtype=torch.int32)
    chosen = more | (same & (same.cumsum(-1, dtype=torch.int32) <= room))
    place = torch.where(chosen, chosen.cumsum(-1, dtype=torch.int32) - 1, count).long()
    listed = tokens.new_full((*key.shape[:-1], count + 1), -1)
    return listed.scatter_(-1, place, tokens.expand(place.shape))[..., :count]
