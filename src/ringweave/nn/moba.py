"""Mixture of block attention: each query attends the blocks of keys with the best means, and its own block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..adaptive.pooling import block_means
from ..adaptive.ranking import Scored, choose
from ..checks import whole
from ..errors import ShapeError
from ..merge import merge
from ..patterns import Causal, Documents, Segments, Selected
from ..precision import Precision
from ..types import acc_dtype
from .key_cache import KeyCache
from .self_attention import ChoosingAttention

if TYPE_CHECKING:
    from ..parallel import ContextParallel


class MixtureOfBlockAttention(ChoosingAttention):
    """Causal self-attention in which each query head chooses, for each query, the blocks of keys with the best means.

    With blocks of ``block_size`` keys, counted from 0, query t of a head attends the keys s <= t of

        blocks(t) = {own} + the best (top_k - 1) of the blocks j < own, by <q[t], mean of k in block j>,

    where own = t // block_size. The own block is always attended and is one of the top_k, as published; of blocks with
    equal scores the earlier one is chosen. No choice depends on a later token, so decoding steps choose the same blocks
    as the whole sequence. The choice has no gradient; all else is differentiable.

    The parameters are those of :class:`MultiheadAttention`, so a state_dict of dense attention loads.

    Args:
        embed_dim: Channels of the input and of the output.
        num_heads: Query heads; divides embed_dim.
        block_size: Keys in a block.
        top_k: Number of blocks that a query attends, its own included.
        num_kv_heads: Key heads; divides num_heads. With fewer, the projections of keys and values are smaller.
        bias: Whether the projections have biases.
        qk_norm: Whether each head's queries and keys are normalised before rotation, by RMSNorm over their channels.
        rotary_base: Base of rotary position embeddings, at least 1, such as 10000.0; None for no rotation.
        context: Ranks that share the sequence: the input is this rank's shard.
        precision: Dtypes that attention rounds to; projections have the dtype of the parameters.
        backend: ``"auto"`` or the name of a backend, as in :func:`ringweave.attention`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    Raises:
        ShapeError: A size is below 1, or the heads do not divide it.
    Example:
        >>> layer = rw.nn.MixtureOfBlockAttention(64, 4, block_size=16, top_k=3, rotary_base=10000.0)
        >>> x = torch.randn(2, 100, 64)
        >>> y = layer(x)
        >>> cache = layer.empty_cache()
        >>> with torch.no_grad():
        ...     steps = [layer(part, cache=cache) for part in x.split([90, 7, 3], 1)]
        >>> torch.testing.assert_close(torch.cat(steps, 1), y)

    References:
        Lu et al. (2025), MoBA: mixture of block attention for long-context LLMs, section 2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        block_size: int,
        top_k: int,
        num_kv_heads: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        rotary_base: float | None = None,
        context: ContextParallel | None = None,
        precision: Precision | None = None,
        backend: str = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads,
            2,
            bias=bias,
            qk_norm=qk_norm,
            rotary_base=rotary_base,
            context=context,
            precision=precision,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.block_size = whole("block_size", block_size, 1, error=ShapeError)
        self.top_k = whole("top_k", top_k, 1, error=ShapeError)
        self.reset_parameters()

    def _parts(self, x: Tensor, positions: Tensor) -> list[Tensor]:
        q, k, v = self._projected(x)
        return [self._rotated(q, positions), self._rotated(k, positions), v]

    def _attend(self, parts: list[Tensor], cache: KeyCache | None) -> Tensor:
        q, k, v = parts
        if self.context is not None:
            means = self.context.gather_blocks(k.detach(), self._means, self.block_size)
            chosen = self.context.unshard(self._chosen(q, means, self.context.positions), 2)
            pattern = Selected(chosen, self.block_size) & Causal()
            return self._attention(q, k, v, pattern, context=self.context)
        first = 0
        if cache is None:
            means = self._means(k, 0)
        else:
            first = cache.length
            k, v = cache.append("keys", k), cache.append("values", v)
            means = cache.append("means", self._means(k, first // self.block_size))
        chosen = self._chosen(q, means, torch.arange(first, first + q.shape[2], device="cpu"))
        # shorter calls have too few queries for each block
        if q.shape[2] >= self.block_size and chosen.shape[-1] > 1:
            return self._attend_by_block(q, k, v, chosen[..., :-1], first)
        return self._attention(q, k, v, Selected(chosen, self.block_size) & Causal(), q_offset=first)

    def _attend_by_block(self, q: Tensor, k: Tensor, v: Tensor, past: Tensor, first: int) -> Tensor:
        """Attend own blocks and the ``past`` blocks, (B, Hq, queries, n), with the queries of a block side by side.

        Neighbouring queries choose different blocks, so tiles of them would compute nearly all blocks. The queries that
        chose a block of keys, of all heads that share the keys, become a document with the keys of the block. Results
        are merged, as published.
        """
        side, (batch, heads), full = self.block_size, k.shape[:2], k.shape[2] // self.block_size
        near = self._attention_with_lse(q, k, v, Segments(side) & Causal(), q_offset=first)
        head = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1, 1)
        grouped = past.unflatten(1, (heads, -1))
        document = torch.where(grouped < 0, -1, head * full + grouped).flatten()
        order = document.argsort(stable=True)
        sizes = document[document >= 0].bincount(minlength=batch * heads * full)
        order = order[document.shape[0] - int(sizes.sum()) :]
        if not len(order):
            return near.out
        documents = Documents(
            cu_seqlens_q=pad(sizes.cumsum(0), (1, 0)),
            cu_seqlens_k=torch.arange(len(sizes) + 1, device=q.device) * side,
        )
        queries = q.flatten(0, 2)[order // past.shape[-1]]
        keys, values = (x[:, :, : full * side].flatten(0, 2) for x in (k, v))
        far = self._attention_with_lse(queries[None, None], keys[None, None], values[None, None], documents)
        out = far.out.new_zeros(past.numel(), v.shape[3]).index_copy(0, order, far.out[0, 0])
        lse = far.lse.new_full((past.numel(),), -torch.inf).index_copy(0, order, far.lse[0, 0])
        outs, lses = out.view(*past.shape, -1).unbind(3), lse.view(past.shape).unbind(3)
        return merge([near.out, *outs], [near.lse, *lses]).out

    def _means(self, k: Tensor, begin: int = 0) -> Tensor:
        """Return the means of full blocks from block ``begin`` on; the last block is left out if it is shorter."""
        side = self.block_size
        if k.shape[2] // side == begin:
            return k.new_zeros(*k.shape[:2], 0, k.shape[3], dtype=acc_dtype(k.dtype))
        return block_means(k.detach()[:, :, begin * side : k.shape[2] // side * side], side)

    @torch.no_grad()
    def _chosen(self, q: Tensor, means: Tensor, positions: Tensor) -> Tensor:
        """Return the blocks of queries at these positions, (B, Hq, queries, n) int32, where -1 is none."""
        own = (positions // self.block_size).to(q.device, torch.int32)
        blocks = torch.arange(means.shape[2], dtype=torch.int32, device=q.device)
        listed = own[:, None].expand(*q.shape[:3], 1)
        if self.top_k == 1 or not len(blocks):
            return listed
        keys = means.mT

        def scored(rows: range) -> Scored:
            part = q[:, :, rows.start : rows.stop]
            grouped = part.to(acc_dtype(q.dtype)).unflatten(1, (means.shape[1], -1))
            scores = (grouped.flatten(2, 3) @ keys).view(*part.shape[:3], -1)
            return Scored(scores, blocks < own[rows.start : rows.stop, None])

        most, scores = min(self.top_k - 1, len(blocks)), q.shape[0] * q.shape[1] * len(blocks)
        with torch.autocast(q.device.type, enabled=False):
            return torch.cat([choose(scored, most, rows=q.shape[2], scores=scores, device=q.device), listed], -1)

    def extra_repr(self) -> str:
        """Return the sizes and the blocks for the module's repr."""
        return f"{super().extra_repr()}, block_size={self.block_size}, top_k={self.top_k}"
