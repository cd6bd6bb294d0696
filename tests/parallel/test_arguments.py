"""Public callables of ringweave.parallel refuse wrong arguments with a RingweaveError in one form."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ringweave as rw
from ringweave.errors import RingweaveError
from ringweave.parallel import ContextParallel, Placement, Transport, export_chrome_trace, regroup
from ringweave.parallel.planning.cost import Machine
from ringweave_lab.simulation.simulate import simulate

from .processes import Pool

WINDOW = rw.SlidingWindow(100)
NUMBERS: list[Any] = [float("nan"), float("inf"), -float("inf"), -1, "1", None, True, [1], 1j]
INTS: list[Any] = [1.0, float("nan"), "1", None, True, [1], 2**70, -1]


def made(**changes: Any) -> ContextParallel:
    return ContextParallel(**({"mesh": None, "pattern": WINDOW, "seq_len": 256, "heads": (2, 2)} | changes))


def placed(**changes: Any) -> Placement:
    owner = np.array([0, 0, 1, 1])
    fields = {"name": "mine", "tokens": 256, "ranks": 2, "block": 64, "owner": owner, "views": 1}
    return Placement(**(fields | changes))


def simulated(**changes: Any) -> object:
    return simulate(**({"patterns": WINDOW, "tokens": 4096, "ranks": [8]} | changes))


CTX = made()
X = torch.randn(1, 2, 256, 8)
ROWS = torch.ones(CTX.local // 128, 2, dtype=torch.bool)
BLOCKS = made(placement="contiguous")


def regrouped(**changes: Any) -> object:
    return regroup(**({"store": None, "rank": 0, "size": 2} | changes))


def whole(**changes: Any) -> object:
    return CTX.replicated(**({"q": X, "k": X, "v": X, "pattern": WINDOW} | changes))


def shared(**changes: Any) -> object:
    return BLOCKS.share_table(**({"rows": ROWS, "block_size": 128, "version": 1} | changes))


CASES: list[tuple[str, Callable[..., object], list[Any]]] = [
    ("deadline", made, [*NUMBERS, 0, 1e300]),
    ("retries", made, [0.0, "1", None, True, -1, 2**70]),
    ("seq_len", made, [*INTS, 0, "256"]),
    ("heads", made, [2, "22", None, (2,), (2, 2, 2), (2.0, 2), (2, True), (0, 1), (2, 0), (3, 2), (-2, -2), (2**70, 1), (torch.tensor(2), 1)]),
    ("schedule", made, ["star", None, 1, ["allgather"], b"ring"]),
    ("placement", made, ["random", None, 1, ["zigzag"], placed(tokens=200)]),
    ("wire", made, ["fp4", 1, ["int8"], b"int8"]),
    ("tolerance", made, [value for value in NUMBERS if value is not None]),
    ("pattern", made, [None, 3, "Causal()", [], [WINDOW, "x"], X]),
    ("mesh", made, ["cpu", 3, -100, WINDOW, object()]),
    ("deadline", lambda deadline: Transport(None, deadline=deadline), [*NUMBERS, 0]),
    ("opening", lambda opening: Transport(None, opening=opening), [value for value in [*NUMBERS, 0] if value is not None]),
    ("retries", lambda retries: Transport(None, retries=retries), [0.5, -1, True]),
    ("mesh", Transport, ["cpu", 3, -100]),
    ("x", lambda x: CTX.shard(x, 2), [None, 3, np.zeros(256)]),
    ("x.shape[1]", lambda x: CTX.shard(x), [X]),
    ("dim", lambda dim: CTX.shard(X, dim), [4, -5, 2.0, None, True, 2**70, "2"]),
    ("dim", lambda dim: CTX.unshard(X, dim), [4, -5, 2.0, None, True, 2**70, "2"]),
    ("dim", lambda dim: CTX.shard(torch.tensor(1.0), dim), [0]),
    ("x", lambda x: CTX.unshard(x, 2), [None, 3]),
    ("tag", CTX.tagged, [None, 3, b"a"]),
    ("head_dim", lambda head_dim: CTX.explain(head_dim=head_dim), INTS),
    ("itemsize", lambda itemsize: CTX.explain(itemsize=itemsize), INTS),
    ("rows", lambda rows: shared(rows=rows), [None, ROWS[0], ROWS[:1]]),
    ("rows.dtype", lambda rows: shared(rows=rows), [ROWS.float()]),
    ("block_size", lambda block_size: shared(block_size=block_size), [*INTS, 0, 96]),
    ("version", lambda version: shared(version=version), [1.0, "1", None, True, 2**70]),
    ("q", lambda q: whole(q=q), [None, X[0], X[:, :, :100]]),
    ("k", lambda k: whole(k=k), [None, X[0], X[..., :4]]),
    ("k.dtype", lambda k: whole(k=k), [X.double()]),
    ("k", lambda q: whole(q=q), [X[:, :1]]),
    ("q", lambda x: whole(q=x, k=x, v=x), [X[:, :1]]),
    ("k", lambda k: whole(k=k, v=k), [X[..., :4], X[:, :, :100]]),
    ("v", lambda v: whole(v=v), [None, X[0], X[:, :1], X[:, :, :100]]),
    ("v.dtype", lambda v: whole(v=v), [X.double()]),
    ("pattern", lambda pattern: whole(pattern=pattern), [None, "Causal()"]),
    ("fallback", lambda fallback: whole(fallback=fallback), [None, "guess", ["single"]]),
    ("backend", lambda backend: whole(backend=backend), [None, "fast", "reference", ["cpu"]]),
    ("mesh", CTX.rebuild, ["cpu"]),
    ("tokens", lambda tokens: placed(tokens=tokens), [*INTS, 0]),
    ("ranks", lambda ranks: placed(ranks=ranks), [*INTS, 0]),
    ("block", lambda block: placed(block=block), [*INTS, 0]),
    ("views", lambda views: placed(views=views), [*INTS, 0, 3]),
    ("views", lambda owner: placed(owner=np.array(owner), views=2), [[0, 1, 0, 1]]),
    ("owner", lambda owner: placed(owner=owner), [None, [], [0.0, 1.0, 0.0, 1.0], [[0, 1]], [0, 0, 1], [0, 2, 0, 2], [-1, 1] * 2, [0, 1], [0, 0, 1, 2**32 + 1]]),
    ("pattern", lambda patterns: simulated(patterns=patterns), [None, [], "Causal()"]),
    ("tokens", lambda tokens: simulated(tokens=tokens), [*INTS, 0]),
    ("ranks", lambda ranks: simulated(ranks=ranks), [[], "8", 8, None, [0], [8, 1.5], [True], [1000]]),
    ("heads", lambda heads: simulated(heads=heads), [(3, 2), 3, None, "ab", (0, 0)]),
    ("head_dim", lambda head_dim: simulated(head_dim=head_dim), INTS),
    ("itemsize", lambda itemsize: simulated(itemsize=itemsize), INTS),
    ("machine", lambda machine: simulated(machine=machine), ["fast", 3]),
    ("flops", lambda flops: Machine(flops=flops), [*NUMBERS, 0]),
    ("bandwidth", lambda bandwidth: Machine(bandwidth=bandwidth), [*NUMBERS, 0]),
    ("latency", lambda latency: Machine(latency=latency), NUMBERS),
    ("store", lambda store: regrouped(store=store), [None]),
    ("rank", lambda rank: regrouped(rank=rank), [*INTS, 2]),
    ("size", lambda size: regrouped(size=size), [*INTS, 0]),
    ("within", lambda within: regrouped(within=within), [*NUMBERS, 0]),
    ("lost", lambda lost: regrouped(lost=lost), [[2], [-1], [None], ["1"]]),
    ("traces", lambda traces: export_chrome_trace(traces, "a.json"), [[3], [None]]),
    ("trace", lambda traces: export_chrome_trace(traces, "a.json"), [[]]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "values"), CASES, ids=[f"{name}{at}" for at, (name, *_) in enumerate(CASES)])
def test_wrong_arguments_are_refused(name: str, call: Callable[..., object], values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RingweaveError) as error:
            call(**{name: value}) if call is made else call(value)
        text = str(error.value)
        assert re.match(rf"{re.escape(name)}: got .+; wanted .+\. [A-Z].*\.$", text, re.S), text
        assert text.count("; wanted ") == 1


def test_equivalent_arguments_are_accepted() -> None:
    """Numbers of numpy and tensors with one value are accepted; reading a tensor may wait for a GPU."""
    ctx = made(seq_len=np.int64(256), heads=[np.int64(2), np.int32(2)], deadline=np.float32(2), tolerance=0)
    assert (ctx.seq_len, ctx.heads, ctx.transport.deadline) == (256, (2, 2), 2.0)
    assert torch.equal(ctx.shard(X, -2), X)
    assert torch.equal(rw.attention(X, X, X, WINDOW, context=ctx), rw.attention(X, X, X, WINDOW))


def test_a_placement_keeps_its_own_owners() -> None:
    """A placement does not change when the caller later writes to the array that it was made from."""
    owner = np.array([0, 0, 1, 1], np.int32)
    mine = placed(owner=owner)
    before, digest = mine.positions(0).tolist(), mine.digest
    owner[:] = owner[::-1].copy()
    with pytest.raises(ValueError, match="read-only"):
        mine.owner[:] = owner
    assert mine.positions(0).tolist() == before
    assert placed(owner=owner).digest != digest


def test_a_closed_context_computes_nothing_more() -> None:
    ctx = made()
    ctx.close()
    with pytest.raises(
        RingweaveError, match=re.escape("transport: got a call after close(); wanted an open transport.")
    ):
        rw.attention(X, X, X, WINDOW, context=ctx)


def test_one_process_without_distributed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of torch without torch.distributed have its module, and no is_initialized in it."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    x = torch.randn(1, 2, 64, 8)
    context = ContextParallel(None, rw.Causal(), 64, heads=(2, 2))
    torch.testing.assert_close(rw.attention(x, x, x, rw.Causal(), context=context), rw.attention(x, x, x, rw.Causal()))


def test_groups_that_are_gone(pool2: Pool) -> None:
    """A destroyed group, or one without this rank, makes no context, with one rank or with several."""
    for rank, texts in enumerate(pool2.run("tests.parallel.jobs_order:groups_that_are_gone")):
        nobody = "a group that this process is no member of"
        wanted = {"none": "None after destroy_process_group()", "mesh": "a mesh without a group", "others": nobody}
        for name, text in texts.items():
            got = wanted.get(name, "a process group that is destroyed")
            if name == "others" and rank == 0:
                assert text == "made"
                continue
            assert text.startswith(f"mesh: got {got}"), (name, text)
            assert "; wanted a device mesh, a live process group or a Transport. " in text
    pool2.reopen()
