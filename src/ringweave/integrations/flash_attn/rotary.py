"""Rotary embeddings of queries and new keys, from tables of cosines and sines."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...axes import Axes
from ...errors import ShapeError

# flash-attn's kernels rotate in steps of this many dimensions
_STEP = 16
_TABLES = Axes("rotary_cos: floating[positions half]; rotary_sin: floating[positions half]")


class Rotary(NamedTuple):
    """Tables of a rotary embedding.

    Attributes:
        cos: (positions, rotated / 2).
        sin: In the same form.
        interleaved: Whether dimensions 0 and 1 rotate together, 2 and 3, and so on; otherwise 0 and rotated / 2.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @staticmethod
    def of(cos: Tensor | None, sin: Tensor | None, interleaved: bool, dim: int) -> Rotary | None:
        """Check the tables of a call with a head dim; None without tables."""
        if cos is None and sin is None:
            return None
        remedy = "Pass cosines and sines, (positions, rotary dim / 2)."
        sizes = _TABLES.fit(rotary_cos=cos, rotary_sin=sin, anywhere=True, empty=("positions", "half"), remedy=remedy)
        assert cos is not None
        assert sin is not None
        rotated = 2 * sizes["half"]
        if rotated % _STEP or not 0 < rotated <= dim:
            wanted = f"a multiple of {_STEP}, at most the head dim {dim}"
            raise ShapeError("rotary dim", rotated, wanted, "Pass tables of half as many columns.")
        return Rotary(cos, sin, bool(interleaved))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate vectors (..., N, H, D) at positions (..., N); sums are made in float32 at least."""
        first, last = (int(each) for each in positions.aminmax()) if positions.numel() else (0, 0)
        if first < 0:
            raise ShapeError(
                "rotary_seqlens", first, "positions from 0 on", "Pass the first position of each sequence."
            )
        if last >= len(self.cos):
            wanted = f"at least {last + 1}, the positions that this call reaches"
            raise ShapeError("rotary_cos rows", len(self.cos), wanted, "Make longer tables.")
        half = self.cos.shape[1]
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (table[positions].unsqueeze(-2).to(wide) for table in (self.cos, self.sin))
        turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        else:
            a, b = turned[..., :half], turned[..., half:]
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return torch.cat([turned.to(x.dtype), rest], -1)
