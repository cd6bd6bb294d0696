"""Test the kernel for aarch64, compiled without optimization, in an emulator; this is a part of ``make arm``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ringweave.errors import ShapeError

from . import plans, test_terms
from .emulated import PROCESSORS, Program, build, missing, module
from .plans import COLUMNS, DTYPES, case, plan_of, poison, shared_case

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")

VARIANTS = {"max": ["neonbf16", "neon", "generic"], "cortex-a72": ["neon", "generic"]}
#: variants to run on each processor: the one without bfloat16 need not repeat "generic"
TRIED = {"max": VARIANTS["max"], "cortex-a72": ["neon"]}
Running = tuple[ModuleType, list[str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = "-DRINGWEAVE_OPTIMIZE=-O0", "-DCMAKE_BUILD_TYPE=Debug"
    return build(tmp_path_factory.mktemp("aarch64"), *options)


@pytest.fixture(scope="module", params=PROCESSORS)
def running(request: pytest.FixtureRequest, program: Path) -> Iterator[Running]:
    one = Program(program, request.param)
    native = module(one, plans._cpu)
    assert native.variants() == VARIANTS[request.param]  # queried from the emulated processor
    yield native, TRIED[request.param]
    one.close()


@pytest.fixture
def emulated(running: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Return the module in place of the machine's own, and the variants to try."""
    for user in (plans, test_terms):
        monkeypatch.setattr(user, "_cpu", running[0])
    return running


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_variant(dtype: str, emulated: Running) -> None:
    """Forward, backward and a decoding step are right with shared heads, partial tiles, odd lengths, and rows without keys."""
    many = shared_case(45, 90, (32, 48), dtype=dtype, batch=2, heads=4, kv_heads=2, dims=(24, 40), groups=2)
    few = shared_case(1, 333, (32, 48), dtype=dtype, heads=4, kv_heads=2, dims=(40, 24), density=0.9)
    assert not many.mask.any(-1).all()
    for variant in emulated[1]:
        for each in (many, few):
            got = each.check(variant, threads=1)
            assert all(torch.equal(got[name], result) for name, result in each.run(variant, threads=3).items())


def of_exponents(x: Tensor, least: int, most: int, special: tuple[int, ...] = ()) -> Tensor:
    """Draw bfloat16 of these exponents in the shape of ``x``; a fifth have the bits of ``special``."""
    exponents, rest = torch.randint(least, most + 1, x.shape) << 7, torch.randint(2**7, x.shape)
    bits = exponents | rest | torch.randint(2, x.shape) << 15
    if special:
        chosen = torch.tensor(special)[torch.randint(len(special), x.shape)]
        bits = torch.where(torch.rand(x.shape) < 0.2, chosen, bits)
    return bits.to(torch.int16).view(torch.bfloat16)


def bits_of(x: Tensor) -> Tensor:
    """Return the bits as float32, with equal bits for all NaNs; zeros keep their signs."""
    return x.float().nan_to_num(nan=12345.0, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)


#: Zeros, subnormal numbers, and the least normal one.
SMALL = (0x0000, 0x8000, 0x0001, 0x807F, 0x0080)


@pytest.mark.parametrize("dims", [(8, 24), (40, 8)], ids=str)
@pytest.mark.parametrize(
    ("of_keys", "of_values"),
    [((120, 130, SMALL), (0, 1, SMALL)), ((0, 130, SMALL), (100, 140, SMALL)), ((60, 75), (40, 140)), ((120, 130), (180, 254))],
    ids=["zeros", "wide", "underflow", "overflow"],
)  # fmt: skip
def test_a_block_of_rows_has_the_bits_of_single_ones(
    of_keys: tuple[int, ...], of_values: tuple[int, ...], dims: tuple[int, int], emulated: Running
) -> None:
    """BFMMLA over even blocks of rows gives the bits of BFDOT in decoding steps, single rows and odd depths."""
    nq, nk = 13, 89  # the second chunk of keys has 13 pairs
    whole = case(nq, nk, (16, 96), dtype="bf16", heads=1, kv_heads=1, dims=dims, masks=torch.ones(1, nq, nk) > 0)
    x = whole.x
    x.q, x.k = of_exponents(x.q, *of_keys), of_exponents(x.k, *of_keys)  # type: ignore[arg-type]
    x.v, x.dout = of_exponents(x.v, *of_values), of_exponents(x.dout, *of_values)  # type: ignore[arg-type]
    # only in some rows and channels, since they make NaN of every result that reads them
    x.q[..., 3, 1], x.q[..., 5, 2], x.v[..., 7, 3], x.v[..., 7, 5] = torch.inf, torch.nan, -torch.inf, torch.nan
    for variant in emulated[1]:
        out, lse = whole.forward(variant, out=poison(*x.dout.shape))
        dq = whole.backward(out.bfloat16(), lse, variant, dtype=torch.float32)[0]
        for i in range(nq):
            row = slice(i, i + 1)
            one = case(1, nk, (16, 96), dtype="bf16", heads=1, kv_heads=1, dims=dims, masks=torch.ones(1, 1, nk) > 0)
            mine = {name: getattr(x, name)[:, :, row].clone() for name in ("q", "dout", "dlse")}
            one.x = replace(x, **mine)
            alone = one.forward(variant, out=poison(*mine["dout"].shape))
            alone += one.backward(alone[0].bfloat16(), alone[1], variant, dtype=torch.float32)[:1]
            for got, want in zip(alone, (out, lse, dq), strict=True):
                assert torch.equal(bits_of(got), bits_of(want[:, :, row])), i


@pytest.mark.parametrize("nq", [1, 40])
def test_terms_and_dropout(nq: int, emulated: Running) -> None:
    for variant in emulated[1]:
        plain = case(nq, 70, (32, 48), dtype="bf16", heads=4, kv_heads=2, dims=(24, 16), density=0.9)
        test_terms.scored("distance alibi bias softcap dropout", plain, offsets=True).check(variant)


@pytest.mark.parametrize("nq", [1, 5])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_every_code_of_8_bits(stored: torch.dtype, nq: int, emulated: Running) -> None:
    """A row of one key returns its value for every 8-bit code: few queries read codes in registers, more of them widen a tile."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    wanted = codes.view(stored).float() * 0.5
    plan = plan_of(torch.eye(256, dtype=torch.bool)[:, None].expand(-1, nq, -1), torch.arange(256)[:, None], 16, 16)
    q, scales = torch.ones(256, 1, nq, 8), torch.full((256, 1, 256), 0.5)
    bytes_ = codes.view(torch.int8) if stored == torch.int8 else codes
    v = bytes_.view(1, 1, 256, 1).expand(256, 1, 256, 8).contiguous()
    # a NaN key would make its row NaN
    k = torch.zeros_like(v)
    for variant in emulated[1]:
        out, lse = poison(256, 1, nq, 8), poison(256, 1, nq)
        rows = {name: value for name, value in plan.items() if name not in COLUMNS}
        emulated[0].forward(
            q=q,
            k=k,
            v=v,
            scale=1.0,
            out=out,
            lse=lse,
            **rows,
            threads=1,
            variant=variant,
            k_scale=scales,
            v_scale=scales,
        )
        torch.testing.assert_close(out, wanted.view(256, 1, 1, 1).expand_as(out), rtol=0, atol=0, equal_nan=True)


def test_a_refusal_arrives(emulated: Running) -> None:
    with pytest.raises(ShapeError, match="^threads: wanted 1 to 4096, got 0"):
        shared_case(5, 9, (16, 16)).forward(threads=0)
    shared_case(5, 9, (16, 16)).check()


def test_a_program_that_ends_is_an_error(tmp_path: Path) -> None:
    ended = Program(tmp_path / "nothing", "max")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the program ended with 1"):
            ended.call("variants", (torch.zeros(2**18),))
    assert ended.close() is None


def test_a_call_that_is_given_up(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of an abandoned call is not taken for the next call's."""
    one = Program(program, PROCESSORS[0])
    native = module(one, plans._cpu)

    def stop(size: int) -> bytes:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(one, "_read", stop)
        with pytest.raises(TimeoutError):
            native.term_kinds()
    assert native.variants() == VARIANTS[PROCESSORS[0]]
    one.close()
