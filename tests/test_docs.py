"""Test that the documentation is complete, current and self-contained. Its code blocks run as separate tests."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch.distributed as dist

import ringweave as rw
from ringweave.patterns.declared import DECLARED
from ringweave.terms import KINDS

from .markdown import run_console
from .parallel.processes import forked
from .sampled import is_long

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
# folders of one machine, and package indexes other than PyTorch's; HTML may have tags within a line of code
MACHINE = re.compile(
    r"(?<![\w.])/(?:home|root|work|tmp|mnt|Users)/|[A-Z]:\\\\|index-url(?!(?:\s|<[^>]*>)*https://download\.pytorch\.org/whl/)",
    re.I,
)


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    sources = os.pathsep.join(str(ROOT / folder) for folder in ("src", "audit/src", "gpu/src", "lab/src"))
    sources += os.pathsep + os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": sources, "NO_MKDOCS_2_WARNING": "1", **more}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("site")
    drawn = {} if is_long() else {"RINGWEAVE_FIGURES": "decode"}
    done = run("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder), **drawn)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pictures_and_gallery_are_current() -> None:
    done = run("docs/pictures.py", "--check")
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = sorted((ROOT / "docs/api").glob("*.md"))
    source = "\n".join(page.read_text("utf-8") for page in pages)
    listed = re.findall(r"^::: (ringweave\.[\w.]+)$", source, flags=re.M)
    modules = {name for name in rw.__all__ if inspect.ismodule(getattr(rw, name))}
    public = {*rw.__all__, *rw._UNLISTED, *DECLARED, *KINDS} - modules
    assert public <= {name.rpartition(".")[2] for name in listed}
    assert len(listed) == len(set(listed))
    built = "\n".join((site / f"api/{page.stem}.html").read_text("utf-8") for page in pages)
    for name in public:
        assert re.search(rf'<h3 id="ringweave\.[\w.]*\b{name}"', built), name
    overview = (ROOT / "docs/api.md").read_text("utf-8")
    assert not [page.name for page in pages if f"](api/{page.name})" not in overview]
    # a role of Sphinx that was not converted to a link
    assert not re.search(r":(?:func|class|meth|mod):", built)


def test_every_pattern_and_preset_is_in_the_gallery() -> None:
    page = (ROOT / "docs/patterns.md").read_text("utf-8")
    table = page.partition("<!-- gallery")[0]
    for name in (name for name, known in DECLARED.items() if known.section is not None):
        assert f"### {name}\n" in page, name
        assert re.search(rf"`(?:patterns\.)?{name}\b", table), name


class _Loads(HTMLParser):
    """A parser that collects the addresses that a page loads without a click."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in ("src", "srcset", *(("href",) if tag == "link" else ())):
            self.found.append(given.get(name) or "")


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 9
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text("utf-8"))
        assert not [each for each in loads.found if re.match(r"(?:https?:)?//", each)], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", sheet.read_text("utf-8")), sheet.name


def test_no_path_of_a_machine_in_any_page(site: Path) -> None:
    for page in [
        *PAGES,
        *site.rglob("*.html"),
        *site.rglob("*.svg"),
        ROOT / "mkdocs.yml",
        *(ROOT / "docs").glob("*.py"),
    ]:
        text = page.read_text("utf-8")
        assert not MACHINE.search(text), (page.name, MACHINE.search(text))
        assert str(ROOT) not in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_as_long_as_its_task(page: Path) -> None:
    """A page has at most 16,000 characters, not counting its programs."""
    assert len(re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text("utf-8"))) <= 16_000


def test_the_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (.+)$", citation, flags=re.M) == [rw.__version__]


def test_links_between_files_of_the_repository() -> None:
    for page in PAGES:
        # mkdocs checks links to the pages of figures, which it generates
        text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8"))
        for target in re.findall(r"\]\((?!figures)([^)#\s]+)[^)]*\)", text):
            assert target.startswith("https://") or (page.parent / target).exists(), (page.name, target)


class _Block:
    def __init__(self, parsed: str):
        self.parsed = parsed


@pytest.mark.parametrize(
    ("block", "wrong"),
    [
        ("$ ringweave --version\n", None),
        (f"$ ringweave --version\nringweave   {rw.__version__}\n", None),
        ("$ ringweave --version\nringweave ...\n", None),
        ("$ make test\nwhatever\n", None),
        ("$ ringweave --version\nringweave 99\n", "wanted:\nringweave 99"),
        ("$ ringweave show 'Nonsense()' -n 64\n", "ended with exit code 2"),
        ("$ ringweave --version\n$ ringweave show nonsense\n", "ended with exit code 2"),
    ],
)
def test_console_blocks_are_compared(block: str, wrong: str | None) -> None:
    pytest.importorskip("typer")
    said = run_console(_Block(block))  # type: ignore[arg-type]
    assert said is None if wrong is None else wrong in (said or "")


def rank_of(program: str, rank: int, ranks: int, port: int) -> str:
    """Run a program in this process as torchrun runs one of its ranks, and return what it prints."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(program, run_name="__main__")
    return printed.getvalue()


def test_the_program_of_the_page_on_a_ring_prints_what_is_shown(tmp_path: Path) -> None:
    """Run the program in four processes, with the environment that the page's torchrun gives them."""
    page = (ROOT / "docs/parallel.md").read_text("utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, flags=re.S)
    program = tmp_path / "program.py"
    program.write_text(next(code for kind, code in blocks if kind == "python"), "utf-8")
    shown = next(code for kind, code in blocks if code.startswith("$ torchrun --nproc-per-node 4 program.py\n"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(4) as ranks:
        printed = ranks.map(lambda rank: forked(rank_of, str(program), rank, 4, store.port), range(4))
    assert shown.partition("\n")[2] in "".join(printed)
