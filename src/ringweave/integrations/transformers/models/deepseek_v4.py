"""DeepSeek V4, read from transformers 5.24.0: a window of keys and, behind them, compressed entries; some are chosen.

The model tells attention about the entries in the values of a mask, which a pattern has not. So the modules that make
entries leave a note, which the attention function of the same layer reads right afterwards.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ....chunks import chunks
from ....errors import UnsupportedError
from ....patterns import KeyPadding, Pattern, Selected, Sinks
from ....patterns.algebra import And


class Entries:
    """The compressed entries of a layer's last call.

    Args:
        compressor: The module that made them.
        number: Number of entries, which are the last keys.
        lists: (B, queries, n), the entries that each query attends; -1 is no entry. None if it attends all.
    """

    def __init__(self, compressor: nn.Module, number: int, lists: Tensor | None):
        self.compressor, self.number, self.lists = compressor, number, lists

    def beside(self, window: Pattern, keys: int) -> Pattern:
        """Return a pattern of the keys before the entries, with the entries that a query attends.

        Args:
            window: Pattern of the keys before the entries.
            keys: Number of all keys.
        """
        first = keys - self.number
        pattern = _over(window, keys) & KeyPadding(first)
        if not self.number:
            return pattern
        if self.lists is None:
            return pattern | KeyPadding(keys, first)
        return pattern | Selected(torch.where(self.lists >= 0, self.lists + first, -1)[:, None])


def _over(window: Pattern, keys: int) -> Pattern:
    """Return a pattern of the first keys as one of more keys: a mask of keys gets values for all of them."""
    if isinstance(window, Sinks) and window.tables:
        (mask,) = window.tables
        return Sinks.own(torch.nn.functional.pad(mask, (0, keys - mask.shape[-1])))
    return window.with_parts([_over(part, keys) for part in window.parts]) if isinstance(window, And) else window


_LAST: ContextVar[Entries | None] = ContextVar("ringweave_entries", default=None)
_CHOSEN: ContextVar[tuple[nn.Module, Tensor] | None] = ContextVar("ringweave_chosen_entries", default=None)


def entries_of(module: nn.Module) -> Entries | None:
    """Return the entries of a layer that calls attention, or None if its compressor is None.

    Raises:
        UnsupportedError: The layer makes entries, but no hook has seen them.
    """
    compressor = module.compressor
    if compressor is None:
        return None
    entries = _LAST.get()
    _LAST.set(None)
    if entries is None or entries.compressor is not compressor:
        got = f"{type(module).__name__}, which tells attention about its compressed entries by values of a mask"
        raise UnsupportedError("layer", got, "a patched model", "Call patch(model) first.")
    return entries


def compress(compressor: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run a compressor, and note its entries.

    Args:
        compressor: The compressor.
        forward: Its own forward.
        args: Arguments of ``forward``.
        kwargs: Arguments of ``forward``.
    Returns:
        The entries, and what they add to the scores.
    """
    entries, bias = forward(*args, **kwargs)
    number, lists, chosen = entries.shape[2], None, _CHOSEN.get()
    _CHOSEN.set(None)
    if chosen is not None and chosen[0] is getattr(compressor, "indexer", None):
        lists = chosen[1]
    elif bias is not None and number:
        lists = torch.where(bias[:, 0] == 0, torch.arange(number, device=bias.device), -1)
    _LAST.set(Entries(compressor, number, lists))
    return entries, bias


def choose_entries(indexer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run the indexer of a compressor without gradients, and note the entries that it chose.

    Args:
        indexer: The indexer.
        forward: Its own forward.
        args: Arguments of ``forward``.
        kwargs: Arguments of ``forward``.
    Returns:
        The chosen entries, (B, queries, n).
    """
    with torch.no_grad():
        lists: Tensor = forward(*args, **kwargs)
    _CHOSEN.set((indexer, lists))
    return lists


def score_in_chunks(scorer: nn.Module, forward: Any, q: Tensor, entries: Tensor, hidden: Tensor) -> Tensor:
    """Score entries for chunks of queries, where the scorer's own forward scores them for all queries and heads.

    Args:
        scorer: The scorer.
        forward: Its own forward.
        q: (B, queries, heads, D).
        entries: (B, entries, D).
        hidden: (B, queries, hidden size).
    Returns:
        The scores, (B, queries, entries).
    """
    one = len(q) * q.shape[2] * entries.shape[1] * 4
    parts = chunks(q.shape[1], one, q.device)
    return torch.cat([forward(q[:, part], entries, hidden[:, part]) for part in parts], 1)


#: Functions that run in place of a module's forward, by the name of its class.
HOOKS = {
    "DeepseekV4IndexerScorer": score_in_chunks,
    "DeepseekV4Indexer": choose_entries,
    "DeepseekV4CSACompressor": compress,
    "DeepseekV4HCACompressor": compress,
}
