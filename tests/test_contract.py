"""The contract of every public name: whatever an argument is, a RingweaveError or the right answer, and nothing else.

Each row is a valid call; each of its arguments in turn is replaced by each hostile value. The library must refuse a value
with a typed error, or the signature must allow it, and the answer must equal that for the plain value and be right by
the dense relation. A new public name, method or argument fails until it has a row. errors.txt has the words of every
refusal: the argument, the kind of the error, what it wants with the remedy, and the functions that say so.

The second part lists probable mistakes with their errors, and wrong calls with the words that each raises: a line of
wrong_calls.txt for each. ``python -m tests.test_contract`` writes the mistakes to docs/errors.md, the words to the lines of
wrong_calls.txt, and the refusals to errors.txt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ringweave as rw
from ringweave.call import Arguments
from ringweave.errors import RingweaveError
from ringweave.integrations import flash_attn, flash_attn_interface
from ringweave.patterns.declared import DECLARED
from ringweave.patterns.shifted import with_offsets
from ringweave.terms import KINDS, Term
from ringweave.terms.term import terms_of, written

from .test_options import MODULES

N = 48
SECONDS = 3.0  # CPU seconds for one call
MIB = 300  # bytes over all calls of a row


class Raising:
    """Raise an error that is not the library's on any use."""

    def _raise(self, *_: object) -> Any:
        raise ZeroDivisionError("asked")

    __index__ = __int__ = __float__ = __bool__ = __len__ = __iter__ = __getitem__ = __call__ = __array__ = _raise  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __fspath__ = _raise  # type: ignore[assignment]
    __hash__ = object.__hash__


def hostile() -> dict[str, Any]:
    """Return hostile values, new for every call: some are used up or written to."""
    return {
        "None": None, "True": True, "False": False, "nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"),
        "-1": -1, "0": 0, "1": 1, "3": 3, "16": 16, "2**31": 2**31, "-2**63": -(2**63), "2**63": 2**63, "2**70": 2**70,
        "10**400": 10**400, "10**5000": 10**5000, "0.5": 0.5, "1.0": 1.0, "1e-40": 1e-40, "1e39": 1e39, "complex": 1j,
        "empty text": "", "text": "abc", "long text": "ab" * 5000, "surrogate": "\ud800", "bytes": b"abc", "path": Path("abc.svg"),
        "empty list": [], "empty tuple": (), "floats": [1.0, 2.0], "bools": [True], "Nones": [None], "texts": ["a"],
        "lists": [[1, 2], [3]], "huge": [2**70], "too large": [2**40, 1], "negative": [-1], "twice": [3, 3], "ints": [1, 2],
        "dict": {1: 2}, "set": {1, 2}, "range": range(2), "long range": range(10**12), "longer range": range(2**70),
        "counting": itertools.count(), "used up": iter(()), "map": map(int, ["1"]),
        "np.int64": np.int64(3), "np.int8": np.int8(16), "np.uint64": np.uint64(2**63), "np.float64": np.float64(2.0),
        "np.float16": np.float16(0.5), "np.nan": np.float32("nan"), "np.bool": np.bool_(True), "np.str": np.str_("x"),
        "array": np.array([1, 2]), "int8 array": np.array([1, 2], np.int8), "float array": np.array([1.0, 2.0]),
        "2-D array": np.array([[1, 2]]), "0-D array": np.array(3), "object array": np.array([None, 1], object),
        "0-D tensor": torch.tensor(3), "0-D float": torch.tensor(2.5), "nan tensor": torch.tensor([torch.nan]),
        "empty tensor": torch.zeros(0), "int tensor": torch.tensor([1, 2]), "float tensor": torch.ones(2),
        "with grad": torch.ones(2, requires_grad=True), "bool tensor": torch.tensor([True, False]),
        "2-D tensor": torch.ones(2, 2, dtype=torch.int64), "5-D tensor": torch.ones(1, 1, 1, 1, 2),
        "4-D tensor": torch.ones(1, 2, N, 8), "half tensor": torch.ones(2, dtype=torch.float16),
        "complex tensor": torch.ones(1, 2, N, 8, dtype=torch.complex64), "meta tensor": torch.ones(2, device="meta"),
        "4-D meta": torch.ones(1, 2, N, 8, device="meta"), "sparse tensor": torch.eye(3).to_sparse(),
        "dtype": torch.int32, "float8": torch.float8_e5m2, "device": torch.device("meta"), "no GPU": "cuda:63",
        "fraction": Fraction(1, 2), "object": object(), "Raising": Raising(), "raising list": [Raising()],
        "type": rw.Causal, "function": lambda *_: None, "module": np, "pattern": rw.Causal(), "patterns": [rw.Causal()],
        "mixture": rw.LongNet([16], [1]), "for others": rw.Documents([5]), "ellipsis": ...,
    }  # fmt: skip


#: Classes and methods with all their checks in other files.
CLASSES_ELSEWHERE = {"ContextParallel"}
#: Records that the library constructs and returns; it does not check their fields again.
RECORDS = {"AttentionOutput", "BlockPlan", "BlockWeights"}
#: Methods by which patterns answer plans: internal, called with arrays.
PROTOCOL = {
    "allows", "zones", "extents", "select", "check", "remade", "spans", "inside", "sizes", "fits", "bound_ids", "read", "readable", "own", "either", "value", "views", "of", "key", "write", "parts_within",
    "apply", "gradient", "total", "bound", "over", "slope", "entry", "share", "example", "stays_equal",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A valid call.

    Attributes:
        arguments: All arguments of the signature, by name.
        right: Raises if an answer is wrong for its arguments.
        of: The callable; the public name by default.
        taken: Arguments that accept more than their annotation plainly says, each with a test of the further values.
    """

    arguments: Callable[[], dict[str, Any]]
    right: Callable[[dict[str, Any], Any], None]
    of: Callable[..., Any] | None = None
    taken: dict[str, Callable[[Any], bool]] = field(default_factory=dict)


# ---- valid arguments -------------------------------------------------------------------------------------------------


def dense_of(pattern: rw.Pattern, n: int) -> None:
    """The plan has the pairs of the definition, and counts them right."""
    batch, heads = pattern.extents()
    sizes = {"heads": heads or 1, "batch": batch or 1}
    try:
        dense = pattern.to_dense(n, **sizes)
    except RingweaveError:
        return  # a pattern made for another length
    assert pattern.density(n, **sizes) == pytest.approx(float(dense.double().mean()), abs=1e-12)
    future = dense & ~rw.Causal().to_dense(n) if pattern.combinable else dense * ~rw.Causal().to_dense(n)
    assert pattern.causality(n, **sizes).pairs == int(future.sum())
    if pattern.combinable:
        assert torch.equal(pattern.plan(n, **sizes).to_dense(), dense)


def is_pattern(arguments: dict[str, Any], answer: Any) -> None:
    assert isinstance(answer, rw.Pattern)
    if not answer.tables and "TokenMask" not in answer.spec:
        assert rw.patterns.parse(answer.spec) == answer
    dense_of(
        answer, arguments["tokens"] if isinstance(arguments.get("tokens"), int) and arguments["tokens"] <= 256 else N
    )


def sizes_of(arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    sizes = {name: arguments[name] for name in ("nq", "nk", "heads", "batch", "q_offset")}
    pattern = arguments.get("pattern", arguments.get("self"))
    pattern, sizes["q_offset"] = with_offsets(
        pattern, sizes["q_offset"], arguments.get("k_offset", 0), arguments["batch"]
    )
    return pattern, sizes


def is_dense(arguments: dict[str, Any], answer: Any) -> None:
    pattern, sizes = sizes_of(arguments)
    assert torch.equal(answer, pattern.to_dense(**sizes))


def is_plan(arguments: dict[str, Any], answer: Any) -> None:
    pattern, sizes = sizes_of(arguments)
    dense = pattern.to_dense(**sizes)
    if answer.device.type == "meta":  # depends on its sizes alone
        return
    assert torch.equal(answer.to_dense(), dense)
    assert answer.density == pattern.density(**sizes) == pytest.approx(float(dense.double().mean()), abs=1e-12)
    assert answer.density <= answer.computed_density <= 1


def is_density(arguments: dict[str, Any], answer: Any) -> None:
    pattern, sizes = sizes_of(arguments)
    assert answer == pytest.approx(float(pattern.to_dense(**sizes).double().mean()), abs=1e-12)


def future_of(arguments: dict[str, Any]) -> torch.Tensor:
    pattern, sizes = sizes_of(arguments)
    name = "pattern" if "pattern" in arguments else "self"
    return pattern.to_dense(**sizes) * ~sizes_of(arguments | {name: rw.Causal()})[0].to_dense(**sizes)


def is_causality(arguments: dict[str, Any], answer: Any) -> None:
    assert answer.pairs == int(future_of(arguments).sum())


def is_shard(arguments: dict[str, Any], answer: Any) -> None:
    count = 2 // arguments["ranks"]
    wanted = arguments["self"].to_dense(N, heads=2)[:, arguments["rank"] * count :][:, :count]
    assert torch.equal(answer.to_dense(N, heads=count), wanted)


def is_explained(arguments: dict[str, Any], answer: Any) -> None:
    pattern, sizes = sizes_of(arguments)
    if arguments["as_dict"]:
        assert answer["pairs"]["allowed"] == int(pattern.to_dense(**sizes).sum())
        assert answer["causality"]["future_pairs"] == int(future_of(arguments).sum())
    else:
        assert f"allowed   {int(pattern.to_dense(**sizes).sum())} of" in answer


def is_at_two_scales(arguments: dict[str, Any], answer: Any) -> None:
    q, k, v = (arguments[name] for name in "qkv")
    assert answer.shape == (*q.shape[:3], v.shape[3])
    everything = rw.hierarchical_attention(**(arguments | {"top_k": 2**20}))
    if arguments["causal"] is True and arguments["combine"] == "exact_cover":
        options = {name: arguments[name] for name in ("scale", "q_offset")}
        torch.testing.assert_close(everything, rw.attention(q, k, v, rw.Causal(), **options))


def is_attention(arguments: dict[str, Any], answer: Any) -> None:
    out = answer.out if isinstance(answer, rw.AttentionOutput) else answer
    pattern = arguments.get("pattern")
    if pattern is None:
        names = ("segments", "rates", "causal", "offset", "heads")
        pattern = rw.LongNet(**{name: arguments[name] for name in names})
    elsewhere = {*"qkv", "pattern", "backend", "context", "precision", "on_oom"}
    options = {name: arguments[name] for name in Arguments._fields if name in arguments and name not in elsewhere}
    if isinstance(options.get("sink_logits"), list):
        options["sink_logits"] = torch.tensor(options["sink_logits"])
    torch.manual_seed(0)
    wanted = rw.attention(*(arguments[name] for name in "qkv"), pattern, backend="reference", **options)
    torch.testing.assert_close(out, wanted)


def is_packed(arguments: dict[str, Any], answer: Any) -> None:
    whole = {name: arguments[name].transpose(0, 1)[None] for name in "qkv"}
    pattern = arguments["pattern"].within(rw.Documents(cu_seqlens=arguments["cu_seqlens_q"]))
    is_attention(arguments | whole | {"pattern": pattern, "q_offset": 0}, answer.transpose(0, 1)[None])


def seeded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        return function(*args, **options)

    return call


def is_term(arguments: dict[str, Any], answer: Any) -> None:
    assert isinstance(answer, Term)
    again = terms_of(*written([answer]))
    assert type(again[0]) is type(answer)
    for one, other in zip(again[0].tables, answer.tables, strict=True):
        assert one.is_meta or torch.equal(one.nan_to_num(), other.nan_to_num())


def fields_of(kind: type[Term]) -> dict[str, Any]:
    term = kind.example(1, 2, N, N, torch.Generator())
    return {each.name: getattr(term, each.name) for each in dataclasses.fields(term)}  # type: ignore[arg-type]


def is_weights(arguments: dict[str, Any], answer: Any) -> None:
    q, k = arguments["q"].double(), arguments["k"].double()
    pattern, q_offset = with_offsets(arguments["pattern"], arguments["q_offset"], arguments["k_offset"], 1)
    allowed = pattern.to_dense(N, N, 2, q_offset=q_offset)
    scale = 8**-0.5 if arguments["scale"] is None else float(arguments["scale"])
    scores = (scale * q @ k.mT).masked_fill(~allowed, -torch.inf)
    wanted = torch.softmax(scores, -1).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    torch.testing.assert_close(answer.to_dense().double(), wanted, rtol=1e-5, atol=1e-6)


def is_merged(arguments: dict[str, Any], answer: Any) -> None:
    assert answer.lse.shape == arguments["lses"][0].shape
    wanted = torch.logsumexp(torch.stack([lse.double() for lse in arguments["lses"]]), 0)
    torch.testing.assert_close(answer.lse.double(), wanted, rtol=1e-5, atol=1e-5)


def is_svg(arguments: dict[str, Any], answer: Any) -> None:
    assert answer.startswith("<svg")


def is_moved(arguments: dict[str, Any], answer: Any) -> None:
    assert torch.equal(answer.to_dense(), arguments["self"].to_dense())


def filled() -> rw.PagedCache:
    """Return a cache with two sequences of N tokens and an empty one."""
    cache = rw.PagedCache.empty(3, 2 * N, 2, 8, page=16)
    given = qkv()
    for b in range(2):
        cache.append(given["k"], given["v"], rows=[b])
    return cache


def is_pages(arguments: dict[str, Any], answer: Any) -> None:
    k = arguments["k"] if "k" in arguments else torch.zeros(1, arguments["heads"], arguments["page"], arguments["dim"])
    assert answer.k.shape[1:] == k.shape[1:]
    assert answer.free_pages <= len(answer.k)


def is_appended(arguments: dict[str, Any], answer: Any) -> None:
    rows = range(3) if arguments["rows"] is None else arguments["rows"]
    cache = arguments["self"]
    assert [int(cache.lengths[b]) for b in rows] == [(N if b < 2 else 0) + arguments["k"].shape[2] for b in rows]


def is_forked(arguments: dict[str, Any], answer: Any) -> None:
    sources, targets = (x if isinstance(x, list) else [x] for x in (arguments["source"], arguments["target"]))
    for source, target in zip(sources, targets, strict=True):
        length = (N if source < 2 else 0) if arguments["length"] is None else arguments["length"]
        assert int(arguments["self"].lengths[target]) == length


def is_freed(arguments: dict[str, Any], answer: Any) -> None:
    rows = range(3) if arguments["rows"] is None else arguments["rows"]
    assert not any(int(arguments["self"].lengths[b]) for b in rows)


def is_paged(arguments: dict[str, Any], answer: Any) -> None:
    q, k, v = (qkv()[name] for name in "qkv")
    q = arguments["q"][:1]
    is_attention(arguments | {"q": q, "k": k, "v": v, "q_offset": N - q.shape[2]}, answer[:1])


def is_cache(arguments: dict[str, Any], answer: Any) -> None:
    assert answer.get(rw.Causal(), 32, 32, tile=(16, 16)).nnz == 3


def nothing(arguments: dict[str, Any], answer: Any) -> None:
    pass


# ---- rows ------------------------------------------------------------------------------------------------------------


def made(**arguments: Any) -> Row:
    return Row(lambda: dict(arguments), is_pattern)


def qkv() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(1, 2, N, 8, generator=generator) for name in "qkv"}


def usual(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a function's options."""
    parameters = inspect.signature(function).parameters.values()
    found = {each.name: each.default for each in parameters if each.default is not each.empty}
    return found | ({"q_offset": 0} if "q_offset" in found else {})


SIZES = {"nq": N, "nk": N, "heads": 2, "batch": 1, "q_offset": 0}
OWN = rw.SlidingWindow(9, 2) & ~rw.Segments(20) | rw.Sinks([3])
NO_DOCUMENTS = {"cu_seqlens": None, "ids": None, "cu_seqlens_q": None, "cu_seqlens_k": None}
SCORED = {"terms": [rw.Softcap(2.0)], "sink_logits": torch.tensor([0.5, -1.0])}
LISTS = {"segments": [16, 32], "rates": [1, 2], "causal": True, "offset": 1, "heads": "shared"}
ASKED = {
    "kv_heads": 1, "head_dim": 16, "value_dim": 8, "dtype": torch.float32, "device": "cpu", "backend": "auto",
    "needs_grad": True, "as_dict": True, "terms": (), "dropout": 0.0,
}  # fmt: skip


def block_mask() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)


def is_causal_mask(arguments: dict[str, Any], answer: Any) -> None:
    assert torch.equal(answer.to_dense(64), rw.Causal().to_dense(64))


def is_table(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


GRID = rw.Grid((6, 8), (2, 4))


def is_grid(arguments: dict[str, Any], answer: Any) -> None:
    assert answer == rw.Grid(answer.shape, answer.tile)
    if answer.tokens <= 2**16:
        assert answer.positions.shape == (answer.tokens, len(answer.shape))


def is_flat(arguments: dict[str, Any], answer: Any) -> None:
    first = arguments["dim"] % arguments["x"].ndim
    places = arguments["x"].movedim((first, first + 1), (0, 1))[GRID.positions.unbind(1)]
    assert torch.equal(answer, places.movedim(0, first))


def is_grid_of(arguments: dict[str, Any], answer: Any) -> None:
    assert torch.equal(GRID.flatten(answer, arguments["dim"] % arguments["x"].ndim), arguments["x"])


def is_of_neighbors(arguments: dict[str, Any], answer: Any) -> None:
    names = ("window", "dilation", "is_causal")
    pattern = rw.GridNeighborhood(GRID, *(arguments[name] for name in names))
    flat = {name: GRID.flatten(arguments[name], 2) for name in "qkv"}
    options = {"scale": arguments["scale"], "terms": arguments["terms"]}
    is_attention(flat | options | {"pattern": pattern}, GRID.flatten(answer, 2))


ROWS: dict[str, Row] = {
    "Full": made(),
    "Causal": made(),
    "SlidingWindow": made(left=5, right=2),
    "Segments": made(length=7),
    "Documents": Row(lambda: {"lengths": [20, N - 20], **NO_DOCUMENTS}, is_pattern, taken={"lengths": lambda v: True, **dict.fromkeys(NO_DOCUMENTS, lambda v: v is None)}),
    "Documents by ids": Row(lambda: {"lengths": None, **NO_DOCUMENTS, "ids": torch.arange(N) // 9}, is_pattern, of=rw.Documents, taken={name: (lambda v: True) if name == "ids" else lambda v: v is None for name in ("lengths", *NO_DOCUMENTS)}),
    "Tree": made(parents=[-1, 0, 0], lengths=[20, 8, N - 28]),
    "Tree.positions": Row(lambda: {"self": rw.Tree([-1, 0], [5, 9])}, nothing, of=rw.Tree.positions),
    "Tree.paths": Row(lambda: {"self": rw.Tree([-1, 0], [5, 9])}, nothing, of=rw.Tree.paths),
    "KeyPadding": made(stop=N, start=5),
    "Pattern.within": Row(lambda: {"self": OWN, "bounds": rw.KeyPadding(N, 5)}, is_pattern, of=rw.Pattern.within, taken={"bounds": lambda v: isinstance(v, (rw.Documents, rw.Tree))}),
    "Neighborhood": made(window=5, dilation=2, tokens=N),
    "Grid": Row(lambda: {"shape": (6, 8), "tile": (2, 4)}, is_grid),
    "Grid.flatten": Row(lambda: {"self": GRID, "x": torch.rand(2, 6, 8, 3), "dim": 1}, is_flat, of=rw.Grid.flatten, taken={"x": is_table}),
    "Grid.unflatten": Row(lambda: {"self": GRID, "x": torch.rand(2, N, 3), "dim": 1}, is_grid_of, of=rw.Grid.unflatten, taken={"x": is_table}),
    "GridNeighborhood": made(grid=GRID, window=(3, 4), dilation=(2, 1), causal=(False, True)),
    "GridWindows": made(grid=GRID, size=(4, 3), shift=(2, 1)),
    "PrefixLM": made(n=5),
    "Sinks": made(tokens=[1, 5]),
    "Global": made(tokens=[1, 5]),
    "Periodic": made(period=7, start=1, stop=3),
    "Strided": made(stride=3),
    "Dilated": made(window=3, rate=4),
    "LongNet": made(**LISTS),
    "PerHead": Row(lambda: {"patterns": [rw.Causal(), OWN]}, is_pattern, taken={"patterns": lambda v: v[0] == rw.Causal()}),
    "TokenMask": made(fn=lambda b, h, q, k: k <= q, tables=None, batch=None, head=None),
    "from_mask_mod": made(fn=lambda b, h, q, k: k <= q, tables=None),
    "BlockTable": Row(
        lambda: {"mask": torch.eye(3).bool(), "block_size": 16, "indices": None, "counts": None, "key_blocks": None, "heads": "kv"},
        is_pattern,
        taken={"block_size": lambda v: True},
    ),
    "BlockTable of indices": Row(
        lambda: {"mask": None, "block_size": 16, "indices": torch.tensor([[0, 2], [1, 1], [2, 0]]), "counts": torch.tensor([2, 1, 0]), "key_blocks": 3, "heads": "query"},
        is_pattern,
        of=rw.BlockTable,
        taken={"block_size": lambda v: True},
    ),
    "Selected": made(
        indices=(torch.arange(N)[:, None] // 4 - torch.tensor([0, 1, 5])).clamp(min=-1), block_size=4, key_blocks=N // 4,
        heads="query",
    ),
    "longformer": made(window=5, global_tokens=[1, 2], causal=False),
    "bigbird": made(tokens=N, window=3, global_tokens=2, random=1, block_size=16, seed=1),
    "sparse_transformer_fixed": made(block=8, summary=2, causal=True),
    "variable": made(tokens=N, local_blocks=[1, 2], global_blocks=[1], random=1, block_size=8, seed=0),
    "local_global": made(window=3, stride=5, causal=False),
    "dilated_blocks": made(window=3, rates=[1, 4]),
    "natten_1d": made(window=3, dilation=2, tokens=N),
    "random_blocks": Row(
        lambda: {"tokens": N, "density": 0.5, "block_size": 16, "heads": 2, "batch": 1, "seed": 0, "diagonal": True},
        is_pattern,
        taken={"density": lambda v: 0 < v <= 1},
    ),
    "attention": Row(lambda: usual(rw.attention) | qkv() | {"pattern": OWN} | SCORED, is_attention, of=seeded(rw.attention)),
    "attention_with_lse": Row(lambda: usual(rw.attention_with_lse) | qkv() | {"pattern": OWN} | SCORED, is_attention, of=seeded(rw.attention_with_lse)),
    **{name: Row(functools.partial(fields_of, kind), is_term) for name, kind in KINDS.items()},
    "ALiBi.of_heads": Row(lambda: {"heads": 2}, is_term, of=rw.ALiBi.of_heads),
    "DistanceBias.from_buckets": Row(lambda: {"weight": torch.ones(16, 2), "max_distance": 9, "bidirectional": True}, is_term, of=rw.DistanceBias.from_buckets),
    "varlen_attention": Row(
        lambda: usual(rw.varlen_attention) | {name: x[0].transpose(0, 1) for name, x in qkv().items()}
        | {"cu_seqlens_q": [0, 20, N], "pattern": OWN} | SCORED,
        is_packed,
        of=seeded(rw.varlen_attention),
        taken=dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), lambda v: False),
    ),
    "PagedCache": Row(lambda: {"k": torch.zeros(4, 2, 16, 8), "v": torch.zeros(4, 2, 16, 8), "table": torch.zeros(2, 2).int(), "lengths": torch.tensor([5, 0]).int(), "scales": None}, is_pages),
    "PagedCache.empty": Row(
        lambda: {"batch": 2, "length": 50, "heads": 2, "dim": 8, "value_dim": 16, "page": 16, "pages": 5, "dtype": torch.float32, "device": "cpu", "precision": None},
        is_pages,
        of=rw.PagedCache.empty,
    ),
    "PagedCache.append": Row(lambda: {"self": filled(), "k": torch.ones(3, 2, 5, 8), "v": torch.ones(3, 2, 5, 8), "rows": [2, 0, 1]}, is_appended, of=rw.PagedCache.append),
    "PagedCache.fork": Row(lambda: {"self": filled(), "source": 0, "target": 2, "length": 20}, is_forked, of=rw.PagedCache.fork),
    "PagedCache.free": Row(lambda: {"self": filled(), "rows": [1]}, is_freed, of=rw.PagedCache.free),
    "paged_attention": Row(
        lambda: usual(rw.paged_attention) | {"q": qkv()["q"][:, :, -3:].expand(3, -1, -1, -1), "cache": filled(), "pattern": OWN} | SCORED,
        is_paged,
    ),
    "hierarchical_attention": Row(
        lambda: usual(rw.hierarchical_attention) | qkv() | {"pool": 8, "top_k": 2, "window": 1, "causal": True},
        is_at_two_scales,
    ),
    "longnet_attention": Row(lambda: usual(rw.longnet_attention) | qkv() | LISTS, is_attention),
    "neighborhood_attention": Row(
        lambda: usual(rw.neighborhood_attention) | {name: x.unflatten(2, (6, 8)) for name, x in qkv().items()}
        | {"window": (3, 4), "dilation": (2, 1), "is_causal": (False, True), "terms": [rw.Softcap(2.0)]},
        is_of_neighbors,
    ),
    "attention_weights": Row(lambda: usual(rw.attention_weights) | {"q": qkv()["q"], "k": qkv()["k"], "pattern": OWN}, is_weights),
    "Precision": Row(lambda: {"compute": torch.bfloat16, "wire": "int8", "table": None, "kv": torch.int8, "summation_order": "fast"}, nothing),
    "merge": Row(lambda: {"outs": [torch.ones(2, 3), torch.zeros(2, 3)], "lses": [torch.ones(2), torch.zeros(2)]}, is_merged),
    "plan": Row(lambda: {"pattern": OWN, **SIZES, "tile": (16, 32), "device": "cpu"}, is_plan, taken={"tile": lambda v: True}),
    "explain": Row(lambda: {"pattern": OWN, **SIZES, "k_offset": 0, "scale": 0.25, **ASKED}, is_explained),
    "from_block_mask": Row(lambda: {"block_mask": block_mask()}, is_causal_mask),
    "PlanCache": Row(lambda: {"max_bytes": 2**20}, is_cache, taken={"max_bytes": lambda v: isinstance(v, (int, np.integer)) and v >= 0}),
    "PlanCache.get": Row(lambda: {"self": rw.PlanCache(), "pattern": OWN, **SIZES, "tile": (16, 32), "device": "cpu"}, is_plan, of=rw.PlanCache.get, taken={"tile": lambda v: True}),
    "PlanCache.statistics": Row(lambda: {"self": rw.PlanCache()}, nothing, of=rw.PlanCache.statistics),
    "PlanCache.clear": Row(lambda: {"self": rw.PlanCache()}, nothing, of=rw.PlanCache.clear),
    "Pattern.to_dense": Row(lambda: {"self": OWN, **SIZES}, is_dense, of=rw.Pattern.to_dense),
    "LongNet.to_dense": Row(lambda: {"self": rw.LongNet([16, 32], [1, 2]), **SIZES}, is_dense, of=rw.LongNet.to_dense),
    "Pattern.plan": Row(lambda: {"self": OWN, **SIZES, "tile": 16, "device": "cpu"}, is_plan, of=rw.Pattern.plan, taken={"tile": lambda v: True}),
    "Pattern.density": Row(lambda: {"self": OWN, **SIZES}, is_density, of=rw.Pattern.density),
    "Pattern.shard": Row(lambda: {"self": rw.PerHead([rw.Causal(), OWN]), "rank": 1, "ranks": 2, "heads": 2}, is_shard, of=rw.Pattern.shard),
    "Pattern.is_causal": Row(lambda: {"self": OWN, **SIZES}, lambda a, x: None if x == (not future_of(a).any()) else pytest.fail("wrong"), of=rw.Pattern.is_causal),
    "Pattern.causality": Row(lambda: {"self": OWN, **SIZES}, is_causality, of=rw.Pattern.causality),
    "Pattern.plot": Row(lambda: {"self": OWN, "tokens": 32, "heads": 1, "path": None}, is_svg, of=rw.Pattern.plot, taken={"path": lambda v: isinstance(v, Path)}),
    "BlockPlan.to": Row(lambda: {"self": OWN.plan(N), "device": "cpu"}, is_moved, of=rw.BlockPlan.to),
    "BlockPlan.to_dense": Row(lambda: {"self": OWN.plan(N)}, nothing, of=rw.BlockPlan.to_dense),
    "BlockPlan.to_block_mask": Row(lambda: {"self": OWN.plan(64, tile=32)}, nothing, of=rw.BlockPlan.to_block_mask),
    "BlockPlan.pairs": Row(lambda: {"self": OWN.plan(N)}, nothing, of=rw.BlockPlan.pairs),
    "BlockPlan.computed_pairs": Row(lambda: {"self": OWN.plan(N)}, nothing, of=rw.BlockPlan.computed_pairs),
    "BlockPlan.listed": Row(lambda: {"self": OWN.plan(N)}, nothing, of=rw.BlockPlan.listed),
    "BlockPlan.tile_rows": Row(lambda: {"self": OWN.plan(N)}, nothing, of=rw.BlockPlan.tile_rows),
    "BlockPlan.first_tiles": Row(lambda: {"self": OWN.plan(N)}, nothing, of=rw.BlockPlan.first_tiles),
    "BlockWeights.to_dense": Row(lambda: {"self": rw.attention_weights(qkv()["q"], qkv()["k"], OWN)}, nothing, of=rw.BlockWeights.to_dense),
}  # fmt: skip


def module_row(name: str) -> Row:
    """Return the row of a module, which a function of all arguments makes and calls.

    A module that takes the options of another has its own arguments only: the others are in the other's row.
    """
    kind, usual_call = getattr(rw.nn, name), MODULES[name]()
    made, of_call = (dict(inspect.signature(each).parameters) for each in (kind, kind.forward))
    signature = made if made.pop("options", None) is not None else made | of_call
    signature.pop("self", None)

    def call(**arguments: Any) -> Any:
        given = usual_call | {
            each: x for each, x in arguments.items() if each in usual_call or x is not signature[each].default
        }
        torch.manual_seed(0)
        layer = kind(**{each: x for each, x in given.items() if each not in of_call})
        if any(each.is_meta for each in layer.parameters()):
            return None
        with torch.no_grad():
            return layer(**{each: x for each, x in given.items() if each in of_call})

    def is_module(arguments: dict[str, Any], answer: Any) -> None:
        if isinstance(arguments.get("q_offset"), list):
            arguments |= {"q_offset": torch.tensor(arguments["q_offset"])}
        out, wanted = answer, call(**arguments | {"backend": "reference"} if "backend" in signature else arguments)
        torch.testing.assert_close(*(x[0] if isinstance(x, tuple) else x for x in (out, wanted)))

    call.__signature__ = inspect.Signature([each.replace(kind=each.KEYWORD_ONLY) for each in signature.values()])  # type: ignore[attr-defined]
    return Row(
        lambda: usual(call) | {each: x for each, x in usual_call.items() if each in signature}, is_module, of=call
    )


def arguments_of(name: str) -> dict[str, Any]:
    """Return the arguments of a pattern's declared example."""
    made_by = {each: known.make for each, known in DECLARED.items()} | {"Grid": rw.Grid, "torch": torch}
    args, named = eval(DECLARED[name].example, made_by | {name: lambda *args, **named: (args, named)})
    bound = inspect.signature(DECLARED[name].make).bind(*args, **named)
    bound.apply_defaults()
    return bound.arguments


#: Patterns that users construct by name; a pattern without a row above uses its example.
PATTERNS = [name for name, known in DECLARED.items() if known.section is not None]
ROWS |= {name: made(**arguments_of(name)) for name in PATTERNS if name not in ROWS}
ROWS |= {f"nn.{name}": module_row(name) for name in rw.nn.__all__}
EVERY = sorted({*rw.__all__, *rw._UNLISTED, *PATTERNS, *KINDS})


def public(name: str) -> Any:
    return DECLARED[name].make if name in PATTERNS else KINDS[name] if name in KINDS else getattr(rw, name)


def called(name: str) -> Callable[..., Any]:
    of = ROWS[name].of
    return of if of is not None else public(name)  # type: ignore[no-any-return]


def methods() -> set[str]:
    """Return the public methods of the exported classes, each at its first definition."""
    found = set()
    for name in EVERY:
        kind = public(name)
        if not inspect.isclass(kind) or issubclass(kind, (Exception, tuple)) or name in CLASSES_ELSEWHERE:
            continue
        own = {
            each: thing
            for each, thing in vars(kind).items()
            if callable(thing) or isinstance(thing, (classmethod, staticmethod))
        }
        found |= {f"{name}.{each}" for each in own if not each.startswith("_") and each not in PROTOCOL}
    return found


def test_every_public_name_has_a_row() -> None:
    callables = {
        name
        for name in EVERY
        if callable(public(name)) and not inspect.isabstract(public(name))
        and not (inspect.isclass(public(name)) and issubclass(public(name), Exception))
    }  # fmt: skip
    callables |= {f"nn.{name}" for name in rw.nn.__all__}
    assert callables | methods() == {name for name in ROWS if " " not in name} | RECORDS | CLASSES_ELSEWHERE


@pytest.mark.parametrize("name", list(ROWS))
def test_rows_are_calls_that_work(name: str) -> None:
    row = ROWS[name]
    arguments = row.arguments()
    given = [p for p in inspect.signature(called(name)).parameters if p != "self"]
    assert [each for each in arguments if each != "self"] == given or set(arguments) - {"self"} == set(given)
    row.right(arguments, called(name)(**arguments))


def plain(value: Any) -> Any:
    """Convert a value to plain Python."""
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    if isinstance(value, torch.Tensor) and value.is_meta:
        return value
    if isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim == 1 and value.dtype != torch.bool:
        return value.tolist()
    return sorted(value) if isinstance(value, set) else list(value) if isinstance(value, (tuple, range)) else value


def is_taken(row: Row, argument: str, annotation: str, value: Any) -> bool:
    """Return whether the signature allows a value."""
    if argument in row.taken and (value is not None or "None" not in annotation):
        return row.taken[argument](value)
    if value is None:
        return "None" in annotation
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if isinstance(value, (list, tuple, set, range, np.ndarray, torch.Tensor)):
        return any(word in annotation for word in ("Sequence", "Tensor", "Sized"))
    found = {
        "bool": isinstance(value, (bool, np.bool_)), "int": whole, "str": isinstance(value, str),
        "float": isinstance(value, (int, float, np.number)) and not isinstance(value, bool),
        "dtype": isinstance(value, torch.dtype), "device": isinstance(value, torch.device),
        "Pattern": isinstance(value, rw.Pattern), "Path": isinstance(value, Path), "ScoreMod": callable(value),
    }  # fmt: skip
    return any(fits for word, fits in found.items() if word in annotation)


CASES = [(name, argument) for name in ROWS for argument in ROWS[name].arguments() if argument != "self"]
#: Other names of arguments in errors, which a part of the call raises.
SPOKEN = {"window": "left", "global_tokens": "tokens", "cu_seqlens_q": "cu_seqlens", "fn": "mask_mod"}
REFUSALS = Path(__file__).with_name("errors.txt")
WANTED = "; wanted "


def tried(name: str, argument: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield for each hostile value its name, the arguments, and the answer or the library's error."""
    row, function = ROWS[name], called(name)
    for what, value in hostile().items():
        arguments = row.arguments() | {argument: value}
        began = time.process_time()
        try:
            answer = function(**arguments)
        except RingweaveError as error:
            answer = error
        except ZeroDivisionError:
            # the own error of a function of the caller
            assert "ScoreMod" in str(inspect.signature(function).parameters[argument].annotation), what
            continue
        assert time.process_time() - began < SECONDS, what
        yield what, arguments, answer


def in_words(error: RingweaveError) -> tuple[str, str]:
    """Return the kind of an error, and what it wants with the remedy."""
    return type(error).__name__, str(error).partition(WANTED)[2]


def refusals() -> str:
    """Return the lines of errors.txt."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, argument in CASES:
        for said in {in_words(answer) for *_, answer in tried(name, argument) if isinstance(answer, RingweaveError)}:
            found.setdefault((argument, *said), []).append(name)
    return "".join(f"{' | '.join(said)} | {', '.join(names)}\n" for said, names in sorted(found.items()))


@functools.cache
def known_refusals() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Return the kinds and words of errors.txt by function and argument."""
    known: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for line in REFUSALS.read_text("utf-8").splitlines():
        argument, kind, rest = line.split(" | ", 2)
        words, _, names = rest.rpartition(" | ")
        for name in names.split(", "):
            known.setdefault((name, argument), set()).add((kind, words))
    return known


def test_every_refusal_is_of_an_argument() -> None:
    assert known_refusals().keys() == {*CASES}


@pytest.mark.parametrize(("name", "argument"), CASES, ids=lambda each: str(each).replace(" ", "_"))
def test_a_hostile_argument_is_refused_or_answered_right(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row, function = ROWS[name], called(name)
    annotation = str(inspect.signature(function).parameters[argument].annotation)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names = {argument, SPOKEN.get(argument, argument)}
    refused, of_others, said = 0, list[str](), set[tuple[str, str]]()
    for what, arguments, answer in tried(name, argument):
        value = arguments[argument]
        if isinstance(answer, RingweaveError):
            refused += 1
            text = str(answer)
            assert WANTED in text, what
            assert len(text) < 2000, what
            said.add(in_words(answer))
            if not names & {*re.findall(r"\w+", text.partition(WANTED)[0])}:
                of_others.append(text)
            continue
        assert is_taken(row, argument, annotation, value), f"{what} was taken as {argument}: {annotation}"
        right = arguments | {argument: plain(value)}
        row.right(right, answer)
        if isinstance(answer, rw.Pattern) and argument not in ("mask", "indices", "counts"):
            assert answer == function(**right), what
    assert refused > 20
    # values that fit alone, but not beside another argument
    assert len(of_others) <= 10, of_others
    # after a change of words: python -m tests.test_contract
    assert said == known_refusals()[name, argument]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MIB, f"{grown:.0f} MiB"


@pytest.mark.parametrize("what", list(hostile()))
def test_operators_take_patterns_alone(what: str) -> None:
    value = hostile()[what]
    pattern = rw.Strided(3)
    for combine in (
        lambda: pattern & value, lambda: pattern | value, lambda: value & pattern, lambda: value | pattern,
    ):  # fmt: skip
        try:
            answer = combine()
        except RingweaveError:
            continue
        assert isinstance(value, rw.Pattern)
        assert isinstance(answer, rw.Pattern)
    assert (pattern == value) is False
    assert (pattern != value) is True


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'ringweave' has no attribute 'nope'"):
        _ = rw.nope
    assert not hasattr(rw, "nope")


# ---- probable mistakes -----------------------------------------------------------------------------------------------

#: Calls that a user may write by mistake, by topic; each raises an error. q, k and v are (1, 4, 256, 32).
MISTAKES: dict[str, dict[str, type[Exception]]] = {
    "Tensors": {
        "rw.attention(q, k, v[:, :, :200])": rw.ShapeError,
        "rw.attention(q, k[:, :3], v[:, :3])": rw.ShapeError,
        "rw.attention(q[0], k[0], v[0])": rw.ShapeError,
        "rw.attention(q, k, v, scale=torch.tensor(0.1))": rw.ShapeError,
    },
    "Patterns": {
        "rw.attention(q, k, v, \"causal\")": rw.PatternError,
        "rw.attention(q, k, v, rw.Causal)": rw.PatternError,
        "rw.attention(q, k, v, torch.ones(256, 256).tril().bool())": rw.PatternError,
        "rw.attention(q, k, v, rw.Documents([100, 100]))": rw.PatternError,
        "rw.attention(q, k, v, rw.PerHead([rw.Causal(), rw.Full()]))": rw.PatternError,
        "rw.SlidingWindow(-1)": rw.PatternError,
        "rw.patterns.parse(\"Slidingwindow(64)\")": rw.PatternError,
    },
    "Arguments": {
        "rw.attention(q, k, v, attn_mask=torch.ones(256, 256))": TypeError,
        "rw.attention(q[:, :, -1:], k, v, rw.Causal(), q_offset=\"last\")": rw.ShapeError,
        "rw.attention(q, k, v, terms=rw.Bias(torch.zeros(4, 10, 10)))": rw.ShapeError,
        "rw.attention(q, k, v, sink_logits=torch.zeros(3))": rw.ShapeError,
    },
    "Backends": {
        "rw.attention(q, k, v, backend=\"gpu\")": rw.UnsupportedError,
        "rw.attention(q, k, v, rw.SlidingWindow(64), backend=\"sdpa\")": rw.UnsupportedError,
    },
    "Decoding and several processes": {
        "cache.append(k[:, :, :200], v[:, :, :200])": rw.PageError,
        "rw.paged_attention(q[:, :, -1:].requires_grad_(), cache)": rw.UnsupportedError,
        "rw.attention(q, k, v, rw.Causal(), context=ctx, q_offset=1)": rw.UnsupportedError,
        "rw.attention(q[:, :, :100], k, v, rw.Causal(), context=ctx)": rw.ShapeError,
    },
}  # fmt: skip
ERRORS = Path(__file__).parents[1] / "docs" / "errors.md"
BEGIN, END = "<!-- mistakes: written by python -m tests.test_contract -->\n", "<!-- end of mistakes -->\n"


def raised(code: str) -> Exception:
    """Return the error of a mistake."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 256, 32, generator=generator) for _ in range(3))
    cache = rw.PagedCache.empty(batch=1, length=256, heads=4, dim=32, page=128, pages=1)
    ctx = rw.ContextParallel(None, rw.Causal(), 256, heads=(4, 4))
    try:
        eval(code, {"rw": rw, "torch": torch, "q": q, "k": k, "v": v, "cache": cache, "ctx": ctx})
    except Exception as error:  # noqa: BLE001
        return error
    pytest.fail(f"{code} raises nothing")


def mistakes() -> str:
    """Return the table of docs/errors.md."""
    lines = []
    for topic, cases in MISTAKES.items():
        lines += [f"\n### {topic}\n", "| call | error |", "|---|---|"]
        for code in cases:
            error = raised(code)
            text = f"{type(error).__name__}: {error}".replace("|", "\\|")
            assert "`" not in text, text
            lines.append(f"| `{code}` | `{text}` |")
    return "\n".join([*lines, "", ""])


@pytest.mark.parametrize("code", [code for cases in MISTAKES.values() for code in cases])
def test_a_mistake_raises_an_error_with_the_wanted_value(code: str) -> None:
    (kind,) = [cases[code] for cases in MISTAKES.values() if code in cases]
    error = raised(code)
    assert type(error) is kind
    assert "; wanted " in str(error)


def test_the_page_of_errors_is_current() -> None:
    assert ERRORS.read_text("utf-8").partition(BEGIN)[2].partition(END)[0] == mistakes()


# ---- wrong calls -----------------------------------------------------------------------------------------------------

WRONG_CALLS, RAISES = Path(__file__).with_name("wrong_calls.txt"), "  ->  "


def names_of_wrong_calls() -> dict[str, Any]:
    """Return the names that the lines of wrong_calls.txt use, new for each."""
    cache = rw.PagedCache.empty(2, 80, 2, 24, value_dim=40, page=16, pages=6)
    for row, n in enumerate((40, 3)):
        cache.append(torch.zeros(1, 2, n, 24), torch.zeros(1, 2, n, 40), rows=[row])

    def pages(**changed: Any) -> rw.PagedCache:
        return rw.PagedCache(**{name: getattr(cache, name) for name in ("k", "v", "table", "lengths")} | changed)

    def moba(context: Any = None) -> torch.nn.Module:
        return rw.nn.MixtureOfBlockAttention(32, 4, block_size=8, top_k=3, context=context)

    context = rw.ContextParallel(None, rw.Causal(), 20, heads=(4, 4), placement="contiguous")
    flash: dict[str, Any] = {
        "flash": flash_attn, "flash3": flash_attn_interface, "fq": torch.zeros(2, 20, 4, 16), "fk": torch.zeros(2, 30, 2, 16),
        "tokens": torch.zeros(60, 2, 16), "cu": torch.tensor([0, 10, 40], dtype=torch.int32),
    }  # fmt: skip
    return flash | {
        "rw": rw, "torch": torch, "np": np, "q": torch.zeros(1, 4, 10, 8), "k": torch.zeros(1, 2, 12, 8), "v": torch.zeros(1, 2, 12, 8),
        "x": torch.zeros(2, 20, 32), "grid": torch.zeros(2, 2, 12, 9, 8), "step": torch.zeros(2, 4, 1, 24), "cache": cache,
        "pages": pages, "moba": moba(), "shared": moba(context), "context": context, "lists": torch.zeros(8, 3, dtype=torch.int64),
    }  # fmt: skip


def said_by(code: str) -> str:
    """Return the kind and the words of the error of a wrong call."""
    try:
        eval(code, names_of_wrong_calls())
    except RingweaveError as error:
        return f"{type(error).__name__}: {error}"
    pytest.fail(f"{code} raises nothing")


@pytest.mark.parametrize("line", [each for each in WRONG_CALLS.read_text("utf-8").splitlines() if each[0] != "#"])
def test_a_wrong_call_raises_these_words(line: str) -> None:
    code, _, words = line.partition(RAISES)
    assert said_by(code) == words
    assert WANTED in words


def wrong_calls() -> str:
    """Return wrong_calls.txt with the words that its calls raise now."""
    lines = (each.partition(RAISES)[0] for each in WRONG_CALLS.read_text("utf-8").splitlines())
    return "".join(f"{each if each[0] == '#' else each + RAISES + said_by(each)}\n" for each in lines)


if __name__ == "__main__":
    WRONG_CALLS.write_text(wrong_calls(), "utf-8")
    before, _, rest = ERRORS.read_text("utf-8").partition(BEGIN)
    ERRORS.write_text(before + BEGIN + mistakes() + END + rest.partition(END)[2], "utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        REFUSALS.write_text(refusals(), "utf-8")
