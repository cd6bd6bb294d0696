"""A part of ``make arm``: the kernel for aarch64, compiled without optimization and run by an emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from . import plans, test_terms
from .emulated import PROCESSORS, Program, build, missing, module
from .plans import DTYPES, ROWS, SHAPE, case, plan_of, poison, shared_case

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")

VARIANTS = {"max": ["neonbf16", "neon", "generic"], "cortex-a72": ["neon", "generic"]}
#: what the processor without bfloat16 need not run again
TRIED = {"max": VARIANTS["max"], "cortex-a72": ["neon"]}
Running = tuple[ModuleType, list[str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = "-DRINGWEAVE_OPTIMIZE=-O0", "-DCMAKE_BUILD_TYPE=Debug"
    return build("arm", tmp_path_factory.mktemp("aarch64"), *options)


@pytest.fixture(scope="module", params=PROCESSORS)
def running(request: pytest.FixtureRequest, program: Path) -> Iterator[Running]:
    one = Program(program, request.param)
    native = module(one, plans._cpu)
    assert native.variants() == VARIANTS[request.param]  # asked of the processor
    yield native, TRIED[request.param]
    one.close()


@pytest.fixture
def emulated(running: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The module, in the place of the machine's own, and the variants to try."""
    for user in (plans, test_terms):
        monkeypatch.setattr(user, "_cpu", running[0])
    return running


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_variant(dtype: str, emulated: Running) -> None:
    """Forward, backward and a decoding step; heads that share keys, partial tiles, odd lengths, rows without a key."""
    many = shared_case(45, 90, (32, 48), dtype=dtype, batch=2, heads=4, kv_heads=2, dims=(24, 40), groups=2)
    few = shared_case(1, 333, (32, 48), dtype=dtype, heads=4, kv_heads=2, dims=(40, 24), density=0.9)
    assert not many.mask.any(-1).all()
    for variant in emulated[1]:
        for each in (many, few):
            got = each.check(variant, threads=1)
            assert all(torch.equal(got[name], result) for name, result in each.run(variant, threads=3).items())


@pytest.mark.parametrize("nq", [1, 40])
def test_terms_and_dropout(nq: int, emulated: Running) -> None:
    for variant in emulated[1]:
        plain = case(nq, 70, (32, 48), dtype="bf16", heads=4, kv_heads=2, dims=(24, 16), density=0.9)
        test_terms.scored("distance alibi bias softcap dropout", plain, offsets=True).check(variant)


@pytest.mark.parametrize("nq", [1, 5])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_every_code_of_8_bits(stored: torch.dtype, nq: int, emulated: Running) -> None:
    """A row of one key returns its value: few queries read codes in registers, more of them widen a tile."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    wanted = codes.view(stored).float() * 0.5
    plan = plan_of(torch.eye(256, dtype=torch.bool)[:, None].expand(-1, nq, -1), torch.arange(256)[:, None], 16, 16)
    q, scales = torch.ones(256, 1, nq, 8), torch.full((256, 1, 256), 0.5)
    bytes_ = codes.view(torch.int8) if stored == torch.int8 else codes
    v = bytes_.view(1, 1, 256, 1).expand(256, 1, 256, 8).contiguous()
    # a key that is not a number would spoil its row
    k = torch.zeros_like(v)
    for variant in emulated[1]:
        out, lse = poison(256, 1, nq, 8), poison(256, 1, nq)
        args = [plan[name] for name in ROWS + SHAPE]
        emulated[0].forward(q, k, v, out, lse, *args, 1.0, 1, variant, k_scale=scales, v_scale=scales)
        torch.testing.assert_close(out, wanted.view(256, 1, 1, 1).expand_as(out), rtol=0, atol=0, equal_nan=True)


def test_a_refusal_arrives(emulated: Running) -> None:
    with pytest.raises(ValueError, match="^threads: wanted 1 to 4096, got 0"):
        shared_case(5, 9, (16, 16)).forward(threads=0)
    shared_case(5, 9, (16, 16)).check()


def test_a_program_that_ends_is_an_error(tmp_path: Path) -> None:
    ended = Program(tmp_path / "nothing", "max")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the program ended with 1"):
            ended.call("variants", (torch.zeros(2**18),))
    assert ended.close() is None


def test_a_call_that_is_given_up(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is not taken for the next one's."""
    one = Program(program, PROCESSORS[0])
    native = module(one, plans._cpu)

    def stop(size: int) -> bytes:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(one, "_read", stop)
        with pytest.raises(TimeoutError):
            native.fma_peak("float32", 1, 0.001)
    assert native.variants() == VARIANTS[PROCESSORS[0]]
    one.close()
