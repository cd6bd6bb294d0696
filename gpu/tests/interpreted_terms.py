"""Test score terms and dropout in the Triton kernels, in Triton's interpreter.

Run by test_triton.py in a process that has TRITON_INTERPRET=1 set. What takes the interpreter long is every step of
every program, so the cases are few, drawn to cover each term in each place beside each way to cut work.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.call import Call, Operands
from ringweave.patterns import Pattern
from ringweave.plan import Branch
from ringweave.terms import KINDS
from ringweave_gpu import triton
from ringweave_gpu.triton import launch
from ringweave_gpu.triton.kernels import score_terms as compiled
from tests.dropped import kept, next_seed
from tests.oracle import Inputs
from tests.test_terms import HEADS, check, constant, dense, make, ours

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # Triton before 3.7 with numpy before 2.4
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
HALF, SINGLE = torch.float16, torch.float32


def small(pattern: Pattern, n: int, offset: int = 0) -> Pattern:
    """Return the pattern on tiles of 16."""
    return pattern & rw.BlockTable(torch.ones(-(-(offset + n) // 16), -(-n // 16), dtype=torch.bool), 16)


WINDOW = (rw.SlidingWindow(9) | rw.Sinks(2)) & rw.Causal()
APART = rw.PerHead([rw.Causal(), rw.SlidingWindow(9), rw.Full(), ~rw.Causal()])


@pytest.mark.parametrize(
    ("names", "pattern", "n", "batch", "kv_heads", "dtype", "offset", "p"),
    [
        # one program for four heads
        (("softcap", "bias"), rw.Full(), 16, 2, 1, SINGLE, 0, 0.0),
        (("distance", "softcap", "shared_bias"), WINDOW, 23, 1, 2, SINGLE, 0, 0.0),
        (("alibi", "distance"), rw.Causal(), 16, 1, 4, HALF, 16, 0.0),
        # one list for each head
        (("shared_bias", "alibi"), APART, 16, 1, 4, SINGLE, 0, 0.25),
        (("softcap",), WINDOW, 23, 1, 2, HALF, 0, 0.5),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_formula(
    names: tuple[str, ...], pattern: Pattern, n: int, batch: int, kv_heads: int, dtype: torch.dtype, offset: int,
    p: float, poisoned: None,
) -> None:  # fmt: skip
    x = Inputs.random(n, batch=batch, heads=HEADS, kv_heads=kv_heads, dim=16, value_dim=24, dtype=dtype)
    pattern = small(pattern, n, offset)
    terms = constant(make(names, n, dtype))
    torch.manual_seed(3)
    keep = kept(next_seed(), p, batch, HEADS, range(offset, offset + n), range(n)) if p else None
    got = ours(x, pattern, terms, "triton", dropout=p, q_offset=offset)

    def formula(kind: torch.dtype, order: int) -> dict[str, Tensor]:
        return dense(x, pattern, names, terms, kind, keep=keep, q_offset=offset, order=order)

    check(got, formula, dtype)


def test_positions_and_places_of_views_and_of_elements_of_their_own() -> None:
    """Terms use token positions in views of every third token, with offsets per batch element and of the first key."""
    x, n = Inputs.random(15, 30, batch=2, heads=2, kv_heads=1, dim=8), 30
    q_offset, k_offset = torch.tensor([31, 20]), torch.tensor([16, 0])
    tables = [torch.randn(2, 2 * 7 + 1), torch.randn(1, 2, 15, n)]
    found = []
    for backend in ("triton", "reference"):
        leaves = [y.clone().requires_grad_() for y in (x.q, x.k, x.v)]
        terms = [rw.DistanceBias(tables[0]), rw.Bias(tables[1]), rw.ALiBi([0.25, 0.5])]
        torch.manual_seed(1)
        out = rw.attention(
            *leaves, rw.Strided(3), terms=terms, dropout=0.25, q_offset=q_offset, k_offset=k_offset, backend=backend
        )
        found.append([out, *torch.autograd.grad((out * x.dout).sum(), leaves)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


def test_places_of_a_mixture() -> None:
    """The branches of a mixture read every second or fourth head, query and key, and their terms do too."""
    x, n = Inputs.random(24, heads=4, dim=8), 24
    pattern, tables = rw.LongNet([8, 16], [2, 4], causal=True), [torch.randn(4, 2 * 7 + 1), torch.randn(1, 4, n, n)]
    found = []
    for backend in ("triton", "reference"):
        leaves = [y.clone().requires_grad_() for y in (x.q, x.k, x.v)]
        terms = [rw.DistanceBias(tables[0]), rw.Bias(tables[1]), rw.ALiBi([0.25, 0.5, 0.75, 1.0])]
        torch.manual_seed(1)
        out = rw.attention(*leaves, pattern, terms=terms, dropout=0.25, backend=backend)
        found.append([out, *torch.autograd.grad((out * x.dout).sum(), leaves)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


def test_the_same_pairs_in_tiles_of_any_size() -> None:
    n, x = 40, Inputs.random(40, heads=1, dim=8)
    call = Call.of(x.q, x.k, x.v, rw.Full(), scale=0.25, dropout=2**14)
    record = Operands.of(call, x.q, x.k, x.v, [torch.tensor(77)])
    want = None
    for side in (16, 128):
        branch = Branch(rw.Full(), (0, 1, 1), 1, 0, 0, n, n, 0, 1, tile_size=(side, side))
        out, _ = launch.forward(record, branch, SINGLE)
        torch.testing.assert_close(out, out if want is None else want)
        want = out
    dropped = 1 - kept(77, 0.25, 1, 1, range(n), range(n)).count_nonzero() / n**2
    assert abs(dropped - 0.25) <= 4 * (0.25 * 0.75 / n**2) ** 0.5


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.axes])
def test_each_kind_of_numbers_alone(name: str) -> None:
    """Each kind of term with numbers alone is right, also beside a table."""
    n = 16
    x = Inputs.random(n, heads=HEADS, kv_heads=2, dim=16, value_dim=24)
    names = (KINDS[name].kernel, "distance")
    terms = constant(make(names, n, SINGLE))
    got = ours(x, rw.Causal(), terms, "triton")
    check(got, lambda kind, order: dense(x, rw.Causal(), names, terms, kind, order=order), SINGLE)


def test_a_kind_without_a_formula_is_no_other_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listed kind without a formula raises instead of leaving scores unchanged, and an unlisted kind is refused."""
    x = Inputs.random(16, heads=1, dim=8)
    assert not triton.BACKEND.lacks(frozenset({"Softcap"}), "cpu")
    monkeypatch.setitem(compiled.KINDS, "softcap", 99)
    with pytest.raises(Exception, match="a kind without a formula"):
        rw.attention(x.q, x.k, x.v, terms=rw.Softcap(1.0), backend="triton")
    monkeypatch.delitem(compiled.KINDS, "softcap")
    # another cap makes another program: a backend is asked only once for each
    with pytest.raises(rw.UnsupportedError, match="it computes no Softcap"):
        rw.attention(x.q, x.k, x.v, terms=rw.Softcap(2.0), backend="triton")


def test_scores_that_are_not_finite() -> None:
    """A bias of -inf leaves a row empty whatever the keys contain, and a NaN score stays NaN."""
    n, x = 16, Inputs.random(16, heads=2, kv_heads=1, dim=8)
    table = torch.randn(1, 2, n, n)
    table[:, :, 5], table[:, :, :, 2] = -torch.inf, -torch.inf
    pattern = small(rw.Causal(), n)
    clean = ours(x, pattern, [rw.Bias(table)], "triton")
    assert (clean["out"][:, :, 5] == 0).all()
    assert torch.isneginf(clean["lse"][:, :, 5]).all()
    assert not clean["dq"].isnan().any()
    dead = x.dout.clone()
    dead[:, :, 5] = 0.0
    want = ours(dataclasses.replace(x, dout=dead), pattern, [rw.Bias(table)], "triton")
    x.q[:, :, 5], x.dout[:, :, 5] = 3.0, torch.nan
    got = ours(x, pattern, [rw.Bias(table)], "triton")
    for name in ("dk", "dv"):
        assert torch.equal(got[name], want[name]), name
    x.q[:, :, 5] = torch.nan
    x.dout[:, :, 5] = 1.0
    got = ours(x, small(rw.SlidingWindow(1), n), [rw.Softcap(2.0), rw.DistanceBias(torch.randn(2, 5))], "triton")
    assert got["out"][:, :, 5].isnan().all()
