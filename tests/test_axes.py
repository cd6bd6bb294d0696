"""Lines of axes: each part of the text accepts what it states, and refuses each other shape, dtype and device by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.axes import Axes
from ringweave.errors import PatternError, ShapeError

ATTENTION = Axes("q: float[B Hq Nq D]; k: q[B Hkv Nk D]; v: q[B Hkv Nk Dv]; Hq % Hkv")


def of(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def given(**other: Any) -> dict[str, Any]:
    return {"q": of(2, 4, 5, 8), "k": of(2, 2, 7, 8), "v": of(2, 2, 7, 3)} | other


def test_sizes_are_returned_by_name() -> None:
    sizes = ATTENTION.fit(**given())
    assert {name: sizes[name] for name in ("B", "Hq", "Nq", "D", "Hkv", "Nk", "Dv")} == {
        "B": 2, "Hq": 4, "Nq": 5, "D": 8, "Hkv": 2, "Nk": 7, "Dv": 3,
    }  # fmt: skip


#: What does not fit, and the error's text.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"q": [1.0]}, "q: got [1.0]; wanted a tensor (B, Hq, Nq, D). Pass a torch tensor."),
    "sparse": (
        {"k": of(2, 2, 7, 8).to_sparse()},
        "k: got a torch.sparse_coo tensor; wanted a dense one. Convert it with .to_dense() or pad it.",
    ),
    "no batch": (
        {"q": of(4, 5, 8)},
        "q: got shape (4, 5, 8); wanted (B, Hq, Nq, D). Pass q[None] for a batch of one.",
    ),
    "rank": (
        {"v": of(2, 2, 1, 7, 3)},
        "v: got shape (2, 2, 1, 7, 3); wanted (B, Hkv, Nk, Dv). Reshape it to (B, Hkv, Nk, Dv).",
    ),
    "size": (
        {"v": of(2, 2, 6, 3)},
        "v: got shape (2, 2, 6, 3); wanted (B, Hkv, Nk, Dv) with Nk = 7, the number of keys of k. "
        "Give v and k the same Nk.",
    ),
    "multiple": (
        {"k": of(2, 3, 7, 8), "v": of(2, 3, 7, 3)},
        "k: got shape (2, 3, 7, 8); wanted (B, Hkv, Nk, D) with Hkv a divisor of 4, the number of query heads of q. "
        "Change Hq or Hkv.",
    ),
    "empty": (
        {"q": of(2, 4, 0, 8)},
        "q: got shape (2, 4, 0, 8); wanted (B, Hq, Nq, D) without an empty axis. Skip the call for an empty tensor.",
    ),
    "no key heads": (
        {"k": of(2, 0, 7, 8), "v": of(2, 0, 7, 3)},
        "k: got shape (2, 0, 7, 8); wanted (B, Hkv, Nk, D) without an empty axis. Skip the call for an empty tensor.",
    ),
    "kind of dtype": (
        {"q": of(2, 4, 5, 8, dtype=torch.int32)},
        "q.dtype: got torch.int32; wanted float32, float16, bfloat16 or float64. Convert q with .to(...).",
    ),
    "other dtype": (
        {"k": of(2, 2, 7, 8, dtype=torch.float16)},
        "k.dtype: got torch.float16; wanted torch.float32, as q. Convert with k.to(q.dtype).",
    ),
    "device": (
        {"v": of(2, 2, 7, 3, device="meta")},
        "v.device: got meta; wanted cpu, as q. Move it with v.to(q.device).",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(WRONG))
def test_an_error_names_the_tensor_its_shape_the_wanted_one_and_a_remedy(what: str) -> None:
    other, text = WRONG[what]
    with pytest.raises(ShapeError) as raised:
        ATTENTION.fit(**given(**other))
    assert str(raised.value) == text


def test_the_class_and_the_remedy_are_the_callers() -> None:
    with pytest.raises(PatternError, match=r"q: got shape \(4, 5, 8\).*Ask a friend\."):
        ATTENTION.fit(error=PatternError, remedy="Ask a friend.", **given(q=of(4, 5, 8)))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("float", torch.float64), ("floating", torch.float8_e5m2), ("int", torch.uint8), ("index", torch.int64),
     ("bool", torch.bool), ("int32", torch.int32), ("", torch.complex64)],
)  # fmt: skip
def test_kinds_of_dtypes(kind: str, dtype: torch.dtype) -> None:
    axes = Axes(f"x: {kind}[N]")
    axes.fit(x=of(3, dtype=dtype))
    refused = torch.complex64 if kind else None
    if refused is not None:
        with pytest.raises(ShapeError, match=r"x\.dtype: got torch\.complex64"):
            axes.fit(x=of(3, dtype=refused))


def test_a_dtype_may_be_given_by_name() -> None:
    axes = Axes("x: acc[N]")
    axes.fit(x=of(3), acc=torch.float32)
    axes.fit(x=of(3), acc=(torch.float32, torch.int8))
    with pytest.raises(ShapeError, match="wanted torch.float64"):
        axes.fit(x=of(3), acc=torch.float64)
    with pytest.raises(ShapeError, match="wanted torch.int8 or torch.float64"):
        axes.fit(x=of(3), acc=(torch.int8, torch.float64))


def test_known_sizes_and_numbers() -> None:
    axes = Axes("gates: floating[B Nq 3]")
    axes.fit(gates=of(2, 5, 3), B=2, Nq=5)
    wanted = r"gates: got shape \(2, 5, 3\); wanted \(B, Nq, 3\) with Nq = 6, the number of queries\. Make gates of"
    with pytest.raises(ShapeError, match=wanted):
        axes.fit(gates=of(2, 5, 3), B=2, Nq=6)
    with pytest.raises(ShapeError, match=r"wanted \(B, Nq, 3\)\. Make gates"):
        axes.fit(gates=of(2, 5, 4), B=2, Nq=5)
    with pytest.raises(ShapeError, match=r"wanted \(Hq,\) with Hq a multiple of 3, the number of key heads\."):
        Axes("q: float[Hq]; Hq % Hkv").fit(q=of(4), Hkv=3)


def test_a_shared_axis_has_its_size_or_1() -> None:
    axes = Axes("one: [B|1 Nq]; other: [B|1 Nq]; q: [B Nq]")
    for first, second in ((1, 1), (1, 2), (2, 1), (2, 2)):
        axes.fit(one=of(first, 5), other=of(second, 5), q=of(2, 5))
    with pytest.raises(ShapeError, match=r"wanted \(B or 1, Nq\) with B = 2, the batch size"):
        axes.fit(one=of(1, 5), other=of(3, 5), q=of(2, 5), B=2)
    with pytest.raises(ShapeError, match=r"q: got shape \(1, 5\); wanted \(B, Nq\) with B = 2"):
        axes.fit(one=of(2, 5), other=of(1, 5), q=of(1, 5))


def test_optional_axes_are_left_out_by_all_tensors_or_by_none() -> None:
    axes = Axes("indices: [B? H? q n]; counts: [B? H? q]")
    for lead in ((), (3,), (2, 3)):
        axes.fit(indices=of(*lead, 4, 5), counts=of(*lead, 4))
    # the sizes would fit if an axis were left out by one of them
    for of_indices, of_counts in (((4, 5), (1, 4)), ((1, 4, 5), (4,)), ((3, 4, 5), (3, 3, 4)), ((2, 3, 4, 5), (3, 4))):
        with pytest.raises(ShapeError, match=r"counts: got shape .*\(q,\), \(H, q\) or \(B, H, q\)"):
            axes.fit(indices=of(*of_indices), counts=of(*of_counts))
    with pytest.raises(ShapeError, match=r"indices: got shape \(5,\); wanted \(q, n\), \(H, q, n\) or \(B, H, q, n\)"):
        axes.fit(indices=of(5), counts=of(5))
    # a given size binds only where the axis is not left out
    slopes = Axes("slopes: [B? Hq]")
    slopes.fit(slopes=of(4), B=2, Hq=4)
    slopes.fit(slopes=of(2, 4), B=2, Hq=4)
    with pytest.raises(ShapeError, match="with B = 2"):
        slopes.fit(slopes=of(3, 4), B=2, Hq=4)


def test_empty_axes_are_allowed_by_name() -> None:
    ATTENTION.fit(empty=("Nq", "B"), **given(q=of(2, 4, 0, 8)))
    with pytest.raises(ShapeError, match="without an empty axis"):
        ATTENTION.fit(empty=("Nq",), **given(q=of(2, 4, 0, 0)))
    # no head divides no head
    ATTENTION.fit(empty=("Hq", "Hkv"), q=of(2, 0, 5, 8), k=of(2, 0, 7, 8), v=of(2, 0, 7, 3))


def test_devices_are_those_of_the_first_tensor_or_given_or_free() -> None:
    moved = given(k=of(2, 2, 7, 8, device="meta"))
    ATTENTION.fit(anywhere=True, **moved)
    with pytest.raises(ShapeError, match=r"q\.device: got cpu; wanted meta\. Move it with q\.to\('meta'\)"):
        ATTENTION.fit(device=torch.device("meta"), **given())


def test_compiled_code_checks_while_it_is_traced() -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: object) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    @torch.compile(backend=count, fullgraph=True, dynamic=True)
    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * ATTENTION.fit(q=q, k=k, v=v)["Nk"]

    for keys in (7, 9, 11):
        assert torch.equal(scaled(of(2, 4, 5, 8), of(2, 2, keys, 8), of(2, 2, keys, 3)), of(2, 4, 5, 8))
    assert graphs == 1


def test_compiled_code_checks_sizes_that_depend_on_values() -> None:
    """Tokens that a mask selects have an unknown number in a trace, which no check may need to know."""
    packed = Axes("q: float[Nq Hq D]; k: q[Nk Hkv D]; v: q[Nk Hkv Dv]; Hq % Hkv")

    @torch.compile(backend="eager", fullgraph=True)
    def selected(x: Tensor, kept: Tensor) -> Tensor:
        x = x[kept]
        packed.fit(q=x, k=x, v=x, empty=("Nq", "Nk"))
        return x * 2

    kept = torch.tensor([True, False, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert selected(torch.ones(3, 4, 8), kept).shape == (2, 4, 8)
