"""Incoming brings each kernel call the right keys and queries, and Outgoing is its transpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.call import Operands
from ringweave.parallel import ContextParallel
from ringweave.parallel.execution.exchange import TokenBlock
from ringweave.parallel.execution.incoming import Incoming
from ringweave.parallel.execution.local_attention import LocalAttention
from ringweave.parallel.execution.messages import Channels
from ringweave.parallel.execution.outgoing import Outgoing, ReturnRoute

from ..cases import MIXTURES, PATTERNS
from .threads import run

NAMES = ["window", "causal", "documents", "per_head", "longnet", "dilated"]


def integers(*shape: int, seed: int) -> Tensor:
    """Small integers as float64, so that sums are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def passed(
    transport: Any, pattern: rw.Pattern, tokens: int, kv_heads: int, per_node: int | None, options: dict[str, str]
) -> tuple[float, float, int]:
    """Receive keys for all kernel calls and check them, then return gradients of random integers.

    Returns <received keys, gradients>, <keys, returned gradients> and the number of calls of remote queries.
    """
    ctx = ContextParallel(transport, pattern, tokens, heads=(4, kv_heads), **options)
    ctx.schedules.per_node = per_node
    work = ctx.schedules.of(pattern)
    wholes = [
        integers(1, heads, tokens, dim, seed=dim) for heads, dim in zip((4, kv_heads, kv_heads), (3, 5, 7), strict=True)
    ]
    q, k, v = (ctx.shard(x, 2) for x in wholes)
    totals = [torch.zeros_like(x) for x in (k, v)]
    collective = ctx.call.with_fields(**work.header)
    received = returned = 0.0
    remote_calls = 0

    def add_keys(block: TokenBlock, rows: Any) -> None:
        for total, grad in zip(totals, rows, strict=True):
            work.heads[block.branch].update(total, block.add, grad)

    incoming = Incoming(work, collective, Operands(q, k, v, 1.0))
    keys_route = ReturnRoute(Channels(1, (5, 7), torch.float64), add_keys)
    outgoing = Outgoing(
        work, collective, q.device, ReturnRoute(Channels(1, (3,), torch.float64), check_results), keys_route
    )
    incoming.agree("test")
    incoming.start(work.stages[0])
    for stage, following in work.steps():
        incoming.wait()
        incoming.start(following)
        grads: dict[int, list[Tensor]] = {}
        for call in incoming.calls():
            heads, keys, cut = call.attention.heads, call.attention.keys, call.attention.cut
            attended = attended_keys(call.attention, 4 // kv_heads)
            at, of_call = torch.from_numpy(cut.key_positions), []
            for buffer, whole in ((call.inputs.k, wholes[1]), (call.inputs.v, wholes[2])):
                assert torch.equal(buffer[:, attended], heads.of_keys(whole)[:, :, at][:, attended])
                grad = integers(*buffer.shape, seed=7 * stage.number + call.number) * attended[..., None]
                received += float((torch.where(attended[..., None], buffer, 0.0) * grad).sum())
                of_call.append(grad)
            for total, grad in zip(totals, of_call, strict=True):
                heads.update(total, keys.shard_tokens.add, keys.of_kernel(grad))
            if call.remote:
                remote_calls += 1
                rows = torch.from_numpy(cut.query_positions)
                assert torch.equal(call.inputs.q, wholes[0][:, slice(*cut.whole.heads)][:, :, rows])
            else:
                grads[call.number] = of_call
            del call

        def of_keys(_peer: int, block: TokenBlock, grads: dict[int, list[Tensor]] = grads) -> list[Tensor]:
            both = grads.get(block.branch, [None, None])
            return [block.gradients(x, totals[0], 1, dim) for x, dim in zip(both, (5, 7), strict=True)]

        outgoing.wait()
        outgoing.start(stage, of_queries, of_keys)
    outgoing.wait()
    returned += sum(float((x * total).sum()) for x, total in zip((k, v), totals, strict=True))
    return received, returned, remote_calls


def attended_keys(attention: LocalAttention, ratio: int) -> Tensor:
    """Return whether any query of a kernel call attends a key, (distinct key heads, keys); a buffer needs only those keys."""
    by_query_head = attention.branch.plan().to_dense()[0].any(1)
    key_heads = [head // ratio for head in range(*attention.branch.heads)]
    rows = [[i for i, other in enumerate(key_heads) if other == head] for head in sorted(set(key_heads))]
    return torch.stack([by_query_head[row].any(0) for row in rows])


def check_results(_block: TokenBlock, rows: Any) -> None:
    """Check the results of remote queries, which are not part of the transpose."""
    assert all((x == 1).all() for x in rows)


def of_queries(_peer: int, block: TokenBlock) -> list[Tensor]:
    return [torch.ones(block.shape(1, 3), dtype=torch.float64)]


@pytest.mark.parametrize(("schedule", "per_node"), [("allgather", None), ("allgather", 2), ("ring", None)])
@pytest.mark.parametrize("name", NAMES)
def test_outgoing_is_the_transpose_of_incoming(name: str, schedule: str, per_node: int | None) -> None:
    pattern = (PATTERNS | MIXTURES)[name](500)
    options = {"schedule": schedule, "placement": "zigzag"}
    found = run(4, passed, pattern, 500, 2, per_node, options)
    assert sum(received for received, _, _ in found) == sum(returned for _, returned, _ in found) != 0


def test_outgoing_is_the_transpose_of_incoming_where_queries_move() -> None:
    options = {"schedule": "ring", "placement": "contiguous"}
    found = run(3, passed, rw.SlidingWindow(256) | rw.Global(128), 4096, 4, None, options)
    assert sum(received for received, _, _ in found) == sum(returned for _, returned, _ in found) != 0
    assert sum(remote for _, _, remote in found) > 0
