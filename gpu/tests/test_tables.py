"""Lists and queues of plans of block tables: spare entries are not read, nothing is read back, and graphs can be replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.plan.from_pattern import build
from ringweave_gpu import flash_attn_4
from ringweave_gpu.triton import queues
from tests.on_gpu import captured
from tests.plan.test_tables import BLOCKS, SIDE, TABLES, N, NothingRead, of_indices, planned, table


@pytest.mark.parametrize("name", list(TABLES))
def test_lists_for_flash_attn_hold_no_spare_entries(name: str) -> None:
    pattern = TABLES[name]()
    exact, spare = (flash_attn_4.padded_lists(planned(pattern, each), "columns") for each in (False, True))
    assert all(torch.equal(one, two) for one, two in zip(exact, spare, strict=True))


def test_queues_of_tables_without_data() -> None:
    plan = build(of_indices("meta"), N, N, heads=4, batch=2, tile=(SIDE, SIDE), device="meta")
    assert queues.row_queue(plan, 2, 1, 2**14, 4).records.shape == (2 * 4 * BLOCKS, 1, 6)
    assert queues.column_queue(plan, 2, 2**14, 4).records.shape == (2 * 2 * BLOCKS, 2, 6)


@pytest.mark.parametrize("name", list(TABLES))
def test_nothing_is_read_back_for_queues(name: str) -> None:
    plan = planned(TABLES[name](), True)
    with NothingRead() as watched:
        queues.row_queue(plan, 2, 1, 2**14, 4)
        queues.column_queue(plan, 2, 2**14, 4)
    assert watched.called


@pytest.mark.gpu
def test_queues_do_not_wait_on_a_gpu() -> None:
    mask = table(0.4, 4).mask.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = rw.BlockTable(mask, SIDE).plan(N, heads=4, batch=2, device="cuda")
        queues.row_queue(plan, 2, 1, 2**14, 4)
        queues.column_queue(plan, 2, 2**14, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("planned_inside", [False, True])
def test_a_graph_of_forward_and_backward_on_a_gpu(planned_inside: bool) -> None:
    """A captured forward and backward can be replayed with other data, and with another table if its plan is in the graph."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, heads, N, 64, device="cuda", dtype=torch.float16, generator=generator)

    q, k, v = (draw(heads).requires_grad_() for heads in (4, 2, 2))
    dout = draw(4)
    mask = table(0.4, 4).mask.cuda()
    outside = rw.BlockTable(mask, SIDE)

    def step() -> tuple[Tensor, ...]:
        pattern = rw.BlockTable(mask, SIDE) if planned_inside else outside
        out = rw.attention(q, k, v, pattern, backend="triton")
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    graph, results = captured(step)
    with torch.no_grad():
        for x in (q, k, v, dout):
            x.copy_(draw(x.shape[1]))
    now = table(0.4, 4)
    if planned_inside:
        now = rw.BlockTable(~mask, SIDE)
        mask.copy_(~mask)
    graph.replay()
    torch.cuda.synchronize()
    out = rw.attention(q, k, v, now, backend="reference")
    want = (out, *torch.autograd.grad(out, (q, k, v), dout))
    for got, exact in zip(results, want, strict=True):
        torch.testing.assert_close(got, exact, rtol=2e-2, atol=2e-2)
