"""Latent attention: a step expands the latents of the chosen keys, where the model expands those of all keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...patterns import Selected
from .masks import Facts, PatternMask
from .model_cache import PagedStates, refused
from .saved_patterns import ATTRIBUTE, NAME


class Latents:
    """The keys or values of a layer before their expansion, which the attention function expands.

    Args:
        expand: The layer's own function, which returns keys and values.
        latents: (B, 1, keys, rank).
        rotated: (B, 1, keys, D), the part of the keys with positions.
    """

    def __init__(self, expand: Any, latents: Tensor, rotated: Tensor):
        self.expand, self.latents, self.rotated = expand, latents, rotated

    @property
    def shape(self) -> torch.Size:
        """Shape of the latents; the third size is the number of keys."""
        return self.latents.shape

    def states(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values."""
        keys, values = self.expand(self.latents, self.rotated)
        return keys, values

    def of(self, indices: Tensor, mask: PatternMask) -> tuple[Tensor, Tensor, PatternMask]:
        """Return the chosen keys and values of a single query, and the mask of those that the query may attend.

        Args:
            indices: (B, 1, n), the chosen keys; -1 is no key.
            mask: The mask of all keys.
        """
        chosen = indices[:, 0].long()
        safe = chosen.clamp(min=0)
        allowed = mask.values()[:, 0, 0].expand(len(safe), -1).gather(1, safe) & (chosen >= 0)
        at = safe[:, None, :, None]
        parts = (x.gather(2, at.expand(-1, -1, -1, x.shape[3])) for x in (self.latents, self.rotated))
        keys, values = self.expand(*parts)
        batch, number = safe.shape
        places = torch.where(allowed, torch.arange(number, device=safe.device), -1)
        return keys, values, PatternMask(Facts(Selected(places[:, None, None]), (batch, 1, 1, number)))


def states_of(
    module: nn.Module, queries: int, key: Latents, mask: object, indices: Tensor | None, weights: bool | None
) -> tuple[Tensor, Tensor, Any, Tensor | None]:
    """Expand latents; return keys, values, mask and chosen keys.

    Args:
        module: The layer.
        queries: Number of queries.
        key: The latents.
        mask: The mask of the call.
        indices: The chosen keys, or None.
        weights: Whether the call returns weights, which are those of all keys.
    """
    single = indices is not None and queries == 1 and indices.shape[-1] < key.shape[2] and not weights
    if (
        single
        and isinstance(mask, PatternMask)
        and mask.facts.context is None
        and getattr(module, ATTRIBUTE, None) is None
    ):
        assert indices is not None
        return *key.of(indices, mask), None
    return *key.states(), mask, indices


def _later(module: Any, expand: Any, latents: Tensor, rotated: Tensor) -> tuple[Any, Any]:
    """Return the latents in place of keys and values, or expand them for another implementation."""
    if isinstance(latents, PagedStates):
        latents.writes.undo()
        raise refused("latents that a layer expands")
    if module.config._attn_implementation != NAME or torch.compiler.is_compiling():
        states: tuple[Any, Any] = expand(latents, rotated)
        return states
    held = Latents(expand, latents, rotated)
    return held, held


def expand_later(model: nn.Module) -> None:
    """Let the layers of a model with latents expand them in the attention function; twice is as once."""
    for module in model.modules():
        expand = getattr(module, "expand_kv", None)
        if expand is not None and not isinstance(expand, partial):
            vars(module)["expand_kv"] = partial(_later, module, expand)
