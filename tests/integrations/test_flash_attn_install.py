"""install() puts flash-attn's modules where imports find them, and models of transformers run on them."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.utils import is_flash_attn_2_available, is_flash_attn_greater_or_equal

from ringweave.integrations import flash_attn, flash_attn_interface

from .tiny import config_of, model_of

NAMES = (
    "flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding", "flash_attn.layers",
    "flash_attn.layers.rotary", "flash_attn_interface",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def present() -> list[str]:
    return [name for name in NAMES if name in sys.modules]


@pytest.mark.parametrize("install", [flash_attn.install, flash_attn_interface.install])
def test_modules_are_found_until_the_end(install: Any) -> None:
    assert not present()
    with install():
        assert present() == list(NAMES)
        for name in NAMES:
            module = importlib.import_module(name)
            assert importlib.util.find_spec(name) is module.__spec__ is not None
            assert module.__spec__.name == module.__name__ == name
        two, three = (importlib.import_module(name) for name in ("flash_attn", "flash_attn_interface"))
        assert two.__version__ == flash_attn.__version__
        assert two.flash_attn_func is two.flash_attn_interface.flash_attn_func is flash_attn.flash_attn_func
        assert two.bert_padding.unpad_input is flash_attn.bert_padding.unpad_input
        assert three.flash_attn_func is flash_attn_interface.flash_attn_func is not two.flash_attn_func
        assert not hasattr(two, "install")
        assert is_flash_attn_2_available()
        assert is_flash_attn_greater_or_equal("2.4.1")
        assert two.layers.rotary.apply_rotary_emb is flash_attn.layers.rotary.apply_rotary_emb
        with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.ops"):
            importlib.import_module("flash_attn.ops.rms_norm")
    assert not present()
    assert not is_flash_attn_2_available()
    assert not is_flash_attn_greater_or_equal("2.4.1")


def test_a_context_ends_after_an_error_and_may_be_nested() -> None:
    with pytest.raises(ZeroDivisionError), flash_attn.install(), flash_attn_interface.install():
        raise ZeroDivisionError
    assert not present()
    with flash_attn.install():
        outer = sys.modules["flash_attn"]
        with flash_attn.install():
            assert sys.modules["flash_attn"] is outer
        assert sys.modules["flash_attn"] is outer
        assert is_flash_attn_2_available()
    assert not present()


def test_without_a_context_the_modules_stay() -> None:
    context = flash_attn.install()
    assert present() == list(NAMES)
    with context:
        pass
    assert not present()


def test_installed_modules_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that a caller has imported, or that is installed, is not replaced; an import that is blocked is."""
    own = ModuleType("flash_attn")
    own.__spec__ = ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", own)
    with flash_attn.install():
        assert sys.modules["flash_attn"] is own
        assert "flash_attn.bert_padding" not in sys.modules
        assert not is_flash_attn_2_available()
        assert "flash_attn_interface" in sys.modules
    assert sys.modules["flash_attn"] is own
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # type: ignore[arg-type]
    with flash_attn.install():
        assert sys.modules["flash_attn"] is not None
    assert sys.modules["flash_attn"] is None


def test_an_installed_package_is_found_before_it_is_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '9'")
    monkeypatch.syspath_prepend(tmp_path)
    with flash_attn.install():
        assert "flash_attn" not in sys.modules
        assert importlib.import_module("flash_attn").__version__ == "9"
    del sys.modules["flash_attn"]


def test_the_package_imports_no_face() -> None:
    program = (
        "import sys, ringweave\n"
        "assert not [name for name in sys.modules if 'flash_attn' in name]\n"
        "import ringweave.integrations.flash_attn, ringweave.integrations.flash_attn_interface\n"
        "assert 'transformers' not in sys.modules and 'flash_attn' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


# ---- models ----------------------------------------------------------------------------------------------------------

IDS = torch.randint(3, 64, (2, 17), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones(2, 17, dtype=torch.int64)
LEFT[0, :6] = 0
PACKED = torch.cat([torch.arange(n) for n in (5, 9, 3)])[None]
CASES: dict[str, dict[str, Any]] = {
    "whole": {"input_ids": IDS},
    "left": {"input_ids": IDS, "attention_mask": LEFT},
    "right": {"input_ids": IDS, "attention_mask": LEFT.flip(1)},
    "packed": {"input_ids": IDS[:1], "position_ids": PACKED, "use_cache": False},
}
MODELS = ["llama", "mistral", "qwen2", "gemma2", "gemma3_text", "phi3"]


def both(name: str, version: int = 2, **changes: Any) -> tuple[Any, Any]:
    """Return a tiny model on flash-attn and the same on its own attention."""
    config = config_of(name, **changes)
    # the word is written into the config
    words = f"flash_attention_{version}", "eager"
    found = [model_of(name, word, copy.deepcopy(config)).eval() for word in words]
    assert found[0].config._attn_implementation == words[0]
    return found[0], found[1]


def logits(model: Any, case: str) -> Tensor:
    given = CASES[case]
    found: Tensor = model(**given).logits
    return found * given["attention_mask"][..., None] if "attention_mask" in given else found


def wanted_logits(model: Any, case: str) -> Tensor:
    """Return logits of the model's own attention; packed documents alone, since not every model separates them."""
    if case != "packed":
        return logits(model, case)
    return torch.cat([model(part).logits for part in CASES["packed"]["input_ids"].split((5, 9, 3), 1)], 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_the_models_own_attention(name: str, case: str) -> None:
    """Windows, caps, padding and packing, in training mode and with gradients to every weight."""
    with flash_attn.install():
        ours, theirs = both(name)
        got, wanted = logits(ours.train(), case), wanted_logits(theirs.train(), case)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
        got.square().sum().backward()
        wanted.square().sum().backward()
        for (weight, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            scale = float(y.grad.norm()) or 1.0
            assert float((x.grad - y.grad).norm()) <= 1e-4 * scale, weight


@torch.no_grad()
@pytest.mark.parametrize("case", ["whole", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_generation(name: str, case: str) -> None:
    """Generated tokens are those of the model's own attention, greedily and with beams."""
    mask = CASES[case].get("attention_mask", torch.ones_like(IDS))
    for beams in (1, 3):
        steps = {"max_new_tokens": 9, "do_sample": False, "num_beams": beams, "eos_token_id": None}
        with flash_attn.install():
            found = [each.generate(IDS, attention_mask=mask, **steps) for each in both(name)]
        assert torch.equal(*found)


@torch.no_grad()
def test_encoders() -> None:
    for name in ("bert", "roberta"):
        with flash_attn.install():
            ours, theirs = both(name)
            torch.testing.assert_close(logits(ours, "right"), logits(theirs, "right"), atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_another_version_and_a_change_of_mind() -> None:
    """A model that exists may switch, and version 3 has the same checks; afterwards both are refused again."""
    with flash_attn_interface.install():
        ours, theirs = both("mistral", 3)
        for word in ("flash_attention_3", "flash_attention_2"):
            ours.set_attn_implementation(word)
            torch.testing.assert_close(logits(ours, "left"), logits(theirs, "left"), atol=2e-5, rtol=1e-4)
    for version in (2, 3):
        with pytest.raises((ImportError, ValueError)):
            both("llama", version)


@torch.no_grad()
def test_cumulative_lengths_of_a_collator() -> None:
    """The arguments of padding-free training, which transformers passes on."""
    lengths: dict[str, Any] = {f"cu_seq_lens_{side}": torch.tensor([0, 5, 14, 17], dtype=torch.int32) for side in "qk"}
    lengths |= {"max_length_q": 9, "max_length_k": 9}
    with flash_attn.install():
        ours, theirs = both("mistral")
        got = ours(**CASES["packed"], **lengths).logits
        torch.testing.assert_close(got, wanted_logits(theirs, "packed"), atol=2e-5, rtol=1e-4)


def test_dropout_is_drawn_in_training() -> None:
    with flash_attn.install():
        ours, _ = both("llama", attention_dropout=0.5)
        ours.train()
        torch.manual_seed(0)
        first, second = (logits(ours, "whole") for _ in range(2))
        torch.manual_seed(0)
        assert torch.equal(logits(ours, "whole"), first)
        assert not torch.equal(first, second)
        assert torch.equal(logits(ours.eval(), "whole"), logits(ours, "whole"))
