"""Every cell of a picture shows the share of allowed pairs of the dense relation."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import ringweave as rw
from ringweave.reports import cells
from ringweave.reports.cells import picture
from ringweave.reports.picture import ASCII_SHADES, SHADES, art_rows, fill, plot

SVG = "{http://www.w3.org/2000/svg}"
PATTERNS = [
    rw.Causal(),
    (rw.SlidingWindow(30) | rw.Sinks(5)) & rw.Causal(),
    ~rw.SlidingWindow(9),
    rw.Dilated(4, 8),
    rw.Strided(7),
    rw.Segments(33),
    rw.patterns.longformer(17, [3, 40]),
    rw.patterns.sparse_transformer_fixed(32, 8),
    rw.from_mask_mod(lambda b, h, q, k: (q * k) % 3 == 0),
    rw.LongNet([16, 64], [1, 4], causal=True),
    rw.LongNet([30, 60], [1, 3], offset=1),
]


def by_cells(dense: np.ndarray, side: int) -> np.ndarray:
    number = -(-len(dense) // side)
    parts = [
        [dense[i * side : (i + 1) * side, j * side : (j + 1) * side] for j in range(number)] for i in range(number)
    ]
    return np.array([[part.mean() for part in row] for row in parts])


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 200, 333])
def test_cells_hold_the_share_of_allowed_pairs(pattern: rw.Pattern, tokens: int) -> None:
    heads = 4 if isinstance(pattern, rw.LongNet) else 1
    drawn = picture(pattern, tokens, heads=heads)
    dense = pattern.to_dense(tokens, heads=heads)[0].double().numpy()
    assert sorted(head for panel in drawn.panels for head in panel.heads) == list(range(heads))
    for panel in drawn.panels:
        for head in panel.heads:
            np.testing.assert_allclose(panel.shares, by_cells(dense[head], drawn.side), rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", [rw.Causal(), rw.Dilated(4, 8), rw.LongNet([30, 60], [1, 3])], ids=repr)
def test_cells_that_are_cut_finer_hold_the_same(pattern: rw.Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = picture(pattern, 600, cells=5)
    monkeypatch.setattr(cells, "_EVALUATED", 500)
    cut = picture(pattern, 600, cells=5)
    np.testing.assert_array_equal(whole.panels[0].shares, cut.panels[0].shares)
    assert whole.caption == cut.caption


def test_a_dilation_is_visible_or_named() -> None:
    """A picture's cells are smaller than the dilation rate if possible; otherwise the caption names the rate."""
    pattern = rw.LongNet([64, 256], [1, 4])
    drawn = picture(pattern, 256, heads=4)
    assert (drawn.side, "hide" in drawn.caption) == (2, False)
    # the second branch, outside of the first one's segments
    assert len(np.unique(drawn.panels[0].shares[:32, 32:])) == 2
    assert "cells of 8 x 8 tokens hide a rate of 4" in picture(pattern, 256, heads=4, cells=32).caption
    coarse = picture(rw.LongNet([2**12, 2**14, 2**15], [1, 16, 64]), 2**15)
    assert "cells of 256 x 256 tokens hide rates of 16, 64" in coarse.caption
    assert "hide" not in picture(rw.Strided(16), 16).caption


def test_an_opaque_pattern_is_sampled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = rw.from_mask_mod(lambda b, h, q, k: (q - k) % 4 == 0)
    monkeypatch.setattr(cells, "_EVALUATED", 2**18)
    monkeypatch.setattr(cells, "_CELLS", 100)
    drawn = picture(pattern, 4096, cells=8)
    assert "density about" in drawn.caption
    np.testing.assert_allclose(drawn.panels[0].shares, 0.25, atol=0.05)


def test_a_million_tokens_are_counted_exactly() -> None:
    tokens = 2**20
    window = 1024
    drawn = picture(rw.SlidingWindow(window), tokens)
    pairs = (window + 1) * tokens - window * (window + 1) // 2
    side = tokens // 64
    assert sum(drawn.panels[0].shares.ravel() * side**2) == pytest.approx(pairs, rel=1e-12)


def test_caption_tells_density_and_tiles() -> None:
    pattern = (rw.SlidingWindow(1024) | rw.Sinks(64)) & rw.Causal()
    drawn = picture(pattern, 16384)
    assert drawn.title == repr(pattern)
    assert f"{pattern.plan(16384).nnz:,} tiles" in drawn.caption
    assert drawn.caption.endswith(", causal")
    assert picture(rw.Sinks(32), 1024).caption.endswith(
        ", not causal: 496 pairs see the future, the first is query 0, key 1"
    )
    assert f"density {100 * pattern.density(16384):.3g} %" in drawn.caption


def test_the_shading_of_an_svg_is_the_density() -> None:
    pattern, tokens = (rw.SlidingWindow(40) | rw.Dilated(3, 8)) & rw.Causal(), 300
    root = ElementTree.fromstring(plot(pattern, tokens))
    drawn = picture(pattern, tokens)
    (group,) = [each for each in root.iter(f"{SVG}g") if each.get("class") == "cells"]
    size = len(drawn.panels[0].shares)
    colours = np.full((size, size), fill(0.0), dtype=object)
    for path in group.iter(f"{SVG}path"):
        for x, y, wide in re.findall(r"M(\d+) (\d+)h([\d.]+)v", path.get("d") or ""):
            colours[int(y), int(x) : int(x) + int(np.ceil(float(wide)))] = path.get("fill")
    dense = by_cells(pattern.to_dense(tokens)[0, 0].double().numpy(), drawn.side)
    assert colours.tolist() == [[fill(share) for share in row] for row in dense.tolist()]
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert {"keys", "queries", "0", "300", drawn.caption} <= set(texts)
    assert repr(pattern) in " ".join(text or "" for text in texts)


def test_more_allowed_pairs_are_darker() -> None:
    def light(colour: str) -> int:
        return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5))

    shades = [light(fill(share)) for share in (0.0, 1e-6, 0.05, 0.3, 0.6, 1.0)]
    assert shades == sorted(shades, reverse=True)
    assert len(set(shades)) == len(shades)
    assert fill(2.0) == fill(1.0)


def test_heads_that_differ_get_a_panel_each() -> None:
    pattern = rw.PerHead([rw.Causal(), rw.SlidingWindow(3), rw.Causal()])
    drawn = picture(pattern, 32)
    assert [panel.caption for panel in drawn.panels] == ["heads 0, 2", "head 1"]
    svg = plot(pattern, 32)
    assert svg.count('class="cells"') == 2
    assert "head 1" in svg
    many = rw.PerHead([rw.SlidingWindow(i) for i in range(12)])
    assert len(picture(many, 32).panels) == 8
    assert "8 of 12 heads" in picture(many, 32).caption
    assert picture(rw.Causal(), 32, heads=16).panels[0].caption == "heads 0-15"


def art(pattern: rw.Pattern, tokens: int, cells: int, shades: str = SHADES, heads: int = 1) -> list[list[str]]:
    return [art_rows(panel, shades) for panel in picture(pattern, tokens, heads=heads, cells=cells).panels]


def test_text_of_causal_is_lower_triangular() -> None:
    (rows,) = art(rw.Causal(), 16384, 16)
    assert len(rows) == 16
    for i, row in enumerate(rows):
        assert row == "██" * i + "▒▒" + "  " * (15 - i)
    assert art(rw.Causal(), 2, 32, ASCII_SHADES) == [["##  ", "####"]]
    assert set("".join(art(rw.Dilated(8, 8), 512, 16)[0])) <= set(SHADES[:3])
    assert art(rw.PerHead([rw.Full(), ~rw.Full()]), 2, 2, heads=2)[1] == ["    ", "    "]


def test_files(tmp_path: Path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.PNG"
    text = rw.Causal().plot(100, path=str(svg))
    assert svg.read_text(encoding="utf-8") == text
    pytest.importorskip("matplotlib")
    rw.PerHead([rw.Causal(), rw.Full()]).plot(100, path=str(png))
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(rw.UnsupportedError, match=r"path: got '.*a\.jpg'; wanted a name that ends in \.svg or \.png"):
        rw.Causal().plot(100, path=str(tmp_path / "a.jpg"))


def test_equal_shares_look_equal_in_a_png(tmp_path: Path) -> None:
    """A panel of 256 cells on 318 pixels draws each cell with the same weight, also of a dilated branch."""
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("matplotlib.image")
    rw.LongNet([64, 256], [1, 4]).plot(256, path=str(tmp_path / "a.png"), heads=4)
    grey = image.imread(tmp_path / "a.png")[..., :3].mean(-1)
    # the upper right of head 0, which has branches of rate 4 only
    part = grey[120:190, 170:390]
    means = [part[:, i : i + 20].mean() for i in range(0, 200, 20)]
    assert max(means) - min(means) < 0.01


def test_png_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(rw.UnsupportedError, match=r"pip install 'ringweave\[plot\]'"):
        rw.Causal().plot(16, path=str(tmp_path / "a.png"))


def test_a_notebook_shows_what_plot_returns() -> None:
    svg = rw.Causal().plot(256)
    assert isinstance(svg, str)
    assert svg._repr_svg_() == svg  # type: ignore[attr-defined]
