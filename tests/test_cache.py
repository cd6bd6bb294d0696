"""The table of ``ringweave.cache`` lists every cache; no module has another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringweave as rw
from ringweave import cache, device_check
from ringweave.cache import PROCESS_CACHES, LRUCache, derived_values, process_cache

SOURCE = Path(cache.__file__).parent
#: Containers that modules fill at run time, with their purpose; their entries could not be recomputed.
REGISTERS = {
    "backends/tuning.py": set[str](),
    "errors.py": {"WARNED"},  # keys of warnings that were logged
    "integrations/transformers/model_context.py": {"_LIVE"},  # objects by name, weakly
    "memory/pressure.py": {"_callbacks"},  # functions of users
    "parallel/execution/collective.py": {"_callers"},
    "parallel/operators.py": {"_sessions"},
    "parallel/transport/lifelines.py": {"_sockets"},
    "parallel/transport/mesh.py": {"_made"},  # process groups
    "parallel/transport/transport.py": {"_made"},
    "patterns/function.py": {"_tickets"},  # living objects, weakly
    "patterns/recorded.py": {"_functions", "_by_key"},
    "plugins.py": {"HOST_PROGRAMS"},
    "plan/cuda_sync.py": {"_made", "_in_graphs"},  # events, and tensors that graphs read
    "terms/term.py": {"KINDS"},
}
_CONTAINERS = {"dict", "set", "list", "deque", "OrderedDict", "defaultdict", "Counter", "LRUCache"}


def _filled(tree: ast.Module) -> Iterator[str]:
    """Return the names of empty containers that a module creates."""
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        empty = isinstance(value, ast.Dict | ast.List | ast.Set) and not ast.unparse(value).strip("{}[]")
        called = value.func if isinstance(value, ast.Call) else None
        if isinstance(called, ast.Subscript):
            called = called.value
        name = getattr(called, "attr", getattr(called, "id", ""))
        if empty or name in _CONTAINERS or name.startswith("Weak"):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            yield ast.unparse(target)


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_module_has_a_cache_of_its_own(file: Path) -> None:
    if file == Path(cache.__file__):
        return
    tree = ast.parse(file.read_text("utf-8"))
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name | ast.alias)]
    words = {getattr(node, "attr", getattr(node, "id", getattr(node, "name", ""))) for node in made}
    assert not words & {"lru_cache", "cache_info"}
    assert "functools.cache" not in {ast.unparse(node) for node in made if isinstance(node, ast.Attribute)}
    found = set(_filled(tree))
    assert found == REGISTERS.get(str(file.relative_to(SOURCE)), set())


def test_containers_that_a_module_fills_are_found() -> None:
    text = (
        "a = {}\nb: dict[int, int] = dict[int, int]()\nc = weakref.WeakSet()\nd = LRUCache(1, 1)\ne = {1: 2}\nf = (1,)"
    )
    assert list(_filled(ast.parse(text))) == ["a", "b", "c", "d"]


def test_the_page_lists_the_caches_and_their_bounds() -> None:
    caches = {name: each for name, each in vars(cache).items() if isinstance(each, LRUCache)}
    assert cache.__doc__ is not None
    table = {line.split()[0]: line for line in cache.__doc__.splitlines() if line.startswith("    ") and line[4] != " "}
    assert set(table) == {"cache", *caches, "derived", "scratch"}
    assert len(table) - 1 <= 8
    for name, each in caches.items():
        mib = f"{each.max_bytes // 2**20} MiB, {each.most}" if each is not cache.COMPILED else str(each.most)
        assert table[name].endswith(f"  {mib}")


def test_trim_clears_all() -> None:
    kept = [each for each in vars(cache).values() if isinstance(each, LRUCache)]
    for each in kept:
        each.put("a test", "value", 1)
        each.front[0] = "value"
    assert rw.memory.trim() >= len(kept)
    assert [each for each in kept if each.get("a test") or each.front] == []


def test_values_derived_from_a_plan_are_freed_with_it() -> None:
    plan = rw.PlanCache().get(rw.Causal(), 64, tile=(16, 16))
    before = len(cache._derived)
    derived_values(plan)["lists"] = object()
    assert derived_values(plan)["lists"] is derived_values(plan)["lists"]
    assert len(cache._derived) == before + 1
    del plan
    assert len(cache._derived) == before


def test_functions_with_a_process_cache_are_listed_and_run_once() -> None:
    """A process cache keeps one result for each argument, and is listed by its function's name."""
    asked = []

    @process_cache
    def found(name: str) -> str | None:
        asked.append(name)
        return None

    assert (found("a"), found("a"), found("b")) == (None, None, None)
    assert asked == ["a", "b"]
    assert PROCESS_CACHES.pop(f"{__name__}.{found.__wrapped__.__qualname__}") is found  # type: ignore[attr-defined]
    assert PROCESS_CACHES["ringweave.device_check._checked"] is device_check._checked
