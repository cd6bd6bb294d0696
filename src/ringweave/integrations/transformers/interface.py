"""ringweave as an attention implementation of transformers, and patterns of a user's own for a model's layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_scalar
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ...api import attention, paged_attention
from ...errors import PatternError, ShapeError, UnsupportedError, message, shown
from ...patterns import Causal, Full, Pattern
from ...terms import Bias, Softcap, Term
from .masks import PatternMask, pattern_mask
from .model_cache import PagedStates

NAME = "ringweave"
#: What a layer's own pattern is kept as.
_ATTRIBUTE = "_ringweave_pattern"
# what changes the meaning of a call, and is not known here
_REFUSED = {
    "head_mask": "weights scaled by head",
    "indices": "keys chosen by index",
    "block_indices": "blocks chosen by index",
    "cache": "a paged cache of the library",
}
_OTHER = "Use attn_implementation='sdpa' or 'eager' for this model."

_log = logging.getLogger("ringweave")
# kinds of layers that were warned of
_WARNED: set[str] = set()

M = TypeVar("M", bound=nn.Module)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PatternMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention: what transformers calls where the implementation is ``"ringweave"``.

    Args:
        module: The layer, which may have a pattern of its own.
        query: (B, Hq, q, D).
        key: (B, Hkv, k, D), of the cache too.
        value: (B, Hkv, k, Dv).
        attention_mask: What :func:`pattern_mask` made; or a mask of the caller's, (B or 1, H or 1, q, k), bool or
            added to scores; None: causal if the layer is.
        dropout: Share of dropped weights; 0 in evaluation.
        scaling: Factor of scores.
        is_causal: In place of the layer's own word.
        softcap: What no score exceeds.
        s_aux: (Hq,): learned sinks.
        sinks: The same by another name.
        position_bias: (B or 1, Hq or 1, q, k), added to scores.
        kwargs: What other implementations need to know.
    Returns:
        (B, q, Hq, Dv), contiguous, and None: there are no weights to return.
    Raises:
        UnsupportedError: The layer wants something that ringweave does not compute.
    """
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(message(name, what, "none", _OTHER))
    if kwargs.get("output_attentions"):
        raise UnsupportedError(message("output_attentions", "True", "False", "Weights need the eager implementation."))
    if hasattr(module, "keep_window_size"):
        # Doge: it leaves its own mask out where the library's is a BlockMask
        raise UnsupportedError(message("layer", type(module).__name__, "one that chooses no keys by content", _OTHER))
    paged = key if isinstance(key, PagedStates) else None
    batch, nq = query.shape[0], query.shape[2]
    sizes = key.shape if paged is None else paged.sizes
    of_keys, nk = sizes[0], sizes[2]
    if batch != of_keys:
        # learned queries, the same for all
        batch = max(batch, of_keys)
        query, key, value = (x.expand(batch, *x.shape[1:]) for x in (query, key, value))
    # a number is text of the call: torch.compile would make a symbol of it
    terms: list[Term] = [] if softcap is None else [Softcap(guard_scalar(softcap))]
    mask = attention_mask if isinstance(attention_mask, PatternMask) else None
    own: Pattern | None = getattr(module, _ATTRIBUTE, None)
    if mask is None:
        pattern, q_offset = _unmade(module, query, key, attention_mask, is_causal, own, terms)
    else:
        if not (mask.positions_seen or mask.rows is not None or mask.context is not None):
            positions = kwargs.get("position_ids")
            if isinstance(positions, Tensor) and not torch.compiler.is_compiling():
                _say_unseen_packing(module, mask, positions)
        if mask.sizes[2:] != (nq, nk):
            wanted = f"({nq}, {nk}), the queries and keys of {type(module).__name__}"
            raise ShapeError(message("attention mask", f"one of {mask.sizes[2:]}", wanted, _OTHER))
        pattern, q_offset = mask.pattern, mask.q_offset
        if own is not None:
            pattern, q_offset = _with(mask, own), q_offset if mask.row is None else mask.row
    if position_bias is not None:
        terms.append(_bias(position_bias, query, key))
    sink_logits = s_aux if sinks is None else sinks
    if paged is not None:
        # a layer without a mask has all that came before, or nothing did
        begins = paged.seen - nq if attention_mask is not None or nq == 1 else 0
        if isinstance(attention_mask, Tensor) or position_bias is not None or begins != paged.seen - nq:
            got = "a mask or bias of numbers, or none for tokens that came before"
            remedy = "Pass past_key_values=DynamicCache()."
            raise UnsupportedError(message("past_key_values", got, "a mask (B, tokens) with keys in pages", remedy))
        out = paged_attention(query, paged.pages, pattern, scale=scaling, terms=terms, sink_logits=sink_logits)
        return out.transpose(1, 2).contiguous(), None
    out = attention(
        query,
        key,
        value,
        pattern,
        scale=scaling,
        q_offset=q_offset,
        terms=terms,
        sink_logits=sink_logits,
        dropout=dropout,
        context=None if mask is None else mask.context,
    )
    return out.transpose(1, 2).contiguous(), None


def _unmade(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: PatternMask | Tensor | None,
    is_causal: bool | None,
    own: Pattern | None,
    terms: list[Term],
) -> tuple[Pattern, int | Tensor]:
    """The pattern of a call without a mask of :func:`pattern_mask`; a mask of numbers becomes a term."""
    nq, nk = query.shape[2], key.shape[2]
    if isinstance(mask, Tensor):
        if own is not None:
            raise UnsupportedError(
                message("attention mask", shown(mask), "none, or (B, tokens), with a pattern", _OTHER)
            )
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        terms.append(_bias(mask, query, key))
        return Full(), 0
    if mask is not None:
        raise UnsupportedError(message("attention mask", shown(mask), "a mask of 4 dimensions", _OTHER))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # as in the library: one query is the last one
    pattern: Pattern = Causal() if nq > 1 and causal else Full()
    return (pattern if own is None else pattern & own), 0 if nq > 1 else nk - 1


def _say_unseen_packing(module: nn.Module, mask: PatternMask, positions: Tensor) -> None:
    """Warn once where positions restart and the mask was made without them: sequences then attend each other."""
    kind = type(module).__name__
    if kind in _WARNED or positions.ndim != 2 or positions.shape[1] != mask.sizes[3]:
        return
    # once for all layers
    mask.positions_seen = True
    if bool((positions.diff(dim=-1) != 1).any()):
        _WARNED.add(kind)
        _log.warning(
            message(
                "position_ids",
                f"positions that restart, of which the mask of {kind} was told nothing",
                "a model that gives them to the library's masks, without attention_mask and cache",
                "Packed sequences attend each other here, as with every implementation; context_parallel(model), "
                "which one process may use too, keeps them apart.",
            )
        )


def _with(mask: PatternMask, own: Pattern) -> Pattern:
    if mask.k_offset:
        got = f"a cache that has dropped its first {mask.k_offset} keys"
        raise UnsupportedError(
            message("pattern", got, "one that keeps all keys", "Pass past_key_values=DynamicCache().")
        )
    return mask.pattern & (own if mask.rows is None else own.within(mask.rows))


def _bias(table: Tensor, query: Tensor, key: Tensor) -> Bias:
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if table.ndim != 4 or any(side not in (1, size) for side, size in zip(table.shape, sizes, strict=True)):
        wanted = f"one that broadcasts to {sizes}"
        raise ShapeError(message("attention mask or bias", shown(table), wanted, _OTHER))
    return Bias(table.expand(-1, -1, *sizes[2:]))


def register() -> None:
    """Register the name ``"ringweave"`` with transformers; importing this package does.

    Example:
        >>> from ringweave.integrations.transformers import register
        >>> register()
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, pattern_mask)


def set_pattern(model: nn.Module, pattern: Pattern | None, layers: Sequence[int] | None = None) -> list[str]:
    """Give a model's attention layers a pattern: what they attend is then what the model allows *and* the pattern.

    So no layer attends padding, another packed sequence or the future, whatever the pattern says. Where sequences are
    packed or padded on the left the pattern is counted from each one's own first token. It is of this process's model:
    ``save_pretrained`` does not write it, and another ``set_attn_implementation`` knows nothing of it.
    A pattern relates positions of one sequence: cross-attention keeps what the model allows.

    Args:
        model: A model of transformers, with the implementation ``"ringweave"``.
        pattern: The pattern; None: that of the model alone again.
        layers: The layers to set, by number (``layer_idx``); all of them by default.
    Returns:
        The names of the modules that were set.
    Raises:
        PatternError: What is no pattern, or a mixture.
        UnsupportedError: A model with another implementation, or none of whose modules are such layers.
    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from ringweave.integrations.transformers import patch
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = patch(LlamaForCausalLM(config))
        >>> set_pattern(model, rw.SlidingWindow(128) | rw.Sinks(4), layers=[1])
        ['model.layers.1.self_attn']
    """
    if pattern is not None and (not isinstance(pattern, Pattern) or not pattern.combinable):
        wanted = "a relation, such as SlidingWindow(1024) | Sinks(4)"
        raise PatternError(
            message("pattern", shown(pattern), wanted, "A mixture is no mask: use rw.longnet_attention.")
        )
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(number := getattr(module, "layer_idx", None), int) or not _attends(name, module):
            continue
        if layers is not None and number not in layers:
            continue
        if pattern is None:
            module.__dict__.pop(_ATTRIBUTE, None)
        else:
            require(module.config)
            setattr(module, _ATTRIBUTE, pattern)
        found.append(name)
    if not found:
        got = f"{type(model).__name__}, none of whose modules is an attention layer" + (
            "" if layers is None else f" numbered {list(layers)}"
        )
        raise UnsupportedError(message("model", got, "layers with a layer_idx", "Name layers that it has."))
    return found


def require(config: Any) -> None:
    """Raise UnsupportedError where a configuration names another implementation.

    Args:
        config: Of a model or a layer.
    """
    if config._attn_implementation != NAME:
        got = repr(config._attn_implementation)
        raise UnsupportedError(message("attn_implementation", got, repr(NAME), "Call patch(model) first."))


def _attends(name: str, module: nn.Module) -> bool:
    """Whether a module is a layer's attention of a sequence to itself."""
    # a block has a number too; its attention calls the interface
    if "Attention" not in type(module).__name__ or not hasattr(module, "config"):
        return False
    # BART's encoder_attn, T5's EncDecAttention, BERT's crossattention.self, and classes of that name
    words = (*name.lower().split(".")[-2:], type(module).__name__.lower())
    return not any("cross" in word or word.startswith(("encoder_attn", "encoder_decoder", "encdec")) for word in words)


def patch(model: M, pattern: Pattern | None = None, layers: Sequence[int] | None = None) -> M:
    """Let a model compute attention with ringweave; the same as ``attn_implementation="ringweave"`` when it is made.

    Args:
        model: A model of transformers.
        pattern: A pattern of one's own for its layers, as of :func:`set_pattern`.
        layers: Which ones.
    Returns:
        The model.
    Raises:
        UnsupportedError: The model does not call attention through the library's interface.
    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = patch(LlamaForCausalLM(config), rw.SlidingWindow(128) | rw.Sinks(4))
        >>> model(torch.arange(8)[None]).logits.shape
        torch.Size([1, 8, 64])
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise UnsupportedError(
            message("model", shown(model), "a PreTrainedModel", "Use ringweave.nn for other modules.")
        )
    if not model._can_set_attn_implementation():
        got = f"{type(model).__name__}, which does not call attention through the library's interface"
        raise UnsupportedError(message("model", got, "one that does", "Replace its attention with rw.attention."))
    model.set_attn_implementation(NAME)
    if pattern is not None:
        set_pattern(model, pattern, layers)
    return model
