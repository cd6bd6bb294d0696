"""Keys that are packed from lists: the heads of one query are the rows of a tile (View::chosen)."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import ringweave as rw
from ringweave.backends import cpu
from ringweave.environment import CPU_VARIANT
from ringweave.errors import ShapeError

from ..oracle import Expected, Inputs, exact, results
from .plans import DTYPES, VARIANTS


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("most", [1, 37, 300, 1300])
@pytest.mark.parametrize(("nq", "heads"), [(1, 16), (5, 4)])
def test_packed_keys(nq: int, heads: int, most: int, dtype: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of single keys give the definition's results, and equal bits on any number of threads; NaN elsewhere is not read."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    keys, generator = 1500, torch.Generator().manual_seed(most)
    lists = torch.stack([torch.randperm(keys, generator=generator)[:most] for _ in range(nq)])
    if most > 1:
        lists[torch.rand(lists.shape, generator=generator) < 0.1] = -1
    x = Inputs.random(nq, keys, heads=heads, kv_heads=1, dim=40, value_dim=24, dtype=DTYPES[dtype])
    mask = torch.zeros(nq, keys + 1).scatter_(1, lists.clamp(min=-1) % (keys + 1), 1.0)[:, :keys]
    expected = Expected.of(x, mask.expand(1, heads, nq, keys), 40**-0.5)
    unread = mask.sum(0) == 0
    k, v = x.k.clone(), x.v.clone()
    k[:, :, unread], v[:, :, unread] = torch.nan, torch.nan
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(rw.attention_with_lse(x.q, k, v, rw.Selected(lists), backend="cpu"))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    expected.check({"out": results[0].out, "lse": results[0].lse})


def drawn(rows: tuple[int, ...], keys: int, most: int, seed: int = 0) -> torch.Tensor:
    """Draw lists (*rows, most + 3) with no key, repeated keys and keys in any order; the fourth query has none."""
    generator = torch.Generator().manual_seed(seed)
    lists = torch.rand(*rows, keys, generator=generator).argsort(-1)[..., :most]
    lists = torch.where(torch.rand(lists.shape, generator=generator) < 0.2, -1, lists)
    lists = torch.cat([lists, lists[..., :3].roll(1, -1)], -1)
    lists[..., 3, :] = -1
    return lists


def counts(lists: torch.Tensor, group: int, keys: int) -> torch.Tensor:
    """Return the pairs that lists (..., H, Nq, n) allow, (..., H * group, Nq, keys)."""
    mask = torch.zeros(*lists.shape[:-1], keys + 1).scatter_(-1, lists % (keys + 1), 1.0)[..., :keys]
    return mask.repeat_interleave(group, -3)


def gradients(x: Inputs, pattern: rw.Pattern, **options: object) -> dict[str, torch.Tensor]:
    """Return the results and the gradients of a call."""
    leaves = [each.detach().requires_grad_() for each in (x.q, x.k, x.v)]
    return results(*rw.attention_with_lse(*leaves, pattern, **options), x, leaves)


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether each call of backward is one over packed keys."""
    seen, native = list[bool](), cpu.module()

    def backward(**given: object) -> None:
        seen.append(given["chosen"] is not None)
        native.backward(**given)

    names = {name: getattr(native, name) for name in dir(native)}
    stand_in = SimpleNamespace(**names | {"backward": backward})
    monkeypatch.setattr(cpu, "module", lambda: stand_in)
    return seen


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("group", "most"), [(16, 70), (13, 1), (45, 129)])
def test_packed_keys_have_gradients(
    group: int, most: int, dtype: str, variant: str, backwards: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gradients are the definition's, in any layout and on any number of threads; NaN elsewhere is not read."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    keys, nq, made = 150, 11, {"batch": 2, "kv_heads": 2, "dim": 40, "value_dim": 24}
    lists = drawn((2, 2, nq), keys, most)
    x = Inputs.random(nq, keys, heads=2 * group, dtype=DTYPES[dtype], **made)
    allowed = counts(lists, group, keys)
    expected = Expected.of(x, allowed)
    unread = allowed[:, ::group].sum(2) == 0
    x.k[unread], x.v[unread] = torch.nan, torch.nan
    x.q[:, :, 3], x.dout[:, :, 3] = torch.nan, torch.inf
    x.q, x.v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (x.q, x.v))
    x.k = torch.nn.functional.pad(x.k, (8, 16))[..., 8:-16]
    pattern, threads, found = rw.Selected(lists, heads="kv"), torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(gradients(x, pattern, backend="cpu"))
    finally:
        torch.set_num_threads(threads)
    assert backwards == [True, True]
    for name, one in found[0].items():
        assert torch.equal(one, found[1][name]), name
    expected.check(found[0])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_packed_keys_of_latents(dtype: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are the first channels of the keys, as in latent attention: a view of them, or a copy, with equal bits."""
    monkeypatch.setenv(CPU_VARIANT, variant)
    keys, lists = 90, drawn((5,), 90, 66)
    x = Inputs.random(5, keys, heads=128, kv_heads=1, dim=576, value_dim=512, dtype=DTYPES[dtype])
    x.v = x.k[..., :512]
    expected = Expected.of(x, counts(lists[None], 128, keys), 0.04)
    pattern = rw.Selected(lists)
    found = gradients(x, pattern, scale=0.04, backend="cpu")
    expected.check(found)
    x.v = x.v.clone()
    for name, other in gradients(x, pattern, scale=0.04, backend="cpu").items():
        assert torch.equal(other, found[name]), name


def test_packed_keys_of_a_query_have_their_own_bits(backwards: list[bool]) -> None:
    """dQ of a query depends on no other query; dK and dV of a key do not depend on queries that do not list it."""
    keys, nq, group = 400, 40, 16
    x, lists = Inputs.random(nq, keys, heads=group, kv_heads=1, dim=24), drawn((nq,), keys, 130)
    whole = gradients(x, rw.Selected(lists), backend="cpu")
    part = dataclasses.replace(
        x, q=x.q[:, :, 7:20], dout=x.dout[:, :, 7:20], dlse=x.dlse[:, :, 7:20]
    )  # fmt: skip
    found = gradients(part, rw.Selected(lists[7:20]), backend="cpu")
    for name in ("out", "lse", "dq"):
        assert torch.equal(found[name], whole[name][:, :, 7:20]), name
    others = lists.masked_fill((lists == 5).any(-1, keepdim=True).logical_not(), -1)
    found = gradients(x, rw.Selected(others), backend="cpu")
    assert found["dk"][0, 0, 5].any()
    for name in ("dk", "dv"):
        assert torch.equal(found[name][:, :, 5], whole[name][:, :, 5]), name
    assert all(backwards)


def test_packed_keys_that_every_query_lists(backwards: list[bool]) -> None:
    """The sum of a key over many queries, all of one sign, rounds about as often as torch's."""
    keys, nq, group = 1600, 1600, 16
    lists = torch.cat([torch.zeros(nq, 1), drawn((nq,), keys - 1, 2) + 1], -1).int()
    lists[lists == 0] = -1
    lists[:, 0] = 0
    x = Inputs.random(nq, keys, heads=group, kv_heads=1, dim=8)
    x.q, x.dout, x.dlse = x.q * 0.1, x.dout.abs(), x.dlse * 0
    found = gradients(x, rw.Selected(lists), backend="cpu")
    counted = counts(lists.long()[None], group, keys)
    wanted, leaves = exact(x, counted), x.leaves()
    out = F.scaled_dot_product_attention(*leaves, attn_mask=counted > 0, enable_gqa=True)
    theirs = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, x.dout), strict=True))
    for name in ("dk", "dv"):
        error, of_torch = ((y[name] - wanted[name])[0, 0, 0].norm() for y in (found, theirs))
        assert error < 2 * of_torch, name
    assert backwards == [True]


def test_packed_keys_select_numbers_that_are_not_finite(backwards: list[bool]) -> None:
    """NaN and infinities of each operand reach what the definition says, and nothing else."""
    keys, nq, group = 90, 9, 16
    lists = drawn((nq,), keys, 60)
    places = {"q": (0, 3, 5, 2), "k": (0, 0, 7, 1), "v": (0, 0, 11, 0), "dout": (0, 2, 6, 3), "dlse": (0, 1, 6)}
    for name, at in places.items():
        # weights of a row with an infinite score are all NaN, and in the definition some are 0
        for value in (torch.nan,) if name == "q" else (torch.nan, torch.inf, -torch.inf):
            x = Inputs.random(nq, keys, heads=group, kv_heads=1, dim=16)
            getattr(x, name)[at] = value
            got, wanted = (gradients(x, rw.Selected(lists), backend=each) for each in ("cpu", "reference"))
            for result, one in got.items():
                told = f"{result} with {value} in {name}"
                torch.testing.assert_close(one, wanted[result], equal_nan=True, atol=1e-4, rtol=1e-4, msg=told)
    assert all(backwards)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_packed_keys_of_which_every_score_is_minus_infinity(dtype: str, backwards: list[bool]) -> None:
    """Rows attend nothing then, whatever their queries, values and gradients hold."""
    x, lists = Inputs.random(9, 90, heads=16, kv_heads=1, dim=16, dtype=DTYPES[dtype]), drawn((9,), 90, 60)
    x.k[..., 1], x.q[..., 1] = -torch.inf, torch.rand(9, dtype=x.q.dtype) + 0.1
    x.q[:, :, 5, 1], x.dout[:, :, 7], x.v[:, :, 3] = torch.inf, torch.nan, torch.inf
    found = gradients(x, rw.Selected(lists), backend="cpu")
    assert found.pop("lse").isneginf().all()
    assert not any(each.count_nonzero() for each in found.values())
    assert backwards == [True]


def test_packed_keys_with_a_softcap(backwards: list[bool]) -> None:
    """A formula of each score has its slope in backward."""
    keys, nq, group = 130, 9, 20
    x, lists = Inputs.random(nq, keys, heads=2 * group, kv_heads=2, dim=16, batch=2), drawn((nq,), keys, 80)
    pattern = rw.Selected(lists) & rw.Causal()
    options = {"terms": [rw.Softcap(1.5), rw.Softcap(0.8)], "scale": -0.9, "q_offset": 110}
    got, wanted = (gradients(x, pattern, backend=each, **options) for each in ("cpu", "reference"))
    for name, one in got.items():
        torch.testing.assert_close(one, wanted[name], atol=1e-5, rtol=1e-5)
    assert backwards == [True]


def test_packed_keys_of_no_query(backwards: list[bool]) -> None:
    """Where no query lists a key, all gradients are 0."""
    x = Inputs.random(5, 40, heads=16, kv_heads=1, dim=8)
    found = gradients(x, rw.Selected(torch.full((5, 3), -1)), backend="cpu")
    assert bool(found["lse"].isneginf().all())
    assert not any(found[name].any() for name in ("out", "dq", "dk", "dv"))
    assert backwards == [True]


def test_packed_keys_of_a_wrong_plan() -> None:
    """Backward of packed keys refuses a plan that is not one of lists."""
    group, side = 16, 16
    q, k = torch.randn(1, group, 2, 8), torch.randn(1, 1, 50, 8)
    mask = torch.zeros(1, group, 1, dtype=torch.int32) + 7
    plan = {
        "row_ptr": torch.tensor([[0, 2, 3]], dtype=torch.int32), "col": torch.arange(3, dtype=torch.int32),
        "mask_id": torch.tensor([-1, 0, -1], dtype=torch.int32), "mask_words": mask,
        "row_set": torch.zeros(1, 1, dtype=torch.int32), "q_tile": group, "kv_tile": side,
        "chosen": torch.arange(48, dtype=torch.int32), "group": group,
    }  # fmt: skip
    of_row = torch.randn(1, group, 2)

    def call(**wrong: object) -> None:
        cpu.module().backward(
            q=q, k=k, v=k, dout=q, lse=of_row, delta=of_row, dq=torch.empty_like(q), dk=torch.empty_like(k),
            dv=torch.empty_like(k), scale=1.0, threads=1, variant="", **plan | wrong,
        )  # fmt: skip

    call()
    uneven = mask.clone()
    uneven[0, 3] = 3
    descending = torch.arange(48, dtype=torch.int32)
    descending[10:12] = descending[10:12].flip(0)
    repeated = torch.arange(48, dtype=torch.int32)
    repeated[11] = 10
    # tiles of two words, with 35 keys
    words = torch.tensor([-1, 7], dtype=torch.int32).expand(1, group, 2).contiguous()
    wide = {
        "row_ptr": torch.tensor([[0, 1, 1]], dtype=torch.int32), "col": torch.tensor([0], dtype=torch.int32),
        "mask_id": torch.tensor([0], dtype=torch.int32), "mask_words": words, "kv_tile": 48,
    }  # fmt: skip
    call(**wide)
    places = {"rows": torch.arange(32, dtype=torch.int32), "columns": torch.arange(48, dtype=torch.int32)}
    bias = torch.zeros(1, 1, 32, 48)
    for message, wrong in {
        "mask_words: wanted the first keys of the last": wide | {"mask_words": words.abs()},
        "terms: wanted none with positions": {"terms": [("bias", [], bias)], **places},
        "group: wanted 1 with gradients": {"terms": [("bias", [], bias)], "table_grads": [bias], **places},
        "col": {"col": torch.tensor([0, 2, 1], dtype=torch.int32)},
        "mask_words: wanted the first keys": {"mask_words": uneven},
        "mask_words: wanted the first keys of": {"mask_words": torch.full_like(mask, 5)},
        "mask_words: wanted the first": {"mask_words": torch.full_like(mask, -1)},
        "mask_words: wanted": {"mask_id": torch.tensor([0, -1, -1], dtype=torch.int32)},
        "chosen: wanted the keys of each query in ascending order": {"chosen": descending},
        "chosen: wanted the keys of each query in ascending": {"chosen": repeated},
        "col: wanted whole tiles": {"chosen": torch.arange(47, dtype=torch.int32)},
        "chosen": {"chosen": torch.full((48,), 50, dtype=torch.int32)},
        "drop": {"drop": 5, "seed": 1, "heads": torch.zeros(1, dtype=torch.int32), **places},
    }.items():  # fmt: skip
        with pytest.raises(ShapeError, match=message):
            call(**wrong)
