"""Keywords that models pass to attention: each is used, has no effect, is refused, or is told."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import ringweave as rw
from ringweave import errors
from ringweave.integrations.transformers import ModelCache, attend, context_parallel, keywords, patch

from .test_models import IDS, LEFT
from .tiny import CACHE, DECODERS, ENCODERS, model_of

ROOT = Path(transformers.__file__).parent
#: Dictionaries of keywords that transformers' models hand on to attention.
DICTIONARIES = ("TransformersKwargs", "FlashAttentionKwargs", "PagedAttentionArgs")
# what continuous batching passes to the whole model, not to attention
OF_THE_MODEL = {"input_ids", "logits_indices", "logits_processor_args"}
FIRST = 9
BOUNDS = torch.tensor([0, FIRST, IDS.shape[1]], dtype=torch.int32)
NUMBERS = (torch.arange(IDS.shape[1]) >= FIRST).int()[None]
APART = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 14, "max_length_k": 14}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(errors, "WARNED", set())
    caplog.set_level(logging.WARNING, "ringweave")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "ringweave"]


def declared() -> Iterator[tuple[str, str]]:
    """Yield (keyword, file) of the calls of attention and the dictionaries of keywords in transformers' sources.

    Only these parts of the files are parsed: parsing all of them takes ten times as long.
    """
    for file in ROOT.rglob("*.py"):
        text = file.read_text("utf-8")
        for call in re.finditer(r"\battention_interface(?=\()", text):
            (node,) = ast.parse(enclosed(text[call.start() :])).body
            yield from ((each.arg, file.name) for each in node.value.keywords if each.arg)  # type: ignore[attr-defined]
        for made in re.finditer(r"^class (\w+)\(([^)]*)\):.*\n((?:[ \t].*)?\n)+", text, re.MULTILINE):
            if {made[1], *re.findall(r"\w+", made[2])} & {*DICTIONARIES}:
                (node,) = ast.parse(made[0]).body
                yield from ((each.target.id, file.name) for each in node.body if isinstance(each, ast.AnnAssign))  # type: ignore[attr-defined]


def enclosed(text: str) -> str:
    """Return the beginning of a text up to the bracket that closes its first one."""
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return text[: bracket.end()]
    raise ValueError(text)


def test_every_keyword_of_transformers_is_known() -> None:
    """Each keyword in the sources of the installed transformers is an argument of attend, or in one of the lists."""
    known = {*inspect.signature(attend).parameters} | keywords.READ | keywords.REFUSED.keys() | OF_THE_MODEL
    found = dict(declared())
    assert {"cu_seq_lens_q", "sliding_window", "output_attentions"} <= found.keys()
    assert {name: file for name, file in found.items() if name not in known} == {}


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_the_keywords_of_models_are_known(name: str, told: Any) -> None:
    """No tiny model passes a keyword that is told as unknown."""
    patch(model_of(name, "eager"))(IDS, attention_mask=LEFT)
    assert [text for text in told() if "a keyword that" in text] == []


def test_an_unknown_keyword_is_told_once(told: Any) -> None:
    """A keyword that no list has is told once, and only if it has a value."""
    model = patch(model_of("llama", "eager")).eval()
    wanted = model(IDS).logits
    assert torch.equal(model(IDS, block_bias=None).logits, wanted)
    assert told() == []
    for _ in range(2):
        model(IDS, block_bias=torch.ones(3))
    (said,) = told()
    assert said.startswith("block_bias: got Tensor of torch.float32 (3,)")


@pytest.mark.parametrize("name", list(keywords.REFUSED))
def test_refused_keywords(name: str) -> None:
    """A keyword that changes the result and is not implemented raises a typed error."""
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(rw.UnsupportedError, match=f"{name}: got {keywords.REFUSED[name]}"):
        attend(torch.nn.Module(), x, x, x, None, **{name: torch.ones(2)})


def alone(name: str) -> Tensor:
    """Return the logits of each document without the other one, by the model's own attention."""
    model = model_of(name, "eager").eval()
    parts = [model(part, use_cache=False).logits for part in (IDS[:1, :FIRST], IDS[:1, FIRST:])]
    return torch.cat(parts, 1)


PLACES = torch.cat([torch.arange(FIRST), torch.arange(IDS.shape[1] - FIRST)])[None]
CALLS: dict[str, dict[str, Any]] = {
    "bounds": APART, "with a cache": APART | {"use_cache": True}, "numbers": {"seq_idx": NUMBERS},
    "a mask of ones": APART | {"attention_mask": torch.ones_like(IDS[:1])},
    "positions too": APART | {"position_ids": PLACES},
    "separate tensors": APART | {"cu_seq_lens_k": BOUNDS.clone()},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_flash_attns_bounds_separate_documents(name: str, call: str) -> None:
    """Packed documents that keywords name give the logits of each document alone, windows and sinks included."""
    options = {"use_cache": False} | CALLS[call]
    got = model_of(name, "ringweave").eval()(IDS[:1], **options).logits
    torch.testing.assert_close(got, alone(name), atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_bounds_over_rows() -> None:
    """Bounds count the tokens of all rows in order, as in flash-attn; no document lies across rows."""
    n = IDS.shape[1]
    bounds = torch.tensor([0, FIRST, n, n + 4, 2 * n])
    model = model_of("llama", "ringweave").eval()
    got = model(IDS, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).logits
    torch.testing.assert_close(got[:1], alone("llama"), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got[1:, :4], model(IDS[1:, :4]).logits, atol=2e-5, rtol=1e-4)
    across = torch.tensor([0, FIRST, n + 4, 2 * n])
    with pytest.raises(rw.ShapeError, match="without a document across rows"):
        model(IDS, use_cache=False, cu_seq_lens_q=across, cu_seq_lens_k=across)


@torch.no_grad()
def test_bounds_that_change_between_calls() -> None:
    """New values in the same tensor are new documents, also for a mask that is passed again."""
    model, bounds = model_of("llama", "ringweave").eval(), BOUNDS.clone()
    options = {"use_cache": False, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    first = model(IDS[:1], **options).logits
    bounds[1] = 5
    second = model(IDS[:1], **options).logits
    assert not torch.allclose(first, second, atol=1e-3)
    torch.testing.assert_close(second[:, :5], model(IDS[:1, :5]).logits, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_pattern_counts_from_the_documents_of_bounds() -> None:
    """A pattern of the layers counts from the first token of each document that bounds name."""
    model = patch(model_of("llama", "eager").eval(), rw.SlidingWindow(3) | rw.Sinks(2))
    wanted = torch.cat([model(part, use_cache=False).logits for part in (IDS[:1, :FIRST], IDS[:1, FIRST:])], 1)
    torch.testing.assert_close(model(IDS[:1], use_cache=False, **APART).logits, wanted, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_documents_that_cannot_be_separated_are_refused() -> None:
    """Documents over cached keys, in chunks of the row, beside a sharded batch, or of other tokens raise errors."""
    model = model_of("llama", "ringweave").eval()
    cached = model(IDS[:1], use_cache=True)[CACHE]
    with pytest.raises(rw.UnsupportedError, match="2 queries over 25 keys, of which some are cached"):
        model(IDS[:1, :2], **{CACHE: cached}, **APART)
    with pytest.raises(rw.UnsupportedError, match="some are cached"):
        model(IDS[:1], **{CACHE: ModelCache()}, **APART)
    with pytest.raises(rw.UnsupportedError, match=r"counts from the first token of the row.*position_ids that restart"):
        model_of("llama4_text", "ringweave").eval()(IDS[:1], use_cache=False, **APART)
    with pytest.raises(rw.UnsupportedError, match="documents beside a sharded batch"):
        model(**context_parallel(model).shard(IDS[:1]), **APART)
    with pytest.raises(rw.ShapeError, match="cu_seq_lens_k: got None"):
        model(IDS[:1], use_cache=False, cu_seq_lens_q=BOUNDS)
    short = torch.tensor([0, FIRST, IDS.shape[1] - 1])
    with pytest.raises(rw.RingweaveError, match="22"):
        model(IDS[:1], use_cache=False, cu_seq_lens_q=short, cu_seq_lens_k=short)


@pytest.mark.parametrize("queries", [1, 8])
def test_a_window_without_a_mask(queries: int) -> None:
    """A layer's window restricts a call without a mask, as in flash-attn."""
    q, k = torch.randn(1, 2, queries, 16), torch.randn(1, 2, 8, 16)
    got = attend(torch.nn.Module(), q, k, k, None, sliding_window=3)[0]
    wanted = rw.attention(q, k, k, rw.SlidingWindow(2), q_offset=8 - queries)
    torch.testing.assert_close(got.transpose(1, 2), wanted)


# ---- weights on request ----------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_weights_are_those_of_eager(name: str) -> None:
    """``output_attentions`` gives eager's maps, and does not change a bit of the outputs."""
    options = {"attention_mask": LEFT, "output_attentions": True}
    wanted = model_of(name, "eager").eval()(IDS, **options).attentions
    model = model_of(name, "ringweave").eval()
    got = model(IDS, **options)
    assert torch.equal(got.logits, model(IDS, attention_mask=LEFT).logits)
    assert len(got.attentions) == len(wanted) > 0
    # eager gives queries without keys, which are padding, the average
    for x, y in zip(got.attentions, wanted, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x * LEFT[:, None, :, None], y * LEFT[:, None, :, None], atol=2e-6, rtol=1e-4)


def test_weights_have_gradients_and_any_length() -> None:
    """Maps of more keys than one call gives, over grouped heads, have the gradients of eager's."""
    q, k = torch.randn(1, 4, 5, 16, requires_grad=True), torch.randn(1, 2, 301, 16, requires_grad=True)
    bias, sinks = torch.randn(1, 4, 5, 301), torch.randn(4)
    out, got = attend(
        torch.nn.Module(), q, k, k, None, position_bias=bias, s_aux=sinks, is_causal=False, output_attentions=True
    )
    scores = q @ k.repeat_interleave(2, 1).mT / 4 + bias
    wanted = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(-1, -1, 5, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(out, (wanted @ k.repeat_interleave(2, 1)).transpose(1, 2), atol=1e-5, rtol=1e-4)
    upstream = torch.randn_like(wanted)
    for x, y in zip(*(torch.autograd.grad(w, (q, k), upstream) for w in (got, wanted)), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_the_cost_of_weights_is_told_once(told: Any) -> None:
    """The first map tells how many numbers it keeps and how often a layer computes."""
    model = model_of("llama", "ringweave").eval()
    for _ in range(2):
        model(IDS, output_attentions=True)
    (said,) = told()
    assert said.startswith("output_attentions: got 4,232 weights of each layer; wanted False where")
    assert said.endswith("Each layer computes attention 2 times and keeps all pairs.")


def test_weights_that_are_not_computed_are_refused() -> None:
    """Maps with dropout, of shards and of pages raise errors."""
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(rw.UnsupportedError, match=r"output_attentions: got dropout of 0.1"):
        attend(torch.nn.Module(), x, x, x, None, dropout=0.1, output_attentions=True)
    model = model_of("llama", "ringweave").eval()
    with torch.no_grad(), pytest.raises(rw.UnsupportedError, match="output_attentions: got keys in pages"):
        model(IDS, output_attentions=True, **{CACHE: ModelCache()})
    with pytest.raises(rw.UnsupportedError, match="output_attentions: got a sharded batch"):
        model(**context_parallel(model).shard(IDS), output_attentions=True)
