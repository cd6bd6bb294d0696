"""Latent attention over chosen keys, without the keys and values that the model expands from the latents.

A step expands the latents of the chosen keys alone. A long call attends the latents themselves, which all heads share,
if that costs less: its queries are multiplied by the factors of the expansion of keys, and its results by those of
values. DeepSeek-V2 calls this the absorbed form (https://arxiv.org/abs/2405.04434, section 2.1.2).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...api import attention
from ...patterns import Pattern, Selected
from .masks import Facts, PatternMask
from .model_cache import PagedStates, refused
from .saved_patterns import ATTRIBUTE, NAME

# A call with fewer queries expands its keys. The absorbed form of a chunk of queries is held at a time. That the layer
# multiplies latents by factors is checked for some keys.
_FEWEST, _CHUNK, _CHECKED = 512, 2048, 8
# queries that expanded keys are computed for together, and most such tiles that are looked at
_TILE, _SAMPLE = 128, 64
# time of a product of the absorbed form over one of expanded keys, forward and with gradients (measured)
_SLOWER = 1.5, 1.7


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

    def absorbed(self, query: Tensor, indices: Tensor) -> Absorbed | None:
        """Return the absorbed form of a call, or None if expanded keys cost less or are no product of the latents.

        Args:
            query: (B, Hq, q, D).
            indices: (B, q, n), the chosen keys; -1 is no key.
        """
        x, rotated = self.latents, self.rotated
        if query.shape[2] < _FEWEST or not query.dtype == x.dtype == rotated.dtype:
            return None
        if query.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return None
        rank, turned = x.shape[3], rotated.shape[3]
        # some keys tell the sizes, and below whether the function multiplies latents by factors
        step = -(-x.shape[2] // _CHECKED)
        some = x[:, :, ::step], rotated[:, :, ::step]
        keys, values = self.expand(*some)
        grads = torch.is_grad_enabled() and any(each.requires_grad for each in (query, x, rotated, keys, values))
        expanded = keys.shape[3] + values.shape[3]
        if not _costs_less(indices, x.shape[2], _SLOWER[grads] * (2 * rank + turned), expanded):
            return None
        ones = torch.eye(rank, dtype=x.dtype, device=x.device)[None, None]
        of_keys, of_values = self.expand(ones, rotated.new_zeros(1, 1, rank, turned))
        of_keys = of_keys[..., : keys.shape[3] - turned]
        found = Absorbed(torch.cat((x, rotated), -1), rank, of_keys, of_values)
        return found if found.expands(some, (keys, values)) else None

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


class Absorbed(NamedTuple):
    """A layer's keys and values as latents that all heads share, and the factors of their expansion.

    Attributes:
        states: (B, 1, keys, rank + D), latents and then the parts of the keys with positions.
        rank: Number of channels of a latent.
        keys: (1, Hq, rank, channels), the factors of the keys' first channels.
        values: (1, Hq, rank, Dv), the factors of the values.
    """

    states: Tensor
    rank: int
    keys: Tensor
    values: Tensor

    @torch.no_grad()
    def expands(self, some: tuple[Tensor, Tensor], got: tuple[Tensor, Tensor]) -> bool:
        """Return whether some latents, with the parts of their keys with positions, have these keys and values."""
        latents, rotated = some
        first = latents @ self.keys
        wanted = torch.cat((first, rotated.expand(*first.shape[:3], -1)), -1), latents @ self.values
        # sums in two orders round differently
        room = max(4 * torch.finfo(latents.dtype).eps, 64 * torch.finfo(torch.float32).eps)
        return all(
            one.shape == two.shape and bool((one - two).norm() <= room * two.norm())
            for one, two in zip(got, wanted, strict=True)
        )

    def attend(
        self, query: Tensor, indices: Tensor, mask: Pattern, q_offset: int | Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Return (B, Hq, q, Dv), the result of queries with expanded keys and values.

        Args:
            query: (B, Hq, q, D).
            indices: (B, q, n), the chosen keys; -1 is no key.
            mask: The keys that they may be.
            q_offset: Index of the first query.
            options: Further options of :func:`ringweave.attention`; a scale is one of them.
        """
        begin, parts = self.keys.shape[3], []
        for first in range(0, query.shape[2], _CHUNK):
            rows, lists = query[:, :, first : first + _CHUNK], indices[:, None, first : first + _CHUNK]
            turned = torch.cat((rows[..., :begin] @ self.keys.mT, rows[..., begin:]), -1)
            values, pattern = self.states[..., : self.rank], Selected(lists) & mask
            out = attention(turned, self.states, values, pattern, q_offset=q_offset + first, **options)
            parts.append(out @ self.values)
        return torch.cat(parts, 2)


def _costs_less(indices: Tensor, nk: int, absorbed: float, expanded: int) -> bool:
    """Return whether each query's own keys times ``absorbed`` are less than the keys of a tile times ``expanded``.

    Args:
        indices: (B, q, n), the chosen keys; -1 is no key.
        nk: Number of keys.
        absorbed: Time of a pair in the absorbed form.
        expanded: Time of a pair in tiles of queries, which compute each key that one of them attends.
    """
    batch, queries, n = indices.shape
    if n * absorbed >= min(nk, _TILE * n) * expanded:
        return False
    own = together = 0
    step = -(-queries // (_TILE * _SAMPLE)) * _TILE
    for first in range(0, queries, step):
        rows = indices[:, first : first + _TILE].flatten(1)
        chosen = torch.zeros(batch, nk + 1, dtype=torch.bool, device=rows.device)
        chosen.scatter_(1, torch.where(rows < 0, nk, rows).clamp(max=nk).long(), True)
        own += int((rows >= 0).sum())
        together += int(chosen[:, :nk].sum()) * _TILE
    return own * absorbed < together * expanded


def states_of(
    module: nn.Module,
    query: Tensor,
    key: Latents,
    mask: object,
    indices: Tensor | None,
    weights: bool | None,
    absorbs: bool,
) -> tuple[Any, Any, Any, Tensor | None, Absorbed | None]:
    """Return keys, values, mask and chosen keys for latents, and the absorbed form if they are those of it.

    Args:
        module: The layer.
        query: (B, Hq, q, D).
        key: The latents.
        mask: The mask of the call.
        indices: The chosen keys, or None.
        weights: Whether the call returns weights, which are those of all keys.
        absorbs: Whether the call may have the absorbed form: its scale is known, it drops no weights and has no bias.
    """
    chosen = indices is not None and indices.shape[-1] < key.shape[2]
    if chosen and not weights and isinstance(mask, PatternMask) and mask.facts.context is None:
        assert indices is not None
        if query.shape[2] == 1 and getattr(module, ATTRIBUTE, None) is None:
            return *key.of(indices, mask), None, None
        absorbed = key.absorbed(query, indices) if absorbs else None
        if absorbed is not None:
            return absorbed.states, absorbed.states, mask, indices, absorbed
    return *key.states(), mask, indices, None


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
