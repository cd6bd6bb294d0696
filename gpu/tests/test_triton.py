"""Test the Triton backend without a GPU: its kernels in Triton's interpreter, and its decisions before a launch.

The interpreter runs in a process of its own: it is switched on before the kernels are loaded.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import ringweave as rw
from ringweave import program
from ringweave.call import Call
from ringweave.plan import Branch, branches, plan, unpack_masks
from ringweave.plan.from_pattern import build
from ringweave_gpu import triton
from ringweave_gpu.triton import pairing, queues
from ringweave_gpu.triton.launch_config import Device, LaunchConfig, launch_config_for
from tests.cases import PATTERNS

# a minute of CPU time; shared machines take several times as much
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    not triton.installed(), reason="triton is not installed (it has wheels for Linux only)"
)


def release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


def in_a_process(command: list[str], cache: Path, **environment: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)} | environment
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
def test_conformance_in_the_interpreter(tmp_path: Path) -> None:
    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        pytest.skip("Triton's interpreter of before 3.7 does not know numpy 2.4")
    if release("triton") >= (3, 9):
        pytest.skip("Triton's interpreter of 3.9 makes integers of a mask of one value for many, and refuses them")
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "gpu.tests.patched_once",
        "--show-capture=all",
    ]
    command += [f"gpu/tests/interpreted{part}.py" for part in ("", "_cuts", "_stored", "_terms")]
    in_a_process(command, tmp_path, TRITON_INTERPRET="1")


def case(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Call:
    return Call(1, 4, 2, 256, 256, 64, 64, dtype, device)


def first(pattern: rw.Pattern) -> Branch:
    return branches(pattern, 256, 256, heads=4)[0]


def test_the_interpreter_runs_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.unsupported_reason(case("cpu", torch.float32), first(rw.Causal())) is None
    assert program.choose_backend("auto", case("cpu"), first(rw.Causal())).name != "triton"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "installed", lambda: False)
    with pytest.raises(rw.UnsupportedError, match="triton is not installed: pip install triton"):
        program.choose_backend("triton", case(), first(rw.Causal()))


def test_cpu_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.randn(1, 2, 64, 16)
    with pytest.raises(rw.UnsupportedError, match="it runs on CUDA and ROCm tensors, and these are on cpu"):
        rw.attention(q, q, q, backend="triton")


@pytest.mark.parametrize("name", ["sinks", "global", "documents", "table_per_head"])
def test_masks_the_other_way(name: str) -> None:
    of = plan(PATTERNS[name](500), 500, heads=4, tile=(64, 32))
    dense = unpack_masks(of.mask_words, 32)
    masks = queues.masks(of)
    assert torch.equal(unpack_masks(masks.transposed, 64), dense.mT)
    assert torch.equal(unpack_masks(masks.live_keys[:, None], 32)[:, 0], dense.any(1))
    assert torch.equal(unpack_masks(masks.live_queries[:, None], 64)[:, 0], dense.any(2))
    assert queues.masks(of) is masks


@pytest.mark.parametrize("name", ["causal", "sinks", "documents", "global", "table_per_head", "window", "segments"])
@pytest.mark.parametrize("n", [500, 512])
def test_which_plans_have_dead_positions_in_their_tiles(name: str, n: int) -> None:
    of = plan(PATTERNS[name](n), n, heads=4, tile=(64, 32))
    dense = torch.nn.functional.pad(of.to_dense(), (0, -n % 32, 0, -n % 64))
    tiles = dense.unflatten(3, (-1, 32)).unflatten(2, (-1, 64))  # (B, H, rows, 64, columns, 32)
    used = tiles.any(5).any(3)
    inside = torch.arange(-(-n // 64) * 64) < n
    keys = (tiles.any(3) | ~inside[: tiles.shape[4] * 32].unflatten(0, (-1, 32))).all(-1)
    queries = (tiles.any(5) | ~inside.unflatten(0, (-1, 64))[:, :, None]).all(3)
    masks = queues.masks(of)
    assert masks.dead_keys == bool((used & ~keys).any())
    assert masks.dead_queries == bool((used & ~queries).any())


def test_masks_of_a_plan_that_the_host_has_not_counted_are_not_read() -> None:
    """The masks of a plan without counts on the host are not read; its tensors have no values, so reading raises."""
    table = rw.BlockTable(torch.empty(8, 8, dtype=torch.bool, device="meta"), 64) & rw.Causal()
    of = build(table, 512, 512, tile=(64, 64), device="meta")
    masks = queues.masks(of)
    assert masks.transposed.shape == of.mask_words.shape
    assert masks.dead_keys
    assert masks.dead_queries


@pytest.mark.parametrize("name", ["causal", "sinks", "documents", "global", "nothing", "per_head", "full"])
def test_rows_of_pairs_spell_the_same_relation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of paired tiles have the plan's relation: each entry of the union, by the masks of its two tiles."""
    monkeypatch.setattr(pairing, "_WASTE", 2)
    n = 1100
    of = plan(PATTERNS[name](n), n, heads=4, tile=64)
    rows = pairing.paired(of)
    assert rows is not None
    assert pairing.paired(of) is rows
    made = rows.plan
    full = torch.ones(1, 64, 64, dtype=torch.bool)
    shapes = torch.cat([unpack_masks(made.mask_words, 64), full])
    counts = made.row_ptr.diff(dim=1).reshape(-1).long()
    row = torch.arange(counts.numel()).repeat_interleave(counts)
    dense = torch.zeros(made.row_ptr.shape[0], made.q_tiles, made.kv_tiles, 2, 64, 64, dtype=torch.bool)
    dense[row // made.q_tiles, row % made.q_tiles, made.col.long()] = shapes[made.mask_id.long()]
    dense = dense.permute(0, 1, 3, 4, 2, 5).reshape(dense.shape[0], made.q_tiles * 128, -1)[:, :n, :n]
    assert torch.equal(dense[made.row_set.long()], of.to_dense())
    assert made.launch_order.sort().values.tolist() == list(range(counts.numel()))
    if made.mask_words.shape[0]:
        assert torch.equal(unpack_masks(rows.live[:, None], 64)[:, 0], unpack_masks(made.mask_words, 64).any(1))


def test_rows_of_pairs_only_where_lists_agree() -> None:
    apart = plan(rw.BlockTable(torch.eye(8, dtype=torch.bool), 64), 512, tile=64)
    together = plan(
        rw.BlockTable(torch.eye(4, dtype=torch.bool).repeat_interleave(2, 0).repeat(1, 2), 64), 512, tile=64
    )
    assert pairing.paired(apart) is None
    rows = pairing.paired(together)
    assert rows is not None
    # both tiles exist, so no mask is needed
    assert rows.plan.mask_words.shape[0] == 0
    assert rows.plan.nnz * 2 == together.nnz


def test_queues_hold_every_task_once_and_the_longest_first() -> None:
    of = plan(rw.PerHead([rw.Causal(), rw.SlidingWindow(9), rw.Causal(), rw.Full()]), 1000, heads=4, batch=2, tile=64)
    rows = queues.row_queue(of, ratio=2, packed=1, head_bytes=1, units=1).records
    assert rows.shape == (2 * 4 * of.q_tiles, 1, 6)
    assert rows[:, 0, :3].unique(dim=0).shape[0] == 2 * 4 * of.q_tiles
    assert torch.equal(rows[:, 0, 3:5], ends(of.row_ptr, of.row_set, rows[:, 0], 0))
    # the plan orders rows by length in classes of half an octave
    assert ((2 * (rows[:, 0, 4] - rows[:, 0, 3]).log2()).floor().diff() <= 0).all()
    columns = queues.column_queue(of, ratio=2, head_bytes=1, units=1).records
    # the query heads of a key head have separate lists
    assert columns.shape == (2 * 2 * of.kv_tiles, 2, 6)
    assert columns[:, 0, :3].unique(dim=0).shape[0] == 2 * 2 * of.kv_tiles
    for member in range(2):
        head = columns[:, member] * torch.tensor([1, 2, 1, 1, 1, 1])
        assert torch.equal(columns[:, member, 3:5], ends(of.col_ptr, of.row_set, head, member))
    assert ((columns[..., 4] - columns[..., 3]).sum(1).diff() <= 0).all()
    assert (rows[..., 5] == -1).all()
    # heads with keys that do not fit the cache together are queued one after the other
    apart = queues.row_queue(of, ratio=2, packed=1, head_bytes=2**30, units=1).records[:, 0]
    assert ((apart[:, 0] * 2 + apart[:, 1] // 2).diff() >= 0).all()


def ends(ptr: torch.Tensor, group: torch.Tensor, records: torch.Tensor, member: int) -> torch.Tensor:
    """Return the begin and end of the lists of whole tasks."""
    b, head, tile = records[:, :3].long().T
    of = group.long()[b, head + member]
    return torch.stack([ptr[of, tile], ptr[of, tile + 1]], 1)


def test_packed_heads_are_one_item_and_shared_lists_one_record() -> None:
    of = plan(rw.SlidingWindow(9), 100, heads=6, batch=2, tile=32)
    rows = queues.row_queue(of, ratio=3, packed=2, head_bytes=1, units=1).records[:, 0]
    assert rows[:, :2].unique(dim=0).tolist() == [[b, head] for b in range(2) for head in (0, 2, 3, 5)]
    columns = queues.column_queue(of, ratio=3, head_bytes=1, units=1).records
    assert columns.shape == (2 * 2 * of.kv_tiles, 1, 6)


def test_queues_of_no_keys_and_of_no_batch_are_empty() -> None:
    keyless = build(rw.Full(), 64, 0, heads=2, tile=(32, 32))
    idle = build(rw.Full(), 64, 64, heads=2, batch=0, tile=(32, 32))
    assert queues.column_queue(keyless, ratio=1, head_bytes=1, units=1).items == 0
    rows = queues.row_queue(keyless, ratio=1, packed=1, head_bytes=1, units=1).records
    # rows without keys have items too, which write their defined results
    assert sorted(rows[:, 0].tolist()) == [[0, head, tile, 0, 0, -1] for head in range(2) for tile in range(2)]
    assert queues.row_queue(idle, ratio=1, packed=1, head_bytes=1, units=1).items == 0
    assert queues.column_queue(idle, ratio=2, head_bytes=1, units=1).items == 0


@pytest.mark.parametrize("units", [2, 60, 300])
def test_shares_of_long_lists_cover_them_once(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "LEAST", 64)
    of = plan(rw.SlidingWindow(40) | rw.Global(1), 1000, heads=4, tile=(16, 32))
    counts = of.row_ptr.diff(dim=1)[of.row_set.long()].reshape(-1)
    queue = queues.row_queue(of, ratio=4, packed=1, head_bytes=1, units=units)
    even = max(2, int(counts.sum()) // units)
    assert (queue.splits is None) == (int(counts.max()) <= even)
    if queue.splits is None:
        assert units == 2
        return
    _, head, tile, begin, end, slot = queue.records[:, 0].T
    task = head * of.q_tiles + tile
    assert torch.zeros_like(counts).index_add_(0, task, end - begin).equal(counts)
    assert int((end - begin).max()) <= even
    assert slot[slot >= 0].sort().values.tolist() == list(range(queue.slots))
    assert len(task[slot < 0].unique()) == int((slot < 0).sum()) == len(counts) - len(queue.splits)
    for _, head, tile, first, count in queue.splits.tolist():
        mine = task == head * of.q_tiles + tile
        assert slot[mine].tolist() == list(range(first, first + count))
        # each share begins at the end of the one before
        ends = of.row_ptr[of.row_set[0, head], tile : tile + 2].tolist()
        assert [ends[0], *end[mine].tolist()] == [*begin[mine].tolist(), ends[1]]


def test_blocks_fit_the_device_and_the_tile() -> None:
    hopper, small = Device.of_cuda(9, 227 * 1024), Device.of_cuda(12, 99 * 1024)
    assert small.generation == "ampere"
    assert launch_config_for("forward", 128, 128, 2, (128, 128), hopper) == LaunchConfig(
        128, 64, 8, 2, described=True, registers=128
    )
    for kernel in ("forward", "backward_q", "backward_kv"):
        for dim in (16, 64, 80, 128, 256, 512):
            for itemsize in (2, 4):
                for tile in ((16, 16), (128, 32), (32, 128), (128, 128), (256, 512)):
                    for device in (hopper, small, Device("cdna", 64 * 1024)):
                        blocks = launch_config_for(kernel, dim, dim, itemsize, tile, device)
                        assert tile[0] % blocks.m == tile[1] % blocks.n == 0
                        assert min(blocks.m, blocks.n) >= 16


def test_gradients_of_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "installed", lambda: True)
    learned = dataclasses.replace(case(), learned=8, features=frozenset({"DistanceBias"}))
    assert "no gradients of terms' tables" in str(triton.unsupported_reason(learned, first(rw.Causal())))
