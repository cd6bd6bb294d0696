"""A model's patterns as text in its config: ``save_pretrained`` writes them, and ``from_pretrained`` restores them.

The config attribute ``ringweave`` is a plain dict, which transformers reads and writes without ringweave:
``{"pattern": text}`` if all attention layers of the config have the same pattern, else ``{"layers": {number: text}}``.

At run time a layer's pattern is an attribute of its attention module. The config is read when a model is patched, or
when a layer without the attribute runs.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import PatternError, UnsupportedError, in_a_line, shown, warn_once
from ...patterns import Pattern, parse

NAME = "ringweave"
#: Attribute of a config that holds the texts of its layers' patterns.
RECORD = "ringweave"
#: Attribute of an attention module that holds its pattern, or None.
ATTRIBUTE = "_ringweave_pattern"
# attribute of an attention module that warns when it is saved with a pattern without text
_TELLS = "_ringweave_tells"

Record = dict[str, Any]


def self_attention(name: str, module: nn.Module) -> bool:
    """Whether a module is the self-attention of a layer."""
    # a decoder block has a layer_idx too, but only its attention module calls the interface
    if "Attention" not in type(module).__name__ or not hasattr(module, "config"):
        return False
    # cross-attention: BART's encoder_attn, T5's EncDecAttention, BERT's crossattention.self, and such class names
    words = (*name.lower().split(".")[-2:], type(module).__name__.lower())
    return not any("cross" in word or word.startswith(("encoder_attn", "encoder_decoder", "encdec")) for word in words)


def numbered(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Iterate over (name, module, layer number) of the modules with a layer number."""
    for name, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int):
            yield name, module, number


def require(config: Any) -> None:
    """Raise UnsupportedError if a config names another attention implementation.

    Args:
        config: Config of a model or a layer.
    """
    if config._attn_implementation != NAME:
        got = repr(config._attn_implementation)
        raise UnsupportedError("attn_implementation", got, repr(NAME), "Call patch(model) first.")


def text_of(pattern: Pattern | None) -> str | None:
    """Return the text that :func:`ringweave.patterns.parse` reads back as the pattern, or None if there is none."""
    if pattern is None:
        return None
    try:
        return pattern.spec if parse(pattern.spec) == pattern else None
    except PatternError:
        # its tensors and functions are not part of the text
        return None


# ---- reading ---------------------------------------------------------------------------------------------------------


def restore(model: nn.Module) -> None:
    """Give the layers that have no pattern attribute the pattern that their config names, or None."""
    known: dict[str, Pattern | None] = {}
    for name, module, number in numbered(model):
        record = getattr(getattr(module, "config", None), RECORD, None)
        if record is None or ATTRIBUTE in vars(module):
            continue
        pattern = None
        if self_attention(name, module) and (text := _text_in(record, number)) is not None:
            key = repr(text)
            if key not in known:
                known[key] = _parsed(text)
            pattern = known[key]
        setattr(module, ATTRIBUTE, pattern)


def first_use(module: nn.Module) -> Pattern | None:
    """Return the pattern that a layer's config names; restore the patterns of the whole model that is running.

    Raises:
        UnsupportedError: torch.compile traces a model before its patterns were restored, or no model calls the layer.
    """
    if hasattr(module, ATTRIBUTE) or not isinstance(getattr(module, "layer_idx", None), int):
        return getattr(module, ATTRIBUTE, None)
    model = None if torch.compiler.is_compiling() else _running(module)
    if model is None:
        got = "a pattern in the config of a model that torch.compile traces before ringweave has read it"
        if not torch.compiler.is_compiling():
            got = "a pattern in the config of a layer that is called outside of its model's forward"
        raise UnsupportedError("config.ringweave", got, "a patched model", "Call patch(model) first.")
    restore(model)
    pattern: Pattern | None = getattr(module, ATTRIBUTE, None)
    return pattern


def _running(module: nn.Module) -> nn.Module | None:
    """Return the largest model of transformers that contains a layer and has a forward that is running.

    A layer's name in the model tells cross-attention from self-attention, and a module of torch does not know its name.
    """
    found = None
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_name == "forward":
            model = frame.f_locals.get("self")
            if isinstance(model, PreTrainedModel) and any(each is module for each in model.modules()):
                found = model
        frame = frame.f_back
    return found


def _text_in(record: object, number: int) -> object:
    if not isinstance(record, dict):
        return record
    if "pattern" in record:
        return record["pattern"]
    layers = record.get("layers")
    return layers.get(str(number)) if isinstance(layers, dict) else record


def _parsed(text: object) -> Pattern | None:
    """Parse a text, or warn and return None."""
    try:
        pattern = parse(text)  # type: ignore[arg-type]
        if pattern.combinable:
            return pattern
        why = "a mixture"
    except PatternError as error:
        why = in_a_line(error)
    got = f"{shown(text)}, which this version does not read as a pattern of layers ({why})"
    remedy = "The model runs without it: upgrade ringweave, or call patch(model, pattern)."
    warn_once(f"unread {text}", "config.ringweave", got, "the text of a pattern", remedy)
    return None


# ---- writing ---------------------------------------------------------------------------------------------------------


def separate(model: nn.Module) -> dict[int, Any]:
    """Give a model its own copies of its configs, so that changes do not reach another model with the same ones.

    Returns:
        The copies by the ids of the originals.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, memo))
    return memo


def record(model: nn.Module) -> list[str]:
    """Write the patterns of a model's layers into its configs.

    Returns:
        The names of the layers that have a pattern which cannot be written.
    """
    top = vars(model).get("config")
    saved = {id(config) for config in _tree(top)}
    # by the config that save_pretrained writes: the configs with its layers, and each layer number's patterns
    configs: dict[int, dict[int, Any]] = {}
    patterns: dict[int, dict[int, list[tuple[str, Pattern | None]]]] = {}
    for name, module, number in numbered(model):
        if not self_attention(name, module):
            continue
        # T5's encoder and decoder have copies of the config, which are not saved
        home = module.config if id(module.config) in saved or top is None else top
        configs.setdefault(id(home), {id(home): home})[id(module.config)] = module.config
        each = name, vars(module).get(ATTRIBUTE)
        patterns.setdefault(id(home), {}).setdefault(number, []).append(each)
    unsaved: list[str] = []
    changed: dict[int, Record | None] = {}
    for home, layers in patterns.items():
        texts: dict[str, str] = {}
        for number, members in layers.items():
            found = {text_of(pattern) for _, pattern in members}
            text = found.pop() if len(found) == 1 else None
            if text is None:
                unsaved += [name for name, pattern in members if pattern is not None]
            else:
                texts[str(number)] = text
        written: Record | None = None
        if texts:
            alike = len(texts) == len(layers) and len(set(texts.values())) == 1
            written = {"pattern": next(iter(texts.values()))} if alike else {"layers": texts}
        for key, config in configs[home].items():
            if getattr(config, RECORD, None) != written:
                changed[key] = written
    if changed:
        copies = separate(model)
        for key, value in changed.items():
            if value is None:
                vars(copies[key]).pop(RECORD)
            else:
                setattr(copies[key], RECORD, copy.deepcopy(value))
    return unsaved


def tell_when_saved(module: nn.Module) -> None:
    """Let a layer warn once if its weights are saved while its pattern has no text, which a config could hold.

    Such patterns, of each batch's documents or of functions, are data of a call, so setting one is no mistake.

    Args:
        module: The attention module of the layer.
    """
    if _TELLS not in vars(module):
        setattr(module, _TELLS, True)
        module.register_state_dict_pre_hook(_on_saving)


def _on_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    pattern: Pattern | None = vars(module).get(ATTRIBUTE)
    if pattern is not None and text_of(pattern) is None:
        wanted = "a pattern of numbers, which a config can hold as text"
        remedy = "save_pretrained does not save it: call patch(model, pattern) again after from_pretrained."
        warn_once(f"unsaved {type(module).__name__}", "pattern", str(pattern), wanted, remedy)


def _tree(config: object) -> Iterator[Any]:
    """Iterate over a config and the configs of its parts."""
    if isinstance(config, PreTrainedConfig):
        yield config
        for name in config.sub_configs:
            yield from _tree(getattr(config, name, None))
