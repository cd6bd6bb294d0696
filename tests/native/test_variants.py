"""Run conformance tests on every instruction set that the machine has, selected as users select it."""

from __future__ import annotations

import pytest

import ringweave as rw
from ringweave.backends import cpu
from ringweave.environment import CPU_VARIANT
from ringweave.errors import UnsupportedError

from ..oracle import Inputs
from ..test_conformance import DTYPES, EVERYTHING, conforms
from .plans import VARIANTS


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "name",
    ["causal", "sinks", "global", "per_head", "dilated", "longnet_causal", "table_per_head", "documents", "tree"],
)
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_lower_variants(variant: str, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    monkeypatch.setenv(CPU_VARIANT, variant)
    assert cpu.variant() == variant
    x = Inputs.random(257, heads=4, kv_heads=2, dim=24, value_dim=40, dtype=DTYPES[dtype])
    conforms(x, EVERYTHING[name](257), "cpu")


def test_the_best_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_VARIANT, raising=False)
    assert cpu.variant() == VARIANTS[0]


def test_an_unknown_variant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_VARIANT, "sse9")
    x = Inputs.random(16)
    with pytest.raises(UnsupportedError, match="RINGWEAVE_CPU_VARIANT.*'sse9'.*one of .+ Unset it"):
        rw.attention(x.q, x.k, x.v, rw.Causal(), backend="cpu")
