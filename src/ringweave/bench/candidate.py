"""What ``ringweave tune`` tries: a backend, the sides of its tiles, its kernels' blocks; called without the operators.

A candidate for backward is timed behind the forward that auto would take, so that the two choices do not mix.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.backend import Backend, Case, Upstream
from ..ops.dispatch import BACKENDS, refusal
from ..ops.kinds import KernelKind
from ..ops.triton.blocks import Blocks, overriding
from ..plan import Branch
from ..plan.build import default_tile, estimate_tiles
from .peers import Built, Peer
from .workload import Inputs, Workload

#: Sides of tiles that are tried.
SIDES = ((32, 32), (64, 64), (64, 128), (128, 64), (128, 128), (256, 128))
# beyond as many tiles a plan is not made to be tried
_MOST_TILES = 2**22


@dataclass(frozen=True)
class Candidate:
    """One way to compute a branch.

    Attributes:
        backend: Its name.
        tile: Sides of the tiles; None for those that the branch has by itself, or a backend without.
        blocks: Of kernels, where they are not the table's.
    """

    backend: str
    tile: tuple[int, int] | None = None
    blocks: tuple[tuple[KernelKind, Blocks], ...] = ()

    def __str__(self) -> str:
        sides = "" if self.tile is None else f", tiles of {self.tile[0]} x {self.tile[1]}"
        return self.backend + sides + (", measured blocks" if self.blocks else "")

    @property
    def usual(self) -> bool:
        """Whether it is a backend as it is."""
        return self.tile is None and not self.blocks

    def step(self, branch: Branch) -> tuple[Backend, Branch]:
        """The backend, and the branch with its sides."""
        return BACKENDS[self.backend], dataclasses.replace(branch, sides=self.tile)

    def refusal(self, case: Case, branch: Branch) -> str | None:
        """Why it cannot run a case; None where it can."""
        backend, own = self.step(branch)
        return refusal(backend, case, own)

    def peer(self, first: Candidate | None, name: str = "") -> Peer:
        """As what :func:`~ringweave.bench.compare.compare` times: on the workload of one branch.

        Args:
            first: Who computes forward where gradients are asked for; itself where None.
            name: In tables; the candidate's own by default.
        """
        spelled = f"{self}, {self.blocks}" if self.blocks else f"{self}"
        behind = "" if first is None or first == self else f" behind {first}"
        return Peer(
            name or spelled + behind, f"{self}", lambda workload, backward: None,
            lambda workload, inputs: Direct.of(self, first or self, workload),
        )  # fmt: skip


@dataclass(frozen=True)
class Direct(Built):
    """A candidate made ready: the backend's own functions, without operators or autograd."""

    gradients: Callable[[Inputs], tuple[Tensor, ...]] | None = None

    @staticmethod
    def of(candidate: Candidate, first: Candidate, workload: Workload) -> Direct:
        """A candidate on a workload's only branch."""
        branch = whole(workload)
        attend = functools.partial(_forward, candidate, branch)
        gradients = functools.partial(_forward_backward, candidate, first, branch)
        return Direct(lambda q, k, v: attend(q, k, v)[0], workload.pattern, str(candidate), None, gradients)

    def forward_backward(self, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
        """A callable that gives (out, dq, dk, dv)."""
        assert self.gradients is not None
        return functools.partial(self.gradients, Inputs(*(x.detach() for x in inputs)))


def whole(workload: Workload) -> Branch:
    """A workload as one branch in token order."""
    n = workload.tokens
    return Branch(workload.pattern, (0, workload.heads, 1), 1, 0, 0, n, n, 0, workload.batch)


def _forward(candidate: Candidate, branch: Branch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    backend, own = candidate.step(branch)
    with torch.no_grad(), overriding(dict(candidate.blocks)):
        return backend.forward(q, k, v, own, 1 / math.sqrt(q.shape[3]), q.dtype)


def _forward_backward(candidate: Candidate, first: Candidate, branch: Branch, inputs: Inputs) -> tuple[Tensor, ...]:
    q, k, v, dout = inputs
    out, lse = _forward(first, branch, q, k, v)
    backend, own = candidate.step(branch)
    assert backend.backward is not None
    with torch.no_grad(), overriding(dict(candidate.blocks)):
        upstream = Upstream(dout, lse, backend.delta(dout, out, lse, None), out)
        return (out, *backend.backward(upstream, q, k, v, own, 1 / math.sqrt(q.shape[3]), q.dtype))


def sides(branch: Branch, device: str) -> list[tuple[int, int]]:
    """Sides to try beside a branch's own: none much longer than its sequences, none that make too large a plan.

    A block table on a GPU keeps its grid: a plan of other tiles would have to wait for the table.
    """
    if device != "cpu" and branch.pattern.grid() is not None:
        return []
    most = [max(16, 1 << (n - 1).bit_length()) for n in (branch.nq, branch.nk)]
    tiles = estimate_tiles(branch.pattern, branch.nq, branch.nk, heads=branch.head_count, q_offset=branch.q_offset)
    area = tiles * default_tile(branch.nq) * default_tile(branch.nk)
    return [
        each
        for each in SIDES
        if each != branch.tile and each[0] <= most[0] and each[1] <= most[1] and area <= _MOST_TILES * each[0] * each[1]
    ]
