"""Build plans from dense masks, call the kernel with poisoned outputs, and compare with the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ..oracle import NAMES, Expected, Inputs

_cpu = pytest.importorskip("ringweave._cpu", exc_type=ImportError)

VARIANTS: list[str] = _cpu.variants()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS, COLUMNS = ("row_ptr", "col", "mask_id"), ("col_ptr", "row", "mask_id_t")
PlanArgs = dict[str, Tensor | int]


def plan_of(masks: Tensor, row_set: Tensor, q_tile: int, kv_tile: int, listed: Tensor | None = None) -> PlanArgs:
    """Return the kernel's arguments for masks (G, Nq, Nk); ``listed`` (G, tiles, tiles) may list empty tiles too."""
    _, nq, nk = masks.shape

    def tiled(x: Tensor) -> Tensor:
        x = F.pad(x, (0, -nk % kv_tile, 0, -nq % q_tile))
        return x.view(len(x), x.shape[1] // q_tile, q_tile, -1, kv_tile).transpose(2, 3)

    tiles, inside = tiled(masks), tiled(torch.ones(1, nq, nk, dtype=torch.bool))
    listed = tiles.any(-1).any(-1) if listed is None else listed
    partial = listed & (tiles != inside).any(-1).any(-1)
    index = torch.where(partial, partial.flatten().cumsum(0).view_as(partial) - 1, -1)
    words = F.pad(tiles[partial], (0, -kv_tile % 32)).unflatten(-1, (-1, 32)).long() << torch.arange(32)

    def lists(listed: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts = listed.sum(-1)
        offsets = F.pad(counts.flatten().cumsum(0), (1, 0)).unfold(0, counts.shape[1] + 1, counts.shape[1])
        return offsets.int().contiguous(), listed.nonzero()[:, 2].int(), index[listed].int()

    plan: PlanArgs = dict(zip(ROWS, lists(listed, index), strict=True))
    plan |= zip(COLUMNS, lists(listed.mT, index.mT), strict=True)
    return plan | {
        "mask_words": words.sum(-1).int(),
        "row_set": row_set.int().contiguous(),
        "q_tile": q_tile,
        "kv_tile": kv_tile,
    }


def random_masks(
    groups: int, nq: int, nk: int, q_tile: int, kv_tile: int, density: float = 0.5, seed: int = 0
) -> Tensor:
    """Return masks (G, Nq, Nk) with full, partial and empty tiles; some rows and columns of partial tiles have no pair."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    rows, columns = -(-nq // q_tile), -(-nk // kv_tile)
    tiles = draw(groups, rows, 1, columns, 1) < density
    pairs = draw(groups, rows, q_tile, columns, kv_tile) < 0.5
    pairs &= draw(groups, rows, q_tile, columns, 1) > 0.2
    pairs &= draw(groups, rows, 1, columns, kv_tile) > 0.2
    full = draw(groups, rows, 1, columns, 1) < 0.6
    return (tiles & (full | pairs)).reshape(groups, rows * q_tile, columns * kv_tile)[:, :nq, :nk]


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@dataclass
class Case:
    """Inputs, a plan, and the bounds on errors against the oracle."""

    x: Inputs
    plan: PlanArgs
    scale: float
    mask: Tensor
    expected: Expected | None = None
    below: bool = False  # whether the last forward found a score below the range of float32

    def forward(self, variant: str = "", threads: int = 2, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.x
        out = poison(*x.dout.shape, dtype=x.q.dtype) if out is None else out
        lse = poison(*x.q.shape[:3])
        self.below = _cpu.forward(**self.inputs(), **self.rows(), out=out, lse=lse, threads=threads, variant=variant)
        return out, lse

    def backward(
        self,
        out: Tensor,
        lse: Tensor,
        variant: str = "",
        threads: int = 2,
        dtype: torch.dtype | None = None,
        **options: object,
    ) -> tuple[Tensor, ...]:
        x = self.x
        delta = poison(*lse.shape)
        _cpu.delta(x.dout, out, x.dlse, delta, threads, variant)
        dq, dk, dv = grads = tuple(poison(*t.shape, dtype=dtype or t.dtype) for t in (x.q, x.k, x.v))
        _cpu.backward(
            **self.inputs(), **self.plan, dout=x.dout, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv,
            threads=threads, variant=variant, **options,
        )  # fmt: skip
        return grads

    def run(self, variant: str = "", threads: int = 2, out: Tensor | None = None) -> dict[str, Tensor]:
        """Return all five results."""
        out, lse = self.forward(variant, threads, out)
        return dict(zip(NAMES, (out, lse, *self.backward(out, lse, variant, threads)), strict=True))

    def inputs(self) -> dict[str, Tensor | float]:
        return {"q": self.x.q, "k": self.x.k, "v": self.x.v, "scale": self.scale}

    def rows(self) -> PlanArgs:
        """Return the plan without its columns, which forward does not use."""
        return {name: value for name, value in self.plan.items() if name not in COLUMNS}

    def check(self, variant: str = "", threads: int = 2, out: Tensor | None = None) -> dict[str, Tensor]:
        """Check that errors are at most twice those of torch's own attention, or those of rounding."""
        self.expected = self.expected or Expected.of(self.x, self.mask, self.scale)
        got = self.run(variant, threads, out)
        self.expected.check(got)
        assert not self.below  # padding and masked pairs do not count
        return got


def case(
    nq: int,
    nk: int,
    tiles: tuple[int, int],
    *,
    dtype: str = "fp32",
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    dims: tuple[int, int] = (16, 16),
    groups: int = 1,
    density: float = 0.5,
    scale: float | None = None,
    masks: Tensor | None = None,
    change: Callable[[Tensor], Tensor] = lambda x: x,
) -> Case:
    """Draw a case; ``change`` makes views of its tensors."""
    x = Inputs.random(
        nq, nk, batch=batch, heads=heads, kv_heads=kv_heads, dim=dims[0], value_dim=dims[1], dtype=DTYPES[dtype]
    )
    x = replace(x, q=change(x.q), k=change(x.k), v=change(x.v), dout=change(x.dout))
    masks = random_masks(groups, nq, nk, *tiles, density) if masks is None else masks
    row_set = torch.randint(0, len(masks), (batch, heads), generator=torch.Generator().manual_seed(1))
    plan = plan_of(masks, row_set, *tiles)
    return Case(x, plan, dims[0] ** -0.5 if scale is None else scale, masks[row_set].float())


#: one case for all variants, so that the oracle runs once
shared_case = functools.cache(case)
