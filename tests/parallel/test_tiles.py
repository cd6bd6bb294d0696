"""A ring keeps the tiles of length and pattern, whatever tile sizes a rank's tuning file has measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import ringweave as rw
from ringweave import program
from ringweave.backends import cpu, tuning, tuning_keys
from ringweave.call import Call
from ringweave.parallel import ContextParallel, Transport
from ringweave.parallel.planning.placement import NAMED
from ringweave.parallel.schedules import Schedules
from ringweave.plan import branches
from ringweave_lab.tune.answers import write_entries

from ..oracle import Inputs
from .threads import run

PATTERN, N = rw.SlidingWindow(300) & rw.Causal() | rw.Sinks(7) & rw.Causal(), 2048
CASE = Call(1, 2, 1, N, N, 16, 16, torch.float32, "cpu", pattern=PATTERN)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a file with tiles of 32 x 64 for the call on one device, and for a rank's share of it."""
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))
    (branch,) = branches(PATTERN, N, N, heads=2)
    name = "dense_batched" if cpu.module() is None else "cpu"
    entries = []
    for needs_grad in (False, True):
        case = dataclasses.replace(CASE, needs_grad=needs_grad)
        for length in (N // 2, N):
            of = dataclasses.replace(branch, nq=length)
            entries += [
                {"kind": tuning_keys.call_key(case, of), "density": density, "backend": name, "tile": [32, 64]}
                for density in range(8)
            ]
    write_entries(entries)


def test_a_rank_computes_the_tiles_of_length_and_pattern(measured: None) -> None:
    """On one device auto uses the measured tiles; the plan that ranks agree on does not."""
    ((alone, _),) = program.compiled(CASE)
    assert alone.tile == (32, 64)
    placement = NAMED["contiguous"](N, 2, 128)
    (demand,) = Schedules(placement, (2, 1), 0, "allgather").demands(PATTERN)
    assert (demand.plan.q_tile, demand.plan.kv_tile) == (128, 128)
    for part in Schedules(placement, (2, 1), 0, "allgather").of(PATTERN).stages[0].own.values():
        assert part.branch.tile == (128, 128)


def test_ranks_agree_whatever_their_stores_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: None) -> None:
    """The hash that every exchange compares depends on plan and placement only."""
    placement = NAMED["contiguous"](N, 2, 128)
    header = Schedules(placement, (2, 1), 0, "allgather").of(PATTERN).header
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "empty"))
    tuning.refresh()
    assert program.compiled(CASE)[0][0].tile == (128, 128)
    assert Schedules(placement, (2, 1), 0, "allgather").of(PATTERN).header == header


@pytest.mark.skipif(cpu.module() is None, reason="the bits of one device are the native kernel's promise")
@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_the_bits_are_those_of_the_named_kernel_on_one_device(measured: None, backend: str) -> None:
    x = Inputs.random(N, heads=2, kv_heads=1, dim=16)

    def job(transport: Transport) -> torch.Tensor:
        ctx = ContextParallel(transport, PATTERN, N, heads=(2, 1), schedule="allgather", placement="contiguous")
        q, k, v = (ctx.shard(t, 2) for t in (x.q, x.k, x.v))
        return ctx.unshard(rw.attention(q, k, v, PATTERN, context=ctx, backend=backend), 2)

    named = rw.attention(x.q, x.k, x.v, PATTERN, backend="cpu")
    for out in run(2, job):
        assert torch.equal(out, named)
    torch.testing.assert_close(rw.attention(x.q, x.k, x.v, PATTERN), named)
