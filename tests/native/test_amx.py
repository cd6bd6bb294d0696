"""A part of ``make amx``: the kernel whose products are AMX tiles, on a model of them; and where tiles are used."""

from __future__ import annotations

import dataclasses
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ringweave import program as calls
from ringweave.backends import cpu
from ringweave.environment import CPU_VARIANT
from ringweave.errors import UnsupportedError

from . import plans, test_terms
from .emulated import Program, build, missing, module
from .plans import VARIANTS, case, shared_case
from .test_same_bits import assert_same_bits

MODEL = "amxmodel"
TILES = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps")
pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64") or missing("amx") is not None,
    reason=missing("amx") or "needs Linux on x86-64",
)
modelled = pytest.mark.skipif("avx512bf16" not in VARIANTS, reason="the model needs AVX-512-BF16")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("amx", tmp_path_factory.mktemp("amx"), "-DRINGWEAVE_OPTIMIZE=-O0", "-DCMAKE_BUILD_TYPE=None")


@pytest.fixture(scope="module")
def running(program: Path) -> Iterator[ModuleType]:
    one = Program(program, "")
    yield module(one, plans._cpu)
    one.close()


@pytest.fixture
def native(running: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for user in (plans, test_terms):
        monkeypatch.setattr(user, "_cpu", running)
    return running


@modelled
@pytest.mark.parametrize("dims", [(8, 24), (40, 8), (64, 64)], ids=str)
@pytest.mark.parametrize("nq", [1, 45], ids=["few", "many"])
def test_against_the_definition(nq: int, dims: tuple[int, int], native: ModuleType) -> None:
    """Ragged tiles, partial ones, rows without a key, what 32 does not divide; backward is that of AVX-512-BF16."""
    one = shared_case(nq, 333, (32, 48), dtype="bf16", batch=2, heads=4, kv_heads=2, dims=dims, groups=2, density=0.7)
    got = one.check(MODEL, threads=1)
    assert all(torch.equal(got[name], result) for name, result in one.run(MODEL, threads=3).items())
    out, lse = one.forward("avx512bf16")
    assert nq == 1 or not torch.equal(got["lse"], lse)  # sums in another order
    pairs = zip(*(one.backward(out, lse, variant) for variant in (MODEL, "avx512bf16")), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@modelled
@pytest.mark.parametrize("nq", [1, 40])
def test_terms_and_dropout(nq: int, native: ModuleType) -> None:
    plain = case(nq, 70, (32, 48), dtype="bf16", heads=4, kv_heads=2, dims=(24, 16), density=0.9)
    test_terms.scored("distance alibi bias softcap dropout", plain, offsets=True).check(MODEL)


@modelled
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("around", (3, 1, 40, 24)),
        pytest.param("window", (3, 1, 24, 24), marks=pytest.mark.long),
        pytest.param("causal", (6, 2, 64, 16), marks=pytest.mark.long),
    ],
)
def test_a_step_has_the_bits_of_tiles(
    name: str, sizes: tuple[int, int, int, int], running: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums without tiles: every length, chunk, page, padding and thread."""
    monkeypatch.setattr(cpu, "module", lambda: running)
    monkeypatch.setattr(calls, "BACKENDS", calls.BACKENDS | {"cpu": dataclasses.replace(cpu.BACKEND)})
    monkeypatch.setenv(CPU_VARIANT, MODEL)
    heads, kv_heads, *dims = sizes
    assert_same_bits(name, torch.bfloat16, (heads, kv_heads), *dims)


@modelled
def test_never_by_itself(native: ModuleType) -> None:
    assert native.variants()[0] == VARIANTS[0]
    assert MODEL in native.variants()[1:]
    assert MODEL not in VARIANTS  # of what is installed


@pytest.mark.skipif("amx" in VARIANTS, reason="this machine has AMX")
def test_a_processor_without_tiles_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    one = shared_case(5, 9, (16, 16), dtype="bf16")
    with pytest.raises(UnsupportedError, match='^variant: this machine cannot run "amx"'):
        one.forward("amx")
    monkeypatch.setenv(CPU_VARIANT, "amx")
    with pytest.raises(UnsupportedError, match="RINGWEAVE_CPU_VARIANT: got 'amx'; wanted one of .*generic"):
        cpu.variant()


@pytest.mark.skipif(not shutil.which("objdump") or not shutil.which("nm"), reason="needs binutils")
def test_where_tiles_are(program: Path) -> None:
    """The object with instructions on tiles is reached through its table, which only the list of builds names."""

    def said(*command: str | Path) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    kernels = {each.parents[1].name: each for each in program.parent.glob("CMakeFiles/kernel_*/csrc/kernel.cpp.o")}
    if "kernel_amx.dir" not in kernels:
        pytest.skip("the assembler does not know tiles")
    for name, found in {"kernel_amx.dir": {*TILES}, "kernel_amxmodel.dir": set()}.items():
        text = said("objdump", "-d", "--no-show-raw-insn", kernels[name])
        assert {tile for tile in TILES if tile in text} == found
    strong = re.findall(r" [A-TX-Z] (\S+)$", said("nm", "--defined-only", kernels["kernel_amx.dir"]), re.MULTILINE)
    assert len(strong) == 1
    assert strong[0].endswith("kernel_amxE")
    leading = [
        each.name
        for each in program.parent.rglob("*.cpp.o")
        if re.search(r" U \w+kernel_amxE$", said("nm", "-u", each), re.MULTILINE)
    ]
    assert leading == ["run.cpp.o"]
