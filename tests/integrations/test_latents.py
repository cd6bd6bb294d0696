"""Long calls of latent attention over chosen keys attend the latents themselves, where that costs less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringweave as rw
from ringweave.integrations.transformers import latents, patch, set_pattern

from .choosing import FAMILIES, chooser
from .tiny import CACHE

if len(FAMILIES) < 11:
    pytest.skip("this version of transformers lacks families", allow_module_level=True)
#: Families with layers that expand latents of chosen keys.
LATENT = ["deepseek_v32", "glm_moe_dsa", "mistral_large4", "hy_v4", "hy_v4_vl", "axk2", "dots3_note"]
LENGTH = 40
IDS = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
MASKS = {"none": torch.ones_like(IDS), "left": torch.ones_like(IDS), "right": torch.ones_like(IDS)}
MASKS["left"][1, :9] = 0
MASKS["right"][0, 33:] = 0


class Seen:
    """Counts the calls in the absorbed form, and the most latents that a layer expands at a time."""

    def __init__(self) -> None:
        self.calls, self.expanded = 0, 0

    def watch(self, model: Any) -> Any:
        """Record the expansions of a model."""
        for module in model.modules():
            if isinstance(getattr(module, "kv_b_proj", None), nn.Module):
                module.kv_b_proj.register_forward_hook(self._expands)
        return model

    def _expands(self, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        self.expanded = max(self.expanded, given[0].shape[-2])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Let every call have the absorbed form, in pieces of 16 queries, and count such calls."""
    found, attend = Seen(), latents.Absorbed.attend

    def counted(*args: Any) -> Tensor:
        found.calls += 1
        return attend(*args)

    for name, value in {"_FEWEST": 2, "_CHUNK": 16, "_costs_less": lambda *args: True}.items():
        monkeypatch.setattr(latents, name, value)
    monkeypatch.setattr(latents.Absorbed, "attend", counted)
    return found


def gradients(model: Any, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits, and the gradients of a loss over the tokens that exist."""
    logits = model(IDS, attention_mask=mask, use_cache=False).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) * mask[..., None]
    (logits * upstream).sum().backward()
    return logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("name", LATENT)
def test_the_absorbed_form_is_eagers_attention(name: str, padding: str, seen: Seen) -> None:
    """Logits and the gradients of all weights are those of eager, and no call expands the latents of all keys."""
    mask = MASKS[padding]
    wanted, of_eager = gradients(chooser(name, "eager"), mask)
    got, of_ours = gradients(seen.watch(patch(chooser(name, "eager"))), mask)
    assert seen.calls > 0
    assert name == "dots3_note" or seen.expanded < LENGTH  # which has other layers, of a window
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], atol=1e-5, rtol=1e-4)
    assert of_eager.keys() == of_ours.keys()
    for key, grad in of_eager.items():
        assert (of_ours[key] - grad).norm() <= 1e-4 * grad.norm().clamp(min=1e-6), key


@torch.no_grad()
def test_a_call_after_cached_tokens(seen: Seen) -> None:
    """Queries that begin behind cached keys have the logits of the whole call."""
    model = patch(chooser("deepseek_v32", "eager")).eval()
    wanted = model(IDS).logits
    cache = model(IDS[:, :17]).get(CACHE)
    before = seen.calls
    torch.testing.assert_close(model(IDS[:, 17:], **{CACHE: cache}).logits, wanted[:, 17:], atol=1e-5, rtol=1e-4)
    assert seen.calls > before


@torch.no_grad()
def test_a_pattern_restricts_the_latents(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(chooser("deepseek_v32", "eager")).eval()
    free = model(IDS).logits
    set_pattern(model, rw.SlidingWindow(3))
    got = model(IDS).logits
    assert seen.calls > 0
    monkeypatch.setattr(latents, "_costs_less", lambda *args: False)
    wanted = model(IDS).logits
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(free, wanted, atol=1e-3)


@torch.no_grad()
def test_bfloat16(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is at most twice that of expanded keys."""
    exact = chooser("deepseek_v32", "eager").eval()(IDS).logits
    model = patch(chooser("deepseek_v32", "eager").bfloat16()).eval()
    got = model(IDS).logits
    assert seen.calls > 0
    monkeypatch.setattr(latents, "_costs_less", lambda *args: False)
    wanted = model(IDS).logits
    assert (got - exact).norm() <= 2 * (wanted - exact).norm()


OTHERS: dict[str, Callable[[Any], Any]] = {
    "weights": lambda model: model(IDS, output_attentions=True),
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16)(model)(IDS),
    "dropout": lambda model: model.train()(IDS),
    "an expansion that is no product": lambda model: model(IDS),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_calls_that_expand(kind: str, seen: Seen) -> None:
    """A call that the absorbed form cannot compute expands its keys."""
    model = patch(chooser("deepseek_v32", "eager", attention_dropout=0.5)).eval()
    if kind.startswith("an expansion"):
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj = nn.Sequential(layer.self_attn.kv_b_proj, nn.Tanh())
    with torch.no_grad():
        OTHERS[kind](model)
    assert seen.calls == 0
    if not kind.startswith("an expansion"):
        with torch.no_grad():
            model.eval()(IDS)
        assert seen.calls > 0


def test_the_cheaper_form() -> None:
    """The absorbed form is for lists that neighbouring queries do not share."""
    generator = torch.Generator().manual_seed(0)
    n, nk, queries = 8, 512, 200
    apart = torch.rand(2, queries, nk, generator=generator).topk(n).indices
    shared = apart[:, :1].expand(-1, queries, -1)
    some = torch.where(torch.arange(n) < 3, apart, -1)
    for indices in (apart, shared, some, torch.full_like(apart, -1)):
        own = int((indices >= 0).sum())
        together = sum(
            128 * len({*row[first : first + 128].flatten().tolist()} - {-1})
            for row in indices
            for first in range(0, queries, 128)
        )
        for absorbed, expanded in ((1.0, 1), (30.0, 1), (300.0, 1), (3.0, 2)):
            limited = n * absorbed < min(nk, 128 * n) * expanded
            wanted = limited and own * absorbed < together * expanded
            assert latents._costs_less(indices, nk, absorbed, expanded) == wanted
    # of a long call some tiles are looked at
    long = torch.rand(1, 128 * 70, 64, generator=generator).topk(2).indices
    assert latents._costs_less(long, 64, 20.0, 1)
    assert not latents._costs_less(long, 64, 33.0, 1)
    assert latents._costs_less(apart, nk, 5.0, 1)
    assert not latents._costs_less(shared, nk, 5.0, 1)
