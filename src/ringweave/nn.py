"""Modules: multi-head attention over a pattern, with the parameters of ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .api import attention, longnet_attention
from .errors import ShapeError, UnsupportedError, message, shown
from .hierarchical import COMBINATIONS, hierarchical_attention
from .names import only
from .patterns import Causal, Full, LongNet, Pattern
from .patterns.validate import flag, number, one_of, refuse, whole
from .precision import NATIVE, Precision, as_precision
from .terms import Bias, Term, as_terms
from .validate import checked_dropout
from .weights import BlockWeights, attention_weights

if TYPE_CHECKING:
    from .parallel import ContextParallel


class MultiheadAttention(nn.Module):
    """Multi-head attention over the pairs that a pattern allows, in place of ``torch.nn.MultiheadAttention``.

    Where both can do a thing, parameters, their names and initial values, arguments and results are the same: a
    ``state_dict`` of one loads into the other. Different are: ``need_weights`` is False by default, and gives the
    weights of the pattern's tiles; a row that may attend nothing gives the output projection's bias, not NaN.

    Args:
        embed_dim: Channels of the queries and of the output.
        num_heads: Query heads; divides embed_dim.
        dropout: Of attention weights, in training.
        bias: Whether the projections have biases.
        add_bias_kv: Must be False.
        add_zero_attn: Must be False.
        kdim: Channels of the keys; embed_dim by default.
        vdim: Channels of the values; embed_dim by default.
        batch_first: Whether inputs are (batch, tokens, channels), not (tokens, batch, channels).
        device: Of the parameters.
        dtype: Of the parameters.
        pattern: Which triples of head, query and key may attend.
        num_kv_heads: Key heads; divides num_heads. With fewer, the projections of keys and values are smaller.
        qk_norm: Whether each head's queries and keys are normalised (RMSNorm over their channels), before rotation.
        rotary_base: Base of rotary position embeddings, such as 10000.0; None: no rotation.
        terms: Score terms; those with parameters are the caller's to register, and to keep: what ``functional_call`` or
            ``load_state_dict(assign=True)`` puts in their place is not seen.
        sinks: Whether a logit per head is learned, that joins the denominator and has no value.
        context: Ranks that share the sequence: inputs are this rank's shards, and rotation is by global positions.
        precision: What attention rounds to what; projections have the types of the parameters.
        backend: As of :func:`ringweave.attention`.
    Raises:
        ShapeError: Sizes that do not divide, or are none.
        PatternError: No pattern.
        UnsupportedError: What torch's module has and this has not: ``add_bias_kv``, ``add_zero_attn``.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        pattern: Pattern = Full(),  # noqa: B008  (immutable)
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        rotary_base: float | None = None,
        terms: Term | Sequence[Term] | None = (),
        sinks: bool = False,
        context: ContextParallel | None = None,
        precision: Precision | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if flag(name, value, ShapeError):
                raise UnsupportedError(message(name, True, "False", "Learned sinks (sinks=True) serve the same end."))
        if not isinstance(pattern, Pattern):
            refuse(pattern)
        self.embed_dim = whole("embed_dim", embed_dim, 1, error=ShapeError)
        self.num_heads = whole("num_heads", num_heads, 1, error=ShapeError)
        kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = whole("num_kv_heads", kv_heads, 1, error=ShapeError)
        self.head_dim = _part("embed_dim", self.embed_dim, "num_heads", self.num_heads)
        _part("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        self.dropout = checked_dropout(dropout)
        self.batch_first = flag("batch_first", batch_first, ShapeError)
        self.pattern, self.context, self.backend = pattern, context, backend
        self.precision = as_precision(precision)
        self.terms = () if terms is None else as_terms(terms)
        self.kdim = self.embed_dim if kdim is None else whole("kdim", kdim, 1, error=ShapeError)
        self.vdim = self.embed_dim if vdim is None else whole("vdim", vdim, 1, error=ShapeError)
        self.rotary_base = None if rotary_base is None else number("rotary_base", rotary_base, error=ShapeError)
        if self.rotary_base is not None and self.head_dim % 2:
            raise ShapeError(message("head dim", self.head_dim, "an even number, to rotate", "Take fewer heads."))
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        kept = self.num_kv_heads * self.head_dim
        if (self.kdim, self.vdim) == (self.embed_dim, self.embed_dim):
            self.in_proj_weight = nn.Parameter(
                torch.empty(self.embed_dim + 2 * kept, self.embed_dim, device=device, dtype=dtype)
            )
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(self.embed_dim, self.embed_dim, device=device, dtype=dtype))
            self.k_proj_weight = nn.Parameter(torch.empty(kept, self.kdim, device=device, dtype=dtype))
            self.v_proj_weight = nn.Parameter(torch.empty(kept, self.vdim, device=device, dtype=dtype))
            self.register_parameter("in_proj_weight", None)
        if flag("bias", bias, ShapeError):
            self.in_proj_bias = nn.Parameter(torch.empty(self.embed_dim + 2 * kept, device=device, dtype=dtype))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **place)
        normed = flag("qk_norm", qk_norm, ShapeError)
        self.q_norm = nn.RMSNorm(self.head_dim, **place) if normed else None
        self.k_norm = nn.RMSNorm(self.head_dim, **place) if normed else None
        if flag("sinks", sinks, ShapeError):
            self.sink_logits = nn.Parameter(torch.zeros(self.num_heads, device=device, dtype=dtype))
        else:
            self.register_parameter("sink_logits", None)
        self.reset_parameters()

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False: what ``nn.TransformerEncoderLayer`` asks before it takes a path that would go round this module."""
        return False

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.MultiheadAttention`` does."""
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
        q_offset: int | Tensor = 0,
    ) -> tuple[Tensor, BlockWeights | None]:
        """Attend.

        Args:
            query: (tokens, batch, embed_dim), (batch, tokens, embed_dim) with ``batch_first``, or without a batch
                (tokens, embed_dim).
            key: As query, of kdim channels.
            value: As key, of vdim channels.
            key_padding_mask: (batch, keys): True where a key is padding, or a float that is added to its scores; with a
                context of the whole sequence, as an ``attn_mask`` is.
            need_weights: Also return the attention weights of each head, of the tiles that the pattern leaves.
            attn_mask: A pattern, that holds besides the module's own; or a tensor (queries, keys) or (batch * heads,
                queries, keys) as of torch's module: True where a pair may not attend, or a float that is added.
            average_attn_weights: Must be left as it is: the weights returned are those of each head.
            is_causal: Also leave out keys after the query; an ``attn_mask`` tensor is then taken for just that.
            positions: (tokens,) or (batch, tokens), by which queries and keys are rotated; by default 0, 1, ... for
                keys, from ``q_offset`` on for queries, and with a context its global positions.
            q_offset: Position of the first query; keys - queries for a decode step. An int, or an integer tensor () or
                (batch,).
        Returns:
            (output, of query's shape; weights or None).
        Raises:
            ShapeError: Tensors that do not fit.
            UnsupportedError: Weights together with terms, sinks, masks of tensors, a context or dropout.
        """
        x, batched = self._batch_first(query, key, value)
        q, k, v = self._projected(*x)
        pattern, terms = self._masks(attn_mask, key_padding_mask, is_causal, q, k, batched)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary_base is not None:
            q, k = self._rotated(q, k, positions, q_offset)
        dropout = self.dropout if self.training else 0.0
        out = self._attend(x[0], q, k, v, pattern, terms, dropout, q_offset)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not batched:
            out = out[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if not flag("need_weights", need_weights, ShapeError):
            return out, None
        if terms or dropout or self.sink_logits is not None or self.context is not None:
            wanted = "a pattern alone: no terms, sinks, tensors as masks, dropout or context"
            raise UnsupportedError(message("need_weights", True, wanted, "Ask for none."))
        return out, self._weights(q, k, pattern, q_offset)

    def _batch_first(self, *inputs: Tensor) -> tuple[list[Tensor], bool]:
        for name, x, dim in zip(("query", "key", "value"), inputs, (self.embed_dim, self.kdim, self.vdim), strict=True):
            if isinstance(x, Tensor) and x.is_nested:
                remedy = "Make nn.TransformerEncoder with enable_nested_tensor=False."
                raise UnsupportedError(message(name, "a nested tensor", "a padded one, with a mask", remedy))
            if not isinstance(x, Tensor) or x.ndim not in (2, 3) or x.ndim != inputs[0].ndim or x.shape[-1] != dim:
                wanted = f"a tensor of as many dimensions as query, 2 or 3, the last of {dim}"
                raise ShapeError(message(name, shown(x), wanted, "Pass tokens, batch and channels in torch's order."))
        batched = inputs[0].ndim == 3
        if not batched:
            return [x[None] for x in inputs], False
        return [x if self.batch_first else x.transpose(0, 1) for x in inputs], True

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        kept = self.num_kv_heads * self.head_dim
        sizes = [self.embed_dim, kept, kept]
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
    ) -> tuple[Pattern, tuple[Term, ...]]:
        """The pattern and the terms of a call."""
        pattern, terms = self.pattern, list(self.terms)
        batch, heads, nq, nk = *q.shape[:3], k.shape[2]
        if self.context is not None:
            nq = nk = self.context.seq_len
        if flag("is_causal", is_causal, ShapeError):
            pattern = pattern & Causal()
            attn_mask = None if isinstance(attn_mask, Tensor) else attn_mask
        if isinstance(attn_mask, Pattern):
            pattern = pattern & attn_mask
        elif attn_mask is not None:
            shapes: dict[tuple[int, ...], tuple[int, ...]] = {
                (nq, nk): (1, 1, nq, nk),
                (batch * heads, nq, nk): (batch, heads, nq, nk),
            }
            terms.append(Bias(_added("attn_mask", attn_mask, shapes, q)))
        if padding is not None:
            shapes = {(batch, nk) if batched else (nk,): (batch, 1, 1, nk)}
            terms.append(Bias(_added("key_padding_mask", padding, shapes, q).expand(batch, 1, nq, nk)))
        return pattern, tuple(terms)

    def _rotated(self, q: Tensor, k: Tensor, positions: Tensor | None, q_offset: int | Tensor) -> tuple[Tensor, Tensor]:
        if positions is None and self.context is not None:
            positions = self.context.positions.to(q.device)
        if positions is not None:
            of_q = of_k = positions
            for name, x in (("query", q), ("key", k)):
                if positions.shape not in ((x.shape[2],), (x.shape[0], x.shape[2])):
                    wanted = f"({x.shape[2]},) or ({x.shape[0]}, {x.shape[2]}): one for each {name}"
                    raise ShapeError(message("positions", shown(positions), wanted, "Rotate other cases yourself."))
        else:
            of_k = torch.arange(k.shape[2], device=k.device)
            first = q_offset[:, None] if isinstance(q_offset, Tensor) and q_offset.ndim else q_offset
            of_q = torch.arange(q.shape[2], device=q.device) + first
        assert self.rotary_base is not None
        half = self.head_dim // 2
        # in float32 whatever the dtype: a bfloat16 position is off by many tokens
        rates = self.rotary_base ** (-torch.arange(half, device=q.device, dtype=torch.float32) / half)
        return _rotate(q, of_q, rates), _rotate(k, of_k, rates)

    def _attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        terms: Sequence[Term],
        dropout: float,
        q_offset: int | Tensor,
    ) -> Tensor:
        return attention(
            q,
            k,
            v,
            pattern,
            q_offset=q_offset,
            terms=terms,
            sink_logits=self.sink_logits,
            dropout=dropout,
            context=self.context,
            precision=self.precision,
            backend=self.backend,
        )

    def _weights(self, q: Tensor, k: Tensor, pattern: Pattern, q_offset: int) -> BlockWeights:
        return attention_weights(q, k, pattern, q_offset=q_offset)

    def extra_repr(self) -> str:
        """The pattern, and what is not torch's."""
        shared = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"{self.embed_dim}, {self.num_heads}{shared}, pattern={self.pattern!r}"


class LongNetAttention(MultiheadAttention):
    """Multi-head LongNet attention: a mixture of dilated branches; see :func:`ringweave.longnet_attention`.

    Args:
        embed_dim: Channels of the inputs and of the output.
        num_heads: Query heads; divides embed_dim.
        segments: Segment length of each branch, in tokens.
        rates: Dilation rate of each branch; divides its segment.
        causal: Whether keys after the query are left out.
        offset: Which residue a head keeps.
        heads: ``"shared"`` or ``"partitioned"``.
        detach_weights: Treat the branch weights as constants in the backward pass.
        **options: As of :class:`MultiheadAttention`, but for ``pattern`` and ``dropout``.
    Raises:
        PatternError: Lists that do not fit each other.
        UnsupportedError: Masks: the mixture is the pattern.
    Example:
        >>> x = torch.randn(2, 128, 64)
        >>> layer = rw.nn.LongNetAttention(64, 4, segments=[32, 128], rates=[1, 4], causal=True, batch_first=True)
        >>> layer(x, x, x)[0].shape
        torch.Size([2, 128, 64])

    References:
        Ding et al. (2023), LongNet: scaling transformers to 1,000,000,000 tokens, section 2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        segments: Sequence[int],
        rates: Sequence[int],
        causal: bool = False,
        offset: str | int = "interleaved",
        heads: str = "shared",
        detach_weights: bool = False,
        **options: Any,
    ) -> None:
        for name in {"pattern", "dropout"} & set(options):
            raise UnsupportedError(message(name, shown(options[name]), "nothing", "Leave it out: the mixture is all."))
        mixture = LongNet(segments, rates, causal=causal, offset=offset, heads=heads)
        super().__init__(embed_dim, num_heads, pattern=mixture, **options)
        self.detach_weights = flag("detach_weights", detach_weights, ShapeError)

    def _attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        terms: Sequence[Term],
        dropout: float,
        q_offset: int | Tensor,
    ) -> Tensor:
        if not self.detach_weights:
            return super()._attend(x, q, k, v, pattern, terms, dropout, q_offset)
        if terms or self.sink_logits is not None or self.precision != NATIVE:
            wanted = "neither terms, sinks nor a precision"
            raise UnsupportedError(message("detach_weights", True, wanted, "Use the exact gradient with them."))
        assert isinstance(pattern, LongNet)
        return longnet_attention(
            q,
            k,
            v,
            segments=pattern.segments,
            rates=pattern.rates,
            causal=pattern.causal,
            offset=pattern.offset,
            heads=pattern.heads,
            detach_weights=True,
            q_offset=q_offset,  # a tensor is refused there
            context=self.context,
            backend=self.backend,
        )


class HierarchicalAttention(MultiheadAttention):
    """Multi-head attention at two scales, near and chosen keys and the means of all others.

    See :func:`ringweave.hierarchical_attention`. With ``combine="gates"`` a linear map of each query's input, then a
    sigmoid, gives the factors of its means, chosen blocks and window, for each head.

    Args:
        embed_dim: Channels of the inputs and of the output.
        num_heads: Query heads; divides embed_dim.
        pool: Tokens of a block of keys, and of a tile of queries.
        top_k: Blocks that each tile of queries chooses.
        window: Tokens around a query that it attends one by one.
        causal: Whether keys after the query are left out.
        combine: ``"exact_cover"`` or ``"gates"``.
        **options: As of :class:`MultiheadAttention`, but for what changes which pairs attend, and how.
    Raises:
        ShapeError: Sizes that are none.
        UnsupportedError: Patterns, masks, terms, sinks, dropout, a context or weights.
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
        for name in {"pattern", "dropout", "terms", "sinks", "context", "precision"} & set(options):
            raise UnsupportedError(message(name, shown(options[name]), "nothing", "Leave it out: both scales are all."))
        self.causal = flag("causal", causal, ShapeError)
        super().__init__(embed_dim, num_heads, pattern=Causal() if self.causal else Full(), **options)
        self.pool = whole("pool", pool, 1, error=ShapeError)
        self.top_k, self.window = (whole(n, x, 0, error=ShapeError) for n, x in (("top_k", top_k), ("window", window)))
        self.combine = one_of("combine", combine, COMBINATIONS)
        place: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.gate = nn.Linear(self.embed_dim, 3 * self.num_heads, **place) if self.combine == "gates" else None

    def _attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        terms: Sequence[Term],
        dropout: float,
        q_offset: int | Tensor,
    ) -> Tensor:
        if isinstance(q_offset, Tensor):
            wanted = "an int: blocks are chosen for queries that stand alike in every batch element"
            raise UnsupportedError(message("q_offset", "a tensor", wanted, "Pass an int."))
        if terms or pattern != self.pattern:
            wanted = "neither masks nor is_causal"
            raise UnsupportedError(message("attn_mask", repr(pattern), wanted, "Pass causal=True to the module."))
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
            q_offset=q_offset,
            backend=self.backend,
        )

    def _weights(self, q: Tensor, k: Tensor, pattern: Pattern, q_offset: int) -> BlockWeights:
        raise UnsupportedError(message("need_weights", True, "False: means have no pairs", "Ask for none."))


def _part(name: str, whole: int, of: str, parts: int) -> int:
    if whole % parts:
        raise ShapeError(message(of, parts, f"a divisor of {name}, {whole}", f"Change {of} or {name}."))
    return whole // parts


def _added(name: str, mask: object, shapes: Mapping[tuple[int, ...], tuple[int, ...]], q: Tensor) -> Tensor:
    """A mask of torch's module as what is added to scores: True is -inf."""
    fits = isinstance(mask, Tensor) and tuple(mask.shape) in shapes
    if not isinstance(mask, Tensor) or not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        wanted = f"a bool or floating tensor {' or '.join(map(str, shapes))}"
        raise ShapeError(message(name, shown(mask), wanted, "Or pass a pattern as attn_mask."))
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill_(mask, -torch.inf)
    return mask.view(shapes[tuple(mask.shape)])


def _rotate(x: Tensor, positions: Tensor, rates: Tensor) -> Tensor:
    """x, (batch, heads, tokens, channels), rotated; positions (tokens,) or (batch, tokens)."""
    angles = positions[..., None].float() * rates
    angles = angles if positions.ndim == 1 else angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


__all__ = ["HierarchicalAttention", "LongNetAttention", "MultiheadAttention"]
__dir__ = only(__all__)
