"""The order of tokens, NATTEN's neighbourhoods and Swin's windows equal loops written from their definitions."""

from __future__ import annotations

import itertools
import math
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringweave as rw
from ringweave.backends import cpu
from ringweave.errors import PatternError
from ringweave.plan import Branch, branches

from ..oracle import Inputs
from ..parallel.spread import joined, spread
from ..test_conformance import conforms

BACKENDS = ["dense_batched"] + ["cpu"] * (cpu.module() is not None)


def neighbours(q: int, n: int, window: int, dilation: int, causal: bool) -> set[int]:
    """Return NATTEN's neighbours along one axis."""
    members = [c for c in range(n) if c % dilation == q % dilation]
    place = members.index(q)
    if causal:
        return set(members[max(place - window + 1, 0) : place + 1])
    left, right = window // 2, window // 2 + window % 2 - 1
    begin = max(place - left, 0)
    if place + right >= len(members):
        begin += len(members) - right - place - 1
    return set(members[begin : begin + window])


def in_window(q: int, n: int, size: int, shift: int) -> set[int]:
    bounds = sorted({0, n, *range(shift, n, size)})
    return next(set(range(lo, hi)) for lo, hi in itertools.pairwise(bounds) if lo <= q < hi)


def product(grid: rw.Grid, along: list[list[set[int]]]) -> torch.Tensor:
    """Return the relation of a grid's tokens: pairs that are allowed along every axis."""
    allowed = torch.ones(grid.tokens, grid.tokens, dtype=torch.bool)
    for axis, keys in enumerate(along):
        table = torch.tensor([[k in each for k in range(len(keys))] for each in keys])
        place = grid.positions[:, axis]
        allowed &= table[place][:, place]
    return allowed


@st.composite
def grids(draw: st.DrawFn) -> rw.Grid:
    axes = draw(st.integers(1, 3))
    shape = draw(st.tuples(*[st.integers(1, (200, 20, 8)[axes - 1])] * axes))
    return rw.Grid(shape, draw(st.none() | st.tuples(*[st.integers(1, 9)] * axes)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[rw.GridNeighborhood | rw.GridWindows, torch.Tensor]:
    grid = draw(grids())
    shape = grid.shape
    if draw(st.booleans()):
        window = tuple(draw(st.integers(1, n)) for n in shape)
        dilation = tuple(draw(st.integers(1, n // w)) for n, w in zip(shape, window, strict=True))
        causal = tuple(draw(st.booleans()) for _ in shape)
        options = list(zip(shape, window, dilation, causal, strict=True))
        along = [[neighbours(q, *each) for q in range(each[0])] for each in options]
        return rw.GridNeighborhood(grid, window, dilation, causal), product(grid, along)
    size = tuple(draw(st.integers(1, n + 2)) for n in shape)
    shift = tuple(draw(st.integers(0, each - 1)) for each in size)
    along = [[in_window(q, *each) for q in range(each[0])] for each in zip(shape, size, shift, strict=True)]
    return rw.GridWindows(grid, size, shift), product(grid, along)


@settings(max_examples=40)
@given(cases(), st.sampled_from([None, 16, (32, 16), (16, 64), 128]), st.data())
def test_definition_and_plans(
    case: tuple[rw.GridNeighborhood | rw.GridWindows, torch.Tensor],
    tile: int | tuple[int, int] | None,
    data: st.DataObject,
) -> None:
    pattern, wanted = case
    n = len(wanted)
    assert torch.equal(pattern.to_dense(n)[0, 0], wanted)
    assert torch.equal(pattern.plan(n, tile=tile).to_dense()[0, 0], wanted)
    # in closed form, and in tiles
    assert pattern.density(n) == pytest.approx(float(wanted.double().mean()), abs=1e-12)
    assert pattern.is_causal(n) == (not wanted.triu(1).any())
    begin = data.draw(st.integers(0, n - 1))
    assert torch.equal(pattern.plan(n - begin, n, q_offset=begin, tile=tile).to_dense()[0, 0], wanted[begin:])
    assert pattern.density(n - begin, n, q_offset=begin) == pytest.approx(
        float(wanted[begin:].double().mean()), abs=1e-12
    )
    window = rw.SlidingWindow(40, 3)
    both, other = (~pattern & window).plan(n, tile=tile), (pattern | window).plan(n, tile=tile)
    near = window.to_dense(n)[0, 0]
    assert torch.equal(both.to_dense()[0, 0], ~wanted & near)
    assert torch.equal(other.to_dense()[0, 0], wanted | near)
    assert rw.patterns.parse(pattern.spec) == pattern == pickle.loads(pickle.dumps(pattern))
    assert hash(rw.patterns.rebuild(pattern.spec, ())) == hash(pattern)


@pytest.mark.parametrize(
    ("window", "causal", "wanted"),
    [
        (3, False, [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4], [2, 3, 4]]),
        # an even window has one more key before the query
        (4, False, [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]]),
        (2, False, [[0, 1], [0, 1], [1, 2], [2, 3], [3, 4]]),
        (3, True, [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]),
        (1, False, [[0], [1], [2], [3], [4]]),
    ],
)
def test_neighbours_by_hand(window: int, causal: bool, wanted: list[list[int]]) -> None:
    dense = rw.GridNeighborhood(rw.Grid(5), window, causal=causal).to_dense(5)[0, 0]
    assert [row.nonzero()[:, 0].tolist() for row in dense] == wanted


def test_dilated_neighbours_by_hand() -> None:
    """Windows are shifted within their residue class: of 7 tokens, four are even and three are odd."""
    dense = rw.GridNeighborhood(rw.Grid(7), 3, 2).to_dense(7)[0, 0]
    wanted = [[0, 2, 4], [1, 3, 5], [0, 2, 4], [1, 3, 5], [2, 4, 6], [1, 3, 5], [2, 4, 6]]
    assert [row.nonzero()[:, 0].tolist() for row in dense] == wanted


@pytest.mark.parametrize(("tokens", "window", "dilation"), [(300, 7, 1), (300, 8, 3), (257, 128, 2), (64, 1, 64)])
def test_one_axis_is_the_neighborhood(tokens: int, window: int, dilation: int) -> None:
    pattern, same = (
        rw.GridNeighborhood(rw.Grid(tokens), window, dilation),
        rw.patterns.Neighborhood(window, dilation, tokens=tokens),
    )
    assert torch.equal(pattern.to_dense(tokens), same.to_dense(tokens))
    assert torch.equal(pattern.plan(tokens).to_dense(), same.plan(tokens).to_dense())


def test_a_dilated_axis_is_split_into_strided_views() -> None:
    one, other = rw.GridNeighborhood(rw.Grid(2**15), 64, 16), rw.patterns.Neighborhood(64, 16, tokens=2**15)
    mine, theirs = (branches(pattern, 2**15, 2**15) for pattern in (one, other))
    assert [each.rate for each in mine] == [each.rate for each in theirs] == [16] * 16
    assert [each.pairs() for each in mine] == [each.pairs() for each in theirs]


def swin_mask(height: int, width: int, size: int, shift: int) -> torch.Tensor:
    """Return the mask of a Swin layer as its implementations compute it: roll, cut, number, compare."""
    regions = torch.zeros(height, width)
    cuts = (slice(0, -size), slice(-size, -shift), slice(-shift, None))
    for number, (rows, columns) in enumerate(itertools.product(cuts, cuts)):
        regions[rows, columns] = number
    token = torch.arange(height * width).view(height, width).roll((-shift, -shift), (0, 1))

    def windows(x: torch.Tensor) -> torch.Tensor:
        cut = x.view(height // size, size, width // size, size)
        return cut.transpose(1, 2).reshape(-1, size * size)

    region, tokens = windows(regions), windows(token)
    allowed = torch.zeros(height * width, height * width, dtype=torch.bool)
    for numbers, members in zip(region, tokens, strict=True):
        allowed[members[:, None], members] = numbers[:, None] == numbers
    return allowed


@pytest.mark.parametrize(("shape", "size", "shift"), [((14, 21), 7, 3), ((16, 8), 4, 1), ((12, 12), 4, 2)])
@pytest.mark.parametrize("tile", [None, 4, (1, 8)])
def test_shifted_windows_are_swins(
    shape: tuple[int, int], size: int, shift: int, tile: int | tuple[int, int] | None
) -> None:
    grid = rw.Grid(shape, tile)
    place = grid.flatten(torch.arange(grid.tokens).view(shape), 0)
    wanted = swin_mask(*shape, size, shift)[place][:, place]
    assert torch.equal(rw.GridWindows(grid, size, shift).to_dense(grid.tokens)[0, 0], wanted)


# ---- the order of tokens ---------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(grids())
def test_order(grid: rw.Grid) -> None:
    """The order has every token once, by coordinates within boxes, so tiles of whole boxes are boxes."""
    raster = torch.arange(grid.tokens).view(grid.shape)
    flat = grid.flatten(raster, 0)
    assert grid.positions.dtype == torch.int64
    assert torch.equal(flat, raster[grid.positions.unbind(1)])
    assert torch.equal(flat.sort().values, raster.flatten())
    assert torch.equal(grid.unflatten(flat, 0), raster)
    volume = math.prod(grid.tile)
    for box in range(math.prod(n // side for n, side in zip(grid.shape, grid.tile, strict=True))):
        inside = grid.positions[box * volume : (box + 1) * volume]
        assert torch.equal(inside.amax(0) - inside.amin(0) + 1, torch.tensor(grid.tile))


@pytest.mark.parametrize("shape", [(30,), (13, 9), (8, 8), (5, 6, 7), (4, 4, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.int16])
def test_round_trips(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Flattening and unflattening restores tensors of any strides, with grid axes anywhere."""
    grid, axes = rw.Grid(shape), len(shape)
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(3, 2, *[2 * n for n in shape], 4, generator=generator) * 5).to(dtype)
    stepped = whole[(slice(None), slice(None), *[slice(None, None, 2)] * axes)]
    for x, dim in (
        (stepped, 2),
        (stepped.flip(2), -1 - axes),
        (stepped.movedim(-1, 0), 3),
        (stepped.transpose(0, 1)[:0], 2),
    ):
        flat = grid.flatten(x, dim)
        first = dim % x.ndim
        assert flat.shape == (*x.shape[:first], grid.tokens, *x.shape[first + axes :])
        assert torch.equal(grid.unflatten(flat, first), x)
        assert torch.equal(grid.unflatten(flat, first - flat.ndim), x)
        assert torch.equal(
            flat,
            x.movedim(tuple(range(first, first + axes)), tuple(range(axes)))[grid.positions.unbind(1)].movedim(
                0, first
            ),
        )
    expanded = torch.zeros(1, dtype=dtype).expand(shape)
    assert torch.equal(grid.unflatten(grid.flatten(expanded, 0), 0), expanded)


def test_gradients_and_transforms() -> None:
    grid = rw.Grid((5, 9), (2, 4))
    x = torch.randn(2, 5, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: grid.flatten(x, 1), x)
    assert torch.autograd.gradgradcheck(lambda x: grid.unflatten(grid.flatten(x, 1).sin(), 1), x)
    assert torch.equal(torch.vmap(lambda x: grid.flatten(x, 0))(x), grid.flatten(x, 1))
    weight = torch.randn(2, 45, dtype=torch.float64)
    torch.func.jvp(lambda x: grid.flatten(x, 1) * weight, (x,), (x,))
    assert grid.flatten(torch.empty(5, 9, device="meta"), 0).shape == (45,)


def test_a_grid_is_a_value() -> None:
    grid = rw.Grid((16, 24))
    assert repr(grid) == "Grid((16, 24), (4, 8))"
    assert grid == rw.Grid([16, 24], (4, 8)) == pickle.loads(pickle.dumps(grid)) == rw.Grid(torch.Size([16, 24]))
    assert hash(grid) == hash(rw.Grid((16, 24), [4, 8]))
    assert grid != rw.Grid((16, 24), (8, 4))
    assert rw.Grid((6, 7), 1) == rw.Grid((6, 7), (1, 7))
    assert rw.Grid(np.int64(9)) == rw.Grid((9,))
    with pytest.raises(AttributeError):
        grid.shape = (1, 1)  # type: ignore[misc]
    pattern = rw.GridNeighborhood(grid, 3, causal=(True, False))
    assert repr(pattern) == "GridNeighborhood(Grid((16, 24), (4, 8)), (3, 3), causal=(True, False))"
    assert pattern == rw.GridNeighborhood(grid, [3, 3], (1, 1), [True, False])
    assert repr(rw.GridWindows(grid, (4, 8), 2)) == "GridWindows(Grid((16, 24), (4, 8)), (4, 8), shift=(2, 2))"
    with pytest.raises(PatternError, match="an assignment to window"):
        pattern.window = (1, 1)


@pytest.mark.parametrize(
    ("shape", "box"),
    [((4096,), (128,)), ((100,), (100,)), ((64, 64), (4, 8)), ((16, 32, 32), (2, 4, 4)), ((2, 300), (2, 16)), ((1, 64, 64), (1, 4, 8)), ((3, 3), (2, 2)), ((1, 50), (1, 32)), ((1, 4096), (1, 4096))],
)  # fmt: skip
def test_chosen_boxes(shape: tuple[int, ...], box: tuple[int, ...]) -> None:
    assert rw.Grid(shape).tile == box


# ---- through the library ---------------------------------------------------------------------------------------------

ATTENDED = {
    "image": lambda: rw.GridNeighborhood(rw.Grid((13, 11)), (5, 4)),
    "dilated": lambda: rw.GridNeighborhood(rw.Grid((12, 12), 4), 3, (2, 4)),
    "video": lambda: rw.GridNeighborhood(rw.Grid((4, 6, 7)), (3, 3, 5), causal=(True, False, False)),
    "windows": lambda: rw.GridWindows(rw.Grid((11, 14)), (4, 5), (2, 1)),
    "algebra": lambda: rw.GridNeighborhood(rw.Grid((10, 15)), 3) | rw.Global(3) & ~rw.Causal(),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(ATTENDED))
def test_attention(name: str, backend: str, poisoned: None) -> None:
    pattern = ATTENDED[name]()
    tokens = {"image": 143, "dilated": 144, "video": 168, "windows": 154, "algebra": 150}[name]
    conforms(Inputs.random(tokens, heads=4, kv_heads=2, batch=2), pattern, backend)


def test_compiled_in_one_graph() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grid = rw.Grid(tuple(q.shape[2:4]))
        pattern = rw.GridNeighborhood(grid, (5, 3), causal=(True, False)) | rw.GridWindows(grid, 4, 2)
        q, k, v = (grid.flatten(x, 2) for x in (q, k, v))
        return grid.unflatten(rw.attention(q, k, v, pattern), 2)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    # sizes that change become symbols
    for shape in ((9, 20), (12, 16), (16, 16)):
        leaves = [torch.randn(1, 2, *shape, 8, requires_grad=True) for _ in range(3)]
        mine, theirs = compiled(*leaves), step(*leaves)
        assert torch.equal(mine, theirs)
        for one, other in zip(*(torch.autograd.grad(out.sum(), leaves) for out in (mine, theirs)), strict=True):
            assert torch.equal(one, other)


def test_modes_of_torch_leave_no_trace() -> None:
    """The cached table of boxes is usable by all, even if it was first made under a mode of torch."""
    first, second, third = (rw.GridNeighborhood(rw.Grid((29, n)), 5) for n in (11, 12, 13))
    with torch.device("meta"):
        assert first.plan(29 * 11).device.type == first.grid.positions.device.type == "cpu"
    with torch._subclasses.FakeTensorMode():
        assert second.grid.flatten(torch.zeros(29, 12), 0).shape == (29 * 12,)
        assert second.grid.positions.shape == (29 * 12, 2)
    with torch.inference_mode():
        third.plan(29 * 13)
    for pattern in (first, second, third):
        n = pattern.grid.tokens
        assert torch.equal(pattern.plan(n).to_dense(), pattern.to_dense(n))
        x = torch.randn(1, 1, n, 8, requires_grad=True)
        rw.attention(x, x, x, pattern).sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize(("schedule", "placement"), [("allgather", "zigzag"), ("ring", "auto")])
def test_around_a_ring(schedule: str, placement: str, poisoned: None) -> None:
    pattern = rw.GridNeighborhood(rw.Grid((20, 21)), 5)
    x = Inputs.random(420, heads=2, dim=8)
    got = joined(spread(3, x, pattern, schedule=schedule, placement=placement), 420)
    out = rw.attention(x.q, x.k, x.v, pattern)
    torch.testing.assert_close(got["out"], out)


def test_threads_share_a_grid() -> None:
    """Threads that plan over one grid together get equal plans."""
    found: list[torch.Tensor] = []

    def plan() -> None:
        found.append(rw.GridNeighborhood(rw.Grid((37, 41)), 5).plan(37 * 41).col)

    threads = [threading.Thread(target=plan) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4
    assert all(torch.equal(each, found[0]) for each in found)


# ---- tiles along the order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "window", "most"),
    [((64, 64), 13, 2.5), ((16, 32, 32), (5, 9, 9), 2.2), ((64, 64), 31, 1.3)],
)
def test_tiles_compute_few_pairs(shape: tuple[int, ...], window: int, most: float) -> None:
    """The ratio of computed to allowed pairs is bounded for boxes, and larger for tokens in the order of rows."""

    def ratio(grid: rw.Grid) -> float:
        pattern = rw.GridNeighborhood(grid, window)
        pairs = rw.explain(pattern, grid.tokens, as_dict=True)["pairs"]
        assert pairs["allowed"] == grid.tokens * math.prod(pattern.window)
        return float(pairs["computed"] / pairs["allowed"])

    assert ratio(rw.Grid(shape)) <= most
    assert ratio(rw.Grid(shape, (1,) * (len(shape) - 1) + shape[-1:])) >= 1.6 * ratio(rw.Grid(shape))


def test_windows_of_a_box_are_full_tiles() -> None:
    plan = rw.GridWindows(rw.Grid((32, 32), (4, 8)), (4, 8)).plan(1024)
    assert (plan.nnz, plan.q_tile, plan.mask_words.shape[0]) == (32, 32, 0)


def test_tiles_of_many_pieces() -> None:
    """A tile of more pieces than are compared with those of other tiles is exact."""
    pattern = rw.GridNeighborhood(rw.Grid((150, 2), (2, 1)), (7, 2), causal=(True, False))
    assert torch.equal(pattern.plan(300, tile=128).to_dense(), pattern.to_dense(300))


def test_masks_and_planning_do_not_grow_with_the_grid() -> None:
    """A long video has no more masks than a short one, and its number of tiles grows only with its length."""
    plans = [rw.GridNeighborhood(rw.Grid((t, 32, 32)), 5).plan(t * 1024) for t in (16, 128)]
    assert plans[0].mask_words.shape[0] == plans[1].mask_words.shape[0] < 300
    assert plans[1].nnz < 10 * plans[0].nnz


def test_density_of_a_long_video_takes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Branch, "plan", None)
    grid = rw.Grid((512, 512, 512))
    assert rw.GridNeighborhood(grid, 9).density(grid.tokens) == pytest.approx(9**3 / 512**3, rel=1e-12)
