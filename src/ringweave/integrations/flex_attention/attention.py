"""FlexAttention's function, and its explanation: read the mask and the score function, and call ringweave's attention.

The mask function is traced at each call, and its pattern is found by the graph and the tensors that it reads. So it
does not matter which object the function is, or where its values come from. Where patterns have the pairs of the
function, the blocks of the mask usually repeat them, and the pattern takes its place. Other functions are evaluated in
tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as peer

from ... import validate
from ...api import attention_with_lse
from ...cache import PATTERNS
from ...call import Arguments
from ...call import Call as AttentionCall
from ...errors import UnsupportedError
from ...patterns import Full, Pattern
from ...patterns.cache_key import TableId
from ...patterns.recorded import Recorded, recorded
from ...plan.interop import blocks_of, fits_blocks, in_blocks
from ...reports import explanation
from ...score_functions.reading import Positions, read
from ...score_functions.scored_program import ScoredProgram
from ...terms.term import ScoreMod
from ...torch_compat import outside_transforms, uncompiled
from ...types import Place, acc_dtype
from .argument_checks import Call, checked

_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
# estimated size of a pattern without its tables
_BYTES = 4 * 2**10


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
        return peer.flex_attention(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    call = checked(query, key, value, block_mask, scale, enable_gqa, return_lse, return_aux)
    with_max = return_aux is not None and return_aux.max_scores
    with torch.autocast("cpu", enabled=False):
        out, lse, most = _attend(call, score_mod, block_mask, with_max)
    if return_aux is not None:
        return out, peer.AuxOutput(lse=lse if return_aux.lse else None, max_scores=most)
    return (out, lse) if return_lse else out


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    as_dict: bool = False,
) -> Any:
    """Explain a call without running it: its pairs, tiles and backends, and how its score function is computed.

    Args:
        query: (B, Hq, L, E).
        key: (B or 1, Hkv, S, E).
        value: (B or 1, Hkv, S, Ev).
        score_mod: Score function.
        block_mask: ``BlockMask`` or None.
        scale: Factor of the scores.
        enable_gqa: Whether Hkv may be a divisor of Hq.
        as_dict: Whether to return a dict of plain values instead of text.
    Returns:
        The text or dict of :func:`ringweave.explain`, with a line or an entry ``score_mod``: the score terms that the
        function is, or that it takes the slower general path, and why.
    Raises:
        ShapeError: The arguments do not fit; as in :func:`flex_attention`.
        UnsupportedError: The tensors are on another device, where torch's function computes the call.
    Example:
        >>> from ringweave.integrations.flex_attention import explain
        >>> print(explain(q, k, v, lambda score, b, h, i, j: score.relu()).splitlines()[-1])
        score_mod general path, slower than terms: relu of the score is no score term
    """
    if isinstance(query, Tensor) and query.device.type != "cpu":
        wanted = "cpu: torch's function computes tensors on other devices"
        raise UnsupportedError("query.device", query.device, wanted, "Explain tensors on the CPU, or use rw.explain.")
    call = checked(query, key, value, block_mask, scale, enable_gqa)
    validate.check_tensors(*call[:3])
    query, key, value = call[:3]
    batch, heads, nq, head_dim = query.shape
    pattern = pattern_of(block_mask, Place(batch, heads, nq, key.shape[2]))
    grad = any(x.requires_grad for x in (query, key, value))
    return explanation.explain(
        pattern, nq, key.shape[2], heads=heads, kv_heads=key.shape[1], head_dim=head_dim, value_dim=value.shape[3],
        batch=batch, dtype=query.dtype, device=query.device, scale=call.scale, needs_grad=grad, terms=score_mod,
        q_offset=0, as_dict=as_dict,
    )  # fmt: skip


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


# ---- masks -----------------------------------------------------------------------------------------------------------


def pattern_of(block_mask: Any, place: Place) -> Pattern:
    """Return the pattern of a mask, or None, for a call; the same object while the mask is the same.

    A write to the mask's tables, another value of an attribute, and other values that the mask function reads are seen.
    A pattern has the values of its call, so that a gradient is that of its call. Where the function is evaluated in
    tiles, a gradient after a write to a tensor that it reads raises an error.
    """
    if block_mask is None:
        return Full()
    tables = {name: table for name in _TABLES if (table := getattr(block_mask, name)) is not None}
    with outside_transforms(*tables.values()):
        function = recorded(block_mask.mask_mod, pairs=True)
        if not function.function.single:
            place = function.at_place(place)
            function = function.compared(place)
        read = function.key()
        # the tables are the mask's own, and nothing writes to them unseen
        listed = tuple(tables), *map(TableId, tables.values()), tuple(block_mask.BLOCK_SIZE)
        # a pattern that evaluates the function reads these very tensors, which may be written to after the call
        key = "block mask", read.value, tuple(map(id, function.tables)), listed, place
        found: Pattern | None = PATTERNS.get(key)
        if found is None:
            found = _made(block_mask, function, place)
            read.check(function)
            if not function.function.single:
                nbytes = sum(table.nbytes for table in (*tables.values(), *found.tables))
                PATTERNS.put(key, found, _BYTES + read.nbytes + nbytes, [block_mask])
        return found


def _made(block_mask: Any, function: Recorded, place: Place) -> Pattern:
    lengths = place.nq, place.nk
    blocks, pairs = blocks_of(block_mask, lengths), function.relation(place)
    if pairs is None:
        return in_blocks(blocks, function)
    return pairs if fits_blocks(blocks, pairs, lengths) else in_blocks(blocks, pairs)
