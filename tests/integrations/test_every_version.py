"""A short suite for each end of the stated range of transformers: `make oldest` runs it with the oldest version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import ringweave as rw
from ringweave.integrations.transformers import ModelCache, context_parallel, patch

from .test_models import CASES, EAGER, IDS, LEFT, TOLD
from .tiny import CACHE, DECODERS, ENCODERS, model_of

ROOT = Path(__file__).parents[2]
#: Models that the installed version has, and that use its interface: ModernBERT began to after 5.0.
NAMES = [
    name
    for name in (*DECODERS, *ENCODERS)
    if name in transformers.CONFIG_MAPPING and not (name == "modernbert" and transformers.__version__ == "5.0.0")
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def pinned(file: str) -> str:
    found = re.search(r"^transformers==(.+)$", (ROOT / file).read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_ends_of_the_range_are_run() -> None:
    """The installed version is one of the two that constraints name, and the older one begins the stated range."""
    oldest = pinned("constraints-oldest.txt")
    assert transformers.__version__ in (oldest, pinned("constraints.txt"))
    stated = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert stated is not None
    assert oldest == f"{stated[1]}.0"


@torch.no_grad()
@pytest.mark.parametrize("case", ["whole", "left", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_models_own_attention(name: str, case: str) -> None:
    """Masks of every kind are read: windows, chunks, padding and packing."""
    if case == "packed" and name in TOLD:
        pytest.skip("documents of this model attend each other, as with every implementation")
    inputs, real = CASES[case], CASES[case].get("attention_mask", torch.ones_like(IDS))[..., None]
    inputs = {key: value for key, value in inputs.items() if name in DECODERS or key != "use_cache"}
    got, wanted = (model_of(name, each).eval()(IDS, **inputs).logits * real for each in ("ringweave", "eager"))
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def said(model: Any, **options: Any) -> Tensor:
    found: Tensor = model.eval().generate(
        IDS[:, :11], attention_mask=LEFT[:, :11], max_new_tokens=12, do_sample=False, eos_token_id=None, **options
    )
    return found


@pytest.mark.parametrize("cache", ["dynamic", "static", "pages", "growing pages"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_generation(name: str, cache: str) -> None:
    """Every cache gives the tokens of the model's own attention."""
    options: dict[str, Any] = {
        "dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True},
        "pages": {CACHE: ModelCache(40, page=16)}, "growing pages": {CACHE: ModelCache(page=16)},
    }[cache]  # fmt: skip
    wanted = said(model_of(name, "eager" if name in EAGER else "sdpa"))
    assert torch.equal(said(model_of(name, "ringweave"), **options), wanted)


def test_pages_are_cut_and_repeated() -> None:
    """Prompt lookup cuts the last tokens from a cache, and beams repeat and reorder sequences."""
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        prompt = {"attention_mask": torch.ones_like(IDS[1:, :11])} | options
        models = [model_of("llama", each).eval() for each in ("ringweave", "sdpa")]
        steps = {"max_new_tokens": 12, "do_sample": False}
        got = models[0].generate(IDS[1:, :11], **{CACHE: ModelCache(64)}, **prompt, **steps)
        assert torch.equal(got, models[1].generate(IDS[1:, :11], **prompt, **steps))


@torch.no_grad()
def test_a_patched_model_is_saved_and_sharded(tmp_path: Path) -> None:
    """A pattern survives saving, and a context of one process gives the same logits."""
    model = patch(model_of("llama", "sdpa").eval(), rw.SlidingWindow(3) | rw.Sinks(2))
    wanted = model(IDS).logits
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="ringweave").eval()
    assert torch.equal(again(IDS).logits, wanted)
    context = context_parallel(model)
    batch = context.shard(IDS)
    torch.testing.assert_close(context.unshard(model(**batch).logits, batch), wanted, atol=1e-5, rtol=1e-4)
