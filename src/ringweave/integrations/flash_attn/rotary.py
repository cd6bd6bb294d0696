"""Rotary embeddings of queries and new keys, from tables of cosines and sines."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...axes import Axes
from ...checks import flag
from ...errors import ShapeError

# flash_attn_with_kvcache rotates in steps of this many dimensions
_STEP = 16
_TABLES = {
    prefix: Axes(f"{prefix}cos: floating[positions half]; {prefix}sin: floating[positions half]")
    for prefix in ("", "rotary_")
}


class Rotary(NamedTuple):
    """Tables of a rotary embedding.

    Attributes:
        cos: (positions, rotated / 2).
        sin: In the same form.
        interleaved: Whether dimensions 0 and 1 rotate together, 2 and 3, and so on; otherwise 0 and rotated / 2.
        prefix: How the names of the tables begin in the caller's arguments.
        first: Name of the caller's argument that says the first position of a sequence.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    prefix: str = ""
    first: str = "seqlen_offsets"

    @staticmethod
    def of_cache(cos: Tensor | None, sin: Tensor | None, interleaved: bool, dim: int) -> Rotary | None:
        """Check the tables of a call of ``flash_attn_with_kvcache`` with a head dim; None without tables."""
        if cos is None and sin is None:
            return None
        return Rotary.of(cos, sin, interleaved, dim, _STEP, "rotary_", "rotary_seqlens")

    @staticmethod
    def of(
        cos: Tensor | None, sin: Tensor | None, interleaved: bool, dim: int, step: int = 2, prefix: str = "",
        first: str = "seqlen_offsets",
    ) -> Rotary:  # fmt: skip
        """Check the tables of a call with a head dim, of which a multiple of ``step`` dimensions rotates."""
        tables: dict[str, Any] = {f"{prefix}cos": cos, f"{prefix}sin": sin}
        remedy = "Pass cosines and sines, (positions, rotary dim / 2)."
        sizes = _TABLES[prefix].fit(**tables, anywhere=True, empty=("positions", "half"), remedy=remedy)
        assert cos is not None
        assert sin is not None
        rotated = 2 * sizes["half"]
        if rotated % step or not 0 < rotated <= dim:
            wanted = f"a multiple of {step}, at most the head dim {dim}"
            raise ShapeError("rotary dim", rotated, wanted, "Pass tables of half as many columns.")
        return Rotary(cos.detach(), sin.detach(), flag(f"{prefix}interleaved", interleaved, ShapeError), prefix, first)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate vectors (..., N, H, D) at positions (..., N)."""
        first, last = (int(each) for each in positions.aminmax()) if positions.numel() else (0, -1)
        self._check_positions(first, last)
        return self._turned(x, self.cos[positions], self.sin[positions])

    def rotate_from(self, x: Tensor, first: int) -> Tensor:
        """Rotate vectors (..., N, H, D) at positions ``first`` and following."""
        stop = first + x.shape[-3]
        self._check_positions(first, stop - 1)
        return self._turned(x, self.cos[first:stop], self.sin[first:stop])

    def _check_positions(self, first: int, last: int) -> None:
        if first < 0:
            raise ShapeError(self.first, first, "positions from 0 on", "Pass the first position of each sequence.")
        if last >= len(self.cos):
            wanted = f"at least {last + 1}, the positions that this call reaches"
            raise ShapeError(f"{self.prefix}cos rows", len(self.cos), wanted, "Make longer tables.")

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate vectors (..., N, H, D) by their rows of the tables, (..., N, rotated / 2), in float32 at least."""
        half = cos.shape[-1]
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (rows.unsqueeze(-2).to(wide) for rows in (cos, sin))
        turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        else:
            a, b = turned[..., :half], turned[..., half:]
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return torch.cat([turned.to(x.dtype), rest], -1)
