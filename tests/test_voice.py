"""Test that the documentation avoids constructions that a reader must decode: see "Voice" in CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "DESIGN.md", "CHANGELOG.md", "audit/README.md")),
]

#: Constructions without an ordinary use in these pages, each with a hint.
FORBIDDEN = {
    r"(?i)\b(?:and|or|but|of|to|in|by|for|with|than|holds|keeps|gives|takes|is) what\b(?! (?:kind|size|type|order)\b)": "name the thing",
    r"(?i)\bwhose\b": "with, or 'that has'",
    r"(?i)\bnobody\b": "say who: no query, no test, no user",
    r"\b(?:that|where) none\b|\b(?:are|is) none\b(?! of)": "say of which things",
    r"(?i)\balike\b|\blikewise\b": "equal, or in the same way",
    r"(?i)\bbe (?:it|they)\b|\bto be had\b": "write a main clause",
    r"(?i)\bso many\b|\bas (?:many|much) as (?:there|it|they) (?:is|are)\b": "give the number",
    r"(?i)\bof (?:which|whom) (?:there|it|they)\b": "write a second sentence",
    r"(?i)\bof those that\b|\bsuch as are\b|\ball that (?:is|are|was|a|the)\b": "name the things",
    r"(?i)\bin silence\b": "silently",
    r"(?i)\bgo(?:es)? (?:on with|on from|round)\b|\bgoes on\b": "continues, bypasses",
    r"(?i)\bat once\b": "immediately, or together",
    r"(?i)\b(?:seamless(?:ly)?|blazing(?:ly)?|cutting-edge|note that)\b": "leave it out",
}


def prose(text: str) -> list[tuple[int, str]]:
    """Return (line number, sentence part) for the lines outside of code, comments, tables of examples and quotes."""
    text = re.sub(r"(?s)<!--.*?-->", lambda found: "\n" * found[0].count("\n"), text)
    # the table and list of the guide quote the words
    text = re.sub(r"(?s)\n\| instead of \| write \|\n.*?(?=\n## )", lambda found: "\n" * found[0].count("\n"), text)
    lines, fenced = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            plain = re.sub(r"\]\([^)]*\)|`[^`]*`", "] ", line)
            lines += [(number, part.strip()) for part in re.split(r"[|;]|\. ", plain) if part.strip()]
    return lines


def found(text: str) -> list[str]:
    """Return each forbidden construction with its line and hint."""
    return [
        f"{number}: {match[0]!r} ({hint}): {part}"
        for number, part in prose(text)
        for construction, hint in FORBIDDEN.items()
        if (match := re.search(construction, part)) is not None
    ]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_plain(page: Path) -> None:
    assert found(page.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "A key that nobody attends.",
        "Masks are lost in silence.",
        "It depends on the length and of what a model keeps.",
        "Bounds that are none.",
        "A backend whose kernel is missing.",
        "Keys, of which there is one for each token.",
        "Calls that are alike are planned together.",
        "It goes on with step 7.",
        "Two at once raise.",
        "Note that it is fast.",
    ],
)
def test_a_construction_is_found(text: str) -> None:
    assert found(text)


@pytest.mark.parametrize(
    "text",
    [
        "What would run, and why",
        "A docstring says what a function does.",
        "`nobody` and `in silence` are quoted code.",
        "None of the backends supports it.",
        "```text\nwhat nobody reads, in silence\n```",
        "The value is None.",
        "In what order do rows start?",
    ],
)
def test_plain_text_passes(text: str) -> None:
    assert found(text) == []
