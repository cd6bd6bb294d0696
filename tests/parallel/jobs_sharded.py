"""Jobs of test_sharded: DTensors on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ringweave as rw
from ringweave.errors import RingweaveError

from ..options import BATCH, DIM, HEADS, TOKENS, VALUES
from ..score_functions.test_calls import CASES

PATTERNS = {
    "window": rw.SlidingWindow(20),
    "per head": rw.PerHead([rw.Causal(), rw.Full(), rw.SlidingWindow(3), rw.Sinks(2)]),
    "table": rw.patterns.random_blocks(96, 0.5, block_size=32, heads=4),
    "mixture": rw.LongNet([32], [2]),
}


def compared(compiled: bool = False) -> dict[str, float]:
    """Return relative errors against one device, by case and result; if ``compiled``, in one graph."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    q, k, v, dout = draw(2, 4, 96, 8), draw(2, 2, 96, 8), draw(2, 2, 96, 8), draw(2, 4, 96, 8)
    rest = [draw(4, 11), draw(2, 4, 96, 96), draw(4)]
    errors: dict[str, float] = {}
    cases = [(name, pattern, Shard(1)) for name, pattern in PATTERNS.items()]
    cases += [("by batch", rw.Causal(), Shard(0)), ("each has all", rw.Causal(), Replicate())]
    # each takes seconds to trace
    cases = cases[1::3] if compiled else cases
    for name, pattern, placement in cases:
        call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
        ours = results([q, k, v], rest, dout, pattern, _spread(mesh, placement), call)
        theirs = results([q, k, v], rest, dout, pattern, lambda x: x)
        for number, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
            if isinstance(found, DTensor):
                assert number > 4 or found.placements == (placement,), (name, number, found.placements)
                found = found.full_tensor()
            errors[f"{name}, {number}"] = float((found - wanted).norm() / wanted.norm())
    return errors


def _spread(mesh: Any, placement: Placement) -> Callable[[Tensor], Tensor]:
    def spread(x: Tensor) -> Tensor:
        # tables and sinks are replicated on all ranks
        return distribute_tensor(x, mesh, [placement if x.shape[-1] == 8 and x.ndim == 4 else Replicate()])

    return spread


def attend(pattern: rw.Pattern, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) with every argument that can be sharded."""
    table, bias, slopes, sinks = rest
    terms = [rw.DistanceBias(table), rw.Bias(bias), rw.ALiBi(slopes), rw.Softcap(5.0)]
    return rw.attention_with_lse(q, k, v, pattern, terms=terms, sink_logits=sinks)


def results(
    inputs: list[Tensor],
    rest: list[Tensor],
    dout: Tensor,
    pattern: rw.Pattern,
    spread: Callable[[Tensor], Tensor],
    call: Callable[..., tuple[Tensor, Tensor]] = attend,
) -> list[Tensor]:
    """Return out, lse and all gradients."""
    leaves = [spread(x).detach().requires_grad_() for x in (*inputs, *rest)]
    *others, sinks = leaves
    out, lse = call(pattern, *others, rw.ALiBi.of_heads(4).slopes, sinks)
    loss = (out * spread(dout)).sum() + lse.sin().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def with_option(option: str) -> str:
    """Return whether a call with another value of an option is computed as on one device, or refused."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, DIM, generator=whole) for _ in range(3))
    given = {"pattern": rw.Causal(), option: VALUES[option](TOKENS)}
    wanted = rw.attention(q, k, v, **given)
    try:
        found = rw.attention(*[distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)], **given)
    except RingweaveError:
        return "refused"
    close = torch.allclose(found.full_tensor(), wanted, atol=1e-2 if option == "precision" else 1e-5)  # type: ignore[attr-defined]
    changed = not torch.allclose(wanted, rw.attention(q, k, v, rw.Causal()), atol=1e-5) or option in (
        "backend",
        "on_oom",
    )
    return "as on one device" if close and changed else "another result"


def functions() -> dict[str, float]:
    """Return relative errors of calls with functions against one device, by placement, function and result.

    Gradients of captured tensors are this rank's part where ranks share heads or batch elements.
    """
    mesh, g = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    x = [torch.randn(2, heads, 96, 8, generator=g) for heads in (4, 2, 2, 4)]
    errors: dict[str, float] = {}
    for placement in (Shard(1), Shard(0), Replicate()):
        for name in ("distances", "pairs", "rows", "two functions", "term, then square", "unread"):
            case = CASES[name]
            found = []
            for spread in (_spread(mesh, placement), lambda x: x):
                leaves = [spread(each).detach().requires_grad_() for each in x[:3]]
                tables = case.tables(2, 4, 96, 96)
                out, lse = rw.attention_with_lse(*leaves, rw.SlidingWindow(20), terms=case.make(**tables))
                loss = (out * spread(x[3])).sum() + lse.sin().sum()
                found.append([out, lse, *torch.autograd.grad(loss, [*leaves, *tables.values()])])
            for number, (ours, wanted) in enumerate(zip(*found, strict=True)):
                if isinstance(ours, DTensor):
                    ours = ours.full_tensor()
                elif not placement.is_replicate():
                    dist.all_reduce(ours)
                errors[f"{placement}, {name}, {number}"] = float((ours - wanted).norm() / wanted.norm())
    return errors


def dropped() -> tuple[bool, bool]:
    """Return whether dropout of DTensors on one rank equals that of their local tensors, and drops any weights."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))["model"]
    q = distribute_tensor(torch.randn(1, 2, 64, 8), mesh, [Shard(1)])
    found = []
    for x in (q, q.to_local()):
        torch.manual_seed(3)
        found.append(rw.attention(x, x, x, dropout=0.5))
    out = found[0].to_local()  # type: ignore[attr-defined]
    return torch.equal(out, found[1]), not torch.equal(out, rw.attention(*[q.to_local()] * 3))


def refused() -> list[str]:
    """Return the errors of calls that DTensors do not support."""
    mesh = init_device_mesh("cpu", (2,))

    def spread(placement: Placement, heads: int = 4) -> DTensor:
        return distribute_tensor(torch.randn(2, heads, 64, 8), mesh, [placement])

    heads, batch = spread(Shard(1)), spread(Shard(0))
    calls: list[tuple[tuple[Tensor, ...], rw.Pattern, dict[str, Any]]] = [
        ((spread(Shard(2)),) * 3, rw.Causal(), {}),
        ((heads, spread(Replicate()), heads), rw.Causal(), {}),
        ((heads, spread(Shard(1), 1), spread(Shard(1), 1)), rw.Causal(), {}),
        ((heads,) * 3, rw.Causal(), {"dropout": 0.1}),
        ((batch,) * 3, rw.KeyPadding(torch.tensor([10, 20])), {}),
        ((batch,) * 3, rw.from_mask_mod(lambda b, h, q, k: q > k + b), {}),
        ((heads,) * 3, rw.LongNet([64], [8]), {}),
        ((spread(Replicate()),) * 3, rw.Causal(), {"dropout": 0.1}),
        # shapes that would fit a rank's own heads
        ((spread(Shard(1), 6),) * 3, rw.Causal(), {"sink_logits": torch.zeros(3)}),
        ((spread(Shard(1), 2),) * 3, rw.Causal(), {"terms": rw.ALiBi(torch.ones(1))}),
        ((heads, heads, spread(Shard(1), 3)), rw.Causal(), {}),
        ((batch,) * 3, rw.PerHead([rw.Causal()] * 3 + [rw.from_mask_mod(lambda b, h, q, k: q > k + b)]), {}),
    ]
    texts = []
    for (q, k, v), pattern, options in calls:
        with pytest.raises(rw.RingweaveError) as error:
            rw.attention(q, k, v, pattern, **options)
        texts.append(str(error.value))
    return texts
