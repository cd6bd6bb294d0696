"""Packed documents that a model's masks or its choice of keys do not separate: their positions, warnings and errors."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from transformers import masking_utils

from ...errors import UnsupportedError, warn_once, warned
from ...patterns import Documents
from ...torch_compat import require

# number of callers between a layer's attention or mask and the model's forward, with room for decorators
_FRAMES = 40


def positions_of_the_call() -> Tensor | None:
    """Return the ``position_ids`` of the model's forward that is running, if its mask does not depend on them.

    Encoders such as ModernBERT pass them only to their embeddings, so nothing but the forward's frame has them. The
    library does not look at them in a call with a cache or an attention mask. Until Python 3.13, reading a frame's
    variables keeps them alive until the forward returns.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        caller = frame.f_back
        if caller is None:
            return None
        frame = caller
        code = frame.f_code
        if code.co_filename == masking_utils.__file__:
            if "position_ids" in code.co_varnames and frame.f_locals.get("position_ids") is not None:
                given = frame.f_locals
                others = ("attention_mask", "cache", "past_key_values")
                return None if all(given.get(name) is None for name in others) else given["position_ids"]
        elif code.co_name == "forward" and "position_ids" in code.co_varnames:
            found = frame.f_locals.get("position_ids")
            return found if isinstance(found, Tensor) else None
    return None


def warn_of_packing(kind: str, positions: object, tokens: int) -> bool:
    """Warn once if a call's positions restart though its mask does not separate documents.

    Args:
        kind: Name of the layer's class.
        positions: The ``position_ids`` of the call, if it has any.
        tokens: Number of tokens in a row of the call.
    Returns:
        Whether the positions were looked at.
    """
    if torch.compiler.is_compiling() or not isinstance(positions, Tensor) or warned(f"packed {kind}"):
        return False
    if positions.ndim not in (2, 3) or positions.shape[-1] != tokens:
        return False
    if bool(_breaks(positions).any()):
        warn_once(
            f"packed {kind}",
            "position_ids",
            f"positions that restart, which the mask of {kind} does not take into account",
            "packing that the model passes on to its masks, without attention_mask and cache",
            "Packed documents attend each other here, as with every implementation. Pass use_cache=False to a decoder. "
            "If this model ignores packing, call set_pattern(model, rw.Documents(ids=numbers)) before each batch, with "
            "each token's document number (B, tokens), or use context_parallel(model), in one process too.",
        )
    return True


def _breaks(positions: Tensor) -> Tensor:
    """Return whether each token but the first of a row begins a document, by its position."""
    steps = positions.diff(dim=-1)
    # of positions with axes (time, height, width) only the time never decreases within a document
    return steps[0] < 0 if positions.ndim == 3 else steps != 1


def breaks_of(documents: Documents) -> Tensor:
    """Return whether each token but the first of a row begins a document, by the documents of a mask."""
    (ids,) = documents.tables
    return ids.diff(dim=-1) != 0


def refuse_packed(name: str, kind: str, choice: str, remedy: str, breaks: Tensor | None = None) -> None:
    """Raise UnsupportedError for packed documents in a layer that chooses its keys without them.

    Args:
        name: The argument that holds the documents.
        kind: Name of the layer's class.
        choice: Words for its choice.
        remedy: What the reader can do.
        breaks: Whether each token begins a document, if that is to be looked at; compiled code looks when it runs.
    """
    error = UnsupportedError(name, f"packed documents in {kind}, {choice}", "one document in each row", remedy)
    if breaks is None:
        raise error
    if torch.compiler.is_compiling():
        require(~breaks.any(), str(error))
    elif bool(breaks.any()):
        raise error


def refuse_restarts(kind: str, positions: object, tokens: int, exists: Tensor | None) -> None:
    """Raise UnsupportedError if positions restart in a layer that chooses its keys, and its mask does not know it.

    Args:
        kind: Name of the layer's class.
        positions: The ``position_ids`` of the call, if it has any.
        tokens: Number of queries in a row of the call.
        exists: (B, tokens), the tokens that are no padding; None for all.
    """
    if not isinstance(positions, Tensor) or positions.ndim not in (2, 3) or positions.shape[-1] != tokens:
        return
    breaks = _breaks(positions)
    if exists is not None:
        breaks = breaks & exists[:, 1:] & exists[:, :-1]
    choice = "by position_ids that restart, which its choice of keys does not take into account"
    refuse_packed("position_ids", kind, choice, TAKES_NO_PACKING, breaks)


#: The remedy for a model without any form of packing.
TAKES_NO_PACKING = (
    "Give each document a row and pad it. Models that choose keys by their mask take position_ids that restart with "
    "use_cache=False and without attention_mask."
)


def warn_of_own_mask(kind: str, tokens: int) -> None:
    """Warn once if positions restart in a model that makes its own padding mask, such as LayoutLM."""
    positions = None if torch.compiler.is_compiling() or warned(f"packed {kind}") else positions_of_the_call()
    if positions is None or positions.ndim != 2 or positions.shape[1] != tokens:
        return
    if bool((positions.diff(dim=-1) != 1).any()):
        got = f"positions that restart, in a model with its own mask of keys for {kind}"
        remedy = "Packed documents attend each other here, as with every implementation: give each document a row."
        warn_once(f"packed {kind}", "position_ids", got, "one document in each row", remedy)
