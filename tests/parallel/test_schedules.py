"""Both schedules agree with the float64 oracle and with one device, on 1 to 8 ranks."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch

import ringweave as rw
from ringweave.backends import cpu

from ..cases import MIXTURES, PATTERNS
from ..oracle import NAMES, Expected, Inputs, errors, exact, rounding
from .spread import alone, call, joined, spread
from .threads import run

EVERYTHING = PATTERNS | MIXTURES
#: (ranks, placement, ranks per node)
GATHERED = [(4, "zigzag", None), (4, "residue", None), (8, "striped", 4)]
AROUND = [(3, "auto", None), (4, "zigzag", None), (4, "residue", None)]


class OneDevice(NamedTuple):
    """The float64 results of a call; the ranks' errors may be twice one device's own, or those of rounding."""

    x: Inputs
    pattern: rw.Pattern
    expected: Expected

    @staticmethod
    def of(x: Inputs, pattern: rw.Pattern) -> OneDevice:
        counts = pattern.to_dense(x.q.shape[2], heads=x.q.shape[1], batch=x.q.shape[0])
        want = exact(x, counts)
        return OneDevice(x, pattern, Expected(want, errors(alone(x, pattern), want), rounding(x, counts, want)))

    def check(self, got: dict[str, torch.Tensor]) -> None:
        self.expected.check(got)


@functools.cache
def one_device(name: str, tokens: int, **sizes: Any) -> OneDevice:
    """Return one device's results for inputs that all placements receive in turn: the oracle takes as much time as the ranks."""
    return OneDevice.of(Inputs.random(tokens, heads=4, dim=8, **sizes), EVERYTHING[name](tokens))


@pytest.mark.sampled
@pytest.mark.parametrize("name", list(EVERYTHING))
@pytest.mark.parametrize(
    ("schedule", "place"), [*(("allgather", place) for place in GATHERED), *(("ring", place) for place in AROUND)]
)
def test_every_pattern(name: str, schedule: str, place: tuple[int, str, int | None], poisoned: None) -> None:
    ranks, placement, per_node = place
    one = one_device(name, 333, kv_heads=2, batch=2)
    options = {"schedule": schedule, "placement": placement}
    if placement == "residue" and name in ("longnet_partitioned", "table"):
        options["placement"] = "striped"
    one.check(joined(spread(ranks, one.x, one.pattern, per_node, **options), 333))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 17, 700])
@pytest.mark.parametrize("name", ["sinks", "per_head", "longnet_causal", "global"])
@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_lengths_and_types(schedule: str, name: str, tokens: int, dtype: torch.dtype, poisoned: None) -> None:
    """Results are right for all lengths and dtypes, also on ranks with nothing but padding."""
    one = one_device(name, tokens, kv_heads=1, value_dim=16, dtype=dtype)
    one.check(joined(spread(4, one.x, one.pattern, schedule=schedule), tokens))


@pytest.mark.skipif(
    cpu.module() is None, reason="batched products of another shape round differently: native kernel only"
)
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(EVERYTHING))
def test_forward_bits(name: str, dtype: torch.dtype, poisoned: None) -> None:
    """Forward has the bits of one device on 1 to 8 ranks, and backward repeats its bits from run to run.

    Lists that query heads share are an exception: docs/numerics.md says so.
    """
    pattern = EVERYTHING[name](1300)
    x = Inputs.random(1300, heads=4, kv_heads=4 if "Selected" in pattern.spec else 2, dim=16, dtype=dtype)
    one = alone(x, pattern)
    places = [(ranks, "auto", None) for ranks in (1, 2, 8)]
    places += [(3, "zigzag", None), (4, "zigzag", None), (4, "striped", 2)]
    for ranks, placement, per_node in places:
        got = joined(spread(ranks, x, pattern, per_node, schedule="allgather", placement=placement), 1300)
        for result in ("out", "lse"):
            assert torch.equal(got[result], one[result]), f"{result} on {ranks} ranks, {placement}"
    again = joined(spread(4, x, pattern, 2, schedule="allgather", placement="striped"), 1300)
    for result in NAMES:
        assert torch.equal(got[result], again[result]), f"{result} from run to run"


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_infinite_scores(schedule: str) -> None:
    """A row with an infinite score is NaN, and so are the gradients that its weights reach, as on one device."""
    x = Inputs.random(256, heads=1, dim=8)
    x.q[:, :, 10] = x.k[:, :, 5] = 1e30
    pattern = rw.Causal()
    got, one = joined(spread(2, x, pattern, schedule=schedule, placement="contiguous"), 256), alone(x, pattern)
    for name in NAMES:
        assert torch.equal(got[name].isnan(), one[name].isnan()), name
    assert one["dv"].isnan().any()


def test_queries_move_to_many_keys(poisoned: None) -> None:
    """Queries of global rows move: the ring lets the ranks with their keys compute them, with fewer bytes and equal results."""
    x = Inputs.random(4096, heads=1, dim=16)
    pattern = rw.SlidingWindow(256) | rw.Global(128)
    around = spread(4, x, pattern, schedule="ring", placement="contiguous")
    gathered = spread(4, x, pattern, schedule="allgather", placement="contiguous")
    # the float64 oracle of so many pairs takes nine seconds
    torch.testing.assert_close(joined(around, 4096), alone(x, pattern), atol=1e-4, rtol=1e-4)
    assert max(sum(share.received) for share in around) < 0.7 * max(sum(share.received) for share in gathered)


def test_backward_without_slopes_of_one_result() -> None:
    """A rank with a loss that does not depend on out, or on lse, still sends the others their gradients."""
    x = Inputs.random(200, heads=2, dim=8)
    x.dout.zero_()
    pattern = rw.Causal()
    got = joined(spread(2, x, pattern), 200)
    OneDevice.of(x, pattern).check(got)


def test_no_view_holds_a_token(poisoned: None) -> None:
    """A mixture with an offset past the last token computes nothing on any rank."""
    x = Inputs.random(3, heads=2, dim=8)
    pattern = rw.LongNet([64], [8], offset=7)
    for schedule in ("allgather", "ring"):
        got = joined(spread(2, x, pattern, schedule=schedule), 3)
        assert (got["out"] == 0).all()
        assert torch.isneginf(got["lse"]).all()
        assert all((got[name] == 0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("backend", ["auto", "dense_batched"])
@pytest.mark.parametrize("tokens", [500, 333])
def test_a_tile_in_pieces_ends_with_the_sequence(tokens: int, backend: str) -> None:
    """A strided view shorter than a tile is spread over all ranks, and no rank counts keys past its end."""
    x = Inputs.random(tokens, heads=4, kv_heads=2, dim=8)
    pattern = rw.LongNet([256, 1024], [1, 4])
    options = {"schedule": "ring", "placement": "contiguous"}
    shares = run(4, call, x, pattern, options, None, backend)
    OneDevice.of(x, pattern).check(joined(shares, tokens))


@pytest.mark.parametrize("pattern", [rw.Full(), rw.Causal()], ids=repr)
@pytest.mark.parametrize("tokens", [96, 195, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dense_calls_with_tiles_of_several_ranks(tokens: int, pattern: rw.Pattern, dtype: torch.dtype) -> None:
    """A query of another rank in a shared tile has an lse of -inf, and gives no gradient to a key."""
    x = Inputs.random(tokens, heads=2, dim=8, dtype=dtype)
    torch.testing.assert_close(joined(spread(3, x, pattern, schedule="allgather"), tokens), alone(x, pattern))
