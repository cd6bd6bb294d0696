"""Every pattern that the documentation calls causal is causal, by the library's own test.

The test reads the pages, docstrings and texts of the sources, the examples, the pictures and their scripts. The rules:

- a pattern that is assigned to a name with "causal" in it is causal;
- a pattern in a sentence, a line of a table, a line of code or beside a comment that says "causal" is causal;
- a picture with "causal" in its caption is causal;
- a union with a causal part is causal as a whole, unless the text beside it says that it is not.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ringweave as rw
from ringweave.patterns import And, Causal, Or, parse
from ringweave.patterns.reader import names

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "docs").glob("*.py")),
]
WORD = re.compile(r"\bcausal\b(?!\s*[=(\]])")
DENIED = re.compile(
    r"(?:not|neither|nor|is no|isn't|non-?)\s*(?:\w+ )?causal|not causal|would see|see the future|see all", re.I
)
#: Values that replace an expression's arguments when a pattern of the sources is evaluated.
_NUMBER = 16


@dataclass(frozen=True)
class Said:
    """A pattern and the text around it."""

    text: str
    pattern: rw.Pattern
    beside: str
    name: str = ""


def read(text: str) -> rw.Pattern | None:
    try:
        return parse(text)
    except rw.RingweaveError:
        return None


class _Numbers(ast.NodeTransformer):
    """Replace names by plain ones, and computed arguments by numbers."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        plain = isinstance(node.value, ast.Name) and node.value.id == "rw"
        return ast.Name(node.attr, ast.Load()) if plain else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in names() and node.func.id not in ("PerHead", "Documents"):
            node.args = [
                a if isinstance(a, (ast.Constant, ast.List, ast.Tuple)) else ast.Constant(_NUMBER) for a in node.args
            ]
        return node


def patterns_in(node: ast.AST) -> Iterator[tuple[str, rw.Pattern]]:
    """Yield the largest expressions of a tree that are patterns."""
    if isinstance(node, (ast.Call, ast.BinOp, ast.UnaryOp)):
        text = ast.unparse(_Numbers().visit(ast.parse(ast.unparse(node), mode="eval")))
        found = read(text)
        if found is not None:
            yield ast.unparse(node), found
            return
    for child in ast.iter_child_nodes(node):
        yield from patterns_in(child)


def in_code(code: str) -> Iterator[Said]:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    lines = code.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.Assert)):
            continue
        names = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        name = next((each.id for each in names if isinstance(each, ast.Name)), "")
        for text, pattern in patterns_in(node):
            beside = "\n".join(lines[max(0, node.lineno - 2) : (node.end_lineno or node.lineno) + 1])
            comments = " ".join(re.findall(r"#.*", "\n".join(lines[node.lineno - 1 : node.end_lineno])))
            yield Said(text, pattern, comments + ("\0" + beside), name)


def in_prose(text: str) -> Iterator[Said]:
    for unit in re.split(r"(?<=[.;:])\s+(?=[A-Z`!])|\n\s*\n|\|\n", text):
        for code in re.findall(r"`+([^`]+)`+", unit):
            pattern = read(code.replace("rw.", ""))
            if pattern is not None:
                yield Said(code, pattern, re.sub(r"`[^`]*`", "``", unit) + "\0" + text)


def in_page(page: Path) -> Iterator[Said]:
    parts = re.split(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), flags=re.M | re.S)
    for prose, kind, code in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True):
        for paragraph in prose.split("\n\n"):
            yield from in_prose(paragraph)
        if ">>>" in code:
            # blocks of the guides that are parts of files contain docstrings with examples
            for text in re.findall(r'"""(.*?)"""', code, flags=re.S) if kind == "py" else [code]:
                for example in doctest.DocTestParser().get_examples(text):
                    yield from (Said(s.text, s.pattern, f"{s.beside}\n{code}", s.name) for s in in_code(example.source))
        elif kind == "python":
            yield from in_code(code)
        else:
            for line in code.splitlines():
                for quoted in re.findall(r'"([^"]+)"', line):
                    pattern = read(quoted)
                    if pattern is not None:
                        yield Said(quoted, pattern, line.partition("#")[2] + "\0" + code)


def in_source(source: Path) -> Iterator[Said]:
    code = source.read_text("utf-8")
    yield from in_code(code)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if ">>>" in text:
                for example in doctest.DocTestParser().get_examples(text):
                    yield from (Said(s.text, s.pattern, f"{s.beside}\n{code}", s.name) for s in in_code(example.source))
            yield from in_prose(text)
            for quoted in [text, *re.findall(r"[\"']([^\"']+)[\"']", text)]:
                pattern = read(quoted)
                if pattern is not None:
                    yield Said(quoted, pattern, "\0" + text)


def is_causal(pattern: rw.Pattern) -> bool:
    heads = pattern.extents()[1] or 4
    for tokens in (1024, int(pattern.tables[0][-1]) if pattern.tables and pattern.tables[0].ndim == 1 else 64, 64, 256):
        try:
            return pattern.is_causal(tokens, heads=heads)
        except rw.PatternError:
            continue
    pytest.fail(f"no length fits {pattern!r}")


def wrong(said: Said) -> str | None:
    """Return how a statement about a pattern is wrong, or None."""
    near, _, around = said.beside.partition("\0")
    claimed = WORD.search(near) is not None and DENIED.search(near) is None
    if said.name and "causal" in said.name.lower() and "not" not in said.name.lower():
        claimed = True
    meant = isinstance(said.pattern, Or) and any(
        isinstance(part, And) and any(isinstance(each, Causal) for each in part.parts) for part in said.pattern.parts
    )
    if (claimed or (meant and DENIED.search(near + around) is None)) and not is_causal(said.pattern):
        return f"{said.text} is called or meant causal: {said.pattern.causality(1024, heads=said.pattern.extents()[1] or 1)}"
    return None


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_patterns_called_causal_are_causal(path: Path) -> None:
    found = list(in_page(path) if path.suffix == ".md" else in_source(path))
    assert not [text for said in found if (text := wrong(said)) is not None]


def test_captions_of_pictures() -> None:
    pictures = {}
    for path in sorted((ROOT / "docs/pictures").glob("*.svg")):
        title = re.search("<title>(.*?)</title>", path.read_text("utf-8"), re.S)
        assert title is not None, path.name
        pictures[path.name] = title[1]
    told = {name for name, title in pictures.items() if re.search(r", (?:not )?causal\b", title)}
    diagrams = {"flow.svg", "tiles.svg", "views.svg", "mixture.svg", "exchange.svg", "audited.svg"}
    assert told == set(pictures) - diagrams
    for page in PAGES:
        for caption, name in re.findall(r"!\[([^\]]*)\]\((?:docs/)?pictures/([\w.]+)\)", page.read_text("utf-8")):
            if (
                WORD.search(caption)
                and not DENIED.search(caption)
                and not caption.startswith("The complement")
                and name in told
            ):
                assert "not causal" not in pictures[name], (page.name, caption)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("A causal window: `SlidingWindow(192) & Causal() | Sinks(32)`", False),
        ("A window: `SlidingWindow(192) & Causal() | Sinks(32)`", False),
        ("Not causal, since the sinks are not: `SlidingWindow(192) & Causal() | Sinks(32)`", True),
        ("A causal window: `(SlidingWindow(192) | Sinks(32)) & Causal()`", True),
        ("A causal window and `Sinks(32)`", False),
        ("A window and `Sinks(32)`", True),
        ("| `longformer(16)` | causal |", False),
    ],
)
def test_the_rules_of_prose(text: str, right: bool) -> None:
    assert all(wrong(said) is None for said in in_prose(text)) == right


@pytest.mark.parametrize(
    ("code", "right"),
    [
        ("pattern = rw.SlidingWindow(w) & rw.Causal() | rw.Sinks(32)", False),
        ("causal = rw.SlidingWindow(9, 1)", False),
        ("rw.attention(q, k, v, rw.Full())  # causal", False),
        ("rw.attention(q, k, v, rw.Full())  # not causal", True),
        ("pattern = rw.SlidingWindow(w) & rw.Causal() | rw.Sinks(32)  # not causal", True),
        ("causal = rw.SlidingWindow(9)", True),
    ],
)
def test_the_rules_of_code(code: str, right: bool) -> None:
    assert all(wrong(said) is None for said in in_code(code)) == right
