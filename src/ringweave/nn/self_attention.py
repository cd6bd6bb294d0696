"""The base of modules of causal self-attention that choose their keys: projections, documents, contexts and caches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..api import attention, attention_with_lse
from ..checks import check_context, flag
from ..errors import PatternError, ShapeError, UnsupportedError, shown
from ..patterns import Documents, Pattern, check_extents
from ..precision import NATIVE, Precision, as_precision
from ..types import AttentionOutput
from .key_cache import KeyCache, Owner
from .module_parts import checked_rotary_base, connected, head_norms, module_place, module_sizes, rotated

if TYPE_CHECKING:
    from ..parallel import ContextParallel

Spans = list[list[tuple[int, int]]]


class ChoosingAttention(nn.Module):
    """The base of modules of causal self-attention in which queries choose their keys.

    A module projects its input in ``_parts`` to tensors with tokens in dimension 2, which are cut at documents, and
    attends them in ``_attend``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        kv_projections: int,
        *,
        bias: bool,
        qk_norm: bool,
        rotary_base: float | None,
        context: ContextParallel | None,
        precision: Precision | None,
        backend: str,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.num_kv_heads = module_sizes(embed_dim, num_heads, num_kv_heads)
        self.head_dim = self.embed_dim // self.num_heads
        check_context(context)
        self.context, self.backend, self.precision = context, backend, as_precision(precision)
        self.rotary_base = checked_rotary_base(rotary_base, self.head_dim)
        self._owner = Owner()
        place = module_place(device, dtype)
        self._sizes = [self.embed_dim, *[self.num_kv_heads * self.head_dim] * kv_projections]
        self.in_proj_weight = nn.Parameter(torch.empty(sum(self._sizes), self.embed_dim, **place))
        if flag("bias", bias, ShapeError):
            self.in_proj_bias = nn.Parameter(torch.empty(sum(self._sizes), **place))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **place)
        self.q_norm, self.k_norm = head_norms(qk_norm, self.head_dim, **place)

    def reset_parameters(self) -> None:
        """Initialise the projections as ``torch.nn.MultiheadAttention`` does."""
        self.out_proj.reset_parameters()
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def empty_cache(self) -> KeyCache:
        """Return a cache without tokens, for decoding a batch of any size with this module."""
        return KeyCache(self._owner)

    def forward(self, x: Tensor, *, documents: Documents | None = None, cache: KeyCache | None = None) -> Tensor:
        """Compute causal attention of the projected input and project the result.

        Args:
            x: (batch, tokens, embed_dim); with a context this rank's shard.
            documents: Packed documents: each one chooses, attends and counts its positions as if it were alone.
            cache: A cache of this module's ``empty_cache()``: x is then the tokens after those in the cache, which are
                appended when nothing can fail any more. Pass a prompt first, then one or more tokens at a time, under
                ``torch.no_grad()``.
        Returns:
            Output, of x's shape.
        Raises:
            ShapeError: x does not fit the module, or the cache is that of another batch or module.
            PatternError: The documents do not have x's tokens, or one is in several pieces.
            UnsupportedError: Two of documents, a cache and a context are combined, or a call with a cache would need
                gradients.
        """
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != self.embed_dim:
            wanted = f"(batch, tokens, {self.embed_dim})"
            raise ShapeError("x", shown(x), wanted, "Pass channels last, and a batch of one as x[None].")
        spans = self._spans(x, documents)
        self._check_cache(x, cache, documents)
        with nullcontext() if cache is None else cache.step(*x.shape[:2]):
            return self.out_proj(self._mixed(x, spans, cache))  # type: ignore[no-any-return]

    # ---- for each module ---------------------------------------------------------------------------------------------

    def _parts(self, x: Tensor, positions: Tensor) -> list[Tensor]:
        """Project x to the tensors that ``_attend`` takes, each (batch, heads, tokens, ...)."""
        raise NotImplementedError

    def _attend(self, parts: list[Tensor], cache: KeyCache | None) -> Tensor:
        """Compute attention, (batch, heads, tokens, channels), of one document or of the tokens after a cache."""
        raise NotImplementedError

    # ---- shared ------------------------------------------------------------------------------------------------------

    def _mixed(self, x: Tensor, spans: Spans | None, cache: KeyCache | None) -> Tensor:
        """Return the attention of all heads side by side, of x's shape."""
        documents = spans is None or any(stop > begin for bounds in spans for begin, stop in bounds)
        # a shard without tokens is no call of its own, so the context judges it
        if not x.shape[0] or not documents or (not x.shape[1] and self.context is None):
            return connected(torch.zeros_like(x), (x, *self.parameters()))
        parts = self._parts(x, self._positions(x, spans, cache))
        out = self._attend(parts, cache) if spans is None else self._each(parts, spans)
        return out.transpose(1, 2).flatten(2)

    def _projected(self, x: Tensor) -> list[Tensor]:
        """Return queries, and the keys and values of each projection in turn, with normalised queries and keys."""
        parts = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias).split(self._sizes, -1)
        heads = [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts]
        if self.q_norm is not None and self.k_norm is not None:
            heads[0] = self.q_norm(heads[0])
            heads[1::2] = [self.k_norm(keys) for keys in heads[1::2]]
        return heads

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.rotary_base is None else rotated(x, positions, self.rotary_base)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **options: Any) -> Tensor:
        return attention(q, k, v, pattern, **self._options(), **options)

    def _attention_with_lse(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **options: Any) -> AttentionOutput:
        return attention_with_lse(q, k, v, pattern, **self._options(), **options)

    def _options(self) -> dict[str, Any]:
        return {"backend": self.backend, "precision": None if self.precision == NATIVE else self.precision}

    def _positions(self, x: Tensor, spans: Spans | None, cache: KeyCache | None) -> Tensor:
        """Return the position of each token, (tokens,), or (batch, tokens) where documents differ."""
        if self.context is not None:
            return self.context.positions.to(x.device)
        if spans is None:
            first = 0 if cache is None else cache.length
            return torch.arange(first, first + x.shape[1], device=x.device)
        positions = torch.zeros(len(spans), x.shape[1], dtype=torch.int64, device="cpu")
        for row, bounds in zip(positions, spans, strict=True):
            for begin, end in bounds:
                row[begin:end] = torch.arange(end - begin, device="cpu")
        return (positions if len(spans) > 1 else positions[0]).to(x.device)

    def _spans(self, x: Tensor, documents: Documents | None) -> Spans | None:
        """Return the bounds of the documents: a list for each batch element, or one for all."""
        if documents is None:
            return None
        if not isinstance(documents, Documents) or documents._packed_apart:
            wanted = "rw.Documents with the same bounds for queries and keys"
            raise PatternError("documents", shown(documents), wanted, "Pass rw.Documents(lengths).")
        if self.context is not None:
            remedy = "Run documents on one device, or without documents."
            raise UnsupportedError("documents", shown(documents), "None with a context", remedy)
        check_extents(documents, x.shape[0], self.num_heads)
        several = documents.extents()[0] is not None
        rows = [documents.select(b, 0) for b in range(x.shape[0])] if several else [documents]
        found = []
        for row in rows:
            assert isinstance(row, Documents)
            row.fits(x.shape[1], x.shape[1], 0)
            spans = row.spans()
            found.append(list(zip(spans.q_first.tolist(), spans.q_stop.tolist(), strict=True)))
        return found

    def _check_cache(self, x: Tensor, cache: KeyCache | None, documents: Documents | None) -> None:
        if cache is None:
            return
        if not isinstance(cache, KeyCache):
            raise ShapeError("cache", shown(cache), "a cache that empty_cache() made", "Pass layer.empty_cache().")
        for name, other in (("documents", documents), ("context", self.context)):
            if other is not None:
                raise UnsupportedError("cache", f"a cache and {name}", "one of the two", f"Decode without {name}.")
        cache.check(self._owner, x.shape[0])
        if torch.is_grad_enabled() and any(each.requires_grad for each in (x, *self.parameters())):
            wanted = "a call under torch.no_grad(): a cache holds no gradients"
            raise UnsupportedError("cache", "a call with gradients", wanted, "Decode under torch.no_grad().")

    def _each(self, parts: list[Tensor], spans: Spans) -> Tensor:
        """Attend each document alone; tokens of no document get 0."""
        batch, tokens = parts[0].shape[0], parts[0].shape[2]
        rows = [slice(None)] if len(spans) == 1 else [slice(b, b + 1) for b in range(batch)]
        outs = []
        for members, bounds in zip(rows, spans, strict=True):
            pieces, end = [], 0
            for begin, stop in [*bounds, (tokens, tokens)]:
                if begin > end:
                    pieces.append(torch.zeros_like(parts[0][members, :, end:begin]))
                if stop > begin:
                    pieces.append(self._attend([x[members, :, begin:stop] for x in parts], None))
                end = stop
            outs.append(torch.cat(pieces, 2))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def extra_repr(self) -> str:
        """Return the sizes for the module's repr."""
        shared = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"{self.embed_dim}, {self.num_heads}{shared}"
