"""A compiled model of transformers has one graph for all lengths, and one for all steps over a static cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch._dynamo.utils import counters

import ringweave as rw
from ringweave.integrations.transformers import mask_reading, pattern_mask

from .test_models import IDS, LEFT
from .tiny import config_of, model_of


# test_reading.py compiles the mask of chunks
@pytest.mark.parametrize("name", ["gemma2", pytest.param("llama4_text", marks=pytest.mark.long)])
def test_one_graph_of_a_padded_forward_for_all_lengths(name: str) -> None:
    model = model_of(name, "ringweave").eval()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for n in (17, 20, 23):
            # contiguous: a slice of all tokens has other strides than a shorter one, and so another graph
            ids, there = IDS[:, :n].contiguous(), LEFT[:, :n].contiguous()
            inputs = {"input_ids": ids, "attention_mask": there, "use_cache": False}
            torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
            assert counter.frame_count == 1, n


def test_gradients_through_one_graph() -> None:
    model = model_of("mistral", "ringweave", config_of("mistral", num_hidden_layers=1)).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = []
    for call in (model, compiled):
        model.zero_grad()
        call(input_ids=IDS, attention_mask=LEFT, labels=IDS, use_cache=False).loss.backward()
        grads.append([weight.grad.clone() for weight in model.parameters()])
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted)


def test_steps_over_a_static_cache_are_compiled_no_more_often_than_with_sdpa() -> None:
    config = transformers.CompileConfig(fullgraph=True, backend="eager", mode=None, dynamic=None)
    config._compile_all_devices = True
    compiled = {"cache_implementation": "static", "compile_config": config}
    outs, graphs = [], []
    for attention in ("sdpa", "ringweave"):
        torch._dynamo.reset()
        counters.clear()
        model = model_of("llama", attention, config_of("llama", num_hidden_layers=1)).eval()
        said: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **compiled}
        outs.append(model.generate(IDS[:, :11], attention_mask=LEFT[:, :11], **said))
        graphs.append(counters["stats"]["unique_graphs"])
    assert torch.equal(*outs)
    assert graphs[1] == graphs[0] > 0


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_changed_number_of_a_mask_function_is_read_again(dynamic: bool | None) -> None:
    """torch.compile does not trace how distances are read, but the numbers that they follow from are guarded."""
    x = torch.randn(1, 2, 24, 8)

    def attend(window: int, first: int) -> torch.Tensor:
        mask = pattern_mask(1, 24, 24, mask_function=lambda b, h, q, k: (k > q - window) & (k <= q + first))
        return rw.attention(x, x, x, mask.pattern)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=dynamic)
    for window, first in [(3, 0), (5, 0), (7, 2), (3, 0)]:
        assert torch.equal(compiled(window, first), attend(window, first)), (window, first)


def test_a_changed_window_of_a_model_is_compiled_again() -> None:
    model = model_of("mistral", "ringweave", config_of("mistral", num_hidden_layers=1)).eval()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    outs = []
    with torch.no_grad():
        for graphs, window in enumerate((5, 2), 1):
            model.config.sliding_window = window
            outs.append(compiled(input_ids=IDS, use_cache=False).logits)
            torch.testing.assert_close(outs[-1], model(input_ids=IDS, use_cache=False).logits)
            assert counter.frame_count == graphs
    assert not torch.equal(*outs)


def test_the_trace_of_a_mask_does_not_read_its_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation that torch.compile traces costs time; distances of numbers are read outside of the trace."""
    read = mask_reading.distances_of

    def untraced(*given: Any) -> Any:
        assert not torch.compiler.is_dynamo_compiling()
        return read(*given)

    monkeypatch.setattr(mask_reading, "distances_of", untraced)
    x = torch.randn(1, 2, 24, 8)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return rw.attention(x, x, x, pattern_mask(1, 24, 24).pattern)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(attend, fullgraph=True, backend="eager")(x), rw.attention(x, x, x, rw.Causal()))
