"""Adds the explorer's page to the site, with answers recorded while the site is built: a hook of mkdocs."""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from ringweave.cli.explorer.answer import Asked, answer
from ringweave.cli.explorer.server import EXAMPLES, page

RECORDED = {
    "Causal window with sinks": ("4K", "16K", "64K", "1M"),
    "Dilated window": ("4K", "64K", "1M"),
    "LongNet": ("16K", "1M"),
    "Sparse Transformer": ("4K", "16K"),
    "An image's neighbourhood": ("4K",),
    "A pattern for each head": ("4K", "64K"),
}


def recorded() -> dict[str, Any]:
    """Answers by pattern and length: those of the call and the ring that the page begins with."""
    found = {}
    for name, lengths in RECORDED.items():
        for tokens in lengths:
            asked = Asked.of(EXAMPLES[name] | {"tokens": tokens, "cells": "64"})
            found[f"{asked.pattern}\n{tokens}"] = answer(asked)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page beside those that are written by hand."""
    files.append(File.generated(config, "explorer-recorded.html", content=page(recorded())))
    return files
