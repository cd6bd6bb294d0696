"""A hook of mkdocs that adds generated pages: the recorded explorer, the pages of figures, and DESIGN.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from ringweave_lab.bench.report import case_pages, read_lines, rendered_figures
from ringweave_lab.explorer.answer import Asked, answer
from ringweave_lab.explorer.server import EXAMPLES, page

RECORDED = {
    "Causal window with sinks": ("4K", "16K", "64K", "1M"),
    "Dilated window": ("4K", "64K", "1M"),
    "LongNet": ("16K", "1M"),
    "Sparse Transformer": ("4K", "16K"),
    "An image's neighbourhood": ("4K",),
    "A pattern for each head": ("4K", "64K"),
}


def recorded() -> dict[str, Any]:
    """Return the explorer's answers by pattern and length, for the page's default call and ranks."""
    found = {}
    for name, lengths in RECORDED.items():
        for tokens in lengths:
            asked = Asked.of(EXAMPLES[name] | {"tokens": tokens, "cells": "64"})
            found[f"{asked.pattern}\n{tokens}"] = answer(asked)
    return found


def figures(folder: Path, case: str | None) -> str:
    """Return the page of a folder's result lines, or of one case's; they are from one processor."""
    lines = read_lines(sorted(folder.glob("*.jsonl")))
    return rendered_figures(case_pages(line for line in lines if case in (None, line["case"])))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the written ones."""
    root = Path(config.config_file_path).parent
    results, case = root / "lab" / "results", config.extra["figures"] or None
    for name, content in (
        ("explorer-recorded.html", page(recorded())),
        ("benchmarks/figures.html", figures(results, case)),
        ("benchmarks/figures-intel.html", figures(results / "intel", case)),
        ("benchmarks/figures-zen5.html", figures(results / "zen5", case)),
        ("benchmarks/figures-avx2.html", figures(results / "avx2", case)),
        ("design.md", (root / "DESIGN.md").read_text("utf-8")),
    ):
        files.append(File.generated(config, name, content=content))
    return files
