"""Models that choose their keys: by the word and after ``patch(model)`` they compute what their eager attention does."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import math
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import ringweave as rw
from ringweave import errors
from ringweave.integrations.transformers import attend, context_parallel, models, patch, pattern_mask, set_pattern
from ringweave.integrations.transformers.indexers import Products
from ringweave.integrations.transformers.masks import PatternMask

from ..sampled import is_long
from .choosing import FAMILIES, chooser
from .tiny import CACHE

if len(FAMILIES) < 11:
    pytest.skip("this version of transformers lacks families", allow_module_level=True)
LENGTH = 21
IDS = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
FULL = torch.ones_like(IDS)


def padded(*spans: tuple[int, int, int]) -> Tensor:
    """Return a mask with padding at the places (row, first, stop)."""
    mask = FULL.clone()
    for row, first, stop in spans:
        mask[row, first:stop] = 0
    return mask


LEFT, RIGHT = padded((1, 0, 6)), padded((0, 15, LENGTH))
PADDED = {
    "none": FULL, "left": LEFT, "right": RIGHT, "between": padded((0, 5, 7), (1, 9, 13)),
    "on both sides": padded((0, 0, 3), (1, 17, LENGTH)), "left of each": padded((0, 0, 7), (1, 0, 2)),
    "left and between": padded((0, 0, 4), (1, 8, 10)),
}  # fmt: skip
WAYS = ("word", "patch")
# without a patch DeepSeek V4 raises an error
CASES = [(name, way) for name in FAMILIES for way in WAYS if (name, way) != ("deepseek_v4", "word")]
#: With padding on the left MiniMax's eager attention leaves tokens without a key, and averages all keys for them.
WITHOUT_LEFT = {"minimax_m3_vl"}
HAVE_LEFT = {name for name, mask in PADDED.items() if not mask[:, 0].all()}
#: A static cache has no layers for its entries, with any implementation.
WITHOUT_STATIC = {"deepseek_v4"}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(errors, "WARNED", set())
    caplog.set_level(logging.WARNING, "ringweave")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "ringweave"]


def ours(name: str, way: str, **changes: Any) -> Any:
    """Make a tiny model that uses ringweave by the word, or by a patch."""
    model = chooser(name, "ringweave" if way == "word" else "eager", **changes)
    return model if way == "word" else patch(model)


@functools.cache
def kept(name: str, way: str, indexed: bool = False) -> Any:
    """Return a model for calls that do not change it, which are quicker than to make it."""
    changes = INDEXED if indexed else {}
    return (chooser(name, "eager", **changes) if way == "eager" else ours(name, way, **changes)).eval()


@functools.cache
@torch.no_grad()
def eager_logits(name: str, padding: str) -> Tensor:
    """Return the logits of a model's own attention, which both ways have."""
    given = {} if padding == "none" else {"attention_mask": PADDED[padding]}
    return kept(name, "eager")(IDS, **given).logits  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_logits_are_those_of_eager(name: str, way: str, padding: str) -> None:
    """The logits of all tokens that exist are those of the model's eager attention."""
    if padding in HAVE_LEFT and name in WITHOUT_LEFT:
        pytest.skip("eager averages all keys for tokens without a key")
    mask = PADDED[padding]
    given = {} if padding == "none" else {"attention_mask": mask}
    wanted, got = eager_logits(name, padding), kept(name, way)(IDS, **given).logits
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], atol=1e-5, rtol=1e-4)


def gradients(model: Any, mask: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss over the tokens that exist."""
    model.train()
    logits = model(IDS, attention_mask=mask, use_cache=False).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) * mask[..., None]
    (logits * upstream).sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@functools.cache
def gradients_of(name: str, way: str) -> dict[str, Tensor]:
    """Return the gradients of a model with padding, by its own attention or by ours."""
    return gradients(chooser(name, "eager") if way == "eager" else ours(name, way), RIGHT)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_gradients_are_those_of_eager(name: str, way: str) -> None:
    """The gradients of all weights are those of the model's eager attention; an indexer's weights have none in both."""
    wanted, got = gradients_of(name, "eager"), gradients_of(name, way)
    assert wanted.keys() == got.keys()
    for key, grad in wanted.items():
        error = (got[key] - grad).norm() / grad.norm().clamp(min=1e-6)
        assert error < 1e-4, (key, float(error))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    """A patched model with gradient checkpointing has the gradients that it has without."""
    wanted, model = gradients_of(name, "patch"), ours(name, "patch")
    model.activation_checkpointing_enable()
    got = gradients(model, RIGHT)
    assert wanted.keys() == got.keys()
    for key, grad in wanted.items():
        torch.testing.assert_close(got[key], grad, atol=1e-6, rtol=1e-5)


# the steps after the prompt are at each place of blocks of two and of four keys
NEW = 5


def generated(model: Any, static: bool = False, **given: Any) -> Tensor:
    """Return the tokens of a greedy generation; tokens of pads are not compared."""
    if static:
        given[CACHE] = StaticCache(config=model.config.get_text_config(), max_cache_len=LENGTH + 12)
    return model.generate(IDS, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **given)


@functools.cache
@torch.no_grad()
def eager_tokens(name: str, padding: str) -> Tensor:
    """Return the tokens that a model generates by its own attention over its own cache."""
    return generated(kept(name, "eager"), attention_mask=PADDED[padding])


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "left of each", "between"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_generation_is_that_of_eager(name: str, way: str, static: bool, padding: str) -> None:
    """Greedy generation over the model's own dynamic cache, and over a static one, chooses eager's tokens over the first."""
    if padding in HAVE_LEFT and name in WITHOUT_LEFT:
        pytest.skip("eager averages all keys for tokens without a key")
    if static and name in WITHOUT_STATIC:
        pytest.skip("no implementation runs it over a static cache")
    got = generated(kept(name, way), static, attention_mask=PADDED[padding])
    assert torch.equal(got, eager_tokens(name, padding))


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "hy_v4_vl"])
def test_a_padded_prompt_in_chunks(name: str) -> None:
    """A prompt with padding between its tokens, in chunks over a cache, has eager's logits."""
    mask, outs = PADDED["between"], []
    for model in (kept(name, "eager"), kept(name, "patch")):
        given: dict[str, Any] = {CACHE: DynamicCache(config=model.config)}
        chunks = ((0, 8), (8, 16), (16, LENGTH))
        outs.append(torch.cat([model(IDS[:, a:b], attention_mask=mask[:, :b], **given).logits for a, b in chunks], 1))
    torch.testing.assert_close(outs[1][mask.bool()], outs[0][mask.bool()], atol=1e-5, rtol=1e-4)


FIRST = 9
PLACES = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])[None]
BOUNDS = torch.tensor([0, FIRST, LENGTH], dtype=torch.int32)
OTHERS = torch.tensor([0, FIRST, 15, LENGTH], dtype=torch.int32)
POSITIONS = {"position_ids": PLACES}
KEYWORDS = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 12, "max_length_k": 12}
NUMBERS = {"seq_idx": (torch.arange(LENGTH) >= FIRST).int()[None]}
#: Ways to pass packed documents; those that a mask holds are known to indexers that read it.
PACKINGS: dict[str, dict[str, Any]] = {
    "positions": POSITIONS, "positions and bounds": POSITIONS | KEYWORDS, "positions and numbers": POSITIONS | NUMBERS,
    "positions of text and axes": {"position_ids": PLACES.expand(4, 1, -1)},
    "bounds": KEYWORDS, "numbers": NUMBERS, "positions with a cache": POSITIONS | {"use_cache": True},
    "positions with a mask": POSITIONS | {"attention_mask": FULL[:1]},
    "other bounds than positions": POSITIONS | KEYWORDS | {"cu_seq_lens_q": OTHERS, "cu_seq_lens_k": OTHERS},
}  # fmt: skip
KNOWN = ("positions", "positions and bounds", "positions and numbers")
#: The packings with which each family chooses and attends inside of documents.
INSIDE = dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "mistral_large4", "hy_v4", "axk2", "dots3_note"), KNOWN) | {
    "hy_v4_vl": ("positions of text and axes",),
    # a model without its layers of linear attention, which carry a state across documents
    "qwen4_exp, indexed": (*KNOWN, "positions of text and axes"),
}
INDEXED = {"layer_types": ["indexed_attention"] * 3}
#: Models that also raise errors of transformers: a position for each axis, or layers of linear attention
RAISES = (rw.UnsupportedError, ValueError, IndexError, RuntimeError)


@torch.no_grad()
@pytest.mark.sampled(2)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("name", "way"), [*CASES, *(("qwen4_exp, indexed", way) for way in WAYS)])
def test_packed_documents_are_apart_or_refused(name: str, way: str, packing: str) -> None:
    """Each family chooses and attends inside of documents, or says that it takes no packed documents."""
    family, _, indexed = name.partition(", ")
    model = kept(family, way, bool(indexed))
    given = {"use_cache": False} | PACKINGS[packing]
    if packing not in INSIDE.get(name, ()):
        with pytest.raises(RAISES) as error:
            model(IDS[:1], **given)
        theirs = "can't keep packed sequences apart" in str(error.value) or packing == "positions of text and axes"
        assert theirs or (isinstance(error.value, rw.UnsupportedError) and "packed documents in" in str(error.value))
        return
    alone = torch.cat([model(part, use_cache=False).logits for part in IDS[:1].split([FIRST, LENGTH - FIRST], 1)], 1)
    torch.testing.assert_close(model(IDS[:1], **given).logits, alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("name", "way"), CASES)
def test_documents_of_a_layers_pattern_are_refused(name: str, way: str) -> None:
    """A choice of keys does not know the documents of a layer's own pattern."""
    model = ours(name, way).eval()
    set_pattern(model, rw.Documents([FIRST, LENGTH - FIRST]))
    with pytest.raises(rw.UnsupportedError, match=r"packed documents in|with a pattern|the model's own pattern"):
        model(IDS, use_cache=False)


@torch.no_grad()
@pytest.mark.parametrize("name", [pytest.param("minimax_m3_vl", marks=pytest.mark.long), "deepseek_v32"])
def test_compiled_choices_know_documents_when_they_run(name: str) -> None:
    """A compiled model computes a call of one document, and refuses packed ones, or keeps them apart."""
    fewer = {"num_hidden_layers": 1, "mlp_layer_types": ["dense"]} if name == "deepseek_v32" else {}
    model = ours(name, "patch", **fewer).eval()
    compiled = torch.compile(model, backend="eager")
    # the positions of one document have the graph of packed ones; the next test compiles a call without positions
    one = {"use_cache": False, "position_ids": torch.arange(LENGTH)[None]}
    wanted = model(IDS[:1], **one).logits
    torch.testing.assert_close(compiled(IDS[:1], **one).logits, wanted, atol=1e-5, rtol=1e-4)
    if name in INSIDE:
        wanted = model(IDS[:1], use_cache=False, **POSITIONS).logits
        got = compiled(IDS[:1], use_cache=False, **POSITIONS).logits
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    else:
        with pytest.raises(RuntimeError, match="packed documents in MiniMax"):
            compiled(IDS[:1], use_cache=False, **POSITIONS)
    torch.compiler.reset()


@torch.no_grad()
@pytest.mark.parametrize("name", ["glm_moe_dsa", "qwen4_exp", "deepseek_v4"])
def test_beams(name: str) -> None:
    """Beam search, which reorders caches, finds eager's tokens."""
    options = {"num_beams": 3, "attention_mask": FULL}
    assert torch.equal(generated(kept(name, "patch"), **options), generated(kept(name, "eager"), **options))


@torch.no_grad()
@pytest.mark.parametrize("way", ["patch", pytest.param("word", marks=pytest.mark.long)])
def test_a_compiled_model_computes_the_same(way: str) -> None:
    """A compiled model gives the logits of the model, also padded; after a patch it is one graph."""
    # tracing takes seconds for each layer and mask; experts are the model's own
    layers, paddings = (["dense", "sparse"], ["none", "right"]) if is_long() else (["dense"], ["right"])
    model = ours("deepseek_v32", way, num_hidden_layers=len(layers), mlp_layer_types=layers).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=way == "patch")
    for padding in paddings:
        given = {"attention_mask": PADDED[padding], "use_cache": False} if padding == "right" else {"use_cache": False}
        wanted, got = model(IDS, **given).logits, compiled(IDS, **given).logits
        torch.testing.assert_close(got[PADDED[padding].bool()], wanted[PADDED[padding].bool()], atol=1e-5, rtol=1e-4)
    torch.compiler.reset()


class Largest(TorchDispatchMode):
    """The largest number of elements of a tensor that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.elements = max(self.elements, result.numel())
        return result


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "glm5_next"])
def test_a_patched_model_makes_no_tensor_of_all_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation of a patched model returns a score for each query, key (or entry) and head of the indexer."""
    monkeypatch.setattr("ringweave.chunks._BUDGET", 2**14)
    length = 256
    ids = torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(3))
    # with 32 index heads, and 2 tokens in a block, scores are the largest tensor by far
    changes = {
        "minimax_m3_vl": {"num_key_value_heads": 4, "index_n_heads": 4},
        "qwen4_exp": {"indexer_n_heads": 32},
    }.get(name, {"index_n_heads": 32})
    sizes = {"minimax_m3_vl": 4 * length, "qwen4_exp": 32 * length // 2, "deepseek_v4": 32 * length // 2}
    scores = length * sizes.get(name, 32 * length)
    with Largest() as seen:
        ours(name, "patch", max_position_embeddings=512, **changes).eval()(ids, use_cache=False)
    assert seen.elements < scores, (seen.elements, scores)
    if name == "qwen4_exp":
        # its own loop scores one query at a time
        return
    with Largest() as seen:
        chooser(name, "eager", max_position_embeddings=512, **changes).eval()(ids, use_cache=False)
    assert seen.elements >= scores


@torch.no_grad()
@pytest.mark.parametrize("name", ["glm_moe_dsa", "hy_v4"])
def test_an_indexer_that_may_choose_all_keys_restricts_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no more keys than the indexer chooses, a patched model scores nothing and plans no lists."""
    wanted = chooser(name, "eager", index_topk=LENGTH).eval()(IDS, attention_mask=LEFT).logits
    for module, attribute in (("indexers", "lightning_indexer"), ("interface", "Selected")):
        monkeypatch.setattr(f"ringweave.integrations.transformers.{module}.{attribute}", None)
    got = ours(name, "patch", index_topk=LENGTH).eval()(IDS, attention_mask=LEFT).logits
    torch.testing.assert_close(got[LEFT.bool()], wanted[LEFT.bool()], atol=1e-5, rtol=1e-4)


@functools.cache
@torch.no_grad()
def with_weights(name: str, way: str) -> Any:
    """Return a generation of three tokens with the maps of its attention."""
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    return kept(name, way).generate(IDS, output_attentions=True, **options)


@torch.no_grad()
@pytest.mark.parametrize(("name", "way"), CASES)
def test_weights_of_steps_are_those_of_eager(name: str, way: str) -> None:
    """``output_attentions`` gives eager's maps of all keys, also in steps, and changes no output."""
    wanted, got = with_weights(name, "eager"), with_weights(name, way)
    # this generation without maps is eager's in another test
    assert torch.equal(got.sequences[:, : LENGTH + 3], eager_tokens(name, "none")[:, : LENGTH + 3])
    assert len(got.attentions) == len(wanted.attentions) == 3
    for mine, theirs in zip(got.attentions, wanted.attentions, strict=True):
        maps = [(x, y) for x, y in zip(mine, theirs, strict=True) if y is not None]
        assert maps
        for x, y in maps:
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_step_expands_the_chosen_latents_only() -> None:
    """A step of a patched model expands as many latents as the indexer chooses."""
    model, expanded = ours("deepseek_v32", "patch").eval(), []
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, given, out: expanded.append(given[0].shape[2]))
    generated(model, attention_mask=FULL)
    layers = len(model.model.layers)
    assert expanded == [LENGTH] * layers + [model.config.index_topk] * layers * (NEW - 1)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_a_patched_model_goes_back_and_is_copied(name: str) -> None:
    """A patched model that is set to eager is eager's, bit for bit; a copy of it has its own modules."""
    wanted, model = chooser(name, "eager").eval()(IDS).logits, ours(name, "patch").eval()
    got, twin = model(IDS).logits, patch(copy.deepcopy(model))
    for weight in model.parameters():
        weight.zero_()
    assert torch.equal(twin(IDS).logits, got)
    twin.set_attn_implementation("eager")
    torch.testing.assert_close(twin(IDS).logits, wanted, atol=1e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_a_pattern_restricts_the_chosen_keys(way: str) -> None:
    """A layer with a pattern attends the chosen keys that the pattern allows, in a call and in steps."""
    model = ours("deepseek_v32", way).eval()
    free = model(IDS).logits
    set_pattern(model, rw.SlidingWindow(3))
    wanted = model(IDS).logits
    assert not torch.allclose(free, wanted, atol=1e-3)
    cache = model(IDS[:, :-2]).get(CACHE)
    for step in (-2, -1):
        at = IDS[:, step:] if step == -1 else IDS[:, step:-1]
        got = model(at, **{CACHE: cache}).logits[:, -1]
        torch.testing.assert_close(got, wanted[:, step], atol=1e-5, rtol=1e-4)


def test_the_guides_table_has_every_family() -> None:
    """The table of the guide names each family once, and those that need a patch."""
    page = (Path(__file__).parents[2] / "docs/huggingface.md").read_text("utf-8")
    start = page.index("| family | by the word |")
    rows = [line.split("|")[1:3] for line in page[start:].split("\n\n")[0].splitlines()[2:]]
    by_word = {
        name: not word.strip().startswith("no") for names, word in rows for name in re.findall(r"`(\w+)`", names)
    }
    assert by_word == {name: (name, "word") in CASES for name in FAMILIES}


# ---- the attention function ------------------------------------------------------------------------------------------


def test_lists_may_hold_forbidden_keys() -> None:
    """A list that names keys of the future, and -1, attends those of its keys that the mask allows."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
    lists = torch.randint(-1, 8, (2, 8, 3), dtype=torch.int32)
    mask = pattern_mask(2, 8, 8)
    got, _ = attend(torch.nn.Module(), q, k, k, mask, indices=lists)
    wanted = rw.attention(q, k, k, rw.Selected(lists[:, None]) & rw.Causal())
    torch.testing.assert_close(got.transpose(1, 2), wanted)
    # layers that share a mask and a list share the pattern, until the list changes
    held = mask.found.lists
    attend(torch.nn.Module(), q, k, k, mask, indices=lists)
    assert mask.found.lists is held
    lists.fill_(0)
    got, _ = attend(torch.nn.Module(), q, k, k, mask, indices=lists)
    torch.testing.assert_close(got, k[:, :, :1].repeat_interleave(2, 1).expand(-1, -1, 8, -1).transpose(1, 2))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_blocks_belong_to_key_heads_or_groups(heads: int) -> None:
    """Lists of blocks may serve all heads, each key head, or each query head."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    blocks = torch.randint(-1, 2, (1, heads, 8, 2))
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 4
    got, _ = attend(module, q, k, k, pattern_mask(1, 8, 8), block_indices=blocks)
    each = rw.Selected(blocks.repeat_interleave(4 // heads, 1), 4)
    torch.testing.assert_close(got.transpose(1, 2), rw.attention(q, k, k, each & rw.Causal()))


def test_what_is_not_chosen_rightly_is_refused() -> None:
    """Lists of other queries, blocks without a size, pages, shards and an unpatched DeepSeek V4 raise typed errors."""
    x, mask = torch.randn(1, 2, 8, 16), pattern_mask(1, 8, 8)
    with pytest.raises(rw.ShapeError, match=r"indices: got .*wanted \(B, Nq, n\) with Nq = 8"):
        attend(torch.nn.Module(), x, x, x, mask, indices=torch.zeros(1, 7, 2, dtype=torch.int32))
    with pytest.raises(rw.UnsupportedError, match="block_indices: got blocks without a size"):
        attend(torch.nn.Module(), x, x, x, mask, block_indices=torch.zeros(1, 1, 8, 2, dtype=torch.int32))
    with pytest.raises(rw.PatternError, match="indices: got 0 to 8"):
        attend(torch.nn.Module(), x, x, x, mask, indices=torch.tensor([0, 8])[None, None].expand(1, 8, 2))
    with pytest.raises(rw.UnsupportedError, match=r"DeepseekV4Attention.*Call patch\(model\) first"):
        ours("deepseek_v4", "word")(IDS)


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl", "deepseek_v4"])
def test_shards_are_refused(name: str) -> None:
    """Models that choose keys raise typed errors over several ranks."""
    model = ours(name, "patch").eval()
    with pytest.raises(rw.UnsupportedError, match="sharded batch|compressed entries"):
        model(**context_parallel(model).shard(IDS))


@pytest.mark.parametrize("name", ["glm5_next", "qwen4_exp"])
def test_layers_without_attention_are_not_sharded(name: str) -> None:
    """Models with layers of linear attention have no placement of tokens, and raise a typed error."""
    model = ours(name, "patch").eval()
    with pytest.raises(rw.UnsupportedError, match="layers that have no mask of pairs"):
        context_parallel(model).shard(IDS)


@torch.no_grad()
def test_what_values_of_a_mask_cost_is_told_once(told: Any) -> None:
    """By the word, an indexer reads a mask of all pairs, which a warning tells once; after a patch none is made."""
    for _ in range(2):
        ours("deepseek_v32", "word").eval()(IDS)
    (said,) = told()
    assert said.startswith("attention mask: got a model that reads its values, 2 x 21 x 21;")
    assert "Call patch(model)" in said


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "glm5_next"])
def test_a_patched_model_makes_no_mask_of_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an indexer nor attention asks a mask for its values."""
    monkeypatch.setattr(PatternMask, "values", None)
    assert ours(name, "patch").eval()(IDS, attention_mask=LEFT).logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("change", [lambda x: x[..., :3], lambda x: x.flip(-1), lambda x: x + 0, lambda x: (x, x)])
def test_an_indexer_that_changes_its_list_is_refused(change: Any) -> None:
    """A list in the order of keys does not stand for one in the order of scores."""
    model = chooser("deepseek_v32", "eager").eval()
    for layer in model.model.layers:
        own = layer.self_attn.indexer.forward
        layer.self_attn.indexer.forward = lambda *args, own=own, **kwargs: change(own(*args, **kwargs))
    with pytest.raises(rw.UnsupportedError, match="indexer: got .* which changes the list of its best keys"):
        patch(model)(IDS)


# ---- symbols for scores ----------------------------------------------------------------------------------------------


def test_symbols_give_their_values_to_other_operations() -> None:
    """An indexer that does something else with its scores gets the numbers that the operations define."""
    torch.manual_seed(0)
    q, k, weights = torch.randn(1, 5, 3, 8), torch.randn(1, 1, 8, 5), torch.randn(1, 5, 1, 3)
    plain = torch.matmul(q, k) * 0.5
    products = Products(q, k) * 0.5
    torch.testing.assert_close(torch.sigmoid(products), plain.sigmoid())
    torch.testing.assert_close(products * torch.ones(5), plain)
    torch.testing.assert_close(products * -2.0, plain * -2)
    positive = torch.relu(products)
    torch.testing.assert_close(positive.amax(-1), plain.relu().amax(-1))
    # a weighted sum of products that may be negative is another function
    torch.testing.assert_close(torch.matmul(weights, products), torch.matmul(weights, plain))
    wanted = torch.matmul(weights, plain.relu())
    scores = torch.matmul(weights, positive)
    assert scores.shape == wanted.shape
    torch.testing.assert_close(scores.softmax(-1), wanted.softmax(-1))
    wanted, scores = wanted.squeeze(-2), scores.squeeze(-2)
    assert math.prod(scores.shape) == wanted.numel()
    assert torch.equal(scores.topk(2).indices, wanted.topk(2).indices)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(scores.masked_fill(~mask, -torch.inf), wanted.masked_fill(~mask, -torch.inf))
    torch.testing.assert_close(torch.nn.functional.pad(scores, (0, 1)), torch.nn.functional.pad(wanted, (0, 1)))
    rows = pattern_mask(1, 5, 5)[:, 0]
    masked = scores.masked_fill(~rows, -torch.inf)
    torch.testing.assert_close(masked.sort(-1).values, wanted.masked_fill(~mask, -torch.inf).sort(-1).values)
    chosen = masked.topk(2, dim=-1).indices
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen[0, 0], torch.tensor([0, -1], dtype=torch.int32))
    assert torch.equal(chosen[0, 4].sort().values.long(), wanted[0, 4].topk(2).indices.sort().values)


@pytest.mark.parametrize("kind", ["products", "scores", "rows"])
def test_symbols_in_lists_and_in_operators_give_their_values(kind: str) -> None:
    torch.manual_seed(0)
    q, k, weights = torch.randn(1, 5, 3, 8), torch.randn(1, 1, 8, 5), torch.randn(1, 5, 1, 3)
    products = torch.relu(Products(q, k))
    rows = pattern_mask(1, 5, 5)[:, 0]
    x = {"products": products, "scores": torch.matmul(weights, products), "rows": rows}[kind]
    plain = x.values()
    assert type(plain) is torch.Tensor
    assert torch.equal(torch.cat([x, x]), torch.cat([plain, plain]))
    assert torch.equal(torch.stack((plain, x)), torch.stack((plain, plain)))
    assert torch.equal(torch.cat(tensors=[plain, x], dim=-1), torch.cat([plain, plain], -1))
    assert torch.equal(torch.logical_not(input=x), plain.logical_not())
    assert torch.equal(x[:, 1:], plain[:, 1:])
    if kind == "rows":
        assert torch.equal(torch.ones(1, 5, 5)[(x,)], torch.ones(1, 5, 5)[(plain,)])
        return
    assert torch.equal(torch.relu(input=x), plain.relu())
    if kind == "products":
        assert torch.equal(torch.matmul(weights, other=x), weights @ plain)
    for of in (
        lambda t: t + 2, lambda t: 2 + t, lambda t: t - 2, lambda t: 2 - t, lambda t: t / 2, lambda t: 2 / (t + 1), lambda t: -t,
        lambda t: t * t, lambda t: t**2, lambda t: t @ torch.ones(5, 2), lambda t: t == 0, lambda t: t != 0, lambda t: t < 1, lambda t: t >= 1,
    ):  # fmt: skip
        assert torch.equal(of(x), of(plain))


def test_files_of_models_name_their_version_and_classes_that_it_has() -> None:
    """A hook is found by the name of a class, so a class with another name would run without it."""
    pinned = re.search(
        r"^transformers==(.+)$", (Path(__file__).parents[2] / "constraints.txt").read_text(), re.MULTILINE
    )
    assert pinned is not None
    sources = {
        "minimax_m3": "minimax_m3_vl", "qwen4": "qwen4_exp", "deepseek_v4": "deepseek_v4"
    }  # fmt: skip
    named = [name for _, name, _ in pkgutil.iter_modules(models.__path__)]
    assert sorted(named) == sorted(sources)
    for name, family in sources.items():
        ours = importlib.import_module(f"{models.__name__}.{name}")
        assert f"read from transformers {pinned[1]}" in (ours.__doc__ or "").partition("\n")[0]
        theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        assert ours.HOOKS
        for kind in ours.HOOKS:
            assert issubclass(getattr(theirs, kind), torch.nn.Module)
            assert models.HOOKS[kind] is ours.HOOKS[kind]
