"""Multi-head attention at two scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import flag, one_of, whole
from ..errors import ShapeError, UnsupportedError
from ..hierarchical import COMBINATIONS, hierarchical_attention
from ..patterns import Causal, Full, Pattern
from ..weights import BlockWeights
from .module_parts import accepted_options, refuse_pattern
from .multihead import MultiheadAttention


class HierarchicalAttention(MultiheadAttention):
    """Multi-head attention at two scales: near and chosen keys one by one, and the means of all other blocks.

    See :func:`ringweave.hierarchical_attention`. With ``combine="gates"`` the factors of the means, the chosen blocks
    and the window are the sigmoid of a linear map of the query's input, for each head.

    Args:
        embed_dim: Channels of the inputs and of the output.
        num_heads: Query heads; divides embed_dim.
        pool: Tokens in a block of keys and in a tile of queries.
        top_k: Number of blocks that each tile of queries chooses.
        window: Number of tokens around a query that it attends one by one.
        causal: Whether keys after the query are left out.
        combine: ``"exact_cover"`` or ``"gates"``.
        **options: Options of :class:`MultiheadAttention` that prepare queries, keys and values, and those that
            :func:`ringweave.hierarchical_attention` takes.
    Raises:
        ShapeError: A size is below 1; top_k or window is below 0.
        PatternError: ``causal`` is not a bool.
        UnsupportedError: An option is passed that the module would not use; in a call, a mask or ``need_weights``.
    Example:
        >>> x = torch.randn(2, 128, 64)
        >>> layer = rw.nn.HierarchicalAttention(64, 4, pool=16, top_k=2, window=16, causal=True, batch_first=True)
        >>> layer(x, x, x)[0].shape
        torch.Size([2, 128, 64])

    References:
        Yuan et al. (2025), Native sparse attention, section 3.2 (gates).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        pool: int,
        top_k: int,
        window: int,
        causal: bool = False,
        combine: str = "exact_cover",
        **options: Any,
    ) -> None:
        refuse_pattern(options, "causal says which keys a query may attend")
        self.causal = flag("causal", causal)
        super().__init__(embed_dim, num_heads, pattern=Causal() if self.causal else Full(), **options)
        accepted_options("hierarchical_attention", self._options(), type(self).__name__)
        self.pool = whole("pool", pool, 1, error=ShapeError)
        self.top_k, self.window = (whole(n, x, 0, error=ShapeError) for n, x in (("top_k", top_k), ("window", window)))
        self.combine = one_of("combine", combine, COMBINATIONS)
        place: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.gate = nn.Linear(self.embed_dim, 3 * self.num_heads, **place) if self.combine == "gates" else None

    def _attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Mapping[str, Any]
    ) -> Tensor:
        if isinstance(options["q_offset"], Tensor):
            wanted = "an int: queries have the same positions in every batch element"
            raise UnsupportedError("q_offset", "a tensor", wanted, "Pass an int.")
        if options["terms"] or pattern != self.pattern:
            wanted = "no mask and is_causal=False"
            got = repr(pattern) if pattern != self.pattern else "a mask tensor or terms"
            raise UnsupportedError("attn_mask", got, wanted, "Create the module with causal=True.")
        gates = None
        if self.gate is not None:
            gates = torch.sigmoid(self.gate(x)).unflatten(-1, (self.num_heads, 3)).transpose(1, 2)
        return hierarchical_attention(
            q,
            k,
            v,
            pool=self.pool,
            top_k=self.top_k,
            window=self.window,
            causal=self.causal,
            combine=self.combine,
            gates=gates,
            **accepted_options("hierarchical_attention", options, type(self).__name__),
        )

    def _weights(self, q: Tensor, k: Tensor, pattern: Pattern, options: Mapping[str, Any]) -> BlockWeights:
        raise UnsupportedError("need_weights", True, "False", "The means of blocks have no weights by pair.")
