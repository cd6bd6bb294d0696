"""Functions shared by the kernels: records of the queue, mask words, and loads and stores of tiles."""

# Triton parses the source of these functions, which rules out annotations and the usual style of names
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl

# Arguments that change from call to call while a cache grows. They are not specialised, so that a change causes no new
# compilation. The strides of lse and delta over tokens are not listed, since they are 1 or the rate of a view.
SIZES = (
    "heads", "nq", "nk", "tokens", "columns",
    *(f"{of}_{axis}" for of in "qkvgo" for axis in "bhn"), "l_b", "l_h", "s_b", "s_h",
)  # fmt: skip
# int32 fields in a record of a queue
FIELDS = tl.constexpr(6)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def record_of(records, at, SPLIT: tl.constexpr):
    """Load a record of ``queues.Queue``; the slot is -1 unless SPLIT."""
    of = records + at * FIELDS
    slot = -1
    if SPLIT:
        slot = tl.load(of + 5)
    return tl.load(of), tl.load(of + 1), tl.load(of + 2), tl.load(of + 3), tl.load(of + 4), slot


@triton.jit
def strides(b, h, n, STEP: tl.constexpr, WIDE: tl.constexpr):
    """Convert strides from units of STEP elements to elements, so that the compiler knows that STEP divides them."""
    if WIDE:
        n = n.to(tl.int64)
    return b.to(tl.int64) * STEP, h.to(tl.int64) * STEP, n * STEP


@triton.jit
def within(local, head, ratio, first, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return which rows of a program exist: their head shares the key head of ``head``, and their token is valid."""
    inside = first + (local % ROWS if HEADS > 1 else local) < tokens
    if HEADS > 1:
        inside = inside & (local // ROWS < ratio - head % ratio)
    return inside


@triton.jit
def spread(local, head_step, step, HEADS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Return the offsets of a program's rows: ROWS rows of the first head, then of the next."""
    row = local % ROWS if HEADS > 1 else local
    if WIDE:
        row = row.to(tl.int64)
    at = row * step
    if HEADS > 1:
        at += (local // ROWS).to(tl.int64) * head_step
    return at


@triton.jit
def word(words, at, code, index: tl.constexpr, shift, keep, MASKED: tl.constexpr, RAGGED: tl.constexpr):
    """Load mask word ``index`` of rows, shifted by ``shift``: ones for a full tile, zeros past the sequence's end."""
    bits = tl.full(at.shape, -1, tl.int32)
    if MASKED:
        bits = tl.load(words + at + index, mask=code >= 0, other=-1) >> shift
    if RAGGED:
        left = keep - 32 * index
        bits = bits & tl.where(left >= 32, -1, (1 << tl.minimum(tl.maximum(left, 0), 31)) - 1)
    return bits


@triton.jit
def allowed(words, code, side, row, first, keep, WORDS: tl.constexpr, SIZE: tl.constexpr,
            MASKED: tl.constexpr, RAGGED: tl.constexpr):  # fmt: skip
    """Return which (rows, SIZE) pairs are allowed: ``row`` in a mask of ``side`` rows, columns from ``first`` on."""
    lane = tl.arange(0, SIZE)[None, :]
    at = (tl.maximum(code, 0).to(tl.int64) * side + row) * WORDS + first // 32
    # blocks of 16 may begin in the middle of a word
    bits = word(words, at, code, 0, first % 32 if SIZE < 32 else 0, keep, MASKED, RAGGED)[:, None]
    if SIZE > 32:
        bits = tl.where(lane < 32, bits, word(words, at, code, 1, 0, keep, MASKED, RAGGED)[:, None])
    if SIZE > 64:
        bits = tl.where(lane < 64, bits, word(words, at, code, 2, 0, keep, MASKED, RAGGED)[:, None])
        bits = tl.where(lane < 96, bits, word(words, at, code, 3, 0, keep, MASKED, RAGGED)[:, None])
    # a thread's columns differ only in bits 0, 3 and 4, so the shift by the other bits is computed once for all columns
    return (((bits >> (lane & 6)) >> (lane & 25)) & 1) != 0


@triton.jit
def partly(code, other, keep, SIZE: tl.constexpr, TILES: tl.constexpr, MASKED: tl.constexpr):
    """Return whether a tile has pairs that are not allowed: it has a mask, or the sequence ends in it."""
    found = keep < SIZE
    if MASKED:
        found = found | (code >= 0)
        if TILES > 1:
            found = found | (other >= 0)
    return found


@triton.jit
def held(x, lacking, partial, words, code, side, row, first, keep, WORDS: tl.constexpr, SIZE: tl.constexpr,
         MASKED: tl.constexpr, RAGGED: tl.constexpr, BRANCHED: tl.constexpr):  # fmt: skip
    """Replace pairs that are not allowed by ``lacking``; BRANCHED skips this for full tiles, which most tiles are."""
    if MASKED or RAGGED:
        if BRANCHED:
            if partial:
                x = tl.where(allowed(words, code, side, row, first, keep, WORDS, SIZE, MASKED, RAGGED), x, lacking)
        else:
            x = tl.where(allowed(words, code, side, row, first, keep, WORDS, SIZE, MASKED, RAGGED), x, lacking)
    return x


@triton.jit
def alive(live, code, first, keep, WORDS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Return which positions of a tile are inside the length and occur in at least one allowed pair."""
    lane = tl.arange(0, SIZE)
    inside = lane < keep
    if MASKED:
        at = tl.maximum(code, 0).to(tl.int64) * WORDS + (first + lane) // 32
        word = tl.load(live + at, mask=inside & (code >= 0), other=-1)
        # blocks of 16 may begin in the middle of a word
        inside = inside & (((word >> ((lane + (first % 32 if SIZE < 32 else 0)) % 32)) & 1) != 0)
    return inside


@triton.jit
def zeroed(x, partial, live, code, other, first, keep, WORDS: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr,
           BRANCHED: tl.constexpr):  # fmt: skip
    """Set rows of a described tile that are not ``alive`` to 0; BRANCHED skips this, and the loads, for full tiles."""
    if BRANCHED:
        if partial:
            x = tl.where(living(live, code, other, first, keep, WORDS, SIZE, TILES, True)[:, None], x, 0.0).to(x.dtype)
    else:
        x = tl.where(living(live, code, other, first, keep, WORDS, SIZE, TILES, True)[:, None], x, 0.0).to(x.dtype)
    return x


@triton.jit
def living(live, code, other, first, keep, WORDS: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """Return which positions are ``alive`` in a tile, or in either tile of a pair if TILES is 2."""
    inside = alive(live, code, first, keep, WORDS, SIZE, MASKED)
    if TILES > 1:
        inside = inside | alive(live, other, first, keep, WORDS, SIZE, MASKED)
    return inside


@triton.jit
def tile(of, at, b, h, first, stride, inside, SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
         WIDE: tl.constexpr, DESCRIBED: tl.constexpr):  # fmt: skip
    """Load (SIZE, PADDED) of a head's (tokens, DIM) from row ``first`` on.

    If DESCRIBED, the descriptor ``of`` loads it, with zeros only past the ends of the tensor. Otherwise it is loaded
    from the address ``at``, with zeros where not ``inside`` and past DIM.
    """
    if DESCRIBED:
        return of.load([b.to(tl.int32), h.to(tl.int32), first, 0]).reshape(SIZE, PADDED)
    else:
        token = tl.arange(0, SIZE)
        if WIDE:
            token = token.to(tl.int64)
        channel = tl.arange(0, PADDED)[None, :]
        mask = inside[:, None]
        if DIM != PADDED:
            mask = mask & (channel < DIM)
        return tl.load(at + first.to(tl.int64) * stride + token[:, None] * stride + channel, mask=mask, other=0.0)


@triton.jit
def of_head(of, b, batch_step, h, head_step, PAGE: tl.constexpr):
    """Return the address of a batch element's head; with pages, of the first page's head."""
    return of + h * head_step if PAGE else of + b * batch_step + h * head_step


@triton.jit
def paged_tile(at, pages, first, keep, page_step, stride, inside, SIZE: tl.constexpr, DIM: tl.constexpr,
               PADDED: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Load (SIZE, PADDED) tokens from pages; ``pages`` is a row of the page table, read only before the last token."""
    token = first + tl.arange(0, SIZE)
    number = page_of(pages, first, keep, SIZE, PAGE)
    lines = number * page_step + (token % PAGE).to(tl.int64) * stride
    return rows(at, lines, inside, DIM, PADDED)


@triton.jit
def page_of(pages, first, keep, SIZE: tl.constexpr, PAGE: tl.constexpr):
    """Return the page of SIZE tokens from ``first`` on: one number if they share a page, or one per token."""
    if PAGE % SIZE == 0:
        number = tl.load(pages + first // PAGE, mask=keep > 0, other=0)
    else:
        token = first + tl.arange(0, SIZE)
        number = tl.load(pages + token // PAGE, mask=tl.arange(0, SIZE) < keep, other=0)
    return number.to(tl.int64)


@triton.jit
def scales(of, table, columns, b, h, heads, tokens, first, keep, inside, SIZE: tl.constexpr, PAGE: tl.constexpr):
    """Load the scales of SIZE 8-bit rows of key head ``h`` from (B, heads, tokens), or from (pages, heads, PAGE)."""
    token = first + tl.arange(0, SIZE)
    if PAGE:
        page = page_of(table + b * columns, first, keep, SIZE, PAGE)
        at = (page * heads + h) * PAGE + token % PAGE
    else:
        at = (b * heads + h) * tokens + token
    return tl.load(of + at, mask=inside, other=0.0)


@triton.jit
def of_codes(codes, dtype: tl.constexpr):
    """Convert 8-bit codes exactly to ``dtype``; uint8 codes are e4m3 for compilers without that type."""
    if codes.dtype == tl.uint8:
        # move sign, exponent and fraction to their places in float16, whose exponent bias is larger by 8
        code = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16512
        half = code.to(tl.float16, bitcast=True) * 256.0
        return tl.where((code & 16256) == 16256, float("nan"), half).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def rows(base, at, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load (rows, PADDED) from ``base`` at the offsets ``at``; 0 where not ``inside`` and past DIM."""
    channel = tl.arange(0, PADDED)[None, :]
    mask = inside[:, None]
    if DIM != PADDED:
        mask = mask & (channel < DIM)
    return tl.load(base + at[:, None] + channel, mask=mask, other=0.0)


@triton.jit
def store_rows(base, at, values, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store (rows, PADDED) where ``rows`` would load it, converted to the destination's type."""
    channel = tl.arange(0, PADDED)[None, :]
    tl.store(base + at[:, None] + channel, values.to(base.dtype.element_ty), mask=inside[:, None] & (channel < DIM))
