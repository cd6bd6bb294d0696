"""What the kernels share: items of a queue, mask words, and tiles of memory."""

# Triton reads these functions' source: it wants neither annotations nor the usual style of names
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl

# what changes from call to call, while a cache grows: no reason to compile again. Of strides, those of lse and delta
# over tokens are left: they are 1 or the rate of a view
SIZES = (
    "items", "heads", "nq", "nk", "tokens", "columns",
    *(f"{of}_{axis}" for of in "qkvgo" for axis in "bhn"), "l_b", "l_h", "s_b", "s_h",
)  # fmt: skip
# int32 numbers of a record of a queue
FIELDS = tl.constexpr(6)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def record_of(records, at, SPLIT: tl.constexpr):
    """Load a record of ``queues.Queue``; its slot where lists are split, else -1."""
    of = records + at * FIELDS
    slot = -1
    if SPLIT:
        slot = tl.load(of + 5)
    return tl.load(of), tl.load(of + 1), tl.load(of + 2), tl.load(of + 3), tl.load(of + 4), slot


@triton.jit
def strides(b, h, n, STEP: tl.constexpr, WIDE: tl.constexpr):
    """Multiply strides in steps of STEP elements to elements: so the compiler knows what divides them."""
    if WIDE:
        n = n.to(tl.int64)
    return b.to(tl.int64) * STEP, h.to(tl.int64) * STEP, n * STEP


@triton.jit
def within(local, head, ratio, first, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Tell which rows of a program there are: of heads from ``head`` on with its keys, of tokens before the end."""
    inside = first + (local % ROWS if HEADS > 1 else local) < tokens
    if HEADS > 1:
        inside = inside & (local // ROWS < ratio - head % ratio)
    return inside


@triton.jit
def spread(local, head_step, step, HEADS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Spread the rows of a program: offsets of ROWS of one head, then of the next."""
    row = local % ROWS if HEADS > 1 else local
    if WIDE:
        row = row.to(tl.int64)
    at = row * step
    if HEADS > 1:
        at += (local // ROWS).to(tl.int64) * head_step
    return at


@triton.jit
def word(words, at, code, index: tl.constexpr, shift, keep, MASKED: tl.constexpr, RAGGED: tl.constexpr):
    """Load mask word ``index`` of some rows from bit ``shift``, ones for a full tile, cut at the sequence's end."""
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
    """Tell which (rows, SIZE) pairs may attend; ``row`` in a mask of ``side`` rows, columns from ``first`` on."""
    lane = tl.arange(0, SIZE)[None, :]
    at = (tl.maximum(code, 0).to(tl.int64) * side + row) * WORDS + first // 32
    # blocks of 16 may begin in the middle of a word
    bits = word(words, at, code, 0, first % 32 if SIZE < 32 else 0, keep, MASKED, RAGGED)[:, None]
    if SIZE > 32:
        bits = tl.where(lane < 32, bits, word(words, at, code, 1, 0, keep, MASKED, RAGGED)[:, None])
    if SIZE > 64:
        bits = tl.where(lane < 64, bits, word(words, at, code, 2, 0, keep, MASKED, RAGGED)[:, None])
        bits = tl.where(lane < 96, bits, word(words, at, code, 3, 0, keep, MASKED, RAGGED)[:, None])
    # a thread holds columns that differ in bits 0, 3 and 4: it shifts by the others once for all of them
    return (((bits >> (lane & 6)) >> (lane & 25)) & 1) != 0


@triton.jit
def partly(code, other, keep, SIZE: tl.constexpr, TILES: tl.constexpr, MASKED: tl.constexpr):
    """Tell whether a tile has pairs that may not attend: it has a mask, or the sequence ends in it."""
    found = keep < SIZE
    if MASKED:
        found = found | (code >= 0)
        if TILES > 1:
            found = found | (other >= 0)
    return found


@triton.jit
def held(x, lacking, partial, words, code, side, row, first, keep, WORDS: tl.constexpr, SIZE: tl.constexpr,
         MASKED: tl.constexpr, RAGGED: tl.constexpr, BRANCHED: tl.constexpr):  # fmt: skip
    """Put ``lacking`` in place of pairs that may not attend; BRANCHED goes past full tiles, nearly all there are."""
    if MASKED or RAGGED:
        if BRANCHED:
            if partial:
                x = tl.where(allowed(words, code, side, row, first, keep, WORDS, SIZE, MASKED, RAGGED), x, lacking)
        else:
            x = tl.where(allowed(words, code, side, row, first, keep, WORDS, SIZE, MASKED, RAGGED), x, lacking)
    return x


@triton.jit
def alive(live, code, first, keep, WORDS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Tell which positions of a tile are inside the length and take part in at least one allowed pair of it."""
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
    """Put 0 in rows of a described tile that are not ``alive``; BRANCHED as in ``held``, of which words are read."""
    if BRANCHED:
        if partial:
            x = tl.where(living(live, code, other, first, keep, WORDS, SIZE, TILES, True)[:, None], x, 0.0).to(x.dtype)
    else:
        x = tl.where(living(live, code, other, first, keep, WORDS, SIZE, TILES, True)[:, None], x, 0.0).to(x.dtype)
    return x


@triton.jit
def living(live, code, other, first, keep, WORDS: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """As ``alive``, of a pair of tiles where TILES is 2."""
    inside = alive(live, code, first, keep, WORDS, SIZE, MASKED)
    if TILES > 1:
        inside = inside | alive(live, other, first, keep, WORDS, SIZE, MASKED)
    return inside


@triton.jit
def tile(of, at, b, h, first, stride, inside, SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
         WIDE: tl.constexpr, DESCRIBED: tl.constexpr):  # fmt: skip
    """Load (SIZE, PADDED) of a head's (tokens, DIM) from row ``first`` on; 0 where not ``inside`` and past DIM.

    By the descriptor ``of`` if DESCRIBED: then 0 past the ends alone. Else from the address ``at``.
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
    """Find a head of a batch element; in pages, a head of the first page."""
    return of + h * head_step if PAGE else of + b * batch_step + h * head_step


@triton.jit
def paged_tile(at, pages, first, keep, page_step, stride, inside, SIZE: tl.constexpr, DIM: tl.constexpr,
               PADDED: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """As ``tile``, from ``pages``, the row of a table; of its numbers only those of tokens before the end are read."""
    token = first + tl.arange(0, SIZE)
    number = page_of(pages, first, keep, SIZE, PAGE)
    lines = number * page_step + (token % PAGE).to(tl.int64) * stride
    return rows(at, lines, inside, DIM, PADDED)


@triton.jit
def page_of(pages, first, keep, SIZE: tl.constexpr, PAGE: tl.constexpr):
    """Look up the page of SIZE tokens from ``first`` on: one number, or one for each."""
    if PAGE % SIZE == 0:
        number = tl.load(pages + first // PAGE, mask=keep > 0, other=0)
    else:
        token = first + tl.arange(0, SIZE)
        number = tl.load(pages + token // PAGE, mask=tl.arange(0, SIZE) < keep, other=0)
    return number.to(tl.int64)


@triton.jit
def scales(of, table, columns, b, h, heads, tokens, first, keep, inside, SIZE: tl.constexpr, PAGE: tl.constexpr):
    """Load what SIZE rows of key head ``h`` are multiplied by, stored in 8 bits: of (B, heads, tokens), or of pages."""
    token = first + tl.arange(0, SIZE)
    if PAGE:
        page = page_of(table + b * columns, first, keep, SIZE, PAGE)
        at = (page * heads + h) * PAGE + token % PAGE
    else:
        at = (b * heads + h) * tokens + token
    return tl.load(of + at, mask=inside, other=0.0)


@triton.jit
def of_codes(codes, dtype: tl.constexpr):
    """Convert what is stored in 8 bits: exactly, to any type. Bytes are e4m3, where the compiler has no such type."""
    if codes.dtype == tl.uint8:
        # sign, exponent and fraction in their places; float16's exponents are 8 more
        code = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16512
        half = code.to(tl.float16, bitcast=True) * 256.0
        return tl.where((code & 16256) == 16256, float("nan"), half).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def rows(base, at, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load (rows, PADDED) from the places ``at`` on; 0 where not ``inside`` and past DIM."""
    channel = tl.arange(0, PADDED)[None, :]
    mask = inside[:, None]
    if DIM != PADDED:
        mask = mask & (channel < DIM)
    return tl.load(base + at[:, None] + channel, mask=mask, other=0.0)


@triton.jit
def store(base, at, values, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store what ``rows`` would load, in the type of its storage."""
    channel = tl.arange(0, PADDED)[None, :]
    tl.store(base + at[:, None] + channel, values.to(base.dtype.element_ty), mask=inside[:, None] & (channel < DIM))
