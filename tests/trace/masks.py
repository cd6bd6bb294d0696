"""A corpus of mask functions: of attention-gym, transformers, torchtitan and torchtune, of these tests, and hostile ones.

Functions of libraries that the tests do not install are written here anew, from their definitions.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Entries of tables, more than any call of the tests has positions.
N = 4096
Function = Callable[..., Any]


class Mask(NamedTuple):
    """A mask function, and how much of it is recognised.

    Attributes:
        function: The function.
        state: "recognised" wholly, "open" at least in a part, or "refused" by the trace.
    """

    function: Function
    state: str = "recognised"


def drawn(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def documents(count: int, seed: int = 0) -> Tensor:
    """Return the numbers (N,) of about ``count`` documents of consecutive tokens."""
    lengths = torch.randint(3, 2 * N // count, (count,), generator=drawn(seed))
    return torch.repeat_interleave(torch.arange(count + 1), torch.cat([lengths, torch.tensor([N])]))[:N]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def every(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q.new_ones((), dtype=torch.bool)


def both(*masks: Function) -> Function:
    """Return the pairs that every mask allows, as torch's ``and_masks`` does."""

    def joined(b, h, q, k):  # type: ignore[no-untyped-def]
        found = b.new_ones((), dtype=torch.bool)
        for mask in masks:
            found = found & mask(b, h, q, k)
        return found

    return joined


def either(*masks: Function) -> Function:
    """Return the pairs that any mask allows, as torch's ``or_masks`` does."""

    def joined(b, h, q, k):  # type: ignore[no-untyped-def]
        found = b.new_zeros((), dtype=torch.bool)
        for mask in masks:
            found = found | mask(b, h, q, k)
        return found

    return joined


# ---- attention-gym ---------------------------------------------------------------------------------------------------


def _in_documents(inner: Function, starts: Tensor, ids: Tensor) -> Function:
    """Apply a mask inside each document, with positions counted from its start."""

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        return (ids[q] == ids[k]) & inner(b, h, q - starts[ids[q]], k - starts[ids[k]])

    return mask


def _batched(inner: Function, size: int) -> Function:
    return lambda b, h, q, k: (q // size == k // size) & inner(b, h, q % size, k % size)


def _block_diffusion(clean: int, size: int) -> Function:
    """Noised tokens come first, then clean ones; a block attends itself, and clean blocks before it."""

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        noised_q, noised_k = q < clean, k < clean
        block_q, block_k = q % clean // size, k % clean // size
        own = (block_q == block_k) & (noised_q == noised_k)
        earlier = (block_q > block_k) & noised_q & ~noised_k
        return own | earlier | (block_q >= block_k) & ~noised_q & ~noised_k

    return mask


def _neighborhood(at: Callable[[Any], tuple[Any, Any]], sides: tuple[int, int], reach: tuple[int, int]) -> Function:
    """Boxes around each token of an image, which move inwards at its borders."""

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        found = None
        for mine, theirs, side, r in zip(at(q), at(k), sides, reach, strict=True):
            center = mine.clamp(r, side - 1 - r)
            near = (center - r <= theirs) & (theirs <= center + r)
            found = near if found is None else found & near
        return found

    return mask


def _tiled(width: int, tile: tuple[int, int]) -> Callable[[Any], tuple[Any, Any]]:
    """Return the place in an image of a token in tile order."""

    def at(i):  # type: ignore[no-untyped-def]
        number, inside = i // (tile[0] * tile[1]), i % (tile[0] * tile[1])
        return number // (width // tile[1]) * tile[0] + inside // tile[1], number % (width // tile[1]) * tile[1] + (
            inside % tile[1]
        )

    return at


def _morton(i: Any) -> tuple[Any, Any]:
    """Return the place of a token on a Z-order curve."""

    def every_second(code):  # type: ignore[no-untyped-def]
        code = code & 0x55555555
        for shift, kept in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
            code = (code | (code >> shift)) & kept
        return code

    return every_second(i), every_second(i >> 1)


def _sliding_tiles(canvas: tuple[int, ...], reach: tuple[int, ...], tile: int, text: int) -> Function:
    """Tiles of a video attend the tiles near them and the text after them; text attends all."""
    pixels = math.prod(canvas) * tile

    def at(i):  # type: ignore[no-untyped-def]
        number, found = i // tile, []
        for side in reversed(canvas):
            found.append(number % side)
            number = number // side
        return found[::-1]

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        near = (q < pixels) & (k < pixels)
        for mine, theirs, side, r in zip(at(q), at(k), canvas, reach, strict=True):
            center = mine.clamp(r, side - 1 - r)
            near = near & (theirs >= center - r) & (theirs <= center + r)
        seen = (q < pixels) & (k >= pixels) & (k < pixels + text)
        return near | seen | (q >= pixels) & (k < pixels + text)

    return mask


def _frames(prompt: int, frames: int, tokens: int, width: int) -> Function:
    """Tokens of a video attend the frames near them, rounded to whole blocks, and everything attends the prompt."""
    stop, reach = prompt + frames * tokens, width * tokens // 2

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        rounded = torch.floor(q / 16) * 16
        near = (k >= rounded - reach) & (k <= rounded + reach)
        return (k < prompt) | (q < prompt) | near & (q < stop) & (k < stop)

    return mask


def _same_place(prompt: int, tokens: int, width: int) -> Function:
    """Tokens of a video attend those at nearby places of each frame."""

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        apart = ((q - prompt) % tokens - (k - prompt) % tokens).abs()
        return (k < prompt) | (q < prompt) | (apart <= width)

    return mask


def gym() -> dict[str, Mask]:
    """Return the kinds of masks of attention-gym and its examples."""
    ids = documents(40)
    starts = torch.nn.functional.pad(torch.bincount(ids).cumsum(0), (1, 0))
    first = torch.arange(len(starts) - 1) // 4 * 4
    marked = torch.zeros(N, dtype=torch.bool)
    marked[::501] = True
    images = torch.tensor([[0, 40 + 13 * i] for i in range(N // 64)])
    ancestors = torch.rand(N, N, generator=drawn(1)) < 0.3
    chosen = torch.randint(0, N // 64, (2, 4, N // 64, 8), generator=drawn(2))
    real = torch.randint(30, 64, (N // 64,), generator=drawn(3))
    pages = torch.randperm(N // 16, generator=drawn(4)).repeat(2, 1)
    pages[:, ::5] = -1

    def shared_prefix(b, h, q, k):  # type: ignore[no-untyped-def]
        mine = ids[q]
        prefix = first[mine]
        whole = (mine != prefix) & (k >= starts[prefix]) & (k < starts[prefix + 1])
        return (k >= starts[mine]) & (q >= k) | whole

    def tree(b, h, q, k):  # type: ignore[no-untyped-def]
        node = (k - 10).clamp(min=0, max=N - 1)
        return (k < 10) | (k >= 10) & (k < 10 + N) & ancestors[q, node]

    def drafts(b, h, q, k):  # type: ignore[no-untyped-def]
        at = k - 17
        return (k < 17) | (k >= 17) & (q // 8 == at // 8) & (at % 8 <= q % 8)

    def selected(b, h, q, k):  # type: ignore[no-untyped-def]
        return (chosen[b, h, q // 64] == (k // 64).unsqueeze(-1)).any(dim=-1)

    def paged(b, h, q, k):  # type: ignore[no-untyped-def]
        page = pages[b, k // 16]
        return torch.where(page >= 0, q >= page * 16 + k % 16, False)

    def image(i):  # type: ignore[no-untyped-def]
        return i // 32, i % 32

    return {
        "causal": Mask(causal),
        "every": Mask(every),
        "batched": Mask(_batched(causal, 48)),
        "block diffusion": Mask(_block_diffusion(60, 8)),
        "dilated window": Mask(lambda b, h, q, k: ((q - k).abs() <= 40) & ((q - k).abs() % 4 == 0)),
        "documents, causal": Mask(_in_documents(causal, starts, ids)),
        "documents": Mask(_in_documents(every, starts, ids)),
        "documents, prefix": Mask(_in_documents(either(lambda b, h, q, k: k < 9, causal), starts, ids)),
        "documents by starts": Mask(lambda b, h, q, k: (k >= starts[ids[q]]) & causal(b, h, q, k)),
        "images": Mask(lambda b, h, q, k: (q >= images[k // 64][0]) & (q < images[k // 64][1])),
        "marked and window": Mask(either(lambda b, h, q, k: (q - k).abs() <= 30, lambda b, h, q, k: marked[q] | marked[k])),
        "tree": Mask(tree),
        "drafts": Mask(drafts),
        "neighborhood": Mask(_neighborhood(image, (32, 32), (3, 2))),
        "neighborhood of tiles": Mask(_neighborhood(_tiled(32, (8, 8)), (32, 32), (3, 2))),
        "neighborhood on a curve": Mask(_neighborhood(_morton, (32, 32), (3, 3))),
        "prefix": Mask(either(lambda b, h, q, k: k < 33, causal)),
        "shared prefix": Mask(shared_prefix),
        "window": Mask(both(lambda b, h, q, k: q - k <= 50, causal)),
        "sliding tiles": Mask(_sliding_tiles((4, 4), (1, 1), 64, 20)),
        "sliding tiles of a video": Mask(_sliding_tiles((2, 2, 2), (0, 1, 0), 128, 20)),
        "frames": Mask(_frames(22, 5, 64, 2)),
        "places in frames": Mask(_same_place(22, 64, 2)),
        "selected": Mask(selected),
        "selected, padded": Mask(both(selected, lambda b, h, q, k: k % 64 < real[k // 64])),
        "pages": Mask(paged),
        "near in both axes": Mask(lambda b, h, q, k: ((q // 32 - k // 32).abs() <= 3) & ((q % 32 - k % 32).abs() <= 3)),
    }  # fmt: skip


# ---- libraries -------------------------------------------------------------------------------------------------------


def transformers() -> dict[str, Mask]:
    """Return the mask functions of transformers."""
    from transformers import masking_utils as m

    numbers = torch.stack([documents(30), documents(11, 1)])
    positions = torch.stack([torch.cat([torch.arange(int(c)) for c in row.bincount()]) for row in numbers])
    blocks = torch.full((2, N), -1)
    blocks[0, 30:70], blocks[1, 50:90], blocks[1, 140:300] = 0, 0, 1
    none = torch.zeros(2, dtype=torch.long)

    def packed(function: Function) -> Function:
        return m.and_masks(
            m.remap_positions_for_packed_sequence(function, positions), m.packed_sequence_mask_function(numbers)
        )

    functions = {
        "causal": m.causal_mask_function,
        "bidirectional": m.bidirectional_mask_function,
        "window": m.sliding_window_causal_mask_function(50),
        "window of 1000": m.sliding_window_causal_mask_function(1000),
        "window on both sides": m.sliding_window_bidirectional_mask_function(40),
        "chunks": m.chunked_causal_mask_function(60, none),
        "chunks, padded": m.chunked_causal_mask_function(60, torch.tensor([0, 4])),
        "packed": packed(m.causal_mask_function),
        "packed window": packed(m.sliding_window_causal_mask_function(30)),
        "packed chunks": packed(m.chunked_causal_mask_function(40, none)),
        "blocks": m.or_masks(m.causal_mask_function, m.blockwise_overlay(blocks)),
        "blocks in a window": m.and_masks(
            m.or_masks(m.causal_mask_function, m.blockwise_overlay(blocks)), m.sliding_window_overlay(50)
        ),
        "padding": m.and_masks(m.causal_mask_function, m.padding_mask_function(numbers < 9)),
        "offsets": m.add_offsets_to_mask_function(m.sliding_window_causal_mask_function(9), 5, 2),
    }
    return {name: Mask(function) for name, function in functions.items()}


def trainers() -> dict[str, Mask]:
    """Return the kinds of masks of torchtitan and torchtune."""
    ids = documents(25, 3)
    rows = torch.stack([ids, documents(9, 4)])
    starts = torch.nn.functional.pad((ids.diff() != 0).nonzero().flatten() + 1, (1, 0))
    return {
        "documents": Mask(lambda b, h, q, k: ids[q] == ids[k]),
        "packed": Mask(lambda b, h, q, k: k >= starts[ids[q]]),
        "packed, causal": Mask(lambda b, h, q, k: (k >= starts[ids[q]]) & (q >= k)),
        "fixed blocks": Mask(lambda b, h, q, k: q // 64 == k // 64),
        "window": Mask(lambda b, h, q, k: (k <= q) & (q - k < 40)),
        "known documents": Mask(lambda b, h, q, k: (ids[q] == ids[k]) & (ids[q] >= 0)),
        "packed rows": Mask(lambda b, h, q, k: (q >= k) & (rows[b, q] == rows[b, k])),
        "offset": Mask(functools.partial(lambda b, h, q, k, offset: k <= offset, offset=70)),
        "chunks": Mask(_batched(causal, 50)),
    }


# ---- tests -----------------------------------------------------------------------------------------------------------


def tests() -> dict[str, Mask]:
    """Return kinds of masks that other tests have."""
    t, pairs = torch.randint(0, 5, (N,), generator=drawn(5)), torch.randint(0, 2, (N, N), generator=drawn(6))
    lengths, reach = torch.tensor([40, 1000]), torch.tensor([3, 0, 29, 11])
    table, left, shift = (
        torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]]),
        torch.randn(2, N, 8, generator=drawn(7)),
        torch.tensor(3),
    )
    return {
        "window by head": Mask(lambda b, h, q, k: (q - k).abs() <= 20 + 7 * h),
        "documents by batch": Mask(lambda b, h, q, k: (q // 50 + b == k // 50 + b) & (q % (b + 3) >= 0)),
        "sparse": Mask(lambda b, h, q, k: (q >= 40) & ((q + 2 * k + b) % 5 == 0), "open"),
        "residues": Mask(lambda b, h, q, k: (q + k + h) % 3 > 0, "open"),
        "shifted": Mask(lambda b, h, q, k: q >= k + 5 * b - h),
        "residue": Mask(lambda b, h, q, k: (q + 2 * k) % 4 < 2, "open"),
        "ids": Mask(lambda b, h, q, k: t[q] == t[k]),
        "pairs": Mask(lambda b, h, q, k: pairs[q, k] == 1),
        "lengths": Mask(lambda b, h, q, k: k < lengths[b]),
        "reach by head": Mask(lambda b, h, q, k: (q - k).abs() <= reach[h]),
        "residue by both": Mask(lambda b, h, q, k: (q + k) % 3 == table[b, h], "open"),
        "two sided": Mask(lambda b, h, q, k: (q - k >= 0) & (q - k < 4) | (q - k < 0) & (-(q - k) < 3)),
        "apart": Mask(lambda b, h, q, k: ~(abs(q - k) <= 2) & (k < q + 6)),
        "rows": Mask(lambda b, h, q, k: (left[b, q] * left[b, k]).sum() > 0, "open"),
        "even": Mask(lambda b, h, q, k: k % 2 == 0),
        "tensor": Mask(lambda b, h, q, k: (k <= q + shift) & (q - k <= 30)),
        "blocks": Mask(lambda b, h, q, k: (q // 64 + k // 64) % 3 == 0, "open"),
        "functions": Mask(lambda b, h, q, k: torch.where(torch.ge(q, k), k > math.pi, torch.eq(q, k))),
    }  # fmt: skip


# ---- hostile ---------------------------------------------------------------------------------------------------------


class Window:
    """An object that is a mask function, and has one."""

    def __init__(self, reach: int):
        self.reach = reach

    def __call__(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return (q - k).abs() <= self.reach

    def method(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return q - k <= self.reach


class Net(torch.nn.Module):
    """A module that is a mask function of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.reach = torch.nn.Parameter(torch.tensor(9.0))

    def forward(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return (q - k).abs() <= self.reach


class Subclass(Tensor):
    """A tensor class without an operation of its own."""


WIDTH = 17


def hostile() -> dict[str, Mask]:
    """Return functions at the edges of what can be traced or recognised."""
    width, box, table = 12, [5], torch.randint(0, 9, (N,), generator=drawn(8))
    by_block = torch.rand(N // 128 + 1, N // 128 + 1, generator=drawn(9)) < 0.5
    bools = torch.rand(2, 4, N // 64, N // 64, generator=drawn(10)) < 0.5
    array, narrow, bytes_ = np.arange(N) % 7, torch.arange(N, dtype=torch.int32) // 9, torch.arange(N).to(torch.uint8)
    far = torch.arange(N).where(torch.arange(N) % 5 > 0, torch.iinfo(torch.int64).max)
    wide = torch.arange(N) + 2**32
    counter, memo = [0], {}

    def nested(b, h, q, k):  # type: ignore[no-untyped-def]
        def inner(x):  # type: ignore[no-untyped-def]
            return x <= width

        return inner((q - k).abs())

    def by_global(b, h, q, k):  # type: ignore[no-untyped-def]
        return q - k < WIDTH

    def branch(b, h, q, k):  # type: ignore[no-untyped-def]
        return q >= k if q > k else k > q

    def catching(b, h, q, k):  # type: ignore[no-untyped-def]
        try:
            return q >= k if bool(q > 3) else k >= q
        except Exception:  # noqa: BLE001  (the hostile part)
            return q >= k

    def counts(b, h, q, k):  # type: ignore[no-untyped-def]
        counter[0] += 1
        return q - k <= 3 + 0 * counter[0]

    def leaks(b, h, q, k):  # type: ignore[no-untyped-def]
        return memo.setdefault("q", q) >= k

    def loop(b, h, q, k):  # type: ignore[no-untyped-def]
        found = q == k
        for step in (1, 2, 4, 8, 16):
            found = found | (q - k == step)
        return found

    def writes(b, h, q, k):  # type: ignore[no-untyped-def]
        table[3] += 0
        return table[q] >= table[k]

    def mapped(b, h, q, k):  # type: ignore[no-untyped-def]
        return torch.vmap(lambda x: x >= k)(q[None])[0]

    def made(b, h, q, k):  # type: ignore[no-untyped-def]
        mask = torch.zeros(N, dtype=torch.bool)
        mask[::3] = True
        return mask[k]

    def chain(kind: Any, count: int) -> Function:
        def mask(b, h, q, k):  # type: ignore[no-untyped-def]
            found = table[q] == table[k]
            for i in range(count):
                found = kind(found, table[q] + i <= k)
            return found

        return mask

    functions: dict[str, Any] = {
        "closure": lambda b, h, q, k: q - k < width,
        "entry of a list": lambda b, h, q, k: q - k < box[0],
        "nested": nested,
        "global": by_global,
        "partial": functools.partial(lambda w, b, h, q, k: q - k < w, 9),
        "object": Window(8),
        "method": Window(8).method,
        "module": Net(),
        "chained by &": lambda b, h, q, k: (q - k >= 0) & (q - k <= 5) & (k >= 1),
        "item of a tensor": lambda b, h, q, k: q - k <= table[3].item(),
        "where": lambda b, h, q, k: torch.where(q < 30, q >= k, (q - k).abs() < 9),
        "floor of negatives": lambda b, h, q, k: (k - q) // 8 == -1,
        "fmod of negatives": lambda b, h, q, k: torch.fmod(k - q, 700) < -2,
        "remainder of negatives": lambda b, h, q, k: (k - q) % 700 < 3,
        "division to zero": lambda b, h, q, k: torch.div(k - q, 8, rounding_mode="trunc") == 0,
        "clamp": lambda b, h, q, k: k >= (q - 9).clamp(min=4, max=200),
        "table of blocks": lambda b, h, q, k: by_block[q // 128, k // 128],
        "table by element and head": lambda b, h, q, k: bools[b, h, q // 64, k // 64] & (q >= k),
        "entry from the end": lambda b, h, q, k: bools[b, h, q // 64 - N // 64, -k // 64 - 1],
        "bits of one side": lambda b, h, q, k: (q & -16) == (k & -16),
        "int32": lambda b, h, q, k: narrow[q] - narrow[k] <= 2,
        "int32 that overflows": lambda b, h, q, k: q.int() * 2**22 >= k.int() * 2**22,
        "int32 and a number beyond it": lambda b, h, q, k: (narrow[q] >= 2**40) & (q >= k),
        "int32 and a sum beyond it": lambda b, h, q, k: narrow[q] + 2**31 - 1 >= narrow[k],
        "int8": lambda b, h, q, k: (q - k).to(torch.int8).abs() <= 5,
        "int16": lambda b, h, q, k: ((q - k) * 1024).to(torch.int16).abs() >= 0,
        "uint8": lambda b, h, q, k: q.to(torch.uint8) >= k.to(torch.uint8),
        "uint8 and a negative number": lambda b, h, q, k: (bytes_[q] >= -5) | (q - k == 2),
        "uint8 in reverse": lambda b, h, q, k: (bytes_[q] > bytes_[k]) & (bytes_[k] < bytes_[q]),
        "int64 by distance that overflows": lambda b, h, q, k: far[(q - k).abs()] >= k - q,
        "int32 of a number beyond it": lambda b, h, q, k: wide[q].int() <= k,
        "int64 at its end": lambda b, h, q, k: (far[q] <= far[k]) & (far[q] > far[k] - 0),
        "sum of bools": lambda b, h, q, k: (q > 5).int() + (k > 9).int() == 1,
        "product of bools": lambda b, h, q, k: (q > 5) * (k > 9),
        "bools that add": lambda b, h, q, k: ((q > 5) + (k > 9)) & (q >= k),
        "xor": lambda b, h, q, k: (q >= k) ^ (k < 7),
        "float division": lambda b, h, q, k: q / 3 >= k / 3,
        "float product": lambda b, h, q, k: (q * 0.1).floor() == (k * 0.1).floor(),
        "named operands": lambda b, h, q, k: torch.sub(input=q, other=k) <= torch.neg(input=torch.mul(k, other=-1)),
        "in another dtype": lambda b, h, q, k: narrow.to(q)[q] <= narrow.type_as(k)[k],
        "any of a row": lambda b, h, q, k: (table[:4] == (k % 9)[None]).any(),
        "array as a tensor": lambda b, h, q, k: torch.from_numpy(array)[q] == torch.from_numpy(array)[k],
        "number of an array": lambda b, h, q, k: torch.as_tensor(array[3]) <= q - k,
        "number of numpy": lambda b, h, q, k: np.int64(7) + k >= q * np.int64(1),
        "Python's random numbers": lambda b, h, q, k: q - k < random.Random(3).randint(5, 9),
        "counter": counts,
        "loop": loop,
        "number": lambda b, h, q, k: True,
        "constant tensor": lambda b, h, q, k: torch.tensor(True),
        "shape": lambda b, h, q, k: q >= k if q.ndim == 0 and q.shape == () else k > q,
        "dtype": lambda b, h, q, k: q >= k if q.dtype == torch.int64 else k > q,
        "in place": lambda b, h, q, k: (q - k).abs_() < 5,
        "maximum": lambda b, h, q, k: torch.maximum(q - k, k - q) <= 12,
        "sum of absolute values": lambda b, h, q, k: (q - k).abs() + (q - 2 * k).abs() - torch.minimum(q, 3 * k) <= 40,
        "chain of and": chain(lambda x, y: x & y, 300),
        "chain of or": chain(lambda x, y: x | y, 300),
    }  # fmt: skip
    opened: dict[str, Any] = {
        "float and nan": lambda b, h, q, k: ~((q / (q - 3).clamp(min=0)) * 0.0 < k / 1.0),
        "int64 that overflows": lambda b, h, q, k: far[q] + k <= far[k] + 5,
        "bits": lambda b, h, q, k: ((q >> 3) ^ (k >> 3)) & 1 == 0,
        "float16 that rounds": lambda b, h, q, k: (q.half() - k.half()) >= 0,
        "stack": lambda b, h, q, k: torch.stack([q >= k, k < 9]).any(),
        "any of a named argument": lambda b, h, q, k: torch.any(input=torch.stack([q, q + 9, q - 9]) == k),
        "minimum by residue": lambda b, h, q, k: torch.minimum(q, k) % 5 == 0,
        "chain of xor": chain(lambda x, y: x ^ y, 40),
        "many absolute values": lambda b, h, q, k: sum((q - i * k).abs() for i in range(1, 16)) <= 9000,
    }
    refused: dict[str, Any] = {
        "if": branch,
        "if that is caught": catching,
        "and": lambda b, h, q, k: q >= k and k > 3,
        "chained": lambda b, h, q, k: 0 <= q - k <= 5,
        "item": lambda b, h, q, k: q.item() >= 3,
        "array by index": lambda b, h, q, k: array[q] == array[k],
        "torch's random numbers": lambda b, h, q, k: torch.rand(()) > q,
        "writes": writes,
        "mapped": mapped,
        "no bool": lambda b, h, q, k: q - k,
        "no number": lambda b, h, q, k: torch.stack([q >= k, k < 9]),
        "made table": made,
        "subclass": lambda b, h, q, k, t=torch.zeros(N).as_subclass(Subclass): t[k] <= q,
        "float of an index": lambda b, h, q, k: math.sqrt(q) >= k,
        "tensor of indices": lambda b, h, q, k: torch.tensor([q, k]).sum() > 3,
        "max": lambda b, h, q, k: max(q, k) < 9,
        "kept symbol": leaks,
    }
    return {
        **{name: Mask(function) for name, function in functions.items()},
        **{name: Mask(function, "open") for name, function in opened.items()},
        **{name: Mask(function, "refused") for name, function in refused.items()},
    }


@functools.cache
def masks() -> dict[str, Mask]:
    """Return the corpus, by group and name."""
    groups = {"gym": gym, "transformers": transformers, "trainers": trainers, "tests": tests, "hostile": hostile}
    return {f"{group}: {name}": mask for group, make in groups.items() for name, mask in make().items()}
