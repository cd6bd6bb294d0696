"""A mask function is read as a pattern that allows the pairs of the library's own dense mask."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from transformers import masking_utils as masks

import ringweave as rw
from ringweave.cache import PATTERNS as KEPT
from ringweave.integrations.transformers import mask_reading, pattern_mask
from ringweave.integrations.transformers.mask_reading import read
from ringweave.integrations.transformers.model_cache import PagedLayer
from ringweave.integrations.transformers.positions import Positions
from ringweave.trace.graph import UntraceableError
from ringweave.trace.operations import OPERATORS

from .frames import calls

B, N = 2, 19
NUMBERS = torch.tensor([[0] * 8 + [1] * 11, [0] * 12 + [1] * 4 + [2] * 3])
POSITIONS = torch.cat([torch.cat([torch.arange(int(c)) for c in row.bincount()])[None] for row in NUMBERS])
BLOCKS = torch.full((B, N), -1)
BLOCKS[0, 3:7], BLOCKS[1, 5:9], BLOCKS[1, 14:] = 0, 0, 1
PADS = torch.tensor([0, 4])


def two_sided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    dist = q - k
    return (dist >= 0) & (dist < 4) | (dist < 0) & (-dist < 3)


def apart(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return ~(abs(q - k) <= 2) & (k < q + 6)


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mask function within packed documents, as the installed transformers makes it."""
    remap = getattr(masks, "remap_positions_for_packed_sequence", None)
    inside = function if remap is None else remap(function, POSITIONS)
    return masks.and_masks(inside, masks.packed_sequence_mask_function(NUMBERS))


def packed_of(numbers: Tensor) -> Callable[..., Any]:
    """Return causal attention within documents."""
    return masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(numbers))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": masks.causal_mask_function,
    "bidirectional": masks.bidirectional_mask_function,
    "window": masks.sliding_window_causal_mask_function(5),
    "window, both sides": masks.sliding_window_bidirectional_mask_function(4),
    "window with two widths": two_sided,
    "all but a window": apart,
    "chunks": masks.chunked_causal_mask_function(6, torch.zeros(B, dtype=torch.long)),
    "chunks after padding": masks.chunked_causal_mask_function(6, PADS),
    "chunks, counted from the first token": lambda b, h, q, k: (q // 5 == k // 5) & (k <= q),
    "chunks in both directions": lambda b, h, q, k: (q - PADS[b]) // 4 == (k - PADS[b]) // 4,
    "a window in chunks": masks.and_masks(
        masks.chunked_overlay(8, torch.full((B,), 3)), masks.sliding_window_bidirectional_overlay(2)
    ),
    "packed": packed(masks.causal_mask_function),
    "packed, window": packed(masks.sliding_window_causal_mask_function(3)),
    "packed, chunks": packed(masks.chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.long))),
    "blocks": masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(BLOCKS)),
    "window and blocks": masks.and_masks(
        masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(BLOCKS)), masks.sliding_window_overlay(5)
    ),
    "padding": masks.and_masks(masks.causal_mask_function, masks.padding_mask_function(NUMBERS == 0)),
}
# queries, keys, the first positions of both
PLACES = {"prefill": (N, N, 0, 0), "step": (1, N, N - 1, 0), "tokens": (3, 13, 16, 6), "one, of fewer": (1, 7, 16, 10)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_is_read_as_what_it_allows(name: str, place: str, padded: bool) -> None:
    nq, nk, q_offset, kv_offset = PLACES[place]
    function = FUNCTIONS[name]
    read(function, Positions(B, nq, nk, q_offset, kv_offset))  # by its trace, not evaluated as a mask_mod
    mask = torch.ones(B, N, dtype=torch.bool)
    if padded:
        mask[1, :4] = mask[0, 17:] = False
    wanted = masks.sdpa_mask(B, nq, nk, q_offset, kv_offset, function, mask, allow_is_causal_skip=False)
    assert wanted is not None
    wanted = wanted[:, 0]
    forms: list[int | Tensor] = [q_offset]
    if nq == 1:
        forms.append(torch.tensor(q_offset))
    for form in forms:
        got = pattern_mask(B, nq, nk, form, kv_offset, function, mask)
        dense = got.pattern.to_dense(nq, nk, batch=B, q_offset=got.q_offset)[:, 0]
        assert torch.equal(dense, wanted), form


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("nk", [N, 12])
def test_queries_past_the_keys_and_tables_of_more_elements(name: str, nk: int) -> None:
    got = pattern_mask(1, N, nk, 0, 0, FUNCTIONS[name])
    wanted = masks.sdpa_mask(1, N, nk, 0, 0, FUNCTIONS[name], allow_is_causal_skip=False)
    assert wanted is not None
    assert torch.equal(got.pattern.to_dense(N, nk), wanted)


ROWS: list[Any] = [
    (slice(None), slice(None), slice(0, None), slice(None)), (slice(None), slice(None), slice(-1, None), slice(None)),
    (Ellipsis, slice(-3, None), slice(None)), (slice(None), slice(None), slice(2, 9)), (Ellipsis, slice(None, N)),
    (slice(0, B), slice(0, 1), slice(5, 6), slice(0, N)), Ellipsis, slice(None), (Ellipsis, slice(-100, 100), slice(None)),
]  # fmt: skip


@pytest.mark.parametrize("padding", ["none", "left", "holes"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_of_a_mask_are_the_rows_of_what_it_allows(name: str, padding: str) -> None:
    """A mask that a model cuts to some of its queries allows these queries' pairs."""
    padded = torch.ones(B, N, dtype=torch.bool)
    padded[1, slice(4) if padding == "left" else slice(6, 8)] = padding == "none"
    mask = pattern_mask(B, N, N, 0, 0, FUNCTIONS[name], padded)
    dense = mask.pattern.to_dense(N, N, batch=B)
    for at in ROWS:
        cut, wanted = mask[at], dense[at]
        assert cut.shape == (B, 1, *wanted.shape[2:])
        assert torch.equal(cut.pattern.to_dense(*wanted.shape[2:], batch=B, q_offset=cut.q_offset), wanted), at
        # the rows of rows
        last = cut[:, :, -1:, :]
        assert torch.equal(last.pattern.to_dense(1, N, batch=B, q_offset=last.q_offset), wanted[:, :, -1:]), at


@pytest.mark.parametrize(
    "at",
    [
        (slice(None), slice(None), slice(0, 4), slice(0, 4)), (slice(None), slice(None), 3, slice(None)),
        (slice(None), slice(None), slice(None, None, 2), slice(None)), (Ellipsis, slice(4, 4), slice(None)),
        (slice(0, 1), Ellipsis), (Ellipsis, None), (slice(None), slice(None), torch.arange(3), slice(None)),
        (Ellipsis, slice(None), Ellipsis), (slice(None),) * 5,
    ],
    ids=str,
)  # fmt: skip
def test_other_cuts_of_a_mask_are_refused(at: Any) -> None:
    """Some keys, single rows, steps and lists of rows are no pattern of a call."""
    with pytest.raises(rw.UnsupportedError, match="attention mask: got mask"):
        pattern_mask(B, N, N)[at]


def test_a_position_that_is_a_tensor_is_not_waited_for() -> None:
    with torch.device("meta"):
        position = torch.zeros((), dtype=torch.int64)
    mask = pattern_mask(1, 1, 64, position, 0, FUNCTIONS["window"])
    assert [table.device.type for table in mask.pattern.tables] == ["meta", "meta"]


REFUSED: dict[str, Callable[..., Any]] = {
    "heads": lambda b, h, q, k: (k <= q) & (h == 0),
    "if": lambda b, h, q, k: k <= q if q else q <= k,
    "random numbers": lambda b, h, q, k: torch.rand(()) < 2,
    "a table that is too short": lambda b, h, q, k: NUMBERS[b, k + N] == 0,
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_without_a_symbol_is_not_guessed(name: str) -> None:
    with pytest.raises(UntraceableError):
        read(REFUSED[name], Positions(B, N, N, 0, 0))


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: q % 2 == 0,
        masks.chunked_causal_mask_function(6, torch.tensor([-40, 2**62])),
        # a difference that overflows
        lambda b, h, q, k, at=torch.full((B,), -(2**63) + 3): (q - at[b]) // 6 == (k - at[b]) // 6,
        lambda b, h, q, k: NUMBERS[b, q] == BLOCKS[b, k],
        lambda b, h, q, k: BLOCKS[b, q] > 3,
        lambda b, h, q, k: (k <= q) & (POSITIONS[b, k] % 3 > 0) | (NUMBERS[b, q] > POSITIONS[b, k]),
    ],
)
def test_masks_that_no_model_has(function: Callable[..., Any]) -> None:
    check(function)


# ---- a graph is compared with its function ---------------------------------------------------------------------------


def clamped(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    d = q - k
    if isinstance(d, Tensor):
        # a symbol takes the other branch
        d = d.clamp(max=9)
    return (d >= 0) & (d < 12)


def switched(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k % 2 == 0) & (k <= q) if torch.is_tensor(q) else k <= q


def per_batch(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    causal = k <= q
    return causal & (b == 0) if isinstance(b, Tensor) else causal


def looked_up(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    same = NUMBERS[b, q] == NUMBERS[b, k]
    return same | (k == 0) if isinstance(q, Tensor) else same


def of_attributes(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q if getattr(q, "node", None) else k < q


MISREAD = {
    "a type that is asked": clamped, "a function that asks": switched, "batch elements": per_batch,
    "a table": looked_up, "an attribute that is asked": of_attributes,
}  # fmt: skip


@pytest.mark.parametrize("place", ["prefill", "step", "tokens"])
@pytest.mark.parametrize("name", MISREAD)
def test_a_mask_that_differs_from_its_reading_is_evaluated(name: str, place: str) -> None:
    """A function that computes otherwise with symbols than with tensors gives the mask that it computes with tensors."""
    nq, nk, q_offset, kv_offset = PLACES[place]
    KEPT.clear()
    with pytest.raises(UntraceableError, match="another value than its formula"):
        read(MISREAD[name], Positions(B, nq, nk, q_offset, kv_offset))
    for _ in range(2):
        got = pattern_mask(B, nq, nk, q_offset, kv_offset, MISREAD[name])
        wanted = masks.sdpa_mask(B, nq, nk, q_offset, kv_offset, MISREAD[name], allow_is_causal_skip=False)
        assert wanted is not None
        assert torch.equal(got.pattern.to_dense(nq, nk, batch=B, q_offset=got.q_offset).expand(B, -1, -1, -1), wanted)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_graph_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs that compute other comparisons, each mask is still what its function allows."""
    for one, other in (("le", "lt"), ("ge", "gt"), ("gt", "ge"), ("eq", "ne")):
        monkeypatch.setitem(OPERATORS, one, (getattr(operator, other), False))
    KEPT.clear()
    with pytest.raises(UntraceableError, match="another value than its formula"):
        read(FUNCTIONS[name], Positions(B, N, N, 0, 0))
    check(FUNCTIONS[name])
    KEPT.clear()


def test_a_mask_that_raises_is_told_as_one() -> None:
    """A table that is too short is not called a mask of another value."""
    short = torch.ones(5, dtype=torch.bool)
    with pytest.raises(UntraceableError, match="it raises IndexError: index 15 is out of bounds"):
        read(lambda b, h, q, k: short[k], Positions(1, 16, 16, 0, 0))


def test_a_function_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and later calls of a function, with other tables, do not compare it again."""
    compared: list[object] = []
    disagreement = mask_reading.disagreement
    monkeypatch.setattr(mask_reading, "disagreement", lambda *args: compared.append(args) or disagreement(*args))
    KEPT.clear()
    for width in (5, 6, 5):
        for at in (0, 1, 7):
            pattern_mask(B, 1 + N * (not at), N, at, 0, WINDOW(width))
    assert len(compared) == 2
    for shift in range(3):
        pattern_mask(B, N, N, 0, 0, packed_of(NUMBERS + shift))
    assert len(compared) == 3


# ---- reading in the context of a module ------------------------------------------------------------------------------

WINDOW = masks.sliding_window_causal_mask_function
EITHER, BOTH, OVERLAY = masks.or_masks, masks.and_masks, masks.sliding_window_overlay


def allowed(function: Callable[..., Any], mine: bool = True) -> Tensor:
    """Return the dense mask of a prefill, through the registered function or by the library's own evaluation."""
    if mine:
        return pattern_mask(B, N, N, 0, 0, function).pattern.to_dense(N, batch=B).expand(B, -1, -1, -1)
    dense = masks.sdpa_mask(B, N, N, 0, 0, function, allow_is_causal_skip=False, use_vmap=False)
    assert dense is not None
    return dense


def check(function: Callable[..., Any]) -> None:
    assert torch.equal(allowed(function), allowed(function, mine=False))


def cells(function: Callable[..., Any]) -> list[Any]:
    """Return every cell of a mask function and of the functions in it."""
    found: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        found.append(cell)
        inside = cell.cell_contents
        for each in inside if isinstance(inside, tuple) else (inside,):
            found += cells(each)
    return found


def test_a_changed_closure_is_read_anew() -> None:
    window = WINDOW(5)
    check(window)
    (width,) = (cell for cell in cells(window) if cell.cell_contents == 5)
    (parts,) = (cell for cell in cells(window) if isinstance(cell.cell_contents, tuple))
    for changed in (3, 1, 8):
        width.cell_contents = changed
        check(window)
    # another function in the tuple, and its parts in another order
    parts.cell_contents = (OVERLAY(2), masks.causal_mask_function)
    check(window)
    parts.cell_contents = parts.cell_contents[::-1]
    check(window)
    parts.cell_contents = (masks.sliding_window_bidirectional_overlay(2),)
    check(window)
    # other code behind the same function
    inner = parts.cell_contents[0]
    inner.__code__ = masks.sliding_window_overlay(2).__code__.replace()
    check(window)
    parts.cell_contents = ()
    assert bool(allowed(window).all())


CHUNKS = masks.chunked_causal_mask_function


@pytest.mark.parametrize("pads", [[0, 0], [6, 12], [1, 1], [0, 4], [-3, 20]], ids=str)
def test_chunks_are_those_of_every_position(pads: list[int]) -> None:
    """Prefills and steps, of keys that begin anywhere, read the numbers of padding again and nothing else."""
    numbers = torch.tensor(pads)
    for nq, nk, q_offset, kv_offset in itertools.product((1, 2, 7), (7, 8, 13), (5, 6, 7, 12, 17), (0, 1, 5, 6, 10)):
        if q_offset < kv_offset:
            continue
        function = CHUNKS(6, numbers)
        got = pattern_mask(B, nq, nk, q_offset, kv_offset, function)
        wanted = masks.sdpa_mask(B, nq, nk, q_offset, kv_offset, function, allow_is_causal_skip=False)
        assert wanted is not None
        dense = got.pattern.to_dense(nq, nk, batch=B, q_offset=got.q_offset)
        assert torch.equal(dense.expand(wanted.shape), wanted), (nq, nk, q_offset, kv_offset)


def test_equal_calls_of_chunks_share_a_pattern() -> None:
    """The pattern of chunks is one object, with new tensors of padding in each call, so its program is found by it."""
    one, other = (pattern_mask(B, N, N, 0, 0, CHUNKS(6, torch.zeros(B, dtype=torch.long))).pattern for _ in range(2))
    assert one is other
    assert str(one) == "Causal() & Segments(6)"
    # all tokens are in one chunk
    assert (
        pattern_mask(B, N, N, 0, 0, CHUNKS(N, torch.zeros(B, dtype=torch.long))).pattern
        is pattern_mask(B, N, N).pattern
    )


def test_fewer_numbers_of_padding_than_batch_elements_are_not_guessed() -> None:
    pattern_mask(B, N, N, 0, 0, CHUNKS(6, torch.zeros(B, dtype=torch.long)))
    with pytest.raises((rw.PatternError, IndexError)):
        allowed(CHUNKS(6, torch.zeros(B, dtype=torch.long)[:1]))


def test_known_functions_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that reads what another one did has its pairs; one that may read more is traced at each call."""
    traced: list[object] = []
    trace = mask_reading.trace
    monkeypatch.setattr(mask_reading, "trace", lambda *args, **kw: traced.append(args) or trace(*args, **kw))

    def found(function: Callable[..., Any]) -> int:
        count = len(traced)
        check(function)
        return len(traced) - count

    KEPT.clear()
    assert [found(WINDOW(width)) for width in (5, 5, 6, 5)] == [1, 0, 1, 0]
    # other code with the same number
    assert [found(each) for each in (OVERLAY(5), masks.sliding_window_bidirectional_overlay(5))] == [1, 1]
    pads = torch.tensor([0, 3])
    assert [found(CHUNKS(5, each)) for each in (pads, pads.clone(), pads + 1)] == [1, 0, 1]
    pads += 1
    assert [found(CHUNKS(5, pads)) for _ in range(2)] == [1, 0]
    assert [found(packed_of(NUMBERS)) for _ in range(2)] == [1, 1]
    assert [found(functools.partial(WINDOW(5))) for _ in range(2)] == [1, 1]
    rw.memory.trim()
    assert found(WINDOW(5)) == 1


STEPS: dict[str, tuple[Callable[[int], tuple[int, int]], Callable[..., Any] | None]] = {
    # (keys, position of the first key) at a position; None is a call without a mask function
    "causal": (lambda at: (at + 1, 0), masks.causal_mask_function),
    "none": (lambda at: (at + 1, 0), None),
    "window": (lambda at: (at + 1, 0), WINDOW(8)),
    "window, dropped keys": (lambda at: (min(at + 1, 8), max(at - 7, 0)), WINDOW(8)),
    "window, in a longer cache": (lambda at: (64, 0), WINDOW(8)),
    "causal, in a longer cache": (lambda at: (64, 0), masks.causal_mask_function),
    "two sides": (lambda at: (at + 1, 0), masks.sliding_window_bidirectional_mask_function(4)),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_share_a_pattern(name: str) -> None:
    """From the step with a full window on, all steps share one pattern, which equals the library's mask at each position."""
    keys, function = STEPS[name]
    patterns = []
    for at in range(4, 40):
        nk, first = keys(at)
        mask = pattern_mask(1, 1, nk, at, first, function)
        wanted = masks.sdpa_mask(
            1, 1, nk, at, first, function or masks.causal_mask_function, allow_is_causal_skip=False
        )
        assert wanted is not None
        assert torch.equal(mask.pattern.to_dense(1, nk, q_offset=mask.q_offset), wanted)
        patterns.append(mask.pattern)
    assert len(set(map(id, patterns[4:]))) == 1
    # all keys, until the window is full
    assert len(set(map(id, patterns))) <= 2
    # and its steps are prepared
    assert patterns[-1].fixed


def test_a_step_makes_few_calls() -> None:
    # the first mask is compared with its function
    pattern_mask(1, 1, 40, 39, 0, WINDOW(8))
    for at in (40, 41, 100, 5000):
        mask = functools.partial(pattern_mask, 1, 1, at + 1, at, 0, WINDOW(8))
        # the function reads what an earlier one did, so it is not traced
        assert calls(mask) <= 18
    layer, token = PagedLayer(64, 16), torch.randn(2, 2, 1, 8)
    with torch.no_grad():
        layer.update(token, token)
        for _ in range(14):
            # two of them leave the cache as it was if the step fails
            assert calls(lambda: layer.update(token, token)) <= 8


# ---- compiled calls --------------------------------------------------------------------------------------------------


def graph_of(function: Callable[..., Any], place: str, padded: Tensor, row: bool = False) -> Callable[[], Tensor]:
    """Return a function that computes the pairs of a mask with padding by one graph, as attention to one-hot values."""
    nq, nk, q_offset, kv_offset = PLACES[place]
    values = torch.eye(nk).expand(B, 1, nk, nk)

    def call(position: Tensor) -> Tensor:
        mask = pattern_mask(B, nq, nk, position if row else q_offset, kv_offset, function, padded)
        zeros = torch.zeros(B, 1, nq, nk), torch.zeros(B, 1, nk, nk)
        return rw.attention(*zeros, values, mask.pattern, q_offset=mask.q_offset)

    torch._dynamo.reset()
    compiled_call = torch.compile(call, fullgraph=True, backend="eager")
    return torch.no_grad()(lambda: compiled_call(torch.tensor(q_offset)) > 0)


def compiled(function: Callable[..., Any], place: str, padded: Tensor, *, row: bool = False) -> tuple[Tensor, Tensor]:
    """Return the pairs of a mask with padding by one graph and by the library."""
    nq, nk, q_offset, kv_offset = PLACES[place]
    got = graph_of(function, place, padded, row)()
    wanted = masks.sdpa_mask(B, nq, nk, q_offset, kv_offset, function, padded, allow_is_causal_skip=False)
    assert wanted is not None
    return got, wanted


#: with every operation and every table that a mask has; compiling takes seconds each
COMPILED = [
    ("chunks after padding", "one, of fewer"),
    ("packed, window", "prefill"),
    ("window and blocks", "one, of fewer"),
]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=[pytest.mark.long] * ((name, place) not in COMPILED))
        for name in FUNCTIONS
        for place in ("prefill", "one, of fewer")
        if name != "all but a window"
    ],
)
def test_one_graph_has_the_pairs_of_a_mask(name: str, place: str) -> None:
    """A prefill, and a step at a position in a tensor; torch.compile cannot trace ``~`` of a symbol."""
    padded = torch.ones(B, N, dtype=torch.bool)
    padded[1, :4] = padded[0, 17:] = False
    got, wanted = compiled(FUNCTIONS[name], place, padded, row=place != "prefill")
    assert torch.equal(got, wanted)


def apart_by(table: Tensor, numbers: Tensor) -> Callable[..., Any]:
    """Return a packed mask of differences between entries of a table."""
    return lambda b, h, q, k: (table[b, k] <= table[b, q]) & (numbers[b, q] == numbers[b, k])


def test_positions_of_packed_documents_are_checked() -> None:
    """Compiled code takes entries of a table for positions, and raises an error if they are not positions."""
    table, numbers = POSITIONS + 7, NUMBERS - 3
    graph = graph_of(apart_by(table, numbers), "prefill", torch.ones(B, N, dtype=torch.bool))
    same = (NUMBERS[:, :, None] == NUMBERS[:, None]).tril()
    assert torch.equal(graph()[:, 0], same)
    pieces = torch.where(torch.arange(N) < 4, 2, NUMBERS)
    for entries, parts in ((POSITIONS // 2, NUMBERS), (-POSITIONS, NUMBERS), (torch.arange(N).expand(B, N), pieces)):
        check(apart_by(entries, parts))
        # the same graph, with other values
        table.copy_(entries)
        numbers.copy_(parts)
        with pytest.raises(RuntimeError, match="a packed mask: got positions"):
            graph()


def test_numbers_of_documents_may_be_any() -> None:
    """Numbers at both ends of int64 are told apart; compiled code, which cannot rank them, raises an error."""
    ends = torch.where(NUMBERS == 0, torch.iinfo(torch.int64).min, NUMBERS + torch.iinfo(torch.int64).max - 2)
    check(packed_of(ends))
    with pytest.raises(RuntimeError, match="numbers of documents"):
        compiled(packed_of(ends), "prefill", torch.ones(B, N, dtype=torch.bool))


def test_sums_that_may_overflow_are_refused_in_compiled_code() -> None:
    """An int64 table may have any entries, so compiled code moves none to the other side of a comparison."""
    low = torch.full((B, N), torch.iinfo(torch.int64).min + 3)
    sums = lambda b, h, q, k: low[b, k] - 5 <= NUMBERS[b, q]  # noqa: E731
    check(sums)
    with pytest.raises(Unsupported):
        compiled(sums, "step", torch.ones(B, N, dtype=torch.bool))
