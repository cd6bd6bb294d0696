"""The explorer: its endpoint says what explain says, refuses strangers, and the page shows what the endpoint says."""

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
from typing import Any
from urllib.parse import urlencode

import pytest

import ringweave as rw

pytest.importorskip("typer")

from typer.testing import CliRunner

from ringweave.cli.app import app
from ringweave.units import flops, nbytes, percent
from ringweave_lab.explorer.answer import Asked, answer
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
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def asked(server: Server, **query: str) -> tuple[int, dict[str, Any]]:
    status, body = get(server, "answer?" + urlencode(query))
    return status, json.loads(body)


def drawn(seed: int) -> dict[str, str]:
    """A random pattern of the kinds that the page offers, with sizes of a call."""
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
    """What ``ringweave explain --json`` prints for the command that the page shows."""
    import shlex

    result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def spelled(facts: dict[str, Any]) -> dict[str, str]:
    """The page's texts, from explain's numbers."""
    pairs, memory, work = facts["pairs"], facts["memory"], facts["flops"]
    ratio = work["dense_over_this"]
    return {
        "pairs.density": percent(pairs["density"]), "pairs.computed_density": percent(pairs["computed_density"]),
        "causality.causal": "causal" if facts["causality"]["causal"] else "sees the future",
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
    # the line to copy builds the pattern
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
        ({"pattern": "__import__('os').system('true')"}, "wanted pattern names"),
        ({"pattern": ""}, "got nothing"),
        ({"pattern": "SlidingWindow(-1)"}, "left"),
        ({"tokens": "0"}, "tokens: got '0'"),
        # what a pattern is made for is as bounded as what is asked for
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
        "GridWindows size", "GridWindows size",
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
        == "out = rw.attention(q, k, v, rw.SlidingWindow(10) & rw.SlidingWindow(256))"
    )
    browser.find_element("id", "undo").send_keys(Keys.ENTER)
    browser.execute_async_script(SETTLE, {})
    browser.find_element("id", "picture").send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert browser.find_element("id", "cell").text.startswith("Queries 8-15, keys 0-7: ")
    browser.execute_async_script(SETTLE, {"pattern": "Oops("})
    assert "Oops" in browser.find_element("id", "error").text


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
