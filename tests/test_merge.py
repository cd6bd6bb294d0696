from __future__ import annotations

import pytest
import torch

import ringweave as rw
from ringweave.backends import cpu
from ringweave.merge import merge_into


def parts(n: int, empty: bool = True) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    outs = [torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(n)]
    lses = [5 * torch.randn(1, 2, 5, dtype=torch.float64) for _ in range(n)]
    if empty:
        lses[0][..., 1] = -torch.inf
        outs[0][..., 1, :] = 0
        for out, lse in zip(outs, lses, strict=True):
            lse[..., 2] = -torch.inf
            out[..., 2, :] = 0
    return outs, lses


def test_merges_disjoint_keys_into_the_whole() -> None:
    q, k, v = (torch.randn(1, 2, 130, 16) for _ in range(3))
    pieces = [rw.SlidingWindow(30), rw.Causal() & ~rw.SlidingWindow(30), ~rw.Causal()]
    results = [rw.attention_with_lse(q, k, v, piece) for piece in pieces]
    got = rw.merge([r.out for r in results], [r.lse for r in results])
    want = rw.attention_with_lse(q, k, v)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)


def test_guarded() -> None:
    outs, lses = parts(3)
    got = rw.merge(outs, lses)
    assert not got.out.isnan().any()
    assert (got.out[..., 2, :] == 0).all()
    assert torch.isneginf(got.lse[..., 2]).all()
    only = rw.merge([outs[1], outs[1]], [lses[1], torch.full_like(lses[1], -torch.inf)])
    torch.testing.assert_close(only.out, outs[1])


def test_associative_and_commutative() -> None:
    outs, lses = parts(3)
    left = rw.merge(*zip(rw.merge(outs[:2], lses[:2]), (outs[2], lses[2]), strict=True))
    right = rw.merge([outs[2], outs[1], outs[0]], [lses[2], lses[1], lses[0]])
    torch.testing.assert_close(left, right)


def test_gradient() -> None:
    outs, lses = parts(3, empty=False)
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    assert torch.autograd.gradcheck(lambda *x: tuple(rw.merge(x[:3], x[3:])), leaves)


def test_gradient_of_empty_rows_is_zero() -> None:
    outs, lses = parts(2)
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    out, _ = rw.merge(leaves[:2], leaves[2:])
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert not any(g.isnan().any() for g in grads)


def test_in_place_agrees() -> None:
    outs, lses = parts(3)
    out, lse = torch.zeros_like(outs[0]), torch.full_like(lses[0], -torch.inf)
    for part, part_lse in zip(outs, lses, strict=True):
        merge_into(out, lse, part, part_lse)
    torch.testing.assert_close((out, lse), tuple(rw.merge(outs, lses)))


@pytest.mark.skipif(cpu.module() is None, reason="torch's functions round vectors and single elements differently")
def test_the_kernel_gives_a_merged_row_the_same_bits_with_any_strides(poisoned: None) -> None:
    """Empty rows, infinite and NaN scores too: as with torch, and by the row alone."""
    out, part = torch.randn(2, 3, 300, 40), torch.randn(2, 3, 300, 40)
    lse, part_lse = 5 * torch.randn(2, 3, 300), 5 * torch.randn(2, 3, 300)
    lse[..., ::7], part_lse[..., ::5] = -torch.inf, -torch.inf
    lse[..., 11], part_lse[..., 12], lse[..., 13] = torch.inf, torch.inf, torch.nan
    out[lse.isneginf()], part[part_lse.isneginf()] = 0.0, 0.0
    want_out, want_lse = out.clone(), lse.clone()
    merge_into(want_out, want_lse, part, part_lse)
    whole_out, whole_lse = out.clone(), lse.clone()
    cpu.merge_into(whole_out, whole_lse, part, part_lse)
    torch.testing.assert_close(whole_out, want_out, rtol=3e-7, atol=3e-7, equal_nan=True)
    torch.testing.assert_close(whole_lse, want_lse, rtol=3e-7, atol=3e-7, equal_nan=True)
    for rows in (slice(3, None, 4), slice(17, 18), slice(1, 290)):
        some_out, some_lse = out.clone(), lse.clone()
        cpu.merge_into(some_out[:, 1:, rows], some_lse[:, 1:, rows], part[:, 1:, rows], part_lse[:, 1:, rows])
        assert torch.equal(some_out[:, 1:, rows].nan_to_num(7.0), whole_out[:, 1:, rows].nan_to_num(7.0))
        assert torch.equal(some_lse[:, 1:, rows].nan_to_num(7.0), whole_lse[:, 1:, rows].nan_to_num(7.0))
        assert torch.equal(some_out[:, 0], out[:, 0])


def test_a_part_that_attends_nothing_adds_nothing_whatever_it_holds() -> None:
    """Other libraries leave NaN or inf in such rows; gradients stay clean too."""
    for bad in (torch.nan, torch.inf):
        outs = [torch.full((1, 2, 4, 8), bad, requires_grad=True), torch.ones(1, 2, 4, 8, requires_grad=True)]
        lses = [torch.full((1, 2, 4), -torch.inf, requires_grad=True), torch.zeros(1, 2, 4, requires_grad=True)]
        merged = rw.merge(outs, lses)
        assert torch.equal(merged.out, torch.ones(1, 2, 4, 8))
        assert torch.equal(merged.lse, torch.zeros(1, 2, 4))
        dead, ones, dead_lse, lse = torch.autograd.grad(merged.out.sum() + merged.lse.sum(), [*outs, *lses])
        for gradient, value in ((dead, 0), (dead_lse, 0), (ones, 1), (lse, 1)):
            assert (gradient == value).all()


def test_nan_is_not_hidden() -> None:
    outs, lses = parts(2, empty=False)
    outs[1][..., 0, :] = torch.nan
    lses[1][..., 0] = torch.nan
    got = rw.merge(outs, lses)
    assert got.out[..., 0, :].isnan().all()
    assert got.lse[..., 0].isnan().all()
