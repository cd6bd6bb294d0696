"""The binding refuses wrong arguments by name, and plans with corrupt numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringweave.errors import ShapeError, UnsupportedError

from .plans import COLUMNS, ROWS, Case, _cpu, case

#: Arguments of only one of forward and backward.
FORWARD, BACKWARD = ("out",), ("dout", "delta", "dq", "dk", "dv", *COLUMNS)


@pytest.fixture(scope="module")
def good() -> dict[str, object]:
    return arguments(case(100, 90, (32, 16), batch=2, heads=4, dims=(16, 24), groups=2))


def arguments(each: Case) -> dict[str, object]:
    x = each.x
    rows = torch.zeros(x.q.shape[:3])
    grads = {name: torch.empty_like(t) for name, t in (("dq", x.q), ("dk", x.k), ("dv", x.v), ("out", x.dout))}
    rest = {"lse": rows, "delta": rows.clone(), "scale": 0.25, "threads": 2, "variant": ""}
    return {"q": x.q, "k": x.k, "v": x.v, "dout": x.dout, **each.plan, **grads, **rest}


def call(args: dict[str, object]) -> None:
    _cpu.forward(**{name: value for name, value in args.items() if name not in BACKWARD})
    _cpu.backward(**{name: value for name, value in args.items() if name not in FORWARD})


def test_accepts(good: dict[str, object]) -> None:
    call(good)


CHANGES: list[tuple[str, str, Callable[[Tensor], object]]] = [
    ("q", "k|q", lambda x: x[:, :, :, :15]),
    ("q", "k|q", lambda x: x[:, :3]),
    ("q", "q", lambda x: x[0]),
    ("q", "q", lambda x: x.double()),
    ("q", "q", lambda x: x[:, :, :0]),
    ("k", "k", lambda x: x[:, :, :, :8]),
    ("k", "k", lambda x: x.bfloat16()),
    ("k", "k", lambda x: x[:1]),
    ("k", "k", lambda x: x.mT.contiguous().mT),
    ("v", "v", lambda x: x[:, :, :50]),
    ("v", "v", lambda x: x.half()),
    ("v", "v", lambda x: x.repeat(1, 1, 1, 27)),
    ("out", "out", lambda x: x[:, :, :, :16]),
    ("out", "out", lambda x: x.half()),
    ("out", "out", lambda x: x[:, :, :1].expand(2, 4, 100, 24)),
    ("lse", "lse", lambda x: x.half()),
    ("lse", "lse", lambda x: x[:, :, :99]),
    ("delta", "delta", lambda x: x[:, :3]),
    ("dout", "dout", lambda x: x[:, :, :99]),
    ("dq", "dq", lambda x: x.half()),
    ("dk", "dk", lambda x: x[:, :1]),
    ("dv", "dv", lambda x: x[:1].expand(2, 2, 90, 24)),
    ("row_ptr", "row_ptr", lambda x: x[:, :-1].contiguous()),
    ("row_ptr", "row_ptr", lambda x: x.long()),
    ("row_ptr", "row_ptr", lambda x: x.repeat(1, 2)[:, ::2]),
    ("row_ptr", "row_ptr", lambda x: x + 1),
    ("row_ptr", "row_ptr", lambda x: -x),
    ("row_ptr", "row_ptr", lambda x: x.flip(1).contiguous()),
    ("col", "col", lambda x: x + 6),
    ("col", "col", lambda x: x - 1),
    ("col", "col", lambda x: x[::2]),
    ("mask_id", "mask_id", lambda x: x[:-1]),
    ("mask_id", "mask_id", lambda x: x + 1000),
    ("mask_id", "mask_id", lambda x: x - 1),
    ("mask_words", "mask_words|mask_id", lambda x: x[:1]),
    ("mask_words", "mask_words", lambda x: x.repeat(1, 1, 2)),
    ("row_set", "row_set", lambda x: x + 2),
    ("row_set", "row_set", lambda x: x - 1),
    ("row_set", "row_set", lambda x: x[:1]),
    ("col_ptr", "col_ptr", lambda x: x + 1),
    ("col_ptr", "col_ptr", lambda x: x[:1]),
    ("col_ptr", "col_ptr", lambda x: x.flip(1).contiguous()),
    ("col_ptr", "col_ptr", lambda x: x[:1].repeat(2, 1)),
    ("row", "row", lambda x: x + 4),
    ("row", "row", lambda x: x - 1),
    ("row", "row", lambda x: x.flip(0).contiguous()),
    ("row", "row", lambda x: x * 0),
    ("mask_id_t", "mask_id_t", lambda x: x + 1000),
    ("mask_id_t", "mask_id_t", lambda x: x[1:].clone()),
    ("q_tile", "q_tile", lambda x: 272),
    ("q_tile", "q_tile", lambda x: 0),
    ("kv_tile", "kv_tile", lambda x: 272),
    ("scale", "scale", lambda x: float("nan")),
    ("scale", "scale", lambda x: float("inf")),
    ("threads", "threads", lambda x: 0),
    ("threads", "threads", lambda x: -1),
    ("variant", "variant", lambda x: "sse9"),
]


@pytest.mark.parametrize(("name", "named", "change"), CHANGES)
def test_refuses(name: str, named: str, change: Callable[[object], object], good: dict[str, object]) -> None:
    kind = UnsupportedError if named == "variant" else ShapeError
    with pytest.raises(kind, match=f"^({named}): "):
        call(good | {name: change(good[name])})


@pytest.mark.parametrize(
    "spacing", [(0, 2), (-1, 2, 16), (2**41, 2, 16), (0, 0, 16), (0, 2**41, 16), (0, 2, 15), (0, 2, 257)], ids=str
)
def test_refuses_a_spacing_out_of_range(spacing: tuple[int, ...], good: dict[str, object]) -> None:
    args = {name: value for name, value in good.items() if name not in BACKWARD}
    _cpu.forward(**args, spacing=[2**40, 2**40, 16])
    with pytest.raises(ShapeError, match="^spacing: wanted "):
        _cpu.forward(**args, spacing=list(spacing))


def test_corrupt_plans(good: dict[str, object]) -> None:
    """Randomly damaged plans are refused or, where still valid, computed without reading out of bounds."""
    generator = torch.Generator().manual_seed(1)
    fields = (*ROWS, *COLUMNS, "row_set")
    reaches = (2, 8, 100, 2**31 - 1)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    refused = []
    for _ in range(600):
        bad = dict(good)
        for _ in range(draw(1, 4)):
            name = fields[draw(0, 7)]
            damaged = bad[name].clone()  # type: ignore[attr-defined]
            reach = reaches[draw(0, 4)]
            damaged.view(-1)[draw(0, damaged.numel())] = draw(-reach, reach)
            bad[name] = damaged
        try:
            call(bad)
        except ShapeError as error:
            refused.append(str(error).split(":")[0])
    assert set(refused) <= set(fields)
    assert 200 < len(refused) < 600


def test_columns_that_are_not_the_transpose_still_end(good: dict[str, object]) -> None:
    """Columns that list other tiles than the rows do still terminate, since the order of sums follows from the columns alone."""
    other = arguments(case(100, 90, (32, 16), batch=2, heads=4, dims=(16, 24), groups=2, density=0.9))
    full = {"mask_id": torch.full_like(good["mask_id"], -1)}  # type: ignore[call-overload]
    call(good | {name: other[name] for name in (*COLUMNS, "mask_words")} | full)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_missing_and_an_unknown_argument_are_named(name: str, good: dict[str, object]) -> None:
    function, others = getattr(_cpu, name), FORWARD if name == "backward" else BACKWARD
    args = {each: value for each, value in good.items() if each not in others}
    with pytest.raises(ShapeError, match="^col: is missing"):
        function(**{each: value for each, value in args.items() if each != "col"})
    with pytest.raises(ShapeError, match="^q_tiles: is no argument of this function"):
        function(**args, q_tiles=4)
    with pytest.raises(ShapeError, match="^kv_tile: has a wrong type"):
        function(**args | {"kv_tile": "64"})


def test_the_indexer_refuses(good: dict[str, object]) -> None:
    """The choice of keys names arguments that do not fit; its keys have one head, and its scale is 1 or -1."""
    plan = {name: good[name] for name in (*ROWS, "mask_words", "row_set", "q_tile", "kv_tile", "threads", "variant")}
    q, k, weights = good["q"], good["k"][:, :1], good["lse"]  # type: ignore[index]
    index = torch.full((2, 100, 8), -1, dtype=torch.int32)
    args = {"q": q, "k": k, "weights": weights, "scale": 1.0, "index": index, **plan}
    _cpu.choose(**args)
    assert ((index >= -1) & (index < 90)).all()
    assert (index >= 0).any()
    changes: list[tuple[str, object]] = [
        ("k", good["k"]),
        ("weights", weights.half()),  # type: ignore[attr-defined]
        ("weights", weights[:, :3]),  # type: ignore[index]
        ("scale", 0.5),
        ("index", index[:, :99]),
        ("index", index.long()),
        ("index", index.mT.contiguous().mT),
        ("threads", 0),
    ]
    for name, value in changes:
        with pytest.raises(ShapeError, match=f"^{name}: "):
            _cpu.choose(**args | {name: value})
