"""The Triton kernels as compiled for sm_90, executed: run by test_triton_compiled.py in a process of its own.

Calls take the path to a GPU through Triton's own launcher, and ptx_emulator.py runs the launched kernels on the tensors.
First the emulator is compared with numpy, on kernels written for that.
"""

# Triton's constants are capitals
# ruff: noqa: N803

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

import ringweave as rw
from ringweave.backends import BACKENDS
from ringweave_gpu.triton import arguments, launch
from tests.cases import MIXTURES, PATTERNS
from tests.dropped import kept, next_seed
from tests.oracle import NAMES, Inputs
from tests.test_conformance import Wanted, run
from tests.test_terms import HEADS, check, constant, dense, make, ours

from .ptx_emulator import Memory, Program, PtxError, whole
from .ptx_emulator import launch as execute
from .stand_in import Cuda

EVERYTHING = PATTERNS | MIXTURES


class Emulated(Cuda):
    """Triton's driver over an emulated H100.

    Args:
        folder: As in Cuda.

    Attributes:
        late: Whether asynchronous operations happen as late as possible.
        together: Warps that take each step together.
        formal: Whether wgmma needs a proxy fence after cp.async.
        edit: Change applied to a kernel's PTX before it runs.
    """

    late, together, formal = False, 4, False
    edit: Callable[[str], str] = staticmethod(str)

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.memory = Memory()
        self.failure: PtxError | None = None
        self.programs: dict[str, Program] = {}
        self.others: list[Any] = []
        device = self

        class Launcher(driver.CudaLauncher):  # type: ignore[misc]
            def __call__(self, *args: Any) -> None:
                device.memory = Memory()
                device.give(args[9:])
                try:
                    super().__call__(*args)
                finally:
                    if device.failure is not None:
                        failure, device.failure = device.failure, None
                        raise failure

        self.launcher_cls = Launcher

    def give(self, argument: Any) -> None:
        """Let the kernel use the tensors among its arguments."""
        if isinstance(argument, Tensor):
            storage = argument.untyped_storage()
            self.memory.give(storage.data_ptr(), storage.nbytes())
        elif isinstance(argument, (tuple, list)):
            for each in argument:
                self.give(each)
        elif hasattr(argument, "base"):
            self.give(argument.base)

    def _note(self, function: int, grid: Any, threads: int, shared: int, parameters: Any) -> int:
        super()._note(function, grid, threads, shared, parameters)
        try:
            ptx = self.edit(self.ptx(function))
            if ptx not in self.programs:
                self.programs[ptx] = Program.of(ptx)
            program = self.programs[ptx]
            where = [parameters[index] for index in range(len(program.parameters))]
            execute(program, grid[0], shared, where, self.memory, self.late, self.together, self.formal)
        except BaseException as error:  # noqa: BLE001 ctypes would drop it
            self.failure = error
        return 0

    def ptx(self, function: int) -> str:
        caches = [kernel.device_caches[self.index][0] for kernel in self.others]
        found = self.compiled() | {kernel.function: kernel for cache in caches for kernel in cache.values()}
        return found[function].asm["ptx"]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def device(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    triton.runtime.driver.set_active(emulated)
    monkeypatch.setattr(launch, "_device", lambda device: launch._of_driver())
    taken = BACKENDS["triton"]
    monkeypatch.setitem(
        BACKENDS,
        "triton",
        dataclasses.replace(
            taken,
            unsupported_reason=lambda case, branch: taken.unsupported_reason(
                dataclasses.replace(case, device="cuda"), branch
            ),
        ),
    )
    yield emulated
    emulated.late, emulated.together, emulated.formal, emulated.edit = False, 4, False, str


BOTH = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@triton.jit
def softmax(x, out, columns, PADDED: tl.constexpr):
    at = tl.arange(0, PADDED)
    row = tl.load(x + tl.program_id(0) * columns + at, at < columns, -float("inf"))
    weights = tl.exp(row - tl.max(row, 0))
    tl.store(out + tl.program_id(0) * columns + at, weights / tl.sum(weights, 0), at < columns)


@triton.jit
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FLIP: tl.constexpr, TWICE: tl.constexpr):
    """Store a @ b, loaded by descriptors; b is transposed if FLIP, and the product is multiplied by b again if TWICE."""
    left = a.load([0, 0])
    right = b.load([0, 0])
    sums = tl.dot(left, right.T if FLIP else right)
    if TWICE:
        sums = tl.dot(sums.to(left.dtype), right)
    tl.store(out + tl.arange(0, M)[:, None] * sums.shape[1] + tl.arange(0, sums.shape[1])[None, :], sums)


@triton.jit
def streamed(a, b, out, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr):
    """a @ b over many K at a time, by addresses."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    sums = tl.zeros([M, N], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        left = tl.load(a + m[:, None] * (steps * K) + step * K + k[None, :])
        right = tl.load(b + (step * K + k)[:, None] * N + n[None, :])
        sums = tl.dot(left, right, sums)
    tl.store(out + m[:, None] * N + n[None, :], sums)


def test_elementwise(device: Emulated) -> None:
    device.others = [add, softmax]
    x, y = torch.randn(2, 1000)
    out = torch.full((1000,), torch.nan)
    add[(4,)](x, y, out, 1000, BLOCK=256)
    assert torch.equal(out, x + y)
    x = torch.randn(5, 77)
    out = torch.empty_like(x)
    softmax[(5,)](x, out, 77, PADDED=128)
    torch.testing.assert_close(out, x.softmax(1))


@pytest.mark.sampled(10)
@BOTH
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "k", "flip", "twice"),
    [(64, 64, 64, True, True), (128, 64, 128, True, True), (64, 128, 32, True, True), (64, 16, 16, True, False),
     (64, 128, 64, False, False), (128, 32, 32, False, False), (64, 16, 64, False, False)],
)  # fmt: skip
def test_products(
    m: int, n: int, k: int, flip: bool, twice: bool, dtype: torch.dtype, warps: int, late: bool, device: Emulated
) -> None:
    device.late, device.others = late, [product]
    a, b = torch.randn(m, k).to(dtype), torch.randn(*((n, k) if flip else (k, n))).to(dtype)
    want = a.double() @ (b.mT if flip else b).double()
    if twice:
        want = want.to(dtype).double() @ b.double()
    out = torch.empty(want.shape)
    described = (TensorDescriptor.from_tensor(x, list(x.shape)) for x in (a, b))
    kernel = product[(1,)](*described, out, m, n, k, flip, twice, num_warps=warps)
    assert "wgmma" in kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    torch.testing.assert_close(out.double(), want, rtol=2e-2 if twice else 1e-4, atol=2e-1 if twice else 1e-4)


def test_copies_as_triton_3_6_spells_them(device: Emulated) -> None:
    """Copies into the shared memory of a cluster of one block are copies into the block's own."""

    def edit(ptx: str) -> str:
        edited, changed = re.subn(
            r"(cp\.async\.bulk\.tensor\.\dd)\.shared::(?:cta|cluster)\.", r"\1.shared::cluster.", ptx
        )
        assert changed
        return edited

    device.others, device.edit = [product], edit
    a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    out = torch.empty(64, 64)
    product[(1,)](*(TensorDescriptor.from_tensor(x, [64, 64]) for x in (a, b)), out, 64, 64, 64, False, False)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(3)
@BOTH
@pytest.mark.parametrize(
    ("m", "n", "k", "stages"), [(64, 64, 64, 3), (128, 128, 32, 2), (16, 16, 64, 3), (32, 64, 16, 1)]
)
def test_streams(m: int, n: int, k: int, stages: int, late: bool, device: Emulated) -> None:
    device.late, device.others = late, [streamed]
    a, b = torch.randn(m, 5 * k).half(), torch.randn(5 * k, n).half()
    out = torch.empty(m, n)
    kernel = streamed[(1,)](a, b, out, 5, m, n, k, stages, num_stages=stages)
    assert ("wgmma" in kernel.asm["ptx"]) == (m >= 64)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


def agrees(x: Inputs, pattern: rw.Pattern, device: Emulated, **options: Any) -> set[str]:
    """Run a call with late asynchronous work, compare five results with float64, and return the kernels that ran."""
    want = Wanted.of(x, pattern, options.pop("q_offset", 0), options.pop("scale", None), floored=True)
    device.late = True
    device.taken()
    want.check("triton")
    made = device.compiled()
    return {made[each.function].metadata.name for each in device.taken()}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dim", "dtype"), [(dim, dtype) for dim in (64, 128) for dtype in (torch.bfloat16, torch.float16)]
)
@pytest.mark.parametrize("name", ["causal", "sinks", "causal_documents", "table_per_head", "full"])
def test_kernels(name: str, dim: int, dtype: torch.dtype, device: Emulated) -> None:
    """A kernel is right for two tiles of 128 with two tokens in the second."""
    x = Inputs.random(130, heads=4 if name == "table_per_head" else 1, dim=dim, dtype=dtype)
    assert agrees(x, EVERYTHING[name](130), device) == {"forward", "delta", "backward_q", "backward_kv"}


@pytest.mark.parametrize("described", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("dim", [64, *(pytest.param(dim, marks=pytest.mark.long) for dim in (128, 256))])
def test_unattended_keys(dim: int, described: bool, device: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in keys that no query attends reaches no result, with loads by descriptors and by addresses."""
    if not described:
        monkeypatch.setattr(arguments, "describable", lambda *_: False)
    x = Inputs.random(130, heads=1, dim=dim, dtype=torch.bfloat16)
    want = Wanted.of(x, ~rw.patterns.Periodic(1000, 20, 31) & rw.Causal(), 0, None, floored=True)
    x.k[:, :, 20:31], x.v[:, :, 20:31] = torch.nan, torch.nan
    device.late = True
    device.taken()
    want.check("triton")
    made = device.compiled()
    ptx = {(kernel := made[each.function]).metadata.name: kernel.asm["ptx"] for each in device.taken()}
    for kernel in ("forward", "backward_q"):
        assert ("cp.async.bulk.tensor" in ptx[kernel]) == described


@pytest.mark.long
@pytest.mark.parametrize("name", ["causal", "sinks"])
def test_proxy_fences(name: str, device: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads by descriptors have every proxy fence that PTX's memory model asks for; by addresses, Triton omits it for values."""
    device.formal = True
    x = Inputs.random(130, heads=1, dim=64, dtype=torch.bfloat16)
    agrees(x, EVERYTHING[name](130), device)
    monkeypatch.setattr(arguments, "describable", lambda *_: False)
    with pytest.raises(PtxError, match="without a proxy fence"):
        rw.attention(x.q, x.k, x.v, EVERYTHING[name](130), backend="triton")


@pytest.mark.parametrize(
    ("names", "n", "heads", "p", "dtype"),
    [
        (("softcap", "distance"), 23, 2, 0.25, torch.bfloat16),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (("alibi", "distance", "softcap"), 130, 2, 0.0, torch.float16),
                (("shared_bias",), 70, 2, 0.0, torch.bfloat16),
                ((), 40, 2, 0.5, torch.bfloat16),
            )
        ),
    ],
)
def test_terms(names: tuple[str, ...], n: int, heads: int, p: float, dtype: torch.dtype, device: Emulated) -> None:
    """Score terms and dropout are right."""
    x = Inputs.random(n, heads=HEADS, kv_heads=heads, dim=16, dtype=dtype)
    pattern = rw.SlidingWindow(9) & rw.Causal()
    if n < 64:
        pattern &= rw.BlockTable(torch.ones(-(-n // 16), -(-n // 16), dtype=torch.bool), 16)
    terms = constant(make(names, n, dtype))
    torch.manual_seed(3)
    keep = kept(next_seed(), p, 1, HEADS, range(n), range(n)) if p else None
    device.late = True
    got = ours(x, pattern, terms, "triton", dropout=p)
    check(got, lambda kind, order: dense(x, pattern, names, terms, kind, keep=keep, order=order), dtype)


@pytest.mark.long
def test_dropout_of_wide_tiles(device: Emulated) -> None:
    """In dK and dV, LLVM moves writes of wgmma's register operands behind the fence that should follow them.

    ptxas puts the arrival that it makes of the fence before the product itself, by gpu/scripts/machine_code.py: with a
    fence there all results are right.
    """
    x = Inputs.random(70, heads=2, dim=16, dtype=torch.bfloat16)
    torch.manual_seed(3)
    keep = kept(next_seed(), 0.5, 1, 2, range(70), range(70))
    with torch.no_grad():
        out = rw.attention(x.q, x.k, x.v, rw.Causal(), dropout=0.5, backend="triton")
    want = dense(x, rw.Causal(), (), (), torch.float64, keep=keep)["out"]
    assert (out - want).abs().max() <= 0.05 * want.abs().max()
    with pytest.raises(PtxError, match="since the last wgmma.fence"):
        ours(x, rw.Causal(), [], "triton", dropout=0.5)
    fence = r"\twgmma.fence.sync.aligned;\n\1"
    device.edit = lambda ptx: re.sub(r"(\twgmma\.mma_async[^{\n]*\{[^}\n]*\}, \{)", fence, ptx)
    torch.manual_seed(3)
    got = ours(x, rw.Causal(), [], "triton", dropout=0.5)
    check(got, lambda kind, order: dense(x, rw.Causal(), (), [], kind, keep=keep, order=order), x.q.dtype)


def test_whole_numbers() -> None:
    """cvt.rzi, and conversions to 8 bits, follow PTX."""
    ends = [1.75, -1.75, 3e9, -3e9, 1e30, -1e30, float("nan")]
    x = np.array(ends, np.float32)
    assert whole(x, np.int32).tolist() == [1, -1, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0]
    assert whole(x, np.int64).tolist() == [1, -1, 3 * 10**9, -3 * 10**9, 2**63 - 1, -(2**63), -(2**63)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["causal", "sinks"])
def test_order_changes_no_bit(name: str, device: Emulated) -> None:
    """The order in which warps run and asynchronous copies arrive changes no bit."""
    x, pattern, found = (
        Inputs.random(200, heads=2, kv_heads=1, dim=64, dtype=torch.bfloat16),
        EVERYTHING[name](200),
        [],
    )
    for device.late, device.together in ((False, 4), (True, 4), (False, 1), (True, 1)):
        found.append(run(x, pattern, "triton"))
    for other in found[1:]:
        for result in NAMES:
            assert torch.equal(other[result], found[0][result]), result


@pytest.mark.long
@pytest.mark.parametrize(("nq", "heads", "kv_heads"), [(1, 8, 1), (5, 6, 2)])
def test_few_queries_over_split_lists(nq: int, heads: int, kv_heads: int, device: Emulated) -> None:
    nk = 5000
    x = Inputs.random(nq, nk, heads=heads, kv_heads=kv_heads, dim=64, dtype=torch.bfloat16)
    assert "join" in agrees(x, rw.Causal(), device, q_offset=nk - nq)


@pytest.mark.long
@pytest.mark.parametrize(("dim", "dtype"), [(40, torch.bfloat16), (24, torch.float32), (256, torch.float16)])
def test_dims(dim: int, dtype: torch.dtype, device: Emulated) -> None:
    agrees(Inputs.random(130, heads=2, kv_heads=1, dim=dim, dtype=dtype), EVERYTHING["sinks"](130), device)


#: a change to a kernel's PTX -> the emulator's error
BROKEN = {
    "barrier": (r"bar\.sync \t?0;", "", "never written|no barrier between|still to write"),
    "wait for products": (r"wgmma\.wait_group[^;]*;", "", "wgmma is still to write"),
    "commit of products": (r"wgmma\.commit_group[^;]*;", "", "wgmma is still to write"),
    "fence of products": (r"wgmma\.fence[^;]*;", "", "since the last wgmma.fence"),
    "proxy fence": (r"fence\.proxy\.async[^;]*;", "", "without a proxy fence"),
    "wait for copies": (r"cp\.async\.wait_group[^;]*;", "", "still to write"),
    "wait for tiles": (r"(?s)\{\s*\.reg \.pred complete;.*?\}", "", "still to write|no barrier between"),
    "half the bytes": (r"(expect_tx\S* _, \[%r\d+\]), 8192", r"\1, 4096", "nobody goes on"),
}


@pytest.mark.sampled(2)
@BOTH
@pytest.mark.parametrize("name", list(BROKEN))
def test_what_breaks_a_kernel(name: str, late: bool, device: Emulated) -> None:
    """Removing a wait, a fence or a barrier from the forward kernel is an error, whatever the results."""
    what, instead, said = BROKEN[name]
    device.late, device.together, changed = late, 1, 0

    def edit(ptx: str) -> str:
        nonlocal changed
        edited, changed = re.subn(what, instead, ptx)
        return edited

    device.edit = edit
    x = Inputs.random(384, heads=1, dim=64, dtype=torch.bfloat16)
    with pytest.raises(PtxError, match=said):
        rw.attention(x.q, x.k, x.v, rw.Causal(), backend="triton")
    assert changed


def test_memory_that_is_not_the_kernels(device: Emulated) -> None:
    device.others = [add]
    x = torch.zeros(100)
    with pytest.raises(PtxError, match="belongs to nothing that was passed"):
        add[(1,)](x, x, x, 128, BLOCK=128)


def test_an_unknown_instruction() -> None:
    program = Program.of(".visible .entry f()\n.reqntid 32\n{\n\tvote.sync.any.pred \t%p1, %p2, -1;\n}\n")
    with pytest.raises(PtxError, match=r"not known: vote\.sync\.any\.pred"):
        program.compiled(32)
