"""Which models of transformers compute the same with ringweave: a table over every model_type that uses its interface.

    python lab/scripts/huggingface_models.py                  # all, into huggingface-models.md, or --out FILE
    python lab/scripts/huggingface_models.py llama gemma3     # these, on the terminal
    python lab/scripts/huggingface_models.py --log tried.tsv  # resume from the file, and append to it

Each gets a tiny configuration with random weights, and a batch of text, images or sound; text is also padded on the
left. The outputs where there is no padding, and all gradients, are compared with the model's own sdpa, or with eager
if it has none. A decoder is then compiled to one graph, with padding.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import math
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

import ringweave.integrations.transformers as integration

#: of whatever a configuration has
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 6, "attention_chunk_size": 6, "d_model": 32, "d_kv": 8, "d_ff": 48,
    "num_layers": 2, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_dim": 48, "n_embd": 32,
    "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48, "embedding_size": 32, "hidden_dim": 48, "dim": 32,
    "n_layers": 2, "n_heads": 4, "num_local_experts": 2, "n_routed_experts": 4, "num_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "local_attention": 6, "query_pre_attn_scalar": 8, "type_vocab_size": 2, "max_window_layers": 1,
    "decoder_start_token_id": 0, "forced_eos_token_id": None, "hidden_size_per_layer_input": 8, "global_head_dim": 8,
    "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "d_inner": 64, "word_embed_proj_dim": 32, "max_target_positions": 128, "max_source_positions": 128,
    "rotary_dim": 4, "num_global_key_value_heads": 2, "layer_types": None, "attention_bias": False,
    # images and sound
    "image_size": 32, "patch_size": 8, "num_frames": 4, "tubelet_size": 2, "depth": 2, "num_mel_bins": 16,
    "projection_dim": 32, "window_size": 4, "conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8],
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "out_hidden_size": 32,
    # sizes that must match the width
    "mamba_n_heads": 8, "mamba_d_head": 8, "text_hidden_size": 32, "audio_hidden_size": 32, "condition_dim": 32,
    "adapter_input_size": 32, "num_windows": 4,
}  # fmt: skip
#: The options of SMALL that count layers, tokens or experts.
DEPTHS = (
    "num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers", "num_decoder_layers",
    "num_encoder_layers", "depth", "layer_types", "max_window_layers", "first_k_dense_replace",
)  # fmt: skip
COUNTS = (
    *DEPTHS, "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id",
    "forced_eos_token_id", "sliding_window", "attention_chunk_size", "local_attention", "num_local_experts",
    "n_routed_experts", "num_experts", "num_experts_per_tok", "n_group", "topk_group", "vocab_size_per_layer_input",
)  # fmt: skip
_SECONDS = 60
_BOUND = 1e-4
IDS = torch.randint(3, 60, (2, 17), generator=torch.Generator().manual_seed(0))
Operands = dict[str, Tensor]


class TooLongError(Exception):
    """A model took longer than the limit."""


class UntriedError(Exception):
    """A model cannot be constructed or fed here, so ringweave was not tried in it."""


def users() -> Iterator[str]:
    """Yield the model types with code that calls attention through the interface."""
    folder = Path(transformers.__file__).parent / "models"
    for name in sorted(transformers.CONFIG_MAPPING):
        kind = transformers.CONFIG_MAPPING[name]
        files = list((folder / kind.__module__.split(".")[-2]).glob("modeling_*.py"))
        if any("ALL_ATTENTION_FUNCTIONS" in file.read_text("utf-8") for file in files):
            yield name


@dataclass(frozen=True)
class Tiny:
    """A model class, and the sizes that keep their usual values where not all can be small.

    Attributes:
        kind: The class.
        own: Names of SMALL.
    """

    kind: Any
    own: tuple[str, ...] = ()

    def config(self) -> Any:
        """Return a tiny configuration."""
        return self.kind.config_class(**sizes(self.kind.config_class, self.own))

    def made(self, attention: str, gain: float = 4.0) -> Any:
        """Return the model, with equal weights for every implementation, so large that attention changes the output."""
        config = self.config()
        config._attn_implementation = attention
        torch.manual_seed(0)
        np.random.seed(0)
        model = self.kind(config).train()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.mul_(gain)
        return model


def tinies(kind: Any) -> Iterator[Tiny]:
    """Yield variants: every size small, all but the layers, or the layers alone; the first that works is used."""
    yield Tiny(kind)
    yield Tiny(kind, DEPTHS)
    yield Tiny(kind, tuple(name for name in SMALL if name not in COUNTS))


def sizes(kind: Any, own: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return small sizes for the arguments that a configuration has, and for its parts."""
    usual = kind()
    words = usual.to_dict()
    # keep its own value where it has one for each stage
    staged = {name for name, value in words.items() if isinstance(value, (list, tuple))}
    small = {name: x for name, x in SMALL.items() if name in words and name not in own}
    found = {name: x for name, x in small.items() if name not in staged or isinstance(x, list)}
    rope = words.get("rope_parameters") or {}
    if (
        rope
        and "head_dim" not in own
        and ("mrope_section" in rope or any(word in kind.model_type for word in ("_vl", "omni", "glm4v", "ocr")))
    ):
        found["rope_parameters"] = rope | {"mrope_section": [2, 1, 1]}
    if isinstance(types := words.get("layer_types"), (list, tuple)) and "layer_types" not in own:
        # one layer of each kind
        found["layer_types"] = list(dict.fromkeys(types))[:3]
        found["num_hidden_layers"] = len(found["layer_types"])
    found |= {name: 0.0 for name, value in words.items() if isinstance(value, float) and "drop" in name}
    if "kv_lora_rank" in words and "kv_lora_rank" not in own:
        # heads make their own keys from one of low rank; only a part of each key is rotated
        found |= {"num_key_value_heads": 4, "head_dim": found.get("qk_rope_head_dim", 8)}
    for name in kind.sub_configs:
        if (part := getattr(usual, name, None)) is not None:
            found[name] = sizes(type(part), own) | {"model_type": part.model_type}
    return found


def class_of(name: str) -> Any:
    """Return the class to try: one for text, else the bare model, else any class with this configuration."""
    for table in ("FOR_CAUSAL_LM_", "FOR_SEQ_TO_SEQ_CAUSAL_LM_", "FOR_MASKED_LM_", "FOR_IMAGE_TEXT_TO_TEXT_", ""):
        found = getattr(modeling_auto, f"MODEL_{table}MAPPING_NAMES").get(name)
        if found is not None:
            kind = getattr(transformers, found if isinstance(found, str) else found[0], None)
            if kind is None:
                raise UntriedError("its class is not there")
            return kind
    config = transformers.CONFIG_MAPPING[name]
    try:
        module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        raise UntriedError("has no file of its own") from None
    for kind in vars(module).values():
        own = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and "forward" in vars(kind)
        if own and kind.__module__ == module.__name__ and kind.config_class is config:
            return kind
    raise UntriedError("no model takes this configuration alone")


def small(tiny: Tiny, limit: int = 130_000_000) -> Any:
    """Return the tiny configuration of a class that calls the interface, with at most a limit of weights."""
    try:
        config = tiny.config()
        with torch.device("meta"):
            weights = sum(weight.numel() for weight in tiny.kind(config).parameters())
    except Exception as error:
        raise UntriedError(f"no tiny configuration: {said(error)}") from error
    if weights > limit:
        raise UntriedError(f"{weights:,} weights in the smallest configuration that was found")
    if not tiny.kind._can_set_attn_implementation():
        raise UntriedError("does not call the interface in this class")
    return config


def feeds(kind: Any, config: Any) -> Iterator[Operands]:
    """Yield batches to try, the smaller ones first: the first that the model takes with its own attention is used."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    takes = inspect.signature(kind.forward).parameters
    text: Operands = {name: IDS for name in ("input_ids", "decoder_input_ids") if name in takes}
    main = getattr(kind, "main_input_name", None)
    if main != "input_ids" and "input_ids" in text:
        del text["input_ids"]
    if "input_ids" in text:
        yield text
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]

    def said(name: str, default: int) -> int:
        value = next((x for x in (getattr(part, name, None) for part in parts) if x is not None), default)
        return value if isinstance(value, int) else value[0]

    side, channels, bins = said("image_size", 32), said("num_channels", 3), said("num_mel_bins", 16)
    frames = 2 * said("max_source_positions", 32)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "pixel_values": [(2, channels, side, side), (2, said("num_frames", 4), channels, side, side)],
        "pixel_values_videos": [(2, said("num_frames", 4), channels, side, side)],
        "input_features": [(2, bins, frames), (2, frames, bins), (2, 1, frames, bins)],
        "input_values": [(2, 1600), (2, 1, 1600), (2, said("max_length", 64), bins)],
        "past_values": [(2, said("context_length", 32), said("num_input_channels", 1)), (2, 64)],
        "hidden_states": [(2, 17, said("hidden_size", 32))],
        "inputs_embeds": [(2, 17, said("hidden_size", 32))],
    }
    if "grid_thw" in takes:
        # patches of two images, side by side
        grid = torch.tensor([[1, 4, 4]] * 2)
        width = said("in_channels", channels) * said("temporal_patch_size", 1) * said("patch_size", 8) ** 2
        patches = next((name for name in ("hidden_states", "pixel_values") if name in takes), main)
        yield {patches: random(32, width), "grid_thw": grid}
    there = [name for name in shapes if name in takes and (name == main or main in (None, "input_ids"))]
    for name in there:
        for shape in shapes[name]:
            yield {**text, name: random(*shape)}


def tensors(out: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's output that require gradients."""
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() and out.requires_grad else []
    if isinstance(out, dict):
        out = list(out.values())
    return [x for each in out for x in tensors(each)] if isinstance(out, (list, tuple)) else []


def learned(
    tiny: Tiny, attention: str, inputs: Operands, dtype: torch.dtype = torch.float32, gain: float = 4.0
) -> list[Tensor | None]:
    """Return the outputs where there is no padding, and the gradients."""
    model = tiny.made(attention, gain).to(dtype)
    outs = tensors(model(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}))
    if not outs:
        raise UntriedError("gives nothing to differentiate")
    mask = inputs.get("attention_mask")
    if mask is not None:
        # some models append a token to the text
        masks = {mask.shape[1] + more: torch.nn.functional.pad(mask, (0, more), value=1) for more in (0, 1)}
        long = [x for x in outs if x.ndim > 1 and x.shape[0] == mask.shape[0] and x.shape[1] in masks]
        outs = [x * masks[x.shape[1]].view(*x.shape[:2], *[1] * (x.ndim - 2)) for x in long] or outs
    sum(x.square().mean() for x in outs).backward()
    return [*(x.detach() for x in outs), *(weight.grad for weight in model.parameters())]


def difference(mine: list[Tensor | None], theirs: list[Tensor | None]) -> float:
    """Return the largest difference relative to the tensor or to 1; infinite for NaN and for a missing tensor."""
    worst = 0.0
    for a, b in zip(mine, theirs, strict=True):
        if b is None or b.numel() == 0:
            continue
        apart = math.inf if a is None else float((a - b).abs().max() / b.abs().max().clamp(min=1.0))
        # max() with a NaN returns its first argument
        worst = math.inf if math.isnan(apart) else max(worst, apart)
    return worst


def said(error: Exception) -> str:
    """Return the text of an error for a cell of the table."""
    text = (str(error).strip().splitlines() or [""])[0].translate(str.maketrans("|[]", "/()"))[:100]
    return f"{type(error).__name__}: {text}"


def peer_of(kind: Any) -> str:
    """Return the implementation to compare with: sdpa, or eager if the model lacks sdpa or sdpa drops its soft cap."""
    capped = "softcap" in inspect.getsource(sys.modules[kind.__module__])
    return "sdpa" if getattr(kind, "_supports_sdpa", False) and not capped else "eager"


def taken(tiny: Tiny, config: Any, peer: str) -> tuple[Operands, list[Tensor | None]]:
    """Return the first batch that a model takes with its own attention, and its results for it."""
    why = ""
    for inputs in feeds(tiny.kind, config):
        try:
            theirs = learned(tiny, peer, inputs)
        except (TooLongError, UntriedError):
            raise
        except Exception as error:  # noqa: BLE001  (of a model that was made too small in some way)
            why = why or f"{peer} fails on the tiny configuration: {said(error)}"
            continue
        if not all(bool(x.isfinite().all()) for x in theirs if x is not None):
            why = why or f"{peer} gives what is no number on the tiny configuration"
            continue
        return inputs, theirs
    raise UntriedError(why or "takes " + ", ".join(list(inspect.signature(tiny.kind.forward).parameters)[1:4]))


def padded(tiny: Tiny, peer: str, inputs: Operands) -> list[Tensor | None]:
    """Return the results of the model's own attention for a batch with padding."""
    try:
        return learned(tiny, peer, inputs)
    except TooLongError:
        raise
    except Exception as error:
        raise UntriedError(f"{peer} fails on padding: {said(error)}") from error


def one_graph(tiny: Tiny, inputs: Operands) -> str:
    """Return whether a padded forward compiles to one graph; if not, whether it does with the model's own attention."""
    found = {}
    for attention in (integration.NAME, peer_of(tiny.kind)):
        torch._dynamo.reset()
        model = tiny.made(attention).eval()
        try:
            with torch.no_grad():
                got = torch.compile(model, fullgraph=True, backend="eager")(**inputs, use_cache=False)[0]
                wanted = model(**inputs, use_cache=False)[0]
            close = torch.allclose(got, wanted, atol=1e-4)
            found[attention] = "one graph" if close else "one graph, WRONG"
        except TooLongError:
            raise
        except Exception as error:  # noqa: BLE001  (whatever cannot be traced)
            found[attention] = f"no one graph ({type(error).__name__})"
        if attention == integration.NAME and found[attention] == "one graph":
            return "one graph"
    own = found[peer_of(tiny.kind)] == "one graph"
    return found[integration.NAME] + ("" if own else ", nor with its own attention")


def tried(name: str) -> tuple[str, str]:
    """Return the outcome for a model type, and its details."""
    first: UntriedError | None = None
    for tiny in tinies(class_of(name)):
        try:
            return compared(name, tiny)
        except UntriedError as why:
            first = first or why
    assert first is not None
    raise first


def compared(name: str, tiny: Tiny) -> tuple[str, str]:
    """Return the outcome and details of one way to make the model small."""
    kind = tiny.kind
    config = small(tiny)
    peer = peer_of(kind)
    inputs, theirs = taken(tiny, config, peer)
    calls: list[int] = []
    own = integration.interface.attention
    integration.interface.attention = lambda *args, **kw: calls.append(1) or own(*args, **kw)
    try:
        worst = difference(learned(tiny, integration.NAME, inputs), theirs)
        if "input_ids" in inputs and "attention_mask" in inspect.signature(kind.forward).parameters:
            left = torch.ones_like(IDS)
            left[1, :5] = 0
            inputs |= {"attention_mask": left}
            theirs = padded(tiny, peer, inputs)
            worst = max(worst, difference(learned(tiny, integration.NAME, inputs), theirs))
    finally:
        integration.interface.attention = own
    if not calls:
        raise UntriedError("this class did not call attention")
    fed = " and ".join(each for each in inputs if each not in ("attention_mask", "decoder_input_ids"))
    more = f"{worst:.0e}, to {peer}, of {fed}"
    if worst > _BOUND:
        # where rounding is amplified, float64 decides
        exact = (learned(tiny, attention, inputs, torch.float64) for attention in (integration.NAME, peer))
        worst = difference(*exact)
        more = f"{worst:.0e} in float64, {more}"
    if worst > _BOUND and peer == "sdpa":
        # where the library's two implementations differ: its eager one, with weights that do not amplify
        mine, *own_two = (learned(tiny, each, inputs, gain=1.0) for each in (integration.NAME, "eager", peer))
        worst = difference(mine, own_two[0])
        more = f"{worst:.0e}, to eager, of {fed}; its sdpa is {difference(*own_two):.0e} from that"
    if worst <= _BOUND and name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "attention_mask" in inputs:
        more += f"; {one_graph(tiny, inputs)}"
    return ("equal" if worst <= _BOUND else "differs"), more


def outcome(name: str) -> tuple[str, str]:
    """Return the outcome and details, with errors as outcomes."""

    def late(number: int, frame: object) -> None:
        raise TooLongError(f"took more than {_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    try:
        return tried(name)
    except UntriedError as why:
        return "not tried", str(why)
    except TooLongError as why:
        return "not tried", str(why)
    except Exception as error:  # noqa: BLE001  (whatever a model raises is its line in the table)
        ours = "ringweave" in type(error).__module__ or "a mask that goes to attention as it is" in str(error)
        return ("refused" if ours else "failed"), said(error)
    finally:
        signal.alarm(0)


def page(rows: list[tuple[str, str, str]]) -> str:
    """Return the table."""
    counts = {
        kind: sum(row[1] == kind for row in rows) for kind in ("equal", "differs", "refused", "failed", "not tried")
    }
    counted = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    graphs = sum(row[2].endswith("; one graph") for row in rows)
    compiled = sum("one graph" in row[2] for row in rows)
    lines = [
        "# Hugging Face models that were tried",
        "",
        f"transformers {transformers.__version__}: {len(rows)} model types call attention through its interface.",
        f"{counted}.",
        "",
        "Each was given a tiny configuration with random weights; what comes out and all gradients are compared with",
        "its own sdpa, or eager: *equal* to 1e-4, in float64 where rounding is amplified. *Failed*: it runs with its",
        "own attention and not with ringweave. *Refused*: ringweave raises, and says why. *Not tried*: the script",
        "could not make or feed it, so nothing is known. A model of several parts is tried with what is named, which",
        "may be text alone.",
        "",
        f"Of {compiled} decoders, {graphs} compile in one graph with padding; of the others it is said whether they do",
        "with their own attention. `python lab/scripts/huggingface_models.py` makes this page.",
        "",
        "| model type | outcome | |",
        "|---|---|---|",
        *(f"| {name} | {kind} | {more} |" for name, kind, more in rows),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Try the models and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types; all by default")
    parser.add_argument("--log", type=Path, help="file of outcomes, a line each; those that it has are not tried again")
    parser.add_argument("--out", type=Path, default=Path("huggingface-models.md"), help="the table of all types")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    log = arguments.log
    known = [line.split("\t") for line in log.read_text("utf-8").splitlines()] if log and log.exists() else []
    done = {line[0]: (line[1], line[2]) for line in known}
    for name in arguments.names or users():
        rows.append((name, *(done[name] if name in done else outcome(name))))
        if name not in done:
            print(*rows[-1], sep="\t", flush=True)
            if log:
                with log.open("a", encoding="utf-8") as file:
                    print(*rows[-1], sep="\t", file=file)
    if not arguments.names:
        arguments.out.write_text(page(rows), "utf-8")


if __name__ == "__main__":
    main()
