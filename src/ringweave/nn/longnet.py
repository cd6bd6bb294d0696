"""Multi-head attention over a mixture of dilated branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..api import longnet_attention
from ..checks import flag
from ..errors import PatternError, ShapeError
from ..patterns import LongNet, Pattern
from .module_parts import accepted_options, refuse_pattern
from .multihead import MultiheadAttention


class LongNetAttention(MultiheadAttention):
    """Multi-head LongNet attention: a mixture of dilated branches; see :func:`ringweave.longnet_attention`.

    Args:
        embed_dim: Channels of the inputs and of the output.
        num_heads: Query heads; divides embed_dim.
        segments: Segment length of each branch, in tokens.
        rates: Dilation rate of each branch; divides its segment.
        causal: Whether keys after the query are left out.
        offset: Residue that a head keeps: ``"interleaved"``, ``"grouped"`` or an int.
        heads: ``"shared"`` or ``"partitioned"``.
        detach_weights: Whether backward treats the branch weights as constants.
        **options: Options of :class:`MultiheadAttention`, except ``pattern``; with ``detach_weights`` also without
            those that :func:`ringweave.longnet_attention` does not take.
    Raises:
        PatternError: The lists differ in length, or a rate does not divide its segment.
        UnsupportedError: An option is passed that the module would not use; in a call, a mask.
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
        refuse_pattern(options, "the branches are the pattern")
        mixture = LongNet(segments, rates, causal=causal, offset=offset, heads=heads)
        super().__init__(embed_dim, num_heads, pattern=mixture, **options)
        self.detach_weights = flag("detach_weights", detach_weights, ShapeError)
        if self.detach_weights:
            accepted_options("longnet_attention", self._options(), "detach_weights=True")

    def _attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Mapping[str, Any]
    ) -> Tensor:
        if not self.detach_weights:
            return super()._attend(x, q, k, v, pattern, options)
        accepted = accepted_options("longnet_attention", options, "detach_weights=True")
        if not isinstance(pattern, LongNet):
            remedy = "Use another module for other patterns."
            raise PatternError("pattern", repr(pattern), "a LongNet, with detach_weights=True", remedy)
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
            **accepted,
        )
