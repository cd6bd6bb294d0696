"""Test the launches of the Triton backend on devices that run nothing; test_triton_compiled.py runs this in its own process.

They test the compiled kernels, the arguments that compile again, and the launches. See stand_in.py.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

import ringweave as rw
from ringweave import call as described_call
from ringweave import kv_cache, torch_ops
from ringweave.backends import BACKENDS
from ringweave.call import Operands
from ringweave.patterns import Pattern
from ringweave.plan import branches
from ringweave.plan.from_pattern import build
from ringweave_gpu.triton import BACKEND, arguments, kernels, launch
from ringweave_gpu.triton.launch import ForwardLayout

from .stand_in import DEVICES, NAMES, Cuda, Hip, Notes
from .stand_in_calls import ALL, CALLS, HALF, PAIRS, STREAMING, Call, launched

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from kernel_resources import SPILLED, of_cubin, of_rocm, spare

ASSEMBLY = {True: "cubin", False: "amdgcn"}
MATRIX = {90: r"wgmma\.mma_async", 80: r"mma\.sync", 100: r"tcgen05\.mma", "gfx942": "v_mfma_f32"}


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Cuda:
    return Cuda(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def device(stand_in: Cuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """An H100, unless a test sets another index; tensors lie on the CPU, or nowhere."""
    triton.runtime.driver.set_active(stand_in)
    monkeypatch.setattr(launch, "_device", lambda device: launch._of_driver())
    stand_in.taken()
    yield stand_in
    stand_in.index = 0


# each path through the launch; these are compiled once for both tests that use them
PLAIN = ("causal, D 64", "pairs, masked", "long lists")
SHORT = (*PLAIN, "a branch, fp16", "one query")


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in CALLS if name not in SHORT)]
)
def test_hopper(name: str, device: Notes) -> None:
    check(*CALLS[name], device)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("name", ["causal, D 64", "full, D 128, fp16", "one query", "fp8, one query"])
def test_other_generations(name: str, index: int, device: Notes) -> None:
    device.index = index
    check(*CALLS[name], device)


@pytest.mark.parametrize("name", ["causal, D 64", "one query"])
def test_rocm(name: str, device: Notes) -> None:
    other = Hip()
    triton.runtime.driver.set_active(other)
    check(*CALLS[name], other)


def test_properties_of_a_device(device: Notes) -> None:
    for device.index in range(3):
        assert launch._of_driver() == DEVICES[device.index]
    triton.runtime.driver.set_active(Hip())
    assert launch._of_driver() == DEVICES[Hip.index]


def check(call: Call, names: list[str], device: Notes) -> None:
    before = device.compiled()
    launches = launched(call, device)
    assert [kernel.metadata.name for kernel, _ in launches] == names
    for kernel, each in launches:
        assert each.grid[0] > 0
        assert each.grid[1:] == (1, 1)
        assert each.shared <= DEVICES[device.index].shared
        if each.function in before:
            continue
        name = kernel.metadata.name
        cuda = "cubin" in kernel.asm
        arch, spilled = kernel.metadata.target.arch, (of_cubin if cuda else of_rocm)(kernel.asm[ASSEMBLY[cuda]])[1]
        known = [size for (*of, _), size in SPILLED.items() if of == [name, call.dim, f"sm_{arch}"]]
        assert spilled <= max(spare(), *known, 0), f"{name} spills"
        if name in STREAMING and call.dtype != torch.float32:
            assert matrix(kernel), f"{name}: no matrix instruction"
    made = device.compiled()
    assert [each for _, each in launched(call, device)] == [each for _, each in launches]
    assert device.compiled() == made


def matrix(kernel: Any) -> bool:
    """Return whether a kernel has its device's matrix instructions, or those for few rows if it has few."""
    constants = {kernel.src.fn.arg_names[index]: value for (index, *_), value in kernel.src.constants.items()}
    rows = constants["BLOCK_N"] if "HEADS" not in constants else constants["HEADS"] * constants["ROWS"]
    arch = kernel.metadata.target.arch
    wanted = MATRIX[arch] if rows >= 64 or arch == "gfx942" else MATRIX[80]
    return re.search(wanted, kernel.asm["amdgcn" if arch == "gfx942" else "ptx"]) is not None


def lengths(*of: int) -> list[tuple[int, int]]:
    return [(n, n) for n in of]


def decoding(*of: int) -> list[tuple[int, int]]:
    return [(1, n) for n in of]


@pytest.mark.parametrize(
    ("call", "sizes"),
    [
        # lengths with every remainder that Triton specialises on: divisible by 128, by 16, odd
        (Call(rw.Causal(), 0), lengths(1024, 1040, 1025, 1151, 1152)),
        (Call(rw.SlidingWindow(300) & rw.Causal(), 0, dim=40), lengths(1024, 1040, 1025, 1151, 1152)),
        (Call(rw.Causal(), 0, heads=8, kv_heads=2, gradients=False), decoding(1024, 1025, 1040, 1152, 1153)),
        (Call(rw.Causal(), 0, heads=8, kv_heads=1, dim=40, gradients=False), decoding(9216, 9217, 9232, 20_001)),
        (Call(rw.Causal(), 0, kv_heads=2, stored=torch.int8, gradients=False), decoding(1024, 1025, 1040, 1153)),
        # a window that ends at a tile's end, and windows that do not
        (Call(rw.SlidingWindow(900) & rw.Causal(), 0, gradients=False), decoding(1024, 1028, 1029, 1030, 1152)),
        # a table with a row of another length, and another seed
        (Call(rw.Causal(), 0, terms="DistanceBias(_), Bias(_)", threshold=9, gradients=False), lengths(512, 513, 528)),
    ],
    ids=["causal", "window", "one query", "one query, split", "one query, int8", "one query, window", "terms"],
)
def test_another_length_compiles_nothing(call: Call, sizes: list[tuple[int, int]], device: Notes) -> None:
    made = []
    for nq, nk in sizes:
        dataclasses.replace(call, nq=nq, nk=nk, q_offset=nk - nq)()
        made.append(len(device.compiled()))
    assert made == made[:1] * len(sizes)
    # neither do batches, nor the strides of a larger cache
    dataclasses.replace(call, nq=nq, nk=nk, q_offset=nk - nq, batch=3)()
    dataclasses.replace(call, nq=nq, nk=nk, q_offset=nk - nq, view=longer)()
    assert len(device.compiled()) == made[0]


def longer(x: Tensor) -> Tensor:
    """Return a view of more tokens with the same shape."""
    return x.new_empty(*x.shape[:2], x.shape[2] + 8, x.shape[3])[:, :, : x.shape[2]]


class Asked:
    """Record whether a kernel is given descriptors, without compiling it."""

    def __init__(self, name: str, seen: dict[str, bool]):
        self.name, self.seen = name, seen

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **_: self.seen.update({self.name: any(isinstance(x, TensorDescriptor) for x in args)})


def described(call: Call) -> dict[str, bool]:
    """Return, for each kernel, whether it is given descriptors."""
    seen: dict[str, bool] = {}
    with pytest.MonkeyPatch.context() as patched:
        for name in NAMES:
            patched.setattr(kernels, name, Asked(name, seen))
        call()
    return {name: seen[name] for name in STREAMING}


def test_descriptors_where_strides_permit(device: Notes) -> None:
    call = Call(rw.Causal(), 512)
    of_keys, of_queries = ("forward", "backward_q"), ("backward_kv",)
    everywhere = dict.fromkeys(STREAMING, True)
    assert described(call) == everywhere
    # the driver checks them
    odd = dataclasses.replace(call, dim=72, value_dim=24, gradients=False)
    ((kernel, _),) = launched(odd, device)
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    # 40 bytes from token to token
    assert described(dataclasses.replace(call, dim=20)) == dict.fromkeys(STREAMING, False)
    broadcast = Call(rw.Causal(), 512, view=lambda x: x[:, :1].expand(x.shape))
    assert described(broadcast) == dict.fromkeys(of_keys + of_queries, False)
    # also with keys that no query attends
    assert described(Call(rw.patterns.Periodic(50, 10, 13), 512)) == everywhere
    assert not arguments.describable(torch.empty(1, 2, 0, 64))
    # a device without descriptors
    device.index = 1
    assert described(call) == dict.fromkeys(STREAMING, False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dim", [40, 64])
def test_loads_of_16_bytes(dim: int, device: Notes) -> None:
    """With channels divisible by 8, pipelined loads have 16 bytes at any length, and none has 2."""
    device.index = 1
    for kernel, _ in launched(Call(rw.Causal(), 1001, dim=dim, dtype=HALF), device):
        if kernel.metadata.name in STREAMING:
            assert re.search(r"cp\.async\.cg\.shared\.global.*0x10", kernel.asm["ptx"])
            assert not re.search(r"ld\.global\.b16", kernel.asm["ptx"])


class Watched(TorchDispatchMode):
    """Record the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()
        #: Those that copied a tensor to another device.
        self.moved: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(func._schema.name)
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
        if len({x.device for x in tensors if x.ndim}) > 1:
            self.moved.add(func._schema.name)
        return result


@pytest.mark.parametrize("name", PLAIN)
def test_a_second_call_allocates_and_launches_and_nothing_else(name: str, device: Notes) -> None:
    """A second call only allocates and launches, so it can be captured in a CUDA graph."""
    call, names = CALLS[name]
    call()
    with Watched() as watched:
        launches = launched(call, device)
    assert [kernel.metadata.name for kernel, _ in launches] == names
    assert watched.called <= {"aten::empty", "aten::new_empty"}


@pytest.mark.parametrize("pattern", [rw.Causal(), PAIRS & rw.Causal()], ids=["rows", "pairs"])
def test_a_layout_is_that_of_its_tensors_and_holds_no_plan(pattern: Pattern, device: Notes) -> None:
    plan = build(pattern, 1024, 1024, heads=4, tile=(64, 64) if pattern.tables else (128, 128))
    x = torch.empty(1, 4, 1024, 64, dtype=HALF)
    others = {
        "contiguous": x,
        "heads last": torch.empty(1, 1024, 4, 64, dtype=HALF).transpose(1, 2),
        "address of two bytes": torch.empty(x.numel() + 1, dtype=HALF)[1:].view(x.shape),
        "float32": x.float(),
        "narrow": x[..., :40],
    }
    found = {}
    for _ in range(2):
        for name, other in others.items():
            of = Operands(other, other, other, 0.125)
            layout, made = (each(of, plan, launch._of_driver()) for each in (ForwardLayout.of, ForwardLayout._made))
            assert found.setdefault(name, layout) is layout
            assert layout.constants == made.constants
            assert layout.numbers == made.numbers
            assert layout.described == made.described
            assert layout.queue is made.queue
    device.index = 1
    assert ForwardLayout.of(of, plan, launch._of_driver()) is not layout
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None


def test_a_repeated_launch_has_the_arguments_of_the_first(device: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated launch skips Triton's look-up, and another alignment, type or sign of the scale does not use its kernel."""
    passed: list[tuple[Any, ...]] = []
    launcher = device.launcher_cls

    def recorded(source: Any, metadata: Any) -> Callable[..., None]:
        launch_it = launcher(source, metadata)
        return lambda *args: (passed.append(args), launch_it(*args))[1]

    monkeypatch.setattr(device, "launcher_cls", recorded)
    # sizes that no other test compiles
    x, n = torch.empty(1, 2, 192, 24, dtype=HALF), 2 * 192 * 24
    odd = torch.empty(n + 1, dtype=HALF)[1:].view(x.shape)
    (branch,) = branches(rw.SlidingWindow(70), 192, 192, heads=2)
    for q, k, v, scale, dtype in (
        (x, x, x, 0.1, HALF), (odd, x, x, 0.1, HALF), (x, odd, x, 0.1, HALF), (x, x, odd, 0.1, HALF),
        (x, x, x, -0.1, HALF), (x, x, x, 0.1, torch.float32),
    ):  # fmt: skip
        looked: list[int] = []
        run = type(kernels.forward).run

        def noted(kernel: Any, *args: Any, run: Any = run, looked: list[int] = looked, **options: Any) -> Any:
            looked.append(1)
            return run(kernel, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(type(kernels.forward), "run", noted)
            calls = []
            for _ in range(3):
                passed.clear()
                launch.forward(Operands(q, k, v, scale), branch, dtype)
                calls.append(list(map(plain, passed[-1])))
        assert looked == [1]
        assert calls[0] == calls[1] == calls[2]
    assert len({each.metadata.hash for each in device.compiled().values() if each.metadata.name == "forward"}) >= 6


def plain(argument: Any) -> object:
    """Return what a launch reads of an argument; results are new tensors at other addresses."""
    if isinstance(argument, TensorDescriptor):
        return argument.base.data_ptr(), *map(tuple, (argument.shape, argument.strides, argument.block_shape))
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    # what a hook is told is made for each launch
    return type(argument) if type(argument).__name__ == "LazyDict" else argument


@pytest.mark.parametrize("inside", [None, rw.Causal()], ids=["alone", "within causal"])
def test_a_table_on_a_gpu_is_planned_and_computed_without_a_look_at_it(inside: Pattern | None, device: Notes) -> None:
    """A table on a GPU is planned and computed without reading it; the tensors are fake, so reading one would raise."""
    table = rw.BlockTable(torch.empty(4, 16, 16, dtype=torch.bool, device="meta"), 64)
    pattern = table if inside is None else table & inside
    launches = launched(Call(pattern, 1024, kv_heads=2, batch=2, device="meta"), device)
    assert [kernel.metadata.name for kernel, _ in launches] == ALL
    assert [each.grid[0] for kernel, each in launches if kernel.metadata.name in STREAMING] == [128, 128, 64]


@pytest.mark.parametrize("terms", ["", "Softcap(9.0)"], ids=["alone", "with a term"])
def test_a_step_over_pages_copies_nothing(terms: str, device: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with lengths that the host knows copies nothing between devices; the tensors are fake, so reading one would raise."""
    runnable = dataclasses.replace(BACKEND, unsupported_reason=lambda call, branch: None)
    monkeypatch.setitem(BACKENDS, "triton", runnable)
    q, pool = (torch.empty(n, 2, side, 64, dtype=HALF, device="meta") for n, side in ((2, 1), (40, 64)))
    table, lengths = (torch.empty(*of, dtype=torch.int32, device="meta") for of in ((2, 20), (2,)))
    # whole tiles, since masks are read once for each plan
    kv_cache._note_lengths(lengths, np.array([1024, 1152], np.int32), kept=True)
    call = described_call.Call.of(q, pool, pool, rw.Causal(), page_table=table, backend="triton", terms=terms)

    def step() -> None:
        torch_ops.attention(q, pool, pool, [table, lengths], call.text, *call.numbers)

    step()
    device.taken()
    with Watched() as watched:
        step()
    (launch,) = device.taken()
    assert device.compiled()[launch.function].metadata.name == "forward"
    assert not watched.moved


PRODUCTS = """
WARPGROUP.ARRIVE
HGMMA.64x16x16.F32.BF16 R8, R24, gdesc[UR4].tnspB, R8, gsb0
LDS.128 R40, [R2]
WARPGROUP.DEPBAR.LE gsb0, 0x0
@P0 BRA 0x10
F2FP.BF16.F32.PACK_AB R24, R1, R0
"""


@pytest.mark.parametrize(
    ("what", "instead", "said"),
    [
        ("", "", None),
        ("WARPGROUP.ARRIVE", "WARPGROUP.ARRIVE\n@!P1 FADD R27, R0, R1", "after the arrival"),
        ("WARPGROUP.ARRIVE", "WARPGROUP.ARRIVE\nLDS.128 R4, [R2]", None),
        ("WARPGROUP.ARRIVE", "WARPGROUP.ARRIVE\nCS2R R14, SRZ", "after the arrival"),
        ("LDS.128 R40", "LDS.128 R24", "takes what it writes"),
        ("LDS.128 R40", "IADD3 R40, P1, R24", None),
        # by turns
        ("gsb0, 0x0", "gsb0, 0x1\nSHFL.BFLY PT, R25, R3, 0x2, 0x1f", "takes what it writes"),
        ("gsb0, 0x0", "gsb0, 0x0\nSHFL.BFLY PT, R25, R3, 0x2, 0x1f", None),
    ],
)  # fmt: skip
def test_the_order_of_products_and_their_registers(what: str, instead: str, said: str | None) -> None:
    import machine_code

    assert not what or what in PRODUCTS
    lines = PRODUCTS.replace(what, instead).strip().splitlines() if what else PRODUCTS.strip().splitlines()
    found = machine_code.unordered({16 * (place + 1): line for place, line in enumerate(lines)})
    assert bool(found) == (said is not None), found
    assert all(str(said) in each for each in found)
