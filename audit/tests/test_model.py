"""Audits of models of torch, ringweave and transformers, with masks that get lost."""

from __future__ import annotations

import inspect
import json
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from typer.testing import CliRunner

import ringweave as rw
import ringweave_audit as audit
from ringweave.cli.app import app
from ringweave_audit import html_report, model_zoo

transformers = pytest.importorskip("transformers")


class Block(nn.Module):
    """A layer that calls torch's attention with a given mask."""

    def __init__(self, pattern: rw.Pattern):
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.pattern = pattern

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, self.pattern.to_dense(x.shape[1]))
        return x + out.transpose(1, 2).flatten(2)


def six(dropped: int | None = None) -> nn.Module:
    window = rw.SlidingWindow(5)
    return nn.Sequential(*(Block(rw.Causal() if n == dropped else window) for n in range(6)))


def make() -> nn.Module:
    """A model function for the command line."""
    return six(4)


def test_window_dropped_in_one_layer_of_six() -> None:
    x = torch.randn(2, 20, 16)
    assert audit.model(six(), x, expect=rw.SlidingWindow(5)).agrees
    found = audit.model(six(4), x, expect=rw.SlidingWindow(5))
    assert [layer.agrees for layer in found.layers] == [True] * 4 + [False, True]
    assert found.layers[4].name == "4"
    assert (
        str(found)
        .splitlines()[4]
        .startswith("4 (scaled_dot_product_attention): attends Causal() instead of SlidingWindow(5)")
    )
    by_name = {"4": rw.Causal()} | {str(n): rw.SlidingWindow(5) for n in (0, 1, 2, 3, 5)}
    assert audit.model(six(4), x, expect=by_name).agrees


def test_torch_modules() -> None:
    encoder = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    x = torch.randn(2, 16, 32)
    assert audit.model(encoder, x, expect=rw.Full()).agrees
    padding = torch.arange(16) >= torch.tensor([[16], [9]])
    found = audit.model(
        encoder, {"src": x, "src_key_padding_mask": padding}, expect=rw.KeyPadding(torch.tensor([16, 9]))
    )
    assert found.agrees, str(found)
    mask = nn.Transformer.generate_square_subsequent_mask(16)
    assert audit.model(encoder, {"src": x, "src_mask": mask, "is_causal": True}, expect=rw.Causal()).agrees


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_and_ours() -> None:
    q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 20), 1, 1, 128, 128, device="cpu")
    with audit.intercepted() as calls:
        flex_attention(q, k, v, block_mask=mask)
        rw.attention(q, k, v, rw.SlidingWindow(20))
    assert [call.through for call in calls] == ["flex_attention", "ringweave"]
    assert audit.compare(calls[0].found, rw.SlidingWindow(19)).agrees
    assert "attends SlidingWindow(20)" in str(audit.compare(calls[1].found, rw.SlidingWindow(19)))


class Bypassed(nn.MultiheadAttention):
    """A subclass with a forward that a fused path bypasses."""

    def forward(self, query: Tensor, *args: object, **options: object) -> tuple[Tensor, None]:  # type: ignore[override]
        out = super().forward(query, *args, **options)[0]  # type: ignore[arg-type]
        return 2 * out, None


def test_a_fused_path_that_bypasses_a_module() -> None:
    encoder = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    encoder.self_attn = Bypassed(32, 4, batch_first=True)
    found = audit.model(encoder, torch.randn(2, 16, 32), expect=rw.Full())
    assert not found.agrees
    assert found.bypassed > 0.01
    assert "a fused path bypasses a module" in str(found)


def results(name: str, implementation: str, *cases: str) -> list[model_zoo.Result]:
    return list(model_zoo.run(model_zoo.target(name, 2), (implementation,), cases or tuple(model_zoo.CASES)))


# afmoe passes its mask by keyword; bigbird's decoder is causal without is_causal
@pytest.mark.parametrize(
    "name", ["mistral", "gemma3_text", "llama4_text", "modernbert", "gpt_oss", "afmoe", "bigbird_pegasus"]
)
def test_transformers(name: str) -> None:
    for result in results(name, "eager", "unpadded", "left", "right", "cached", "static"):
        decodes = name != "modernbert" or result.case not in ("cached", "static")
        assert result.agrees is (True if decodes else None), html_report.lines(result)


def test_the_promise_of_a_configuration() -> None:
    (result,) = results("gemma3_text", "sdpa", "unpadded")
    assert result.audit is not None
    first = result.audit.layers[0]
    assert first.comparison is not None
    assert "SlidingWindow(7)" in first.sentence
    (sinks,) = results("gpt_oss", "eager", "unpadded")
    assert sinks.audit is not None
    assert sinks.audit.layers[0].found.sinks is not None


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_mask_that_a_model_drops() -> None:
    """Doge builds its mask from numbers, and does not read the block mask of flex_attention."""
    (sound,) = results("doge", "eager", "unpadded")
    assert sound.agrees, html_report.lines(sound)
    (flex,) = results("doge", "flex_attention", "unpadded")
    assert "future visible from token 0: attends Full() instead of" in html_report.lines(flex)[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_between_tokens(attention: str) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    config._attn_implementation = attention
    model, padding = transformers.LlamaForCausalLM(config).eval(), torch.ones(2, 12, dtype=torch.long)
    padding[0, 4], padding[1, [0, 1, 6]] = 0, 0
    inputs = {"input_ids": torch.arange(24).view(2, 12), "attention_mask": padding}
    found = rw.audit.model(model, inputs)
    assert found.agrees, str(found)
    cache = transformers.StaticCache(config=config, max_cache_len=19)
    cached = {"past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else "cache": cache}
    found = rw.audit.model(model, inputs | cached)
    assert found.agrees, str(found)
    everything = rw.audit.model(model, inputs, expect=rw.Causal())
    assert not everything.agrees
    assert "pairs missing" in str(everything)


def test_padding_of_a_text_is_none_of_an_image_with_as_many_tokens() -> None:
    part = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.CLIPConfig(
        text_config=part | {"vocab_size": 64}, vision_config=part | {"image_size": 32, "patch_size": 8}
    )
    padding = torch.ones(2, 17, dtype=torch.int64)
    padding[1, 12:] = 0
    inputs = {"input_ids": torch.full((2, 17), 5), "pixel_values": torch.randn(2, 3, 32, 32), "attention_mask": padding}
    found = audit.model(transformers.CLIPModel(config), inputs)
    assert [layer.found.pairs.shape[2:] for layer in found.layers] == [(17, 17), (17, 17)]
    assert found.agrees, str(found)


class Across(nn.Module):
    """Cross-attention of a decoder may attend all keys of the encoder, regardless of the layer's kind."""

    is_causal, layer_idx = True, 0

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, None]
        return F.scaled_dot_product_attention(y[:, :, :5], y, y)[:, 0]


def test_a_window_is_none_of_an_encoder() -> None:
    model = nn.Sequential()
    model.config = transformers.MistralConfig(sliding_window=3)
    model.register_module("cross_attn", Across())
    found = audit.model(model, torch.randn(1, 9, 16))
    assert str(found) == "cross_attn (scaled_dot_product_attention): agrees with Full()"


def test_inputs_of_ones_own() -> None:
    target = model_zoo.target("mistral", 1)
    own = model_zoo.Target("mistral", target.build, {"input_ids": torch.full((1, 9), 5)})
    shapes = set()
    for result in model_zoo.run(own, ("eager",), ("unpadded", "packed", "cached")):
        assert result.agrees
        assert result.audit is not None
        shapes.add(tuple(result.audit.layers[0].found.pairs.shape[2:]))
    # the cache holds the keys within the window
    assert shapes == {(9, 9), (3, 9)}


def test_masks_lost_in_transformers() -> None:
    """An attention function without a mask function: transformers then builds no mask, and padding is lost silently."""
    from transformers import AttentionInterface

    def bare(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: object
    ) -> tuple[Tensor, None]:
        ratio = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and q.shape[2] > 1)
        return out.transpose(1, 2), None

    AttentionInterface.register("bare", bare)
    try:
        found = {result.case: result for result in results("mistral", "bare", "unpadded", "left")}
    finally:
        del AttentionInterface._global_mapping["bare"]
    assert "attends Causal() instead of SlidingWindow(7)" in html_report.lines(found["unpadded"])[0]
    said = html_report.lines(found["left"])[0]
    assert "attends Causal() instead of SlidingWindow(7)" in said or "padding is ignored" in said or "row 1" in said


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    out = tmp_path / "report.html"
    done = run.invoke(
        app, ["audit", "mistral", "-i", "eager", "-c", "unpadded,left", "--layers", "2", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "2 cases: 2 examined, 2 agree, 0 differ, 0 not examined." in done.output
    assert "<svg" not in out.read_text()
    done = run.invoke(app, ["audit", "mistral", "-i", "eager", "-c", "packed", "--layers", "1", "--json"])
    layers = json.loads(done.stdout)["results"][0]["layers"]
    assert layers[0]["agrees"]
    assert layers[0]["scale"] == pytest.approx(0.25, rel=0.05)
    done = run.invoke(app, ["audit", "no_such_model_type"])
    assert done.exit_code == 2
    assert "audit" in run.invoke(app, ["--help"]).output
    done = run.invoke(app, ["audit", "--kernel", "audit.tests.functions:a_softmax_a_tile", "--examples", "5"])
    assert done.exit_code == 1
    assert "broken" in done.output


def only_causal(q: Tensor, k: Tensor, v: Tensor, pattern: rw.Pattern) -> Tensor:
    """A kernel for the command line that refuses every call."""
    raise NotImplementedError


@pytest.mark.parametrize("form", ["text", "JSON", "page"])
def test_unexamined_cases_are_counted(form: str, tmp_path: Path) -> None:
    """Cases that a model does not support, that raise, or that nothing is expected of, are not examined: status 2."""
    out = tmp_path / "report.html"
    options = {"text": [], "JSON": ["--json"], "page": ["--out", str(out)]}[form]
    command = ["audit", "modernbert", "-i", "eager,nothing_like_it", "-c", "unpadded,cached", "--layers", "1"]
    done = CliRunner().invoke(app, command + options)
    assert done.exit_code == 2, done.output
    text = out.read_text() if form == "page" else done.stdout
    if form == "JSON":
        said = json.loads(text)
        counts = {"agrees": None, "examined": 1, "agreed": 1, "differing": 0, "unexamined": 2}
        assert {name: said[name] for name in counts} == counts
        assert [each["agrees"] for each in said["results"]] == [True, None, None]
        assert [each["agreed"] for each in said["results"]] == [1, 0, 0]
    else:
        assert "3 cases: 1 examined, 1 agree, 0 differ, 2 not examined." in text
        assert text.count(">not examined<" if form == "page" else "not examined  ") == 2
        assert "the model is not a causal decoder" in " ".join(text.split())


@pytest.mark.parametrize(("target", "says"), [("make", 1), ("sound", 0)])
def test_a_difference_outweighs_unexamined_calls(target: str, says: int) -> None:
    """A call without an expected pattern is not examined, whether another one agrees or differs."""
    model = six(4 if target == "make" else None)
    x, causal = torch.randn(1, 20, 16), rw.SlidingWindow(5)
    some = audit.model(model, x, expect={"4": causal})
    assert some.agrees is (False if says else None)
    assert (some.counts.examined, some.counts.differing, some.counts.unexamined) == (1, says, 5)
    assert str(some).count("not examined, as no pattern is expected: attends SlidingWindow(5)") == 5
    assert some.counts.status == (1 if says else 2)


def test_a_rule_that_a_kernel_refuses_is_not_examined() -> None:
    """The kit counts a rule as not examined if the kernel refused every call."""
    command = ["audit", "--kernel", "audit.tests.test_model:only_causal", "--examples", "3"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert done.output.count("not examined  ") == 7
    assert "7 rules: 0 examined, 0 agree, 0 differ, 7 not examined." in done.output
    said = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert said["agrees"] is None
    assert {each["holds"] for each in said["rules"]} == {None}


def test_no_query_and_no_output_is_no_agreement() -> None:
    """A comparison of no query, and a search in no output, examine nothing."""
    pairs, none = rw.Full().to_dense(4), torch.zeros(1, 4, dtype=torch.bool)
    assert audit.compare(pairs, rw.Causal(), rows=none).agrees is None
    assert audit.leaks(lambda x: x.flip(1), torch.randn(1, 4, 2), rw.Causal(), rows=none).agrees is None


class Unread(nn.Module):
    """A module with an output that holds no tensor."""

    def forward(self, x: Tensor) -> str:
        return str(F.scaled_dot_product_attention(x, x, x).shape)


def test_outputs_that_are_not_compared_are_told() -> None:
    """Without a tensor in the outputs nothing tells whether a fused path bypasses a module."""
    found = audit.model(Unread(), torch.randn(1, 2, 6, 8), expect=rw.Full())
    assert (found.bypassed, found.agrees, found.counts.agreed) == (None, None, 1)
    assert "the outputs with and without the audit could not be compared" in str(found)


def test_a_fused_path_beside_a_cache_is_seen() -> None:
    """Outputs are compared over a cache too; the first call gets a copy of the cache."""
    for result in results("mistral", "eager", "cached", "static"):
        assert result.audit is not None
        assert result.audit.bypassed == 0.0


class Hiding(torch.nn.Module):
    """Hide random tokens in evaluation too, as models for masked images do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[:, torch.rand(x.shape[1]).argsort()[:8]]
        out: torch.Tensor = self.attention(kept, kept, kept)[0]
        return out


def test_chance_is_no_fused_path() -> None:
    found = audit.model(Hiding(), torch.randn(1, 20, 16, generator=torch.Generator().manual_seed(0)), expect=rw.Full())
    assert found.agrees, str(found)
    model, before = Hiding(), torch.get_rng_state()
    audit.model(model, torch.ones(1, 20, 16), expect=rw.Full())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_page_with_pictures(tmp_path: Path) -> None:
    found = audit.model(six(4), torch.randn(1, 20, 16), expect=rw.SlidingWindow(5))
    result = model_zoo.Result("eager", "unpadded", found)
    text = html_report.write_page("six", [result], 20, tmp_path / "a.html").read_text()
    assert text.count("<svg") == 1
    assert html_report.COLOURS["extra"] in text
    assert "4: attends Causal() instead of SlidingWindow(5)" in text


def test_parts_of_a_model_in_training_stay_in_their_modes() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    encoder.dropout.eval()
    modes = [module.training for module in encoder.modules()]
    audit.model(encoder, torch.randn(2, 6, 16), expect=rw.Full())
    assert [module.training for module in encoder.modules()] == modes


def test_a_name_of_no_module_that_attends_is_no_agreement() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    with pytest.raises(rw.ShapeError, match="expect: got attention; wanted modules that attend: self_attn"):
        audit.model(encoder, torch.randn(2, 6, 16), expect={"attention": rw.Full()})


def test_audits_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two threads run one after the other, remove their patches, and do not record each other's calls."""
    import torch.nn.attention.flex_attention as module

    def original(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + k + v

    # which is not compiled
    monkeypatch.setattr(module, "flex_attention", original)
    x, found = torch.randn(1, 1, 16, 16), list[str]()
    began, inside, over = (threading.Event() for _ in range(3))

    def other() -> None:
        module.flex_attention(x, x, x)
        began.set()
        with audit.intercepted() as calls:
            inside.set()
            over.wait(60)
            module.flex_attention(x, x, x)
        found.extend(call.through for call in calls)

    thread = threading.Thread(target=other)
    with audit.intercepted() as calls:
        thread.start()
        assert began.wait(60)
        inside.wait(0.3)
        assert not calls
        module.flex_attention(x, x, x)
        assert len(calls) == 1
    over.set()
    thread.join()
    assert found == ["flex_attention"]
    assert module.flex_attention is original


@pytest.mark.parametrize("shape", [(9, 8), (4, 9, 8), (2, 3, 4, 9, 8)])
def test_calls_of_any_rank_are_seen(shape: tuple[int, ...]) -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, torch.ones(9, 9, dtype=torch.bool).tril())

    assert audit.model(Layer(), torch.randn(shape), expect=rw.Causal()).agrees
    assert not audit.model(Layer(), torch.randn(shape), expect=rw.Full()).agrees


def test_a_module_without_a_batch_is_seen() -> None:
    x = torch.randn(9, 16)
    attends = nn.MultiheadAttention(16, 2)
    assert audit.model(attends, (x, x, x), expect=rw.Full()).agrees
    assert not audit.model(attends, (x, x, x), expect=rw.Causal()).agrees


def test_a_module_without_a_truth_is_named() -> None:
    class Empty(nn.Module):
        def __len__(self) -> int:
            raise TypeError("as a compiled module says")

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    found = audit.model(nn.Sequential(Empty(), nn.Identity()), torch.randn(1, 2, 6, 8), expect=rw.Full())
    assert [layer.name for layer in found.layers] == ["0"]
