"""A call without terms, dropout and 8-bit keys compiles as if the kernels had none of them; test_triton_compiled.py runs this.

The kernels' source is taken without every word about them, by its syntax tree, and both are lowered to Triton's
intermediate representation, from which all that follows is one deterministic compiler. So nothing is frozen that
could grow old, and any word that leaks into a plain call shows.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton
from triton.compiler import ASTSource

from ringweave_gpu.triton import kernels
from ringweave_gpu.triton.kernels import score_terms as compiled

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import kernel_resources
from kernel_shapes import ScoreTerms, Shape

SWITCHES = {"SCORED", "TERMS", "HOLES", "drop", "k_scale", "v_scale"}
ARGUMENTS = SWITCHES | {"places", "tables", "numbers"}
SHAPE = Shape((64, 64), heads=4, split=True)


class Without(ast.NodeTransformer):
    """Remove the branches for calls with terms, and their arguments, from a kernel's source."""

    def visit_If(self, node: ast.If) -> Any:
        node = self.generic_visit(node)  # type: ignore[assignment]
        names = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)} & SWITCHES
        if not names:
            return node
        given = eval(ast.unparse(node.test), dict.fromkeys(names))
        return (node.body if given else node.orelse) or None

    visit_IfExp = visit_If  # noqa: N815

    def visit_arguments(self, node: ast.arguments) -> ast.arguments:
        node.args = [each for each in node.args if each.arg not in ARGUMENTS]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        if node.module == "score_terms":
            return None
        # the new module is imported alone, so relative imports become absolute
        node.module, node.level = f"{kernels.__name__}.{node.module}" if node.level else node.module, 0
        return node


def without(module: str, folder: Path) -> ModuleType:
    """Return a module of the kernels, imported from a new file: Triton reads source files."""
    tree = Without().visit(ast.parse((Path(kernels.__path__[0]) / f"{module}.py").read_text()))
    text = ast.unparse(ast.fix_missing_locations(tree))
    words = {each.id for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)}
    assert not words & (ARGUMENTS | (set(vars(compiled)) - {"triton", "tl", "annotations"}))
    path = folder / f"plain_{module}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    return made


def lowered(source: ASTSource, target: Any, options: dict[str, Any]) -> str:
    """Return Triton's intermediate representation without source locations."""
    from triton._C.libtriton import ir

    backend = triton.compiler.make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )
    return str(module.str_nodebug())


class StopError(Exception):
    """End compilation after its first stage."""


@pytest.mark.parametrize("name", ["forward", "backward_q", "backward_kv"])
def test_a_plain_call_has_nothing_of_terms(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def noted(source: ASTSource, target: Any, options: dict[str, Any]) -> None:
        found.append(lowered(source, target, options))
        raise StopError

    monkeypatch.setattr(kernel_resources.triton, "compile", noted)
    plain = getattr(without(name.partition("_")[0], tmp_path), name)

    def lower(**given: Any) -> None:
        with pytest.raises(StopError):
            kernel_resources.compile_kernel(name, 64, "sm_90", SHAPE, **given)

    lower()
    lower(terms=ScoreTerms((compiled.SOFTCAP.value,)))
    monkeypatch.setattr(kernels, name, plain)
    lower()
    now, softcap, before = found
    assert now == before
    assert softcap != now
