"""Test formats on the wire: their size, their accuracy, and that a tolerance holds."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave.parallel import ContextParallel
from ringweave.parallel.execution import wire

from ..oracle import Inputs
from .spread import alone, joined, spread

WINDOW = rw.SlidingWindow(200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", wire.FORMATS)
def test_round_trip(form: str, dtype: torch.dtype) -> None:
    code = wire.code(form)
    x = torch.randn(2, 3, 50, 24).to(dtype)
    x[0, 0, 3] = 0
    x[1] *= 1000
    data = torch.full((wire.nbytes(code, 300, 24, dtype),), 255, dtype=torch.uint8)
    wire.write(data, x, code)
    back = wire.read(data, (2, 3, 50, 24), code, dtype)
    assert back.dtype == dtype
    # half a step of the token's own scale, and bfloat16's eight bits
    top = x.double().abs().amax(-1, keepdim=True)
    allowed = {
        "native": 0 * top,
        "bf16": 2**-8 * x.double().abs(),
        "int8": 0.51 / 127 * top + 2**-8 * top * (dtype.itemsize == 2),
    }
    assert ((back.double() - x.double()).abs() <= allowed[form]).all()


@pytest.mark.parametrize("form", wire.FORMATS)
def test_one_element_of_any_stride_after_an_odd_number_of_bytes(form: str) -> None:
    x = torch.tensor([5.0, 7.0]).view(1, 1, 1, 2)[..., 1::2]
    assert x.is_contiguous()
    assert x.stride(-1) == 2
    code = wire.code(form)
    data = torch.zeros(1 + wire.nbytes(code, 1, 1, x.dtype), dtype=torch.uint8)[1:]
    wire.write(data, x, code)
    torch.testing.assert_close(wire.read(data, (1, 1, 1, 1), code, x.dtype), x)


def test_int8_is_about_half_of_bf16() -> None:
    """G10: int8 takes at most 0.53 of the bytes of bf16 at D = 128, scales included."""
    x = Inputs.random(1024, heads=2, dim=128, dtype=torch.bfloat16)
    native, small = (spread(2, x, WINDOW, wire=form) for form in ("native", "int8"))
    # bytes received by rank 1; rank 0 of a causal window receives only gradients, in float32
    assert 0 < sum(small[1].received) <= 0.53 * sum(native[1].received)
    assert sum(small[0].received) == sum(native[0].received)
    assert small[1].wire.ratio == 1.0
    assert small[0].wire.ratio < 1.0
    assert small[0].wire.messages["int8"] == 1


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
@pytest.mark.parametrize(("form", "bound"), [("bf16", 4e-3), ("int8", 1.5e-2)])
def test_results_err_as_little_as_the_format(form: str, bound: float, schedule: str) -> None:
    x = Inputs.random(1000, heads=2, dim=32)
    exact = joined(spread(4, x, WINDOW, schedule=schedule), 1000)
    shares = spread(4, x, WINDOW, schedule=schedule, wire=form)
    coded = joined(shares, 1000)
    for name, want in exact.items():
        error = (coded[name] - want).norm() / want.norm()
        assert 0 < error <= bound, name
    assert 0 < max(share.wire.worst_error for share in shares) <= bound
    assert max(share.wire.refused for share in shares) == 0


def test_a_tolerance_is_kept_message_by_message() -> None:
    """If a token's one large channel would cost its small ones their digits in int8, its message is sent as it is, and others in int8."""
    x = Inputs.random(1024, heads=1, dim=32)
    for tensor in (x.k, x.v):
        tensor[:, :, :512, 0] *= 1e4
        tensor[:, :, :512, 1:] *= 10
    both = rw.SlidingWindow(600, 600)
    exact = joined(spread(2, x, both), 1024)
    shares = spread(2, x, both, wire="int8", tolerance=0.006)
    # rank 0 has the tokens with outliers; by the norm its relative error is small, so compare what each rank sent
    assert [share.wire.messages["int8"] + share.wire.refused for share in shares] == [1, 1]
    assert all(share.wire.worst_error <= 0.006 for share in shares)
    strict = spread(2, x, both, wire="int8", tolerance=1e-9)
    assert [share.wire.refused for share in strict] == [1, 1]
    for name, want in exact.items():
        assert torch.equal(joined(strict, 1024)[name], want), name


def test_a_message_with_values_that_are_not_finite_is_not_encoded() -> None:
    x = Inputs.random(512, heads=1, dim=8)
    x.k[:, :, 100] = torch.nan
    shares = spread(2, x, rw.SlidingWindow(300, 300), wire="int8", tolerance=0.5)
    assert shares[0].wire.refused == 1
    assert shares[1].wire.refused == 0


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("tolerance", [0.5, None])
def test_a_nan_key_is_never_decoded_to_a_number(name: str, tolerance: float | None) -> None:
    """A NaN key makes NaN rows, also if the sample misses it, if no tolerance is measured, and in an int8 message."""
    x = Inputs.random(512, heads=1, dim=8)
    both = rw.SlidingWindow(300, 300)
    getattr(x, name)[:, :, 101] = torch.nan
    getattr(x, name)[:, :, 103, 2] = torch.inf
    shares = spread(2, x, both, wire="int8", tolerance=tolerance)
    assert shares[0].wire.messages["int8"] == 1
    mine, wanted = (out["out"].isfinite().all(-1) for out in (joined(shares, 512), alone(x, both)))
    assert not (mine & ~wanted).any()


def test_messages_of_odd_lengths_lie_side_by_side() -> None:
    """An encoded message of an odd number of bytes, at the sequence's end, may precede messages that are not encoded."""
    x = Inputs.random(701, heads=1, dim=5)
    # zigzag: the rank before the last has the sequence's end, here of signs, which lose nothing in int8
    for tensor in (x.k, x.v):
        for tokens in (slice(256, 384), slice(640, None)):
            tensor[:, :, tokens] = tensor[:, :, tokens].sign()
    exact = joined(spread(4, x, rw.Full(), placement="zigzag"), 701)
    for schedule in ("allgather", "ring"):
        shares = spread(4, x, rw.Full(), schedule=schedule, placement="zigzag", wire="int8", tolerance=0.002)
        assert [share.wire.refused > 0 for share in shares] == [True, True, False, True]
        for name, want in exact.items():
            torch.testing.assert_close(joined(shares, 701)[name], want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_every_message_is_counted(schedule: str) -> None:
    """Every message is counted, also the ring's large ones, which are sent unpacked."""
    x = Inputs.random(4096, heads=1, dim=64)
    for share in spread(2, x, rw.SlidingWindow(600), schedule=schedule, placement="contiguous"):
        assert share.wire.sent_bytes == share.wire.native_bytes == sum(share.sent) > 2**16


def test_unknown_format() -> None:
    with pytest.raises(UnsupportedError, match="wire: got 'fp4'; wanted one of native, bf16, int8"):
        ContextParallel(None, WINDOW, 512, heads=(1, 1), wire="fp4")
