"""Compare a score function once with its graph, and with its terms, before they are trusted.

A trace runs a function with symbols. A function that asks what its arguments are, or that a reader misreads, may
compute other values with tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..cache import PATTERNS
from ..patterns.cache_key import TableId
from ..torch_compat import dispatched, transforming
from ..trace import comparison
from ..trace.comparison import asks_for_types, codes
from ..trace.evaluate import Arguments
from ..trace.graph import Graph
from ..types import Place

_SCORES = 0.0, 0.5, -0.5, 3.0, -3.0, 40.0, -40.0
# about the size of a key
_NBYTES = 2**12


def disagreement(
    score_mod: Callable[..., Any],
    graph: Graph,
    place: Place,
    dtype: torch.dtype,
    *recognised: Callable[[Arguments], Tensor],
) -> str:
    """Return how a function differs from its graph, or from what that was recognised as; empty if it does not.

    A known function is not called again, unless it may ask for types.

    A function is known by its code and its graph, in which numbers count by value and tables by shape. Where all
    entries of a table are equal, as in one of zeros, it is compared again once the table is written to. An unknown
    function is trusted in a transform or a mode of torch, in which tensors may have no values to compare.

    Args:
        score_mod: The function.
        graph: Its graph.
        place: Sizes of the call.
        dtype: Dtype of the scores.
        recognised: Functions that compute it at pairs in another way.
    """
    code = codes(score_mod)
    key: Hashable = "score function", code, graph.key, place, len(recognised)
    known = PATTERNS.get(key)
    if isinstance(known, str):
        return known
    if transforming() or dispatched():
        return ""
    tables = tuple(map(TableId, graph.tensors))
    if known is not None and known == tables:
        return ""
    lengths = {"score": torch.tensor(_SCORES, dtype=dtype, device="cpu"), **place.lengths()}
    how = comparison.disagreement(score_mod, graph, lengths, *recognised)
    if (not how and asks_for_types(code)) or tables != tuple(map(TableId, graph.tensors)):
        # for tensors it may read other values in each call; or another thread wrote to one of them meanwhile
        return how
    if not how and not all(map(_varies, graph.tensors)):
        PATTERNS.put(key, tables, _NBYTES + sum(x.nbytes for x in graph.tensors))
    else:
        PATTERNS.put(key, how, _NBYTES)
    return how


def _varies(x: Tensor) -> bool:
    """Return whether reading another entry of a tensor, or none, would show."""
    entries = x.detach().reshape(-1)
    return bool((entries[1:] != entries[0]).any()) if len(entries) > 1 else bool((entries != 0).all())
