"""Native sparse attention: compressed, selected and near keys, joined by gates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad

from ..adaptive.pooling import token_runs
from ..adaptive.ranking import Scored, choose
from ..checks import flag, whole
from ..errors import ShapeError
from ..patterns import Causal, Selected, SlidingWindow
from ..precision import Precision
from ..types import acc_dtype
from .key_cache import KeyCache
from .module_parts import connected
from .self_attention import ChoosingAttention

if TYPE_CHECKING:
    from ..parallel import ContextParallel


class BlockCompression(nn.Module):
    """Map each block of tokens of a key head to one row: ``W2 gelu(W1 vec(block + P))``.

    P is a position for each place of a block. There are no biases: P shifts the first map, and a constant that is added
    to every key changes no softmax.

    Args:
        heads: Key heads, which have parameters of their own.
        dim: Channels of a head.
        block: Tokens in a block.
        stride: Tokens from the beginning of a block to that of the next.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        block: int,
        stride: int,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        self.block, self.stride = block, stride
        self.position = nn.Parameter(torch.empty(heads, block, dim, device=device, dtype=dtype))
        self.hidden = nn.Parameter(torch.empty(heads, block * dim, dim, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(heads, dim, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights that keep the variance of their inputs, and small positions."""
        nn.init.normal_(self.position, std=0.02)
        for weight in (self.hidden, self.weight):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Compress (B, heads, tokens, dim) to (B, heads, full blocks, dim)."""
        if x.shape[2] < self.block:
            return connected(x[:, :, :0], self.parameters())
        blocks = x.unfold(2, self.block, self.stride).transpose(3, 4)
        inner = (blocks + self.position[:, None]).flatten(3) @ self.hidden
        return gelu(inner) @ self.weight


class NativeSparseAttention(ChoosingAttention):
    """Causal self-attention over compressed, selected and near keys, joined by gates; keys are chosen by content.

    Each branch c has keys and values of its own. Query t of a query head attends, separately normalised,

    - ``compressed``: k'[i] = phi(k[i d], ..., k[i d + l - 1]), a learned map of each block of l tokens, every d tokens,
      for each i with i d + l - 1 <= t; v' likewise. p[t, i] are the softmax weights.
    - ``selected``: the keys s <= t of top_k blocks of ``block_size`` tokens: the first block, the query's own and the
      one before it, and those j between them with the largest importance
      sum_i p[t, i] (tokens that compressed block i shares with block j) / d, which is added over the query heads of a
      key head. This is the paper's sum over m and n of p[(l'/d) j - m - n], with j and the index counted from 1.
    - ``window``: the keys t - window < s <= t.

    The output of the head is sum_c gate_c(t) out_c, where gates are the sigmoid of a linear map of the input. All query
    heads of a key head share a choice, in groups of any size; of blocks with equal importance the earlier is chosen. No
    choice depends on a later token, so decoding steps choose the same blocks as the whole sequence. The choice has no
    gradient; all else is differentiable.

    phi adds a learned position to each place of a block and applies a network of two layers, for each key head. With a
    ``rotary_base`` the keys and queries of the selected and window branches are rotated: a compressed key has no single
    position. Memory holds scores against compressed keys for one chunk of queries, and nothing of tokens x tokens.

    Args:
        embed_dim: Channels of the input and of the output.
        num_heads: Query heads; divides embed_dim.
        num_kv_heads: Key heads; divides num_heads. Query heads of a key head choose together.
        compress_block: Tokens in a compressed block (l); a multiple of compress_stride.
        compress_stride: Tokens from the beginning of a compressed block to that of the next (d).
        block_size: Tokens in a selected block (l'); a multiple of compress_stride.
        top_k: Number of selected blocks, with the fixed ones.
        window: Number of nearest keys in the window, the query's own included.
        initial_blocks: Number of blocks at the beginning that are always selected.
        local_blocks: Number of blocks up to the query's own that are always selected.
        separate_kv: Whether each branch has projections of keys and values of its own.
        bias: Whether the projections have biases.
        qk_norm: Whether each head's queries and keys are normalised before rotation, by RMSNorm over their channels.
        rotary_base: Base of rotary position embeddings, at least 1, such as 10000.0; None for no rotation.
        context: Ranks that share the sequence: the input is this rank's shard.
        precision: Dtypes that attention rounds to; projections have the dtype of the parameters.
        backend: ``"auto"`` or the name of a backend, as in :func:`ringweave.attention`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    Raises:
        ShapeError: A size is below 1, a block is not a multiple of the stride, the heads do not divide embed_dim, or
            top_k is less than the number of fixed blocks.
    Example:
        >>> layer = rw.nn.NativeSparseAttention(
        ...     64, 4, num_kv_heads=1, compress_block=8, compress_stride=4, block_size=16, top_k=4, window=16
        ... )
        >>> x = torch.randn(2, 100, 64)
        >>> y = layer(x)
        >>> cache = layer.empty_cache()
        >>> with torch.no_grad():
        ...     steps = [layer(part, cache=cache) for part in x.split([90, 7, 3], 1)]
        >>> torch.testing.assert_close(torch.cat(steps, 1), y)

    References:
        Yuan et al. (2025), Native sparse attention, section 3.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        compress_block: int = 32,
        compress_stride: int = 16,
        block_size: int = 64,
        top_k: int = 16,
        window: int = 512,
        initial_blocks: int = 1,
        local_blocks: int = 2,
        separate_kv: bool = True,
        bias: bool = True,
        qk_norm: bool = False,
        rotary_base: float | None = None,
        context: ContextParallel | None = None,
        precision: Precision | None = None,
        backend: str = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.separate_kv = flag("separate_kv", separate_kv, ShapeError)
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads,
            6 if separate_kv else 2,
            bias=bias,
            qk_norm=qk_norm,
            rotary_base=rotary_base,
            context=context,
            precision=precision,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self._set_sizes(compress_block, compress_stride, block_size, top_k, window, initial_blocks, local_blocks)
        sizes = self.num_kv_heads, self.head_dim, self.compress_block, self.compress_stride, device, dtype
        self.compress_keys, self.compress_values = BlockCompression(*sizes), BlockCompression(*sizes)
        self.gate = nn.Linear(self.embed_dim, 3 * self.num_heads, device=device, dtype=dtype)
        self.reset_parameters()

    def _set_sizes(
        self,
        compress_block: int,
        compress_stride: int,
        block_size: int,
        top_k: int,
        window: int,
        initial_blocks: int,
        local_blocks: int,
    ) -> None:
        self.compress_block = whole("compress_block", compress_block, 1, error=ShapeError)
        self.compress_stride = stride = whole("compress_stride", compress_stride, 1, error=ShapeError)
        self.block_size = whole("block_size", block_size, 1, error=ShapeError)
        for name in ("compress_block", "block_size"):
            if getattr(self, name) % stride:
                wanted = f"a multiple of compress_stride, {stride}"
                raise ShapeError(name, getattr(self, name), wanted, f"Change {name} or compress_stride.")
        self.window = whole("window", window, 1, error=ShapeError)
        self.initial_blocks = whole("initial_blocks", initial_blocks, 0, error=ShapeError)
        self.local_blocks = whole("local_blocks", local_blocks, 1, error=ShapeError)
        fixed = self.initial_blocks + self.local_blocks
        remedy = f"Raise top_k to {fixed} or more: the initial and the local blocks are among the top_k."
        self.top_k = whole("top_k", top_k, fixed, error=ShapeError, remedy=remedy)

    def reset_parameters(self) -> None:
        """Initialise the projections as ``torch.nn.MultiheadAttention`` does, and the maps of blocks."""
        super().reset_parameters()
        self.compress_keys.reset_parameters()
        self.compress_values.reset_parameters()
        self.gate.reset_parameters()

    def _parts(self, x: Tensor, positions: Tensor) -> list[Tensor]:
        """Return queries, rotated queries, gates, and keys and values of the three branches."""
        q, *kv = self._projected(x)
        kv = kv if self.separate_kv else kv * 3
        kv[2::2] = [self._rotated(keys, positions) for keys in kv[2::2]]
        gates = torch.sigmoid(self.gate(x)).unflatten(-1, (self.num_heads, 3)).transpose(1, 2)
        return [q, self._rotated(q, positions), gates, *kv]

    def _attend(self, parts: list[Tensor], cache: KeyCache | None) -> Tensor:
        q, turned, gates, *kv = parts
        first, tokens = 0 if cache is None else cache.length, q.shape[2]
        if cache is not None:
            kv = self._appended(kv, cache)
        else:
            kv[:2] = [
                compress(x)
                if self.context is None
                else self.context.gather_blocks(x, compress, self.compress_block, self.compress_stride)
                for x, compress in zip(kv[:2], (self.compress_keys, self.compress_values), strict=True)
            ]
        if self.context is None:
            chosen = self._chosen(q, kv[0], torch.arange(first, first + tokens, device="cpu"))
        else:
            chosen = self._chosen(q, kv[0], self.context.positions)
            # a rank of early positions chooses fewer blocks, and ranks exchange lists of one width
            chosen = self.context.unshard(pad(chosen, (0, self.top_k - chosen.shape[-1]), value=-1), 2)
        pattern, near = Selected(chosen, self.block_size, heads="kv") & Causal(), SlidingWindow(self.window - 1, 0)
        dropped = first + tokens - kv[4].shape[2] if self.context is None else 0
        shared: dict[str, Any] = {"q_offset": first, "context": self.context}
        outs = (
            self._attend_compressed(q, kv[0], kv[1], first),
            self._attention(turned, kv[2], kv[3], pattern, **shared),
            self._attention(turned, kv[4], kv[5], near, k_offset=dropped, **shared),
        )
        compressed, selected, window = (gates[..., i : i + 1] * out for i, out in enumerate(outs))
        out: Tensor = compressed + selected + window
        return out

    def _appended(self, kv: list[Tensor], cache: KeyCache) -> list[Tensor]:
        """Append the keys and values of new tokens to a cache, and return those that the new tokens may attend.

        The cache holds all keys of the selected branch, the last ones of the window, the compressed keys, and the
        tokens of blocks that are not full yet.
        """
        end = cache.length + kv[0].shape[2]
        full = max(0, (end - self.compress_block) // self.compress_stride + 1)
        found = []
        for i, (side, compress) in enumerate((("keys", self.compress_keys), ("values", self.compress_values))):
            block = cache.last(f"open {side}", kv[i], end - full * self.compress_stride)
            found.append(cache.append(f"compressed {side}", compress(block)))
        for branch, first in (("selected", 2), ("window", 4)):
            for i, side in enumerate(("keys", "values"), first):
                name = f"{branch} {side}"
                kept = cache.append(name, kv[i]) if branch == "selected" else cache.last(name, kv[i], self.window - 1)
                found.append(kept)
        return found

    def _attend_compressed(self, q: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
        """Attend the compressed keys that end at or before each query."""
        if not keys.shape[2]:
            return connected(torch.zeros_like(q), (q, keys, values))
        if self.context is None:
            return self._attend_run(q, keys, values, first)
        runs = token_runs(self.context, self.context.seq_len)
        if not runs:
            # a rank with padding only takes part in the gradients of the others
            return connected(torch.zeros_like(q), (q, keys, values))
        outs = [self._attend_run(q[:, :, begin:end], keys, values, position) for begin, end, position in runs]
        padding = q.shape[2] - sum(end - begin for begin, end, _ in runs)
        return pad(torch.cat(outs, 2), (0, 0, 0, padding))

    def _attend_run(self, q: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
        """Attend compressed keys from queries at consecutive positions.

        Query t attends key i where i d + l <= t + 1, so i + l/d <= (t + 1) // d. Queries with the same residue of t + 1
        modulo d become a head, and the relation is causal.
        """
        stride, heads, tokens = self.compress_stride, q.shape[1], q.shape[2]
        lead = (first + 1) % stride
        folded = pad(q, (0, 0, lead, -(lead + tokens) % stride)).unflatten(2, (-1, stride))
        folded = folded.transpose(2, 3).flatten(1, 2)
        offsets = {"q_offset": (first + 1) // stride, "k_offset": self.compress_block // stride}
        out = self._attention(folded, keys, values, Causal(), **offsets)
        unfolded: Tensor = out.unflatten(1, (heads, stride)).transpose(2, 3).flatten(2, 3)
        return unfolded[:, :, lead : lead + tokens]

    # ---- the choice --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _chosen(self, q: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """Return the blocks of queries at these positions, (B, Hkv, queries, n) int32, where -1 is none."""
        batch, heads = keys.shape[:2]
        own = (positions // self.block_size).int()
        begin = torch.arange(self.initial_blocks, dtype=torch.int32, device="cpu")
        local = own[:, None] - torch.arange(self.local_blocks, dtype=torch.int32, device="cpu")
        fixed = torch.cat([begin.where(begin <= own[:, None], -1), local.clamp(min=-1)], -1).to(q.device)
        fixed = fixed.expand(batch, heads, -1, -1)
        more = self.top_k - self.initial_blocks - self.local_blocks
        # blocks before the local ones of the last query
        blocks = int(own.max()) - self.local_blocks + 1
        if not more or blocks <= self.initial_blocks:
            return fixed
        scores = batch * q.shape[1] * keys.shape[2]

        def scored(rows: range) -> Scored:
            some = slice(rows.start, rows.stop)
            return self._scored(q[:, :, some], keys, positions[some])

        with torch.autocast(q.device.type, enabled=False):
            return torch.cat([fixed, choose(scored, more, rows=q.shape[2], scores=scores, device=q.device)], -1)

    def _scored(self, q: Tensor, keys: Tensor, positions: Tensor) -> Scored:
        """Return the importance of blocks for a few queries, which choose between the initial and the local ones."""
        last = int(positions.max())
        blocks = torch.arange(max(1, last // self.block_size - self.local_blocks + 1), dtype=torch.int32, device="cpu")
        reach = max(0, (last + 1 - self.compress_block) // self.compress_stride + 1)
        weights = self._weights(q, keys[:, :, :reach], positions)
        end = positions[:, None] // self.block_size - self.local_blocks
        may = (blocks >= self.initial_blocks) & (blocks <= end)
        return Scored(self._importance(weights, len(blocks)), may.to(q.device))

    def _weights(self, q: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """Return the weights of compressed keys, added over the query heads of a key head: (B, Hkv, queries, keys)."""
        acc = acc_dtype(q.dtype)
        grouped = (q.to(acc) / math.sqrt(self.head_dim)).unflatten(1, (keys.shape[1], -1))
        scores = (grouped.flatten(2, 3) @ keys.to(acc).mT).unflatten(2, grouped.shape[2:4])
        ends = torch.arange(keys.shape[2], device="cpu") * self.compress_stride + self.compress_block
        later = (ends > positions[:, None] + 1).to(q.device)
        # finite, so that a row without keys has weights, which become 0
        weights: Tensor = scores.masked_fill_(later, torch.finfo(acc).min).softmax(-1).sum(2)
        return weights.masked_fill_(later, 0.0)

    def _importance(self, weights: Tensor, blocks: int) -> Tensor:
        """Add the weights of compressed blocks, times the strides that they share with each block."""
        shared, side = self.compress_block // self.compress_stride, self.block_size // self.compress_stride
        # entry i: the weights of the compressed blocks that contain the tokens of stride i
        padded = pad(weights, (shared - 1, blocks * side - weights.shape[-1]))
        of_strides: Tensor = padded.unfold(-1, shared, 1).sum(-1)
        of_blocks: Tensor = of_strides.unflatten(-1, (blocks, side)).sum(-1)
        return of_blocks

    def extra_repr(self) -> str:
        """Return the sizes of the branches for the module's repr."""
        compressed = f"compress_block={self.compress_block}, compress_stride={self.compress_stride}"
        chosen = f"block_size={self.block_size}, top_k={self.top_k}, window={self.window}"
        return f"{super().extra_repr()}, {compressed}, {chosen}"
