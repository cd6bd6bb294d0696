"""DESIGN.md lists the layers of pyproject.toml, and no imports form a circle.

``python -m tests.test_layers`` writes the list of layers, ``python -m tests.test_layers circles`` prints the circles.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringweave.backends import BACKENDS
from ringweave.plugins import BACKEND_OWNERS

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- layers -->\n", "<!-- /layers -->\n"


#: Imports inside functions of the package; the number may only fall.
LATE = 80


def contract(name: str) -> dict[str, list[str]]:
    """Return a contract of import-linter."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (found,) = (each for each in contracts if each["name"] == name)
    return found  # type: ignore[no-any-return]


def layers() -> str:
    """Return the contract of layers as a block of text, topmost layer first."""
    rows = contract("Imports run downwards")["layers"]
    lines = [row.replace("ringweave.", "").replace(" | ", "   ") for row in rows]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def parts() -> tuple[str, str, str]:
    """Return DESIGN.md's text before the list, the list, and the rest."""
    before, _, rest = (ROOT / "DESIGN.md").read_text("utf-8").partition(BEGIN)
    middle, _, after = rest.partition(END)
    return before, middle, after


def test_the_list_of_layers_is_the_linters() -> None:
    assert parts()[1] == layers()


def test_every_backend_of_the_registry_is_an_independent_sibling() -> None:
    siblings = contract("Backends are independent siblings")["modules"]
    found = {each.forward.__module__ for each in BACKENDS.values()}
    # the package runs without the distributions that add backends
    added = {f"{owner.replace('-', '_')}.{name}" for name, owner in BACKEND_OWNERS.items()}
    assert sorted(siblings) == sorted(found | added)


def test_modules_above_the_backends_know_them_by_their_records() -> None:
    rule = contract("Modules above the backends know them by their records")
    siblings = contract("Backends are independent siblings")["modules"]
    assert sorted(rule["forbidden_modules"]) == sorted(each for each in siblings if each.startswith("ringweave."))
    rows = contract("Imports run downwards")["layers"]
    above = rows[rows.index("ringweave.cli") : rows.index("ringweave.backends")]
    assert sorted(rule["source_modules"]) == sorted(name for row in above for name in row.split(" | "))


def late_imports(root: Path) -> list[str]:
    """Return the file and line of each import inside a function."""
    return sorted(
        {
            f"{file.relative_to(root)}:{node.lineno}"
            for file in root.rglob("*.py")
            for function in ast.walk(ast.parse(file.read_text("utf-8")))
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(function)
            if isinstance(node, (ast.Import, ast.ImportFrom))
        }
    )


def test_imports_inside_functions_become_fewer() -> None:
    """A circle of files can hide in imports inside functions, which no other rule sees."""
    assert len(late_imports(ROOT / "src/ringweave")) <= LATE


def test_imports_inside_functions_are_found(tmp_path: Path) -> None:
    text = "import ast\ndef climb():\n    def inner():\n        import re\n    from . import stairs\nclass Roof:\n    import io\n"
    (tmp_path / "house.py").write_text(text)
    assert late_imports(tmp_path) == ["house.py:4", "house.py:5"]


@pytest.mark.parametrize(
    "page",
    sorted([*ROOT.glob("src/**/README.md"), *ROOT.glob("audit/src/**/README.md"), *ROOT.glob("gpu/src/**/README.md")]),
    ids=lambda page: page.parent.name,
)
def test_a_folders_page_names_its_files(page: Path) -> None:
    said = page.read_text("utf-8")
    # folders below have their own pages, or a line in the root's
    whole = page.parent == ROOT / "src/ringweave"
    files = page.parent.glob("*.py") if whole else page.parent.rglob("*.py")
    names = [file.name for file in files if file.name != "__init__.py"]
    kernels = [file.name for file in page.parent.rglob("kernels/*.py")]
    assert [name for name in names if name not in said and name not in kernels] == []
    assert [each for each in re.findall(r"`(?:\w+/)*(\w+\.py)`", said) if each not in names] == []
    folders = [folder.parent.name for folder in page.parent.glob("*/__init__.py")] if whole else []
    assert [name for name in folders if f"`{name}/`" not in said] == []


def imports(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module of a package imports outside of functions, those for type checking too.

    A module of another folder is imported with the ``__init__`` of that folder, except for type checking.
    """
    files = {".".join(file.relative_to(root.parent).with_suffix("").parts): file for file in root.rglob("*.py")}
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for found, runs in _imported(ast.parse(file.read_text("utf-8")), _package(name, file)):
            module = found if found in files else found.rpartition(".")[0]
            if module in files:
                above = [each for each in _above(module) if runs and not f"{name}.".startswith(f"{each}.")]
                graph[name] |= {module, *above}
    return graph


def _above(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _package(name: str, file: Path) -> str:
    return name if file.name == "__init__.py" else name.rpartition(".")[0]


def _imported(node: ast.AST, package: str, runs: bool = True) -> Iterator[tuple[str, bool]]:
    """Yield each imported name with its module, and whether the import runs."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        for each in node.body:
            yield from _imported(each, package, False)
        for each in node.orelse:
            yield from _imported(each, package, runs)
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name, runs) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        yield from ((f"{module}.{alias.name}", runs) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _imported(child, package, runs)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other in circles."""
    reached = {name: _reached(graph, name) for name in graph}
    found = [{other for other in reached[name] if name in reached[other]} for name in graph if name in reached[name]]
    return [each for i, each in enumerate(found) if each not in found[:i]]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    open_ = [start]
    while open_:
        for other in graph[open_.pop()] - found:
            found.add(other)
            open_.append(other)
    return found


@pytest.mark.parametrize("package", ["ringweave_audit", "ringweave_gpu"])
def test_the_tests_of_the_core_need_no_other_distribution(package: str) -> None:
    """The audit and the backends of ringweave-gpu are distributions of their own, and so are their tests."""
    attribute = package.replace("ringweave_", "rw.")
    importing = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package))
        or (isinstance(node, ast.Import) and any(each.name.startswith(package) for each in node.names))
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == attribute)
    ]
    assert importing == []


def test_no_imports_lead_in_a_circle() -> None:
    assert [sorted(each) for each in circles(imports(ROOT / "src/ringweave"))] == []


def test_circles_are_found(tmp_path: Path) -> None:
    """Circles are found through re-exporting packages, of a module with itself, and under TYPE_CHECKING, but not in functions."""
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    for name, text in {
        "__init__": "", "room/__init__": "from .door import open_", "roof": "import house.room",
        "room/door": "from ..roof import rain", "cellar": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from . import stairs", "stairs": "from . import cellar", "own": "from house import own",
        "late": "from . import later", "later": "def climb():\n    from . import late",
    }.items():  # fmt: skip
        (package / f"{name}.py").write_text(text)
    graph = imports(package)
    found = {frozenset(each) for each in circles(graph)}
    assert found == {
        frozenset(["house.room", "house.room.door", "house.roof"]), frozenset(["house.cellar", "house.stairs"]),
        frozenset(["house.own"]),
    }  # fmt: skip
    (package / "own.py").write_text("from house.room.door import open_")
    assert imports(package)["house.own"] == {"house.room", "house.room.door"}


if __name__ == "__main__":
    if sys.argv[1:] == ["circles"]:
        for each in circles(imports(ROOT / "src/ringweave")):
            print(len(each), *sorted(each))
        sys.exit()
    before, _, after = parts()
    (ROOT / "DESIGN.md").write_text(before + BEGIN + layers() + END + after, "utf-8")
