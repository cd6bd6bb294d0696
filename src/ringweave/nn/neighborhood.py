"""Multi-head neighborhood attention on grids of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..api import neighborhood_attention
from ..checks import flag
from ..errors import ShapeError, shown
from ..terms import Term
from ..terms.term import ScoreMod, as_listed
from .module_parts import connected, module_place, module_sizes


class NeighborhoodAttention(nn.Module):
    """Multi-head neighborhood attention on tokens, images or video, as NATTEN's modules compute it.

    See :func:`ringweave.neighborhood_attention`. One linear map, ``qkv``, projects the input, and another, ``proj``,
    the result.

    Args:
        embed_dim: Channels of the input and of the output.
        num_heads: Query heads; divides embed_dim.
        window: Keys along each axis of the grid, one number for all axes or one for each.
        dilation: Step between the keys of a window, one number for all axes or one for each.
        is_causal: Whether an axis is causal, one bool for all axes or one for each.
        bias: Whether the projections have biases.
        num_kv_heads: Key heads; divides num_heads. With fewer, the projections of keys and values are smaller.
        scale: Factor of the scores; 1 / sqrt(channels of a head) by default.
        terms: Score terms, as in :func:`ringweave.neighborhood_attention`; the caller registers their parameters.
        backend: ``"auto"`` or the name of a backend, as in :func:`ringweave.attention`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    Raises:
        ShapeError: A size is below 1, or the heads do not divide it; in a call, the input does not fit.
        PatternError: In a call, the window, dilation or is_causal does not fit the grid.
    Example:
        >>> layer = rw.nn.NeighborhoodAttention(64, 4, window=7, dilation=2)
        >>> layer(torch.randn(2, 16, 20, 64)).shape
        torch.Size([2, 16, 20, 64])

    References:
        Hassani et al. (2023), Neighborhood attention transformer, section 3.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: int | Sequence[int],
        dilation: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
        *,
        bias: bool = True,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        terms: Term | ScoreMod | Sequence[Term | ScoreMod] | None = (),
        backend: str = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.num_kv_heads = module_sizes(embed_dim, num_heads, num_kv_heads)
        self.head_dim = self.embed_dim // self.num_heads
        self.window, self.dilation, self.is_causal = window, dilation, is_causal
        self.scale, self.terms, self.backend = scale, as_listed(terms), backend
        place = {"bias": flag("bias", bias, ShapeError), **module_place(device, dtype)}
        self.qkv = nn.Linear(self.embed_dim, self.embed_dim + 2 * self.num_kv_heads * self.head_dim, **place)
        self.proj = nn.Linear(self.embed_dim, self.embed_dim, **place)

    def forward(self, x: Tensor) -> Tensor:
        """Compute attention of the projected input and project the result.

        Args:
            x: (batch, *grid, embed_dim), where grid is (n,), (height, width) or (time, height, width).
        Returns:
            Output, of x's shape.
        """
        if not isinstance(x, Tensor) or not 3 <= x.ndim <= 5 or x.shape[-1] != self.embed_dim:
            wanted = f"(batch, *grid, {self.embed_dim}) with 1 to 3 grid axes"
            raise ShapeError("x", shown(x), wanted, "Pass channels last.")
        if not x.numel():
            tables = (table for term in self.terms if isinstance(term, Term) for table in term.learned)
            return self.proj(connected(x, (*self.parameters(), *tables)))  # type: ignore[no-any-return]
        kv_dim = self.num_kv_heads * self.head_dim
        parts = self.qkv(x).split([self.embed_dim, kv_dim, kv_dim], -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).movedim(-2, 1) for part in parts)
        out = neighborhood_attention(
            q,
            k,
            v,
            self.window,
            dilation=self.dilation,
            is_causal=self.is_causal,
            scale=self.scale,
            terms=self.terms,
            backend=self.backend,
        )
        return self.proj(out.movedim(1, -2).flatten(-2))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the sizes and the window for the module's repr."""
        shared = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        causal = f", is_causal={self.is_causal}" if self.is_causal else ""
        return f"{self.embed_dim}, {self.num_heads}{shared}, window={self.window}, dilation={self.dilation}{causal}"
