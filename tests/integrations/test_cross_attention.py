"""Cross-attention over keys with padding between them equals the model's own attention, in every model type that has it.

``TRIED`` and ``UNTRIED`` name the classes of the installed library that call the attention interface and take a mask of an
encoder's tokens, or a text, its mask and a decoder's text: the first of each kind in a modeling file. A test compares
them with the library.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lab.tests.test_models_script import script
from torch import Tensor

import ringweave as rw
from ringweave.integrations.transformers import interface, set_pattern

KEYS = 20
QUERIES = {"shorter": 12, "longer": 30}
IDS = torch.randint(3, 60, (2, 30), generator=torch.Generator().manual_seed(3))
MASK = torch.ones(2, KEYS, dtype=torch.long)
MASK[0, 5:9] = MASK[1, :2] = MASK[1, 6] = MASK[1, 17:] = 0
# rounding; a wrong gap in the padding changes outputs by 1e-2 and more
BOUND = 1e-4
FOLDER = Path(transformers.__file__).parent / "models"

#: File of the library: its classes. "Decoder" and similar ones take an encoder's states, the others two texts.
TRIED = {
    "bart": ["BartDecoder", "BartModel"],
    "bert": ["BertModel"],
    "bert_generation": ["BertGenerationEncoder"],
    "bigbird_pegasus": ["BigBirdPegasusDecoder"],
    "blenderbot": ["BlenderbotDecoder", "BlenderbotModel"],
    "blenderbot_small": ["BlenderbotSmallDecoder", "BlenderbotSmallModel"],
    "blip_2": ["Blip2QFormerModel"],
    "bridgetower": ["BridgeTowerTextModel"],
    "camembert": ["CamembertModel"],
    "canary": ["CanaryDecoder"],
    "cohere_asr": ["CohereAsrDecoder"],
    "conditional_detr": ["ConditionalDetrDecoder"],
    "data2vec": ["Data2VecTextModel"],
    "decision_transformer": ["DecisionTransformerGPT2Model"],
    "detr": ["DetrDecoder"],
    "dia": ["DiaDecoder"],
    "electra": ["ElectraModel"],
    "encoder_decoder": ["EncoderDecoderModel"],
    "ernie": ["ErnieModel"],
    "florence2": ["Florence2Model"],
    "gpt2": ["GPT2Model"],
    "instructblip": ["InstructBlipQFormerModel"],
    "instructblipvideo": ["InstructBlipVideoQFormerModel"],
    "longt5": ["LongT5Stack", "LongT5Model"],
    "m2m_100": ["M2M100Decoder", "M2M100Model"],
    "marian": ["MarianDecoder", "MarianModel"],
    "maskformer": ["MaskFormerDetrDecoder"],
    "mbart": ["MBartDecoder", "MBartModel"],
    "moonshine": ["MoonshineDecoder"],
    "moonshine_streaming": ["MoonshineStreamingDecoder"],
    "mt5": ["MT5Stack", "MT5Model"],
    "musicgen": ["MusicgenDecoder"],
    "musicgen_melody": ["MusicgenMelodyDecoder"],
    "nllb_moe": ["NllbMoeDecoder", "NllbMoeModel"],
    "pegasus": ["PegasusDecoder", "PegasusModel"],
    "pegasus_x": ["PegasusXDecoder", "PegasusXModel"],
    "pix2struct": ["Pix2StructTextModel"],
    "plbart": ["PLBartDecoder", "PLBartModel"],
    "pop2piano": ["Pop2PianoStack", "Pop2PianoForConditionalGeneration"],
    "pp_formulanet": ["PPFormulaNetTextModel"],
    "roberta": ["RobertaModel"],
    "roberta_prelayernorm": ["RobertaPreLayerNormModel"],
    "roc_bert": ["RoCBertModel"],
    "seamless_m4t": ["SeamlessM4TDecoder", "SeamlessM4TForTextToText"],
    "seamless_m4t_v2": ["SeamlessM4Tv2Decoder", "SeamlessM4Tv2ForTextToText"],
    "speech_to_text": ["Speech2TextDecoder"],
    "switch_transformers": ["SwitchTransformersStack", "SwitchTransformersModel"],
    "t5": ["T5Stack", "T5Model"],
    "t5gemma": ["T5GemmaModel"],
    "time_series_transformer": ["TimeSeriesTransformerDecoder"],
    "udop": ["UdopStack", "UdopModel"],
    "umt5": ["UMT5Stack", "UMT5Model"],
    "xlm_roberta": ["XLMRobertaModel"],
    "xlm_roberta_xl": ["XLMRobertaXLModel"],
    "xmod": ["XmodModel"],
}
CASES = {kind: file for file, kinds in TRIED.items() for kind in kinds}

_PIXELS = "takes images or sound; its decoder of text is tried"
_DEFORMABLE = "its cross-attention samples values at points and does not call the interface"
#: The reasons not to try the other classes.
UNTRIED = {
    **dict.fromkeys(
        (
            "Blip2Model", "CanaryModel", "CohereAsrModel", "DiaModel", "InstructBlipModel", "InstructBlipVideoModel",
            "MoonshineModel", "MoonshineStreamingModel", "MusicgenForConditionalGeneration",
            "MusicgenMelodyForConditionalGeneration", "PPFormulaNetModel", "Pix2StructForConditionalGeneration",
            "Speech2TextModel",
        ),
        _PIXELS,
    ),
    **dict.fromkeys(
        (
            "DFineDecoder", "DeformableDetrDecoder", "Deimv2Decoder", "LwDetrDecoder", "PPDocLayoutV2Decoder",
            "PPDocLayoutV3Decoder", "PPDocLayoutV4Decoder", "RTDetrDecoder", "RTDetrV2Decoder", "RfDetrDecoder",
        ),
        _DEFORMABLE,
    ),
    "DiffusionGemmaModel": "its decoder attends a cache of the prompt and itself, without cross-attention",
    "EsmModel": "its own attention takes as many queries as keys alone",
    "GPTBigCodeModel": "takes a mask of three dimensions, which the library does not make",
    "Kosmos2TextTransformer": "its own attention fails on input_ids: it reads inputs_embeds that it was not given",
    "NemotronAsrStreamingForRNNT": "a transducer: its decoder attends nothing of the encoder",
    "ParakeetForRNNT": "a transducer: its decoder attends nothing of the encoder",
    "SeamlessM4TTextToUnitModel": "takes states in place of a text; the text-to-text class is tried",
    "T5Gemma2Decoder": "no small configuration of its own; the whole model is refused, see below",
    "T5GemmaDecoder": "takes the whole model's configuration; the whole model is tried",
    "WhisperModel": "masks no sound; see the tests of models",
}  # fmt: skip
#: Classes that compute with the values of their masks, which symbolic masks lack: the file, and the operation.
REFUSED = {
    "BigBirdPegasusModel": ("bigbird_pegasus", "torch.add"),
    "InformerDecoder": ("informer", "a use of .expand"),
    "T5Gemma2Model": ("t5gemma2", "torch.cat"),
}
_TEXT = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# sizes with other names than in other models
_SERIES = {
    "prediction_length": 30, "context_length": 30, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
#: Settings that a class needs besides.
CHANGED: dict[str, dict[str, Any]] = {
    "XmodModel": {"default_language": "en_XX"},
    "Pix2StructTextModel": {"initializer_range": 0.02},
    "MoonshineStreamingDecoder": {"num_key_value_heads": 4},
    "InstructBlipQFormerModel": {"cross_attention_frequency": 1},
    "InstructBlipVideoQFormerModel": {"cross_attention_frequency": 1},
}


def class_of(name: str) -> Any:
    """Return a class by its name."""
    file = "t5" if name.startswith("T5F") else CASES[name] if name in CASES else REFUSED[name][0]
    stem = next(
        path.stem for path in (FOLDER / file).glob("modeling_*.py") if f"class {name}(" in path.read_text("utf-8")
    )
    return getattr(importlib.import_module(f"transformers.models.{file}.{stem}"), name)


def configs(name: str, kind: Any) -> Iterator[Any]:
    """Yield configurations to try, the smallest first; each is new, since a model writes to its own."""
    if name == "EncoderDecoderModel":
        part = {
            **_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        }  # fmt: skip
        yield transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.BertConfig(**part), transformers.BertConfig(**part)
        )
    elif name in ("InformerDecoder", "TimeSeriesTransformerDecoder"):
        yield kind.config_class(**_SERIES)
    else:
        for tiny in script.tinies(kind):
            yield tiny.config()


def made(name: str, config: Any, attention: str) -> Any:
    """Return a tiny model, with equal weights for each implementation."""
    for key, value in CHANGED.get(name, {}).items():
        setattr(config, key, value)
    if takes_states(name):
        for key in ("is_decoder", "add_cross_attention"):
            if hasattr(config, key):
                setattr(config, key, True)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = class_of(name)(config).train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(2.0)
    return model


def takes_states(name: str) -> bool:
    """Return whether a class takes an encoder's states, not its text."""
    return "encoder_attention_mask" in inspect.signature(class_of(name).forward).parameters


def fed(name: str, model: Any, queries: int, mask: Tensor) -> dict[str, Any]:
    """Return a batch: a decoder's text, or its substitute, over an encoder's states or text."""
    takes, config = inspect.signature(model.forward).parameters, model.config
    generator = torch.Generator().manual_seed(7)
    ids = IDS[:, :queries]
    inputs: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    if not takes_states(name):
        inputs |= {"input_ids": IDS[:, :KEYS].flip(1), "attention_mask": mask, "decoder_input_ids": ids}
        return inputs | ({"bbox": torch.rand(2, KEYS, 4, generator=generator)} if "bbox" in takes else {})
    widths = (
        getattr(config, key, None) for key in ("encoder_hidden_size", "cross_hidden_size", "d_model", "embed_dim")
    )
    width = next((width for width in widths if width), None) or config.hidden_size
    inputs["encoder_hidden_states"] = torch.randn(2, KEYS, width, generator=generator)
    inputs["encoder_attention_mask"] = mask
    if "query_embeds" in takes:
        # learned queries over the images, before three tokens of text
        inputs["query_embeds"], ids = torch.randn(2, queries, config.hidden_size, generator=generator), ids[:, :3]
    for key, size in (("object_queries_position_embeddings", queries), ("spatial_position_embeddings", KEYS)):
        if key in takes:
            inputs[key] = torch.randn(2, size, width, generator=generator)
    if name == "DiaDecoder":
        inputs["input_ids"] = ids[..., None].repeat(1, 1, config.num_channels)
    elif "input_ids" in takes:
        # streams of sound, one after the other
        inputs["input_ids"] = ids.repeat(getattr(config, "num_codebooks", 1), 1)
    elif "inputs_embeds" in takes:
        inputs["inputs_embeds"] = torch.randn(2, queries, getattr(config, "feature_size", width), generator=generator)
    return inputs


def learned(
    name: str, attention: str, queries: int, mask: Tensor, change: Callable[[Any], Any] = lambda model: model
) -> list[Tensor | None]:
    """Return all outputs and gradients of the smallest model that can be constructed."""
    why: Exception | None = None
    for config in configs(name, class_of(name)):
        try:
            model = made(name, config, attention)
            outs = script.tensors(change(model)(**fed(name, model, queries, mask)))
        except Exception as error:
            if "goes to attention as it is" in str(error):
                raise
            # some models cannot be so small
            why = why or error
            continue
        sum(x.square().mean() for x in outs).backward()
        return [*(x.detach() for x in outs), *(weight.grad for weight in model.parameters())]
    assert why is not None
    raise why


def mask_of(name: str) -> Tensor:
    """Return the encoder's padding."""
    mask = MASK.clone()
    if name == "MusicgenMelodyDecoder":
        # it puts the encoder's states before its text, and queries before the first existing key would attend nothing
        mask[:, :2] = 1
    return mask


def found() -> Iterator[str]:
    """Yield the first class of either kind in each file that calls the interface."""
    for file in sorted(FOLDER.glob("*/modeling_*.py")):
        text = file.read_text("utf-8")
        if "ALL_ATTENTION_FUNCTIONS" not in text:
            continue
        kinds: dict[str, str] = {}
        for name, bases, body in re.findall(r"^class (\w+)\(([^)]*)\):(.*?)(?=^class |\Z)", text, re.M | re.S):
            forward = re.search(r"^    def forward\((.*?)^    \)", body, re.M | re.S)
            if "PreTrainedModel" not in bases or forward is None:
                continue
            takes = set(re.findall(r"^        (\w+)", forward[1], re.M))
            if {"encoder_hidden_states", "encoder_attention_mask"} <= takes:
                kinds.setdefault("states", name)
            elif {"attention_mask", "decoder_input_ids"} <= takes:
                kinds.setdefault("text", name)
        yield from kinds.values()


def test_every_class_is_tried_or_said_why_not() -> None:
    """Every class is in one of the tables; for a new release of the library, add the classes that this names."""
    known = {*CASES, *UNTRIED, *REFUSED}
    assert set(found()) - known == set()
    # two classes that are not the first in their files
    assert known - set(found()) == {"EncoderDecoderModel", "SeamlessM4TForTextToText"}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("name", CASES)
def test_cross_attention(name: str, queries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients are equal at every position, also for queries beyond the number of keys."""
    mask, number = mask_of(name), QUERIES[queries]
    wanted = learned(name, "eager", number, mask)
    # the mask changes the result
    assert script.difference(learned(name, "eager", number, torch.ones_like(mask)), wanted) > 10 * BOUND
    patterns: list[rw.Pattern] = []
    attend = interface.attention
    monkeypatch.setattr(interface, "attention", lambda *args, **kw: patterns.append(args[3]) or attend(*args, **kw))
    assert script.difference(learned(name, "ringweave", number, mask), wanted) <= BOUND
    # the mask arrived as a pattern
    assert any("Sinks(_" in pattern.spec for pattern in patterns)


@pytest.mark.parametrize("name", REFUSED)
def test_masks_with_values_are_refused(name: str) -> None:
    with pytest.raises((rw.UnsupportedError, AttributeError), match=re.escape(f"got {REFUSED[name][1]};")):
        learned(name, "ringweave", 12, MASK)


# compiling takes seconds; more queries than keys are the harder of both, which test_cross_attention tries without a compiler
@pytest.mark.parametrize("queries", [pytest.param("shorter", marks=pytest.mark.long), "longer"])
@pytest.mark.parametrize(
    "name", ["T5Model", *(pytest.param(name, marks=pytest.mark.long) for name in CASES if name != "T5Model")]
)
def test_compiled(name: str, queries: str) -> None:
    """Forward and backward compile to one graph wherever they do with the model's own attention."""
    number, mask = QUERIES[queries], mask_of(name)

    def compiled(model: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(model, fullgraph=True, backend="eager")

    try:
        found = learned(name, "ringweave", number, mask, compiled)
    except torch._dynamo.exc.Unsupported:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            learned(name, "eager", number, mask, compiled)
    else:
        assert script.difference(found, learned(name, "eager", number, mask)) <= BOUND


@pytest.mark.sampled(10)
# its encoder passes a mask of numbers, which is refused together with a user's pattern
@pytest.mark.parametrize("name", [name for name in CASES if name != "SwitchTransformersModel"])
def test_a_pattern_of_ones_own_leaves_cross_attention_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's window applies to self-attention only: on cross-attention, queries past its end would attend nothing."""
    window, calls, set_ = rw.SlidingWindow(2, 2), list[tuple[bool, bool]](), list[str]()
    attend = interface.attention

    def noted(q: Tensor, k: Tensor, v: Tensor, pattern: rw.Pattern, **kwargs: Any) -> Tensor:
        calls.append((q.shape[2] != k.shape[2], window.spec in pattern.spec))
        return attend(q, k, v, pattern, **kwargs)

    def patched(model: Any) -> Any:
        # Q-formers do not number their layers
        with contextlib.suppress(rw.UnsupportedError):
            set_.extend(set_pattern(model, window))
        return model

    monkeypatch.setattr(interface, "attention", noted)
    learned(name, "ringweave", 30, mask_of(name), patched)
    assert (True, True) not in calls
    assert ((False, True) in calls) == bool(set_)


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "EncoderDecoderModel"])
def test_generation(name: str, mode: dict[str, Any]) -> None:
    tokens = []
    for attention in ("eager", "ringweave"):
        config = next(configs(name, class_of(name)))
        config.decoder_start_token_id = 1
        model = made(name, config, attention).eval()
        given = {"max_new_tokens": KEYS + 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        tokens.append(model.generate(IDS[:, :KEYS], attention_mask=MASK, **given, **mode))
    assert torch.equal(*tokens)
