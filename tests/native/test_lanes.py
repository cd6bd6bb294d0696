"""Lanes of a vector past the valid keys do not count, for few queries over strided views, with terms, at odd rates and lengths.

Panels of a view begin at any key, so kernels load vectors that reach past the last one. What they find there must not
count. ``python -m tests.native.test_lanes`` draws in a process of its own, in memory that the allocator filled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.environment import CPU_VARIANT

from ..oracle import Inputs, check_errors, errors, results
from .plans import DTYPES, VARIANTS

DRAWS = 48


@dataclass
class Draw:
    """A random call over a residue view."""

    x: Inputs
    pattern: rw.Pattern
    terms: list[rw.terms.Term]
    q_offset: int

    @staticmethod
    def of(seed: int) -> Draw:
        """Draw sizes, a relation by residue, and one to four terms in random order."""
        r, generator = Random(seed), torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        rate = r.choice([2, 3, 5, 7, 11, 13, 16, 29])
        pattern = r.choice(
            [
                rw.Dilated(r.randint(1, 40), rate),
                rw.Dilated(r.randint(1, 40), rate) & rw.Causal(),
                rw.Strided(rate),
                rw.Strided(rate) & rw.Causal(),
                (rw.SlidingWindow(r.randint(1, 50)) | rw.Strided(rate)) & rw.Causal(),
                rw.SlidingWindow(r.randint(1, 9), 2) | rw.Dilated(r.randint(1, 9), rate) | rw.Sinks(3),
            ]
        )
        batch, kv_heads = r.choice([(1, 1), (1, 1), (2, 2), (3, 1)])
        heads = kv_heads * r.choice([1, 1, 2, 3])
        nk = r.choice([r.randint(1, 60), r.randint(60, 400), r.randint(400, 1100)])
        nq = min(nk, r.choice([1, 1, 1, 2, 3, 4, r.randint(5, 40)]))
        offset = r.choice([nk - nq, nk - nq, r.randint(0, nk - nq)])
        dim, value_dim = 8 * r.randint(1, 5), 8 * r.randint(1, 5)
        dtype = r.choice(list(DTYPES.values()))
        every = [
            rw.Softcap(r.choice([0.5, 3.0])),
            rw.ALiBi.of_heads(heads),
            rw.DistanceBias(randn(heads, 2 * r.randint(0, 90) + 1).requires_grad_()),
            rw.Bias(randn(r.choice([1, batch]), r.choice([1, heads]), nq, nk).to(dtype).requires_grad_()),
        ]
        inputs = [randn(batch, heads, nq, dim), randn(batch, kv_heads, nk, dim), randn(batch, kv_heads, nk, value_dim)]
        terms = r.sample(every, r.randint(1, 4))
        slopes = randn(batch, heads, nq, value_dim), randn(batch, heads, nq)
        return Draw(Inputs(*(x.to(dtype) for x in inputs), *slopes), pattern, terms, offset)

    def run(self, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return all results and gradients of a backend."""
        leaves, tables = self.x.leaves(dtype), [t for term in self.terms for t in term.tables if t.requires_grad]
        out, lse = rw.attention_with_lse(
            *leaves, self.pattern, q_offset=self.q_offset, terms=self.terms, backend=backend
        )
        return results(out, lse, self.x, leaves, **{f"table {i}": t for i, t in enumerate(tables)})

    def check(self) -> None:
        """Compare the kernel with the reference: it may err twice as much as dense_batched, or a few units."""
        want = self.run("reference", torch.float64)
        theirs = errors(self.run("dense_batched"), want)
        check_errors(self.run("cpu"), want, [theirs], 4 * torch.finfo(self.x.q.dtype).eps)

    def __str__(self) -> str:
        kinds = ", ".join(type(term).__name__ for term in self.terms)
        return f"{self.pattern} with {kinds}, {[tuple(t.shape) for t in self.x.leaves()]}, {self.x.q.dtype}"


@pytest.mark.sampled(3, whole="variant")
@pytest.mark.parametrize("seed", range(DRAWS))
@pytest.mark.parametrize("variant", VARIANTS)
def test_few_queries_over_views(variant: str, seed: int, monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    """Results and gradients of a random call over a view are those of the reference."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    Draw.of(seed).check()


@pytest.mark.skipif(sys.platform != "linux", reason="MALLOC_PERTURB_ is a setting of glibc")
def test_few_queries_in_filled_memory() -> None:
    """Values that the allocator left in a kernel's scratch are neither used nor taken as indices."""
    environment = os.environ | {"MALLOC_PERTURB_": "85"}
    environment.pop(CPU_VARIANT, None)
    command, root = [sys.executable, "-m", __name__], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    last = (done.stdout.splitlines() or ["nothing"])[-1]
    assert done.returncode == 0, f"ended with {done.returncode} at {last}\n{done.stderr[-3000:]}"
    assert last == f"{len(VARIANTS)} x {DRAWS // 3} draws"


if __name__ == "__main__":
    for os.environ[CPU_VARIANT] in VARIANTS:
        for each in range(0, DRAWS, 3):
            drawn = Draw.of(each)
            print(os.environ[CPU_VARIANT], each, drawn, flush=True)
            drawn.check()
    print(f"{len(VARIANTS)} x {DRAWS // 3} draws")
