"""Adds DESIGN.md to the site, where it is kept in one place: a hook of mkdocs."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add it beside the pages that are written by hand."""
    text = (Path(config.config_file_path).parent / "DESIGN.md").read_text("utf-8")
    files.append(File.generated(config, "design.md", content=text))
    return files
