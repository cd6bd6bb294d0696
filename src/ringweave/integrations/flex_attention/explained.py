"""Explain a call of FlexAttention's function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...reports import explanation
from ...terms.term import ScoreMod
from ...types import Place
from ...validate import check_tensors
from .argument_checks import checked
from .block_masks import pattern_of


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
    Example:
        >>> from ringweave.integrations.flex_attention import explain
        >>> print(explain(q, k, v, lambda score, b, h, i, j: score.relu()).splitlines()[-1])
        score_mod general path, slower than terms: relu of the score is no score term
    """
    call = checked(query, key, value, block_mask, scale, enable_gqa)
    check_tensors(*call[:3])
    query, key, value = call[:3]
    batch, heads, nq, head_dim = query.shape
    pattern = pattern_of(block_mask, Place(batch, heads, nq, key.shape[2]))
    grad = any(x.requires_grad for x in (query, key, value))
    return explanation.explain(
        pattern, nq, key.shape[2], heads=heads, kv_heads=key.shape[1], head_dim=head_dim, value_dim=value.shape[3],
        batch=batch, dtype=query.dtype, device=query.device, needs_grad=grad, terms=score_mod, q_offset=0,
        as_dict=as_dict,
    )  # fmt: skip
