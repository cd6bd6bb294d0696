"""Compile variants of the Triton kernels ahead of time into Triton's cache, with a process per core.

The variants are those that calls on the device use; compiling them needs no device (see ``compiling.py``).
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
from ringweave.call import Operands
from ringweave.errors import RingweaveError, in_a_line

from ..tune.problem import FORWARD, Problem, RandomBlocks
from ..tune.search import whole
from .compiling import Target, begin, kernels


@dataclass(frozen=True)
class Variant:
    """The kernels of a problem."""

    problem: Problem
    direction: str


def compiled(variant: Variant) -> str | None:
    """Compile a variant's kernels in a prepared process, and return the error if there was one."""
    from ringweave_gpu import triton

    # the plan of a table on a GPU does not read its data; the host plans everything else
    device = "meta" if isinstance(variant.problem.relation, RandomBlocks) else "cpu"
    problem = dataclasses.replace(variant.problem, device=device)
    heads = (problem.heads, problem.key_heads, problem.key_heads, problem.heads)
    q, k, v, dout = (
        torch.empty(problem.batch, each, problem.tokens, problem.head_dim, dtype=problem.dtype, device=device)
        for each in heads
    )
    inputs, branch = Operands(q, k, v, problem.head_dim**-0.5), whole(problem)
    try:
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
        variants: Variants to compile.
        target: Device to compile for.
        processes: Number of processes; by default the number of cores.
    Returns:
        Errors of the variants that failed, and the number of kernels.
    """
    count = max(1, min(len(variants), processes or os.cpu_count() or 1))
    found: set[str] = set()
    failed: dict[Variant, str] = {}
    pending, alone = list(variants), False
    while pending:
        with ProcessPoolExecutor(1 if alone else count, get_context("spawn"), begin, (target,)) as pool:
            # problems are copied, so that a pattern with tensors on a device is not sent to other processes
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
            # variants run one after another here, so the first one without an answer is the cause
            failed[pending.pop(0)] = "the compiler took its process down"
        alone = not alone
    return failed, len(found)
