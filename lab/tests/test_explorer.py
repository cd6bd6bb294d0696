"""The explorer's answers equal explain's and simulate's, it refuses requests of other sites, and the page shows its answers."""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import urlencode

import numpy as np
import pytest

import ringweave as rw

pytest.importorskip("typer")

from typer.testing import CliRunner

from ringweave.cli.app import app
from ringweave.units import flops, nbytes, percent, seconds
from ringweave_lab.explorer.answer import Asked, answer, filled
from ringweave_lab.explorer.neighbours import neighbours
from ringweave_lab.explorer.server import EXAMPLES, PIECES, Server, page
from ringweave_lab.explorer.spots import python, spots

TOKENS = ("300", "1K", "4096", "16K")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()


def get(server: Server, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(server.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=240) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def asked(server: Server, **query: str) -> tuple[int, dict[str, Any]]:
    status, body = get(server, "answer?" + urlencode(query))
    return status, json.loads(body)


def drawn(seed: int) -> dict[str, str]:
    """Draw a pattern of the kinds that the page offers, and the sizes of a call."""
    r = random.Random(seed)
    leaves = [
        lambda: "Causal()",
        lambda: f"SlidingWindow({r.randrange(2000)}, {r.randrange(100)})",
        lambda: f"Sinks({r.randrange(1, 300)})",
        lambda: f"Global([0, {r.randrange(1, 250)}])",
        lambda: f"Segments({r.randrange(1, 3000)})",
        lambda: f"Dilated({r.randrange(1, 64)}, {r.randrange(1, 9)})",
        lambda: f"Strided(stride={r.randrange(1, 200)})",
        lambda: f"sparse_transformer_fixed({2 ** r.randrange(5, 9)}, 16)",
    ]
    whole = [
        lambda: f"LongNet([{2 ** r.randrange(4, 9)}, {2 ** r.randrange(9, 12)}], [1, {2 ** r.randrange(1, 4)}])",
        lambda: f"GridNeighborhood(Grid([{r.randrange(8, 40)}, {r.randrange(8, 40)}]), {2 * r.randrange(1, 4) + 1})",
        lambda: f"PerHead([Causal(), {r.choice(leaves)()}])",
    ]
    text = r.choice(leaves)()
    for _ in range(r.randrange(3)):
        text = f"({text} {r.choice('&|')} {r.choice(('', '~'))}{r.choice(leaves)()})"
    if seed % 4 == 0:
        text = r.choice(whole)()
    heads = r.choice((1, 2, 4, 8))
    return {
        "pattern": text, "tokens": r.choice(TOKENS), "heads": str(heads), "kv_heads": r.choice(("", "1")),
        "head_dim": r.choice(("32", "64", "128")), "dtype": r.choice(("float32", "bfloat16")), "ranks": r.choice(("1", "2", "8")),
    }  # fmt: skip


def explained(command: str) -> dict[str, Any]:
    """Return the output of ``ringweave explain --json`` for the command that the page shows."""
    import shlex

    result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def spelled(facts: dict[str, Any]) -> dict[str, str]:
    """Return the texts that the page should show for explain's numbers."""
    pairs, memory, work = facts["pairs"], facts["memory"], facts["flops"]
    ratio = work["dense_over_this"]
    return {
        "pairs.density": percent(pairs["density"]), "pairs.computed_density": percent(pairs["computed_density"]),
        "causality.causal": "causal" if facts["causality"]["causal"] else "not causal",
        "tiles.computed": f"{facts['tiles']['computed']:,}" if facts["tiles"]["computed"] else "none: dense kernels",
        "tiles.full": f"{facts['tiles']['full']:,}",
        "flops.forward": flops(work["forward"]), "flops.backward": flops(work["backward"]),
        "flops.dense_forward": flops(work["dense_forward"]),
        "flops.dense_over_this": "-" if ratio is None else f"{ratio:.3g} x",
        **{f"memory.{name}": nbytes(memory[name]) for name in ("plan", "activations", "gradients", "scratch")},
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_explains(server: Server, seed: int) -> None:
    query = drawn(seed)
    status, found = asked(server, **query)
    assert status == 200, found
    facts = explained(found["command"])
    assert found["facts"] == facts
    texts = {row["of"]: row["text"] for group in found["shown"] for row in group["rows"]}
    assert {of: texts[of] for of in spelled(facts)} == spelled(facts)
    # the line to copy constructs the pattern
    line = found["python"].removeprefix("out = rw.attention(q, k, v, ").removesuffix(")")
    assert eval(line, {"rw": rw}) == rw.patterns.parse(query["pattern"])
    for spot in found["spots"]:
        assert query["pattern"][spot["begin"] : spot["end"]] == str(spot["value"])


def test_picture_shows_which_cells_have_pairs() -> None:
    found = answer(Asked(pattern="SlidingWindow(3) & Causal()", tokens="16", cells="8"))["picture"]
    cells = base64.b64decode(found["panels"][0]["shades"])
    dense = rw.patterns.parse("SlidingWindow(3) & Causal()").to_dense(16)[0, 0].reshape(8, 2, 8, 2).sum((1, 3))
    assert [(c > 0, c == 255) for c in cells] == [(n > 0, n == 4) for n in dense.reshape(-1).tolist()]


def test_million_tokens_and_every_example(server: Server) -> None:
    assert asked(server, pattern="Dilated(64, 16) & Causal()", tokens="1M", ranks="64")[1]["step"]["ranks"] == 64
    for example in EXAMPLES.values():
        status, found = asked(server, **example, cells="32", ranks="2")
        assert status == 200, (example, found)
        assert "error" not in found["step"]
    for piece in PIECES.values():
        assert asked(server, pattern=f"Full() & {piece}", tokens="1K", ranks="1")[0] == 200


# the numbers of a rank on each device, as options of simulate
MACHINES = {
    "cpu": ("--flops", "0.34e12", "--bandwidth", "1.25e9", "--latency", "50e-6"),
    "cuda": ("--flops", "500e12", "--bandwidth", "50e9", "--latency", "10e-6"),
}


def simulated(pattern: str, tokens: str, gpus: str, *options: str) -> list[dict[str, Any]]:
    """Return the rows that ``ringweave simulate --json`` prints."""
    command = [
        "simulate",
        pattern,
        "-n",
        tokens,
        "--gpus",
        gpus,
        "--heads",
        "8:8",
        "--head-dim",
        "64",
        *options,
        "--json",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return cast("list[dict[str, Any]]", json.loads(result.stdout))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_times_are_those_of_the_named_device(server: Server, device: str) -> None:
    machine = MACHINES[device.partition(":")[0]]
    _, found = asked(server, pattern="SlidingWindow(64)", tokens="4096", ranks="4", device=device)
    step = found["step"]
    one, four = (row["ringweave"]["seconds"] for row in simulated("SlidingWindow(64)", "4096", "1,4", *machine))
    assert {row["of"]: row["text"] for row in step["shown"] if row["of"].endswith("seconds")} == {
        "one.seconds": seconds(one), "ranks.seconds": seconds(four),
    }  # fmt: skip
    assert step["title"] == f"One forward step on 4 {device} ranks"
    assert [float(text) for text in step["usual"].values()] == pytest.approx(
        [float(machine[1]) / 1e12, float(machine[3]) / 1e9, float(machine[5]) * 1e6]
    )
    assert f"for a {device} rank that computes {step['usual']['tflops']} TFLOP/s" in step["notes"][0]


def test_a_device_without_figures_has_no_times(server: Server) -> None:
    query = {"pattern": "SlidingWindow(64)", "tokens": "4096", "ranks": "4", "device": "mps"}
    _, found = asked(server, **query, tflops="3", gbytes="2")
    assert found["facts"]["sizes"]["device"] == "mps"
    assert found["step"] == {
        "usual": {"tflops": "", "gbytes": "", "micros": ""},
        "error": "mps rank: got no figures; wanted TFLOP/s, GB/s and us / message. "
        "Enter all three: the page has no defaults for this device.",
    }
    _, found = asked(server, **query, tflops="3", gbytes="2", micros="20")
    (one,) = simulated("SlidingWindow(64)", "4096", "1", "--flops", "3e12", "--bandwidth", "2e9", "--latency", "2e-5")
    assert found["step"]["figures"]["one"]["seconds"] == one["ringweave"]["seconds"]
    assert "for a mps rank that computes 3 TFLOP/s" in found["step"]["notes"][0]


def test_tables_have_no_empty_column(server: Server) -> None:
    assert filled([["a", "b", "c"], ["x", "", ""], ["y", "", "1"]]) == [["a", "c"], ["x", "-"], ["y", "1"]]
    for ranks in ("1", "2", "3", "16"):
        _, found = asked(server, pattern="SlidingWindow(64)", tokens="4096", kv_heads="2", ranks=ranks)
        step = found["step"]
        # on one rank all systems are equal, so there is no comparison and only one time
        assert (step["systems"] == []) == (step["map"] is None) == (ranks == "1")
        assert all(any(cell != "-" for cell in column) for column in zip(*step["systems"][1:], strict=True))
        labels = [row["label"] for row in step["shown"]]
        assert len(labels) == len(set(labels))
        dashes = any("-" in line for line in step["systems"])
        assert dashes == any("Ulysses needs" in note for note in step["notes"]) == (ranks in ("3", "16"))


def test_no_two_sliders_are_equal() -> None:
    texts = [*EXAMPLES.values()]
    patterns = [each["pattern"] for each in texts] + list(PIECES.values())
    patterns += [f"({first}) | {second}" for first in PIECES.values() for second in PIECES.values()]
    for pattern in patterns:
        found = [spot.name for spot in spots(pattern)]
        assert len(found) == len(set(found)), (pattern, found)
        assert not {"tokens", "query heads", "ranks", "number"} & set(found)


GRIDS = {
    "GridNeighborhood(Grid([6, 9]), [3, 5])": (6, 9),
    "GridNeighborhood(Grid([4, 5, 6]), 3, causal=[True, False, False])": (4, 5, 6),
    "GridWindows(Grid([7, 8], [2, 4]), 4, shift=2)": (7, 8),
    "GridNeighborhood(Grid([40]), 5, dilation=2)": (40,),
    "Neighborhood(5, 2, tokens=37)": (37,),
    "~GridWindows(Grid([6, 6]), 3) & Causal()": (6, 6),
}


@pytest.mark.parametrize("text", GRIDS)
def test_the_image_of_a_grid_shows_the_keys_of_the_query(server: Server, text: str) -> None:
    shape = GRIDS[text]
    grid = rw.Grid(shape) if "[2, 4]" not in text else rw.Grid(shape, (2, 4))
    dense = rw.patterns.parse(text).to_dense(grid.tokens)[0, 0]
    r = random.Random(text)
    for pixel in [tuple(r.randrange(n) for n in shape) for _ in range(5)]:
        status, found = asked(server, pattern=text, pixel=",".join(map(str, pixel)), ranks="1")
        assert status == 200, found
        drawn = found["grid"]
        assert (drawn["pixel"], drawn["shape"]) == (list(pixel), list(shape))
        assert grid.positions[drawn["token"]].tolist() == list(pixel)
        keys = {tuple(each) for each in grid.positions[dense[drawn["token"]]].tolist()}
        (panel,) = drawn["panels"]
        assert panel["attended"] == len(keys)
        coloured = set()
        for frame, shades in enumerate(panel["frames"]):
            for cell, shade in enumerate(base64.b64decode(shades)):
                if shade:
                    assert shade == 255
                    row, col = divmod(cell, drawn["cols"])
                    coloured.add((row * drawn["width"] + col,) if len(shape) == 1 else (frame, row, col)[-len(shape) :])
        assert coloured == keys
        frame, row, col = drawn["query"]
        assert (frame, row, col)[-len(shape) :] == pixel if len(shape) > 1 else row * drawn["width"] + col == pixel[0]


def test_the_image_of_a_large_grid_has_cells_and_frames() -> None:
    drawn = neighbours(rw.GridWindows(rw.Grid((300, 300)), 30), rw.Grid((300, 300)), [0], "31,299")
    assert (drawn["side"], drawn["rows"], drawn["cols"], drawn["query"]) == (3, 100, 100, [0, 10, 99])
    shares = np.frombuffer(base64.b64decode(drawn["panels"][0]["frames"][0]), np.uint8).reshape(100, 100)
    assert np.argwhere(shares).min(0).tolist() == [10, 90]
    assert (shares[10:20, 90:] == 255).all()
    assert drawn["panels"][0]["attended"] == 900
    video = rw.Grid((40, 4, 4))
    drawn = neighbours(rw.GridWindows(video, 2), video, [0], "39,0,0")
    assert (drawn["first"], len(drawn["panels"][0]["frames"]), drawn["query"][0]) == (28, 12, 11)


def test_a_pixel_that_does_not_fit_is_moved() -> None:
    grid = rw.Grid((8, 6))
    for pixel, place in (("", [4, 3]), ("99,2", [7, 2]), ("1,2,3", [4, 3]), ("-1,0", [4, 3]), ("x", [4, 3])):
        assert neighbours(rw.GridWindows(grid, 2), grid, [0], pixel)["pixel"] == place
    assert answer(Asked(pattern="Causal()", tokens="64"))["grid"] is None
    # the grid's own order wins over a line of tokens, and each distinct head has its image
    text = "PerHead([Neighborhood(3, tokens=48), GridWindows(Grid([8, 6]), 2)])"
    found = answer(Asked(pattern=text, ranks="1"))["grid"]
    assert (found["shape"], [panel["attended"] for panel in found["panels"]]) == ([8, 6], [3, 4])


def test_step_is_simulates(server: Server) -> None:
    found = asked(
        server, pattern="SlidingWindow(64)", tokens="4096", heads="8", kv_heads="2", ranks="4", dtype="bfloat16"
    )
    said = CliRunner().invoke(
        app,
        [
            "simulate",
            "SlidingWindow(64)",
            "-n",
            "4096",
            "--gpus",
            "1,4",
            "--heads",
            "8:2",
            "--head-dim",
            "64",
            *MACHINES["cpu"],
            "--json",
        ],
    )
    one, four = (row["ringweave"] for row in json.loads(said.stdout))
    figures = found[1]["step"]["figures"]
    for got, wanted in ((figures["one"], one), (figures["ranks"], four)):
        assert {name: got[name] for name in wanted} == wanted
    held = base64.b64decode(found[1]["step"]["map"]["shades"])
    assert [i % 64 // 16 for i, shade in enumerate(held) if shade] == [i // 64 for i, shade in enumerate(held) if shade]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"pattern": "__import__('os').system('true')"}, "wanted the name of a pattern or preset"),
        ({"pattern": ""}, "got no pattern"),
        ({"pattern": "SlidingWindow(-1)"}, "left"),
        ({"tokens": "0"}, "tokens: got '0'"),
        # sizes that the pattern sets have the same limits as requested sizes
        ({"pattern": "GridNeighborhood(Grid([100000, 100000]), 3)"}, "shape: got 10000000000"),
        ({"pattern": f"PerHead([{'Causal(), ' * 1025}])"}, "heads: got '1025'"),
        ({"tokens": "99M"}, "tokens: got '99M'"),
        ({"heads": "6", "kv_heads": "4"}, "divisor"),
        ({"heads": "many"}, "heads: got 'many'"),
        ({"heads": "²"}, "heads: got"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"device": "fridge"}, "device: got 'fridge'"),
        ({"pattern": "Causal() & ~SlidingWindow(5)", "tokens": "1M"}, "million tiles"),
    ],
)
def test_what_cannot_be_answered_is_said(server: Server, query: dict[str, str], said: str) -> None:
    status, found = asked(server, **query)
    assert status == 400
    assert said in found["error"]


@pytest.mark.parametrize(
    "query", [{"ranks": "0"}, {"ranks": "900", "tokens": "1K"}, {"tflops": "inf"}, {"gbytes": "0"}]
)
def test_a_ring_that_cannot_be_modelled_takes_nothing_else(server: Server, query: dict[str, str]) -> None:
    status, found = asked(server, **query)
    assert status == 200
    assert found["facts"]["pairs"]["allowed"] > 0
    assert "wanted" in found["step"]["error"]


def test_strangers_are_refused(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "")[0] == 200
    for headers in (
        {"Host": "example.org"},
        {"Host": f"127.0.0.1:{server.server_port + 1}"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert get(server, "answer", **headers)[0] == 403
    assert get(server, "../pyproject.toml")[0] == 404


def test_a_taken_port_is_said(server: Server) -> None:
    result = CliRunner().invoke(app, ["explore", "--no-browser", "--port", str(server.server_port)])
    assert result.exit_code == 2
    assert "--port" in result.stderr


def test_numbers_of_a_text_are_named() -> None:
    text = "PerHead([SlidingWindow(3), random_blocks(64, density=0.5)]) & GridWindows(Grid([8, 8]), (4, 2))"
    assert [spot.name for spot in spots(text)] == [
        "SlidingWindow left", "random_blocks tokens", "random_blocks density", "Grid shape 1", "Grid shape 2",
        "GridWindows size 1", "GridWindows size 2",
    ]  # fmt: skip
    text = "SlidingWindow(3, 4) | (Sinks(2) & SlidingWindow(right=5, left=6))"
    assert [spot.name for spot in spots(text)] == [
        "SlidingWindow #1 left", "SlidingWindow #1 right", "Sinks tokens", "SlidingWindow #2 right",
        "SlidingWindow #2 left",
    ]  # fmt: skip
    assert python("Causal()\n  | Sinks(2)") == "out = rw.attention(q, k, v, rw.Causal()   | rw.Sinks(2))"


def test_the_page_loads_nothing_and_no_text_ends_its_script() -> None:
    text = page({"</script><b>\n1": {}})
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    assert "</script><b>" not in text
    assert text.count("</script>") == 3


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium, which drives a browser, is not installed")
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for each in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,1000",
    ):
        options.add_argument(each)
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    running.set_script_timeout(120)
    yield running
    running.quit()


SETTLE = """
const done = arguments[arguments.length - 1], before = arguments[1];
change(arguments[0]);
const wait = () => document.body.dataset.done >= wanted && !running ? done(true) : setTimeout(wait, 5);
wait();
"""
TEXTS = """
return Object.fromEntries([...document.querySelectorAll("dd[data-of]")].map(each => [each.dataset.of, each.textContent]));
"""
PAINTED = """
const canvas = document.getElementById("picture"), shades = bytes(panel().shades), paper = String(colours()[0]);
const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
return shades.filter((shade, i) => (String([...data.slice(4 * i, 4 * i + 3)]) === paper) === (shade === 0)).length;
"""


def test_the_page_shows_explains_numbers(server: Server, browser: Any) -> None:
    browser.get(server.url)
    for seed in range(20):
        browser.execute_async_script(SETTLE, {"heads": "8", "kv_heads": "", **drawn(seed)})
        facts = explained(browser.execute_script("return document.getElementById('command').textContent"))
        texts = browser.execute_script(TEXTS)
        assert browser.execute_script("return document.getElementById('error').textContent") == ""
        assert {of: texts[of] for of in spelled(facts)} == spelled(facts)
        # the canvas: the paper's colour exactly where no pair is
        assert browser.execute_script(PAINTED) == browser.execute_script("return panel().cells") ** 2
    assert [each for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []


def test_the_page_by_keyboard(server: Server, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get(server.url + "#pattern=SlidingWindow(8)&tokens=1K")
    browser.execute_async_script(SETTLE, {})
    slider = browser.find_element("id", "spot0-range")
    slider.send_keys(Keys.ARROW_RIGHT)
    browser.execute_async_script(SETTLE, {})
    assert browser.find_element("id", "pattern").get_attribute("value") == "SlidingWindow(10)"
    browser.find_element("id", "add").send_keys(Keys.ENTER)
    browser.execute_async_script(SETTLE, {})
    assert (
        browser.find_element("id", "python").text
        == f"out = rw.attention(q, k, v, rw.SlidingWindow(10) & rw.{PIECES['SlidingWindow']})"
    )
    browser.find_element("id", "undo").send_keys(Keys.ENTER)
    browser.execute_async_script(SETTLE, {})
    browser.find_element("id", "picture").send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert browser.find_element("id", "cell").text.startswith("Queries 8-15, keys 0-7: ")
    browser.execute_async_script(SETTLE, {"pattern": "Oops("})
    assert "Oops" in browser.find_element("id", "error").text


def test_the_page_shows_the_grid_of_a_chosen_query(server: Server, browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.get(server.url + "#pattern=GridNeighborhood(Grid([16, 16]), 3)")
    browser.execute_async_script(SETTLE, {"pixel": "0,15"})
    assert browser.find_element("id", "pixel").text == "The query at row 0, column 15 attends 9 of 256 tokens."
    # the pattern's own sliders set the length
    assert not browser.find_element("id", "tokens-slider").is_displayed()
    canvas = browser.find_element("css selector", "#frames canvas")
    canvas.send_keys(Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    browser.execute_async_script(SETTLE, {})
    assert browser.find_element("id", "pixel").text == "The query at row 1, column 13 attends 9 of 256 tokens."
    # three pixels right of and below the centre: inside row 8 and column 8
    ActionChains(browser).move_to_element_with_offset(canvas, 3, 3).click().perform()
    browser.execute_async_script(SETTLE, {})
    assert browser.find_element("id", "pixel").text == "The query at row 8, column 8 attends 9 of 256 tokens."
    browser.execute_async_script(SETTLE, {"pattern": "Causal()", "tokens": "1K"})
    assert not browser.find_element("id", "grid").is_displayed()
    assert browser.find_element("id", "tokens-slider").is_displayed()


def test_another_device_drops_the_figures_of_the_last_one(server: Server, browser: Any) -> None:
    browser.get(server.url + "#pattern=Causal()&tokens=1K")
    browser.execute_async_script(SETTLE, {"tflops": "7"})
    assert "cpu rank that computes 7 TFLOP/s" in browser.find_element("id", "step-note").text
    browser.find_element("css selector", "#device option[value=cuda], #device option:nth-child(2)").click()
    browser.execute_async_script(SETTLE, {})
    assert "cuda rank that computes 500 TFLOP/s" in browser.find_element("id", "step-note").text
    assert browser.find_element("id", "tflops").get_attribute("placeholder") == "500"


def test_the_page_fits_narrow_windows(server: Server, browser: Any) -> None:
    for width in (360, 700, 1280):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(server.url)
        browser.execute_async_script(SETTLE, {})
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_recorded_page_stands_for_itself(browser: Any, tmp_path: Any) -> None:
    asked = Asked.of({"pattern": "Causal()", "tokens": "1K"})
    (tmp_path / "page.html").write_text(page({"Causal()\n1K": answer(asked)}), "utf-8")
    browser.get((tmp_path / "page.html").as_uri())
    texts = browser.execute_script(TEXTS)
    assert texts["pairs.density"] == "50 %"
    assert not browser.find_element("id", "pattern").is_enabled()
