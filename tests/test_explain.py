"""The numbers of explain() are those of the plans, and its reasons those of the dispatch."""

from __future__ import annotations

import json

import pytest
import torch

import ringweave as rw
from ringweave.backends import cpu
from ringweave.reports.explanation import explain

WINDOW = (rw.SlidingWindow(200) | rw.Sinks(4)) & rw.Causal()


@pytest.mark.parametrize(
    "pattern",
    [
        WINDOW,
        rw.Causal(),
        rw.Full(),
        rw.Dilated(20, 16),
        rw.patterns.dilated_blocks(16, [1, 64]),
        rw.LongNet([64, 256], [1, 4], causal=True),
        rw.from_mask_mod(lambda b, h, q, k: (q + k + h) % 5 == 0),
    ],
    ids=repr,
)
@pytest.mark.parametrize(("nq", "nk", "q_offset"), [(1000, 1000, 0), (300, 1000, 700), (64, 500, 0)])
def test_pairs_are_counted_exactly(pattern: rw.Pattern, nq: int, nk: int, q_offset: int) -> None:
    facts = explain(pattern, nq, nk, heads=2, batch=2, q_offset=q_offset, as_dict=True)
    dense = pattern.to_dense(nq, nk, 2, batch=2, q_offset=q_offset)
    assert facts["pairs"]["allowed"] == int(dense.sum())
    assert facts["pairs"]["all"] == 4 * nq * nk
    assert facts["pairs"]["density"] == pytest.approx(float(dense.double().mean()))
    assert facts["pairs"]["allowed"] <= facts["pairs"]["computed"]
    for entry in facts["branches"]:
        assert entry["full"] + entry["partial"] == entry["tiles"]


def test_tiles_are_those_of_the_plan() -> None:
    facts = explain(WINDOW, 2000, heads=3, as_dict=True)
    plan = rw.plan(WINDOW, 2000, heads=3)
    (entry,) = facts["branches"]
    assert facts["tiles"]["computed"] == entry["tiles"] == plan.tiles
    assert entry["full"] == 3 * int((plan.mask_id < 0).sum())
    assert entry["masks"] == plan.mask_words.shape[0]
    assert entry["groups"] == 1
    assert entry["tile"] == [[plan.q_tile, plan.kv_tile]]
    assert facts["memory"]["plan"] == plan.nbytes
    tiled = torch.zeros(plan.q_tiles, plan.kv_tiles, dtype=torch.bool)
    tiled[plan.tile_rows(), plan.col.long()] = True
    whole = tiled.repeat_interleave(plan.q_tile, 0).repeat_interleave(plan.kv_tile, 1)[:2000, :2000]
    assert facts["pairs"]["computed"] == 3 * int(whole.sum())
    assert facts["pairs"]["computed_density"] == plan.computed_density == pytest.approx(float(whole.double().mean()))
    assert facts["pairs"]["computed_over_allowed"] == pytest.approx(plan.computed_density / plan.density)


def test_branches_of_one_rate_are_one_entry() -> None:
    facts = explain(rw.LongNet([512, 2048], [1, 4]), 2050, heads=8, as_dict=True)
    one, four = facts["branches"]
    assert (one["rate"], one["views"], one["queries"], one["heads"]) == (1, 1, [2050], list(range(8)))
    assert (four["rate"], four["views"], four["queries"], four["heads"]) == (4, 4, [512, 513], list(range(8)))


def test_causality_is_told() -> None:
    leaking = rw.SlidingWindow(192) & rw.Causal() | rw.Sinks(32)
    text = "not causal: 496 pairs see the future, the first is query 0, key 1"
    assert f"causality {text}" in explain(leaking, 1024)
    assert explain(leaking, 1024, as_dict=True)["causality"] == {
        "causal": False, "future_pairs": 496, "first": {"query": 0, "key": 1, "batch": 0, "head": 0}, "text": text,
    }  # fmt: skip
    assert "causality causal\n" in explain(WINDOW, 1024)
    facts = explain(rw.Full(), 2**24, backend="sdpa", as_dict=True)
    assert facts["causality"]["future_pairs"] == 2**23 * (2**24 - 1)


def test_memory_and_flops() -> None:
    facts = explain(
        rw.Full(), 128, 256, heads=8, kv_heads=2, head_dim=64, value_dim=32, batch=2, dtype=torch.bfloat16, as_dict=True
    )
    memory = facts["memory"]
    assert memory["q"] == 2 * 8 * 128 * 64 * 2
    assert memory["k"] == 2 * 2 * 256 * 64 * 2
    assert memory["v"] == 2 * 2 * 256 * 32 * 2
    assert memory["out"] == 2 * 8 * 128 * 32 * 2
    assert memory["lse"] == 2 * 8 * 128 * 4
    assert memory["activations"] == sum(memory[name] for name in ("q", "k", "v", "out", "lse"))
    flops = facts["flops"]
    assert flops["forward"] == flops["dense_forward"] == 2 * 8 * 128 * 256 * 2 * (64 + 32)
    assert flops["backward"] == 2.5 * flops["forward"]
    assert flops["dense_over_this"] == 1.0


def test_backends_and_why_not_the_others() -> None:
    # float64, which the native kernel does not compute, so the choice is the same without it
    facts = explain(rw.Causal(), 1000, dtype=torch.float64, as_dict=True)
    assert facts["backend"]["chosen"] == [{"backend": "sdpa", "branches": 1}]
    assert facts["pairs"]["allowed"] == facts["pairs"]["computed"] == 1000 * 1001 // 2
    assert "sdpa is preferred" in facts["backend"]["others"]["dense_batched"][0]
    facts = explain(WINDOW, 1000, dtype=torch.float64, as_dict=True)
    assert facts["backend"]["chosen"] == [{"backend": "dense_batched", "branches": 1}]
    assert "neither full nor causal" in facts["backend"]["others"]["sdpa"][0]
    facts = explain(rw.Causal(), 1000, backend="dense_batched", as_dict=True)
    assert facts["backend"]["others"]["sdpa"] == ["could run it; dense_batched was asked for"]
    facts = explain(rw.Dilated(3, 4), 100, backend="reference", as_dict=True)
    assert facts["backend"]["chosen"] == [{"backend": "reference", "branches": 1}]
    assert facts["pairs"]["computed"] == 100 * 100
    with pytest.raises(rw.UnsupportedError, match="neither full nor causal"):
        explain(WINDOW, 1000, backend="sdpa")


def test_terms_and_dropout_exclude_backends_by_name() -> None:
    """Terms and dropout exclude sdpa, and explain names them; float64 excludes the native kernel."""
    terms = [rw.Softcap(30.0), rw.DistanceBias(torch.zeros(4, 2**16 + 1, requires_grad=True))]
    facts = explain(rw.Causal(), 1000, heads=4, dtype=torch.float64, terms=terms, dropout=0.1, as_dict=True)
    assert facts["sizes"]["features"] == ["DistanceBias", "Softcap", "dropout"]
    assert facts["backend"]["chosen"] == [{"backend": "dense_batched", "branches": 1}]
    assert facts["backend"]["others"]["sdpa"] == ["it computes no DistanceBias and no Softcap and no dropout"]
    text = explain(rw.Causal(), 1000, heads=4, terms=rw.Softcap(30.0))
    assert "with Softcap\n" in text
    assert "not sdpa: it computes no Softcap" in text
    assert "with Softcap" not in explain(rw.Causal(), 1000)
    with pytest.raises(rw.UnsupportedError, match="it computes no dropout"):
        explain(rw.Causal(), 1000, dropout=0.1, backend="sdpa")
    with pytest.raises(rw.ShapeError, match=r"table: got shape .* with Hq = 8, the number of query heads"):
        explain(rw.Causal(), 1000, heads=8, terms=terms)


@pytest.mark.skipif(cpu.module() is None, reason="the native kernel is absent: there was no compiler")
def test_scratch_counts_what_a_tables_gradient_is_summed_in() -> None:
    held = []
    for learns in (False, True):
        terms = rw.DistanceBias(torch.zeros(4, 2**16 + 1, requires_grad=learns))
        held.append(explain(rw.Causal(), 256, heads=4, backend="cpu", terms=terms, as_dict=True)["memory"]["scratch"])
    # at least 64 bits an entry
    assert held[1] - held[0] >= 8 * 4 * 2**16


def test_a_long_causal_call_is_explained_without_its_plan() -> None:
    n = 2**24
    assert explain(rw.Causal(), n, as_dict=True)["pairs"]["allowed"] == n * (n + 1) // 2


def test_text_says_the_same() -> None:
    facts = explain(WINDOW, 2000, as_dict=True)
    text = explain(WINDOW, 2000)
    assert text.splitlines()[0] == f"pattern   {WINDOW!r}"
    for number in (facts["pairs"]["allowed"], facts["pairs"]["computed"], facts["tiles"]["computed"]):
        assert f"{number:,}" in text
    assert "not sdpa: the pattern is neither full nor causal" in text
    assert "backward" in text
    assert "\nbackward" in text
    assert "\nbackward" not in explain(WINDOW, 2000, needs_grad=False)
    assert text.isascii()
    assert json.loads(json.dumps(facts)) == facts


def test_how_functions_are_computed() -> None:
    """A function with the pairs of a pattern is that pattern; another one is evaluated, or called."""

    def counted(b, h, q, k):  # type: ignore[no-untyped-def]
        return torch.from_numpy(q.numpy() * k.numpy() % 2 == 0)

    def causal(b, h, q, k):  # type: ignore[no-untyped-def]
        return q >= k

    # functions with equal graphs keep their names
    assert rw.explain(rw.from_mask_mod(causal), 64, as_dict=True)["functions"] == ["causal: q >= k"]
    facts = rw.explain(rw.from_mask_mod(lambda b, h, q, k: q >= k), 64, as_dict=True)
    assert (facts["pattern"], facts["functions"]) == ("Causal()", ["<lambda>: q >= k"])
    said = rw.explain(rw.Causal() & rw.from_mask_mod(lambda b, h, q, k: (q * k * k) % 7 > 3), 3000)
    formula = "<lambda>: q * k * k % 7 > 3"
    assert f"function  {formula}, evaluated in tiles: its pairs are no pattern, or too many zones" in said
    said = rw.explain(rw.from_mask_mod(counted), 64)
    assert "function  counted is called at each call: it uses .numpy of a score or an index" in said
