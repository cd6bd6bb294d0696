"""The kit finds what kernels get wrong, prints what can be pasted, and runs under pytest."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ringweave as rw
from ringweave.audit import kit
from ringweave.errors import UnsupportedError


def sound(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return kit.dense(q, k, v, allowed, q.shape[-1] ** -0.5)[0]


def whole_tiles(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    n = allowed.shape[-1]
    tiles = F.pad(allowed, (0, -n % 16)).unflatten(-1, (-1, 16)).any(-1)
    return sound(q, k, v, tiles.repeat_interleave(16, -1)[..., :n])


def interleaved(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    ratio = q.shape[1] // k.shape[1]
    return sound(q, k.repeat(1, ratio, 1, 1), v.repeat(1, ratio, 1, 1), allowed)


def per_tile(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    tile = torch.arange(allowed.shape[-1]) // 16
    return sum(sound(q, k, v, allowed & (tile == n)) for n in range(int(tile[-1]) + 1))  # type: ignore[return-value]


def detached(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return sound(q, k, v.detach(), allowed)


def uniform(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Rows without keys give the mean of all values."""
    return sound(q, k, v, allowed | ~allowed.any(-1, keepdim=True))


def by_address(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Takes for granted that tensors are contiguous."""
    q, k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v))
    return sound(q, k, v, allowed)


def writes(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    out = sound(q, k, v, allowed)
    if not q.requires_grad and q.stride(0):
        q.mul_(2.0)
    return out


@pytest.mark.parametrize(
    ("kernel", "rule", "error"),
    [
        (whole_tiles, "exact", "out is off by"),
        (whole_tiles, "leaks", "with keys that it may not attend"),
        (interleaved, "exact", "out is off by"),
        (per_tile, "row_sums", "rows of ones give"),
        (detached, "gradients", "dv is off by"),
        (uniform, "row_sums", "rows of ones give"),
        (by_address, "strides", "give an output that is off by"),
    ],
)
def test_faults(kernel: object, rule: str, error: str) -> None:
    failure = kit.judge(kernel, rule, examples=60).failure  # type: ignore[arg-type]
    assert failure is not None
    assert error in failure.error
    assert failure.trial.nk <= 20
    assert len(failure.script.splitlines()) <= 10
    with pytest.raises(AssertionError, match=error):
        exec(failure.script.replace("print(", "str("), {})


def test_refusals_are_counted() -> None:
    def only_causal(q: Tensor, k: Tensor, v: Tensor, pattern: rw.Pattern) -> Tensor:
        raise NotImplementedError

    verdict = kit.judge(only_causal, "exact", examples=5)
    assert (verdict.tried, verdict.refused, verdict.failure) == (0, 5, None)


def test_what_is_no_kernel() -> None:
    with pytest.raises(UnsupportedError, match="kernel: got 'nowhere:f'"):
        kit.load("nowhere:f")
    with pytest.raises(UnsupportedError, match="a parameter named allowed or pattern"):
        kit.judge(lambda q, k, v: q, "exact")


def test_under_pytest() -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "pytest_ringweave",
        "--pyargs", "ringweave.audit.kit", "-k", "row_sums", "--kernel", "tests.audit.test_kit:per_tile",
    ]  # fmt: skip
    # where it is installed it is there already
    plugin = ["-p", "pytest_ringweave"]
    installed = "pytest_ringweave" in str(
        list(__import__("importlib.metadata").metadata.entry_points(group="pytest11"))
    )
    if installed:
        at = command.index(plugin[1]) - 1
        command = command[:at] + command[at + 2 :]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rows of ones give" in done.stdout
    assert "from ringweave.audit import kit" in done.stdout
