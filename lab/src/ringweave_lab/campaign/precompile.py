"""Variants of the Triton kernels compiled ahead, in as many processes as there are cores, into Triton's own cache.

What is compiled is what a call on the device asks for, and no device is needed (``compiling.py``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from ringweave.backends.backend import Upstream
from ringweave.backends.triton.launch_config import overriding
from ringweave.call import Operands
from ringweave.errors import RingweaveError, in_a_line
from ringweave.tune.problem import FORWARD, Drawn, Problem
from ringweave.tune.search import whole

from .compiling import Target, begin, kernels


@dataclass(frozen=True)
class Variant:
    """Kernels of a problem."""

    problem: Problem
    direction: str


def compiled(variant: Variant) -> str | None:
    """Compile a variant's kernels in a process that has begun; say what went wrong."""
    from ringweave.backends import triton

    # a table on a GPU is planned without a look at it, anything else by the host
    device = "meta" if isinstance(variant.problem.relation, Drawn) else "cpu"
    problem = dataclasses.replace(variant.problem, device=device)
    heads = (problem.heads, problem.key_heads, problem.key_heads, problem.heads)
    q, k, v, dout = (
        torch.empty(problem.batch, each, problem.tokens, problem.head_dim, dtype=problem.dtype, device=device)
        for each in heads
    )
    inputs, branch = Operands(q, k, v, problem.head_dim**-0.5), whole(problem)
    try:
        with overriding({}):
            out, lse = triton.forward(inputs, branch, problem.dtype)
            if variant.direction != FORWARD:
                upstream = Upstream(dout, lse, triton.delta(dout, out, lse, None), out)
                triton.backward(upstream, inputs, branch, problem.dtype)
    except (RingweaveError, RuntimeError, ValueError, AssertionError) as error:  # the compiler's own
        return in_a_line(error)
    return None


def _in_a_worker(variant: Variant) -> tuple[str | None, set[str]]:
    return compiled(variant), kernels()


def precompile(
    variants: Sequence[Variant], target: Target, processes: int | None = None
) -> tuple[Mapping[Variant, str], int]:
    """Compile variants in a pool of processes.

    Args:
        variants: What.
        target: What for.
        processes: How many; by default as many as cores.
    Returns:
        Why those that failed did, and how many kernels there are.
    """
    count = max(1, min(len(variants), processes or os.cpu_count() or 1))
    found: set[str] = set()
    failed: dict[Variant, str] = {}
    pending, alone = list(variants), False
    while pending:
        with ProcessPoolExecutor(1 if alone else count, get_context("spawn"), begin, (target,)) as pool:
            # anew: a pattern that was made on a device stays here
            anew = (dataclasses.replace(each, problem=dataclasses.replace(each.problem)) for each in pending)
            waiting = [(each, pool.submit(_in_a_worker, each)) for each in anew]
            pending = []
            for each, future in waiting:
                try:
                    reason, names = future.result()
                except BrokenProcessPool:
                    pending.append(each)
                    continue
                found |= names
                if reason is not None:
                    failed[each] = reason
        if pending and alone:
            # one after the other, the first without an answer is the one
            failed[pending.pop(0)] = "the compiler took its process down"
        alone = not alone
    return failed, len(found)
