"""A model's patterns are saved in its config, and patching a model changes no other model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import ringweave as rw
from ringweave import errors
from ringweave.integrations.transformers import ModelCache, patch, saved_patterns, set_pattern

from .test_models import IDS, vision_and_speech
from .tiny import CACHE, config_of, model_of

PATTERN = rw.SlidingWindow(3) | rw.Sinks(2)
TEXT = "SlidingWindow(3) | Sinks(2)"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.logging.set_verbosity_error()
    monkeypatch.setattr(errors, "WARNED", set())


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("WARNING", "ringweave")
    return caplog


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model.eval()(ids).logits  # type: ignore[no-any-return]


def saved(model: Any, folder: Path) -> Any:
    """Save a model, and return its config as JSON."""
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text("utf-8"))


def loaded(model: Any, folder: Path, **options: Any) -> Any:
    return type(model).from_pretrained(folder, **options)


def test_a_trained_model_loads_with_its_pattern(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    model = patch(model_of("llama", "sdpa").train(), PATTERN)
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    wanted = logits(model)
    assert saved(model, tmp_path)["ringweave"] == {"pattern": TEXT}
    assert torch.equal(logits(loaded(model, tmp_path, attn_implementation="ringweave")), wanted)
    assert not warned.messages
    # another implementation ignores the pattern
    other = loaded(model, tmp_path, attn_implementation="sdpa")
    assert (logits(other) - wanted).abs().max() > 1e-2
    # both ways to switch the implementation restore it
    assert torch.equal(logits(patch(copy.deepcopy(other))), wanted)
    other.set_attn_implementation("ringweave")
    assert torch.equal(logits(other), wanted)
    # a pattern that is given replaces the one in the config
    near = patch(loaded(model, tmp_path, attn_implementation="ringweave"), rw.SlidingWindow(1))
    assert near.config.ringweave == {"pattern": "SlidingWindow(1)"}
    assert (logits(near) - wanted).abs().max() > 1e-2


def test_each_layer_is_saved_with_its_pattern(tmp_path: Path) -> None:
    model = patch(model_of("llama", "sdpa"), PATTERN)
    set_pattern(model, rw.SlidingWindow(5), layers=[0])
    assert saved(model, tmp_path)["ringweave"] == {"layers": {"0": "SlidingWindow(5)", "1": TEXT}}
    again = loaded(model, tmp_path, attn_implementation="ringweave")
    assert torch.equal(logits(again), logits(model))
    set_pattern(again, None, layers=[1])
    assert again.config.ringweave == {"layers": {"0": "SlidingWindow(5)"}}
    set_pattern(again, rw.SlidingWindow(5))
    assert again.config.ringweave == {"pattern": "SlidingWindow(5)"}
    set_pattern(again, None)
    assert "ringweave" not in saved(again, tmp_path)
    torch.testing.assert_close(logits(again), logits(model_of("llama", "sdpa")), atol=1e-4, rtol=0)


def test_a_step_over_a_cache_of_a_loaded_model_has_the_pattern(tmp_path: Path) -> None:
    model = patch(model_of("llama", "sdpa").eval(), PATTERN)
    model.save_pretrained(tmp_path)
    again = loaded(model, tmp_path, attn_implementation="ringweave").eval()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "attention_mask": None}
    wanted = model.generate(IDS[:1], **options)
    assert torch.equal(again.generate(IDS[:1], **{CACHE: ModelCache(max_tokens=64)}, **options), wanted)


@pytest.mark.parametrize("layers", [None, [1]])
def test_a_loaded_model_compiles_with_its_pattern(layers: list[int] | None, tmp_path: Path) -> None:
    model = patch(model_of("llama", "sdpa"), PATTERN, layers)
    model.save_pretrained(tmp_path)
    again = patch(loaded(model, tmp_path, attn_implementation="ringweave").eval())
    torch._dynamo.reset()
    compiled = torch.compile(again, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, logits(model))


def test_the_first_forward_of_a_loaded_model_reads_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer restores the patterns of all layers; torch.compile, and a layer without its model, cannot."""
    model = patch(model_of("llama", "sdpa"), PATTERN)
    model.save_pretrained(tmp_path)
    again = loaded(model, tmp_path, attn_implementation="ringweave").eval()
    layers = [layer.self_attn for layer in again.model.layers]
    assert not any(saved_patterns.ATTRIBUTE in vars(layer) for layer in layers)
    with monkeypatch.context() as traced:
        traced.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(rw.UnsupportedError, match=r"config.ringweave: got .* Call patch\(model\) first"):
            saved_patterns.first_use(layers[0])
    with pytest.raises(rw.UnsupportedError, match=r"a layer that is called outside of its model's forward"):
        saved_patterns.first_use(layers[0])
    assert torch.equal(logits(again), logits(model))
    assert [getattr(layer, saved_patterns.ATTRIBUTE) for layer in layers] == [PATTERN, PATTERN]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"pattern": "HexagonalWindow(3)"}, "unknown name 'HexagonalWindow'"),
        ({"pattern": "LongNet([4], [2])"}, "a mixture"),
        ({"pattern": 5}, "text: got 5"),
        ({"layers": {"0": "SlidingWindow("}}, "PatternError"),
        ({"layers": [1]}, "text: got dict"),
        ("SlidingWindow", "PatternError"),
    ],
)
def test_a_text_that_this_version_does_not_read_is_said_once(
    record: Any, why: str, tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    model = model_of("llama", "sdpa", config_of("llama", ringweave=record))
    model.save_pretrained(tmp_path)
    for _ in range(2):
        again = loaded(model, tmp_path, attn_implementation="ringweave")
        torch.testing.assert_close(logits(again), logits(model_of("llama", "sdpa")), atol=1e-4, rtol=0)
    (message,) = warned.messages
    assert message.startswith("config.ringweave: got ")
    assert why in message
    assert message.endswith("The model runs without it: upgrade ringweave, or call patch(model, pattern).")
    assert patch(again, PATTERN).config.ringweave == {"pattern": TEXT}


@pytest.mark.parametrize(
    "pattern",
    [
        rw.from_mask_mod(lambda b, h, q, k: q - k < 3),
        rw.Documents(ids=torch.arange(23)[None] // 9),
        rw.SlidingWindow(3) | rw.Sinks(torch.arange(23) < 2),
    ],
    ids=["function", "documents", "mask"],
)
def test_a_pattern_without_text_is_said_not_to_be_saved(
    pattern: rw.Pattern, tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    model = patch(model_of("llama", "sdpa"), PATTERN)
    for _ in range(2):
        patch(model, pattern)
    # a pattern of each batch is data, which is not told before it would be lost
    assert not warned.messages
    for _ in range(2):
        saved(model, tmp_path)
    (message,) = warned.messages
    assert message == (
        f"pattern: got {pattern}; wanted a pattern of numbers, which a config can hold as text. save_pretrained does not "
        "save it: call patch(model, pattern) again after from_pretrained."
    )
    # nor is the earlier one
    assert "ringweave" not in saved(model, tmp_path)


@pytest.mark.parametrize("first", ["patched", "other"])
@pytest.mark.parametrize("attention", ["sdpa", "ringweave"])
def test_models_of_one_config_are_patched_apart(first: str, attention: str, tmp_path: Path) -> None:
    config = config_of("llama")
    models = [model_of("llama", attention, config) for _ in range(2)]
    assert models[0].config is models[1].config is config
    one, other = models if first == "patched" else models[::-1]
    before, written = logits(other), config.to_json_string()
    patch(one, PATTERN)
    assert other.config is config
    assert config.to_json_string() == written
    assert config._attn_implementation == attention
    assert torch.equal(logits(other), before)
    assert (logits(one) - before).abs().max() > 1e-2
    assert one.config._attn_implementation == "ringweave"
    # no module of it has the old config
    assert not any(value is config for module in one.modules() for value in vars(module).values())
    set_pattern(one, rw.SlidingWindow(1), layers=[0])
    assert config.to_json_string() == written
    assert torch.equal(logits(other), before)
    # nor is a model that is made of it later another one
    assert torch.equal(logits(model_of("llama", attention, config)), before)
    assert "ringweave" not in saved(other, tmp_path)


def test_a_pattern_is_saved_with_the_model_that_was_patched(tmp_path: Path) -> None:
    """A part saves its patterns in a config of its own; a model that reads images saves those of its language model."""
    model = model_of("llama", "sdpa")
    patch(model.model, PATTERN)
    assert model.config is not model.model.config
    assert saved(model.model, tmp_path / "part")["ringweave"] == {"pattern": TEXT}
    again = loaded(model.model, tmp_path / "part", attn_implementation="ringweave").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).last_hidden_state, model.eval().model(IDS).last_hidden_state)
    # the whole does not save it until the whole is patched
    assert "ringweave" not in saved(model, tmp_path / "whole")
    assert saved(patch(model, PATTERN), tmp_path / "whole")["ringweave"] == {"pattern": TEXT}
    t = transformers
    wide: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    vision = t.CLIPVisionConfig(image_size=16, patch_size=8, **wide)
    words = t.LlamaConfig(vocab_size=64, num_key_value_heads=2, **wide)
    config = t.LlavaConfig(vision_config=vision, text_config=words, image_token_index=5)
    config._attn_implementation = "ringweave"
    reader = t.LlavaForConditionalGeneration(config).eval()
    wanted = logits(reader)
    set_pattern(reader, PATTERN)
    assert reader.config.text_config is reader.model.language_model.config
    written = saved(reader, tmp_path / "images")
    assert written["text_config"]["ringweave"] == {"pattern": TEXT}
    assert "ringweave" not in written
    assert "ringweave" not in written["vision_config"]
    assert "ringweave" not in config.to_dict()["text_config"]
    again = loaded(reader, tmp_path / "images", attn_implementation="ringweave")
    assert torch.equal(logits(again), logits(reader))
    assert (logits(again) - wanted).abs().max() > 1e-4


def test_an_encoder_and_a_decoder_with_copies_of_the_config(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    """T5's config is saved; its stacks have copies. Cross-attention keeps the model's mask."""
    make, kind, inputs = vision_and_speech()["t5"]
    model = kind(make()).eval()
    patch(model, PATTERN, layers=[0])
    assert saved(model, tmp_path)["ringweave"] == {"layers": {"0": TEXT}}
    again = loaded(model, tmp_path, attn_implementation="ringweave").eval()
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    assert not warned.messages
    # the encoder's config holds its patterns
    set_pattern(model.encoder, rw.SlidingWindow(1))
    assert model.encoder.config.ringweave == {"pattern": "SlidingWindow(1)"}
    assert not warned.messages
    # that of the whole cannot: the decoder's layers have the same numbers
    set_pattern(model, rw.SlidingWindow(1), layers=[1])
    assert len(warned.messages) == 1
    assert "pattern: got SlidingWindow(1), set in encoder.block.0.layer.0.SelfAttention" in warned.messages[0]
    assert saved(model, tmp_path)["ringweave"] == {"layers": {"1": "SlidingWindow(1)"}}


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (rw.Causal, r"pattern: got the class Causal; wanted .* Call it: Causal\(\)\."),
        ("sdpa", r"pattern: got 'sdpa', the name of an attention implementation; .*set_attn_implementation\('sdpa'\)"),
        ("eager", "pattern: got 'eager', the name of an attention implementation"),
        ("SlidingWindw(3)", "unknown name 'SlidingWindw'"),
        (5, "pattern: got 5"),
    ],
)
def test_what_is_no_pattern_is_named_before_a_model_changes(pattern: Any, said: str) -> None:
    model = model_of("llama", "sdpa")
    config, written = model.config, model.config.to_json_string()
    with pytest.raises(rw.PatternError, match=said):
        patch(model, pattern)
    assert model.config is config
    assert config._attn_implementation == "sdpa"
    assert config.to_json_string() == written


def test_a_pattern_may_be_given_as_text() -> None:
    assert torch.equal(
        logits(patch(model_of("llama", "sdpa"), TEXT)), logits(patch(model_of("llama", "sdpa"), PATTERN))
    )
