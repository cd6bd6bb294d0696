"""What every test and every example of the docs starts from."""

from __future__ import annotations

import gc
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests import deprecations, progress, sampled

import ringweave as rw


def example_names() -> dict[str, object]:
    """The names that the documentation's examples use without saying so."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 256, 32, generator=generator) for _ in range(3))
    return {"rw": rw, "torch": torch, "q": q, "k": k, "v": v}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--long``."""
    parser.addoption("--long", action="store_true", help="every case of every test: `make test-all`")


def pytest_configure(config: pytest.Config) -> None:
    """No test reads or writes the user's own tuning store or asks the model hub, nor does a process that one starts."""
    folder = tempfile.TemporaryDirectory(prefix="ringweave-cache-")
    os.environ["RINGWEAVE_CACHE"] = folder.name
    # without a network it is asked again and again for half a minute
    os.environ["HF_HUB_OFFLINE"] = "1"
    if config.getoption("--long"):
        os.environ[sampled.LONG] = "1"
    _seed_no_absent_device()
    # tests make many objects that stay, such as compiled code: collections of the defaults take a tenth of their time
    gc.set_threshold(20_000, 20, 20)
    config.add_cleanup(folder.cleanup)
    progress.register(config)
    if importlib.util.find_spec("hypothesis") is not None:
        import hypothesis

        # a busy machine is no failure
        slow = [hypothesis.HealthCheck.too_slow]
        examples = 100 if sampled.is_long() else 40
        hypothesis.settings.register_profile(
            "ringweave", deadline=None, max_examples=examples, suppress_health_check=slow
        )
        hypothesis.settings.load_profile("ringweave")


def _seed_no_absent_device() -> None:
    """Make torch.manual_seed skip the devices that this machine lacks.

    For each of them it keeps the seed for later, with the stack of its caller as text, which takes a millisecond.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]


# Two processes that share the tests take whole files: the longest first, since what is left for the end runs alone.
LONGEST = [
    "gpu/tests/compiled/test_triton_compiled.py", "gpu/tests/test_triton.py", "tests/test_examples.py",
    "lab/tests/bench/test_demo.py", "tests/parallel/test_failure.py", "tests/integrations/test_chosen_keys.py",
    "tests/test_unattended.py", "lab/tests/bench/test_ring.py", "tests/parallel/test_compose.py",
    "audit/tests/test_kernels.py", "tests/parallel/test_schedules.py",
    "tests/integrations/test_flex_attention_calls.py",
    "tests/test_docs.py", "tests/parallel/test_models.py", "tests/integrations/test_reading.py",
    "lab/tests/bench/test_peers.py", "lab/tests/bench/test_campaign.py", "tests/test_api.py",
    "tests/patterns/test_ragged.py", "tests/test_guide.py", "tests/test_varlen.py",
]  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none; what compilers there warn of is no failure."""
    if not sampled.is_long():
        left_out = sampled.left_out(items)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if "PYTEST_XDIST_WORKER" in os.environ:
        begin = {name: place - len(LONGEST) for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: begin.get(item.nodeid.partition("::")[0], 0))
    skipped = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    for item in items:
        if item.get_closest_marker("measures") is not None:
            item.add_marker(pytest.mark.flaky(reruns=2))
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.filterwarnings("default") if torch.cuda.is_available() else skipped)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest, doctest_namespace: dict[str, object]) -> None:
    torch.manual_seed(0)
    deprecations.refuse()
    if isinstance(request.node, pytest.DoctestItem):
        doctest_namespace.update(example_names())


@pytest.fixture(scope="module", autouse=True)
def _small_collections() -> None:
    """Exclude from garbage collection the objects that exist when a file begins.

    Each step of a benchmark collects. After some hundred files, a collection of all objects takes seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _as_many_threads() -> Iterator[None]:
    """No file leaves another number of threads behind, here or for threads that begin later."""
    before = torch.get_num_threads()
    yield
    with ThreadPoolExecutor(1) as begun:
        after = torch.get_num_threads(), begun.submit(torch.get_num_threads).result()
    torch.set_num_threads(before)
    assert after == (before, before), "a test set another number of threads, and left it"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every torch.empty holds NaN: an element that is never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


# pages are run as they are read, where sybil is there to read them; scripts beside them are no tests
if importlib.util.find_spec("sybil") is not None:
    from tests.markdown import collector

    pytest_collect_file = collector(
        Path(__file__).parent,
        ["README.md", "CONTRIBUTING.md", "audit/README.md", "docs/*.md", "docs/upstream/*.md"],
        example_names,
    )
collect_ignore_glob = ["docs/*.py"]
# these import triton as they are loaded
if importlib.util.find_spec("triton") is None:
    folder = "gpu/src/ringweave_gpu/triton"
    collect_ignore_glob += [f"{folder}/kernels/*.py", f"{folder}/launch.py", f"{folder}/operands.py"]
    collect_ignore_glob += ["gpu/tests/interpreted_cuts.py"]
    collect_ignore_glob += [f"gpu/tests/compiled/{name}.py" for name in ("emulated", "launched", "stand_in*")]
