"""Multi-head attention over a pattern, with the parameters of torch's own module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..api import attention
from ..checks import check_context, flag, whole
from ..errors import ShapeError, UnsupportedError, shown
from ..patterns import Causal, Full, Pattern, Tree
from ..patterns.alignment import first_query
from ..patterns.base import parts_of
from ..patterns.fitting import refuse
from ..precision import NATIVE, Precision, as_precision
from ..terms import Bias, Term
from ..terms.term import ScoreMod, as_listed
from ..validate import checked_dropout
from ..weights import BlockWeights, attention_weights
from .module_parts import (
    accepted_options,
    checked_rotary_base,
    connected,
    head_norms,
    module_place,
    module_sizes,
    rotated,
)

if TYPE_CHECKING:
    from ..parallel import ContextParallel


class MultiheadAttention(nn.Module):
    """Multi-head attention over the pairs that a pattern allows, in place of ``torch.nn.MultiheadAttention``.

    Parameters, their names and initial values, arguments and results are those of torch's module, and a ``state_dict``
    of one loads into the other. There are two differences: ``need_weights`` is False by default and gives the weights
    of the pattern's tiles, and a row that may attend nothing gives the output projection's bias instead of NaN.

    Args:
        embed_dim: Channels of the queries and of the output.
        num_heads: Query heads; divides embed_dim.
        dropout: Share of the attention weights that are dropped in training.
        bias: Whether the projections have biases.
        add_bias_kv: Must be False.
        add_zero_attn: Must be False.
        kdim: Channels of the keys; embed_dim by default.
        vdim: Channels of the values; embed_dim by default.
        batch_first: Whether inputs are (batch, tokens, channels), not (tokens, batch, channels).
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        pattern: Pattern that says which (head, query, key) triples may attend.
        num_kv_heads: Key heads; divides num_heads. With fewer, the projections of keys and values are smaller.
        qk_norm: Whether each head's queries and keys are normalised before rotation, by RMSNorm over their channels.
        rotary_base: Base of rotary position embeddings, at least 1, such as 10000.0; None for no rotation.
        terms: Score terms, or functions, as in :func:`ringweave.attention`. The caller registers their parameters and
            keeps the tensors: the module does not see those that ``functional_call`` or
            ``load_state_dict(assign=True)`` put in their place.
        sink_logits: Whether to learn one logit per head that joins the denominator and has no value.
        context: Ranks that share the sequence: inputs are this rank's shards, and rotation uses global positions.
        precision: Dtypes that attention rounds to; projections have the dtype of the parameters.
        backend: ``"auto"`` or the name of a backend, as in :func:`ringweave.attention`.
    Raises:
        ShapeError: A size is below 1, or the heads do not divide it.
        PatternError: The pattern is not a pattern.
        UnsupportedError: ``add_bias_kv`` or ``add_zero_attn`` is True.
    Example:
        >>> x = torch.randn(2, 128, 64)
        >>> layer = rw.nn.MultiheadAttention(64, 4, batch_first=True, pattern=rw.SlidingWindow(16) & rw.Causal())
        >>> out, _ = layer(x, x, x)
        >>> out.shape
        torch.Size([2, 128, 64])

    References:
        Vaswani et al. (2017), Attention is all you need, section 3.2.2; Su et al. (2021), RoFormer, section 3.4
        (rotation; here the two halves of a head's channels are rotated against each other).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        pattern: Pattern = Full(),  # noqa: B008  (immutable)
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        rotary_base: float | None = None,
        terms: Term | ScoreMod | Sequence[Term | ScoreMod] | None = (),
        sink_logits: bool = False,
        context: ContextParallel | None = None,
        precision: Precision | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if flag(name, value, ShapeError):
                raise UnsupportedError(name, True, "False", "Pass sink_logits=True for a learned sink.")
        if not isinstance(pattern, Pattern):
            refuse(pattern)
        self.embed_dim, self.num_heads, self.num_kv_heads = module_sizes(embed_dim, num_heads, num_kv_heads)
        self.head_dim = self.embed_dim // self.num_heads
        self.dropout = checked_dropout(dropout)
        self.batch_first = flag("batch_first", batch_first, ShapeError)
        check_context(context)
        self.pattern, self.context, self.backend = pattern, context, backend
        self.precision = as_precision(precision)
        self.terms = as_listed(terms)
        self.kdim = self.embed_dim if kdim is None else whole("kdim", kdim, 1, error=ShapeError)
        self.vdim = self.embed_dim if vdim is None else whole("vdim", vdim, 1, error=ShapeError)
        self.rotary_base = checked_rotary_base(rotary_base, self.head_dim)
        place = module_place(device, dtype)
        kv_dim = self.num_kv_heads * self.head_dim
        if (self.kdim, self.vdim) == (self.embed_dim, self.embed_dim):
            self.in_proj_weight = nn.Parameter(torch.empty(self.embed_dim + 2 * kv_dim, self.embed_dim, **place))
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(self.embed_dim, self.embed_dim, **place))
            self.k_proj_weight = nn.Parameter(torch.empty(kv_dim, self.kdim, **place))
            self.v_proj_weight = nn.Parameter(torch.empty(kv_dim, self.vdim, **place))
            self.register_parameter("in_proj_weight", None)
        if flag("bias", bias, ShapeError):
            self.in_proj_bias = nn.Parameter(torch.empty(self.embed_dim + 2 * kv_dim, **place))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **place)
        self.q_norm, self.k_norm = head_norms(qk_norm, self.head_dim, **place)
        if flag("sink_logits", sink_logits, ShapeError):
            self.sink_logits = nn.Parameter(torch.zeros(self.num_heads, **place))
        else:
            self.register_parameter("sink_logits", None)
        self.reset_parameters()

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, so that ``nn.TransformerEncoderLayer`` calls this module instead of its fused path."""
        return False

    def reset_parameters(self) -> None:
        """Initialise the parameters as ``torch.nn.MultiheadAttention`` does."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Pattern | Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        positions: Tensor | None = None,
        q_offset: int | Tensor | Literal["end"] = 0,
    ) -> tuple[Tensor, BlockWeights | None]:
        """Compute attention of the projected inputs and project the result.

        Args:
            query: (tokens, batch, embed_dim), (batch, tokens, embed_dim) with ``batch_first``, or without a batch
                (tokens, embed_dim).
            key: Tensor with the layout of query and kdim channels.
            value: Tensor with the layout of key and vdim channels.
            key_padding_mask: (batch, keys), True where a key is padding, or a float that is added to its scores. With a
                context its keys are those of the whole sequence.
            need_weights: Whether to return the attention weights of each head, for the pattern's tiles.
            attn_mask: A pattern, intersected with the module's own, or a tensor (queries, keys) or (batch * heads,
                queries, keys) as in torch's module: True where a pair may not attend, or a float that is added. With a
                context queries and keys are those of the whole sequence.
            average_attn_weights: Ignored: the weights of each head are returned.
            is_causal: Whether keys after the query are left out. An ``attn_mask`` tensor is then taken to say the same,
                and is not read.
            positions: (tokens,) or (batch, tokens), positions by which queries and keys are rotated. By default keys
                count from 0 and queries from ``q_offset``; with a context its global positions are used. They need a
                ``rotary_base``. A pattern with a ``Tree`` has no default: pass ``tree.positions()``.
            q_offset: Position of the first query: an int, an integer tensor () or (batch,), or ``"end"`` for a decode
                step, as in :func:`ringweave.attention`.
        Returns:
            (output, weights): output has query's shape; weights are None without ``need_weights``. A call without
            sequences, queries or keys is like any other, except that it has no weights.
        Raises:
            ShapeError: The tensors do not fit.
            PatternError: ``is_causal`` is not a bool, or the mask does not fit.
            UnsupportedError: Weights are asked for with terms, sink logits, tensor masks, a context, a precision or
                dropout.
        """
        x, batched = self._batch_first(query, key, value)
        q, k, v = self._projected(*x)
        pattern, terms = self._masks(attn_mask, key_padding_mask, is_causal, q, k, batched)
        first = first_query(pattern, q_offset, 0, batch=q.shape[0], nq=q.shape[2], nk=k.shape[2])
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary_base is not None:
            if positions is None and pattern.tables and parts_of(pattern, Tree):
                wanted = "the positions of the tokens on their paths: rotary_base is set, and the pattern has a Tree"
                raise ShapeError("positions", None, wanted, "Pass positions=tree.positions().")
            q, k = self._rotated(q, k, positions, first)
        elif positions is not None:
            wanted = "None: without rotary_base no position is used"
            raise ShapeError("positions", shown(positions), wanted, "Create the module with a rotary_base.")
        options = self._options() | {"terms": terms, "q_offset": first}
        if not self.training:
            options["dropout"] = 0.0
        if self._has_pairs(q, k, v):
            out = self._attend(x[0], q, k, v, pattern, options).transpose(1, 2).flatten(2)
        else:
            tables = (table for term in terms if isinstance(term, Term) for table in term.learned)
            out = connected(torch.zeros_like(x[0]), (*x, *self.parameters(), *tables))
        out = self.out_proj(out)
        if not batched:
            out = out[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        flag("average_attn_weights", average_attn_weights, ShapeError)
        if not flag("need_weights", need_weights, ShapeError):
            return out, None
        # a backend may change the speed, never the weights
        del options["backend"]
        return out, self._weights(q, k, pattern, options)

    def _batch_first(self, *inputs: Tensor) -> tuple[list[Tensor], bool]:
        for name, x, dim in zip(("query", "key", "value"), inputs, (self.embed_dim, self.kdim, self.vdim), strict=True):
            if isinstance(x, Tensor) and x.is_nested:
                remedy = "Create nn.TransformerEncoder with enable_nested_tensor=False."
                raise UnsupportedError(name, "a nested tensor", "a padded one, with a mask", remedy)
            if not isinstance(x, Tensor) or x.ndim not in (2, 3) or x.ndim != inputs[0].ndim or x.shape[-1] != dim:
                wanted = f"2 dimensions, or 3 with a batch, the same as query, and {dim} channels in the last"
                raise ShapeError(name, shown(x), wanted, "Pass (tokens, batch, channels), or see batch_first.")
        batched = inputs[0].ndim == 3
        if not batched:
            return [x[None] for x in inputs], False
        return [x if self.batch_first else x.transpose(0, 1) for x in inputs], True

    def _has_pairs(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return False for a call without queries or keys, after a check of its sizes: no attention checks them."""
        # a shard without tokens is no call of its own, so the context judges it
        if q.shape[0] and (self.context is not None or (q.shape[2] and k.shape[2])):
            return True
        if not len(q) == len(k) == len(v) or k.shape[2] != v.shape[2]:
            got = f"{len(q)}, {len(k)} and {len(v)} sequences, with {k.shape[2]} keys and {v.shape[2]} values"
            raise ShapeError("query, key, value", got, "one batch size, and a value for each key", "Align them.")
        return False

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        kv_dim = self.num_kv_heads * self.head_dim
        sizes = [self.embed_dim, kv_dim, kv_dim]
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        if self.in_proj_weight is not None and query is key and key is value:
            parts = nn.functional.linear(query, self.in_proj_weight, self.in_proj_bias).split(sizes, -1)
        else:
            weights = (
                (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
                if self.in_proj_weight is None
                else self.in_proj_weight.split(sizes)
            )
            each = zip((query, key, value), weights, biases, strict=True)
            parts = tuple(nn.functional.linear(x, weight, bias) for x, weight, bias in each)
        return [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts]

    def _masks(
        self,
        attn_mask: Pattern | Tensor | None,
        padding: Tensor | None,
        is_causal: bool,
        q: Tensor,
        k: Tensor,
        batched: bool,
    ) -> tuple[Pattern, tuple[Term | ScoreMod, ...]]:
        """Return the pattern and the terms of a call."""
        pattern = self.pattern
        tables: list[Tensor] = []
        batch, heads, nq, nk = *q.shape[:3], k.shape[2]
        if self.context is not None:
            nq = nk = self.context.seq_len
        if flag("is_causal", is_causal):
            pattern = pattern & Causal()
            attn_mask = None if isinstance(attn_mask, Tensor) else attn_mask
        if isinstance(attn_mask, Pattern):
            pattern = pattern & attn_mask
        elif attn_mask is not None:
            shapes: dict[tuple[int, ...], tuple[int, ...]] = {
                (nq, nk): (1, 1, nq, nk),
                (batch * heads, nq, nk): (batch, heads, nq, nk),
            }
            tables.append(_added("attn_mask", attn_mask, shapes, q))
        if padding is not None:
            shapes = {(batch, nk) if batched else (nk,): (batch, 1, 1, nk)}
            tables.append(_added("key_padding_mask", padding, shapes, q).expand(batch, 1, nq, nk))
        # a call without pairs has tables without entries
        return pattern, (*self.terms, *(Bias(table) for table in tables if table.numel()))

    def _rotated(self, q: Tensor, k: Tensor, positions: Tensor | None, q_offset: int | Tensor) -> tuple[Tensor, Tensor]:
        if positions is None and self.context is not None:
            positions = self.context.positions.to(q.device)
        if positions is not None:
            of_q = of_k = positions
            for name, x in (("query", q), ("key", k)):
                if positions.shape not in ((x.shape[2],), (x.shape[0], x.shape[2])):
                    wanted = f"({x.shape[2]},) or ({x.shape[0]}, {x.shape[2]}): one for each {name}"
                    remedy = "Pass q_offset if queries and keys differ in number."
                    raise ShapeError("positions", shown(positions), wanted, remedy)
        else:
            of_k = torch.arange(k.shape[2], device=k.device)
            first = q_offset[:, None] if isinstance(q_offset, Tensor) and q_offset.ndim else q_offset
            of_q = torch.arange(q.shape[2], device=q.device) + first
        assert self.rotary_base is not None
        return rotated(q, of_q, self.rotary_base), rotated(k, of_k, self.rotary_base)

    def _options(self) -> dict[str, Any]:
        """Return the arguments of attention that the module's options set.

        A module that computes attention by another function refuses those that it does not take; see
        ``accepted_options``.
        """
        return {
            "terms": self.terms,
            "sink_logits": self.sink_logits,
            "dropout": self.dropout,
            "context": self.context,
            "precision": None if self.precision == NATIVE else self.precision,
            "backend": self.backend,
        }

    def _attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Mapping[str, Any]
    ) -> Tensor:
        return attention(q, k, v, pattern, **options)

    def _weights(self, q: Tensor, k: Tensor, pattern: Pattern, options: Mapping[str, Any]) -> BlockWeights:
        return attention_weights(q, k, pattern, **accepted_options("attention_weights", options, "need_weights=True"))

    def extra_repr(self) -> str:
        """Return the sizes and the pattern for the module's repr."""
        shared = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"{self.embed_dim}, {self.num_heads}{shared}, pattern={self.pattern!r}"


def _added(name: str, mask: object, shapes: Mapping[tuple[int, ...], tuple[int, ...]], q: Tensor) -> Tensor:
    """Return a mask of torch's module as a tensor that is added to scores: True becomes -inf."""
    fits = isinstance(mask, Tensor) and tuple(mask.shape) in shapes
    if not isinstance(mask, Tensor) or not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        wanted = f"a bool or floating tensor {' or '.join(map(str, shapes))}"
        raise ShapeError(name, shown(mask), wanted, "Pass such a tensor, or a pattern as attn_mask.")
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill(mask, -torch.inf)
    return mask.view(shapes[tuple(mask.shape)])
