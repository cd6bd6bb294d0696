"""The case `quality` in its quick form resumes from its records, and its methods select the keys that they promise."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import ringweave as rw
from ringweave.adaptive import select
from ringweave_lab.bench.cases import quality
from ringweave_lab.bench.record import Measuring, Options, Score, Target
from ringweave_lab.bench.text import standard_library


def records(measuring: Measuring, count: int | None = None) -> list[object]:
    found: list[object] = []
    for record in measuring:
        found.append(record)
        if len(found) == count:
            break
    return found


def test_it_resumes_from_its_records_and_draws_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "SELECTORS", ("mean", "top_p"))
    options = Options(quick=True, folder=str(tmp_path))
    first = records(quality.measure(options, lambda text: None), 7)
    said: list[str] = []
    whole = records(quality.measure(options, said.append))
    assert whole[:7] == first
    # existing records are not measured again
    assert not any("local + random, excerpt" in text for text in said)
    scores = [each for each in whole if isinstance(each, Score)]
    assert {each.part for each in scores} == {
        "recall", "recall beyond the window", "bits per byte", "needle", "associative recall",
    }  # fmt: skip
    assert all(0 < each.density <= 1.01 for each in scores)
    by_name = {each.method: each for each in scores if each.part == "recall"}
    assert by_name["best blocks"].value >= max(by_name[name].value for name in ("local", "local + random", "mean"))
    beyond = {each.method: each.value for each in scores if each.part == "recall beyond the window"}
    assert beyond.keys() == by_name.keys()
    assert all(0 <= share <= 1 for share in beyond.values())
    assert beyond["mean"] > 0
    assert len(by_name["indexer"].curve) == quality._INDEXER_STEPS * quality.QUICK.recall[2]
    assert len(by_name["tracker"].curve) == quality.QUICK.recall[2] + 1
    found = {each.method: each.value for each in scores if each.part == "needle"}
    assert found["dense"] == found["hierarchical"] == 1
    assert found["local + random"] < 1
    assert len([each for each in whole if isinstance(each, Target)]) == 7
    assert ElementTree.parse(tmp_path / "quality.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    lines = quality.spread(scores)
    assert [line["seeds"] for line in lines] == [1] * len(lines)
    # a killed run may leave half a line
    with (tmp_path / "scores.jsonl").open("a") as file:
        file.write('{"part": "recall", "meth')
    assert records(quality.measure(options, said.append)) == whole


def test_weight_beyond_the_window_is_that_of_far_tiles() -> None:
    """The weight beyond the window sums the dense weights of block pairs two or more apart, without the first block of keys."""
    n, side = 256, 32
    q, k, v, _ = quality.questions("associative recall", n, 0)
    lse = rw.attention_with_lse(q, k, v, rw.Causal()).lse
    blocks = torch.arange(n) // side
    far = (blocks[:, None] - blocks >= 2) & (blocks > 0)
    weights = (q.double() @ k.double().mT / 64**0.5 - lse.double()[..., None]).exp()
    table = select(q, k, top_k=3, block_size=side) & rw.Causal()
    for pattern in (rw.Causal(), table):
        want = (weights * (far & pattern.to_dense(n, n, heads=4))).sum()
        assert quality.Seen(q, k, lse).far(pattern, side) == pytest.approx(float(want), rel=1e-5)


def test_choices_have_the_density_asked_for() -> None:
    n, density = 512, 0.25
    q, k, _, _ = quality.questions("needle", n, 0)
    blocks = torch.arange(1, n // 32 + 1)
    wanted = torch.maximum((blocks * density).ceil(), blocks.clamp(max=2))
    tables = quality.static(n, density, 0) | {
        name: quality.chosen(name, q, k, density) for name in (*quality.SELECTORS, "means of pools")
    }
    for name, pattern in tables.items():
        if name == "bigbird":
            assert 0.3 * density < quality.share(pattern, n) < 1.5 * density
            continue
        (table,) = [part for part in pattern.parts if isinstance(part, rw.BlockTable)]  # type: ignore[attr-defined]
        counts = table.mask.sum(-1).reshape(4, -1)
        if name == "top_p":
            assert 0.8 * wanted.sum() <= counts.float().mean(0).sum() <= wanted.sum()
        else:
            assert torch.equal(counts.float(), wanted.expand(4, -1)), name
        assert table.mask.reshape(4, 16, 16).diagonal(dim1=1, dim2=2).all(), name


def test_every_key_that_is_looked_for_is_in_the_past() -> None:
    for kind in ("needle", "associative recall"):
        q, k, _, (rows, wanted) = quality.questions(kind, 512, 1)
        assert (wanted < rows).all()
        head = torch.arange(4)
        assert (((q @ k.mT)[0, head, rows, :].argmax(-1)) == wanted).all()


def test_trained_models_have_their_own_state() -> None:
    sizes = dataclasses.replace(quality.QUICK, text=(128, 5, 2))
    kept = quality.Kept(None)
    scores = {each.method: each for each in quality.bits(sizes, standard_library(2**18), kept, lambda text: None)}
    assert scores["dense"].density == pytest.approx(1.0)
    assert all(len(each.curve) == 5 and 0 < each.value < 9 for each in scores.values())
    # the runs have equal weights and text until attention differs
    assert len({each.curve[0] for each in scores.values() if each.method in ("dense", "indexer")}) == 1
    # dense first, then at most half
    scheduled = quality.Trained("scheduled", 128, 0.25, 5, 0)
    assert scheduled.schedule.density == 0.5
