"""Tables that change constantly, in threads and processes: a plan never belongs to another table.

``make soak`` tests 10,000 tables in two processes, instead of a few.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

import ringweave as rw
from ringweave.adaptive import select

N, SIDE = 64, 16
BLOCKS = N // SIDE


def mask_of(indices: Tensor, counts: Tensor) -> Tensor:
    mask = torch.zeros(*counts.shape, BLOCKS, dtype=torch.bool)
    for place in range(indices.shape[-1]):
        here = (place < counts)[..., None]
        mask |= here & (indices[..., place, None] == torch.arange(BLOCKS))
    return mask


def check(pattern: rw.Pattern, mask: Tensor, causal: bool) -> None:
    """Check a plan from the cache, and the attention computed with one."""
    plan = rw.plan(pattern, N, heads=2)
    allowed = mask.repeat_interleave(SIDE, -2).repeat_interleave(SIDE, -1)
    allowed = allowed & torch.ones(N, N, dtype=torch.bool).tril() if causal else allowed
    assert torch.equal(plan.to_dense()[0], allowed)
    q = torch.zeros(1, 2, N, 8)
    lse = rw.attention_with_lse(q, q, q, pattern).lse[0]
    torch.testing.assert_close(lse.exp(), allowed.sum(-1).float())


def tables(number: int, seed: int) -> int:
    """Create ``number`` tables and modify their tensors in place, and check each; return ``number``."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.zeros(2, BLOCKS, 3, dtype=torch.int64)
    counts = torch.zeros(2, BLOCKS, dtype=torch.int64)
    x = torch.zeros(1, 2, N, 8)
    kept: rw.BlockTable | None = None
    for turn in range(number):
        causal = turn % 2 == 1
        kind = turn % 3
        if kind == 0 or kept is None:
            # new tables of the same tensors
            indices.random_(0, BLOCKS, generator=generator)
            counts.random_(0, 4, generator=generator)
            kept = rw.BlockTable(indices=indices, counts=counts, key_blocks=BLOCKS, block_size=SIDE)
            table, mask = kept, mask_of(indices, counts)
        elif kind == 1:
            # a table with a tensor that is modified in place
            rows = torch.randint(0, BLOCKS, (), generator=generator)
            kept.blocks.table.copy_(kept.blocks.table.roll(int(rows), 1))
            table, mask = kept, kept.mask
        else:
            # tables found in tensors that are modified in place
            x.normal_(generator=generator)
            table = select(x, x, top_k=2, block_size=SIDE, causal=False)
            mask = table.mask[0]
        check(table & rw.Causal() if causal else table, mask, causal)
    return number


def in_threads(number: int, seed: int) -> int:
    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(lambda each: tables(number // 4, 10 * seed + each), range(4)))


def in_processes(number: int, processes: int) -> int:
    command = [sys.executable, "-m", "tests.adaptive.test_mutated_tables", str(number // processes)]
    root = Path(__file__).parents[2]
    running = [
        subprocess.Popen([*command, str(seed)], cwd=root, stdout=subprocess.PIPE, text=True)
        for seed in range(processes)
    ]
    found = [int(each.communicate(timeout=3600)[0]) for each in running]
    assert all(each.returncode == 0 for each in running)
    return sum(found)


def test_no_plan_is_stale() -> None:
    assert in_threads(240, 1) == 240


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(in_threads(int(sys.argv[1]), int(sys.argv[2])))
    else:
        print(in_processes(int(sys.argv[1]), 2), "tables, none stale")
