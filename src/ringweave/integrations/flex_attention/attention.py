"""FlexAttention's function: read the mask and the score function, and call ringweave's attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import validate
from ...api import attention_with_lse
from ...call import Arguments
from ...call import Call as AttentionCall
from ...patterns import Full, Pattern
from ...score_functions.reading import Positions, read
from ...score_functions.scored_program import ScoredProgram
from ...terms.term import ScoreMod
from ...torch_compat import uncompiled
from ...types import Place, acc_dtype
from .argument_checks import Call, checked
from .block_masks import pattern_of


@uncompiled("Call it outside of code that is compiled with fullgraph=True; other compiled code breaks its graph here.")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute ``torch.nn.attention.flex_attention.flex_attention`` on a CPU, with gradients.

    ``out[i] = sum_j softmax_j(score_mod(scale * <query[i], key[j]>, b, h, i, j)) value[j]`` over the pairs of the full
    blocks of ``block_mask``, and over those of its partial blocks for which its ``mask_mod`` holds. A row that attends
    nothing gives 0. Gradients reach the query, keys and values, also through lse, and every tensor that ``score_mod``
    captures.

    Score functions that are score terms run in the kernel: a soft cap, ALiBi, a bias by head and distance, and a table
    by batch element, head, query and key. ``torch.where(allowed, score, -inf)`` around them is a mask, if a pattern has
    its pairs. Any other function is computed with torch in tiles, which is slower; :func:`explain` tells which. Both
    functions are called with 0-dim tensors under ``torch.vmap``, and read at each call, so that values that they
    capture may change between calls. Tensors on other devices go to torch's function.

    Args:
        query: (B, Hq, L, E), float32, float16, bfloat16 or float64, any strides.
        key: (B or 1, Hkv, S, E), dtype and device of the query.
        value: (B or 1, Hkv, S, Ev).
        score_mod: ``score_mod(score, b, h, q, k)`` of a score and whole-number indices; h is the query head.
        block_mask: ``BlockMask`` for L queries and S keys, with a batch of 1 or B and heads of 1 or Hq.
        scale: Factor of the scores; 1 / sqrt(E) by default.
        enable_gqa: Whether Hkv may be a divisor of Hq.
        return_lse: Whether to return (out, lse).
        kernel_options: Accepted and ignored.
        return_aux: ``AuxRequest`` of torch: which of lse and max_scores to return.
    Returns:
        out (B, Hq, L, Ev), with the query's dtype and order of strides; with ``return_lse`` (out, lse); with
        ``return_aux`` (out, ``AuxOutput``), in which values that were not asked for are None. lse (B, Hq, L) is the
        natural logarithm, in float32 (float64 for float64), and -inf for a row that attends nothing. ``max_scores`` has
        lse's shape and dtype, and no gradient.
    Raises:
        ShapeError: Sizes do not fit, ``block_mask`` is for other lengths, or both ``return_lse`` and ``return_aux`` are
            given (a ValueError).
        NotImplementedError: A tensor is nested or does not have four dimensions.
        UnsupportedError: ``block_mask`` is a slice without a ``mask_mod``, or on another device (a RuntimeError).
        PatternError: ``mask_mod`` fails, or what it reads changed between a call and its gradient (a ValueError).
    Example:
        >>> from ringweave.integrations.flex_attention import flex_attention
        >>> slope = torch.tensor(0.1, requires_grad=True)
        >>> out = flex_attention(q, k, v, lambda score, b, h, i, j: score - slope * (i - j).abs())
        >>> out.sum().backward()
        >>> slope.grad.shape
        torch.Size([])

    References:
        Dong et al. (2024), Flex Attention: a programming model for generating optimized attention kernels.
    """
    if isinstance(query, Tensor) and query.device.type != "cpu":
        from torch.nn.attention import flex_attention as peer

        return peer.flex_attention(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    call = checked(query, key, value, block_mask, scale, enable_gqa, return_lse, return_aux)
    with_max = return_aux is not None and return_aux.max_scores
    with torch.autocast("cpu", enabled=False):
        out, lse, most = _attend(call, score_mod, block_mask, with_max)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=most)
    return (out, lse) if return_lse else out


def _attend(
    call: Call, score_mod: ScoreMod | None, block_mask: Any, with_max: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    query, key, value, scale = call
    batch, heads, nq, _ = query.shape
    place = Place(batch, heads, nq, key.shape[2])
    if 0 in place[:4]:
        validate.check_tensors(query, key, value, empty=True)
        whole = AttentionCall.of(query, key, value, Full(), scale=scale)
        program = ScoredProgram.of(whole, score_mod or _unchanged, None, query, key)
        return *program.attend(query, key, value), program.largest(query, key) if with_max else None
    pattern = pattern_of(block_mask, place)
    terms = () if score_mod is None else score_mod
    # given, since a causal mask of fewer queries than keys is no mistake here
    out, lse = attention_with_lse(query, key, value, pattern, scale=scale, terms=terms, q_offset=0)
    most = _largest(call, score_mod or _unchanged, pattern, place) if with_max else None
    return _in_order_of(query, out), lse, most


def _largest(call: Call, score_mod: ScoreMod, pattern: Pattern, place: Place) -> Tensor:
    """Return the largest score of each row."""
    query, key, value, scale = call
    graph = read((score_mod,), Positions(place), acc_dtype(query.dtype), scale).graph
    whole = validate.checked(Arguments(query, key, value, pattern, scale)).call
    return ScoredProgram.of(whole, score_mod, graph, query, key).largest(query, key)


def _unchanged(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score


def _in_order_of(query: Tensor, out: Tensor) -> Tensor:
    """Return the output with its dimensions in memory in the order of the query's, and the last one innermost."""
    _, heads, tokens, width = out.shape
    if out.shape == query.shape and out.stride() == query.stride() == (
        heads * tokens * width,
        tokens * width,
        width,
        1,
    ):
        return out
    order = [*sorted(range(3), key=query.stride, reverse=True), 3]
    ordered = out.permute(order).contiguous()
    # contiguous tensors may have any stride along a side of 1, and the query's order has one
    result = ordered.view(-1).view(ordered.shape).permute([order.index(dim) for dim in range(4)])
    return out if result.stride() == out.stride() else result
