"""The kit finds faults of kernels, prints a script that reproduces them, and runs under pytest."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from torch import Tensor

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave_audit import conformance

from .functions import KERNELS, RIGHT_KERNELS

ERRORS = {
    "exact": "out is off by|lse is off by", "leaks": "with keys that it must not attend", "row_sums": "rows of ones give",
    "gradients": "d[qkv] is off by", "strides": "the output is off by", "repeated": ".", "unattended_nan": ".",
}  # fmt: skip


@pytest.mark.parametrize("name", list(KERNELS))
def test_faults(name: str) -> None:
    """Each fault is caught by its rule, reduced, and printed as a script that reproduces it."""
    kernel, rule = KERNELS[name]
    failure = conformance.judge(kernel, rule, examples=100).failure
    assert failure is not None
    assert re.search(ERRORS[rule], failure.error), failure.error
    assert len(failure.script.splitlines()) <= 10
    # torch refuses some writes to a shared element
    with pytest.raises((AssertionError, RuntimeError)):
        exec(failure.script.replace("print(", "str("), {})


@pytest.mark.parametrize("name", list(RIGHT_KERNELS))
def test_right_kernels_hold_every_rule(name: str) -> None:
    for rule in conformance.RULES:
        verdict = conformance.judge(RIGHT_KERNELS[name], rule, examples=20)
        assert (verdict.tried, verdict.failure) == (20, None)


def test_refusals_are_counted() -> None:
    def only_causal(q: Tensor, k: Tensor, v: Tensor, pattern: rw.Pattern) -> Tensor:
        raise NotImplementedError

    verdict = conformance.judge(only_causal, "exact", examples=5)
    assert (verdict.tried, verdict.refused, verdict.failure, verdict.holds) == (0, 5, None, None)


def test_invalid_kernels() -> None:
    with pytest.raises(UnsupportedError, match="kernel: got 'nowhere:f'"):
        conformance.load("nowhere:f")
    with pytest.raises(UnsupportedError, match="a parameter named allowed or pattern"):
        conformance.judge(lambda q, k, v: q, "exact")


@pytest.mark.parametrize(
    ("kernel", "status", "says"),
    [
        ("audit.tests.functions:a_softmax_a_tile", 1, "rows of ones give"),
        ("audit.tests.test_model:only_causal", 0, "0 calls, 40 refused"),
    ],
)
def test_under_pytest(kernel: str, status: int, says: str) -> None:
    """Pytest fails for a rule that a kernel breaks, and skips a rule that it refuses."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "pytest_ringweave",
        "--pyargs", "ringweave_audit.conformance", "-k", "row_sums", "-rs", "--kernel", kernel,
    ]  # fmt: skip
    # an installed plugin is loaded already
    plugin = ["-p", "pytest_ringweave"]
    installed = "pytest_ringweave" in str(
        list(__import__("importlib.metadata").metadata.entry_points(group="pytest11"))
    )
    if installed:
        at = command.index(plugin[1]) - 1
        command = command[:at] + command[at + 2 :]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert says in done.stdout
    assert ("from ringweave_audit import conformance" if status else "not examined: ") in done.stdout
