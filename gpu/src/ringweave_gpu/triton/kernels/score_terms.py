"""Score terms and dropout on a block of pairs.

Values that belong to queries or to keys broadcast along the other axis, so the functions work for blocks of queries by
keys and of keys by queries. TERMS is a tuple of kinds, in order; ``tables`` and ``numbers`` have a tuple for each term.
All are None in a call without terms, and then none of this is compiled. Triton specialises a kernel for integers in a
tuple that are 1 or divisible by 16. So all integers are passed times 16, and other values cause no new compilation.
"""

# Triton parses the source of these functions, which rules out annotations and the usual style of names
# ruff: noqa: N803, RET505, RUF005

from __future__ import annotations

import triton
import triton.language as tl

# kinds with tables; kinds from POINTWISE on depend on the score alone, and :func:`pointwise` computes them
ALIBI, DISTANCE, BIAS = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
# ALiBi with a slope for each key
SLOPES_OF_KEYS = tl.constexpr(5)
POINTWISE = tl.constexpr(16)
SOFTCAP = tl.constexpr(16)
#: Kinds of terms that the kernels support, by ``Term.kernel``; the launcher refuses any other.
KINDS = {"softcap": SOFTCAP.value, "alibi": ALIBI.value, "distance": DISTANCE.value, "bias": BIAS.value}
_TWO_LOG2_E = tl.constexpr(2.8853900817779268)


@triton.jit
def standing(places, offsets, index, b, count, SIDE: tl.constexpr):
    """Return the indices in the call and the positions of a view's queries (SIDE 0) or keys (SIDE 1).

    The results are arbitrary past the end. Positions and their differences fit 32 bits, which patterns guarantee.
    """
    place = tl.load(places + index, mask=index < count, other=0)
    return place, (place + tl.load(offsets + 2 * b + SIDE)).to(tl.int32)


@triton.jit
def query_heads(heads, head, local, mine, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return the heads, in the call, of a program's rows: one head, or a column of heads."""
    if HEADS > 1:
        return tl.load(heads + head + local // ROWS, mask=mine, other=0)[:, None]
    else:
        return tl.load(heads + head)


@triton.jit
def tanh(x):
    """Compute tanh, with the polynomial of Cephes near 0."""
    z = x * x
    near = -5.70498872745e-3 * z + 2.06390887954e-2
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = near * z - 3.33332819422e-1
    near = near * z * x + x
    far = 1.0 - 2.0 / (tl.math.exp2(tl.abs(x) * _TWO_LOG2_E) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def pointwise(t, KIND: tl.constexpr, numbers):
    """Compute the scores after a pointwise term, and their derivatives (slopes)."""
    if KIND == SOFTCAP:
        y = tanh(t * (1.0 / numbers[0]))
        after = numbers[0] * y
        slope = 1.0 - y * y
    else:
        tl.static_assert(False, "a kind without a formula")
    return after, slope


@triton.jit
def scored(t, b, head, rows, columns, distance, inside, TERMS: tl.constexpr, tables, numbers):
    """Compute the scores after all terms, and a tuple with the slopes of each pointwise term.

    ``distance`` is key - query, and ``inside`` marks the pairs with an entry in tables. A score that is not finite is
    unchanged.
    """
    state = t
    slopes = ()
    for i in tl.static_range(len(TERMS)):
        slope = 1.0
        if TERMS[i] >= POINTWISE:
            state, slope = pointwise(state, TERMS[i], numbers[i])
        slopes = slopes + (slope,)  # type: ignore[assignment]
        if TERMS[i] == ALIBI:
            state -= tl.load(tables[i][0] + head) * tl.abs(distance).to(tl.float32)
        if TERMS[i] == SLOPES_OF_KEYS:
            # indices past the end are 0
            slope_of_key = tl.load(tables[i][0] + head * (numbers[i][0] >> 4) + columns)
            state -= slope_of_key * tl.abs(distance).to(tl.float32)
        if TERMS[i] == DISTANCE:
            reach = numbers[i][0] >> 4
            entry = tl.minimum(tl.maximum(distance, -reach), reach) + (reach + head * (2 * reach + 1))
            state += tl.load(tables[i][0] + entry).to(tl.float32)
        if TERMS[i] == BIAS:
            at = b * (numbers[i][0] >> 4) + head * (numbers[i][1] >> 4)
            at += rows * (numbers[i][2] >> 4) + columns * (numbers[i][3] >> 4)
            state += tl.load(tables[i][0] + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(tl.abs(t) < float("inf"), state, t), slopes


@triton.jit
def chained(grad, slopes, TERMS: tl.constexpr):
    """Compute the gradient of the scores before the terms from the gradient after them."""
    for i in tl.static_range(len(TERMS) - 1, -1, -1):
        if TERMS[i] >= POINTWISE:
            grad *= slopes[i]
    return grad


@triton.jit
def kept(b, head, query, key, drop):
    """Return which pairs dropout keeps.

    Each pair uses 16 bits of Philox4x32-10 at the counter (key // 8, query, head, batch), as in dropout.py.
    """
    low, high = (drop[0] >> 4) | (drop[1] << 12), (drop[2] >> 4) | (drop[3] << 12)
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    counter = (key >> 3).to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox_impl(
        counter, query.to(tl.uint32, bitcast=True), head.to(tl.uint32), b.to(tl.uint32), low, high
    )
    place = key & 7
    word = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
    half = (word >> ((key & 1) * 16).to(tl.uint32)) & 0xFFFF
    return half.to(tl.int32) >= drop[4] >> 4
