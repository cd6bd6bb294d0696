"""Each public pattern is declared once, and every list of patterns contains all of them."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import numpy as np
import pytest

import ringweave as rw
from ringweave import patterns
from ringweave.patterns import base, declared
from ringweave.patterns.base import Composite, Derived, Pattern
from ringweave.patterns.declared import DECLARED, declare
from ringweave.patterns.dilated import Strided
from ringweave.patterns.reader import names
from ringweave.relation.lines import Line
from ringweave.relation.node import Frame, Node
from ringweave.relation.zones import Zones

from .. import cases
from ..fuzz import kinds
from . import candidates

#: The methods that a pattern may define, as the docstring of Pattern lists them.
REQUIRED = {"_text", "zones"}
OPTIONAL = {"extents", "select", "bound", "check"}
SAID = {"tables", "residue_rate", "tile_size", "by_place", "_packed_apart", "_among_keys"}
#: The methods that identify a function mask by the values it reads and bounds by their contents, and those of a mixture.
BESIDES = {
    "OfFunction": {"value", "looks_up"},
    "TokenMask": {"key", "stays_equal", "_for_call", "_owners"},
    "Recorded": {"key", "_owners", "_recognised"},
    "Bounds": {"key", "stays_equal", "_constant"},
    "ZoneTable": {"key"},
    "LongNet": {"combinable", "to_dense"},
    "OnGrid": {"looks_up", "_allowed_pairs"},
    "Sinks": {"lists_tokens", "_either"},
}
#: Further methods of Composite and of the classes that operators create.
OF_PARTS = {"parts_within", "remade", "depth", "leaves", "_for_call", "_recognised", "counts_apart"}


def kinds_of(kind: type[Pattern]) -> Iterator[type[Pattern]]:
    for each in kind.__subclasses__():
        yield each
        yield from kinds_of(each)


INNER = [kind for kind in dict.fromkeys(kinds_of(Pattern)) if kind.__module__.startswith("ringweave.")]


def test_a_new_pattern_defines_a_dozen_methods_at_most() -> None:
    assert len(REQUIRED | OPTIONAL) <= 12
    assert Pattern.__abstractmethods__ == REQUIRED
    said = " ".join((inspect.getdoc(Pattern) or "").split())
    for name in REQUIRED | OPTIONAL | SAID:
        assert f"``{name}``" in said, name


@pytest.mark.parametrize("kind", INNER, ids=lambda kind: kind.__name__)
def test_patterns_define_no_other_method(kind: type[Pattern]) -> None:
    own = {name for name in vars(kind) if name in vars(Pattern) and not name.startswith("__")} - {"_abc_impl"}
    allowed = REQUIRED | OPTIONAL | SAID | BESIDES.get(kind.__name__, set())
    assert own <= (allowed | OF_PARTS if issubclass(kind, Composite) else allowed)


#: Classes that operators and calls create; users do not write these names.
MADE = {
    "And",
    "Or",
    "Not",
    "Combined",
    "Shifted",
    "Offsets",
    "View",
    "OfFunction",
    "Recorded",
    "Composite",
    "Derived",
    "ZoneTable",
}


def test_every_pattern_is_declared_and_exported() -> None:
    """Every pattern in every module of the folder, imported or not, is declared and exported."""
    for info in pkgutil.iter_modules(patterns.__path__, f"{patterns.__name__}."):
        for name, thing in vars(importlib.import_module(info.name)).items():
            if not inspect.isclass(thing) or not issubclass(thing, Pattern) or thing.__module__ != info.name:
                continue
            if not name.startswith("_") and not inspect.isabstract(thing) and name not in MADE:
                assert name in DECLARED, f"{name} of {info.name} has no @declare"
    assert set(DECLARED) <= set(patterns.__all__)


@pytest.mark.parametrize("name", DECLARED)
def test_declared_patterns_are_everywhere(name: str) -> None:
    known = DECLARED[name]
    assert name in patterns.__all__
    assert getattr(patterns, name) is known.make
    assert (name in names()) == known.text
    if known.text:
        pattern = rw.patterns.parse(known.example)
        assert pattern.plot(known.tokens, heads=known.heads).startswith("<svg")
        if inspect.isclass(known.make):
            assert type(pattern) is known.make
            assert rw.patterns.rebuild(pattern.spec, pattern.tables) == pattern
    assert name in {*kinds.KINDS, *kinds.ELSEWHERE}
    assert name in cases.NAMED | cases.ELSEWHERE | set(cases.PATTERNS)
    # a new class is either a first-level name, or under rw.patterns only
    assert name not in rw.__all__ or getattr(rw, name) is known.make


@pytest.mark.parametrize("name", DECLARED)
def test_plans_look_at_few_more_tiles_than_they_contain(name: str) -> None:
    """The time of a plan grows with its tiles, for the example and for a long period or a large parameter."""
    known = DECLARED[name]
    has_numbers = any(character.isdigit() for character in known.example)
    assert known.hostile or "lambda" in known.example or not has_numbers, f"declare a hostile= expression of {name}"
    candidates.check_declared(known)


class Everywhere(Zones):
    """Zones that may be in any tile, as far as they say."""

    def touched(self, frame: Frame, within: Line | None = None) -> Line:
        return Line(np.zeros(1, np.int64), np.full(1, frame.length))


class Spread(Strided):
    """Multiples of a stride that may be in any tile: Strided once listed too many tiles in this way."""

    def zones(self, n: int | None) -> Node:
        found = super().zones(n)
        assert isinstance(found, Zones)
        return Everywhere(residue=found.residue) if n is not None and n <= self.stride else found


def test_a_quadratic_plan_is_found() -> None:
    candidates.check(Spread(300), 2**11)
    with pytest.raises(AssertionError, match="256 candidates, 16 tiles"):
        candidates.check(Spread(2**30), 2**11)


def test_a_declaration_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong declaration raises, and a second pattern of a known name too."""
    monkeypatch.setattr(declared, "DECLARED", copy.deepcopy(DECLARED))

    def other() -> Pattern:
        return rw.Causal()

    with pytest.raises(rw.PatternError, match=r"example: got 'Other\(\)'; wanted an expression other\(...\)"):
        declare("Other()", "Presets")(other)
    with pytest.raises(rw.PatternError, match=r"hostile: got 'Other\(n\)'; wanted an expression other\(...\)"):
        declare("other()", "Presets", hostile="Other(n)")(other)
    with pytest.raises(rw.PatternError, match="the section of other: got 'By taste'; wanted one of 'By position'"):
        declare("other()", "By taste")(other)
    other.__name__ = "Causal"
    with pytest.raises(
        rw.PatternError,
        match="got Causal of tests.patterns.test_declared and of ringweave.patterns.local; wanted one pattern per name",
    ):
        declare("Causal()", "Presets")(other)


def test_base_imports_no_pattern() -> None:
    """The module of the base class imports the modules of patterns, plans and pictures inside of methods only."""
    tree = ast.parse(inspect.getsource(base))
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    late = {id(node) for method in methods for node in ast.walk(method)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in late]
    found = {node.module for node in nodes if node.level}
    assert found == {
        "checks",
        "errors",
        "types",
        "cache_key",
        "declared",
        "plan.block_plan",
        "relation.node",
        "relation.zones",
    }
    assert issubclass(Derived, Pattern)
