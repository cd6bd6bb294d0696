"""The heads of a group as the rows of a query's tile: read and written in place, with the bits of copied rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.errors import ShapeError

from .plans import DTYPES, VARIANTS, PlanArgs, _cpu, plan_of

FORWARD, SIZES = ("row_ptr", "col", "mask_id", "mask_words", "row_set", "q_tile", "kv_tile"), (2, 2, 5, 7, 70)


def rows(x: Tensor, group: int) -> Tensor:
    """Copy (B, Hkv * group, N, ...) to (B, Hkv, N * group, ...)."""
    return x.unflatten(1, (-1, group)).transpose(2, 3).flatten(2, 3).contiguous()


def heads(x: Tensor, group: int) -> Tensor:
    """Undo ``rows``."""
    return x.unflatten(2, (-1, group)).transpose(2, 3).flatten(1, 2).contiguous()


def laid_out(x: Tensor, order: str) -> Tensor:
    """Return a tensor (B, H, N, ...) with tokens before heads, with gaps, or as it is."""
    if order == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "gaps":
        wide = x.new_full((x.shape[0], x.shape[1] + 1, x.shape[2] + 3, *x.shape[3:]), torch.nan)
        part = wide[:, 1:, 2:-1]
        return part.copy_(x)
    return x.clone()


def bits(x: Tensor) -> Tensor:
    """Return the bits as numbers, which are equal for NaN too."""
    return x.view(torch.int32 if x.itemsize == 4 else torch.int16)


def plan(group: int) -> PlanArgs:
    """Return the plan of random lists of tiles for each query; some are empty, and some tiles are partial."""
    batch, kv_heads, _, nq, nk = SIZES
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(batch * kv_heads, nq, 1, 5, 1, generator=generator) < 0.5
    density = torch.tensor([1, 0.5, 1, 0.3, 1])[:, None]
    masks = masks & (torch.rand(batch * kv_heads, nq, 1, 5, 16, generator=generator) < density)
    masks[:, 3] = False
    masks = masks.expand(-1, -1, group, -1, -1).reshape(batch * kv_heads, nq * group, 80)[..., :nk]
    return plan_of(masks, torch.arange(batch * kv_heads).view(batch, kv_heads), group, 16)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("group", [1, 2, 3, 16, 40])
def test_bits_of_copied_rows(group: int, dtype: str, variant: str) -> None:
    """Forward and backward, in any layout of inputs and results; memory between the rows is not written."""
    batch, kv_heads, _, nq, nk = SIZES
    kind, made, options = DTYPES[dtype], plan(group), {"scale": 0.3, "threads": 2, "variant": variant}
    sizes = (kv_heads * group, nq), (kv_heads, nk)
    q, k = (torch.randn(batch, *size, 40).to(kind) for size in sizes)
    dout, v = (torch.randn(batch, *size, 24).to(kind) for size in sizes)
    q[0, 0, 1], v[0, 0, 5] = torch.nan, torch.inf

    def run(order: str, apart: bool) -> dict[str, Tensor]:
        def given(x: Tensor) -> Tensor:
            return rows(x, group) if apart else laid_out(x, order)

        def empty(width: int | None, kind: torch.dtype) -> Tensor:
            x = torch.full((batch, kv_heads * group, nq, *([] if width is None else [width])), torch.nan, dtype=kind)
            return given(x)

        more: dict[str, Any] = {} if apart else {"group": group}
        out, lse = empty(24, kind), empty(None, torch.float32)
        forward = {name: made[name] for name in FORWARD}
        _cpu.forward(q=given(q), k=k, v=v, out=out, lse=lse, **forward, **more, **options)
        delta = heads(lse, group) if apart else lse
        delta = given(torch.where(delta.isfinite(), delta.sin(), 0.0))
        dq, dk, dv = empty(40, torch.float32), k.new_full(k.shape, torch.nan), v.new_full(v.shape, torch.nan)
        _cpu.backward(
            q=given(q), k=k, v=v, dout=given(dout), lse=lse, delta=delta, dq=dq, dk=dk, dv=dv, **made, **more, **options
        )  # fmt: skip
        found = {"out": out, "lse": lse, "dq": dq}
        if order == "gaps" and not apart:
            assert all(x._base is not None and x._base[:, 0].isnan().all() for x in found.values())
        return {name: heads(x, group) if apart else x for name, x in found.items()} | {"dk": dk, "dv": dv}

    wanted = run("", True)
    assert wanted["out"][1:].isfinite().any()
    assert bool((wanted["lse"] == -torch.inf).any())
    for order in ("heads first", "tokens first", "gaps"):
        for name, got in run(order, False).items():
            assert torch.equal(bits(got), bits(wanted[name])), name


def test_a_group_fits_its_plan() -> None:
    group, made = 4, plan(4)
    forward = {name: made[name] for name in FORWARD}
    batch, kv_heads, _, nq, nk = SIZES

    def call(group: int, heads: int = kv_heads * 4, **more: Any) -> None:
        q, k = torch.randn(batch, heads, nq, 16), torch.randn(batch, kv_heads, nk, 16)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
        _cpu.forward(
            q=q, k=k, v=k, out=out, lse=lse, scale=1.0, threads=1, variant="", group=group, **forward | more
        )  # fmt: skip

    call(group)
    for wrong in (0, -4, 3, 16):
        with pytest.raises(ShapeError, match="k: its number of heads must divide that of q"):
            call(wrong)
    with pytest.raises(ShapeError, match="group: wanted the rows of a query tile, 4"):
        call(2)
    with pytest.raises(ShapeError, match="q_tile"):
        call(group, q_tile=300)
