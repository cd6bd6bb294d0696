"""Caches: the project's own pages behind transformers' interface, and a quantised one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, QuantizedLayer

import ringweave as rw
from ringweave.integrations.transformers import ModelCache, interface, patch

from .test_models import EAGER, IDS, LEFT
from .tiny import config_of, model_of


def said(model: Any, prompt: Tensor = IDS[:, :11], mask: Tensor = LEFT[:, :11], **options: Any) -> Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None} | options
    return model.eval().generate(prompt, attention_mask=mask, **options)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("mode", ["greedy", "beam", "chunked prefill"])
def test_pages_give_the_same_tokens(name: str, mode: str) -> None:
    """Windows with a soft cap, sinks, chunks; beams share pages and part."""
    options: dict[str, Any] = {"greedy": {}, "beam": {"num_beams": 3}, "chunked prefill": {"prefill_chunk_size": 7}}[
        mode
    ]
    wanted = said(model_of(name, "eager" if name in EAGER else "sdpa"), **options)
    got = said(model_of(name, "ringweave"), past_key_values=ModelCache(40, page=16), **options)
    assert torch.equal(got, wanted)


def test_a_prompt_looked_up_is_cut_from_the_pages() -> None:
    prompt, mask = IDS[1:, :11], torch.ones_like(IDS[1:, :11])
    wanted = said(model_of("llama", "sdpa"), prompt, mask)
    cache = ModelCache(64)
    got = said(model_of("llama", "ringweave"), prompt, mask, prompt_lookup_num_tokens=3, past_key_values=cache)
    assert torch.equal(got, wanted)


def test_pages_hold_a_pattern_of_ones_own_and_are_used_again() -> None:
    model = patch(model_of("llama", "eager").eval(), rw.SlidingWindow(3) | rw.Sinks(2))
    with torch.no_grad():
        wanted = model(IDS).logits
        cache = ModelCache(32, page=16)
        for _ in range(2):
            parts = [model(part, past_key_values=cache).logits for part in IDS.split([9, 1, 1, 12], 1)]
            torch.testing.assert_close(torch.cat(parts, 1), wanted)
            assert cache.get_seq_length() == 23
            pages = [layer.pages for layer in cache.layers]
            cache.reset()
            assert cache.get_seq_length() == 0
            assert {each.free_pages for each in pages} == {4}


def test_a_pattern_counts_from_each_sequences_first_token_in_pages_too() -> None:
    model = patch(model_of("llama", "eager"), rw.SlidingWindow(3) | rw.Sinks(2))
    assert torch.equal(said(model, past_key_values=ModelCache(40, page=16)), said(model))
    patch(model, rw.SlidingWindow(3))
    assert not torch.equal(said(model, past_key_values=ModelCache(40, page=16)), said(model_of("llama", "sdpa")))


@pytest.mark.parametrize("mine", [False, True])
def test_an_assistant(mine: bool) -> None:
    prompt, mask = IDS[1:, :11], torch.ones_like(IDS[1:, :11])
    assistant = model_of("llama", "ringweave", config_of("llama", num_hidden_layers=1)).eval()
    options: dict[str, Any] = {"past_key_values": ModelCache(64)} if mine else {}
    got = said(model_of("llama", "ringweave"), prompt, mask, assistant_model=assistant, **options)
    assert torch.equal(got, said(model_of("llama", "sdpa"), prompt, mask))


def test_what_pages_cannot_do_is_said() -> None:
    with pytest.raises(rw.ShapeError, match="length: got 0"):
        ModelCache(0)
    with pytest.raises(rw.ShapeError, match="page: got 7"):
        ModelCache(8, page=7)
    with torch.no_grad():
        with pytest.raises(rw.UnsupportedError, match="past_key_values: got a use of keys in pages"):
            model_of("llama", "sdpa").eval()(IDS, past_key_values=ModelCache(32))
        with pytest.raises(rw.ShapeError, match="append: got 23 tokens for row 0"):
            model_of("llama", "ringweave").eval()(IDS, past_key_values=ModelCache(16, page=16))
        mask = torch.zeros(2, 1, 23, 64)
        with pytest.raises(rw.UnsupportedError, match="past_key_values: got a mask or bias of numbers"):
            model_of("llama", "ringweave").eval()(IDS, attention_mask=mask, past_key_values=ModelCache(32))
    with pytest.raises(rw.UnsupportedError, match="gradients"):
        model_of("llama", "ringweave")(IDS, past_key_values=ModelCache(32))


class Coarse(QuantizedLayer):
    """Eight bits for each number, a scale for each head; what transformers' own backends do with more packages."""

    def __init__(self) -> None:
        super().__init__(nbits=8, residual_length=4)

    def _quantize(self, tensor: Tensor, axis: int) -> Any:
        scale = tensor.abs().amax((2, 3), keepdim=True) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, q_tensor: Any) -> Tensor:
        return q_tensor[0] * q_tensor[1]


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_quantised_cache(name: str) -> None:
    outs = [
        said(model_of(name, attention), past_key_values=Cache(layers=[Coarse(), Coarse()]))
        for attention in ("sdpa", "ringweave")
    ]
    assert torch.equal(*outs)


@pytest.mark.measures
def test_steps_take_no_more_memory_as_they_go_on() -> None:
    path = Path(__file__).parents[2] / "scripts" / "decoding_soak.py"
    spec = importlib.util.spec_from_file_location("decoding_soak", path)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for kind in script.KINDS:
        assert script.growth(script.soak(kind, 40))[1] < 4 * 2**20


def test_a_step_over_pages_touches_what_its_pattern_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama", num_hidden_layers=1, max_position_embeddings=4096)
    model = patch(model_of("llama", "eager", config).eval(), rw.SlidingWindow(100) | rw.Sinks(4))
    patterns: list[rw.Pattern] = []
    attend = interface.paged_attention
    monkeypatch.setattr(
        interface, "paged_attention", lambda *args, **kw: patterns.append(args[2]) or attend(*args, **kw)
    )
    with torch.no_grad():
        for n in (1000, 4000):
            cache = ModelCache(4096)
            model(torch.randint(3, 64, (1, n)), past_key_values=cache, logits_to_keep=1)
            model(torch.tensor([[5]]), past_key_values=cache)
            plan = patterns[-1].plan(1, 4096, q_offset=n)
            # its window of 101 keys, and the first 4
            assert patterns[-1].to_dense(1, 4096, q_offset=n).sum() == 105
            assert plan.nnz <= 4
