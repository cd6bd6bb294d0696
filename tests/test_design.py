"""DESIGN.md and CONTRIBUTING.md name only files, modules, classes and functions that exist."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = ("DESIGN.md", "CONTRIBUTING.md")
_PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w-]+\.(?:py|md|toml|txt|json|cpp|h)")


@functools.cache
def _tracked() -> set[str]:
    """Return the files of the repository and all their folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # a file that is removed and not yet committed is listed, too
    files = [Path(line) for line in said.splitlines() if (ROOT / line).exists()]
    return {str(each) for file in files for each in (file, *file.parents)}


@functools.cache
def _words() -> set[str]:
    """Return all words that the sources define or hold as text: names, arguments, attributes, keys."""
    found: set[str] = set()
    for tree in _trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.arg | ast.alias):
                found |= {node.arg} if isinstance(node, ast.arg) else {node.asname or node.name}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
                found.add(node.value)
    for file in (*(ROOT / "csrc").iterdir(), ROOT / "Makefile", ROOT / "pyproject.toml"):
        found |= set(re.findall(r"[\w.-]+", file.read_text("utf-8")))
    return found


@functools.cache
def _trees() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules by their dotted names."""
    files = [file for file in _tracked() if file.endswith(".py")]
    names = [
        file.removesuffix(".py").removesuffix("/__init__").rpartition("src/")[2].replace("/", ".") for file in files
    ]
    return {name: ast.parse((ROOT / file).read_text("utf-8")) for name, file in zip(names, files, strict=True)}


def _members(body: list[ast.stmt]) -> set[str]:
    """Return the names that a module or a class defines, imports or writes."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store):
                found.add(inner.id if isinstance(inner, ast.Name) else inner.attr)
            elif isinstance(inner, ast.alias):
                found.add(inner.asname or inner.name)
    return found


def _has(owner: str, name: str) -> bool:
    """Return whether a module with this end of its name, or a class of this name, has a member."""
    for module, tree in _trees().items():
        if f".{module}".endswith(f".{owner}") and (name in _members(tree.body) or f"{module}.{name}" in _trees()):
            return True
        if "." not in owner:
            classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
            if any(name in _members(each.body) for each in classes):
                return True
    return False


def absent(text: str) -> list[str]:
    """Return the backticked names of a page that name nothing; a guide's blocks define names too."""
    # sentences that are quoted as examples of wording
    text = re.sub(r"(?ms)^\| instead of .*?\n\n", "", text)
    blocks = "\n".join(re.findall(r"(?ms)^```.*?^```$", text))
    new_files = set(re.findall(r"(?m)^`([\w./-]+)`, a new file", text))
    new_files |= {str(each) for file in new_files for each in Path(file).parents}
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").split()}
    missing = []
    for said in dict.fromkeys(re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```$", "", text))):
        if _PATH.fullmatch(said):
            path = said.removeprefix("src/ringweave/").rstrip("/")
            named = {path, f"src/ringweave/{path}", f"src/ringweave/{path}.py"}
            there = named & (_tracked() | new_files) or path in ignored or said.startswith("/")
            there = there or any(file.endswith(f"/{path}") for file in _tracked() | new_files)
            # further files of a distribution that a guide adds
            there = there or (path.partition("/")[0] in new_files - _tracked())
        elif re.fullmatch(r"\w+(?:\.\w+)+", said):
            full = re.sub(r"^rw\b", "ringweave", said)
            owner, _, name = full.rpartition(".")
            there = full in _words() or _has(owner.removeprefix("ringweave."), name) or f"class {name}(" in blocks
            there = there or (owner == "torch" and hasattr(torch, name))
        elif command := re.fullmatch(r"python (?:-m )?([\w./]+)", said):
            there = command[1] in _trees() or command[1] in _tracked()
        elif re.fullmatch(r"\w+", said):
            there = (
                said in _words() | _tracked()
                or any(f".{name}".endswith(f".{said}") for name in _trees())
                or said in blocks
            )
        else:
            there = True
        if not there:
            missing.append(said)
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_what_exists(page: str) -> None:
    assert absent((ROOT / page).read_text("utf-8")) == []


def test_absent_names_are_found() -> None:
    # put together here, since this file is one of the sources that define names
    gone = "gone" + "away"
    wrong = [f"{place}{gone}" for place in ("backends/", "patterns.base.", "Backend.", "", "python -m tests.")]
    right = ["backends/cpu.py", "csrc/", "patterns.base", "Backend.prepare", "TokenMask", "python -m tests.test_layers"]
    text = " ".join(f"`{name}`" for name in (*wrong, *right))
    assert absent(text) == wrong
