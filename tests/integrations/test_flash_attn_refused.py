"""A refused call of flash_attn_with_kvcache writes nothing, and one that fails can be repeated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.errors import RingweaveError, ShapeError
from ringweave.integrations import flash_attn, flash_attn_interface

from ..failing import executed, fails

VERSIONS: dict[str, Callable[..., Any]] = {
    "2": flash_attn.flash_attn_with_kvcache, "3": flash_attn_interface.flash_attn_with_kvcache,
}  # fmt: skip
TABLE = torch.tensor([[1, 3, 0], [2, 5, 4]], dtype=torch.int32)


def arguments(version: str, paged: bool, *, rotary: bool = True) -> dict[str, Any]:
    """Return the arguments of a step of two tokens over two sequences, in rows or in pages of 16 tokens."""
    torch.manual_seed(0)
    size = (6, 16) if paged else (2, 48)
    given: dict[str, Any] = {
        "q": torch.randn(2, 2, 4, 32), "k": torch.randn(2, 2, 2, 32), "v": torch.randn(2, 2, 2, 32),
        "k_cache": torch.randn(*size, 2, 32), "v_cache": torch.randn(*size, 2, 32),
        "cache_seqlens": torch.tensor([15, 30], dtype=torch.int32), "causal": True,
    }  # fmt: skip
    if paged:
        given["block_table" if version == "2" else "page_table"] = TABLE
    if rotary:
        given |= {"rotary_cos": torch.randn(64, 8), "rotary_sin": torch.randn(64, 8)}
    return given


NOT_NUMBERS = [math.nan, math.inf, -math.inf, 1e300, True, "1", None, torch.tensor(0.5), [1.0]]
REFUSED: dict[str, list[Any]] = {
    "softmax_scale": [*(x for x in NOT_NUMBERS if x is not None), 1e-40, 1e39],
    "softcap": [*NOT_NUMBERS, 1e-40, 1e38],
    "window_size": [(1,), (1.5, 2), None, "12", 3],
    "cache_seqlens": [-1, 47, True, "9", 2.0, None, torch.tensor([3]), torch.tensor([3.0, 4.0]), torch.tensor([3, 60])],
    "q": [None, torch.randn(2, 2, 3, 32), torch.randn(2, 2, 4, 24), torch.randn(2, 2, 4, 0), torch.randn(3, 2, 4, 32), torch.randn(2, 2, 4, 32).double()],
    "k": [None, torch.randn(2, 3, 2, 32), torch.randn(2, 2, 2, 16), torch.randn(3, 2, 2, 32), torch.randn(2, 2, 2, 32).half()],
    "v": [None, torch.randn(2, 3, 2, 32), torch.randn(2, 2, 1, 32), torch.randn(2, 2, 2, 32).long(), torch.randn(2, 2, 2, 0)],
    "rotary_cos": [None, torch.randn(64, 7), torch.randn(20, 8), torch.randn(64, 24), torch.ones(64, 8).int()],
    "rotary_sin": [None, torch.randn(63, 8), "s"],
    "causal": ["yes", 1, None], "rotary_interleaved": ["no", 2],
}  # fmt: skip
OF_VERSION: dict[str, dict[str, list[Any]]] = {
    "2": {"alibi_slopes": [torch.ones(3), torch.ones(3, 4), torch.ones(4).half(), 0.5]},
    "3": {
        "attention_chunk": ["8", None, 1.5, True, torch.tensor([3])],
        "rotary_seqlens": [torch.tensor([-5, 3]), torch.tensor([3, 63]), torch.tensor([1]), "0", torch.tensor([-1, -1])],
        "qv": [torch.randn(2, 2, 4, 32)], "q_descale": [torch.ones(2, 2)], "v_descale": [torch.ones(2, 2)],
        "cu_seqlens_k_new": [torch.tensor([0, 2]), torch.tensor([0, 3, 2]), "0"],
    },
}  # fmt: skip


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_refused_call_writes_nothing(version: str, paged: bool) -> None:
    """Whichever argument is wrong: a call that raises an error has left the cache as it was, and its own error names it."""
    refused = 0
    for name, values in (REFUSED | OF_VERSION[version]).items():
        for value in values:
            given = arguments(version, paged)
            before = given["k_cache"].clone(), given["v_cache"].clone()
            try:
                VERSIONS[version](**given | {name: value})
            except RingweaveError:
                refused += 1
                assert torch.equal(given["k_cache"], before[0]), (name, value)
                assert torch.equal(given["v_cache"], before[1]), (name, value)
            else:
                raise AssertionError(f"{name}={value} was answered")
    assert refused > 50


@pytest.mark.parametrize("version", VERSIONS)
def test_caches_that_cannot_be_written(version: str) -> None:
    """Rows that share memory, and inference tensors outside of inference mode, are refused before any is written."""
    for name in ("k_cache", "v_cache"):
        given = arguments(version, False)
        with torch.inference_mode():
            made = torch.zeros(2, 48, 2, 32)
        for wrong in (
            torch.zeros(1, 48, 2, 32).expand(2, -1, -1, -1),
            torch.zeros(2, 48, 1, 32).expand(-1, -1, 2, -1),
            made,
        ):
            other = {"k_cache": "v_cache", "v_cache": "k_cache"}[name]
            before = given[other].clone()
            with pytest.raises(ShapeError, match=name):
                VERSIONS[version](**given | {name: wrong})
            assert torch.equal(given[other], before)
            assert not wrong.any()
    with torch.inference_mode():
        VERSIONS[version](**arguments(version, False) | {"k_cache": made})


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_failure_at_any_line(version: str, paged: bool, rotary: bool) -> None:
    """No slot but those of the new tokens changes, and the repeated call has the result of one that never failed."""
    given = arguments(version, paged, rotary=rotary)
    sides = ("k_cache", "v_cache")
    before = {name: given[name].clone() for name in sides}

    def step() -> Tensor:
        return VERSIONS[version](**given)

    def reset() -> None:
        for name in sides:
            given[name].copy_(before[name])

    want = step()
    after = {name: given[name].clone() for name in sides}
    reset()
    lines = executed(step)
    own = [number for number, (file, _) in enumerate(lines, 1) if "/flash_attn" in file]
    assert len(own) > 80
    failed = 0
    for number in sorted({*own[::4], *range(1, len(lines) + 1, 200)}):
        reset()
        if not fails(step, number):
            continue
        failed += 1
        for name in sides:
            kept = given[name] == before[name]
            assert bool((kept | (given[name] == after[name])).all()), lines[number - 1]
        assert torch.equal(step(), want), lines[number - 1]
        assert all(torch.equal(given[name], after[name]) for name in sides), lines[number - 1]
    assert failed > 20
