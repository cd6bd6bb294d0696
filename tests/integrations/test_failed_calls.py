"""A call that fails leaves a ModelCache as it was: a failure at every line of a step, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import ringweave as rw
from ringweave.integrations.transformers import ModelCache, interface, model_cache

from ..failing import executed, fails
from .choosing import FAMILIES, chooser
from .test_models import IDS
from .tiny import CACHE, model_of

# files of the package in which a failure is injected; a page cache's own failures have their own tests
FILES = (*map(str, Path(interface.__file__).parent.glob("*.py")), str(Path(rw.__file__).parent / "api.py"))


@torch.no_grad()
def steps(model: Any, cache: Any, tokens: Tensor) -> Tensor:
    """Return the logits of single tokens, one after the other."""
    return torch.cat([model(token, **{CACHE: cache}).logits for token in tokens.split(1, 1)], 1)


CACHES: dict[str, Callable[[], ModelCache]] = {
    "pages": lambda: ModelCache(page=16),
    # the step needs another page, and a pool that grows
    "pages that grow": lambda: ModelCache(page=16),
    "a bounded cache in 8 bits": lambda: ModelCache(64, page=16, precision=rw.Precision(kv=torch.int8)),
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_step_that_fails_anywhere_may_be_repeated(kind: str) -> None:
    """Wherever a step fails in the integration, the same step gives the same logits afterwards, and so do later steps."""
    model, prompt = model_of("llama", "ringweave").eval(), 16 if kind == "pages that grow" else 11
    cache = CACHES[kind]()
    with torch.no_grad():
        model(IDS[:, :prompt], **{CACHE: cache})
    tokens = IDS[:, prompt : prompt + 2]
    # the first step of a length makes plans, which later ones share
    steps(model, copy.deepcopy(cache), tokens)
    wanted, twin = steps(model, copy.deepcopy(cache), tokens), copy.deepcopy(cache)
    told: list[str] = []
    count = len(executed(lambda: steps(model, twin, tokens[:, :1]), FILES))
    assert count > 100
    # together, the kinds of caches fail at every line
    for line in range(1 + list(CACHES).index(kind), count + 1, len(CACHES)):
        mine = copy.deepcopy(cache)
        assert fails(lambda mine=mine: steps(model, mine, tokens[:, :1]), line, FILES)
        try:
            first = steps(model, mine, tokens[:, :1])
        except rw.UnsupportedError as error:
            told.append(str(error))
            first = steps(model, mine, tokens[:, :1])
        got = torch.cat([first, steps(model, mine, tokens[:, 1:])], 1)
        assert torch.equal(got, wanted), line
        assert mine.get_seq_length() == prompt + 2
    # only if it failed before the protected part of an update or of an attention
    assert len(told) <= 5
    assert all(f"Repeat the call: each layer holds {prompt} tokens" in text for text in told)


def filled(name: str = "llama") -> tuple[Any, ModelCache]:
    """Return a model, and a cache with a prompt of eleven tokens."""
    model, cache = model_of(name, "ringweave").eval(), ModelCache(page=16)
    with torch.no_grad():
        model(IDS[:, :11], **{CACHE: cache})
    return model, cache


def lengths(cache: ModelCache) -> list[list[int]]:
    """Return the tokens of each layer: as it counts them, and in its pages."""
    return [[layer.seen, *layer.pages.lengths.tolist()] for layer in cache.layers]


@torch.no_grad()
def test_a_refused_call_leaves_the_tokens() -> None:
    """A call that attention or a use of the keys refuses writes nothing."""
    model, cache = filled()
    before, free = lengths(cache), [layer.pages.free_pages for layer in cache.layers]
    bias, bounds = torch.zeros(2, 1, 1, 16), torch.tensor([0, 1, 2])
    with pytest.raises(rw.UnsupportedError, match="output_attentions: got keys in pages"):
        model(IDS[:, 11:12], output_attentions=True, **{CACHE: cache})
    with pytest.raises(rw.UnsupportedError, match=f"{CACHE}: got a mask or bias of numbers"):
        model(IDS[:, 11:12], attention_mask=bias, **{CACHE: cache})
    with pytest.raises(rw.UnsupportedError, match=rf"{CACHE}: got a use of keys in pages.*call patch\(model\)"):
        model_of("llama", "eager").eval()(IDS[:, 11:12], **{CACHE: cache})
    with pytest.raises(rw.UnsupportedError, match="some are cached"):
        model(IDS[:, 11:12], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, **{CACHE: cache})
    assert lengths(cache) == before == [[11, 11, 11]] * 2
    assert [layer.pages.free_pages for layer in cache.layers] == free
    small = ModelCache(16, page=16)
    model(IDS[:, :11], **{CACHE: small})
    with pytest.raises(rw.ShapeError, match="max_tokens: got 16, with 11 tokens"):
        model(IDS[:, 11:20], **{CACHE: small})
    assert torch.equal(steps(model, small, IDS[:, 11:13]), steps(model, cache, IDS[:, 11:13]))


@torch.no_grad()
def test_a_pool_that_could_not_grow_grows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer without memory for larger pages keeps its pages and their room."""
    model, cache = filled()
    wanted = steps(model, copy.deepcopy(cache), IDS[:, 11:23])
    first = steps(model, cache, IDS[:, 11:16])

    def out_of_memory(*args: object) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as short:
        short.setattr(model_cache, "_grown", out_of_memory)
        for _ in range(2):
            with pytest.raises(MemoryError):
                steps(model, cache, IDS[:, 16:17])
    assert torch.equal(torch.cat([first, steps(model, cache, IDS[:, 16:23])], 1), wanted)


@torch.no_grad()
@pytest.mark.parametrize("prompt", [0, 11])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_failure_elsewhere_in_the_model_is_told(layer: int, prompt: int) -> None:
    """After a failure between two layers the next call removes the tokens; after the last attention, crop does."""
    model, cache = model_of("llama", "ringweave").eval(), ModelCache(page=16)
    if prompt:
        model(IDS[:, :prompt], **{CACHE: cache})
    wanted = steps(model, copy.deepcopy(cache), IDS[:, prompt : prompt + 3])

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[layer].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        steps(model, cache, IDS[:, prompt : prompt + 1])
    hook.remove()
    if layer == 0:
        with pytest.raises(rw.UnsupportedError, match=f"failed between two layers.* each layer holds {prompt} tokens"):
            steps(model, cache, IDS[:, prompt : prompt + 1])
    else:
        cache.crop(-1)
    assert torch.equal(steps(model, cache, IDS[:, prompt : prompt + 3]), wanted)


@torch.no_grad()
@pytest.mark.parametrize("way", ["word", "patch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_pages_are_refused_with_a_remedy_that_works(name: str, way: str) -> None:
    """Models that choose keys raise a typed error over a ModelCache, and run with the cache that it names."""
    model = chooser(name, "ringweave" if way == "word" else "eager").eval()
    if way == "patch":
        interface.patch(model)
    ids = IDS.clamp(max=63)
    with pytest.raises(
        rw.UnsupportedError, match=rf"a use of keys in pages.*{CACHE}=DynamicCache\(config=model.config\)"
    ):
        model(ids, **{CACHE: ModelCache()})
    if (name, way) != ("deepseek_v4", "word"):
        cache = DynamicCache(config=model.config)
        assert model(ids, **{CACHE: cache}).logits.shape[:2] == ids.shape


@torch.no_grad()
def test_a_caller_of_update_without_attention() -> None:
    """Layers that attend nothing are written to one call after another."""
    cache, token = ModelCache(page=16), torch.randn(2, 2, 1, 8)
    for step in range(20):
        for layer in range(3):
            cache.update(token, token, layer)
        assert [each.seen for each in cache.layers] == [step + 1] * 3
