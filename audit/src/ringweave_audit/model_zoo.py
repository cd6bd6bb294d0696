"""Targets and cases of ``ringweave audit``: build small models, and call them padded, packed or with a cache."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringweave.errors import UnsupportedError

from .counts import Counts
from .layers import ModelAudit, model

IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "ringweave")
#: Sizes of the small model, by the configuration's field names; fields that a configuration lacks are skipped.
_SMALL = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "intermediate_size": 64, "d_ff": 64, "ffn_dim": 64, "head_dim": 16,
    "d_kv": 16, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 128, "attention_chunk_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 32, "image_size": 32,
    "patch_size": 8, "embed_dim": 32, "num_mel_bins": 16, "vocab_size_per_layer_input": 128, "embedding_size": 64,
    "hidden_size_per_layer_input": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "num_experts_per_tok": 2, "decoder_start_token_id": 1,
    "max_source_positions": 12,
}  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
_WINDOW = 8
_ID = re.compile(r"\w[\w.-]*/[\w.-]+").fullmatch
# most parameters of a model: a configuration from a file may set sizes that `shrink` does not know
_NUMBERS = 1 << 28
# errors of building or calling a user's model; they become results instead of ending the audit
_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError, OSError)


@dataclass(frozen=True)
class Target:
    """A model to audit.

    Attributes:
        name: Name given by the user.
        build: Function that builds the model with an implementation of attention.
        inputs: Keyword arguments of the model; None to create them from its configuration.
    """

    name: str
    build: Callable[[str | None], nn.Module]
    inputs: Mapping[str, Any] | None = None


def target(name: str, layers: int = 6, *, trust: bool = False) -> Target:
    """Find the target with a name.

    Args:
        name: A transformers model type ("mistral"), a folder or file with a configuration, a model id (with a "/";
            its configuration is downloaded if it is not cached), ``module:function`` that returns a module, or a file
            with a module saved by ``torch.save``.
        layers: Maximum number of layers of the small model.
        trust: Whether code from files may run: a saved module is a pickle, which can run any code when it is loaded,
            and a configuration may name classes in files.
    Returns:
        The target; the model is not built yet.
    Raises:
        UnsupportedError: The target does not exist, or needs ``trust``.
    """
    if ":" in name and not Path(name).exists():
        module, _, function = name.partition(":")
        try:
            made = getattr(importlib.import_module(module), function)
        except _ERRORS as error:
            raise _unknown(name, _said(error)) from None
        return Target(name, lambda implementation: _made(made, implementation))
    if name.endswith((".pt", ".pth")):
        if not Path(name).is_file():
            raise _unknown(name, "There is no such file")
        if not trust:
            got, wanted = f"{name!r}, a pickle, which may run any code when it is loaded", "your consent"
            raise UnsupportedError("target", got, wanted, "Pass --trust (trust=True) if you know its author.")
        return Target(name, lambda _: _loaded(name))
    transformers = library()
    types = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    here = name in types or Path(name).exists()
    # use the network only for an id (owner/name); for other names, look in the download cache only
    local = here or _ID(name) is None
    try:
        config = types[name]() if name in types else transformers.AutoConfig.from_pretrained(
            name, local_files_only=local, trust_remote_code=trust
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001  (of a file that may hold anything)
        why = _said(error)
        if "trust_remote_code" in str(error):
            why += " Pass --trust (trust=True) if you know its author"
        elif local and not here:
            close = " or ".join(difflib.get_close_matches(name, list(types.keys()), 3))
            why = f"{f'Did you mean {close}? ' if close else ''}An id to download is owner/name"
        raise _unknown(name, why) from None
    return Target(name, lambda implementation: small_model(config, implementation, layers, trust=trust))


def _loaded(name: str) -> nn.Module:
    """Load a saved module, which the user has declared trusted."""
    try:
        found = torch.load(name, weights_only=False, map_location="cpu")
    except Exception as error:  # noqa: BLE001  (of a pickle)
        raise _unknown(name, f"It could not be loaded: {_said(error)}") from None
    if not isinstance(found, nn.Module):
        got = f"{name!r}, which holds {type(found).__name__}"
        raise UnsupportedError("target", got, "a whole module", "Save the model, not its state_dict().")
    return found


def _unknown(name: str, why: str) -> UnsupportedError:
    wanted = "a transformers model type, configuration or id, module:function, or a saved module"
    return UnsupportedError("target", repr(name), wanted, f"{why}.")


def library() -> Any:
    """Import transformers, which is an extra.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise UnsupportedError(
            "transformers", "not installed", "transformers, to build its models", "pip install transformers."
        ) from None


def _made(function: Callable[..., Any], implementation: str | None) -> nn.Module:
    takes = "implementation" in inspect.signature(function).parameters
    found = function(implementation=implementation) if takes else function()
    if not isinstance(found, nn.Module):
        got = type(found).__name__
        raise UnsupportedError("target", got, "a function that returns a torch.nn.Module", "Return the model.")
    return found


def shrink(config: Any, layers: int = 6) -> Any:
    """Reduce the sizes of a configuration; keep its kinds of layers, sharing of key heads, and use of windows."""
    for name, value in _SMALL.items():
        if isinstance(getattr(config, name, None), int) and not isinstance(getattr(config, name), bool):
            _set(config, name, value)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int):
            shared = getattr(config, "num_key_value_heads", None)
            _set(config, name, 4)
            if isinstance(shared, int):
                _set(config, "num_key_value_heads", 4 if shared == heads else 1 if shared == 1 else 2)
    for name in _LAYERS:
        if isinstance(getattr(config, name, None), int):
            _set(config, name, min(getattr(config, name), layers))
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if kinds:
            _set(config, name, kinds[:layers])
    for name in ("sliding_window", "local_attention"):
        if getattr(config, name, None):
            _set(config, name, _WINDOW)
    if getattr(config, "depths", None):
        _set(config, "depths", [2, 2])
        _set(config, "num_heads", [2, 4])
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            _set(config, name, 0 if name == "pad_token_id" else 1)
    for part in ("text_config", "vision_config", "audio_config", "encoder", "decoder"):
        inner = getattr(config, part, None)
        if inner is not None and hasattr(inner, "model_type"):
            shrink(inner, layers)
    return config


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, TypeError, ValueError):
        # some fields are computed from others and cannot be set
        return


def small_model(config: Any, implementation: str | None, layers: int = 6, *, trust: bool = False) -> nn.Module:
    """Build a small model with random weights."""
    transformers = library()
    if implementation == "ringweave":
        try:
            importlib.import_module("ringweave.integrations.transformers")
        except ModuleNotFoundError:
            wanted = "ringweave.integrations.transformers"
            raise UnsupportedError("implementation", repr(implementation), wanted, "Install it.") from None
    config = shrink(type(config).from_dict(config.to_dict()), layers)
    options = {} if implementation is None else {"attn_implementation": implementation}
    for kind in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        auto = getattr(transformers, kind)
        if type(config) in auto._model_mapping:
            make = functools.partial(auto.from_config, config, trust_remote_code=trust, **options)
            _refuse_large(make)
            torch.manual_seed(0)
            built: nn.Module = make()
            return built.eval()
    raise _unknown(config.model_type, "transformers has no model for this configuration")


def _refuse_large(build: Callable[[], nn.Module]) -> None:
    """Raise for a model that is too large, before allocating its memory."""
    try:
        with torch.device("meta"):
            numbers = sum(x.numel() for x in build().state_dict().values())
    except _ERRORS:
        # some models cannot be built on the meta device
        return
    if numbers > _NUMBERS:
        raise UnsupportedError(
            "target", f"{numbers:,} parameters", f"at most {_NUMBERS:,}", "Reduce its configuration."
        )


# ---- cases ----------------------------------------------------------------------------------------------------


class _NotTaken(Exception):  # noqa: N818
    """The model does not support a case; the text says why."""


#: Names of the argument that takes a cache: that of transformers from 5.24 on, and the older one.
_CACHES = ("cache", "past_key_values")


@dataclass(frozen=True)
class _Shape:
    """A model, the number of tokens, and its inputs if given; derives the model's configuration and abilities."""

    module: nn.Module
    tokens: int
    inputs: Mapping[str, Any] | None

    @property
    def config(self) -> Any:
        return getattr(self.module, "config", None)

    @property
    def takes(self) -> set[str]:
        return set(inspect.signature(self.module.forward).parameters)

    def ids(self) -> dict[str, Any]:
        if self.inputs is not None:
            return dict(self.inputs)
        generator = torch.Generator("cpu").manual_seed(0)
        if "input_ids" not in self.takes and "pixel_values" in self.takes:
            side = self.config.image_size
            sides = (side, side) if isinstance(side, int) else tuple(side)
            pixels = torch.randn(2, getattr(self.config, "num_channels", 3), *sides, generator=generator, device="cpu")
            return {"pixel_values": pixels}
        if "input_ids" not in self.takes:
            raise UnsupportedError(
                "target", "a model without input_ids", "a model that takes token ids or pixels", "Call audit.model."
            )
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        ids = torch.randint(3, getattr(text, "vocab_size", 128), (2, self.tokens), generator=generator, device="cpu")
        found: dict[str, Any] = {"input_ids": ids}
        if getattr(self.config, "is_encoder_decoder", False):
            found["decoder_input_ids"] = ids[:, : self.tokens // 2]
        return found

    def cache(self) -> str:
        """Return the name of the model's argument for a cache; raise _NotTaken if it does not generate with one."""
        modules = list(self.module.modules())
        causal = any(getattr(module, "is_causal", False) or getattr(module, "is_decoder", False) for module in modules)
        if not causal or getattr(self.config, "is_encoder_decoder", False):
            raise _NotTaken("the model is not a causal decoder")
        if "input_ids" not in (self.takes if self.inputs is None else self.inputs):
            raise _NotTaken("the model takes no input_ids")
        name = next((name for name in _CACHES if name in self.takes), None)
        if name is None:
            raise _NotTaken(f"the model takes no {' or '.join(_CACHES)}")
        return name

    def padded(self, left: bool) -> dict[str, Any]:
        given = self.ids()
        if "attention_mask" not in self.takes or "input_ids" not in given:
            raise _NotTaken("the model takes no input_ids with an attention_mask")
        there = torch.ones_like(given["input_ids"])
        some = there.shape[1] // 3
        there[-1, slice(None, some) if left else slice(-some, None)] = 0
        return given | {"attention_mask": there}


def _plain(shape: _Shape) -> ModelAudit:
    return model(shape.module, shape.ids())


def _left(shape: _Shape) -> ModelAudit:
    return model(shape.module, shape.padded(left=True))


def _right(shape: _Shape) -> ModelAudit:
    return model(shape.module, shape.padded(left=False))


def _packed(shape: _Shape) -> ModelAudit:
    shape.cache()
    if "position_ids" not in shape.takes:
        raise _NotTaken("the model takes no position_ids")
    given = shape.ids()
    tokens = given["input_ids"].shape[1]
    places = torch.arange(tokens, device="cpu")
    places = torch.where(places < tokens // 3, places, places - tokens // 3).expand_as(given["input_ids"])
    return model(shape.module, given | {"position_ids": places, "use_cache": False})


def _cached(shape: _Shape, static: bool = False) -> ModelAudit:
    name = shape.cache()
    transformers = library()
    config = shape.config.get_text_config()
    ids, last = shape.ids()["input_ids"], 3
    tokens = ids.shape[1]
    if static:
        cache = transformers.StaticCache(config=config, max_cache_len=tokens + 7)
    else:
        cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        shape.module(input_ids=ids[:, :-last], use_cache=True, **{name: cache})
    step = {"input_ids": ids[:, -last:], name: cache, "use_cache": True}
    return model(shape.module, step, q_offset=tokens - last)


def _static(shape: _Shape) -> ModelAudit:
    return _cached(shape, static=True)


CASES: dict[str, Callable[[_Shape], ModelAudit]] = {
    "unpadded": _plain, "left": _left, "right": _right, "packed": _packed, "cached": _cached, "static": _static,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Result:
    """The result of one case with one implementation.

    Attributes:
        implementation: Implementation of attention; "" if the model does not offer a choice.
        case: Name of the case.
        audit: The audit, or None if the case could not run.
        reason: Why the case did not run: the model does not support it, or an error.
        failed: Whether an error occurred.
    """

    implementation: str
    case: str
    audit: ModelAudit | None
    reason: str = ""
    failed: bool = False

    @property
    def agrees(self) -> bool | None:
        """Whether the audit agrees; None if the case was not examined."""
        return None if self.audit is None else self.audit.agrees

    def as_dict(self) -> dict[str, Any]:
        """Return the result, with the counts of its calls, as values that can be written as JSON."""
        layers = [] if self.audit is None else [layer.as_dict() for layer in self.audit.layers]
        bypassed = None if self.audit is None else self.audit.bypassed
        counts = (Counts(0, 0, 0) if self.audit is None else self.audit.counts).as_dict()
        return {"implementation": self.implementation, "case": self.case, "reason": self.reason} | counts | {
            "agrees": self.agrees, "bypassed": bypassed, "layers": layers,
        }  # fmt: skip


def counts(results: Iterable[Result]) -> Counts:
    """Count the results that agree, differ and were not examined."""
    return Counts.of(result.agrees for result in results)


def run(target: Target, implementations: tuple[str, ...], cases: tuple[str, ...], tokens: int = 24) -> Iterator[Result]:
    """Yield a result for every implementation and case; unsupported cases and errors are results too.

    Compiled parts run eagerly: the masks are the same, and each probe would be compiled again.
    """
    for implementation in implementations or ("",):
        try:
            built = target.build(implementation or None)
        except _ERRORS as error:
            yield Result(implementation, "build", None, _said(error), failed=True)
            continue
        for case in cases:
            try:
                with torch.compiler.set_stance("force_eager"):
                    audit = CASES[case](_Shape(built, tokens, target.inputs))
                yield Result(implementation, case, audit)
            except _NotTaken as why:
                yield Result(implementation, case, None, str(why))
            except _ERRORS as error:
                yield Result(implementation, case, None, _said(error), failed=True)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
