"""Test caches: ModelCache's pages, and a quantised cache of transformers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, QuantizedLayer

import ringweave as rw
from ringweave.integrations.transformers import ModelCache, interface, patch
from ringweave.precision import STORED, dequantize_rows, quantize_rows

from ..oracle import Expected, Inputs
from .frames import calls
from .test_models import EAGER, IDS, LEFT
from .tiny import CACHE, config_of, model_of


def said(model: Any, prompt: Tensor = IDS[:, :11], mask: Tensor = LEFT[:, :11], **options: Any) -> Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None} | options
    return model.eval().generate(prompt, attention_mask=mask, **options)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("mode", ["greedy", "beam", "chunked prefill"])
def test_pages_give_the_same_tokens(name: str, mode: str) -> None:
    """Windows with a soft cap, sinks and chunks give the same tokens over pages; beams share pages and diverge."""
    options: dict[str, Any] = {"greedy": {}, "beam": {"num_beams": 3}, "chunked prefill": {"prefill_chunk_size": 7}}[
        mode
    ]
    wanted = said(model_of(name, "eager" if name in EAGER else "sdpa"), **options)
    got = said(model_of(name, "ringweave"), **{CACHE: ModelCache(40, page=16)}, **options)
    assert torch.equal(got, wanted)


def test_a_prompt_looked_up_is_cut_from_the_pages() -> None:
    prompt, mask = IDS[1:, :11], torch.ones_like(IDS[1:, :11])
    wanted = said(model_of("llama", "sdpa"), prompt, mask)
    cache = ModelCache(64)
    got = said(model_of("llama", "ringweave"), prompt, mask, prompt_lookup_num_tokens=3, **{CACHE: cache})
    assert torch.equal(got, wanted)


def test_pages_hold_a_pattern_of_ones_own_and_are_used_again() -> None:
    model = patch(model_of("llama", "eager").eval(), rw.SlidingWindow(3) | rw.Sinks(2))
    with torch.no_grad():
        wanted = model(IDS).logits
        cache = ModelCache(32, page=16)
        for _ in range(2):
            parts = [model(part, **{CACHE: cache}).logits for part in IDS.split([9, 1, 1, 12], 1)]
            torch.testing.assert_close(torch.cat(parts, 1), wanted)
            assert cache.get_seq_length() == 23
            pages = [layer.pages for layer in cache.layers]
            cache.reset()
            assert cache.get_seq_length() == 0
            assert {each.free_pages for each in pages} == {4}


def test_a_pattern_counts_from_each_sequences_first_token_in_pages_too() -> None:
    model = patch(model_of("llama", "eager"), rw.SlidingWindow(3) | rw.Sinks(2))
    assert torch.equal(said(model, **{CACHE: ModelCache(40, page=16)}), said(model))
    patch(model, rw.SlidingWindow(3))
    assert not torch.equal(said(model, **{CACHE: ModelCache(40, page=16)}), said(model_of("llama", "sdpa")))


def test_a_pattern_of_ones_own_stands_where_a_static_caches_query_does() -> None:
    model = patch(model_of("llama", "eager"), rw.SlidingWindow(3) | rw.Sinks(2))
    assert torch.equal(said(model, cache_implementation="static", disable_compile=True), said(model, use_cache=False))


def test_copies_of_a_prompts_pages_go_on_by_themselves() -> None:
    model, cache = model_of("llama", "ringweave").eval(), ModelCache(40, page=16)
    # the cache is made in inference mode and written to outside of it
    with torch.inference_mode():
        model(IDS[:, :9], **{CACHE: cache})
    whole = torch.ones_like(IDS[:, :11])
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        wanted = said(model_of("llama", "sdpa"), mask=whole)
        assert torch.equal(said(model, mask=whole, **{CACHE: copied}), wanted)


def test_a_cache_that_was_reset_takes_another_batch() -> None:
    model, cache = model_of("llama", "ringweave").eval(), ModelCache(32, page=16)
    with torch.no_grad():
        for ids in (IDS, IDS[:1], IDS.repeat(2, 1)):
            torch.testing.assert_close(model(ids, **{CACHE: cache}).logits, model(ids).logits)
            cache.reset()


def test_what_is_cropped_is_there() -> None:
    model, cache = model_of("llama", "ringweave").eval(), ModelCache(32)
    with torch.no_grad():
        model(IDS, **{CACHE: cache})
    for number in (5, -24):
        with pytest.raises(rw.ShapeError, match=f"tokens_to_remove: got {number}; wanted a number from -23 to 0"):
            cache.crop(number)
        assert cache.get_seq_length() == 23
    cache.crop(0)
    cache.crop(-23)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("mine", [False, True])
def test_an_assistant(mine: bool) -> None:
    prompt, mask = IDS[1:, :11], torch.ones_like(IDS[1:, :11])
    assistant = model_of("llama", "ringweave", config_of("llama", num_hidden_layers=1)).eval()
    options: dict[str, Any] = {CACHE: ModelCache(64)} if mine else {}
    got = said(model_of("llama", "ringweave"), prompt, mask, assistant_model=assistant, **options)
    assert torch.equal(got, said(model_of("llama", "sdpa"), prompt, mask))


def test_what_pages_cannot_do_is_said() -> None:
    with pytest.raises(rw.ShapeError, match="max_tokens: got 0"):
        ModelCache(0)
    with pytest.raises(rw.ShapeError, match="page: got 7"):
        ModelCache(8, page=7)
    with pytest.raises(rw.UnsupportedError, match="precision: got str"):
        ModelCache(8, precision="int8")  # type: ignore[arg-type]
    with torch.no_grad():
        says = r"max_tokens: got 16, with 0 tokens .* 23 more; wanted at least 23: .* \+ max_new_tokens. .*reset\(\)"
        with pytest.raises(rw.ShapeError, match=says):
            model_of("llama", "ringweave").eval()(IDS, **{CACHE: ModelCache(16, page=16)})
        drops = config_of("llama")
        drops.attention_dropout = 0.1
        with pytest.raises(rw.UnsupportedError, match=r"dropout: got 0.1 with keys in pages; .* Call model.eval\(\)"):
            model_of("llama", "ringweave", drops).train()(IDS, **{CACHE: ModelCache(32)})
    with pytest.raises(rw.UnsupportedError, match="gradients"):
        model_of("llama", "ringweave")(IDS, **{CACHE: ModelCache(32)})


@pytest.mark.parametrize("mode", ["greedy", "beam", "chunked prefill", "8 bits"])
def test_a_cache_without_a_number_grows(mode: str) -> None:
    """A cache without ``max_tokens`` gives the tokens of a cache with enough room, and doubles its pages."""
    options: dict[str, Any] = {"beam": {"num_beams": 3}, "chunked prefill": {"prefill_chunk_size": 7}}.get(mode, {})
    precision = rw.Precision(kv=torch.int8) if mode == "8 bits" else None
    model, options = model_of("gpt_oss", "ringweave"), options | {"max_new_tokens": 60}
    cache = ModelCache(page=16, precision=precision)
    fixed = {CACHE: ModelCache(80, page=16, precision=precision)}
    assert torch.equal(said(model, **{CACHE: cache}, **options), said(model, **fixed, **options))
    assert cache.get_max_length() == -1
    # 70 tokens, the last without a cached key: pages of 16, 32, 64 and 128 tokens
    assert [layer.length for layer in cache.layers] == [128, 128]


def test_a_cache_is_used_for_a_second_conversation() -> None:
    """After ``reset()`` a cache gives the results of a new cache; without it, the error names ``reset()``."""
    model, second = model_of("llama", "ringweave"), IDS[:, 11:]
    for cache in (ModelCache(page=16), ModelCache(32, page=16)):
        said(model, **{CACHE: cache})
        cache.reset()
        got = said(model, second, torch.ones_like(second), **{CACHE: cache})
        assert torch.equal(got, said(model, second, torch.ones_like(second)))
    with torch.no_grad(), pytest.raises(rw.ShapeError, match=r"with 23 tokens .* call reset\(\) before another"):
        model(IDS, **{CACHE: cache})


def as_of_a_dynamic_cache(change: Any, steps: int = 2, **options: Any) -> None:
    """Change a filled cache, and compare the logits of the next steps with those of transformers' cache."""
    caches: tuple[Cache, Cache] = (ModelCache(32, page=16, **options), DynamicCache())
    models = [model_of("llama", attention).eval() for attention in ("ringweave", "sdpa")]
    with torch.no_grad():
        for model, cache in zip(models, caches, strict=True):
            model(IDS[:, :17], **{CACHE: cache})
        for step in range(steps):
            for cache in caches:
                change(cache)
            batch = caches[1].layers[0].keys.shape[0]
            assert caches[0].batch_size == batch
            ids = torch.arange(3, 3 + batch)[:, None] + step
            got, wanted = (model(ids, **{CACHE: cache}) for model, cache in zip(models, caches, strict=True))
            atol = 0.2 if options else 1e-4
            torch.testing.assert_close(got.logits, wanted.logits, atol=atol, rtol=0)


CHANGES: dict[str, Any] = {
    "repeated": lambda cache: cache.batch_repeat_interleave(3),
    "one": lambda cache: cache.batch_select_indices(torch.tensor([-1])),
    "several times": lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1, -1, 0])),
    "more beams": lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])),
    "fewer beams": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "as contrastive search": lambda cache: (
        cache.batch_repeat_interleave(4),
        cache.batch_select_indices(torch.tensor([1, 6])),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_sequences_that_are_repeated_and_chosen_go_on(name: str) -> None:
    """Sequences share pages until one writes to them, at first to the last page of the prompt."""
    as_of_a_dynamic_cache(CHANGES[name])


@pytest.mark.parametrize("kv", list(STORED), ids=str)
def test_sequences_in_8_bits_are_repeated(kv: torch.dtype) -> None:
    as_of_a_dynamic_cache(CHANGES["as contrastive search"], precision=rw.Precision(kv=kv))


def test_repeated_sequences_share_pages_and_have_room_for_their_own() -> None:
    model, cache = model_of("llama", "ringweave").eval(), ModelCache(48, page=16)
    with torch.no_grad():
        model(IDS[:, :17], **{CACHE: cache})
        pages = cache.layers[0].pages
        cache.batch_repeat_interleave(2)
        grown = cache.layers[0].pages
        # four sequences of three pages have room; two full pages and two partial ones are in use
        assert (pages.free_pages, grown.free_pages) == (2, 8)
        for _ in range(31):
            model(torch.full((4, 1), 5), **{CACHE: cache})
        assert grown.free_pages == 2
        cache.batch_select_indices(torch.tensor([0, 3]))
        assert cache.layers[0].pages.k is grown.k
        assert cache.layers[0].pages.free_pages == 6


# arguments of each method of transformers' cache
CALLS: dict[str, tuple[Any, ...]] = {
    "get_seq_length": (), "get_query_offset": (), "is_recording_past": (0,), "activate_past_recording": (),
    "has_previous_state": (), "reorder_cache": (torch.tensor([1, 0]),), "crop": (-2,), "reset": (),
    "batch_repeat_interleave": (2,), "batch_select_indices": (torch.tensor([0]),), "get_conv_state": (0,),
    "get_recurrent_state": (0,), "update_conv_state": (torch.zeros(1), 0), "update_indexer": (torch.zeros(1), 0),
    "update_recurrent_state": (torch.zeros(1), 0), "prefetch": (0,),
    "early_initialization": (2, 2, 8, torch.float32, torch.device("cpu")),
}  # fmt: skip
OTHER: dict[str, Any] = {
    "get_max_length": ((), 32), "get_mask_sizes": ((1, 0), (32, 0)), "offload": ((0,), rw.UnsupportedError),
}  # fmt: skip


def test_every_method_of_the_librarys_cache() -> None:
    """Each method answers or raises as a dynamic cache does, or as listed for pages; add new methods to the list."""
    methods = {name for name, what in vars(Cache).items() if callable(what) and not name.startswith("_")} - {"update"}
    assert methods == CALLS.keys() | OTHER.keys()

    def answer(name: str, cache: Cache, args: tuple[Any, ...]) -> Any:
        try:
            return getattr(cache, name)(*args)
        except Exception as error:  # noqa: BLE001  (whatever the library's raises)
            # a model that asks a cache without layers for a state gets a typed error
            kind = type(error)
            return rw.UnsupportedError if kind is IndexError and not len(cache) else kind

    def filled(attention: str, cache: Cache) -> Cache:
        with torch.no_grad():
            model_of("llama", attention).eval()(IDS[:, :9], **{CACHE: cache})
        return cache

    for name, args in CALLS.items():
        for fill in (filled, lambda attention, cache: cache):
            mine, theirs = fill("ringweave", ModelCache(32, page=16)), fill("sdpa", DynamicCache())
            assert answer(name, mine, args) == answer(name, theirs, args), name
            assert mine.get_seq_length() == theirs.get_seq_length(), name
    for name, (args, wanted) in OTHER.items():
        assert answer(name, filled("ringweave", ModelCache(32, page=16)), args) == wanted, name
    properties = {name for name, what in vars(Cache).items() if isinstance(what, property)}
    mine, theirs = filled("ringweave", ModelCache(32, page=16)), filled("sdpa", DynamicCache())
    for name in properties - {"batch_size"}:
        # layers of transformers do not know the batch
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.batch_size == 2


def test_no_sequence_is_left_of_pages() -> None:
    cache = ModelCache(32)
    cache.batch_repeat_interleave(2)
    with torch.no_grad():
        model_of("llama", "ringweave").eval()(IDS, **{CACHE: cache})
    with pytest.raises(rw.ShapeError, match="repeats: got 0; wanted"):
        cache.batch_repeat_interleave(0)
    with pytest.raises(rw.ShapeError, match="indices: got .*; wanted one sequence or more"):
        cache.batch_select_indices(torch.tensor([], dtype=torch.int64))


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
        said(model_of(name, attention), **{CACHE: Cache(layers=[Coarse(), Coarse()])})
        for attention in ("sdpa", "ringweave")
    ]
    assert torch.equal(*outs)


class Rounded(DynamicLayer):
    """Return the values of an 8-bit cache in float32."""

    kv = torch.int8

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key_states, value_states = (dequantize_rows(*quantize_rows(x, self.kv)) for x in (key_states, value_states))
        return super().update(key_states, value_states, *args, **kwargs)


class RoundedFloats(Rounded):
    kv = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("name", "mode", "kv"),
    [
        ("llama", "greedy", torch.float8_e4m3fn),
        ("llama", "chunked prefill", torch.int8),
        ("gpt_oss", "beam", torch.int8),
    ],
    ids=str,
)
def test_pages_in_8_bits_give_the_tokens_of_what_they_store(name: str, mode: str, kv: torch.dtype) -> None:
    """Beams copy scales with their pages, and a prompt in chunks rounds each token once."""
    options: dict[str, Any] = {"greedy": {}, "beam": {"num_beams": 3}, "chunked prefill": {"prefill_chunk_size": 7}}[
        mode
    ]
    kind = Rounded if kv == torch.int8 else RoundedFloats
    model = model_of(name, "eager" if name in EAGER else "sdpa")
    wanted = said(model, **{CACHE: Cache(layers=[kind(), kind()])}, **options)
    cache = ModelCache(40, page=16, precision=rw.Precision(kv=kv))
    assert torch.equal(said(model_of(name, "ringweave"), **{CACHE: cache}, **options), wanted)
    assert {layer.pages.k.dtype for layer in cache.layers} == {kv}


@pytest.mark.parametrize("kv", list(STORED), ids=str)
def test_pages_in_8_bits_are_attended_as_they_are_stored(kv: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a generation equals float64 attention over the values that its pages store at that time."""
    calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def attend(q: Tensor, pages: rw.PagedCache, pattern: rw.Pattern, **kwargs: Any) -> Tensor:
        out, nk = rw.paged_attention(q, pages, pattern, **kwargs), int(pages.lengths[0])
        assert pages.scales is not None
        k, v = (
            dequantize_rows(x, scale)[pages.table.long()].transpose(1, 2).flatten(2, 3)[:, :, :nk]
            for x, scale in ((pages.k, pages.scales.k), (pages.v, pages.scales.v))
        )
        calls.append((q.clone(), k, v, out))
        return out

    monkeypatch.setattr(interface, "paged_attention", attend)
    model = patch(model_of("llama", "eager"), rw.SlidingWindow(9) | rw.Sinks(2))
    cache = ModelCache(40, page=16, precision=rw.Precision(kv=kv))
    said(model, IDS[:, :11], torch.ones_like(IDS[:, :11]), **{CACHE: cache})
    assert len(calls) == 2 * 12
    for q, k, v, out in calls:
        nq, nk = q.shape[2], k.shape[2]
        pattern = (rw.SlidingWindow(9) | rw.Sinks(2)) & rw.Causal()
        counts = pattern.to_dense(nq, nk, q.shape[1], q_offset=nk - nq)
        x = Inputs(q, k, v, out, torch.zeros(q.shape[:3]))
        Expected.of(x, counts).check({"out": out})


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
            model(torch.randint(3, 64, (1, n)), **{CACHE: cache}, logits_to_keep=1)
            model(torch.tensor([[5]]), **{CACHE: cache})
            plan = patterns[-1].plan(1, 4096, q_offset=n)
            # its window of 101 keys, and the first 4
            assert patterns[-1].to_dense(1, 4096, q_offset=n).sum() == 105
            assert plan.nnz <= 4


@pytest.mark.parametrize("name", ["dynamic", "sliding", "pages"])
def test_a_step_of_a_model_makes_few_calls(name: str) -> None:
    """A step makes a bounded number of Python calls besides attention itself, the same at each step."""
    model = model_of("mistral", "ringweave", config_of("mistral", num_hidden_layers=1)).eval()
    makes: dict[str, Any] = {"sliding": lambda: DynamicCache(config=model.config), "pages": lambda: ModelCache(128)}
    cache, token = makes.get(name, DynamicCache)(), torch.full((2, 1), 5)
    with torch.no_grad():
        model(IDS, **{CACHE: cache})
        model(token, **{CACHE: cache})
        steps = [calls(lambda: model(token, **{CACHE: cache}), "integrations", "kv_cache.py") for _ in range(20)]
    assert len(set(steps)) == 1
    # with pages, the call's checks are added, and those by which a failed step leaves the cache as it was
    assert steps[0] <= (27 if name == "pages" else 10)
