"""Packed documents that a model's masks do not separate: where its positions are found, and warnings about them."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from transformers import masking_utils

from ...errors import warn_once, warned

# number of callers between a layer's attention or mask and the model's forward, with room for decorators
_FRAMES = 40


def positions_of_the_call() -> Tensor | None:
    """Return the ``position_ids`` of the model's forward that is running, if the model does not pass them to its masks.

    Encoders such as ModernBERT pass them only to their embeddings, so nothing but the forward's frame has them. Until
    Python 3.13, reading a frame's variables keeps them alive until the forward returns.
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
                return None
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
    steps = positions.diff(dim=-1)
    # of positions with axes (time, height, width) only the time never decreases within a document
    if bool((steps[0] < 0 if positions.ndim == 3 else steps != 1).any()):
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


def warn_of_own_mask(kind: str, tokens: int) -> None:
    """Warn once if positions restart in a model that makes its own padding mask, such as LayoutLM."""
    positions = None if torch.compiler.is_compiling() or warned(f"packed {kind}") else positions_of_the_call()
    if positions is None or positions.ndim != 2 or positions.shape[1] != tokens:
        return
    if bool((positions.diff(dim=-1) != 1).any()):
        got = f"positions that restart, in a model with its own mask of keys for {kind}"
        remedy = "Packed documents attend each other here, as with every implementation: give each document a row."
        warn_once(f"packed {kind}", "position_ids", got, "one document in each row", remedy)
