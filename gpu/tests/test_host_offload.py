"""Keys and values on the host: the same results, each key is copied once, and no read precedes its copy."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import ringweave as rw
from ringweave import errors, torch_ops
from ringweave.backends import BACKENDS
from ringweave.call import Call, Operands
from ringweave.errors import ShapeError, UnsupportedError
from ringweave.plan.tile_size import default_tile_size
from ringweave.program import Program, Returned
from ringweave_gpu import host_offload
from ringweave_gpu.host_offload import HostProgram
from tests import oracle
from tests.backends.test_saved_layouts import CASES, LAYOUTS, gradients, same
from tests.cases import MIXTURES, PATTERNS
from tests.memory.test_oom_retry import RUNGS, short_of
from tests.test_conformance import Wanted

from .late import Late, RaceError

HEADS, KV_HEADS, DIM = 4, 2, 16
TOKEN = KV_HEADS * 2 * DIM * 4  # bytes of a key and a value


@contextlib.contextmanager
def streaming(piece: int = 70 * TOKEN, forgotten: tuple[str, int] | None = None) -> Iterator[list[Late]]:
    """Treat keys and values as a host's, and let only two tiles fit on the device."""
    made: list[Late] = []

    def late(inputs: Operands) -> Late:
        made.append(Late(forgotten))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "hosted", lambda q, k: True)
        patch.setattr(host_offload, "copies_of", late)
        patch.setattr(host_offload, "PIECE", piece)
        yield made
    assert all(each.closed for each in made)


def results(x: oracle.Inputs, pattern: rw.Pattern, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    leaves = x.leaves()
    out, lse = rw.attention_with_lse(*leaves, pattern, on_oom="stream", **options)
    return oracle.results(out, lse, x, leaves)


def random(tokens: int, nk: int | None = None, **of: Any) -> oracle.Inputs:
    return oracle.Inputs.random(tokens, nk, **{"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM} | of)


SOME = [
    "full", "nothing", "sinks", "global", "window_and_dilated", "documents", "keys", "within_documents", "table_per_head",
    "function", "per_head", "longnet_causal", "longnet_partitioned",
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["cpu", "dense_batched"])
@pytest.mark.parametrize("name", SOME)
def test_patterns_against_the_oracle(name: str, backend: str) -> None:
    if backend == "cpu":
        pytest.importorskip("ringweave._cpu", exc_type=ImportError)
    want = Wanted.of(random(150, batch=2), (PATTERNS | MIXTURES)[name](150))
    with streaming() as made:
        dataclasses.replace(want, options=want.options | {"on_oom": "stream"}).check(backend)
    assert [each.sent > 0 for each in made] == [name != "nothing"] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_against_the_oracle(dtype: torch.dtype) -> None:
    want = Wanted.of(random(300, dtype=dtype), PATTERNS["sinks"](300))
    with streaming():
        dataclasses.replace(want, options=want.options | {"on_oom": "stream"}).check("auto")


@pytest.mark.parametrize(("tokens", "keys"), [(300, 300), (300, 150), (150, 300)])
@pytest.mark.parametrize("pattern", [rw.Full(), rw.Causal()], ids=repr)
def test_dense_kernels_get_dense_pieces(pattern: rw.Pattern, tokens: int, keys: int) -> None:
    x = random(tokens, keys)
    want = Wanted.of(x, pattern)
    with streaming() as made:
        dataclasses.replace(want, options=want.options | {"on_oom": "stream"}).check("sdpa")
    pieces = -(-(keys if pattern == rw.Full() else min(tokens, keys)) // default_tile_size(keys))
    assert [each.calls["compute_after"] for each in made] == [pieces, pieces]


def test_a_piece_that_is_all_gives_the_same_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = random(257, dtype=dtype)
        want = results(x, rw.Causal(), backend="dense_batched")
        with streaming(2**30):
            got = results(x, rw.Causal(), backend="dense_batched")
        assert all(torch.equal(got[name], want[name]) for name in ("out", "lse", "dk", "dv")), dtype


# ---- what moves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "tiles"),
    [
        (rw.Causal(), range(8)),
        # queries are the last 100 of 1,024 tokens, in tiles of 128
        (rw.SlidingWindow(100) & rw.Causal(), (6, 7)),
        ((rw.SlidingWindow(100) | rw.Sinks(3)) & rw.Causal(), (0, 6, 7)),
        (rw.Global([300, 700]), (2, 5)),
        (rw.PerHead([rw.Segments(1024), rw.Sinks(1), rw.Sinks(1), rw.Sinks(1)]), range(8)),
        (~rw.Full(), ()),
    ],
    ids=["causal", "window", "sinks", "global", "one head", "nothing"],
)
def test_each_key_that_is_attended_moves_once(pattern: rw.Pattern, tiles: Any) -> None:
    x = random(100, 1024)
    with streaming(2 * 128 * TOKEN) as made:
        got = results(x, pattern, q_offset=924)
    forward, backward = made
    moved = len(tiles) * 128 * TOKEN
    assert (forward.sent, forward.returned) == (moved, 0)
    assert (backward.sent, backward.returned) == (moved, moved)
    # keys that were not copied have no gradient
    still = torch.ones(8, dtype=torch.bool).index_fill(0, torch.tensor(list(tiles), dtype=torch.long), False)
    for name in ("dk", "dv"):
        assert not got[name][:, :, still.repeat_interleave(128)].any()


def test_gradients_return_in_their_own_type() -> None:
    x = random(256, dtype=torch.bfloat16)
    with streaming() as made:
        results(x, rw.Causal())
    # branches that share keys are summed first
    assert made[1].returned == made[1].sent == 256 * TOKEN // 2
    with streaming() as made:
        results(x, rw.LongNet([128, 256], [1, 2]))
    assert made[1].returned == 2 * made[1].sent


# ---- who waits for whom ----------------------------------------------------------------------------------------------


def described(x: oracle.Inputs, pattern: rw.Pattern) -> tuple[Call, Operands]:
    call = Call.of(x.q, x.k, x.v, pattern, scale=DIM**-0.5, backend="dense_batched")
    return call, Operands.of(call, x.q, x.k, x.v)


def both(x: oracle.Inputs, pattern: rw.Pattern) -> tuple[Late, Late]:
    """Run forward and backward without operators, so that every access of PyTorch is seen."""
    call, operands = described(x, pattern)
    with streaming() as made:
        out, lse = HostProgram(call).forward(operands)
        grads = HostProgram(call).backward(operands, Returned(x.dout, x.dlse, out, lse))
    want = results(x, pattern, backend="dense_batched")
    for name, got in zip(oracle.NAMES, (out, lse, *grads), strict=True):
        torch.testing.assert_close(got, want[name], rtol=1e-4, atol=1e-5)
    return made[0], made[1]


@pytest.mark.parametrize("tokens", [40, 120, 400])
@pytest.mark.parametrize("name", ["causal", "longnet_causal"])
def test_nothing_is_used_before_it_is_there(name: str, tokens: int) -> None:
    x = random(tokens)
    forward, backward = both(x, (PATTERNS | MIXTURES)[name](tokens))
    assert forward.calls["compute_after"] == backward.calls["compute_after"] >= 1


def test_every_wait_of_forward_is_needed() -> None:
    x = random(400)
    call, operands = described(x, rw.Causal())
    calls = both(x, rw.Causal())[0].calls
    assert len(calls) == 3
    for kind, count in calls.items():
        for number in range(count):
            with streaming(forgotten=(kind, number)), pytest.raises(RaceError):
                HostProgram(call).forward(operands)


def test_every_wait_for_gradients_is_needed() -> None:
    x = random(400)
    call, operands = described(x, rw.Causal())
    out, lse = Program(call).forward(operands)

    def backward() -> None:
        HostProgram(call).backward(operands, Returned(x.dout, None, out, lse))

    with streaming() as made:
        backward()
    calls, unseen = made[0].calls, []
    for kind, count in calls.items():
        for number in range(count):
            try:
                with streaming(forgotten=(kind, number)):
                    backward()
                unseen.append((kind, number))
            except RaceError:
                pass
    assert calls == {"copy_after": 8, "compute_after": 4, "wait": 6}
    # the third piece and the fourth take memory from which gradients were made that copies have waited for; and who has
    # waited for gradients of the first has waited for the second piece
    assert unseen == [("copy_after", 3), ("copy_after", 5), ("wait", 2)]


def test_an_error_leaves_no_copy_behind() -> None:
    x = random(400)
    before, calls = BACKENDS["dense_batched"], []

    def run(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("stop")
        return before.forward(*args)

    BACKENDS["dense_batched"] = dataclasses.replace(before, forward=run)
    try:
        with streaming() as made, pytest.raises(ValueError, match="stop"):
            rw.attention(x.q, x.k, x.v, rw.Causal(), backend="dense_batched", on_oom="stream")
    finally:
        BACKENDS["dense_batched"] = before
    assert len(made) == 1


# ---- what else a call may be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", RUNGS)
def test_the_other_rungs_stream_too(rung: str) -> None:
    x = random(512)
    pattern = (rw.SlidingWindow(70) | rw.Sinks(3)) & rw.Causal()
    want = results(x, pattern)
    with streaming(100 * TOKEN) as made, short_of(RUNGS[rung]):
        got = results(x, pattern)
    assert len(made) > 2
    for name, error in oracle.errors(got, want).items():
        assert error < 1e-6, name


def test_terms_dropout_offsets_and_sinks() -> None:
    tables = [torch.randn(HEADS, 41, requires_grad=True), torch.randn(1, HEADS, 300, 512, requires_grad=True)]
    terms = [rw.Softcap(20.0), rw.ALiBi(torch.rand(HEADS)), rw.DistanceBias(tables[0]), rw.Bias(tables[1])]
    x, found = random(300, 512, batch=2), []
    for stream in (False, True):
        with streaming() if stream else contextlib.nullcontext():
            torch.manual_seed(5)
            leaves = x.leaves()
            out = rw.attention(
                *leaves, (rw.SlidingWindow(90) | rw.Sinks(130)) & rw.Causal(), terms=terms, dropout=0.25,
                sink_logits=torch.ones(HEADS), q_offset=torch.tensor([200, 250]), k_offset=7, on_oom="stream",
            )  # fmt: skip
            found.append([out, *torch.autograd.grad((out * x.dout).sum(), [*leaves, *tables])])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_keys_in_8_bits_and_in_another_type() -> None:
    x = random(300)
    for policy in (rw.Precision(kv=torch.int8), rw.Precision(compute=torch.bfloat16)):
        want = rw.attention(x.q, x.k, x.v, rw.Causal(), precision=policy)
        with streaming() as made:
            got = rw.attention(x.q, x.k, x.v, rw.Causal(), precision=policy, on_oom="stream")
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-5 if policy.compute is None else 4e-3)
        assert made[0].sent < 300 * TOKEN * 0.6


def test_key_heads_that_serve_unequally_many() -> None:
    """A branch has three of six query heads: two of one key head, and one of another."""
    x = random(200, heads=6, kv_heads=3)
    pattern = rw.LongNet([40, 200], [1, 2], heads="partitioned")
    want = results(x, pattern)
    with streaming() as made:
        got = results(x, pattern)
    assert made[0].calls["compute_after"] > 2
    for name in oracle.NAMES:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learns", ["q", "k", "v", "kv"])
def test_layouts_and_some_gradients(learns: str) -> None:
    """Keys that are transposed, have gaps, or are one head expanded to all."""
    found = []
    for stream in (False, True):
        x = random(150)
        tensors = {
            "q": x.q.transpose(1, 2).contiguous().transpose(1, 2),
            "k": torch.cat([x.k, x.k], -1)[..., ::2],
            "v": x.v[:, :1].expand(-1, KV_HEADS, -1, -1),
        }
        for name in learns:
            tensors[name].requires_grad_()
        with streaming() if stream else contextlib.nullcontext():
            out = rw.attention(*tensors.values(), PATTERNS["sinks"](150), on_oom="stream")
            found.append([out, *torch.autograd.grad((out * x.dout).sum(), [tensors[name] for name in learns])])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_rows_out_of_range_are_as_without() -> None:
    x = random(257)
    x.k[0, 0, 5] = torch.inf
    x.k[0, 1, 200] = 3e38
    x.q[0, 3, 220:] *= 1e3
    want = results(x, rw.Causal())
    with streaming():
        got = results(x, rw.Causal())
    assert all(torch.equal(got[name].isnan(), want[name].isnan()) for name in oracle.NAMES)
    torch.testing.assert_close(got["out"], want["out"], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert want["out"].isnan().any()


def test_keys_that_were_changed_before_backward_are_noticed() -> None:
    x = random(150)
    q, k, v = x.leaves()
    with streaming():
        own = k * 1.0
        out = rw.attention(q, own, v, rw.Causal(), on_oom="stream")
        own.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_keys_that_are_changed_after_the_call_are_not_its_keys() -> None:
    x = random(300)
    want = rw.attention(x.q, x.k, x.v, rw.Causal())
    with streaming():
        k = x.k.clone()
        got = rw.attention(x.q, k, x.v, rw.Causal(), on_oom="stream")
        k.zero_()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_bounds_that_were_written_are_cut_anew() -> None:
    x, stop = random(256, batch=2), torch.tensor([70, 200])
    pattern = rw.KeyPadding(stop)
    with streaming():
        for _ in range(2):
            got = rw.attention(x.q, x.k, x.v, pattern, on_oom="stream")
            want = rw.attention(x.q, x.k, x.v, rw.KeyPadding(stop.tolist()))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            stop += 40


def test_under_transforms() -> None:
    x = random(150, batch=3)
    want = rw.attention(x.q, x.k, x.v, rw.Causal())

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rw.attention(q[None], k[None], v[None], rw.Causal(), on_oom="stream")[0]

    with streaming() as made:
        got = torch.vmap(one)(x.q, x.k, x.v)
        shared = torch.vmap(one, (0, None, None))(x.q, x.k[0], x.v[0])
        of_k = torch.func.grad(lambda k: (one(x.q[0], k, x.v[0]) * x.dout[0]).sum())(x.k[0])
    assert len(made) >= 4
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    alike = rw.attention(x.q, x.k[:1].expand_as(x.k), x.v[:1].expand_as(x.v), rw.Causal())
    torch.testing.assert_close(shared, alike, rtol=1e-4, atol=1e-5)
    leaf = x.k[:1].clone().requires_grad_()
    (rw.attention(x.q[:1], leaf, x.v[:1], rw.Causal()) * x.dout[:1]).sum().backward()
    torch.testing.assert_close(of_k[None], leaf.grad, rtol=1e-4, atol=1e-5)


def test_compiled() -> None:
    x = random(150)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rw.attention(q, k, v, rw.Causal(), on_oom="stream").sin()

    found = []
    for stream in (False, True):
        with streaming() if stream else contextlib.nullcontext([]) as made:
            leaves = x.leaves()
            out = step(*leaves)
            found.append([out, *torch.autograd.grad(out.sum(), leaves)])
        assert len(made) == 2 * stream
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    # the check of devices is traced too
    q, k = torch.empty(1, HEADS, 150, DIM, device="meta"), torch.randn(1, KV_HEADS, 150, DIM)
    assert step(q, k, k).device.type == "meta"


# ---- the allowed cases -----------------------------------------------------------------------------------------------


def test_where_gradients_are_made() -> None:
    """Check the rules with meta tensors in place of a GPU's."""
    q = torch.empty(1, HEADS, 64, DIM, device="meta", requires_grad=True)
    k, v = (torch.randn(1, KV_HEADS, 64, DIM, requires_grad=True) for _ in range(2))
    out, lse = rw.attention_with_lse(q, k, v, rw.Causal(), on_oom="stream")
    assert (out.device.type, lse.device.type) == ("meta", "meta")
    grads = torch.autograd.grad(out.sum() + lse.sum(), [q, k, v])
    assert [grad.device.type for grad in grads] == ["meta", "cpu", "cpu"]


def test_unsupported_calls_are_refused() -> None:
    q, k = torch.empty(1, HEADS, 64, DIM, device="meta"), torch.randn(1, KV_HEADS, 64, DIM)
    for on_oom in ("degrade", "raise"):
        with pytest.raises(ShapeError, match="k.device: got cpu; wanted meta, as q. .*on_oom='stream'"):
            rw.attention(q, k, k, on_oom=on_oom)
    other = torch.empty_like(k, device="meta")
    with pytest.raises(ShapeError, match="k.device: got cpu; wanted meta"):
        rw.attention(q, k, other, on_oom="stream")
    with pytest.raises(ShapeError, match="v.device: got cpu; wanted meta"):
        rw.attention(q, other, k, on_oom="stream")
    with pytest.raises(ShapeError, match="k.device: got meta; wanted cpu"):
        rw.attention(k, other, other, on_oom="stream")
    context = rw.ContextParallel(None, rw.Causal(), 64, heads=(HEADS, KV_HEADS))
    with pytest.raises(UnsupportedError, match="on_oom: got 'stream' where ranks share the call"):
        rw.attention(torch.randn(1, HEADS, 64, DIM), k, k, rw.Causal(), context=context, on_oom="stream")
    # the reference backend cannot compute parts of a call
    x = random(64)
    for pattern in (rw.Full(), rw.SlidingWindow(9)):
        with streaming(), pytest.raises(UnsupportedError, match="backend: got 'reference'; wanted .* parts of a call"):
            rw.attention(x.q, x.k, x.v, pattern, backend="reference", on_oom="stream")


@pytest.mark.parametrize("name", CASES)
def test_saved_tensors_in_another_layout(name: str) -> None:
    """Gradients are right if hooks return saved tensors in another layout."""
    with streaming():
        want = gradients(name, contextlib.nullcontext(), on_oom="stream")
        for layout in LAYOUTS.values():
            same(gradients(name, saved_tensors_hooks(lambda x: x, layout), on_oom="stream"), want)


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    x = random(150)
    errors.WARNED.clear()
    with streaming(2**26), caplog.at_level(logging.WARNING, "ringweave"):
        for _ in range(2):
            results(x, rw.Causal())
    begins = "keys and values are on the host: attention copies them"
    assert [record.message for record in caplog.records] == [
        f"{begins}, forward in pieces of 64 MiB to cpu (the same result; cost: each key that a query attends is copied once)",
        f"{begins}, backward in pieces of 64 MiB to cpu (the same result; cost: each key that a query attends is copied once more, and its gradients back)",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", ["causal", "sinks", "documents", "per_head", "longnet_causal"])
def test_on_a_gpu(name: str, pinned: bool) -> None:
    """Many pieces in sequence, on a stream other than the default, against keys on the device."""
    tokens = 4096
    x, pattern = random(tokens, dim=64, dtype=torch.bfloat16), (PATTERNS | MIXTURES)[name](tokens)
    want = results(x.to("cuda"), pattern)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with pytest.MonkeyPatch.context() as patch, torch.cuda.stream(side):
        patch.setattr(host_offload, "PIECE", 2**18)
        q, k, v = (x.q.cuda(), *(y.pin_memory() if pinned else y for y in (x.k, x.v)))
        for _ in range(3):
            leaves = [y.detach().requires_grad_() for y in (q, k, v)]
            out, lse = rw.attention_with_lse(*leaves, pattern, on_oom="stream")
            got = oracle.results(out, lse, dataclasses.replace(x, dout=x.dout.cuda(), dlse=x.dlse.cuda()), leaves)
            assert [got[grad].device.type for grad in ("dq", "dk", "dv")] == ["cuda", "cpu", "cpu"]
            side.synchronize()
            got = {each: value.cpu() for each, value in got.items()}
            for each, error in oracle.errors(got, {each: y.cpu() for each, y in want.items()}).items():
                assert error < 1e-2, each


@pytest.mark.gpu
def test_on_a_gpu_with_less_room_than_the_keys_take() -> None:
    """2 GiB of keys and values need 512 MiB of device memory besides the results."""
    q = torch.randn(1, 2, 1024, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, 2, 2**21, 128, dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = rw.attention(q, k, v, on_oom="stream")
    assert torch.cuda.max_memory_allocated() - before < 2**29
    assert out.isfinite().all()
