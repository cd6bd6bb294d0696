"""Models of transformers give the same results with ringweave as with their own attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import ringweave as rw
from ringweave import errors
from ringweave.backends.decoding import Steps
from ringweave.integrations.transformers import (
    ModelCache,
    PatternMask,
    context_parallel,
    interface,
    patch,
    pattern_mask,
    set_pattern,
)

from .tiny import CACHE, DECODERS, ENCODERS, SMALL, model_of

# transformers' sdpa ignores their soft caps and learned sinks
EAGER = ("gemma2", "gpt_oss")
# their packed documents attend each other: positions do not reach the masks
TOLD = ("gpt_oss", "bert", "roberta", "modernbert")
N = 23

generator = torch.Generator().manual_seed(5)
IDS = torch.randint(3, 64, (2, N), generator=generator)
RIGHT, LEFT, HOLES = (torch.ones_like(IDS) for _ in range(3))
RIGHT[1, 17:] = LEFT[1, :6] = HOLES[1, 4:8] = 0
PACKED = torch.cat([torch.arange(9), torch.arange(14)])[None].expand(2, -1)
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "right": {"attention_mask": RIGHT},
    "left": {"attention_mask": LEFT},
    "holes": {"attention_mask": HOLES},
    "packed": {"position_ids": PACKED, "use_cache": False},
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def learned(model: Any, **inputs: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return the logits of tokens that are not padding, and all gradients."""
    logits = model.train()(input_ids=IDS, **inputs).logits
    real = inputs.get("attention_mask", torch.ones_like(IDS))[..., None]
    (logits.logsumexp(-1, keepdim=True) * real).mean().backward()
    return (logits * real).detach(), [weight.grad for weight in model.parameters()]


@functools.cache
def of_the_library(name: str, case: str) -> tuple[Tensor, list[Tensor | None]]:
    return learned(model_of(name, "eager" if name in EAGER else "sdpa"), **CASES[case])


def assert_alike(mine: tuple[Tensor, list[Tensor | None]], theirs: tuple[Tensor, list[Tensor | None]]) -> None:
    torch.testing.assert_close(mine[0], theirs[0], atol=1e-4, rtol=0)
    for got, wanted in zip(mine[1], theirs[1], strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_logits_and_gradients(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "packed" and name in ENCODERS:
        pytest.skip("the masks of encoders ignore packing")
    calls = []
    attend = interface.attention
    monkeypatch.setattr(interface, "attention", lambda *args, **kw: calls.append(args[3]) or attend(*args, **kw))
    assert_alike(learned(model_of(name, "ringweave"), **CASES[case]), of_the_library(name, case))
    # ringweave computed it, once per layer
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_query_between_padding_attends_the_keys_that_exist(name: str) -> None:
    """transformers, too, computes the rows of tokens that are padding."""
    mask = HOLES.clone()
    mask[1, :2] = 0
    mine, theirs = (
        model_of(name, attention).eval()(input_ids=IDS, attention_mask=mask).logits
        for attention in ("ringweave", "eager")
    )
    # a causal model's tokens before the first one that exists attend nothing: 0 here, an average in transformers
    first = 2 if name == "llama" else 0
    torch.testing.assert_close(mine[:, first:], theirs[:, first:], atol=1e-4, rtol=0)


def test_a_context_counts_a_pattern_of_ones_own_from_the_first_token_beside_holes() -> None:
    model = patch(model_of("llama", "eager").eval(), rw.Sinks(2) | rw.SlidingWindow(3))
    mask = LEFT.clone()
    mask[1, 10:12] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    plain = model(input_ids=IDS, attention_mask=mask, position_ids=positions).logits
    context = context_parallel(model)
    batch = context.shard(IDS, attention_mask=mask, position_ids=positions)
    shared = context.unshard(model(**batch).logits, batch)
    torch.testing.assert_close(shared[1, 6:], plain[1, 6:])


# models in which the last layers read the keys of others, and compute only the queries with logits
_SHARED = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "sliding_window": 7, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "global_head_dim": 8,
}  # fmt: skip
SHARING = {
    "gemma4_text": ("Gemma4ForCausalLM", "Gemma4TextConfig"),
    "gemma4_unified_text": ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextConfig"),
    "gemma3n_text": ("Gemma3nForCausalLM", "Gemma3nTextConfig"),
}
SHARING = {name: kinds for name, kinds in SHARING.items() if hasattr(transformers, kinds[1])}


def sharing(name: str, attention: str) -> Any:
    """Make a tiny model with layers that share keys; skip if this version has none."""
    kind, config_kind = SHARING[name]
    config = getattr(transformers, config_kind)(**(SMALL | _SHARED))
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3.0)
    return model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SHARING)
def test_layers_that_share_keys(name: str, case: str) -> None:
    """Logits, gradients and the logits of the last tokens are eager's if later layers read the keys of earlier ones."""
    mine, theirs = (learned(sharing(name, attention), **CASES[case]) for attention in ("ringweave", "eager"))
    assert_alike(mine, theirs)
    real = CASES[case].get("attention_mask", torch.ones_like(IDS))
    for last in (1, 3):
        got, wanted = (
            sharing(name, attention).eval()(IDS, logits_to_keep=last, **CASES[case]).logits * real[:, -last:, None]
            for attention in ("ringweave", "eager")
        )
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}, {"prefill_chunk_size": 4}, {CACHE: None}],
    ids=["dynamic", "static", "beams", "chunks", "pages"],
)  # fmt: skip
@pytest.mark.parametrize("name", SHARING)
def test_generation_of_layers_that_share_keys(name: str, options: dict[str, Any]) -> None:
    """Greedy generation and beams find eager's tokens over each cache."""
    given = {"attention_mask": LEFT, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mine = options | ({CACHE: ModelCache()} if CACHE in options else {})
    theirs = {key: value for key, value in options.items() if key != CACHE}
    wanted = sharing(name, "eager").eval().generate(IDS, **given, **theirs)
    assert torch.equal(sharing(name, "ringweave").eval().generate(IDS, **given, **mine), wanted)


def test_a_layers_pattern_may_list_tokens_that_a_text_does_not_have() -> None:
    """Short texts and the steps of a generation attend the listed tokens that they have."""
    model = patch(model_of("llama", "eager").eval(), rw.SlidingWindow(2) | rw.Global([1, 15, 300]))
    with torch.no_grad():
        for n in (9, N):
            tokens = [token for token in (1, 15) if token < n]
            got = model(IDS[:, :n]).logits
            wanted = patch(model_of("llama", "eager").eval(), rw.SlidingWindow(2) | rw.Global(tokens))(
                IDS[:, :n]
            ).logits
            assert torch.equal(got, wanted)
        cache = model(IDS[:, :9])[CACHE]
        steps = [model(IDS[:, t : t + 1], **{CACHE: cache}).logits for t in range(9, N)]
        torch.testing.assert_close(torch.cat(steps, 1), got[:, 9:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_gradient_checkpointing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attend = interface.attention
    monkeypatch.setattr(interface, "attention", lambda *args, **kw: calls.append(args[3]) or attend(*args, **kw))
    model = model_of(name, "ringweave")
    model.activation_checkpointing_enable()
    assert_alike(learned(model, **CASES["left"]), of_the_library(name, "left"))
    # the backward pass computes each layer again, with the same mask
    assert len(calls) == 4
    assert calls[2] == calls[1]
    assert calls[3] == calls[0]


def test_the_comparison_tells_masks_apart() -> None:
    whole, packed = (of_the_library("llama", case)[0] for case in ("whole", "packed"))
    assert (whole - packed).abs().max() > 1e-3
    near, far = of_the_library("mistral", "whole")[0], learned(model_of("llama", "sdpa"))[0]
    assert (near - far).abs().max() > 1e-3


def vision_and_speech() -> dict[str, tuple[Callable[[], Any], type[Any], dict[str, Any]]]:
    t, images = transformers, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    wide = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    speech = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    text = {"decoder_input_ids": IDS, "decoder_attention_mask": RIGHT}
    return {
        "t5": (
            lambda: t.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0),
            t.T5ForConditionalGeneration, {"input_ids": IDS, "attention_mask": RIGHT, **text},
        ),
        "swin": (
            lambda: t.SwinConfig(
                image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
                drop_path_rate=0.0,
            ),
            t.SwinModel, {"pixel_values": images},
        ),
        "vit": (lambda: t.ViTConfig(image_size=32, patch_size=8, **wide), t.ViTModel, {"pixel_values": images}),
        "whisper": (
            lambda: t.WhisperConfig(
                vocab_size=64, num_mel_bins=8, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0,
                max_source_positions=20, max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=1, **speech,
            ),
            t.WhisperForConditionalGeneration,
            {"input_features": torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1)), **text},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["t5", "swin", "vit", "whisper"])
def test_biases_images_and_speech(name: str) -> None:
    make, kind, inputs = vision_and_speech()[name]
    results = []
    for attention in ("sdpa", "ringweave"):
        config = make()
        config._attn_implementation = attention
        torch.manual_seed(0)
        model = kind(config).train()
        out = model(**inputs)[0]
        if "decoder_attention_mask" in inputs:
            out = out * RIGHT[..., None]
        out.square().mean().backward()
        results.append((out.detach(), [weight.grad for weight in model.parameters()]))
    assert_alike(results[1], results[0])


GENERATION: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "no cache": {"use_cache": False},
    "beam": {"num_beams": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("gemma3_text", mode) for mode in GENERATION),
        *(("llama4_text", mode) for mode in ("dynamic", "static")),
        ("gpt_oss", "dynamic"),
    ],
)
def test_generation_token_for_token(name: str, mode: str) -> None:
    prompt, mask = (IDS[1:, :11], LEFT[1:, :11]) if mode == "lookup" else (IDS[:, :11], LEFT[:, :11])
    outs = [
        model_of(name, attention)
        .eval()
        .generate(
            prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None, **GENERATION[mode]
        )
        for attention in ("eager" if name in EAGER else "sdpa", "ringweave")
    ]
    assert torch.equal(*outs)


def test_a_mask_holds_nothing_that_grows_with_the_square() -> None:
    n = 2**20
    mask = pattern_mask(1, n, n)
    assert isinstance(mask, PatternMask)
    assert mask.shape == (1, 1, n, n)
    assert mask.contiguous() is mask
    assert mask.pattern == rw.Causal()
    assert not mask.pattern.tables


def test_a_pattern_of_ones_own_counts_from_each_sequence() -> None:
    pattern = rw.SlidingWindow(3) | rw.Sinks(2)
    model = patch(model_of("llama", "eager").eval(), pattern)
    alone = model(input_ids=IDS[1:, 6:]).logits
    padded = model(input_ids=IDS, attention_mask=LEFT, position_ids=(LEFT.cumsum(-1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(padded[1:, 6:], alone)
    packed = model(input_ids=torch.cat([IDS[:1, :6], IDS[1:, 6:]], 1), use_cache=False,
                   position_ids=torch.cat([torch.arange(6), torch.arange(N - 6)])[None]).logits  # fmt: skip
    torch.testing.assert_close(packed[:, 6:], alone)
    set_pattern(model, None)
    assert (model(input_ids=IDS[1:, 6:]).logits - alone).abs().max() > 1e-3
    # steps over a cache attend the same pairs as one call
    set_pattern(model, pattern, layers=[0])
    whole = model(input_ids=IDS).logits
    first = model(input_ids=IDS[:, :14], use_cache=True)
    rest = model(input_ids=IDS[:, 14:], **{CACHE: first[CACHE]}).logits
    torch.testing.assert_close(rest, whole[:, 14:])


def test_packing_that_a_model_does_not_tell_is_said_and_kept_apart_by_a_context(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gpt-oss in 5.23: packed documents attend each other with every implementation."""
    monkeypatch.setattr(errors, "WARNED", set())
    for name in ("mistral", "gpt_oss"):
        model = model_of(name, "ringweave").train()
        with caplog.at_level("WARNING", "ringweave"):
            model(IDS, use_cache=False)
            assert not caplog.messages
            joined = model(IDS, position_ids=PACKED, use_cache=False).logits
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(
        "position_ids: got positions that restart, which the mask of GptOssAttention does not take into account;"
    )
    context = context_parallel(model)
    batch = context.shard(IDS, position_ids=PACKED)
    apart = context.unshard(model(**batch).logits, batch)
    alone = torch.cat([model_of("gpt_oss", "eager")(part, use_cache=False).logits for part in IDS.split([9, 14], 1)], 1)
    torch.testing.assert_close(apart, alone, atol=1e-4, rtol=0)
    assert (joined - alone).abs().max() > 1e-3
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_packed_documents_are_apart_or_the_user_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For every model of this file packed documents are separate, or a message says so; its recipe separates them."""
    monkeypatch.setattr(errors, "WARNED", set())
    caplog.set_level("WARNING", "ringweave")
    mixed: list[bool] = []
    attend = interface.attention

    def looked_at(q: Tensor, k: Tensor, v: Tensor, pattern: rw.Pattern, **options: Any) -> Tensor:
        dense = pattern.to_dense(N, batch=2)
        mixed.append(bool(dense[..., 9:, :9].any() or dense[..., :9, 9:].any()))
        return attend(q, k, v, pattern, **options)

    monkeypatch.setattr(interface, "attention", looked_at)
    model = model_of(name, "ringweave").eval()
    inputs: dict[str, Any] = {"position_ids": PACKED} | ({} if name in ENCODERS else {"use_cache": False})
    with torch.no_grad():
        model(IDS, **inputs)
        assert len(mixed) == 2
        assert any(mixed) == (name in TOLD)
        assert len(caplog.messages) == any(mixed)
        numbers = (PACKED == 0).cumsum(-1)
        caplog.clear()
        mixed.clear()
        errors.WARNED.clear()
        set_pattern(model, rw.Documents(ids=numbers))
        model(IDS, **inputs)
        assert mixed == [False, False]
        assert not [each for each in caplog.messages if each.startswith("position_ids")]


@pytest.mark.parametrize("name", ["modernbert", "llama"])
def test_a_model_that_mixes_documents_says_so_and_how_to_separate_them(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ModernBERT passes positions only to its rotary embedding, and a decoder with a cache ignores packing; both are told."""
    monkeypatch.setattr(errors, "WARNED", set())
    caplog.set_level("WARNING", "ringweave")
    model = model_of(name, "ringweave").eval()
    with torch.no_grad():
        model(IDS)
        assert not caplog.messages
        model(IDS, position_ids=PACKED)
        joined = model(IDS, position_ids=PACKED).logits
        (message,) = caplog.messages
        assert message.startswith("position_ids: got positions that restart, which the mask of ")
        assert "set_pattern(model, rw.Documents(ids=numbers)) before each batch" in message
        set_pattern(model, rw.Documents(ids=(PACKED == 0).cumsum(-1)))
        apart = model(IDS, position_ids=PACKED).logits
        alone = torch.cat([model_of(name, "eager").eval()(part).logits for part in IDS.split([9, 14], 1)], 1)
    torch.testing.assert_close(apart, alone, atol=1e-4, rtol=0)
    assert (joined - alone).abs().max() > 1e-2


def test_a_model_with_a_mask_of_its_own_says_that_it_mixes_documents(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(errors, "WARNED", set())
    caplog.set_level("WARNING", "ringweave")
    config = transformers.LayoutLMConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    config._attn_implementation = "ringweave"
    model = transformers.LayoutLMModel(config).eval()
    with torch.no_grad():
        model(IDS, position_ids=torch.arange(N)[None])
        assert not caplog.messages
        model(IDS, position_ids=PACKED)
    (message,) = caplog.messages
    assert message.startswith("position_ids: got positions that restart, in a model with its own mask of keys for ")
    assert message.endswith("give each document a row.")


def test_time_that_decreases_is_packing_in_positions_with_axes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(errors, "WARNED", set())
    caplog.set_level("WARNING", "ringweave")
    x = torch.randn(1, 4, 6, 8)
    layer = torch.nn.Identity()
    picture, packed = torch.tensor([0, 1, 1, 1, 4, 5]), torch.tensor([0, 1, 1, 0, 1, 2])
    for time, said in ((picture, 0), (packed, 1)):
        interface.attend(layer, x, x, x, pattern_mask(1, 6, 6), position_ids=time.expand(3, 1, -1))
        assert len(caplog.messages) == said


def test_a_function_that_has_no_symbols_is_a_mask_mod() -> None:
    def odd(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q + k) % 3 != 1)

    mask = pattern_mask(1, 9, 9, mask_function=odd)
    at = torch.arange(9)
    zero = torch.zeros(1, dtype=torch.int64)
    assert torch.equal(mask.pattern.to_dense(9)[0, 0], odd(zero, zero, at[:, None], at[None]))


@pytest.mark.parametrize(
    ("what", "inputs"),
    [
        ("head_mask: got weights scaled by head", {"head_mask": torch.ones(4)}),
        ("attention mask: got one of", {"attention_mask": pattern_mask(1, 4, 4)}),
        ("attention_mask: got shape", {"attention_mask": torch.ones(1, 1, 3, 3)}),
    ],
)
def test_what_cannot_be_honoured_is_refused(what: str, inputs: dict[str, Any]) -> None:
    x = torch.randn(1, 4, 5, 8)
    with pytest.raises(rw.RingweaveError, match=what):
        interface.attend(torch.nn.Identity(), x, x, x, **({"attention_mask": None} | inputs))


def test_a_mask_whose_values_are_read_says_so() -> None:
    mask = pattern_mask(1, 4, 4)
    with pytest.raises(rw.UnsupportedError, match="attention mask: got arithmetic with it"):
        mask + torch.zeros(4)
    with pytest.raises(AttributeError, match="mask: got a use of .masked_fill"):
        mask.masked_fill  # noqa: B018
    with pytest.raises(rw.UnsupportedError, match="attn_implementation: got 'sdpa'"):
        set_pattern(model_of("llama", "sdpa"), rw.Causal())
    with pytest.raises(rw.PatternError, match="pattern: got"):
        set_pattern(model_of("llama", "ringweave"), rw.LongNet([4], [2]))


@pytest.mark.parametrize("pattern", [None, rw.SlidingWindow(4) | rw.Sinks(1)])
def test_steps_go_straight_to_the_kernel(pattern: rw.Pattern | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's step is one prepared call: no argument of the interface sends it through the operators."""
    pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    straight: list[int] = []
    forward = Steps.forward
    monkeypatch.setattr(Steps, "forward", lambda *call: straight.append(1) or forward(*call))
    model = patch(model_of("llama", "sdpa"), pattern)
    with torch.no_grad():
        cache = model(torch.randint(3, 64, (1, 40)), use_cache=True)[CACHE]
        straight.clear()
        model(IDS[:1, :1], **{CACHE: cache})
    assert len(straight) == model.config.num_hidden_layers
